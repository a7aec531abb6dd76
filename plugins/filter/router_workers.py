# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: router_workers
short_description: Check the URLs of a router's workers and write them as the router lists them
version_added: 0.2.0
description:
  - Refuses a URL without scheme or host, with a path, or with a password in it, and one that stands
    there twice.
  - Takes the slash at the end away.
positional: _input
options:
  _input:
    description:
      - The URLs.
    type: list
    elements: str
    required: true
author:
  - gpuhost.inference contributors (@gpuhost)
seealso:
  - module: gpuhost.inference.sglang_router_workers
"""

EXAMPLES = r"""
- name: Show the workers as the router lists them
  ansible.builtin.debug:
    msg: "{{ ['http://10.0.0.5:30000/'] | gpuhost.inference.router_workers }}"   # http://10.0.0.5:30000
"""

RETURN = r"""
_value:
  description: The URLs, in their order.
  type: list
  elements: str
"""

from typing import Any, Callable

from ansible.errors import AnsibleFilterError
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_router import worker_urls


def router_workers(urls: Any) -> list[str]:
    if isinstance(urls, str) or not all(isinstance(url, str) for url in urls):
        raise AnsibleFilterError("The workers of a router are a list of URLs.")
    try:
        return worker_urls(urls)
    except GpuHostError as error:
        raise AnsibleFilterError(str(error)) from error


class FilterModule:
    def filters(self) -> dict[str, Callable[[Any], list[str]]]:
        return {"router_workers": router_workers}
