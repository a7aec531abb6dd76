#!/usr/bin/python
# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: iommu_group
short_description: Set the type of a GPU's IOMMU group
version_added: 0.1.0
author:
  - gpuhost.inference contributors (@gpuhost)
description:
  - Sets how the kernel maps the DMA of a GPU and of all other devices in its IOMMU group.
  - The kernel changes a type only while no driver of the group uses DMA and no virtual machine
    has the group open. The one exception is from V(DMA) to V(DMA-FQ). C(vfio-pci) alone, without
    a virtual machine, does not stand in the way from Linux 6.4 on. Otherwise use
    O(gpuhost.inference.gpu#module:iommu_type), which takes the GPU off its driver meanwhile.
  - The type is lost at the next boot, and whenever the device is removed and found again.
extends_documentation_fragment:
  - gpuhost.inference.attributes
  - gpuhost.inference.attributes.state_module
options:
  address:
    description:
      - PCI address of the GPU whose group is meant. Group numbers are not used, since they change
        between boots.
    type: str
    required: true
  type:
    description:
      - V(identity) maps nothing, a GPU uses physical addresses. It is refused on a host with
        SEV-SNP, and unless lifted by O(accept), on one with memory encryption and for GPUs with a
        security processor (FSP).
      - V(DMA) maps strictly, V(DMA-FQ) maps and flushes lazily, which is faster.
      - V(auto) is the type the group gets at boot. It is computed, so a second run changes nothing.
    type: str
    required: true
    choices: [identity, DMA, DMA-FQ, auto]
  accept:
    description:
      - Risks to take knowingly.
      - V(fsp-identity) allows V(identity) for a GPU with an FSP, which may then fail to boot
        until power is cut.
      - V(sme-identity) allows V(identity) with C(mem_encrypt=on).
      - V(foreign-type) changes the type of a group that also holds devices which are not functions
        of this card.
    type: list
    elements: str
    choices: [foreign-type, sme-identity, fsp-identity]
    default: []
  timeout:
    description:
      - Seconds to wait for the kernel to answer the write.
    type: float
    default: 30
seealso:
  - module: gpuhost.inference.iommu_group_info
  - module: gpuhost.inference.gpu
"""

EXAMPLES = r"""
- name: Map lazily, which needs no unbinding when the group is strict now
  gpuhost.inference.iommu_group:
    address: "0000:41:00.0"
    type: DMA-FQ

- name: Go back to what the group gets at boot
  gpuhost.inference.iommu_group:
    address: "0000:41:00.0"
    type: auto

- name: Change the type of a GPU that nvidia has
  gpuhost.inference.gpu:
    addresses: ["0000:41:00.0"]
    driver: nvidia
    iommu_type: DMA
"""

RETURN = r"""
group:
  description:
    - The group as in RV(gpuhost.inference.iommu_group_info#module:groups[]), after the change; in
      check mode as it is.
  returned: always, unless an option is wrong
  type: dict
  sample:
    number: 42
    type: DMA-FQ
    members:
      - address: "0000:41:00.0"
        class: "0x030200"
        driver: nvidia
        id: "10de:2bb5"
        is_gpu: true
    reserved_regions: []
guards:
  description: All reasons against the change, as in RV(gpuhost.inference.gpu#module:guards).
  returned: always, unless an option is wrong
  type: list
  elements: dict
  sample: []
recovered:
  description:
    - An earlier run that was cut off, and what became of it, as in
      RV(gpuhost.inference.gpu#module:recovered).
  returned: always, unless an option is wrong
  type: dict
  sample: null
writes:
  description: What was written to the kernel, or would be in check mode.
  returned: success
  type: list
  elements: dict
  sample:
    - {path: /sys/kernel/iommu_groups/42/type, value: DMA-FQ}
diff:
  description: The type before and after.
  returned: success
  type: dict
  sample: {after: {"0000:41:00.0": DMA-FQ}, before: {"0000:41:00.0": DMA}}
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuhost.inference.plugins.module_utils._binding import set_group_type
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from ansible_collections.gpuhost.inference.plugins.module_utils._iommu import TYPES
from ansible_collections.gpuhost.inference.plugins.module_utils._kernel_write import Machine, write
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader
from ansible_collections.gpuhost.inference.plugins.module_utils._transaction import Store


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "address": {"type": "str", "required": True},
            "type": {"type": "str", "required": True, "choices": list(TYPES)},
            "accept": {
                "type": "list",
                "elements": "str",
                "choices": ["foreign-type", "sme-identity", "fsp-identity"],
                "default": [],
            },
            "timeout": {"type": "float", "default": 30},
        },
        supports_check_mode=True,
    )
    options = module.params
    host = Reader()
    try:
        result = set_group_type(
            Machine(host, write, options["timeout"]),
            options["address"],
            options["type"],
            store=Store(host),
            accept=options["accept"],
            check=module.check_mode,
        )
    except GpuHostError as error:
        module.fail_json(msg=str(error))
    for text in result.pop("warnings"):
        module.warn(text)
    if "msg" in result:
        module.fail_json(**result)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
