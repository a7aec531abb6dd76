# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: sglang_changes
short_description: Tell what changes between two files of settings, without their secrets
version_added: 0.2.0
description:
  - Compares the file that a server has with the one it will have and returns a line for each
    setting that differs. Values of keys and passwords are never shown.
  - Understood are configuration files of SGLang and files of C(NAME="value") for systemd.
positional: _input, before
options:
  _input:
    description: Content of the file as it will be.
    type: str
    required: true
  before:
    description: Content of the file as it is, empty when there is none.
    type: str
    required: true
  hidden:
    description: Whether all values are secret.
    type: bool
    default: false
author:
  - gpuhost.inference contributors (@gpuhost)
seealso:
  - plugin: gpuhost.inference.sglang_config
    plugin_type: filter
"""

EXAMPLES = r"""
- name: Show what changes
  ansible.builtin.debug:
    # ['port: 30000 -> 30001']
    msg: "{{ 'port: 30001' | gpuhost.inference.sglang_changes('port: 30000') }}"
"""

RETURN = r"""
_value:
  description: The lines, sorted by name.
  type: list
  elements: str
"""

import re
from typing import Any, Callable

import yaml

_SECRET = re.compile(r"key$|password|secret|token$", re.IGNORECASE)
_ABSENT = object()


def sglang_changes(after: str, before: str, hidden: bool = False) -> list[str]:
    old, new = _settings(before), _settings(after)
    return [
        _line(name, old.get(name, _ABSENT), new.get(name, _ABSENT), hidden)
        for name in sorted({*old, *new})
        if old.get(name, _ABSENT) != new.get(name, _ABSENT)
    ]


def _settings(text: str) -> dict[str, Any]:
    """Return the settings of a file; one that is understood in neither way has none."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    pairs = [line.partition("=") for line in lines]
    if pairs and all(re.fullmatch(r"[A-Za-z_]\w*", name) and sign for name, sign, _value in pairs):
        return {name: value for name, _sign, value in pairs}
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError:  # an error of ours would quote it, with the key
        return {}
    return {str(name): value for name, value in found.items()} if isinstance(found, dict) else {}


def _line(name: str, old: Any, new: Any, hidden: bool) -> str:
    if hidden or _SECRET.search(name):
        verb = "new" if old is _ABSENT else "gone" if new is _ABSENT else "changed"
        return f"{name}: {verb} (its value is not shown)"
    if old is _ABSENT:
        return f"{name}: {_shown(new)} (new)"
    if new is _ABSENT:
        return f"{name}: {_shown(old)} -> (gone)"
    return f"{name}: {_shown(old)} -> {_shown(new)}"


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


class FilterModule:
    def filters(self) -> dict[str, Callable[..., list[str]]]:
        return {"sglang_changes": sglang_changes}
