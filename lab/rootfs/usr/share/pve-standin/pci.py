"""PCI devices of VMs: what `hostpciN` names, who reserved it, handing it to vfio-pci."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import guests
from guests import GuestError

SYSFS = Path("/sys/bus/pci")
RUN = Path("/run/qemu-server")
RESERVATIONS = RUN / "pci-id-reservations"
ADDRESS = r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]"


class HostPci(NamedTuple):
    """One `hostpciN`: the addresses it stands for, and its other words."""

    name: str
    addresses: list[str]
    options: dict[str, str]


class Reservation(NamedTuple):
    """Who took a device: for a while before its VM runs (`time`), then with the VM (`pid`)."""

    vmid: int
    kind: str  # "time": until then, seconds since 1970; "pid": of the VM's process
    number: int


def host_devices(conf: dict[str, str], present: list[str]) -> list[HostPci]:
    """Return a VM's host devices in order; an address without function means all functions.

    Raises:
        GuestError: a device is not there, named twice, or named by a mapping (there are none).
    """
    found = []
    for index in sorted(int(key[7:]) for key in conf if re.fullmatch(r"hostpci\d+", key)):
        options = guests.properties(conf[f"hostpci{index}"], "host")
        if "mapping" in options:
            raise GuestError(f"PCI device mapping not found for '{options['mapping']}'")
        addresses = []
        for host in options.get("host", "").lower().split(";"):
            full = host if re.match(r"[0-9a-f]{4,}:[0-9a-f]{2}:", host) else f"0000:{host}"
            matching = [a for a in present if a == full or a.rpartition(".")[0] == full]
            if not matching:
                raise GuestError(f"no PCI device found for '{host}'")
            addresses += matching
        found.append(HostPci(f"hostpci{index}", addresses, options))
    used: set[str] = set()
    for address in (a for device in found for a in device.addresses):
        if address in used:
            raise GuestError(f"device '{address}' assigned more than once")
        used.add(address)
    return found


def present() -> list[str]:
    """Return the addresses of all PCI devices."""
    return sorted(os.listdir(SYSFS / "devices"))


def parse_reservations(text: str) -> dict[str, Reservation]:
    """Read the reservation file: `0000:83:00.0 201 pid:1234` a line."""
    lines = re.findall(rf"^({ADDRESS}) (\d+) (time|pid):(\d+)$", text, re.MULTILINE)
    return {a: Reservation(int(vmid), kind, int(number)) for a, vmid, kind, number in lines}


def format_reservations(reservations: dict[str, Reservation]) -> str:
    """Return the text of the reservation file."""
    return "".join(
        f"{address} {r.vmid} {r.kind}:{r.number}\n" for address, r in sorted(reservations.items())
    )


def claim(
    reservations: dict[str, Reservation],
    addresses: list[str],
    mine: Reservation,
    now: float,
    pid_of: Callable[[int], int | None],
) -> dict[str, Reservation]:
    """Return the reservations with these addresses taken; leftovers of dead VMs are taken over.

    Raises:
        GuestError: another VM reserved one, and it is running or about to.
    """
    for address in addresses:
        other = reservations.get(address)
        if other is None or other.vmid == mine.vmid:
            continue
        if other.kind == "time" and other.number > now:
            raise GuestError(
                f"PCI device '{address}' is currently reserved for use by VMID '{other.vmid}'"
            )
        if other.kind == "pid":
            if pid_of(other.vmid) == other.number:
                raise GuestError(f"PCI device '{address}' already in use by VMID '{other.vmid}'")
            print(f"leftover PCI reservation found for {address}, lets take it...", file=sys.stderr)
    return {**reservations, **dict.fromkeys(addresses, mine)}


def _rewrite(change: Callable[[dict[str, Reservation]], dict[str, Reservation]]) -> None:
    with guests.locked(f"{RESERVATIONS}.lock"):
        text = RESERVATIONS.read_text() if RESERVATIONS.exists() else ""
        new = RESERVATIONS.with_suffix(".tmp")
        new.write_text(format_reservations(change(parse_reservations(text))))
        new.replace(RESERVATIONS)


def reserve(addresses: list[str], mine: Reservation, pid_of: Callable[[int], int | None]) -> None:
    """Reserve devices in the file; see `claim`."""
    _rewrite(lambda old: claim(old, addresses, mine, time.time(), pid_of))


def release(vmid: int) -> None:
    """Drop all reservations of a VM."""
    _rewrite(lambda old: {a: r for a, r in old.items() if r.vmid != vmid})


def write(path: Path, text: str) -> OSError | None:
    """Write to sysfs and return the kernel's refusal, if any."""
    try:
        descriptor = os.open(path, os.O_WRONLY)
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)
    except OSError as error:
        return error
    return None


def bind_group(address: str) -> None:
    """Give a device's whole group to vfio-pci the way Proxmox does, by `new_id`.

    `new_id` makes the driver take every other device with the same id that has no driver then.

    Raises:
        GuestError: there is no IOMMU, or a member did not go to vfio-pci.
    """
    if not any(Path("/sys/kernel/iommu_groups").glob("*")):
        raise GuestError("cannot prepare PCI pass-through, IOMMU not present")
    driver = SYSFS / "drivers/vfio-pci"
    if not driver.is_dir():
        subprocess.run(["modprobe", "vfio-pci"], check=False, capture_output=True)
    if not driver.is_dir():
        raise GuestError("Cannot find vfio-pci module!")
    group = SYSFS / "devices" / address / "iommu_group/devices"
    if not group.is_dir():
        raise GuestError("Cannot open iommu_group: No such file or directory")
    for member in sorted(os.listdir(group)):
        device = SYSFS / "devices" / member
        if (driver / member).exists() or (device / "pci_bus").exists():  # its own, or a bridge
            continue
        ids = " ".join((device / name).read_text().strip()[2:] for name in ("vendor", "device"))
        steps = [(driver / "new_id", ids)]
        if (device / "driver").exists():
            steps.append((device / "driver/unbind", member))
        for path, text in [*steps, (driver / "bind", member)]:
            if path.name == "bind" and (driver / member).exists():
                continue  # new_id found it without a driver
            error = write(path, text)
            if error and not (path.name == "new_id" and error.errno == errno.EEXIST):
                print(f"error writing '{text}' to '{path}': {error.strerror}", file=sys.stderr)
                break
        if not (driver / member).exists():
            raise GuestError(f"Cannot bind {member} to vfio")
