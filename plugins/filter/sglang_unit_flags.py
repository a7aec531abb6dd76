# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: sglang_unit_flags
short_description: Tell the flags that a systemd unit gives to SGLang
version_added: 0.2.0
description:
  - Reads the command line of a unit, whoever has written it, and the file that its C(--config)
    names.
positional: _input, files
options:
  _input:
    description:
      - The unit with its drop-ins, as C(systemctl cat) prints it.
    type: str
    required: true
  files:
    description: Content by path of the files that C(--config) may name.
    type: dict
    default: {}
author:
  - gpuhost.inference contributors (@gpuhost)
seealso:
  - plugin: gpuhost.inference.sglang_url
    plugin_type: filter
"""

EXAMPLES = r"""
- name: Show where a server answers
  ansible.builtin.debug:
    # http://127.0.0.1:30001
    msg: "{{ unit | gpuhost.inference.sglang_unit_flags | gpuhost.inference.sglang_url }}"
  vars:
    unit: "ExecStart=/opt/sglang/bin/python -m sglang.launch_server --port 30001"
"""

RETURN = r"""
_value:
  description:
    - The flags without their dashes. One without a value is V(true), values of the command line
      are texts.
    - V(null) when they are not known, because the command line starts something else, takes some
      from variables, or names a file that is not among O(files).
  type: dict
"""

import re
import shlex
from collections.abc import Mapping
from typing import Any, Callable

import yaml
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_check import parse_wanted

_SERVER = re.compile(r"(^|/)(sglang\.launch_server|sglang/launch_server\.py|sglang)$")


def sglang_unit_flags(unit: str, files: Mapping[str, str] | None = None) -> dict[str, Any] | None:
    words = _command(unit)
    first = next((at for at, word in enumerate(words) if word.startswith("--")), len(words))
    flags: dict[str, Any] = {
        one.spelling.lstrip("-"): " ".join(one.values) if one.values else True
        for one in parse_wanted(words[first:])
    }
    started = any(_SERVER.search(word) for word in words[:first])
    if not started or any("$" in str(value) for value in flags.values()):
        return None
    if "config" not in flags:
        return flags
    try:
        config = yaml.safe_load((files or {}).get(str(flags.pop("config"))) or "")
    except yaml.YAMLError:  # an error of ours would quote it, with the key
        return None
    return {**config, **flags} if isinstance(config, dict) else None


def _command(unit: str) -> list[str]:
    """Return the words of the last command, as an empty one takes back those before."""
    commands = re.findall(r"^[ \t]*ExecStart[ \t]*=(.*)$", unit.replace("\\\n", " "), re.MULTILINE)
    try:
        words = shlex.split(commands[-1]) if commands else []
    except ValueError:  # quotes without an end
        return []
    return [word.replace("%%", "%") for word in words]


class FilterModule:
    def filters(self) -> dict[str, Callable[..., dict[str, Any] | None]]:
        return {"sglang_unit_flags": sglang_unit_flags}
