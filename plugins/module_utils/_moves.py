# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.

"""From wishes to the writes that fulfil them, in order, as pure functions.

Only `driver_override` is used to bind: it names one device, where `new_id` would take every free
sibling with the same id (drivers/pci/pci-driver.c). It stays set on every GPU, also on `nvidia`,
since Proxmox itself writes `new_id` when it starts a virtual machine.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from ansible_collections.gpuhost.inference.plugins.module_utils._gpu import Gpu
from ansible_collections.gpuhost.inference.plugins.module_utils._guards import Situation, Target
from ansible_collections.gpuhost.inference.plugins.module_utils._iommu import (
    GROUPS,
    holds_group,
    needs_idle_group,
    target_type,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._kernel_write import MODPROBE, Write
from ansible_collections.gpuhost.inference.plugins.module_utils._pci import DEVICES, DRIVERS
from ansible_collections.gpuhost.inference.plugins.module_utils._transaction import Had

CHOICES = ("nvidia", "vfio-pci", "none")
NO_DRIVER = "none"  # as an override it names no driver, so that nothing binds the device
ANY = "any"  # a driver of the kernel's choice
PROBE = "/sys/bus/pci/drivers_probe"
REBIND = "rebind"  # no reset, only the driver taken off and given back


@dataclass(frozen=True)
class Wish:
    """What GPUs are to have.

    Attributes:
        addresses: of the GPUs, in full form.
        driver: one of `CHOICES`, `None` to leave it.
        type: of their IOMMU groups, `None` to leave it.
        expect_id: vendor and device id the cards must have.
        in_place: take no driver off for a change of type.
        reset: reset the cards by this method while they have no driver; `REBIND` for none.
    """

    addresses: tuple[str, ...]
    driver: str | None = None
    type: str | None = None
    expect_id: str | None = None
    in_place: bool = False
    reset: str | None = None


@dataclass(frozen=True)
class Plan:
    """A change, decided.

    Attributes:
        targets: what happens to each GPU, for the guards.
        before: of every function concerned.
        after: of every function concerned; driver `ANY` where the kernel chooses.
        types: group number to the type it is to get.
        resets: the file `reset_method` of each GPU that is reset by one method of several, and
            what it reads.
        writes: the way there, in order.
    """

    targets: tuple[Target, ...]
    before: Mapping[str, Had]
    after: Mapping[str, Had]
    types: Mapping[int, str]
    resets: Mapping[str, str]
    writes: tuple[Write, ...]


def present(gpu: Gpu) -> dict[str, Had]:
    """Return what each function of a card has now, the GPU first."""
    found = {gpu.address: Had(gpu.driver, gpu.driver_override)}
    for companion in gpu.companions:
        found[companion.address] = Had(companion.driver, companion.driver_override)
    return found


def plan_change(
    situation: Situation, wishes: Sequence[Wish], services: Collection[str] = ()
) -> Plan:
    """Return the writes that fulfil all wishes together; none when they are fulfilled already.

    Raises:
        GpuHostError: the wishes contradict each other, or a type cannot be told.
    """
    wish_of = _by_gpu(wishes)
    gone = sorted(set(wish_of) - set(situation.gpus))
    if gone:
        raise GpuHostError(f"{', '.join(gone)} vanished from the PCI bus: look at the kernel log")
    types, by_name = _types(situation, wish_of)
    cards = {address: situation.gpus[address] for address in wish_of}
    before = {at: had for gpu in cards.values() for at, had in present(gpu).items()}
    after = dict(before)
    for address, wish in wish_of.items():
        if wish.driver is not None:
            after.update(_wanted(cards[address], wish.driver))
    moving = {at for at in before if after[at].driver != before[at].driver}
    for address, wish in wish_of.items():
        if not wish.in_place:
            moving |= _in_the_way(situation, cards[address], types)
        if wish.reset is not None:
            moving |= {at for at in present(cards[address]) if after[at].driver not in (None, ANY)}
    resets = {
        address: _reset(situation, cards[address], wish.reset)
        for address, wish in wish_of.items()
        if wish.reset not in (None, REBIND)
    }
    targets = tuple(
        Target(
            gpu=gpu,
            driver=after[address].driver,
            moves=any(at in moving for at in present(gpu)) or wish_of[address].reset is not None,
            type=types.get(gpu.iommu_group.number) if gpu.iommu_group else None,
            by_name=gpu.iommu_group is not None and gpu.iommu_group.number in by_name,
            expect_id=wish_of[address].expect_id,
            going=moving,
            together=before,
            services=services,
            reset=wish_of[address].reset,
            reset_writes=tuple((step.path, step.value) for step in resets.get(address, ())),
        )
        for address, gpu in sorted(cards.items())
    )
    order = [at for at in before if at in moving]
    middle = [step for _address, steps in sorted(resets.items()) for step in steps]
    files = {step.path: step.value for steps in resets.values() for step in steps[2:]}
    writes = moves(situation, before, after, order, types, resets=middle)
    return Plan(targets, before, after, types, files, tuple(writes))


def _reset(situation: Situation, gpu: Gpu, method: str | None) -> list[Write]:
    """Return the writes that reset a card without driver by one method (drivers/pci/pci.c).

    The kernel uses the first method of the file `reset_method`, so that names the one alone
    meanwhile. A card of several functions has no `bus` there: that goes by the bridge above it.

    Raises:
        GpuHostError: the kernel offers no such method for this card now.
    """
    at = f"{DEVICES}/{gpu.address}"
    bridge = situation.bridges.get(gpu.address)
    if method == "bus" and method not in gpu.reset_methods and bridge:
        return [Write(f"{DEVICES}/{bridge}/reset_subordinate", "1")]
    if method is None or method not in gpu.reset_methods:
        raise GpuHostError(
            f"the kernel does not offer {method} for {gpu.address} now: its file reset_method has "
            f"{' '.join(gpu.reset_methods) or 'nothing'}"
        )
    steps = [Write(f"{at}/reset", "1")]
    if len(gpu.reset_methods) > 1:
        file = f"{at}/reset_method"
        steps = [Write(file, method), *steps, Write(file, " ".join(gpu.reset_methods))]
    return steps


def _by_gpu(wishes: Sequence[Wish]) -> dict[str, Wish]:
    wish_of: dict[str, Wish] = {}
    for wish in wishes:
        for address in wish.addresses:
            if address in wish_of:
                raise GpuHostError(f"{address} is listed twice: name each GPU once")
            wish_of[address] = wish
    return wish_of


def _types(
    situation: Situation, wish_of: Mapping[str, Wish]
) -> tuple[dict[int, str], frozenset[int]]:
    """Return the groups whose type changes, and those among them asked for by a type's name."""
    asked: dict[int, str] = {}
    changes: dict[int, str] = {}
    by_name = set()
    for address, wish in wish_of.items():
        group = situation.gpus[address].iommu_group
        if wish.type is None:
            continue
        if group is None:
            raise GpuHostError(f"{address} is in no IOMMU group: no IOMMU is in use on this host")
        target = target_type(group, wish.type, situation.mode)
        if asked.setdefault(group.number, target) != target:
            raise GpuHostError(
                f"{address} shares IOMMU group {group.number} with a GPU that is to get type "
                f"{asked[group.number]}, not {target}: ask for one type"
            )
        if target != group.type:
            changes[group.number] = target
            if wish.type != "auto":
                by_name.add(group.number)
    return changes, frozenset(by_name)


def _wanted(gpu: Gpu, driver: str) -> dict[str, Had]:
    """Return what each function shall have.

    With `nvidia`, companions that were set aside get the driver the kernel finds for them: they
    lose their override, and `driver` is what they have now, for nothing is demanded.
    """
    wish = Had(None if driver == NO_DRIVER else driver, driver)
    wanted = {gpu.address: wish}
    for companion in gpu.companions:
        free = Had(companion.driver, companion.driver_override)
        if companion.driver_override in ("vfio-pci", NO_DRIVER):
            free = Had(ANY, None)
        wanted[companion.address] = free if driver == "nvidia" else wish
    return wanted


def _in_the_way(situation: Situation, gpu: Gpu, types: Mapping[int, str]) -> set[str]:
    """Return the functions of a card whose driver bars the wanted type of its group."""
    group = gpu.iommu_group
    if group is None or not needs_idle_group(group.type, types.get(group.number, "DMA-FQ")):
        return set()
    if group.number not in types:
        return set()
    ours = {at: had.driver for at, had in present(gpu).items()}
    return {at for at, driver in ours.items() if holds_group(driver, situation.release)}


def moves(
    situation: Situation,
    now: Mapping[str, Had],
    wanted: Mapping[str, Had],
    moving: Sequence[str],
    types: Mapping[int, str],
    *,
    resets: Sequence[Write] = (),
) -> list[Write]:
    """Return the writes from one state to another.

    Overrides come first, so that nothing else takes a function while it is free; a type, and a
    reset, come while there is no driver, and nvidia is not loaded before, for it would bind at
    once.
    """
    writes = [
        Write(f"{DEVICES}/{address}/driver_override", want.override or "")
        for address, want in wanted.items()
        if now[address].override != want.override
    ]
    drivers = {wanted[address].driver for address in moving} - situation.drivers - {None, ANY}
    loads = [Write(MODPROBE, driver) for driver in sorted(filter(None, drivers))]
    writes += loads if not types and not resets else []
    awake = sorted({file for address in moving for file in situation.sleepy.get(address, ())})
    writes += [Write(file, "on") for file in awake]
    writes += [  # companions first: the GPU's own function carries the card
        Write(f"{DRIVERS}/{now[address].driver}/unbind", address)
        for address in reversed(moving)
        if now[address].driver
    ]
    writes += [Write(f"{GROUPS}/{number}/type", value) for number, value in sorted(types.items())]
    writes += resets
    writes += loads if types or resets else []
    writes += [Write(PROBE, address) for address in moving if wanted[address].driver]
    return writes + [Write(file, "auto") for file in awake if file in situation.restore]
