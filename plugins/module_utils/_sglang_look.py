# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.

"""Calling the witnesses of an SGLang server, and waiting until they agree that it is ready."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ansible_collections.gpuhost.inference.plugins.module_utils import _command
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang import (
    Listener,
    Unit,
    Verdict,
    Witnesses,
    judge_server,
    model_ids,
    parse_unit,
    read_listener,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_http import (
    Client,
    Metric,
    Reply,
    parse_metrics,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_log import Log, read_log
from ansible_collections.gpuhost.inference.plugins.module_utils._speculation import (
    judge_acceptance,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader

Runner = Callable[[Sequence[str]], str]

_UNIT_PROPERTIES = (
    "LoadState,ActiveState,SubState,NRestarts,MainPID,InvocationID,ExecMainCode,ExecMainStatus,"
    "Result,ControlGroup"
)
_LINES = 5000  # of the journal: a start writes some hundred, a week of serving many more
_ANSWER = 10.0  # seconds that an answer without a generation may take
_INTERVAL = 2.0  # seconds between two looks while waiting
_SECRET_FIELD = re.compile(r"api_key|password|secret|watermark_key|launch_command")
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
    """

    url: str
    unit: str | None = None
    model_id: str | None = None
    generate: bool = False
    acceptance_tokens: int = 0
    timeout: float = 30.0


def look(question: Question, client: Client, host: Reader, run: Runner = _command.run) -> Witnesses:
    """Call every witness once.

    The server is asked only when its port is not known to be another's: a key is for it alone.

    Raises:
        GpuHostError: systemd does not answer about the unit.
        UnreadableError: the socket table of the kernel is not readable.
    """
    unit = log = None
    if question.unit is not None:
        command = ["systemctl", "show", "--property", _UNIT_PROPERTIES, question.unit]
        unit = parse_unit(question.unit, run(command))
        log = _journal(unit, run)
    seen = Witnesses(
        url=question.url,
        expected=question.model_id,
        unit=unit,
        log=log,
        listener=read_listener(host, question.url, unit),
    )
    if unit is not None and unit.active in ("inactive", "failed"):
        return seen
    if seen.listener is not None and not seen.listener.open:
        return replace(seen, health=Reply(None, "", "refused", 0.0))
    if seen.listener is not None and seen.listener.ours is False:
        return seen
    return _ask(seen, question, client)


def _journal(unit: Unit, run: Runner) -> Log | None:
    """Return the log of the unit's present or last run, `None` when it cannot be read."""
    if not unit.invocation:
        return None
    try:
        command = ["journalctl", "--no-pager", "--quiet", "--output=short-unix"]
        text = run([*command, f"--lines={_LINES}", f"_SYSTEMD_INVOCATION_ID={unit.invocation}"])
    except GpuHostError:
        return None
    records: list[tuple[float | None, str]] = []
    for line in text.splitlines():
        match = re.match(r"(\d+\.\d+) \S+ [^:]+: ?(.*)", line)
        if match:
            records.append((float(match[1]), match[2]))
        else:
            records.append((None, line.strip()))
    if not records:
        return None
    return read_log(records, now=time.time(), truncated=len(records) >= _LINES)


def _ask(seen: Witnesses, question: Question, client: Client) -> Witnesses:
    """Ask the server itself, and no more once it has failed."""
    before = _metrics(client)
    health = client.ask("/health", max(question.timeout, 1.0))
    seen = replace(seen, health=health, metrics=before)
    if health.status != 200:
        after = _metrics(client) if health.seconds > 1.0 and before is not None else None
        if before is not None and after is not None:
            seen = replace(seen, metrics=after, moved=_tokens(after) > _tokens(before))
        return seen
    seen = replace(seen, models=client.ask("/v1/models", _ANSWER), metrics=_metrics(client))
    if seen.models is None or seen.models.status != 200:
        return seen
    seen = replace(seen, info=_server_info(client))
    tokens = question.acceptance_tokens or (16 if question.generate else 0)
    if tokens:
        sampling = {"temperature": 0, "max_new_tokens": tokens}
        body = {"text": _PROMPT, "sampling_params": sampling}
        seen = replace(seen, generated=client.ask("/generate", 60.0 + tokens, body))
    return seen


def _metrics(client: Client) -> dict[str, Metric] | None:
    reply = client.ask("/metrics", _ANSWER)
    return parse_metrics(reply.body) if reply.status == 200 else None


def _tokens(metrics: Mapping[str, Metric]) -> float:
    names = ("generation_tokens_total", "prompt_tokens_total")
    return sum(metrics[name].total for name in names if name in metrics)


def _server_info(client: Client) -> dict[str, Any] | None:
    """Return what the server says of itself, its keys hidden."""
    reply = client.ask("/server_info", _ANSWER)
    if reply.status == 404:  # releases before 0.5.7
        reply = client.ask("/get_server_info", _ANSWER)
    if reply.status != 200:
        return None
    return {
        name: "(redacted)" if value is not None and _SECRET_FIELD.search(name) else value
        for name, value in reply.json().items()
    }


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
        sleep(min(_INTERVAL, max(0.0, end - clock())))


def facts(seen: Witnesses, verdict: Verdict, question: Question) -> dict[str, Any]:
    """Return the server as the module's result shows it."""
    info = seen.info or {}
    states = info.get("internal_states")
    inner = states[0] if isinstance(states, list) and states else {}
    memory = inner.get("memory_usage") or {}
    served = model_ids(seen.models)
    model = (seen.models.json().get("data") or [{}])[0] if seen.models and served else {}
    metrics = seen.metrics or {}

    def gauge(name: str) -> float | None:
        return metrics[name].highest if name in metrics else None

    unit, log = seen.unit, seen.log
    return {
        "state": verdict.state,
        "reason": verdict.reason,
        "progress": log.progress if log is not None else None,
        "url": seen.url,
        "unit": unit.name if unit is not None else None,
        "pid": unit.main_pid if unit is not None else _pid(seen),
        "restarts": unit.restarts if unit is not None else None,
        "listener": _listener(seen.listener),
        "version": info.get("version"),
        "model_id": served[0] if served else None,
        "model_path": info.get("model_path"),
        "max_model_len": model.get("max_model_len"),
        "effective_max_running_requests": inner.get("effective_max_running_requests_per_dp"),
        "kv_tokens": info.get("max_total_num_tokens") or memory.get("token_capacity"),
        "kv_cache_gb": memory.get("kvcache"),
        "load": {
            "running": gauge("num_running_reqs"),
            "queued": gauge("num_queue_reqs"),
            "token_usage": gauge("token_usage"),
            "mamba_usage": gauge("mamba_usage"),
            "generated_per_second": gauge("gen_throughput"),
        },
        "speculation": _speculation(seen, info, inner, question.acceptance_tokens > 0),
        "flags": {
            name: value for name, value in info.items() if name not in ("internal_states", "status")
        },
        "log": list(log.tail) if log is not None and verdict.state != "ready" else [],
    }


def _listener(listener: Listener | None) -> dict[str, Any] | None:
    if listener is None or not listener.open:
        return None
    return {
        "pid": listener.pid,
        "command": listener.command,
        "addresses": list(listener.addresses),
        "ours": listener.ours,
    }


def _pid(seen: Witnesses) -> int | None:
    return seen.listener.pid if seen.listener is not None else None


def _speculation(
    seen: Witnesses, info: Mapping[str, Any], inner: Mapping[str, Any], measure: bool
) -> dict[str, Any]:
    """Return what the server speculates with, and the best measure of how well."""
    drafts = info.get("speculative_num_draft_tokens")
    measures = (
        ("generate", _measured(seen.generated) if measure else None),
        ("server_info", inner.get("avg_spec_accept_length")),
        ("metrics", _gauge(seen.metrics, "spec_accept_length")),  # 0.0 also when it is off
    )
    source, length = next(((name, value) for name, value in measures if value), (None, None))
    acceptance = judge_acceptance(length, drafts)
    return {
        "algorithm": info.get("speculative_algorithm"),
        "num_steps": info.get("speculative_num_steps"),
        "eagle_topk": info.get("speculative_eagle_topk"),
        "num_draft_tokens": drafts,
        "accept_length": acceptance.length,
        "accept_rate": acceptance.rate,
        "verdict": acceptance.verdict,
        "source": source,
    }


def _measured(reply: Reply | None) -> float | None:
    """Return tokens per verification pass, from the two fields that all releases have."""
    meta = reply.json().get("meta_info") if reply is not None else None
    if not isinstance(meta, dict) or not meta.get("spec_verify_ct"):
        return None
    return float(meta.get("completion_tokens", 0)) / float(meta["spec_verify_ct"])


def _gauge(metrics: Mapping[str, Metric] | None, name: str) -> float | None:
    return metrics[name].highest if metrics and name in metrics else None
