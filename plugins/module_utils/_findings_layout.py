# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.
"""Findings about the declared layout, changes on the way to it, and what could not be read."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ansible_collections.gpuhost.inference.plugins.module_utils._apply import out_of_reach
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from ansible_collections.gpuhost.inference.plugins.module_utils._finding import (
    Facts,
    Hit,
    Rule,
    configured,
    guest_name,
    laid_out,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._guards import Situation, judge
from ansible_collections.gpuhost.inference.plugins.module_utils._iommu import HostMode
from ansible_collections.gpuhost.inference.plugins.module_utils._moves import Wish, plan_change
from ansible_collections.gpuhost.inference.plugins.module_utils._transaction import FOLDER
from ansible_collections.gpuhost.inference.plugins.module_utils._trial import TRIAL, told

_TYPES = "kernel: Documentation/ABI/testing/sysfs-kernel-iommu_groups"
_PLACE = re.compile(r"(?:/[^\s:,]+|[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])")


def _driver_differs(facts: Facts) -> Iterator[Hit]:
    for entry, gpu in laid_out(facts):
        now = gpu.driver or "none"
        if now != entry.driver:
            yield Hit(gpu.address, f"driver is {now}, layout {entry.name} wants {entry.driver}")


def _type_differs(facts: Facts) -> Iterator[Hit]:
    for entry, gpu in laid_out(facts):
        wanted = facts.default_type if entry.iommu_type == "auto" else entry.iommu_type
        now = gpu.iommu_group.type if gpu.iommu_group else None
        if wanted and now != wanted:
            yield Hit(gpu.address, f"type is {now}, layout {entry.name} wants {entry.iommu_type}")


def _guest_differs(facts: Facts) -> Iterator[Hit]:
    for entry, gpu in laid_out(facts):
        if not entry.guest or (entry.guest.kind == "lxc" and gpu.driver != "nvidia"):
            continue  # without its driver a GPU has no node that a container could list
        have = {(owner.kind, owner.vmid) for owner in configured(gpu)}
        wanted = (entry.guest.kind, entry.guest.vmid)
        if have != {wanted}:
            named = ", ".join(f"{kind} {vmid}" for kind, vmid in sorted(have)) or "no guest"
            yield Hit(
                gpu.address, f"{named} names it, layout {entry.name} wants {guest_name(entry)}"
            )


def _change_refused(facts: Facts) -> Iterator[Hit]:
    """Ask the guards of the module gpu what they would say to the layout."""
    extras = facts.extras
    situation = Situation(
        gpus={gpu.address: gpu for gpu in facts.gpus},
        mode=HostMode(facts.boot.snp is True, facts.sme is True, facts.default_type),
        release=facts.boot.kernel or "",
        drivers=extras.drivers,
        modeset=extras.modeset,
        stuck={},  # has a finding of its own
        tried={},  # so has this
        duties=extras.duties,
        sleepy={},
        restore=frozenset(),
    )
    wishes = [
        Wish(entry.addresses, entry.driver, entry.iommu_type, entry.expect_id)
        for entry in facts.layout
        if entry.iommu_type != "auto" or facts.default_type
    ]
    try:
        plan = plan_change(situation, wishes)
    except GpuHostError:
        return  # a layout that contradicts itself, which its problems tell
    for reason in judge(situation, plan.targets):
        lift = f", or accept {reason.id}" if reason.liftable else ""
        yield Hit(reason.address, f"{reason.id}: {reason.evidence}", f"{reason.remedy}{lift}")


def _unfinished_change(facts: Facts) -> Iterator[Hit]:
    record = facts.extras.record
    if record:
        evidence = f"begun {record.started}: {record.wish}"
        off, hung = out_of_reach(record, facts.gpus, facts.extras.stuck)
        if off or hung:
            evidence += f"; only a reboot or a power-off ends that for {', '.join([*off, *hung])}"
        yield Hit(f"{FOLDER}/transaction.json", evidence)


def _unbind_stuck(facts: Facts) -> Iterator[Hit]:
    for address, sentence in facts.extras.stuck.items():
        yield Hit(address, sentence)


def _trial_armed(facts: Facts) -> Iterator[Hit]:
    trial = facts.extras.trial
    if trial and trial.state == "armed":
        yield Hit(TRIAL, told(trial))


def _trial_running(facts: Facts) -> Iterator[Hit]:
    trial = facts.extras.trial
    if trial and trial.state == "running":
        yield Hit(TRIAL, told(trial))


def _part_unread(facts: Facts) -> Iterator[Hit]:
    for sentence in facts.unread:
        place = _PLACE.search(sentence)
        yield Hit(place[0] if place else "/", sentence)


RULES = (
    Rule(
        "driver-differs",
        "warning",
        _driver_differs,
        "The GPU is not on the driver that the layout declares.",
        "Run the playbook site; with --check --diff it shows what it would do.",
        "layout",
    ),
    Rule(
        "type-differs",
        "warning",
        _type_differs,
        "The IOMMU group of the GPU does not have the type that the layout declares. The kernel "
        "changes it only while no driver of the group uses DMA; from DMA to DMA-FQ also below one.",
        "Run the playbook site; with --check --diff it shows what it would do.",
        _TYPES,
    ),
    Rule(
        "guest-differs",
        "warning",
        _guest_differs,
        "The guests' configurations give the GPU to somebody else than the layout says.",
        "Correct hostpciN or devN of the guests (playbook assign_gpus), or the layout.",
        "layout",
    ),
    Rule(
        "change-refused",
        "warning",
        _change_refused,
        "The GPU is not as the layout says, and a guard of the module gpu stands against the "
        "change. Evidence and remedy are those of the guard, whose name comes first.",
        "See the guards of the module gpu.",
        "gpu",
    ),
    Rule(
        "unfinished-change",
        "error",
        _unfinished_change,
        "A change of drivers or types was cut off. Cards may be without driver, and services that "
        "were stopped for it may still be.",
        "Run the playbook site, or gpu: each ends or undoes it first, and says what became of it.",
        "gpu",
    ),
    Rule(
        "unbind-stuck",
        "error",
        _unbind_stuck,
        "The driver waits in the kernel for a user who never lets go. Nothing can be done with the "
        "GPU, and a clean shutdown may wait for it, too.",
        "Reboot the host when the other guests allow it (role host_reboot with host_reboot_force). "
        "If the shutdown stalls, cut the power through the BMC.",
        "open-gpu-kernel-modules: kernel-open/nvidia/nv-pci.c, nv_pci_remove_helper",
    ),
    Rule(
        "trial-armed",
        "warning",
        _trial_armed,
        "The next boot tries other IOMMU group types on these GPUs, whoever reboots the host.",
        "If nobody is about to reboot into it, take it back: ansible HOST -b -m "
        "gpuhost.inference.iommu_trial -a state=absent. Then identity_trial may begin anew.",
        "iommu_trial",
    ),
    Rule(
        "trial-running",
        "warning",
        _trial_running,
        "This boot tries IOMMU group types that the layout does not have, and the host reboots by "
        "itself unless somebody confirms it.",
        "Look at the health of the GPUs, then reboot, or stay: ansible HOST -b -m "
        "gpuhost.inference.iommu_trial -a state=confirmed.",
        "iommu_trial",
    ),
    Rule(
        "part-unread",
        "warning",
        _part_unread,
        "A part of the host could not be read, so nothing was concluded from it.",
        "Run the audit as root, and look at the named file.",
        "gpu_host_info",
    ),
)
