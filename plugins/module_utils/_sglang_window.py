# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.

"""How well a server speculates on what its users ask, over a window of time.

Both numbers that a server shows of itself are means since its start or gauges of its last forty
steps. A window lies between two looks at its counters, or holds the lines of its log.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Optional

from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_http import (
    Client,
    Metric,
    parse_metrics,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_log import Batch, Log
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_unit import Unit
from ansible_collections.gpuhost.inference.plugins.module_utils._speculation import (
    judge_acceptance,
)

_TOKENS, _PASSES = "generation_tokens_total", "spec_verify_calls_total"
_ANSWER = 10.0

Metrics = Mapping[str, Metric]
LookAgain = Callable[[], tuple[Optional[Unit], Optional[Log]]]


@dataclass(frozen=True)
class Window:
    """What happened between two looks. `None` stands for what is not known.

    Attributes:
        seconds: length of the window.
        generated_tokens: tokens that were generated in it. A request's tokens may be counted when
            it ends, so the window should hold several requests.
        verify_calls: passes of the model over drafts, from 0.5.13 on.
        accept_length: tokens for each pass.
        accept_rate: share of the drafts that was accepted, computed alike for all releases.
        verdict: what the length means, as for a measurement.
        source: `metrics` or `log`.
        reason: why there is no accept length.
    """

    seconds: float
    generated_tokens: int | None = None
    verify_calls: int | None = None
    accept_length: float | None = None
    accept_rate: float | None = None
    verdict: str = "unknown"
    source: str | None = None
    reason: str | None = None


def watch(
    seconds: float,
    drafts: int | None,
    client: Client,
    again: LookAgain,
    sleep: Callable[[float], None] = time.sleep,
) -> Window:
    """Look at a server's counters and log, wait, and look again.

    Args:
        seconds: to wait.
        drafts: tokens that are verified in one pass, `None` when not known.
        client: of the server.
        again: reads its service and its journal.
        sleep: waits.
    """
    unit, _log = again()
    before, began = _scrape(client), time.monotonic()
    sleep(seconds)
    after, took = _scrape(client), time.monotonic() - began
    later, log = again()
    window = Window(round(took, 1))
    if unit is not None and later is not None and unit.invocation != later.invocation:
        return replace(window, reason="the server was restarted in the window")
    batches = [one for one in log.batches if one.at is not None and one.at >= began] if log else []
    return measure(window, drafts, (before, after), batches if log is not None else None)


def measure(
    window: Window,
    drafts: int | None,
    scrapes: tuple[Metrics | None, Metrics | None],
    batches: Sequence[Batch] | None,
) -> Window:
    """Return a window with what the counters at its ends, and the log's lines in it, tell.

    Args:
        window: without figures.
        drafts: tokens that are verified in one pass, the highest accept length that can be.
        scrapes: the metrics at both ends, `None` when the server has none.
        batches: the lines, `None` when the journal cannot be read.
    """
    tokens, passes = (_grown(*scrapes, name) for name in (_TOKENS, _PASSES))
    if (tokens or 0) < 0 or (passes or 0) < 0:
        return replace(window, reason="the counters went back: the server was restarted meanwhile")
    window = replace(window, generated_tokens=tokens, verify_calls=passes)
    doubt = None
    if tokens is not None and passes:
        length = tokens / passes
        if 1.0 <= length <= (drafts or length):
            return _with(window, length, drafts, "metrics")
        doubt = "requests that reach over its ends blur the counters: take a longer window"
    said = _accept_length(batches or ())
    if said is not None:
        return _with(window, said, drafts, "log")
    return replace(window, reason=doubt or _why_not(window, batches))


def _with(window: Window, length: float, drafts: int | None, source: str) -> Window:
    acceptance = judge_acceptance(length, drafts)
    return replace(
        window,
        accept_length=acceptance.length,
        accept_rate=acceptance.rate,
        verdict=acceptance.verdict,
        source=source,
    )


def _why_not(window: Window, batches: Sequence[Batch] | None) -> str:
    if batches and any(one.decodes for one in batches):
        return "it does not speculate: its log tells of tokens, but not of accepted drafts"
    if window.generated_tokens:
        return "it does not speculate, or too few tokens were generated for a line of its log"
    if window.generated_tokens is None and batches is None:
        return "neither /metrics (flag enable-metrics) nor its journal can be read"
    return "nothing was generated in the window"


def _grown(before: Metrics | None, after: Metrics | None, name: str) -> int | None:
    """Return by how much a counter has grown; one that has not counted yet is not shown."""
    if before is None or after is None or name not in after:
        return None
    return round(after[name].total - (before[name].total if name in before else 0.0))


def _accept_length(batches: Sequence[Batch]) -> float | None:
    """Return the mean of the log's lines. Each is of as many steps, of as many requests as ran."""
    lines = [one.values for one in batches if one.decodes and "accept len" in one.values]
    weights = [max(1.0, line.get("#running-req", 1.0)) for line in lines]
    if not lines:
        return None
    total = sum(line["accept len"] * weight for line, weight in zip(lines, weights))
    return total / sum(weights)


def _scrape(client: Client) -> Metrics | None:
    reply = client.ask("/metrics", _ANSWER)
    return parse_metrics(reply.body) if reply.status == 200 else None
