"""PCI addresses in every form people paste, and devices as sysfs shows them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from ansible_collections.gpuhost.inference.plugins.module_utils._pci import (
    PciDevice,
    normalize_address,
    read_device,
    read_devices,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("0000:41:00.0", "0000:41:00.0"),
        ("41:00.0", "0000:41:00.0"),
        ("0000:C1:00.0", "0000:c1:00.0"),
        ("00000000:C1:00.0", "0000:c1:00.0"),  # nvidia-smi
        ("10000:e1:00.0", "10000:e1:00.0"),  # domains of a VMD controller have five digits
        (" 0001:41:1f.7\n", "0001:41:1f.7"),
    ],
)
def test_an_address_is_given_in_full(text: str, address: str) -> None:
    assert normalize_address(text) == address


@pytest.mark.parametrize(
    "text", ["", "41:00", "0000:41:00", "0000:41:20.0", "0000:41:00.8", "GPU-1", "0000:41:00.0;"]
)
def test_what_is_no_address_is_named_in_the_error(text: str) -> None:
    with pytest.raises(GpuHostError, match=f"'{text}' is not a PCI address.*0000:41:00.0"):
        normalize_address(text)


def test_a_device_is_read(host_tree: Callable[[str], Path]) -> None:
    host = Reader(str(host_tree("four-functions")))
    assert read_device(host, "0000:01:00.1") == PciDevice(
        address="0000:01:00.1",
        id="10de:22e8",
        subsystem_id="10de:204e",
        class_="0x040300",
        driver="snd_hda_intel",
        numa_node=0,
        group=14,
        port="0000:00:01.1",
    )
    bridge = read_device(host, "0000:00:01.1")
    assert bridge
    assert (bridge.port, bridge.is_bridge, bridge.is_gpu) == (None, True, False)


def test_absent_is_none_and_a_device_without_driver_has_none(
    host_tree: Callable[[str], Path],
) -> None:
    host = Reader(str(host_tree("four-functions")))
    assert read_device(host, "0000:09:00.0") is None
    ucsi = read_device(host, "0000:01:00.3")
    assert ucsi
    assert ucsi.driver is None


def test_an_unknown_numa_node_is_none(host_tree: Callable[[str], Path]) -> None:
    root = host_tree("four-functions")
    (root / "sys/bus/pci/devices/0000:01:00.0/numa_node").write_text("-1\n")
    gpu = read_device(Reader(str(root)), "0000:01:00.0")
    assert gpu
    assert gpu.numa_node is None


def test_only_nvidia_display_devices_are_gpus(host_tree: Callable[[str], Path]) -> None:
    devices = read_devices(Reader(str(host_tree("bmc-and-nvme"))))
    assert [device.address for device in devices if device.is_gpu] == [
        "0000:21:00.0",
        "0000:c1:00.0",
    ]
    assert "0000:c2:00.0" in [device.address for device in devices]  # the BMC's VGA
