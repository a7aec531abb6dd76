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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Optional

from ansible_collections.gpuhost.inference.plugins.module_utils._redact import redact

_PREFIX = re.compile(r"^\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?: [A-Z]+\d+)*\] ")
# A batch's line changed its form four times, so it is read as a head and pairs.
_BATCH = re.compile(r"(Decode|Prefill) batch(?: \[\d+\])?[.,] (.*)$")
_PAIR = re.compile(r"([#A-Za-z][^:,]*?): ([0-9.]+)(?=,|$)")
# A user's text can hold any words, and --log-requests writes it down.
_USERS_TEXT = re.compile(r"(Receive|Finish|Received|Finished)(: | request)")


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
        r"unrecognized arguments:|ambiguous option:|invalid choice:|: expected [\w ]+ arguments?$",
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
LOADING = "loading weights"
WARMING = "warming up"
# How far a start has come, in the order of the stages.
_STAGES = (
    (r"server_args=", "reading its configuration"),
    (r"Init (torch distributed|parallel) begin", CONNECTING),
    (r"Load weight begin", LOADING),
    (r"Load weight end|(Mamba|KV) Cache is allocated", "allocating memory"),
    (r"Capture .*begin", "capturing graphs"),
    (r"max_total_num_tokens=", "starting the web server"),
    (r"Uvicorn running on|Application startup complete", WARMING),
)
# What the role's program says before each start; roles/sglang/files/gpuhost-sglang-start
_WILL_NOT = re.compile(r"gpuhost: will not start: (.+)")
_WAITS = re.compile(r"gpuhost: waits (.+)")
_READY = "The server is fired up and ready to roll"
# What is only said in service: a log without a beginning that says it has been ready.
_SERVES = re.compile(r'Decode batch|"(?:POST /\S+|GET /health\S*) HTTP/1\.1" 200')
_DRAINS = re.compile(r"SIGTERM received|Gracefully exiting")
# A rank that has died takes the server with it, sooner or later.
_DIED = re.compile(
    r"Scheduler hit an exception|Subprocess .* crashed with exit code|SIGQUIT received"
    r"|Received sigquit|Rank \d+ scheduler died"
)
_RANK = re.compile(r"\bnnodes=(\d+),.*\bnode_rank=(\d+)\b")
_SUMMARY = re.compile(r"max_total_num_tokens=(\d+).*\bmax_running_requests=(\d+)")
_SHARDS = re.compile(r"(\d+)% Completed \| (\d+/\d+)")
_EXCEPTION = re.compile(r"^([\w.]*(?:Error|Exception|Interrupt))\b(?:: (.*))?$")

Records = Sequence[tuple[Optional[float], str]]


@dataclass(frozen=True)
class Batch:
    """A line about the batches of the last steps.

    Attributes:
        at: when it was written, in the clock of the records.
        decodes: a line of decoding, else one of a prefill.
        values: what it says, by the names in it: `#running-req`, `accept len`.
    """

    at: float | None
    decodes: bool
    values: dict[str, float]


@dataclass(frozen=True)
class Log:
    """The log of one run of the server.

    Attributes:
        ready: it has said that it is ready, or, where its beginning is lost, that it serves.
        progress: the stage of the start, with a share of the weights where it is told.
        stage: seconds since that stage began, `None` when not known.
        decisive: the line that explains the server's end best, `None` when there is none.
        meaning: what that line means.
        fatal: whether the server does not survive it.
        died: a rank of it has died.
        drains: it was told to end, and answers what is left.
        last: the last line.
        quiet: seconds since it was written, `None` when not known.
        draft_model: a draft model was built for speculation.
        nodes: over how many machines the server is spread, `None` when not known.
        node_rank: which of them this one is; 0 answers requests.
        max_running: how many requests really run at once.
        kv_tokens: size of the key-value cache in tokens.
        batches: what it says of its work.
        tail: the last lines.
    """

    ready: bool
    progress: str | None
    stage: float | None
    decisive: str | None
    meaning: str | None
    fatal: bool
    died: bool
    drains: bool
    last: str | None
    quiet: float | None
    draft_model: bool
    nodes: int | None = None
    node_rank: int | None = None
    max_running: int | None = None
    kv_tokens: int | None = None
    batches: tuple[Batch, ...] = ()
    tail: tuple[str, ...] = ()


def read_log(records: Records, now: float | None = None) -> Log:
    """Return what the lines of one run say.

    Args:
        records: time (seconds, of any clock) and text of each line, oldest first.
        now: the time of reading, of the same clock.
    """
    lines = [_PREFIX.sub("", text) for _time, text in records]
    progress, began, beginning = None, None, False
    for (at, _text), line in zip(records, lines):
        for mark, stage in _STAGES:
            if re.search(mark, line):
                if stage != (progress or "").partition(",")[0]:
                    began = at
                progress = stage
                beginning = True
                break
        waits = _WAITS.match(line)
        if waits:
            progress, began = redact(f"waiting {waits[1]}")[:300], at
        shards = _SHARDS.findall(line)  # a progress bar is one long line of its states
        if shards:
            progress = f"{LOADING}, {shards[-1][0]} % ({shards[-1][1]} files)"
    ready = any(_READY in line for line in lines)
    if not ready and not beginning:
        ready = any(_SERVES.search(line) for line in lines)
    first = max((number for number, line in enumerate(lines) if _READY in line), default=0)
    decisive, meaning = _decisive(lines[first:])
    written = next((at for at, _text in reversed(records) if at is not None), None)
    rank = _last_match(_RANK, lines)
    summary = _last_match(_SUMMARY, lines)
    return Log(
        ready=ready,
        progress=None if ready else progress,
        stage=None if ready else _since(began, now),
        decisive=redact(decisive)[:500] if decisive else None,
        meaning=meaning.text if meaning else None,
        fatal=meaning.fatal if meaning else False,
        died=any(_DIED.match(line) for line in lines),
        drains=any(_DRAINS.match(line) for line in lines),
        last=redact(lines[-1])[:300] if lines else None,
        quiet=_since(written, now),
        draft_model=any(
            "Load weight end" in line and re.search(r"type=\w*(?:MTP|NextN|Eagle)", line)
            for line in lines
        ),
        nodes=int(rank[1]) if rank else None,
        node_rank=int(rank[2]) if rank else None,
        max_running=int(summary[2]) if summary else None,
        kv_tokens=int(summary[1]) if summary else None,
        batches=tuple(
            batch for (at, _text), line in zip(records, lines) for batch in _batches(at, line)
        ),
        tail=tuple(redact(line)[:500] for line in lines[-20:]),
    )


def _since(at: float | None, now: float | None) -> float | None:
    return max(0.0, now - at) if now is not None and at is not None else None


def _last_match(pattern: re.Pattern[str], lines: Sequence[str]) -> re.Match[str] | None:
    found = [match for match in map(pattern.search, lines) if match]
    return found[-1] if found else None


def _batches(at: float | None, line: str) -> Iterator[Batch]:
    head = _BATCH.match(line)
    if head:
        values: dict[str, float] = {}
        for name, value in _PAIR.findall(head[2]):
            if value.count(".") <= 1 and value != ".":
                values[name] = float(value)
        yield Batch(at, head[1] == "Decode", values)


def _decisive(lines: Sequence[str]) -> tuple[str | None, Meaning | None]:
    """Return the line that explains an end: a cause before a consequence, an early one first."""
    for line in lines:
        refused = _WILL_NOT.match(line)
        if refused:
            return line, Meaning(_WILL_NOT.pattern, redact(refused[1])[:500])
    found: list[tuple[int, str, Meaning]] = []
    for number, line in enumerate(lines):
        if _USERS_TEXT.match(line):
            continue
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
