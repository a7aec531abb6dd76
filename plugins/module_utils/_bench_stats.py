# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.

"""From the times of single requests to the figures of a point, its start and its tail left out.

A closed loop of C requests is full only between its first wave and its last admission. Tokens over
the whole duration read up to a third too low, as the end empties slowly. Tokens that come within
the full part read up to a twelfth too low where prompts are long and requests fall out of step, as
they do with speculation: it then holds more prefills than answers. Little's law has neither error:
tokens of whole requests, over the time these took, times how many were in flight.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

STEADY = 0.10  # how much the pace may differ from part to part, beyond what prompts explain
BLOCKS = 4  # the parts
# An answer that takes so many times as long as the middle one has not only had the worse drafts
STALL = 5.0
# SGLang's clients ask the server for its arguments, and sum up, before they stop their clock
OVERHEAD = 0.25


@dataclass(frozen=True)
class Request:
    """One request as its client saw it. Times are in seconds.

    Attributes:
        start: when it was sent, from the first one on; `None` where the client does not tell.
        ttft: from then to the first token.
        gaps: from each piece of text to the next; a piece may hold several tokens.
        tokens: generated, by the server's count; `None` when it gave none.
        input_tokens: of the prompt, `None` when not known.
        error: why it failed.
    """

    start: float | None
    ttft: float
    gaps: tuple[float, ...]
    tokens: int | None
    input_tokens: int | None = None
    error: str | None = None

    @property
    def latency(self) -> float:
        """Seconds from sending to the last piece."""
        return self.ttft + sum(self.gaps)

    @property
    def end(self) -> float:
        """When its last piece came."""
        return (self.start or 0.0) + self.latency

    @property
    def tpot(self) -> float | None:
        """Seconds for each token after the first, `None` when there is none."""
        if self.tokens is None or self.tokens < 2 or not self.gaps:
            return None
        return (self.latency - self.ttft) / (self.tokens - 1)


@dataclass(frozen=True)
class Steady:
    """The part in which the loop is full: seconds from the first request's start."""

    begin: float
    end: float

    @property
    def seconds(self) -> float:
        """How long it is."""
        return self.end - self.begin


def with_starts(requests: Sequence[Request], concurrency: int) -> list[Request]:
    """Return the requests, in the order they were submitted, with the times they were sent.

    SGLang's clients leave those out of their result. Their cap is a semaphore that wakes in the
    order of waiting, so each request starts when the first of the running ones ends.
    """
    if all(request.start is not None for request in requests):
        return list(requests)
    ends: list[float] = []
    started = []
    for request in requests:
        start = heapq.heappop(ends) if len(ends) >= concurrency else 0.0
        started.append(replace(request, start=start))
        heapq.heappush(ends, start + request.latency)
    return started


def steady_part(requests: Sequence[Request], concurrency: int) -> Steady | None:
    """Return the part in which the loop is full and past its first wave, `None` without one.

    It begins when the first C prompts have their first token and one request has followed them,
    and ends when the last one is sent: both are moments of an admission, so that a wave is counted
    with its prefill.
    """
    order = sorted(requests, key=lambda request: request.start or 0.0)
    if len(order) <= concurrency:
        return None
    first = max((request.start or 0.0) + request.ttft for request in order[:concurrency])
    begin = max(first, order[concurrency].start or 0.0)
    end = order[-1].start or 0.0
    return Steady(begin, end) if end > begin else None


def in_flight(requests: Sequence[Request], part: Steady) -> float:
    """Return how many requests were on their way on average."""
    overlaps = [
        max(0.0, min(request.end, part.end) - max(request.start or 0.0, part.begin))
        for request in requests
    ]
    return sum(overlaps) / part.seconds


def inside(requests: Sequence[Request], concurrency: int, part: Steady) -> list[Request]:
    """Return the requests of a part, in the order they were sent: neither the first C nor the last.

    They are told by their order and not by whether they ended in it, which would prefer short ones.
    """
    order = sorted(requests, key=lambda request: request.start or 0.0)
    middle = order[concurrency : len(order) - concurrency]
    return [request for request in middle if (request.start or 0.0) >= part.begin - 1e-6]


def spread(values: Sequence[float]) -> dict[str, float | None]:
    """Return mean and percentiles, rounded; `None` of nothing."""
    names = ("mean", "median", "p90", "p95", "p99")
    if not values:
        return dict.fromkeys(names)
    order = sorted(values)
    cuts = [percentile(order, share) for share in (0.5, 0.9, 0.95, 0.99)]
    return dict(zip(names, (round(value, 3) for value in (sum(order) / len(order), *cuts))))


def percentile(order: Sequence[float], share: float) -> float:
    """Return the value below which a share of sorted values lies, interpolated."""
    at = share * (len(order) - 1)
    low = math.floor(at)
    high = min(low + 1, len(order) - 1)
    return order[low] + (order[high] - order[low]) * (at - low)


def median(values: Sequence[float]) -> float | None:
    """Return the middle value, `None` of nothing."""
    return percentile(sorted(values), 0.5) if values else None


def wavers(requests: Sequence[Request]) -> float | None:
    """Return how much the pace differs between parts of a run, more than its prompts explain.

    Prompts differ in how many drafts are accepted, so single requests differ a lot; the mean of a
    part differs by that over the root of its size. Twice this is taken as chance.

    Returns:
        The coefficient of variation of the parts when it is more than 10 % beyond chance; `None`
        when it is not, or when there are too few requests to tell.
    """
    paces = [request.tpot for request in requests]
    known = [pace for pace in paces if pace is not None]
    size = len(known) // BLOCKS
    if size < 2:
        return None
    blocks = [known[at * size : (at + 1) * size] for at in range(BLOCKS)]
    means = [sum(block) / size for block in blocks]
    centre = sum(means) / BLOCKS
    if centre <= 0:
        return None
    between = sum((mean - centre) ** 2 for mean in means) / (BLOCKS - 1)
    within = sum((pace - mean) ** 2 for block, mean in zip(blocks, means) for pace in block) / (
        BLOCKS * (size - 1)
    )
    allowed = (STEADY * centre) ** 2 + 4 * within / size
    return math.sqrt(between) / centre if between > allowed else None


def stalled(requests: Sequence[Request]) -> float:
    """Return the share of the time that was lost in answers that stood still.

    All of them have as many tokens, so one that takes five times as long as most, and not for a
    longer prompt, has waited. In the parts of a run it hides, as it makes their chance as large as
    their difference.
    """
    times = [request.latency for request in requests]
    middle = median(times) or 0.0
    usual = median([float(request.input_tokens or 0) for request in requests]) or 0.0
    lost = sum(
        request.latency - middle
        for request in requests
        if request.latency > STALL * middle and (request.input_tokens or 0) <= 2 * usual
    )
    return lost / sum(times) if lost else 0.0


def figures(
    requests: Sequence[Request], concurrency: int, duration: float | None
) -> tuple[dict[str, Any], Steady | None]:
    """Return the figures of one point, and its steady part.

    Args:
        requests: all of them, failed ones too, in the order they were submitted.
        concurrency: how many should be in flight.
        duration: seconds the client says that it took; longer than what its requests add up to
            when the client itself lost time. `None` where the starts are known.
    """
    known = all(request.start is not None for request in requests)
    started = with_starts(requests, concurrency)
    done = [request for request in started if request.error is None]
    part = steady_part(started, concurrency)
    middle = [] if part is None else inside(started, concurrency, part)
    whole = [request for request in middle if request.error is None]
    if len(middle) < concurrency:
        part, whole = None, []
    took = max((request.end for request in started), default=0.0)
    counted = took if known or not duration else max(took, duration - OVERHEAD)
    lost = took / counted if counted else 1.0
    rate = flight = None
    if part is not None:
        flight = in_flight(started, part) * lost
        busy = sum(request.latency for request in whole)
        rate = flight * sum(request.tokens or 0 for request in whole) / busy if busy else None
    paces = [request.tpot for request in whole]
    per_request = median([1 / pace for pace in paces if pace])
    return {
        "concurrency": concurrency,
        "requests": len(done),
        "duration_s": round(duration or took, 3),
        "steady_s": None if part is None else round(part.seconds, 3),
        "output_tok_s": None if rate is None else round(rate, 2),
        "per_request_tok_s": None if per_request is None else round(per_request, 3),
        "ttft_ms": spread([request.ttft * 1000 for request in whole]),
        "tpot_ms": spread([pace * 1000 for pace in paces if pace is not None]),
        "itl_ms": spread([gap * 1000 for request in whole for gap in request.gaps]),
        "e2e_ms": spread([request.latency * 1000 for request in whole]),
        "in_flight": None if flight is None else round(flight, 2),
    }, part
