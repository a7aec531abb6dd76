"""The lab host's stand-ins for Proxmox's tools, as far as they decide on values."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from itertools import chain
from pathlib import Path
from typing import Any

import guests
import pci
import pct
import pytest
import qm

ROOTFS = Path(__file__).parents[3] / "lab" / "rootfs"
GPUS = [f"0000:{bus}:00.0" for bus in (41, 42, 43, 44, 81, 82, 83, 84)]
CONF = """#note
memory: 512
dev1: /dev/nvidia1,mode=0666
dev0: /dev/nvidia0
lxc.cgroup2.devices.allow: c 1:3 rw
lxc.cgroup2.devices.allow: c 1:5 rw

[before]
memory: 256
dev0: /dev/nvidia7
"""


def shipped(kind: str, vmid: int) -> list[tuple[str, str]]:
    file = ROOTFS / "etc/pve/local" / guests.FOLDERS[kind] / f"{vmid}.conf"
    return guests.parse(file.read_text())


def test_settings_of_a_snapshot_are_not_the_guests() -> None:
    assert dict(guests.parse(CONF))["dev0"] == "/dev/nvidia0"
    assert [line[0] for line in guests.parse(CONF)].count("lxc.cgroup2.devices.allow") == 2


def test_edit_keeps_notes_raw_keys_and_snapshots() -> None:
    text = guests.edit(CONF, {"dev1": None, "dev0": "/dev/nvidia2", "cores": "4"})
    head, bracket, rest = text.partition("\n[")
    assert head.splitlines() == [
        "#note",
        "cores: 4",
        "dev0: /dev/nvidia2",
        "memory: 512",
        "lxc.cgroup2.devices.allow: c 1:3 rw",
        "lxc.cgroup2.devices.allow: c 1:5 rw",
    ]
    assert bracket + rest == "\n" + CONF[CONF.index("[") :]
    assert guests.edit(text, {}) == text


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["-dev0", "/dev/nvidia0,gid=0"], {"dev0": "/dev/nvidia0,gid=0"}),
        (["--dev0=/dev/nvidia0", "--onboot", "1"], {"dev0": "/dev/nvidia0", "onboot": "1"}),
        (["--delete", "dev0,dev1"], {"dev0": None, "dev1": None}),
        (["--onboot"], {"onboot": "1"}),
    ],
)
def test_set_options(words: list[str], expected: dict[str, Any]) -> None:
    assert guests.set_options("lxc", 100, words, pct.SETTINGS) == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--devx", "/dev/null"], "Unknown option: devx\n400 unable to parse option"),
        (["dev0"], "400 too many arguments"),
        ([], "no options specified"),
    ],
)
def test_set_refuses(words: list[str], message: str) -> None:
    with pytest.raises(guests.GuestError, match=message):
        guests.set_options("lxc", 100, words, pct.SETTINGS)


def test_a_device_is_looked_at_when_it_is_handed_in() -> None:
    null = pct.node("/dev/null,gid=44,mode=0640,deny-write=1")
    assert null == pct.Node("/dev/null", "c", 1, 3, 0o640, 0, 44, "r")
    with pytest.raises(guests.GuestError, match=r"^Device /dev/nvidia99 does not exist$"):
        pct.node("/dev/nvidia99")
    with pytest.raises(guests.GuestError, match=r"is not a device$"):
        pct.node(__file__)


def test_container_100_becomes_an_lxc_configuration() -> None:
    node = pct.Node("/dev/nvidia1", "c", 195, 1, 0o666, 0, 0, "rw")
    lines = pct.lxc_config(100, shipped("lxc", 100), [node]).splitlines()
    for expected in (
        "lxc.cgroup2.devices.allow = c 195:1 rw",
        "lxc.mount.entry = /var/lib/lxc/100/passthrough/dev/nvidia1 dev/nvidia1"
        " none bind,create=file 0 0",
        "lxc.uts.name = ct100",
        "lxc.rootfs.path = dir:/var/lib/vz/images/100/subvol-100-disk-0.subvol",
        "lxc.net.0.link = vmbr1",
        "lxc.net.0.hwaddr = BC:24:11:0A:00:64",
        "lxc.net.0.ipv4.address = 10.10.10.100/24",
    ):
        assert expected in lines


def test_raw_lines_go_to_lxc_as_they_are() -> None:
    lines = pct.lxc_config(7, [("rootfs", "local:7/x"), ("lxc.idmap", "u 0 1 1")], []).splitlines()
    assert lines[-1] == "lxc.idmap = u 0 1 1"
    with pytest.raises(guests.GuestError, match="storage 'zfs' does not exist"):
        pct.lxc_config(7, [("rootfs", "zfs:7/x")], [])


@pytest.mark.parametrize(
    ("value", "addresses"),
    [
        ("0000:81:00.0,pcie=1", ["0000:81:00.0"]),
        ("81:00", ["0000:81:00.0", "0000:81:00.1"]),
        ("host=0000:81:00;82:00.0", ["0000:81:00.0", "0000:81:00.1", "0000:82:00.0"]),
    ],
)
def test_hostpci_forms(value: str, addresses: list[str]) -> None:
    present = [*GPUS, "0000:81:00.1"]
    (device,) = pci.host_devices({"hostpci0": value}, sorted(present))
    assert device.addresses == addresses


@pytest.mark.parametrize(
    ("conf", "message"),
    [
        ({"hostpci0": "85:00.0"}, "no PCI device found for '85:00.0'"),
        ({"hostpci0": "mapping=gpu"}, "PCI device mapping not found for 'gpu'"),
        (
            {"hostpci0": "81:00", "hostpci1": "0000:81:00.0"},
            "device '0000:81:00.0' assigned more than once",
        ),
    ],
)
def test_hostpci_refused(conf: dict[str, str], message: str) -> None:
    with pytest.raises(guests.GuestError, match=message):
        pci.host_devices(conf, GPUS)


def test_reservations_keep_their_form() -> None:
    text = "0000:83:00.0 201 pid:1234\n0000:84:00.0 201 time:99\n"
    assert pci.format_reservations(pci.parse_reservations("rubbish\n" + text)) == text


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("0000:83:00.0 201 pid:1234", "already in use by VMID '201'"),
        ("0000:83:00.0 201 pid:77", None),  # left over by a process that is gone
        ("0000:83:00.0 201 time:200", "currently reserved for use by VMID '201'"),
        ("0000:83:00.0 201 time:50", None),
        ("0000:83:00.0 200 time:200", None),  # its own
    ],
)
def test_who_may_have_a_device(line: str, message: str | None) -> None:
    old = pci.parse_reservations(line + "\n0000:84:00.0 201 pid:1234\n")
    mine = pci.Reservation(200, "pid", 5)
    pids = {201: 1234}
    if message:
        with pytest.raises(guests.GuestError, match=message):
            pci.claim(old, ["0000:83:00.0"], mine, 100, pids.get)
    else:
        new = pci.claim(old, ["0000:83:00.0"], mine, 100, pids.get)
        assert new == {**old, "0000:83:00.0": mine}


def test_command_line_of_vm_201_names_what_it_holds() -> None:
    conf = dict(shipped("qemu", 201))
    words = qm.command(201, conf, pci.host_devices(conf, GPUS))
    assert words[:3] == ["/usr/bin/kvm", "-id", "201"]
    held = [words[i + 1] for i, word in enumerate(words) if word == "-device"]
    assert held == [
        "vfio-pci,host=0000:83:00.0,id=hostpci0,bus=ich9-pcie-port-1,addr=0x0",
        "vfio-pci,host=0000:84:00.0,id=hostpci1,bus=ich9-pcie-port-2,addr=0x0",
    ]


def test_no_gpu_has_two_owners() -> None:
    wanted = [
        device.addresses
        for vmid in (200, 201)
        for device in pci.host_devices(dict(shipped("qemu", vmid)), GPUS)
    ]
    assert sorted(chain(*wanted)) == GPUS[4:]


def may_rename() -> bool:
    """Tell whether this process has CAP_SYS_RESOURCE, which changing a command line takes."""
    status = Path("/proc/self/status").read_text()
    return bool(int(status.partition("CapEff:")[2].split()[0], 16) >> 24 & 1)


@pytest.mark.skipif(not may_rename(), reason="lacks CAP_SYS_RESOURCE")
def test_vm_process_shows_its_command_line_counts_and_leaves(tmp_path: Path) -> None:
    file, alive = tmp_path / "9.pid", tmp_path / "9.alive"
    words = ["-id", "9", "-pidfile", str(file), "-daemonize"]
    subprocess.run([sys.executable, str(ROOTFS / "usr/bin/kvm"), *words], check=True, timeout=30)
    pid = int(file.read_text())
    try:
        shown = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        assert shown == ["/usr/bin/kvm", *words, ""]
        assert Path(f"/proc/{pid}/comm").read_text() == "kvm\n"
    finally:
        os.kill(pid, signal.SIGTERM)
        end = time.monotonic() + 30
        while file.exists() and time.monotonic() < end:
            time.sleep(0.05)
    assert not file.exists()
    assert alive.read_text().split()[:2] == ["1", str(pid)]


def test_vm_process_says_why_a_device_cannot_be_had(tmp_path: Path) -> None:
    device = "vfio-pci,host=ffff:00:00.0,id=hostpci0"
    words = ["-pidfile", str(tmp_path / "9.pid"), "-device", device]
    done = subprocess.run(
        [sys.executable, str(ROOTFS / "usr/bin/kvm"), *words],
        check=False,
        timeout=30,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr.startswith(f"kvm: -device {device}: ")
    assert not (tmp_path / "9.pid").exists()
