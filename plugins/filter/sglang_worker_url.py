# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: sglang_worker_url
short_description: Tell where the server of a host is reached from other hosts
version_added: 0.2.0
description:
  - Takes the variable C(sglang_worker_url) of the host, where it has one. Else builds the address
    from C(ansible_host) or else C(inventory_hostname), C(sglang_port) and C(sglang_ssl_certfile).
  - A container that is reached through its Proxmox host (connection
    C(community.proxmox.proxmox_pct_remote)) needs that variable, as C(ansible_host) is the Proxmox
    host's address then. Without it this is an error.
positional: _input
options:
  _input:
    description: The host's variables, an entry of C(hostvars).
    type: dict
    required: true
author:
  - gpuhost.inference contributors (@gpuhost)
seealso:
  - plugin: gpuhost.inference.sglang_url
    plugin_type: filter
  - plugin: gpuhost.inference.router_workers
    plugin_type: filter
"""

EXAMPLES = r"""
- name: Show where the servers are
  ansible.builtin.debug:
    msg: "{{ groups.inference_guests | map('extract', hostvars)
      | map('gpuhost.inference.sglang_worker_url') }}"
"""

RETURN = r"""
_value:
  description: The address.
  type: str
"""

from collections.abc import Mapping
from typing import Any, Callable

from ansible.errors import AnsibleFilterError
from ansible_collections.gpuhost.inference.plugins.filter.sglang_url import sglang_url


def sglang_worker_url(variables: Any) -> str:
    if not isinstance(variables, Mapping) or "inventory_hostname" not in variables:
        raise AnsibleFilterError("sglang_worker_url takes the variables of a host, as of hostvars")
    told = variables.get("sglang_worker_url")
    if told:
        return str(told)
    name = variables["inventory_hostname"]
    if str(variables.get("ansible_connection", "")).endswith("pct_remote"):
        raise AnsibleFilterError(
            f"{name} is reached through its Proxmox host, so ansible_host is not its server's "
            "address: give it the variable sglang_worker_url, such as http://192.0.2.100:30000"
        )
    flags = {
        "host": variables.get("ansible_host") or name,
        "port": variables.get("sglang_port"),
        "ssl-certfile": variables.get("sglang_ssl_certfile"),
    }
    return sglang_url(flags)


class FilterModule:
    def filters(self) -> dict[str, Callable[[Any], str]]:
        return {"sglang_worker_url": sglang_worker_url}
