# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.

"""Who uses a GPU now (open device nodes), and which Proxmox guest it belongs to."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ansible_collections.gpuhost.inference.plugins.module_utils._errors import (
    GpuHostError,
    UnreadableError,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._pci import (
    DEVICES,
    normalize_address,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader

Number = tuple[int, int]  # (major, minor) of a device node

CONFIGS = (("lxc", "/etc/pve/lxc"), ("qemu", "/etc/pve/qemu-server"))
MAPPINGS = "/etc/pve/mapping/pci.cfg"
RUN = "/run/qemu-server"
RESERVATIONS = f"{RUN}/pci-id-reservations"

# Command lines are shown to whoever runs a playbook, and may hold keys
_SECRET = re.compile(r"(--?[\w-]*(?:key|token|password|secret)[\w-]*[= ])\S+", re.IGNORECASE)
_NVIDIA_NODE = re.compile(r"/dev/nvidia(\d+)")


@dataclass(frozen=True)
class User:
    """A process that has a device node of a GPU open, or mapped into its memory."""

    pid: int
    command: str
    cgroup: str | None
    node: str
    unit: str | None  # of systemd, from the cgroup: nvidia-persistenced.service
    how: str  # open, mapped


@dataclass(frozen=True)
class Guest:
    """A container or virtual machine of this host."""

    kind: str  # lxc, qemu
    vmid: int
    name: str | None
    path: str | None  # its configuration; None for a process whose configuration is gone
    config: tuple[tuple[str, str], ...]  # key and value, in order, without snapshots
    running: bool | None  # None: could not be found out
    pid: int | None = None  # of a virtual machine's process
    command: tuple[str, ...] = ()


@dataclass(frozen=True)
class Owner:
    """One reason to say that a GPU belongs to a guest."""

    kind: str
    vmid: int
    source: str  # config, process, reservation
    running: bool | None
    detail: str


def card_numbers(
    host: Reader, minor: int | None, groups: Iterable[int], functions: Iterable[str]
) -> set[Number]:
    """Return the (major, minor) of every device node through which this one card is used.

    These are the driver's node, DRM nodes, and VFIO's nodes for the group and for the device.
    `/dev/nvidiactl` and `/dev/nvidia-uvm` serve all cards, so holding them says nothing.
    """
    numbers = set()
    if minor is not None:
        numbers.add((_nvidia_major(host), minor))
    files = [f"/sys/class/vfio/{group}/dev" for group in groups]
    for function in functions:
        for kind in ("drm", "vfio-dev"):
            folder = f"{DEVICES}/{function}/{kind}"
            files += [f"{folder}/{name}/dev" for name in host.names(folder)]
    for file in files:
        major, _colon, low = (host.text(file) or "").partition(":")
        if major.isdigit() and low.isdigit():
            numbers.add((int(major), int(low)))
    return numbers


def _nvidia_major(host: Reader) -> int:
    """Return the major number of `/dev/nvidiaN`: 195 in all drivers, unless the kernel differs."""
    listed = re.search(
        r"^ *(\d+) nvidia(?:-frontend)?$", host.text("/proc/devices") or "", re.MULTILINE
    )
    return int(listed[1]) if listed else 195


def read_users(
    host: Reader, numbers: Mapping[Number, Sequence[str]]
) -> tuple[dict[str, list[User]], list[str]]:
    """Look through the open files of every process once, for all cards.

    `numbers` leads from the device number of a node to the addresses of its cards. Numbers are
    compared, never paths: a container may have its own node under any name. Processes that end
    meanwhile are no users.

    Returns:
        The users of each address, and what could not be looked at: while that is not empty,
        any card may be in use.
    """
    users: dict[str, list[User]] = {}
    unknown: list[str] = []
    for pid in sorted(int(name) for name in host.names("/proc") if name.isdigit()):
        for number, path in _open_nodes(host, pid, unknown).items():
            if number in numbers:
                user = _user(host, pid, host.link(path) or "{}:{}".format(*number))
                for card in numbers[number]:
                    users.setdefault(card, []).append(user)
    if len(unknown) > 3:  # without privileges that is nearly every process
        unknown[3:] = [f"and the open files of {len(unknown) - 3} more processes"]
    return users, unknown


def _open_nodes(host: Reader, pid: int, unknown: list[str]) -> dict[Number, str]:
    """Return the device nodes a process has open, each with one of its `/proc/PID/fd` entries."""
    found = {}
    try:
        entries = host.names(f"/proc/{pid}/fd")
    except UnreadableError as error:
        unknown.append(str(error))
        entries = []
    for entry in entries:
        path = f"/proc/{pid}/fd/{entry}"
        try:
            number = host.device_number(path)
        except UnreadableError as error:
            unknown.append(str(error))
        else:
            if number:
                found[number] = path
    return found


def _user(host: Reader, pid: int, node: str) -> User:
    command = " ".join(_arguments(host, pid)) or f"[{host.text(f'/proc/{pid}/comm') or '?'}]"
    cgroups = (host.text(f"/proc/{pid}/cgroup") or "").splitlines()
    command = _SECRET.sub(r"\1(redacted)", command)
    cgroup = cgroups[-1].split(":", 2)[2] if cgroups else None
    return User(pid, command, cgroup, node, _unit(cgroup), "open")


def _unit(cgroup: str | None) -> str | None:
    """Return the innermost systemd unit of a cgroup path; slices only group units."""
    units = re.findall(r"/([^/]+\.(?:service|scope))(?=/|$)", cgroup or "")
    return units[-1] if units else None


def _arguments(host: Reader, pid: int) -> tuple[str, ...]:
    content = host.data(f"/proc/{pid}/cmdline") or b""
    return tuple(content.decode("utf-8", "replace").rstrip("\n\0").split("\0")) if content else ()


def read_guests(host: Reader) -> list[Guest]:
    """Return the containers and virtual machines of this host, running or not, by number.

    Raises:
        UnreadableError: the configurations cannot be read, so no card can be called free.
    """
    if host.exists("/etc/pve") and not any(host.exists(folder) for _kind, folder in CONFIGS):
        raise UnreadableError("/etc/pve holds no guest configurations: is pve-cluster running?")
    guests = {}
    for kind, folder in CONFIGS:
        for file in host.names(folder):
            if re.fullmatch(r"\d+\.conf", file):
                guest = _guest(host, kind, int(file[:-5]), f"{folder}/{file}")
                guests[guest.vmid] = guest
    for file in host.names(RUN):
        if re.fullmatch(r"\d+\.pid", file) and int(file[:-4]) not in guests:
            guest = _with_process(host, Guest("qemu", int(file[:-4]), None, None, (), False))
            if guest.running:
                guests[guest.vmid] = guest
    return [guests[vmid] for vmid in sorted(guests)]


def _guest(host: Reader, kind: str, vmid: int, path: str) -> Guest:
    config = tuple(_settings(host.text(path) or ""))
    name = dict(config).get("hostname" if kind == "lxc" else "name")
    if kind == "lxc":
        return Guest(kind, vmid, name, path, config, _container_runs(host, vmid))
    return _with_process(host, Guest(kind, vmid, name, path, config, False))


def _settings(text: str) -> Iterator[tuple[str, str]]:
    """Yield key and value of a guest configuration; changes still pending count, snapshots not."""
    current = True
    for line in text.splitlines():
        if line.startswith("["):
            current = line.strip() in ("[PENDING]", "[pve:pending]")
        elif current and not line.startswith("#") and ":" in line:
            key, _colon, value = line.partition(":")
            yield key.strip(), value.strip()


def _container_runs(host: Reader, vmid: int) -> bool | None:
    """Tell by its cgroup whether a container runs: `lxc/ID` (Proxmox) or `lxc.payload.ID` (LXC)."""
    root = "/sys/fs/cgroup"
    if not host.exists(f"{root}/cgroup.controllers"):
        return None
    for name in (f"lxc/{vmid}", f"lxc.payload.{vmid}"):
        if "populated 1" in (host.text(f"{root}/{name}/cgroup.events") or ""):
            return True
    return False


def _with_process(host: Reader, guest: Guest) -> Guest:
    """Add the running process of a virtual machine, if its pid file still names one of its own."""
    pid = host.number(f"{RUN}/{guest.vmid}.pid")
    if pid is None:
        return guest
    try:
        command = _arguments(host, pid)
    except UnreadableError:
        return replace(guest, running=None, pid=pid)
    if ("-id", str(guest.vmid)) not in zip(command, command[1:]):
        return guest  # the process number was given to somebody else
    return replace(guest, running=True, pid=pid, command=command)


def read_owners(
    host: Reader,
    guests: Iterable[Guest],
    numbers: Mapping[Number, Sequence[str]],
    cards: Iterable[str],
) -> dict[str, list[Owner]]:
    """Return the owners of each card; `numbers` is that of `read_users`.

    A container owns the cards whose nodes it lists. Without its driver a card has no node, so a
    container's claim on a card that is on vfio-pci cannot be seen here.
    """
    mappings = _read_mappings(host)
    owners: dict[str, list[Owner]] = {}
    cards = set(cards)
    for guest in guests:
        claims = _claims_of_vm(guest, mappings) if guest.kind == "qemu" else []
        for source, claim, detail in claims:
            for card in _matching(cards, claim):
                owner = Owner(guest.kind, guest.vmid, source, guest.running, detail)
                owners.setdefault(card, []).append(owner)
        for key, value in guest.config if guest.kind == "lxc" else ():
            for card in sorted(
                {card for n in _nodes(host, key, value) for card in numbers.get(n, ())}
            ):
                owner = Owner("lxc", guest.vmid, "config", guest.running, f"{key}: {value}")
                owners.setdefault(card, []).append(owner)
    running = {guest.vmid: guest.running for guest in guests}
    for address, vmid, until in _reservations(host):
        for card in _matching(cards, address):
            held = running.get(vmid, False) if until is None else until > time.time()
            owner = Owner("qemu", vmid, "reservation", held, RESERVATIONS)
            owners.setdefault(card, []).append(owner)
    return owners


def _matching(cards: set[str], claim: str) -> list[str]:
    """Return the cards a hostpci address means; any function of a card, or none, means its GPU."""
    full = claim if "." in claim else f"{claim}.0"
    try:
        address = normalize_address(full)
    except GpuHostError:
        return []
    if "." in claim and address in cards:
        return [address]
    return sorted(card for card in cards if card.startswith(address[:-1]))


def _claims_of_vm(
    guest: Guest, mappings: Mapping[str, list[str]]
) -> Iterator[tuple[str, str, str]]:
    """Yield (source, claimed address, where it stands) from configuration and command line."""
    for key, value in guest.config:
        if re.fullmatch(r"hostpci\d+", key):
            first, *others = value.split(",")
            options = dict(part.split("=", 1) for part in others if "=" in part)
            name, _equals, target = first.rpartition("=")
            options[name or "host"] = target
            claims = options.get("host", "").split(";")
            claims += mappings.get(options.get("mapping", ""), [])
            for claim in filter(None, claims):
                yield "config", claim, f"{key}: {value}"
    for argument in guest.command:
        for claim in re.findall(r"(?:,host=|,sysfsdev=\S*/)([0-9A-Fa-f:]+\.[0-7])", argument):
            yield "process", claim, f"process {guest.pid}: {argument}"


def _read_mappings(host: Reader) -> dict[str, list[str]]:
    """Return the addresses of each PCI mapping on this node (PVE::Mapping::PCI)."""
    node = host.text("/proc/sys/kernel/hostname")
    found: dict[str, list[str]] = {}
    name = ""
    for line in (host.text(MAPPINGS) or "").splitlines():
        if not line[:1].isspace():
            name = line.strip()
        elif line.split()[:1] == ["map"]:
            options = dict(part.split("=", 1) for part in line.split()[1].split(",") if "=" in part)
            if node is None or options.get("node", node) == node:
                found.setdefault(name, []).extend(options.get("path", "").split(";"))
    return found


def _nodes(host: Reader, key: str, value: str) -> Iterator[Number]:
    """Yield the device numbers a line of a container's configuration gives to it."""
    if re.fullmatch(r"dev\d+", key):
        parts = [part.partition("=") for part in value.split(",")]
        path = next(
            (end if sign else start for start, sign, end in parts if start == "path" or not sign),
            "",
        )
    elif key == "lxc.mount.entry":
        path = (value.split(maxsplit=1) or [""])[0]  # an empty entry clears those before it
    else:
        return
    if not path.startswith("/"):
        return
    card = _NVIDIA_NODE.fullmatch(path)
    if card:  # also when the node was not made yet
        yield _nvidia_major(host), int(card[1])
    for node in (path, *(f"{path}/{name}" for name in host.names(path))):
        number = host.device_number(node)
        if number:
            yield number


def _reservations(host: Reader) -> Iterator[tuple[str, int, float | None]]:
    """Yield (address, guest, end of the reservation or None while a process holds it)."""
    for line in (host.text(RESERVATIONS) or "").splitlines():
        match = re.fullmatch(r"([0-9a-f:]+\.[0-7])\s+(\d+)\s+(time|pid):(\d+)", line.strip())
        if match:
            until = float(match[4]) if match[3] == "time" else None
            yield normalize_address(match[1]), int(match[2]), until
