# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.

"""Writes into the kernel that may be refused, or never return.

A write to `unbind` waits in the driver's remove function, which with the open NVIDIA driver ends
only when the last user of the GPU is gone (kernel-open/nvidia/nv-pci.c); it cannot be killed and
holds the device lock meanwhile. So every access that may block runs in a child process.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Callable

from ansible_collections.gpuhost.inference.plugins.module_utils._child import in_child
from ansible_collections.gpuhost.inference.plugins.module_utils._command import run
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import (
    GpuHostError,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._kernel_log import (
    KernelLog,
    read_since,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader

MODPROBE = "/sbin/modprobe"  # a "write" to this path loads the module named by the value

_MODPROBE_SECONDS = 600  # it runs in a child that has a deadline of its own


@dataclass(frozen=True)
class Write:
    """One step of a plan: a value for a kernel file, or a module for `MODPROBE` to load."""

    path: str
    value: str


@dataclass(frozen=True)
class Outcome:
    """What became of a write: `ok`, `refused` (with the kernel's errno) or `stuck` (who waits)."""

    state: str
    errno: int | None = None
    detail: str = ""
    pid: int | None = None


Writer = Callable[[str, str, float], Outcome]


def open_node(path: str, timeout: float) -> Outcome:
    """Open a device node and close it again, waiting at most `timeout` seconds.

    The NVIDIA driver starts a GPU when its node is opened (nv_open_device in kernel-open/nvidia),
    and answers EIO when that fails.
    """
    return _outcome(*in_child(_open, (path,), timeout))


@dataclass(frozen=True)
class Machine:
    """A host to change.

    Attributes:
        host: reads it.
        write: writes to its kernel.
        timeout: how many seconds one write may take.
        drain: how many seconds processes may take to let go of a GPU they were asked to leave.
        run: runs a command of the host, for what only NVIDIA's or systemd's tools can do.
        log: returns what the kernel logged since so many seconds after boot.
        start: opens a device node, and closes it again.
    """

    host: Reader
    write: Writer
    timeout: float
    drain: float = 30.0
    run: Callable[[Sequence[str], float], str] = run
    log: Callable[[Reader, float], KernelLog] = read_since
    start: Callable[[str, float], Outcome] = open_node


def write(path: str, value: str, timeout: float) -> Outcome:
    """Write a value to a kernel file, waiting at most `timeout` seconds for the kernel.

    After the deadline the write is left behind in its own process: it may still take effect.
    """
    action = _load if path == MODPROBE else _store
    return _outcome(*in_child(action, (path, value), timeout))


def _outcome(answer: bytes, child: int) -> Outcome:
    if child:
        return Outcome("stuck", pid=child)
    if answer == b"ok":
        return Outcome("ok")
    if answer.isdigit():
        return Outcome("refused", int(answer), os.strerror(int(answer)))
    return Outcome("refused", None, answer.decode("utf-8", "replace").strip() or "no answer")


def _store(send: Callable[[bytes], object], path: str, value: str) -> None:
    # os.write, because a buffered file reports the kernel's refusal only when it is closed
    try:
        os.write(os.open(path, os.O_WRONLY), value.encode() + b"\n")
    except OSError as error:
        send(str(error.errno).encode())
    else:
        send(b"ok")


def _open(send: Callable[[bytes], object], path: str) -> None:
    try:
        os.close(os.open(path, os.O_RDWR))
    except OSError as error:
        send(str(error.errno).encode())
    else:
        send(b"ok")


def _load(send: Callable[[bytes], object], path: str, value: str) -> None:
    try:
        run([path, value], _MODPROBE_SECONDS)
    except GpuHostError as error:
        send(str(error).encode())
    else:
        send(b"ok")
