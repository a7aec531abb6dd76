# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.

"""Calling the witnesses of an SGLang server, and waiting until they agree that it is ready."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ansible_collections.gpuhost.inference.plugins.module_utils import _command
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from ansible_collections.gpuhost.inference.plugins.module_utils._redact import redact_fields
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang import (
    NO_LIMITS,
    SLOW_HEALTH,
    Limits,
    Verdict,
    Witnesses,
    helps_rank_0,
    judge_server,
    model_ids,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_http import (
    NO_CONNECTION,
    REFUSED,
    Client,
    Metric,
    Reply,
    dict_of,
    list_of,
    number_of,
    parse_metrics,
    text_of,
    whole_of,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_log import Log, read_log
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_unit import (
    UNIT_PROPERTIES,
    GpuProcess,
    Listener,
    Unit,
    parse_unit,
    read_gpu_processes,
    read_hints,
    read_listener,
    read_oom_kills,
    service_name,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_window import (
    Window,
    watch,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._speculation import (
    judge_acceptance,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader

Runner = Callable[[Sequence[str]], str]

_LINES = 5000  # of the journal: a start writes some hundred, a week of serving many more
_ANSWER = 10.0  # seconds that an answer without a generation may take
# seconds between two looks while waiting: each `/health` that fails late leaves a request behind
_INTERVAL = {"loading": 2.0, "warming": 2.0}
_LONG_INTERVAL = 10.0
# `/health` with a generation sleeps a second at least; one that is quicker was none.
_NO_GENERATION = 0.9
# Of as many tokens and one pass less it is 1.03, which is `dead` still.
_FEWEST = 32
# Real text, as acceptance depends on it: one repeated token is accepted always, noise never.
_PROMPT = (
    "The following is a clear explanation, for a new colleague, of how a web browser fetches a "
    "page: how the name is resolved, how the connection is opened and secured, what is sent, and "
    "what can go wrong at each step.\n\n"
)


@dataclass(frozen=True)
class Question:
    """What is to be found out.

    Attributes:
        url: where the server is asked.
        unit: its systemd service, `None` when there is none or it is on another machine.
        model_id: the model it should serve, `None` for any.
        generate: ask for a short generation too.
        acceptance_tokens: measure the acceptance of drafts over that many tokens, 0 for not.
        timeout: seconds `/health` may take; it needs 20 to say that the scheduler hangs.
        limits: seconds that the phases of a start may take.
        window: seconds over which speculation is watched, 0 for not.
    """

    url: str
    unit: str | None = None
    model_id: str | None = None
    generate: bool = False
    acceptance_tokens: int = 0
    timeout: float = 30.0
    limits: Limits = NO_LIMITS
    window: int = 0


def look(question: Question, client: Client, host: Reader, run: Runner = _command.run) -> Witnesses:
    """Call every witness once.

    The server is asked only when its port is not known to be another's: a key is for it alone.

    Raises:
        GpuHostError: systemd does not answer about the unit.
        UnreadableError: the socket table of the kernel is not readable.
    """
    unit = read_unit(question.unit, host, run)
    log = read_journal(unit, run)
    listener = read_listener(host, question.url, unit)
    seen = Witnesses(
        url=question.url,
        expected=question.model_id,
        limits=question.limits,
        unit=unit,
        log=log,
        listener=listener,
        # a server that is asked over the network has its GPUs elsewhere
        processes=read_gpu_processes(host, unit) if listener is not None else None,
    )
    if unit is not None and unit.active in ("inactive", "failed"):
        return seen
    if listener is not None and not listener.open:
        return replace(seen, health=Reply(None, "", REFUSED, 0.0))
    if listener is not None and listener.ours is False:
        # whoever it is, it is not asked; where it does not answer for the url, nobody does
        return replace(seen, health=Reply(None, "", REFUSED, 0.0)) if listener.elsewhere else seen
    return _ask(seen, question, client, host, run)


def read_unit(name: str | None, host: Reader, run: Runner) -> Unit | None:
    """Return what systemd says about a service, `None` without a name.

    Raises:
        GpuHostError: the name is none, or systemd does not answer.
    """
    if name is None:
        return None
    command = ["systemctl", "show", "--property", UNIT_PROPERTIES, "--", service_name(name)]
    unit = parse_unit(name, run(command), time.monotonic())
    return replace(unit, oom_kills=read_oom_kills(host, unit))


def read_journal(unit: Unit | None, run: Runner) -> Log | None:
    """Return the log of the unit's present or last run, `None` when it cannot be read.

    Its times are those of CLOCK_MONOTONIC, as the clock of the day may be set while it runs.
    """
    if unit is None or not re.fullmatch(r"[0-9a-f]+", unit.invocation):
        return None
    try:
        command = ["journalctl", "--no-pager", "--quiet", "--output=short-monotonic"]
        text = run([*command, f"--lines={_LINES}", f"_SYSTEMD_INVOCATION_ID={unit.invocation}"])
    except GpuHostError:
        return None
    records: list[tuple[float | None, str]] = []
    for line in text.splitlines():
        match = re.match(r"\[ *(\d+\.\d+)\] \S+ [^:]+: ?(.*)", line)
        if match:
            records.append((float(match[1]), match[2]))
        elif line.strip():
            records.append((None, line.strip()))
    return read_log(records, now=time.monotonic()) if records else None


def _ask(
    seen: Witnesses, question: Question, client: Client, host: Reader, run: Runner
) -> Witnesses:
    """Ask the server itself, and no more once it has failed."""
    scrape = client.ask("/metrics", _ANSWER)
    if scrape.failure in (REFUSED, NO_CONNECTION):  # so would the next be
        return replace(seen, health=scrape)
    before = _metrics(scrape)
    asked = time.monotonic()
    health = _health(seen, question, client)
    seen = replace(seen, health=health, metrics=before)
    if health.status != 200:
        return _busy(seen, client, host, run, asked) if health.seconds >= SLOW_HEALTH else seen
    if helps_rank_0(seen):
        return seen
    seen = replace(seen, models=client.ask("/v1/models", _ANSWER))
    seen = replace(seen, metrics=_metrics(client.ask("/metrics", _ANSWER)))
    if seen.models is None or seen.models.status != 200:
        return seen
    seen = replace(seen, info=_server_info(client))
    tokens = question.acceptance_tokens or (16 if question.generate else 0)
    if tokens:
        sampling = {"temperature": 0, "max_new_tokens": tokens}
        body = {"text": _PROMPT, "sampling_params": sampling}
        seen = replace(seen, generated=client.ask("/generate", 60.0 + tokens, body))
    return seen


def _health(seen: Witnesses, question: Question, client: Client) -> Reply:
    """Return the answer of `/health`, or of its sister where it has only told a flag.

    With SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION=false `/health` does not ask the scheduler, and
    is well while that hangs; `/health_generate` always asks it.
    """
    health = client.ask("/health", max(question.timeout, 1.0))
    if health.status == 200 and health.seconds < _NO_GENERATION and not helps_rank_0(seen):
        generated = client.ask("/health_generate", max(question.timeout, 1.5))
        if generated.status != 404:  # a release without it
            return generated
    return health


def _busy(seen: Witnesses, client: Client, host: Reader, run: Runner, asked: float) -> Witnesses:
    """Add whether a server that was asked in vain at a moment has gone on computing since."""
    before, after = seen.metrics, _metrics(client.ask("/metrics", _ANSWER))
    if before is not None and after is not None:
        seen = replace(seen, metrics=after)
        if _tokens(after) > _tokens(before):
            return replace(seen, moved="its counters of tokens move")
        seen = replace(seen, stands=True)
    unit = seen.unit
    if unit is None:
        return seen
    log = read_journal(unit, run)
    if log is not None:
        new = [batch for batch in log.batches if batch.at is not None and batch.at > asked]
        seen = replace(seen, log=log)
        if new:
            return replace(seen, moved="its log tells of new batches", stands=False)
    compiler, stuck = read_hints(host, unit)
    return replace(seen, compiler=compiler, stuck=stuck)


def _metrics(reply: Reply) -> dict[str, Metric] | None:
    return parse_metrics(reply.body) if reply.status == 200 else None


def _tokens(metrics: Mapping[str, Metric]) -> float:
    names = ("generation_tokens_total", "prompt_tokens_total")
    return sum(metrics[name].total for name in names if name in metrics)


def _server_info(client: Client) -> dict[str, Any] | None:
    """Return what the server says of itself, its keys hidden."""
    reply = client.ask("/server_info", _ANSWER)
    if reply.status == 404:  # releases before 0.5.7
        reply = client.ask("/get_server_info", _ANSWER)
    return dict_of(redact_fields(reply.json())) if reply.status == 200 else None


def wait_until_ready(
    once: Callable[[], Witnesses],
    seconds: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[Witnesses, Verdict]:
    """Look until the state is settled or the time is over; at least once."""
    end = clock() + seconds
    while True:
        seen = once()
        verdict = judge_server(seen)
        if verdict.settled or clock() >= end:
            return seen, verdict
        sleep(min(_INTERVAL.get(verdict.state, _LONG_INTERVAL), max(0.0, end - clock())))


def watch_speculation(
    seen: Witnesses, question: Question, client: Client, host: Reader, run: Runner = _command.run
) -> Window | None:
    """Return how well a server speculates over the asked window, `None` when it is not asked."""
    if question.window <= 0:
        return None
    if seen.health is None or seen.health.status != 200:
        return Window(0.0, reason="the server is not ready")

    def again() -> tuple[Unit | None, Log | None]:
        unit = read_unit(question.unit, host, run)
        return unit, read_journal(unit, run)

    drafts = whole_of((seen.info or {}).get("speculative_num_draft_tokens"))
    return watch(question.window, drafts, client, again)


def facts(
    seen: Witnesses, verdict: Verdict, question: Question, window: Window | None = None
) -> dict[str, Any]:
    """Return the server as the module's result shows it."""
    info = seen.info or {}
    states = [dict_of(state) for state in list_of(info.get("internal_states"))]
    inner = states[0] if states else {}  # the first of the ranks of data parallelism
    memory = dict_of(inner.get("memory_usage"))
    served = model_ids(seen.models)
    models = list_of(seen.models.json().get("data")) if seen.models is not None else []
    unit, log = seen.unit, seen.log
    return {
        "state": verdict.state,
        "settled": verdict.settled,
        "reason": verdict.reason,
        "progress": log.progress if log is not None else None,
        "seconds": {
            "running": _rounded(unit.age if unit is not None else None),
            "stage": _rounded(log.stage if log is not None else None),
            "quiet": _rounded(log.quiet if log is not None else None),
        },
        "url": seen.url,
        "unit": unit.name if unit is not None else None,
        "pid": unit.main_pid if unit is not None else _pid(seen),
        "restarts": unit.restarts if unit is not None else None,
        "restarting": unit.restarting if unit is not None else None,
        "listener": _listener(seen.listener),
        "gpu_processes": _gpu_processes(seen.processes),
        "node_rank": log.node_rank if log is not None else None,
        "version": text_of(info.get("version")),
        "model_id": served[0] if served else None,
        "model_path": text_of(info.get("model_path")),
        "max_model_len": whole_of(dict_of(models[0]).get("max_model_len")) if models else None,
        "effective_max_running_requests": _max_running(states)
        or (log.max_running if log is not None else None),
        "kv_tokens": whole_of(info.get("max_total_num_tokens"))
        or whole_of(memory.get("token_capacity"))
        or (log.kv_tokens if log is not None else None),
        "kv_cache_gb": number_of(memory.get("kvcache")),
        "load": {
            "running": _gauge(seen.metrics, "num_running_reqs"),
            "queued": _gauge(seen.metrics, "num_queue_reqs"),
            "token_usage": _gauge(seen.metrics, "token_usage"),
            "mamba_usage": _gauge(seen.metrics, "mamba_usage"),
            "generated_per_second": _gauge(seen.metrics, "gen_throughput"),
        },
        "speculation": {
            **_speculation(seen, info, states, question.acceptance_tokens > 0),
            "window": None if window is None else asdict(window),
        },
        "flags": {
            name: value for name, value in info.items() if name not in ("internal_states", "status")
        },
        "log": list(log.tail) if log is not None and verdict.state != "ready" else [],
    }


def _rounded(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds)


def _max_running(states: Sequence[Mapping[str, Any]]) -> int | None:
    """Return how many requests run at once over all ranks of data parallelism."""
    found = [whole_of(state.get("effective_max_running_requests_per_dp")) for state in states]
    return sum(one for one in found if one is not None) or None


def _listener(listener: Listener | None) -> dict[str, Any] | None:
    if listener is None or not listener.open:
        return None
    return {
        "pid": listener.pid,
        "command": listener.command,
        "addresses": list(listener.addresses),
        "ours": listener.ours,
    }


def _gpu_processes(processes: Sequence[GpuProcess] | None) -> list[dict[str, Any]] | None:
    if processes is None:
        return None
    return [
        {
            "pid": one.pid,
            "command": one.command,
            "nodes": list(one.nodes),
            "computes": one.computes,
            "ours": one.ours,
        }
        for one in processes
    ]


def _pid(seen: Witnesses) -> int | None:
    return seen.listener.pid if seen.listener is not None else None


def _speculation(
    seen: Witnesses,
    info: Mapping[str, Any],
    states: Sequence[Mapping[str, Any]],
    measure: bool,
) -> dict[str, Any]:
    """Return what the server speculates with, and the best measure of how well."""
    drafts = whole_of(info.get("speculative_num_draft_tokens"))
    means = [number_of(state.get("avg_spec_accept_length")) for state in states]
    known = [mean for mean in means if mean]
    measures = (
        ("generate", _measured(seen.generated, drafts) if measure else None),
        ("server_info", sum(known) / len(known) if known else None),
        ("metrics", _gauge(seen.metrics, "spec_accept_length")),  # 0.0 also when it is off
    )
    source, length = next(((name, value) for name, value in measures if value), (None, None))
    acceptance = judge_acceptance(length, drafts)
    return {
        "algorithm": text_of(info.get("speculative_algorithm")),
        "num_steps": whole_of(info.get("speculative_num_steps")),
        "eagle_topk": whole_of(info.get("speculative_eagle_topk")),
        "num_draft_tokens": drafts,
        "accept_length": acceptance.length,
        "accept_rate": acceptance.rate,
        "verdict": acceptance.verdict,
        "source": source,
    }


def _measured(reply: Reply | None, drafts: int | None) -> float | None:
    """Return tokens per verification pass, from the two fields that all releases have.

    The first token comes without a pass. Of an answer that soon ends it makes so much that drafts
    which are never accepted would look well: that measures nothing.
    """
    meta = dict_of(reply.json().get("meta_info")) if reply is not None else {}
    passes, tokens = (number_of(meta.get(name)) for name in ("spec_verify_ct", "completion_tokens"))
    if tokens is None or passes is None or tokens < _FEWEST or passes <= 0:
        return None
    length = tokens / passes
    return length if drafts is None or length <= drafts + 1 else None


def _gauge(metrics: Mapping[str, Metric] | None, name: str) -> float | None:
    return metrics[name].highest if metrics and name in metrics else None
