"""Users by device number, guests by configuration, process and reservation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import UnreadableError
from ansible_collections.gpuhost.inference.plugins.module_utils._gpu import Gpu, read_gpus
from ansible_collections.gpuhost.inference.plugins.module_utils._owners import (
    Owner,
    User,
    read_guests,
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


def test_a_kernel_thread_is_named(root: Path) -> None:
    process(root, 9, "x", fd3="/dev/nvidia0")
    (root / "proc/9/cmdline").write_bytes(b"")
    (root / "proc/9/comm").write_text("nv_queue\n")
    assert gpu(root, "41:00.0").users[0].command == "[nv_queue]"


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


@pytest.mark.parametrize(
    ("holder", "running"),
    [("200 pid:99", False), ("200 time:1", False), ("200 time:99999999999", True)],
)
def test_a_reservation_counts_while_its_holder_lives(
    root: Path, holder: str, running: bool
) -> None:
    (root / "run/qemu-server/pci-id-reservations").write_text(f"0000:42:00.0 {holder}\nnonsense\n")
    assert gpu(root, "42:00.0").owners[-1] == Owner(
        "qemu", 200, "reservation", running, "/run/qemu-server/pci-id-reservations"
    )


def test_a_cluster_file_system_that_is_not_there_is_unknown_not_empty(root: Path) -> None:
    for folder in ("lxc", "qemu-server"):
        (root / "etc/pve" / folder).rename(root / folder)
    assert "is pve-cluster running?" in gpu(root, "41:00.0").users_unknown[0]


def test_a_host_that_is_no_proxmox_has_no_guests(tmp_path: Path) -> None:
    assert read_guests(Reader(str(tmp_path))) == []


def test_the_scan_is_done_once_for_all_gpus(root: Path, tmp_path: Path) -> None:
    calls = tmp_path / "calls"

    class Counting(Reader):
        def names(self, path: str) -> list[str]:
            with calls.open("a") as file:  # the scan runs in a child
                file.write(f"{path}\n")
            return super().names(path)

    read_gpus(Counting(str(root)))
    assert calls.read_text().split().count("/proc/2010/fd") == 1
