"""The module `gpu`: options reach the binding, its answer reaches the user."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader
from ansible_collections.gpuhost.inference.plugins.modules import gpu
from fake_kernel import FakeKernel

Run = Callable[..., dict[str, Any]]


@pytest.fixture
def kernel(host_tree: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> FakeKernel:
    root = host_tree("eight-gpus")
    fake = FakeKernel(root)
    monkeypatch.setattr(gpu, "Reader", lambda: Reader(str(root)))
    monkeypatch.setattr(gpu, "write", fake)
    return fake


def test_a_list_may_come_as_a_string(kernel: FakeKernel, run_module: Run) -> None:
    result = run_module(
        gpu, addresses="43:00.0,44:00.0", driver="vfio-pci", accept=["guest-config"]
    )
    assert [one["driver"] for one in result["gpus"]] == ["vfio-pci", "vfio-pci"]
    assert result["changed"] is True


def test_check_mode_and_diff(kernel: FakeKernel, run_module: Run) -> None:
    options = {"addresses": ["44:00.0"], "driver": "none", "accept": "guest-config"}
    result = run_module(gpu, check=True, diff=True, **options)
    assert kernel.writes == []
    assert result["changed"] is True
    assert result["diff"]["after"] == {"0000:44:00.0": {"driver": None, "override": "none"}}


def test_expect_refuses_another_card(kernel: FakeKernel, run_module: Run) -> None:
    options = {"addresses": ["44:00.0"], "driver": "vfio-pci"}
    result = run_module(gpu, **options, expect={"id": "10de:2684"})
    assert result["failed"] is True
    assert "nothing was changed" in result["msg"]


def test_a_failure_still_tells_what_was_written(kernel: FakeKernel, run_module: Run) -> None:
    kernel.refuses_probe.add("vfio-pci")
    result = run_module(gpu, addresses=["44:00.0"], driver="vfio-pci", accept=["guest-config"])
    assert result["failed"] is True
    assert result["rolled_back"] is True
    assert result["writes"]


def test_an_unknown_driver_is_an_option_error(kernel: FakeKernel, run_module: Run) -> None:
    result = run_module(gpu, addresses=["44:00.0"], driver="nouveau")
    assert "must be one of: nvidia, vfio-pci, none" in result["msg"]
    assert kernel.writes == []


def test_entries_of_a_layout_are_bindings_as_they_are(kernel: FakeKernel, run_module: Run) -> None:
    entries = [
        {
            "name": "inference",
            "addresses": ["0000:43:00.0", "0000:44:00.0"],
            "expect": {"id": "10de:2bb5"},
            "driver": "nvidia",
            "iommu_type": "DMA-FQ",
            "guest": {"kind": "lxc", "vmid": 100, "sev_snp": False},
        },
        {
            "name": "spare",
            "addresses": ["0000:81:00.0"],
            "expect": None,
            "driver": "none",
            "iommu_type": None,
            "guest": None,
        },
    ]
    result = run_module(gpu, bindings=entries, accept=["guest-config"])
    assert [one["driver"] for one in result["gpus"]] == ["nvidia", "nvidia", None]
    assert result["diff"]["after"]["0000:43:00.0"]["type"] == "DMA-FQ"
    assert run_module(gpu, bindings=entries)["changed"] is False


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"bindings": [{"addresses": ["44:00.0"]}]}, "driver found in bindings"),
        ({"bindings": [{"driver": "nvidia"}]}, "required"),
        ({"addresses": ["44:00.0"], "driver": "none", "bindings": []}, "mutually exclusive"),
        (
            {"bindings": [{"addresses": ["44:00.0"], "driver": "none", "iommu_type": "lazy"}]},
            "no type lazy: give one of identity, DMA, DMA-FQ, auto",
        ),
        ({"addresses": ["44:00.0"], "driver": "none", "timeout": 0}, "seconds above 0"),
    ],
)
def test_bad_options(
    kernel: FakeKernel, run_module: Run, options: dict[str, Any], words: str
) -> None:
    result = run_module(gpu, **options)
    assert result["failed"] is True
    assert words in result["msg"]
    assert kernel.writes == []


@pytest.mark.parametrize("options", [{"addresses": [], "driver": "none"}, {"bindings": []}])
def test_a_layout_without_entries_asks_for_nothing(
    kernel: FakeKernel, run_module: Run, options: dict[str, Any]
) -> None:
    result = run_module(gpu, **options)
    assert (result["changed"], result["gpus"]) == (False, [])
