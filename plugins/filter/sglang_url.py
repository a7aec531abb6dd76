# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: sglang_url
short_description: Tell where a server with certain flags is reached from its own machine
version_added: 0.2.0
description:
  - Builds the address from the flags C(host), C(port) and C(ssl-certfile). A server that listens on
    all addresses is reached by the loopback one.
positional: _input
options:
  _input:
    description: Flags, without leading dashes, and their values.
    type: dict
    required: true
author:
  - gpuhost.inference contributors (@gpuhost)
seealso:
  - module: gpuhost.inference.sglang_info
"""

EXAMPLES = r"""
- name: Show where the server is
  ansible.builtin.debug:
    msg: "{{ {'host': '0.0.0.0', 'port': 30000} | gpuhost.inference.sglang_url }}"   # http://127.0.0.1:30000
"""

RETURN = r"""
_value:
  description: The address.
  type: str
"""

from collections.abc import Mapping
from typing import Any, Callable

from ansible.errors import AnsibleFilterError


def sglang_url(flags: Any) -> str:
    if not isinstance(flags, Mapping):
        raise AnsibleFilterError("sglang_url takes a mapping of flags")
    host = str(flags.get("host") or "127.0.0.1")
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    scheme = "https" if flags.get("ssl-certfile") else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{flags.get('port') or 30000}"


class FilterModule:
    def filters(self) -> dict[str, Callable[[Any], str]]:
        return {"sglang_url": sglang_url}
