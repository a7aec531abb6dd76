# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: tune_verdict
short_description: Judge from repeated benchmarks whether a setting of SGLang pays
version_added: 0.2.0
description:
  - Compares the speed with a setting (MTP for instance) with that without it, at each concurrency
    and under a load, and says whether to keep the setting.
  - A start of the server is one observation, as all points of a start share its luck. The interval
    of the ratio is Student's, over the logarithms of the speeds, with the spread of both arms
    pooled. It needs two starts of each arm at least.
  - At a concurrency and for a load, V(keep) needs a whole interval above 1 + O(margin), V(drop) one
    below 1 - O(margin), V(tie) one between them. Anything else is V(not-enough-data).
  - Between two measured concurrencies the ratio is drawn as a line, in logarithms, and marked as
    not measured. Its interval does not know how straight the truth is, so it gets a verdict only
    where both neighbours have the same. Outside of what was measured nothing is said.
  - Runs that differ in anything but their arm are not compared. Nor are runs of two benchmark
    clients, of two files of prompts or of two hosts.
positional: baseline
options:
  _input:
    description: Results of M(gpuhost.inference.sglang_benchmark), each start once.
    type: list
    elements: dict
    required: true
  baseline:
    description: Name of the arm that the others are compared with, the simplest one.
    type: str
    default: 'off'
  load:
    description:
      - Share of the time by number of requests at once, C(load) of
        P(gpuhost.inference.tune_load#filter). Any weights do, they are made to sum up to 1.
      - With it, the verdict is that on the gain under this load.
      - Without it, V(keep) says that the variant gains more than O(margin) at one measured
        concurrency at least, and at none may lose more than that, each with its whole interval.
        V(drop) says the reverse, and V(tie) that it does neither at any. Concurrencies at which
        requests waited in the queue of a server are left out.
    type: dict
  margin:
    description: Gain that is worth having, and loss that is worth avoiding.
    type: float
    default: 0.05
  confidence:
    description:
      - Share of cases in which the intervals of all variants at one concurrency hold together.
    type: float
    default: 0.95
  prompts:
    description: Kind of prompts whose points count. By default the only kind, or V(mixed).
    type: str
  may_differ:
    description:
      - Facts of the servers (keys of C(equal)) that the setting brings with it. They are listed in
        RV(_value.apart) and do not keep the arms from being compared.
    type: list
    elements: str
    default: []
author:
  - gpuhost.inference contributors (@gpuhost)
seealso:
  - plugin: gpuhost.inference.tune_plan
    plugin_type: filter
"""

EXAMPLES = r"""
# Four runs of these three tasks, in the order off 1, on 1, on 2, off 2:
# ansible-playbook -i inventory/production measure.yml -l qwen-a -e arm=off -e start=1
- name: Stop the server, as a start is what is repeated
  ansible.builtin.systemd_service:
    name: sglang.service
    state: stopped

- name: Start it in this arm, with the same limit in both
  ansible.builtin.include_role:
    name: gpuhost.inference.sglang_mtp
  vars:
    sglang_mtp_state: "{{ 'absent' if arm == 'off' else 'present' }}"
    sglang_max_running_requests: 24
    sglang_mtp_window: 0

- name: Measure it, which writes /var/lib/gpuhost/tune/ARM-START.json on its host
  gpuhost.inference.sglang_benchmark:
    python: /opt/sglang/bin/python
    arm: "{{ arm }}"
    start: "{{ start }}"
    concurrencies: [1, 4, 16]

# Then the verdict, for one user for most of the time, and sometimes 16 at once
- name: Read the runs from the host
  ansible.builtin.slurp:
    src: "/var/lib/gpuhost/tune/{{ item }}.json"
  loop: [off-1, on-1, on-2, off-2]
  register: files

- name: Show the verdict
  ansible.builtin.debug:
    msg: "{{ (runs | gpuhost.inference.tune_verdict(load=load, may_differ=brought)).text }}"
  vars:
    load: {1: 0.8, 16: 0.2}
    runs: "{{ files.results | map(attribute='content') | map('b64decode') | map('from_json') }}"
    # what MTP brings with it, as the role sglang_tune has it
    brought:
      - mamba_radix_cache_strategy
      - mamba_scheduler_strategy
      - mamba_track_interval
      - disable_overlap_schedule

# What the role sglang_tune measured lies on the control node
- name: Judge the same runs for another load
  ansible.builtin.debug:
    msg: "{{ (runs | gpuhost.inference.tune_verdict(load=load, may_differ=brought)).text }}"
  vars:
    load: {1: 0.5, 4: 0.5}
    runs: "{{ (lookup('ansible.builtin.file', file) | from_json).runs }}"
    file: "{{ playbook_dir }}/reports/qwen-a-sglang-tune-20261130T140000Z.json"
    # as above
    brought:
      - mamba_radix_cache_strategy
      - mamba_scheduler_strategy
      - mamba_track_interval
      - disable_overlap_schedule
"""

RETURN = r"""
_value:
  description: The verdict.
  type: dict
  contains:
    baseline:
      description: The arm that the others are compared with.
      type: str
    variant:
      description: The arm that the verdict is on, the best one. Null when none can be compared.
      type: str
    variants:
      description: The verdict on each arm that can be compared, by its name.
      type: dict
    winner:
      description:
        - The arm to run, after V(tie) the baseline. Null for V(depends) and V(not-enough-data).
      type: str
    verdict:
      description:
        - V(keep), V(drop), V(tie), V(not-enough-data), or V(depends) when the variant gains at some
          concurrencies and loses at others.
      type: str
    keep_at:
      description: Concurrencies at which the variant surely gains.
      type: list
      elements: int
    drop_at:
      description: Measured concurrencies at which it surely loses.
      type: list
      elements: int
    margin:
      description: As given.
      type: float
    confidence:
      description: As given.
      type: float
    points:
      description: One for each variant and concurrency.
      type: list
      elements: dict
      contains:
        arm:
          description: The variant.
          type: str
        concurrency:
          description: Requests at once.
          type: int
        ratio:
          description: Its output tokens per second over those of the baseline.
          type: float
        low:
          description: Lower end of the interval, null with too few starts.
          type: float
        high:
          description: Upper end.
          type: float
        starts:
          description: Starts that count, by arm.
          type: dict
        verdict:
          description: V(keep), V(drop), V(tie) or V(not-enough-data).
          type: str
        measured:
          description: Whether both arms were measured there.
          type: bool
        held:
          description:
            - Arms that run fewer requests at once, so that their speed at that limit
              (C(effective_max_running_requests)) stands for this concurrency. Where there is none
              and it was not measured either, it is drawn between two measured ones.
          type: list
          elements: str
    profiles:
      description:
        - The load (V(yours)), and three that stand for a single user (1 request at once), a team (8
          and 16) and a batch (64 and 128), for each variant.
      type: list
      elements: dict
      contains:
        name:
          description: Name of the load.
          type: str
        load:
          description: Share of the time by concurrency.
          type: dict
        covered:
          description:
            - Share of the load at measured concurrencies and between them. Below 0.95 there is no
              gain.
          type: float
        measured:
          description: Share of the load at measured concurrencies.
          type: float
        arm:
          description: The variant.
          type: str
        gain:
          description:
            - Mean of the ratio over the time, as a factor (1.2 is 20 % faster), the geometric one.
          type: float
        low:
          description: Lower end of the interval.
          type: float
        high:
          description: Upper end.
          type: float
        verdict:
          description: V(keep), V(drop), V(tie) or V(not-enough-data).
          type: str
    unequal:
      description: What differs and should not, with its C(key) and a value under each arm's name.
      type: list
      elements: dict
    apart:
      description:
        - What else differs between the arms, in the same form. Flags that are compared are among
          them, and how many tokens fit the key-value cache, which decides at long contexts.
      type: list
      elements: dict
    left_out:
      description: Points that do not count, with C(arm), C(start), C(concurrency) and C(reasons).
      type: list
      elements: dict
    text:
      description: At most ten lines that say it.
      type: list
      elements: str
"""

from collections.abc import Mapping, Sequence
from typing import Any, Callable

from ansible.errors import AnsibleFilterError
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from ansible_collections.gpuhost.inference.plugins.module_utils._tune_runs import numbers
from ansible_collections.gpuhost.inference.plugins.module_utils._tune_verdict import Rules, judge


def tune_verdict(
    runs: Sequence[Mapping[str, Any]],
    baseline: str = "off",
    *,
    load: Mapping[Any, Any] | None = None,
    margin: float = 0.05,
    confidence: float = 0.95,
    prompts: str | None = None,
    may_differ: Sequence[str] = (),
) -> dict[str, Any]:
    try:
        rules = Rules(**numbers(float, margin=margin, confidence=confidence))
        return judge(
            runs,
            baseline=baseline,
            load=load,
            rules=rules,
            prompts=prompts,
            may_differ=may_differ,
        )
    except GpuHostError as error:
        raise AnsibleFilterError(f"tune_verdict: {error}") from error


class FilterModule:
    def filters(self) -> dict[str, Callable[..., dict[str, Any]]]:
        return {"tune_verdict": tune_verdict}
