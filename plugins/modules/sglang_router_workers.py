#!/usr/bin/python

# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: sglang_router_workers
short_description: Take SGLang servers out of a router when they are idle, or put them into it
version_added: 0.2.0
description:
  - With O(state=absent), takes workers out of the router and waits until no request runs on them
    any more, so that they can be restarted without a failed request. It refuses when too few others
    would remain.
  - With O(state=present), puts workers into the router and waits until it sends requests to them. A
    worker that it holds for healthy but that refuses the key does not count, as the router's own
    probe needs no key.
  - Knows the routers C(sglang-router) 0.3.2 and C(smg) 1.13.0. Run it where the workers can be
    reached by the URLs that the router has.
  - A router that is restarted has the workers of its configuration again, also those that were
    taken out.
author:
  - gpuhost.inference contributors (@gpuhost)
extends_documentation_fragment:
  - gpuhost.inference.attributes
attributes:
  check_mode:
    support: full
  diff_mode:
    support: full
options:
  url:
    description:
      - Where the router is asked.
    type: str
    default: http://127.0.0.1:30000
  api_key:
    description:
      - The key of router and workers. It is one and the same, as the router hands the key of a
        client on to the worker.
    type: str
  workers:
    description:
      - URLs of workers, such as C(http://10.0.0.5:30000). With none, nothing is done.
    type: list
    elements: str
    required: true
  state:
    description:
      - Whether they are to be in the router.
    type: str
    choices: [present, absent]
    default: present
  min_healthy:
    description:
      - How many other workers must serve when some are taken out.
    type: int
    default: 1
  wait:
    description:
      - Seconds until workers that are put in have to serve, and until those that are taken out have
        to be idle. A worker that is not idle then is put in again, and the module fails.
    type: int
    default: 600
  validate_certs:
    description:
      - Whether to check the certificates of C(https) servers.
    type: bool
    default: true
seealso:
  - module: gpuhost.inference.sglang_info
"""

EXAMPLES = r"""
- name: Take this server out of the router, and wait until it has nothing to do
  gpuhost.inference.sglang_router_workers:
    url: http://10.0.0.9:30000
    workers: [http://10.0.0.5:30000]
    state: absent
    api_key: "{{ vault_sglang_api_key }}"

- name: Put it back, and wait until it serves
  gpuhost.inference.sglang_router_workers:
    url: http://10.0.0.9:30000
    workers: [http://10.0.0.5:30000]
    api_key: "{{ vault_sglang_api_key }}"
"""

RETURN = r"""
moved:
  description: The workers that were put in or taken out.
  returned: success
  type: list
  elements: str
  sample: [http://10.0.0.5:30000]
workers:
  description: All workers of the router, as it lists them afterwards. In check mode, as it lists
    them now.
  returned: success
  type: list
  elements: dict
  contains:
    id:
      description: The router's name for it, another one each time it is added.
      returned: always
      type: str
      sample: 42ace7aa-d684-47e5-a79f-fdaf68a4a168
    url:
      description: Where the router reaches it.
      returned: always
      type: str
      sample: http://10.0.0.5:30000
    healthy:
      description: Whether the router sends requests to it.
      returned: always
      type: bool
      sample: true
    model_id:
      description: The model it offers, V(null) when the router could not find out.
      returned: always
      type: str
      sample: qwen3.5-122b
"""

from dataclasses import asdict
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_http import Client
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_router import (
    Fleet,
    put_in,
    read_workers,
    take_out,
    worker_urls,
)


def run(params: dict[str, Any], check_mode: bool) -> dict[str, Any]:
    key, certs = params["api_key"], params["validate_certs"]
    fleet = Fleet(Client(params["url"], key, certs), lambda url: Client(url, key, certs))
    urls = worker_urls(params["workers"])
    before = sorted(worker.url for worker in read_workers(fleet.router))
    here = [url for url in urls if url in before]
    moved = here if params["state"] == "absent" else [url for url in urls if url not in before]
    after = [url for url in before if url not in moved]
    after += moved if params["state"] == "present" else []
    if not check_mode and params["state"] == "present":
        put_in(fleet, urls, key, params["wait"])
    if params["state"] == "absent":
        take_out(fleet, urls, key, params["min_healthy"], None if check_mode else params["wait"])
    return {
        "changed": bool(moved),
        "moved": moved,
        "workers": [asdict(worker) for worker in read_workers(fleet.router)],
        "diff": {
            "before": "".join(f"{url}\n" for url in before),
            "after": "".join(f"{url}\n" for url in sorted(after)),
        },
    }


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "url": {"type": "str", "default": "http://127.0.0.1:30000"},
            "api_key": {"type": "str", "no_log": True},
            "workers": {"type": "list", "elements": "str", "required": True},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            "min_healthy": {"type": "int", "default": 1},
            "wait": {"type": "int", "default": 600},
            "validate_certs": {"type": "bool", "default": True},
        },
        supports_check_mode=True,
    )
    try:
        result = run(module.params, module.check_mode)
    except GpuHostError as error:
        module.fail_json(msg=str(error))
    module.exit_json(**result)


if __name__ == "__main__":
    main()
