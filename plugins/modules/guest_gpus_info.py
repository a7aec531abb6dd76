#!/usr/bin/python
# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: guest_gpus_info
short_description: Tell what it takes to give the guests the GPUs of the layout
version_added: 0.2.0
author:
  - gpuhost.inference contributors (@gpuhost)
description:
  - Compares the layout with the GPUs and the guests' configurations, and tells which guests have to
    be stopped, which GPUs get another driver or group type, and which configurations change.
  - The playbook C(assign_gpus) acts on the result. Nothing is changed here.
extends_documentation_fragment:
  - gpuhost.inference.attributes
  - gpuhost.inference.attributes.info_module
options:
  layout:
    description:
      - The layout, as in O(gpuhost.inference.gpu_host_info#module:layout).
    type: list
    elements: raw
    required: true
  layout_unassigned:
    description:
      - What a GPU is that no entry names, V(refuse) for a mistake, V(keep) for somebody else's.
    type: str
    choices: [refuse, keep]
    default: refuse
  release:
    description:
      - Guests that may lose all their GPUs, by number. A guest that neither an entry nor this list
        names is somebody else's. It is never stopped nor changed.
    type: list
    elements: int
    default: []
  services:
    description:
      - Units that are stopped while GPUs move, so their processes do not count as users.
    type: list
    elements: str
    default: [nvidia-persistenced.service]
seealso:
  - module: gpuhost.inference.guest_gpus
  - module: gpuhost.inference.gpu_host_info
"""

EXAMPLES = r"""
- name: See what a changed layout asks for
  gpuhost.inference.guest_gpus_info:
    layout: "{{ gpu_layout }}"
  register: plan

- name: Show it
  ansible.builtin.debug:
    msg: "{{ plan.problems or plan.steps }}"
"""

RETURN = r"""
problems:
  description:
    - What is wrong with the layout, and what stands against bringing it about. Only when this is
      empty may the rest be acted upon.
  returned: success
  type: list
  elements: str
  sample: []
needed:
  description: Whether anything has to be done.
  returned: success
  type: bool
  sample: true
kept:
  description:
    - Whether the host keeps a layout at boot, so that a changed one has to be kept as well.
  returned: success
  type: bool
  sample: true
forget:
  description:
    - Whether an unfinished run noted guests to start again, and all of them run by now or are gone.
      Then the note, C(/var/lib/gpuhost/assign.json), is to be removed.
  returned: success
  type: bool
  sample: false
steps:
  description: What has to be done, in order, a sentence each.
  returned: success
  type: list
  elements: str
  sample:
    - shut down lxc 100 (ct100)
    - take 0000:44:00.0 from lxc 100 (ct100)
    - bind 0000:44:00.0 to vfio-pci (nvidia now)
    - give 0000:44:00.0 to qemu 200 (confidential)
    - start lxc 100 (ct100)
state:
  description: How the guests of the layout stand, a sentence each.
  returned: success
  type: list
  elements: str
  sample: ["lxc 100 (ct100) runs, its configuration names 0000:41:00.0"]
guests:
  description:
    - The guests of the layout and of O(release), in the order in which Proxmox starts them.
  returned: success
  type: list
  elements: dict
  contains:
    kind:
      description: V(lxc) or V(qemu).
      type: str
      returned: always
      sample: lxc
    vmid:
      description: Its number.
      type: int
      returned: always
      sample: 100
    name:
      description: Its name.
      type: str
      returned: always
      sample: ct100
    path:
      description: Its configuration.
      type: str
      returned: always
      sample: /etc/pve/lxc/100.conf
    running:
      description: Whether it runs, V(null) when that could not be found out.
      type: bool
      returned: always
      sample: true
    has:
      description:
        - GPUs its configuration names. A container's line for a GPU without driver is not seen.
      type: list
      elements: str
      returned: always
      sample: ["0000:41:00.0", "0000:44:00.0"]
    wants:
      description: GPUs the layout gives it.
      type: list
      elements: str
      returned: always
      sample: ["0000:41:00.0"]
    keeps:
      description: GPUs of RV(guests[].has) that the layout gives it, too.
      type: list
      elements: str
      returned: always
      sample: ["0000:41:00.0"]
    changes:
      description: Whether its configuration has to change.
      type: bool
      returned: always
      sample: true
    loses:
      description: Whether something must go from it before the GPUs are bound.
      type: bool
      returned: always
      sample: true
    gains:
      description: Whether GPUs must be added to it after they are bound.
      type: bool
      returned: always
      sample: false
    stop:
      description: Whether it has to be stopped for that, or for its GPUs to be bound anew.
      type: bool
      returned: always
      sample: true
    start:
      description:
        - Whether it is to be started at the end, since it is stopped for the change, or was
          stopped by a run that did not get to its end.
      type: bool
      returned: always
      sample: true
    fit:
      description: Whether it may be started with its configuration and drivers as they are.
      type: bool
      returned: always
      sample: true
bindings:
  description: GPUs whose driver or group type is not that of the layout.
  returned: success
  type: list
  elements: dict
  sample:
    - address: "0000:44:00.0"
      driver: nvidia
      type: DMA-FQ
      wanted_driver: vfio-pci
      wanted_type: DMA-FQ
entries:
  description:
    - The layout with its addresses resolved, as in
      RV(gpuhost.inference.gpu_host_info#module:layout.entries).
  returned: success
  type: list
  elements: dict
  sample: []
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuhost.inference.plugins.module_utils._assignment import read_assignment
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "layout": {"type": "list", "elements": "raw", "required": True},
            "layout_unassigned": {
                "type": "str",
                "choices": ["refuse", "keep"],
                "default": "refuse",
            },
            "release": {"type": "list", "elements": "int", "default": []},
            "services": {
                "type": "list",
                "elements": "str",
                "default": ["nvidia-persistenced.service"],
            },
        },
        supports_check_mode=True,
    )
    asked = module.params
    try:
        result = read_assignment(
            Reader(),
            asked["layout"],
            asked["layout_unassigned"],
            release=asked["release"],
            services=asked["services"],
        )
    except GpuHostError as error:
        module.fail_json(msg=str(error))
    module.exit_json(**result)


if __name__ == "__main__":
    main()
