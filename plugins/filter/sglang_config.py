# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: sglang_config
short_description: Turn a mapping of SGLang flags into the content of its configuration file
version_added: 0.1.0
description:
  - Names flags as SGLang's C(--config) file does, without leading dashes, and leaves out those
    that are not set.
positional: _input
options:
  _input:
    description:
      - Flags, with or without the leading dashes, and their values.
      - V(null), V(false) and an empty text leave a flag out.
    type: dict
    required: true
author:
  - gpuhost.inference contributors (@gpuhost)
seealso:
  - module: gpuhost.inference.sglang_flags_info
"""

EXAMPLES = r"""
- name: Write a configuration file for --config
  ansible.builtin.copy:
    content: "{{ flags | gpuhost.inference.sglang_config | to_nice_yaml }}"   # tp-size: 4
    dest: /etc/sglang.yaml
    mode: "0600"
  vars:
    flags: {"--tp-size": 4, chat-template: null}
"""

RETURN = r"""
_value:
  description: The content, in the order of the mapping.
  type: dict
"""

from collections.abc import Mapping
from typing import Any, Callable

from ansible.errors import AnsibleFilterError


def sglang_config(flags: Any) -> dict[str, Any]:
    if not isinstance(flags, Mapping):
        raise AnsibleFilterError(f"sglang_config takes a mapping of flags, not {flags!r}")
    return {
        name.removeprefix("--"): value
        for name, value in flags.items()
        if value is not None and value is not False and value != ""
    }


class FilterModule:
    def filters(self) -> dict[str, Callable[[Any], dict[str, Any]]]:
        return {"sglang_config": sglang_config}
