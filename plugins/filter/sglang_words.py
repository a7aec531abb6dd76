# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: sglang_words
short_description: Turn a mapping of SGLang flags into the words of a command line
version_added: 0.1.0
description:
  - Turns flags with their values into the list of words that a command line holds.
  - The rules are those of the option O(gpuhost.inference.sglang_flags_info#module:wanted), so that
    what was checked is what will be run.
positional: _input
options:
  _input:
    description:
      - Flags, with or without the leading dashes, and their values.
      - V(true) stands for the flag alone, V(false) and V(null) leave it out, a list gives several
        values and a mapping one value in JSON.
    type: dict
    required: true
author:
  - gpuhost.inference contributors (@gpuhost)
seealso:
  - module: gpuhost.inference.sglang_flags_info
"""

EXAMPLES = r"""
- name: Show a command line
  ansible.builtin.debug:
    msg: "{{ {'tp-size': 4, 'enable-metrics': true} | gpuhost.inference.sglang_words }}"
    # ["--tp-size", "4", "--enable-metrics"]
"""

RETURN = r"""
_value:
  description: The words, in the order of the mapping.
  type: list
  elements: str
"""

from collections.abc import Mapping
from typing import Any, Callable

from ansible.errors import AnsibleFilterError
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_check import words


def sglang_words(flags: Any) -> list[str]:
    if not isinstance(flags, Mapping):
        raise AnsibleFilterError(f"sglang_words takes a mapping of flags, not {flags!r}")
    return words(flags)


class FilterModule:
    def filters(self) -> dict[str, Callable[[Any], list[str]]]:
        return {"sglang_words": sglang_words}
