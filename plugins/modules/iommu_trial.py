#!/usr/bin/python
# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: iommu_trial
short_description: Try an IOMMU group type on GPUs for one boot
version_added: 0.2.0
author:
  - gpuhost.inference contributors (@gpuhost)
description:
  - Arms a trial. The next boot of the host gives the named GPUs the type before C(nvidia) gets
    them, and notes on disk that it did so before it does. No further boot does it again, however
    that one ends.
  - A boot that takes a trial and is not confirmed in time reboots the host by itself, with whatever
    guests run then. The way back needs neither this module nor a control node. Should the shutdown
    hang in a driver, only a watchdog (C(RebootWatchdogSec) of systemd) or the BMC ends it.
  - The playbook C(gpuhost.inference.identity_trial) goes all the way, and reports what
    was learned.
  - The host has to keep its GPUs by the role P(gpuhost.inference.gpu_passthrough#role), whose boot
    program takes the trial.
extends_documentation_fragment:
  - gpuhost.inference.attributes
  - gpuhost.inference.attributes.state_module
options:
  state:
    description:
      - V(armed) has the next boot try it. Nothing is changed in the running one.
      - V(confirmed) tells the running boot, which tries it, to stay. The types are as before after
        the next one in any case; the role P(gpuhost.inference.gpu_passthrough#role) keeps a type
        for good.
      - V(absent) disarms. A trial that is in force only ends with its boot, so then it is an error.
    type: str
    choices: [armed, confirmed, absent]
    default: armed
  addresses:
    description:
      - PCI addresses of the GPUs to try it on. They must be for C(nvidia) in the layout that the
        host keeps.
      - Needed for O(state=armed).
    type: list
    elements: str
    default: []
  type:
    description:
      - The type to try.
      - V(identity) is refused on a host with SEV-SNP, and with memory encryption unless O(accept)
        lifts that.
    type: str
    choices: [identity, DMA, DMA-FQ]
    default: identity
  accept:
    description:
      - Risks to take knowingly, as in O(gpuhost.inference.gpu#module:accept). That a security
        processor (FSP) may fail is what a trial finds out, and needs no acceptance. A group with
        devices of others has no trial.
    type: list
    elements: str
    choices: [sme-identity]
    default: []
  valid_for:
    description:
      - Seconds from now until which the boot has to begin, at most a week; a later one leaves it
        alone.
    type: int
    default: 3600
  confirm_timeout:
    description:
      - Seconds after its start within which the boot has to be confirmed, at least 60. Then it
        reboots.
    type: int
    default: 1800
seealso:
  - module: gpuhost.inference.iommu_group
  - module: gpuhost.inference.gpu_health_info
  - module: gpuhost.inference.gpu_p2p_info
"""

EXAMPLES = r"""
- name: Have the next boot try identity on two GPUs
  gpuhost.inference.iommu_trial:
    addresses: ["0000:41:00.0", "0000:42:00.0"]

- name: Reboot into it, which the role refuses while guests of others run
  ansible.builtin.include_role:
    name: gpuhost.inference.host_reboot
  vars:
    host_reboot_allowed: true
    host_reboot_always: true
    host_reboot_trial: true

- name: Look whether they came up, once something has opened them
  gpuhost.inference.gpu_health_info:
    addresses: ["0000:41:00.0", "0000:42:00.0"]
  register: judged

- name: Stay in this boot if they did; otherwise it ends by itself
  gpuhost.inference.iommu_trial:
    state: confirmed
  when: judged.gpus | rejectattr('verdict', 'eq', 'healthy') | length == 0

- name: Change your mind before the reboot
  gpuhost.inference.iommu_trial:
    state: absent
"""

RETURN = r"""
trial:
  description: The trial, as it is now or would be after a run without check mode.
  returned: always, unless an option is wrong
  type: dict
  sample: null
  contains:
    state:
      description:
        - V(armed) for the next boot, V(running) in force and not yet confirmed, V(confirmed) in
          force until this boot ends, V(ended) history.
      returned: success
      type: str
      choices: [armed, running, confirmed, ended]
      sample: armed
    text:
      description: The same in a sentence.
      returned: success
      type: str
      sample: the next boot, if it begins before 2026-11-30T12:00:00Z, tries type identity for
        0000:41:00.0
    type:
      description: The type tried.
      returned: success
      type: str
      sample: identity
    gpus:
      description: Vendor and device id of the GPUs it is for, by address.
      returned: success
      type: dict
      sample: {"0000:41:00.0": "10de:2bb5"}
    accept:
      description: The guards lifted for it; V(fsp-identity) always is.
      returned: success
      type: list
      elements: str
      sample: [fsp-identity]
    armed:
      description: When it was armed, in UTC.
      returned: success
      type: str
      sample: "2026-11-30T11:00:00Z"
    since:
      description: The same in seconds since 1970.
      returned: success
      type: float
      sample: 1796036400.0
    armed_boot:
      description: Id of the boot it was armed in.
      returned: success
      type: str
      sample: 0d1b7f4e-6a86-4f6b-9b5e-0a3f5f0f9c11
    expires:
      description: Seconds since 1970 after which no boot takes it.
      returned: success
      type: float
      sample: 1796040000.0
    confirm:
      description: Seconds after its start within which the boot has to be confirmed.
      returned: success
      type: int
      sample: 1800
    boot:
      description: Id of the boot that took it, V(null) before.
      returned: success
      type: str
      sample: null
    outcome:
      description: How it ended, in words; V(null) before.
      returned: success
      type: str
      sample: null
guards:
  description:
    - All reasons against arming, as in RV(gpuhost.inference.gpu#module:guards). Besides guards of
      that module there are V(same-type), V(no-group), V(old-kernel), V(unfinished-change),
      V(no-way-back), V(not-kept), V(type-too-late), V(initramfs-incomplete), V(next-boot), and
      V(guest-starts), a guest of somebody else that would start and then run during the way back.
    - V(var-apart) is a host whose C(/var) is not on the root file system.
  returned: always, unless an option is wrong
  type: list
  elements: dict
  sample: []
diff:
  description: The trial before and after, each in a sentence.
  returned: success
  type: dict
  sample: {after: "the next boot tries type identity for 0000:41:00.0", before: ""}
"""

import time

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuhost.inference.plugins.module_utils._arming import Wish, change_trial
from ansible_collections.gpuhost.inference.plugins.module_utils._command import run
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {
                "type": "str",
                "choices": ["armed", "confirmed", "absent"],
                "default": "armed",
            },
            "addresses": {"type": "list", "elements": "str", "default": []},
            "type": {
                "type": "str",
                "choices": ["identity", "DMA", "DMA-FQ"],
                "default": "identity",
            },
            "accept": {
                "type": "list",
                "elements": "str",
                "choices": ["sme-identity"],
                "default": [],
            },
            "valid_for": {"type": "int", "default": 3600},
            "confirm_timeout": {"type": "int", "default": 1800},
        },
        supports_check_mode=True,
    )
    options = dict(module.params)
    state, check = options.pop("state"), module.check_mode
    try:
        result = change_trial(
            Reader(), state, Wish(**options), run=run, now=time.time(), check=check
        )
    except GpuHostError as error:
        module.fail_json(msg=str(error))
    if "msg" in result:
        module.fail_json(**result)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
