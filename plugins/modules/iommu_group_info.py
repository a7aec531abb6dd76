#!/usr/bin/python
# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: iommu_group_info
short_description: List IOMMU groups with their type and members
version_added: 0.1.0
author:
  - gpuhost.inference contributors (@gpuhost)
description:
  - Lists the IOMMU groups of the host. No group at all means that no IOMMU is in use, whatever
    the kernel command line says.
  - The type is the one of the group's default domain. While a virtual machine has the group open,
    its own domain is in force and the type has no effect.
extends_documentation_fragment:
  - gpuhost.inference.attributes
  - gpuhost.inference.attributes.info_module
options:
  sysroot:
    description:
      - Folder with a captured host's C(/sys), C(/proc) and so on, to judge it offline.
    type: path
    default: /
seealso:
  - module: gpuhost.inference.iommu_group
  - module: gpuhost.inference.gpu_info
"""

EXAMPLES = r"""
- name: List IOMMU groups
  gpuhost.inference.iommu_group_info:
  register: iommu

- name: Refuse to go on without an IOMMU
  ansible.builtin.assert:
    that: iommu.groups | length > 0
    fail_msg: No IOMMU is in use. Enable it in the firmware.

- name: Show which types are in use, and the one groups get at boot
  ansible.builtin.debug:
    msg: "{{ iommu.groups | map(attribute='type') | unique }}, by default {{ iommu.default_type }}"
"""

RETURN = r"""
groups:
  description: The groups, by number.
  returned: success
  type: list
  elements: dict
  contains:
    number:
      description: Number of the group. It may be another one after the next boot.
      returned: success
      type: int
      sample: 42
    type:
      description: Type of the group's default domain, V(null) on kernels before 5.11.
      returned: success
      type: str
      choices: [identity, DMA, DMA-FQ, blocked, unmanaged]
      sample: DMA-FQ
    members:
      description: Devices of the group, by address.
      returned: success
      type: list
      elements: dict
      contains:
        address:
          description: PCI address.
          returned: success
          type: str
          sample: "0000:41:00.0"
        class:
          description: PCI class.
          returned: success
          type: str
          sample: "0x030200"
        id:
          description: Vendor and device id.
          returned: success
          type: str
          sample: "10de:2bb5"
        driver:
          description: Driver bound to the device, V(null) for none.
          returned: success
          type: str
          sample: nvidia
        is_gpu:
          description: Whether it is an NVIDIA GPU.
          returned: success
          type: bool
          sample: true
    reserved_regions:
      description:
        - Bus addresses that are kept free, with C(start), C(end) (the last one) and C(type).
        - A region of type V(direct) makes the kernel refuse some types.
      returned: success
      type: list
      elements: dict
      sample:
        - {end: 4277141503, start: 4276092928, type: msi}
default_type:
  description:
    - Type that groups get at boot, computed from the command line, the kernel's build options and
      whether the IOMMU is an emulated one. V(null) when that does not decide it, or without an
      IOMMU.
  returned: success
  type: str
  choices: [identity, DMA, DMA-FQ]
  sample: DMA-FQ
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from ansible_collections.gpuhost.inference.plugins.module_utils._iommu import (
    default_type,
    read_groups,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._pci import as_result
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader


def main() -> None:
    module = AnsibleModule(
        argument_spec={"sysroot": {"type": "path", "default": "/"}}, supports_check_mode=True
    )
    host = Reader(module.params["sysroot"])
    try:
        groups = [as_result(group) for group in read_groups(host)]
        default = default_type(host)
    except GpuHostError as error:
        module.fail_json(msg=str(error))
    module.exit_json(changed=False, groups=groups, default_type=default)


if __name__ == "__main__":
    main()
