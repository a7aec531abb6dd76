"""Runs of a benchmark in the form that `sglang_benchmark` returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

EQUAL = {"model": "m", "version": "0.5.23", "mem_fraction_static": 0.85, "cuda_graph": None}


def point(concurrency: int, speed: float | None, reasons: tuple[str, ...] = ()) -> dict[str, Any]:
    return {
        "concurrency": concurrency,
        "prompts": "mixed",
        "output_tok_s": speed,
        "output_tokens": {"asked": 256, "median": 256},
        "duration_s": 60.0,
        "reasons": [{"code": code, "text": code} for code in reasons],
    }


def run(
    arm: str,
    start: int,
    speeds: Mapping[int, float],
    *,
    equal: Mapping[str, Any] | None = None,
    rejected: Mapping[int, str] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Return one start of an arm; `rejected` gives a reason by concurrency."""
    return {
        "schema": 1,
        "arm": arm,
        "start": start,
        "at": f"2026-11-29T10:{start:02}:00Z",
        "host": "gpu1",
        "server": "http://127.0.0.1:30000",
        "client": {"name": "python", "version": "0.5.23"},
        "seed": 42,
        "corpus": {"sha256": "ab" * 32, "kinds": ["code", "chat"]},
        "equal": {**EQUAL, **(equal or {})},
        "apart": {"kv_tokens": 438000 if arm == "off" else 337000},
        "points": [point(one, speed) for one, speed in speeds.items()],
        "rejected": [point(one, 9999.0, (why,)) for one, why in (rejected or {}).items()],
        **more,
    }
