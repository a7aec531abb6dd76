"""The sentences about what fits a server."""

from __future__ import annotations

from typing import Any

import pytest
from ansible.errors import AnsibleFilterError
from ansible_collections.gpuhost.inference.plugins.filter.sglang_capacity import FilterModule

SAY = FilterModule().filters()["sglang_capacity"]
ARM = {
    "max_running_requests": 24,
    "requested": 64,
    "limited_by": "states",
    "state_slots": 123,
    "slots_per_request": 5,
    "state_mib": 36.6,
    "kv_tokens": 700000,
    "unknown": [],
}
UNKNOWN = {**ARM, "max_running_requests": None, "unknown": ["the GPUs are not known"]}


def capacity(with_mtp: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"without_mtp": UNKNOWN, "with_mtp": with_mtp or ARM, "assumptions": ["a", "b"]}


def test_prediction() -> None:
    assert SAY(capacity(), ["8", 32]) == [
        "without MTP: not known how many requests run at once: the GPUs are not known",
        "with MTP: 24 requests run at once (the slots for states limit them), 700000 tokens in the "
        "key-value cache, 123 slots for states of 36.6 MiB, 5 for each request",
        "with MTP: at 32 requests at once some wait in the queue",
        "assuming that a; b",
    ]


@pytest.mark.parametrize(
    ("arm", "server", "expected"),
    [
        (
            ARM,
            {
                "effective_max_running_requests": 24,
                "kv_tokens": 700001,
                "flags": {"max_mamba_cache_size": 120},
            },
            [
                "requests run at once: 24 where 24 was predicted",
                "tokens in the key-value cache: 700001 where 700000 was predicted (less than 1 % "
                "apart)",
                "slots for states: 120 where 123 was predicted (-2 %)",
                "64 were asked for: SGLang runs 24",
                "as the server is: at 32 requests at once some wait in the queue",
            ],
        ),
        (
            UNKNOWN,
            {"effective_max_running_requests": 64, "kv_tokens": None},
            ["requests run at once: 64, and no prediction to compare with"],
        ),
        (ARM, {}, ["the server does not say how many requests run at once"]),
    ],
)
def test_comparison(arm: dict[str, Any], server: dict[str, Any], expected: list[str]) -> None:
    assert SAY(capacity(arm), [32], server) == expected


def test_no_capacity() -> None:
    with pytest.raises(AnsibleFilterError, match="takes the capacity"):
        SAY([])
