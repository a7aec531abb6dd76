"""Commands: output in blocks, and a clear error for each way of going wrong."""

from __future__ import annotations

import pytest
from ansible_collections.gpuhost.inference.plugins.module_utils._command import run, stream
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
