"""GPUs as three constructed hosts show them, and addresses that mean none."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from ansible_collections.gpuhost.inference.plugins.module_utils import _child
from ansible_collections.gpuhost.inference.plugins.module_utils._chips import identify
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import (
    GpuHostError,
    UnreadableError,
)
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
    monkeypatch.setattr(_child, "_SECONDS", 0.5)
    root = host_tree("eight-gpus")
    file = root / "sys/bus/pci/devices/0000:41:00.0/driver_override"
    file.unlink()
    os.mkfifo(file)  # reading it blocks, as the kernel does behind a hung unbind
    (root / "sys/bus/pci/devices/0000:42:00.0/driver_override").write_text("nvidia\n")
    gpus = read_gpus(Reader(str(root)))
    assert "pending in the kernel" in gpus[0].users_unknown[0]
    assert (gpus[1].driver_override, gpus[1].users_unknown) == ("nvidia", ())
    os.close(os.open(file, os.O_RDWR | os.O_NONBLOCK))


@pytest.mark.parametrize("name", ["driver_override", "sriov_numvfs", "config"])
def test_whatever_waits_for_the_device_lock_is_asked_with_a_deadline(
    host_tree: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(_child, "_SECONDS", 0.5)
    root = host_tree("eight-gpus")
    file = root / "sys/bus/pci/devices/0000:41:00.0" / name
    file.unlink()
    os.mkfifo(file)
    gpus = read_gpus(Reader(str(root)))
    os.close(os.open(file, os.O_RDWR | os.O_NONBLOCK))
    assert "pending in the kernel" in gpus[0].users_unknown[0]
    assert (gpus[0].sriov.num_vfs, gpus[0].config_readable) == (None, None)
    assert (gpus[1].users_unknown, gpus[1].sriov.num_vfs) == ((), 0)


def test_a_driver_that_does_not_answer_leaves_its_gpu_in_doubt(
    host_tree: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver link goes before the driver lets go: the doubt must not depend on it."""
    monkeypatch.setattr(_child, "_SECONDS", 0.5)
    root = host_tree("eight-gpus")
    (root / "sys/bus/pci/devices/0000:41:00.0/driver").unlink()
    file = root / "proc/driver/nvidia/gpus/0000:41:00.0/information"
    file.unlink()
    os.mkfifo(file)
    gpus = read_gpus(Reader(str(root)))
    os.close(os.open(file, os.O_RDWR | os.O_NONBLOCK))
    assert gpus[0].users_unknown == (
        "/proc/driver/nvidia/gpus/0000:41:00.0/information gave no answer",
    )
    assert [(gpu.device_minor, gpu.users_unknown) for gpu in gpus[1:3]] == [(1, ()), (2, ())]


def test_nodes_that_cannot_be_found_out_leave_one_gpu_in_doubt(
    host_tree: Callable[[str], Path],
) -> None:
    class Blind(Reader):
        def names(self, path: str) -> list[str]:
            if path.endswith("/gpu1/mig"):
                raise UnreadableError(f"{path} could not be listed: Permission denied")
            return super().names(path)

    gpus = read_gpus(Blind(str(host_tree("busy-host"))))
    assert [bool(gpu.users_unknown) for gpu in gpus] == [False, True, False]
    assert gpus[1].mig is None


def test_mig_and_the_bus(host_tree: Callable[[str], Path]) -> None:
    gpus = read_gpus(Reader(str(host_tree("busy-host"))))
    assert [(gpu.address, gpu.mig, gpu.config_readable) for gpu in gpus] == [
        ("0000:21:00.0", False, True),
        ("0000:c1:00.0", True, True),
        ("0000:e1:00.0", None, False),  # on vfio-pci, and its configuration space is all ones
    ]


@pytest.mark.parametrize(
    ("power", "config", "readable"),
    [
        ("D0", b"\xde\x10\xb5\x2b\x06", True),
        ("D0", b"\xff\xff\xff\xff", False),
        ("D0", b"\xff\xff\xff\x2b", True),
        ("D3hot", b"\xff" * 64, False),
        ("error", b"\xff" * 64, False),
        ("unknown", b"\xff" * 64, False),
        ("D3cold", b"\xff" * 64, None),  # asking would wake it
        ("D0", None, None),
        ("D0", b"", None),
    ],
)
def test_a_card_off_the_bus(
    host_tree: Callable[[str], Path], power: str, config: bytes | None, readable: bool | None
) -> None:
    root = host_tree("eight-gpus")
    at = root / "sys/bus/pci/devices/0000:41:00.0"
    (at / "power_state").write_text(f"{power}\n")
    (at / "config").unlink()
    if config is not None:
        (at / "config").write_bytes(config)
    gpu = read_gpus(Reader(str(root)), ["41:00.0"])[0]
    assert (gpu.config_readable, gpu.power.state) == (readable, power)


@pytest.mark.parametrize(
    ("config", "readable"), [(b"\xde\x10\xb5\x2b", True), (b"\xff" * 4, False)]
)
def test_a_sleeping_card_is_woken_only_when_asked_to(
    host_tree: Callable[[str], Path], config: bytes, readable: bool
) -> None:
    root = host_tree("eight-gpus")
    for address in ("0000:81:00.0", "0000:82:00.0"):
        at = root / "sys/bus/pci/devices" / address
        (at / "power_state").write_text("D3cold\n")
        (at / "config").write_bytes(config)
    gpus = read_gpus(Reader(str(root)), wake=["0000:82:00.0"])
    assert [gpu.config_readable for gpu in gpus[4:6]] == [None, readable]


def test_a_sleeping_card_is_not_woken_for_its_link(host_tree: Callable[[str], Path]) -> None:
    root = host_tree("eight-gpus")
    (root / "sys/bus/pci/devices/0000:41:00.0/power_state").write_text("D3cold\n")
    gpus = read_gpus(Reader(str(root)), ["41:00.0", "42:00.0"])
    assert [gpu.link.width for gpu in gpus] == [None, 16]


def framebuffer(root: Path, name: str, device: str, driver: str) -> None:
    at = root / "sys/devices" / device / "graphics" / name
    at.mkdir(parents=True)
    (at / "name").write_text(f"{driver}\n")
    (root / "sys/class/graphics").mkdir(parents=True, exist_ok=True)
    (root / "sys/class/graphics" / name).symlink_to(f"../../devices/{device}/graphics/{name}")


def test_the_boot_display_of_the_host(host_tree: Callable[[str], Path]) -> None:
    root = host_tree("four-functions")
    (root / "sys/bus/pci/devices/0000:01:00.0/boot_vga").write_text("1\n")
    host = Reader(str(root))
    assert read_gpus(host)[0].display == ()  # nothing draws on it
    framebuffer(root, "fb0", "platform/simple-framebuffer.0", "simpledrmdrmfb")
    assert read_gpus(host)[0].display == (
        "the firmware uses it as display (boot_vga), and the host draws on fb0 (simpledrmdrmfb)",
    )
    (root / "sys/bus/pci/devices/0000:01:00.0/boot_vga").write_text("0\n")
    assert read_gpus(host)[0].display == ()


@pytest.mark.parametrize(
    "device",
    [
        "pci0000:00/0000:00:01.1/0000:01:00.0",
        "pci0000:00/0000:00:01.1/0000:01:00.0/simple-framebuffer.0",  # kernels since 6.9
    ],
)
def test_a_framebuffer_on_the_gpu_itself(host_tree: Callable[[str], Path], device: str) -> None:
    root = host_tree("four-functions")
    framebuffer(root, "fb1", device, "nvidia-drmdrmfb")
    assert read_gpus(Reader(str(root)))[0].display == (
        "it draws the host's framebuffer fb1 (nvidia-drmdrmfb)",
    )


def test_the_display_of_a_management_controller_is_no_sign(
    host_tree: Callable[[str], Path],
) -> None:
    """It holds boot_vga, the framebuffer and the memory the firmware reserved."""
    root = host_tree("busy-host")
    assert [gpu.display for gpu in read_gpus(Reader(str(root)))] == [(), (), ()]


@pytest.mark.parametrize(
    ("line", "index"),
    [
        ("200000000000-2000007fffff : BOOTFB", 1),
        ("    1fffffffff00-200000000000 : efifb", 1),  # one byte of it
        ("d0000000-d07fffff : simple-framebuffer.0", 0),
        ("d3ffffff-d4000000 : simpledrm", 0),
        ("d4000000-d47fffff : BOOTFB", None),
        ("1fffff000000-1fffffffffff : efifb", None),
        ("200000000000-201fffffffff : 0000:01:00.0", None),
        ("200000000000-2000007fffff : nvidia", None),
    ],
)
def test_the_firmwares_framebuffer_in_a_window(
    host_tree: Callable[[str], Path], line: str, index: int | None
) -> None:
    root = host_tree("four-functions")
    (root / "proc/iomem").write_text(f"00000000-00000fff : Reserved\n{line}\n")
    signs = read_gpus(Reader(str(root)))[0].display
    assert len(signs) == (index is not None)
    assert all(sign.endswith(f"lies in its BAR {index}") for sign in signs)


def test_hidden_addresses_are_unknown_not_elsewhere(host_tree: Callable[[str], Path]) -> None:
    root = host_tree("four-functions")
    (root / "proc/iomem").write_text("00000000-00000000 : System RAM\n")
    assert read_gpus(Reader(str(root)))[0].display == ()  # no framebuffer, wherever it might be
    (root / "proc/iomem").write_text("00000000-00000000 : BOOTFB\n")
    [sign] = read_gpus(Reader(str(root)))[0].display
    assert "is not known: /proc/iomem shows addresses to root only" in sign


def test_virtual_functions_are_counted(host_tree: Callable[[str], Path]) -> None:
    root = host_tree("eight-gpus")
    (root / "sys/bus/pci/devices/0000:41:00.0/sriov_numvfs").write_text("4\n")
    assert read_gpus(Reader(str(root)), ["41:00.0"])[0].sriov == Sriov(48, 4, None)


def test_a_group_names_all_that_moves_with_a_gpu(host_tree: Callable[[str], Path]) -> None:
    gpus = {
        name: read_gpus(Reader(str(host_tree(name))))[0] for name in ("four-functions", "busy-host")
    }
    members = {
        name: [member.address for member in gpu.iommu_group.members] if gpu.iommu_group else []
        for name, gpu in gpus.items()
    }
    assert members == {
        "four-functions": ["0000:00:01.1", *(f"0000:01:00.{function}" for function in range(4))],
        "busy-host": ["0000:21:00.0", "0000:22:00.0", "0000:23:00.0"],
    }
