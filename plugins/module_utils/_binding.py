# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.

"""Give GPUs to `nvidia`, to `vfio-pci` or to no driver, whole cards, one transaction.

Only `driver_override` is used: it names one device, where `new_id` would take every free sibling
with the same id (drivers/pci/pci-driver.c). It stays set on every GPU, also on `nvidia`, since
Proxmox itself writes `new_id` when it starts a virtual machine.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from ansible_collections.gpuhost.inference.plugins.module_utils._gpu import Gpu, read_gpus
from ansible_collections.gpuhost.inference.plugins.module_utils._kernel_write import (
    MODPROBE,
    Machine,
    Outcome,
    Write,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._pci import (
    DEVICES,
    DRIVERS,
    as_result,
    read_device,
    read_devices,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader

CHOICES = ("nvidia", "vfio-pci", "none")
NO_DRIVER = "none"  # as an override it names no driver, so that nothing binds the device

ANY = "any"  # a driver of the kernel's choice

_PROBE = "/sys/bus/pci/drivers_probe"


@dataclass(frozen=True)
class Binding:
    """What one function has, or shall have."""

    driver: str | None
    override: str | None


@dataclass(frozen=True)
class Situation:
    """Everything a plan depends on, read before anything is written."""

    gpus: tuple[Gpu, ...]
    lost: frozenset[str]  # addresses whose configuration space reads all ones
    loaded: frozenset[str]  # drivers present, as modules or built in
    sleepy: Mapping[str, tuple[str, ...]]  # address to power/control files that read `auto`
    restore: frozenset[str]  # those among them that get `auto` back afterwards


def read_situation(host: Reader, addresses: Sequence[str]) -> Situation:
    """Read what a plan for these GPUs depends on.

    Raises:
        GpuHostError: an address is wrong, or something could not be read.
    """
    gpus = tuple(read_gpus(host, addresses))
    sleepy, restore = {}, set()
    for address, present in (item for gpu in gpus for item in _present(gpu).items()):
        device = read_device(host, address)
        port = device.port if device else None
        files = [f"{DEVICES}/{one}/power/control" for one in (port, address) if one]
        sleepy[address] = tuple(file for file in files if host.text(file) == "auto")
        # vfio-pci sets `auto` on its own devices, and `on` when it lets go (vfio_pci_core.c)
        own = files[-1] if present.driver == "vfio-pci" else None
        restore |= {file for file in sleepy[address] if file != own}
    return Situation(
        gpus=gpus,
        lost=frozenset(
            gpu.address
            for gpu in gpus
            if (host.data(f"{DEVICES}/{gpu.address}/config") or b"")[:4] == b"\xff" * 4
        ),
        loaded=frozenset(host.names(DRIVERS)),
        sleepy=sleepy,
        restore=frozenset(restore),
    )


def _present(gpu: Gpu) -> dict[str, Binding]:
    """Return what each function of a card has now, the GPU first."""
    present = {gpu.address: Binding(gpu.driver, gpu.driver_override)}
    for companion in gpu.companions:
        present[companion.address] = Binding(companion.driver, companion.driver_override)
    return present


def _wanted(gpu: Gpu, driver: str) -> dict[str, Binding]:
    """Return what each function shall have.

    With `nvidia`, companions that were set aside get the driver the kernel finds for them: they
    lose their override, and `driver` is what they have now, for nothing is demanded.
    """
    wish = Binding(None if driver == NO_DRIVER else driver, driver)
    wanted = {gpu.address: wish}
    for companion in gpu.companions:
        free = Binding(companion.driver, companion.driver_override)
        if companion.driver_override in ("vfio-pci", NO_DRIVER):
            free = Binding(ANY, None)
        wanted[companion.address] = free if driver == "nvidia" else wish
    return wanted


def plan_binding(situation: Situation, driver: str, expect_id: str | None = None) -> list[Write]:
    """Return the writes that bind cards to a driver, in order; none when they are bound already.

    Raises:
        GpuHostError: all reasons why some card must not be touched, together.
    """
    problems, now, wanted = [], {}, {}
    for gpu in situation.gpus:
        if expect_id and gpu.id != expect_id.lower():
            problems.append(f"{gpu.address} is {gpu.id}, not {expect_id}: another card is there")
        have, want = _present(gpu), _wanted(gpu, driver)
        if any(want[address].driver != have[address].driver for address in have):
            problems += [f"{gpu.address}: {text}" for text in _dangers(situation, gpu, driver)]
        now.update(have)
        wanted.update(want)
    if problems:
        raise GpuHostError(f"nothing was changed: {'; '.join(problems)}")
    return _moves(situation, now, wanted)


def _dangers(situation: Situation, gpu: Gpu, driver: str) -> list[str]:
    """Return why the driver of this card must not be changed now."""
    dangers = []
    if gpu.address in situation.lost:
        dangers.append(
            "its configuration space reads all ones, the card is off the bus: power the host off "
            "and on"
        )
    if gpu.sriov.num_vfs:
        dangers.append(
            f"it has {gpu.sriov.num_vfs} virtual functions, which would vanish: write 0 to its "
            "sriov_numvfs first"
        )
    dangers += [
        f"in use by process {user.pid} ({user.command[:80]}; cgroup {user.cgroup}) through "
        f"{user.node}: stop it first"
        for user in gpu.users
    ]
    dangers += [f"may be in use: {unknown}" for unknown in gpu.users_unknown]
    dangers += [
        f"belongs to {guest}, which runs: shut it down first"
        for guest in sorted({f"{o.kind} guest {o.vmid}" for o in gpu.owners if o.running})
    ]
    dangers += [
        f"belongs to {o.kind} guest {o.vmid}, and whether that runs is not known ({o.detail})"
        for o in gpu.owners
        if o.running is None
    ]
    group = gpu.iommu_group
    ours = {address for target in situation.gpus for address in _present(target)}
    if group and driver != "nvidia":
        dangers += [
            f"its IOMMU group {group.number} also holds {member.address} (class {member.class_}, "
            f"driver {member.driver or 'none'}), "
            + ("a GPU: list it too" if member.is_gpu else "which would have to go along: refused")
            for member in group.members
            if member.address not in ours and not member.class_.startswith(("0x0600", "0x0604"))
        ]
    return dangers


def _moves(
    situation: Situation, now: Mapping[str, Binding], wanted: Mapping[str, Binding]
) -> list[Write]:
    """Return the writes from one state to another: overrides, unbind, probe."""
    writes = [
        Write(f"{DEVICES}/{address}/driver_override", want.override or "")
        for address, want in wanted.items()
        if now[address].override != want.override
    ]
    moving = [address for address in wanted if now[address].driver != wanted[address].driver]
    drivers = {wanted[address].driver for address in moving} - situation.loaded - {None, ANY}
    writes += [Write(MODPROBE, driver) for driver in sorted(filter(None, drivers))]
    awake = sorted({file for address in moving for file in situation.sleepy.get(address, ())})
    writes += [Write(file, "on") for file in awake]
    writes += [  # companions first: the GPU's own function carries the card
        Write(f"{DRIVERS}/{now[address].driver}/unbind", address)
        for address in reversed(moving)
        if now[address].driver
    ]
    writes += [Write(_PROBE, address) for address in moving if wanted[address].driver]
    return writes + [Write(file, "auto") for file in awake if file in situation.restore]


def bind_gpus(
    machine: Machine,
    addresses: Sequence[str],
    driver: str,
    *,
    expect_id: str | None = None,
    check: bool = False,
) -> dict[str, Any]:
    """Bind GPUs and return the result of the module `gpu`; a failure stands in its `msg`.

    Raises:
        GpuHostError: nothing was changed, and why.
    """
    situation = read_situation(machine.host, addresses)
    plan = plan_binding(situation, driver, expect_id)
    before = {address: one for gpu in situation.gpus for address, one in _present(gpu).items()}
    wanted = {
        address: one for gpu in situation.gpus for address, one in _wanted(gpu, driver).items()
    }
    result: dict[str, Any] = {"changed": bool(plan), "rolled_back": False}
    gpus, after, writes = situation.gpus, wanted, plan
    if plan and not check:
        others = _drivers_of_others(machine.host, before)
        writes, failure, stuck = _apply(machine, plan, wanted)
        if not failure:
            failure = _changed_others(others, _drivers_of_others(machine.host, before))
        if failure and not stuck:
            writes += _undo(machine, situation, before)
        gpus = tuple(read_gpus(machine.host, addresses))
        after = {address: one for gpu in gpus for address, one in _present(gpu).items()}
        result["changed"] = after != before
        if failure:
            result["rolled_back"] = after == before
            result["msg"] = _report(failure, stuck, before, after)
    result["writes"] = [as_result(step) for step in writes]
    result["gpus"] = [as_result(gpu) for gpu in gpus]
    result["diff"] = {"before": _shown(before), "after": _shown(after)}
    return result


def _shown(state: Mapping[str, Binding]) -> dict[str, dict[str, Any]]:
    return {address: as_result(binding) for address, binding in sorted(state.items())}


def _apply(
    machine: Machine, plan: Sequence[Write], wanted: Mapping[str, Binding]
) -> tuple[list[Write], str, bool]:
    """Carry out a plan; return what was written, what failed, and whether a write is stuck."""
    done = []
    for step in plan:
        done.append(step)
        outcome = machine.write(step.path, step.value, machine.timeout)
        if outcome.state == "stuck":
            return done, _explain(step, outcome, machine.timeout), True
        # probing answers with success or EINVAL whatever happens: the driver link decides below
        if outcome.state == "refused" and step.path != _PROBE:
            return done, _explain(step, outcome, machine.timeout), False
    for address, want in wanted.items():
        if want.driver == ANY or _driver(machine.host, address) == want.driver:
            continue
        if want.driver is None:
            return done, f"{address} was unbound, and something bound it again", False
        step = Write(f"{DRIVERS}/{want.driver}/bind", address)  # once more, for the kernel's reason
        done.append(step)
        outcome = machine.write(step.path, step.value, machine.timeout)
        if outcome.state != "ok" or _driver(machine.host, address) != want.driver:
            stuck = outcome.state == "stuck"
            return done, _explain(step, outcome, machine.timeout), stuck
    return done, "", False


def _undo(machine: Machine, situation: Situation, before: Mapping[str, Binding]) -> list[Write]:
    """Bring back the former drivers, then the former overrides; return what was written."""
    gpus = read_gpus(machine.host, [gpu.address for gpu in situation.gpus])
    now = {address: one for gpu in gpus for address, one in _present(gpu).items()}
    # the former driver's name forces it; the former override, often none, follows afterwards
    forced = {
        address: Binding(one.driver, one.driver or one.override) for address, one in before.items()
    }
    steps = _moves(situation, now, forced)
    steps += [
        Write(f"{DEVICES}/{address}/driver_override", one.override or "")
        for address, one in before.items()
        if one.override != forced[address].override
    ]
    steps += [  # where the plan stopped between waking a device and moving it
        Write(file, "auto")
        for file in sorted(situation.restore)
        if machine.host.text(file) == "on" and Write(file, "auto") not in steps
    ]
    for at, step in enumerate(steps):
        if machine.write(step.path, step.value, machine.timeout).state == "stuck":
            return steps[: at + 1]
    return steps


def _driver(host: Reader, address: str) -> str | None:
    device = read_device(host, address)
    return device.driver if device else None


def _drivers_of_others(host: Reader, ours: Mapping[str, Binding]) -> dict[str, str | None]:
    devices = read_devices(host)
    return {one.address: one.driver for one in devices if one.is_gpu and one.address not in ours}


def _changed_others(before: Mapping[str, str | None], after: Mapping[str, str | None]) -> str:
    changes = [
        f"{address} went from driver {driver or 'none'} to {after.get(address) or 'none'}"
        for address, driver in before.items()
        if after.get(address) != driver
    ]
    return "other GPUs changed meanwhile: " + "; ".join(changes) if changes else ""


def _explain(step: Write, outcome: Outcome, timeout: float) -> str:
    """Say in a sentence what became of a write that did not do its work."""
    what = f"writing {step.value} to {step.path}"
    if outcome.state == "stuck":
        return (
            f"{what} has not returned within {timeout:g} s and is pending in the kernel. A driver "
            "waits so for a user that no process shows: nvidia_drm with modeset, nvidia_uvm, a "
            "peer memory client. It may still happen; nothing was undone; a reboot is needed"
        )
    if step.path == MODPROBE:
        return f"module {step.value} could not be loaded: {outcome.detail}"
    meanings = {
        errno.EPERM: "EPERM: the driver refused the card in its probe; see the kernel log",
        errno.EBUSY: "EBUSY: it is bound already, or VFIO holds its IOMMU group open",
        errno.ENODEV: "ENODEV: it is not bound to that driver, does not match it, or is gone",
        errno.EACCES: "EACCES: run this as root on the host itself, not in a container",
    }
    if outcome.state == "ok":
        return f"{what} succeeded, but the driver is not bound; see the kernel log"
    return f"{what} was refused, {meanings.get(outcome.errno or 0, outcome.detail)}"


def _report(
    failure: str, stuck: bool, before: Mapping[str, Binding], after: Mapping[str, Binding]
) -> str:
    """Say what failed and what holds now. The driver link goes before the driver lets go."""
    if after == before and not stuck:
        return f"{failure}; all is as it was before"
    drivers = ", ".join(f"{address} {one.driver or 'none'}" for address, one in after.items())
    undone = "" if stuck else "not all could be put back; "
    return f"{failure}; {undone}drivers shown now: {drivers}"
