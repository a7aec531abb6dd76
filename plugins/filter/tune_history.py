# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: tune_history
short_description: Tell whether an SGLang server is as fast as it was before a change
version_added: 0.2.0
description:
  - Compares kept runs of one arm from before a change (a new release, a new driver) with later
    ones, at each concurrency, and lists which facts changed meanwhile.
  - V(slower) needs a whole interval below 1 - O(margin), V(faster) one above 1 + O(margin), V(same)
    one between them. Anything else, and any comparison of two hosts, clients or files of prompts,
    is V(cannot tell). A client that came with another release is the same client, and listed.
  - One start on one side is enough when the other side has two or more, since their spread then
    stands for both.
positional: before
options:
  _input:
    description: Results of M(gpuhost.inference.sglang_benchmark) after the change.
    type: list
    elements: dict
    required: true
  before:
    description: Results from before it.
    type: list
    elements: dict
    required: true
  arm:
    description: Whose runs count. Can be left out when all are of one arm.
    type: str
  margin:
    description: Difference that matters.
    type: float
    default: 0.05
  confidence:
    description: Share of cases in which an interval holds.
    type: float
    default: 0.95
  prompts:
    description: Kind of prompts whose points count. By default the only kind, or V(mixed).
    type: str
author:
  - gpuhost.inference contributors (@gpuhost)
seealso:
  - plugin: gpuhost.inference.tune_verdict
    plugin_type: filter
"""

EXAMPLES = r"""
# Two results of the role sglang_tune, on the control node
- name: Refuse a release that is slower
  ansible.builtin.assert:
    that: found.verdict != 'slower'
    fail_msg: "slower since {{ found.changed | map(attribute='key') | join(', ') }} changed"
  vars:
    stem: "{{ playbook_dir }}/reports/qwen-a-sglang-tune-"
    before: "{{ lookup('ansible.builtin.file', stem ~ '20261130T140000Z.json') | from_json }}"
    after: "{{ lookup('ansible.builtin.file', stem ~ '20261207T140000Z.json') | from_json }}"
    found: "{{ after.runs | gpuhost.inference.tune_history(before.runs, arm='on') }}"
"""

RETURN = r"""
_value:
  description: The comparison.
  type: dict
  contains:
    arm:
      description: Whose runs were compared.
      type: str
    verdict:
      description:
        - V(slower) when one concurrency surely is, V(faster) when one is and none may be slower,
          V(same) when all are, else V(cannot tell).
      type: str
    margin:
      description: As given.
      type: float
    confidence:
      description: As given.
      type: float
    points:
      description: One for each concurrency.
      type: list
      elements: dict
      contains:
        concurrency:
          description: Requests at once.
          type: int
        ratio:
          description: Output tokens per second after the change over those before it.
          type: float
        low:
          description: Lower end of the interval, null with too few starts.
          type: float
        high:
          description: Upper end.
          type: float
        starts:
          description: Starts that count, C(before) and C(after).
          type: dict
        verdict:
          description: V(slower), V(faster), V(same) or V(cannot tell).
          type: str
    changed:
      description: Facts of the server that changed, with C(key), C(before) and C(after).
      type: list
      elements: dict
    unequal:
      description: What makes the runs incomparable, in the same form.
      type: list
      elements: dict
    left_out:
      description: Points that do not count, with C(arm), C(start), C(concurrency) and C(reasons).
      type: list
      elements: dict
"""

from collections.abc import Mapping, Sequence
from typing import Any, Callable

from ansible.errors import AnsibleFilterError
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from ansible_collections.gpuhost.inference.plugins.module_utils._tune_history import (
    compare_history,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._tune_runs import numbers
from ansible_collections.gpuhost.inference.plugins.module_utils._tune_verdict import Rules


def tune_history(
    after: Sequence[Mapping[str, Any]],
    before: Sequence[Mapping[str, Any]],
    *,
    arm: str | None = None,
    margin: float = 0.05,
    confidence: float = 0.95,
    prompts: str | None = None,
) -> dict[str, Any]:
    try:
        rules = Rules(**numbers(float, margin=margin, confidence=confidence))
        return compare_history(before, after, arm=arm, rules=rules, prompts=prompts)
    except GpuHostError as error:
        raise AnsibleFilterError(f"tune_history: {error}") from error


class FilterModule:
    def filters(self) -> dict[str, Callable[..., dict[str, Any]]]:
        return {"tune_history": tune_history}
