"""A kernel for an unpacked host tree: answers writes as Linux does, and changes the tree.

Rules from drivers/base/bus.c, drivers/pci/pci-driver.c and drivers/iommu/iommu.c, of 6.12 or,
with `old=True`, of 6.1. What a real one answered is in the scenarios of the lab.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from ansible_collections.gpuhost.inference.plugins.module_utils._kernel_log import (
    KernelLog,
    read_blocks,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._kernel_write import Outcome
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader

# what a real kernel finds by the alias of a device
DRIVERS = {"0x0300": "nvidia", "0x0302": "nvidia", "0x0403": "snd_hda_intel", "0x0c03": "xhci_hcd"}


class FakeKernel:
    """Use it as the `write` of a `Machine`; `writes` tells what it was asked."""

    def __init__(self, root: Path, *, old: bool = False) -> None:
        self.root = root
        self.old = old
        self.writes: list[tuple[str, str]] = []
        self.answers: dict[tuple[str, str], int | str] = {}  # (end of path, value): errno, "stuck"
        self.refuses_probe: set[str] = set()  # drivers whose probe fails
        self.commands: list[str] = []
        self.answer: Callable[[str], str] = lambda _command: ""
        self.logged = ""  # what the kernel says while a change goes on
        self.resets: list[tuple[str, str]] = []  # (what was reset, method)
        self.cures: dict[str, str] = {}  # GPUs that do not start, and the method that helps them
        self._clock = 100  # seconds since boot, one more with each write
        self.starting: dict[str, int | str] = {}  # GPU to errno, or "stuck"
        self.complaint = "NVRM: GPU {}: RmInitAdapter failed! (0x62:0xffff:2168)"
        (root / "run").mkdir(exist_ok=True)
        self.boot("5b1d0f6e-0c3a-4f6d-9d0a-0f5f2f1d7c11")

    def run(self, command: Sequence[str], timeout: float) -> str:
        """Use it as the `run` of a `Machine`; `commands` tells what was run."""
        self.commands.append(" ".join(command))
        return self.answer(self.commands[-1])

    def log(self, host: Reader, seconds: float) -> KernelLog:
        """Use it as the `log` of a `Machine`; lines without a time are always new."""
        lines = self.logged.splitlines(keepends=True)
        old = re.compile(r"\[ *(\d+)\.")
        times = [(old.match(line), line) for line in lines]
        return read_blocks(
            [line.encode() for time, line in times if not time or int(time[1]) >= seconds]
        )

    def start(self, path: str, timeout: float) -> Outcome:
        """Use it as the `start` of a `Machine`: an ill GPU complains, as the driver does."""
        minor = path.removeprefix("/dev/nvidia")
        gpus = self.root / "proc/driver/nvidia/gpus"
        address = next(
            at
            for at in sorted(os.listdir(gpus))
            if f"Device Minor: \t {minor}\n" in (gpus / at / "information").read_text()
        )
        if address in self.cures:
            for line in self.complaint.format(address).splitlines():
                self.say(line)
            self._tick()
            return self._outcome(errno.EIO)
        return self._outcome(self.starting.get(address, 0))

    def _tick(self) -> None:
        self._clock += 1
        (self.root / "proc/uptime").write_text(f"{self._clock}.00 1.00\n")

    def boot(self, boot_id: str) -> None:
        """Give the running boot an id."""
        file = self.root / "proc/sys/kernel/random/boot_id"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{boot_id}\n")

    def __call__(self, path: str, value: str, timeout: float) -> Outcome:
        self.writes.append((path, value))
        self._tick()
        for (ending, wanted), answer in self.answers.items():
            if path.endswith(ending) and value == wanted:
                return self._outcome(answer)
        return self._outcome(self._write(path, value))

    @staticmethod
    def _outcome(answer: int | str) -> Outcome:
        if answer == "stuck":
            return Outcome("stuck")
        return (
            Outcome("refused", int(answer), os.strerror(int(answer))) if answer else Outcome("ok")
        )

    def _write(self, path: str, value: str) -> int:
        parent, name = path.split("/")[-2:]
        known = {
            "drivers_probe": lambda: self._probe(value),
            "unbind": lambda: self._unbind(parent, value),
            "bind": lambda: self._bind(parent, value),
            "type": lambda: self._set_type(self.root / path[1:], value),
            "modprobe": lambda: self._load(value),
            "reset": lambda: self._reset(parent),
            "reset_subordinate": lambda: self._reset(parent),
        }
        if name in known:
            return known[name]()
        at = self.root / path[1:]
        if not at.exists():
            return errno.ENOENT
        at.write_text(value or ("(null)" if name == "driver_override" else ""))
        return 0

    def device(self, address: str) -> Path:
        return self.root / "sys/bus/pci/devices" / address

    def driver(self, address: str) -> str | None:
        link = self.device(address) / "driver"
        return Path(os.readlink(link)).name if link.is_symlink() else None

    def override(self, address: str) -> str:
        text = (self.device(address) / "driver_override").read_text().strip()
        return "" if text == "(null)" else text

    def _load(self, name: str) -> int:
        (self.root / "sys/bus/pci/drivers" / name).mkdir(exist_ok=True)
        for device in sorted((self.root / "sys/bus/pci/devices").iterdir()):
            if self._match(device.name) == name:
                self._probe(device.name)
        return 0

    def _match(self, address: str) -> str | None:
        class_ = (self.device(address) / "class").read_text()[:6]
        vendor = (self.device(address) / "vendor").read_text().strip()
        known = DRIVERS.get(class_) if vendor == "0x10de" else None
        name = self.override(address) or known
        return name if name and (self.root / "sys/bus/pci/drivers" / name).is_dir() else None

    def _probe(self, address: str) -> int:
        if not self.device(address).exists():
            return errno.EINVAL
        name = self._match(address)
        if not self.driver(address) and name:
            self._bind(name, address)
        return 0  # also when nothing was bound

    def _bind(self, name: str, address: str) -> int:
        if not self.device(address).exists():
            return errno.ENODEV
        if self._match(address) != name:
            return errno.ENODEV
        if self.driver(address):
            return errno.EBUSY
        if name in self.refuses_probe:
            return errno.EPERM  # nvidia's probe fails with -1, whatever is wrong
        (self.device(address) / "driver").symlink_to(
            os.path.relpath(
                self.root / "sys/bus/pci/drivers" / name, self.device(address).resolve()
            )
        )
        if name == "nvidia":
            self._make_node(address)
        return 0

    def _make_node(self, address: str) -> None:
        nodes = self.root / "dev"
        minor = next(n for n in range(99) if not (nodes / f"nvidia{n}").exists())
        (nodes / f"nvidia{minor}").write_text(f"c 195:{minor}")
        folder = self.root / "proc/driver/nvidia/gpus" / address
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Device Minor: \t {minor}\n")

    def _unbind(self, name: str, address: str) -> int:
        if self.driver(address) != name:
            return errno.ENODEV
        (self.device(address) / "driver").unlink()
        folder = self.root / "proc/driver/nvidia/gpus" / address
        if folder.is_dir():
            minor = (folder / "information").read_text().split("Device Minor:")[1].split()[0]
            (self.root / f"dev/nvidia{minor}").unlink()
            shutil.rmtree(folder)
        return 0

    def _reset(self, name: str) -> int:
        file = self.device(name) / "reset_method"
        method = file.read_text().split()[0] if file.exists() else "subordinate"
        self.resets.append((name, method))
        below = [
            at for at in self.cures if at == name or f"/{name}/" in os.readlink(self.device(at))
        ]
        for address in below:
            if self.driver(address):
                raise AssertionError(f"{address} was reset below its driver")
            if self.cures[address] == method:
                del self.cures[address]
        return 0

    def say(self, text: str) -> None:
        """Log a message; of the ring there is only the newest one."""
        self.logged += f"[{self._clock:5}.000000] {text}\n"
        (self.root / "dev").mkdir(exist_ok=True)
        (self.root / "dev/kmsg").write_text(f"4,1,{self._clock}000000,-;{text}\n")

    def _set_type(self, at: Path, value: str) -> int:
        members = sorted(os.listdir(at.parent / "devices"))
        if value not in ("identity", "DMA", "DMA-FQ", "auto"):
            return errno.EINVAL
        lazy = (at.read_text().strip(), value) == ("DMA", "DMA-FQ")
        if self.old and len(members) > 1:
            return errno.EINVAL
        counted = [
            member
            for member in members
            if self.driver(member)
            and (self.old or self.driver(member) not in ("vfio-pci", "pcieport"))
        ]
        if counted and not lazy:
            return errno.EBUSY if self.old else errno.EPERM
        at.write_text("DMA-FQ\n" if value == "auto" else f"{value}\n")
        return 0
