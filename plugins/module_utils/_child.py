# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.

"""Work that may never return, done in a child process.

A system call that waits in the kernel for a lock, a driver or a dead file server cannot be
cancelled, not even by a signal. Only a process of its own can be left behind with it.
"""

from __future__ import annotations

import json
import os
import select
import time
from collections.abc import Iterable
from typing import Callable

from ansible_collections.gpuhost.inference.plugins.module_utils._errors import UnreadableError

Send = Callable[[bytes], object]

_SECONDS = 2.0  # one reading takes microseconds, unless somebody holds a lock
_GIVE_UP = 8  # each reading that blocks leaves a process behind, and costs _SECONDS


def in_child(
    action: Callable[..., None], arguments: tuple[object, ...], timeout: float
) -> tuple[bytes, int]:
    """Run `action(send, *arguments)` in a child, which may be silent for `timeout` seconds.

    Returns:
        What the child sent, and its process number if it hangs, else 0. A child that hangs is
        never waited for: nothing could end it.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            null = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1, 2):  # a child left behind must not keep Ansible's pipes open
                os.dup2(null, stream)
            for open_file in map(int, os.listdir("/proc/self/fd")):
                if open_file > 2 and open_file != writing:  # nor the lock of the host
                    _close(open_file)
            action(lambda data: os.write(writing, data), *arguments)
        finally:
            os._exit(0)
    os.close(writing)
    answers: list[bytes] = []
    deadline = time.monotonic() + timeout
    try:
        while select.select([reading], [], [], max(0.0, deadline - time.monotonic()))[0]:
            data = os.read(reading, 65536)
            if not data:
                os.waitpid(child, 0)
                return b"".join(answers), 0
            answers.append(data)
            deadline = time.monotonic() + timeout
        return b"".join(answers), child
    finally:
        os.close(reading)


def _close(open_file: int) -> None:
    try:
        os.close(open_file)
    except OSError:
        return  # the listing's own, closed meanwhile


def ask(read: Callable[[str], str | None], items: Iterable[str]) -> dict[str, str | None]:
    """Return `read(item)` for each item, in a child, waiting at most two seconds for each.

    Returns:
        The answers. An item has none when its reading blocked or raised `UnreadableError`, or
        when eight before it blocked: then nothing more is tried.
    """
    left = list(items)
    found: dict[str, str | None] = {}
    for _attempt in range(_GIVE_UP):
        if not left:
            break
        sent, child = in_child(_answer, (read, left), _SECONDS)
        answers = [json.loads(line) for line in sent.split(b"\n")[:-1]]
        found.update({item: answer[0] for item, answer in zip(left, answers) if answer is not None})
        left = left[len(answers) + 1 :]  # the one after the last answer is what blocks
        if not child:
            break
    return found


def _answer(send: Send, read: Callable[[str], str | None], items: list[str]) -> None:
    for item in items:
        try:
            answer = [read(item)]
        except UnreadableError:
            send(b"null\n")
        else:
            send(json.dumps(answer).encode() + b"\n")
