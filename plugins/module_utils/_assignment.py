# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.

"""What it takes to give a host's GPUs to the guests its layout names: whom to stop, bind, start."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ansible_collections.gpuhost.inference.plugins.module_utils._errors import UnreadableError
from ansible_collections.gpuhost.inference.plugins.module_utils._gpu import Gpu, read_gpus
from ansible_collections.gpuhost.inference.plugins.module_utils._guests import (
    TOOLS,
    Situation,
    Surroundings,
    Wish,
    claims_of,
    node_paths,
    numbered,
    parse_options,
    plan_guest,
    read_surroundings,
    settings_of,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._iommu import default_type
from ansible_collections.gpuhost.inference.plugins.module_utils._layout import (
    KINDS,
    Entry,
    entry_as_result,
    resolve_layout,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._owners import Guest, read_guests
from ansible_collections.gpuhost.inference.plugins.module_utils._pci import read_device
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader

KEPT = "/etc/gpuhost/layout.json"  # the layout that role gpu_passthrough keeps at boot
MEMORY = "/var/lib/gpuhost/assign.json"  # which guests an unfinished run had stopped

_LAST = 1 << 31  # guests without a startup order come last, as in Proxmox


@dataclass(frozen=True)
class Binding:
    """A GPU that has to get another driver or group type."""

    address: str
    driver: str
    type: str | None
    wanted_driver: str
    wanted_type: str | None


@dataclass(frozen=True)
class Move:
    """What the layout asks of one of its guests."""

    kind: str
    vmid: int
    name: str | None
    path: str | None
    running: bool | None
    has: tuple[str, ...]  # GPUs its configuration names
    wants: tuple[str, ...]
    keeps: tuple[str, ...]  # those of `has` that it may name all the time
    changes: bool  # its configuration
    loses: bool  # something must go from its configuration before the GPUs are bound
    gains: bool  # something must be added to it afterwards
    stop: bool
    start: bool
    fit: bool  # it may be started as it is: its GPUs are there, on their driver, and its own


@dataclass(frozen=True)
class Assignment:
    """All that has to happen; `guests` in the order in which Proxmox starts them."""

    guests: tuple[Move, ...]
    bindings: tuple[Binding, ...]
    problems: tuple[str, ...]
    needed: bool

    @property
    def steps(self) -> list[str]:
        """Return what is to be done, a sentence each, in order."""
        lost = [(move, set(move.has) - set(move.wants)) for move in self.guests]
        gained = [(move, set(move.wants) - set(move.has)) for move in self.guests]
        return [
            *(f"shut down {_label(move)}" for move in reversed(self.guests) if move.stop),
            *(f"take {', '.join(sorted(gpus))} from {_label(m)}" for m, gpus in lost if gpus),
            *(_sentence(binding) for binding in self.bindings),
            *(f"give {', '.join(sorted(gpus))} to {_label(m)}" for m, gpus in gained if gpus),
            *(
                f"write the device entries of {_label(move)} anew"
                for move in self.guests
                if move.changes and move.has == move.wants
            ),
            *(f"start {_label(move)}" for move in self.guests if move.start),
        ]

    @property
    def state(self) -> list[str]:
        """Return how things stand, a sentence each guest."""
        words = {True: "runs", False: "is stopped", None: "may or may not run"}
        return [
            f"{_label(move)} {words[move.running]}, its configuration names "
            f"{', '.join(move.has) or 'no GPU'}"
            + ("" if move.fit else ", and it must not be started so")
            for move in self.guests
        ]


def _label(move: Move | Guest) -> str:
    return f"{move.kind} {move.vmid}" + (f" ({move.name})" if move.name else "")


def _sentence(binding: Binding) -> str:
    parts = []
    if binding.driver != binding.wanted_driver:
        parts.append(f"bind {binding.address} to {binding.wanted_driver} ({binding.driver} now)")
    if binding.type != binding.wanted_type:
        parts.append(
            f"set the group type of {binding.address} to {binding.wanted_type} ({binding.type} now)"
        )
    return " and ".join(parts)


def plan_assignment(
    entries: Sequence[Entry],
    gpus: Sequence[Gpu],
    guests: Sequence[Guest],
    around: Surroundings,
    *,
    default: str | None = None,
    remembered: Collection[int] = (),
    release: Collection[int] = (),
    services: Collection[str] = (),
) -> Assignment:
    """Plan what brings the GPUs to the guests of the layout.

    Args:
        entries: Of the resolved layout.
        gpus: All GPUs of the host.
        guests: All guests of the host.
        around: What configurations are judged by.
        default: Type that `auto` stands for, `None` when not known.
        remembered: Guests that an unfinished run had stopped.
        release: Guests that may lose all their GPUs, though no entry names them.
        services: Units that are stopped while GPUs move, so their processes are no users.
    """
    wants: dict[int, set[str]] = {vmid: set() for vmid in release}
    for entry in entries:
        if entry.guest:
            wants.setdefault(entry.guest.vmid, set()).update(entry.addresses)
    ours = sorted((guest for guest in guests if guest.vmid in wants), key=_start_order)
    bindings = tuple(_bindings(entries, gpus, default))
    moving = {one.address for one in bindings if _unbinds(one)}
    moves, problems = [], [*_foreign(entries, gpus, wants), *_left_down(guests, wants, remembered)]
    problems += [
        f"guest {vmid} of the option release is not on this host"
        for vmid in sorted(set(release) - {guest.vmid for guest in guests})
    ]
    for guest in ours:
        wish = Wish(tuple(sorted(wants[guest.vmid])))
        situation = Situation(guest, tuple(gpus), around, frozenset())
        everyone = {one.vmid for one in guests}
        plan = plan_guest(situation, wish, everyone, assume=True)
        has = {address for cards in claims_of(guest, gpus).values() for address in cards}
        keeps = tuple(sorted(has & wants[guest.vmid]))
        less = plan_guest(situation, Wish(keeps), everyone, assume=True)
        # without its driver a GPU has no node, so its line in a container is one of nobody
        changes = bool(plan.changes)
        touched = changes or bool(moving & (has | wants[guest.vmid]))
        moves.append(
            Move(
                kind=guest.kind,
                vmid=guest.vmid,
                name=guest.name,
                path=guest.path,
                running=guest.running,
                has=tuple(sorted(has)),
                wants=wish.addresses,
                keeps=keeps,
                changes=changes,
                loses=bool(less.changes),
                gains=keeps != wish.addresses,
                stop=touched and guest.running is True,
                start=(touched and guest.running is True)
                or (guest.vmid in remembered and guest.running is False),
                fit=not any(_unfit(guest, gpus, around)),
            )
        )
        said = [*plan.problems, *plan.mapping_problems] if touched else []
        problems += [f"{guest.kind} guest {guest.vmid}: {text}" for text in said]
        if touched and guest.running is None:
            problems.append(f"whether {guest.kind} guest {guest.vmid} runs could not be found out")
        if touched and dict(settings_of(guest.config)).get("lock"):
            problems.append(f"{guest.kind} guest {guest.vmid} is locked: wait until that is over")
    problems += _other_users(gpus, moving, [move.vmid for move in moves if move.stop], services)
    needed = bool(bindings) or any(move.changes or move.start for move in moves)
    return Assignment(tuple(moves), bindings, tuple(problems), needed)


def _start_order(guest: Guest) -> tuple[int, int]:
    """Return a guest's place in Proxmox's start order: `startup: order=N`, then its number."""
    order = parse_options(dict(guest.config).get("startup", ""), "order").get("order", "")
    return (int(order) if re.fullmatch("[0-9]{1,9}", order) else _LAST, guest.vmid)


def _bindings(
    entries: Sequence[Entry], gpus: Sequence[Gpu], default: str | None
) -> Iterator[Binding]:
    """Yield the GPUs whose driver or group type is not that of their entry."""
    present = {gpu.address: gpu for gpu in gpus}
    for entry in entries:
        for address in entry.addresses:
            gpu = present[address]
            type_ = gpu.iommu_group.type if gpu.iommu_group else None
            wanted = default if entry.iommu_type == "auto" else entry.iommu_type
            found = Binding(address, gpu.driver or "none", type_, entry.driver, wanted or type_)
            if (found.driver, found.type) != (found.wanted_driver, found.wanted_type):
                yield found


def _unbinds(binding: Binding) -> bool:
    """Tell whether nobody may use the GPU meanwhile: only `DMA` to `DMA-FQ` is done below a driver.

    Source: kernel, Documentation/ABI/testing/sysfs-kernel-iommu_groups.
    """
    lazy = (binding.type, binding.wanted_type) == ("DMA", "DMA-FQ")
    return binding.driver != binding.wanted_driver or not (
        binding.type == binding.wanted_type or (lazy and binding.driver != "vfio-pci")
    )


def _foreign(entries: Sequence[Entry], gpus: Sequence[Gpu], ours: Collection[int]) -> list[str]:
    """Return the guests that have a GPU of the layout and are not the layout's to change."""
    named = {address for entry in entries for address in entry.addresses}
    states = {True: "runs", False: "is stopped", None: "may run"}
    found = {
        f"{gpu.address} belongs to {owner.kind} guest {owner.vmid}, which {states[owner.running]} "
        f"and is not in the layout ({owner.detail}), so it is neither stopped nor changed: take "
        "the GPU out of that guest yourself, or name its number in release if the guest is yours"
        for gpu in gpus
        for owner in gpu.owners
        if gpu.address in named and owner.vmid not in ours
        if owner.source == "config" or owner.running is not False
    }
    return sorted(found)


def _left_down(
    guests: Sequence[Guest], ours: Collection[int], remembered: Collection[int]
) -> list[str]:
    """Return the guests that an unfinished run stopped, and that no plan of ours starts again."""
    return [
        f"an unfinished run stopped {_label(guest)}, which is still stopped and which the layout "
        f"does not name: name its number in release to have it started, or start it yourself "
        f"({TOOLS[guest.kind]} start {guest.vmid}); if it is to stay stopped, take its number out "
        f"of {MEMORY}"
        for guest in guests
        if guest.vmid in remembered and guest.vmid not in ours and guest.running is False
    ]


def _other_users(
    gpus: Sequence[Gpu],
    moving: Collection[str],
    stopped: Collection[int],
    services: Collection[str],
) -> list[str]:
    """Return the processes that will still have a moving GPU open when the guests are stopped."""
    return [
        f"{gpu.address} is in use by process {user.pid} ({user.command[:80]}; cgroup "
        f"{user.cgroup}), which no guest of the layout runs: stop it first"
        for gpu in gpus
        for user in gpu.users
        if gpu.address in moving
        if user.unit not in services
        if not any(_runs_in(user.cgroup or "", vmid) for vmid in stopped)
    ]


def _runs_in(cgroup: str, vmid: int) -> bool:
    """Tell whether a cgroup is a guest's: `lxc/ID`, LXC's own name, or QEMU's scope."""
    return bool(
        re.search(rf"/(lxc/{vmid}|lxc\.payload\.{vmid}|qemu\.slice/{vmid}\.scope)(/|$)", cgroup)
    )


def _unfit(guest: Guest, gpus: Sequence[Gpu], around: Surroundings) -> Iterator[str]:
    """Yield why a guest must not be started with its configuration as it is."""
    claims = claims_of(guest, gpus)
    named = {address for cards in claims.values() for address in cards}
    for gpu in gpus:
        if gpu.address in named:
            if gpu.driver != KINDS[guest.kind]:
                yield f"{gpu.address} is on driver {gpu.driver}"
            others = [one for one in gpu.owners if (one.kind, one.vmid) != (guest.kind, guest.vmid)]
            if any(one.running is not False for one in others):
                yield f"{gpu.address} is another guest's"
    nodes = set(node_paths(gpus).values())
    if guest.kind == "lxc":
        for options in numbered(settings_of(guest.config), "dev", "path").values():
            path = options.get("path", "")
            if path in around.absent or (
                re.fullmatch(r"/dev/nvidia\d+", path) and path not in nodes
            ):
                yield f"{path} is no device of a GPU"


def read_assignment(
    host: Reader,
    layout: object,
    unassigned: str = "refuse",
    *,
    release: Collection[int] = (),
    services: Collection[str] = (),
) -> dict[str, Any]:
    """Read a host and return the result of module `guest_gpus_info`.

    Args:
        host: The host.
        layout: The declared layout as its user wrote it.
        unassigned: `keep` allows GPUs that no layout entry names.
        release: See `plan_assignment`.
        services: See `plan_assignment`.

    Raises:
        UnreadableError: something could not be read, so nothing can be planned.
    """
    gpus, guests = read_gpus(host), read_guests(host)

    def describe(address: str) -> str | None:
        device = read_device(host, address)
        return f"{device.id}, class {device.class_}" if device else None

    # what guests name now is what is about to change, so it is no problem of the layout
    found = resolve_layout(
        layout,
        [replace(gpu, owners=()) for gpu in gpus],
        {(guest.kind, guest.vmid) for guest in guests},
        unassigned,
        describe,
    )
    remembered = read_memory(host)
    plan = plan_assignment(
        found.entries,
        gpus,
        guests,
        read_surroundings(host, guests),
        default=default_type(host),
        remembered=remembered,
        release=release,
        services=services,
    )
    return {
        "guests": [asdict(move) for move in plan.guests],
        "bindings": [asdict(binding) for binding in plan.bindings],
        "entries": [entry_as_result(entry) for entry in found.entries],
        "problems": [*found.problems, *plan.problems],
        "needed": plan.needed,
        "kept": host.exists(KEPT),
        "forget": bool(remembered)
        and not any(one.vmid in remembered and one.running is not True for one in guests),
        "steps": plan.steps,
        "state": plan.state,
    }


def read_memory(host: Reader) -> frozenset[int]:
    """Return the guests that an unfinished run had stopped.

    Raises:
        UnreadableError: the file is there and is not what a run writes.
    """
    text = host.text(MEMORY)
    try:
        content = json.loads(text) if text else {"stopped": []}
    except ValueError as error:
        raise _not_ours(str(error)) from error
    stopped = content.get("stopped") if isinstance(content, dict) else None
    if not isinstance(stopped, list) or not all(map(_is_number, stopped)):
        raise _not_ours("it has no list of guest numbers by the name stopped")
    return frozenset(stopped)


def _is_number(vmid: object) -> bool:
    return isinstance(vmid, int) and not isinstance(vmid, bool)


def _not_ours(why: str) -> UnreadableError:
    return UnreadableError(
        f"{MEMORY} is not what a run of assign_gpus writes ({why}): look which guests should "
        "run, start them, and remove the file"
    )
