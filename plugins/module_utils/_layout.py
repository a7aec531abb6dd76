# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.

"""The declared layout of a host, checked as a whole: which GPU has which driver, type and guest."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from ansible_collections.gpuhost.inference.plugins.module_utils._gpu import Gpu
from ansible_collections.gpuhost.inference.plugins.module_utils._pci import normalize_address

DRIVERS = ("nvidia", "vfio-pci", "none")
TYPES = ("DMA", "DMA-FQ", "identity", "auto")
KINDS = {"lxc": "nvidia", "qemu": "vfio-pci"}  # a guest of this kind needs its GPUs on this driver
_KEYS = ("name", "addresses", "numa_node", "expect", "driver", "iommu_type", "guest")
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


@dataclass(frozen=True)
class WantedGuest:
    """The guest that is to have an entry's GPUs."""

    kind: str
    vmid: int
    sev_snp: bool


@dataclass(frozen=True)
class Entry:
    """One entry of the layout with its addresses resolved; `None` where it asks for nothing."""

    name: str
    addresses: tuple[str, ...]
    expect_id: str | None
    driver: str
    iommu_type: str | None
    guest: WantedGuest | None


def entry_as_result(entry: Entry) -> dict[str, Any]:
    """Return an entry as modules show it, and as the module `gpu` takes it in `bindings`."""
    return {
        "name": entry.name,
        "addresses": entry.addresses,
        "expect": {"id": entry.expect_id} if entry.expect_id else None,
        "driver": entry.driver,
        "iommu_type": entry.iommu_type,
        "guest": asdict(entry.guest) if entry.guest else None,
    }


@dataclass(frozen=True)
class Layout:
    """The resolved layout; it may only be used when `problems` is empty."""

    entries: tuple[Entry, ...]
    unassigned: tuple[str, ...]
    problems: tuple[str, ...]


def resolve_layout(
    layout: object,
    gpus: Sequence[Gpu],
    guests: Collection[tuple[str, int]] | None,
    unassigned: str = "refuse",
    describe: Callable[[str], str | None] = lambda _address: None,
) -> Layout:
    """Resolve a declared layout against a host and list everything that is wrong with it.

    Args:
        layout: What a user wrote, of any type: every YAML value is answered, none raises.
        gpus: The GPUs of the host.
        guests: (kind, vmid) of the guests the host knows, `None` when that could not be read.
        unassigned: `keep` allows GPUs that no entry names, `refuse` does not.
        describe: Says what a device that is no GPU is, `None` when there is no such device.
    """
    if layout is None:
        return Layout((), tuple(gpu.address for gpu in gpus), ())
    if not isinstance(layout, (list, tuple)):
        problem = f"the layout is {_shown(layout)}, not a list: write a list of entries"
        return Layout((), tuple(gpu.address for gpu in gpus), (problem,))
    drafts = [_Draft(number, raw, gpus, describe) for number, raw in enumerate(layout, 1)]
    problems = [problem for draft in drafts for problem in draft.problems]
    problems += _twice(drafts)
    entries = tuple(draft.entry for draft in drafts if draft.entry)
    problems += _guest_problems(entries, guests)
    problems += _extra_gpus(entries, gpus)
    problems += _snp_problems(entries)
    claimed = {address for draft in drafts for address in draft.claimed}
    left = tuple(gpu.address for gpu in gpus if gpu.address not in claimed)
    if left and unassigned != "keep":
        problems.append(
            f"no layout entry names {', '.join(left)}: add an entry for each GPU, "
            "or let the rest stay as it is (option layout_unassigned: keep, in an inventory "
            "gpu_layout_unassigned: keep)"
        )
    return Layout(entries, left, tuple(problems))


class _Draft:
    """One entry while it is read: every problem is noted, so that all come in one answer."""

    def __init__(
        self,
        number: int,
        raw: object,
        gpus: Sequence[Gpu],
        describe: Callable[[str], str | None],
    ) -> None:
        self.label = f"layout entry {number}"
        self.problems: list[str] = []
        self.claimed: tuple[str, ...] = ()
        self.entry: Entry | None = None
        if not isinstance(raw, Mapping):
            self._problem(f"is {_shown(raw)}: write keys and values, {', '.join(_KEYS)}")
            return
        self.name = self._name(raw.get("name"), number)
        self._unknown_keys(raw, _KEYS, "")
        expect = self._expect(raw.get("expect"))
        driver = self._word(raw.get("driver"), "driver", DRIVERS)
        if raw.get("driver") is None:
            self._problem(f"has no driver: give one of {', '.join(DRIVERS)}")
        iommu_type = self._word(raw.get("iommu_type"), "iommu_type", TYPES)
        guest = self._guest(raw.get("guest"), driver)
        self.claimed = self._addresses(raw, gpus, describe)
        others = [gpu for gpu in gpus if gpu.address in self.claimed and gpu.id != expect]
        if expect and others:
            there = ", ".join(f"{gpu.id} at {gpu.address}" for gpu in others)
            self._problem(
                f"expects {expect}, but there is {there}: "
                "cards may have moved, compare with gpu_info and correct the addresses"
            )
        if driver and self.claimed:
            self.entry = Entry(self.name, self.claimed, expect, driver, iommu_type, guest)

    def _problem(self, text: str) -> None:
        self.problems.append(f"{self.label} {text}")

    def _name(self, raw: object, number: int) -> str:
        if isinstance(raw, str) and raw.strip():
            self.label += f" ({_shown(raw.strip())})"
            return raw.strip()
        self._problem("has no name: give it a short text, it is used in messages and in the report")
        return f"entry {number}"

    def _unknown_keys(self, raw: Mapping[object, object], known: Sequence[str], where: str) -> None:
        for key in raw:
            if key not in known:
                near = difflib.get_close_matches(str(key), known, 1)
                hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
                self._problem(f"has an unknown key {_shown(key)}{where}: {hint}")

    def _word(self, raw: object, key: str, choices: Sequence[str]) -> str | None:
        if raw is None:
            return None
        for choice in choices:
            if isinstance(raw, str) and raw.strip().lower() == choice.lower():
                return choice
        self._problem(f"has {key} {_shown(raw)}: give one of {', '.join(choices)}")
        return None

    def _expect(self, raw: object) -> str | None:
        if raw is None:
            return None
        if not isinstance(raw, Mapping):
            self._problem(f"has expect {_shown(raw)}: write expect: {{id: '10de:2bb5'}}")
            return None
        self._unknown_keys(raw, ("id",), " in expect")
        id_ = raw.get("id")
        if isinstance(id_, str) and re.fullmatch(r"[0-9a-fA-F]{4}:[0-9a-fA-F]{4}", id_.strip()):
            return id_.strip().lower()
        self._problem(
            f"expects the id {_shown(id_)}: write vendor:device in quotes, as in '10de:2bb5'"
        )
        return None

    def _guest(self, raw: object, driver: str | None) -> WantedGuest | None:
        if raw is None:
            return None
        if not isinstance(raw, Mapping):
            self._problem(f"has guest {_shown(raw)}: write guest: {{kind: lxc, vmid: 100}}")
            return None
        self._unknown_keys(raw, ("kind", "vmid", "sev_snp"), " in guest")
        kind = self._word(raw.get("kind") or "", "guest kind", tuple(KINDS))
        vmid = _number(raw.get("vmid"))
        if vmid is None or vmid < 100:
            self._problem(f"has guest vmid {_shown(raw.get('vmid'))}: give a number from 100 on")
        sev_snp = _truth(raw.get("sev_snp", False))
        if sev_snp is None:
            self._problem(f"has guest sev_snp {_shown(raw.get('sev_snp'))}: give true or false")
        if sev_snp and kind == "lxc":
            self._problem("asks for sev_snp, which containers do not have: remove it")
        if kind and driver and KINDS[kind] != driver:
            self._problem(
                f"gives GPUs on driver {driver} to a guest of kind {kind}, "
                f"which needs {KINDS[kind]}: change the driver or the guest"
            )
        if kind is None or vmid is None or vmid < 100:
            return None
        return WantedGuest(kind, vmid, bool(sev_snp))

    def _addresses(
        self,
        raw: Mapping[object, object],
        gpus: Sequence[Gpu],
        describe: Callable[[str], str | None],
    ) -> tuple[str, ...]:
        by_hand, node = raw.get("addresses"), raw.get("numa_node")
        if (by_hand is None) == (node is None):
            say = "neither addresses nor" if node is None else "both addresses and"
            self._problem(f"has {say} numa_node: give one of the two")
            return ()
        if by_hand is None:
            return self._of_node(node, gpus)
        items = by_hand.split(",") if isinstance(by_hand, str) else by_hand
        if not isinstance(items, (list, tuple)) or not items:
            self._problem(f"has addresses {_shown(by_hand)}: give a list of PCI addresses")
            return ()
        found = [self._address(item, gpus, describe) for item in items]
        known = [address for address in found if address]
        for address in sorted({address for address in known if known.count(address) > 1}):
            self._problem(f"names {address} twice: remove one")
        return tuple(sorted(set(known)))

    def _of_node(self, raw: object, gpus: Sequence[Gpu]) -> tuple[str, ...]:
        node = _number(raw)
        if node is None:
            self._problem(f"has numa_node {_shown(raw)}: give a number")
            return ()
        found = tuple(gpu.address for gpu in gpus if gpu.numa_node == node)
        if not found:
            nodes = sorted({gpu.numa_node for gpu in gpus if gpu.numa_node is not None})
            have = (
                f"GPUs are on node {', '.join(map(str, nodes))}"
                if nodes
                else ("no GPU of this host says its node, use addresses")
            )
            self._problem(f"asks for NUMA node {node}, which has no GPU: {have}")
        return found

    def _address(
        self, raw: object, gpus: Sequence[Gpu], describe: Callable[[str], str | None]
    ) -> str | None:
        if not isinstance(raw, str):
            # YAML 1.1 reads 0000:41:00.0 as a number in base 60
            self._problem(f"names {_shown(raw)} as an address: put each address in quotes")
            return None
        try:
            address = normalize_address(raw)
        except GpuHostError:
            self._problem(
                f"names {_shown(raw)}, which is no PCI address: "
                "write domain:bus:device.function as in 0000:41:00.0"
            )
            return None
        all_addresses = [gpu.address for gpu in gpus]
        if address in all_addresses:
            return address
        what = describe(address)
        if what:
            self._problem(f"names {address}, which is no NVIDIA GPU but {what}: name GPUs only")
            return None
        near = difflib.get_close_matches(address, all_addresses, 3, 0.8) or all_addresses
        have = f"near it are the GPUs {', '.join(sorted(near))}" if near else "there is no GPU"
        self._problem(f"names {address}, and this host has no such device: {have}")
        return None


def _twice(drafts: Sequence[_Draft]) -> list[str]:
    first: dict[str, str] = {}
    names: dict[str, str] = {}
    problems = []
    for draft in drafts:
        for address in draft.claimed:
            if address in first:
                problems.append(
                    f"{draft.label} names {address}, which {first[address]} names already: "
                    "give each GPU to one entry"
                )
            first.setdefault(address, draft.label)
        if draft.entry and draft.entry.name in names:
            problems.append(
                f"{draft.label} has the name of {names[draft.entry.name]}: give each its own"
            )
        if draft.entry:
            names.setdefault(draft.entry.name, draft.label)
    return problems


def _guest_problems(
    entries: Sequence[Entry], guests: Collection[tuple[str, int]] | None
) -> list[str]:
    problems = []
    for entry in entries:
        if not entry.guest:
            continue
        kind, vmid = entry.guest.kind, entry.guest.vmid
        what = f"layout entry {_shown(entry.name)} gives its GPUs to {kind} {vmid}"
        if guests is None:
            problems.append(
                f"{what}, but the guests of this host could not be read: check /etc/pve"
            )
        elif (kind, vmid) not in guests:
            other = next((have for have, number in guests if number == vmid), None)
            have = f"{vmid} is of kind {other} here" if other else "this host has no such guest"
            problems.append(f"{what}, but {have}: create it first or correct kind and vmid")
    return problems


def _extra_gpus(entries: Sequence[Entry], gpus: Sequence[Gpu]) -> list[str]:
    """A VM takes every GPU of its configuration when it starts, whoever has it then."""
    given: dict[int, set[str]] = {}
    for entry in entries:
        if entry.guest and entry.guest.kind == "qemu":
            given.setdefault(entry.guest.vmid, set()).update(entry.addresses)
    return [
        f"{gpu.address} stands in the configuration of qemu {owner.vmid} ({owner.detail}), but its "
        "layout entry does not name it, and the VM would take it at its start: correct one of them"
        for gpu in gpus
        for owner in gpu.owners
        if owner.kind == "qemu" and owner.source == "config"
        if owner.vmid in given and gpu.address not in given[owner.vmid]
    ]


def _snp_problems(entries: Sequence[Entry]) -> list[str]:
    """With SEV-SNP on, the AMD IOMMU allows no identity domain for any device of the host."""
    snp = [entry.name for entry in entries if entry.guest and entry.guest.sev_snp]
    return [
        f"layout entry {_shown(entry.name)} asks for identity, which no group may have on a host "
        f"with SEV-SNP guests (entry {_shown(snp[0])}): use DMA-FQ, or give up sev_snp"
        for entry in entries
        if snp and entry.iommu_type == "identity"
    ]


def _number(raw: object) -> int | None:
    """Understand a number that may come as text, as from a survey."""
    if isinstance(raw, str) and re.fullmatch(r"\s*[0-9]{1,9}\s*", raw):
        return int(raw)
    return raw if isinstance(raw, int) and not isinstance(raw, bool) else None


def _truth(raw: object) -> bool | None:
    word = str(raw).strip().lower() if isinstance(raw, (str, bool, int)) else ""
    return True if word in _TRUE else False if word in _FALSE else None


def _shown(raw: object) -> str:
    """Quote a value of a user, short; `repr` lets no control character through."""
    text = repr(raw)
    return text if len(text) <= 60 else f"{text[:57]}..."
