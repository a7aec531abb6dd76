# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The child processes: a scheduler for each rank, which holds its GPU, and the detokenizer.

Rank 0 runs the engine and talks to the server process over a socket, a JSON list on each line.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import time
from dataclasses import dataclass
from typing import Any, NoReturn

from sglang.standin.arguments import dumps
from sglang.standin.engine import Engine, Request
from sglang.standin.model import Model, Pools, plan
from sglang.standin.process import log, set_title

DRAFT_GIB = 1.91  # weights of the draft layer on each of four ranks
MAX_LAG = 0.1  # seconds of lost time that the engine may catch up


@dataclass(frozen=True)
class Child:
    """A child process; the detokenizer has no channel."""

    name: str
    pid: int
    channel: socket.socket | None


def start(args: dict[str, Any], model: Model) -> list[Child]:
    """Fork all children, each with only its own end of its own channel."""
    children: list[Child] = []
    names = [f"scheduler_{rank}" for rank in range(args["tp_size"])]
    for rank, name in enumerate(names):
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            ours.close()
            _close(children)
            _run_rank(rank, args, model, theirs)
        theirs.close()
        children.append(Child(name, pid, ours))
    pid = os.fork()
    if pid == 0:
        _close(children)
        set_title("sglang::detokenizer")
        while True:  # stays until somebody kills it, as the real one
            signal.pause()
    children.append(Child("detokenizer", pid, None))
    return children


def _close(children: list[Child]) -> None:
    for child in children:
        if child.channel:
            child.channel.close()


def _run_rank(rank: int, args: dict[str, Any], model: Model, channel: socket.socket) -> NoReturn:
    suffix = f" TP{rank}" if args["tp_size"] > 1 else ""
    set_title("sglang::scheduler" + suffix.replace(" ", "_"), suffix)
    try:
        nodes = _open_gpu(args["base_gpu_id"] + rank * args["gpu_id_step"])
        pools = plan(args, model)
    except (OSError, RuntimeError) as error:
        log(
            "Scheduler hit an exception: Traceback (most recent call last):\n"
            f"{type(error).__name__}: {error}\n"
        )
        sys.stdout.flush()
        os._exit(1)
    _load(rank, args, model, pools)
    try:
        channel.sendall(dumps(["ready", pools.__dict__]) + b"\n")
        if rank == 0:
            scale = float(os.environ.get("LAB_SGLANG_TIME_SCALE", "1"))
            _Loop(Engine(args, pools, model.has_mtp), channel, scale).run()
        channel.recv(1)  # nothing ever comes; the end does
    except (BrokenPipeError, ConnectionResetError):  # the server process is gone
        os._exit(1)
    for node in nodes:
        os.close(node)
    os._exit(0)


def _open_gpu(index: int) -> list[int]:
    """Open the nodes that CUDA opens for one device and keep them open.

    Raises:
        RuntimeError: there is no such device; the texts are CUDA's and SGLang's.
        OSError: a node cannot be opened, EIO for a GPU whose firmware does not start.
    """
    if os.environ.get("LAB_SGLANG_GPUS") == "none":
        return []
    numbers = sorted(
        int(name[6:])
        for name in os.listdir("/dev")
        if name.startswith("nvidia") and name[6:].isdigit()
    )
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        wanted = [int(word) for word in chosen.split(",") if word.strip().isdigit()]
        numbers = [numbers[at] for at in wanted if at < len(numbers)]
    if not numbers:
        raise RuntimeError("No CUDA devices found via torch.cuda.")
    if index >= len(numbers):
        raise RuntimeError("CUDA error: invalid device ordinal")
    names = ("nvidiactl", "nvidia-uvm", f"nvidia{numbers[index]}")
    try:
        return [os.open(f"/dev/{name}", os.O_RDWR | os.O_CLOEXEC) for name in names]
    except FileNotFoundError as error:
        raise RuntimeError(f"No CUDA devices found via torch.cuda. ({error})") from error


def _load(rank: int, args: dict[str, Any], model: Model, pools: Pools) -> None:
    """Take the time that loading takes, with the lines that SGLang writes meanwhile."""
    seconds = float(os.environ.get("LAB_SGLANG_LOAD_SECONDS", "4"))
    free = model.GPU_GIB
    log("Init parallel begin.")
    time.sleep(seconds * 0.1)
    log(f"Init parallel ends. elapsed={seconds * 0.1:.2f} s")
    weights = [(model.architecture, pools.weight)]
    if args["speculative_algorithm"]:
        draft = "Qwen3_5ForCausalLMMTP" if "Qwen3_5" in model.architecture else "DraftForCausalLM"
        weights.append((draft, DRAFT_GIB))
    for name, size in weights:
        took = seconds * 0.7 / len(weights)
        log(f"Load weight begin. avail mem={free:.2f} GB")
        time.sleep(took)
        free -= size
        log(
            f"Load weight end. elapsed={took:.2f} s, type={name}, "
            f"avail mem={free:.2f} GB, mem usage={size:.2f} GB."
        )
    if pools.state_slots:
        text = (
            f"Mamba Cache is allocated. max_mamba_cache_size: {pools.state_slots}, "
            f"conv_state size: {pools.conv:.2f}GB, ssm_state size: {pools.ssm:.2f}GB "
        )
        if pools.intermediate:
            text += f"intermediate_ssm_state_cache size: {pools.intermediate:.2f}GB "
        log(text)
    log(
        f"KV Cache is allocated. dtype: torch.bfloat16, #tokens: {pools.tokens}, "
        f"K size: {pools.kv / 2:.2f} GB, V size: {pools.kv / 2:.2f} GB"
    )
    log(f"Memory pool end. avail mem={pools.free:.2f} GB")
    if rank == 0:
        _log_cap(args, pools)
    for role in ["target", "draft"][: len(weights)]:
        log(f"Capture {role} decode CUDA graph begin. backend=full, avail mem={pools.free:.2f} GB")
    time.sleep(seconds * 0.2)
    if rank == 0:
        log(
            f"max_total_num_tokens={pools.tokens}, "
            f"chunked_prefill_size={args['chunked_prefill_size']}, "
            f"max_prefill_tokens={args['max_prefill_tokens']}, "
            f"max_running_requests={pools.max_running}, context_len={args['context_length']}, "
            f"available_gpu_mem={pools.free:.2f} GB"
        )


def _log_cap(args: dict[str, Any], pools: Pools) -> None:
    wanted = args["max_running_requests"]
    if pools.capped:
        log(
            f"max_running_requests is capped to {pools.max_running} by the mamba state cache "
            f"(max_mamba_cache_size={pools.state_slots}, {pools.slots_per_request} state slots "
            "per request). To raise it: increase --mamba-full-memory-ratio or "
            "--max-mamba-cache-size, or halve the state size with --mamba-ssm-dtype bfloat16."
        )
    elif wanted and pools.max_running < wanted:
        log(
            f"max_running_requests was reduced from the requested {wanted} to {pools.max_running} "
            "(per dp worker) due to the available KV cache capacity."
        )


class _Loop:
    """Gives the engine its clock: a step is announced when its time is over."""

    def __init__(self, engine: Engine, channel: socket.socket, scale: float) -> None:
        self._engine = engine
        self._channel = channel
        self._scale = scale
        self._rest = b""

    def run(self) -> None:
        """Work until the server process closes the channel."""
        due, progress = 0.0, None
        while True:
            if progress is None and (self._engine.waiting or self._engine.running):
                seconds, progress = self._engine.step()
                due = max(due, time.monotonic() - MAX_LAG) + seconds * self._scale
            timeout = None if progress is None else max(0.0, due - time.monotonic())
            if select.select([self._channel], [], [], timeout)[0]:
                data = self._channel.recv(1 << 16)
                if not data:
                    return
                self._receive(data)
            elif progress is not None:
                self._send("progress", progress, self._engine.gauges())
                progress = None

    def _receive(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            verb, *words = json.loads(line)
            if verb == "add":
                if not self._engine.add(Request(*words)):
                    self._send("full", words[0])
            elif verb == "abort":
                self._engine.abort(words[0])
            elif verb == "flush":
                self._send("answer", words[0], self._engine.flush())
            elif verb == "state":
                state = {"last_gen_throughput": self._engine.throughput}
                average = self._engine.average_accept_length()
                if average is not None:
                    state["avg_spec_accept_length"] = average
                self._send("answer", words[0], state)

    def _send(self, *message: Any) -> None:
        self._channel.sendall(dumps(message) + b"\n")
