# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Processes as SGLang has them: log lines, titles, children, and how they end."""

from __future__ import annotations

import os
import signal
import time

_prefix = [""]


def log(text: str) -> None:
    """Write one line in the form of SGLang's logger, in one write."""
    stamp = time.strftime("%Y-%m-%d %H:%M:%S")
    os.write(2, f"[{stamp}{_prefix[0]}] {text}\n".encode())


def set_title(title: str, prefix: str = "") -> None:
    """Rename this process for `ps`, as SGLang does with setproctitle, and set the log prefix.

    The kernel shows in `/proc/PID/cmdline` what stands at `arg_start` (field 48 of
    `/proc/PID/stat`, proc(5)); the title is written there and cut to the room that it has.
    """
    _prefix[0] = prefix
    with open("/proc/self/comm", "w", encoding="ascii") as comm:  # noqa: PTH123
        comm.write(title[:15])
    with open("/proc/self/stat", encoding="ascii") as stat:  # noqa: PTH123
        fields = stat.read().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    room = end - start
    with open("/proc/self/mem", "r+b", buffering=0) as memory:  # noqa: PTH123
        memory.seek(start)
        memory.write(title.encode()[: room - 1].ljust(room, b"\0"))


def die(children: list[int]) -> None:
    """Kill the children, then this process: SGLang's end after any failure, status 137."""
    for child in children:
        try:
            os.kill(child, signal.SIGKILL)
        except ProcessLookupError:  # already reaped
            continue
    os.kill(os.getpid(), signal.SIGKILL)
