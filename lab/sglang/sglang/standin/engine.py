# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The scheduler's model: which request gets how many tokens in which step, and how long it takes.

One step of a batch of b requests takes, in milliseconds,

    without speculation   12 + 0.6 b
    with it               12 + 0.6 b + 2.1 steps + 0.4 b draft_tokens

and gives each request one token, or one more for each draft token accepted in a row. So MTP wins
while b is small and loses when the verification of all drafts costs more than it saves; the slots
that it takes from the state cache (`model.plan`) come on top. The numbers are fitted to public
figures for this model on four cards of this kind; they hold for no other. `truth` tells the rates
that follow.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from sglang.standin.process import log
from sglang.standin.text import Dice

STEP_MS, REQUEST_MS, DRAFT_STEP_MS, VERIFY_MS = 12.0, 0.6, 2.1, 0.4
PREFILL_MS, PREFILL_TOKENS_PER_MS = 8.0, 6.0


@dataclass
class Request:
    """One request in the scheduler.

    Attributes:
        rid: its name.
        prompt_tokens: length of the prompt.
        seed: of the prompt, also the key of the prefix cache.
        chance: that a draft token is accepted.
        length: tokens to generate.
        made: tokens generated.
        passes: verification passes.
        correct: drafts accepted.
    """

    rid: str
    prompt_tokens: int
    seed: int
    chance: float
    length: int
    made: int = 0
    passes: int = 0
    correct: int = 0
    cached: int = 0
    dice: Dice = field(init=False)

    def __post_init__(self) -> None:
        self.dice = Dice(self.seed ^ 0x5EED)

    def progress(self) -> list[Any]:
        """Return what the server process is told after a step."""
        return [self.rid, self.made, self.passes, self.correct, self.cached]


class Engine:
    """Queue, running batch and counters of one scheduler. Knows no clock but for the log."""

    def __init__(self, args: dict[str, Any], pools: Any, has_mtp: bool) -> None:
        self.pools = pools
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._steps = args["speculative_num_steps"] if args["speculative_algorithm"] else 0
        self._drafts = args["speculative_num_draft_tokens"] if self._steps else 0
        self._has_mtp = has_mtp
        self._max_waiting = args["max_queued_requests"]
        self._chunk = args["chunked_prefill_size"]
        self._interval = args["decode_log_interval"]
        self._prefixes: set[int] | None = None if args["disable_radix_cache"] else set()
        self._decodes = 0
        self._window = [0, 0, 0]  # tokens, passes and accepted drafts since the last line
        self._total = [0, 0]  # tokens and passes since the start or the last flush
        self._since = time.monotonic()
        self.accept_length = self.accept_rate = self.throughput = 0.0

    def add(self, request: Request) -> bool:
        """Take a request; false when the queue is full."""
        if self._max_waiting is not None and len(self.waiting) >= self._max_waiting:
            return False
        self.waiting.append(request)
        return True

    def abort(self, rid: str) -> None:
        """Drop a request wherever it is."""
        self.waiting = deque(r for r in self.waiting if r.rid != rid)
        self.running = [r for r in self.running if r.rid != rid]

    def flush(self) -> bool:
        """Empty the prefix cache and reset the average, only when idle."""
        if self.waiting or self.running:
            return False
        if self._prefixes:
            self._prefixes.clear()
        self._total = [0, 0]
        return True

    def step(self) -> tuple[float, list[list[Any]]]:
        """Do one prefill or decode step: seconds it takes, and the progress of its requests."""
        if self.waiting and len(self.running) < self.pools.max_running:
            return self._prefill()
        return self._decode()

    def _prefill(self) -> tuple[float, list[list[Any]]]:
        new: list[Request] = []
        tokens = cached = 0
        while self.waiting and len(self.running) < self.pools.max_running:
            request = self.waiting[0]
            if self._prefixes is not None and request.seed in self._prefixes:
                request.cached = request.prompt_tokens - 1
            if new and tokens + request.prompt_tokens - request.cached > self._chunk:
                break
            self.waiting.popleft()
            tokens += request.prompt_tokens - request.cached
            cached += request.cached
            if self._prefixes is not None:
                self._prefixes.add(request.seed)
            request.made = 1
            new.append(request)
            self.running.append(request)
        seconds = (PREFILL_MS + tokens / PREFILL_TOKENS_PER_MS) / 1000
        usage = self.usage()
        log(
            f"Prefill batch, #new-seq: {len(new)}, #new-token: {tokens}, #cached-token: {cached}, "
            f"{self._usage_text(usage, ('full token usage', 'mamba usage'))}"
            f"#running-req: {len(self.running) - len(new)}, #queue-req: {len(self.waiting)}, "
            f"#pending-token: 0, cuda graph: False, "
            f"input throughput (token/s): {tokens / seconds:.2f}"
        )
        return seconds, self._progress(new)

    def _decode(self) -> tuple[float, list[list[Any]]]:
        batch = self.running
        milliseconds = STEP_MS + REQUEST_MS * len(batch)
        if self._steps:
            milliseconds += DRAFT_STEP_MS * self._steps + VERIFY_MS * len(batch) * self._drafts
        window = self._window
        for request in batch:
            accepted = 0
            if self._steps:
                if self._has_mtp:
                    while accepted < self._steps and request.dice.hit(request.chance):
                        accepted += 1
                request.passes += 1
                request.correct += accepted
                window[1] += 1
                window[2] += accepted
            request.made = min(request.made + 1 + accepted, request.length)
            window[0] += 1 + accepted
        self._decodes += 1
        if self._decodes % self._interval == 0:
            self._report(len(batch))
        return milliseconds / 1000, self._progress(batch)

    def _progress(self, batch: list[Request]) -> list[list[Any]]:
        progress = [request.progress() for request in batch]
        self.running = [request for request in self.running if request.made < request.length]
        return progress

    def _report(self, running: int) -> None:
        """Write the decode line and refresh what the gauges show."""
        now = time.monotonic()
        tokens, passes, correct = self._window
        self.throughput = tokens / max(now - self._since, 1e-6)
        self._since, self._window = now, [0, 0, 0]
        speculation = ""
        if passes:
            self._total[0] += tokens
            self._total[1] += passes
            self.accept_length = tokens / passes
            self.accept_rate = correct / (passes * max(1, self._drafts - 1))
            speculation = (
                f"accept len: {self.accept_length:.2f}, accept rate: {self.accept_rate:.2f}, "
            )
        names = ("#full token", "full token usage", "mamba num", "mamba usage")
        log(
            f"Decode batch, #running-req: {running}, {self._usage_text(self.usage(), names)}"
            f"{speculation}cuda graph: True, gen throughput (token/s): {self.throughput:.2f}, "
            f"#queue-req: {len(self.waiting)}"
        )

    def usage(self) -> dict[str, Any]:
        """Return the fill of the pools, under the names of the log."""
        tokens = sum(request.prompt_tokens + request.made for request in self.running)
        slots = len(self.running) * self.pools.slots_per_request
        return {
            "#full token": tokens,
            "full token usage": round(tokens / max(1, self.pools.tokens), 2),
            "mamba num": slots if self.pools.state_slots else 0,
            "mamba usage": round(slots / max(1, self.pools.state_slots), 2)
            if self.pools.state_slots
            else 0.0,
        }

    def _usage_text(self, usage: dict[str, Any], names: tuple[str, ...]) -> str:
        if not self.pools.state_slots:  # not a hybrid model: the plain names
            plain = {
                name.replace("full ", ""): usage[name] for name in names if "mamba" not in name
            }
        else:
            plain = {name: usage[name] for name in names}
        return "".join(
            f"{name}: {value:.2f}, " if isinstance(value, float) else f"{name}: {value}, "
            for name, value in plain.items()
        )

    def gauges(self) -> dict[str, Any]:
        """Return the state for `/metrics` and `/v1/loads`."""
        usage = self.usage()
        return {
            "num_running_reqs": len(self.running),
            "num_queue_reqs": len(self.waiting),
            "num_used_tokens": usage["#full token"],
            "token_usage": usage["full token usage"],
            "full_token_usage": usage["full token usage"],
            "mamba_usage": usage["mamba usage"],
            "mamba_used_tokens": usage["mamba num"],
            "gen_throughput": self.throughput,
            "spec_accept_length": self.accept_length,
            "spec_accept_rate": self.accept_rate,
            "spec_num_steps": self._steps or 0,
            "spec_num_draft_tokens": self._drafts or 0,
            "is_cuda_graph": 1 if self.running else 0,
        }

    def average_accept_length(self) -> float | None:
        """Return the average since the start or the last flush, `None` before the first line."""
        return self._total[0] / self._total[1] if self._total[1] else None
