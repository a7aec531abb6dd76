# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.

"""What to measure next so that a verdict is worth its time.

Four points and a straight line between their logarithms decide well. A fifth and sixth go where
the arms are close or change places. The arms are started in blocks that read the same from both
ends (off, on, on, off), so that a host that slowly warms up favours no arm. The number of blocks
follows from the time alone, never from the figures: whoever stops when he likes what he sees is
wrong more often than he says.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from ansible_collections.gpuhost.inference.plugins.module_utils._tune_runs import (
    Run,
    check_arms,
    differences,
    hold,
    read_load,
    read_runs,
    told_load,
    waited_at,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._tune_stats import between

FIRST = (1, 8, 32, 128)
CLOSE = math.log(1.1)  # arms whose speeds differ by less are close


@dataclass(frozen=True)
class Budget:
    """What measuring may cost.

    Attributes:
        minutes: that are left from now on.
        restart_s: seconds from stopping a server until it is ready in the other arm.
        point_s: seconds that one point takes with its warm-up, the mean of all so far or a guess.
        points: most concurrencies for each arm.
        blocks: most blocks, two starts of every arm each.
    """

    minutes: float
    restart_s: float
    point_s: float
    points: int = 6
    blocks: int = 4

    def __post_init__(self) -> None:
        """Refuse what cannot be planned with."""
        for name, least in (
            ("minutes", 0),
            ("restart_s", 0),
            ("point_s", 0),
            ("points", 2),
            ("blocks", 1),
        ):
            value = getattr(self, name)
            if not least <= value < math.inf:
                raise GpuHostError(f"{name} is {value}: it must be a number from {least} on")

    def seconds(self, points: Sequence[int]) -> float:
        """Return how long starts take.

        Args:
            points: how many each of them has.
        """
        return sum(self.restart_s + count * self.point_s for count in points)


def plan(
    runs: object,
    arms: Sequence[str],
    budget: Budget,
    *,
    levels: Sequence[int] = (),
    max_concurrency: int | None = None,
    load: object = None,
    prompts: str | None = None,
) -> dict[str, Any]:
    """Return the starts that are to come, each with the concurrencies to measure.

    Args:
        runs: results of `sglang_benchmark` so far.
        arms: names of all arms, the baseline first.
        budget: time that is left and what is spent on what.
        levels: concurrencies to choose from; by default the powers of two up to 128.
        max_concurrency: requests that the servers run at once, in the arm that runs most. Of the
            arms that were started the runs tell it.
        load: share of the time by concurrency, `None` when it is not known.
        prompts: kind of prompts whose points count. By default the only kind, or `mixed`.

    Raises:
        GpuHostError: the runs, arms or levels are not what they should be.
    """
    if len(set(arms)) != len(arms) or len(arms) < 2:
        raise GpuHostError(f"the arms are {', '.join(arms)}: name two or more, the baseline first")
    check_arms(arms)
    shares, read = read_load(load), hold(read_runs(runs, prompts))
    strange = sorted({run.arm for run in read} - set(arms))
    if strange:
        raise GpuHostError(f"a run is of the arm {strange[0]}, not among the arms: name it too")
    for arm in arms:
        _refuse_mixture(arm, [run for run in read if run.arm == arm])
    caps = _caps(read, arms, max_concurrency)
    cap = max(caps.values(), default=None)
    choice = choose_from(levels, cap, shares, min(waited_at(read), default=None))
    skipped = sorted({level for level in levels if level > choice[-1]}) if not shares else []
    done = {arm: sum(1 for run in read if run.arm == arm and run.logs) for arm in arms}
    base = first_points(choice, budget.points)
    before = {one for run in read for one in run.logs.keys() - run.held} & set(choice)
    if not levels:  # the choice changes with the cap, and what an earlier one had is worth a repeat
        before |= {one for run in read for one in _own(run) if choice[0] < one < choice[-1]}
    points = sorted({*base, *before})
    # An arm that runs fewer requests at once is measured at its own cap instead
    spared = {arm: len(points) - len(_levels(points, caps.get(arm))) for arm in arms}
    blocks, room = _fit(done, budget, spared, (len(points), min(budget.points, len(choice))))
    coming = _coming(arms, done, max(1, blocks))
    if blocks == 1 and not read:
        points = sorted({*points, *more_points(None, points, choice, shares, room - len(points))})
    elif blocks > 1 and all(coming.count(arm) > 1 for arm in arms):
        ratios = [_ratios(read, arms[0], arm) for arm in arms[1:]]
        for one in ratios:
            wanted = more_points(one, points, choice, shares, room - len(points))
            points = sorted({*points, *wanted})
    levels_of = {arm: _levels(points, caps.get(arm)) for arm in arms}
    seconds = budget.seconds([len(levels_of[arm]) for arm in coming])
    enough = blocks > 0
    numbers = {arm: max((run.start for run in read if run.arm == arm), default=0) for arm in arms}
    following = []
    for arm in coming if enough else []:
        numbers[arm] += 1
        following.append({"arm": arm, "start": numbers[arm], "concurrencies": levels_of[arm]})
    result = {
        "next": following,
        "done": enough and not coming,
        "enough": enough,
        "blocks": blocks,
        "starts": done,
        "concurrencies": points,
        "max_concurrency": cap,
        "skipped": skipped,
        "minutes": math.ceil(seconds / 60),
    }
    return {**result, "text": [*_text(result, budget), *_load_text(shares)]}


def _refuse_mixture(arm: str, runs: Sequence[Run]) -> None:
    """Refuse starts of one arm that are not of one setting: they would count as its repeats."""

    def setting(run: Run) -> dict[str, Any]:
        told = {key: value for key, value in run.apart.items() if key.startswith("speculative_")}
        return {**run.how, **run.equal, **told}

    found = differences({arm: runs}, setting)
    if found:
        key, values = found[0]["key"], ", ".join(map(str, found[0][arm]))
        raise GpuHostError(
            f"the starts of the arm {arm} differ in {key} ({values}), so they are of two "
            "measurements: move those away that are not of this one"
        )


def _caps(runs: Sequence[Run], arms: Sequence[str], asked: int | None) -> dict[str, int]:
    """Return how many requests each arm runs at once, as far as that is known.

    Up to the highest of them there is something to measure. A server that runs fewer is measured
    up to its own limit, see `hold`.
    """
    if asked is not None and asked < 1:
        raise GpuHostError(f"max_concurrency is {asked}: a server runs one request or more")
    caps = {}
    for arm in arms:
        mine = [run.cap for run in runs if run.arm == arm]
        told = max([cap for cap in mine if cap is not None], default=None if mine else asked)
        if told is not None:
            caps[arm] = told
    return caps


def _own(run: Run) -> set[int]:
    """Return what a start measured below its cap, which is nothing to the other arms."""
    return {one for one in run.logs if run.cap is None or one < run.cap}


def _levels(points: Sequence[int], cap: int | None) -> list[int]:
    """Return what is measured in an arm for these points, each once."""
    return sorted({point if cap is None else min(point, cap) for point in points})


def choose_from(
    levels: Sequence[int],
    cap: int | None,
    load: Mapping[int, float] | None,
    waited: int | None = None,
) -> list[int]:
    """Return the concurrencies that may be measured, ascending.

    Args:
        levels: that the user wants; when empty, the powers of two up to 128, and the cap itself.
        cap: highest that the servers run at once.
        load: what lies outside of it needs no point.
        waited: lowest at which requests were seen to wait.
    """
    if any(level < 1 for level in levels):
        raise GpuHostError(f"{min(levels)} is no level of concurrency: name numbers from 1 on")
    choice = sorted(set(levels))
    if not choice:
        top = min(cap or 128, 128)
        choice = [*(2**k for k in range(7) if 2**k * 1.5 <= top), top]
    # a server is as fast for more clients as at its cap, so that stands for them
    most = [level if cap is None else min(level, cap) for level in choice]
    fitting = sorted({level for level in most if waited is None or level < waited})
    if not fitting:
        raise GpuHostError(
            f"even at the lowest level, {choice[0]}, requests wait in the queue of a server: name "
            "lower levels, or raise max_running_requests"
        )
    if not load:
        return fitting
    low = max((level for level in fitting if level <= min(load)), default=fitting[0])
    high = min((level for level in fitting if level >= max(load)), default=fitting[-1])
    return [level for level in fitting if low <= level <= high]


def first_points(choice: Sequence[int], most: int) -> list[int]:
    """Return where to begin: both ends, and what is nearest to 1, 8, 32 and 128.

    Args:
        choice: concurrencies that may be measured, ascending.
        most: how many.
    """
    near = [min(choice, key=lambda one: abs(math.log(one / level))) for level in FIRST]
    return sorted(list(dict.fromkeys([choice[0], choice[-1], *near]))[:most])


def more_points(
    ratios: Mapping[int, float] | None,
    measured: Sequence[int],
    choice: Sequence[int],
    load: Mapping[int, float] | None,
    count: int,
) -> list[int]:
    """Return where else to measure, the most useful first.

    A gap between two neighbours is of use when the arms change places in it or are close at one of
    its ends, and the more of the load lies in it. Among equals the higher concurrency is taken:
    more users wait there.

    Args:
        ratios: logarithm of the ratio of the arms where it is known. With `None`, before anything
            is measured, every gap is of use.
        measured: concurrencies that are measured anyway, ascending.
        choice: concurrencies that may be measured.
        load: share of the time by concurrency; without one all of the choice weighs the same.
        count: most points to add.
    """
    known = None if ratios is None else dict(ratios)
    points = sorted(measured)
    added: list[int] = []
    while len(added) < count:
        gaps = [
            (_use(known, pair, choice, load), *pair)
            for pair in zip(points, points[1:])
            if any(pair[0] < one < pair[1] for one in choice)
        ]
        use, low, high = max(gaps, default=(0.0, 0, 0))
        if use <= 0:
            break
        best = _best(low, high, choice, load)
        near = None if known is None else between(best, sorted(known))
        if known is not None and near is not None:
            known[best] = sum(share * known[one] for one, share in near.items())
        added.append(best)
        points = sorted([*points, best])
    return added


def _best(low: int, high: int, choice: Sequence[int], load: Mapping[int, float] | None) -> int:
    """Return the level of a gap that is nearest to the load in it, or to its middle."""
    inside = {one: share for one, share in (load or {}).items() if low < one < high}
    aim = math.log(low * high) / 2
    if inside:
        aim = sum(share * math.log(one) for one, share in inside.items()) / sum(inside.values())
    levels = (one for one in choice if low < one < high)
    return min(levels, key=lambda one: (round(abs(math.log(one) - aim), 9), -one))


def _use(
    ratios: Mapping[int, float] | None,
    gap: tuple[int, int],
    choice: Sequence[int],
    load: Mapping[int, float] | None,
) -> float:
    low, high = gap
    weight = (
        sum(share for one, share in load.items() if low < one < high)
        if load
        else float(sum(1 for one in choice if low < one < high))
    )
    if ratios is None:
        return weight
    if low not in ratios or high not in ratios:
        return 0.0
    if ratios[low] * ratios[high] < 0:
        return 2 * weight
    return weight if min(abs(ratios[low]), abs(ratios[high])) <= CLOSE else 0.0


def _ratios(runs: Sequence[Run], baseline: str, arm: str) -> dict[int, float]:
    """Return the logarithm of the ratio where both arms have a point, however often."""
    means = []
    for name in (baseline, arm):
        logs: dict[int, list[float]] = {}
        for run in runs:
            if run.arm == name:
                for concurrency, value in run.logs.items():
                    logs.setdefault(concurrency, []).append(value)
        means.append({concurrency: fmean(values) for concurrency, values in logs.items()})
    return {one: means[1][one] - means[0][one] for one in sorted(means[0].keys() & means[1].keys())}


def _fit(
    done: Mapping[str, int], budget: Budget, spared: Mapping[str, int], points: tuple[int, int]
) -> tuple[int, int]:
    """Return how many blocks fit and how many points a start has room for.

    Two blocks of the first points tell more than one with all points: the interval of two starts
    an arm is 1.8 times as wide as that of four from its t alone.

    Args:
        done: starts by arm.
        budget: time that is left.
        spared: points that an arm does without, as they lie above its cap.
        points: those of a start at first, and at most.
    """
    base, most = points
    for least, count in ((2, max(points)), (1, base)):
        blocks = _blocks(done, budget, spared, count)
        if blocks >= least:
            room = count
            while room < most and _blocks(done, budget, spared, room + 1) >= blocks:
                room += 1
            return blocks, room
    return 0, base


def _blocks(done: Mapping[str, int], budget: Budget, spared: Mapping[str, int], points: int) -> int:
    fitting = 0
    for blocks in range(1, budget.blocks + 1):
        starts = [
            points - spared[arm] for arm, n in done.items() for _start in range(n, 2 * blocks)
        ]
        if budget.seconds(starts) <= budget.minutes * 60:
            fitting = blocks
    return fitting


def order(arms: Sequence[str], blocks: int) -> list[str]:
    """Return the order of starts, in blocks that read the same from both ends.

    Args:
        arms: names.
        blocks: how many. Each begins with the next arm, so every arm is first and last in turn.
    """
    starts: list[str] = []
    for block in range(blocks):
        turn = block % len(arms)
        half = [*arms[turn:], *arms[:turn]]
        starts += [*half, *reversed(half)]
    return starts


def _coming(arms: Sequence[str], done: Mapping[str, int], blocks: int) -> list[str]:
    left = dict(done)
    coming = []
    for arm in order(arms, blocks):
        if left[arm]:
            left[arm] -= 1
        else:
            coming.append(arm)
    return coming


def _load_text(shares: Mapping[int, float] | None) -> list[str]:
    """Show which load the plan is for: weights of any sum were given."""
    return [f"for the load {told_load(shares)}"] if shares else []


def _text(result: Mapping[str, Any], budget: Budget) -> list[str]:
    levels = ", ".join(map(str, result["concurrencies"]))
    lines = []
    if not result["enough"]:
        lines.append(
            f"not enough time: one block of two starts an arm at C={levels} needs "
            f"{result['minutes']} minutes, and {budget.minutes:g} are left"
        )
    elif result["done"]:
        lines.append(f"all that fits is measured; blocks: {result['blocks']}")
    else:
        arms = " ".join(start["arm"] for start in result["next"])
        fewer = {one["arm"]: one["concurrencies"] for one in result["next"]}
        held = [
            f", {arm} up to {mine[-1]}"
            for arm, mine in fewer.items()
            if mine != result["concurrencies"]
        ]
        lines.append(
            f"next: {arms}, each at C={levels}{''.join(held)}; about {result['minutes']} minutes"
        )
    if result["skipped"]:
        lines.append(
            f"not measured: C={', '.join(map(str, result['skipped']))}, as requests would wait in "
            "the queue of a server"
        )
    return lines
