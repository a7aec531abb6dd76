"""What a window of time tells about drafts: from counters, from log lines of all four forms."""

from __future__ import annotations

import re
from typing import Any

import pytest
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_http import (
    Metric,
    parse_metrics,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_log import (
    Batch,
    read_log,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_window import (
    Window,
    measure,
)

# 0.4.10 to 0.5.3, 0.5.4 to 0.5.8, hybrid models, and 0.5.23 with what newer ones insert
OLD = (
    "[2026-11-02 07:00:01 TP0] Decode batch. #running-req: 3, #token: 900, token usage: 0.01, "
    "accept len: 2.00, cuda graph: True, gen throughput (token/s): 210.50, #queue-req: 0, "
)
MIDDLE = (
    "[2026-11-02 07:00:02 DP0 TP0 EP0] Decode batch, #running-req: 1, #token: 90, token usage: "
    "0.00, accept len: 3.00, accept rate: 0.75, cuda graph: True, gen throughput (token/s): "
    "80.00, #queue-req: 2, "
)
HYBRID = (
    "[2026-11-02 07:00:03 TP0] Decode batch, #running-req: 1, #full token: 90, full token usage: "
    "0.00, mamba num: 2, mamba usage: 0.04, accept len: 1.50, accept rate: 0.17, cuda graph: "
    "True, gen throughput (token/s): 80.00, #queue-req: 0"
)
NEW = (
    "[2026-11-02 07:00:04 TP0] Decode batch [4711], #running-req: 2, #token: 90, token usage: "
    "0.00, accept len: 2.50, cap len: 4.00, accept rate: 0.50, npu graph: False, gen throughput "
    "(token/s): 80.00, #queue-req: 0, #pending: 1.2.3, next: -"
)
PREFILL = (
    "[2026-11-02 07:00:05 TP0] Prefill batch, #new-seq: 1, #new-token: 8192, #cached-token: 0, "
    "token usage: 0.02, #running-req: 0, #queue-req: 1, cuda graph: False, input throughput "
    "(token/s): 9000.10"
)
PLAIN = OLD.replace("accept len: 2.00, ", "")


def batches(*lines: str) -> tuple[Batch, ...]:
    return read_log([(1.0, line) for line in lines]).batches


def counters(tokens: float | None, passes: float | None = None) -> dict[str, Metric]:
    given = {"generation_tokens_total": tokens, "spec_verify_calls_total": passes}
    return {name: Metric(value, value) for name, value in given.items() if value is not None}


@pytest.mark.parametrize(
    ("line", "running", "length", "queued"),
    [(OLD, 3, 2.0, 0), (MIDDLE, 1, 3.0, 2), (HYBRID, 1, 1.5, 0), (NEW, 2, 2.5, 0)],
)
def test_all_forms_of_a_line(line: str, running: int, length: float, queued: int) -> None:
    (batch,) = batches(line)
    assert batch.decodes
    said = {"#running-req": running, "accept len": length, "#queue-req": queued}
    assert said.items() <= batch.values.items()
    assert "gen throughput (token/s)" in batch.values


def test_other_lines() -> None:
    (batch,) = batches(PREFILL)
    assert (batch.decodes, batch.values["#new-token"]) == (False, 8192)
    assert batches("Decode batch", "a user says: Decode batch, #running-req: 1") == ()


@pytest.mark.parametrize(
    ("scrapes", "lines", "found"),
    [
        (
            (counters(1000, 500), counters(3000, 1300)),
            (OLD,),  # the counters are exact
            {"accept_length": 2.5, "accept_rate": 0.5, "source": "metrics"},
        ),
        # before 0.5.13: three requests at 2.0 and one at 3.0
        (
            (counters(1000), counters(3000)),
            (OLD, MIDDLE, PREFILL),
            {"accept_length": 2.25, "accept_rate": 0.4167, "source": "log"},
        ),
        ((None, None), (NEW,), {"accept_length": 2.5, "accept_rate": 0.5, "source": "log"}),
        # more tokens than passes can give: of requests that began before
        (
            (counters(0, 0), counters(9000, 1000)),
            (MIDDLE,),
            {"accept_length": 3.0, "source": "log"},
        ),
        ((counters(0, 0), counters(9000, 1000)), (), {"reason": "take a longer window"}),
        ((counters(0, 0), counters(10, 1000)), None, {"reason": "take a longer window"}),
        # a counter shows when it has counted
        (({}, counters(400, 200)), (), {"accept_length": 2.0}),
        # nothing to measure
        ((counters(5, 5), counters(5, 5)), (), {"reason": "nothing was generated"}),
        ((None, None), (), {"reason": "nothing was generated"}),
        ((None, None), None, {"reason": "neither /metrics .* nor its journal"}),
        ((counters(5), counters(905)), (PLAIN,), {"reason": "it does not speculate: its log"}),
        ((counters(5), counters(905)), (), {"reason": "does not speculate, or too few tokens"}),
        ((counters(900, 500), counters(100, 50)), (OLD,), {"reason": "counters went back"}),
    ],
)
def test_window(scrapes: Any, lines: tuple[str, ...] | None, found: dict[str, Any]) -> None:
    seen = measure(Window(60.0), 4, scrapes, None if lines is None else batches(*lines))
    reason = found.pop("reason", None)
    for name, value in found.items():
        assert getattr(seen, name) == pytest.approx(value, abs=1e-3), name
    assert (seen.accept_length is None) is (reason is not None)
    assert re.search(reason or "^$", seen.reason or ""), seen.reason


def test_all_schedulers_that_report_count_once() -> None:
    text = "".join(
        f'sglang:spec_verify_calls_total{{tp_rank="{rank}"}} 200.0\n' for rank in range(4)
    )
    after = parse_metrics(text + "sglang:generation_tokens_total 500.0\n")
    assert measure(Window(1.0), 4, ({}, after), ()).accept_length == 2.5
