"""What lines of a log mean, how far a start has come, and that no key gets out."""

from __future__ import annotations

import pytest
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_log import (
    Log,
    read_log,
)

START = [
    "[2026-10-31 12:00:00] server_args=ServerArgs(model_path='/m', api_key='hunter2', port=30000)",
    "[2026-10-31 12:00:01 TP0] Init torch distributed begin.",
    "[2026-10-31 12:00:09 TP0] Load weight begin. avail mem=94.3 GB",
    "Loading safetensors checkpoint shards:   0% Completed | 0/39 [00:00<?, ?it/s]"
    "\rLoading safetensors checkpoint shards:  25% Completed | 10/39 [00:05<00:15,  1.9it/s]",
    "[2026-10-31 12:00:30 TP0] Load weight end. elapsed=21 s, type=Qwen3_5ForCausalLMMTP, avail",
    "[2026-10-31 12:00:31 TP0] Capture target decode CUDA graph begin. backend=full",
    "[2026-10-31 12:00:35] INFO:     Uvicorn running on http://127.0.0.1:30000",
    "[2026-10-31 12:00:36] The server is fired up and ready to roll!",
]


def log(*lines: str) -> Log:
    return read_log([(None, line) for line in lines])


@pytest.mark.parametrize(
    ("count", "progress"),
    [
        (1, "reading its configuration"),
        (2, "connecting the GPUs"),
        (3, "loading weights"),
        (4, "loading weights, 25 % (10/39 files)"),
        (5, "allocating memory"),
        (6, "capturing graphs"),
        (7, "warming up"),
        (8, None),
    ],
)
def test_progress(count: int, progress: str | None) -> None:
    found = log(*START[:count])
    assert found.progress == progress
    assert found.ready is (count == 8)
    assert found.draft_model is (count >= 5)
    assert found.decisive is None


def test_long_log_has_been_ready() -> None:
    assert log("[2026-10-31 12:00:36 TP0] Decode batch, #running-req: 1").ready
    assert log('INFO:     127.0.0.1:4711 - "GET /health HTTP/1.1" 200 OK').ready
    assert not log(START[1], 'INFO:     127.0.0.1:4711 - "POST /generate HTTP/1.1" 200 OK').ready


@pytest.mark.parametrize(
    ("lines", "decisive", "meaning"),
    [
        (
            ["launch_server.py: error: unrecognized arguments: --mamba-scheduler-strategy x"],
            "launch_server.py: error: unrecognized arguments: --mamba-scheduler-strategy x",
            "a flag is not one of this release",
        ),
        (
            [
                "[2026-10-31 12:00:36 TP1] Scheduler hit an exception: Traceback (most recent call",
                '  File "/x/scheduler.py", line 1, in run',
                "    load()",
                "KeyError: 'mtp.fc.weight'",
                "",
                "During handling of the above exception, another exception occurred:",
                "",
                "Traceback (most recent call last):",
                '  File "/x/loader.py", line 2, in load',
                "RuntimeError: no such tensor",
                "",
                "[2026-10-31 12:00:37] Received sigquit from a child process. It usually means the",
            ],
            "RuntimeError: no such tensor",
            "a rank died",
        ),
        (
            [
                "[2026-10-31 12:00:36] Received sigquit from a child process. It usually means",
                "Rank 0 scheduler died during initialization (exit code: -9).",
            ],
            "Rank 0 scheduler died during initialization (exit code: -9).",
            "a scheduler was killed",
        ),
        (
            [
                "[2026-10-31 12:00:36 TP0] Scheduler hit an exception: Traceback (most recent call",
                "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
                "Exception: Capture cuda graph failed: CUDA out of memory.",
            ],
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
            "a GPU's memory is full",
        ),
        (
            ["gpuhost: will not start: /dev/nvidia1 is held by 8 (train --api-key=hunter2)"],
            "gpuhost: will not start: /dev/nvidia1 is held by 8 (train --api-key=(redacted)",
            "/dev/nvidia1 is held by 8",
        ),
        (
            [
                "Receive: obj=GenerateReqInput(text='why does CUDA out of memory happen?')",
                "[2026-10-31 12:00:36 TP0] Scheduler hit an exception: Traceback (most recent call",
                "ValueError: a cause",
            ],
            "ValueError: a cause",
            "a rank died",
        ),
        (
            # what it has survived before it was ready did not end it
            [
                "RuntimeError: NCCL error in: x.cpp:1",
                START[-1],
                "[2026-10-31 12:00:36 TP0] torch.OutOfMemoryError: CUDA out of memory. Tried",
            ],
            "torch.OutOfMemoryError: CUDA out of memory. Tried",
            "a GPU's memory is full",
        ),
        (
            ["ERROR:    [Errno 98] error while attempting to bind: address already in use"],
            "ERROR:    [Errno 98] error while attempting to bind: address already in use",
            "another server owns the port",
        ),
    ],
)
def test_decisive_line(lines: list[str], decisive: str, meaning: str) -> None:
    found = log(*START[:5], *lines)
    assert found.decisive == decisive
    assert found.fatal
    assert (found.meaning or "").startswith(meaning)


def test_serious_line_is_not_the_end() -> None:
    line = (
        "Health check failed. Server couldn't get a response from detokenizer for last 20 seconds"
    )
    found = log(*START, line)
    assert (found.decisive, found.fatal) == (line, False)


def test_no_key_leaves_the_log() -> None:
    assert "hunter2" not in repr(log(*START))


def test_times_are_told_of_the_present_stage() -> None:
    records = [(float(10 * at), line) for at, line in enumerate(START[:5])]
    found = read_log(records, now=100.0)
    assert (found.stage, found.quiet) == (60.0, 60.0)  # memory, since the weights are there
    found = read_log(records[:4], now=100.0)
    assert (found.stage, found.quiet) == (80.0, 70.0)  # the shares of a stage are not stages
    assert read_log(records, now=5.0).stage == 0.0
    both = [records[0], (10.0, START[2]), (30.0, START[2].replace("TP0", "TP1"))]
    assert read_log(both, now=100.0).stage == 90.0  # all ranks tell of their stage


def test_what_a_start_says_of_its_size() -> None:
    found = log(
        "server_args=ServerArgs(model_path='/m', nnodes=4, dist_init_addr='a:5', node_rank=3, y=1)",
        "[2026-10-31 12:00:34 TP0] max_total_num_tokens=120, chunked_prefill_size=8192, "
        "max_prefill_tokens=16384, max_running_requests=24, context_len=262144",
    )
    assert (found.nodes, found.node_rank) == (4, 3)
    assert (found.kv_tokens, found.max_running) == (120, 24)


def test_a_rank_that_died() -> None:
    assert log(*START, "[2026-10-31 12:00:36] SIGQUIT received. signum=3, frame=None.").died
    assert not log(*START, "a user asks: why is SIGQUIT received").died
    assert log(*START, "[2026-10-31 12:00:36] SIGTERM received. signum=15").drains
