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
      - The folder of the model, or its id on Hugging Face, as C(org/name), which is looked for in
        the cache in O(hf_home).
    type: str
    required: true
  hf_home:
    description:
      - The folder C(HF_HOME) of the server, for a model that is named by its id.
    type: path
    version_added: 0.2.0
  num_steps:
    description:
      - How many tokens are drafted before the model verifies them; it verifies one more.
    type: int
    default: 3
  wanted:
    description:
      - The flags that the server gets anyway, as in M(gpuhost.inference.sglang_flags_info). They
        win over what is decided here where the release can run both, and are a problem where it
        cannot.
      - They decide the capacity too.
    type: raw
    version_added: 0.2.0
  environment:
    description:
      - The environment that the server gets anyway. Only variables that SGLang reads are looked at.
    type: dict
    default: {}
    version_added: 0.2.0
  gpu_memory_mib:
    description:
      - Memory of the smallest GPU in MiB, for the capacity. Without it, C(nvidia-smi) is asked;
        where that does not answer the capacity is V(null).
    type: int
    version_added: 0.2.0
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

- name: See how many requests would run at once with it, before anything is restarted
  gpuhost.inference.sglang_mtp_info:
    python: /opt/sglang/bin/python
    model_path: /srv/models/qwen3.5-122b
    gpu_memory_mib: 97887
    wanted:
      tensor-parallel-size: 4
      mem-fraction-static: 0.8
      max-running-requests: 64
  register: result
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
capacity:
  description:
    - How many requests and tokens fit the server, predicted with the formulas of the release,
      without MTP and with it.
    - A value is V(null) when an input is not known, never guessed.
  returned: always
  type: dict
  contains:
    without_mtp:
      description: With the wanted flags, but without those of speculation.
      returned: always
      type: dict
      contains: &arm
        max_running_requests:
          description: Requests that run at once; more of them wait. V(null) when it cannot be told.
          returned: always
          type: int
          sample: 24
        requested:
          description: The number that the flags ask for, or 48, which SGLang takes with
            speculation; V(null) when neither.
          returned: always
          type: int
          sample: 48
        limited_by:
          description: What limits the requests, V(requested), V(states) or V(kv_cache).
          returned: always
          type: str
          sample: states
        state_slots:
          description: Slots for the states of Mamba or linear attention; V(null) for a model
            without.
          returned: always
          type: int
          sample: 123
        slots_per_request:
          description: How many of them a running request holds.
          returned: always
          type: int
          sample: 5
        state_mib:
          description: Memory of one slot on one GPU.
          returned: always
          type: float
          sample: 36.6
        kv_tokens:
          description: Tokens that the key-value cache holds.
          returned: always
          type: int
          sample: 733361
        kv_bytes_per_token:
          description: Memory of one token on one GPU.
          returned: always
          type: int
          sample: 13312
        weights_mib:
          description: Weights on one GPU.
          returned: always
          type: int
          sample: 60313
        budget_mib:
          description: What SGLang shares out among states and key-value cache on one GPU.
          returned: always
          type: int
          sample: 17416
        unknown:
          description: Why values are V(null).
          returned: always
          type: list
          elements: str
          sample: []
    with_mtp:
      description: With the wanted flags and those that are decided.
      returned: always
      type: dict
      contains: *arm
    assumptions:
      description: What the numbers take for granted.
      returned: always
      type: list
      elements: str
      sample:
        - the weights are divided evenly among the GPUs
"""

from dataclasses import asdict, replace
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuhost.inference.plugins.module_utils._capacity import (
    Server,
    predict,
    smallest_gpu,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from ansible_collections.gpuhost.inference.plugins.module_utils._mtp_families import family_of
from ansible_collections.gpuhost.inference.plugins.module_utils._mtp_plan import decide, values_of
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_check import parse_wanted
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_flags import (
    find_package,
    read_flags,
    version_key,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_model import model_folder
from ansible_collections.gpuhost.inference.plugins.module_utils._speculation import (
    architecture_of,
    read_config,
    read_sizes,
    read_weights,
)


def run(params: dict[str, Any]) -> dict[str, Any]:
    flags = read_flags(find_package(params["python"], params["package"]))
    wanted = parse_wanted(params["wanted"] or [])
    values = values_of(flags, wanted)
    environment = {name: str(value) for name, value in params["environment"].items()}
    folder = model_folder(params["model_path"], params["hf_home"])
    config = read_config(folder)
    family = family_of(architecture_of(config))
    draft = "".join(values.get("--speculative-draft-model-path", ()))
    own = family is not None and family.own_draft and draft != ""
    weights = read_weights(folder, config, family)
    if own:
        layers = read_weights(model_folder(draft, params["hf_home"]), config, family)
        weights = replace(layers, missing_files=weights.missing_files + layers.missing_files)
    mtp = decide(
        flags, config, weights, params["num_steps"], wanted=wanted, environment=environment
    )
    memory = params["gpu_memory_mib"]
    server = Server(
        version_key(flags.version),
        config,
        values,
        read_sizes(folder, config, family),
        smallest_gpu() if memory is None else memory,
        environment,
    )
    return {
        "changed": False,
        "version": flags.version,
        "mtp": asdict(mtp),
        "capacity": asdict(predict(server, mtp.flags)),
    }


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "python": {"type": "path"},
            "package": {"type": "path"},
            "model_path": {"type": "str", "required": True},
            "hf_home": {"type": "path"},
            "num_steps": {"type": "int", "default": 3},
            "wanted": {"type": "raw"},
            "environment": {"type": "dict", "default": {}},
            "gpu_memory_mib": {"type": "int"},
        },
        mutually_exclusive=[("python", "package")],
        required_one_of=[("python", "package")],
        supports_check_mode=True,
    )
    try:
        if module.params["num_steps"] < 1:
            raise GpuHostError("num_steps must be at least 1")
        result = run(module.params)
    except GpuHostError as error:
        module.fail_json(msg=str(error))
    module.exit_json(**result)


if __name__ == "__main__":
    main()
