# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: recovery
short_description: Tell which GPUs of a host are ill, and what to try next
version_added: 0.2.0
description:
  - What the playbook C(recover) decides by. Each ill GPU goes up its ladder, from the rung at which
    its fault is known to react, and no rung is tried twice.
  - The lowest rung that any of them stands on comes first; but a reboot is left out when a GPU
    needs the power cut anyway, and that may be done.
  - V(application) and V(hardware) are told and left to people. A rung that something bars, such as
    a running guest of others bars a reboot, is told with that.
positional: _input
options:
  _input:
    description: Result of M(gpuhost.inference.gpu_host_info).
    type: dict
    required: true
  addresses:
    description:
      - GPUs to look at, whatever their verdict but V(healthy). Without it those of the layout that
        are V(failed) or V(lost). Text with commas or spaces, as AWX hands over, counts as a list.
    type: list
    elements: str
    default: []
  timeline:
    description:
      - What was done so far; entries with C(rung) and C(addresses) count as tried. Their GPUs are
        ill until they are V(healthy), also when they are not there any more.
    type: list
    elements: dict
    default: []
  reboot_allowed:
    description: Whether the host may be rebooted or powered off.
    type: bool
    default: false
  power_tasks:
    description: Tasks file that cuts the power; empty when there is none.
    type: str
    default: ""
author:
  - gpuhost.inference contributors (@gpuhost)
seealso:
  - module: gpuhost.inference.gpu_health_info
  - module: gpuhost.inference.gpu_reset
"""

EXAMPLES = r"""
- name: Show what would help
  ansible.builtin.debug:
    msg: "{{ gpu_host | gpuhost.inference.recovery }}"
  # addresses: ["0000:41:00.0"]
  # ill: [{address: "0000:41:00.0", verdict: failed, reason: ..., left: [power-off, hardware]}]
  # rung: null
  # say: ["0000:41:00.0 is failed: its FSP did not come up. ..."]
"""

RETURN = r"""
_value:
  description:
    - C(ill), the ill GPUs with C(verdict), C(reason) and the rungs C(left).
    - C(rung), what to do next, V(null) for nothing; and C(addresses), the GPUs it is for.
    - C(retype), those whose IOMMU group has another type than the layout declares.
    - C(entries), the entries of the layout whose container has a GPU that is ill or was; and
      C(running), the numbers of those containers that run.
    - C(say), a sentence for each ill GPU.
  type: dict
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Callable

from ansible.errors import AnsibleFilterError
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from ansible_collections.gpuhost.inference.plugins.module_utils._fault_kinds import (
    BY_ID,
    RUNGS,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._pci import normalize_address

_ORDER = tuple(RUNGS)
_ILL = ("failed", "lost")
_VANISHED = {  # what was treated, and is not among the GPUs afterwards
    "verdict": "lost",
    "reason": "it is not on the PCI bus any more",
    "ladder": BY_ID["all-ones"].ladder,
}
_OF_HOST = ("reboot", "power-off")  # rungs that are for all GPUs at once
_OF_PEOPLE = "that is for a person to do"


def recovery(
    facts: Mapping[str, Any],
    timeline: Sequence[Mapping[str, Any]] = (),
    *,
    addresses: str | Iterable[str] = (),
    reboot_allowed: bool = False,
    power_tasks: str = "",
) -> dict[str, Any]:
    """Return what is ill on a host and what to try next."""
    if facts.get("gpus", ()) is None:
        raise AnsibleFilterError(f"the GPUs could not be read: {'; '.join(facts['unread'])}")
    treated = {at for step in timeline for at in step.get("addresses", ())}
    known = {at: {**_VANISHED, "address": at} for at in treated}
    known.update({gpu["address"]: gpu for gpu in facts["health"]["gpus"]})
    named = _named(addresses, known)
    entries = facts["layout"]["entries"]
    ours = named or [at for entry in entries for at in entry["addresses"] if at in known]
    ill = [
        {**known[at], "left": _left(known[at]["ladder"], at, timeline)}
        for at in sorted(treated.union(ours))
        if known[at]["verdict"] in _ILL
        or (known[at]["verdict"] != "healthy" and (named or at in treated))
    ]
    bars = _bars(facts, reboot_allowed, power_tasks)
    firsts = {gpu["left"][0] for gpu in ill if gpu["left"] and not bars[gpu["left"][0]]}
    rung = min(firsts, key=_ORDER.index, default=None)
    if rung == "reboot" and "power-off" in firsts:
        rung = "power-off"
    concerned = {gpu["address"] for gpu in ill} | treated
    held = [
        entry
        for entry in entries
        if (entry["guest"] or {}).get("kind") == "lxc" and concerned & set(entry["addresses"])
    ]
    vmids = {entry["guest"]["vmid"] for entry in held}
    return {
        "ill": [{key: gpu[key] for key in ("address", "verdict", "reason", "left")} for gpu in ill],
        "rung": rung,
        "addresses": [
            gpu["address"]
            for gpu in ill
            if rung in _OF_HOST or (rung and gpu["left"][:1] == [rung])
        ],
        "retype": sorted(
            {one["subject"] for one in facts["findings"] if one["id"] == "type-differs"}
            & {gpu["address"] for gpu in ill}
        ),
        "entries": held,
        "running": sorted(
            guest["vmid"]
            for guest in facts["guests"]
            if guest["vmid"] in vmids and guest["running"]
        ),
        "say": [_sentence(gpu, timeline, bars) for gpu in ill],
    }


def _bars(
    facts: Mapping[str, Any], reboot_allowed: bool, power_tasks: str
) -> dict[str, Sequence[str]]:
    """Return what stands against each rung."""
    down = [] if reboot_allowed else ["host_reboot_allowed is false"]
    cut = [] if power_tasks else ["host_power_tasks is not set"]
    others = [*facts["layout"]["problems"], *facts["host"]["reboot"]["problems"]]
    return {
        **dict.fromkeys(_ORDER, ()),
        "application": (_OF_PEOPLE,),
        "hardware": (_OF_PEOPLE,),
        "reboot": [*down, *others],
        "power-off": [*down, *cut, *others],
    }


def _named(addresses: str | Iterable[str], known: Mapping[str, Any]) -> list[str]:
    words = addresses.replace(",", " ").split() if isinstance(addresses, str) else addresses
    try:
        named = [normalize_address(address) for address in words]
    except GpuHostError as error:
        raise AnsibleFilterError(str(error)) from error
    for address in named:
        if address not in known:
            raise AnsibleFilterError(
                f"{address} is no NVIDIA GPU of this host; they are at {', '.join(known) or 'none'}"
            )
    return named


def _tried(address: str, timeline: Iterable[Mapping[str, Any]]) -> list[str]:
    return [step["rung"] for step in timeline if address in step.get("addresses", ())]


def _left(ladder: Sequence[str], address: str, timeline: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the rungs above all that were tried on a GPU: a power-off is a reset, too."""
    highest = max((_ORDER.index(rung) for rung in _tried(address, timeline)), default=-1)
    return [rung for rung in ladder if _ORDER.index(rung) > highest]


def _sentence(
    gpu: Mapping[str, Any],
    timeline: Iterable[Mapping[str, Any]],
    bars: Mapping[str, Sequence[str]],
) -> str:
    """Say what a GPU has, what did not help, what is next, and what is missing for that."""
    tried = _tried(gpu["address"], timeline)
    words = [f"{gpu['address']} is {gpu['verdict']}: {gpu['reason']}."]
    help_ = "" if gpu["verdict"] == "unknown" else " without help"
    if tried:
        words.append(f"Tried{help_}: {', '.join(tried)}.")
    if gpu["verdict"] == "unknown" and tried:
        words.append("So nobody can tell whether that helped.")
    if not gpu["left"]:
        return " ".join([*words, "Nothing else is known to help."])
    rung = gpu["left"][0]
    words.append(f"Needed: {rung} ({RUNGS[rung]}).")
    if bars[rung]:
        words.append(f"Not done: {'; '.join(bars[rung])}.")
    return " ".join(words)


class FilterModule:
    def filters(self) -> dict[str, Callable[..., dict[str, Any]]]:
        return {"recovery": recovery}
