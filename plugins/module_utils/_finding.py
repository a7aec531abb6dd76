# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.

"""What a rule is, what it judges, and what several families of rules look at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ansible_collections.gpuhost.inference.plugins.module_utils._boot import Boot
from ansible_collections.gpuhost.inference.plugins.module_utils._faults import Health
from ansible_collections.gpuhost.inference.plugins.module_utils._finding_facts import Extras
from ansible_collections.gpuhost.inference.plugins.module_utils._gpu import Gpu
from ansible_collections.gpuhost.inference.plugins.module_utils._iommu import IommuGroup
from ansible_collections.gpuhost.inference.plugins.module_utils._layout import Entry
from ansible_collections.gpuhost.inference.plugins.module_utils._owners import Guest, Owner

SEVERITIES = ("error", "warning", "note")
SYSFS_TOOLS = "Proxmox VE: PVE/SysFSTools.pm of pve-common, pci_dev_group_bind_to_vfio"


@dataclass(frozen=True)
class Facts:
    """What the rules judge. A part that could not be read is `None` and named in `unread`."""

    boot: Boot
    mode: str
    sme: bool | None
    default_type: str | None
    gpus: Sequence[Gpu]
    groups: Sequence[IommuGroup] | None
    guests: Sequence[Guest] | None
    health: Health
    layout: Sequence[Entry]
    extras: Extras
    unread: Sequence[str]


@dataclass(frozen=True)
class Hit:
    """One subject a rule speaks about, with what was read and where; `remedy` if it is special.

    A subject is a PCI address, a guest (`qemu 200`), or a file.
    """

    subject: str
    evidence: str
    remedy: str | None = None


@dataclass(frozen=True)
class Rule:
    """One kind of finding. The texts are for people: what it means, what to do, who says so."""

    id: str
    severity: str
    check: Callable[[Facts], Iterable[Hit]]
    why: str
    remedy: str
    reference: str


def configured(gpu: Gpu, kind: str | None = None) -> Iterator[Owner]:
    """Yield the owners of a GPU by guest configuration."""
    for owner in gpu.owners:
        if owner.source == "config" and kind in (None, owner.kind):
            yield owner


def laid_out(facts: Facts) -> Iterator[tuple[Entry, Gpu]]:
    """Yield every GPU of the layout with its entry."""
    gpus: Mapping[str, Gpu] = {gpu.address: gpu for gpu in facts.gpus}
    for entry in facts.layout:
        for address in entry.addresses:
            yield entry, gpus[address]


def for_vms(facts: Facts) -> Iterator[tuple[Gpu, str]]:
    """Yield every GPU that is for a virtual machine, with what says so."""
    wanted = {gpu.address: entry.name for entry, gpu in laid_out(facts) if _is_vfio(entry)}
    for gpu in facts.gpus:
        owner = next(configured(gpu, "qemu"), None)
        if owner:
            yield gpu, f"VM {owner.vmid} has {owner.detail}"
        elif gpu.address in wanted:
            yield gpu, f"layout {wanted[gpu.address]} wants vfio-pci"
        elif gpu.driver == "vfio-pci":
            yield gpu, "driver vfio-pci"


def _is_vfio(entry: Entry) -> bool:
    return entry.driver == "vfio-pci"


def guest_name(entry: Entry) -> str:
    """Return the guest of a layout entry as a subject."""
    return f"{entry.guest.kind} {entry.guest.vmid}" if entry.guest else "no guest"


def equals(gpus: Iterable[Gpu]) -> list[list[Gpu]]:
    """Return the GPUs in lots of equal cards, by id and subsystem; a card without twin is none."""
    lots: dict[Hashable, list[Gpu]] = {}
    for gpu in gpus:
        lots.setdefault((gpu.id, gpu.subsystem_id, gpu.sriov.physfn is None), []).append(gpu)
    return [lot for lot in lots.values() if len(lot) > 1]


def usual(values: Iterable[Hashable]) -> Hashable | None:
    """Return the value that more than half of all have, `None` when there is none."""
    counted = Counter(values)
    value, count = counted.most_common(1)[0]
    return value if count * 2 > sum(counted.values()) else None
