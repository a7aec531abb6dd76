"""Which points to measure, in which order of starts, and how many fit into a time."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from ansible_collections.gpuhost.inference.plugins.module_utils._tune_plan import (
    Budget,
    choose_from,
    first_points,
    more_points,
    order,
    plan,
)
from bench_runs import run

ARMS = ["off", "on"]
CAP = "effective_max_running_requests"
POWERS = [1, 2, 4, 8, 16, 32, 64, 128]
LONG = Budget(minutes=600, restart_s=300, point_s=60)


@pytest.mark.parametrize(
    ("levels", "cap", "load", "choice"),
    [
        ((), None, None, POWERS),
        ((), 48, None, [1, 2, 4, 8, 16, 32, 48]),
        ((), 40, None, [1, 2, 4, 8, 16, 40]),
        ((), 1, None, [1]),
        ((), 500, None, POWERS),
        ((64, 1, 16, 1), 48, None, [1, 16, 48]),
        ((1, 10, 200), None, None, [1, 10, 200]),
        ((), None, {2: 0.5, 12: 0.5}, [2, 4, 8, 16]),
        ((), None, {12: 1.0}, [8, 16]),
        ((), 48, {100: 1.0}, [48]),
    ],
)
def test_choice(
    levels: tuple[int, ...], cap: int | None, load: dict[int, float] | None, choice: list[int]
) -> None:
    assert choose_from(levels, cap, load) == choice


@pytest.mark.parametrize(
    ("choice", "most", "points"),
    [
        (POWERS, 6, [1, 8, 32, 128]),
        ([1, 2, 4, 8, 16, 32, 48], 6, [1, 8, 32, 48]),
        ([1, 2, 4, 8, 16], 6, [1, 8, 16]),
        ([1, 4, 16, 64, 256], 6, [1, 4, 16, 64, 256]),
        ([2, 10, 40, 256], 6, [2, 10, 40, 256]),
        ([5], 6, [5]),
        (POWERS, 2, [1, 128]),
        (POWERS, 3, [1, 8, 128]),
    ],
)
def test_first_points(choice: list[int], most: int, points: list[int]) -> None:
    assert first_points(choice, most) == points


def logs(**ratios: float) -> dict[int, float]:
    return {int(one[1:]): math.log(ratio) for one, ratio in ratios.items()}


@pytest.mark.parametrize(
    ("ratios", "load", "count", "points"),
    [
        # changes places between 8 and 32
        (logs(c1=1.5, c8=1.3, c32=0.7, c128=0.6), None, 2, [16]),
        # close at 32: both gaps beside it
        (logs(c1=1.5, c8=1.3, c32=1.09, c128=1.3), None, 2, [64, 16]),
        (logs(c1=1.5, c8=1.3, c32=1.11, c128=1.3), None, 2, []),
        # the wider gap first, then its half in which the line changes sign
        (logs(c1=1.5, c8=0.7, c32=0.7, c128=0.6), None, 2, [4, 2]),
        (logs(c1=1.5, c8=0.7, c32=0.7, c128=0.6), None, 0, []),
        # two changes of place, the load between 8 and 32
        (logs(c1=1.5, c8=0.7, c32=1.4, c128=1.3), {12: 0.9, 4: 0.1}, 1, [16]),
        (logs(c1=1.5, c8=0.7, c32=1.4, c128=1.3), {12: 0.1, 4: 0.9}, 1, [4]),
        (logs(c1=1.5, c8=0.7, c32=1.4, c128=1.3), {1: 1.0}, 2, []),
        # nothing known: the widest gaps
        (None, None, 2, [4, 64]),
        # measured in one arm alone so far
        ({}, None, 2, []),
    ],
)
def test_more_points(
    ratios: dict[int, float] | None, load: dict[int, float] | None, count: int, points: list[int]
) -> None:
    assert more_points(ratios, [1, 8, 32, 128], POWERS, load, count) == points


def test_order() -> None:
    assert order(ARMS, 1) == ["off", "on", "on", "off"]
    assert order(ARMS, 2) == ["off", "on", "on", "off", "on", "off", "off", "on"]
    assert order(["a", "b", "c"], 2) == [*"abccba", *"bcaacb"]


@pytest.mark.parametrize("arms", [2, 3, 4])
@pytest.mark.parametrize("blocks", [1, 2, 3, 4])
def test_a_steady_drift_favours_no_arm(arms: int, blocks: int) -> None:
    names = [str(arm) for arm in range(arms)]
    starts = order(names, blocks)
    means = {
        name: sum(at for at, arm in enumerate(starts) if arm == name) / starts.count(name)
        for name in names
    }
    assert len(set(means.values())) == 1
    assert {starts.count(name) for name in names} == {2 * blocks}


def seconds(starts: int, points: int, budget: Budget = LONG) -> float:
    return budget.seconds([points] * starts) / 60


@pytest.mark.parametrize(
    ("minutes", "blocks", "points"),
    [
        (seconds(4, 4) - 0.1, 0, [1, 8, 32, 128]),
        (seconds(4, 4), 1, [1, 8, 32, 128]),
        (seconds(4, 5), 1, [1, 4, 8, 32, 128]),
        (seconds(4, 6), 1, [1, 4, 8, 32, 64, 128]),
        (seconds(8, 4), 2, [1, 8, 32, 128]),
        (seconds(8, 6), 2, [1, 8, 32, 128]),
        (seconds(16, 6), 4, [1, 8, 32, 128]),
        (9999, 4, [1, 8, 32, 128]),
    ],
)
def test_blocks_that_fit(minutes: float, blocks: int, points: list[int]) -> None:
    found = plan([], ARMS, Budget(minutes, LONG.restart_s, LONG.point_s))
    assert (found["blocks"], found["concurrencies"]) == (blocks, points)
    assert found["enough"] is (blocks > 0)
    assert not found["done"]
    assert len(found["next"]) == 4 * blocks
    if blocks:
        assert found["minutes"] <= minutes + 1
    json.dumps(found, allow_nan=False)


def test_not_enough_time_says_how_much_is_needed() -> None:
    found = plan([], ARMS, Budget(20, 300, 60))
    assert found["next"] == []
    assert found["minutes"] == 36
    assert found["text"] == [
        "not enough time: one block of two starts an arm at C=1, 8, 32, 128 needs 36 minutes, and "
        "20 are left"
    ]


def test_starts_are_numbered_in_each_arm() -> None:
    found = plan([], ["off", "on", "adaptive"], Budget(600, 300, 60, blocks=1))
    assert [(one["arm"], one["start"]) for one in found["next"]] == [
        ("off", 1),
        ("on", 1),
        ("adaptive", 1),
        ("adaptive", 2),
        ("on", 2),
        ("off", 2),
    ]


FIRST: list[dict[str, Any]] = [
    run("off", 1, {1: 60.0, 8: 350.0, 32: 900.0, 128: 1700.0}),
    run("on", 1, {1: 90.0, 8: 500.0, 32: 800.0, 128: 1100.0}),
]


def test_new_points_come_while_they_can_still_be_repeated() -> None:
    found = plan(FIRST, ARMS, LONG)
    assert found["concurrencies"] == [1, 8, 16, 32, 128]
    assert [one["arm"] for one in found["next"]][:3] == ["on", "off", "on"]
    assert (found["next"][0]["start"], found["next"][1]["start"]) == (2, 2)


@pytest.mark.parametrize(("off", "new"), [(2, True), (3, False)])
def test_no_new_point_that_an_arm_cannot_repeat(off: int, new: bool) -> None:
    runs = [run("off", start, {1: 60.0, 8: 350.0, 32: 900.0, 128: 1700.0}) for start in range(off)]
    runs += [run("on", start, {1: 90.0, 8: 500.0, 32: 800.0, 128: 1100.0}) for start in range(2)]
    found = plan(runs, ARMS, Budget(600, 300, 60, blocks=2))
    assert (found["concurrencies"] == [1, 8, 16, 32, 128]) is new


def test_no_new_point_with_one_block() -> None:
    found = plan(FIRST, ARMS, Budget(600, 300, 60, blocks=1))
    assert found["concurrencies"] == [1, 8, 32, 128]
    assert [one["arm"] for one in found["next"]] == ["on", "off"]


def test_all_points_of_earlier_starts_are_repeated() -> None:
    runs = [run("off", 1, {1: 60.0, 2: 100.0, 8: 350.0, 32: 900.0, 128: 1700.0})]
    found = plan(runs, ARMS, Budget(600, 300, 60, blocks=1))
    assert found["concurrencies"] == [1, 2, 8, 32, 128]


def test_done() -> None:
    runs = [run(arm, start, {1: 60.0, 128: 900.0}) for arm in ARMS for start in (1, 2)]
    found = plan(runs, ARMS, Budget(10, 300, 60))
    assert (found["done"], found["enough"], found["next"]) == (True, True, [])
    assert found["text"] == ["all that fits is measured; blocks: 1"]


def test_a_start_that_failed_is_repeated() -> None:
    runs = [FIRST[0], run("on", 1, {}, rejected={1: "failed-requests"})]
    found = plan(runs, ARMS, Budget(600, 300, 60, blocks=1))
    assert found["starts"] == {"off": 1, "on": 0}
    assert [(one["arm"], one["start"]) for one in found["next"]] == [
        ("on", 2),
        ("on", 3),
        ("off", 2),
    ]


@pytest.mark.parametrize("code", ["queued", "above-cap"])
def test_what_waits_in_the_queue_is_not_measured_again(code: str) -> None:
    runs = [FIRST[0], run("on", 1, {1: 90.0, 8: 500.0, 32: 800.0}, rejected={128: code})]
    found = plan(runs, ARMS, LONG)
    assert found["concurrencies"] == [1, 8, 16, 32, 64]
    found = plan(runs, ARMS, LONG, levels=[1, 8, 100, 256])
    assert (found["concurrencies"], found["skipped"]) == ([1, 8, 100], [256])


def test_the_runs_tell_how_many_requests_run_at_once() -> None:
    apart = {"effective_max_running_requests": 48}
    runs = [FIRST[0], run("on", 1, {1: 90.0, 8: 500.0, 32: 800.0}, apart=apart)]
    found = plan(runs, ARMS, LONG, max_concurrency=200)
    assert found["max_concurrency"] == 48
    assert found["concurrencies"] == [1, 8, 16, 32, 48]


def test_levels_above_the_cap_are_told() -> None:
    found = plan([], ARMS, LONG, levels=[1, 16, 64, 128], max_concurrency=48)
    assert found["concurrencies"] == [1, 16, 48]
    assert found["skipped"] == [64, 128]
    assert "C=64, 128, as requests would wait" in found["text"][1]


def test_a_load_of_any_weights_is_shown_as_shares() -> None:
    found = plan([], ARMS, LONG, load={1: 18, 8: 6})
    assert found["text"][-1] == "for the load C 1: 75 %, 8: 25 %"
    assert found == plan([], ARMS, LONG, load={"1": 0.75, "8": 0.25})


def test_levels_above_the_cap_of_an_arm_are_one_point() -> None:
    runs = [
        run("off", 1, {1: 60.0, 8: 350.0, 45: 900.0}, apart={CAP: 45}),
        run("on", 1, {1: 90.0, 8: 500.0, 24: 700.0}, apart={CAP: 24}),
    ]
    levels = [1, 8, 32, 64, 128]
    found = plan(runs, ARMS, Budget(600, 300, 60, blocks=1), levels=levels)
    assert found["concurrencies"] == [1, 8, 32, 45]
    assert [(one["arm"], one["concurrencies"]) for one in found["next"]] == [
        ("on", [1, 8, 24]),
        ("off", [1, 8, 32, 45]),
    ]
    assert found["minutes"] == (300 + 3 * 60 + 300 + 4 * 60) / 60
    assert found["text"][0] == "next: on off, each at C=1, 8, 32, 45, on up to 24; about 17 minutes"
    # and so much time is enough
    assert plan(runs, ARMS, Budget(17, 300, 60, blocks=1), levels=levels)["enough"]
    assert not plan(runs, ARMS, Budget(16.9, 300, 60, blocks=1), levels=levels)["enough"]


def test_no_point_is_measured_in_vain_when_the_cap_is_lower_than_the_flag() -> None:
    """Of the powers of two below 45, 32 would not be chosen any more."""
    off = run("off", 1, {1: 60.0, 8: 350.0, 32: 800.0, 45: 900.0}, apart={CAP: 45})
    assert plan([], ARMS, LONG, max_concurrency=48)["concurrencies"] == [1, 8, 32, 48]
    assert plan([off], ARMS, LONG, max_concurrency=48)["concurrencies"] == [1, 8, 32, 48]
    on = run("on", 1, {1: 90.0, 8: 525.0, 24: 980.0}, apart={CAP: 24})
    found = plan([off, on], ARMS, Budget(600, 300, 60, blocks=1), max_concurrency=48)
    assert found["concurrencies"] == [1, 8, 32, 45]


def test_an_arm_that_runs_few_does_not_cut_those_that_were_not_started() -> None:
    runs = [run("on", 1, {1: 90.0, 8: 500.0, 24: 700.0}, apart={CAP: 24})]
    found = plan(runs, ARMS, LONG, max_concurrency=48)
    assert (found["max_concurrency"], found["concurrencies"]) == (48, [1, 8, 32, 48])


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (([], ["off"], LONG), {}, "the arms are off: name two"),
        (([], ["on", "on"], LONG), {}, "the arms are on, on"),
        (([], ["off", "key"], LONG), {}, "an arm cannot be named key"),
        (([run("x", 1, {1: 1.0})], ARMS, LONG), {}, "a run is of the arm x"),
        (([], ARMS, LONG), {"levels": [0, 1]}, "0 is no level"),
        (([], ARMS, LONG), {"max_concurrency": 0}, "max_concurrency is 0"),
    ],
)
def test_bad_input(arguments: tuple[Any, ...], options: dict[str, Any], message: str) -> None:
    with pytest.raises(GpuHostError, match=message):
        plan(*arguments, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"minutes": math.nan},
        {"minutes": -1},
        {"restart_s": math.inf},
        {"point_s": -1},
        {"points": 1},
        {"blocks": 0},
    ],
)
def test_bad_budget(options: dict[str, Any]) -> None:
    with pytest.raises(GpuHostError, match=f"{next(iter(options))} is "):
        Budget(**{"minutes": 60, "restart_s": 300, "point_s": 60, **options})


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"equal": {"sglang": "0.5.24"}}, "differ in sglang"),
        ({"apart": {"speculative_num_steps": 1}}, "differ in speculative_num_steps"),
        ({"host": "other"}, "differ in host"),
    ],
)
def test_starts_of_two_settings_are_no_repeats(other: dict[str, Any], message: str) -> None:
    here = {"apart": {"speculative_num_steps": 3}, "equal": {"sglang": "0.5.23"}, "host": "h"}
    starts = [
        {**run("on", number, {1: 100.0}), **here, **(other if number == 2 else {})}
        for number in (1, 2)
    ]
    with pytest.raises(GpuHostError, match=f"the starts of the arm on {message}"):
        plan(starts, ARMS, LONG)
    # how many tokens fit differs from start to start
    apart = {"speculative_num_steps": 3, "kv_tokens": 7}
    assert plan([starts[0], {**starts[1], **here, "apart": apart}], ARMS, LONG)["enough"]
