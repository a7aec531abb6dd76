#!/usr/bin/python
# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: gpu
short_description: Bind NVIDIA GPUs to a driver
version_added: 0.1.0
author:
  - gpuhost.inference contributors (@gpuhost)
description:
  - Binds the named GPUs, with all functions of their cards, to C(nvidia), to C(vfio-pci) or to no
    driver, all or none of them.
  - It sets C(driver_override) on each device, and leaves it set, also for C(nvidia). So neither
    another GPU with the same id is touched, nor does a starting virtual machine take this one
    along, as Proxmox does by id.
  - Before a driver is changed everything is looked at, and all reasons against it are reported
    together; nothing is changed then. Reasons are a process that has the GPU open, a running
    guest it belongs to, virtual functions, a device of another card in the IOMMU group, a card
    that is off the bus, and anything that could not be looked at.
  - An unbind may wait in the kernel for ever. Each write is therefore given O(timeout) seconds,
    and then reported as pending. It is neither repeated nor undone, and the host needs a reboot.
  - Other failures are undone, and the result says in RV(rolled_back) whether everything is as it
    was.
  - The binding is lost at the next boot.
extends_documentation_fragment:
  - gpuhost.inference.attributes
  - gpuhost.inference.attributes.state_module
options:
  addresses:
    description:
      - PCI addresses of the GPUs, in full (V(0000:41:00.0)) or short form (V(41:00.0)).
      - Other functions of the same card come along by themselves and are not named.
    type: list
    elements: str
    required: true
  driver:
    description:
      - V(nvidia) for the host and its containers. Other functions of the card get back the
        drivers the kernel finds for them.
      - V(vfio-pci) for virtual machines.
      - V(none) unbinds and keeps every driver away, until the module binds another.
    type: str
    required: true
    choices: [nvidia, vfio-pci, none]
  expect:
    description:
      - What the cards must be. A card moved to another slot, or another model in its place, is
        refused then.
    type: dict
    suboptions:
      id:
        description:
          - Vendor and device id, such as V(10de:2bb5).
        type: str
  timeout:
    description:
      - Seconds to wait for the kernel to answer one write.
    type: float
    default: 30
seealso:
  - module: gpuhost.inference.gpu_info
  - module: gpuhost.inference.iommu_group
"""

EXAMPLES = r"""
- name: Give two GPUs to virtual machines
  gpuhost.inference.gpu:
    addresses: ["0000:81:00.0", "0000:82:00.0"]
    driver: vfio-pci
    expect:
      id: 10de:2bb5

- name: Take one back for containers
  gpuhost.inference.gpu:
    addresses: ["0000:82:00.0"]
    driver: nvidia
  register: taken

- name: Show its new device node, which may be another one than before
  ansible.builtin.debug:
    msg: /dev/nvidia{{ taken.gpus[0].device_minor }}
"""

RETURN = r"""
gpus:
  description:
    - The named GPUs as in RV(gpuhost.inference.gpu_info#module:gpus[]), after the change; in
      check mode as they are.
  returned: success, or failure after something was written
  type: list
  elements: dict
  sample:
    - {address: "0000:81:00.0", driver: vfio-pci, driver_override: vfio-pci}
rolled_back:
  description: Whether a failed change was undone completely.
  returned: success, or failure after something was written
  type: bool
  sample: false
writes:
  description:
    - What was written to the kernel, in order, or would be in check mode. After a failure it
      includes the undoing.
    - A C(path) of C(/sbin/modprobe) means that the module named by C(value) is loaded.
  returned: success, or failure after something was written
  type: list
  elements: dict
  sample:
    - {path: "/sys/bus/pci/devices/0000:81:00.0/driver_override", value: vfio-pci}
    - {path: /sys/bus/pci/drivers/nvidia/unbind, value: "0000:81:00.0"}
    - {path: /sys/bus/pci/drivers_probe, value: "0000:81:00.0"}
diff:
  description:
    - Driver and override of each function, before and after. V(any) stands for a driver of the
      kernel's choice.
  returned: success, or failure after something was written
  type: dict
  sample:
    after: {"0000:81:00.0": {driver: vfio-pci, override: vfio-pci}}
    before: {"0000:81:00.0": {driver: nvidia, override: null}}
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuhost.inference.plugins.module_utils._binding import CHOICES, bind_gpus
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from ansible_collections.gpuhost.inference.plugins.module_utils._kernel_write import Machine, write
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "addresses": {"type": "list", "elements": "str", "required": True},
            "driver": {"type": "str", "required": True, "choices": list(CHOICES)},
            "expect": {"type": "dict", "options": {"id": {"type": "str"}}},
            "timeout": {"type": "float", "default": 30},
        },
        supports_check_mode=True,
    )
    wish = module.params
    try:
        result = bind_gpus(
            Machine(Reader(), write, wish["timeout"]),
            wish["addresses"],
            wish["driver"],
            expect_id=(wish["expect"] or {}).get("id"),
            check=module.check_mode,
        )
    except GpuHostError as error:
        module.fail_json(msg=str(error))
    if "msg" in result:
        module.fail_json(**result)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
