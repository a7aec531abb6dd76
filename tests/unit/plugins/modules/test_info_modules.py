"""`gpu_info` and `iommu_group_info`: every documented key is there, on four hosts, offline."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from ansible_collections.gpuhost.inference.plugins.modules import gpu_info, iommu_group_info

Run = Callable[..., dict[str, Any]]
HOSTS = ["eight-gpus", "four-functions", "bmc-and-nvme", "busy-host"]


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize(("module", "noun"), [(gpu_info, "gpus"), (iommu_group_info, "groups")])
def test_results_have_exactly_the_documented_keys(
    host_tree: Callable[[str], Path], run_module: Run, module: ModuleType, noun: str, host: str
) -> None:
    result = run_module(module, sysroot=str(host_tree(host)))
    documented = yaml.safe_load(module.RETURN)
    assert result["changed"] is False
    assert result.keys() - {"changed", "invocation"} == documented.keys()
    assert result[noun]
    for item in result[noun]:
        assert item.keys() == documented[noun]["contains"].keys()


@pytest.mark.parametrize(
    ("key", "at"), [("users", 6), ("owners", 0), ("bars", 0), ("iommu_group", 0), ("link", 0)]
)
def test_samples_of_nested_values_have_the_real_keys(
    host_tree: Callable[[str], Path], run_module: Run, key: str, at: int
) -> None:
    gpu = run_module(gpu_info, sysroot=str(host_tree("eight-gpus")))["gpus"][at]
    documented = yaml.safe_load(gpu_info.RETURN)["gpus"]["contains"][key]
    sample = documented["sample"]
    real, shown = (gpu[key][0], sample[0]) if isinstance(sample, list) else (gpu[key], sample)
    assert real.keys() == shown.keys() == documented.get("contains", shown).keys()


def test_addresses_choose(host_tree: Callable[[str], Path], run_module: Run) -> None:
    root = str(host_tree("eight-gpus"))
    result = run_module(gpu_info, sysroot=root, addresses="84:00.0,41:00.0")
    assert [gpu["address"] for gpu in result["gpus"]] == ["0000:41:00.0", "0000:84:00.0"]
    assert "no PCI device" in run_module(gpu_info, sysroot=root, addresses=["99:00.0"])["msg"]


def test_a_group_that_cannot_be_read_fails_with_its_name(
    host_tree: Callable[[str], Path], run_module: Run
) -> None:
    root = host_tree("bmc-and-nvme")
    (root / "sys/bus/pci/devices/0000:22:00.0").unlink()
    for module in (gpu_info, iommu_group_info):
        assert "IOMMU group 18" in run_module(module, sysroot=str(root))["msg"]
