"""What the modules refuse on a live host, in which words; nothing changes then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from testinfra.host import Host

testinfra_hosts = ["ansible://pve1"]
RunModule = Callable[..., dict[str, Any]]
STATE = (
    "cd /sys/bus/pci/devices; stat -c %N */driver; grep -s . */driver_override */iommu_group/type"
)
HOLD = "systemd-run --quiet --unit=holder sh -c 'exec sleep 600 3</dev/nvidia0'"


@pytest.fixture(scope="module", autouse=True)
def nothing_changes(
    host: Host, assert_neighbour_undisturbed: Callable[[Host], None]
) -> Iterator[None]:
    """Compare drivers, overrides and types of all devices before and after all tests."""
    before = host.check_output(STATE)
    yield
    assert host.check_output(STATE) == before
    assert_neighbour_undisturbed(host)


@pytest.fixture
def holder(host: Host) -> Iterator[str]:
    """Have a process hold GPU 0000:41:00.0 open; return its number."""
    host.check_output(HOLD)
    yield host.check_output("systemctl show -P MainPID holder")
    host.check_output("systemctl stop holder")


def test_gpu_held_open_by_a_process(run_module: RunModule, holder: str) -> None:
    result = run_module("gpu", addresses=["0000:41:00.0"], driver="vfio-pci")
    assert result["failed"]
    for words in (holder, "sleep 600", "/system.slice/holder.service", "/dev/nvidia0"):
        assert words in result["msg"]
    assert "lxc guest 100" in result["msg"]  # all reasons in one message


def test_gpu_of_a_running_machine_of_another_tenant(host: Host, run_module: RunModule) -> None:
    result = run_module("gpu", addresses=["0000:83:00.0"], driver="nvidia")
    assert result["failed"]
    assert "qemu guest 201" in result["msg"]
    assert host.check_output("cat /run/qemu-server/201.pid") in result["msg"]


def test_type_below_a_bound_driver(run_module: RunModule) -> None:
    result = run_module("iommu_group", address="0000:41:00.0", type="DMA")
    assert result["failed"]
    assert "0000:41:00.0 (driver nvidia)" in result["msg"]
    assert "give the gpu module a type" in result["msg"]  # the way out


def test_identity_on_a_gpu_with_a_security_processor(run_module: RunModule) -> None:
    result = run_module("iommu_group", address="0000:41:00.0", type="identity")
    assert result["failed"]
    assert "accept fsp-identity" in result["msg"]
    assert "driver nvidia" in result["msg"]


@pytest.mark.parametrize(
    ("module", "options", "words"),
    [
        ("gpu", {"addresses": ["0000:99:00.0"]}, "0000:99:00.0: this host has no PCI device"),
        ("gpu", {"addresses": ["0000:00:01.0"]}, "0000:00:01.0 is not an NVIDIA GPU"),
        ("gpu", {"addresses": ["41:00.0", "0000:41:00.0"]}, "0000:41:00.0 is listed twice"),
        ("gpu", {"addresses": ["first"]}, "first"),
        ("iommu_group", {"address": "0000:41:00.0", "type": "fast"}, "identity, DMA, DMA-FQ, auto"),
        ("iommu_group", {"address": "0000:99:00.0", "type": "DMA"}, "0000:99:00.0"),
    ],
)
def test_bad_input(run_module: RunModule, module: str, options: Any, words: str) -> None:
    driver = {"driver": "vfio-pci"} if module == "gpu" else {}
    result = run_module(module, **options, **driver)
    assert result["failed"]
    assert words in result["msg"]
    assert not result.get("writes")
