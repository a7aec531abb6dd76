# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.
"""What SGLang's log says: how far a start has come, and which line explains its end.

Texts are those of the releases 0.4.10 to 0.5.23 (`srt/managers`, `srt/model_executor`, and what
PyTorch, NCCL, Triton and uvicorn write through the same log). They carry a prefix of time and rank.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ansible_collections.gpuhost.inference.plugins.module_utils._redact import redact

_PREFIX = re.compile(r"^\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?: [A-Z]+\d+)*\] ")


@dataclass(frozen=True)
class Meaning:
    """What a line of the log stands for.

    Attributes:
        pattern: what is searched in the line.
        text: what it means and what to do, in one sentence.
        fatal: the server does not survive it.
        follows: it is only the consequence of an earlier line, which is to be preferred.
    """

    pattern: str
    text: str
    fatal: bool = True
    follows: bool = False


MEANINGS = (
    Meaning(
        r"unrecognized arguments:|ambiguous option:|invalid choice:|expected .*argument",
        "a flag is not one of this release: check the command line with sglang_flags_info",
    ),
    Meaning(
        r"[Aa]ddress already in use|Port .* is already in use",
        "another server owns the port: stop it, or choose another port",
    ),
    Meaning(
        r"Hybrid \(mamba/linear-attention\) state cache is too small"
        r"|Not enough GPU memory for hybrid",
        "too few state slots for one request each: raise mem_fraction_static, lower the number of "
        "draft tokens, or keep the states in bfloat16 (mamba-ssm-dtype)",
    ),
    Meaning(
        r"Not enough memory\. Please try to increase --mem-fraction-static"
        r"|Loaded weights leave no GPU memory for the KV cache",
        "no memory is left for the cache: raise mem_fraction_static, or use more GPUs",
    ),
    Meaning(
        r"The memory capacity is unbalanced",
        "another process holds memory of a GPU: find it with nvidia-smi; a retry does not help",
    ),
    Meaning(
        r"Capture cuda graph failed",
        "memory ran out while graphs were captured: lower mem_fraction_static or the graphs' batch",
    ),
    Meaning(
        r"CUDA out of memory|OutOfMemoryError",
        "a GPU's memory is full: lower mem_fraction_static, the graphs' batch or the prefill chunk",
    ),
    Meaning(
        r"out of resource: shared memory",
        "a Triton kernel is too big for this GPU: choose another attention or MoE backend, "
        "or a newer SGLang (sgl-project/sglang issue 28019)",
    ),
    Meaning(
        r"an illegal memory access was encountered",
        "a kernel is faulty: try another attention backend, another release, or without MTP",
    ),
    Meaning(
        r"Watchdog caught collective operation timeout",
        "a GPU waits for another: look at peer-to-peer transfers and the IOMMU of the host, "
        "or set NCCL_P2P_DISABLE=1",
    ),
    Meaning(
        r"peer access is not supported between these two devices",
        "the GPUs have no peer-to-peer: add the flag disable-custom-all-reduce",
    ),
    Meaning(
        r"NCCL error|unhandled cuda error|unhandled system error",
        "NCCL failed: set NCCL_DEBUG=INFO, look at the size of /dev/shm and at peer-to-peer",
    ),
    Meaning(
        r"No CUDA devices found|No accelerator \(CUDA|No CUDA GPUs are available",
        "the GPUs are not visible here: are their device nodes passed into the container, may "
        "the service's user open them, and does the driver's version inside equal the host's?",
    ),
    Meaning(
        r"nknown speculative algorithm",
        "the name of the speculative algorithm is not known to this release",
    ),
    Meaning(
        r"watchdog timeout \(self\.watchdog_timeout",
        "a step did not end within the watchdog's time; the server kills itself",
    ),
    Meaning(
        r"Initialization failed\. warmup error",
        "the generation that ends a start failed",
        follows=True,
    ),
    Meaning(
        r"scheduler died during initialization \(exit code: -9\)",
        "a scheduler was killed: by the kernel for want of memory, or by a memory limit",
    ),
    Meaning(r"Scheduler hit an exception: Traceback", "a rank died", follows=True),
    Meaning(
        r"scheduler died during initialization|Subprocess .* crashed with exit code",
        "a rank died",
        follows=True,
    ),
    Meaning(r"Received sigquit from a child process|SIGQUIT received", "a rank died", follows=True),
    Meaning(
        r"Health check failed\. Server couldn't get a response",
        "the scheduler was busy or hung for the time of a health check",
        fatal=False,
    ),
    Meaning(r"Gracefully exiting", "it answers its last requests before it stops", fatal=False),
)

CONNECTING = "connecting the GPUs"
# How far a start has come, in the order of the stages.
_STAGES = (
    (r"server_args=", "reading its configuration"),
    (r"Init (torch distributed|parallel) begin", CONNECTING),
    (r"Load weight begin", "loading weights"),
    (r"Load weight end|(Mamba|KV) Cache is allocated", "allocating memory"),
    (r"Capture .*begin", "capturing graphs"),
    (r"max_total_num_tokens=", "starting the web server"),
    (r"Uvicorn running on|Application startup complete", "warming up"),
)
_READY = "The server is fired up and ready to roll"
_SHARDS = re.compile(r"(\d+)% Completed \| (\d+/\d+)")
_EXCEPTION = re.compile(r"^([\w.]*(?:Error|Exception|Interrupt))\b(?:: (.*))?$")


@dataclass(frozen=True)
class Log:
    """The log of one run of the server.

    Attributes:
        ready: it has said that it is ready; also when the log is too long to see its beginning.
        progress: the stage of the start, with a share of the weights where it is told.
        decisive: the line that explains the server's end best, `None` when there is none.
        meaning: what that line means.
        fatal: whether the server does not survive it.
        last: the last line.
        quiet: seconds since it was written, `None` when not known.
        draft_model: a draft model was built for speculation.
        tail: the last lines.
    """

    ready: bool
    progress: str | None
    decisive: str | None
    meaning: str | None
    fatal: bool
    last: str | None
    quiet: float | None
    draft_model: bool
    tail: tuple[str, ...] = ()


def read_log(
    records: Sequence[tuple[float | None, str]], now: float | None = None, truncated: bool = False
) -> Log:
    """Return what the lines of one run say.

    Args:
        records: time (seconds since 1970) and text of each line, oldest first.
        now: the time of reading.
        truncated: older lines of the run are not among them.
    """
    lines = [_PREFIX.sub("", text) for _time, text in records]
    progress = None
    for line in lines:
        progress = next((stage for mark, stage in _STAGES if re.search(mark, line)), progress)
        shards = _SHARDS.findall(line)  # a progress bar is one long line of its states
        if shards:
            progress = f"loading weights, {shards[-1][0]} % ({shards[-1][1]} files)"
    ready = truncated or any(_READY in line for line in lines)
    decisive, meaning = _decisive(lines)
    written = next((at for at, _text in reversed(records) if at is not None), None)
    return Log(
        ready=ready,
        progress=None if ready else progress,
        decisive=redact(decisive)[:500] if decisive else None,
        meaning=meaning.text if meaning else None,
        fatal=meaning.fatal if meaning else False,
        last=redact(lines[-1])[:300] if lines else None,
        quiet=max(0.0, now - written) if now is not None and written is not None else None,
        draft_model=any(
            "Load weight end" in line and re.search(r"type=\w*(?:MTP|NextN|Eagle)", line)
            for line in lines
        ),
        tail=tuple(redact(line)[:500] for line in lines[-20:]),
    )


def _decisive(lines: Sequence[str]) -> tuple[str | None, Meaning | None]:
    """Return the line that explains an end: a cause before a consequence, an early one first."""
    found: list[tuple[int, str, Meaning]] = []
    for number, line in enumerate(lines):
        for meaning in MEANINGS:
            if re.search(meaning.pattern, line):
                found.append((number, line, meaning))
                break
    for wanted in (
        [hit for hit in found if hit[2].fatal and not hit[2].follows],
        [hit for hit in found if hit[2].fatal],
        found,
    ):
        if wanted:
            number, line, meaning = wanted[0]
            if meaning.follows:  # the exception below the consequence is the cause
                line = _exception_after(lines, number) or line
            return line, meaning
    return None, None


def _exception_after(lines: Sequence[str], start: int) -> str | None:
    """Return the last exception of the traceback that begins at a line."""
    found = None
    for line in lines[start : start + 200]:
        if _EXCEPTION.match(line.strip()):
            found = line.strip()
        elif found and line and not line.startswith((" ", "Traceback", "During", "The above")):
            break
    return found
