"""The load of a server from looks at its metrics."""

from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from ansible_collections.gpuhost.inference.plugins.module_utils._tune_load import load_of


def text(running: float, *, queued: float | None = 0, seconds: float | None = None) -> str:
    """Return what a server of two ranks of one group and one model says."""
    labels = 'model_name="m",engine_type="unified"'
    lines = [
        "# TYPE sglang:num_running_reqs gauge",
        f'sglang:num_running_reqs{{{labels},tp_rank="0",pp_rank="0"}} {running}',
        f'sglang:num_running_reqs{{{labels},tp_rank="1",pp_rank="0"}} {running}',
    ]
    if queued is not None:
        lines.append(f'sglang:num_queue_reqs{{{labels},tp_rank="0"}} {queued}')
    if seconds is not None:
        lines.append(f"sglang:e2e_request_latency_seconds_sum{{{labels}}} {seconds}")
    return "\n".join(lines) + "\n"


def test_each_look_stands_for_the_time_around_it() -> None:
    found = load_of([(0, text(1)), (10, text(2)), (30, text(0, queued=1)), (40, text(4.0))])
    # 5 s with one, 15 s with two, 15 s idle, 5 s with four
    assert found["load"] == pytest.approx({"1": 0.2, "2": 0.6, "4": 0.2})
    assert found["idle"] == pytest.approx(15 / 40)
    assert found["mean"] == pytest.approx((5 + 30 + 20) / 40)
    assert found["queued"] == pytest.approx(15 / 40)
    assert (found["looks"], found["seconds"]) == (4, 40)


def test_an_idle_server_has_no_load() -> None:
    found = load_of([(0, text(0)), (10, text(0))])
    assert (found["load"], found["idle"], found["mean"]) == (None, 1.0, 0.0)


@pytest.mark.parametrize(
    ("sums", "mean"),
    [
        ((100.0, 130.0, 160.0), 3.0),
        ((None, 10.0, 40.0), 2.0),
        ((100.0, 0.0, 40.0), None),
        ((None, None, None), None),
    ],
)
def test_mean_by_latency(sums: tuple[float | None, ...], mean: float | None) -> None:
    found = load_of([(10.0 * at, text(1, seconds=one)) for at, one in enumerate(sums)])
    assert found["mean_by_latency"] == mean


def test_a_queue_that_is_not_told_is_not_known() -> None:
    assert load_of([(0, text(1)), (1, text(1, queued=None))])["queued"] is None


def test_replicas_add_up() -> None:
    ranks = "".join(
        f'sglang:num_running_reqs{{tp_rank="{tp}",dp_rank="{dp}"}} {2 + dp}\n'
        for tp in (0, 1)
        for dp in (0, 1)
    )
    assert load_of([(0, ranks), (1, ranks)])["load"] == {"5": 1.0}


@pytest.mark.parametrize(
    ("scrapes", "message"),
    [
        ([], "0 looks"),
        ([(0, text(1))], "1 looks"),
        ([(1, text(1)), (0, text(1))], "not in the order"),
        ([(0, text(1)), (0, text(1))], "not in the order"),
        ([(0, text(1)), (float("nan"), text(1))], "not in the order"),
        ([(0, text(1)), (float("inf"), text(1))], "not in the order"),
        ([(0, text(1)), (1, "404 page not found")], "look 2 .* enable-metrics"),
    ],
)
def test_bad_input(scrapes: list[Any], message: str) -> None:
    with pytest.raises(GpuHostError, match=message):
        load_of(scrapes)
