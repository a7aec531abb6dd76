"""The module's result; the rules are tested with the program that runs before each start."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader
from ansible_collections.gpuhost.inference.plugins.modules import sglang_gpus_info
from trees import unpack

Run = Callable[..., dict[str, Any]]
HOST = """
/dev/nvidia4 c 195:4
/dev/nvidia5 c 195:5
/dev/nvidia-uvm c 511:0
/proc/700/comm = sglang::schedul
/proc/700/cmdline = sglang::scheduler_TP0
/proc/700/cgroup = 0::/system.slice/chat.service
/proc/700/fd/3 -> /dev/nvidia4
/proc/700/fd/4 -> /dev/nvidia-uvm
"""


@pytest.fixture(autouse=True)
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = str(unpack(HOST, tmp_path))
    monkeypatch.setattr(sglang_gpus_info, "Reader", lambda: Reader(root))


def test_own_processes_are_no_strangers(run_module: Run) -> None:
    result = run_module(sglang_gpus_info, wanted={"tp-size": 1}, unit="chat", check=True)
    assert result["gpus"] == [{"node": "/dev/nvidia4", "address": None, "uuid": None}]
    assert (result["changed"], result["fault"]) == (False, None)
    assert (result["strangers"], result["unknown"]) == ([], [])
    full = run_module(sglang_gpus_info, wanted={"tp-size": 1}, unit="chat.service")
    assert full["strangers"] == []
    result = run_module(sglang_gpus_info, wanted={"tp-size": 1}, unit="other")
    assert result["strangers"] == [
        "process 700 (sglang::scheduler_TP0 of chat.service) holds /dev/nvidia4"
    ]


@pytest.mark.parametrize(
    ("wanted", "nodes"),
    [
        ({"base-gpu-id": 1}, ["/dev/nvidia5"]),
        ({"tp-size": 4, "nnodes": 2, "node-rank": 1}, ["/dev/nvidia4", "/dev/nvidia5"]),
        ({"dp-size": 2}, ["/dev/nvidia4", "/dev/nvidia5"]),
        ({"dp-size": 2, "enable-dp-attention": True}, ["/dev/nvidia4"]),
        ({"device": "cpu", "tp-size": 4}, []),
    ],
)
def test_which_gpus_flags_mean(run_module: Run, wanted: dict[str, Any], nodes: list[str]) -> None:
    result = run_module(sglang_gpus_info, wanted=wanted)
    assert [gpu["node"] for gpu in result["gpus"]] == nodes
    assert result["fault"] is None


def test_gpus_that_are_not_there(run_module: Run) -> None:
    result = run_module(sglang_gpus_info, wanted={"tp-size": 4})
    assert result["gpus"] == []
    assert result["fault"] == (
        "its flags want 4 GPUs, of the indices 0 to 3; there are /dev/nvidia4, /dev/nvidia5"
    )
