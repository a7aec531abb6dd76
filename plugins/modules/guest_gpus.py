#!/usr/bin/python
# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: guest_gpus
short_description: Make a Proxmox guest's configuration name exactly these GPUs
version_added: 0.2.0
author:
  - gpuhost.inference contributors (@gpuhost)
description:
  - Writes the C(devN) entries of a container, or the C(hostpciN) entries of a virtual machine, so
    that they name the given GPUs and no other. Entries of other devices are left alone.
  - Entries of GPUs that stay keep their number and all their options. A GPU that comes takes the
    number and the options of one that goes, save those that describe the card (such as C(romfile)
    and C(device-id)), else the lowest free number and what the other entries have in common.
  - The node of a container's GPU is looked up by its PCI address, since C(/dev/nvidiaN) changes
    whenever GPUs are bound anew. So bind first (M(gpuhost.inference.gpu)), then run this module.
  - Changes go through C(pct set) and C(qm set) on the host, which validate and lock, and are read
    back. After a failure the former settings are set again. The Proxmox API is not used, since it
    offers C(devN) and C(hostpciN) with plain addresses to C(root@pam) alone.
  - Refused, all reasons together - a guest that runs or is locked, a GPU that is not on the driver
    its guest needs, a GPU that another guest names or uses, a container with raw C(lxc.) lines
    that hand in NVIDIA nodes beside its C(devN) entries.
extends_documentation_fragment:
  - gpuhost.inference.attributes
  - gpuhost.inference.attributes.state_module
options:
  kind:
    description:
      - V(lxc) for a container, V(qemu) for a virtual machine.
    type: str
    required: true
    choices: [lxc, qemu]
  vmid:
    description:
      - Number of the guest.
    type: int
    required: true
  addresses:
    description:
      - PCI addresses of all GPUs it is to have, in full (V(0000:41:00.0)) or short form. An empty
        list takes all away.
    type: list
    elements: str
    required: true
  uid:
    description:
      - Owner of the container's nodes, of the driver's common ones too. Without it entries keep
        what they have, and new ones take it from the first.
    type: int
  gid:
    description:
      - Group of the container's nodes, as O(uid).
    type: int
  mode:
    description:
      - Access mode of the container's nodes, octal with a leading zero as V('0666'), as O(uid).
        Without any, Proxmox makes them V('0660').
    type: str
  control_nodes:
    description:
      - Give a container C(/dev/nvidiactl), C(/dev/nvidia-uvm) and C(/dev/nvidia-uvm-tools) as
        well, which CUDA needs. Those that are there are never taken away.
    type: bool
    default: true
  pcie:
    description:
      - Give new entries of a virtual machine C(pcie=1), which needs the machine type C(q35).
    type: bool
    default: true
  allow_from:
    description:
      - Guests whose configuration may still name one of the GPUs, by number.
    type: list
    elements: int
    default: []
  assume_ready:
    description:
      - In check mode, take the guest for stopped and the GPUs for bound, as in a play that sees to
        both before. The number of a node that is not there yet is then shown as its address.
      - Without check mode it has no effect.
    type: bool
    default: false
seealso:
  - module: gpuhost.inference.guest_gpus_info
  - module: gpuhost.inference.gpu
notes:
  - A machine that uses PCI mappings keeps using them. Mappings belong to the whole cluster and are
    never changed here. RV(mapping_problems) says which one is missing, with the command that makes
    it.
"""

EXAMPLES = r"""
- name: Bind a GPU for containers
  gpuhost.inference.gpu:
    addresses: ["0000:44:00.0"]
    driver: nvidia

- name: Give a container four GPUs, with nodes that every user of it may open
  gpuhost.inference.guest_gpus:
    kind: lxc
    vmid: 100
    addresses: ["0000:41:00.0", "0000:42:00.0", "0000:43:00.0", "0000:44:00.0"]
    mode: "0666"

- name: Take all GPUs from a virtual machine
  gpuhost.inference.guest_gpus:
    kind: qemu
    vmid: 200
    addresses: []
"""

RETURN = r"""
guest:
  description: The guest, and the GPUs its configuration names, or would name in check mode.
  returned: success, or when the change is refused or failed
  type: dict
  sample:
    kind: lxc
    vmid: 100
    name: ct100
    path: /etc/pve/lxc/100.conf
    addresses: ["0000:41:00.0", "0000:42:00.0"]
writes:
  description:
    - The settings that were changed, or would be. A C(value) of V(null) means that the setting is
      removed.
  returned: success, or when the change is refused or failed
  type: list
  elements: dict
  sample:
    - {path: /etc/pve/lxc/100.conf, key: dev3, value: "/dev/nvidia3,gid=0,mode=0666"}
    - {path: /etc/pve/lxc/100.conf, key: dev7, value: null}
leftovers:
  description:
    - Raw lines of a container that hand in NVIDIA nodes, or a device number that no driver has
      any more. They are refused, not removed, since C(pct set) cannot.
  returned: success, or when the change is refused or failed
  type: list
  elements: dict
  sample:
    - line: "lxc.cgroup2.devices.allow: c 195:* rwm"
      remedy: "remove the line from the configuration: devN entries allow their nodes themselves"
mapping_problems:
  description: Why the PCI mappings of this node do not fit what is wanted, and what would.
  returned: success, or when the change is refused or failed
  type: list
  elements: str
  sample: []
diff:
  description: The lines before and after.
  returned: success, or when the change is refused or failed
  type: dict
  sample:
    before_header: /etc/pve/qemu-server/200.conf
    after_header: /etc/pve/qemu-server/200.conf
    before: ""
    after: "hostpci2: 0000:44:00.0,pcie=1\n"
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuhost.inference.plugins.module_utils._command import run
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from ansible_collections.gpuhost.inference.plugins.module_utils._guests import Wish, set_gpus
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "kind": {"type": "str", "required": True, "choices": ["lxc", "qemu"]},
            "vmid": {"type": "int", "required": True},
            "addresses": {"type": "list", "elements": "str", "required": True},
            "uid": {"type": "int"},
            "gid": {"type": "int"},
            "mode": {"type": "str"},
            "control_nodes": {"type": "bool", "default": True},
            "pcie": {"type": "bool", "default": True},
            "allow_from": {"type": "list", "elements": "int", "default": []},
            "assume_ready": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    asked = module.params
    names = ("uid", "gid", "mode", "control_nodes", "pcie")
    try:
        result = set_gpus(
            Reader(),
            run,
            asked["kind"],
            asked["vmid"],
            Wish(tuple(asked["addresses"]), *(asked[name] for name in names)),
            allow_from=asked["allow_from"],
            assume=asked["assume_ready"],
            check=module.check_mode,
        )
    except GpuHostError as error:
        module.fail_json(msg=str(error))
    if "msg" in result:
        module.fail_json(**result)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
