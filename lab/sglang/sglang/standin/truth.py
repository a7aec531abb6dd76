# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What a benchmark of this stand-in has to find: the same engine, run in virtual time.

    PYTHONPATH=lab/sglang python3 -m sglang.standin.truth --model-path DIR [--tp 4 ...]

prints, for the flags that the server would get, a line of JSON for each concurrency: tokens/s of
all requests while the loop is full, tokens/s of one after its first, and how many run at once.
`TRUTH_CONCURRENCIES` (1,4,8,16,24,32,64,128), `TRUTH_OUTPUT_TOKENS` (512), `TRUTH_PROMPT_TOKENS`
(55) and `TRUTH_KINDS` (code,chat,reasoning) in the environment change the load.
"""

from __future__ import annotations

import json
import os
import sys
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from sglang.standin import arguments
from sglang.standin.engine import Engine, Request
from sglang.standin.model import plan, read_model
from sglang.standin.text import draft_chance

WAVES = 24  # of the loop, of which the first and the last are left out


@dataclass
class Trace:
    """One request: when it was sent, and when how many of its tokens had been made."""

    start: float
    made: list[tuple[float, int]] = field(default_factory=list)


def run(engine: Engine, requests: Iterable[Request], concurrency: int) -> list[Trace]:
    """Send requests in a closed loop and return what becomes of each, times in seconds.

    A client that gets an answer's end sends its next request at once, but the engine has begun
    another step by then, as it does behind a real socket, unless it has nothing else to do.
    """
    waiting = deque(requests)
    traces: dict[str, Trace] = {}
    now = 0.0
    arrivals = [waiting.popleft() for _ in range(min(concurrency, len(waiting)))]
    for request in arrivals:
        traces[request.rid] = Trace(now)
        engine.add(request)
    late: list[Request] = []
    while engine.waiting or engine.running or late:
        if not (engine.waiting or engine.running):
            for request in late:
                engine.add(request)
            late = []
        lengths = {one.rid: one.length for one in (*engine.running, *engine.waiting)}
        seconds, progress = engine.step()
        now += seconds
        for request in late:
            engine.add(request)
        late = []
        for rid, made, *_counts in progress:
            traces[rid].made.append((now, made))
            if made >= lengths[rid] and waiting:
                following = waiting.popleft()
                traces[following.rid] = Trace(now)
                late.append(following)
    return list(traces.values())


def steady(traces: list[Trace], concurrency: int) -> tuple[float, float]:
    """Return tokens/s of all while the loop is full, and the median request's after its first."""
    whole = sorted(traces, key=lambda trace: trace.start)[concurrency:-concurrency]
    tokens = sum(trace.made[-1][1] for trace in whole)
    busy = sum(trace.made[-1][0] - trace.start for trace in whole)
    ends = [(trace.made[0][0], *trace.made[-1]) for trace in whole]
    paces = sorted((made - 1) / (last - first) for first, last, made in ends)
    return concurrency * tokens / busy, paces[len(paces) // 2]


def main(argv: list[str]) -> None:
    """Print the table."""
    given = os.environ.get
    output = int(given("TRUTH_OUTPUT_TOKENS", "512"))
    prompt = int(given("TRUTH_PROMPT_TOKENS", "55"))
    kinds = given("TRUTH_KINDS", "code,chat,reasoning").split(",")
    args = arguments.parse(argv)
    model = read_model(args["model_path"])
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 2)  # the engine writes a line for each prefill
    arguments.resolve(args, model)
    pools = plan(args, model)
    for word in given("TRUTH_CONCURRENCIES", "1,4,8,16,24,32,64,128").split(","):
        concurrency = int(word)
        count = WAVES * max(concurrency, 12)
        engine = Engine(args, pools, model.has_mtp)
        load = [
            Request(str(n), prompt, n * 7919 + 1, draft_chance(kinds[n % len(kinds)], 0), output)
            for n in range(count)
        ]
        rate, pace = steady(run(engine, load, concurrency), concurrency)
        line = {"concurrency": concurrency, "output_tok_s": round(rate, 1)}
        line.update(per_request_tok_s=round(pace, 2), runs=min(concurrency, pools.max_running))
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
