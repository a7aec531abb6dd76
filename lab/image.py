# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The lab's disk image: Debian 13 with the guest modules, the Proxmox stand-ins and a container.

Three layers, each kept in `.build/lab` under a hash of what goes into it, so that a changed file
of `rootfs/` costs seconds and not a new installation:
base (packages, by mmdebstrap), container (made by `container/build`), image (all together).
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

LAB = Path(__file__).resolve().parent
STATE = LAB.parent / ".build" / "lab"
KEY = STATE / "id_ed25519"

SUITE = "trixie"
MIRROR = "http://deb.debian.org/debian"
PACKAGES = (
    # a host one can log in to
    *("systemd", "systemd-sysv", "dbus", "udev", "kmod", "procps", "pciutils"),
    *("openssh-server", "openssh-client", "iproute2", "iputils-ping", "python3", "lxc"),
    # the kernel, its initramfs, and what builds the lab's modules and its libcuda
    *("linux-image-amd64", "initramfs-tools", "zstd", "linux-headers-amd64", "gcc", "make"),
    "libc6-dev",
)
OLD_SUITE = "bookworm"  # brings the second kernel
UNUSED = ("/usr/share/doc/*", "/usr/share/man/*", "/usr/share/locale/*", "/usr/share/info/*")
# Of the second kernel: what drives hardware that no machine of the lab has.
OLD_UNUSED = tuple(
    f"/lib/modules/6.1.*/kernel/{folder}/*"
    for folder in (
        *("sound", "drivers/gpu", "drivers/media", "drivers/infiniband", "drivers/staging"),
        *("drivers/iio", "drivers/usb", "drivers/scsi", "drivers/hid", "drivers/input"),
        *("drivers/net/ethernet", "drivers/net/wireless", "drivers/net/usb", "drivers/net/can"),
    )
)
# The initramfs are made once at the end, with the lab's own files in them.
BASE_ENVIRONMENT = {"INITRD": "No"}
# Needed to build modules, not to run: left out of the image.
BUILD_ONLY = (
    *("./usr/lib/gcc", "./usr/libexec/gcc", "./usr/src", "./usr/include", "./tmp/*"),
    "./usr/lib/x86_64-linux-gnu/*.a",
)
# Background work that has no use here and would disturb measurements.
MASKED = (
    *("apt-daily.timer", "apt-daily-upgrade.timer", "dpkg-db-backup.timer", "fstrim.timer"),
    *("e2scrub_all.timer", "systemd-tmpfiles-clean.timer", "e2scrub_reap.service"),
    *("getty@tty1.service", "serial-getty@ttyS0.service", "systemd-networkd-wait-online.service"),
    *("lxc-net.service", "lxc.service", "lxc-monitord.service", "systemd-pstore.service"),
    *("systemd-rfkill.socket", "systemd-binfmt.service", "modprobe@drm.service"),
)
# Looking for things this machine does not have.
NO_GENERATORS = (
    *("debug", "getty", "gpt-auto", "hibernate-resume", "rc-local", "ssh", "system-update", "tpm2"),
)
ENABLED = ("systemd-networkd.service", "nvidia-init.service")
SIZE = "8G"
LOADER = "boot/lab-loader.conf"
OLD_KERNEL = "usr/share/lab/old-kernel"  # /usr/sbin/lab-old-kernel brings it to /boot
LIBCUDA = "usr/lib/x86_64-linux-gnu/libcuda.so.1"
COMPILED = "usr/lib/python3/dist-packages"  # of the containers, too: what keeps compiled code
CONTAINERS = (100, 101)  # the roots in the image; the configuration of 101 is set aside
OWN_FOLDERS = ("etc", "root", "var")  # of each container; the others' files are the same, linked

# Command: Debian package that brings it.
BUILD_TOOLS = {
    "mmdebstrap": "mmdebstrap",
    "mkfs.ext4": "e2fsprogs",
    "ssh-keygen": "openssh-client",
    "tar": "tar",
    "chroot": "coreutils",
}


class LabError(Exception):
    """Something the user can act on; its text says what is wrong and the next step."""


def digest(*parts: object) -> str:
    """A short hash of values and of files (a `Path` means everything below it, with modes)."""
    total = hashlib.sha256()
    for part in parts:
        if not isinstance(part, Path):
            total.update(repr(part).encode())
            continue
        for path in sorted([part, *part.rglob("*")]):
            if "__pycache__" in path.parts:
                continue
            name = str(path.relative_to(part))
            if path.is_symlink():
                total.update(f"l {name} {path.readlink()}\0".encode())
            elif path.is_file():
                total.update(f"f {name} {os.access(path, os.X_OK)}\0".encode())
                total.update(path.read_bytes())
    return total.hexdigest()[:16]


def base_id() -> str:
    """The hash that names the base layer."""
    words = (SUITE, OLD_SUITE, MIRROR, PACKAGES, UNUSED, OLD_UNUSED, BASE_ENVIRONMENT)
    return digest(words, LAB / "old-kernel")


def container_id() -> str:
    """The hash that names the container layer."""
    return digest(LAB / "container", LAB / "sglang")


def image_id() -> str:
    """The hash that names the finished image. Makes the key pair, which is part of it."""
    make_key()
    return digest(
        base_id(),
        container_id(),
        (BUILD_ONLY, MASKED, NO_GENERATORS, ENABLED, SIZE),
        *(LAB / name for name in ("image.py", "kernel", "cuda", "rootfs")),
        KEY.with_suffix(".pub").read_text(),
    )


def make_key() -> None:
    """The key pair that opens the lab's hosts; lives and dies with `.build`."""
    if not KEY.with_suffix(".pub").exists():
        STATE.mkdir(parents=True, exist_ok=True)
        KEY.unlink(missing_ok=True)
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "lab", "-f", KEY)


def run(*command: object, quiet: bool = True, **options: object) -> None:
    """Run a command; its output is shown only when it fails.

    Raises:
        LabError: it failed, with the end of what it said.
    """
    words = [str(word) for word in command]
    done = subprocess.run(
        words,
        stdout=subprocess.PIPE if quiet else None,
        stderr=subprocess.STDOUT if quiet else None,
        text=True,
        errors="replace",
        check=False,
        **options,
    )
    if done.returncode:
        tail = "\n".join((done.stdout or "").splitlines()[-25:])
        raise LabError(
            f"{words[0]} failed with status {done.returncode}: {' '.join(words)}\n{tail}"
        )


def require(tools: dict[str, str]) -> None:
    """Raises a `LabError` that names every missing package at once."""
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    os.environ["PATH"] = path
    missing = sorted({package for tool, package in tools.items() if not shutil.which(tool)})
    if missing:
        raise LabError(
            f"this machine lacks {', '.join(missing)}: apt-get install -y --no-install-recommends "
            + " ".join(missing)
        )


class Progress:
    """Says what is being done and how long it has taken so far."""

    def __init__(self) -> None:
        self.start = time.monotonic()

    def __call__(self, text: str) -> None:
        """Print one line."""
        print(f"lab: [{time.monotonic() - self.start:4.0f} s] {text}", flush=True)


@contextmanager
def finished(target: Path) -> Iterator[Path]:
    """A working path that becomes `target` only when the block ends well."""
    work = target.with_name(f"{target.name}.part")
    discard(work)
    yield work
    work.rename(target)


def detach(tree: Path) -> None:
    """Take `/proc` off a tree, else it would be copied with it, without an end.

    mmdebstrap leaves it mounted when somebody looks into it at that moment, as `grep -r` of the
    checkout does, and mounts it again over that at its next step.
    """
    while (tree / "proc").is_mount():
        run("umount", "--lazy", tree / "proc")


def discard(path: Path) -> None:
    """Remove a file or a tree, if there."""
    if path.is_dir() and not path.is_symlink():
        detach(path)
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def build(progress: Progress) -> Path:
    """The image for the present inputs, built if it is not there yet.

    Raises:
        LabError: not root, a package is missing, or a step failed.
    """
    target = STATE / f"image-{image_id()}.img"
    if target.exists():
        return target
    require(BUILD_TOOLS)
    if os.geteuid():
        raise LabError("building the image needs root (chroot, device nodes): run it as root")
    STATE.mkdir(parents=True, exist_ok=True)
    with (STATE / "image.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            base = build_base(progress)
            container = build_container(progress)
            build_image(target, base, container, progress)
            for old in STATE.iterdir():
                if old.name.startswith(("base-", "container-", "image-")) and old not in (
                    *(base, container, target),
                ):
                    discard(old)
    return target


def build_base(progress: Progress) -> Path:
    """The Debian tree."""
    target = STATE / f"base-{base_id()}"
    if not target.exists():
        progress(f"image 1/4: installing Debian {SUITE} (one to two minutes)")
        no_initramfs = (
            'mkdir -p "$1/etc/initramfs-tools" && '
            'echo update_initramfs=no > "$1/etc/initramfs-tools/update-initramfs.conf"'
        )
        with finished(target) as work:
            run(
                *("mmdebstrap", "--quiet", "--variant=minbase", "--dpkgopt=force-confold"),
                *(f"--dpkgopt=path-exclude={pattern}" for pattern in UNUSED + OLD_UNUSED),
                f"--essential-hook={no_initramfs}",
                f'--customize-hook={LAB / "old-kernel"} "$1" {OLD_SUITE} {MIRROR}',
                f"--include={','.join(PACKAGES)}",
                *(SUITE, work, MIRROR),
                env={**os.environ, **BASE_ENVIRONMENT},
            )
    detach(target)
    return target


def build_container(progress: Progress) -> Path | None:
    """The root file system of the containers, or `None` when there is no recipe."""
    recipe = LAB / "container" / "build"
    if not recipe.exists():
        return None
    target = STATE / f"container-{container_id()}"
    if not target.exists():
        progress("image 2/4: building the container's tree")
        with finished(target) as work:
            run(recipe, work, env={**os.environ, "LAB_PYTHON": sys.executable})
    detach(target)
    return target


def build_image(target: Path, base: Path, container: Path | None, progress: Progress) -> None:
    """Everything together, as one ext4 file system without a partition table."""
    progress("image 3/4: building the guest's modules and its initramfs")
    versions = sorted(path.name for path in (base / "usr/lib/modules").iterdir())
    tree = STATE / "tree"
    discard(tree)
    tree.mkdir()
    with finished(target) as disk:
        skip = [f"--exclude={path}" for path in BUILD_ONLY]
        pack = ["tar", "-C", str(base), *skip, "--numeric-owner", "-cf", "-", "."]
        with subprocess.Popen(pack, stdout=subprocess.PIPE) as source:
            run("tar", "-C", tree, "--numeric-owner", "-xpf", "-", stdin=source.stdout)
        if source.returncode:
            raise LabError(
                f"tar could not read all of {base} (see above): remove it, and it is made anew"
            )
        overlay(LAB / "rootfs", tree)
        for version in versions:
            build_modules(base, tree, version)
        roots = [tree]
        if container:
            roots.append(container_root(tree, CONTAINERS[0]))
            roots[-1].parent.mkdir(parents=True)
            run("cp", "-a", container, roots[-1])
            overlay(LAB / "rootfs" / COMPILED, roots[-1] / COMPILED)
            authorize(roots[-1])
        build_libcuda(base, roots)
        if container:
            for number in CONTAINERS[1:]:
                twin(roots[-1], container_root(tree, number), number)
        authorize(tree)
        settle(tree)
        *old, newest = versions
        for version in old:
            set_aside(tree, version)
        run("chroot", tree, "update-initramfs", "-c", "-k", newest)
        run("chroot", tree, "proxmox-boot-tool", "refresh")
        progress("image 4/4: writing the disk")
        disk.touch()
        os.truncate(disk, parse_size(SIZE))
        run(
            *("mkfs.ext4", "-q", "-F", "-L", "lab", "-m", "0", "-d", tree),
            *("-E", "assume_storage_prezeroed=1", disk),
        )
    discard(tree)


def container_root(tree: Path, number: int) -> Path:
    """Where the root of a container lies on the host, on the storage `local`."""
    return tree / f"var/lib/vz/images/{number}/subvol-{number}-disk-0.subvol"


def twin(source: Path, target: Path, number: int) -> None:
    """Make the root of one more container: programs and models are hard links, so it costs little.

    Packages and Ansible replace files and do not write into them, so neither sees the other's.
    """
    target.parent.mkdir(parents=True)
    run("cp", "-al", source, target)
    for name in OWN_FOLDERS:
        discard(target / name)
        run("cp", "-a", source / name, target / name)
    (target / "etc/hostname").write_text(f"ct{number}\n")
    for key in (target / "etc/ssh").glob("ssh_host_*"):
        key.unlink()
    authorize(target)


def set_aside(tree: Path, version: str) -> None:
    """Take a kernel out of /boot: each one there costs a minute whenever an initramfs is made."""
    aside = tree / OLD_KERNEL
    aside.mkdir(parents=True, exist_ok=True)
    for path in (tree / "boot").glob(f"*-{version}"):
        path.rename(aside / path.name)


def parse_size(text: str) -> int:
    """Bytes of a size such as 8G."""
    return int(text.removesuffix("G")) << 30


def overlay(source: Path, tree: Path) -> None:
    """Copy the files of `source` over `tree`: root's, 0755 when executable, else 0644."""
    for path in sorted(source.rglob("*")):
        target = tree / path.relative_to(source)
        if path.is_symlink():
            target.unlink(missing_ok=True)
            target.symlink_to(path.readlink())
        elif path.is_dir():
            target.mkdir(mode=0o755, exist_ok=True)
        else:
            target.unlink(missing_ok=True)
            shutil.copyfile(path, target)
            target.chmod(0o755 if os.access(path, os.X_OK) else 0o644)


@contextmanager
def sources_in(base: Path) -> Iterator[Path]:
    """A copy of the sources of what the guest gets, for the base tree's compiler."""
    sources = base / "tmp" / "lab"
    discard(sources)
    for name in ("kernel", "cuda"):
        shutil.copytree(LAB / name, sources / name)
    try:
        yield sources
    finally:
        discard(sources)


def build_modules(base: Path, tree: Path, version: str) -> None:
    """Build `kernel/` with the base tree's compiler and install the result in `tree`."""
    with sources_in(base) as sources:
        build_dir = f"/lib/modules/{version}/build"
        make = ["make", "-C", build_dir, "M=/tmp/lab/kernel", "CC=gcc"]
        run("chroot", base, *make, "modules")
        target = tree / "usr/lib/modules" / version / "updates"
        target.mkdir(exist_ok=True)
        for module in (sources / "kernel").glob("*.ko"):
            shutil.copy(module, target)
    run("chroot", tree, "depmod", version)


def build_libcuda(base: Path, roots: Sequence[Path]) -> None:
    """Build `cuda/` with the base tree's compiler and install it in the host and its container."""
    with sources_in(base) as sources:
        flags = ["-shared", "-fPIC", "-O2", "-Wall", "-Wextra", "-Werror", "-fvisibility=hidden"]
        flags += ["-Wl,-soname,libcuda.so.1", "-I/tmp/lab/kernel", "-o", "/tmp/lab/libcuda.so.1"]
        run("chroot", base, "gcc", *flags, "/tmp/lab/cuda/libcuda.c")
        for root in roots:
            shutil.copy(sources / "libcuda.so.1", root / LIBCUDA)


def authorize(tree: Path) -> None:
    """Let the lab's key in as root, and give the host its own keys."""
    directory = tree / "root" / ".ssh"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    keys = directory / "authorized_keys"
    shutil.copyfile(KEY.with_suffix(".pub"), keys)
    keys.chmod(0o600)
    run("chroot", tree, "ssh-keygen", "-A")


def settle(tree: Path) -> None:
    """State that a first boot would otherwise have to make."""
    (tree / "etc/machine-id").write_text(digest(image_id(), "machine") * 2 + "\n")
    (tree / "var/log/journal").mkdir(exist_ok=True)
    (tree / "etc/initramfs-tools/update-initramfs.conf").write_text("update_initramfs=yes\n")
    (tree / "etc/resolv.conf").unlink(missing_ok=True)
    (tree / "etc/resolv.conf").write_text("")
    units = tree / "etc/systemd/system"
    for unit in MASKED:
        (units / unit).unlink(missing_ok=True)
        (units / unit).symlink_to("/dev/null")
    generators = tree / "etc/systemd/system-generators"
    generators.mkdir(exist_ok=True)
    for name in NO_GENERATORS:
        (generators / f"systemd-{name}-generator").symlink_to("/dev/null")
    run("chroot", tree, "systemctl", "enable", *ENABLED)
    # Nothing is newer than what the packages' scripts have already processed
    for directory in ("etc", "var"):
        (tree / directory / ".updated").touch()
