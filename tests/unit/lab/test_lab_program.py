"""The lab's program: what it starts, what it keeps, what it says. No machine is booted here."""

from __future__ import annotations

import fcntl
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import image
import machine
import pytest

LAB = Path(__file__).parents[3] / "lab"
LOADER = machine.Loader(kernel="/k", initrd="/i", cmdline="root=/dev/vda rw")


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(image, "STATE", tmp_path)
    monkeypatch.setattr(machine, "STATE", tmp_path)
    return tmp_path


def arguments(name: str = "amd", accel: str = "tcg") -> list[str]:
    return machine.qemu_arguments(name, accel, Path("/state"), LOADER, 2200)


def test_four_gpus_behind_each_node() -> None:
    words = arguments()
    roots = [word for word in words if word.startswith("pxb-pcie")]
    assert [re.search(r"bus_nr=(\d+),numa_node=(\d)", root).groups() for root in roots] == [
        (str(0x40), "0"),
        (str(0x80), "1"),
    ]
    ports = [word for word in words if word.startswith("pcie-root-port")]
    assert [re.search(r"bus=(\w+),addr=(\w+)", port).groups() for port in ports] == [
        (root, slot) for root in ("root0", "root1") for slot in ("0x1", "0x2", "0x3", "0x4")
    ]
    assert sum(word.startswith("edu,") for word in words) == 8


@pytest.mark.parametrize(("name", "iommu"), [("amd", "amd-iommu"), ("intel", "intel-iommu")])
def test_machine_names_its_iommu(name: str, iommu: str) -> None:
    assert [w.split(",")[0] for w in arguments(name) if "-iommu" in w] == [iommu]


def test_sound_device_beside_one_gpu() -> None:
    words = machine.qemu_arguments(
        "amd", "tcg", Path("/state"), LOADER, 2200, companion="0000:82:00.0"
    )
    sixth = [word for word in words if word.startswith("edu,bus=port6,")]
    assert [re.search(r"id=(\w+),addr=(\S+)", word).groups() for word in sixth] == [
        ("gpu6", "0x0.0x0"),
        ("audio6", "0x0.0x1"),
    ]
    assert all("multifunction=on" in word for word in sixth)
    others = [w for w in words if w.startswith("edu,") and w not in sixth]
    assert others == [w for w in arguments() if w.startswith("edu,") and "bus=port6," not in w]


def test_a_sound_device_stays_with_the_machine() -> None:
    host = machine.Machine("amd")
    assert host.companion is None
    host.companion = "0000:44:00.0"
    assert machine.Machine("amd").companion == "0000:44:00.0"
    assert machine.Machine("intel").companion is None
    host.companion = None
    assert machine.Machine("amd").companion is None


def test_network_is_closed_and_on_loopback() -> None:
    (net,) = [word for word in arguments() if word.startswith("user,")]
    assert "restrict=on" in net
    assert "hostfwd=tcp:127.0.0.1:2200-:22" in net


def test_guest_reboot_ends_qemu() -> None:
    assert "-no-reboot" in arguments()


def test_loader_file() -> None:
    text = "# a comment\nkernel=/boot/vmlinuz-6\n\ninitrd = /boot/i\ncmdline=root=/dev/vda a=b\n"
    assert machine.parse_loader(text) == machine.Loader(
        kernel="/boot/vmlinuz-6", initrd="/boot/i", cmdline="root=/dev/vda a=b"
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("kernel=/k\ninitrd=/i\n", "lacks cmdline"),
        ("kernel=/k\ntitle=Debian\n", "'title=Debian' is not one of"),
        ("", "lacks kernel, initrd, cmdline"),
    ],
)
def test_loader_file_that_boots_nothing(text: str, words: str) -> None:
    with pytest.raises(image.LabError, match=words):
        machine.parse_loader(text)


@pytest.mark.skipif(not shutil.which("mkfs.ext4"), reason="needs e2fsprogs")
def test_boot_loader_reads_the_guests_disk(tmp_path: Path) -> None:
    boot = tmp_path / "tree" / "boot"
    boot.mkdir(parents=True)
    (boot / "vmlinuz-1").write_text("a kernel")
    (boot / "initrd.img-1").write_text("an initramfs")
    loader = boot / "lab-loader.conf"
    loader.write_text("kernel=/boot/vmlinuz-1\ninitrd=/boot/initrd.img-1\ncmdline=quiet\n")
    host = machine.Machine("amd")
    host.directory.mkdir()
    make = ["mkfs.ext4", "-q", "-F", "-d", str(tmp_path / "tree"), str(host.disk), "8M"]
    subprocess.run(make, check=True)
    loaded = machine.load(host)
    assert loaded.cmdline == "quiet"
    assert Path(loaded.kernel).read_text() == "a kernel"
    assert Path(loaded.initrd).read_text() == "an initramfs"

    loader.write_text("kernel=/boot/vmlinuz-2\ninitrd=/boot/initrd.img-1\ncmdline=\n")
    subprocess.run(make, check=True)
    with pytest.raises(image.LabError, match="vmlinuz-2, which is not there"):
        machine.load(host)


def test_hash_follows_content_mode_and_links(tmp_path: Path) -> None:
    tree = tmp_path / "inputs"
    tree.mkdir()
    file = tree / "file"
    seen = set()
    for change in (
        lambda: file.write_text("a"),
        lambda: file.write_text("b"),
        lambda: file.chmod(0o755),
        lambda: file.rename(tree / "other"),
        lambda: (tree / "link").symlink_to("other"),
    ):
        change()
        seen.add(image.digest(tree))
    assert len(seen) == 5
    assert image.digest(tree) == image.digest(tree)


def test_all_missing_packages_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda tool: None if "no-" in tool else tool)
    with pytest.raises(image.LabError, match=r"apt-get install .* one two$"):
        image.require({"no-a": "two", "ls": "coreutils", "no-b": "one", "no-c": "two"})


def test_overlay_gives_plain_modes(tmp_path: Path) -> None:
    source, tree = tmp_path / "source", tmp_path / "tree"
    (source / "usr/bin").mkdir(parents=True)
    (source / "usr/bin/tool").touch(mode=0o775)
    (source / "usr/text").touch(mode=0o664)
    (source / "usr/link").symlink_to("text")
    (tree / "usr/bin").mkdir(parents=True)
    (tree / "usr/link").write_text("replaced")
    image.overlay(source, tree)
    assert (tree / "usr/bin/tool").stat().st_mode & 0o7777 == 0o755
    assert (tree / "usr/text").stat().st_mode & 0o7777 == 0o644
    assert (tree / "usr/link").is_symlink()


def test_stale_state_is_off_and_a_held_lock_is_on() -> None:
    host = machine.Machine("amd")
    assert host.running() is None
    host.directory.mkdir()
    state = {"pid": 1, "port": 2200, "accel": "tcg", "image": "x"}
    host.state.write_text(json.dumps(state))
    host.lock.touch()
    assert host.running() is None, "nobody holds the lock: the pid in the file means nothing"
    with host.lock.open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert host.running() == machine.Running(**state)
    assert host.running() is None


def run_lab(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, LAB / "lab", *words], capture_output=True, text=True, check=False
    )


def test_snapshot_names_stay_in_their_directory() -> None:
    done = run_lab("restore", "../x", "--machine", "intel")
    assert done.returncode == 1
    assert "'../x' can't name a snapshot" in done.stderr


def test_sound_device_where_no_gpu_is() -> None:
    done = run_lab("up", "--companion", "0000:45:00.0", "--machine", "intel")
    assert done.returncode == 2
    assert "invalid choice: '0000:45:00.0' (choose from '0000:41:00.0'" in done.stderr


def test_wrong_machine() -> None:
    assert "invalid choice: 'arm'" in run_lab("status", "--machine", "arm").stderr


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[Path]:
    """Give a tree whose /proc is mounted, with somebody who looks into it."""
    proc = tmp_path / "tree.part/proc"
    proc.mkdir(parents=True)
    mounted = subprocess.run(["mount", "-t", "proc", "proc", proc], check=False)
    if mounted.returncode:
        pytest.skip("NOT TESTED: this account may not mount /proc")
    with (proc / "version").open():
        yield proc.parent
    if proc.is_mount():
        subprocess.run(["umount", "--lazy", proc], check=True)


def test_proc_that_is_in_use_goes_into_no_image(tree: Path) -> None:
    image.detach(tree)
    assert not list((tree / "proc").iterdir())


def test_tree_that_was_left_with_proc_can_be_begun_anew(tree: Path) -> None:
    with image.finished(tree.with_suffix("")) as work:
        assert not work.exists()
        work.mkdir()
    assert Path("/proc/version").exists()
