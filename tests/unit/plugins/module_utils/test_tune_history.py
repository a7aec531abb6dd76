"""Kept runs before and after a change."""

from __future__ import annotations

import json
from typing import Any

import pytest
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from ansible_collections.gpuhost.inference.plugins.module_utils._tune_history import (
    compare_history,
)
from bench_runs import run

NEW = {"version": "0.5.24"}


def kept(factor: float, count: int = 2, start: int = 1, **more: Any) -> list[dict[str, Any]]:
    return [
        run("on", one, {1: 90.0 * luck * factor, 8: 500.0 * luck}, **more)
        for one, luck in zip(range(start, start + count), (0.999, 1.001, 1.0))
    ]


@pytest.mark.parametrize(
    ("factor", "word", "verdict"),
    [
        (0.8, "slower", "slower"),
        (1.2, "faster", "faster"),
        (1.0, "same", "same"),
        (0.951, "cannot tell", "cannot tell"),
    ],
)
def test_words(factor: float, word: str, verdict: str) -> None:
    found = compare_history(kept(1.0), kept(factor, start=3, equal=NEW))
    first, second = found["points"]
    assert (first["verdict"], second["verdict"], found["verdict"]) == (word, "same", verdict)
    assert first["ratio"] == pytest.approx(factor)
    assert found["changed"] == [{"key": "version", "before": "0.5.23", "after": "0.5.24"}]
    assert found["arm"] == "on"
    json.dumps(found, allow_nan=False)


def test_one_start_after_is_enough_when_there_were_several() -> None:
    found = compare_history(kept(1.0, 3), kept(0.5, 1, start=9))
    assert found["points"][0]["verdict"] == "slower"
    assert found["points"][0]["starts"] == {"before": 3, "after": 1}


def test_one_start_each_cannot_tell() -> None:
    found = compare_history(kept(1.0, 1), kept(0.5, 1, start=9))
    assert found["points"][0]["ratio"] == pytest.approx(0.5)
    assert found["points"][0]["low"] is None
    assert found["verdict"] == "cannot tell"


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"host": "gpu2"}, "host"),
        ({"client": {"name": "rust", "version": "1"}}, "benchmark client"),
        ({"corpus": {"sha256": "0"}}, "prompts (sha256)"),
    ],
)
def test_what_cannot_be_compared(change: dict[str, Any], key: str) -> None:
    found = compare_history(kept(1.0), kept(0.5, start=3, **change))
    assert [one["key"] for one in found["unequal"]] == [key]
    assert found["verdict"] == "cannot tell"
    assert {point["verdict"] for point in found["points"]} == {"cannot tell"}


@pytest.mark.parametrize(
    ("key", "before", "after"),
    [
        ("context_tokens", None, 32000),
        ("output_tokens", 256, 512),
        ("kinds", ["code", "chat"], ["code", "reasoning"]),
        ("temperature", 0.0, 1.0),
        ("requests", None, 96),
        ("warmup", None, 0),
        ("flush", True, False),
        ("seed", 1, 2),
        ("model", "a", "b"),
    ],
)
def test_another_question_cannot_be_compared(key: str, before: Any, after: Any) -> None:
    """A longer context alone makes every server slower."""
    found = compare_history(
        kept(1.0, equal={key: before}), kept(0.5, start=3, equal={**NEW, key: after})
    )
    assert found["unequal"] == [{"key": key, "before": before, "after": after}]
    assert [one["key"] for one in found["changed"]] == ["version"]
    assert found["verdict"] == "cannot tell"


@pytest.mark.parametrize("mixed", ["before", "after"])
def test_starts_of_two_releases_are_no_repeats(mixed: str) -> None:
    sides = {"before": kept(1.0), "after": kept(0.5, start=3, equal=NEW)}
    sides[mixed][0]["equal"]["version"] = "0.5.1"
    found = compare_history(**sides)
    assert [one["key"] for one in found["unequal"]] == ["version"]
    assert found["verdict"] == "cannot tell"


def test_a_client_of_another_release_is_listed() -> None:
    client = {"name": "python", "version": "0.5.24"}
    found = compare_history(kept(1.0), kept(0.5, start=3, client=client))
    assert (found["verdict"], found["unequal"]) == ("slower", [])
    assert [one["key"] for one in found["changed"]] == ["benchmark client"]


def test_facts_that_stand_apart_are_listed() -> None:
    found = compare_history(kept(1.0), kept(1.0, start=3, apart={"kv_tokens": 300000}))
    assert found["changed"] == [{"key": "kv_tokens", "before": 337000, "after": 300000}]


def test_the_arm() -> None:
    off = run("off", 1, {1: 60.0})
    with pytest.raises(GpuHostError, match=r"of 2 arms \(off, on\)"):
        compare_history([off, *kept(1.0)], kept(1.0))
    found = compare_history([off, *kept(1.0)], [off, *kept(1.0)], arm="on")
    assert found["verdict"] == "same"


@pytest.mark.parametrize(
    ("before", "after", "side"),
    [
        ([], kept(1.0), "before"),
        (kept(1.0), [], "after"),
        (kept(1.0), [run("on", 3, {}, rejected={1: "failed-requests"})], "after"),
    ],
)
def test_a_side_without_runs(before: list[Any], after: list[Any], side: str) -> None:
    with pytest.raises(GpuHostError, match=f"no run of the arm on from {side} the change"):
        compare_history(before, after, arm="on")
