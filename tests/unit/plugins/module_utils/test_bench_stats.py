"""Figures of closed loops whose true rate is known."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from ansible_collections.gpuhost.inference.plugins.module_utils._bench_stats import (
    Request,
    Steady,
    figures,
    inside,
    percentile,
    spread,
    steady_part,
    wavers,
    with_starts,
)
from closed_loop import as_sglang, loop, ragged

LOOPS = [
    (concurrency, waves, seed)
    for concurrency in (1, 8, 32, 128)
    for waves in (4, 10)
    for seed in (1, 2)
]


@pytest.mark.parametrize(("concurrency", "waves", "seed"), LOOPS)
def test_rate_of_ragged_lengths_is_right(concurrency: int, waves: int, seed: int) -> None:
    count = max(waves * concurrency, 32)
    requests = as_sglang(loop(concurrency, ragged(count, seed), lambda _number: 0.005))
    found, _part = figures(requests, concurrency, None)
    assert found["output_tok_s"] == pytest.approx(concurrency / 0.005, rel=0.01)
    raw = sum(request.tokens or 0 for request in requests) / found["duration_s"]
    assert concurrency == 1 or raw < found["output_tok_s"]  # what a plain mean would say
    assert found["tpot_ms"]["median"] == pytest.approx(5.0)
    assert found["per_request_tok_s"] == pytest.approx(200.0)
    assert found["in_flight"] == pytest.approx(concurrency)


@pytest.mark.parametrize("seed", range(20))
def test_starts_are_found_again(seed: int) -> None:
    """Within one percent of all, also when each request has its own pace and some jitter."""
    dice = random.Random(seed)
    concurrency = dice.choice([2, 5, 16, 64])
    paces = [dice.uniform(0.002, 0.02) for _turn in range(6 * concurrency)]
    truth = loop(
        concurrency, ragged(len(paces), seed, 10, 300), lambda number: paces[number], ttft=0.05
    )
    found = with_starts(as_sglang(truth), concurrency)
    whole = max(request.end for request in truth)
    worst = max(abs((a.start or 0) - (b.start or 0)) for a, b in zip(truth, found))
    assert worst <= 0.01 * whole
    assert max(request.end for request in found) == pytest.approx(whole, rel=0.01)


def test_known_starts_are_kept() -> None:
    requests = [Request(0.5, 0.1, (0.1,), 2), Request(0.7, 0.1, (0.1,), 2)]
    assert with_starts(requests, 1) == requests


@pytest.mark.parametrize("packed", [1, 3])
@pytest.mark.parametrize("ttft", [0.0, 0.5, 2.0])
def test_waves_in_step_count_their_prefill(ttft: float, packed: int) -> None:
    """Equal lengths run in step: a part that holds one prefill less would read up to 40 % high."""
    requests = as_sglang(loop(16, [200] * 64, lambda _number: 0.01, ttft, packed))
    found, _part = figures(requests, 16, None)
    true = 16 * 200 / (ttft + 199 * 0.01)
    assert found["output_tok_s"] == pytest.approx(true, rel=0.01)


def test_the_first_wave_and_the_tail_are_left_out() -> None:
    lengths = [50] * 12
    requests = loop(2, lengths, lambda number: 0.5 if number < 2 or number > 9 else 0.01, 0.2)
    found, part = figures(requests, 2, None)
    assert found["tpot_ms"]["p99"] == pytest.approx(10.0)
    assert part is not None
    assert part.begin == pytest.approx(0.2 + 49 * 0.5)


def test_a_wave_that_queues_for_its_prefill_is_waited_for() -> None:
    first = [Request(0.0, 5.0 * (number + 1), (0.1,) * 10, 11) for number in range(4)]
    part = steady_part([*first, *(Request(6.0 * n, 1.0, (), 1) for n in range(1, 9))], 4)
    assert part is not None
    assert part.begin == 20.0


def test_without_a_second_wave_there_is_no_part() -> None:
    for count in (1, 4, 8):
        found, part = figures(loop(8, [50] * count, lambda _number: 0.01), 8, None)
        assert part is None
        assert found["output_tok_s"] is None
        assert found["in_flight"] is None
        assert found["ttft_ms"] == dict.fromkeys(("mean", "median", "p90", "p95", "p99"))
    assert figures([], 8, None)[0]["requests"] == 0


def test_time_that_the_client_lost_lowers_what_was_in_flight() -> None:
    requests = as_sglang(loop(4, [200] * 40, lambda _number: 0.01))
    took = max(request.end for request in with_starts(requests, 4))
    fine, _part = figures(requests, 4, took + 0.2)
    assert fine["in_flight"] == pytest.approx(4)
    slow, _part = figures(requests, 4, took * 1.25 + 0.25)
    assert slow["in_flight"] == pytest.approx(3.2)
    assert slow["output_tok_s"] == pytest.approx(0.8 * fine["output_tok_s"], rel=0.001)


def test_failed_requests_are_no_figures() -> None:
    requests = loop(2, [50] * 20, lambda _number: 0.01)
    requests[7] = replace(requests[7], error="refused", tokens=None, gaps=())
    found, _part = figures(requests, 2, None)
    assert found["requests"] == 19


def test_percentiles_interpolate() -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0], 0.5) == 2.5
    assert percentile([7.0], 0.99) == 7.0
    assert spread([1.0, 2.0, 3.0, 4.0, 10.0]) == {
        "mean": 4.0,
        "median": 3.0,
        "p90": 7.6,
        "p95": 8.8,
        "p99": 9.76,
    }


def test_prompts_that_differ_are_no_unsteady_run() -> None:
    """With speculation code runs twice as fast as reasoning: that is chance, not the server."""
    false = 0
    for seed in range(300):
        dice = random.Random(seed)
        paces = [dice.choice([0.005, 0.007, 0.010]) for _turn in range(30)]
        false += wavers(loop(1, [100] * 30, lambda number, p=paces: p[number])) is not None
    assert false <= 6


@pytest.mark.parametrize(("slow", "unsteady"), [(1.0, False), (1.1, False), (1.5, True)])
def test_a_run_that_becomes_slow_is_unsteady(slow: float, unsteady: bool) -> None:
    dice = random.Random(4)
    paces = [dice.uniform(0.0095, 0.0105) * (slow if number > 60 else 1) for number in range(128)]
    found = wavers(loop(8, [100] * 128, lambda number: paces[number]))
    assert (found is not None) is unsteady


def test_too_few_requests_tell_nothing_of_steadiness() -> None:
    assert wavers(loop(1, [100] * 7, lambda number: 0.01 * (number + 1))) is None
    assert wavers([Request(0.0, 0.1, (), 1)] * 20) is None


def test_the_first_and_the_last_are_not_inside() -> None:
    requests = loop(2, [101] * 8, lambda _number: 0.01)
    starts = [one.start for one in inside(requests, 2, Steady(1.0, 3.0))]
    assert starts == pytest.approx([1.0, 1.0, 2.0, 2.0])
    later = [one.start for one in inside(requests, 2, Steady(1.5, 3.0))]
    assert later == pytest.approx([2.0, 2.0])


def prefills_in_turns(count: int, seed: int) -> list[Request]:
    """Return requests of a server that does one prefill at a time, their answers of three paces."""
    dice = random.Random(seed)
    free, ends, found = 0.0, [0.0] * 8, []
    for _number in range(count):
        start = min(ends)
        first = free = max(start, free) + 0.1
        took = 199 * 0.01 * dice.choice([0.8, 1.0, 1.4])
        ends[ends.index(start)] = first + took
        found.append(Request(start, first - start, (took / 199,) * 199, 200))
    return found


def test_requests_that_fall_out_of_step_count_their_prefill() -> None:
    """Tokens by the clock would read up to a twelfth too low: more prefills than answers."""
    many = prefills_in_turns(8000, 0)
    true = 8000 * 200 / max(request.end for request in many)
    found = [
        figures(prefills_in_turns(32, seed), 8, None)[0]["output_tok_s"] / true - 1
        for seed in range(1, 41)
    ]
    assert abs(sum(found) / len(found)) < 0.015
