"""Writes that succeed, are refused, or never return. A FIFO without a reader blocks its writer."""

from __future__ import annotations

import errno
import os
import select
from pathlib import Path

from ansible_collections.gpuhost.inference.plugins.module_utils import _kernel_write
from ansible_collections.gpuhost.inference.plugins.module_utils._kernel_write import (
    Outcome,
    write,
)
from pytest import MonkeyPatch  # noqa: PT013


def release(fifo: Path) -> None:
    """Let the child that a test left behind end."""
    os.close(os.open(fifo, os.O_RDWR | os.O_NONBLOCK))


def test_a_write_arrives_with_a_newline(tmp_path: Path) -> None:
    file = tmp_path / "type"
    file.write_text("DMA-FQ\n")
    assert write(str(file), "DMA", 5) == Outcome("ok")
    assert file.read_text().startswith("DMA\n")


def test_a_refusal_carries_the_errno(tmp_path: Path) -> None:
    outcome = write(str(tmp_path / "none"), "1", 5)
    assert (outcome.state, outcome.errno) == ("refused", errno.ENOENT)


def test_a_refusal_of_the_write_itself_is_seen() -> None:
    outcome = write("/dev/full", "1", 5)  # opening succeeds, as with files of the kernel
    assert (outcome.state, outcome.errno) == ("refused", errno.ENOSPC)


def test_a_write_that_never_returns_is_left_behind(tmp_path: Path) -> None:
    fifo = tmp_path / "unbind"
    os.mkfifo(fifo)
    with (tmp_path / "lock").open("w") as lock:
        outcome = write(str(fifo), "0000:41:00.0", 0.2)
        left = {os.readlink(f"/proc/{outcome.pid}/fd/{n}") for n in ("0", "1", "2")}
        assert outcome == Outcome("stuck", pid=outcome.pid)
        assert left == {"/dev/null"}
        held = os.listdir(f"/proc/{outcome.pid}/fd")
        links = [os.readlink(f"/proc/{outcome.pid}/fd/{entry}") for entry in held]
        assert lock.name not in links  # else it would hold the lock of the host for good
    release(fifo)


def test_the_child_keeps_no_stream_of_its_parent_open(tmp_path: Path) -> None:
    fifo = tmp_path / "unbind"
    os.mkfifo(fifo)
    reading, writing = os.pipe()
    stdout = os.dup(1)
    os.dup2(writing, 1)
    os.close(writing)
    try:
        write(str(fifo), "0000:41:00.0", 0.2)
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
    # Ansible waits for the end of this stream, which a child that has it open would withhold
    ended = bool(select.select([reading], [], [], 1)[0])
    os.close(reading)
    release(fifo)
    assert ended


def test_a_module_that_cannot_be_loaded_says_why(monkeypatch: MonkeyPatch, tmp_path: Path) -> None:
    modprobe = tmp_path / "modprobe"
    modprobe.write_text(
        '#!/bin/sh\n[ "$1" = good ] || { echo "FATAL: Module $1 not found" >&2; exit 1; }\n'
    )
    modprobe.chmod(0o755)
    monkeypatch.setattr(_kernel_write, "MODPROBE", str(modprobe))
    assert write(str(modprobe), "good", 5) == Outcome("ok")
    refused = write(str(modprobe), "bad", 5)
    assert refused.state == "refused"
    assert refused.detail.endswith("modprobe bad failed (1): FATAL: Module bad not found")
    monkeypatch.setattr(_kernel_write, "MODPROBE", str(tmp_path / "none"))
    assert "No such file" in write(str(tmp_path / "none"), "good", 5).detail


def test_opening_a_node_tells_how_it_ended(tmp_path: Path) -> None:
    (tmp_path / "nvidia0").touch()
    assert _kernel_write.open_node(str(tmp_path / "nvidia0"), 10) == Outcome("ok")
    gone = _kernel_write.open_node(str(tmp_path / "nvidia1"), 10)
    assert (gone.state, gone.errno) == ("refused", errno.ENOENT)
