"""GPUs as three constructed hosts show them, and addresses that mean none."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from ansible_collections.gpuhost.inference.plugins.module_utils import _child
from ansible_collections.gpuhost.inference.plugins.module_utils._chips import identify
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from ansible_collections.gpuhost.inference.plugins.module_utils._gpu import (
    Bar,
    Companion,
    Link,
    Power,
    Sriov,
    read_gpus,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader


def test_eight_equal_gpus(host_tree: Callable[[str], Path]) -> None:
    gpus = read_gpus(Reader(str(host_tree("eight-gpus"))))
    assert [(gpu.address, gpu.driver, gpu.numa_node, gpu.device_minor) for gpu in gpus] == [
        ("0000:41:00.0", "nvidia", 0, 0),
        ("0000:42:00.0", "nvidia", 0, 1),
        ("0000:43:00.0", "nvidia", 0, 2),
        ("0000:44:00.0", "nvidia", 0, 3),
        ("0000:81:00.0", "vfio-pci", 1, None),
        ("0000:82:00.0", "vfio-pci", 1, None),
        ("0000:83:00.0", "vfio-pci", 1, None),
        ("0000:84:00.0", "vfio-pci", 1, None),
    ]
    first = gpus[0]
    assert first.name == "RTX PRO 6000 Blackwell Server Edition"
    assert (first.architecture, first.has_fsp) == ("Blackwell", "yes")
    assert (first.id, first.subsystem_id, first.class_) == ("10de:2bb5", "10de:204e", "0x030200")
    assert first.bars == (Bar(0, 64 << 20), Bar(1, 128 << 30), Bar(3, 32 << 20))
    assert first.link == Link("32.0 GT/s PCIe", 16, "32.0 GT/s PCIe", 16)
    assert first.power == Power("D0", "auto", "active", d3cold_allowed=True)
    assert first.reset_methods == ("flr", "bus")
    assert first.sriov == Sriov(48, 0, None)
    assert first.driver_override is None
    assert first.iommu_group
    assert (first.iommu_group.number, first.iommu_group.type) == (42, "DMA-FQ")


def test_a_four_function_card_is_one_gpu_with_companions(
    host_tree: Callable[[str], Path],
) -> None:
    [gpu] = read_gpus(Reader(str(host_tree("four-functions"))))
    assert gpu.companions == (
        Companion("0000:01:00.1", "0x040300", "snd_hda_intel", None),
        Companion("0000:01:00.2", "0x0c0330", "xhci_hcd", None),
        Companion("0000:01:00.3", "0x0c8000", None, None),
    )


def test_the_vga_of_a_management_controller_is_no_gpu(host_tree: Callable[[str], Path]) -> None:
    gpus = read_gpus(Reader(str(host_tree("bmc-and-nvme"))))
    assert [gpu.address for gpu in gpus] == ["0000:21:00.0", "0000:c1:00.0"]


@pytest.mark.parametrize(
    ("id_", "expected"),
    [
        ("10de:2bb5", ("RTX PRO 6000 Blackwell Server Edition", "Blackwell", "yes")),
        ("10de:2b00", (None, "Blackwell", "no")),  # a system on chip, which has SEC2
        ("10de:2330", ("H100 SXM", "Hopper", "yes")),
        ("10de:26b9", ("L40S", "Ada", "no")),
        ("10de:2230", ("RTX A6000", "Ampere", "no")),
        ("10de:1db4", (None, "Volta", "no")),
        ("10de:3020", (None, "Rubin", "unknown")),
        ("10de:3fff", (None, "unknown", "unknown")),
        ("10de:0fc6", (None, "unknown", "unknown")),
    ],
)
def test_chips_by_id(id_: str, expected: tuple[str | None, str, str]) -> None:
    assert identify(id_) == expected


@pytest.mark.parametrize(
    ("addresses", "message"),
    [
        (["0000:99:00.0"], "0000:99:00.0: this host has no PCI device there.*0000:01:00.0"),
        (["0000:01:00.1"], "not an NVIDIA GPU .id 10de:22e8.*the GPU of that card is 0000:01:00.0"),
        (["0000:00:01.1"], "not an NVIDIA GPU .id 1022:1483, class 0x060400"),
        (["0000:01:00.0", "01:00.0"], "0000:01:00.0 is listed twice"),
        (["gpu0"], "'gpu0' is not a PCI address"),
    ],
)
def test_an_address_that_means_no_gpu_is_explained(
    host_tree: Callable[[str], Path], addresses: list[str], message: str
) -> None:
    with pytest.raises(GpuHostError, match=message):
        read_gpus(Reader(str(host_tree("four-functions"))), addresses)


def test_chosen_gpus_come_sorted(host_tree: Callable[[str], Path]) -> None:
    gpus = read_gpus(Reader(str(host_tree("eight-gpus"))), ["84:00.0", "00000000:41:00.0"])
    assert [gpu.address for gpu in gpus] == ["0000:41:00.0", "0000:84:00.0"]


def test_absent_facts_are_none(host_tree: Callable[[str], Path]) -> None:
    root = host_tree("eight-gpus")
    at = root / "sys/bus/pci/devices/0000:41:00.0"
    for name in ("resource", "current_link_speed", "current_link_width", "reset_method"):
        (at / name).unlink()
    for name in ("iommu_group", "driver"):
        (at / name).unlink()
    (at / "power_state").unlink()
    (at / "d3cold_allowed").unlink()
    gpu = read_gpus(Reader(str(root)), ["41:00.0"])[0]
    assert (gpu.iommu_group, gpu.driver, gpu.bars, gpu.reset_methods) == (None, None, (), ())
    assert (gpu.link.speed, gpu.link.width) == (None, None)
    assert (gpu.power.state, gpu.power.d3cold_allowed) == (None, None)


def test_a_window_without_room_has_size_0(host_tree: Callable[[str], Path]) -> None:
    root = host_tree("eight-gpus")
    (root / "sys/bus/pci/devices/0000:41:00.0/resource").write_text(
        "0x00000000d0000000 0x00000000d3ffffff 0x0000000000040200\n"
        "0x0000000000000000 0x0000000000000000 0x000000000014220c\n"
    )
    assert read_gpus(Reader(str(root)), ["41:00.0"])[0].bars == (Bar(0, 64 << 20), Bar(1, 0))


def test_a_virtual_function_names_its_card(host_tree: Callable[[str], Path]) -> None:
    root = host_tree("eight-gpus")
    (root / "sys/bus/pci/devices/0000:41:00.0/physfn").symlink_to("../0000:42:00.0")
    assert read_gpus(Reader(str(root)), ["41:00.0"])[0].sriov.physfn == "0000:42:00.0"


def test_virtual_functions_of_one_slot_are_no_companions_of_each_other(
    host_tree: Callable[[str], Path],
) -> None:
    root = host_tree("four-functions")
    (root / "sys/bus/pci/devices/0000:01:00.3/class").write_text("0x030200\n")
    gpus = read_gpus(Reader(str(root)))
    assert [gpu.address for gpu in gpus] == ["0000:01:00.0", "0000:01:00.3"]
    assert [one.address for one in gpus[0].companions] == ["0000:01:00.1", "0000:01:00.2"]


def test_an_override_is_shown(host_tree: Callable[[str], Path]) -> None:
    root = host_tree("eight-gpus")
    (root / "sys/bus/pci/devices/0000:41:00.0/driver_override").write_text("nvidia\n")
    assert read_gpus(Reader(str(root)), ["41:00.0"])[0].driver_override == "nvidia"


def test_a_bound_gpu_whose_node_is_not_known_may_be_in_use(
    host_tree: Callable[[str], Path],
) -> None:
    root = host_tree("eight-gpus")
    (root / "proc/driver/nvidia/gpus/0000:41:00.0/information").unlink()
    gpus = read_gpus(Reader(str(root)), ["41:00.0", "42:00.0"])
    assert "which device node" in gpus[0].users_unknown[0]
    assert gpus[1].users_unknown == ()


def test_a_gpu_whose_lock_is_held_may_be_in_use_and_hides_no_other(
    host_tree: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_child, "_SECONDS", 0.2)
    root = host_tree("eight-gpus")
    file = root / "sys/bus/pci/devices/0000:41:00.0/driver_override"
    file.unlink()
    os.mkfifo(file)  # reading it blocks, as the kernel does behind a hung unbind
    (root / "sys/bus/pci/devices/0000:42:00.0/driver_override").write_text("nvidia\n")
    gpus = read_gpus(Reader(str(root)))
    assert "pending in the kernel" in gpus[0].users_unknown[0]
    assert (gpus[1].driver_override, gpus[1].users_unknown) == ("nvidia", ())
    os.close(os.open(file, os.O_RDWR | os.O_NONBLOCK))
