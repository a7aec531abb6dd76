"""Closed loops of requests with a known true rate, as a client would report them."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from ansible_collections.gpuhost.inference.plugins.module_utils._bench_stats import Request


def loop(
    concurrency: int,
    lengths: Sequence[int],
    gap: Callable[[int], float],
    ttft: float = 0.0,
    packed: int = 1,
) -> list[Request]:
    """Return requests of a server that gives each a token every `gap(number)` seconds.

    Args:
        concurrency: at a time; the next starts when the first ends.
        lengths: tokens of each.
        gap: seconds for a token of the request with a number.
        ttft: seconds to the first token.
        packed: tokens that come as one piece.
    """
    ends: list[float] = []
    found = []
    for number, length in enumerate(lengths):
        start = heapq.heappop(ends) if len(ends) >= concurrency else 0.0
        pieces = [packed] * ((length - 1) // packed) + [(length - 1) % packed]
        gaps = tuple(gap(number) * piece for piece in pieces if piece)
        request = Request(start, ttft, gaps, length, 20)
        heapq.heappush(ends, request.end)
        found.append(request)
    return found


def ragged(count: int, seed: int, low: int = 100, high: int = 400) -> list[int]:
    dice = random.Random(seed)
    return [dice.randint(low, high) for _turn in range(count)]


def as_sglang(requests: Sequence[Request]) -> list[Request]:
    """Return requests as SGLang's clients tell of them: without their starts."""
    return [replace(request, start=None) for request in requests]
