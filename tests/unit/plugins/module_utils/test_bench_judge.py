"""Every reason to reject a point, each by the smallest difference from a good one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from ansible_collections.gpuhost.inference.plugins.module_utils._bench_judge import Seen, reasons
from ansible_collections.gpuhost.inference.plugins.module_utils._bench_stats import (
    Request,
    figures,
)
from closed_loop import as_sglang, loop

CONCURRENCY = 8
GOOD = loop(CONCURRENCY, [100] * 64, lambda number: 0.01 + number % 3 / 1000)
ASKED = {"requests": 64, "output_tokens": 100}
SEEN = Seen(
    cap=24,
    queued=(0.0, 1.0, 0.0, 0.0, 0.0, 0.0),
    running=8.0,
    kv_use=0.5,
    retracted=0,
    tokens=6400.0,
    clocks=(),
)
WAITING = (2.0, 0.0, 3.0, 4.0, 3.0)


def judge(
    requests: list[Request] | None = None,
    seen: Seen = SEEN,
    duration: float | None = None,
    asked: dict[str, int] | None = None,
    concurrency: int = CONCURRENCY,
) -> dict[str, str]:
    asking = GOOD if requests is None else requests
    point, part = figures(asking, concurrency, duration)
    found = reasons(asking, point, part, asked or ASKED, seen)
    return {one["code"]: one["text"] for one in found}


def changed(number: int, **values: Any) -> list[Request]:
    return [replace(one, **values) if at == number else one for at, one in enumerate(GOOD)]


def test_a_good_point_has_no_reason() -> None:
    assert judge() == {}
    assert judge(as_sglang(GOOD)) == {}
    assert judge(seen=Seen()) == {}  # of a server that tells nothing


CASES: dict[str, tuple[dict[str, Any], str]] = {
    "failed-requests": (
        {"requests": changed(40, error="503: full"), "seen": replace(SEEN, tokens=None)},
        "1 of 64 requests failed, the first with: 503: full",
    ),
    "too-few-requests": ({"asked": {**ASKED, "requests": 65}}, "64 of 65 requests were sent"),
    "short-output": (
        {"requests": changed(40, tokens=99)},
        "1 of 64 answers are shorter than 100 tokens (the shortest 99)",
    ),
    "unsaturated": (
        {"requests": as_sglang(GOOD), "duration": 12.0},
        "of 8 requests were in flight",
    ),
    "unsteady": (
        {"requests": loop(CONCURRENCY, [100] * 64, lambda number: 0.01 if number < 36 else 0.02)},
        "varies by",
    ),
    "throttled": (
        {"seen": replace(SEEN, clocks=("power brake",))},
        "the GPUs were slowed down (power brake)",
    ),
    "queued": (
        {"seen": replace(SEEN, queued=WAITING, kv_use=0.97)},
        "mostly 3 of 8 requests waited",
    ),
    "above-cap": ({"seen": replace(SEEN, cap=7)}, "runs 7 requests at once and 8 were sent"),
    "no-window": ({"concurrency": 64}, "ask for 256"),
    "tokens-unknown": (
        {"requests": changed(40, tokens=None)},
        "no token count for 1 of 64 requests",
    ),
}


@pytest.mark.parametrize("code", CASES)
def test_reason(code: str) -> None:
    given, text = CASES[code]
    found = judge(**given)
    assert set(found) - {"above-cap" if code == "no-window" else ""} == {code}
    assert text in found[code]
    assert ": " in found[code]  # what is wrong, and the next step


def test_requests_thrown_back_are_a_queue() -> None:
    found = judge(seen=replace(SEEN, queued=(0.0,), retracted=3))
    assert "3 were thrown back" in found["queued"]


def test_load_of_others_shows_in_the_servers_count() -> None:
    assert judge(seen=replace(SEEN, tokens=6400 * 1.02)) == {}
    found = judge(seen=replace(SEEN, tokens=9000.0))
    assert "generated 9000 tokens, the client counted 6400" in found["tokens-unknown"]


@pytest.mark.parametrize(
    "values",
    [
        {"queued": (0.0, 8.0, 0.0, 8.0, 0.0)},  # moments
        {"queued": (8.0, 8.0)},  # too few looks to tell
        {"queued": WAITING, "kv_use": 0.5},  # for their prefill
        {"queued": WAITING, "kv_use": None},
        {"queued": WAITING, "cap": None, "running": 8.0},
        {"queued": WAITING, "cap": None, "running": None},
    ],
)
def test_what_waits_for_its_turn_is_served(values: dict[str, Any]) -> None:
    assert (
        judge(seen=replace(SEEN, **{"kv_use": 0.97, **values} if len(values) == 1 else values))
        == {}
    )


def test_a_client_that_has_no_time_left() -> None:
    assert judge(seen=replace(SEEN, client=0.8)) == {}
    found = judge(seen=replace(SEEN, client=0.97))
    assert "the client computed, or waited for a processor, 97% of the time" in found["unsaturated"]


def test_a_server_that_runs_fewer_and_does_not_say_how_many() -> None:
    found = judge(seen=replace(SEEN, queued=WAITING, cap=None, running=5.0))
    assert "mostly 3 of 8 requests waited" in found["queued"]


@pytest.mark.parametrize(
    ("tokens", "code"),
    [
        (0, "short-output"),
        (-5, "short-output"),
        (100 + 17, "tokens-unknown"),
        (10**9, "tokens-unknown"),
    ],
)
def test_a_server_that_counts_wrong(tokens: int, code: str) -> None:
    """Where it shows no counters to compare with, too."""
    assert list(judge(changed(40, tokens=tokens), Seen())) == [code]
    assert list(judge([replace(one, tokens=tokens) for one in GOOD], Seen())) == [code]


def test_a_verification_may_end_a_little_beyond() -> None:
    assert judge(changed(40, tokens=103)) == {}


def test_answers_that_come_as_one_piece() -> None:
    """A proxy that collects them: the first token is then the last one."""
    whole = [replace(one, ttft=one.latency, gaps=()) for one in GOOD]
    found = judge(whole)
    assert list(found) == ["tokens-unknown"]
    assert "came as one piece" in found["tokens-unknown"]
    halves = [replace(one, ttft=one.latency, gaps=(0.0, 0.0)) for one in GOOD]
    assert list(judge(halves)) == ["tokens-unknown"]


@pytest.mark.parametrize("where", ["ttft", "gap"])
@pytest.mark.parametrize("concurrency", [1, 8])
def test_a_server_that_stalls(where: str, concurrency: int) -> None:
    """One answer that hangs takes the time of others; at one at a time nothing else shows it."""
    good = loop(concurrency, [100] * 64, lambda number: 0.01 + number % 3 / 1000)
    assert judge(good, concurrency=concurrency) == {}
    bad = [
        one
        if number != 40
        else replace(one, ttft=one.ttft + 9)
        if where == "ttft"
        else replace(one, gaps=(*one.gaps[:-1], 9.0))
        for number, one in enumerate(good)
    ]
    assert "stood still" in judge(bad, Seen(), concurrency=concurrency)["unsteady"]


def test_a_long_prompt_is_no_stall() -> None:
    """Its prefill may take longer than a short answer."""
    mixed = [
        replace(one, ttft=9.0, input_tokens=4000) if number % 4 == 0 else one
        for number, one in enumerate(loop(1, [100] * 64, lambda _number: 0.01))
    ]
    shift = 0.0
    for number, one in enumerate(mixed):
        mixed[number] = replace(one, start=shift)
        shift += one.latency
    assert judge(mixed, Seen(), concurrency=1) == {}
