# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.

"""Ratios of speeds between the starts of two servers, with their intervals.

A start is the unit of replication: acceptance, clocks and captured CUDA graphs differ between
starts, while the points of one start share its luck. So all that is asked of a start (its speed at
a concurrency, between two of them, or under a load) becomes one number, a weighted mean of the
logarithms of its speeds, and Student's t compares the numbers of both sides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean

_MOST = 600.0  # logarithm of a ratio that still fits a float


@dataclass(frozen=True)
class Ratio:
    """How much faster one side is.

    Attributes:
        value: speed of the second side over that of the first, 1.2 is 20 % faster. `None` when a
            side has no start.
        low: lower end of the interval, `None` when the starts are too few for one.
        high: upper end.
        starts: how many starts of either side count.
    """

    value: float | None
    low: float | None
    high: float | None
    starts: tuple[int, int]


@cache
def t_quantile(confidence: float, freedom: int) -> float:
    """Return t so that a share `confidence` of Student's distribution lies within -t and t.

    The distribution function of a whole number of degrees of freedom is a finite sum (Abramowitz
    and Stegun, 26.7.3 and 26.7.4), so no library of statistics is needed for this one number.

    Args:
        confidence: 0.95 for instance.
        freedom: degrees of freedom, 1 or more.
    """
    low, high = 0.0, 1.0
    while _within(high, freedom) < confidence:
        low, high = high, 2 * high
    for _step in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < confidence else (low, middle)
    return high


def _within(t: float, freedom: int) -> float:
    """Return the share of Student's distribution between -t and t."""
    angle = math.atan(t / math.sqrt(freedom))
    odd = freedom % 2
    term = math.cos(angle) if odd else 1.0
    total = 0.0
    for k in range(freedom // 2):
        total += term
        term *= math.cos(angle) ** 2 * (2 * k + 1 + odd) / (2 * k + 2 + odd)
    total *= math.sin(angle)
    return (angle + total) * 2 / math.pi if odd else total


def compare(
    first: Sequence[float], second: Sequence[float], confidence: float, fewest: int = 2
) -> Ratio:
    """Return the ratio of two sides from the logarithms of their starts' speeds.

    The spread is pooled, which gives n + n - 2 degrees of freedom. One ABBA block (two starts a
    side) leaves 2; Welch's form would leave between 1 and 2 there and cover 97.5 %, not 95 %. When
    one side spreads more than the other by half, twice or three times, the pooled interval of two
    to four starts a side still covers 94.6, 94.0 or 92.5 % (a million simulated comparisons).

    Args:
        first: natural logarithms, one for each start.
        second: of the other side.
        confidence: of the interval.
        fewest: starts that each side needs for an interval.
    """
    starts = len(first), len(second)
    if not all(starts):
        return Ratio(None, None, None, starts)
    middle = fmean(second) - fmean(first)
    freedom = sum(starts) - 2
    if min(starts) < fewest or freedom < 1:
        return Ratio(math.exp(middle), None, None, starts)
    squares = sum((one - fmean(side)) ** 2 for side in (first, second) for one in side)
    error = math.sqrt(squares / freedom * (1 / starts[0] + 1 / starts[1]))
    reach = t_quantile(confidence, freedom) * error
    low, high = (math.exp(min(_MOST, middle + end)) for end in (-reach, reach))
    return Ratio(math.exp(middle), low, high, starts)


def between(concurrency: int, measured: Sequence[int]) -> dict[int, float] | None:
    """Return how much each measured concurrency says about another one.

    The logarithm of a speed is taken as straight in the logarithm of the concurrency between two
    neighbours.

    Args:
        concurrency: of interest.
        measured: concurrencies, ascending.

    Returns:
        Shares that sum up to 1, of one concurrency when it was measured, else of its neighbours;
        `None` outside of what was measured, where nothing is known.
    """
    if concurrency in measured:
        return {concurrency: 1.0}
    below = [one for one in measured if one < concurrency]
    above = [one for one in measured if one > concurrency]
    if not below or not above:
        return None
    lower, upper = below[-1], above[0]
    share = math.log(concurrency / lower) / math.log(upper / lower)
    return {lower: 1 - share, upper: share}


def spread(load: Mapping[int, float], measured: Sequence[int]) -> tuple[dict[int, float], float]:
    """Return how much each measured concurrency says about a load.

    Args:
        load: share of the time by concurrency; the shares sum up to 1.
        measured: concurrencies, ascending.

    Returns:
        Weights that sum up to 1 (empty when no part of the load was measured), and the share of the
        load that lies within what was measured.
    """
    weights: dict[int, float] = {}
    covered = 0.0
    for concurrency, share in load.items():
        near = between(concurrency, measured)
        if near is not None:
            covered += share
            for one, part in near.items():
                weights[one] = weights.get(one, 0.0) + share * part
    return {one: weight / covered for one, weight in weights.items() if weight > 0}, covered
