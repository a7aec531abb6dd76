"""Work in a child: answers, answers that never come, and what a child may keep open."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from ansible_collections.gpuhost.inference.plugins.module_utils import _child
from ansible_collections.gpuhost.inference.plugins.module_utils._child import ask, in_child
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import UnreadableError
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader


@pytest.fixture
def pipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Give a folder for pipes nobody writes to: reading one blocks, as behind a device lock."""
    monkeypatch.setattr(_child, "_SECONDS", 0.5)
    yield tmp_path
    for pipe in tmp_path.iterdir():
        if pipe.is_fifo():  # lets the children go that were left behind
            os.close(os.open(pipe, os.O_RDWR | os.O_NONBLOCK))


def test_answers_may_be_long_absent_or_of_several_lines(tmp_path: Path) -> None:
    (tmp_path / "lines").write_text("Device Minor: 1\r\nsecond\n\nlast")
    (tmp_path / "long").write_text("x" * 300_000)
    host = Reader(str(tmp_path))
    assert ask(host.text, ["/lines", "/absent", "/long"]) == {
        "/lines": "Device Minor: 1\r\nsecond\n\nlast",
        "/absent": None,
        "/long": "x" * 300_000,
    }


def test_what_blocks_or_cannot_be_read_has_no_answer_and_hides_nothing(pipes: Path) -> None:
    os.mkfifo(pipes / "blocks")
    (pipes / "folder").mkdir()
    for name in ("first", "last"):
        (pipes / name).write_text(name)
    found = ask(Reader(str(pipes)).text, ["/first", "/blocks", "/folder", "/last"])
    assert found == {"/first": "first", "/last": "last"}


def test_after_eight_that_block_nothing_more_is_tried(pipes: Path) -> None:
    names = [f"/blocks{at}" for at in range(9)]
    for name in names:
        os.mkfifo(pipes / name[1:])
    for at in (7, 8):
        (pipes / f"after{at}").write_text("here")
    asked = [*names[:7], "/after7", *names[7:], "/after8"]
    assert ask(Reader(str(pipes)).text, asked) == {"/after7": "here"}


def test_a_child_that_fails_leaves_the_rest_unanswered() -> None:
    def read(item: str) -> str:
        if item == "b":
            raise ValueError(item)
        return item

    assert ask(read, "abc") == {"a": "a"}


def test_unreadable_is_no_answer() -> None:
    def read(item: str) -> str:
        raise UnreadableError(item)

    assert ask(read, "a") == {}


def test_the_deadline_is_one_of_silence() -> None:
    def count(send: _child.Send) -> None:
        for _number in range(8):
            send(b".")
            signal.sigtimedwait([], 0.2)

    assert in_child(count, (), 1) == (b"........", 0)


def test_a_child_left_behind_keeps_nothing_of_its_parent(tmp_path: Path) -> None:
    def wait(send: _child.Send) -> None:
        send(b"started")
        signal.sigtimedwait([], 30)

    with (tmp_path / "lock").open("w") as lock:
        answer, pid = in_child(wait, (), 1)
        kept = {os.readlink(f"/proc/{pid}/fd/{name}") for name in os.listdir(f"/proc/{pid}/fd")}
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        assert answer == b"started"
        assert lock.name not in kept
        assert {"/dev/null"} == {name for name in kept if not name.startswith("pipe:")}
