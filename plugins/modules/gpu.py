#!/usr/bin/python
# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: gpu
short_description: Bind NVIDIA GPUs to a driver, and set their IOMMU group types
version_added: 0.1.0
author:
  - gpuhost.inference contributors (@gpuhost)
description:
  - Binds the named GPUs, with all functions of their cards, to C(nvidia), to C(vfio-pci) or to no
    driver, and gives their IOMMU groups a type, all or none of it, in one transaction. GPUs may
    swap sides in it.
  - It sets C(driver_override) on each device, and leaves it set, also for C(nvidia). So neither
    another GPU with the same id is touched, nor does a starting virtual machine take this one
    along, as Proxmox does by id.
  - Before anything is changed everything is looked at, and all reasons against it are reported
    together, in RV(guards) and in the message; nothing is changed then. What could not be looked
    at counts as a reason.
  - Where the kernel allows a change of type only without a driver, the GPUs of the call are taken
    off theirs meanwhile.
  - The persistence daemon is asked to let go of GPUs that move, and to take them again. Units in
    O(services) are stopped while they hold one, and started again.
  - What there was is recorded in C(/var/lib/gpuhost) before the first change. When a run is cut
    off, the next one undoes what was half done, unless the host was rebooted, and says so in
    RV(recovered). One host-wide lock keeps two runs apart.
  - An unbind may wait in the kernel for ever. Each write is therefore given O(timeout) seconds,
    and then reported as pending. It is neither repeated nor undone, the GPU is marked, and the host
    needs a reboot.
  - Other failures are undone, and the result says in RV(rolled_back) whether everything is as it
    was. A kernel fault that is logged about a GPU while it moves is a failure.
  - The binding is lost at the next boot, unless the role P(gpuhost.inference.gpu_passthrough#role)
    keeps it.
extends_documentation_fragment:
  - gpuhost.inference.attributes
  - gpuhost.inference.attributes.state_module
options:
  addresses:
    description:
      - PCI addresses of the GPUs, in full (V(0000:41:00.0)) or short form (V(41:00.0)).
      - Other functions of the same card come along by themselves and are not named.
      - Either O(addresses) with O(driver) or O(bindings) is required.
    type: list
    elements: str
  driver:
    description:
      - V(nvidia) for the host and its containers. Other functions of the card get back the
        drivers the kernel finds for them.
      - V(vfio-pci) for virtual machines.
      - V(none) unbinds and keeps every driver away, until the module binds another.
    type: str
    choices: [nvidia, vfio-pci, none]
  iommu_type:
    version_added: 0.2.0
    description:
      - Type for the IOMMU groups of the GPUs; without it they keep theirs. V(auto) stands for the
        type of the boot.
    type: str
    choices: [identity, DMA, DMA-FQ, auto]
  expect: &expect
    description:
      - What the cards must be. A card moved to another slot, or another model in its place, is
        refused then.
    type: dict
    suboptions:
      id:
        description:
          - Vendor and device id, such as V(10de:2bb5).
        type: str
  bindings:
    version_added: 0.2.0
    description:
      - Several of these at once, in one transaction, for a swap or a whole host.
      - RV(gpuhost.inference.gpu_host_info#module:layout.entries) may be given as it is; C(name)
        and C(guest) are not used.
    type: list
    elements: dict
    suboptions:
      addresses:
        description:
          - As O(addresses).
        type: list
        elements: str
        required: true
      driver:
        description:
          - As O(driver).
        type: str
        required: true
        choices: [nvidia, vfio-pci, none]
      iommu_type:
        description:
          - As O(iommu_type); null leaves the type.
        type: str
      expect: *expect
      name:
        description:
          - Not used.
        type: str
      guest:
        description:
          - Not used.
        type: dict
  accept:
    version_added: 0.2.0
    description:
      - Guards to lift, by the names in RV(guards[].id).
      - V(fsp-identity) and V(sme-identity) allow V(identity) where it is known to fail;
        V(guest-config) moves a GPU that a stopped guest is still configured to have;
        V(display), V(kernel-client) and V(mig) move one that drives a display, that nvidia_drm
        uses itself, or that is divided; V(foreign-type) changes the type of a group that holds
        other devices, too.
      - The other guards cannot be lifted.
    type: list
    elements: str
    choices: [mig, guest-config, foreign-type, display, kernel-client, sme-identity, fsp-identity]
    default: []
  services:
    version_added: 0.2.0
    description:
      - Systemd units of the host that may be stopped while a GPU moves that they hold, such as
        V(nvidia-dcgm.service). They are started again in any case.
    type: list
    elements: str
    default: []
  timeout:
    description:
      - Seconds to wait for the kernel to answer one write.
    type: float
    default: 30
  drain_timeout:
    version_added: 0.2.0
    description:
      - Seconds for those to let go who were asked to.
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

- name: Swap two GPUs between a container's side and a virtual machine's
  gpuhost.inference.gpu:
    bindings:
      - {addresses: ["0000:44:00.0"], driver: vfio-pci}
      - {addresses: ["0000:81:00.0"], driver: nvidia, iommu_type: DMA-FQ}
    services: [nvidia-dcgm.service]

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
guards:
  description:
    - All reasons against the change, also those accepted.
  returned: always, unless an option is wrong
  type: list
  elements: dict
  contains:
    id:
      description: Name of the guard.
      type: str
    address:
      description: The GPU.
      type: str
    evidence:
      description: What was read.
      type: str
    remedy:
      description: What to do.
      type: str
    liftable:
      description: Whether O(accept) can lift it.
      type: bool
    accepted:
      description: Whether it did.
      type: bool
  sample:
    - id: in-use
      address: "0000:41:00.0"
      evidence: in use by process 4242 (nvtop; cgroup /user.slice) through /dev/nvidia0
      remedy: stop it first
      liftable: false
      accepted: false
quiesced:
  description: Who was asked to let go, and came back afterwards.
  returned: always, unless an option is wrong
  type: dict
  sample: {persistence: ["0000:41:00.0"], services: [nvidia-dcgm.service]}
recovered:
  description: An earlier run that was cut off, and what became of it; null when there is none.
  returned: always, unless an option is wrong
  type: dict
  sample:
    started: "2026-11-29T08:15:00Z"
    wish: 0000:41:00.0 to driver vfio-pci
    outcome: "undone: all is as it was before"
    writes: []
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
    - Driver and override of each function, before and after, and the type of the group where one
      was asked for. V(any) stands for a driver of the kernel's choice.
  returned: success, or failure after something was written
  type: dict
  sample:
    after: {"0000:81:00.0": {driver: vfio-pci, override: vfio-pci}}
    before: {"0000:81:00.0": {driver: nvidia, override: null}}
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuhost.inference.plugins.module_utils._binding import change
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from ansible_collections.gpuhost.inference.plugins.module_utils._guards import LIFTABLE
from ansible_collections.gpuhost.inference.plugins.module_utils._iommu import TYPES
from ansible_collections.gpuhost.inference.plugins.module_utils._kernel_write import Machine, write
from ansible_collections.gpuhost.inference.plugins.module_utils._moves import CHOICES, Wish
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader
from ansible_collections.gpuhost.inference.plugins.module_utils._transaction import Store


def main() -> None:
    binding: dict[str, dict[str, Any]] = {
        "addresses": {"type": "list", "elements": "str"},
        "driver": {"type": "str", "choices": list(CHOICES)},
        "expect": {"type": "dict", "options": {"id": {"type": "str"}}},
    }
    module = AnsibleModule(
        argument_spec={
            **binding,
            "iommu_type": {"type": "str", "choices": list(TYPES)},
            "bindings": {
                "type": "list",
                "elements": "dict",
                "options": {  # as the layout has them; a null is no choice to AnsibleModule
                    **binding,
                    "addresses": {**binding["addresses"], "required": True},
                    "driver": {**binding["driver"], "required": True},
                    "iommu_type": {"type": "str"},
                    "name": {"type": "str"},
                    "guest": {"type": "dict"},
                },
            },
            "accept": {
                "type": "list",
                "elements": "str",
                "choices": list(LIFTABLE),
                "default": [],
            },
            "services": {"type": "list", "elements": "str", "default": []},
            "timeout": {"type": "float", "default": 30},
            "drain_timeout": {"type": "float", "default": 30},
        },
        required_one_of=[("addresses", "bindings")],
        required_together=[("addresses", "driver")],
        mutually_exclusive=[("addresses", "bindings")],
        supports_check_mode=True,
    )
    options = module.params
    host = Reader()
    wishes = [
        Wish(
            addresses=tuple(one["addresses"]),
            driver=one["driver"],
            type=one["iommu_type"],
            expect_id=(one["expect"] or {}).get("id"),
        )
        for one in ([options] if options["bindings"] is None else options["bindings"])
    ]
    try:
        result = change(
            Machine(host, write, options["timeout"], options["drain_timeout"]),
            wishes,
            store=Store(host),
            accept=options["accept"],
            services=options["services"],
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
