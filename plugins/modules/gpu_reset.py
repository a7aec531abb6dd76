#!/usr/bin/python
# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: gpu_reset
short_description: Reset NVIDIA GPUs that nobody uses, and say whether it helped
version_added: 0.2.0
author:
  - gpuhost.inference contributors (@gpuhost)
description:
  - Takes the driver off each named GPU with all functions of its card, resets the card, and gives
    the driver back; one method after another, until one helps.
  - Whether a method helped is tried, not assumed. The GPU has to answer on the bus; one of
    C(nvidia) has to start when its device node is opened; and the kernel must not have logged a
    fault about it since. A GPU of C(vfio-pci) or without driver cannot be started by the host, so
    for it RV(attempts[].helped) is null at best.
  - When no method helped, or there is none, the module fails, says what was tried and what the
    kernel logged, and names in RV(ill) what is left to do. For a failed FSP (security processor)
    that is a power-off, and no method here helps.
  - Before anything is changed all reasons against it are reported together, in RV(guards) and in
    the message; nothing is changed then. They are those of M(gpuhost.inference.gpu), such as a
    process that uses the GPU or a guest that runs, and one more; a reset of the bus must reach
    nothing but the GPU's own card.
  - Each attempt is a transaction like those of M(gpuhost.inference.gpu), with the same record,
    lock, undoing and time limits. As there, C(driver_override) stays set.
  - A start that was seen is noted in the kernel log, by a line that begins with C(gpuhost), so that
    M(gpuhost.inference.gpu_health_info) knows faults before it as history.
extends_documentation_fragment:
  - gpuhost.inference.attributes
  - gpuhost.inference.attributes.state_module
options:
  addresses:
    description:
      - PCI addresses of the GPUs, in full (V(0000:41:00.0)) or short form (V(41:00.0)).
    type: list
    elements: str
    required: true
  methods:
    description:
      - Methods to try, in this order.
      - V(rebind) resets nothing, it only takes the driver off and gives it back. The others are
        those of the kernel's file C(reset_method). V(bus) of a card with several functions, which
        that file does not offer, goes by the bridge above it, where the kernel can
        (C(reset_subordinate)).
      - Without it, all that the GPU offers and that reach nothing else, least reaching first,
        without V(rebind).
      - A method that a GPU does not offer is an error.
    type: list
    elements: str
    choices: [rebind, device_specific, acpi, flr, af_flr, pm, cxl_bus, bus]
  accept:
    description:
      - Guards to lift, as in O(gpuhost.inference.gpu#module:accept).
    type: list
    elements: str
    choices: [mig, guest-config, foreign-type, display, kernel-client, sme-identity, fsp-identity]
    default: []
  services:
    description:
      - Systemd units of the host that may be stopped while a GPU is reset that they hold, such as
        V(nvidia-dcgm.service). They are started again in any case.
    type: list
    elements: str
    default: []
  timeout:
    description:
      - Seconds to wait for the kernel to answer one write. A reset may take a minute when the card
        is slow to answer.
    type: float
    default: 90
  drain_timeout:
    description:
      - Seconds for those to let go who were asked to.
    type: float
    default: 30
  start_timeout:
    description:
      - Seconds for a GPU to start.
    type: float
    default: 120
seealso:
  - module: gpuhost.inference.gpu
  - module: gpuhost.inference.gpu_health_info
"""

EXAMPLES = r"""
- name: Reset a GPU whose GSP firmware stopped
  gpuhost.inference.gpu_reset:
    addresses: ["0000:44:00.0"]
  register: reset

- name: Show what was tried
  ansible.builtin.debug:
    msg: "{{ reset.attempts }}"

- name: Only have the driver begin anew, stopping DCGM meanwhile
  gpuhost.inference.gpu_reset:
    addresses: ["0000:44:00.0"]
    methods: [rebind]
    services: [nvidia-dcgm.service]
"""

RETURN = r"""
gpus:
  description:
    - The named GPUs as in RV(gpuhost.inference.gpu_info#module:gpus[]), afterwards; in check mode
      as they are.
  returned: always, unless an option is wrong
  type: list
  elements: dict
  sample:
    - {address: "0000:44:00.0", driver: nvidia, driver_override: nvidia}
attempts:
  description: What was tried, in order, or would be in check mode.
  returned: always, unless an option is wrong
  type: list
  elements: dict
  contains:
    address:
      description: The GPU.
      type: str
    method:
      description: As in O(methods).
      type: str
    outcome:
      description:
        - V(done), or V(failed) when the kernel refused a write or the driver did not come back;
          V(refused) when nothing was written, by a guard or since the host changed during the run;
          V(stuck) when the kernel has not answered in time, which ends the
          run; V(planned) in check mode.
      type: str
    helped:
      description: Whether the GPU works now; null where that cannot be told.
      type: bool
    reason:
      description: What that rests on.
      type: str
    log:
      description: What the kernel logged about the GPU meanwhile.
      type: list
      elements: str
  sample:
    - address: "0000:44:00.0"
      method: flr
      outcome: done
      helped: true
      reason: it was started, and no fault was logged
      log: []
ill:
  description:
    - The GPUs that no method helped, or for which there is none that reaches them alone. One that
      was only refused is not in it.
  returned: always, unless an option is wrong
  type: list
  elements: dict
  contains:
    address:
      description: The GPU.
      type: str
    reason:
      description: What is wrong with it.
      type: str
    ladder:
      description:
        - What is left to try, the next one first; names as in
          RV(gpuhost.inference.gpu_health_info#module:gpus[].ladder).
      type: list
      elements: str
  sample: []
guards:
  description:
    - All reasons against it, also those accepted, as in RV(gpuhost.inference.gpu#module:guards).
  returned: always, unless an option is wrong
  type: list
  elements: dict
  sample:
    - id: reset-reach
      address: "0000:44:00.0"
      evidence: a reset of its bus would also reset 0000:45:00.0, which are not of its card
      remedy: use a method that resets the GPU alone, or power the host off
      liftable: false
      accepted: false
recovered:
  description:
    - An earlier run that was cut off, and what became of it, as in
      RV(gpuhost.inference.gpu#module:recovered); null when there is none.
  returned: always, unless an option is wrong
  type: dict
  sample: null
writes:
  description:
    - What was written to the kernel, in order. In check mode what all methods together would write;
      those after the first that helps are not needed.
  returned: always, unless an option is wrong
  type: list
  elements: dict
  sample:
    - {path: /sys/bus/pci/drivers/nvidia/unbind, value: "0000:44:00.0"}
    - {path: "/sys/bus/pci/devices/0000:44:00.0/reset", value: "1"}
    - {path: /sys/bus/pci/drivers_probe, value: "0000:44:00.0"}
diff:
  description: Driver and override of each function, before and after.
  returned: always, unless an option is wrong
  type: dict
  sample:
    after: {"0000:44:00.0": {driver: nvidia, override: nvidia}}
    before: {"0000:44:00.0": {driver: nvidia, override: null}}
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from ansible_collections.gpuhost.inference.plugins.module_utils._guards import LIFTABLE
from ansible_collections.gpuhost.inference.plugins.module_utils._kernel_write import Machine, write
from ansible_collections.gpuhost.inference.plugins.module_utils._reset import (
    METHODS,
    Order,
    reset,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader
from ansible_collections.gpuhost.inference.plugins.module_utils._transaction import Store


def main() -> None:
    names = {"type": "list", "elements": "str"}
    module = AnsibleModule(
        argument_spec={
            "addresses": {**names, "required": True},
            "methods": {**names, "choices": list(METHODS)},
            "accept": {**names, "choices": list(LIFTABLE), "default": []},
            "services": {**names, "default": []},
            "timeout": {"type": "float", "default": 90},
            "drain_timeout": {"type": "float", "default": 30},
            "start_timeout": {"type": "float", "default": 120},
        },
        supports_check_mode=True,
    )
    options = module.params
    host = Reader()
    try:
        result = reset(
            Machine(host, write, options["timeout"], options["drain_timeout"]),
            options["addresses"],
            Order(
                options["methods"],
                options["accept"],
                options["services"],
                options["start_timeout"],
            ),
            store=Store(host),
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
