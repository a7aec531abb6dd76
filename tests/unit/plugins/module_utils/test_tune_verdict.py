"""Verdicts on runs: words, fairness, loads, several variants."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from ansible_collections.gpuhost.inference.plugins.module_utils._tune_stats import Ratio
from ansible_collections.gpuhost.inference.plugins.module_utils._tune_verdict import (
    Rules,
    judge,
    word_for,
)
from bench_runs import run

OFF = {1: 60.0, 8: 350.0, 32: 900.0, 128: 1700.0}


def starts(
    arm: str, gains: Mapping[int, float], noise: Sequence[float] = (0.99, 1.01)
) -> list[Any]:
    """Return starts of an arm; each noise is that of one start."""
    return [
        run(arm, start, {one: OFF[one] * gain * luck for one, gain in gains.items()})
        for start, luck in enumerate(noise, 1)
    ]


SAME = dict.fromkeys(OFF, 1.0)


@pytest.mark.parametrize(
    ("low", "high", "word"),
    [
        (1.051, 1.4, "keep"),
        (1.05, 1.4, "not-enough-data"),
        (0.7, 0.949, "drop"),
        (0.7, 0.95, "not-enough-data"),
        (0.95, 1.05, "tie"),
        (0.949, 1.05, "not-enough-data"),
        (0.95, 1.051, "not-enough-data"),
        (0.5, 2.0, "not-enough-data"),
        (None, None, "not-enough-data"),
    ],
)
def test_words(low: float | None, high: float | None, word: str) -> None:
    assert word_for(Ratio(1.0, low, high, (2, 2)), 0.05) == word


@pytest.mark.parametrize(
    ("gains", "verdict", "winner", "keep_at", "drop_at"),
    [
        ({1: 1.5, 8: 1.4, 32: 1.3, 128: 1.2}, "keep", "on", [1, 8, 32, 128], []),
        ({1: 1.5, 8: 1.4, 32: 1.3, 128: 1.0}, "keep", "on", [1, 8, 32], []),
        ({1: 0.6, 8: 0.7, 32: 0.7, 128: 0.8}, "drop", "off", [], [1, 8, 32, 128]),
        ({1: 1.5, 8: 1.4, 32: 1.0, 128: 0.6}, "depends", None, [1, 8], [128]),
        ({1: 1.0, 8: 1.0, 32: 1.0, 128: 1.0}, "tie", "off", [], []),
        ({1: 1.5, 8: 1.4, 32: 1.3, 128: 0.95}, "not-enough-data", None, [1, 8, 32], []),
    ],
)
def test_overall(
    gains: dict[int, float],
    verdict: str,
    winner: str | None,
    keep_at: list[int],
    drop_at: list[int],
) -> None:
    noise = (0.999, 1.001) if verdict == "tie" or gains[128] == 1.0 else (0.99, 1.01)
    found = judge([*starts("off", SAME, noise), *starts("on", gains, noise)])
    assert (found["verdict"], found["winner"]) == (verdict, winner)
    assert (found["keep_at"], found["drop_at"]) == (keep_at, drop_at)
    assert found["text"][0].startswith(verdict)
    assert len(found["text"]) <= 10
    json.dumps(found, allow_nan=False)


FALLING = {1: 1.5, 8: 1.4, 32: 1.0, 128: 0.6}


@pytest.mark.parametrize(
    ("load", "verdict"),
    [
        ({1: 0.9, 8: 0.1}, "keep"),
        ({"1": 3, "8": 1}, "keep"),
        ({128: 1}, "drop"),
        ({1: 55, 128: 45}, "depends"),
        ({1: 0.5, 256: 0.5}, "depends"),
        ({1: 0.97, 256: 0.03}, "keep"),
        ({16: 1.0}, "keep"),
    ],
)
def test_load(load: dict[Any, float], verdict: str) -> None:
    found = judge([*starts("off", SAME), *starts("on", FALLING)], load=load)
    assert found["verdict"] == verdict
    yours = found["profiles"][0]
    assert yours["name"] == "yours"
    assert sum(yours["load"].values()) == pytest.approx(1.0)
    assert set(yours["load"]) == {str(one) for one in load}


def test_load_gain_is_the_mean_over_the_time() -> None:
    found = judge([*starts("off", SAME), *starts("on", FALLING)], load={1: 0.5, 16: 0.5})
    yours = found["profiles"][0]
    assert yours["gain"] == pytest.approx((1.5 * (1.4 * 1.0) ** 0.5) ** 0.5)
    assert yours["low"] < yours["gain"] < yours["high"]


def test_a_drawn_point_needs_neighbours_that_say_the_same() -> None:
    found = judge([*starts("off", SAME), *starts("on", FALLING)], load={4: 0.5, 16: 0.25, 64: 0.25})
    drawn = {p["concurrency"]: p["verdict"] for p in found["points"] if not p["measured"]}
    assert drawn == {4: "keep", 16: "not-enough-data", 64: "not-enough-data"}
    assert (found["profiles"][0]["measured"], found["profiles"][0]["covered"]) == (0, 1)
    assert any("; 100 % of it not measured itself" in line for line in found["text"])


def test_no_word_outside_of_what_was_measured() -> None:
    found = judge(
        [
            *starts("off", {8: 1.0, 32: 1.0}),
            *starts("on", {8: 1.3, 32: 1.3}),
        ],
        load={1: 0.5, 8: 0.5},
    )
    assert found["verdict"] == "not-enough-data"
    assert [point["concurrency"] for point in found["points"]] == [8, 16, 32]
    assert [point["measured"] for point in found["points"]] == [True, False, True]
    profiles = {one["name"]: (one["covered"], one["verdict"]) for one in found["profiles"]}
    assert profiles == {
        "yours": (0.5, "not-enough-data"),
        "single-user": (0.0, "not-enough-data"),
        "team": (1.0, "keep"),
        "batch": (0.0, "not-enough-data"),
    }


def test_one_start_each_is_not_enough() -> None:
    found = judge([*starts("off", SAME, (1.0,)), *starts("on", FALLING, (1.0,))])
    assert found["verdict"] == "not-enough-data"
    assert found["points"][0]["ratio"] == pytest.approx(1.5)
    assert found["points"][0]["low"] is None
    assert found["points"][0]["starts"] == {"off": 1, "on": 1}


@pytest.mark.parametrize(
    ("change", "key", "values"),
    [
        ({"equal": {"mem_fraction_static": 0.9}}, "mem_fraction_static", (0.85, 0.9)),
        ({"equal": {"cuda_graph": [1, 2]}}, "cuda_graph", (None, [1, 2])),
        ({"equal": {"only_here": 1}}, "only_here", (None, 1)),
        (
            {"client": {"name": "rust", "version": "0.5.23"}},
            "benchmark client",
            ("python 0.5.23", "rust 0.5.23"),
        ),
        ({"host": "gpu2"}, "host", ("gpu1", "gpu2")),
        (
            {"corpus": {"sha256": "cd" * 32, "kinds": []}},
            "prompts (sha256)",
            ("ab" * 32, "cd" * 32),
        ),
    ],
)
def test_unequal_arms_are_not_compared(
    change: dict[str, Any], key: str, values: tuple[Any, Any]
) -> None:
    on = [run("on", start, {1: 100.0 + start}, **change) for start in (1, 2)]
    found = judge([*starts("off", {1: 1.0}), *on])
    assert found["verdict"] == "not-enough-data"
    assert found["winner"] is None
    assert found["points"] == []
    assert found["unequal"] == [{"key": key, "off": values[0], "on": values[1]}]
    assert any(key in line for line in found["text"])


def test_answers_of_another_length_are_not_compared() -> None:
    runs = [*starts("off", {1: 1.0}), *starts("on", {1: 1.5})]
    for one in runs[2:]:
        one["points"][0]["output_tokens"] = {"asked": 512, "median": 512}
    found = judge(runs)
    assert found["unequal"] == [{"key": "output tokens asked", "off": 256, "on": 512}]
    assert found["verdict"] == "not-enough-data"


def test_what_a_setting_brings_with_it_may_differ() -> None:
    on = [
        run("on", start, {1: 99.0}, equal={"disable_overlap_schedule": True, "model": "m2"})
        for start in (1, 2)
    ]
    runs = [*starts("off", {1: 1.0}), *on]
    found = judge(runs, may_differ=["disable_overlap_schedule"])
    assert [one["key"] for one in found["unequal"]] == ["model"]
    found = judge(runs, may_differ=["disable_overlap_schedule", "model", "host"])
    assert found["verdict"] == "keep"
    assert [one["key"] for one in found["apart"]] == [
        "disable_overlap_schedule",
        "kv_tokens",
        "model",
    ]
    on[0]["host"] = "gpu2"
    assert judge(runs, may_differ=["disable_overlap_schedule", "model", "host"])["unequal"]


def test_one_start_of_an_arm_that_differs() -> None:
    on = [run("on", 1, {1: 100.0}), run("on", 2, {1: 101.0}, equal={"version": "0.5.22"})]
    found = judge([*starts("off", {1: 1.0}), *on])
    assert found["verdict"] == "not-enough-data"
    assert found["unequal"] == [{"key": "version", "off": "0.5.23", "on": ["0.5.23", "0.5.22"]}]


def test_rejected_points_are_left_out_and_listed() -> None:
    runs = [
        *starts("off", SAME),
        run("on", 1, {1: 90.0, 8: 500.0}, rejected={128: "queued"}),
        run("on", 2, {1: 91.0, 8: 505.0}, rejected={128: "queued"}),
    ]
    found = judge(runs)
    assert [(p["arm"], p["start"], p["concurrency"]) for p in found["left_out"]] == [
        ("on", 1, 128),
        ("on", 2, 128),
    ]
    by = {point["concurrency"]: point for point in found["points"]}
    assert by[128]["verdict"] == "not-enough-data"
    assert by[128]["starts"] == {"off": 2, "on": 0}
    assert found["keep_at"] == [1, 8]
    assert "2 points do not count: queued at C=128" in found["text"]


def why(runs: list[Any], text: str) -> list[Any]:
    """Have rejected points tell this."""
    for one in runs:
        for point in one["rejected"]:
            point["reasons"][0]["text"] = text
    return runs


def test_an_arm_without_a_point_is_told_why_and_not_to_measure_more() -> None:
    off = starts("off", {1: 1.0, 8: 1.0})
    lost = {1: "unsaturated", 8: "unsaturated"}
    on = why([run("on", start, {}, rejected=lost) for start in (1, 2)], "3 in flight: take a core")
    text = judge([*off, *on])["text"]
    assert text[0].startswith("not-enough-data: ")
    assert text[0].endswith("; mend why points of on do not count")
    assert text[1] == "no point of on counts at C=1, 8 (unsaturated): 3 in flight: take a core"
    # so it is when the baseline is the one
    text = judge([*off, *on], baseline="on")["text"]
    assert text[0].endswith("; mend why points of on do not count")


@pytest.mark.parametrize(
    ("code", "load", "told"),
    [
        ("throttled", None, True),
        ("queued", None, False),
        ("queued", {1: 0.5, 128: 0.5}, True),
    ],
)
def test_a_concurrency_without_a_point_is_told_why(
    code: str, load: dict[int, float] | None, told: bool
) -> None:
    off = [run("off", start, {1: 60.0 + 9 * start, 128: 1700.0}) for start in (1, 2)]
    on = why([run("on", n, {1: 70.0 + n}, rejected={128: code}) for n in (1, 2)], "mend it")
    found = judge([*off, *on], load=load)
    assert found["verdict"] == "not-enough-data"
    assert (f"no point of on counts at C=128 ({code}): mend it" in found["text"]) is told
    assert found["text"][0].endswith("measure more starts") is not told


def test_a_second_variant_without_a_point_is_told_beside_the_winner() -> None:
    lost = why([run("adaptive", n, {}, rejected={1: "unsteady"}) for n in (1, 2)], "wait")
    found = judge([*starts("off", SAME), *starts("on", dict.fromkeys(OFF, 1.5)), *lost])
    assert found["winner"] == "on"
    assert "no point of adaptive counts at C=1 (unsteady): wait" in found["text"]


@pytest.mark.parametrize(
    ("code", "load", "verdict"),
    [
        ("queued", None, "keep"),
        ("above-cap", None, "keep"),
        ("failed-requests", None, "not-enough-data"),
        ("queued", {8: 0.9, 128: 0.1}, "not-enough-data"),
    ],
)
def test_where_a_server_is_full_only_a_load_matters(
    code: str, load: dict[int, float] | None, verdict: str
) -> None:
    off = {one: OFF[one] for one in (1, 8, 128)}
    on = {1: 90.0, 8: 500.0}
    runs = [run("off", 1, off), run("off", 2, off)]
    runs += [run("on", start, on, rejected={128: code}) for start in (1, 2)]
    assert judge(runs, load=load)["verdict"] == verdict


def test_a_good_point_without_a_figure_does_not_count() -> None:
    runs = [*starts("off", {1: 1.0}), *starts("on", {1: 1.5})]
    runs[2]["points"][0]["output_tok_s"] = None
    found = judge(runs)
    assert found["left_out"][0]["reasons"][0]["code"] == "tokens-unknown"
    assert found["verdict"] == "not-enough-data"


def test_a_start_without_a_good_point_does_not_speak() -> None:
    broken = run("on", 3, {}, rejected={1: "failed-requests"}, equal={"model": "another"})
    found = judge([*starts("off", {1: 1.0}), *starts("on", {1: 1.5}), broken])
    assert found["unequal"] == []
    assert found["verdict"] == "keep"


def test_a_start_that_lacks_a_point_does_not_bend_the_line() -> None:
    """Its own neighbours would: speeds are not straight in C, only their ratio nearly is."""
    runs = [*starts("off", SAME, (0.99, 1.0, 1.01)), *starts("on", SAME, (0.99, 1.0, 1.01))]
    del runs[4]["points"][2]
    found = judge(runs, load={32: 1.0})
    assert found["profiles"][0]["gain"] == pytest.approx(1.0, abs=1e-3)


def test_other_prompts_do_not_count() -> None:
    runs = [*starts("off", {1: 1.0}), *starts("on", {1: 1.5})]
    for one in runs:
        code = {**one["points"][0], "prompts": "code", "output_tok_s": 10.0}
        one["points"].append(code)
    assert judge(runs)["verdict"] == "keep"
    assert judge(runs, prompts="code")["verdict"] == "tie"
    for one in runs:
        del one["points"][0]
    assert judge(runs)["verdict"] == "tie"


def test_the_best_of_three_arms() -> None:
    runs = [
        *starts("off", SAME),
        *starts("on", FALLING),
        *starts("adaptive", {1: 1.4, 8: 1.3, 32: 1.2, 128: 1.15}),
    ]
    found = judge(runs)
    assert (found["variant"], found["winner"], found["verdict"]) == (
        "adaptive",
        "adaptive",
        "keep",
    )
    assert {point["arm"] for point in found["points"]} == {"on", "adaptive"}


def test_a_variant_that_may_win_is_not_hidden() -> None:
    noise = (0.96, 1.04)
    runs = [
        *starts("off", SAME, noise),
        *starts("on", {1: 4.0, 8: 1.4, 32: 1.0, 128: 0.2}, noise),
        *starts("adaptive", {1: 4.0, 8: 1.4, 32: 1.0, 128: 1.0}, noise),
    ]
    found = judge(runs)
    assert found["variants"] == {"on": "depends", "adaptive": "not-enough-data"}
    assert found["variant"] == "adaptive"
    assert found["text"][0].endswith("(it gains at C=1); measure more starts")
    assert "other arms: on: depends" in found["text"]


def test_two_variants_alike_are_told_so() -> None:
    gain = dict.fromkeys(OFF, 1.4)
    runs = [
        *starts("off", SAME),
        *starts("on", gain),
        *starts("adaptive", gain, (1.0, 1.02)),
    ]
    found = judge(runs)
    assert found["winner"] == "adaptive"
    assert "adaptive cannot be told from on: it only had the better figures" in found["text"]
    better = judge([*runs[:4], *starts("adaptive", dict.fromkeys(OFF, 1.8))])
    assert not any("told from" in line for line in better["text"])


def test_more_variants_need_wider_intervals() -> None:
    """Bonferroni: two chances to win by luck, half of the risk for each."""
    two = [*starts("off", SAME), *starts("on", FALLING)]
    alone = judge(two)["points"][0]
    beside = next(
        point
        for point in judge([*two, *starts("adaptive", FALLING)])["points"]
        if point["arm"] == "on" and point["concurrency"] == 1
    )
    assert beside["low"] < alone["low"] < alone["high"] < beside["high"]


def test_what_stands_apart_is_told() -> None:
    found = judge([*starts("off", SAME), *starts("on", FALLING)])
    assert found["apart"] == [{"key": "kv_tokens", "off": 438000, "on": 337000}]


@pytest.mark.parametrize(
    ("load", "headline"),
    [
        ({1: 1}, "keep on: it gains more than 5 % over off (it loses at C=128)"),
        ({128: 1}, "drop on: it loses more than 5 % against off (it gains at C=1, 8)"),
        (None, "depends: on gains at C=1, 8 and loses at C=128"),
    ],
)
def test_headline(load: dict[int, float] | None, headline: str) -> None:
    runs = [*starts("off", SAME), *starts("on", FALLING)]
    assert judge(runs, load=load)["text"][0] == headline


@pytest.mark.parametrize(
    ("gain", "headline"),
    [
        (1.5, "keep on: it gains more than 5 % over off at C=1"),
        (0.7, "drop on: it loses more than 5 % against off at C=1"),
    ],
)
def test_a_headline_claims_no_more_than_was_measured(gain: float, headline: str) -> None:
    """With eight at once it is within the margin."""
    quiet = (0.999, 1.001)
    runs = [*starts("off", {1: 1, 8: 1}, quiet), *starts("on", {1: gain, 8: 1}, quiet)]
    text = judge(runs)["text"]
    assert text[0] == headline


def test_a_load_outside_of_what_was_measured_is_told_so() -> None:
    """More starts of the same concurrencies would never help."""
    runs = [*starts("off", {1: 1, 8: 1}), *starts("on", {1: 1.5, 8: 1.4})]
    text = judge(runs, load={1: 0.7, 4: 0.1, 16: 0.1, 32: 0.1})["text"]
    assert text[0] == (
        "not-enough-data: 20 % of the load lies outside of what was measured (it gains at C=1, 8); "
        "measure C=16, 32 too"
    )


STARTED = {"boot": "2026-11-30T10:00:00Z", "process": 1764496800.5}


@pytest.mark.parametrize(
    ("first", "second", "refused"),
    [
        (STARTED, STARTED, True),
        (STARTED, {**STARTED, "process": 1764497100.25}, False),
        (STARTED, None, False),
        ({"process": None}, {"process": None}, False),
    ],
)
def test_one_start_of_the_server_is_no_repeat(first: Any, second: Any, refused: bool) -> None:
    """Measured by hand under another number: their spread knows nothing of a start's luck."""
    runs = starts("on", {1: 1.5})
    runs[0]["server_start"], runs[1]["server_start"] = first, second
    runs += starts("off", {1: 1})
    if not refused:
        assert judge(runs)["verdict"] == "keep"
        return
    with pytest.raises(GpuHostError, match="starts 1 and 2 of the arm on are the same start of"):
        judge(runs)


def test_each_kind_of_prompts_of_a_start_may_have_its_run() -> None:
    runs = [*starts("off", {1: 1}), *starts("on", {1: 1.5})]
    for number, one in enumerate(runs):
        one["server_start"] = {"process": number}
    other = {**runs[-1], "at": "2026-11-29T12:00:00Z"}
    other["points"] = [{**point, "prompts": "code"} for point in other["points"]]
    assert judge([*runs, other])["verdict"] == "keep"


def test_a_load_of_many_levels_stays_short() -> None:
    load = dict.fromkeys(range(1, 129), 1.0)
    found = judge([*starts("off", SAME), *starts("on", FALLING)], load=load)
    assert len(found["points"]) == 128
    assert all(len(line) < 400 for line in found["text"])


def test_the_unequal_variant_does_not_stop_the_other() -> None:
    odd = [run("odd", start, {1: 99.0}, equal={"version": "1"}) for start in (1, 2)]
    found = judge([*starts("off", {1: 1.0}), *starts("on", {1: 1.5}), *odd])
    assert (found["winner"], found["verdict"]) == ("on", "keep")
    assert found["unequal"] == [{"key": "version", "off": "0.5.23", "odd": "1"}]
    assert any(line.startswith("odd is not comparable with off, ") for line in found["text"])


def test_an_arm_named_as_a_field_of_the_result_is_refused() -> None:
    with pytest.raises(GpuHostError, match="an arm cannot be named key"):
        judge([GOOD, run("key", 1, {1: 60.0})])


@pytest.mark.parametrize(
    ("on", "said"),
    [({"speculative_algorithm": "EAGLE"}, False), ({"speculative_algorithm": None}, True)],
)
def test_arms_that_are_the_same_are_told(on: dict[str, Any], said: bool) -> None:
    """A tie of a server with itself says nothing of the setting."""
    runs = [*starts("off", SAME), *starts("on", SAME)]
    for one in runs:
        one["apart"] = {"speculative_algorithm": None, "kv_tokens": one["start"]}
    for one in runs[2:]:
        one["apart"].update(on)
    found = judge(runs)
    line = "off and on ran with the same settings, by what the servers tell: was it switched on?"
    assert (line in found["text"]) == said


def test_servers_that_tell_nothing_of_themselves() -> None:
    runs = [*starts("off", SAME), *starts("on", SAME)]
    line = "what else differs between the arms is not known: the servers told nothing of themselves"
    assert line not in judge(runs)["text"]
    for one in runs:
        one["equal"] = {"model": "m", "sglang": None, "gpus": "A", "seed": 1, "client": "own 1"}
    assert line in judge(runs)["text"]


def test_no_runs() -> None:
    assert judge([])["verdict"] == "not-enough-data"
    found = judge(starts("off", SAME))
    assert (found["variant"], found["verdict"]) == (None, "not-enough-data")


GOOD = run("off", 1, {1: 60.0})


def with_point(**more: Any) -> dict[str, Any]:
    return {**GOOD, "points": [{**GOOD["points"][0], **more}]}


@pytest.mark.parametrize(
    ("runs", "options", "message"),
    [
        ("text", {}, "not a list"),
        ([{**GOOD, "schema": 2}], {}, "run 1 .* schema 1"),
        ([GOOD, GOOD], {}, "start 1 of the arm off is there twice"),
        ([{k: v for k, v in GOOD.items() if k != "equal"}], {}, "run 1 cannot be read .*equal"),
        ([GOOD, {"schema": 1, "points": [1], "rejected": []}], {}, "run 2 cannot be read"),
        ([GOOD], {"baseline": "of"}, "no run is of the arm of, only of off"),
        ([GOOD], {"prompts": "code"}, "no point is of the prompts code, only of mixed"),
        ([GOOD], {"load": {"x": 1}}, "the load has x: 1"),
        ([GOOD], {"load": {0: 1}}, "the load has 0: 1"),
        ([GOOD], {"load": {1: -1}}, "the load has 1: -1"),
        ([GOOD], {"load": {1: float("nan")}}, "the load has 1: nan"),
        ([GOOD], {"load": {1: True}}, "the load has 1: True"),
        ([GOOD], {"load": {True: 1}}, "the load has True: 1"),
        ([GOOD], {"load": {1.5: 1}}, "the load has 1.5: 1"),
        ([GOOD], {"load": {1: None}}, "the load has 1: None"),
        ([GOOD], {"load": {1: 0}}, "all shares of the load are 0"),
        ([GOOD], {"load": [1]}, "the load is not a mapping"),
        ([GOOD], {"load": {1: 1e308, 2: 1e308}}, "the load sums up to inf"),
        ([with_point(output_tokens=256)], {}, "run 1 cannot be read"),
        ([with_point(concurrency=float("inf"))], {}, "run 1 cannot be read"),
        ([with_point(concurrency=0)], {}, "run 1 cannot be read .*concurrency of 0"),
        ([with_point(concurrency=-8)], {}, "run 1 cannot be read .*concurrency of -8"),
        ([with_point(reasons=["throttled"])], {}, "run 1 cannot be read"),
        ([with_point(reasons=[{"text": "hot"}])], {}, "run 1 cannot be read .*code"),
        ([{**GOOD, "start": float("inf")}], {}, "run 1 cannot be read"),
    ],
)
def test_bad_input(runs: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(GpuHostError, match=message):
        judge(runs, **options)


@pytest.mark.parametrize("speed", [True, "60", 1e300, 1e-300, float("nan"), float("inf"), -1])
def test_what_is_no_speed_does_not_count(speed: Any) -> None:
    found = judge([*starts("off", {1: 1.0}), run("on", 1, {1: speed}), run("on", 2, {1: speed})])
    assert found["verdict"] == "not-enough-data"
    assert {one["arm"] for one in found["left_out"]} == {"on"}


@pytest.mark.parametrize("rules", [{"margin": 1.0}, {"margin": -0.1}, {"confidence": 95.0}])
def test_bad_rules(rules: dict[str, float]) -> None:
    with pytest.raises(GpuHostError, match="must be a share"):
        Rules(**rules)


def capped(arm: str, cap: int, speeds: Mapping[int, float]) -> list[Any]:
    apart = {"effective_max_running_requests": cap}
    return [
        run(arm, start, {one: speed * luck for one, speed in speeds.items()}, apart=apart)
        for start, luck in enumerate((0.995, 1.005, 1.0, 1.0), 1)
    ]


def test_a_server_at_its_cap_is_as_fast_for_more_clients() -> None:
    off = capped("off", 48, {1: 60.0, 8: 350.0, 32: 900.0, 48: 1200.0})
    on = capped("on", 24, {1: 90.0, 8: 480.0, 24: 840.0})
    found = judge([*off, *on])
    assert found["verdict"] == "depends"
    assert (found["keep_at"], found["drop_at"]) == ([1, 8], [32, 48, 64, 128])
    points = {p["concurrency"]: p for p in found["points"]}
    assert points[32]["ratio"] == pytest.approx(840 / 900, rel=1e-3)
    assert points[128]["ratio"] == pytest.approx(840 / 1200, rel=1e-3)
    assert (points[8]["held"], points[32]["held"]) == ([], ["on"])
    assert (points[32]["measured"], points[128]["held"]) == (False, ["off", "on"])
    words = {p["name"]: p["verdict"] for p in found["profiles"]}
    assert words == {"single-user": "keep", "team": "keep", "batch": "drop"}
    assert any(line.startswith("one at its cap: C=32 -7 %") for line in found["text"])


def test_nothing_is_known_above_a_cap_that_was_not_measured() -> None:
    off = capped("off", 48, {1: 60.0, 8: 350.0, 48: 1200.0})
    found = judge([*off, *capped("on", 24, {1: 90.0, 8: 480.0})])
    assert {p["concurrency"] for p in found["points"] if p["ratio"] is not None} == {1, 8}
    assert found["profiles"][-1]["verdict"] == "not-enough-data"
