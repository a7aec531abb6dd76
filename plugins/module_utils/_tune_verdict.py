# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.

"""Does a setting of a server pay? A verdict from runs with it and without it.

Everything is compared with one arm, the baseline. A verdict needs a whole interval on one side of
the margin; an interval that lies across it is no verdict but `not-enough-data`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from ansible_collections.gpuhost.inference.plugins.module_utils._tune_runs import (
    Run,
    contrast,
    differences,
    first_of,
    hold,
    read_load,
    read_runs,
    repeated,
    told_load,
    waited_at,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._tune_stats import (
    Ratio,
    between,
    spread,
)

KEEP, DROP, TIE, DEPENDS, UNKNOWN = "keep", "drop", "tie", "depends", "not-enough-data"
# The load that stands for a kind of use as long as nobody has measured one.
PROFILES: Mapping[str, Mapping[int, float]] = {
    "single-user": {1: 1.0},
    "team": {8: 0.5, 16: 0.5},
    "batch": {64: 0.5, 128: 0.5},
}
YOURS = "yours"
# What may lie outside of the measured concurrencies: if it ran at half the speed, the gain would
# change by 0.05 * ln 2 = 3.5 %, which is less than the margin.
_OUTSIDE = 0.05
# Which variant the verdict is on. One that may yet win stands beside one that wins here and there.
_RANK: Mapping[str, int] = {KEEP: 0, DEPENDS: 1, UNKNOWN: 1, TIE: 2, DROP: 3}


@dataclass(frozen=True)
class Rules:
    """How sure a verdict must be.

    Attributes:
        margin: gain that is worth having and loss that is worth avoiding, as a share.
        confidence: of all intervals at one concurrency together, when there are several variants.
    """

    margin: float = 0.05
    confidence: float = 0.95

    def __post_init__(self) -> None:
        """Refuse shares that are none."""
        for name, value, least in (
            ("margin", self.margin, 0.0),
            ("confidence", self.confidence, 0.5),
        ):
            if not least <= value < 1:
                raise GpuHostError(
                    f"{name} is {value}: it must be a share from {least:g} to below 1"
                )


def word_for(ratio: Ratio, margin: float) -> str:
    """Return the verdict on one interval.

    Args:
        ratio: of the variant over the baseline.
        margin: as a share.
    """
    if ratio.low is None or ratio.high is None:
        return UNKNOWN
    if ratio.low > 1 + margin:
        return KEEP
    if ratio.high < 1 - margin:
        return DROP
    return TIE if ratio.low >= 1 - margin and ratio.high <= 1 + margin else UNKNOWN


def judge(
    runs: object,
    *,
    baseline: str = "off",
    load: object = None,
    rules: Rules | None = None,
    prompts: str | None = None,
    may_differ: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the verdict on every arm beside the baseline, and the arm to run.

    Args:
        runs: results of `sglang_benchmark`.
        baseline: arm that the others are compared with.
        load: share of the time by concurrency, `None` when it is not known.
        rules: margin and confidence.
        prompts: kind of prompts whose points count. By default the only kind, or `mixed`.
        may_differ: facts of the server that the setting brings with it.

    Raises:
        GpuHostError: the runs or the load are not what they should be, or no run is of the
            baseline.
    """
    rules, shares = rules or Rules(), read_load(load)
    loads = {**({YOURS: shares} if shares else {}), **PROFILES}
    read = hold(read_runs(runs, prompts), {one for some in loads.values() for one in some})
    arms = {
        name: [run for run in read if run.arm == name] for name in sorted({r.arm for r in read})
    }
    if arms and baseline not in arms:
        raise GpuHostError(
            f"no run is of the arm {baseline}, only of {', '.join(arms)}: name the baseline, or "
            "measure it"
        )
    # A start without a good point has nothing that could be compared.
    arms = {name: [run for run in mine if run.logs] for name, mine in arms.items()}
    variants = [name for name in arms if name != baseline]

    def same(run: Run) -> dict[str, Any]:
        equal = {key: value for key, value in run.equal.items() if key not in may_differ}
        return {**equal, **run.how}

    def others(run: Run) -> dict[str, Any]:
        brought = {key: value for key, value in run.equal.items() if key in may_differ}
        return {**run.apart, **brought}

    unequal = {
        name: differences({baseline: arms[baseline], name: arms[name]}, same) for name in variants
    }
    # Several variants are several chances to win by luck: Bonferroni's share for each.
    confidence = 1 - (1 - rules.confidence) / max(1, len(variants))
    pairs = {
        name: _Pair((baseline, name), (arms[baseline], arms[name]), rules.margin, confidence)
        for name in variants
        if not unequal[name]
    }
    sides = {name: _side(pair, loads) for name, pair in pairs.items()}
    best = min(sides, key=lambda name: _order(sides[name]), default=None)
    chosen = _Side(UNKNOWN, (), ()) if best is None else sides[best]
    result = {
        "baseline": baseline,
        "variant": best,
        "variants": {name: side.verdict for name, side in sides.items()},
        "winner": {KEEP: best, DROP: baseline, TIE: baseline}.get(chosen.verdict),
        "verdict": chosen.verdict,
        "keep_at": _at(chosen, KEEP),
        "drop_at": _at(chosen, DROP),
        "margin": rules.margin,
        "confidence": rules.confidence,
        "points": [point for side in sides.values() for point in side.points],
        "profiles": [profile for side in sides.values() for profile in side.profiles],
        "unequal": [difference for found in unequal.values() for difference in found],
        "apart": differences(arms, others),
        "left_out": [point for run in read for point in run.left_out],
    }
    rivals = [
        name
        for name, side in sides.items()
        if best not in (None, name)
        and side.verdict == chosen.verdict
        and not _beats((arms[name], arms[str(best)]), shares, confidence)
    ]
    unsure = [name for name, side in sides.items() if side.verdict == UNKNOWN]
    lost = {
        name: _lost([run for run in read if run.arm == name], bool(shares))
        for name in ([baseline, *unsure] if unsure else [])
    }
    doubts = [] if best is None else _doubts((baseline, best), arms, others)
    headline, *lines = _text(result, rivals, lost)
    return {**result, "text": [headline, *doubts, *lines][:10]}


def _doubts(
    names: tuple[str, str],
    arms: Mapping[str, Sequence[Run]],
    apart: Callable[[Run], Mapping[str, Any]],
) -> list[str]:
    """Say where the word may be on something else than the setting."""
    sides = {name: arms[name] for name in names}
    runs = [run for mine in sides.values() for run in mine]
    if runs and not any(run.tells_itself for run in runs):
        return [
            "what else differs between the arms is not known: the servers told nothing of "
            "themselves"
        ]
    # Room in the cache differs between starts of one setting too
    told = any(key.startswith("speculative_") for run in runs for key in run.apart)
    keys = {one["key"] for one in differences(sides, apart)} - {
        "kv_tokens",
        "effective_max_running_requests",
    }
    if told and not keys:
        return [
            f"{' and '.join(names)} ran with the same settings, by what the servers tell: was it "
            "switched on?"
        ]
    return []


@dataclass(frozen=True)
class _Pair:
    """The baseline and one variant, in this order."""

    names: tuple[str, str]
    starts: tuple[Sequence[Run], Sequence[Run]]
    margin: float
    confidence: float

    def ratio(self, weights: Mapping[int, float]) -> Ratio:
        return contrast(*self.starts, weights, self.confidence)


@dataclass(frozen=True)
class _Side:
    """What is known of one variant."""

    verdict: str
    points: Sequence[Mapping[str, Any]]
    profiles: Sequence[Mapping[str, Any]]


def _side(pair: _Pair, loads: Mapping[str, Mapping[int, float]]) -> _Side:
    measured = {one for runs in pair.starts for run in runs for one in run.logs}
    wanted = {one for shares in loads.values() for one in shares}
    points = [_point(pair, one, {one: 1.0}) for one in sorted(measured)]
    words = {point["concurrency"]: point["verdict"] for point in points}
    for concurrency in wanted - measured:
        near = between(concurrency, repeated(*pair.starts))
        if near is not None:
            drawn = {**_point(pair, concurrency, near), "measured": False, "held": []}
            # Public tables are off their lines by 10 % (root mean square), of which the interval
            # knows nothing. Between neighbours that say the same, the sign holds in 65 of 68.
            if any(words[one] != drawn["verdict"] for one in near):
                drawn["verdict"] = UNKNOWN
            points.append(drawn)
    points.sort(key=lambda point: int(point["concurrency"]))
    profiles = [_profile(pair, name, shares) for name, shares in loads.items()]
    # There is no speed to judge where a server is full: a load tells whether that matters.
    full = {one for runs in pair.starts for one in waited_at(runs)}
    counted = [p for p in points if _known(p) and p["concurrency"] not in full]
    return _Side(_overall(counted, profiles, pair.margin), points, profiles)


def _point(pair: _Pair, concurrency: int, weights: Mapping[int, float]) -> dict[str, Any]:
    ratio = pair.ratio(weights)
    held = [
        name
        for name, runs in zip(pair.names, pair.starts)
        if any(concurrency in run.held for run in runs)
    ]
    return {
        "arm": pair.names[1],
        "concurrency": concurrency,
        "ratio": ratio.value,
        "low": ratio.low,
        "high": ratio.high,
        "starts": dict(zip(pair.names, ratio.starts)),
        "verdict": word_for(ratio, pair.margin),
        "measured": not held,
        "held": held,
    }


def _profile(pair: _Pair, name: str, load: Mapping[int, float]) -> dict[str, Any]:
    grid = repeated(*pair.starts)
    held = {one for runs in pair.starts for run in runs for one in run.held}
    weights, covered = spread(load, grid)
    ratio = Ratio(None, None, None, (0, 0))
    if covered >= 1 - _OUTSIDE:
        ratio = pair.ratio(weights)
    return {
        "name": name,
        "load": {str(concurrency): share for concurrency, share in load.items()},
        "covered": covered,
        "measured": sum(share for one, share in load.items() if one in grid and one not in held),
        "arm": pair.names[1],
        "gain": ratio.value,
        "low": ratio.low,
        "high": ratio.high,
        "verdict": word_for(ratio, pair.margin),
    }


def _known(point: Mapping[str, Any]) -> bool:
    """Whether it was measured in both arms, at this concurrency or at the cap below it."""
    return bool(point["measured"] or point["held"])


def _overall(
    measured: Sequence[Mapping[str, Any]], profiles: Sequence[Mapping[str, Any]], margin: float
) -> str:
    """Return the word for a variant: that of the load, else that of all measured points."""
    words = {point["verdict"] for point in measured}
    yours = str(profiles[0]["verdict"]) if profiles[0]["name"] == YOURS else None
    if yours in (KEEP, DROP):
        return yours
    if {KEEP, DROP} <= words:
        return DEPENDS
    if yours is not None:
        return yours
    word = next((one for one in (KEEP, DROP) if one in words), TIE)
    no_harm = all(
        point["low"] is not None
        and (word == DROP or point["low"] >= 1 - margin)
        and (word == KEEP or point["high"] <= 1 + margin)
        for point in measured
    )
    return word if measured and no_harm else UNKNOWN


def _at(side: _Side, word: str) -> list[int]:
    return [
        point["concurrency"] for point in side.points if _known(point) and point["verdict"] == word
    ]


def _order(side: _Side) -> tuple[int, float]:
    """Order variants by their word, then by their gain, the best first."""
    ratios = [p["ratio"] for p in side.points if p["measured"] and p["ratio"] is not None]
    gain = sum(map(math.log, ratios)) / len(ratios) if ratios else 0.0
    if side.profiles and side.profiles[0]["name"] == YOURS and side.profiles[0]["gain"]:
        gain = math.log(side.profiles[0]["gain"])
    return _RANK[side.verdict], -gain


def _beats(
    starts: tuple[Sequence[Run], Sequence[Run]],
    load: Mapping[int, float] | None,
    confidence: float,
) -> bool:
    """Whether the second of two variants is surely faster than the first."""
    grid = repeated(*starts)
    weights, _covered = spread(load or {one: 1.0 / len(grid) for one in grid}, grid)
    low = contrast(*starts, weights, confidence).low if weights else None
    return low is not None and low > 1


def _lost(runs: Sequence[Run], loaded: bool) -> list[str]:
    """Say where an arm has no point at all and why, which more starts alone would not change.

    Where requests wait in a queue nothing is missed, unless a load asks for it or nothing is left.
    """
    good = {one for run in runs for one in run.logs}
    full = set() if loaded or not good else waited_at(runs)
    found: dict[str, tuple[set[int], str]] = {}
    for point in (point for run in runs for point in run.left_out):
        for reason in point["reasons"] if point["concurrency"] not in good | full else ():
            levels, _first_text = found.setdefault(reason["code"], (set(), reason["text"]))
            levels.add(point["concurrency"])
    return [
        f"no point of {runs[0].arm} counts at C={_at_levels(levels)} ({code}): {text}"
        for code, (levels, text) in found.items()
    ]


def _text(
    result: Mapping[str, Any], rivals: Sequence[str], lost: Mapping[str, Sequence[str]]
) -> Iterator[str]:
    """Say it, the most important first."""
    best, baseline = result["variant"], result["baseline"]
    yield _headline(result, [name for name in (baseline, best) if lost.get(name)])
    yield from [line for lines in lost.values() for line in lines][:4]
    if rivals:
        yield f"{best} cannot be told from {', '.join(rivals)}: it only had the better figures"
    others = [f"{arm}: {word}" for arm, word in result["variants"].items() if arm != best]
    if others:
        yield f"other arms: {', '.join(others)}"
    for profile in result["profiles"]:
        if profile["arm"] != best or profile["gain"] is None:
            continue
        drawn = profile["covered"] - profile["measured"]
        yield (
            f"load {profile['name']} ({told_load(profile['load'])}): {_shown(profile, 'gain')}, "
            f"{profile['verdict']}"
            f"{f'; {_percent(drawn)} of it not measured itself' if drawn > 0 else ''}"
        )
    points = [point for point in result["points"] if point["arm"] == best]
    kinds = (
        ("measured", [p for p in points if p["measured"]]),
        ("one at its cap", [p for p in points if p["held"]]),
        ("interpolated between measured points", [p for p in points if not _known(p)]),
    )
    for said, rows in kinds:
        if rows:
            shown = [f"C={p['concurrency']} {_shown(p, 'ratio')}" for p in rows]
            yield f"{said}: {first_of(shown, '; ')}"
    keys: dict[str, list[str]] = {}
    for one in result["unequal"]:
        for arm in one.keys() - {"key", baseline}:
            keys.setdefault(arm, []).append(one["key"])
    for arm, mine in keys.items():
        yield (
            f"{arm} is not comparable with {baseline}, as these differ: {first_of(mine, ', ')}; "
            "make them equal and measure again"
        )
    if result["left_out"]:
        levels: dict[str, set[int]] = {}
        for one in result["left_out"]:
            for reason in one["reasons"]:
                levels.setdefault(reason["code"], set()).add(one["concurrency"])
        codes = [f"{code} at C={_at_levels(found)}" for code, found in sorted(levels.items())]
        yield f"{len(result['left_out'])} points do not count: {'; '.join(codes)}"


def _headline(result: Mapping[str, Any], lost: Sequence[str]) -> str:
    best, baseline, verdict = result["variant"], result["baseline"], result["verdict"]
    percent = _percent(result["margin"])
    if best is None:
        return f"{UNKNOWN}: there is no arm that can be compared with {baseline}"
    gains, losses = (", ".join(map(str, result[key])) for key in ("keep_at", "drop_at"))
    but_gains, but_losses = (
        f" (it {verb} at C={levels})" if levels else ""
        for verb, levels in (("gains", gains), ("loses", losses))
    )
    points = [point for point in result["points"] if point["arm"] == best]
    yours = [one for one in result["profiles"] if (one["name"], one["arm"]) == (YOURS, best)]
    step = "measure more starts"
    if lost:
        step = f"mend why points of {' and '.join(lost)} do not count"
    elif verdict == UNKNOWN and yours and yours[0]["gain"] is None:
        there = {str(point["concurrency"]) for point in points if point["ratio"] is not None}
        missing = ", ".join(one for one in yours[0]["load"] if one not in there)
        return (
            f"{UNKNOWN}: {_percent(1 - yours[0]['covered'])} of the load lies outside of what was "
            f"measured{but_gains}{but_losses}; measure C={missing} too"
        )
    even = {point["verdict"] for point in points if _known(point)} == {verdict}
    at_gains, at_losses = ("" if yours or even else f" at C={levels}" for levels in (gains, losses))
    return {
        KEEP: f"keep {best}: it gains more than {percent} over {baseline}{at_gains}{but_losses}",
        DROP: f"drop {best}: it loses more than {percent} against {baseline}{at_losses}{but_gains}",
        TIE: f"tie: {best} and {baseline} differ by less than {percent}; {baseline} is simpler",
        DEPENDS: f"depends: {best} gains at C={gains} and loses at C={losses}",
        UNKNOWN: f"{UNKNOWN}: the starts do not settle whether {best} gains or loses {percent}"
        f"{but_gains}{but_losses}; {step}",
    }[verdict]


def _shown(row: Mapping[str, Any], key: str) -> str:
    if row[key] is None:
        return "not measured in both"
    if row["low"] is None:
        return f"{_change(row[key])} (too few starts for an interval)"
    return f"{_change(row[key])} ({_change(row['low'])} to {_change(row['high'])})"


def _at_levels(levels: set[int]) -> str:
    return ", ".join(map(str, sorted(levels)))


def _change(ratio: float) -> str:
    return f"{round(100 * (ratio - 1)):+d} %"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
