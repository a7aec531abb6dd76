# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The server process: HTTP, the phases of its life, requests on their way, and metrics."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from sglang.standin.arguments import dumps
from sglang.standin.metrics import Metrics
from sglang.standin.model import Model
from sglang.standin.process import die, log
from sglang.standin.ranks import Child
from sglang.standin.text import Words, draft_chance, kind_of, seed_of, token_count

HEALTH_PREFIX = "HEALTH_CHECK"
WATCH_SECONDS = 1.0  # how often children are looked at
CRASH_PAUSE = 5.0  # between the crash of a child and the end of the server
DRAIN_DELAY = 2.0  # from SIGTERM to the first look at the remaining requests
DRAIN_LOG_SECONDS = 5.0


@dataclass(frozen=True)
class Setup:
    """What the server serves."""

    args: dict[str, Any]
    model: Model
    pools: dict[str, Any]
    children: list[Child]
    startup: float


@dataclass
class Generation:
    """A request on its way. Its counters only grow; a slow reader sees several steps at once."""

    rid: str
    prompt_tokens: int
    length: int
    finish: dict[str, Any]
    words: Words
    began: float = field(default_factory=time.monotonic)
    first: float | None = None
    last: float = 0.0
    made: int = 0
    passes: int = 0
    correct: int = 0
    cached: int = 0
    error: tuple[int, str] | None = None
    news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def done(self) -> bool:
        """Whether nothing more comes."""
        return self.error is not None or self.made >= self.length


class RequestError(Exception):
    """A request that is answered with a status and a text; `kind` is the error's type."""

    def __init__(self, status: int, text: str, kind: str = "") -> None:
        super().__init__(text)
        self.status = status
        self.kind = kind


class Server:
    """State of the server process. `status` is starting, up, unhealthy or stuck."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.args = setup.args
        self.status = "starting"
        self.draining = False
        self.metrics = Metrics(setup)
        self.last_receive = 0.0
        self._generations: dict[str, Generation] = {}
        self._answers: dict[str, asyncio.Future[Any]] = {}
        self._listener: asyncio.Server | None = None
        self._engine: asyncio.StreamWriter | None = None
        self._finished = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    # Life

    async def run(self) -> None:
        """Bind, warm up, serve, drain."""
        from sglang.standin.http import serve_connection  # noqa: PLC0415 - it imports this module

        channel = self.setup.children[0].channel
        reader, self._engine = await asyncio.open_connection(sock=channel)
        self.spawn(self._read_engine(reader))
        address = (self.args["host"], self.args["port"])
        log(f"INFO:     Started server process [{os.getpid()}]")
        log("INFO:     Waiting for application startup.")
        log("INFO:     Application startup complete.")
        try:
            self._listener = await asyncio.start_server(
                lambda incoming, outgoing: serve_connection(self, incoming, outgoing), *address
            )
        except OSError as error:
            log(f"ERROR:    [Errno {error.errno}] {error.strerror}")
            self._kill_children()
            os._exit(3)
        log(f"INFO:     Uvicorn running on http://{address[0]}:{address[1]} (Press CTRL+C to quit)")
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        self.spawn(self._watch_children())
        self.spawn(self._warm_up())
        await self._finished.wait()

    def spawn(self, work: Any) -> None:
        """Start a task and keep a reference to it."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _warm_up(self) -> None:
        if not self.args["skip_server_warmup"]:
            await asyncio.sleep(float(os.environ.get("LAB_SGLANG_WARMUP_SECONDS", "1")))
            warm = self.begin("The capital city of France is", 8, {"temperature": 0}, HEALTH_PREFIX)
            async for _ in self.steps(warm):
                pass
        if self.status == "starting":
            self.status = "up"
            log("The server is fired up and ready to roll!")

    def _stop(self) -> None:
        if self.status == "starting":
            # The HTTP library's own handler is still in place: it closes the port and then waits
            # for the application, which never ends. Only SIGKILL helps.
            self.status = "stuck"
            log("INFO:     Shutting down")
            log("INFO:     Waiting for application shutdown.")
            if self._listener:
                self._listener.close()
        elif not self.draining and self.status != "stuck":
            log("SIGTERM received. signum=None frame=None. Draining requests and shutting down...")
            self.draining = True
            self.spawn(self._drain())

    async def _drain(self) -> None:
        await asyncio.sleep(DRAIN_DELAY)
        logged = 0.0
        while True:
            remaining = list(self._generations)
            if not remaining or time.monotonic() - logged >= DRAIN_LOG_SECONDS:
                log(
                    f"Gracefully exiting... Remaining number of requests {len(remaining)}. "
                    f"Remaining requests remaining_rids={remaining}."
                )
                logged = time.monotonic()
            if not remaining:
                break
            await asyncio.sleep(0.1)
        self._kill_children()
        self._finished.set()

    async def _watch_children(self) -> None:
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            for child in self.setup.children:
                pid, status = os.waitpid(child.pid, os.WNOHANG)
                if pid:
                    self._crash(child, os.waitstatus_to_exitcode(status))

    def _crash(self, child: Child, code: int) -> None:
        log(
            f"Subprocess {child.name} (pid={child.pid}) crashed with exit code {code}. "
            "Triggering SIGQUIT for cleanup..."
        )
        log("SIGQUIT received. signum=None, frame=None. It usually means one child failed.")
        time.sleep(CRASH_PAUSE)  # nothing is answered meanwhile
        die([other.pid for other in self.setup.children if other is not child])

    def _kill_children(self) -> None:
        for child in self.setup.children:
            os.kill(child.pid, signal.SIGKILL)
            os.waitpid(child.pid, 0)

    # Requests

    def begin(
        self, prompt: str, limit: int | None, sampling: dict[str, Any], prefix: str = ""
    ) -> Generation:
        """Hand a prompt to the engine.

        Raises:
            RequestError: it does not fit into the context.
        """
        temperature = sampling.get("temperature")
        temperature = 1.0 if temperature is None else float(temperature)
        seed = seed_of(prompt, self.args["random_seed"] or 0)
        tokens, context = token_count(prompt), self.args["context_length"]
        if tokens >= context:
            raise RequestError(
                400,
                f"The input ({tokens} tokens) is longer than the model's context length "
                f"({context} tokens).",
            )
        words = Words(seed)
        limit = min(limit or context, context - tokens)
        natural = limit if sampling.get("ignore_eos") else words.natural_length
        finish: dict[str, Any] = {"type": "length", "length": limit}
        if natural < limit:
            finish = {"type": "stop", "matched": 248046}
        generation = Generation(
            (f"{prefix}_" if prefix else "") + uuid.uuid4().hex,
            tokens,
            min(limit, natural),
            finish,
            words,
        )
        self._generations[generation.rid] = generation
        chance = draft_chance(kind_of(prompt), temperature)
        self._tell("add", generation.rid, tokens, seed, chance, generation.length)
        return generation

    async def steps(self, generation: Generation) -> AsyncIterator[int]:
        """Yield the number of new tokens each time there are some, until the request is done.

        Raises:
            RequestError: the queue was full.
        """
        seen = 0
        try:
            while True:
                await generation.news.wait()
                generation.news.clear()
                if generation.error:
                    raise RequestError(*generation.error)
                made = generation.made
                if made > seen:
                    yield made - seen
                seen = made
                if made >= generation.length:
                    return
        finally:
            self._generations.pop(generation.rid, None)
            if not generation.done:  # the client went away
                self._tell("abort", generation.rid)

    async def health(self) -> bool:
        """Generate one token; anything that the scheduler says in time counts as life."""
        if self.draining or self.status in ("starting", "stuck"):
            return False
        began = time.monotonic()
        probe = self.begin("", 1, {"temperature": 0}, HEALTH_PREFIX)
        limit = float(os.environ.get("SGLANG_HEALTH_CHECK_TIMEOUT", "20"))
        while time.monotonic() < began + limit:
            await asyncio.sleep(1)  # so an answer never takes less than a second
            if self.last_receive > began:
                self._generations.pop(probe.rid, None)
                self.status = "up"
                return True
        # The probe stays in the scheduler, as in the real server.
        self._generations.pop(probe.rid, None)
        log(
            "Health check failed. Server couldn't get a response from detokenizer for last "
            f"{limit:.0f} seconds. tic start time: {_clock(began)}. "
            f"last_heartbeat time: {_clock(self.last_receive)}"
        )
        self.status = "unhealthy"
        return False

    async def ask(self, verb: str) -> Any:
        """Ask the scheduler; a scheduler that hangs never answers."""
        name = uuid.uuid4().hex
        self._answers[name] = asyncio.get_running_loop().create_future()
        self._tell(verb, name)
        return await self._answers[name]

    def _tell(self, *message: Any) -> None:
        assert self._engine is not None  # connected before the port opens
        self._engine.write(dumps(message) + b"\n")

    async def _read_engine(self, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            self.last_receive = time.monotonic()
            verb, *words = json.loads(line)
            if verb == "progress":
                self.metrics.gauges = words[1]
                for step in words[0]:
                    self._progress(step)
            elif verb == "full":
                generation = self._generations.get(words[0])
                if generation:
                    generation.error = (503, "The request queue is full.")
                    generation.news.set()
            else:
                self._answers.pop(words[0]).set_result(words[1])

    def _progress(self, step: list[Any]) -> None:
        rid, made, passes, correct, cached = step
        generation = self._generations.get(rid)
        if generation is None:  # a probe that timed out, a client that left
            return
        now = time.monotonic()
        if not rid.startswith(HEALTH_PREFIX):
            self.metrics.observe(generation, now, made, passes, cached)
        generation.first = generation.first or now
        generation.last = now
        generation.made, generation.passes = made, passes
        generation.correct, generation.cached = correct, cached
        generation.news.set()


def _clock(monotonic: float) -> str:
    """Return the time of day of a monotonic time."""
    return time.strftime("%H:%M:%S", time.localtime(time.time() - time.monotonic() + monotonic))


def run(setup: Setup) -> None:
    """Serve until drained. Returns for status 0; every other end leaves the process at once."""

    async def main() -> None:
        await Server(setup).run()
        sys.stderr.flush()
        os._exit(0)

    asyncio.run(main())
