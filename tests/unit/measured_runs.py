"""Runs as the benchmark returns them, and what is made of them, for reports to show."""

from __future__ import annotations

import copy
from typing import Any

from ansible_collections.gpuhost.inference.plugins.module_utils._tune_history import (
    compare_history,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._tune_verdict import judge

# what the host of the reports declares
LAYOUT: list[dict[str, Any]] = [
    {
        "name": "inference",
        "numa_node": 0,
        "driver": "nvidia",
        "iommu_type": "identity",
        "guest": {"kind": "lxc", "vmid": 100},
    }
]
# concurrency: tokens/s of all requests, without MTP and with it
SPEEDS = {1: (103.5, 148.2), 4: (294.0, 402.1), 16: (812.3, 842.6), 64: (1780.7, 1210.8)}
ACCEPTED = {"chat": 2.31, "code": 3.12, "mixed": 2.64, "reasoning": 2.78}
EQUAL = {
    "sglang": "0.5.23",
    "model": "qwen3.5-122b",
    "gpus": "4 x NVIDIA RTX PRO 6000 Blackwell Server Edition",
    "power_limit_w": "600.00",
    "context_length": 262144,
    "mem_fraction_static": 0.8,
    "max_running_requests": 48,
    "output_tokens": 512,
}


def spread(median: float) -> dict[str, float]:
    return {
        "mean": median * 1.05,
        "median": median,
        "p90": median * 1.3,
        "p95": median * 1.5,
        "p99": median * 2.2,
    }


def point(load: int, speed: float, *, prompts: str = "mixed", mtp: bool = False) -> dict[str, Any]:
    each = speed / load
    length = ACCEPTED[prompts] if mtp else None
    return {
        "concurrency": load,
        "prompts": prompts,
        "requests": max(32, 4 * load),
        "duration_s": 90.0,
        "steady_s": 70.0,
        "output_tok_s": speed,
        "per_request_tok_s": each,
        "ttft_ms": spread((88.0 if mtp else 80.0) + (12 if mtp else 9) * load),
        "tpot_ms": spread(1000 / each),
        "itl_ms": spread(1000 / each),
        "e2e_ms": spread(512_000 / each),
        "in_flight": load * 0.98,
        "accept_length": length,
        "accept_rate": None if length is None else (length - 1) / 3,
        "running_max": float(load),
        "queued_max": 0.0,
        "kv_use_max": 0.4,
        "retracted": 0,
        "output_tokens": {"asked": 512, "median": 512},
        "input_tokens": {"asked": 1024, "median": 1019},
        "reasons": [],
    }


def run(arm: str, start: int, factor: float = 1.0) -> dict[str, Any]:
    mtp = arm != "off"
    points = [point(n, pair[mtp] * factor, mtp=mtp) for n, pair in SPEEDS.items()]
    kinds = [
        point(4, 400 * factor, prompts=kind, mtp=mtp) for kind in ("chat", "code", "reasoning")
    ]
    for number, kind in enumerate(kinds if mtp else ()):
        kind["accept_length"] *= factor - 0.02 * number
    reason = {"code": "unsaturated", "text": "only 91 of 128 requests were in flight"}
    return {
        "schema": 1,
        "arm": arm,
        "start": start,
        "at": f"2026-11-30T0{start + (4 if mtp else 0)}:10:00Z",
        "host": "ct100",
        "server": "http://127.0.0.1:30000",
        "client": {"name": "rust", "version": "0.5.23"},
        "seed": 42,
        "corpus": {"sha256": "ab" * 32, "kinds": sorted(ACCEPTED)},
        "equal": EQUAL,
        "apart": {
            "kv_tokens": 733361 if mtp else 1024000,
            "speculative_algorithm": "NEXTN" if mtp else None,
            "speculative_num_steps": 3 if mtp else None,
        },
        "points": points + kinds,
        "rejected": [{**point(128, 1900.0, mtp=mtp), "reasons": [reason]}],
    }


def runs() -> list[dict[str, Any]]:
    factors = (1.0, 0.98, 1.01)
    arms = ("off", "mtp3")
    found = [run(arm, n, factor) for arm in arms for n, factor in enumerate(factors, 1)]
    # one that the verdict leaves out by itself, as it has no speed
    found[4]["points"].append({**point(32, 1000.0, mtp=True), "output_tok_s": None})
    return found


def verdict() -> dict[str, Any]:
    """Return what is said of these runs, as a play would be given it."""
    return judge(runs())


def history() -> dict[str, Any]:
    """Return how they compare with those of a release before, which was faster for many at once."""
    before = copy.deepcopy(runs())
    for one in before:
        one["equal"]["sglang"] = "0.5.22"
        for mine in one["points"]:
            if mine["concurrency"] == 16:
                mine["output_tok_s"] *= 1.2
    return compare_history(before, runs(), arm="mtp3")


def copies(worst: str = "wrong") -> dict[str, Any]:
    """Return a test of three GPUs whose first write is this, and whose last pair was not tested."""
    names = ["0000:41:00.0", "0000:42:00.0", "0000:43:00.0"]
    pairs = [
        {
            "from": source,
            "to": target,
            "capability": {"read": "OK", "write": "OK"},
            "write": "right",
            "read": "right",
            "reason": None,
        }
        for source in names
        for target in names
        if source != target
    ]
    pairs[0].update(write=worst, reason="write: nothing arrived, and no error was told")
    pairs[-1].update(write="untested", read="untested", reason="the test was over before")
    return {
        "changed": False,
        "p2p": {
            "verdict": "broken",
            "reason": "1 of 12 copies did not arrive",
            "time": "2026-11-30T02:00:00Z",
            "vmid": 100,
            "addresses": names,
            "pairs": pairs,
            "faults": [
                {"line": "[  99.1] nvidia 0000:41:00.0: AMD-Vi: Event logged [IO_PAGE_FAULT]"}
            ],
            "fallback": {"wanted": True, "servers": []},
            "problems": ["process 4711 lacks NCCL_P2P_DISABLE=1"],
            "basis": {},
        },
        "kept": [],
        "worth_keeping": True,
    }
