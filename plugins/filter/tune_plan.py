# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: tune_plan
short_description: Plan what to measure next, to learn whether a setting of SGLang pays
version_added: 0.2.0
description:
  - Returns the starts that are to come, in order, each with the concurrencies to measure. Ask again
    after every start, with the runs so far and the time that is left.
  - Measured are at first the levels nearest to 1, 8, 32 and 128, then more of them where the arms
    change places or differ by less than 10 %, where the load is. What a server lets wait in its
    queue is not measured.
  - The arms are started in blocks that read the same from both ends (off, on, on, off), which
    cancels a steady drift of the host. Each block begins with the next arm, so the second one is
    on, off, off, on. How many blocks there are follows from the time alone and
    never from the figures, since stopping at a result that pleases makes it wrong more often than
    it says.
  - With time for one block only, all points are fixed beforehand, as points that are added later
    would lack a repeat.
positional: arms
options:
  _input:
    description: Results of M(gpuhost.inference.sglang_benchmark) so far, empty at the beginning.
    type: list
    elements: dict
    required: true
  arms:
    description: Names of the settings that are compared, the one to compare with first.
    type: list
    elements: str
    default: ['off', 'on']
  minutes:
    description: Time that is left from now on.
    type: float
    required: true
  restart_s:
    description: Seconds from stopping a server until it is ready in the other arm.
    type: float
    default: 600
  point_s:
    description: Seconds that a point takes with its warm-up, the mean of all so far or a guess.
    type: float
    default: 120
  points:
    description: Most concurrencies for each arm, two or more.
    type: int
    default: 6
  blocks:
    description: Most blocks. Each has two starts of every arm.
    type: int
    default: 4
  levels:
    description: Concurrencies to choose from, by default the powers of two from 1 to 128.
    type: list
    elements: int
    default: []
  max_concurrency:
    description:
      - Requests that the servers run at once, in the arm that runs most
        (C(effective_max_running_requests) of M(gpuhost.inference.sglang_info)), or may run by their
        flag. The runs tell it for the arms that were started.
    type: int
  load:
    description:
      - Share of the time by number of requests at once, C(load) of
        P(gpuhost.inference.tune_load#filter). Any weights do, they are made to sum up to 1. Nothing
        is measured outside of it.
    type: dict
  prompts:
    description: Kind of prompts whose points count. By default the only kind, or V(mixed).
    type: str
author:
  - gpuhost.inference contributors (@gpuhost)
seealso:
  - plugin: gpuhost.inference.tune_verdict
    plugin_type: filter
  - plugin: gpuhost.inference.tune_load
    plugin_type: filter
"""

EXAMPLES = r"""
- name: Show what an hour is enough for
  ansible.builtin.debug:
    # next: off on on off, each at C=1, 4, 8, 32, 64, 128; about 60 minutes
    msg: "{{ ([] | gpuhost.inference.tune_plan(minutes=60, restart_s=300, point_s=100)).text }}"

- name: Refuse to begin when the time is too short for a verdict
  ansible.builtin.assert:
    that: plan.enough
    fail_msg: "{{ plan.text | join('; ') }}"
  vars:
    plan: "{{ [] | gpuhost.inference.tune_plan(['off', 'on', 'adaptive'], minutes=240) }}"
"""

RETURN = r"""
_value:
  description: The plan.
  type: dict
  contains:
    next:
      description: The starts to come, in order, empty when the time is not enough or all is done.
      type: list
      elements: dict
      contains:
        arm:
          description: Name of the arm.
          type: str
        start:
          description: Number of the start within the arm.
          type: int
        concurrencies:
          description:
            - What to measure, ascending. Levels above what this arm runs at once are measured as
              one, at that limit.
          type: list
          elements: int
    done:
      description: Whether all is measured that fits.
      type: bool
    enough:
      description: Whether one whole block fits, without which there is no verdict.
      type: bool
    blocks:
      description: Blocks that fit, those that are measured included.
      type: int
    starts:
      description: Starts with a good point so far, by arm.
      type: dict
    concurrencies:
      description: All levels of the plan.
      type: list
      elements: int
    max_concurrency:
      description: Requests that the arm that runs most runs at once, null when not known.
      type: int
    skipped:
      description: Levels that were asked for and at which requests would wait.
      type: list
      elements: int
    minutes:
      description: What the starts to come take, or would take when the time is not enough.
      type: int
    text:
      description: The same in one or two sentences.
      type: list
      elements: str
"""

from collections.abc import Mapping, Sequence
from typing import Any, Callable

from ansible.errors import AnsibleFilterError
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from ansible_collections.gpuhost.inference.plugins.module_utils._tune_plan import Budget, plan
from ansible_collections.gpuhost.inference.plugins.module_utils._tune_runs import numbers


def tune_plan(
    runs: Sequence[Mapping[str, Any]],
    arms: Sequence[str] = ("off", "on"),
    *,
    minutes: float,
    restart_s: float = 600,
    point_s: float = 120,
    points: int = 6,
    blocks: int = 4,
    levels: Sequence[int] = (),
    max_concurrency: int | None = None,
    load: Mapping[Any, Any] | None = None,
    prompts: str | None = None,
) -> dict[str, Any]:
    try:
        time = numbers(float, minutes=minutes, restart_s=restart_s, point_s=point_s)
        most = numbers(int, points=points, blocks=blocks)
        caps = {} if max_concurrency is None else {"max_concurrency": max_concurrency}
        return plan(
            runs,
            arms,
            Budget(
                time["minutes"],
                time["restart_s"],
                time["point_s"],
                most["points"],
                most["blocks"],
            ),
            levels=[numbers(int, level=level)["level"] for level in levels],
            **numbers(int, **caps),
            load=load,
            prompts=prompts,
        )
    except GpuHostError as error:
        raise AnsibleFilterError(f"tune_plan: {error}") from error


class FilterModule:
    def filters(self) -> dict[str, Callable[..., dict[str, Any]]]:
        return {"tune_plan": tune_plan}
