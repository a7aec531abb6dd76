#!/usr/bin/python

# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: sglang_mtp_info
short_description: Tell how to switch on multi-token prediction for a model on an installed SGLang
version_added: 0.1.0
description:
  - Decides from a model's C(config.json), the names of its tensors and the version of the installed
    SGLang which flags and environment switch on multi-token prediction (MTP), which SGLang drives
    as speculative decoding with the algorithm C(NEXTN). The names of the flags and what must go
    with them have changed in most releases.
  - Checks that the checkpoint has its MTP tensors. SGLang does not - it starts without them,
    reports ready, never accepts a draft, and is slower than without speculation. Quantised uploads
    often lack them.
  - Nothing of SGLang is run, and no GPU is needed.
author:
  - gpuhost.inference contributors (@gpuhost)
extends_documentation_fragment:
  - gpuhost.inference.attributes
  - gpuhost.inference.attributes.info_module
options:
  python:
    description:
      - Path of the Python interpreter that runs SGLang. It is not run; the libraries beside it are
        looked at.
      - Exactly one of O(python) and O(package) is needed.
    type: path
  package:
    description:
      - The folder C(sglang) of the package, or the folder that holds it.
    type: path
  model_path:
    description:
      - The folder of the model.
    type: path
    required: true
  num_steps:
    description:
      - How many tokens are drafted before the model verifies them; it verifies one more.
    type: int
    default: 3
seealso:
  - module: gpuhost.inference.sglang_flags_info
  - module: gpuhost.inference.sglang_info
"""

EXAMPLES = r"""
- name: See how MTP is switched on for this model
  gpuhost.inference.sglang_mtp_info:
    python: /opt/sglang/bin/python
    model_path: /srv/models/qwen3.5-122b
  register: result

- name: Stop when the model cannot do it here
  ansible.builtin.assert:
    that: result.mtp.supported
    fail_msg: "{{ result.mtp.problems | map(attribute='message') | join('; ') }}"
"""

RETURN = r"""
version:
  description: Version of SGLang, V(null) when the package names none.
  returned: always
  type: str
  sample: 0.5.23
mtp:
  description: How to switch on MTP.
  returned: always
  type: dict
  contains:
    supported:
      description:
        - Whether it can work. V(null) when that cannot be told, for example as the names of the
          model's MTP tensors are not known.
      returned: always
      type: bool
      sample: true
    architecture:
      description: The model's architecture, V(null) when its configuration names none.
      returned: always
      type: str
      sample: Qwen3_5MoeForConditionalGeneration
    family:
      description: Models that are driven alike, V(null) when the architecture is not known to have
        MTP.
      returned: always
      type: str
      sample: qwen3_5
    algorithm:
      description: The speculative algorithm. The server's log and C(/server_info) call C(NEXTN)
        C(EAGLE).
      returned: always
      type: str
      sample: NEXTN
    flags:
      description: Flags to add, with their values.
      returned: always
      type: dict
      sample:
        --speculative-algorithm: NEXTN
        --speculative-num-steps: 3
        --speculative-eagle-topk: 1
        --speculative-num-draft-tokens: 4
        --mamba-radix-cache-strategy: extra_buffer
    environment:
      description: Environment variables to add.
      returned: always
      type: dict
      sample: {}
    weights:
      description: What the model's folder holds.
      returned: always
      type: dict
      contains:
        found:
          description: Whether MTP tensors are listed, V(null) when that cannot be told.
          returned: always
          type: bool
          sample: true
        prefix:
          description: How their names begin, V(null) when not known for this family.
          returned: always
          type: str
          sample: mtp.
        tensors:
          description: How many there are.
          returned: always
          type: int
          sample: 785
        missing_files:
          description: Files of the model that are absent, empty or pointers of Git LFS.
          returned: always
          type: list
          elements: str
          sample: []
    problems:
      description: What stands in the way, or should be known; the keys are those of
        M(gpuhost.inference.sglang_flags_info).
      returned: always
      type: list
      elements: dict
      sample: []
"""

from dataclasses import asdict
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from ansible_collections.gpuhost.inference.plugins.module_utils._mtp_families import family_of
from ansible_collections.gpuhost.inference.plugins.module_utils._mtp_plan import decide
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_flags import (
    find_package,
    read_flags,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._speculation import (
    architecture_of,
    read_config,
    read_weights,
)


def run(python: str | None, package: str | None, model_path: str, num_steps: int) -> dict[str, Any]:
    flags = read_flags(find_package(python, package))
    config = read_config(model_path)
    weights = read_weights(model_path, config, family_of(architecture_of(config)))
    mtp = decide(flags, config, weights, num_steps)
    return {"changed": False, "version": flags.version, "mtp": asdict(mtp)}


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "python": {"type": "path"},
            "package": {"type": "path"},
            "model_path": {"type": "path", "required": True},
            "num_steps": {"type": "int", "default": 3},
        },
        mutually_exclusive=[("python", "package")],
        required_one_of=[("python", "package")],
        supports_check_mode=True,
    )
    try:
        if module.params["num_steps"] < 1:
            raise GpuHostError("num_steps must be at least 1")
        result = run(**module.params)
    except GpuHostError as error:
        module.fail_json(msg=str(error))
    module.exit_json(**result)


if __name__ == "__main__":
    main()
