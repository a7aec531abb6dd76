# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: trial_layout
short_description: Return a layout in which some GPUs have another IOMMU group type
version_added: 0.2.0
description:
  - Takes the entries of a resolved layout, and sets the type of the named GPUs. An entry of which
    only some GPUs are named becomes two, with the same guest.
  - The playbook C(gpuhost.inference.identity_trial) judges the boot of a trial by it.
positional: addresses, type
options:
  _input:
    description: RV(gpuhost.inference.gpu_host_info#module:layout.entries).
    type: list
    elements: dict
    required: true
  addresses:
    description: Full PCI addresses of the GPUs.
    type: list
    elements: str
    required: true
  type:
    description: The type they get.
    type: str
    required: true
author:
  - gpuhost.inference contributors (@gpuhost)
seealso:
  - module: gpuhost.inference.iommu_trial
"""

EXAMPLES = r"""
- name: Read the host by its layout
  gpuhost.inference.gpu_host_info:
    layout: "{{ gpu_layout }}"
  register: host

- name: Judge it by the layout with one GPU on identity
  gpuhost.inference.gpu_host_info:
    layout: "{{ host.layout.entries | gpuhost.inference.trial_layout(tried, 'identity') }}"
  vars:
    tried: ["0000:41:00.0"]
"""

RETURN = r"""
_value:
  description: The entries, in the form in which an inventory declares them.
  type: list
  elements: dict
"""

from collections.abc import Mapping, Sequence
from typing import Any, Callable


def trial_layout(
    entries: Sequence[Mapping[str, Any]],
    addresses: Sequence[str],
    type: str,  # noqa: A002
) -> list[dict[str, Any]]:
    found = []
    for entry in entries:
        tried = [address for address in entry["addresses"] if address in addresses]
        others = [address for address in entry["addresses"] if address not in addresses]
        if others:
            found.append({**entry, "addresses": others})
        if tried:
            name = f"{entry['name']}, {type}" if others else entry["name"]
            found.append({**entry, "name": name, "addresses": tried, "iommu_type": type})
    return found


class FilterModule:
    def filters(self) -> dict[str, Callable[..., list[dict[str, Any]]]]:
        return {"trial_layout": trial_layout}
