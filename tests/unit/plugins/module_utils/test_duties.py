"""What the host does with disks and network cards, on a host that needs both, and on variants."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from ansible_collections.gpuhost.inference.plugins.module_utils._duties import read_duties
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import UnreadableError
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader

DISK = "0000:22:00.0"
CARD = "0000:23:00.0"


@pytest.fixture
def root(host_tree: Callable[[str], Path]) -> Path:
    return host_tree("busy-host")


def duties(root: Path, address: str) -> tuple[str, ...]:
    return read_duties(Reader(str(root)), address)


def process(root: Path, pid: int, command: str, node: str) -> None:
    at = root / f"proc/{pid}"
    (at / "fd").mkdir(parents=True)
    (at / "cmdline").write_bytes(command.replace(" ", "\0").encode() + b"\0")
    (at / "fd/3").symlink_to(node)


def interface(root: Path, name: str, *, folder: str = "") -> Path:
    """Add a network device without hardware, and give the folder it lies in."""
    at = root / "sys/devices/virtual/net" / name
    (at / folder).mkdir(parents=True)
    (root / "sys/class/net" / name).symlink_to(f"../../devices/virtual/net/{name}")
    return at


def test_a_boot_disk_and_the_card_of_the_default_route(root: Path) -> None:
    assert duties(root, DISK) == (
        "disk nvme0n1p2 is mounted at /boot/efi",
        "disk nvme0n1p3 is used for swap through dm-0 (pve-swap)",
        "disk nvme0n1p3 is mounted at / through dm-1 (pve-root)",
    )
    assert duties(root, CARD) == (
        "network card eno1 is a port of bridge vmbr0",
        "network card eno1 has the default route through vmbr0",
    )


@pytest.mark.parametrize("address", ["0000:21:00.0", "0000:c2:00.0", "0000:99:00.0"])
def test_others_have_no_duty(root: Path, address: str) -> None:
    assert duties(root, address) == ()


def test_a_disk_that_nothing_uses_has_no_duty(root: Path) -> None:
    (root / "proc/self/mountinfo").write_text("")
    (root / "proc/swaps").unlink()
    folder = (root / "sys/class/block/nvme0n1p3").resolve() / "holders"
    for name in ("dm-0", "dm-1"):
        (folder / name).unlink()
    assert duties(root, DISK) == ()


def test_an_active_volume_counts_also_when_nothing_is_mounted(root: Path) -> None:
    (root / "proc/self/mountinfo").write_text("")
    (root / "proc/swaps").unlink()
    assert duties(root, DISK) == ("disk nvme0n1p3 is used through dm-1 (pve-root)",)


def test_a_mount_in_a_container_counts(root: Path) -> None:
    for pid, inode in (("self", 1), ("1", 1), ("700", 2)):
        (root / f"proc/{pid}/ns").mkdir(parents=True)
        (root / f"proc/{pid}/ns/mnt").symlink_to(f"mnt:[{inode}]")
    (root / "proc/700/mountinfo").write_text("9 1 259:1 / /srv/data rw - ext4 /dev/nvme0n1p1 rw\n")
    assert duties(root, DISK)[0] == "disk nvme0n1p1 is mounted at /srv/data"


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        (  # its mounts have numbers of their own, and name one of its disks
            {"sys/fs/btrfs/0a1b/devices/nvme0n1p1/size": "1"},
            "disk nvme0n1p1 is part of a mounted btrfs",
        ),
        (
            {
                "run/udev/data/b259:1": "S:x\nE:ID_FS_TYPE=zfs_member\nE:ID_FS_LABEL=tank",
                "proc/spl/kstat/zfs/tank/state": "ONLINE",
            },
            "disk nvme0n1p1 is part of ZFS pool tank",
        ),
        (  # a disk that was once part of a pool
            {
                "run/udev/data/b259:1": "E:ID_FS_TYPE=zfs_member\nE:ID_FS_LABEL=old",
                "proc/spl/kstat/zfs/tank/state": "ONLINE",
            },
            None,
        ),
    ],
)
def test_file_systems_of_several_disks(
    root: Path, entries: dict[str, str], expected: str | None
) -> None:
    for path, text in entries.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    found = [one for one in duties(root, DISK) if one.startswith("disk nvme0n1p1 ")]
    assert found == ([expected] if expected else [])


def test_an_array_counts_through_its_layers(root: Path) -> None:
    block = root / "sys/class/block"
    for name, number in (("md0", "9:0"), ("dm-9", "252:9")):
        (root / "sys/devices/virtual/block" / name / "holders").mkdir(parents=True)
        (root / "sys/devices/virtual/block" / name / "dev").write_text(number)
        (block / name).symlink_to(f"../../devices/virtual/block/{name}")
    (block.joinpath("nvme0n1p1").resolve() / "holders").mkdir()
    (block.joinpath("nvme0n1p1").resolve() / "holders/md0").mkdir()
    (block.joinpath("md0").resolve() / "holders/dm-9").mkdir()
    with (root / "proc/self/mountinfo").open("a") as file:
        file.write("40 22 252:9 / /data rw - xfs /dev/mapper/x rw\n")
    assert duties(root, DISK)[0] == "disk nvme0n1p1 is mounted at /data through dm-9"


def test_a_volume_open_in_a_virtual_machine_counts(root: Path) -> None:
    (root / "dev/dm-1").write_text("b 252:1")
    (root / "dev/vfio").mkdir()
    (root / "dev/vfio/1").write_text("c 252:1")  # a character device of the same number
    process(root, 2010, "/usr/bin/kvm -id 201", "/dev/dm-1")
    process(root, 2011, "/usr/bin/kvm -id 202", "/dev/vfio/1")
    assert [one for one in duties(root, DISK) if "process" in one] == [
        "disk nvme0n1p3 is open in process 2010 (/usr/bin/kvm -id 201) through dm-1 (pve-root)"
    ]


def test_many_uses_are_counted(root: Path) -> None:
    lines = [f"{at} 22 259:1 / /m{at} rw - ext4 /dev/nvme0n1p1 rw" for at in range(40, 50)]
    (root / "proc/self/mountinfo").write_text("\n".join(lines))
    found = duties(root, DISK)
    assert found[3:5] == (
        "disk nvme0n1p1 is mounted at /m43",
        "disk nvme0n1p1 has 6 more uses",
    )


def test_a_disk_with_several_controllers_lies_in_its_subsystem(root: Path) -> None:
    link = root / "sys/class/block/nvme0n1p2"
    at = root / "sys/devices/virtual/nvme-subsystem/nvme-subsys0"
    (at / "nvme0n1/nvme0n1p2").mkdir(parents=True)
    (at / "nvme0n1/nvme0n1p2/dev").write_text("259:2")
    (at / "nvme0").mkdir()
    link.unlink()
    link.symlink_to("../../devices/virtual/nvme-subsystem/nvme-subsys0/nvme0n1/nvme0n1p2")
    assert "disk nvme0n1p2 is mounted at /boot/efi" not in duties(root, DISK)
    (root / "sys/class/nvme-subsystem").mkdir()
    (root / "sys/class/nvme-subsystem/nvme-subsys0").symlink_to(
        "../../devices/virtual/nvme-subsystem/nvme-subsys0"
    )
    assert "disk nvme0n1p2 is mounted at /boot/efi" in duties(root, DISK)


def test_a_disk_on_the_usb_port_of_a_card_counts(root: Path) -> None:
    (root / "sys/class/block/sda").symlink_to(
        "../../devices/pci0000:20/0000:20:01.1/0000:21:00.2/usb3/3-1/host0/target0:0:0/block/sda"
    )
    at = root / "sys/devices/pci0000:20/0000:20:01.1/0000:21:00.2/usb3/3-1/host0/target0:0:0"
    (at / "block/sda").mkdir(parents=True)
    (at / "block/sda/dev").write_text("8:0")
    (root / "proc/self/mountinfo").write_text("40 22 8:0 / /backup rw - ext4 /dev/sda rw\n")
    assert duties(root, "0000:21:00.2") == ("disk sda is mounted at /backup",)


def test_a_bridge_of_a_bond_and_a_vlan_above(root: Path) -> None:
    card = (root / "sys/class/net/eno1").resolve()
    for name in ("master", "upper_vmbr0"):
        (card / name).unlink()
    bond = interface(root, "bond0", folder="bonding")
    (card / "master").symlink_to("../../bond0")
    (card / "upper_bond0").mkdir()
    (bond / "master").symlink_to("../vmbr0")
    (bond / "upper_vmbr0").mkdir()
    (root / "sys/devices/virtual/net/vmbr0/upper_vmbr0.7").mkdir()
    interface(root, "vmbr0.7")
    (root / "proc/net/route").write_text(
        "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n"
        "vmbr0.7\t0000000A\t00000000\t0001\t0\t0\t0\t0000FFFF\t0\t0\t0\n"
        "vmbr0\t0000000B\t00000000\t0201\t0\t0\t0\t000000FF\t0\t0\t0\n"  # unreachable
    )
    assert duties(root, CARD) == (
        "network card eno1 is a member of bond bond0",
        "network card eno1 is a port of bridge vmbr0 through bond0",
        "network card eno1 carries network 10.0.0.0/16 through vmbr0.7",
    )


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "0" * 32 + " 00 {z} 00 fe800000000000000000000000000001 0 1 0 00000003",
            "has the default route",
        ),
        ("20010db8" + "0" * 24 + " 20 {z} 00 {z} 0 1 0 00000001", "carries network 2001:db8::/32"),
        ("fe80" + "0" * 28 + " 40 {z} 00 {z} 0 1 0 00000001", None),
        ("20010db8" + "0" * 23 + "1 80 {z} 00 {z} 0 1 0 80200001", None),
        ("ff00" + "0" * 28 + " 08 {z} 00 {z} 0 1 0 00000001", None),
        ("0" * 32 + " 00 {z} 00 {z} 0 1 0 00200200", None),
    ],
)
def test_routes_of_ipv6(root: Path, line: str, expected: str | None) -> None:
    (root / "proc/net/route").unlink()
    (root / "proc/net/ipv6_route").write_text(f"{line.format(z='0' * 32)}     eno1\n")
    found = [one for one in duties(root, CARD) if "bridge" not in one]
    assert found == ([f"network card eno1 {expected}"] if expected else [])


def test_a_card_whose_interface_a_container_has(root: Path) -> None:
    (root / "sys/class/net/eno1").unlink()
    assert duties(root, CARD) == (
        "its network interface is not the host's: a container may have it",
    )
    driver = root / "sys/bus/pci/devices" / CARD / "driver"
    driver.unlink()
    driver.symlink_to("../../../../bus/pci/drivers/vfio-pci")
    assert duties(root, CARD) == ()


def test_virtual_functions_count(root: Path) -> None:
    for at in range(4):
        (root / "sys/bus/pci/devices" / CARD / f"virtfn{at}").mkdir()
    assert duties(root, CARD)[0] == "it has 4 virtual functions"


def test_a_mount_namespace_that_cannot_be_read_hides_no_mount(root: Path) -> None:
    class Blind(Reader):
        def link(self, path: str) -> str | None:
            if path == "/proc/1/ns/mnt":
                raise UnreadableError(f"{path} could not be read: Permission denied")
            return super().link(path)

    assert read_duties(Blind(str(root)), DISK)[:2] == (
        "its disks may be in use: /proc/1/ns/mnt could not be read: Permission denied",
        "disk nvme0n1p2 is mounted at /boot/efi",
    )


def test_what_cannot_be_read_is_told_and_hides_nothing(root: Path) -> None:
    class Blind(Reader):
        def names(self, path: str) -> list[str]:
            if path == "/sys/class/block":
                raise UnreadableError(f"{path} could not be listed: Permission denied")
            return super().names(path)

    found = read_duties(Blind(str(root)), CARD)
    assert found[0] == (
        f"what the host does with {CARD} is not known: "
        "/sys/class/block could not be listed: Permission denied"
    )
    assert "network card eno1 is a port of bridge vmbr0" in found
