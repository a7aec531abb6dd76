# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.

"""Which GPUs a guest's configuration names, and the change that makes it name exactly those wanted.

Containers get device nodes (`devN`, pve-container: src/PVE/LXC/Config.pm), virtual machines get PCI
functions (`hostpciN`, qemu-server: src/PVE/QemuServer/PCI.pm). Changes go through `pct set` and
`qm set`, which validate and lock.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Callable

from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from ansible_collections.gpuhost.inference.plugins.module_utils._gpu import Gpu, read_gpus
from ansible_collections.gpuhost.inference.plugins.module_utils._layout import KINDS
from ansible_collections.gpuhost.inference.plugins.module_utils._owners import (
    MAPPINGS,
    Guest,
    read_guests,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._pci import (
    PciDevice,
    normalize_address,
    read_devices,
    slot_of,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader

CONTROL_NODES = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools")
STORAGES = "/etc/pve/storage.cfg"
MAX_HOSTPCI = 16  # qemu-server: $MAX_HOSTPCI_DEVICES
MAX_DEV = 256  # pve-container: $MAX_DEVICES

Run = Callable[[Sequence[str]], str]  # runs a command of the host, raises GpuHostError

TOOLS = {"lxc": "pct", "qemu": "qm"}
_NETWORK = ("nfs", "cifs", "cephfs", "glusterfs", "rbd", "iscsi", "iscsidirect", "pbs", "esxi")
_NVIDIA_NODE = re.compile(r"/dev/nvidia\d+")
_OWNERSHIP = ("uid", "gid", "mode")
# what a new hostpci entry takes over from another card's; the other options are of that card
_COMMON = ("pcie", "rombar")
# what an entry says of its card: wrong for any other that takes its place
_OF_CARD = (
    "romfile",
    "mdev",
    "legacy-igd",
    "vendor-id",
    "device-id",
    "sub-vendor-id",
    "sub-device-id",
)
_NAMING = ("host", "mapping", "pcie", *_OF_CARD)  # what a new entry has of its own
_NODE_SECONDS = 10  # udev makes /dev/nvidiaN a moment after the driver is bound


@dataclass(frozen=True)
class MapLine:
    """One `map` line of a PCI mapping; Proxmox passes all its paths together."""

    mapping: str
    node: str
    id: str
    subsystem_id: str | None
    iommugroup: int | None
    paths: tuple[str, ...]
    text: str  # as it is written


@dataclass(frozen=True)
class Wish:
    """What a guest's configuration shall name; `None` keeps what its entries have."""

    addresses: tuple[str, ...]
    uid: int | None = None
    gid: int | None = None
    mode: str | None = None  # octal, "0666"
    control_nodes: bool = True
    pcie: bool = True


@dataclass(frozen=True)
class Plan:
    """Settings to change (`None` removes one), and why that must not be done now."""

    changes: Mapping[str, str | None]
    problems: tuple[str, ...] = ()
    mapping_problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class Leftover:
    """A raw line of a container that hands in NVIDIA nodes beside its `devN` entries."""

    line: str
    remedy: str


@dataclass(frozen=True)
class Surroundings:
    """What configurations are judged by, beside the guests and GPUs themselves."""

    node: str  # this host's name in the cluster
    devices: Mapping[str, PciDevice]  # all PCI functions by address
    mappings: tuple[MapLine, ...]
    majors: Mapping[int, str]  # character drivers by major number
    absent: frozenset[str]  # paths of devN entries at which there is no device
    local_storages: frozenset[str]  # storages that only this node has


def settings_of(config: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the settings a guest will start with: pending changes and deletions count.

    Raw `lxc.*` lines may come more than once; of other keys the last one holds.
    """
    found: list[tuple[str, str]] = []
    for key, value in config:
        gone = re.split(r"[,;\s]+", value) if key == "delete" else [key]
        if not key.startswith("lxc."):
            found = [item for item in found if item[0] not in gone]
        if key != "delete":
            found.append((key, value))
    return found


def parse_options(value: str, nameless: str) -> dict[str, str]:
    """Split a property string such as `82:00.0,pcie=1`; the part without a name is `nameless`."""
    parts = [part.partition("=") for part in value.split(",") if part]
    return {
        (name.strip() if equals else nameless): (text if equals else name).strip()
        for name, equals, text in parts
    }


def format_options(options: Mapping[str, str], nameless: str) -> str:
    """Write a property string, the nameless part first."""
    rest = [f"{name}={value}" for name, value in options.items() if name != nameless]
    return ",".join([options[nameless], *rest] if nameless in options else rest)


def numbered(
    settings: Sequence[tuple[str, str]], prefix: str, nameless: str
) -> dict[int, dict[str, str]]:
    """Return the options of the entries `PREFIXn` by their number."""
    entries = {
        int(key[len(prefix) :]): parse_options(value, nameless)
        for key, value in settings
        if re.fullmatch(rf"{prefix}\d+", key)
    }
    return dict(sorted(entries.items()))


def functions_of(claim: str, functions: Collection[str]) -> list[str]:
    """Return the PCI functions a hostpci or mapping path means: one, or all of a card."""
    claim = claim.strip()
    try:
        address = normalize_address(claim if "." in claim else f"{claim}.0")
    except GpuHostError:
        return []
    if "." in claim:
        return [address] if address in functions else []
    return sorted(one for one in functions if slot_of(one) == slot_of(address))


def parse_mappings(text: str) -> tuple[MapLine, ...]:
    """Return the lines of `/etc/pve/mapping/pci.cfg` (pve-guest-common: src/PVE/Mapping/PCI.pm)."""
    lines, name = [], ""
    for line in text.splitlines():
        words = line.split()
        if not line[:1].isspace():
            name = line.strip()
        elif words[:1] == ["map"] and len(words) > 1:
            text = " ".join(words[1:])
            options = parse_options(text, "node")
            group = options.get("iommugroup", "")
            lines.append(
                MapLine(
                    mapping=name,
                    node=options.get("node", ""),
                    id=options.get("id", ""),
                    subsystem_id=options.get("subsystem-id"),
                    iommugroup=int(group) if re.fullmatch(r"-?\d+", group) else None,
                    paths=tuple(filter(None, options.get("path", "").split(";"))),
                    text=text,
                )
            )
    return tuple(lines)


def read_surroundings(host: Reader, guests: Iterable[Guest]) -> Surroundings:
    """Read what these guests' configurations are judged by.

    Raises:
        UnreadableError: one of the files is there but cannot be read.
    """
    characters = (host.text("/proc/devices") or "").partition("Block devices:")[0]
    listed = re.findall(r"^ *(\d+) (\S+)$", characters, re.MULTILINE)
    paths = {
        options.get("path", "")
        for guest in guests
        if guest.kind == "lxc"
        for options in numbered(settings_of(guest.config), "dev", "path").values()
    }
    return Surroundings(
        node=(host.text("/proc/sys/kernel/hostname") or "").partition(".")[0],
        devices={device.address: device for device in read_devices(host)},
        mappings=parse_mappings(host.text(MAPPINGS) or ""),
        majors={int(major): name for major, name in listed},
        absent=frozenset(path for path in paths if path and host.device_number(path) is None),
        local_storages=frozenset(_local_storages(host.text(STORAGES) or "")),
    )


def _local_storages(text: str) -> Iterator[str]:
    """Yield the storages of `/etc/pve/storage.cfg` that are neither shared nor on a network."""
    for section in re.split(r"\n(?=\S)", text):
        head = re.match(r"(\w+):\s*(\S+)", section)
        if head and head[1] not in _NETWORK and not re.search(r"^\s+shared\s+1", section, re.M):
            yield head[2]


def claims_of(guest: Guest, gpus: Sequence[Gpu]) -> dict[str, frozenset[str]]:
    """Return the GPUs each line of a guest's configuration names, as `read_gpus` found out."""
    claims: dict[str, set[str]] = {}
    for gpu in gpus:
        for owner in gpu.owners:
            if owner.source == "config" and (owner.kind, owner.vmid) == (guest.kind, guest.vmid):
                claims.setdefault(owner.detail, set()).add(gpu.address)
    return {line: frozenset(cards) for line, cards in claims.items()}


def leftovers(config: Sequence[tuple[str, str]], majors: Mapping[int, str]) -> list[Leftover]:
    """Return the raw lines of a container that hand in NVIDIA nodes, or a number nobody has now.

    `devN` looks the number up at each start; a raw line with a fixed one goes stale when the
    major number of nvidia-uvm moves.
    """
    found = []
    for key, value in config:
        why = ""
        number = re.match(r"c (\d+):", value)
        if key == "lxc.mount.entry" and re.search(r"/?dev/nvidia", value):
            why = "devN entries make the nodes"
        elif re.fullmatch(r"lxc\.cgroup2?\.devices\.allow", key) and number:
            major = int(number[1])
            name = majors.get(major)
            if major == 195 or (name or "").startswith("nvidia"):
                why = "devN entries allow their nodes themselves"
            elif name is None and major >= 234:  # majors from here on are handed out at load time
                uvm = [str(at) for at, driver in majors.items() if driver == "nvidia-uvm"]
                now = f"; nvidia-uvm has {uvm[0]} now" if uvm else ""
                why = f"no driver has major number {major}{now}"
        if why:
            line = f"{key}: {value}"
            found.append(Leftover(line, f"remove the line from the configuration: {why}"))
    return found


def plan_container(
    settings: Sequence[tuple[str, str]],
    claims: Mapping[str, frozenset[str]],
    nodes: Mapping[str, str],
    wish: Wish,
) -> Plan:
    """Return the change after which a container's `devN` name these GPUs and no other.

    Entries of other devices stay as they are, those of wanted GPUs keep their number and options.

    Args:
        settings: Of the container, see `settings_of`.
        claims: GPUs by line, see `claims_of`.
        nodes: Path of the device node by address, for each wanted GPU.
        wish: What is wanted.
    """
    before = numbered(settings, "dev", "path")
    texts = dict(settings)
    wanted = list(nodes.values())
    asked = {
        name: str(value)
        for name, value in (("uid", wish.uid), ("gid", wish.gid), ("mode", wish.mode))
        if value is not None
    }
    after: dict[int, dict[str, str]] = {}
    pattern: dict[str, str] = {}
    dropped = []
    for number, options in before.items():
        path = options.get("path", "")
        cards = claims.get(f"dev{number}: {texts[f'dev{number}']}", frozenset())
        ours = bool(cards) or path in CONTROL_NODES or bool(_NVIDIA_NODE.fullmatch(path))
        if ours and not pattern:
            pattern = {name: options[name] for name in _OWNERSHIP if name in options}
        if ours and path not in CONTROL_NODES and not (cards and cards <= set(nodes)):
            dropped.append(number)
        elif ours and path in [entry.get("path") for entry in after.values()]:
            dropped.append(number)  # the same node twice
        else:
            after[number] = {**options, **asked} if ours else options
    have = [entry.get("path") for entry in after.values()]
    missing = [path for path in wanted if path not in have]
    if wish.control_nodes and wanted:
        missing += [path for path in CONTROL_NODES if path not in have]
    free = dropped + [number for number in range(MAX_DEV) if number not in before]
    after.update(
        (number, {"path": path, **pattern, **asked}) for number, path in zip(free, missing)
    )
    return Plan(_changes("dev", "path", before, after))


def plan_machine(
    settings: Sequence[tuple[str, str]],
    gpus: Sequence[Gpu],
    around: Surroundings,
    wish: Wish,
) -> Plan:
    """Return the change after which a machine's `hostpciN` name these GPUs and no other.

    Entries without a GPU stay as they are, those of wanted GPUs keep number and options. Where
    mappings are in use they stay in use; the mappings themselves are never changed, since they
    belong to the whole cluster.

    Args:
        settings: Of the machine, see `settings_of`.
        gpus: All GPUs of the host.
        around: PCI functions and mappings of the host.
        wish: What is wanted.
    """
    before = numbered(settings, "hostpci", "host")
    cards = _Cards(gpus, around)
    wanted = frozenset(wish.addresses)
    after: dict[int, dict[str, str]] = {}
    covered: set[str] = set()
    problems: list[str] = []
    dropped, with_gpu = [], []
    for number, options in before.items():
        meant = cards.of_entry(options)
        if not meant:
            after[number] = options
            continue
        with_gpu.append(options)
        kept: dict[str, str] | None = options
        if "mapping" not in options:
            kept = _without(options, cards, wanted, covered)
        elif not meant & wanted:
            kept = None
        elif not meant <= wanted:
            problems.append(
                f"hostpci{number} uses mapping {options['mapping']}, which stands for "
                f"{', '.join(sorted(meant))} on this node, more than is wanted: use a mapping of "
                "the wanted GPUs alone"
            )
        if kept is None:
            dropped.append(number)
        else:
            after[number] = kept
            covered.update(cards.functions(kept))
    problems += _uncertain_mappings(after, cards)
    missing = [gpu for gpu in gpus if gpu.address in wanted - covered]
    free = dropped + [number for number in range(MAX_HOSTPCI) if number not in before]
    mapped = any("mapping" in options for options in with_gpu)
    common = {k: v for options in with_gpu[:1] for k, v in options.items() if k in _COMMON}
    for number, gpu in zip(free, missing):
        target, problem = _target(gpu, cards, mapped)
        problems += [problem] if problem else []
        like = before.get(number, common)
        rest = {k: v for k, v in like.items() if k not in _NAMING}
        after[number] = {**target, **({"pcie": "1"} if wish.pcie else {}), **rest}
    refusals = []
    if len(missing) > len(free):
        refusals.append(f"a machine has {MAX_HOSTPCI} hostpci entries, and all are taken")
    if missing and wish.pcie and "q35" not in dict(settings).get("machine", ""):
        refusals.append("pcie=1 needs the machine type q35: set that, or use pcie: false")
    changes = _changes("hostpci", "host", before, after)
    return Plan(changes, tuple(refusals), tuple(problems))


class _Cards:
    """Answers which functions and GPUs an entry stands for."""

    def __init__(self, gpus: Sequence[Gpu], around: Surroundings) -> None:
        self.around = around
        self._gpus = {slot_of(gpu.address): gpu.address for gpu in gpus}

    def of_path(self, path: str) -> frozenset[str]:
        """Return the GPUs whose card a path touches, be it by its sound function."""
        slots = {slot_of(one) for one in functions_of(path, self.around.devices)}
        return frozenset(self._gpus[slot] for slot in slots if slot in self._gpus)

    def of_entry(self, options: Mapping[str, str]) -> frozenset[str]:
        """Return the GPUs an entry may stand for; a mapping offers one of its lines."""
        return frozenset(one for path in self._paths(options) for one in self.of_path(path))

    def functions(self, options: Mapping[str, str]) -> Iterator[str]:
        """Yield the PCI functions an entry may stand for."""
        for path in self._paths(options):
            yield from functions_of(path, self.around.devices)

    def _paths(self, options: Mapping[str, str]) -> list[str]:
        if "mapping" in options:
            lines = lines_of(options["mapping"], self.around)
            return [path for line in lines for path in line.paths]
        return options.get("host", "").split(";")


def _without(
    options: dict[str, str], cards: _Cards, wanted: frozenset[str], covered: set[str]
) -> dict[str, str] | None:
    """Return an entry without the addresses of GPUs that are not wanted, or there already."""
    claims = options.get("host", "").split(";")
    stay = [
        claim
        for claim in claims
        if cards.of_path(claim) <= wanted and not set(cards.functions({"host": claim})) & covered
    ]
    if stay == claims:
        return options
    return {**options, "host": ";".join(stay)} if stay else None


def lines_of(mapping: str, around: Surroundings) -> list[MapLine]:
    """Return the lines of a mapping that are of this node."""
    return [one for one in around.mappings if (one.mapping, one.node) == (mapping, around.node)]


def _uncertain_mappings(entries: Mapping[int, Mapping[str, str]], cards: _Cards) -> Iterator[str]:
    """Yield the mappings from which the machine would take whichever GPU is free."""
    used = [
        options["mapping"]
        for options in entries.values()
        if "mapping" in options and cards.of_entry(options)
    ]
    for mapping in sorted(set(used)):
        lines = lines_of(mapping, cards.around)
        if len(lines) != used.count(mapping):
            yield (
                f"mapping {mapping} offers {len(lines)} choices on this node to "
                f"{used.count(mapping)} hostpci entries, so which GPU the machine gets is open: "
                "use a mapping for each GPU"
            )


def _target(gpu: Gpu, cards: _Cards, mapped: bool) -> tuple[dict[str, str], str | None]:
    """Return how a new entry names a GPU, and what stands against that."""
    node = cards.around.node
    whole = slot_of(gpu.address) if gpu.companions else gpu.address
    if not mapped:
        return {"host": whole}, None
    for name in sorted({one.mapping for one in cards.around.mappings if one.node == node}):
        entry = {"mapping": name}
        alone = len(lines_of(name, cards.around)) == 1 and cards.of_entry(entry) == {gpu.address}
        if alone and gpu.address in cards.functions(entry):
            return entry, None
    name = "gpu-" + re.sub(r"\W", "-", slot_of(gpu.address))
    return {"host": whole}, (
        f"the machine uses mappings, and none on this node stands for {gpu.address} alone: "
        f"pvesh create /cluster/mapping/pci --id {name} --map {map_text(gpu, node, whole)}"
    )


def map_text(gpu: Gpu, node: str, path: str) -> str:
    """Return the `map` line with which a mapping fits a GPU as it is now."""
    parts = [f"node={node}", f"path={path}", f"id={gpu.id}"]
    parts += [f"subsystem-id={gpu.subsystem_id}"] if gpu.subsystem_id else []
    parts += [f"iommugroup={gpu.iommu_group.number}"] if gpu.iommu_group else []
    return ",".join(parts)


def _changes(
    prefix: str,
    nameless: str,
    before: Mapping[int, Mapping[str, str]],
    after: Mapping[int, Mapping[str, str]],
) -> dict[str, str | None]:
    """Return what differs, by key; the order of options is no difference."""
    return {
        f"{prefix}{number}": format_options(after[number], nameless) if number in after else None
        for number in sorted({*before, *after})
        if before.get(number) != after.get(number)
    }


@dataclass(frozen=True)
class Situation:
    """What a guest's plan depends on, read at once."""

    guest: Guest
    gpus: tuple[Gpu, ...]
    around: Surroundings
    absent: frozenset[str]  # device nodes of the driver that are not there


def read_situation(host: Reader, kind: str, vmid: int) -> Situation:
    """Read what the plan for a guest depends on.

    Raises:
        GpuHostError: there is no such guest, or something could not be read.
    """
    guests = {guest.vmid: guest for guest in read_guests(host)}
    guest = guests.get(vmid)
    if guest is None or guest.kind != kind or guest.path is None:
        of_kind = [str(one.vmid) for one in guests.values() if one.kind == kind and one.path]
        have = f" (it is of kind {guest.kind})" if guest and guest.kind != kind else ""
        raise GpuHostError(
            f"there is no {kind} guest {vmid} on this host{have}: its {kind} guests are "
            f"{', '.join(of_kind) or 'none'}"
        )
    gpus = tuple(read_gpus(host))
    paths = [*node_paths(gpus).values(), *CONTROL_NODES]
    absent = frozenset(path for path in paths if host.device_number(path) is None)
    return Situation(guest, gpus, read_surroundings(host, guests.values()), absent)


def choose(gpus: Sequence[Gpu], addresses: Sequence[str]) -> tuple[str, ...]:
    """Return wanted addresses in full form and in order.

    Raises:
        GpuHostError: one is malformed, named twice, or no GPU of this host.
    """
    known = [gpu.address for gpu in gpus]
    chosen: list[str] = []
    for text in addresses:
        address = normalize_address(text)
        if address in chosen:
            raise GpuHostError(f"{address} is listed twice: name each GPU once")
        if address not in known:
            raise GpuHostError(
                f"{address} is no NVIDIA GPU of this host; those are at {', '.join(known) or '-'}"
            )
        chosen.append(address)
    return tuple(sorted(chosen))


def node_paths(gpus: Sequence[Gpu]) -> dict[str, str]:
    """Return the device node of each GPU that has one now, by address."""
    return {
        gpu.address: f"/dev/nvidia{gpu.device_minor}"
        for gpu in gpus
        if gpu.driver == "nvidia" and gpu.device_minor is not None
    }


def plan_guest(
    situation: Situation, wish: Wish, allow_from: Collection[int] = (), *, assume: bool = False
) -> Plan:
    """Return the change of a guest's configuration, with everything that stands against it.

    Args:
        situation: See `read_situation`.
        wish: What is wanted, with full addresses.
        allow_from: Guests whose configuration may still name a wanted GPU.
        assume: Plan as if the guest were stopped and its GPUs had their driver.
    """
    guest, gpus = situation.guest, situation.gpus
    settings = settings_of(guest.config)
    if guest.kind == "lxc":
        known = node_paths(gpus)
        # the driver hands out a node's number when it is bound, not before
        nodes = {
            address: known.get(address, f"/dev/nvidia(of {address})")
            for address in wish.addresses
            if assume or address in known
        }
        plan = plan_container(settings, claims_of(guest, gpus), nodes, wish)
    else:
        plan = plan_machine(settings, gpus, situation.around, wish)
    problems = list(plan.problems)
    for gpu in gpus:
        if gpu.address in wish.addresses:
            problems += _unfit(gpu, guest, allow_from, assume)
    if guest.kind == "lxc":
        problems += [
            f"the line '{one.line}' of {guest.path} hands in NVIDIA nodes as well: {one.remedy}"
            for one in leftovers(guest.config, situation.around.majors)
        ]
        new = {parse_options(value, "path").get("path") for value in plan.changes.values() if value}
        problems += [
            f"{path} does not exist, and Proxmox starts no container without it: "
            "nvidia-modprobe -u -c 0 makes the driver's nodes"
            for path in sorted(situation.absent)
            if path in new and not assume
        ]
    if plan.changes and not assume:
        problems += _not_now(guest, dict(settings))
    return Plan(plan.changes, tuple(problems), plan.mapping_problems)


def _not_now(guest: Guest, settings: Mapping[str, str]) -> Iterator[str]:
    name = f"{guest.kind} guest {guest.vmid}"
    if guest.running:
        yield (
            f"{name} runs, and Proxmox takes no device from a running guest: "
            f"{TOOLS[guest.kind]} shutdown {guest.vmid}"
        )
    elif guest.running is None:
        yield f"whether {name} runs could not be found out"
    if settings.get("lock"):
        yield f"{name} is locked ({settings['lock']}): wait until that is over"


def _unfit(gpu: Gpu, guest: Guest, allow_from: Collection[int], assume: bool) -> Iterator[str]:
    """Yield why a guest must not get this GPU now."""
    driver = KINDS[guest.kind]
    if gpu.driver != driver and not assume:
        yield (
            f"{gpu.address} is on driver {gpu.driver or 'none'}, and a guest of kind {guest.kind} "
            f"needs {driver}: bind it first (gpu)"
        )
    elif guest.kind == "lxc" and gpu.device_minor is None and not assume:
        yield (
            f"{gpu.address} is on nvidia, which does not say its device node: see "
            f"/proc/driver/nvidia/gpus/{gpu.address}/information and gpu_health_info"
        )
    others = {
        (owner.kind, owner.vmid): owner
        for owner in gpu.owners
        if (owner.kind, owner.vmid) != (guest.kind, guest.vmid) and owner.vmid not in allow_from
        if owner.source == "config" or owner.running is not False
    }
    for (kind, vmid), owner in sorted(others.items()):
        state = {True: "runs", False: "is stopped", None: "may run"}[owner.running]
        yield (
            f"{gpu.address} belongs to {kind} guest {vmid}, which {state} ({owner.detail}): "
            "take it from there first, or name that guest in allow_from"
        )


def set_gpus(
    host: Reader,
    run: Run,
    kind: str,
    vmid: int,
    wish: Wish,
    *,
    allow_from: Collection[int] = (),
    assume: bool = False,
    check: bool = False,
    sleep: Callable[[float], None] = time.sleep,
) -> dict[str, Any]:
    """Make a guest's configuration name these GPUs; return the result of module `guest_gpus`.

    A refusal or failure stands in its `msg`.

    Raises:
        GpuHostError: there is no such guest or GPU, or something could not be read.
    """
    if wish.mode is not None and not re.fullmatch("0[0-7]{3}", wish.mode):
        raise GpuHostError(f"mode {wish.mode} is not octal: write it in quotes, as in '0666'")
    situation = _settled(host, kind, vmid, wait=not check, sleep=sleep)
    wish = replace(wish, addresses=choose(situation.gpus, wish.addresses))
    plan = plan_guest(situation, wish, allow_from, assume=assume and check)
    guest = situation.guest
    former = {key: dict(settings_of(guest.config)).get(key) for key in plan.changes}
    result: dict[str, Any] = {
        "changed": bool(plan.changes),
        "guest": {
            "kind": kind,
            "vmid": vmid,
            "name": guest.name,
            "path": guest.path,
            "addresses": list(wish.addresses),
        },
        "writes": [
            {"path": guest.path, "key": key, "value": value} for key, value in plan.changes.items()
        ],
        "leftovers": [
            {"line": one.line, "remedy": one.remedy}
            for one in (leftovers(guest.config, situation.around.majors) if kind == "lxc" else ())
        ],
        "mapping_problems": list(plan.mapping_problems),
        "diff": {
            "before_header": guest.path,
            "after_header": guest.path,
            "before": _shown(former),
            "after": _shown(plan.changes),
        },
    }
    problems = [*plan.problems, *plan.mapping_problems]
    if problems:
        msg = f"{kind} guest {vmid} was not changed: {'; '.join(problems)}"
        return {**result, "changed": False, "msg": msg}
    if plan.changes and not check:
        failure = _apply(run, kind, vmid, plan.changes)
        if not failure:
            left = plan_guest(read_situation(host, kind, vmid), wish, allow_from).changes
            failure = f"it still differs in {', '.join(left)}" if left else ""
        if failure:
            undo = _apply(run, kind, vmid, former)
            now = f"and could not be set back: {undo}" if undo else "and is as before"
            msg = f"the configuration of {kind} guest {vmid} was not changed as wanted ({failure})"
            return {**result, "changed": bool(undo), "msg": f"{msg}, {now}"}
    return result


def _settled(
    host: Reader, kind: str, vmid: int, *, wait: bool, sleep: Callable[[float], None]
) -> Situation:
    """Read the situation, and wait for nodes that udev has yet to make after a binding."""
    situation = read_situation(host, kind, vmid)
    for _second in range(_NODE_SECONDS if wait and kind == "lxc" else 0):
        if not situation.absent.intersection(node_paths(situation.gpus).values()):
            break
        sleep(1.0)
        situation = read_situation(host, kind, vmid)
    return situation


def _apply(run: Run, kind: str, vmid: int, changes: Mapping[str, str | None]) -> str:
    """Change settings by Proxmox's tool; return what went wrong."""
    words = [TOOLS[kind], "set", str(vmid)]
    for key, value in changes.items():
        words += [f"--{key}", value] if value is not None else []
    gone = [key for key, value in changes.items() if value is None]
    words += ["--delete", ",".join(gone)] if gone else []
    try:
        run(words)
    except GpuHostError as error:
        return str(error)
    return ""


def _shown(changes: Mapping[str, str | None]) -> str:
    return "".join(f"{key}: {value}\n" for key, value in changes.items() if value is not None)
