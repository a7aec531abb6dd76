"""The module as a whole: the shape of its result, and wrong options."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.gpuhost.inference.plugins.module_utils import _p2p
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader
from ansible_collections.gpuhost.inference.plugins.modules import gpu_p2p_info

Run = Callable[..., dict[str, Any]]


@pytest.fixture
def without_tools(monkeypatch: pytest.MonkeyPatch, host_tree: Callable[[str], Path]) -> None:
    """Let the module see eight GPUs, and neither nvidia-smi nor a Python with CUDA."""
    root = str(host_tree("eight-gpus"))

    def fail(command: list[str], _timeout: float, given: bytes = b"") -> Iterator[bytes]:
        yield given[:0]
        raise GpuHostError(f"{command[0]} failed (127): it cannot be run")

    examine = _p2p.examine
    monkeypatch.setattr(gpu_p2p_info, "Reader", lambda: Reader(root))
    monkeypatch.setattr(
        gpu_p2p_info,
        "examine",
        lambda host, wish: examine(host, wish, run=fail, sleep=lambda _seconds: None),
    )


@pytest.mark.usefixtures("without_tools")
def test_result_has_the_documented_keys(run_module: Run) -> None:
    result = run_module(gpu_p2p_info, addresses=["41:00.0", "42:00.0"])
    returned = yaml.safe_load(gpu_p2p_info.RETURN)
    assert returned.keys() <= result.keys()
    documented = returned["p2p"]["contains"]
    p2p = result["p2p"]
    assert result["changed"] is False
    assert p2p.keys() == documented.keys()
    assert p2p["pairs"][0].keys() == documented["pairs"]["contains"].keys()
    for key in ("basis", "fallback"):
        assert p2p[key].keys() == documented[key]["sample"].keys()
    assert p2p["verdict"] == "unknown"
    assert len(p2p["problems"]) == 3  # no nvidia-smi, no test, no kernel log


@pytest.mark.usefixtures("without_tools")
def test_an_address_without_a_gpu_is_an_error(run_module: Run) -> None:
    result = run_module(gpu_p2p_info, addresses=["0000:99:00.0"])
    assert "0000:99:00.0 is no NVIDIA GPU of this host" in result["msg"]
