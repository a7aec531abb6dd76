# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: tune_load
short_description: Tell from an SGLang server's metrics how many requests it runs at once
version_added: 0.2.0
description:
  - Turns looks at C(/metrics) into a load for P(gpuhost.inference.tune_verdict#filter), the share
    of the busy time by number of requests at once.
  - The server must run with the flag C(enable-metrics). An hour with a look every ten seconds is a
    good load, and better still a day.
options:
  _input:
    description:
      - The looks, in the order of time. Each has C(at), a time in seconds, and C(text), the answer
        of C(/metrics).
    type: list
    elements: dict
    required: true
author:
  - gpuhost.inference contributors (@gpuhost)
seealso:
  - plugin: gpuhost.inference.tune_verdict
    plugin_type: filter
"""

EXAMPLES = r"""
- name: Show the load between two looks (take many more)
  ansible.builtin.debug:
    # {'1': 0.5, '3': 0.5}
    msg: "{{ (looks | gpuhost.inference.tune_load).load }}"
  vars:
    looks:
      - {at: 0, text: "sglang:num_running_reqs 1.0"}
      - {at: 10, text: "sglang:num_running_reqs 3.0"}
"""

RETURN = r"""
_value:
  description: The load.
  type: dict
  contains:
    load:
      description:
        - Share of the busy time by number of requests at once. Null when the server was idle at all
          looks.
      type: dict
    idle:
      description: Share of the time without a request.
      type: float
    mean:
      description: Requests at once over all the time.
      type: float
    mean_by_latency:
      description:
        - The same from the time that all requests took. When it is far from RV(_value.mean), the
          looks were too few. Null when the server does not tell or was restarted.
      type: float
    queued:
      description: Share of the time in which requests waited, null when the server does not tell.
      type: float
    looks:
      description: How many looks there were.
      type: int
    seconds:
      description: Time between the first and the last.
      type: float
"""

from collections.abc import Mapping, Sequence
from typing import Any, Callable

from ansible.errors import AnsibleFilterError
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from ansible_collections.gpuhost.inference.plugins.module_utils._tune_load import load_of


def tune_load(looks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    try:
        scrapes = [(float(look["at"]), str(look["text"])) for look in looks]
    except (KeyError, TypeError, ValueError) as error:
        raise AnsibleFilterError(
            "tune_load: each look needs at, a time in seconds, and text, the answer of /metrics"
        ) from error
    try:
        return load_of(scrapes)
    except GpuHostError as error:
        raise AnsibleFilterError(f"tune_load: {error}") from error


class FilterModule:
    def filters(self) -> dict[str, Callable[..., dict[str, Any]]]:
        return {"tune_load": tune_load}
