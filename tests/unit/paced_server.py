"""A server in a thread that streams chat completions at a known pace; it computes nothing."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Body = dict[str, Any]


@dataclass
class Paced:
    """How it behaves, and what it saw.

    Attributes:
        gap: seconds from one piece of text to the next.
        first: seconds to the first.
        packed: tokens in a piece after the first.
        usage: whether it counts tokens.
        status: of answers to completions; other than 200 they are a text.
        pieces: cuts each write of the stream into so many bytes, 0 for whole events.
        length: tokens whatever is asked for, 0 for those asked for.
        breaks: requests, by number, whose connection is closed in the middle.
        broken: what these are sent instead, their connection kept.
        closes: whether it closes each connection after an answer.
        thinks: tokens of the beginning that are thoughts.
        said: bytes to be sent instead of anything else.
    """

    gap: float = 0.002
    first: float = 0.01
    packed: int = 1
    usage: bool = True
    status: int = 200
    pieces: int = 0
    length: int = 0
    breaks: set[int] = field(default_factory=set)
    broken: bytes = b""
    closes: bool = False
    thinks: int = 0
    said: bytes = b""
    paths: dict[str, Callable[[], tuple[int, str]]] = field(default_factory=dict)
    connections: int = 0
    running: int = 0
    most: int = 0
    tokens: int = 0
    asked: list[Body] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Paced:
        self._loop = asyncio.new_event_loop()
        ready = threading.Event()

        async def listen() -> None:
            self._server = await asyncio.start_server(self._talk, "127.0.0.1", 0)
            self.port = self._server.sockets[0].getsockname()[1]
            ready.set()

        def run() -> None:
            self._loop.create_task(listen())
            self._loop.run_forever()

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()
        assert ready.wait(10)
        return self

    def __exit__(self, *_reason: object) -> None:
        async def end() -> None:
            self._server.close()
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                self.heads.append(head)
                sizes = [
                    int(line.split(":")[1])
                    for line in head.split("\r\n")
                    if line.lower().startswith("content-length")
                ]
                data = await reader.readexactly(sizes[0]) if sizes else b""
                path = head.split(" ")[1]
                if path == "/v1/chat/completions":
                    await self._complete(writer, json.loads(data))
                else:
                    status, text = self.paths.get(path, lambda: (404, "{}"))()
                    writer.write(_whole(status, text))
                await writer.drain()
                if self.closes or "connection: close" in head.lower():
                    break
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def _complete(self, writer: asyncio.StreamWriter, body: Body) -> None:
        number = len(self.asked)
        self.asked.append(body)
        if self.said or (self.broken and number in self.breaks):
            writer.write(self.said or self.broken)
            return
        if self.status != 200:
            writer.write(_whole(self.status, '{"message": "no, with api_key=sekret"}'))
            return
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await self._stream(writer, body, number)
        finally:
            self.running -= 1

    async def _stream(self, writer: asyncio.StreamWriter, body: Body, number: int) -> None:
        loop = asyncio.get_running_loop()
        total = self.length or int(body["max_completion_tokens"])
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
        close = b"connection: close\r\n" if self.closes else b""
        writer.write(head + close + b"transfer-encoding: chunked\r\n\r\n")
        await self._send(writer, {"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        due, made = loop.time() + self.first, 0
        while made < total:
            await asyncio.sleep(max(0.0, due - loop.time()))
            new = 1 if made == 0 else min(self.packed, total - made)
            name = "reasoning_content" if made < self.thinks else "content"
            await self._send(writer, {"choices": [{"delta": {name: "word " * new}}]})
            made += new
            self.tokens += new
            due += self.gap
            if number in self.breaks and made > total // 2:
                raise ConnectionError
        if self.usage:
            counts = {"completion_tokens": total, "prompt_tokens": 20}
            await self._send(writer, {"choices": [], "usage": counts})
        await self._send(writer, None)
        writer.write(b"0\r\n\r\n")

    async def _send(self, writer: asyncio.StreamWriter, event: Any) -> None:
        text = "[DONE]" if event is None else json.dumps(event)
        data = f"data: {text}\n\n".encode()
        data = b"%x\r\n%b\r\n" % (len(data), data)
        for at in range(0, len(data), self.pieces or len(data)):
            writer.write(data[at : at + (self.pieces or len(data))])
            if self.pieces:
                await asyncio.sleep(0)
        await writer.drain()


def _whole(status: int, text: str) -> bytes:
    head = f"HTTP/1.1 {status} Said\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(text)}\r\n\r\n{text}".encode()
