"""What becomes of a host whose driver hangs, dawdles or fails: bounded, told, and never made worse.

The faults are those of the lab's stand-in driver (lab/README.md). Hangs come last: they stay.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from testinfra.host import Host

testinfra_hosts = ["ansible://pve1"]
RunModule = Callable[..., dict[str, Any]]
Fault = Callable[[str, str], None]
MOVE = {"driver": "vfio-pci", "accept": ["guest-config"]}


@pytest.fixture
def fault(host: Host) -> Iterator[Fault]:
    """Switch a fault on by `fault(parameter, value)`; all are off again after the test."""
    switched = []

    def switch(parameter: str, value: str) -> None:
        module = "lab_gpu" if parameter == "lab_all_ones" else "nvidia"
        file = f"/sys/module/{module}/parameters/{parameter}"
        host.check_output(f"echo {value} >{file}")
        switched.append((file, "0" if parameter.endswith("_seconds") else ""))

    yield switch
    for file, off in switched:
        host.check_output(f"echo {off} >{file}")


def shown(host: Host, address: str) -> tuple[str, str]:
    at = f"/sys/bus/pci/devices/{address}"
    driver = host.run(f"readlink {at}/driver").stdout.strip().rpartition("/")[2]
    override = host.run(f"timeout 5 cat {at}/driver_override").stdout.strip()
    return driver, override


def test_both_functions_of_a_card_move_together(host: Host, run_module: RunModule) -> None:
    before = [shown(host, f"0000:44:00.{function}") for function in (0, 1)]
    assert [driver for driver, _override in before] == ["nvidia", "snd_hda_intel"]
    moved = run_module("gpu", addresses=["0000:44:00.0"], **MOVE)
    assert not moved["failed"], moved["msg"]
    assert [shown(host, f"0000:44:00.{function}") for function in (0, 1)] == [
        ("vfio-pci", "vfio-pci")
    ] * 2
    back = run_module("gpu", addresses=["0000:44:00.0"], driver="nvidia", iommu_type="DMA-FQ")
    assert not back["failed"], back["msg"]
    assert [shown(host, f"0000:44:00.{function}")[0] for function in (0, 1)] == [
        "nvidia",
        "snd_hda_intel",
    ]


def test_a_type_below_two_drivers_takes_both_off_and_on(host: Host, run_module: RunModule) -> None:
    in_place = run_module("iommu_group", address="0000:44:00.0", type="DMA")
    assert in_place["failed"]
    assert "0000:44:00.1 (driver snd_hda_intel)" in in_place["msg"]
    result = run_module("gpu", addresses=["0000:44:00.0"], driver="nvidia", iommu_type="DMA")
    assert not result["failed"], result["msg"]
    kind = host.check_output("cat /sys/bus/pci/devices/0000:44:00.1/iommu_group/type")
    assert kind == "DMA"
    assert shown(host, "0000:44:00.1")[0] == "snd_hda_intel"


def test_a_failing_probe_is_undone(host: Host, run_module: RunModule, fault: Fault) -> None:
    moved = run_module("gpu", addresses=["0000:42:00.0"], **MOVE)
    assert not moved["failed"], moved["msg"]
    fault("lab_probe_fails", "0000:42:00.0")
    before = shown(host, "0000:42:00.0")
    result = run_module("gpu", addresses=["0000:42:00.0"], driver="nvidia")
    assert result["failed"]
    assert "the driver refused the card in its probe" in result["msg"]
    assert "all is as it was before" in result["msg"]
    assert (result["rolled_back"], result["changed"]) == (True, False)
    assert shown(host, "0000:42:00.0") == before == ("vfio-pci", "vfio-pci")


def test_a_gpu_off_the_bus_is_not_touched(host: Host, run_module: RunModule, fault: Fault) -> None:
    fault("lab_all_ones", "0000:41:00.0")
    result = run_module("gpu", addresses=["0000:41:00.0"], **MOVE)
    assert result["failed"]
    assert "off-bus" in [guard["id"] for guard in result["guards"]]
    assert result["writes"] == []
    assert shown(host, "0000:41:00.0")[0] == "nvidia"


def test_a_slow_remove_is_waited_for(host: Host, run_module: RunModule, fault: Fault) -> None:
    fault("lab_remove_seconds", "6")
    result = run_module("gpu", addresses=["0000:41:00.0"], **MOVE)
    assert not result["failed"], result["msg"]
    assert shown(host, "0000:41:00.0") == ("vfio-pci", "vfio-pci")


def test_a_remove_slower_than_the_limit_counts_as_hung_until_it_returns(
    host: Host, run_module: RunModule, fault: Fault
) -> None:
    fault("lab_remove_seconds", "45")
    result = run_module("gpu", addresses=["0000:43:00.0"], timeout=3, **MOVE)
    assert result["failed"]
    assert "has not returned within 3 s" in result["msg"]
    again = run_module("gpu", addresses=["0000:43:00.0"], **MOVE)
    assert [guard["id"] for guard in again["guards"]][:1] == ["stuck"]
    marks = json.loads(host.check_output("cat /var/lib/gpuhost/stuck.json"))["addresses"]
    waits = (
        f"timeout 100 sh -c 'while test -e /proc/{marks['0000:43:00.0']['pid']}; do sleep 1; done'"
    )
    host.check_output(waits)
    result = run_module("gpu", addresses=["0000:43:00.0"], **MOVE)
    assert not result["failed"], result["msg"]
    assert shown(host, "0000:43:00.0") == ("vfio-pci", "vfio-pci")


@pytest.mark.parametrize(
    ("parameter", "address"),
    [("lab_use_count_leaked", "0000:81:00.0"), ("lab_remove_hangs", "0000:82:00.0")],
)
def test_an_unbind_that_never_returns(
    host: Host, run_module: RunModule, parameter: str, address: str
) -> None:
    host.check_output(f"echo {address} >/sys/module/nvidia/parameters/{parameter}")  # and stays
    result = run_module("gpu", addresses=[address], driver="vfio-pci", timeout=5)
    assert result["failed"]
    for words in ("has not returned within 5 s", "nothing was undone", "a reboot is needed"):
        assert words in result["msg"]
    assert result["rolled_back"] is False
    assert result["writes"][-1] == {"path": "/sys/bus/pci/drivers/nvidia/unbind", "value": address}
    again = run_module("gpu", addresses=[address], driver="vfio-pci")
    assert "stuck" in [guard["id"] for guard in again["guards"]]
    assert again["writes"] == []


def test_the_rest_of_the_host_still_works(
    host: Host, run_module: RunModule, assert_neighbour_undisturbed: Callable[[Host], None]
) -> None:
    result = run_module("gpu", addresses=["0000:41:00.0"], driver="nvidia")
    assert not result["failed"], result["msg"]
    audit = run_module("gpu_host_info")
    stuck = [f["subject"] for f in audit["findings"] if f["id"] == "unbind-stuck"]
    assert stuck == ["0000:81:00.0", "0000:82:00.0"]
    assert_neighbour_undisturbed(host)
