"""Users by device number, guests by configuration, process and reservation."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from time import sleep

import pytest
from ansible_collections.gpuhost.inference.plugins.module_utils import _child, _owners
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import UnreadableError
from ansible_collections.gpuhost.inference.plugins.module_utils._gpu import Gpu, read_gpus
from ansible_collections.gpuhost.inference.plugins.module_utils._owners import (
    Owner,
    User,
    read_guests,
    read_users,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader

KVM = "/usr/bin/kvm -id 200 -name x -device vfio-pci,host=0000:42:00.0"


@pytest.fixture
def root(host_tree: Callable[[str], Path]) -> Path:
    return host_tree("eight-gpus")


def process(root: Path, pid: int, command: str, **nodes: str) -> None:
    """Add a process; nodes are links of its fd folder, as `fd3="/dev/nvidia0"`."""
    at = root / f"proc/{pid}"
    (at / "fd").mkdir(parents=True)
    (at / "cmdline").write_bytes(command.replace(" ", "\0").encode() + b"\0")
    (at / "cgroup").write_text("0::/lxc/100/ns/system.slice/sglang.service\n")
    for name, target in nodes.items():
        (at / "fd" / name[2:]).symlink_to(target)


def gpu(root: Path, address: str) -> Gpu:
    return read_gpus(Reader(str(root)), [address])[0]


def test_a_user_is_told_by_pid_command_and_cgroup(root: Path) -> None:
    process(root, 4242, "python3 -m sglang.launch_server", fd3="/dev/nvidia0", fd4="/dev/nvidia0")
    assert gpu(root, "41:00.0").users == (
        User(
            4242,
            "python3 -m sglang.launch_server",
            "/lxc/100/ns/system.slice/sglang.service",
            "/dev/nvidia0",
            unit=None,  # of the container's systemd, not of the host's
            how="open",
        ),
    )
    assert gpu(root, "42:00.0").users == ()


def test_the_node_of_a_container_under_another_name_is_found(root: Path) -> None:
    (root / "srv").mkdir()
    (root / "srv/card").write_text("c 195:1")
    process(root, 7, "x", fd3="/srv/card")
    assert [user.node for user in gpu(root, "42:00.0").users] == ["/srv/card"]


def test_nvidia1_is_not_nvidia10(root: Path) -> None:
    (root / "dev/nvidia10").write_text("c 195:10")
    process(root, 7, "x", fd3="/dev/nvidia10")
    assert gpu(root, "42:00.0").users == ()


def mapping(root: Path, pid: int, line: str, node: str | None = None) -> None:
    """Add a line to the memory map of a process, and the link to the file it stands for."""
    at = root / f"proc/{pid}"
    with (at / "maps").open("a") as file:
        file.write(f"{line}\n")
    if node:
        first, last = (int(end, 16) for end in line.split(maxsplit=1)[0].split("-"))
        (at / "map_files").mkdir(exist_ok=True)
        (at / f"map_files/{first:x}-{last:x}").symlink_to(node)


def test_a_mapped_node_whose_file_was_closed_is_use(root: Path) -> None:
    process(root, 7, "python3 serve.py")
    mapping(root, 7, "7f0000000000-7f0000100000 r-xp 00001000 00:1c 77        /usr/lib/libc.so.6")
    mapping(
        root, 7, "7f0001000000-7f0001001000 rw-s 00000000 00:05 700  /dev/nvidia1", "/dev/nvidia1"
    )
    [user] = gpu(root, "42:00.0").users
    assert (user.pid, user.node, user.how) == (7, "/dev/nvidia1", "mapped")
    assert gpu(root, "41:00.0").users == ()


def test_a_node_open_and_mapped_is_told_once(root: Path) -> None:
    process(root, 7, "x", fd3="/dev/nvidia1")
    for at in range(3):
        line = f"7f000100{at}000-7f000100{at + 1}000 rw-s 00000000 00:05 700  /dev/nvidia1"
        mapping(root, 7, line, "/dev/nvidia1")
    assert [user.how for user in gpu(root, "42:00.0").users] == ["open"]


@pytest.mark.parametrize(
    ("line", "node", "used"),
    [
        # the path is the container's: only the number counts
        ("7f01000-7f02000 rw-s 00000000 00:2f 9  /srv/card", "/dev/nvidia1", True),
        ("7f01000-7f02000 rw-s 00000000 00:2f 9  /dev/nvidia1", "/dev/nvidia0", False),
        ("00400000-00401000 rw-s 00000000 00:05 9  /dev/nvidia1 (deleted)", "/dev/nvidia1", True),
        ("7f01000-7f02000 rw-p 00000000 00:05 9  /dev/nvidia1", "/dev/nvidia1", True),
        ("7f01000-7f02000 rw-s 00000000 00:05 9  /dev/nvidia10", "/dev/nvidia10", False),
        ("7f01000-7f02000 rw-s 00000000 00:05 9  /dev/nvidia10", None, False),
        ("7f01000-7f02000 rw-s 00000000 00:05 9  /dev/nvidiactl", "/dev/nvidiactl", False),
        ("7f01000-7f02000 rw-s 00000000 00:01 9  /memfd:x (deleted)", None, False),
        ("7f01000-7f02000 rw-s 00000000 00:0f 9  anon_inode:[perf_event]", None, False),
        # unmapped a moment ago, or without map_files in a captured host
        ("7f01000-7f02000 rw-s 00000000 00:05 9  /dev/nvidia1", None, True),
    ],
)
def test_a_mapping_counts_by_number(root: Path, line: str, node: str | None, used: bool) -> None:
    (root / "dev/nvidia10").write_text("c 195:10")
    process(root, 7, "x")
    mapping(root, 7, line, node)
    assert bool(gpu(root, "42:00.0").users) is used


def test_nodes_of_mig_instances_count(host_tree: Callable[[str], Path]) -> None:
    root = host_tree("busy-host")
    for minor in (3, 4, 5):
        (root / f"dev/nvidia-cap{minor}").write_text(f"c 237:{minor}")
        process(root, 70 + minor, "x", fd3=f"/dev/nvidia-cap{minor}")
    gpus = read_gpus(Reader(str(root)))
    assert [[user.pid for user in one.users] for one in gpus] == [[], [73, 74], []]


def test_sound_nodes_of_a_companion_count(host_tree: Callable[[str], Path]) -> None:
    root = host_tree("four-functions")
    at = root / "sys/bus/pci/devices/0000:01:00.1/sound/card1/controlC1"
    at.mkdir(parents=True)
    (at / "dev").write_text("116:7\n")
    (root / "dev/snd").write_text("c 116:7")
    process(root, 7, "pipewire", fd3="/dev/snd")
    assert [user.node for user in gpu(root, "01:00.0").users] == ["/dev/snd"]


def test_block_devices_of_the_same_number_are_others(root: Path) -> None:
    (root / "dev/dm-62").write_text("b 240:62")  # group 62 is c 240:62
    process(root, 7, "/usr/bin/kvm", fd3="/dev/dm-62")
    assert [user.pid for user in gpu(root, "83:00.0").users] == [2010]


def test_vfio_holders_are_told_whatever_the_state_of_their_guest(root: Path) -> None:
    """A machine that was killed and cannot end: no command line, first thread gone."""
    at = root / "proc/3000"
    (at / "fd").mkdir(parents=True)
    (at / "cmdline").write_bytes(b"")
    (at / "comm").write_text("kvm\n")
    (at / "cgroup").write_text("0::/qemu.slice/200.scope\n")
    for thread in ("3000", "3007"):
        (at / "task" / thread / "fd").mkdir(parents=True)
    (at / "task/3007/fd/31").symlink_to("/dev/vfio/61")
    (root / "dev/vfio/61").write_text("c 240:61")
    one = gpu(root, "82:00.0")
    assert one.users == (
        User(3000, "[kvm]", "/qemu.slice/200.scope", "/dev/vfio/61", "200.scope", "open"),
    )
    assert [owner.running for owner in one.owners if owner.vmid == 200] == [False]


def test_without_an_iommu_vfio_has_nodes_of_another_name(root: Path) -> None:
    (root / "sys/class/vfio/60").rename(root / "sys/class/vfio/noiommu-60")
    (root / "dev/vfio/noiommu-60").write_text("c 240:60")
    process(root, 7, "dpdk", fd3="/dev/vfio/noiommu-60")
    assert [user.pid for user in gpu(root, "81:00.0").users] == [7]


def test_the_persistence_daemon_uses_every_gpu_and_is_named(root: Path) -> None:
    nodes = {f"fd{minor + 3}": f"/dev/nvidia{minor}" for minor in range(4)}
    process(root, 812, "/usr/bin/nvidia-persistenced --user nvpd", **nodes)
    (root / "proc/812/cgroup").write_text("0::/system.slice/nvidia-persistenced.service\n")
    for one in read_gpus(Reader(str(root)))[:4]:
        assert [(user.pid, user.unit) for user in one.users] == [
            (812, "nvidia-persistenced.service")
        ]


@pytest.mark.parametrize(
    ("cgroup", "unit"),
    [
        ("/system.slice/nvidia-dcgm.service", "nvidia-dcgm.service"),
        ("/system.slice/system-x.slice/x@1.service/inner.scope", "x@1.service"),
        ("/user.slice/user-0.slice/user@0.service/app.slice/a.service", "user@0.service"),
        ("/qemu.slice/201.scope", "201.scope"),
        ("/machine.slice/systemd-nspawn@a.service/payload/system.slice/b.service",
         "systemd-nspawn@a.service"),
        ("/lxc/100/ns/system.slice/nvidia-persistenced.service", None),
        ("/lxc.payload.100/system.slice/nvidia-persistenced.service", None),
        ("/init.scope", "init.scope"),
        ("/", None),
    ],
)  # fmt: skip
def test_the_unit_is_the_hosts(root: Path, cgroup: str, unit: str | None) -> None:
    process(root, 7, "x", fd3="/dev/nvidia0")
    (root / "proc/7/cgroup").write_text(f"0::{cgroup}\n")
    assert [user.unit for user in gpu(root, "41:00.0").users] == [unit]


def test_a_process_that_does_not_answer_is_unknown_and_hides_no_other(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_child, "_SECONDS", 0.5)
    process(root, 77, "x")
    (root / "proc/77/comm").write_text("stuck\n")
    os.mkfifo(root / "proc/77/maps")  # as behind a lock on its memory map
    process(root, 78, "y", fd3="/dev/nvidia0")
    one = gpu(root, "41:00.0")
    os.close(os.open(root / "proc/77/maps", os.O_RDWR | os.O_NONBLOCK))
    assert one.users_unknown == ("the open files of process 77 (stuck) could not be looked at",)
    assert [user.pid for user in one.users] == [78]


@pytest.mark.parametrize(
    ("options", "known"), [("rw,nosuid,nodev", True), ("rw,nosuid", False), (None, False)]
)
def test_a_file_of_a_mount_without_device_nodes_is_no_doubt(
    root: Path, options: str | None, known: bool
) -> None:
    """Root may not look into FUSE mounts of others, and all of those are nodev."""

    class Blind(Reader):
        def device_number(self, path: str, kind: str = "c") -> tuple[int, int] | None:
            if path == "/proc/77/fd/4":
                raise UnreadableError(f"{path} could not be read: Permission denied")
            return super().device_number(path, kind)

    process(root, 77, "rclone", fd4="/mnt/cloud/file", fd5="/dev/nvidia0")
    if options:
        (root / "proc/77/fdinfo").mkdir()
        (root / "proc/77/fdinfo/4").write_text("pos:\t0\nflags:\t0100000\nmnt_id:\t1234\nino:\t5\n")
        (root / "proc/77/mountinfo").write_text(
            "99 1 0:1 / / rw - ext4 /dev/x rw\n"
            f"1234 99 0:57 / /mnt/cloud {options} - fuse.rclone cloud: rw\n"
        )
    one = read_gpus(Blind(str(root)), ["41:00.0"])[0]
    assert bool(one.users_unknown) is not known
    assert [user.pid for user in one.users] == [77]


def test_nodes_of_all_cards_are_no_use_of_one(root: Path) -> None:
    process(root, 7, "x", fd3="/dev/nvidiactl", fd4="/dev/nvidia-uvm")
    assert [one.users for one in read_gpus(Reader(str(root)))[:4]] == [()] * 4


def test_drm_and_iommufd_nodes_count(root: Path) -> None:
    at = root / "sys/bus/pci/devices/0000:41:00.0"
    for kind, name, number in (("drm", "card1", "226:1"), ("vfio-dev", "vfio3", "511:3")):
        (at / kind / name).mkdir(parents=True)
        (at / kind / name / "dev").write_text(f"{number}\n")
    for number, name in (("226:1", "dri"), ("511:3", "cdev")):
        (root / "dev" / name).write_text(f"c {number}")
    process(root, 7, "x", fd3="/dev/dri", fd4="/dev/cdev")
    assert {user.node for user in gpu(root, "41:00.0").users} == {"/dev/dri", "/dev/cdev"}


def test_whoever_holds_a_shared_group_uses_all_its_gpus(root: Path) -> None:
    devices = root / "sys/bus/pci/devices"
    group = devices / "0000:81:00.0/iommu_group"
    group.unlink()
    group.symlink_to((devices / "0000:82:00.0/iommu_group").readlink())
    (root / "dev/vfio/61").write_text("c 240:61")
    process(root, 555, "qemu", fd9="/dev/vfio/61")
    for address in ("81:00.0", "82:00.0"):
        assert [user.pid for user in gpu(root, address).users] == [555]


def test_keys_on_a_command_line_are_not_shown(root: Path) -> None:
    process(root, 556, "python3 --api-key s3cret --hf-token=s3cret --tp 4", fd3="/dev/nvidia0")
    command = gpu(root, "41:00.0").users[0].command
    assert command == "python3 --api-key (redacted) --hf-token=(redacted) --tp 4"


def test_the_driver_may_have_another_major(root: Path) -> None:
    (root / "proc/devices").write_text("Character devices:\n 505 nvidia-uvm\n 240 nvidia\n")
    (root / "srv").mkdir()
    (root / "srv/card").write_text("c 240:0")
    process(root, 7, "x", fd3="/srv/card")
    assert [user.pid for user in gpu(root, "41:00.0").users] == [7]


def test_processes_that_end_meanwhile_are_no_users_and_no_doubt(root: Path) -> None:
    (root / "proc/77").mkdir()  # its fd folder is gone
    process(root, 78, "x", fd3="/proc/78/gone")
    one = gpu(root, "41:00.0")
    assert (one.users, one.users_unknown) == ((), ())


def test_without_any_node_nobody_is_asked(root: Path) -> None:
    class Refusing(Reader):
        def names(self, path: str) -> list[str]:
            if path.startswith("/proc"):
                raise UnreadableError(path)
            return super().names(path)

    assert read_users(Refusing(str(root)), {}) == ({}, [])


def test_a_kernel_thread_is_named(root: Path) -> None:
    process(root, 9, "x", fd3="/dev/nvidia0")
    (root / "proc/9/cmdline").write_bytes(b"")
    (root / "proc/9/comm").write_text("nv_queue\n")
    assert gpu(root, "41:00.0").users[0].command == "[nv_queue]"


def test_one_file_that_cannot_be_looked_at_hides_no_other(root: Path) -> None:
    class Partly(Reader):
        def device_number(self, path: str, kind: str = "c") -> tuple[int, int] | None:
            if path == "/proc/77/fd/3":
                raise UnreadableError(f"{path} could not be read: Permission denied")
            return super().device_number(path, kind)

        def data(self, path: str) -> bytes | None:
            if path.startswith("/proc/77/fdinfo"):
                raise UnreadableError(f"{path} could not be read: Permission denied")
            return super().data(path)

    process(root, 77, "x", fd3="/srv/file", fd5="/dev/nvidia0")
    one = read_gpus(Partly(str(root)), ["41:00.0"])[0]
    assert one.users_unknown == ("/proc/77/fd/3 could not be read: Permission denied",)
    assert [user.pid for user in one.users] == [77]


class Blind(Reader):
    """Cannot look at some paths, as a reader without privileges."""

    def names(self, path: str) -> list[str]:
        if path.endswith("/fd"):
            raise UnreadableError(f"{path} could not be listed: Permission denied")
        return super().names(path)


def test_what_cannot_be_looked_at_is_unknown_for_every_gpu(root: Path) -> None:
    for pid in range(5000, 5010):
        process(root, pid, "x")
    for one in read_gpus(Blind(str(root))):
        assert one.users_unknown[0] == "/proc/1/fd could not be listed: Permission denied"
        assert one.users_unknown[3] == "and the open files of 10 more processes"


def test_owners_come_from_configuration_process_and_reservation(root: Path) -> None:
    owners = {one.address: one.owners for one in read_gpus(Reader(str(root)))}
    assert owners["0000:41:00.0"] == (
        Owner("lxc", 100, "config", False, "dev0: /dev/nvidia0,gid=44"),
    )
    assert owners["0000:81:00.0"] == (
        Owner("qemu", 200, "config", False, "hostpci0: 0000:81:00,pcie=1"),
    )
    assert [(o.vmid, o.source, o.running) for o in owners["0000:84:00.0"]] == [
        (201, "config", True),
        (201, "process", True),
        (201, "reservation", True),
    ]


@pytest.mark.parametrize(
    ("line", "claimed"),
    [
        ("hostpci0: 0000:41:00.0", ["0000:41:00.0"]),
        ("hostpci3: 41:00", ["0000:41:00.0"]),
        ("hostpci0: host=42:00.0;43:00.0,pcie=1", ["0000:42:00.0", "0000:43:00.0"]),
        ("hostpci0: pcie=1,host=0000:44:00", ["0000:44:00.0"]),
        ("hostpci0: host=0000:41:00.1", ["0000:41:00.0"]),  # a function beside the GPU is its card
        ("hostpci0: mapping=spare", ["0000:83:00.0", "0000:84:00.0"]),
        ("hostpci0: mapping=unheard", []),
        ("hostpci0: 00000000:44:00.0,pcie=1", ["0000:44:00.0"]),  # as nvidia-smi writes it
        ("hostpci0: 0000:41:00.0;0000:42:00;43:00.0", [f"0000:4{at}:00.0" for at in (1, 2, 3)]),
        ("args: -device vfio-pci,host=41:00.0,x-igd=1", ["0000:41:00.0"]),
        ("args: -device vfio-pci,sysfsdev=/sys/bus/pci/devices/0000:42:00.0", ["0000:42:00.0"]),
        ("#hostpci0: 0000:41:00.0", []),
        ("[snap]\nhostpci0: 0000:41:00.0", []),
        ("[PENDING]\nhostpci0: 0000:41:00.0", ["0000:41:00.0"]),
    ],
)
def test_every_form_of_hostpci(root: Path, line: str, claimed: list[str]) -> None:
    (root / "etc/pve/qemu-server/200.conf").write_text(f"name: x\n{line}\n")
    found = [
        one.address
        for one in read_gpus(Reader(str(root)))
        if any(owner.vmid == 200 for owner in one.owners)
    ]
    assert found == claimed


def test_an_upper_case_address_is_the_same_one(host_tree: Callable[[str], Path]) -> None:
    root = host_tree("busy-host")
    folder = root / "etc/pve/qemu-server"
    folder.mkdir(parents=True)
    (folder / "300.conf").write_text("hostpci0: 0000:C1:00.0,pcie=1\n")
    (root / "run/qemu-server").mkdir(parents=True)
    (root / "run/qemu-server/pci-id-reservations").write_text("0000:C1:00.0 300 time:1\n")
    owners = gpu(root, "C1:00.0").owners
    assert [(owner.vmid, owner.source) for owner in owners] == [
        (300, "config"),
        (300, "reservation"),
    ]


def test_a_device_on_the_command_line_in_json(root: Path) -> None:
    (root / "run/qemu-server/200.pid").write_text("2020\n")
    device = '{"driver":"vfio-pci","host":"0000:42:00.0","id":"hostpci0"}'
    process(root, 2020, f"/usr/bin/kvm -id 200 -device {device}")
    owner = gpu(root, "42:00.0").owners[-1]
    assert (owner.vmid, owner.source, owner.running) == (200, "process", True)


@pytest.mark.parametrize(
    ("line", "claimed"),
    [
        ("dev0: /dev/nvidia1", ["0000:42:00.0"]),
        ("dev12: path=/dev/nvidia1,mode=0666", ["0000:42:00.0"]),
        ("dev3: mode=0666,path=/dev/nvidia1", ["0000:42:00.0"]),
        ("dev0: /dev/nvidia10", []),
        ("lxc.mount.entry:", []),
        ("dev0: /dev/nvidiactl", []),
        (
            "lxc.mount.entry: /dev/nvidia2 dev/nvidia2 none bind,optional,create=file",
            ["0000:43:00.0"],
        ),
        ("lxc.mount.entry: /dev/dri dev/dri none bind,create=dir", ["0000:41:00.0"]),
        ("[pve:pending]\ndev0: /dev/nvidia1", ["0000:42:00.0"]),
        ("[snap]\ndev0: /dev/nvidia1", []),
        ("lxc.cgroup2.devices.allow: c 195:3 rwm", ["0000:44:00.0"]),
        ("lxc.cgroup.devices.allow: c 195:3 rw", ["0000:44:00.0"]),
        ("lxc.cgroup2.devices.allow: c 195:* rwm", [f"0000:4{at}:00.0" for at in (1, 2, 3, 4)]),
        ("lxc.cgroup2.devices.allow: c 226:1 rwm", ["0000:41:00.0"]),
        ("lxc.cgroup2.devices.allow: b 195:3 rwm", []),
        ("lxc.cgroup2.devices.allow: c 195:30 rwm", []),
        ("lxc.cgroup2.devices.allow: c *:* rwm", []),  # permission alone gives no node
        ("lxc.cgroup2.devices.allow: a", []),
        ("lxc.cgroup2.devices.deny: c 195:3 rwm", []),
    ],
)
def test_every_form_of_a_containers_node(root: Path, line: str, claimed: list[str]) -> None:
    at = root / "sys/bus/pci/devices/0000:41:00.0/drm/card1"
    at.mkdir(parents=True)
    (at / "dev").write_text("226:1\n")
    (root / "dev/dri").mkdir()
    (root / "dev/dri/card1").write_text("c 226:1")
    (root / "etc/pve/lxc/100.conf").write_text(f"hostname: x\n{line}\n")
    found = [
        one.address
        for one in read_gpus(Reader(str(root)))
        if any(owner.vmid == 100 for owner in one.owners)
    ]
    assert found == claimed


@pytest.mark.parametrize("folder", ["lxc/100", "lxc.payload.100"])
def test_a_container_runs_when_its_cgroup_has_processes(root: Path, folder: str) -> None:
    events = root / "sys/fs/cgroup" / folder / "cgroup.events"
    events.parent.mkdir(parents=True, exist_ok=True)
    events.write_text("populated 1\nfrozen 0\n")
    assert read_guests(Reader(str(root)))[0].running is True


def test_without_unified_cgroups_nobody_knows_whether_a_container_runs(root: Path) -> None:
    (root / "sys/fs/cgroup/cgroup.controllers").unlink()
    assert read_guests(Reader(str(root)))[0].running is None


def test_a_reused_process_number_is_no_running_guest(root: Path) -> None:
    (root / "run/qemu-server/200.pid").write_text("2010\n")  # this is guest 201
    guests = {guest.vmid: guest for guest in read_guests(Reader(str(root)))}
    assert (guests[200].running, guests[201].running) == (False, True)
    assert guests[201].name == "tenant"


def test_a_running_guest_without_configuration_still_owns(root: Path) -> None:
    (root / "etc/pve/qemu-server/200.conf").unlink()
    (root / "run/qemu-server/200.pid").write_text("2020\n")
    process(root, 2020, KVM)
    owner = gpu(root, "42:00.0").owners[-1]
    assert (owner.vmid, owner.source, owner.running) == (200, "process", True)


SPARE = Owner("qemu", 201, "config", True, "hostpci0: mapping=spare,pcie=1")


@pytest.mark.parametrize("hostname", ["pve1.example.com", "pve1", ""])
def test_a_node_is_called_like_its_host_without_the_domain(root: Path, hostname: str) -> None:
    (root / "proc/sys/kernel/hostname").write_text(f"{hostname}\n")
    assert SPARE in gpu(root, "83:00.0").owners
    # of another node, unless nobody knows which node this is
    assert (SPARE in gpu(root, "41:00.0").owners) is (hostname == "")


@pytest.mark.parametrize(
    "line",
    [
        "map",
        "map ",
        "map nonsense",
        "map node=pve1",
        "map node=pve1,path=",
        "map node=pve1,path=;",
        "map node=pve1,path=zz",
        "map node=pve1,path=0000:83:00.0;zz",
    ],
)
def test_a_mapping_that_cannot_be_understood_is_unknown_where_a_guest_uses_it(
    root: Path, line: str
) -> None:
    (root / "etc/pve/mapping/pci.cfg").write_text(f"spare\n\t{line}\n")
    for address in ("41:00.0", "84:00.0"):  # it may mean any
        assert gpu(root, address).users_unknown == (
            "guests: /etc/pve/mapping/pci.cfg: which devices the mapping spare of guest 201 means "
            "cannot be told: correct its map lines",
        )


@pytest.mark.parametrize(
    "text",
    [
        "other\n\tmap\n",  # nobody uses it
        "\tmap\n",
        "spare\n\tmap node=pve2,path=zz\n",  # of another node
        "spare\n\tdescription map\n\tmap  node=pve1, path=0000:83:00;\n",
    ],
)
def test_what_is_odd_elsewhere_in_the_mappings_makes_no_doubt(root: Path, text: str) -> None:
    (root / "etc/pve/mapping/pci.cfg").write_text(text)
    one = gpu(root, "83:00.0")
    assert one.users_unknown == ()
    assert (SPARE in one.owners) is ("83" in text)


@pytest.mark.parametrize(
    ("holder", "running"),
    [
        ("200 pid:99", False),  # no such process
        ("200 pid:2010", False),  # it is another guest's
        ("201 pid:2010", True),
        ("200 pid:900", False),
        ("200 pid:901", None),  # about to end, without a command line
        ("200 time:1", False),
        ("200 time:99999999999", True),
    ],
)
def test_a_reservation_counts_while_its_holder_lives(
    root: Path, holder: str, running: bool | None
) -> None:
    (root / "proc/901").mkdir()
    (root / "run/qemu-server/pci-id-reservations").write_text(f"0000:42:00.0 {holder}\nnonsense\n")
    assert gpu(root, "42:00.0").owners[-1] == Owner(
        "qemu", int(holder[:3]), "reservation", running, "/run/qemu-server/pci-id-reservations"
    )


@pytest.mark.parametrize(
    ("pid_file", "scope", "running"),
    [
        (None, None, False),
        ("", None, None),
        ("garbage", None, None),
        ("20 10", None, None),
        ("2020", None, True),
        ("3030", None, None),  # a process without a command line
        ("4040", None, False),  # no process
        ("900", None, False),  # somebody else's
        (None, "2020", True),  # the file was lost
        ("garbage", "2020", True),
        ("900", "1\n2020", True),
        (None, "3030", None),
    ],
)
def test_whether_a_machine_runs(
    root: Path, pid_file: str | None, scope: str | None, running: bool | None
) -> None:
    process(root, 2020, KVM)
    (root / "proc/3030").mkdir()
    if pid_file is not None:
        (root / "run/qemu-server/200.pid").write_text(f"{pid_file}\n")
    if scope is not None:
        folder = root / "sys/fs/cgroup/qemu.slice/200.scope"
        folder.mkdir(parents=True)
        (folder / "cgroup.procs").write_text(f"{scope}\n")
    guest = {guest.vmid: guest for guest in read_guests(Reader(str(root)))}[200]
    assert guest.running is running
    assert guest.pid == (2020 if running else None)


def test_a_cluster_file_system_that_does_not_answer_is_unknown(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_child, "_SECONDS", 0.5)

    class Hung(Reader):
        def exists(self, path: str) -> bool:
            if path.startswith("/etc/pve"):
                sleep(5)
            return super().exists(path)

    one = read_gpus(Hung(str(root)), ["41:00.0"])[0]
    assert one.users_unknown == ("guests: /etc/pve does not answer: is pve-cluster working?",)


def test_a_cluster_file_system_that_is_not_there_is_unknown_not_empty(root: Path) -> None:
    for folder in ("lxc", "qemu-server"):
        (root / "etc/pve" / folder).rename(root / folder)
    assert "is pve-cluster running?" in gpu(root, "41:00.0").users_unknown[0]


def test_a_host_that_is_no_proxmox_has_no_guests(tmp_path: Path) -> None:
    assert read_guests(Reader(str(tmp_path))) == []


@pytest.mark.parametrize(("machines", "children"), [(True, 2), (False, 1)])
def test_a_host_without_running_machines_starts_no_child_for_them(
    root: Path, monkeypatch: pytest.MonkeyPatch, machines: bool, children: int
) -> None:
    asked: list[list[str]] = []

    def counted(read: Callable[[str], str | None], items: Iterable[str]) -> dict[str, str | None]:
        asked.append(list(items))
        return _child.ask(read, asked[-1])

    monkeypatch.setattr(_owners, "ask", counted)
    if not machines:
        (root / "run/qemu-server/201.pid").unlink()
    read_guests(Reader(str(root)))
    assert len(asked) == children


def test_the_scan_is_done_once_for_all_gpus(root: Path, tmp_path: Path) -> None:
    calls = tmp_path / "calls"

    class Counting(Reader):
        def names(self, path: str) -> list[str]:
            with calls.open("a") as file:  # the scan runs in a child
                file.write(f"{path}\n")
            return super().names(path)

    read_gpus(Counting(str(root)))
    assert calls.read_text().split().count("/proc/2010/fd") == 1
