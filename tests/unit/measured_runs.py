"""Runs and verdicts as the benchmark and its judgement return them, for reports to show."""

from __future__ import annotations

from typing import Any

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
SPEEDS = {1: (103.5, 148.2), 4: (294.0, 402.1), 16: (812.3, 905.4), 64: (1780.7, 1210.8)}
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
    return [run(arm, n, factor) for arm in arms for n, factor in enumerate(factors, 1)]


def verdict() -> dict[str, Any]:
    starts = {"off": 3, "mtp3": 3}
    rows = (
        (1, 1.43, 1.38, 1.49, "keep", True),
        (4, 1.37, 1.31, 1.43, "keep", True),
        (8, 1.24, None, None, "keep", False),
        (16, 1.11, 0.98, 1.26, "tie", True),
        (64, 0.68, 0.63, 0.73, "drop", True),
    )
    keys = ("concurrency", "ratio", "low", "high", "verdict", "measured")
    return {
        "baseline": "off",
        "variant": "mtp3",
        "winner": None,
        "verdict": "depends",
        "keep_at": [1, 4],
        "drop_at": [64],
        "margin": 0.05,
        "confidence": 0.95,
        "points": [
            {"arm": "mtp3", "starts": starts, **dict(zip(keys, row, strict=True))} for row in rows
        ],
        "profiles": [
            {
                "name": "single-user",
                "load": {"1": 1.0},
                "arm": "mtp3",
                "gain": 1.43,
                "low": 1.38,
                "high": 1.49,
                "verdict": "keep",
            },
            {
                "name": "batch",
                "load": {"64": 0.7, "16": 0.3},
                "arm": "off",
                "gain": 0.81,
                "low": 0.74,
                "high": 0.89,
                "verdict": "drop",
            },
        ],
        "unequal": [{"key": "mem_fraction_static", "off": 0.85, "mtp3": 0.8}],
        "left_out": [
            {"arm": "off", "start": 1, "concurrency": 128, "reasons": [{"code": "unsaturated"}]},
            {
                "arm": "mtp3",
                "start": 2,
                "concurrency": 32,
                "reasons": [{"code": "no-window", "text": "all requests ended at once"}],
            },
        ],
        "text": [
            "depends: mtp3 gains at C=1, 4 and loses at C=64",
            "load single-user (C 1: 100 %): +43 % (+38 % to +49 %), keep",
        ],
    }


def history() -> dict[str, Any]:
    return {
        "arm": "mtp3",
        "verdict": "slower",
        "unequal": [],
        "points": [
            {"concurrency": 1, "ratio": 0.99, "low": 0.96, "high": 1.02, "verdict": "same"},
            {"concurrency": 16, "ratio": 0.84, "low": 0.79, "high": 0.89, "verdict": "slower"},
        ],
        "changed": [{"key": "sglang", "before": "0.5.22", "after": "0.5.23"}],
    }


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
