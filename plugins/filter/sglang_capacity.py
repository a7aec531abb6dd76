# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: sglang_capacity
short_description: Say what fits an SGLang server, and how it differs from the prediction
version_added: 0.2.0
description:
  - Turns the capacity that M(gpuhost.inference.sglang_mtp_info) predicts into sentences.
  - With O(server), says instead what the server has of it, and at which levels of concurrency its
    requests would wait in the queue.
positional: levels, server
options:
  _input:
    description: RV(gpuhost.inference.sglang_mtp_info#module:capacity).
    type: dict
    required: true
  levels:
    description: Numbers of requests at once that are of interest.
    type: list
    elements: int
    default: []
  server:
    description: RV(gpuhost.inference.sglang_info#module:server), of a server with MTP.
    type: dict
author:
  - gpuhost.inference contributors (@gpuhost)
seealso:
  - module: gpuhost.inference.sglang_mtp_info
"""

EXAMPLES = r"""
- name: Show what would fit
  ansible.builtin.debug:
    msg: "{{ decided.capacity | gpuhost.inference.sglang_capacity(levels=[1, 8, 64]) }}"

- name: Show how the server differs from that
  ansible.builtin.debug:
    msg: "{{ decided.capacity | gpuhost.inference.sglang_capacity(levels, now.server) }}"
  vars:
    levels: [1, 8, 64]
"""

RETURN = r"""
_value:
  description: Sentences.
  type: list
  elements: str
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Callable

from ansible.errors import AnsibleFilterError

_LIMITS = {
    "requested": "as many as asked for",
    "states": "the slots for states limit them",
    "kv_cache": "the key-value cache limits them",
}


def sglang_capacity(
    capacity: Any, levels: Sequence[Any] = (), server: Mapping[str, Any] | None = None
) -> list[str]:
    if not isinstance(capacity, Mapping) or "with_mtp" not in capacity:
        raise AnsibleFilterError("sglang_capacity takes the capacity of sglang_mtp_info")
    numbers = [int(level) for level in levels]  # core 2.16 gives text
    if server is not None:
        return list(_compared(capacity["with_mtp"], numbers, server))
    return list(_predicted(capacity, numbers))


def _predicted(capacity: Mapping[str, Any], levels: Sequence[int]) -> Iterator[str]:
    for name, words in (("without_mtp", "without MTP"), ("with_mtp", "with MTP")):
        arm = capacity[name]
        running = arm["max_running_requests"]
        if running is None:
            yield f"{words}: not known how many requests run at once: {'; '.join(arm['unknown'])}"
            continue
        states = ""
        if arm["state_slots"] is not None:
            states = (
                f", {arm['state_slots']} slots for states of {arm['state_mib']} MiB, "
                f"{arm['slots_per_request']} for each request"
            )
        yield (
            f"{words}: {running} requests run at once ({_LIMITS[arm['limited_by']]}), "
            f"{arm['kv_tokens']} tokens in the key-value cache{states}"
        )
        yield from _waiting(words, running, levels)
    yield "assuming that " + "; ".join(capacity["assumptions"])


def _waiting(words: str, running: int, levels: Sequence[int]) -> Iterator[str]:
    above = [str(level) for level in levels if level > running]
    if above:
        yield f"{words}: at {', '.join(above)} requests at once some wait in the queue"


def _compared(
    arm: Mapping[str, Any], levels: Sequence[int], server: Mapping[str, Any]
) -> Iterator[str]:
    rows = (
        ("max_running_requests", "effective_max_running_requests", "requests run at once"),
        ("kv_tokens", "kv_tokens", "tokens in the key-value cache"),
        ("state_slots", "max_mamba_cache_size", "slots for states"),
    )
    resolved = server.get("flags") or {}
    for predicted, reported, words in rows:
        expected, found = arm.get(predicted), server.get(reported, resolved.get(reported))
        if found is None:
            if predicted == "max_running_requests":
                yield f"the server does not say how many {words}"
        elif expected is None:
            yield f"{words}: {found}, and no prediction to compare with"
        else:
            yield f"{words}: {found} where {expected} was predicted{_difference(found, expected)}"
    running = server.get("effective_max_running_requests")
    requested = arm.get("requested")
    if running is not None:
        if requested is not None and requested > running:
            yield f"{requested} were asked for: SGLang runs {running}"
        yield from _waiting("as the server is", running, levels)


def _difference(found: int, expected: int) -> str:
    if found == expected or not expected:
        return ""
    share = round(100 * (found - expected) / expected)
    return f" ({share:+d} %)" if share else " (less than 1 % apart)"


class FilterModule:
    def filters(self) -> dict[str, Callable[..., list[str]]]:
        return {"sglang_capacity": sglang_capacity}
