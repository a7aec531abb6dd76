# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.

"""Who uses a GPU now (open device nodes), and which Proxmox guest it belongs to."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ansible_collections.gpuhost.inference.plugins.module_utils._child import ask
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import (
    GpuHostError,
    UnreadableError,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._pci import (
    DEVICES,
    normalize_address,
    slot_of,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._redact import redact
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader

Number = tuple[int, int]  # (major, minor) of a device node

CONFIGS = (("lxc", "/etc/pve/lxc"), ("qemu", "/etc/pve/qemu-server"))
MAPPINGS = "/etc/pve/mapping/pci.cfg"
RUN = "/run/qemu-server"
RESERVATIONS = f"{RUN}/pci-id-reservations"
CAPABILITIES = "/proc/driver/nvidia/capabilities"

_NVIDIA_NODE = re.compile(r"/dev/nvidia(\d+)")
# a device given to QEMU by address, or by its folder in sysfs
_ASSIGNED = re.compile(r"""(?:\bhost["=: ]+|sysfsdev["=: ]+\S*/)([0-9A-Fa-f:]+\.[0-7])""")
_ALLOWED = re.compile(r"c (\d+):(\d+|\*)(?: [rwm]+)?")


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


def read_majors(host: Reader) -> dict[str, int]:
    """Return the major numbers of character devices by name, from `/proc/devices`."""
    characters = (host.text("/proc/devices") or "").partition("Block devices:")[0]
    pairs = (line.split() for line in characters.splitlines())
    return {pair[1]: int(pair[0]) for pair in pairs if len(pair) == 2 and pair[0].isdigit()}


def _nvidia_major(majors: Mapping[str, int]) -> int:
    """Return the major number of `/dev/nvidiaN`: 195 in all drivers, unless the kernel differs."""
    return majors.get("nvidia", majors.get("nvidia-frontend", 195))


def card_numbers(
    host: Reader,
    majors: Mapping[str, int],
    minor: int | None,
    groups: Iterable[int],
    functions: Iterable[str],
) -> set[Number]:
    """Return the (major, minor) of every device node through which this one card is used.

    These are the driver's node and those of its MIG instances, DRM nodes, VFIO's nodes for the
    group and for the device, and the sound nodes of a companion, whose driver lets go only when
    they are closed (snd_card_free in the kernel). `/dev/nvidiactl`, `/dev/nvidia-uvm` and
    `/dev/nvidia-modeset` serve all cards, so holding them says nothing.

    Raises:
        UnreadableError: some of them cannot be found out.
    """
    numbers = set()
    if minor is not None:
        numbers.add((_nvidia_major(majors), minor))
        if "nvidia-caps" in majors:
            numbers |= {(majors["nvidia-caps"], one) for one in _capabilities(host, minor)}
    names = [name for group in groups for name in (f"{group}", f"noiommu-{group}")]
    files = [f"/sys/class/vfio/{name}/dev" for name in names]
    for function in functions:
        at = f"{DEVICES}/{function}"
        folders = [f"{at}/drm", f"{at}/vfio-dev"]
        folders += [f"{at}/sound/{card}" for card in host.names(f"{at}/sound")]
        files += [f"{folder}/{name}/dev" for folder in folders for name in host.names(folder)]
    for file in files:
        major, _colon, low = (host.text(file) or "").partition(":")
        if major.isdigit() and low.isdigit():
            numbers.add((int(major), int(low)))
    return numbers


def _capabilities(host: Reader, minor: int) -> Iterator[int]:
    """Yield the minor numbers of the nodes that stand for a card's MIG instances."""
    at = f"{CAPABILITIES}/gpu{minor}/mig"
    for instance in host.names(at):
        parts = host.names(f"{at}/{instance}")  # access, and a folder for each compute instance
        for path in (f"{at}/{instance}", *(f"{at}/{instance}/{part}" for part in parts)):
            found = re.search(r"DeviceFileMinor: (\d+)", host.text(f"{path}/access") or "")
            if found:
                yield int(found[1])


def read_users(
    host: Reader, numbers: Mapping[Number, Sequence[str]], kind: str = "c"
) -> tuple[dict[str, list[User]], list[str]]:
    """Look through the open and mapped files of every process once, for all cards.

    Numbers are compared, never paths: a container may have its own node under any name.
    Processes that end meanwhile are no users. A process that does not answer in two seconds, as
    one whose memory map is locked or whose files lie on a dead file server, is not known.
    Two kinds of holder are not seen: threads that gave up sharing the open files of their
    process, and files on their way through a socket.

    Args:
        host: the host.
        numbers: lead from the device number of a node to the addresses of its cards.
        kind: of the nodes, `c` for character and `b` for block devices.

    Returns:
        The users of each address, and what could not be looked at: while that is not empty,
        any card may be in use.
    """
    users: dict[str, list[User]] = {}
    unknown: list[str] = []
    if not numbers:  # without a node nobody can hold one
        return users, unknown
    pids = sorted((name for name in host.names("/proc") if name.isdigit()), key=int)
    looked = ask(lambda pid: _look(host, pid, numbers, kind), pids)
    for pid in pids:
        if pid not in looked:
            name = host.text(f"/proc/{pid}/comm") or "?"
            unknown.append(f"the open files of process {pid} ({name}) could not be looked at")
        elif looked[pid]:
            found = json.loads(looked[pid] or "")
            unknown += found["unknown"]
            for major, minor, node, how in found["nodes"]:
                cgroup = found["cgroup"]
                user = User(int(pid), found["command"], cgroup, node, _unit(cgroup), how)
                for card in numbers[major, minor]:
                    users.setdefault(card, []).append(user)
    if len(unknown) > 3:  # without privileges that is nearly every process
        unknown[3:] = [f"and the open files of {len(unknown) - 3} more processes"]
    return users, unknown


def _look(host: Reader, pid: str, wanted: Collection[Number], kind: str) -> str:
    """Return as JSON which wanted nodes a process holds; empty when it holds none."""
    at = f"/proc/{pid}"
    unknown: list[str] = []
    found: dict[Number, tuple[str, str]] = {}
    try:
        open_files = {at: host.names(f"{at}/fd")}
        if not open_files[at]:  # its first thread may have ended before others, which hold files
            threads = [f"{at}/task/{one}" for one in host.names(f"{at}/task") if one != pid]
            open_files.update((thread, host.names(f"{thread}/fd")) for thread in threads)
        for folder, names in open_files.items():
            for name in names:
                node = _opened(host, folder, name, kind, unknown)
                if node:
                    found.setdefault(node[0], (node[1], "open"))
            if kind == "c":
                for number, path in _mapped(host, folder, at):
                    found.setdefault(number, (path, "mapped"))
    except UnreadableError as error:
        unknown.append(str(error))
    nodes = [(*number, *found[number]) for number in found if number in wanted]
    if not nodes and not unknown:
        return ""
    cgroups = (host.text(f"{at}/cgroup") or "").splitlines() if nodes else []
    return json.dumps(
        {
            "unknown": unknown[:1],
            "nodes": nodes,
            "command": _shown_command(host, pid) if nodes else "",
            "cgroup": cgroups[-1].split(":", 2)[2] if cgroups else None,
        }
    )


def _opened(
    host: Reader, at: str, name: str, kind: str, unknown: list[str]
) -> tuple[Number, str] | None:
    """Return number and path of the device node that a process, or a thread of it, has open."""
    path = f"{at}/fd/{name}"
    try:
        number = host.device_number(path, kind)
        return (number, host.link(path) or "{}:{}".format(*number)) if number else None
    except UnreadableError as error:
        if not _without_nodes(host, at, name):
            unknown.append(str(error))
        return None


def _without_nodes(host: Reader, at: str, entry: str) -> bool:
    """Tell whether an open file lies on a mount without device nodes (nodev).

    Root may not look at files on FUSE mounts of others, and all those are such mounts.
    """
    try:
        position = host.text(f"{at}/fdinfo/{entry}") or ""
        mounts = (host.text(f"{at}/mountinfo") or "").splitlines()
    except UnreadableError:
        return False
    mount = re.search(r"^mnt_id:\s*(\d+)$", position, re.MULTILINE)
    options = [line.split()[5] for line in mounts if mount and line.split()[0] == mount[1]]
    return any("nodev" in one.split(",") for one in options)


def _mapped(host: Reader, at: str, process: str) -> Iterator[tuple[Number, str]]:
    """Yield number and path of the device nodes that a process has mapped into its memory.

    `maps` names device and inode of the file system a node lies on, and a path that may be of a
    container. Only the links in `map_files` lead to the node itself.
    """
    files: dict[tuple[bytes, bytes, bytes], bytes] = {}
    for line in (host.data(f"{at}/maps") or b"").split(b"\n"):
        # drivers give their memory to shared mappings, those of libraries are private
        if b"s " in line or b"/dev/" in line:
            area, mode, _offset, device, inode, *rest = line.split(None, 5)
            name = rest[0] if rest else b""
            if name.startswith(b"/") and (mode.endswith(b"s") or b"/dev/" in name):
                files.setdefault((device, inode, name), area)
    for (_device, _inode, name), area in files.items():
        first, last = (int(end, 16) for end in area.split(b"-"))
        node = name.decode("utf-8", "replace")
        number = host.device_number(f"{process}/map_files/{first:x}-{last:x}")
        if number is None and node.startswith("/dev/"):  # unmapped meanwhile, or a thread's
            number = host.device_number(node)
        if number:
            yield number, node


def _shown_command(host: Reader, pid: str) -> str:
    command = " ".join(_arguments(host, pid)) or f"[{host.text(f'/proc/{pid}/comm') or '?'}]"
    return redact(command)


def _unit(cgroup: str | None) -> str | None:
    """Return the unit of the host's systemd that a process belongs to, `None` in a container.

    Only slices stand above it; what a unit has below itself is its own affair.
    """
    found = re.match(r"(?:/[^/]+\.slice)*/([^/]+\.(?:service|scope))(?:/|$)", cgroup or "")
    return found[1] if found else None


def _arguments(host: Reader, pid: str) -> tuple[str, ...]:
    content = host.data(f"/proc/{pid}/cmdline") or b""
    return tuple(content.decode("utf-8", "replace").rstrip("\n\0").split("\0")) if content else ()


def read_guests(host: Reader) -> list[Guest]:
    """Return the containers and virtual machines of this host, running or not, by number.

    Raises:
        UnreadableError: the configurations cannot be read, so no card can be called free.
    """
    places = ("/etc/pve", *(folder for _kind, folder in CONFIGS))
    answers = ask(lambda path: "there" if host.exists(path) else None, places)
    if len(answers) < len(places):
        raise UnreadableError("/etc/pve does not answer: is pve-cluster working?")
    if answers["/etc/pve"] and not any(answers[folder] for _kind, folder in CONFIGS):
        raise UnreadableError("/etc/pve holds no guest configurations: is pve-cluster running?")
    guests = {}
    for kind, folder in CONFIGS:
        for file in host.names(folder):
            if re.fullmatch(r"\d+\.conf", file):
                guest = _guest(host, kind, int(file[:-5]), f"{folder}/{file}")
                guests[guest.vmid] = guest
    for file in host.names(RUN):
        if re.fullmatch(r"\d+\.pid", file) and int(file[:-4]) not in guests:
            guests[int(file[:-4])] = Guest("qemu", int(file[:-4]), None, None, (), False)
    found = _with_processes(host, list(guests.values()))
    return sorted((one for one in found if one.path or one.running), key=lambda one: one.vmid)


def _guest(host: Reader, kind: str, vmid: int, path: str) -> Guest:
    config = tuple(_settings(host.text(path) or ""))
    name = dict(config).get("hostname" if kind == "lxc" else "name")
    runs = _container_runs(host, vmid) if kind == "lxc" else False
    return Guest(kind, vmid, name, path, config, runs)


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


def _with_processes(host: Reader, guests: Sequence[Guest]) -> list[Guest]:
    """Add the running processes of virtual machines, by pid file and by systemd's scope.

    A pid file outlives its process, and the number may be given to somebody else: only a command
    line with the number of the guest proves anything. A process without one is about to end, or
    cannot, and may still hold its devices.
    """
    named: dict[int, list[str]] = {}
    for guest in guests:
        if guest.kind == "qemu":
            scope = f"/sys/fs/cgroup/qemu.slice/{guest.vmid}.scope/cgroup.procs"
            file = host.text(f"{RUN}/{guest.vmid}.pid")
            named[guest.vmid] = [] if file is None else [file]
            named[guest.vmid] += (host.text(scope) or "").split()
    commands = _read_commands(host, {pid for pids in named.values() for pid in pids})
    found = []
    for guest in guests:
        states = [
            (_is_machine(commands, pid, guest.vmid), pid) for pid in named.get(guest.vmid, ())
        ]
        proved = [pid for state, pid in states if state]
        if proved:
            command = commands[proved[0]] or ()
            found.append(replace(guest, running=True, pid=int(proved[0]), command=command))
        elif any(state is None for state, _pid in states):
            found.append(replace(guest, running=None))
        else:
            found.append(guest)
    return found


def _read_commands(host: Reader, pids: Iterable[str]) -> dict[str, tuple[str, ...] | None]:
    """Return the command lines of those numbers that are processes.

    `None` for one that has none, as it is about to end, or that does not let it be read.
    """
    processes = sorted(pid for pid in pids if pid.isdigit() and host.exists(f"/proc/{pid}"))
    # no child for nothing: starting one costs more than all it reads
    texts = ask(lambda pid: "\0".join(_arguments(host, pid)), processes) if processes else {}
    return {
        pid: tuple(text.split("\0")) if text else None
        for pid, text in ((pid, texts.get(pid)) for pid in processes)
    }


def _is_machine(commands: Mapping[str, tuple[str, ...] | None], pid: str, vmid: int) -> bool | None:
    """Tell whether a process number is that of a virtual machine, `None` when nobody knows."""
    if not pid.isdigit():  # a damaged pid file
        return None
    if pid not in commands:
        return False
    command = commands[pid]
    return None if command is None else ("-id", str(vmid)) in zip(command, command[1:])


def read_owners(
    host: Reader,
    guests: Iterable[Guest],
    numbers: Mapping[Number, Sequence[str]],
    cards: Iterable[str],
) -> dict[str, list[Owner]]:
    """Return the owners of each card; `numbers` is that of `read_users`.

    A container owns the cards whose nodes it lists. Without its driver a card has no node, so a
    container's claim on a card that is on vfio-pci cannot be seen here: its `dev3: /dev/nvidia3`
    then names a node of no card, or of another one.
    """
    slots: dict[str, list[str]] = {}
    for card in sorted(cards):
        slots.setdefault(slot_of(card), []).append(card)
    majors = read_majors(host)
    mappings = _read_mappings(host)
    owners: dict[str, list[Owner]] = {}
    for guest in guests:
        claims = _claims_of_vm(guest, mappings) if guest.kind == "qemu" else ()
        for source, claim, detail in claims:
            for card in _matching(slots, claim):
                owner = Owner(guest.kind, guest.vmid, source, guest.running, detail)
                owners.setdefault(card, []).append(owner)
        for key, value in guest.config if guest.kind == "lxc" else ():
            nodes = _nodes(host, majors, numbers, key, value)
            for card in sorted({card for n in nodes for card in numbers.get(n, ())}):
                owner = Owner("lxc", guest.vmid, "config", guest.running, f"{key}: {value}")
                owners.setdefault(card, []).append(owner)
    for address, vmid, running in _reservations(host):
        for card in _matching(slots, address):
            owner = Owner("qemu", vmid, "reservation", running, RESERVATIONS)
            owners.setdefault(card, []).append(owner)
    return owners


def _address(claim: str) -> str | None:
    """Return the address of the first function a hostpci address means, `None` for none."""
    try:
        return normalize_address(claim if "." in claim else f"{claim}.0")
    except GpuHostError:
        return None


def _matching(slots: Mapping[str, list[str]], claim: str) -> list[str]:
    """Return the cards a hostpci address means; any function of a card, or none, means its GPU."""
    address = _address(claim)
    if address is None:
        return []
    cards = slots.get(slot_of(address), [])
    return [address] if "." in claim and address in cards else cards


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
            name = options.get("mapping", "")
            if not all(_address(path) for path in mappings.get(name, ())):
                raise UnreadableError(
                    f"{MAPPINGS}: which devices the mapping {name} of guest {guest.vmid} means "
                    "cannot be told: correct its map lines"
                )
            claims = [*options.get("host", "").split(";"), *mappings.get(name, ())]
            for claim in filter(None, claims):
                yield "config", claim, f"{key}: {value}"
        elif key == "args":  # options for QEMU as they are
            for claim in _ASSIGNED.findall(value):
                yield "config", claim, f"args with {claim}"
    for argument in guest.command:
        for claim in _ASSIGNED.findall(argument):
            yield "process", claim, f"process {guest.pid}: {argument}"


def _read_mappings(host: Reader) -> dict[str, list[str]]:
    """Return the addresses of each PCI mapping on this node (PVE::Mapping::PCI).

    One that is empty or malformed stands for a line that does not tell which devices it means.
    """
    # a node is named like its host without the domain (PVE::INotify::nodename)
    node = (host.text("/proc/sys/kernel/hostname") or "").partition(".")[0]
    found: dict[str, list[str]] = {}
    name = ""
    for line in (host.text(MAPPINGS) or "").splitlines():
        if not line[:1].isspace():
            name = line.strip()
        elif line.split()[:1] == ["map"]:
            parts = "".join(line.split()[1:]).split(",")
            options = dict(part.split("=", 1) for part in parts if "=" in part)
            if not node or options.get("node", node) == node:
                paths = list(filter(None, options.get("path", "").split(";")))
                found.setdefault(name, []).extend(paths or [""])
    return found


def _nodes(
    host: Reader,
    majors: Mapping[str, int],
    numbers: Collection[Number],
    key: str,
    value: str,
) -> Iterator[Number]:
    """Yield the device numbers a line of a container's configuration gives to it.

    Permission for everything (`a`, `c *:* rwm`) gives no node and is no claim.
    """
    if re.fullmatch(r"lxc\.cgroup2?\.devices\.allow", key):
        allowed = _ALLOWED.fullmatch(value)
        if allowed:
            for major, minor in numbers:
                if int(allowed[1]) == major and allowed[2] in ("*", str(minor)):
                    yield major, minor
        return
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
        yield _nvidia_major(majors), int(card[1])
    for node in (path, *(f"{path}/{name}" for name in host.names(path))):
        number = host.device_number(node)
        if number:
            yield number


def _reservations(host: Reader) -> Iterator[tuple[str, int, bool | None]]:
    """Yield (address, guest, whether the reservation holds now), `None` when nobody knows.

    It holds until a time while a machine is starting, then as long as its process lives.
    """
    lines = re.findall(
        r"^\s*([0-9a-f:]+\.[0-7])\s+(\d+)\s+(time|pid):(\d+)\s*$",
        host.text(RESERVATIONS) or "",
        re.MULTILINE | re.IGNORECASE,
    )
    commands = _read_commands(host, {value for _at, _vmid, kind, value in lines if kind == "pid"})
    for address, vmid, kind, value in lines:
        if kind == "time":
            yield address, int(vmid), int(value) > time.time()
        else:
            yield address, int(vmid), _is_machine(commands, value, int(vmid))
