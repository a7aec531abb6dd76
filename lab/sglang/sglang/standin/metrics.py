# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Prometheus text of the server, with the names of 0.5.23."""

from __future__ import annotations

import time
from bisect import bisect_left
from typing import TYPE_CHECKING, Any

from sglang import __version__

if TYPE_CHECKING:
    from sglang.standin.server import Generation, Setup

_BUCKETS = {
    "time_to_first_token_seconds": (0.1, 0.2, 0.4, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80),
    "inter_token_latency_seconds": (0.002, 0.004, 0.006, 0.01, 0.02, 0.04, 0.08, 0.2, 0.5, 1, 4),
    "e2e_request_latency_seconds": (0.1, 0.2, 0.4, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 120, 240),
}
# The scheduler's own series carry its rank, the others only the model.
_COUNTERS = (
    "prompt_tokens_total",
    "generation_tokens_total",
    "cached_tokens_total",
    "num_requests_total",
    "num_aborted_requests_total",
    "spec_verify_calls_total",
)
_DISAGGREGATION = (
    *("decode_prealloc_queue_reqs", "decode_retracted_queue_reqs", "decode_transfer_queue_reqs"),
    *("kv_transfer_latency_ms", "kv_transfer_speed_gb_s", "prefill_bootstrap_queue_reqs"),
    "prefill_inflight_queue_reqs",
)
# Labels beside those of the model. The stand-in does not tell streams from other requests.
_STREAM, _CACHE = ',is_streaming="False"', ',cache_source="device"'
_MORE_LABELS = {
    "cached_tokens_total": _CACHE,
    "generation_tokens_total": _STREAM,
    "num_requests_total": _STREAM,
    "prompt_tokens_total": _STREAM,
    "time_to_first_token_seconds": _STREAM,
    "e2e_request_latency_seconds": _STREAM,
}


class Metrics:
    """Counters and histograms of the server process, and the last gauges of the scheduler."""

    def __init__(self, setup: Setup) -> None:
        pools, args = setup.pools, setup.args
        self.gauges: dict[str, Any] = {}
        self.counters = dict.fromkeys(_COUNTERS, 0)
        self._histograms = {name: [0] * (len(b) + 1) for name, b in _BUCKETS.items()}
        self._sums = dict.fromkeys(_BUCKETS, 0.0)
        self._constants = {
            "max_total_num_tokens": pools["tokens"],
            "context_len": args["context_length"],
            "page_size": args["page_size"],
            "weight_memory_usage_gb": round(pools["weight"], 3),
            "kv_cache_memory_usage_gb": round(pools["kv"], 3),
            "startup_available_gpu_memory_gb": round(pools["free"], 3),
        }
        self._startup = round(setup.startup, 3)
        model = f'model_name="{args["served_model_name"]}",engine_type="unified"'
        self._model = model
        self._scheduler = f'{model},tp_rank="0",pp_rank="0",moe_ep_rank="0"'
        self._pools = pools

    def observe(
        self, generation: Generation, now: float, made: int, passes: int, cached: int
    ) -> None:
        """Count one step of a request, before its own counters are updated."""
        counters = self.counters
        new = made - generation.made
        counters["generation_tokens_total"] += new
        counters["spec_verify_calls_total"] += passes - generation.passes
        if generation.first is None:
            counters["prompt_tokens_total"] += generation.prompt_tokens
            counters["cached_tokens_total"] += cached
            self._add("time_to_first_token_seconds", now - generation.began)
        else:
            # The gap is spread over the tokens that came with it, as the real server does.
            self._add("inter_token_latency_seconds", (now - generation.last) / new, new)
        if made >= generation.length:
            counters["num_requests_total"] += 1
            self._add("e2e_request_latency_seconds", now - generation.began)

    def _add(self, name: str, seconds: float, count: int = 1) -> None:
        self._histograms[name][bisect_left(_BUCKETS[name], seconds)] += count
        self._sums[name] += seconds * count

    def text(self) -> str:
        """Return the exposition text."""
        lines: list[str] = []
        for name, value in {**self._constants, **self.gauges}.items():
            lines += [f"# TYPE sglang:{name} gauge", f"sglang:{name}{{{self._scheduler}}} {value}"]
        name = "sglang:startup_time_seconds"
        lines += [f"# TYPE {name} gauge", f'{name}{{{self._model},phase="e2e"}} {self._startup}']
        for name, value in self.counters.items():
            if not value and name != "spec_verify_calls_total":
                continue  # a series appears with its first value
            labels = self._model + _MORE_LABELS.get(name, "")
            lines += [f"# TYPE sglang:{name} counter", f"sglang:{name}{{{labels}}} {value}"]
        for name, counts in self._histograms.items():
            total = 0
            if not any(counts):
                continue
            labels = self._model + _MORE_LABELS.get(name, "")
            lines.append(f"# TYPE sglang:{name} histogram")
            for limit, count in zip((*_BUCKETS[name], "+Inf"), counts):
                total += count
                lines.append(f'sglang:{name}_bucket{{{labels},le="{limit}"}} {total}')
            lines.append(f"sglang:{name}_sum{{{labels}}} {self._sums[name]:.6f}")
            lines.append(f"sglang:{name}_count{{{labels}}} {total}")
        return "\n".join(lines) + "\n"

    def load(self) -> dict[str, Any]:
        """Return the entry of `/v1/loads`, from what the scheduler said last."""
        gauges, pools = self.gauges, self._pools
        return {
            "dp_rank": 0,
            "num_running_reqs": gauges.get("num_running_reqs", 0),
            "num_waiting_reqs": gauges.get("num_queue_reqs", 0),
            "num_used_tokens": gauges.get("num_used_tokens", 0),
            "num_total_tokens": gauges.get("num_used_tokens", 0),
            "max_total_num_tokens": pools["tokens"],
            "max_running_requests": pools["max_running"],
            "token_usage": gauges.get("token_usage", 0.0),
            "gen_throughput": gauges.get("gen_throughput", 0.0),
            "cache_hit_rate": 0.0,
            "utilization": 0.0,
            "timestamp": time.time(),
            "num_active_tokens": gauges.get("num_used_tokens", 0),
            "num_prealloc_ready_tokens": 0,
            "num_waiting_uncached_tokens": 0,
            "total_prefill_busy_us": 0,
            "total_prefill_uncached_tokens": 0,
            "decode_moments": None,
            "disaggregation": {"mode": "null", **dict.fromkeys(_DISAGGREGATION, 0)},
            "memory": {
                "weight_gb": round(pools["weight"], 3),
                "kv_cache_gb": round(pools["kv"], 3),
                "graph_gb": 0.0,
                "token_capacity": pools["tokens"],
            },
            "queues": {
                "waiting": gauges.get("num_queue_reqs", 0),
                **dict.fromkeys(("grammar", "paused", "prealloc_ready", "retracted"), 0),
            },
            **self._speculative(),
        }

    def _speculative(self) -> dict[str, Any]:
        if not self.gauges.get("spec_num_steps"):
            return {}
        names = {"accept_length": "spec_accept_length", "accept_rate": "spec_accept_rate"}
        return {"speculative": {name: self.gauges[gauge] for name, gauge in names.items()}}


def loads(metrics: Metrics, accelerators: int, now: str) -> dict[str, Any]:
    """Return the body of `/v1/loads`."""
    return {
        "timestamp": now,
        "version": __version__,
        "accelerator": "lab stand-in",
        "num_accelerators": accelerators,
        "loads": [metrics.load()],
    }
