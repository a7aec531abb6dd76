# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.

"""How many requests a server runs at once in its daily life, from looks at its metrics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_http import (
    Metric,
    parse_metrics,
)

_RUNNING, _QUEUED = "num_running_reqs", "num_queue_reqs"
_LATENCY = "e2e_request_latency_seconds_sum"

Scrape = tuple[float, str]


def load_of(scrapes: Sequence[Scrape]) -> dict[str, Any]:
    """Return the load between the first and the last look at `/metrics`.

    A gauge is what it was at its last update (every forty decode steps, and when the server becomes
    idle), so a load needs many looks: an hour with one every ten seconds is a good one. The mean
    that the latencies give (Little's law: seconds that all requests took, over the seconds that
    went by) has no such gaps and shows whether the looks were enough.

    Args:
        scrapes: time in seconds and the text of `/metrics`, in the order of time.

    Returns:
        `load`: share of the busy time by number of requests at once, each look standing for the
        time half-way to its neighbours; `None` when the server was idle at all looks. `idle`: share
        of the time without a request. `mean`: requests at once over all the time, idle time too.
        `mean_by_latency`: the same by Little's law, `None` when the server has no such counter or
        was restarted. `queued`: share of the time in which requests waited, `None` when not known.
        `looks` and `seconds`.

    Raises:
        GpuHostError: fewer than two looks, looks out of order, or one without the gauge.
    """
    if len(scrapes) < 2:
        raise GpuHostError(f"{len(scrapes)} looks at /metrics show no load: take two or more")
    times = [at for at, _text in scrapes]
    if any(not before < later < math.inf for before, later in zip(times, times[1:])):
        raise GpuHostError("the looks at /metrics are not in the order of time: sort them by it")
    looks = [parse_metrics(text) for _at, text in scrapes]
    for number, look in enumerate(looks, 1):
        if _RUNNING not in look:
            raise GpuHostError(
                f"look {number} at /metrics has no sglang:{_RUNNING}: start the server with the "
                "flag enable-metrics"
            )
    seconds = times[-1] - times[0]
    ends = [times[0], *((a + b) / 2 for a, b in zip(times, times[1:])), times[-1]]
    shares: dict[int, float] = {}
    for look, begin, end in zip(looks, ends, ends[1:]):
        running = round(look[_RUNNING].total)
        shares[running] = shares.get(running, 0.0) + (end - begin) / seconds
    idle = shares.pop(0, 0.0)
    busy = sum(shares.values())
    return {
        "load": {str(one): share / busy for one, share in sorted(shares.items())} or None,
        "idle": idle,
        "mean": sum(one * share for one, share in shares.items()),
        "mean_by_latency": _by_latency(looks, seconds),
        "queued": _queued(looks, ends, seconds),
        "looks": len(looks),
        "seconds": seconds,
    }


def _by_latency(looks: Sequence[dict[str, Metric]], seconds: float) -> float | None:
    if _LATENCY not in looks[-1]:
        return None
    # A series appears with its first value, so before it there was none.
    sums = [look[_LATENCY].total if _LATENCY in look else 0.0 for look in looks]
    if any(later < before for before, later in zip(sums, sums[1:])):
        return None
    return (sums[-1] - sums[0]) / seconds


def _queued(
    looks: Sequence[dict[str, Metric]], ends: Sequence[float], seconds: float
) -> float | None:
    waits = [look[_QUEUED].total if _QUEUED in look else math.nan for look in looks]
    if any(math.isnan(wait) for wait in waits):
        return None
    return sum(b - a for wait, a, b in zip(waits, ends, ends[1:]) if wait > 0) / seconds
