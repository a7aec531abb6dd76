# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""One virtual machine: its QEMU command line, its boot loader, its power.

A supervisor process stays beside QEMU. When the guest reboots, QEMU ends and the supervisor does
what firmware and boot loader do on a real host: it reads `/boot/lab-loader.conf` from the guest's
disk and starts the kernel, initramfs and command line named there. So a changed command line or a
new initramfs takes effect by a reboot and not before. What a real board keeps over a warm reboot
(the state of a GPU's security processor) is kept in the file `board`, and cleared at power-on.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

from image import CONTAINERS, KEY, LOADER, STATE, LabError, discard, run

MACHINES = ("amd", "intel")
GPUS = tuple(f"0000:{bus:x}:00.0" for bus in (*range(0x41, 0x45), *range(0x81, 0x85)))
# No devices that the lab does not use: each costs the guest's boot a driver.
MACHINE_TYPE = "q35,kernel-irqchip=split,usb=off,sata=off,smbus=off,vmport=off,i8042=off,hpet=off"
BOARD_BYTES = 1 << 20  # the smallest that ivshmem takes
LOADER_KEYS = ("kernel", "initrd", "cmdline")

# Command: Debian package that brings it.
RUN_TOOLS = {
    "qemu-system-x86_64": "qemu-system-x86",
    "debugfs": "e2fsprogs",
    "e2fsck": "e2fsprogs",
    "ssh": "openssh-client",
}


@dataclass(frozen=True)
class Loader:
    """What to start: paths of files (in the guest or here) and the kernel command line."""

    kernel: str
    initrd: str
    cmdline: str


@dataclass(frozen=True)
class Running:
    """A machine that is switched on."""

    pid: int
    port: int
    accel: str
    image: str


def parse_loader(text: str) -> Loader:
    """Parse `lab-loader.conf`: `key=value` lines, `#` comments.

    Raises:
        LabError: a key is missing or unknown.
    """
    values = {}
    for line in text.splitlines():
        key, equals, value = (part.strip() for part in line.partition("="))
        if not key or key.startswith("#"):
            continue
        if not equals or key not in LOADER_KEYS:
            raise LabError(f"/{LOADER}: {line.strip()!r} is not one of {', '.join(LOADER_KEYS)}")
        values[key] = value.strip()
    missing = [key for key in LOADER_KEYS if key not in values]
    if missing:
        raise LabError(f"/{LOADER} of the guest lacks {', '.join(missing)}: nothing to boot")
    return Loader(**values)


def qemu_arguments(
    machine: str,
    accel: str,
    directory: Path,
    loader: Loader,
    port: int,
    *,
    companion: str | None = None,
) -> list:
    """The QEMU command line. GPUs are at 41:00.0 to 44:00.0 (node 0), 81:00.0 to 84:00.0 (1).

    `companion` is the address of the one GPU that has a sound device at its function 1.
    """
    iommu = {"amd": "amd-iommu,intremap=off", "intel": "intel-iommu,intremap=off,caching-mode=on"}
    arguments = [
        *("qemu-system-x86_64", "-name", f"lab-{machine}", "-nodefaults", "-no-user-config"),
        *("-machine", MACHINE_TYPE),
        *accel_arguments(accel),
        *("-m", "3072", "-smp", "2,sockets=2", "-display", "none", "-vga", "none", "-no-reboot"),
        *("-qmp", "stdio", "-chardev", f"file,id=console,path={directory}/console.log,append=on"),
        *("-serial", "chardev:console", "-rtc", "base=utc"),
        *("-kernel", loader.kernel, "-initrd", loader.initrd, "-append", loader.cmdline),
        *("-drive", f"file={directory}/disk.img,format=raw,if=none,id=disk,cache=unsafe"),
        *("-device", "virtio-blk-pci,drive=disk,addr=0x1"),
        *("-netdev", f"user,id=net,restrict=on,hostfwd=tcp:127.0.0.1:{port}-:22"),
        *("-device", "virtio-net-pci,netdev=net,addr=0x2,romfile="),
        *(
            "-object",
            f"memory-backend-file,id=board,share=on,size={BOARD_BYTES},mem-path={directory}/board",
        ),
        *("-device", "ivshmem-plain,memdev=board,addr=0x3"),
        *("-device", iommu[machine]),
    ]
    for node in (0, 1):
        arguments += [
            *("-object", f"memory-backend-ram,id=memory{node},size=1536M"),
            *("-numa", f"node,nodeid={node},cpus={node},memdev=memory{node}"),
            *(
                "-device",
                f"pxb-pcie,id=root{node},bus_nr={0x40 * (node + 1)},numa_node={node},"
                f"bus=pcie.0,addr={8 + node:#x}",
            ),
        ]
    for gpu, address in enumerate(GPUS):
        node, slot, number = gpu // 4, gpu % 4 + 1, gpu + 1
        edu = f"edu,bus=port{number},dma_mask=0xffffffffffffffff"
        arguments += [
            *(
                "-device",
                f"pcie-root-port,id=port{number},chassis={number},slot={number},"
                f"bus=root{node},addr={slot:#x}",
            ),
        ]
        if address == companion:
            # On both: Linux reads it of a device before it has looked for others in the slot
            edu += ",multifunction=on"
            arguments += ["-device", f"{edu},id=gpu{number},addr=0x0.0x0"]
            arguments += ["-device", f"{edu},id=audio{number},addr=0x0.0x1"]
        else:
            arguments += ["-device", f"{edu},id=gpu{number}"]
    return arguments


def accel_arguments(accel: str) -> tuple[str, ...]:
    """Accelerator and processor model."""
    if accel == "kvm":
        return ("-accel", "kvm", "-cpu", "host")
    return ("-accel", "tcg,thread=multi,tb-size=512", "-cpu", "max,la57=off")


class Machine:
    """A machine by name, switched on or not, with its files in `.build/lab/NAME`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.directory = STATE / name
        self.disk = self.directory / "disk.img"
        self.origin = self.directory / "disk.image"  # id of the image the disk began as
        self.board = self.directory / "board"
        self.console = self.directory / "console.log"
        self.log = self.directory / "supervisor.log"
        self.ssh_config = self.directory / "ssh_config"
        self.state = self.directory / "state.json"
        self.lock = self.directory / "lock"
        self.companion_file = self.directory / "companion"

    def running(self) -> Running | None:
        """The machine's state if it is switched on: its lock is held while QEMU lives."""
        try:
            with self.lock.open() as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return None
        except BlockingIOError:
            return Running(**json.loads(self.state.read_text()))
        return None

    def start(self, accel: str) -> Running:
        """Switch on: leaves a supervisor in the background."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self.board.write_bytes(bytes(BOARD_BYTES))  # power-on clears what went wrong before
        self.console.write_bytes(b"")
        lock = os.open(self.lock, os.O_RDWR | os.O_CREAT, 0o644)
        if not wait_until(lambda: take(lock), 2):  # `status` holds it for a moment
            os.close(lock)
            raise LabError(f"machine {self.name} is just being started by somebody else")
        port = free_port(self.last_port())
        try:
            with self.log.open("w") as log:
                process = subprocess.Popen(
                    [sys.executable, LAB_PROGRAM, "supervise", self.name, accel, str(port)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=[lock],
                    start_new_session=True,
                    env={**os.environ, "LAB_LOCK": str(lock)},
                )
            image = self.origin.read_text().strip()
            running = Running(pid=process.pid, port=port, accel=accel, image=image)
            self.state.write_text(json.dumps(asdict(running)) + "\n")
        finally:
            os.close(lock)
        self.write_ssh_config(port)
        return running

    @property
    def companion(self) -> str | None:
        """The GPU with a sound device beside it, if any: the machine's, not its disk's."""
        try:
            return self.companion_file.read_text().strip() or None
        except FileNotFoundError:
            return None

    @companion.setter
    def companion(self, address: str | None) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        self.companion_file.write_text(f"{address or ''}\n")

    def last_port(self) -> int:
        """The port of the last time, to be used again if it is free; 0 for none."""
        try:
            return int(json.loads(self.state.read_text())["port"])
        except (FileNotFoundError, ValueError, KeyError):
            return 0

    def write_ssh_config(self, port: int) -> None:
        """The SSH client's file for `pve1` and the containers."""
        options = (
            f"  User root\n  IdentityFile {KEY}\n  IdentitiesOnly yes\n"
            f"  UserKnownHostsFile {self.directory}/known_hosts\n  StrictHostKeyChecking no\n"
            "  LogLevel ERROR\n  ControlMaster no\n  ControlPersist no\n  ConnectTimeout 30\n"
        )
        self.ssh_config.write_text(
            f"Host pve1\n  HostName 127.0.0.1\n  Port {port}\n  HostKeyAlias {self.name}-pve1\n"
            f"{options}\n"
            + "\n".join(
                f"Host ct{number}\n  HostName 10.10.10.{number}\n"
                f"  HostKeyAlias {self.name}-ct{number}\n  ProxyJump pve1\n{options}"
                for number in CONTAINERS
            )
        )
        discard(self.directory / "known_hosts")

    def ssh(self, *command: str) -> list[str]:
        """A command line that runs `command` on the host, or opens a shell there."""
        return ["ssh", "-F", str(self.ssh_config), "pve1", *command]

    def answers(self, running: Running) -> bool:
        """Whether the guest's SSH server greets."""
        try:
            with socket.create_connection(("127.0.0.1", running.port), timeout=5) as connection:
                return connection.recv(4) == b"SSH-"
        except OSError:
            return False

    def power_cut(self, running: Running) -> None:
        """Take the power away: the supervisor and QEMU (one process group) die at once."""
        os.killpg(running.pid, signal.SIGKILL)
        wait_until(lambda: not self.running(), 10)

    def power_off(self, running: Running, seconds: float) -> bool:
        """Press the power button, again and again: a guest that still boots ignores it.

        False if the guest did not go down in time.
        """
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with suppress(ProcessLookupError):
                os.kill(running.pid, signal.SIGTERM)
            if wait_until(lambda: not self.running(), 10):
                return True
        return False


LAB_PROGRAM = str(Path(__file__).resolve().parent / "lab")


def take(lock: int) -> bool:
    """Take a lock file for this process and those that inherit it, unless somebody has it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def wait_until(condition: Callable[[], bool], seconds: float, step: float = 0.2) -> bool:
    """Whether `condition` came true within so many seconds."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(step)
    return True


def free_port(wanted: int) -> int:
    """`wanted` if nobody has it, else any free TCP port of the loopback."""
    for port in (wanted, 0):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise LabError("no free TCP port on 127.0.0.1")


def copy_disk(source: Path, target: Path) -> None:
    """Copy a disk; holes stay holes."""
    part = target.with_name(f"{target.name}.part")
    run("cp", "--sparse=always", "--reflink=auto", source, part)
    part.rename(target)


# ---- the supervisor: firmware and boot loader -------------------------------------------------


def load(machine: Machine) -> Loader:
    """Read from the guest's disk what its boot loader is to start.

    Raises:
        LabError: the disk names no kernel, or a file is not there.
    """
    # The journal may hold the newest files after a power cut. 1 = it was replayed.
    replay = subprocess.run(
        ["e2fsck", "-p", "-E", "journal_only", str(machine.disk)],
        capture_output=True,
        text=True,
        check=False,
    )
    if replay.returncode > 1:
        raise LabError(f"the guest's file system can't be read: {replay.stdout}{replay.stderr}")
    text = subprocess.run(
        ["debugfs", "-R", f"cat /{LOADER}", str(machine.disk)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    wanted = parse_loader(text)
    found = {}
    for key in ("kernel", "initrd"):
        target = machine.directory / key
        discard(target)
        command = f"dump {getattr(wanted, key)} {target}"
        subprocess.run(["debugfs", "-R", command, machine.disk], capture_output=True, check=True)
        if not target.exists() or not target.stat().st_size:
            raise LabError(f"/{LOADER} names {key} {getattr(wanted, key)}, which is not there")
        found[key] = str(target)
    return Loader(cmdline=wanted.cmdline, **found)


def supervise(machine: Machine, accel: str, port: int) -> None:
    """Run the machine until it is powered off; start it again whenever it reboots."""
    boots = 0
    companion = machine.companion  # cards are put in while the power is off
    while True:
        loader = load(machine)
        boots += 1
        print(f"boot {boots}: {loader.cmdline}", flush=True)
        arguments = qemu_arguments(
            machine.name, accel, machine.directory, loader, port, companion=companion
        )
        reason = run_qemu(arguments)
        print(f"boot {boots} ended: {reason}", flush=True)
        if reason != "guest-reset":
            return


def run_qemu(arguments: list) -> str:
    """Run QEMU to its end and return its reason, as QMP's SHUTDOWN event gives it."""
    lock = int(os.environ["LAB_LOCK"])
    reason = "unknown"
    qemu = subprocess.Popen(
        arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[lock]
    )

    def press_power_button(_signal: int, _frame: FrameType | None) -> None:
        os.write(qemu.stdin.fileno(), b'{"execute": "system_powerdown"}\n')

    signal.signal(signal.SIGTERM, press_power_button)
    os.write(qemu.stdin.fileno(), b'{"execute": "qmp_capabilities"}\n')
    for line in qemu.stdout:
        message = json.loads(line)
        if message.get("event") == "SHUTDOWN":
            reason = message["data"]["reason"]
    status = qemu.wait()
    return f"QEMU failed with status {status}" if status else reason


# ---- which accelerator ---------------------------------------------------------------------------


def choose_accel(loader: Loader) -> tuple[str, str]:
    """`kvm` if a stock kernel really boots under it here, else `tcg`, and the reason in words.

    Some nested hypervisors offer /dev/kvm but can't run an ordinary kernel. So the guest's kernel
    is booted once without a disk: it must come as far as not finding its root file system.
    """
    if platform.machine() != "x86_64":
        return "tcg", f"this machine is {platform.machine()}"
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return "tcg", "there is no usable /dev/kvm"
    verdict = STATE / "kvm.json"
    key = [platform.release(), loader.kernel, Path("/dev/kvm").stat().st_ctime_ns]
    try:
        known = json.loads(verdict.read_text())
        if known["key"] == key:
            return known["accel"], known["reason"]
    except (FileNotFoundError, ValueError, KeyError):
        pass
    works = boots_under_kvm(loader)
    accel = "kvm" if works else "tcg"
    reason = "a stock kernel boots under KVM" if works else "a stock kernel does not boot under KVM"
    verdict.write_text(json.dumps({"key": key, "accel": accel, "reason": reason}))
    return accel, reason


def boots_under_kvm(loader: Loader, seconds: float = 20) -> bool:
    """Whether the kernel comes up to mounting its root file system within so many seconds."""
    qemu = subprocess.Popen(
        [
            *("qemu-system-x86_64", "-nodefaults", "-no-user-config", "-display", "none"),
            *("-machine", "q35,kernel-irqchip=split", "-accel", "kvm", "-cpu", "host"),
            *("-m", "512", "-smp", "2", "-no-reboot", "-serial", "stdio", "-kernel", loader.kernel),
            *("-append", "console=ttyS0 panic=-1 root=/dev/none"),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        said = qemu.communicate(timeout=seconds)[0]
    except subprocess.TimeoutExpired:
        qemu.kill()
        said = qemu.communicate()[0]
    return b"Unable to mount root fs" in said
