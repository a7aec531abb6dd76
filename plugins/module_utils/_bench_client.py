# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.

"""A load generator of our own: a closed loop of streaming chat completions, in one thread.

Each of C connections is kept and has one request at a time; the next prompt goes to whichever is
free first. A token is what the server's usage counts; a piece of text may hold several.
"""

from __future__ import annotations

import asyncio
import gc
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from ansible_collections.gpuhost.inference.plugins.module_utils._bench_stats import Request
from ansible_collections.gpuhost.inference.plugins.module_utils._redact import one_line, redact
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_http import (
    Target,
    dict_of,
    list_of,
    whole_of,
)

PATH = "/v1/chat/completions"
_CONNECT_SECONDS = 10.0
_SAID = 200  # characters of an error that are kept
_MOST = 1024 * 1024  # bytes of a head, a chunk or an event; those of SGLang have less than 64 KB


@dataclass(frozen=True)
class Load:
    """What is sent.

    Attributes:
        model: its id.
        prompts: one for each request.
        concurrency: requests at a time.
        output_tokens: that each generates; the server is told not to stop by itself.
        temperature: of sampling.
        timeout: seconds for all of them together.
        seed: of the order in which SGLang's clients send them; ours keeps to the given one.
    """

    model: str
    prompts: Sequence[str]
    concurrency: int
    output_tokens: int
    temperature: float
    timeout: float
    seed: int = 0

    def body(self, prompt: str) -> dict[str, Any]:
        """Return the request of one prompt."""
        return {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "max_completion_tokens": self.output_tokens,
            "temperature": self.temperature,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


def occupied() -> float | None:
    """Return the seconds that this thread has computed, or waited for a processor, in all.

    The kernel counts both (`/proc/PID/schedstat`, `sched-stats.rst`); `None` where it does not.
    """
    try:
        text = Path("/proc/thread-self/schedstat").read_text(encoding="ascii")
        computed, waited = text.split()[:2]
        return (int(computed) + int(waited)) / 1e9
    except (OSError, ValueError):
        return None


def run(target: Target, load: Load) -> list[Request]:
    """Send all requests and return what became of each, in the order of the prompts."""
    collecting = gc.isenabled()
    gc.disable()  # a collection over millions of times takes longer than a token
    try:
        return asyncio.run(_run(target, load))
    finally:
        if collecting:
            gc.enable()


async def _run(target: Target, load: Load) -> list[Request]:
    loop = asyncio.get_running_loop()
    wire = [_as_http(target, load.body(prompt)) for prompt in load.prompts]
    found: list[_Answer | None] = [None] * len(wire)
    left = iter(range(len(wire)))
    began = loop.time()
    lanes = [_Lane(target) for _number in range(min(load.concurrency, len(wire)))]
    work = [asyncio.ensure_future(_work(lane, wire, left, found)) for lane in lanes]
    await asyncio.wait(work, timeout=load.timeout)
    for task, lane in zip(work, lanes):
        task.cancel()
        lane.close()
    await asyncio.gather(*work, return_exceptions=True)
    late = _Answer(began, began, [], {}, f"no end within {load.timeout:g} s")
    return [(one or late).request(began) for one in found]


def _as_http(target: Target, body: Mapping[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    host = f"[{target.host}]" if ":" in target.host else target.host
    lines = [
        f"POST {target.path}{PATH} HTTP/1.1",
        f"Host: {host}:{target.port}",
        "Content-Type: application/json",
        f"Content-Length: {len(data)}",
        "Accept: text/event-stream",
        *(f"{name}: {value}" for name, value in target.headers.items()),
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


async def _work(
    lane: _Lane, wire: Sequence[bytes], left: Iterator[int], found: list[_Answer | None]
) -> None:
    for number in left:
        found[number] = await lane.send(wire[number])


@dataclass(frozen=True)
class _Answer:
    """What a request brought, to be summed up when nobody waits for the next one."""

    start: float
    end: float
    times: list[float]
    usage: dict[str, Any]
    error: str | None

    def request(self, began: float) -> Request:
        """Return it with times from a moment on."""
        first = self.times[0] if self.times else self.end
        return Request(
            self.start - began,
            first - self.start,
            tuple(after - before for before, after in zip(self.times, self.times[1:])),
            whole_of(self.usage.get("completion_tokens")),
            whole_of(self.usage.get("prompt_tokens")),
            self.error or (None if self.times else "an answer without text"),
        )


class _Lane:
    """One connection, opened when it is needed, with one request at a time."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._stream: _Stream | None = None

    def close(self) -> None:
        """Close it."""
        if self._stream is not None:
            self._stream.transport.close()
            self._stream = None

    async def send(self, request: bytes) -> _Answer:
        """Send one request and wait for its end; what goes wrong is told in it."""
        loop = asyncio.get_running_loop()
        start = loop.time()
        try:
            if self._stream is None or self._stream.transport.is_closing():
                self._stream = await self._open(loop)
            stream = self._stream
            await stream.ask(request)
        except (OSError, asyncio.TimeoutError) as error:
            self.close()
            reason = str(error) or type(error).__name__
            return _Answer(start, loop.time(), [], {}, redact(reason)[:_SAID])
        if stream.last:
            self.close()
        return _Answer(start, loop.time(), stream.times, stream.usage, stream.error)

    async def _open(self, loop: asyncio.AbstractEventLoop) -> _Stream:
        target = self._target
        name = target.host if target.tls else None
        attempt = loop.create_connection(
            lambda: _Stream(loop),
            target.host,
            target.port,
            ssl=target.tls,
            server_hostname=name,
        )
        _transport, stream = await asyncio.wait_for(attempt, _CONNECT_SECONDS)
        return stream


class _Stream(asyncio.Protocol):
    """Reads answers of HTTP/1.1: events in chunks, or one body with an error in it."""

    transport: asyncio.Transport

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._done: asyncio.Future[None] | None = None
        self._reset()

    def _reset(self) -> None:
        self.times: list[float] = []
        self.usage: dict[str, Any] = {}
        self.error: str | None = None
        self.last = False  # the server closes after this answer
        self._whole = False  # the stream has told its end
        self._raw = b""  # not yet decoded
        self._text = b""  # decoded, but no whole line
        self._status: int | None = None
        self._chunked = False
        self._length: int | None = None  # left of a body of known length

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the connection."""
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the request under way."""
        if self._done is None or self._done.done():
            return
        unbounded = self._status is not None and not self._chunked and self._length is None
        if unbounded and exc is None:
            self._finish()  # such a body ends with its connection
        else:
            self._done.set_exception(ConnectionError("the server closed the connection"))

    async def ask(self, request: bytes) -> None:
        """Send a request and wait until its answer is whole."""
        self._reset()
        self._done = self._loop.create_future()
        self.transport.write(request)
        await self._done

    def data_received(self, data: bytes) -> None:
        """Take what has come."""
        if self._done is None or self._done.done():
            self.transport.close()  # nobody asked
            return
        now = self._loop.time()
        self._raw = self._raw + data if self._raw else data
        try:
            if self._status is not None or self._read_head():
                self._read_body(now)
            if len(self._raw) + len(self._text) > _MOST:
                raise ValueError
        except (ValueError, RecursionError):
            self._done.set_exception(ConnectionError("the answer is no HTTP"))
            self.transport.close()

    def _read_head(self) -> bool:
        head, end, rest = self._raw.partition(b"\r\n\r\n")
        if not end:
            return False
        first, *lines = head.decode("latin-1").split("\r\n")
        words = first.split(" ")
        self._status = int(words[1]) if re.fullmatch("[0-9]{3}", "".join(words[1:2])) else 0
        fields = {
            name.strip().lower(): value.strip().lower()
            for name, _colon, value in (line.partition(":") for line in lines)
        }
        self._chunked = "chunked" in fields.get("transfer-encoding", "")
        length = fields.get("content-length", "")
        self._length = int(length) if length and not self._chunked else None
        stays = "keep-alive" if words[0] == "HTTP/1.0" else ""
        connection = fields.get("connection", "")
        self.last = "close" in connection or stays not in connection
        self._raw = rest
        return True

    def _read_body(self, now: float) -> None:
        if self._chunked:
            self._read_chunks(now)
            return
        self._take(self._raw, now)
        if self._length is not None:
            self._length -= len(self._raw)
        self._raw = b""
        if self._length is not None and self._length <= 0:
            self._finish()

    def _read_chunks(self, now: float) -> None:
        raw, at = self._raw, 0
        while True:
            line = raw.find(b"\r\n", at)
            if line < 0:
                break
            size = int(raw[at:line].partition(b";")[0], 16)
            if size < 0:  # it would be followed by itself, without end
                raise ValueError
            after = line + 2 + size
            if len(raw) < after + 2:
                break
            if size == 0:
                self._raw = b""
                self._finish()
                return
            self._take(raw[line + 2 : after], now)
            at = after + 2
        self._raw = raw[at:]

    def _take(self, data: bytes, now: float) -> None:
        """Take a part of the body: lines of events, of which only whole ones are read."""
        text = self._text + data if self._text else data
        if self._status != 200:
            self._text = text
            return
        *lines, self._text = text.split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now)

    def _event(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self._whole = True
            return
        event = dict_of(json.loads(data))
        for choice in list_of(event.get("choices"))[:1]:
            delta = dict_of(dict_of(choice).get("delta"))
            if delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning"):
                self.times.append(now)
        if event.get("usage"):
            self.usage = dict_of(event["usage"])
        if event.get("error"):
            self.error = said(event)

    def _finish(self) -> None:
        if self._status != 200:
            self.error = f"{self._status}: {said(self._text)}"
        elif self.times and not self._whole and not self.error:
            self.error = "the answer ended without [DONE]"
        if self._done is not None and not self._done.done():
            self._done.set_result(None)


def said(content: Any) -> str:
    """Return the text of an error, without secrets, short, and harmless on a terminal."""
    text = content.decode("utf-8", "replace") if isinstance(content, bytes) else str(content)
    return redact(one_line(text[: 10 * _SAID]))[:_SAID]
