#!/usr/bin/python

# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: sglang_gpus_info
short_description: Tell which GPUs an SGLang server would use, and who holds them
version_added: 0.2.0
description:
  - Concludes from a server's flags and environment which GPUs of this machine or container it
    takes, and looks which other processes compute on them. A server that starts on a GPU that
    another one has fails minutes later, or hangs.
  - A process that only watches a GPU, such as nvidia-persistenced or an exporter of metrics, holds
    none. In a container, processes outside it are not seen; the memory that C(nvidia-smi) shows as
    used tells of them.
  - Run it as root, or the files of other users' processes cannot be looked at.
author:
  - gpuhost.inference contributors (@gpuhost)
extends_documentation_fragment:
  - gpuhost.inference.attributes
  - gpuhost.inference.attributes.info_module
options:
  wanted:
    description:
      - The flags of the server, as for M(gpuhost.inference.sglang_flags_info).
    type: raw
    required: true
  environment:
    description:
      - Environment of the server, for C(CUDA_VISIBLE_DEVICES).
    type: dict
    default: {}
  unit:
    description:
      - Name of the server's systemd service, whose own processes are no strangers.
      - Without it, every process is one.
    type: str
seealso:
  - module: gpuhost.inference.sglang_info
"""

EXAMPLES = r"""
- name: Look who holds the first four GPUs
  gpuhost.inference.sglang_gpus_info:
    wanted: {tensor-parallel-size: 4}
    unit: sglang
  register: result

- name: Stop when somebody else does
  ansible.builtin.assert:
    that: result.strangers | length == 0
    fail_msg: "{{ result.strangers | join('; ') }}"
"""

RETURN = r"""
gpus:
  description: The GPUs the server takes, in its order. Empty without CUDA, or when they are not
    there.
  returned: always
  type: list
  elements: dict
  contains:
    node:
      description: Device node.
      returned: always
      type: str
      sample: /dev/nvidia0
    address:
      description: PCI address, V(null) when the driver does not tell.
      returned: always
      type: str
      sample: "0000:41:00.0"
    uuid:
      description: The driver's name for it, V(null) when the driver does not tell.
      returned: always
      type: str
      sample: GPU-7d1c0d9e-51b7-0b2f-8d83-8a2f3c1e9b54
fault:
  description: Why the GPUs are not there, V(null) when they are.
  returned: always
  type: str
  sample: its flags want 4 GPUs, of the indices 0 to 3; there is /dev/nvidia0
strangers:
  description: Sentences, one for each reason to say that the GPUs are taken.
  returned: always
  type: list
  elements: str
  sample: ["process 812 (python3 train.py) holds /dev/nvidia0"]
unknown:
  description: What could not be looked at and leaves it open whether there are more.
  returned: always
  type: list
  elements: str
  sample: []
"""

from dataclasses import asdict
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuhost.inference.plugins.module_utils import _sglang_gpus as gpus
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_check import parse_wanted
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader


def run(host: Reader, wanted: Any, environment: dict[str, Any], unit: str | None) -> dict[str, Any]:
    texts = {name: str(value) for name, value in environment.items()}
    share = gpus.share_of(gpus.read_cards(host), parse_wanted(wanted), texts)
    holding = gpus.read_holding(host, share.gpus)
    return {
        "changed": False,
        "gpus": [asdict(gpu) for gpu in share.gpus],
        "fault": share.fault,
        "strangers": gpus.strangers(holding, unit),
        "unknown": gpus.doubts(holding),
    }


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "wanted": {"type": "raw", "required": True},
            "environment": {"type": "dict", "default": {}},
            "unit": {"type": "str"},
        },
        supports_check_mode=True,
    )
    try:
        result = run(Reader(), **module.params)
    except GpuHostError as error:
        module.fail_json(msg=str(error))
    module.exit_json(**result)


if __name__ == "__main__":
    main()
