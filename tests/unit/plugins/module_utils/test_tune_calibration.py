"""Are the verdicts as sure as they say? Servers with a known truth, measured a thousand times.

A start has its own luck, shared by all of its points, and each point has noise of its own; both
multiply the speed. The starts of an arm may be noisier than those of the baseline.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from ansible_collections.gpuhost.inference.plugins.module_utils._tune_verdict import judge
from bench_runs import run

TIMES = 1000
SPEEDS = {1: 60.0, 8: 350.0, 32: 900.0, 128: 1700.0}
GAINS = {1: 1.45, 8: 1.25, 32: 1.02, 128: 0.7}
LOAD = {1: 0.5, 4: 0.2, 16: 0.2, 100: 0.1}  # 4, 16 and 100 lie between measured points
START, POINT = 0.02, 0.015  # standard deviations of logarithms

Truth = Mapping[str, Mapping[int, float]]


def verdicts(
    truth: Truth, starts: int, noise: Mapping[str, float], load: Mapping[int, float] | None
) -> Iterator[dict[str, Any]]:
    """Measure all arms, again and again, and judge."""
    chance = random.Random(20261129)
    for _time in range(TIMES):
        runs = []
        for arm in ("off", *truth):
            more = noise.get(arm, 1.0)
            for start in range(1, starts + 1):
                luck = chance.gauss(0, START * more)
                speeds = {
                    one: speed
                    * truth.get(arm, {}).get(one, 1.0)
                    * math.exp(luck + chance.gauss(0, POINT * more))
                    for one, speed in SPEEDS.items()
                }
                runs.append(run(arm, start, speeds))
        yield judge(runs, load=load)


def true_gain(gains: Mapping[int, float], load: Mapping[int, float]) -> float:
    """Return the gain under a load, from lines drawn by hand between the true points."""
    total = 0.0
    for one, share in load.items():
        low = max(at for at in gains if at <= one)
        high = min(at for at in gains if at >= one)
        part = 0.0 if low == high else math.log(one / low) / math.log(high / low)
        total += share * ((1 - part) * math.log(gains[low]) + part * math.log(gains[high]))
    return math.exp(total)


def holds(row: Mapping[str, Any], true: float) -> bool:
    return bool(row["low"] <= true <= row["high"])


@pytest.mark.parametrize(
    ("starts", "noise"),
    [(2, 1.0), (4, 1.0), (2, 1.5), (4, 2.0)],
    ids=["one block", "two blocks", "one block, MTP noisier", "two blocks, MTP twice as noisy"],
)
def test_intervals(starts: int, noise: float) -> None:
    held: Counter[str] = Counter()
    for verdict in verdicts({"on": GAINS}, starts, {"on": noise}, LOAD):
        for point in verdict["points"]:
            true = true_gain(GAINS, {point["concurrency"]: 1.0})
            held[f"C={point['concurrency']}"] += holds(point, true)
        for profile in verdict["profiles"]:
            load = {int(one): share for one, share in profile["load"].items()}
            held[profile["name"]] += holds(profile, true_gain(GAINS, load))
    print(f"\n{starts} starts, noise x{noise}:", {name: n / TIMES for name, n in held.items()})
    assert {"C=1", "C=8", "C=16", "C=128", "yours", "team"} <= held.keys()
    assert all(0.93 * TIMES <= count <= 0.97 * TIMES for count in held.values())


def test_three_arms() -> None:
    """With two variants, both intervals hold together as often as one alone would."""
    truth = {"on": GAINS, "adaptive": {one: max(1.0, gain) for one, gain in GAINS.items()}}
    together: Counter[str] = Counter()
    for verdict in verdicts(truth, 2, {"adaptive": 1.5}, LOAD):
        held: dict[str, bool] = {}
        for row in (*verdict["points"], *verdict["profiles"]):
            load = {row["concurrency"]: 1.0} if "concurrency" in row else row["load"]
            name = str(row.get("concurrency", row.get("name")))
            true = true_gain(truth[row["arm"]], {int(one): load[one] for one in load})
            held[name] = held.get(name, True) and holds(row, true)
        together.update(name for name, all_held in held.items() if all_held)
    print("\nthree arms:", {name: n / TIMES for name, n in together.items()})
    assert all(0.93 * TIMES <= count <= 0.97 * TIMES for count in together.values())


@pytest.mark.parametrize(
    ("gain", "arms", "load"),
    [(1.0, 1, LOAD), (1.0, 1, None), (1.0, 2, LOAD), (1.05, 1, LOAD), (0.95, 1, LOAD)],
    ids=["no difference", "no load", "three arms", "at +5 %", "at -5 %"],
)
def test_false_calls(gain: float, arms: int, load: Mapping[int, float] | None) -> None:
    """Without a difference, and with one of just the margin, hardly anything is called."""
    truth = {f"on{arm}": dict.fromkeys(SPEEDS, gain) for arm in range(arms)}
    said = Counter(verdict["verdict"] for verdict in verdicts(truth, 4, {}, load))
    print(f"\n{arms} variants, gain {gain}, load {load}:", dict(said))
    assert said["keep"] + said["drop"] + said["depends"] <= 0.05 * TIMES
    if gain == 1.0 and load and arms == 1:  # of two variants one is mostly unsettled
        assert said["tie"] > 0.5 * TIMES


def test_a_real_difference_is_seen() -> None:
    said = Counter(
        one["verdict"] for one in verdicts({"on": dict.fromkeys(SPEEDS, 1.3)}, 2, {}, LOAD)
    )
    print("\ngain 1.3, one block:", dict(said))
    assert said["keep"] > 0.85 * TIMES
    assert said["drop"] == 0
