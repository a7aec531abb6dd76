"""What is seen of a server while it is measured; what cannot be seen is unknown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from ansible_collections.gpuhost.inference.plugins.module_utils._bench_server import (
    Look,
    Watch,
    read_clocks,
    read_gpus,
    usage,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._bench_stats import Steady
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_http import Metric


def seen(at: float, **values: float) -> Look:
    return Look(at, {name: Metric(value, value) for name, value in values.items()})


def smi(answers: dict[str, str]) -> Any:
    """Return a runner of nvidia-smi that knows some fields."""

    def run(words: Sequence[str], _timeout: float) -> str:
        field = words[1].partition("=")[2]
        if field not in answers:
            raise GpuHostError(f"{field} is not a valid field to query")
        return answers[field]

    return run


@pytest.mark.parametrize(
    ("said", "reasons"),
    [
        ("0x0000000000000000\n", set()),
        ("0x0000000000000001\n0x0000000000000004\n", set()),  # idle, and at its power limit
        (
            "0x0000000000000004\n0x0000000000000028\n",
            {"hardware slowdown", "software thermal slowdown"},
        ),
        ("0x00000000000000c0\n", {"hardware thermal slowdown", "power brake"}),
        ("[N/A]\n", None),
        ("", None),
    ],
)
def test_clocks(said: str, reasons: set[str] | None) -> None:
    assert read_clocks(smi({"clocks_event_reasons.active": said})) == reasons
    old = {"clocks_throttle_reasons.active": said}  # drivers before 535
    assert read_clocks(smi(old)) == reasons


def test_without_nvidia_smi_clocks_and_gpus_are_unknown() -> None:
    assert read_clocks(smi({})) is None
    assert read_gpus(smi({})) == {"gpus": None, "power_limit_w": None}


def test_gpus_by_kind() -> None:
    said = "NVIDIA RTX PRO 6000, 600.00\n" * 4
    assert read_gpus(smi({"name,power.limit": said})) == {
        "gpus": "4 x NVIDIA RTX PRO 6000",
        "power_limit_w": "600.00",
    }


def test_counters_of_a_time() -> None:
    watch = Watch(seen(0, tokens=100.0), seen(9, tokens=350.0, late=7.0))
    assert watch.delta("tokens") == 250
    assert watch.delta("late") == 7  # a series appears with its first value
    assert watch.delta("none") is None
    assert Watch(seen(0, tokens=100.0), seen(9, tokens=3.0)).delta("tokens") is None  # restarted
    assert Watch(None, None).delta("tokens") is None


def test_only_the_steady_part_is_looked_at() -> None:
    looks = [seen(100 + n, num_running_reqs=float(n), num_queue_reqs=0.0) for n in range(10)]
    watch = Watch(looks=looks)
    part = Steady(2.0, 5.0)
    assert [one.at for one in watch.within(part, 9.0, 100.0)] == [102, 103, 104, 105]
    assert watch.within(None, 9.0, 100.0) == []
    assert usage(watch, watch.within(part, 9.0, 100.0)) == {
        "running_max": 5.0,
        "queued_max": 0.0,
        "kv_use_max": None,
        "retracted": None,
    }


def test_a_client_that_loads_first_began_when_its_requests_did() -> None:
    """SGLang's Python client imports for many seconds; the last busy look ends its load."""
    busy = [0, 0, 0, 0, 4, 8, 8, 8, 3, 0, 0]
    watch = Watch(looks=[seen(n, num_running_reqs=float(one)) for n, one in enumerate(busy)])
    assert [one.at for one in watch.within(Steady(1.0, 3.0), 4.5, None)] == [5, 6]
    idle = Watch(looks=[seen(n, num_running_reqs=0.0) for n in range(9)])
    assert idle.within(Steady(1.0, 3.0), 4.5, None) == []


def test_the_fullest_cache_counts() -> None:
    looks = [seen(0, token_usage=0.2, full_token_usage=0.7), seen(1, token_usage=0.4)]
    watch = Watch(looks=[*looks, seen(2, num_retracted_reqs=3.0)])
    assert usage(watch, looks)["kv_use_max"] == 0.7
    assert usage(watch, looks)["retracted"] == 3
