# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: trial_lessons
short_description: Say what a trial of an IOMMU group type has shown
version_added: 0.2.0
description:
  - Compares what was read of a host in the boot of a trial with what was wanted, for each GPU and
    for the platform.
  - V(works) needs every GPU of the trial to have the type, to be healthy, and, if copies between
    the GPUs were tested, every copy to be right. V(fails) is shown by a GPU that is ill or a copy
    that is wrong. All else is V(unknown).
options:
  _input:
    description:
      - What is known; C(addresses) and C(type) of the trial, C(after), a result of
        M(gpuhost.inference.gpu_host_info) in its boot, C(p2p_before) and C(p2p_after), results
        of M(gpuhost.inference.gpu_p2p_info), and C(failure), a sentence about what went wrong.
        Only the first two are required.
    type: dict
    required: true
author:
  - gpuhost.inference contributors (@gpuhost)
seealso:
  - module: gpuhost.inference.iommu_trial
"""

EXAMPLES = r"""
- name: Say in a few lines what was learned
  ansible.builtin.debug:
    msg: "{{ (known | gpuhost.inference.trial_lessons).lines }}"
  vars:
    known:
      addresses: ["0000:41:00.0"]
      type: identity
      after: "{{ host }}"
"""

RETURN = r"""
_value:
  description: >-
    C(verdict), C(works), C(fails) or C(unknown), with its C(reason); C(gpus), for each its
    C(type), C(fsp), C(verdict), C(reason), C(ladder) and the C(evidence) from the kernel log;
    C(power), whether only the power helps a GPU; C(p2p), the verdicts C(before) and C(after);
    C(platform); and all of it as C(lines) of text.
  type: dict
"""

from collections.abc import Mapping, Sequence
from typing import Any, Callable

from ansible.errors import AnsibleFilterError

_ILL = ("failed", "lost", "degraded")


def trial_lessons(known: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(known, Mapping) or not known.get("addresses") or not known.get("type"):
        raise AnsibleFilterError("trial_lessons: give at least addresses and type of the trial")
    after = known.get("after") or {}
    p2p = {when: _copies(known.get(f"p2p_{when}")) for when in ("before", "after")}
    gpus = [_gpu(address, after) for address in sorted(known["addresses"])]
    verdict, reason = _verdict(known, gpus, p2p["after"])
    lessons = {
        "verdict": verdict,
        "reason": reason,
        "type": known["type"],
        "gpus": gpus,
        "power": any(gpu["ladder"][:1] == ["power-off"] for gpu in gpus),
        "p2p": {when: copies.get("verdict") for when, copies in p2p.items()},
        "platform": _platform(after, p2p["after"]),
    }
    return {**lessons, "lines": _lines(lessons)}


def _copies(result: Any) -> Mapping[str, Any]:
    copies = result.get("p2p") if isinstance(result, Mapping) else None
    return copies if isinstance(copies, Mapping) else {}


def _gpu(address: str, after: Mapping[str, Any]) -> dict[str, Any]:
    read = _by_address(after.get("gpus"), address)
    judged = _by_address((after.get("health") or {}).get("gpus"), address)
    return {
        "address": address,
        "name": read.get("name"),
        "type": (read.get("iommu_group") or {}).get("type"),
        "fsp": judged.get("fsp", "unknown"),
        "verdict": judged.get("verdict", "unknown"),
        "reason": judged.get("reason", "it was not looked at in the boot of the trial"),
        "evidence": list(judged.get("evidence", ())),
        "ladder": list(judged.get("ladder", ())),
    }


def _by_address(items: Sequence[Mapping[str, Any]] | None, address: str) -> Mapping[str, Any]:
    return next((item for item in items or () if item["address"] == address), {})


def _verdict(
    known: Mapping[str, Any], gpus: Sequence[Mapping[str, Any]], copies: Mapping[str, Any]
) -> tuple[str, str]:
    wanted, failure = known["type"], known.get("failure")
    other = [
        f"{gpu['address']} {gpu['type'] or 'unknown'}" for gpu in gpus if gpu["type"] != wanted
    ]
    if other:
        said = f"type {wanted} was not in force: {', '.join(other)}"
        return "unknown", f"{said} ({failure})" if failure else said
    between = f"the GPUs start, but copies between them: {copies.get('reason')}"
    ill = [gpu for gpu in gpus if gpu["verdict"] in _ILL or gpu["fsp"] == "failed"]
    wrong = [f"{gpu['address']}: {gpu['reason']}" for gpu in ill]
    if not wrong and copies.get("verdict") == "broken":
        wrong = [between]
    if wrong:
        return "fails", "; ".join(wrong)
    unsure = [f"{gpu['address']}: {gpu['reason']}" for gpu in gpus if gpu["verdict"] != "healthy"]
    if not unsure and copies and copies.get("verdict") != "works":
        unsure = [between]
    if unsure or failure:
        return "unknown", "; ".join(unsure or [str(failure)])
    return "works", "every GPU started" + (", every copy was right" if copies else "")


def _platform(after: Mapping[str, Any], copies: Mapping[str, Any]) -> dict[str, Any]:
    host = after.get("host") or {}
    return {
        "kernel": host.get("kernel"),
        "iommu": (host.get("iommu") or {}).get("vendor"),
        "mode": host.get("mode"),
        "driver": (copies.get("basis") or {}).get("driver"),
    }


def _lines(lessons: Mapping[str, Any]) -> list[str]:
    platform = lessons["platform"]
    lines = [
        f"{lessons['type']} {lessons['verdict']} here: {lessons['reason']}",
        f"platform: kernel {platform['kernel']}, IOMMU {platform['iommu']}, mode "
        f"{platform['mode']}, driver {platform['driver'] or 'unknown'}",
    ]
    for gpu in lessons["gpus"]:
        lines.append(
            f"{gpu['address']} {gpu['name'] or ''}: type {gpu['type']}, FSP {gpu['fsp']}, "
            f"{gpu['verdict']} ({gpu['reason']})"
        )
        lines += [f"    {line}" for line in gpu["evidence"][:2]]
    before, after = (lessons["p2p"][when] or "not tested" for when in ("before", "after"))
    lines.append(f"copies between the GPUs: {before} before, {after} in the trial")
    return lines


class FilterModule:
    def filters(self) -> dict[str, Callable[..., dict[str, Any]]]:
        return {"trial_lessons": trial_lessons}
