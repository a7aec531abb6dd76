# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.

"""Change drivers and group types of GPUs, whole cards, as one transaction.

The order: lock, end what an earlier run left, read, ask all guards, record, have the persistence
daemon and listed services let go, ask the guards again, write, verify by reading back, undo in
reverse on failure, bring services back, drop the record. A write that never returns is the one
failure that is not undone: the driver still holds the device, and more writes would hang too.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ansible_collections.gpuhost.inference.plugins.module_utils._apply import (
    Failure,
    Shape,
    carry_out,
    out_of_reach,
    restore,
    shape_of,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._duties import read_duties
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from ansible_collections.gpuhost.inference.plugins.module_utils._gpu import Gpu, choose, read_gpus
from ansible_collections.gpuhost.inference.plugins.module_utils._guards import (
    LIFTABLE,
    Reason,
    Situation,
    Target,
    judge,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._iommu import (
    TYPES,
    read_mode,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._kernel_write import (
    Machine,
    Write,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._moves import (
    Plan,
    Wish,
    plan_change,
    present,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._pci import (
    DEVICES,
    DRIVERS,
    as_result,
    read_device,
    slot_of,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._quiesce import (
    Quiet,
    plan_quiet,
    quiesce,
    resume,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader
from ansible_collections.gpuhost.inference.plugins.module_utils._transaction import (
    Had,
    Record,
    Store,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._trial import tried

# What bars an undo: somebody took a half-moved GPU meanwhile, or it cannot be moved at all
_ID = "[0-9A-Fa-f]{4}:[0-9A-Fa-f]{4}"
_LONGEST = 3600  # seconds; who waits longer for one write has a hung driver
_BARS_UNDO = ("off-bus", "stuck", "in-use", "in-use-unknown", "guest-running", "guest-unknown")


@dataclass(frozen=True)
class Request:
    """What a run was asked for; see `change`."""

    wishes: Sequence[Wish]
    accept: Collection[str]
    services: Collection[str]


def foresee(host: Reader, gpus: Iterable[Gpu], wishes: Sequence[Wish]) -> list[Reason]:
    """Return what all guards say now to wishes, for GPUs that were read already.

    Raises:
        GpuHostError: the wishes contradict each other, or something could not be read.
    """
    situation = _situation(host, Store(host), gpus)
    return judge(situation, plan_change(situation, wishes).targets)


def read_situation(host: Reader, store: Store, wake: Collection[str] = ()) -> Situation:
    """Read all that plans and guards depend on, once; wake the cards that are to move.

    Raises:
        UnreadableError: something needed for every answer could not be read.
    """
    return _situation(host, store, read_gpus(host, wake=wake))


def _situation(host: Reader, store: Store, cards: Iterable[Gpu]) -> Situation:
    gpus = {gpu.address: gpu for gpu in cards}
    sleepy, restore = {}, set()
    for address, had in (item for gpu in gpus.values() for item in present(gpu).items()):
        device = read_device(host, address)
        port = device.port if device else None
        files = [f"{DEVICES}/{one}/power/control" for one in (port, address) if one]
        sleepy[address] = tuple(file for file in files if host.text(file) == "auto")
        # vfio-pci sets `auto` on its own devices, and `on` when it lets go (vfio_pci_core.c)
        own = files[-1] if had.driver == "vfio-pci" else None
        restore |= {file for file in sleepy[address] if file != own}
    bridges, below = _above(host, gpus.values())
    others = {
        member.address
        for gpu in gpus.values()
        for member in (gpu.iommu_group.members if gpu.iommu_group else ())
        if not member.is_gpu and slot_of(member.address) != slot_of(gpu.address)
    }
    return Situation(
        gpus=gpus,
        mode=read_mode(host),
        release=host.text("/proc/sys/kernel/osrelease") or "",
        drivers=frozenset(host.names(DRIVERS)),
        modeset=host.text("/sys/module/nvidia_drm/parameters/modeset") in ("Y", "1"),
        stuck=store.stuck(),
        tried=tried(host),
        duties={address: read_duties(host, address) for address in sorted(others)},
        sleepy=sleepy,
        restore=frozenset(restore),
        bridges=bridges,
        below=below,
    )


def _above(host: Reader, gpus: Iterable[Gpu]) -> tuple[dict[str, str], dict[str, tuple[str, ...]]]:
    """Return `bridges` and `below` of a `Situation`."""
    places = {at: f"{host.link(f'{DEVICES}/{at}') or ''}/" for at in host.names(DEVICES)}
    bridges, below = {}, {}
    for gpu in gpus:
        device = read_device(host, gpu.address)
        if device is None or device.port is None:
            continue
        below[gpu.address] = tuple(
            at
            for at, place in places.items()
            if f"/{device.port}/" in place[: -len(at) - 1] and slot_of(at) != slot_of(gpu.address)
        )
        file = f"{DEVICES}/{device.port}/reset_subordinate"
        if "bus" not in gpu.reset_methods and host.exists(file):
            bridges[gpu.address] = device.port
    return bridges, below


def change(
    machine: Machine,
    wishes: Sequence[Wish],
    *,
    store: Store,
    accept: Collection[str] = (),
    services: Collection[str] = (),
    check: bool = False,
) -> dict[str, Any]:
    """Fulfil wishes and return the result of the module `gpu`; a failure stands in its `msg`.

    Args:
        machine: the host.
        wishes: each for other GPUs; all are fulfilled, or none.
        store: of the host's record and lock.
        accept: guards to lift by name.
        services: systemd units that may be stopped meanwhile, when they hold a GPU that moves.
        check: tell what would be done, and do nothing.

    Raises:
        GpuHostError: a wish is wrong in itself, or an earlier change is in the way.
    """
    check_limits(machine, accept)
    request = Request(_resolved(machine.host, wishes), accept, services)
    if check:
        return _preview(machine.host, store, request)
    with store.lock():
        recovered = recover(machine, store)
        return {**transact(machine, store, request), "recovered": recovered}


def check_limits(machine: Machine, accept: Collection[str]) -> None:
    """See that guards to lift and times to wait are ones there are.

    Raises:
        GpuHostError: they are not.
    """
    unknown = sorted(set(accept) - set(LIFTABLE))
    if unknown:
        raise GpuHostError(
            f"accept names {', '.join(unknown)}, which cannot be lifted: there are "
            f"{', '.join(LIFTABLE)}"
        )
    if not (0 < machine.timeout <= _LONGEST and 0 < machine.drain <= _LONGEST):
        raise GpuHostError(
            f"timeout is {machine.timeout:g} and drain_timeout {machine.drain:g}: give seconds "
            f"above 0, at most {_LONGEST}"
        )


def set_group_type(
    machine: Machine,
    address: str,
    wanted: str,
    *,
    store: Store,
    accept: Collection[str] = (),
    check: bool = False,
) -> dict[str, Any]:
    """Set the type of a GPU's IOMMU group where it is, and return the result of `iommu_group`.

    Raises:
        GpuHostError: the address is wrong, or an earlier change is in the way.
    """
    wish = Wish((address,), type=wanted, in_place=True)
    result = change(machine, [wish], store=store, accept=accept, check=check)
    keys = ("changed", "writes", "guards", "recovered", "warnings", "msg")
    return {
        **{key: result[key] for key in keys if key in result},
        "group": result["gpus"][0]["iommu_group"] if result["gpus"] else None,
        "diff": {
            when: {at: one["type"] for at, one in shown.items() if "type" in one}
            for when, shown in result["diff"].items()
        },
    }


def _resolved(host: Reader, wishes: Sequence[Wish]) -> list[Wish]:
    """Return the wishes with full addresses; all are checked together."""
    wrong = sorted({wish.type for wish in wishes if wish.type is not None} - set(TYPES))
    if wrong:
        raise GpuHostError(f"there is no type {', '.join(wrong)}: give one of {', '.join(TYPES)}")
    for wish in wishes:
        if wish.expect_id is not None and not re.fullmatch(_ID, wish.expect_id):
            raise GpuHostError(
                f"the card expected is '{wish.expect_id}': write vendor:device as in 10de:2bb5"
            )
    choose(host, [address for wish in wishes for address in wish.addresses])
    return [replace(wish, addresses=tuple(choose(host, wish.addresses))) for wish in wishes]


def _preview(host: Reader, store: Store, request: Request) -> dict[str, Any]:
    left = store.record()
    situation = read_situation(host, store)
    plan = plan_change(situation, request.wishes, request.services)
    reasons = judge(situation, plan.targets, request.accept)
    before = shape_of(situation.gpus.values())
    planned = {t.gpu.address: t.type or before.types.get(t.gpu.address) for t in plan.targets}
    after = before if refused(reasons) else Shape(plan.after, planned)
    result = _result(request, plan, reasons, before, after)
    result["writes"] = [] if refused(reasons) else [as_result(step) for step in plan.writes]
    result["gpus"] = _named(situation.gpus, request)
    result["quiesced"] = as_result(plan_quiet(plan.targets, request.services))
    result["recovered"] = None
    if left:
        result["warnings"].append(
            f"an earlier change ({left.wish}, begun {left.started}) was cut off; a real run first "
            "ends it, so its plan may differ from this one"
        )
    return result


def _named(gpus: Mapping[str, Gpu], request: Request) -> list[dict[str, Any]]:
    named = sorted(address for wish in request.wishes for address in wish.addresses)
    return [as_result(gpus[address]) for address in named if address in gpus]


def transact(machine: Machine, store: Store, request: Request) -> dict[str, Any]:
    """Fulfil wishes in one transaction; the caller holds the lock. See `change`."""
    named = [address for wish in request.wishes for address in wish.addresses]
    situation = read_situation(machine.host, store, wake=named)
    plan = plan_change(situation, request.wishes, request.services)
    reasons = judge(situation, plan.targets, request.accept)
    before = shape_of(situation.gpus.values())
    if not plan.writes or refused(reasons):
        result = _result(request, plan, reasons, before, before)
        return {**result, "gpus": _named(situation.gpus, request), "writes": []}
    quiet = plan_quiet(plan.targets, request.services)
    record = _record(store, request, plan, quiet)
    store.begin(record)
    done: list[Write] = []
    try:
        failure = _let_go(machine, store, request, plan, quiet)
        failure = failure or carry_out(machine, plan, before, done)
    except GpuHostError as error:
        failure = Failure(f"the host could not be read meanwhile: {error}")
    left = False
    if failure and failure.stuck:
        failure = _mark(store, plan, failure)
    elif failure:
        failure, left = _undo(machine, store, record, done, failure)
    if not left:
        store.end()  # before anybody is brought back, who may take a GPU at once
    gpus, unread = _read_again(machine)
    warnings = resume(machine, quiet, gpus.values())
    after = shape_of(gpus.values())
    result = _result(request, plan, reasons, before, after)
    result["gpus"] = _named(gpus, request)
    result["writes"] = [as_result(step) for step in done]
    result["quiesced"] = as_result(quiet)
    result["warnings"] += warnings + _renumbered(situation.gpus, gpus)
    changed = [at for at in plan.before if after.had.get(at) != plan.before[at]]
    changed += [at for at in record.types if after.types.get(at) != before.types[at]]
    if failure:
        result["msg"] = _report(failure, plan, changed, after)
        result["rolled_back"] = not changed and not unread
        result["changed"] = bool(changed) or bool(unread)
    if unread:
        result["msg"] = f"{result.get('msg', 'the change was made')}; {unread}"
    return result


def _mark(store: Store, plan: Plan, failure: Failure) -> Failure:
    """Mark what a write hangs on: a function, or all that move when it hangs elsewhere."""
    moving = {at for t in plan.targets if t.moves for at in present(t.gpu)}
    addresses = sorted(set(failure.addresses) & set(plan.before)) or sorted(moving)
    try:
        store.mark_stuck(addresses, failure.pid, failure.text)
    except GpuHostError as error:
        return replace(failure, text=f"{failure.text}; this could not be noted: {error}")
    return failure


def _read_again(machine: Machine) -> tuple[dict[str, Gpu], str]:
    """Return the GPUs as they are after a change, or why they could not be read."""
    try:
        return {gpu.address: gpu for gpu in read_gpus(machine.host)}, ""
    except GpuHostError as error:
        return {}, f"how the GPUs are now could not be read: {error}"


def _renumbered(before: Mapping[str, Gpu], after: Mapping[str, Gpu]) -> list[str]:
    """Tell of device nodes that changed: the driver gives a GPU it binds the lowest free one."""
    return [
        f"{at} is /dev/nvidia{gpu.device_minor} now and was /dev/nvidia{was}: containers that list "
        "nodes by name may have another GPU than before (guest_gpus corrects them)"
        for at, gpu in after.items()
        for was in [before[at].device_minor if at in before else None]
        if was is not None and gpu.device_minor is not None and was != gpu.device_minor
    ]


def refused(reasons: Iterable[Reason]) -> list[Reason]:
    """Return the reasons that were not accepted."""
    return [reason for reason in reasons if not reason.accepted]


def _record(store: Store, request: Request, plan: Plan, quiet: Quiet) -> Record:
    types = {}
    for target in plan.targets:
        group = target.gpu.iommu_group
        if target.type and group and group.type:
            types[target.gpu.address] = group.type
    return Record(
        boot=store.boot(),
        started=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        wish="; ".join(_wish_in_words(wish) for wish in request.wishes),
        before=plan.before,
        types=types,
        awake=tuple(sorted({write.path for write in plan.writes if write.value == "auto"})),
        services=quiet.services,
        persistence=quiet.persistence,
        resets=plan.resets,
    )


def _wish_in_words(wish: Wish) -> str:
    words = [f"driver {wish.driver}"] if wish.driver else []
    words += [f"type {wish.type}"] if wish.type else []
    words += [f"a reset by {wish.reset}"] if wish.reset else []
    return f"{', '.join(wish.addresses)} to {' and '.join(words)}"


def _let_go(
    machine: Machine, store: Store, request: Request, plan: Plan, quiet: Quiet
) -> Failure | None:
    """Have those let go who do so when asked, then ask the guards again, for time has passed."""
    if not quiet.persistence and not quiet.services:
        return None
    moving = [target.gpu.address for target in plan.targets if target.moves]
    problems = quiesce(machine, quiet, moving, request.services)
    if not problems:
        situation = read_situation(machine.host, store)
        again = plan_change(situation, request.wishes, request.services)
        reasons = judge(situation, again.targets, request.accept)
        problems = [str(reason) for reason in refused(reasons)]
    return Failure("; ".join(problems)) if problems else None


def _undo(
    machine: Machine, store: Store, record: Record, done: list[Write], failure: Failure
) -> tuple[Failure, bool]:
    """Put everything back in reverse.

    Returns:
        The failure, with what became of the undoing, and whether the record has to stay.
    """
    try:
        situation, barred = _freed(machine, store, record)
        outcome = None if barred else restore(machine, situation, record, done)
    except GpuHostError as error:
        return replace(failure, text=f"{failure.text}; undoing it failed: {error}"), True
    if barred:
        why = "; ".join(barred)
        return replace(
            failure, text=f"{failure.text}; it was not undone ({why}), the next run will try again"
        ), True
    if outcome:  # a write of the undoing hangs
        text = f"{failure.text}; undoing it hangs: {outcome.text}"
        store.mark_stuck(outcome.addresses, outcome.pid, outcome.text)
        return replace(failure, text=text), False
    return failure, False


def _freed(machine: Machine, store: Store, record: Record) -> tuple[Situation, list[str]]:
    """Have those let go of a recorded change's GPUs who do so when asked, and ask the guards.

    Returns:
        The host as it is then, and what bars undoing the change.
    """
    situation = read_situation(machine.host, store)
    targets = _targets_of(situation, record)
    quiet = plan_quiet(targets, record.services)
    if quiet.persistence or quiet.services:
        moving = [target.gpu.address for target in targets if target.moves]
        problems = quiesce(machine, quiet, moving, record.services)
        situation = read_situation(machine.host, store)
        if problems:
            return situation, problems
    reasons = judge(situation, _targets_of(situation, record))
    return situation, [str(reason) for reason in reasons if reason.id in _BARS_UNDO]


def recover(machine: Machine, store: Store) -> dict[str, Any] | None:
    """End a change that was cut off; the caller holds the lock.

    Returns:
        What was found and what became of it, `None` when nothing was left behind.

    Raises:
        GpuHostError: it cannot be undone now, and why. The record stays for the next run.
    """
    record = store.record()
    if record is None:
        return None
    told = {"started": record.started, "wish": record.wish, "writes": []}
    if record.boot != store.boot():
        store.end()
        return {
            **told,
            "outcome": "ended by a reboot: drivers, overrides and types began anew at that boot",
        }
    name = f"an earlier change ({record.wish}, begun {record.started}) was cut off"
    situation = read_situation(machine.host, store)
    off, hung = out_of_reach(record, situation.gpus.values(), situation.stuck)
    if hung:  # more writes would hang too; as after a write of this run that does
        store.end()
        quiet = Quiet(record.persistence, record.services)
        warnings = resume(machine, quiet, situation.gpus.values())
        text = f"left as it is: {', '.join(hung)} hangs, and only a reboot ends that"
        return {**told, "outcome": "; ".join([text, *warnings])}
    record = _without(record, [situation.gpus[address] for address in off])
    situation, barred = _freed(machine, store, record)
    if barred:
        raise GpuHostError(
            f"{name} and cannot be undone now: {'; '.join(barred)}. To leave all as it is "
            "instead, remove /var/lib/gpuhost/transaction.json"
        )
    done: list[Write] = []
    failure = restore(machine, situation, record, done)
    if failure:
        store.mark_stuck(failure.addresses, failure.pid, failure.text)
        store.end()  # the mark bars these GPUs until a reboot, which the record would bar
        raise GpuHostError(f"{name}, and undoing it hangs: {failure.text}")
    gpus = {gpu.address: gpu for gpu in read_gpus(machine.host)}
    now = shape_of(gpus.values())
    gone = sorted((set(record.before) | set(record.types)) - set(now.had))
    wrong = [
        f"{at} {now.had[at].driver or 'none'}"
        for at, had in record.before.items()
        if at in now.had and now.had[at] != had
    ]
    wrong += [
        f"type of {at} {now.types.get(at)}"
        for at, kind in record.types.items()
        if at in now.had and now.types.get(at) != kind
    ]
    if wrong:
        raise GpuHostError(
            f"{name}, and undoing it did not bring everything back: {', '.join(wrong)}. Look at "
            "the kernel log; to leave all as it is, remove /var/lib/gpuhost/transaction.json"
        )
    store.end()
    warnings = resume(machine, Quiet(record.persistence, record.services), gpus.values())
    outcome = "undone: all is as it was before"
    if gone:
        outcome = f"undone, except for {', '.join(gone)}, which this host does not have any more"
    if off:
        outcome += (
            f"; except for {', '.join(off)}, off the bus: its driver, override and type begin anew "
            "at a reboot or a power-off"
        )
    return {
        **told,
        "writes": [as_result(step) for step in done],
        "outcome": "; ".join([outcome, *warnings]),
    }


def _without(record: Record, gpus: Iterable[Gpu]) -> Record:
    """Return a record without cards that are off the bus, to undo the rest."""
    functions = {at for gpu in gpus for at in present(gpu)}

    def elsewhere(file: str) -> bool:
        return not any(f"/{at}/" in file for at in functions)

    return replace(
        record,
        before={at: had for at, had in record.before.items() if at not in functions},
        types={at: kind for at, kind in record.types.items() if at not in functions},
        awake=tuple(filter(elsewhere, record.awake)),
        resets={file: text for file, text in record.resets.items() if elsewhere(file)},
    )


def _targets_of(situation: Situation, record: Record) -> list[Target]:
    """Return what undoing a record would do to each GPU that does not have its former driver."""
    return [
        Target(
            gpu=gpu,
            driver=record.before[address].driver,
            moves=any(had != record.before.get(at) for at, had in present(gpu).items())
            or record.types.get(address) not in (None, gpu.iommu_group and gpu.iommu_group.type),
            type=None,
            by_name=False,
            expect_id=None,
            going=(),
            together=record.before,
            services=(),
        )
        for address, gpu in situation.gpus.items()
        if address in record.before
    ]


def _result(
    request: Request, plan: Plan, reasons: Sequence[Reason], before: Shape, after: Shape
) -> dict[str, Any]:
    """Return what every result of the module has."""
    against = refused(reasons)
    typed = {at for wish in request.wishes if wish.type for at in wish.addresses}
    result: dict[str, Any] = {
        "changed": bool(plan.writes) and not against,
        "rolled_back": False,
        "guards": [as_result(reason) for reason in reasons],
        "quiesced": as_result(Quiet((), ())),
        "diff": {"before": _shown(plan, before, typed), "after": _shown(plan, after, typed)},
        "warnings": [f"accepted {reason.id}: {reason}" for reason in reasons if reason.accepted],
    }
    if against:
        result["msg"] = "nothing was changed: " + "; ".join(map(str, against))
    return result


def _shown(plan: Plan, shape: Shape, typed: Collection[str]) -> dict[str, dict[str, Any]]:
    shown = {}
    for address in sorted(plan.before):
        shown[address] = as_result(shape.had.get(address, Had(None, None)))
        if address in typed:
            shown[address]["type"] = shape.types.get(address)
    return shown


def _report(failure: Failure, plan: Plan, changed: Sequence[str], after: Shape) -> str:
    """Say what failed and what holds now. The driver link goes before the driver lets go."""
    if not changed and not failure.stuck:
        return f"{failure.text}; all is as it was before"
    drivers = ", ".join(
        f"{at} {after.had[at].driver or 'none'}" if at in after.had else f"{at} gone"
        for at in plan.before
    )
    undone = "" if failure.stuck else "not all could be put back; "
    return f"{failure.text}; {undone}drivers shown now: {drivers}"
