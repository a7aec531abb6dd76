#!/usr/bin/python

# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: sglang_benchmark
short_description: Measure the throughput of a running SGLang server at several concurrencies
version_added: 0.2.0
description:
  - Sends different prompts in a closed loop to a server that is ready, at each of the
    concurrencies, and returns throughput and latencies of the time in which the loop was full.
    With two servers that differ in one thing, such as multi-token prediction, this tells which is
    faster for which load.
  - Each point is warmed up, and begins with an empty prefix cache. A point that cannot be trusted
    is returned in RV(run.rejected) with the reasons, among them failed requests, a queue in the
    server, and GPUs that were slowed down.
  - Uses a load generator of the installed SGLang, run on the managed host, else one of its own.
    Tokens are what the server counts, since a piece of text holds several with speculation.
  - Each point is written to a file in O(results) as soon as it is measured. The same task takes
    what is there and measures the rest, after whatever interrupted it.
  - Nothing else may use the server meanwhile.
author:
  - gpuhost.inference contributors (@gpuhost)
extends_documentation_fragment:
  - gpuhost.inference.attributes
attributes:
  check_mode:
    support: full
    details:
      - The points that would be measured are returned in RV(plan). The server is asked what it is,
        but gets no load and keeps its cache.
  diff_mode:
    support: none
options:
  url:
    description:
      - Where the server is. Measure on its own host, so that the network counts for nothing.
    type: str
    default: http://127.0.0.1:30000
  api_key:
    description:
      - The key of the server. It is in no result, no file and no command line.
    type: str
  validate_certs:
    description:
      - Whether to check the certificate of a C(https) server. SGLang's own clients always do.
    type: bool
    default: true
  python:
    description:
      - Path of the Python interpreter that runs SGLang, to find its load generator.
    type: path
  client:
    description:
      - The load generator. V(rust) is in SGLang from 0.5.22 on, V(python) in all releases.
      - V(auto) takes the first that works here, in the order V(rust), V(python), V(own). One that
        does not count the tokens of a reasoning model, as in old releases, is passed over. So are
        SGLang's where the certificate of a C(https) server is not to be checked.
      - V(own) needs nothing of SGLang.
      - Never compare runs of different clients.
    type: str
    choices: [auto, rust, python, own]
    default: auto
  model:
    description:
      - The model id, by default the first that the server offers.
    type: str
  tokenizer:
    description:
      - The folder of the tokenizer, which SGLang's own clients need. By default what the server
        names.
    type: path
  concurrencies:
    description:
      - How many requests are in flight, a point for each.
    type: list
    elements: int
    default: [1, 8, 32, 128]
  prompts:
    description:
      - A file on the host in the form of ShareGPT, a list in JSON or an object on each line. The
        first turn of each conversation is sent. By default the prompts of this collection, which
        differ from one another and are always the same for a O(seed).
      - 'It has the form C([{"conversations": [{"from": "human", "value": "..."}]}]).'
      - As many different prompts are needed as O(requests) and O(warmup) are together. By default
        that is six times the highest concurrency, and 48 are enough up to 8.
      - Refuses a prompt that is one word or phrase over and over, as nearly every draft of more of
        the same is accepted. Random words cannot be told from others, and make speculation look
        bad.
    type: path
  kinds:
    description:
      - Which prompts of this collection are sent, in turns. V(long) asks about long documents.
      - How many drafts are accepted, and so how much speculation gains, depends on it.
    type: list
    elements: str
    choices: [code, chat, reasoning, long]
    default: [code, chat, reasoning]
  context_tokens:
    description:
      - About how many tokens each prompt has, reached by documents before its question. What it
        really was is returned. By default the questions alone, of about 60 tokens, and 4000 for
        V(long).
    type: int
  output_tokens:
    description:
      - How many tokens each answer has; the model is not allowed to stop earlier.
    type: int
    default: 512
  requests:
    description:
      - How many requests are measured for a point. By default four for each that is in flight, and
        at least 32.
    type: int
  warmup:
    description:
      - How many requests warm up before a point, with other prompts. By default two for each that
        is in flight.
    type: int
  flush:
    description:
      - Whether to empty the prefix cache of the server before each point.
    type: bool
    default: true
  seed:
    description:
      - Of the prompts and their order. Use the same for all runs that are compared.
    type: int
    default: 1
  temperature:
    description:
      - Of sampling. Speculation gains less when it is higher.
    type: float
    default: 0.0
  arm:
    description:
      - The name of what runs, as V(off) or V(mtp-3). It names the file.
    type: str
    default: "off"
  start:
    description:
      - Which start of this arm it is. Starts differ, so a comparison needs several of each arm.
      - Restart the server before each. Measuring one start again under another number is no repeat.
    type: int
    default: 1
  results:
    description:
      - The folder on the host for the files of runs, C(ARM-START.json).
        P(gpuhost.inference.tune_verdict#filter) shows how to read and compare them.
    type: path
    default: /var/lib/gpuhost/tune
  again:
    description:
      - What is measured again although it is in the file. With V(all) the file is put aside first,
        and kept under another name.
    type: str
    choices: [none, rejected, all]
    default: none
  timeout:
    description:
      - Seconds that the requests of a point may take.
    type: int
    default: 3600
seealso:
  - module: gpuhost.inference.sglang_info
  - module: gpuhost.inference.sglang_mtp_info
  - plugin: gpuhost.inference.tune_verdict
    plugin_type: filter
"""

EXAMPLES = r"""
- name: Measure the server as it is
  gpuhost.inference.sglang_benchmark:
    python: /opt/sglang/bin/python
    api_key: "{{ vault_sglang_api_key }}"
  register: result

# Restart the server before: another start is what the number stands for
- name: Measure the second start with MTP for long contexts and few users
  gpuhost.inference.sglang_benchmark:
    python: /opt/sglang/bin/python
    arm: mtp-3
    start: 2
    concurrencies: [1, 4, 8]
    kinds: [code]
    context_tokens: 32000
    output_tokens: 1024
"""

RETURN = r"""
run:
  description:
    - One start of one arm with its points, as it is in the file. In check mode what is there
      already, V(null) for nothing.
  returned: success
  type: dict
  contains:
    schema:
      description: Version of this form.
      returned: always
      type: int
      sample: 1
    arm:
      description: The name of what ran.
      returned: always
      type: str
      sample: mtp-3
    start:
      description: Which start of it.
      returned: always
      type: int
      sample: 1
    at:
      description: When the run began, in UTC.
      returned: always
      type: str
      sample: "2026-11-30T09:00:00Z"
    host:
      description: Name of the host.
      returned: always
      type: str
      sample: gpu-1
    server:
      description: Where the server was.
      returned: always
      type: str
      sample: http://127.0.0.1:30000
    client:
      description: Name and version of the load generator.
      returned: always
      type: dict
      sample:
        name: rust
        version: 0.5.23
    seed:
      description: Of the prompts.
      returned: always
      type: int
      sample: 1
    corpus:
      description: Digest and kinds of the prompts.
      returned: always
      type: dict
      sample:
        kinds: [code, chat, reasoning]
    equal:
      description: What must be the same in all runs that are compared.
      returned: always
      type: dict
      sample:
        mem_fraction_static: 0.8
        max_running_requests: 48
    apart:
      description: What differs on purpose, or because of that.
      returned: always
      type: dict
      sample:
        speculative_algorithm: EAGLE
        kv_tokens: 733361
    question:
      description: The options that the points answer.
      returned: always
      type: dict
      sample: {}
    server_start:
      description: By what another start of the server is noticed.
      returned: always
      type: dict
      sample: {}
    points:
      description: The good points.
      returned: always
      type: list
      elements: dict
      contains: &point
        concurrency:
          description: Requests in flight that were asked for.
          returned: always
          type: int
          sample: 8
        prompts:
          description: V(mixed), the only kind, or V(file).
          returned: always
          type: str
          sample: mixed
        requests:
          description: Those that were answered.
          returned: always
          type: int
          sample: 32
        duration_s:
          description: Seconds from the first request to the last answer.
          returned: always
          type: float
          sample: 61.2
        steady_s:
          description:
            - Seconds of the full part, from the end of the first wave to the last admission.
          returned: always
          type: float
          sample: 30.5
        output_tok_s:
          description:
            - Generated tokens a second of all requests together while the loop was full, from the
              tokens and the times of whole requests and how many were in flight.
          returned: always
          type: float
          sample: 540.1
        per_request_tok_s:
          description: The median request's tokens a second after its first token.
          returned: always
          type: float
          sample: 69.2
        ttft_ms:
          description: Milliseconds to the first token, of the requests of the full part.
          returned: always
          type: dict
          sample: {mean: 40.1, median: 39.0, p90: 55.2, p95: 60.0, p99: 71.3}
        tpot_ms:
          description: Milliseconds for each token after the first.
          returned: always
          type: dict
          sample: {mean: 14.5, median: 14.4, p90: 15.0, p95: 15.1, p99: 15.6}
        itl_ms:
          description:
            - Milliseconds from one piece of text to the next. A piece holds several tokens with
              speculation, so compare C(tpot_ms) instead.
          returned: always
          type: dict
          sample: {mean: 30.5, median: 30.1, p90: 33.0, p95: 35.2, p99: 41.0}
        e2e_ms:
          description: Milliseconds from sending to the end.
          returned: always
          type: dict
          sample: {mean: 7400.0, median: 7390.2, p90: 7500.1, p95: 7600.0, p99: 7700.3}
        in_flight:
          description: Requests that really were in flight, on average over the full part.
          returned: always
          type: float
          sample: 7.99
        accept_length:
          description:
            - Tokens for each verification, by the server's counters. V(null) without speculation,
              and where they cannot be read.
          returned: always
          type: float
          sample: 2.41
        accept_rate:
          description: Share of the drafts that were accepted.
          returned: always
          type: float
          sample: 0.47
        running_max:
          description:
            - Most requests that ran at once in the full part, V(null) without the server's metrics.
          returned: always
          type: float
          sample: 8
        queued_max:
          description: Most requests that waited.
          returned: always
          type: float
          sample: 0
        kv_use_max:
          description: Largest used share of the key-value cache.
          returned: always
          type: float
          sample: 0.31
        retracted:
          description: Requests that were thrown back into the queue at once.
          returned: always
          type: int
          sample: 0
        output_tokens:
          description: Tokens of an answer, asked for and the median.
          returned: always
          type: dict
          sample: {asked: 512, median: 512.0}
        input_tokens:
          description: Tokens of a prompt, asked for and the median.
          returned: always
          type: dict
          sample: {asked: null, median: 66.0}
        slowed_clocks:
          description:
            - Why GPUs ran below their clocks, other than for their power limit. V(null) when
              C(nvidia-smi) does not tell.
          returned: always
          type: list
          elements: str
          sample: []
        reasons:
          description: Why the point must not be used, nothing for a good one.
          returned: always
          type: list
          elements: dict
          sample: []
    rejected:
      description:
        - The points that must not be used. Codes of their reasons are V(failed-requests),
          V(too-few-requests), V(tokens-unknown), V(short-output), V(no-window), V(unsaturated),
          V(unsteady), V(throttled), V(above-cap) and V(queued).
      returned: always
      type: list
      elements: dict
      contains: *point
plan:
  description: The points that were, or in check mode would be, measured.
  returned: success
  type: list
  elements: dict
  contains:
    concurrency:
      description: Requests in flight.
      returned: always
      type: int
      sample: 8
    requests:
      description: How many are measured.
      returned: always
      type: int
      sample: 32
    warmup:
      description: How many warm up.
      returned: always
      type: int
      sample: 16
    about_seconds:
      description: About how long it takes; 30 tokens/s a request where nothing was measured yet.
      returned: always
      type: float
      sample: 85.3
client:
  description: The load generator, and why it was chosen.
  returned: success
  type: dict
  sample:
    name: rust
    version: 0.5.23
    reason: SGLang 0.5.23 has it
file:
  description: Path of the run's file on the host.
  returned: success
  type: str
  sample: /var/lib/gpuhost/tune/mtp-3-1.json
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuhost.inference.plugins.module_utils._bench import (
    Bench,
    Question,
    about_seconds,
    check,
    measure,
    open_book,
    plan,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._bench_corpus import (
    built_in,
    from_file,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._bench_server import read_server
from ansible_collections.gpuhost.inference.plugins.module_utils._bench_sglang import choose
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_http import Client


def run(params: dict[str, Any], check_mode: bool) -> dict[str, Any]:
    names = ["arm", "start", "context_tokens", "output_tokens", "requests", "warmup", "flush"]
    names += ["seed", "temperature", "timeout"]
    given = params["prompts"]
    question = Question(
        concurrencies=tuple(params["concurrencies"]),
        corpus=from_file(given) if given else built_in(params["kinds"]),
        **{name: params[name] for name in names},
    )
    check(question)
    client = Client(params["url"], params["api_key"], params["validate_certs"])
    unproved = params["url"].lower().startswith("https") and not params["validate_certs"]
    tool = choose(params["client"], params["python"], unproved=unproved)
    server = read_server(client, params["model"], params["tokenizer"])
    book = open_book(params["results"], question, server, tool)
    todo = plan(question, book, params["again"])
    points = [
        {
            "concurrency": concurrency,
            "requests": question.requests_at(concurrency),
            "warmup": question.warmup_at(concurrency),
            "about_seconds": about_seconds(question, book, concurrency),
        }
        for concurrency in todo
    ]
    content: dict[str, Any] | None = book.content or None
    if todo and not check_mode:
        bench = Bench(client, server, tool, params["api_key"])
        content = measure(bench, question, book, todo, params["again"] == "all")
    return {
        "changed": bool(todo),
        "run": content,
        "plan": points,
        "client": {"name": tool.name, "version": tool.version, "reason": tool.reason},
        "file": book.path,
    }


def main() -> None:
    kinds = ["code", "chat", "reasoning", "long"]
    module = AnsibleModule(
        argument_spec={
            "url": {"type": "str", "default": "http://127.0.0.1:30000"},
            "api_key": {"type": "str", "no_log": True},
            "validate_certs": {"type": "bool", "default": True},
            "python": {"type": "path"},
            "client": {
                "type": "str",
                "choices": ["auto", "rust", "python", "own"],
                "default": "auto",
            },
            "model": {"type": "str"},
            "tokenizer": {"type": "path", "no_log": False},
            "concurrencies": {"type": "list", "elements": "int", "default": [1, 8, 32, 128]},
            "prompts": {"type": "path"},
            "kinds": {
                "type": "list",
                "elements": "str",
                "choices": kinds,
                "default": ["code", "chat", "reasoning"],
            },
            "context_tokens": {"type": "int", "no_log": False},
            "output_tokens": {"type": "int", "default": 512, "no_log": False},
            "requests": {"type": "int"},
            "warmup": {"type": "int"},
            "flush": {"type": "bool", "default": True},
            "seed": {"type": "int", "default": 1},
            "temperature": {"type": "float", "default": 0.0},
            "arm": {"type": "str", "default": "off"},
            "start": {"type": "int", "default": 1},
            "results": {"type": "path", "default": "/var/lib/gpuhost/tune"},
            "again": {"type": "str", "choices": ["none", "rejected", "all"], "default": "none"},
            "timeout": {"type": "int", "default": 3600},
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
