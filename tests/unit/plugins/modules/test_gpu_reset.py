"""The module `gpu_reset`: options reach the resetting, its answer reaches the user."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuhost.inference.plugins.module_utils._kernel_write import Machine
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader
from ansible_collections.gpuhost.inference.plugins.modules import gpu_reset
from fake_kernel import FakeKernel

Run = Callable[..., dict[str, Any]]


@pytest.fixture
def kernel(host_tree: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> FakeKernel:
    root = host_tree("eight-gpus")
    fake = FakeKernel(root)

    def machine(host: Reader, _write: Any, timeout: float, drain: float) -> Machine:
        return Machine(host, fake, timeout, drain, fake.run, fake.log, fake.start)

    monkeypatch.setattr(gpu_reset, "Reader", lambda: Reader(str(root)))
    monkeypatch.setattr(gpu_reset, "Machine", machine)
    return fake


def test_what_helped_is_told(kernel: FakeKernel, run_module: Run) -> None:
    kernel.cures = {"0000:44:00.0": "bus"}
    result = run_module(gpu_reset, addresses="44:00.0", methods="rebind,bus")
    assert [one["helped"] for one in result["attempts"]] == [False, True]
    assert (result["changed"], result["ill"]) == (True, [])
    assert kernel.resets == [("0000:44:00.0", "bus")]


def test_what_nothing_helped_fails_with_all_results(kernel: FakeKernel, run_module: Run) -> None:
    kernel.cures = {"0000:44:00.0": "power-off"}
    result = run_module(gpu_reset, addresses=["44:00.0"])
    assert result["failed"] is True
    assert result["ill"][0]["address"] == "0000:44:00.0"
    assert result["writes"]


def test_check_mode_and_diff(kernel: FakeKernel, run_module: Run) -> None:
    result = run_module(gpu_reset, check=True, diff=True, addresses=["44:00.0"])
    assert kernel.writes == []
    assert result["changed"] is True
    assert result["diff"]["after"] == {"0000:44:00.0": {"driver": "nvidia", "override": "nvidia"}}


def test_warnings_reach_the_user(kernel: FakeKernel, run_module: Run) -> None:
    result = run_module(gpu_reset, addresses=["82:00.0"], methods=["flr"])
    assert "0000:82:00.0 was reset by flr" in str(result["warnings"])


@pytest.mark.parametrize("options", [{"methods": ["warm"]}, {"accept": ["in-use"]}])
def test_wrong_words_are_option_errors(
    kernel: FakeKernel, run_module: Run, options: dict[str, Any]
) -> None:
    result = run_module(gpu_reset, addresses=["44:00.0"], **options)
    assert "must be one or more of" in result["msg"]
    assert kernel.writes == []
