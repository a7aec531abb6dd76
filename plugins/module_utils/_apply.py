# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.

"""Carry out a planned change, verify it by reading back, and put back what was there before."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from ansible_collections.gpuhost.inference.plugins.module_utils._fault_log import collect
from ansible_collections.gpuhost.inference.plugins.module_utils._faults import (
    conclude,
    read_subjects,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._gpu import Gpu, read_gpus
from ansible_collections.gpuhost.inference.plugins.module_utils._guards import (
    Situation,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._iommu import (
    GROUPS,
    explain_refusal,
    holds_group,
    read_group,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._kernel_write import (
    MODPROBE,
    Machine,
    Outcome,
    Write,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._moves import (
    ANY,
    PROBE,
    Plan,
    moves,
    present,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._pci import (
    DEVICES,
    DRIVERS,
    read_device,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader
from ansible_collections.gpuhost.inference.plugins.module_utils._transaction import (
    Had,
    Record,
)


@dataclass(frozen=True)
class Failure:
    """Why a change stopped; `stuck` when a write did not return, `pid` the process it hangs in."""

    text: str
    stuck: bool = False
    addresses: tuple[str, ...] = ()
    pid: int | None = None


@dataclass(frozen=True)
class Shape:
    """What a change may alter of a host, for comparisons: by function, and by GPU."""

    had: Mapping[str, Had]
    types: Mapping[str, str | None]


def shape_of(gpus: Iterable[Gpu]) -> Shape:
    """Return what a change may alter of these GPUs."""
    cards = list(gpus)
    return Shape(
        had={at: had for gpu in cards for at, had in present(gpu).items()},
        types={g.address: g.iommu_group.type for g in cards if g.iommu_group},
    )


def carry_out(machine: Machine, plan: Plan, before: Shape, done: list[Write]) -> Failure | None:
    """Write and verify; `done` receives what was written.

    Returns:
        Why it stopped, `None` when all is as planned.
    """
    started = uptime(machine.host)
    try:
        failure = _write_all(machine, plan.writes, done) or _settle(machine, plan, done)
        return failure or _verify(machine, plan, before, started)
    except GpuHostError as error:
        return Failure(f"the host could not be read while it was changed: {error}")


def uptime(host: Reader) -> float:
    """Return the seconds since the host was booted."""
    return float((host.text("/proc/uptime") or "0").split()[0])


def _write_all(machine: Machine, writes: Sequence[Write], done: list[Write]) -> Failure | None:
    for step in writes:
        done.append(step)
        outcome = machine.write(step.path, step.value, machine.timeout)
        group = _group_of(step)
        if group is not None:
            now = read_group(machine.host, group)
            if outcome.state != "ok":
                text = explain_refusal(now, outcome, step.value)
                members = tuple(member.address for member in now.members)
                return Failure(text, outcome.state == "stuck", members, outcome.pid)
            if now.type != step.value:  # 6.1 falls back to DMA under SNP, and reports success
                return Failure(
                    f"IOMMU group {group}: the kernel took {step.value} but kept {now.type}; "
                    "look at the kernel log"
                )
        # probing answers with success or EINVAL whatever happens: the driver link decides
        elif outcome.state == "stuck" or (outcome.state == "refused" and step.path != PROBE):
            return _failed(machine, step, outcome)
    return None


def _group_of(step: Write) -> int | None:
    match = re.fullmatch(rf"{GROUPS}/(\d+)/type", step.path)
    return int(match[1]) if match else None


def _failed(machine: Machine, step: Write, outcome: Outcome) -> Failure:
    found = re.findall(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", f"{step.path} {step.value}")
    text = _explain(step, outcome, machine.timeout)
    return Failure(text, outcome.state == "stuck", tuple(found), outcome.pid)


def _settle(machine: Machine, plan: Plan, done: list[Write]) -> Failure | None:
    """Compare the driver links with the plan; where probing bound nothing, bind by name once."""
    for address, want in plan.after.items():
        if want.driver == ANY or _driver(machine.host, address) == want.driver:
            continue
        if want.driver is None:
            return Failure(f"{address} was unbound, and something bound it again")
        step = Write(f"{DRIVERS}/{want.driver}/bind", address)  # once more, for the kernel's reason
        done.append(step)
        outcome = machine.write(step.path, step.value, machine.timeout)
        if outcome.state != "ok" or _driver(machine.host, address) != want.driver:
            return _failed(machine, step, outcome)
    return None


def _verify(machine: Machine, plan: Plan, before: Shape, started: float) -> Failure | None:
    """Read back what must be so now: the rest of the host untouched, and adapters that work."""
    gpus = read_gpus(machine.host)
    strays = _strays(plan, before, shape_of(gpus))
    if strays:
        return Failure(f"other GPUs changed meanwhile: {'; '.join(strays)}")
    moved = [target.gpu.address for target in plan.targets if target.moves]
    for gpu in gpus:
        if gpu.address in moved and gpu.driver == "nvidia" and gpu.device_minor is None:
            return Failure(
                f"{gpu.address} is bound to nvidia, which shows nothing of it below "
                "/proc/driver/nvidia/gpus: look at the kernel log"
            )
    log = machine.log(machine.host, started)
    found = collect(log)
    health = conclude(found, log.summary(), read_subjects(machine.host, gpus))
    ill = [f"{f.address}: {f.line}" for f in health.faults if f.current and f.address in moved]
    return Failure(f"the kernel logged a fault meanwhile: {'; '.join(ill)}") if ill else None


def _strays(plan: Plan, before: Shape, after: Shape) -> list[str]:
    """Say what changed on functions and in groups that the plan does not name."""
    strays = []
    for address, had in before.had.items():
        now = after.had.get(address)
        if address not in plan.before and now != had:
            driver = (now.driver if now else None) or "none"
            strays.append(f"{address} went from driver {had.driver or 'none'} to {driver}")
    typed = {target.gpu.address for target in plan.targets if target.type}
    strays += [
        f"the IOMMU group of {address} went from {kind} to {after.types.get(address)}"
        for address, kind in before.types.items()
        if address not in typed and after.types.get(address) != kind
    ]
    return strays


def out_of_reach(
    record: Record, gpus: Iterable[Gpu], stuck: Mapping[str, str]
) -> tuple[list[str], list[str]]:
    """Return the GPUs of a record that no undoing reaches, only a reboot or a power-off.

    Returns:
        Those that are off the bus, and those on which a write hangs.
    """
    ours = [gpu for gpu in gpus if gpu.address in record.before]
    off = [g.address for g in ours if g.config_readable is False or g.power.state == "error"]
    return off, [gpu.address for gpu in ours if set(present(gpu)) & set(stuck)]


def restore(
    machine: Machine, situation: Situation, record: Record, done: list[Write]
) -> Failure | None:
    """Write back what a record holds, as far as it differs now; go on after a refusal.

    Returns:
        The write that hangs, if one does. What was refused shows when the host is read again.
    """
    gpus = [g for g in situation.gpus.values() if g.address in record.before]
    now = {at: had for g in gpus for at, had in present(g).items() if at in record.before}
    # the former driver's name forces it; the former override, often none, follows afterwards
    forced = {
        at: Had(record.before[at].driver, record.before[at].driver or record.before[at].override)
        for at in now
    }
    types = {
        gpu.iommu_group.number: record.types[gpu.address]
        for gpu in gpus
        if gpu.address in record.types and gpu.iommu_group
        if gpu.iommu_group.type != record.types[gpu.address]
    }
    typed = {
        at for g in gpus if g.iommu_group and g.iommu_group.number in types for at in present(g)
    }
    moving = [
        at
        for at in now
        if now[at].driver != forced[at].driver
        or (at in typed and holds_group(now[at].driver, situation.release))
    ]
    steps = moves(situation, now, forced, moving, types)
    steps += [
        Write(f"{DEVICES}/{at}/driver_override", record.before[at].override or "")
        for at in now
        if record.before[at].override != forced[at].override
    ]
    steps += [  # where the change stopped between waking a device and moving it
        Write(file, "auto")
        for file in record.awake
        if machine.host.text(file) == "on" and Write(file, "auto") not in steps
    ]
    steps += [
        Write(file, methods)
        for file, methods in record.resets.items()
        if machine.host.text(file) not in (None, methods)
    ]
    for step in steps:
        done.append(step)
        outcome = machine.write(step.path, step.value, machine.timeout)
        if outcome.state == "stuck":
            return _failed(machine, step, outcome)
    return None


def _driver(host: Reader, address: str) -> str | None:
    device = read_device(host, address)
    return device.driver if device else None


def _explain(step: Write, outcome: Outcome, timeout: float) -> str:
    """Say in a sentence what became of a write that did not do its work."""
    what = f"writing {step.value} to {step.path}"
    if outcome.state == "stuck":
        return (
            f"{what} has not returned within {timeout:g} s and is pending in the kernel (process "
            f"{outcome.pid}). A driver waits so for a user that no process shows: nvidia_drm with "
            "modeset, nvidia_uvm, a peer memory client. It may still happen; nothing was undone; a "
            "reboot is needed"
        )
    if step.path == MODPROBE:
        return f"module {step.value} could not be loaded: {outcome.detail}"
    if step.path.endswith(("/reset", "/reset_method", "/reset_subordinate")):
        return f"{what} failed, {outcome.detail}: the kernel could not reset the card this way"
    meanings = {
        errno.EPERM: "EPERM: the driver refused the card in its probe; see the kernel log",
        errno.EBUSY: "EBUSY: it is bound already, or VFIO holds its IOMMU group open",
        errno.ENODEV: "ENODEV: it is not bound to that driver, does not match it, or is gone",
        errno.EACCES: "EACCES: run this as root on the host itself, not in a container",
    }
    if outcome.state == "ok":
        return f"{what} succeeded, but the driver is not bound; see the kernel log"
    return f"{what} was refused, {meanings.get(outcome.errno or 0, outcome.detail)}"
