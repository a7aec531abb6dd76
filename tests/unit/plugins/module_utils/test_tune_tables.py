"""The choice of points against public tables of MTP on and off.

A table has one figure for each arm and concurrency. Points are chosen and lines drawn as if the
servers were measured, and the arm that the line picks is compared with the faster one.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Mapping
from pathlib import Path

from ansible_collections.gpuhost.inference.plugins.module_utils._tune_plan import (
    choose_from,
    first_points,
    more_points,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._tune_stats import between

HERE = Path(__file__).parents[3] / "fixtures" / "mtp_tables"
MOST = 6

Table = Mapping[int, float]
Rule = Callable[[Table], Mapping[int, bool]]


def tables() -> dict[str, dict[int, float]]:
    """Return the logarithm of on over off, by case and concurrency."""
    found: dict[str, dict[int, float]] = {}
    with (HERE / "cases.csv").open(encoding="utf-8") as rows:
        for row in csv.DictReader(rows):
            ratio = math.log(float(row["on"]) / float(row["off"]))
            found.setdefault(row["case"], {})[int(row["concurrency"])] = ratio
    return {name: table for name, table in found.items() if len(table) >= 4}


CASES = tables()


def measured(table: Table) -> list[int]:
    """Choose the points of one table, two rounds of new points at most."""
    choice = choose_from(list(table), None, None)
    points = first_points(choice, MOST)
    for _round in range(2):
        known = {one: table[one] for one in points}
        points = sorted({*points, *more_points(known, points, choice, None, MOST - len(points))})
    return points


def interpolated(table: Table, points: list[int]) -> dict[int, bool]:
    picks = {}
    for one in table:
        near = between(one, points)
        assert near is not None
        picks[one] = sum(share * table[at] for at, share in near.items()) > 0
    return picks


def by_first(table: Table) -> dict[int, bool]:
    return dict.fromkeys(table, table[min(table)] > 0)


RULES: dict[str, Rule] = {
    "always on": lambda table: dict.fromkeys(table, True),
    "always off": lambda table: dict.fromkeys(table, False),
    "what the lowest C says": by_first,
    "C=1, 8, 32, 128 and a line": lambda table: interpolated(
        table, first_points(sorted(table), MOST)
    ),
    "up to six points and a line": lambda table: interpolated(table, measured(table)),
}


def losses(rule: Rule) -> list[float]:
    """Return the share of speed that the rule's picks lose, for each point of each table."""
    lost = []
    for table in CASES.values():
        for one, on in rule(table).items():
            lost.append(1 - math.exp(-abs(table[one])) if on != (table[one] > 0) else 0.0)
    return lost


def slower(lost: list[float]) -> int:
    """Count picks of an arm when the other is more than 5 % faster."""
    return sum(1 / (1 - one) > 1.05 for one in lost)


def test_rules() -> None:
    figures = {name: losses(rule) for name, rule in RULES.items()}
    points = sum(len(measured(table)) for table in CASES.values()) / len(CASES)
    lines = [
        f"{len(CASES)} tables, {len(figures['always on'])} points, "
        f"{points:.1f} measured for each table and arm"
    ]
    for name, lost in figures.items():
        lines.append(
            f"{name:28} wrong {slower(lost):3} ({slower(lost) / len(lost):5.1%}), "
            f"mean loss {sum(lost) / len(lost):5.2%}, worst {max(lost):4.0%}"
        )
    print("\n" + "\n".join(lines))
    assert all(len(measured(table)) <= MOST for table in CASES.values())
    ours = figures["up to six points and a line"]
    assert slower(ours) <= 0.04 * len(ours)
    assert sum(ours) / len(ours) <= 0.005
    for name, lost in figures.items():
        if "line" not in name:
            assert slower(lost) > 3 * slower(ours), name
