"""The lab host's boot-loader tools: the one that is in charge decides what is booted next."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOTFS = Path(__file__).parents[3] / "lab" / "rootfs"
KERNELS = ("6.12.9", "6.12.117", "6.8.1")
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for folder in ("boot", "etc/kernel", "etc/default/grub.d"):
        (tmp_path / folder).mkdir(parents=True)
    for kernel in KERNELS:
        (tmp_path / f"boot/vmlinuz-{kernel}").touch()
        (tmp_path / f"boot/initrd.img-{kernel}").touch()
    (tmp_path / "etc/fstab").write_text("/dev/vda / ext4 defaults 0 1\n")
    (tmp_path / "etc/default/grub").write_text('GRUB_CMDLINE_LINUX_DEFAULT="quiet"\n')
    (tmp_path / "etc/kernel/cmdline").write_text("root=/dev/vda rw a=b\n")
    (tmp_path / "etc/kernel/proxmox-boot-uuids").write_text("5A5A-0C1E\n")
    return tmp_path


@pytest.fixture
def run(root: Path) -> Run:
    """Run a tool with `root` in place of the host's root."""
    text = (ROOTFS / "usr/sbin/proxmox-boot-tool").read_text()
    for place in ("/boot/vmlinuz-*", '/boot/initrd.img-$1"', '/boot/vmlinuz-$1"', "/boot/grub"):
        text = text.replace(place, f"{root}{place}")
    text = text.replace("file#/boot", f"file#{root}/boot").replace(
        "=/boot/lab", f"={root}/boot/lab"
    )
    text = text.replace("/etc/", f"{root}/etc/")
    for name in ("proxmox-boot-tool", "update-grub"):
        (root / name).write_text(text)

    def call(name: str, *words: str) -> subprocess.CompletedProcess[str]:
        command = ["sh", str(root / name), *words]
        return subprocess.run(command, check=False, capture_output=True, text=True)

    return call


def booted(root: Path) -> dict[str, str]:
    lines = (root / "boot/lab-loader.conf").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines)


def test_systemd_boot_takes_the_kernels_command_line(root: Path, run: Run) -> None:
    assert run("proxmox-boot-tool", "refresh").returncode == 0
    assert booted(root) == {
        "kernel": "/boot/vmlinuz-6.12.117",
        "initrd": "/boot/initrd.img-6.12.117",
        "cmdline": "initrd=\\EFI\\proxmox\\6.12.117\\initrd.img-6.12.117 root=/dev/vda rw a=b",
    }


def test_grub_is_not_in_charge_of_a_host_with_synced_esps(root: Path, run: Run) -> None:
    assert run("update-grub").returncode == 0
    assert "root=/dev/vda ro quiet" in (root / "boot/grub/grub.cfg").read_text()
    assert not (root / "boot/lab-loader.conf").exists()


def test_grub_in_charge_reads_its_drop_ins(root: Path, run: Run) -> None:
    (root / "etc/kernel/proxmox-boot-uuids").unlink()
    (root / "etc/default/grub.d/x.cfg").write_text('GRUB_CMDLINE_LINUX="iommu.strict=0"\n')
    assert "skipping ESP sync" in run("proxmox-boot-tool", "refresh").stderr
    assert not (root / "boot/lab-loader.conf").exists()
    run("update-grub")
    expected = "BOOT_IMAGE=/boot/vmlinuz-6.12.117 root=/dev/vda ro iommu.strict=0 quiet"
    assert booted(root)["cmdline"] == expected


def test_a_pinned_kernel_is_booted_after_a_refresh(root: Path, run: Run) -> None:
    run("proxmox-boot-tool", "refresh")
    assert run("proxmox-boot-tool", "kernel", "pin", "6.8.1").returncode == 0
    assert booted(root)["kernel"].endswith("6.12.117")
    run("proxmox-boot-tool", "refresh")
    assert booted(root)["kernel"].endswith("6.8.1")


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["kernel", "pin", "9.9"], 1, "no kernel image found in /boot for '9.9'"),
        (["format"], 1, "does not know 'format'"),
    ],
)
def test_refusals(run: Run, words: list[str], code: int, message: str) -> None:
    done = run("proxmox-boot-tool", *words)
    assert (done.returncode, message in done.stderr) == (code, True)


def test_a_command_line_without_root_is_refused(root: Path, run: Run) -> None:
    (root / "etc/kernel/cmdline").write_text("quiet\n")
    done = run("proxmox-boot-tool", "refresh")
    assert (done.returncode, "No root= parameter" in done.stderr) == (1, True)


def test_status_of_a_host_without_synced_esps(root: Path, run: Run) -> None:
    assert "uefi (versions: 6.12.117, 6.12.9, 6.8.1)" in run("proxmox-boot-tool", "status").stdout
    (root / "etc/kernel/proxmox-boot-uuids").unlink()
    assert run("proxmox-boot-tool", "status", "--quiet").returncode == 2
