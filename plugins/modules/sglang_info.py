#!/usr/bin/python

# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: sglang_info
short_description: Tell the state of an SGLang server from several witnesses, or wait until it is
  ready
version_added: 0.1.0
description:
  - Asks systemd, the journal of the server's present run, the kernel's table of sockets, and the
    server's own endpoints, and concludes from all of them what state it is in. No single one can be
    trusted - C(/v1/models) answers during warm-up and after the scheduler has hung, a closed port
    is normal for minutes after a start, and an open one may belong to another program.
  - An O(api_key) is never sent to a process that is known not to be of O(unit).
  - Run it on the machine or in the container where the server runs, as root, so that the owner of
    the port can be seen. Without O(unit) it can also look at a server elsewhere, with fewer
    witnesses.
  - SGLang writes its keys in clear into the journal and into C(/server_info). They are removed from
    the result.
author:
  - gpuhost.inference contributors (@gpuhost)
extends_documentation_fragment:
  - gpuhost.inference.attributes
  - gpuhost.inference.attributes.info_module
options:
  url:
    description:
      - Where the server is asked.
    type: str
    default: http://127.0.0.1:30000
  unit:
    description:
      - Name of the server's systemd service on this machine.
      - Without it, nothing is known about a server that does not answer.
    type: str
  api_key:
    description:
      - The server's key, if it has one.
    type: str
  model_id:
    description:
      - The model the server must offer, as in C(/v1/models). A request's model name is no check, as
        SGLang answers to any.
    type: str
  generate:
    description:
      - Also ask for a short text, and look whether it is one. A server can be healthy and repeat
        one character.
    type: bool
    default: false
  acceptance_tokens:
    description:
      - Measure how many drafted tokens are accepted, in one request over this many tokens of real
        text. Use 200 or more, for of fewer than 32 nothing can be told. V(0) does not measure.
      - It takes as long as generating that many tokens takes.
    type: int
    default: 0
  window:
    description:
      - Watch for this many seconds how well it speculates on what its users ask meanwhile, into
        RV(server.speculation.window). V(0) does not watch.
      - Take a time in which many requests begin and end, as some counters grow when a request
        ends.
    type: int
    default: 0
    version_added: 0.2.0
  wait:
    description:
      - Seconds to wait until the server is ready. Loading a big model takes minutes.
      - The module fails when it is not ready then, and at once when waiting cannot help.
      - With V(0) it never fails for the server's state, and in check mode neither, as nothing was
        started then.
    type: int
    default: 0
  loading_timeout:
    description:
      - Seconds that a start may load, counted from the start of the unit's main process by systemd,
        so calls that follow each other add up. Longer loading is V(failed).
      - Unset, it may take any time.
    type: int
    version_added: 0.2.0
  warming_timeout:
    description:
      - Seconds that a warm-up may take, counted from its first line in the journal. When that line
        is lost, both phases together may take what O(loading_timeout) and this allow.
      - Unset, it may take any time; SGLang itself gives up after 600 s.
    type: int
    version_added: 0.2.0
  timeout:
    description:
      - Seconds that C(/health) may take. It needs 1 when all is well, and 20 to say that the
        scheduler does not answer. A smaller value than 25 does not see that answer.
    type: float
    default: 30
  validate_certs:
    description:
      - Whether to check the certificate of an C(https) server.
    type: bool
    default: true
seealso:
  - module: gpuhost.inference.sglang_flags_info
  - module: gpuhost.inference.sglang_mtp_info
"""

EXAMPLES = r"""
- name: Look at the server
  gpuhost.inference.sglang_info:
    unit: sglang
    model_id: qwen3.5-122b
  register: result

- name: Say how it is
  ansible.builtin.debug:
    msg: "{{ result.server.state }}: {{ result.server.reason }}"

- name: Wait until it is ready, at most twenty minutes, and try a generation
  gpuhost.inference.sglang_info:
    unit: sglang
    model_id: qwen3.5-122b
    api_key: "{{ vault_sglang_api_key }}"
    generate: true
    wait: 1200

- name: Wait in short calls, each of which shows how far it is; the limits hold over all of them
  gpuhost.inference.sglang_info:
    unit: sglang
    loading_timeout: 1800
    warming_timeout: 600
  register: result
  until: result.server.settled
  retries: 100
  delay: 30

- name: Fail unless it is ready, with the line of its log that tells why
  ansible.builtin.assert:
    that: result.server.state == 'ready'
    fail_msg: "{{ result.server.state }}: {{ result.server.reason }}"

- name: Measure how well it speculates
  gpuhost.inference.sglang_info:
    unit: sglang
    acceptance_tokens: 256
  register: result

- name: Watch five minutes of what its users ask
  gpuhost.inference.sglang_info:
    unit: sglang
    window: 300
  register: watched

- name: Warn of drafts that are hardly ever accepted
  ansible.builtin.debug:
    msg: "Only {{ watched.server.speculation.window.accept_length }} tokens for each pass"
  when: (watched.server.speculation.window.accept_length or 4) < 1.4

- name: Show it
  ansible.builtin.debug:
    msg: "{{ result.server.speculation.accept_length }} tokens for each pass of the model"
"""

RETURN = r"""
server:
  description: What is known of the server.
  returned: always
  type: dict
  contains:
    state:
      description:
        - V(absent) - there is no such unit.
        - V(stopped) - it is not started, or is stopping without an answer to anybody.
        - V(draining) - it was told to stop, and answers the requests that it has. Wait, or let
          systemd kill it when its time is over.
        - V(loading) - it runs and its port is still closed.
        - V(warming) - it answers but has not generated yet.
        - V(ready) - it is healthy and offers the expected model.
        - V(degraded) - it answers, but something is wrong with what it answers.
        - V(hung) - its scheduler does not answer.
        - V(failed) - it has ended with an error, its start cannot succeed any more, or takes
          longer than O(loading_timeout) or O(warming_timeout) allow.
        - V(unreachable) - it cannot be reached from here.
      returned: always
      type: str
      choices: [absent, stopped, loading, warming, ready, degraded, hung, draining, failed,
        unreachable]
      sample: ready
    settled:
      description: Whether waiting will not change the state. A wait ends at once then.
      returned: always
      type: bool
      sample: true
    reason:
      description: Why, in a sentence. For a failed server with the line of its log that explains
        it.
      returned: always
      type: str
      sample: serves qwen3.5-122b
    progress:
      description: How far a start has come, V(null) when it has ended or is not known.
      returned: always
      type: str
      sample: loading weights, 25 % (10/39 files)
    seconds:
      description: Since when, in seconds. Each is V(null) when it is not known.
      returned: always
      type: dict
      contains:
        running:
          description: Since the start of its main process.
          returned: always
          type: int
          sample: 95
        stage:
          description: Since the beginning of the present stage of its start.
          returned: always
          type: int
          sample: 40
        quiet:
          description: Since the last line of its log.
          returned: always
          type: int
          sample: 2
    url:
      description: Where it was asked.
      returned: always
      type: str
      sample: http://127.0.0.1:30000
    unit:
      description: Its service.
      returned: always
      type: str
      sample: sglang
    pid:
      description: Its main process.
      returned: always
      type: int
      sample: 4242
    restarts:
      description: How often systemd has restarted it after a failure.
      returned: always
      type: int
      sample: 0
    restarting:
      description:
        - Whether systemd waits to start it again by itself after a failure. It is V(failed) until
          then. V(null) without a unit.
      returned: always
      type: bool
      sample: false
      version_added: 0.2.0
    listener:
      description: The process that listens on the port, V(null) when none does or it is elsewhere.
      returned: always
      type: dict
      contains:
        pid:
          description: The process, V(null) when it could not be looked at.
          returned: always
          type: int
          sample: 4242
        command:
          description: Its name.
          returned: always
          type: str
          sample: python
        addresses:
          description: The addresses it listens on.
          returned: always
          type: list
          elements: str
          sample: [0.0.0.0]
        ours:
          description: Whether it belongs to O(unit), V(null) when that is not known.
          returned: always
          type: bool
          sample: true
    gpu_processes:
      description:
        - The processes of this machine or container that have a GPU's node open, without
          nvidia-persistenced. V(null) when not all could be looked at, or O(url) is elsewhere.
        - In a container those of the host and of other containers are not seen.
      returned: always
      type: list
      elements: dict
      contains:
        pid:
          description: The process.
          returned: always
          type: int
          sample: 4244
        command:
          description: Its name.
          returned: always
          type: str
          sample: sglang::schedul
        nodes:
          description: The nodes it has open.
          returned: always
          type: list
          elements: str
          sample: [/dev/nvidia0]
        computes:
          description: Whether it has C(/dev/nvidia-uvm) open too, as CUDA needs, and programs that
            only watch GPUs do not. V(null) when there is no such node.
          returned: always
          type: bool
          sample: true
        ours:
          description: Whether it belongs to O(unit), V(null) without one.
          returned: always
          type: bool
          sample: true
    node_rank:
      description: Which of several machines this is for one server, from its log. All but V(0) only
        compute. V(null) when it is not known.
      returned: always
      type: int
      sample: 0
    version:
      description: Version of SGLang that runs.
      returned: always
      type: str
      sample: 0.5.23
    model_id:
      description: The model it offers.
      returned: always
      type: str
      sample: qwen3.5-122b
    model_path:
      description: Where it has the model from.
      returned: always
      type: str
      sample: /srv/models/qwen3.5-122b
    max_model_len:
      description: Longest context in tokens.
      returned: always
      type: int
      sample: 262144
    effective_max_running_requests:
      description:
        - How many requests really run at once. It can be far below the flag, as speculation and the
          state of hybrid models take their share of the memory.
      returned: always
      type: int
      sample: 24
    kv_tokens:
      description: Size of the key-value cache in tokens.
      returned: always
      type: int
      sample: 1200000
    kv_cache_gb:
      description: Size of the key-value cache in GB for each GPU.
      returned: always
      type: float
      sample: 14.2
    load:
      description: What it is doing, from C(/metrics), V(null) without the flag C(enable-metrics).
      returned: always
      type: dict
      sample: {running: 2, queued: 0, token_usage: 0.04, mamba_usage: 0.08, generated_per_second:
        87.5}
    speculation:
      description: What it speculates with, and how well.
      returned: always
      type: dict
      contains:
        algorithm:
          description: The algorithm, as the server calls it. V(EAGLE) for the flag's value
            C(NEXTN).
          returned: always
          type: str
          sample: EAGLE
        num_steps:
          description: Drafted steps.
          returned: always
          type: int
          sample: 3
        eagle_topk:
          description: Candidates in each step.
          returned: always
          type: int
          sample: 1
        num_draft_tokens:
          description: Tokens that are verified in one pass.
          returned: always
          type: int
          sample: 4
        accept_length:
          description: Tokens for each pass. V(1.0) means that no draft is ever accepted.
          returned: always
          type: float
          sample: 1.95
        accept_rate:
          description: Share of the drafts that is accepted, computed alike for all releases.
          returned: always
          type: float
          sample: 0.3167
        verdict:
          description:
            - V(dead) below 1.05 tokens for each pass, V(low) below 1.4, V(ok) from there on,
              V(unknown) when nothing was measured.
          returned: always
          type: str
          choices: [dead, low, ok, unknown]
          sample: ok
        source:
          description:
            - Where the length is from - V(generate) is the measurement of O(acceptance_tokens),
              V(server_info) the average since the start, V(metrics) the last forty steps.
          returned: always
          type: str
          sample: generate
        window:
          description: What happened in O(window), V(null) without it.
          returned: always
          type: dict
          contains:
            seconds:
              description: Its length.
              returned: always
              type: float
              sample: 60.0
            generated_tokens:
              description: Tokens that were generated, V(null) without the flag C(enable-metrics).
              returned: always
              type: int
              sample: 5230
            verify_calls:
              description: Passes of the model over drafts, V(null) before 0.5.13.
              returned: always
              type: int
              sample: 2050
            accept_length:
              description: Tokens for each pass, V(null) when it is not known.
              returned: always
              type: float
              sample: 2.5512
            accept_rate:
              description: Share of the drafts that was accepted, computed alike for all releases.
              returned: always
              type: float
              sample: 0.5171
            verdict:
              description: What that length means, as RV(server.speculation.verdict).
              returned: always
              type: str
              choices: [dead, low, ok, unknown]
              sample: ok
            source:
              description: V(metrics), the counters of its ends, or V(log), its lines about batches.
              returned: always
              type: str
              sample: metrics
            reason:
              description: Why there is no accept length, as nobody asked anything or the server
                was restarted.
              returned: always
              type: str
              sample: nothing was generated in the window
    flags:
      description: Every argument the server runs with, as it resolved them, without keys. Empty
        when it did not tell.
      returned: always
      type: dict
      sample: {attention_backend: triton, tp_size: 4, api_key: (redacted)}
    log:
      description: The last lines of its journal, empty for a ready server.
      returned: always
      type: list
      elements: str
      sample: []
witnesses:
  description: What each witness said, in the order they were called.
  returned: always
  type: list
  elements: dict
  contains:
    name:
      description: V(unit), V(journal), V(port), V(gpu_processes), V(health), V(models),
        V(generation) or V(counters).
      returned: always
      type: str
      sample: health
    said:
      description: What it said.
      returned: always
      type: str
      sample: 200 after 1.0 s
    ok:
      description: Whether that speaks for a ready server, V(null) when it says neither.
      returned: always
      type: bool
      sample: true
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang import Limits, describe
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_http import Client
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_look import (
    Question,
    facts,
    look,
    wait_until_ready,
    watch_speculation,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader


def run(question: Question, client: Client, wait: float) -> dict[str, Any]:
    seen, verdict = wait_until_ready(lambda: look(question, client, Reader()), wait)
    window = watch_speculation(seen, question, client, Reader())
    return {
        "changed": False,
        "server": facts(seen, verdict, question, window),
        "witnesses": [
            {"name": name, "said": said, "ok": good} for name, said, good in describe(seen)
        ],
    }


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "url": {"type": "str", "default": "http://127.0.0.1:30000"},
            "unit": {"type": "str"},
            "api_key": {"type": "str", "no_log": True},
            "model_id": {"type": "str"},
            "generate": {"type": "bool", "default": False},
            "acceptance_tokens": {"type": "int", "default": 0, "no_log": False},
            "window": {"type": "int", "default": 0},
            "wait": {"type": "int", "default": 0},
            "loading_timeout": {"type": "int"},
            "warming_timeout": {"type": "int"},
            "timeout": {"type": "float", "default": 30.0},
            "validate_certs": {"type": "bool", "default": True},
        },
        supports_check_mode=True,
    )
    options = dict(module.params)
    wait = 0 if module.check_mode else options["wait"]
    del options["wait"]
    limits = Limits(options.pop("loading_timeout"), options.pop("warming_timeout"))
    key, checked = options.pop("api_key"), options.pop("validate_certs")
    try:
        client = Client(options["url"], key, checked)
        result = run(Question(**options, limits=limits), client, wait)
    except GpuHostError as error:
        module.fail_json(msg=str(error))
    server = result["server"]
    if wait and server["state"] != "ready":
        said = "; ".join(f"{w['name']}: {w['said']}" for w in result["witnesses"])
        module.fail_json(
            msg=f"SGLang at {server['url']} is {server['state']}: {server['reason']}. "
            f"The witnesses: {said}",
            **result,
        )
    module.exit_json(**result)


if __name__ == "__main__":
    main()
