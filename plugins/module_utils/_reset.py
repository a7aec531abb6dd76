# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.

"""Reset GPUs, one method after another until one helps, and say honestly when none did.

A card is reset without its driver: each attempt is one transaction of the engine, which takes the
driver off, resets, and gives it back. Whether that helped is seen by starting the GPU, and in what
the kernel logged meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ansible_collections.gpuhost.inference.plugins.module_utils._apply import shape_of, uptime
from ansible_collections.gpuhost.inference.plugins.module_utils._binding import (
    Request,
    check_limits,
    read_situation,
    recover,
    refused,
    transact,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from ansible_collections.gpuhost.inference.plugins.module_utils._fault_kinds import RUNGS
from ansible_collections.gpuhost.inference.plugins.module_utils._fault_log import collect
from ansible_collections.gpuhost.inference.plugins.module_utils._faults import (
    conclude,
    read_subjects,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._gpu import Gpu, choose, read_gpus
from ansible_collections.gpuhost.inference.plugins.module_utils._guards import (
    BUS_RESETS,
    Reason,
    Situation,
    judge,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._kernel_write import Machine
from ansible_collections.gpuhost.inference.plugins.module_utils._moves import (
    REBIND,
    Plan,
    Wish,
    plan_change,
    present,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._pci import as_result
from ansible_collections.gpuhost.inference.plugins.module_utils._starts import note_start
from ansible_collections.gpuhost.inference.plugins.module_utils._transaction import Had, Store

# In the kernel's order, pci_reset_fn_methods in drivers/pci/pci.c, but those of the bus last
METHODS = (REBIND, "device_specific", "acpi", "flr", "af_flr", "pm", "cxl_bus", "bus")
_DRIVERS = ("nvidia", "vfio-pci", None)
_NVIDIA_MAJOR = 195  # NV_MAJOR_DEVICE_NUMBER in the driver's nv-linux.h
_AFTER_RESET = tuple(RUNGS)[tuple(RUNGS).index("reset") + 1 :]
_LINES = 12
_WAYLESS = (
    "it offers no reset that reaches it alone: take its driver off and give it back with methods "
    f"[{REBIND}], or reboot the host or power it off"
)


@dataclass(frozen=True)
class Attempt:
    """One method tried on one GPU.

    Attributes:
        address: of the GPU.
        method: one of `METHODS`.
        outcome: `done`; `failed`, when a write was refused or the driver did not come back;
            `refused` before anything was written, by a guard or since the host has changed;
            `stuck`, when the kernel has not answered; `planned`.
        helped: the GPU started, and no fault was logged; `None` when that cannot be told.
        reason: what it rests on.
        log: what the kernel logged about the GPU meanwhile.
        ladder: rungs that are left when it did not help, the next one first.
    """

    address: str
    method: str
    outcome: str
    helped: bool | None
    reason: str
    log: tuple[str, ...] = ()
    ladder: tuple[str, ...] = ()


@dataclass(frozen=True)
class Order:
    """What a run was asked for; see `reset`."""

    methods: Sequence[str] | None
    accept: Collection[str]
    services: Collection[str]
    start_timeout: float


def reset(
    machine: Machine, addresses: Iterable[str], order: Order, *, store: Store, check: bool = False
) -> dict[str, Any]:
    """Reset GPUs, and return the result of the module `gpu_reset`; a failure stands in its `msg`.

    Args:
        machine: the host.
        addresses: of the GPUs, in any form.
        order: the methods to try, `None` for what each GPU offers; guards to lift by name; systemd
            units that may be stopped; how many seconds a GPU may take to start.
        store: of the host's record and lock.
        check: tell what would be done, and do nothing.

    Raises:
        GpuHostError: a GPU does not offer a method that was named, or an earlier change is in the
            way.
    """
    check_limits(machine, order.accept)
    chosen = choose(machine.host, addresses)
    if check:
        return _preview(machine, store, chosen, order)
    with store.lock():
        told = recover(machine, store)
        return {**_reset(machine, store, chosen, order), "recovered": told}


def offered(situation: Situation, gpu: Gpu) -> tuple[str, ...]:
    """Return the methods there are for a GPU, least reaching first."""
    names = {REBIND, *gpu.reset_methods} | ({"bus"} if gpu.address in situation.bridges else set())
    return tuple(method for method in METHODS if method in names)


def _ways(situation: Situation, addresses: Sequence[str], order: Order) -> dict[str, Sequence[str]]:
    """Return the methods to try on each GPU; none where no reset reaches that GPU alone.

    Raises:
        GpuHostError: a method that was named is not offered.
    """
    ways: dict[str, Sequence[str]] = {}
    wrong = []
    for address in addresses:
        gpu = situation.gpus[address]
        there = offered(situation, gpu)
        if gpu.driver not in _DRIVERS:
            wrong.append(f"{address} has driver {gpu.driver}: bind it to nvidia or vfio-pci first")
        elif order.methods:
            missing = [method for method in order.methods if method not in there]
            if missing:
                wrong.append(
                    f"{address} offers no {', '.join(missing)}: there is {', '.join(there)}"
                )
            ways[address] = order.methods
        else:
            reaching = situation.below.get(address)
            ways[address] = [
                one for one in there if one != REBIND and not (reaching and one in BUS_RESETS)
            ]
    if wrong:
        raise GpuHostError("; ".join(wrong))
    return ways


def _wish(gpu: Gpu, method: str) -> Wish:
    return Wish((gpu.address,), gpu.driver, reset=method)


def _foresee(
    situation: Situation, ways: Mapping[str, Sequence[str]], order: Order
) -> tuple[list[Plan], list[Reason]]:
    """Return the plan of every attempt, and what all guards say to all of them."""
    plans = [
        plan_change(situation, [_wish(situation.gpus[address], method)], order.services)
        for address, methods in ways.items()
        for method in methods
    ]
    reasons = (reason for plan in plans for reason in judge(situation, plan.targets, order.accept))
    return plans, list(dict.fromkeys(reasons))


def _preview(
    machine: Machine, store: Store, addresses: Sequence[str], order: Order
) -> dict[str, Any]:
    situation = read_situation(machine.host, store)
    ways = _ways(situation, addresses, order)
    plans, reasons = _foresee(situation, ways, order)
    had = _functions(situation.gpus, addresses)
    after = {at: one for plan in plans for at, one in plan.after.items()}
    free = not refused(reasons)
    planned = [
        Attempt(address, method, "planned", None, "tried unless one before it helps")
        for address, methods in ways.items()
        for method in methods
    ]
    result = _result(ways, situation.gpus, planned if free else (), reasons)
    result["changed"] = free and bool(plans)
    result["writes"] = [as_result(one) for plan in plans for one in plan.writes] if free else []
    result["diff"] = _diff(had, after if free else had)
    result["recovered"] = None
    left = store.record()
    if left:
        result["warnings"].append(
            f"an earlier change ({left.wish}, begun {left.started}) was cut off; a real run first "
            "ends it"
        )
    return result


def _reset(
    machine: Machine, store: Store, addresses: Sequence[str], order: Order
) -> dict[str, Any]:
    situation = read_situation(machine.host, store, wake=addresses)
    ways = _ways(situation, addresses, order)
    _plans, reasons = _foresee(situation, ways, order)
    had = _functions(situation.gpus, addresses)
    if refused(reasons):
        result = _result(ways, situation.gpus, (), reasons)
        return {**result, "writes": [], "diff": _diff(had, had)}
    attempts: list[Attempt] = []
    writes: list[dict[str, Any]] = []
    warnings: list[str] = []
    for address, methods in ways.items():
        for method in methods:
            wish = _wish(situation.gpus[address], method)
            attempt, done = _attempt(machine, store, Request([wish], order.accept, order.services))
            writes += done["writes"]
            warnings += done["warnings"]
            if attempt is None:
                attempt = _tried(machine, address, method, done["since"], order.start_timeout)
            attempts.append(attempt)
            if attempt.helped is not False or attempt.outcome in ("stuck", "refused"):
                break
            if store.record():
                break
        if (attempts and attempts[-1].outcome == "stuck") or store.record():
            break  # what holds one GPU's lock may hold the driver's; and a record bars a change
    gpus = {gpu.address: gpu for gpu in read_gpus(machine.host)}
    result = _result(ways, gpus, attempts, reasons)
    result["changed"] = bool(writes)
    result["writes"] = writes
    result["diff"] = _diff(had, shape_of(gpus.values()).had)
    result["warnings"] = list(dict.fromkeys(result["warnings"] + warnings))
    return result


def _attempt(
    machine: Machine, store: Store, request: Request
) -> tuple[Attempt | None, dict[str, Any]]:
    """Take the driver off, reset, give it back.

    Returns:
        The attempt when it ended here, `None` when the GPU is to be tried; the engine's result,
        with the seconds after boot at which it began as `since`.
    """
    since = uptime(machine.host)
    wish = request.wishes[0]
    address, method = wish.addresses[0], wish.reset or ""
    try:
        result = {**transact(machine, store, request), "since": since}
    except GpuHostError as error:  # the host is not any more as it was when this run began
        nothing = {"writes": [], "warnings": [], "since": since}
        return Attempt(address, method, "refused", False, str(error), (), _AFTER_RESET), nothing
    text = result.get("msg")
    if text is None:
        return None, result
    outcome, helped = "failed", False
    if not result["writes"]:
        outcome = "refused"
    elif set(
        _functions({one.address: one for one in read_gpus(machine.host)}, wish.addresses)
    ) & set(store.stuck()):
        outcome = "stuck"
    ill = _logged(machine, address, since)
    return Attempt(address, method, outcome, helped, text, ill.log, ill.ladder), result


def _tried(
    machine: Machine, address: str, method: str, since: float, start_timeout: float
) -> Attempt:
    """Look whether a GPU answers after a reset, start it if it is nvidia's, and read the log."""
    gpu = next((one for one in read_gpus(machine.host) if one.address == address), None)
    outcome, reason, helped = "done", "", None
    if gpu is None:
        ill = _logged(machine, address, since)
        reason = "it is not on the PCI bus any more"
        return Attempt(address, method, outcome, False, reason, ill.log, ill.ladder)
    if gpu.config_readable is not True:
        helped, reason = False, "its configuration space does not answer"
    elif gpu.driver == "nvidia":
        state, reason = _start(machine, gpu, start_timeout)
        outcome, helped = ("stuck" if state == "stuck" else "done"), state == "ok"
    ill = _logged(machine, address, since)
    if ill.reason:
        helped, reason = False, "; ".join(filter(None, (reason, ill.reason)))
    elif helped is None:
        reason = f"it answers, and whether it works shows when driver {gpu.driver} uses it"
    if helped:
        reason = "it was started, and no fault was logged"
        try:  # so that whoever reads the log later knows that the faults before are history
            note_start(machine.host, address)
        except GpuHostError as error:
            reason += f"; the faults before will count until the next boot, though: {error}"
        return Attempt(address, method, outcome, True, reason)
    ladder = () if helped is None else ill.ladder
    return Attempt(address, method, outcome, helped, reason, ill.log, ladder)


def _start(machine: Machine, gpu: Gpu, timeout: float) -> tuple[str, str]:
    """Have the driver start a GPU by opening its node; return the state and what it means."""
    node = f"/dev/nvidia{gpu.device_minor}"
    try:
        if not machine.host.exists(node):  # the driver makes none itself
            machine.run(["nvidia-modprobe", "-c", str(gpu.device_minor)], machine.timeout)
        number = machine.host.device_number(node)
    except GpuHostError as error:
        return "refused", f"its device node {node} is not there: {error}"
    if number != (_NVIDIA_MAJOR, gpu.device_minor):
        return "refused", f"{node} is not its device node, but {number}"
    outcome = machine.start(node, timeout)
    if outcome.state == "stuck":
        return "stuck", f"opening {node} has not returned within {timeout:g} s"
    return outcome.state, f"it does not start: {node} answers {outcome.detail}"


@dataclass(frozen=True)
class _Ill:
    reason: str
    log: tuple[str, ...]
    ladder: tuple[str, ...]


def _logged(machine: Machine, address: str, since: float) -> _Ill:
    """Return the faults of a GPU, or of it or another, that were logged since a time."""
    log = machine.log(machine.host, since)
    found = collect(log)
    health = conclude(found, log.summary(), read_subjects(machine.host, read_gpus(machine.host)))
    faults = [
        fault
        for fault in health.faults
        if fault.current and (fault.address == address or address in fault.candidates)
    ]
    judged = next((gpu for gpu in health.gpus if gpu.address == address), None)
    left = [rung for rung in (judged.ladder if judged else ()) if rung in _AFTER_RESET]
    lines = [line for fault in faults for line in (fault.line, *fault.evidence)]
    return _Ill(
        "; ".join(fault.told for fault in faults),
        tuple(lines[:_LINES]),
        tuple(left) or _AFTER_RESET,
    )


def _functions(gpus: Mapping[str, Gpu], addresses: Iterable[str]) -> dict[str, Had]:
    there = [gpus[address] for address in addresses if address in gpus]
    return {at: had for gpu in there for at, had in present(gpu).items()}


def _diff(before: Mapping[str, Had], after: Mapping[str, Had]) -> dict[str, Any]:
    gone = Had(None, None)
    return {
        "before": {at: as_result(had) for at, had in before.items()},
        "after": {at: as_result(after.get(at, gone)) for at in before},
    }


def _result(
    ways: Mapping[str, Sequence[str]],
    gpus: Mapping[str, Gpu],
    attempts: Sequence[Attempt],
    reasons: Sequence[Reason],
) -> dict[str, Any]:
    """Return what every result has; in `ill`, the GPUs that no attempt helped, or none can."""
    last = {attempt.address: attempt for attempt in attempts}
    tried = {one.address: one for one in attempts if one.outcome != "refused"}
    against = refused(reasons)
    ill = [
        {"address": one.address, "reason": one.reason, "ladder": list(one.ladder)}
        for one in tried.values()
        if one.helped is False
    ]
    wayless = [address for address, methods in ways.items() if not methods and not against]
    ill += [{"address": at, "reason": _WAYLESS, "ladder": list(_AFTER_RESET)} for at in wayless]
    result: dict[str, Any] = {
        "changed": False,
        "gpus": [as_result(gpus[address]) for address in ways if address in gpus],
        "attempts": [_shown(attempt) for attempt in attempts],
        "ill": ill,
        "guards": [as_result(reason) for reason in reasons],
        "warnings": [f"accepted {reason.id}: {reason}" for reason in reasons if reason.accepted]
        + [
            f"{one.address} was reset by {one.method}: {one.reason}"
            for one in last.values()
            if one.helped is None and one.outcome == "done"
        ],
    }
    words = [_told(one, attempts) for one in last.values() if one.helped is False]
    untried = [at for at, methods in ways.items() if methods and words and at not in last]
    words += [f"{', '.join(untried)} was not tried"] if untried else []
    words += [f"{address}: {_WAYLESS}" for address in wayless]
    if against:
        result["msg"] = "nothing was changed: " + "; ".join(map(str, against))
    elif words:
        result["msg"] = "; ".join(words)
    return result


def _shown(attempt: Attempt) -> dict[str, Any]:
    shown = as_result(attempt)
    del shown["ladder"]
    return {**shown, "log": list(attempt.log)}


def _told(last: Attempt, attempts: Sequence[Attempt]) -> str:
    """Say what did not help a GPU, and what is next."""
    tried = [one.method for one in attempts if one.address == last.address]
    seen = f" ({last.log[0]})" if last.log else ""
    if last.outcome == "refused":
        return f"{last.address} was left as it is: {last.reason}"
    rung = last.ladder[0]
    return (
        f"{last.address} does not work: {last.reason}{seen}; these steps did not help: "
        f"{', '.join(tried)}; {rung} needed: {RUNGS[rung]}"
    )
