# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.

"""The server under measurement: what must be the same in both arms, and what it does meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ansible_collections.gpuhost.inference.plugins.module_utils import _command
from ansible_collections.gpuhost.inference.plugins.module_utils._bench_stats import Steady
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from ansible_collections.gpuhost.inference.plugins.module_utils._redact import redact_fields
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_http import (
    REFUSED,
    Client,
    Metric,
    dict_of,
    list_of,
    number_of,
    parse_metrics,
    text_of,
    whole_of,
)

_ANSWER = 10.0  # seconds that an answer about the server may take
_LOOK = 0.5  # between two looks at its metrics
_CLOCKS = 10  # looks at its metrics for each at the clocks
_IDLE = 60.0  # seconds until requests that others left behind must have ended

# Arguments that change the speed of one arm alone make a comparison worthless. `resolved` values:
# SGLang fills in what was not given.
_EQUAL = (
    *("model_path", "served_model_name", "quantization", "dtype", "kv_cache_dtype", "load_format"),
    *("context_length", "mem_fraction_static", "max_running_requests", "max_total_tokens"),
    *("max_queued_requests", "chunked_prefill_size", "max_prefill_tokens", "page_size"),
    *("schedule_policy", "schedule_conservativeness", "stream_interval", "decode_log_interval"),
    *("tp_size", "pp_size", "dp_size", "ep_size", "nnodes", "enable_dp_attention"),
    *("attention_backend", "prefill_attention_backend", "decode_attention_backend"),
    *("sampling_backend", "moe_runner_backend", "moe_a2a_backend", "mamba_backend"),
    *("linear_attn_backend", "mamba_ssm_dtype", "mamba_full_memory_ratio", "max_mamba_cache_size"),
    *("mamba_radix_cache_strategy", "mamba_scheduler_strategy", "mamba_track_interval"),
    *("cuda_graph_bs", "cuda_graph_max_bs", "cuda_graph_bs_decode", "cuda_graph_max_bs_decode"),
    *("disable_cuda_graph", "disable_decode_cuda_graph", "disable_radix_cache"),
    *("disable_overlap_schedule", "disable_custom_all_reduce", "enable_p2p_check"),
    *("enable_torch_compile", "enable_mixed_chunk", "reasoning_parser", "chat_template"),
)
_KV = ("token_usage", "full_token_usage", "swa_token_usage")

# clocks_event_reasons of nvidia-smi that no healthy GPU shows under load; a power cap is normal
_SLOWED = (
    (0x8, "hardware slowdown"),
    (0x20, "software thermal slowdown"),
    (0x40, "hardware thermal slowdown"),
    (0x80, "power brake"),
)


@dataclass(frozen=True)
class Server:
    """A server as it tells of itself.

    Attributes:
        model: the id that requests name.
        tokenizer: its folder, `None` when not told.
        info: `/server_info` without keys, empty where the server has none.
        cap: requests that it runs at once, `None` when not told.
        started: what another start would change: times of its start, to the microsecond.
    """

    model: str
    tokenizer: str | None
    info: dict[str, Any]
    cap: int | None
    started: dict[str, Any]

    @property
    def drafts(self) -> int | None:
        """Return how many tokens are verified at once, `None` without speculation."""
        on = text_of(self.info.get("speculative_algorithm"))
        return whole_of(self.info.get("speculative_num_draft_tokens")) if on else None


def read_server(client: Client, model: str | None, tokenizer: str | None) -> Server:
    """Ask a server what it is.

    Raises:
        GpuHostError: it is not ready, refuses the key, or serves another model.
    """
    served = _served(client)
    if model is not None and model not in served:
        raise GpuHostError(
            f"{client.url} serves {', '.join(served) or 'no model'}, not {model}: correct model"
        )
    reply = client.ask("/server_info", _ANSWER)
    if reply.status == 404:  # releases before 0.5.7
        reply = client.ask("/get_server_info", _ANSWER)
    info = dict_of(redact_fields(reply.json())) if reply.status == 200 else {}
    states = [dict_of(state) for state in list_of(info.get("internal_states"))]
    caps = [whole_of(state.get("effective_max_running_requests_per_dp")) for state in states]
    known = [cap for cap in caps if cap is not None]
    folder = text_of(info.get("tokenizer_path")) or text_of(info.get("model_path"))
    return Server(
        model or served[0],
        tokenizer or folder,
        info,
        sum(known) or None,
        {"startup_time": info.get("startup_time"), "random_seed": info.get("random_seed")},
    )


def _served(client: Client) -> list[str]:
    reply = client.ask("/v1/models", _ANSWER)
    if reply.status == 401:
        raise GpuHostError(f"{client.url} does not take this api_key (401): correct it")
    if reply.status != 200:
        said = "refuses connections" if reply.failure == REFUSED else "does not answer"
        what = f"answers {reply.status}" if reply.status is not None else said
        raise GpuHostError(
            f"{client.url}/v1/models {what}: start the server, and wait with sglang_info until it "
            "is ready"
        )
    names = [text_of(dict_of(one).get("id")) for one in list_of(reply.json().get("data"))]
    served = [name for name in names if name and name.isprintable()]
    if not served:
        raise GpuHostError(f"{client.url}/v1/models names no model: is it SGLang?")
    return served


def equal_facts(server: Server) -> dict[str, Any]:
    """Return the arguments of a server that must be the same in both arms."""
    info = server.info
    facts = {name: info[name] for name in _EQUAL if name in info}
    graphs = dict_of(dict_of(info.get("cuda_graph_config")).get("decode"))  # from 0.5.14 on
    if graphs:
        facts["cuda_graph_decode"] = {name: graphs.get(name) for name in ("backend", "bs")}
    return {"model": server.model, "sglang": text_of(info.get("version")), **facts}


def apart_facts(server: Server) -> dict[str, Any]:
    """Return what differs between arms on purpose, or because of that."""
    info = server.info
    states = [dict_of(state) for state in list_of(info.get("internal_states"))]
    memory = dict_of(states[0].get("memory_usage")) if states else {}
    facts = {name: info[name] for name in sorted(info) if name.startswith("speculative_")}
    return {
        **facts,
        "kv_tokens": whole_of(info.get("max_total_num_tokens"))
        or whole_of(memory.get("token_capacity")),
        "effective_max_running_requests": server.cap,
    }


def read_gpus(run: Callable[..., str] = _command.run) -> dict[str, Any]:
    """Return names and power limits of the GPUs, `None` where nvidia-smi does not tell."""
    words = ["nvidia-smi", "--query-gpu=name,power.limit", "--format=csv,noheader,nounits"]
    try:
        rows = [row.split(", ") for row in run(words, 10).splitlines() if row.strip()]
    except GpuHostError:
        return {"gpus": None, "power_limit_w": None}
    names = [row[0] for row in rows]
    kinds = [f"{names.count(name)} x {name}" for name in dict.fromkeys(names)]
    limits = list(dict.fromkeys(row[1] for row in rows if len(row) > 1))
    return {"gpus": ", ".join(kinds) or None, "power_limit_w": ", ".join(limits) or None}


def flush(client: Client) -> None:
    """Empty the prefix cache, which also begins a new average of the accept length.

    Raises:
        GpuHostError: it is not idle, or cannot.
    """
    end = time.monotonic() + _IDLE
    while True:
        reply = client.ask("/flush_cache", _ANSWER, {})
        if reply.status == 200:
            return
        if reply.status in (401, 403, 404, 405):
            raise GpuHostError(
                f"{client.url}/flush_cache answers {reply.status}: with an admin key, or without "
                "this endpoint, set flush to false; prompts are new ones for each point anyway"
            )
        if time.monotonic() > end:
            raise GpuHostError(
                f"{client.url} is not idle ({reply.status or reply.failure} from /flush_cache for "
                f"{_IDLE:g} s): let nobody else use it while it is measured"
            )
        time.sleep(min(1.0, _IDLE))


@dataclass(frozen=True)
class Look:
    """The metrics of a server at a moment of the monotonic clock."""

    at: float
    metrics: dict[str, Metric]

    def total(self, name: str) -> float | None:
        """Return a counter."""
        return self.metrics[name].total if name in self.metrics else None

    def highest(self, name: str) -> float | None:
        """Return a gauge."""
        return self.metrics[name].highest if name in self.metrics else None


def look(client: Client) -> Look | None:
    """Read the metrics, `None` where the server shows none (flag enable-metrics)."""
    at = time.monotonic()
    reply = client.ask("/metrics", _ANSWER)
    return Look(at, parse_metrics(reply.body)) if reply.status == 200 else None


@dataclass
class Watch:
    """What was seen while requests ran.

    Attributes:
        before: the counters before the first request.
        looks: at the metrics, in time.
        after: the counters after the last request.
        clocks: why GPUs were slowed down, `None` when that cannot be read.
        length: mean tokens of a verification, `None` without one.
        client: share of the time that our client computed or waited for a processor, `None` when
            that is not known.
    """

    before: Look | None = None
    after: Look | None = None
    looks: list[Look] | None = None
    clocks: set[str] | None = None
    length: float | None = None
    client: float | None = None

    def delta(self, name: str) -> float | None:
        """Return by how much a counter grew, `None` when it cannot be told."""
        if self.before is None or self.after is None:
            return None
        after = self.after.total(name)
        before = self.before.total(name) or 0.0  # a series appears with its first value
        return None if after is None or after < before else after - before

    def gauges(self, name: str, looks: Sequence[Look]) -> list[float]:
        """Return the values of a gauge."""
        found = [one.highest(name) for one in looks]
        return [value for value in found if value is not None]

    def within(self, part: Steady | None, duration: float, began: float | None) -> list[Look]:
        """Return the looks of the steady part.

        Args:
            part: seconds from the first request's start.
            duration: of all requests.
            began: when that was; where it is not known, as with a program that first loads for a
                while, the end of the load is taken from the counters.
        """
        looks = self.looks or []
        if part is None:
            return []
        start = began if began is not None else _start(looks, duration)
        if start is None:
            return []
        return [one for one in looks if start + part.begin <= one.at <= start + part.end]


def _start(looks: Sequence[Look], duration: float) -> float | None:
    """Return about when a load began that ended with the last look at running requests."""
    busy = [one.at for one in looks if (one.highest("num_running_reqs") or 0) > 0]
    return busy[-1] - duration if busy else None


@contextmanager
def watching(client: Client) -> Iterator[Watch]:
    """Look at metrics and clocks from a thread while the caller sends requests."""
    seen = Watch(before=look(client), looks=[], clocks=read_clocks())
    over = threading.Event()

    def go() -> None:
        turns = 0
        while not over.wait(_LOOK):
            turns += 1
            one = look(client) if seen.before is not None else None
            if one is not None and seen.looks is not None:
                seen.looks.append(one)
            if seen.clocks is not None and turns % _CLOCKS == 0:
                seen.clocks |= read_clocks() or set()

    thread = threading.Thread(target=go, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join(3 * _ANSWER)
        seen.after = look(client) if seen.before is not None else None


def read_clocks(run: Callable[..., str] = _command.run) -> set[str] | None:
    """Return why GPUs are slowed down at the moment, `None` when nvidia-smi does not tell."""
    for field in ("clocks_event_reasons.active", "clocks_throttle_reasons.active"):
        words = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"]
        try:
            rows = run(words, 10).split()
            bits = [int(row, 16) for row in rows]
        except (GpuHostError, ValueError):
            continue
        if bits:
            return {name for bit, name in _SLOWED if any(one & bit for one in bits)}
    return None


def accept_length(watch: Watch, client: Client, server: Server, flushed: bool) -> float | None:
    """Return the mean tokens of a verification over the watched time, `None` without one.

    Counters where the release has them (0.5.13); before, the server's average since a flush. One
    that no number of drafts gives is of counters that were begun anew, and not known.
    """
    length = _length(watch, client, server, flushed)
    possible = length is not None and 0.95 <= length <= (server.drafts or 0) + 1
    return length if possible else None


def _length(watch: Watch, client: Client, server: Server, flushed: bool) -> float | None:
    if server.drafts is None:
        return None
    passes = watch.delta("spec_verify_calls_total")
    tokens = watch.delta("generation_tokens_total")
    if passes and tokens:
        return tokens / passes
    if not flushed:
        return None
    now = read_server(client, None, None).info
    means = [
        number_of(dict_of(state).get("avg_spec_accept_length"))
        for state in list_of(now.get("internal_states"))
    ]
    known = [mean for mean in means if mean]
    return sum(known) / len(known) if known else None


def usage(watch: Watch, looks: Sequence[Look]) -> dict[str, Any]:
    """Return the highest gauges of a point, `None` for what the server does not show."""
    names: dict[str, tuple[str, ...]] = {
        "running_max": ("num_running_reqs",),
        "queued_max": ("num_queue_reqs",),
        "kv_use_max": _KV,
    }
    found: dict[str, Any] = {}
    for key, gauges in names.items():
        values = [value for name in gauges for value in watch.gauges(name, looks)]
        found[key] = max(values) if values else None
    back = watch.gauges("num_retracted_reqs", watch.looks or [])
    found["retracted"] = int(max(back)) if back else None
    return found
