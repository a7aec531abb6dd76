# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""HTTP/1.1 on asyncio streams, and the endpoints of SGLang that clients of the lab call."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang import __version__
from sglang.standin.arguments import dumps
from sglang.standin.metrics import loads
from sglang.standin.process import log
from sglang.standin.server import Generation, RequestError

if TYPE_CHECKING:
    from sglang.standin.server import Server

REASONS = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found"}
REASONS.update({405: "Method Not Allowed", 503: "Service Unavailable"})
JSON, TEXT, EMPTY = "application/json", "text/plain; charset=utf-8", ""
GRAPHS = ("prefill", "decode", "target_verify", "draft_prefill", "draft_decode", "draft_extend")
HERE_ONLY = ("launch_command", "custom_sigquit_handler")  # not in `internal_states`
FLUSH_NOTE = (
    "Please check backend logs for more details. (When there are running or waiting requests, "
    "the operation will not be performed.)\n"
)
INVALID = "1 validation error:\n "
REASONING_TOKENS = 48  # at the beginning of an answer, when the model thinks


@dataclass(frozen=True)
class Request:
    """One request from a client."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes

    def json(self) -> dict[str, Any]:
        """Return the body.

        Raises:
            RequestError: it is not a JSON object.
        """
        try:
            value = json.loads(self.body or b"{}")
        except ValueError as error:
            raise RequestError(400, f"{INVALID} {error}", "Bad Request") from error
        if not isinstance(value, dict):
            raise RequestError(400, f"{INVALID} not an object", "Bad Request")
        return value


@dataclass(frozen=True)
class Response:
    """An answer: a whole body, or events that come one by one."""

    status: int = 200
    body: bytes = b""
    content_type: str = JSON
    events: AsyncIterator[bytes] | None = None


Handler = Callable[["Server", Request], Awaitable[Response]]


async def serve_connection(
    server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Answer the requests of one connection until it ends."""
    try:
        while request := await _read(reader):
            response = await _answer(server, request)
            client = ":".join(map(str, writer.get_extra_info("peername")[:2]))
            log(
                f'INFO:     {client} - "{request.method} {request.path} HTTP/1.1" '
                f"{response.status} {REASONS[response.status]}"
            )
            await _write(writer, response)
            if request.headers.get("connection", "").lower() == "close":
                break
    except (ConnectionError, asyncio.IncompleteReadError, ValueError):
        pass  # the client went away or does not speak HTTP
    finally:
        writer.close()


async def _read(reader: asyncio.StreamReader) -> Request | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.decode("latin-1").split("\r\n")
    method, target, _version = first.split(" ")
    pairs = (line.partition(":") for line in lines if line)
    headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
    body = b""
    if "content-length" in headers:
        body = await reader.readexactly(int(headers["content-length"]))
    path, _, rest = target.partition("?")
    query = dict(part.partition("=")[::2] for part in rest.split("&") if part)
    return Request(method, path, query, headers, body)


async def _write(writer: asyncio.StreamWriter, response: Response) -> None:
    head = f"HTTP/1.1 {response.status} {REASONS[response.status]}\r\nserver: uvicorn\r\n"
    if response.content_type:
        head += f"content-type: {response.content_type}\r\n"
    if response.events is None:
        head += f"content-length: {len(response.body)}\r\n\r\n"
        writer.write(head.encode() + response.body)
        await writer.drain()
        return
    writer.write(head.encode() + b"transfer-encoding: chunked\r\n\r\n")
    try:
        async for event in response.events:
            data = b"data: " + event + b"\n\n"
            writer.write(b"%x\r\n%b\r\n" % (len(data), data))
            await writer.drain()
            if writer.is_closing():
                raise ConnectionError
        writer.write(b"0\r\n\r\n")
        await writer.drain()
    finally:
        await response.events.aclose()  # type: ignore[attr-defined]


async def _answer(server: Server, request: Request) -> Response:
    if not _allowed(server.args, request):
        return Response(401, dumps({"error": "Unauthorized"}))
    path = request.path
    methods, handler = ENDPOINTS.get(path, ((), None))
    if handler is None or (path == "/metrics" and not server.args["enable_metrics"]):
        return Response(404, dumps({"detail": "Not Found"}))
    if request.method not in methods:
        return Response(405, dumps({"detail": "Method Not Allowed"}))
    try:
        return await handler(server, request)
    except RequestError as error:
        return Response(error.status, dumps(_error(request.path, error)))


def _error(path: str, error: RequestError) -> dict[str, Any]:
    """Return the body: the OpenAI form, and a shorter one for what `/generate` refuses itself."""
    if path == "/generate" and error.status == 400 and not error.kind:
        return {"error": {"message": str(error)}}
    kind = error.kind or ("BadRequestError" if error.status == 400 else str(error.status))
    content = {"object": "error", "message": str(error), "type": kind, "param": None}
    return {**content, "code": error.status}


def _allowed(args: dict[str, Any], request: Request) -> bool:
    if request.path.startswith(("/health", "/metrics")) or request.path == "/ready":
        return True
    key = args["api_key"]
    if request.path == "/flush_cache":  # a management endpoint: the admin's key where there is one
        key = args["admin_api_key"] or key
    return not key or request.headers.get("authorization") == f"Bearer {key}"


async def _health(server: Server, _request: Request) -> Response:
    return Response(200 if await server.health() else 503, content_type=EMPTY)


async def _ready(server: Server, _request: Request) -> Response:
    ready = server.status == "up" and not server.draining
    return Response(200 if ready else 503, content_type=EMPTY)


async def _ping(server: Server, request: Request) -> Response:
    return await _ready(server, request)  # they differ for a paused server only


async def _metrics(server: Server, _request: Request) -> Response:
    content_type = "text/plain; version=0.0.4; charset=utf-8"
    return Response(200, server.metrics.text().encode(), content_type)


async def _loads(server: Server, _request: Request) -> Response:
    now = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime())
    return Response(200, dumps(loads(server.metrics, server.args["tp_size"], now)))


async def _models(server: Server, _request: Request) -> Response:
    name = server.args["served_model_name"]
    card = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "sglang"}
    card.update(root=name, parent=None, max_model_len=server.args["context_length"])
    return Response(200, dumps({"object": "list", "data": [card]}))


async def _model_info(server: Server, _request: Request) -> Response:
    args, model = server.args, server.setup.model
    names = ["model_path", "served_model_name", "tokenizer_path", "preferred_sampling_params"]
    names += ["weight_version", "load_format", "reasoning_parser", "tool_call_parser"]
    info = {name: args[name] for name in names}
    info.update(is_generation=True, disaggregation_mode=args["disaggregation_mode"])
    info.update(has_image_understanding=False, has_audio_understanding=False)
    info.update(model_type=model.model_type, architectures=[model.architecture], embedding=None)
    return Response(200, dumps(info))


async def _server_info(server: Server, _request: Request) -> Response:
    pools, args, setup = server.setup.pools, server.args, server.setup
    state = await server.ask("state")
    memory = {"weight": pools["weight"], "kvcache": pools["kv"], "token_capacity": pools["tokens"]}
    memory.update(token_capacity_swa=None, startup_available=pools["free"])
    memory["graph"] = dict.fromkeys(GRAPHS, 0.0)
    took = {"load_weight": setup.startup * 0.7, "kv_cache_allocation": 0.0}
    took.update(scheduler_e2e=setup.startup, cuda_graph=dict.fromkeys(GRAPHS, 0.0))
    # The scheduler repeats its arguments here, keys among them, as the real one does.
    repeated = {name: args[name] for name in args if name not in HERE_ONLY}
    internal = {
        **repeated,
        "world_size": args["tp_size"],
        "startup_time": took,
        "effective_max_running_requests_per_dp": pools["max_running"],
        "memory_usage": memory,
        "decode_cuda_graph_bs": None,
        "decode_cuda_graph_memory_gb": None,
        **state,
    }
    info = {
        **args,
        "status": "ready",
        "max_total_num_tokens": pools["tokens"],
        "max_req_input_len": args["context_length"] - 6,
        "startup_time": {**took, "tokenizer_e2e": setup.startup},
        "hicache_object_layout": None,
        "internal_states": [internal],
        "version": __version__,
        "frontend": "python",
        "kv_events": None,
        "lab_stand_in": True,
    }
    return Response(200, dumps(info))


async def _flush(server: Server, _request: Request) -> Response:
    if await server.ask("flush"):
        return Response(200, b"Cache flushed.\n" + FLUSH_NOTE.encode(), EMPTY)
    return Response(400, b"Flush cache failed.\n", EMPTY)


# Generation


def _meta(server: Server, generation: Generation) -> dict[str, Any]:
    """Return `meta_info` with the names of 0.5.23; no `spec_` field without speculation."""
    meta: dict[str, Any] = {
        "id": generation.rid,
        "finish_reason": generation.finish if generation.done else None,
        "prompt_tokens": generation.prompt_tokens,
        "completion_tokens": generation.made,
        "reasoning_tokens": 0,
        "cached_tokens": generation.cached,
        "cached_tokens_details": {"device": generation.cached, "host": 0},
        "num_retractions": 0,
        "queue_time": 0.0,
        "storage_prefetch_wait": 0.0,
        "storage_staging_wait": 0.0,
        "dp_rank": None,
        "weight_version": server.args["weight_version"],
        "forward_entry_time": generation.began,
        "prefill_finished_time": generation.first,
    }
    if generation.done:
        meta.update(_timing(server, generation))
    if generation.passes:
        drafts = server.args["speculative_num_draft_tokens"] - 1
        meta.update(_spec(generation, drafts))
    return meta


def _timing(server: Server, generation: Generation) -> dict[str, Any]:
    """Return what `meta_info` has at the end of a request only."""
    now, wall = time.monotonic(), time.time()
    first = generation.first or now
    version = {"start": 0, "end": generation.made, "version": server.args["weight_version"]}
    return {
        "e2e_latency": now - generation.began,
        "first_token_latency": first - generation.began,
        "decode_throughput": generation.made / max(now - first, 1e-6),
        "weight_versions": [version],
        "request_received_ts": wall - (now - generation.began),
        "api_server_dispatch_finish_ts": wall - (now - generation.began),
        "request_finished_ts": wall,
        "response_sent_to_client_ts": wall,
    }


def _spec(generation: Generation, drafts: int) -> dict[str, Any]:
    proposed = generation.passes * drafts
    return {
        "spec_accept_rate": generation.correct / proposed,
        "spec_accept_length": generation.made / generation.passes,
        "spec_num_correct_drafts": generation.correct,
        "spec_num_proposed_drafts": proposed,
        "spec_verify_ct": generation.passes,
    }


async def _generate(server: Server, request: Request) -> Response:
    body = request.json()
    sampling = body.get("sampling_params") or {}
    prompt = _prompt(body.get("text", body.get("input_ids")))
    generation = server.begin(prompt, sampling.get("max_new_tokens", 128), sampling)
    answer: dict[str, Any] = {"text": "", "output_ids": []}

    async def events() -> AsyncIterator[bytes]:
        sent = {"response_sent_to_client_ts": time.time()}  # in the first event, and in the last
        try:
            async for count in server.steps(generation):
                text, numbers = generation.words.more(count)
                answer["text"] += text
                answer["output_ids"] += numbers
                yield dumps({**answer, "meta_info": {**sent, **_meta(server, generation)}})
                sent = {}
        except RequestError as error:
            yield dumps({**answer, "meta_info": _refusal(server, generation, error)})
        yield b"[DONE]"

    if body.get("stream"):
        return Response(content_type="text/event-stream; charset=utf-8", events=events())
    async for count in server.steps(generation):
        text, numbers = generation.words.more(count)
        answer["text"] += text
        answer["output_ids"] += numbers
    return Response(200, dumps({**answer, "meta_info": _meta(server, generation)}))


def _refusal(server: Server, generation: Generation, error: RequestError) -> dict[str, Any]:
    """Return the `meta_info` of a stream that the scheduler does not take: the status is 200."""
    timing = _timing(server, generation)
    kept = ("e2e_latency", "response_sent_to_client_ts", "weight_versions")
    return {
        "id": generation.rid,
        "finish_reason": {"type": "abort", "message": str(error), "status_code": error.status},
        "completion_tokens": 0,
        "weight_version": server.args["weight_version"],
        **{name: timing[name] for name in kept},
    }


def _prompt(value: Any) -> str:
    """Return one prompt as text; token numbers become words that nobody can guess.

    Raises:
        RequestError: it is missing, or there are several.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(item, int) for item in value):
        return " ".join(f"<{item}x>" for item in value)
    if value is None:
        raise RequestError(400, "Either text, input_ids or input_embeds should be provided.")
    raise RequestError(400, f"{INVALID} one text or one list of token ids", "Bad Request")


def _chat_prompt(messages: Any) -> str:
    if not isinstance(messages, list):
        raise RequestError(400, f"{INVALID} messages", "Bad Request")
    if not messages:
        raise RequestError(400, "Messages cannot be empty.")
    texts = []
    for message in messages:
        content = message.get("content") or ""
        parts = [{"text": content}] if isinstance(content, str) else content
        texts.append(" ".join(part.get("text", "") for part in parts))
    return "\n".join(texts)


class _OpenAI:
    """Shapes the answers of `/v1/completions` and `/v1/chat/completions`."""

    def __init__(self, server: Server, body: dict[str, Any], chat: bool) -> None:
        self._server = server
        self._body = body
        self._chat = chat
        prompt = _chat_prompt(body.get("messages")) if chat else _prompt(body.get("prompt"))
        limit = body.get("max_completion_tokens") or body.get("max_tokens")
        self.generation = server.begin(prompt, limit or (None if chat else 16), body)
        options = body.get("chat_template_kwargs") or {}
        thinks = chat and server.args["reasoning_parser"] and options.get("enable_thinking", True)
        self._thoughts = REASONING_TOKENS if thinks else 0

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.generation.rid,
            "object": ("chat.completion" if self._chat else "text_completion") + kind,
            "created": int(time.time()),
            "model": self._body.get("model") or self._server.args["served_model_name"],
        }

    def _words(self, count: int) -> tuple[str, str]:
        """Return the next words: those of the reasoning and those of the answer."""
        thoughts = min(count, self._thoughts)
        self._thoughts -= thoughts
        words = self.generation.words
        return words.more(thoughts)[0], words.more(count - thoughts)[0]

    def _usage(self) -> dict[str, Any]:
        made, prompt = self.generation.made, self.generation.prompt_tokens
        return {
            "prompt_tokens": prompt,
            "total_tokens": prompt + made,
            "completion_tokens": made,
            "prompt_tokens_details": None,
            "completion_tokens_details": None,
            "reasoning_tokens": 0,
        }

    def _extension(self) -> dict[str, Any]:
        if not (self._body.get("return_spec_tokens_details") and self.generation.passes):
            return {}
        drafts = self._server.args["speculative_num_draft_tokens"] - 1
        return {"sglext": {"spec_tokens_details": _spec(self.generation, drafts)}}

    async def whole(self) -> Response:
        """Wait for all of it."""
        thought = text = ""
        async for count in self._server.steps(self.generation):
            more_thought, more_text = self._words(count)
            thought, text = thought + more_thought, text + more_text
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "matched_stop": None}
        if self._chat:
            message = {"role": "assistant", "content": text or None}
            choice["message"] = {**message, "reasoning_content": thought or None}
        else:
            choice["text"] = text
        choice["finish_reason"] = self.generation.finish["type"]
        version = self._server.args["weight_version"]
        versions = [{"start": 0, "end": self.generation.made, "version": version}]
        answer = {**self._envelope(""), "choices": [choice], "usage": self._usage()}
        answer["metadata"] = {"weight_version": version, "weight_versions": versions}
        return Response(200, dumps({**answer, **self._extension()}))

    def _chunk(self, delta: dict[str, Any], finish: Any = None) -> bytes:
        """Return one chunk; `delta` is that of a chat, or the text of a completion."""
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "matched_stop": None}
        choice["finish_reason"] = finish
        chunk = {**self._envelope(".chunk" if self._chat else ""), "choices": [choice]}
        if self._chat:
            choice["delta"] = delta
        else:
            choice["text"] = delta.get("content") or ""
            chunk["usage"] = None
        return dumps(chunk)

    async def events(self) -> AsyncIterator[bytes]:
        """Yield a chunk for each step of the engine: several tokens at once with MTP."""
        finish = self.generation.finish["type"]
        if self._chat:
            role = {"role": "assistant", "content": "", "reasoning_content": None}
            yield self._chunk(role)
        async for count in self._server.steps(self.generation):
            thought, text = self._words(count)
            delta = {"content": text or None, "reasoning_content": thought or None}
            last = self.generation.done and not self._chat
            yield self._chunk(delta, finish if last else None)
        if self._chat:
            yield self._chunk({"reasoning_content": None}, finish)
        if (self._body.get("stream_options") or {}).get("include_usage"):
            last_chunk = {**self._envelope(".chunk" if self._chat else ""), "choices": []}
            usage = self._usage()
            if not self._chat:
                del usage["prompt_tokens_details"], usage["completion_tokens_details"]
            yield dumps({**last_chunk, "usage": usage, **self._extension()})
        yield b"[DONE]"

    async def answer(self) -> Response:
        """Answer at once or by events."""
        if self._body.get("stream"):
            return Response(content_type="text/event-stream; charset=utf-8", events=self.events())
        return await self.whole()


async def _chat(server: Server, request: Request) -> Response:
    return await _OpenAI(server, request.json(), chat=True).answer()


async def _completions(server: Server, request: Request) -> Response:
    return await _OpenAI(server, request.json(), chat=False).answer()


ENDPOINTS: dict[str, tuple[tuple[str, ...], Handler]] = {
    "/health": (("GET",), _health),
    "/health_generate": (("GET",), _health),
    "/ready": (("GET",), _ready),
    "/ping": (("GET",), _ping),
    "/metrics": (("GET",), _metrics),
    "/v1/models": (("GET",), _models),
    "/v1/loads": (("GET",), _loads),
    "/model_info": (("GET",), _model_info),
    "/get_model_info": (("GET",), _model_info),
    "/server_info": (("GET",), _server_info),
    "/get_server_info": (("GET",), _server_info),
    "/flush_cache": (("GET", "POST"), _flush),
    "/generate": (("POST", "PUT"), _generate),
    "/v1/completions": (("POST",), _completions),
    "/v1/chat/completions": (("POST",), _chat),
}
