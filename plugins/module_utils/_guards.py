# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.

"""Why a GPU must not be touched now: one guard per kind of reason, all in the table `GUARDS`.

Guards are pure functions over what was read. All are asked and all answers are reported together.
What could not be looked at counts as a reason. Some guards may be lifted by name; none lifts
another.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ansible_collections.gpuhost.inference.plugins.module_utils._gpu import Gpu
from ansible_collections.gpuhost.inference.plugins.module_utils._iommu import (
    HostMode,
    holds_group,
    identity_risks,
    is_old,
    needs_idle_group,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._owners import Owner, User

BUS_RESETS = ("bus", "cxl_bus")
DRIVER_OF = {"lxc": "nvidia", "qemu": "vfio-pci"}  # what a guest of this kind needs its GPUs on


@dataclass(frozen=True)
class Situation:
    """What a host is like, read once before anything is written.

    Attributes:
        gpus: all GPUs of the host, by address.
        mode: memory encryption, and the type a group gets at boot.
        release: of the kernel.
        drivers: PCI drivers that are there, as modules or built in.
        modeset: nvidia_drm runs with modeset, and so uses every GPU of nvidia itself.
        stuck: functions whose unbind never returned, each with a sentence.
        tried: GPUs on which this boot tries a type, each with a sentence.
        duties: what the host itself does with the other devices of the GPUs' groups, by address.
        sleepy: `power/control` files that read `auto`, by the function they matter for.
        restore: those among them that get `auto` back afterwards.
        bridges: the bridge above each GPU that can reset all that is below it (its file
            `reset_subordinate`); only of GPUs that offer no reset of the bus themselves.
        below: functions that are no part of a GPU's card, below the bridge above that GPU.
    """

    gpus: Mapping[str, Gpu]
    mode: HostMode
    release: str
    drivers: frozenset[str]
    modeset: bool
    stuck: Mapping[str, str]
    tried: Mapping[str, str]
    duties: Mapping[str, tuple[str, ...]]
    sleepy: Mapping[str, tuple[str, ...]]
    restore: frozenset[str]
    bridges: Mapping[str, str] = field(default_factory=dict)
    below: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Target:
    """What is to happen to one GPU.

    Attributes:
        gpu: as it is.
        driver: it shall have; `None` for none.
        moves: its driver changes, or is taken off for a while.
        type: its group shall get, `None` when that stays.
        by_name: the type was asked for by its name, not as `auto`.
        expect_id: the card that should be there.
        going: all functions that are without driver while the type is written.
        together: all functions the change is about.
        services: systemd units that may be stopped for the change.
        reset: how the card is reset while it has no driver, `None` when it is not.
        reset_writes: the files that are written for that and what they get, in order.
    """

    gpu: Gpu
    driver: str | None
    moves: bool
    type: str | None
    by_name: bool
    expect_id: str | None
    going: Collection[str]
    together: Collection[str]
    services: Collection[str]
    reset: str | None = None
    reset_writes: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True)
class Reason:
    """One reason against a change, with what was read and what to do."""

    id: str
    address: str
    evidence: str
    remedy: str
    liftable: bool
    accepted: bool

    def __str__(self) -> str:
        """Say it in a sentence."""
        lift = f" (or accept {self.id})" if self.liftable else ""
        return f"{self.address}: {self.evidence}: {self.remedy}{lift}"


@dataclass(frozen=True)
class Guard:
    """One kind of reason; `check` yields evidence and remedy for each case of it."""

    id: str
    liftable: bool
    check: Callable[[Situation, Target], Iterable[tuple[str, str]]]


def judge(
    situation: Situation, targets: Iterable[Target], accept: Collection[str] = ()
) -> list[Reason]:
    """Return all reasons against a change, those that were accepted by name included."""
    return [
        Reason(guard.id, target.gpu.address, *found, guard.liftable, guard.id in accept)
        for target in targets
        for guard in GUARDS
        for found in guard.check(situation, target)
    ]


def _wrong_card(_situation: Situation, target: Target) -> Iterator[tuple[str, str]]:
    expected = target.expect_id
    if expected and target.gpu.id != expected.lower():
        yield (
            f"it is {target.gpu.id}, not {expected}, so another card is there",
            "compare with gpu_info and correct the address, or what is expected",
        )


def _off_bus(_situation: Situation, target: Target) -> Iterator[tuple[str, str]]:
    """A card in D3cold is woken and read before it moves; in check mode it is left asleep."""
    gpu = target.gpu
    if not target.moves:
        return
    if gpu.config_readable is False:
        yield (
            "its configuration space reads all ones, so the card is off the bus",
            "power the host off and on",
        )
    elif gpu.config_readable is None and gpu.power.state != "D3cold":
        yield "its configuration space could not be read", "look at it with lspci -s, as root"
    if gpu.power.state == "error":
        yield "its power state is error: it did not wake", "power the host off and on"


def _stuck(situation: Situation, target: Target) -> Iterator[tuple[str, str]]:
    for function in (target.gpu.address, *(c.address for c in target.gpu.companions)):
        if function in situation.stuck:
            yield situation.stuck[function], "reboot the host"


def _trial_running(situation: Situation, target: Target) -> Iterator[tuple[str, str]]:
    if target.gpu.address in situation.tried and (target.moves or target.type is not None):
        yield (
            situation.tried[target.gpu.address],
            "reboot first, or confirm the trial (iommu_trial with state: confirmed)",
        )


def _sriov_vfs(_situation: Situation, target: Target) -> Iterator[tuple[str, str]]:
    count = target.gpu.sriov.num_vfs
    if target.moves and count:
        yield (
            f"it has {count} virtual functions, which would vanish",
            "write 0 to its sriov_numvfs first",
        )


def _mig(_situation: Situation, target: Target) -> Iterator[tuple[str, str]]:
    gpu = target.gpu
    if not target.moves or (target.driver == "nvidia" and target.reset is None):
        return
    if gpu.mig:
        yield (
            "it is divided into MIG instances (/proc/driver/nvidia/capabilities)",
            "delete the instances with nvidia-smi mig first",
        )
    elif gpu.mig is None and gpu.driver == "nvidia":
        yield (
            "whether it is divided into MIG instances could not be read",
            "look with nvidia-smi mig -lgi",
        )


def _in_use(situation: Situation, target: Target) -> Iterator[tuple[str, str]]:
    for user in target.gpu.users:
        through_vfio = user.node.startswith("/dev/vfio/")
        if through_vfio and not target.moves and target.type is not None:
            yield f"{_who(user)} has {user.node} open", "shut that guest down first"
        elif target.moves and not leaves_when_asked(user, target.services):
            yield f"in use by {_who(user)} through {user.node}", "stop it first"


def leaves_when_asked(user: User, services: Collection[str]) -> bool:
    """Tell whether a process lets go of a GPU by itself: the persistence daemon, a listed unit."""
    return is_persistence(user) or host_unit(user) in services


def is_persistence(user: User) -> bool:
    """Tell whether a process is the host's nvidia-persistenced."""
    program = user.command.split(" ", 1)[0].rpartition("/")[2]
    return program == "nvidia-persistenced" and _on_host(user)


def host_unit(user: User) -> str | None:
    """Return the systemd unit of a process of the host itself, not of a container."""
    return user.unit if _on_host(user) else None


def _on_host(user: User) -> bool:
    return (user.cgroup or "").startswith("/system.slice/")


def _who(user: User) -> str:
    return f"process {user.pid} ({user.command[:80]}; cgroup {user.cgroup})"


def _in_use_unknown(situation: Situation, target: Target) -> Iterator[tuple[str, str]]:
    idle = target.type is not None and _needs_idle(target)
    if target.moves or idle:
        for unknown in target.gpu.users_unknown:
            yield f"may be in use: {unknown}", "see to that, as root on the host itself"


def _needs_idle(target: Target) -> bool:
    group = target.gpu.iommu_group
    return (
        group is not None and target.type is not None and needs_idle_group(group.type, target.type)
    )


def _guest_running(_situation: Situation, target: Target) -> Iterator[tuple[str, str]]:
    if target.moves:
        for guest in sorted({_guest(owner) for owner in target.gpu.owners if owner.running}):
            yield f"belongs to {guest}, which runs", "shut it down first"


def _guest_unknown(_situation: Situation, target: Target) -> Iterator[tuple[str, str]]:
    for owner in target.gpu.owners if target.moves else ():
        if owner.running is None:
            yield (
                f"belongs to {_guest(owner)}, and whether that runs is not known ({owner.detail})",
                "look with pct status or qm status",
            )


def _guest(owner: Owner) -> str:
    return f"{owner.kind} guest {owner.vmid}"


def _guest_config(_situation: Situation, target: Target) -> Iterator[tuple[str, str]]:
    for owner in target.gpu.owners:
        needed = DRIVER_OF[owner.kind]
        leaves = target.gpu.driver == needed and target.driver != needed
        if leaves and owner.source == "config" and owner.running is False:
            harm = (
                "would no longer start without that device node"
                if owner.kind == "lxc"
                else "would take the GPU from its new driver at its start, whoever uses it then"
            )
            yield (
                f"the configuration of {_guest(owner)} names it ({owner.detail}), and that guest "
                f"{harm}",
                "take it out of the configuration first, as the playbook assign_gpus does",
            )


def _foreign_member(situation: Situation, target: Target) -> Iterator[tuple[str, str]]:
    group = target.gpu.iommu_group
    if group is None or not target.moves or target.driver == "nvidia":
        return
    for member in group.members:
        if member.address in target.together or member.class_.startswith(("0x0600", "0x0604")):
            continue
        duties = "".join(f"; {duty}" for duty in situation.duties.get(member.address, ()))
        yield (
            f"its IOMMU group {group.number} also holds {member.address} (class {member.class_}, "
            f"driver {member.driver or 'none'}{duties})",
            "a GPU, so list it too"
            if member.is_gpu
            else "it would have to go along, and is none of a GPU's own functions",
        )


def _foreign_type(situation: Situation, target: Target) -> Iterator[tuple[str, str]]:
    """A group has one type: that of others changes too (Documentation/ABI, iommu_groups)."""
    group = target.gpu.iommu_group
    for member in group.members if group and target.type else ():
        if member.address in target.together or member.class_.startswith(("0x0600", "0x0604")):
            continue
        duties = "".join(f"; {duty}" for duty in situation.duties.get(member.address, ()))
        yield (
            f"the type would change for {member.address} as well (class {member.class_}, driver "
            f"{member.driver or 'none'}{duties}), which is in the same IOMMU group",
            "a GPU, so name it too" if member.is_gpu else "leave the type as it is",
        )


def _display(_situation: Situation, target: Target) -> Iterator[tuple[str, str]]:
    if target.moves and (target.driver != "nvidia" or target.reset is not None):
        for sign in target.gpu.display:
            yield sign, "give the host another display, or none"


def _reset_reach(situation: Situation, target: Target) -> Iterator[tuple[str, str]]:
    """A reset of the bus reaches everything below the bridge (pci_bridge_secondary_bus_reset)."""
    others = situation.below.get(target.gpu.address, ())
    if others and _resets_bus(target):
        yield (
            f"a reset of its bus would also reset {', '.join(others)}, which are not of its card",
            "use a method that resets the GPU alone, or power the host off",
        )


def _resets_bus(target: Target) -> bool:
    """Tell whether one of the writes resets a bus, whatever the method is called that was asked.

    The kernel uses the first method in `reset_method` that does not fail with ENOTTY.
    """
    methods: Collection[str] = target.gpu.reset_methods
    for path, value in target.reset_writes:
        if path.endswith("/reset_method"):
            methods = value.split()
        elif path.endswith("/reset_subordinate") or set(methods) & set(BUS_RESETS):
            return True
    return False


def _kernel_client(situation: Situation, target: Target) -> Iterator[tuple[str, str]]:
    if target.moves and target.gpu.driver == "nvidia" and situation.modeset:
        yield (
            "nvidia_drm runs with modeset and holds every GPU of nvidia itself, so an unbind may "
            "wait for ever",
            "unload nvidia_drm, or set options nvidia_drm modeset=0 and reload it",
        )


def _sibling_taken(situation: Situation, target: Target) -> Iterator[tuple[str, str]]:
    """Loading a driver binds every free device it knows (drivers/base/dd.c)."""
    if not target.moves or target.driver != "nvidia" or "nvidia" in situation.drivers:
        return
    free = [
        gpu.address
        for gpu in situation.gpus.values()
        if gpu.driver is None and not gpu.driver_override and gpu.address not in target.together
    ]
    if free:
        yield (
            f"nvidia must be loaded for it, and would take {', '.join(free)} as well, which have "
            "neither driver nor driver_override",
            "name them too, with the driver they are to have",
        )


def _type_held(situation: Situation, target: Target) -> Iterator[tuple[str, str]]:
    group = target.gpu.iommu_group
    if group is None or not _needs_idle(target):
        return
    bound = [
        f"{member.address} (driver {member.driver})"
        for member in group.members
        if member.address not in target.going and holds_group(member.driver, situation.release)
    ]
    if bound:
        yield (
            f"IOMMU group {group.number} cannot go from {group.type} to {target.type} while a "
            f"driver that uses DMA is bound, here {', '.join(bound)}",
            "give the gpu module a type, which takes its own GPUs off their driver meanwhile",
        )
    if is_old(situation.release) and len(group.members) > 1:
        yield (
            f"kernel {situation.release} cannot change the type of a group with several devices, "
            f"and IOMMU group {group.number} has {len(group.members)}",
            "boot a kernel from 6.4 on",
        )


def _identity(id_: str) -> Callable[[Situation, Target], Iterator[tuple[str, str]]]:
    def check(situation: Situation, target: Target) -> Iterator[tuple[str, str]]:
        if target.type == "identity":
            fsp = target.by_name and target.gpu.has_fsp != "no"
            for guard, evidence, remedy in identity_risks(situation.mode, fsp=fsp):
                if guard == id_:
                    yield evidence, remedy

    return check


GUARDS = (
    Guard("wrong-card", False, _wrong_card),
    Guard("off-bus", False, _off_bus),
    Guard("stuck", False, _stuck),
    Guard("trial-running", False, _trial_running),
    Guard("sriov-vfs", False, _sriov_vfs),
    Guard("mig", True, _mig),
    Guard("in-use", False, _in_use),
    Guard("in-use-unknown", False, _in_use_unknown),
    Guard("guest-running", False, _guest_running),
    Guard("guest-unknown", False, _guest_unknown),
    Guard("guest-config", True, _guest_config),
    Guard("foreign-member", False, _foreign_member),
    Guard("foreign-type", True, _foreign_type),
    Guard("display", True, _display),
    Guard("kernel-client", True, _kernel_client),
    Guard("sibling-taken", False, _sibling_taken),
    Guard("type-held", False, _type_held),
    Guard("reset-reach", False, _reset_reach),
    Guard("snp-identity", False, _identity("snp-identity")),
    Guard("sme-identity", True, _identity("sme-identity")),
    Guard("fsp-identity", True, _identity("fsp-identity")),
)
LIFTABLE = tuple(guard.id for guard in GUARDS if guard.liftable)
