#!/usr/bin/python

# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: sglang_flags_info
short_description: List the flags of an installed SGLang and check a wanted command line
version_added: 0.1.0
description:
  - Reads which flags an installed SGLang accepts, from its source and without running any of it.
    It needs no GPU and takes well under a second, where C(python -m sglang.launch_server --help)
    takes up to half a minute.
  - SGLang renames and removes flags in releases two weeks apart, and a server that is given an
    unknown flag ends with status 2. So a command line should be checked against the very
    installation that will run it.
  - What the source computes only when it runs cannot be read. Such parts are named in
    RV(flags[].unchecked) and are never called wrong. Where it may define more flags,
    RV(passed_over) says so, and a flag that is not known is a warning instead of an error.
author:
  - gpuhost.inference contributors (@gpuhost)
extends_documentation_fragment:
  - gpuhost.inference.attributes
  - gpuhost.inference.attributes.info_module
options:
  python:
    description:
      - Path of the Python interpreter that runs SGLang, for example of a virtual environment. It is
        not run; the libraries beside it are looked at.
      - Exactly one of O(python) and O(package) is needed.
    type: path
  package:
    description:
      - The folder C(sglang) of the package, or the folder that holds it.
    type: path
  wanted:
    description:
      - The command line to check.
      - A mapping of flags to values, with or without the leading dashes. V(true) stands for the
        flag alone, V(false), V(null), an empty text and an empty list leave it out, a list gives
        several values, a mapping one value in JSON.
      - Or a list of words as on a command line.
      - Write canonical long names. Abbreviations, which SGLang's parser would accept, are reported.
    type: raw
  hf_home:
    description:
      - The folder C(HF_HOME) of the server. A model that O(wanted) names by its id on the Hugging
        Face hub is looked for in the cache there, with its weights. What is not in it is an error,
        as SGLang would try to download it at each start.
      - Without this option such a model is not looked for, which a note says.
    type: path
    version_added: 0.2.0
seealso:
  - module: gpuhost.inference.sglang_mtp_info
  - module: gpuhost.inference.sglang_info
"""

EXAMPLES = r"""
- name: Check the flags of a server against the installed release
  gpuhost.inference.sglang_flags_info:
    python: /opt/sglang/bin/python
    wanted:
      model-path: /srv/models/qwen3.5-122b
      tensor-parallel-size: 4
      mamba-scheduler-strategy: extra_buffer
  register: check

- name: Stop when the server would not start with them
  ansible.builtin.assert:
    that: check.problems | selectattr('severity', 'eq', 'error') | length == 0
    fail_msg: "{{ check.problems | map(attribute='message') | join('; ') }}"

- name: Show which attention backends an unpacked wheel offers
  gpuhost.inference.sglang_flags_info:
    package: /tmp/sglang-0.5.23
  register: release

- name: Print them
  ansible.builtin.debug:
    msg: "{{ (release.flags | selectattr('name', 'eq', '--attention-backend') | first).choices }}"
"""

RETURN = r"""
version:
  description: Version of the package, V(null) when it names none.
  returned: always
  type: str
  sample: 0.5.23
package:
  description: The folder the flags were read from.
  returned: always
  type: str
  sample: /opt/sglang/lib/python3.12/site-packages/sglang
flags:
  description: The flags, sorted by name.
  returned: always
  type: list
  elements: dict
  contains:
    name:
      description: The long name that the release puts first.
      returned: always
      type: str
      sample: --tp-size
    aliases:
      description: Other accepted spellings.
      returned: always
      type: list
      elements: str
      sample: [--tensor-parallel-size]
    dest:
      description: Name of the server's field, as C(/server_info) shows it.
      returned: always
      type: str
      sample: tp_size
    type:
      description: V(str), V(int), V(float), V(bool), or the name of the function that reads the
        value.
      returned: always
      type: str
      sample: int
    choices:
      description: Allowed values, V(null) when there is no list or it could not be read.
      returned: always
      type: list
      elements: raw
      sample: null
    default:
      description: Value when the flag is not given, V(null) also when it could not be read.
      returned: always
      type: raw
      sample: 1
    action:
      description: What the parser does with it.
      returned: always
      type: str
      sample: store
    nargs:
      description: How many values it takes, in the words of argparse. V(null) is one, V(0) none.
      returned: always
      type: raw
      sample: null
    required:
      description: Whether the server needs it.
      returned: always
      type: bool
      sample: false
    replacement:
      description: What a deprecated flag points to, V(null) for a current one.
      returned: always
      type: str
      sample: null
    retired:
      description: Whether the server refuses to start with it.
      returned: always
      type: bool
      sample: false
    unchecked:
      description: Parts that could not be read, of V(choices), V(default), V(nargs).
      returned: always
      type: list
      elements: str
      sample: []
complete:
  description:
    - Whether these are all flags of the release. If not, one of O(wanted) that is not among them is
      a problem V(unchecked) instead of V(unknown), of the severity V(warning).
  returned: always
  type: bool
  sample: true
  version_added: 0.2.0
passed_over:
  description: Places of the source that may define more flags and could not be read, and why.
  returned: always
  type: list
  elements: str
  sample: []
  version_added: 0.2.0
config:
  description:
    - The part of O(wanted) that can stand in a file for SGLang's flag C(--config), names without
      dashes.
  returned: always
  type: dict
  sample: {tensor-parallel-size: 4, enable-metrics: true}
config_supported:
  description:
    - Whether the release reads a file at all, from 0.5.3 on. Where it does not, RV(config) is
      empty, RV(arguments) is the whole command line, and a key could be given only there, where
      all users of the host see it.
  returned: always
  type: bool
  sample: true
  version_added: 0.2.0
arguments:
  description: The rest of it, as words for the command line. The file refuses some kinds of flags.
  returned: always
  type: list
  elements: str
  sample: [--lora-paths, /srv/adapters/sql]
problems:
  description: What is or may be wrong with O(wanted), in its order.
  returned: always
  type: list
  elements: dict
  contains:
    flag:
      description: The flag as it was given.
      returned: always
      type: str
      sample: --mamba-scheduler-strategy
    kind:
      description: What sort of problem it is.
      returned: always
      type: str
      choices:
        - unknown
        - renamed
        - abbreviation
        - duplicate
        - choice
        - type
        - missing_partner
        - conflict
        - missing_file
        - deprecated
        - known_bad
        - unchecked
      sample: renamed
    severity:
      description:
        - V(error) when the server would not start or would run something else, V(warning) when it
          starts but may surprise, or when whether it starts is not known, V(note) for a value that
          could not be checked.
      returned: always
      type: str
      choices: [error, warning, note]
      sample: error
    message:
      description: What is wrong.
      returned: always
      type: str
      sample: --mamba-scheduler-strategy is not a flag of SGLang 0.5.23, which calls it
        --mamba-radix-cache-strategy
    suggestion:
      description: What to write instead, V(null) when there is no single answer.
      returned: always
      type: str
      sample: --mamba-radix-cache-strategy
"""

from dataclasses import asdict
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_check import (
    check_flags,
    check_left_out,
    for_config_file,
    parse_wanted,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_flags import (
    find_package,
    read_flags,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._speculation import (
    check_model_path,
)


def run(
    python: str | None, package: str | None, wanted: Any, hf_home: str | None
) -> dict[str, Any]:
    flags = read_flags(find_package(python, package))
    given = parse_wanted(wanted or [])
    architecture, missing = check_model_path(given, hf_home)
    problems = check_flags(flags, given, architecture)
    problems += check_left_out(flags, wanted) + missing
    config, arguments = for_config_file(flags, given)
    return {
        "changed": False,
        "version": flags.version,
        "package": flags.package,
        "flags": [flag.as_dict() for flag in flags.flags],
        "complete": flags.complete,
        "passed_over": list(flags.passed_over),
        "problems": [asdict(problem) for problem in problems],
        "config_supported": "--config" in flags.spellings(),
        "config": config,
        "arguments": arguments,
    }


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "python": {"type": "path"},
            "package": {"type": "path"},
            "wanted": {"type": "raw"},
            "hf_home": {"type": "path"},
        },
        mutually_exclusive=[("python", "package")],
        required_one_of=[("python", "package")],
        supports_check_mode=True,
    )
    try:
        result = run(**module.params)
    except GpuHostError as error:
        module.fail_json(msg=str(error))
    module.exit_json(**result)


if __name__ == "__main__":
    main()
