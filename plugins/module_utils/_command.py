# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.

"""Commands of the host with a time limit, their output as a stream.

`AnsibleModule.run_command` has no time limit and holds all output in memory: a kernel journal may
be long, and a driver that hangs makes tools hang.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError

_REAP_SECONDS = 5.0


class CommandError(GpuHostError):
    """A command ended, but not as it should.

    Attributes:
        code: its exit status; below zero the signal that ended it, 127 when it is not installed.
        said: what it wrote to standard error.
    """

    def __init__(self, text: str, code: int, said: str) -> None:
        super().__init__(text)
        self.code = code
        self.said = said


def stream(
    command: Sequence[str],
    timeout: float,
    *,
    good: Sequence[int] = (0,),
    silent: bool = False,
    memory: int | None = None,
    given: bytes = b"",
) -> Iterator[bytes]:
    """Run a command and yield its standard output in blocks.

    Args:
        command: program and arguments.
        timeout: seconds in all, what the caller does between two blocks included.
        good: exit statuses of success.
        silent: a command that wrote to standard error did not succeed.
        memory: bytes of address space that it may have.
        given: its standard input, less than the 64 KiB that a pipe holds (pipe(7)).

    Raises:
        CommandError: it is not installed, or failed.
        GpuHostError: it was stopped after `timeout` seconds.
    """
    reading, writing = os.pipe()
    with tempfile.TemporaryFile() as complaints, _at_hand(given) as its_input:
        child = os.fork()
        if child == 0:
            _become(command, (its_input, writing, complaints.fileno()), memory)
        os.close(writing)
        deadline, ended = time.monotonic() + timeout, False
        try:
            while select.select([reading], [], [], max(0.0, deadline - time.monotonic()))[0]:
                block = os.read(reading, 65536)
                if not block:
                    ended = True
                    break
                yield block
        finally:
            os.close(reading)
            if not ended:
                os.kill(child, signal.SIGKILL)
            code = _exit_status(child, _REAP_SECONDS if not ended else timeout)
        if code is None:
            raise GpuHostError(
                f"{command[0]} (process {child}) does not end, not even when killed: it hangs in "
                "the kernel"
            )
        if not ended:
            raise GpuHostError(f"{command[0]} was stopped after {timeout:g} s, before its end")
        complaints.seek(0)
        said = complaints.read(500).decode("utf-8", "replace").strip()
        if code not in good or (silent and said):
            raise CommandError(f"{' '.join(command)} failed ({code}): {said}", code, said)


@contextmanager
def _at_hand(given: bytes) -> Iterator[int]:
    """Give a pipe with these bytes in it: what runs in a container may read no file of the host."""
    reading, writing = os.pipe()
    try:
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(given)
        yield reading
    finally:
        os.close(reading)


def _exit_status(child: int, seconds: float) -> int | None:
    """Wait for a child's end so many seconds; `None` when it hangs in the kernel."""
    end = time.monotonic() + seconds
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            return None
        time.sleep(0.01)


def _become(command: Sequence[str], streams: Sequence[int], memory: int | None) -> None:
    """Turn this process, a fresh child, into the command, with these three streams."""
    try:
        if memory is not None:
            resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        for target, source in enumerate(streams):
            os.dup2(source, target)
        os.execvp(command[0], list(command))
    except OSError as error:
        os.write(2, f"it cannot be run: {error.strerror}".encode())
    finally:
        os._exit(127)


def run(command: Sequence[str], timeout: float = 30) -> str:
    """Run a command and return its standard output as text; see `stream` for errors."""
    return b"".join(stream(command, timeout)).decode("utf-8", "replace")
