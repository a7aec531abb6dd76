"""Commands: output in blocks, and a clear error for each way of going wrong."""

from __future__ import annotations

import sys

import pytest
from ansible_collections.gpuhost.inference.plugins.module_utils._command import (
    CommandError,
    run,
    stream,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError


def test_output() -> None:
    assert run(["sh", "-c", "echo one; echo two"]) == "one\ntwo\n"
    assert len(b"".join(stream(["head", "-c", "200000", "/dev/zero"], 30))) == 200000


@pytest.mark.parametrize(
    ("command", "timeout", "said"),
    [
        (["no-such-command-here"], 30, "cannot be run: No such file"),
        (["sh", "-c", "echo sorry >&2; exit 3"], 30, r"failed \(3\): sorry"),
        (["sleep", "60"], 0.1, "sleep was stopped after 0.1 s, before its end"),
        (["sh", "-c", "kill -9 $$"], 30, r"failed \(-9\)"),
    ],
)
def test_errors(command: list[str], timeout: float, said: str) -> None:
    with pytest.raises(GpuHostError, match=said):
        run(command, timeout)


def test_a_reader_who_stops_early_leaves_no_process() -> None:
    blocks = stream(["yes"], 30)
    assert next(blocks).startswith(b"y\n")
    blocks.close()  # type: ignore[attr-defined]


def test_what_counts_as_success() -> None:
    assert b"".join(stream(["sh", "-c", "echo x; exit 1"], 30, good=(0, 1))) == b"x\n"
    complaint = ["sh", "-c", "echo x; echo damaged >&2"]
    assert b"".join(stream(complaint, 30)) == b"x\n"
    with pytest.raises(CommandError) as raised:
        list(stream(complaint, 30, silent=True))
    assert (raised.value.code, raised.value.said) == (0, "damaged")


def test_memory_of_a_command_may_be_limited() -> None:
    needs = [sys.executable, "-c", "print(len(bytes(1 << 30)))"]
    assert b"".join(stream(needs, 60)) == b"1073741824\n"
    with pytest.raises(CommandError, match="MemoryError"):
        list(stream(needs, 60, memory=600 << 20))
