# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.

"""Is a server still as fast as it was? A comparison of kept runs before and after a change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from ansible_collections.gpuhost.inference.plugins.module_utils._tune_runs import (
    ASKED,
    Run,
    contrast,
    differences,
    read_runs,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._tune_verdict import (
    DROP,
    KEEP,
    TIE,
    Rules,
    word_for,
)

_WORDS: Mapping[str, str] = {KEEP: "faster", DROP: "slower", TIE: "same"}
_CANNOT_TELL = "cannot tell"
_CLIENT = "benchmark client"


def compare_history(
    before: object,
    after: object,
    *,
    arm: str | None = None,
    rules: Rules | None = None,
    prompts: str | None = None,
) -> dict[str, Any]:
    """Return how much faster each concurrency became, and what changed meanwhile.

    Both sides are the same arm, so one start on a side is enough when the other has several: their
    spread stands for both.

    Args:
        before: kept results of `sglang_benchmark`.
        after: later ones.
        arm: whose runs count; may be left out when all runs are of one.
        rules: margin and confidence.
        prompts: kind of prompts whose points count. By default the only kind, or `mixed`.

    Raises:
        GpuHostError: the runs are not what they should be, or of several arms.
    """
    rules = rules or Rules()
    sides = {"before": read_runs(before, prompts), "after": read_runs(after, prompts)}
    arm = arm if arm is not None else _only_arm([run for side in sides.values() for run in side])
    runs = {name: [run for run in side if run.arm == arm] for name, side in sides.items()}
    missing = [name for name, mine in runs.items() if not any(run.logs for run in mine)]
    if missing:
        raise GpuHostError(
            f"no run of the arm {arm} from {missing[0]} the change has a good point: give one"
        )
    changed = differences(runs, _server)
    mixed = {one["key"] for name in runs for one in differences({name: runs[name]}, _setting)}
    unequal = [*differences(runs, _how), *(one for one in changed if one["key"] in mixed)]
    points = []
    for concurrency in sorted({one for mine in runs.values() for run in mine for one in run.logs}):
        ratio = contrast(
            runs["before"], runs["after"], {concurrency: 1.0}, rules.confidence, fewest=1
        )
        word = _CANNOT_TELL if unequal else _WORDS.get(word_for(ratio, rules.margin), _CANNOT_TELL)
        points.append(
            {
                "concurrency": concurrency,
                "ratio": ratio.value,
                "low": ratio.low,
                "high": ratio.high,
                "starts": dict(zip(runs, ratio.starts)),
                "verdict": word,
            }
        )
    words = {str(point["verdict"]) for point in points}
    return {
        "arm": arm,
        "verdict": _overall(words),
        "margin": rules.margin,
        "confidence": rules.confidence,
        "points": points,
        "changed": changed,
        "unequal": unequal,
        "left_out": [point for mine in runs.values() for run in mine for point in run.left_out],
    }


def _how(run: Run) -> dict[str, Any]:
    """Return how it was measured. SGLang's own clients change their version with each release."""
    asked = {key: value for key, value in run.equal.items() if key in ASKED}
    return {**run.how, **asked, _CLIENT: str(run.how[_CLIENT]).split()[0]}


def _setting(run: Run) -> dict[str, Any]:
    """Return what the starts of one side share; room in the cache differs from start to start."""
    told = {key: value for key, value in run.apart.items() if key.startswith("speculative_")}
    return {**told, **{key: value for key, value in run.equal.items() if key not in ASKED}}


def _server(run: Run) -> dict[str, Any]:
    return {**run.apart, **_setting(run), _CLIENT: run.how[_CLIENT]}


def _only_arm(runs: Sequence[Run]) -> str:
    arms = sorted({run.arm for run in runs})
    if len(arms) != 1:
        raise GpuHostError(
            f"the runs are of {len(arms)} arms ({', '.join(arms)}): say which one to compare"
        )
    return arms[0]


def _overall(words: set[str]) -> str:
    """Return the worst that is certain; `same` and `faster` need all points to be no worse."""
    if "slower" in words:
        return "slower"
    if not words or _CANNOT_TELL in words:
        return _CANNOT_TELL
    return "faster" if "faster" in words else "same"
