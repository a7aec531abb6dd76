# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.

"""The state of an SGLang server, from several witnesses that can each be wrong alone.

`/v1/models` answers while the server is still warming up and after its scheduler has hung; a
closed port is normal for minutes after a start; an open port may be somebody else's; `/health`
needs a second when all is well and twenty when it is not. So what systemd, the journal, the
kernel's socket table and the server itself say is put together here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ansible_collections.gpuhost.inference.plugins.module_utils._redact import (
    redact,
    redact_fields,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_http import (
    NO_ANSWER,
    NO_CONNECTION,
    REFUSED,
    Metric,
    Reply,
    dict_of,
    list_of,
    text_of,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_log import (
    CONNECTING,
    WARMING,
    Log,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_unit import (
    GpuProcess,
    Listener,
    Unit,
)

# `/health` that fails at once is a server that is starting or stopping; one that has asked its
# scheduler in vain needs SGLANG_HEALTH_CHECK_TIMEOUT, 20 s unless it is changed.
SLOW_HEALTH = 3.0
# A quiet log in this stage for so many seconds is what a peer-to-peer hang looks like.
QUIET = 120.0

# Exit statuses of SGLang, and those that systemd.exec(5) uses before the program runs.
_EXIT = {
    2: "a flag is wrong",
    3: "the port is taken",
    137: "killed by itself or from outside: SGLang ends so after any failure of a rank",
    203: "the interpreter cannot be executed",
    217: "the user does not exist",
    226: "this container allows no mount namespaces: set nesting=1 for it, or switch off the "
    "unit's sandbox",
}


@dataclass(frozen=True)
class Limits:
    """Seconds that the phases of a start may take, `None` for any time.

    Attributes:
        loading: from the start of the main process until the port answers.
        warming: from then until it is ready.
    """

    loading: float | None = None
    warming: float | None = None


NO_LIMITS = Limits()


@dataclass(frozen=True)
class Witnesses:
    """Everything that was seen of one server. `None` stands for what was not, or cannot be, asked.

    Attributes:
        expected: the model id that the server should have.
        url: where it was asked.
        limits: of its start.
        unit: the service.
        log: the journal of its present or last run.
        listener: the port.
        processes: who has a GPU's node open.
        health: the answer of `/health`.
        models: the answer of `/v1/models`.
        info: the answer of `/server_info`, without keys.
        generated: the text of a short generation, or why there is none.
        moved: it went on computing while `/health` was waited for, and how that shows.
        stands: it did not, as far as its counters or its log tell.
        compiler: a process of the unit that compiles a kernel.
        stuck: a process of the unit that is stopped, or waits in the kernel.
        metrics: the answer of `/metrics`.
    """

    url: str
    expected: str | None = None
    limits: Limits = NO_LIMITS
    unit: Unit | None = None
    log: Log | None = None
    listener: Listener | None = None
    processes: tuple[GpuProcess, ...] | None = None
    health: Reply | None = None
    models: Reply | None = None
    info: dict[str, Any] | None = None
    generated: Reply | None = None
    moved: str | None = None
    stands: bool = False
    compiler: str | None = None
    stuck: str | None = None
    metrics: dict[str, Metric] | None = None


@dataclass(frozen=True)
class Verdict:
    """The state of a server, the sentence that says why, and whether waiting can change it."""

    state: str
    reason: str
    settled: bool = True


def judge_server(seen: Witnesses) -> Verdict:
    """Return the state of a server.

    It is one of `absent`, `stopped`, `failed`, `loading`, `warming`, `ready`, `degraded`, `hung`,
    `draining` and `unreachable`.
    """
    return (
        _judge_unit(seen)
        or _judge_start(seen)
        or _judge_port(seen)
        or _judge_health(seen)
        or _judge_answers(seen)
        or Verdict("ready", _ready(seen))
    )


def _judge_unit(seen: Witnesses) -> Verdict | None:
    """Judge a service that does not run."""
    unit = seen.unit
    verdict = None
    if unit is None or unit.active in ("active", "reloading"):
        verdict = None
    elif unit.load == "not-found" and unit.active == "inactive":
        verdict = Verdict("absent", f"there is no unit {unit.name}{_others(seen)}")
    elif unit.load in ("bad-setting", "error"):
        reason = f"systemd cannot read {unit.name}: systemd-analyze verify tells why"
        verdict = Verdict("failed", reason)
    elif unit.active == "failed" or unit.restarting:
        verdict = Verdict("failed", f"{_why_failed(unit, seen.log)}{_others(seen)}")
    elif unit.active == "deactivating":
        verdict = _judge_stop(unit, seen.log)
    elif unit.active == "inactive":
        masked = " and is masked" if unit.load == "masked" else ""
        verdict = Verdict("stopped", f"{unit.name} is not running{masked}{_others(seen)}")
    return verdict  # none while activating: its process may run already


def _judge_stop(unit: Unit, log: Log | None) -> Verdict:
    if log is not None and log.drains:
        reason = f"{unit.name} answers what is left before it stops: {_last(log)}"
        return Verdict("draining", reason, settled=False)
    return Verdict("stopped", f"{unit.name} is stopping: {_last(log)}", settled=False)


def _judge_start(seen: Witnesses) -> Verdict | None:
    """Judge a service whose start cannot succeed any more, though its process still runs."""
    unit, log, listener = seen.unit, seen.log, seen.listener
    if unit is None or (seen.health is not None and seen.health.status == 200):
        return None
    if log is not None and (log.died or (log.fatal and not log.ready)):
        return Verdict("failed", f"{_why_failed(unit, log)}{_others(seen)}")
    if listener is not None and listener.open and listener.ours is False:
        if listener.elsewhere:  # whether that is in the way depends on where ours listens
            return None
        return Verdict(
            "failed",
            f"{_holder(listener)} holds the port, which {unit.name} cannot bind when it is loaded: "
            "stop that process or choose another port",
        )
    return None


def _judge_port(seen: Witnesses) -> Verdict | None:
    """Judge a port that is closed, or open on another address."""
    listener, unit = seen.listener, seen.unit
    if listener is not None and listener.elsewhere and listener.ours is not False:
        return Verdict(
            "unreachable",
            f"it listens on {' and '.join(listener.addresses)}, not where {seen.url} asks",
        )
    if seen.health is None or seen.health.failure != REFUSED:
        return None
    if unit is None:
        return Verdict(
            "unreachable", f"{seen.url} refuses connections, and no unit is known", settled=False
        )
    if listener is not None and listener.open and listener.ours:
        reason = (
            f"it listens on {' and '.join(listener.addresses)}, but {seen.url} refuses connections"
        )
        return Verdict("unreachable", reason)
    return _judge_closed(seen, unit)


def _judge_closed(seen: Witnesses, unit: Unit) -> Verdict:
    """Judge a service that runs and has its port closed."""
    log = seen.log
    if log is not None and log.drains:
        return Verdict("draining", f"{unit.name} was told to end: {_last(log)}", settled=False)
    if log is not None and log.ready:
        return Verdict(
            "unreachable",
            f"{unit.name} runs and has been ready, but {seen.url} refuses connections: "
            "is that its port?",
        )
    if unit.sub == "start-pre" and (log is None or log.progress is None):
        doing = "doing its checks before the start (ExecStartPre)"
    else:
        doing = _progress(log)
    return _in_time(
        "loading", f"{unit.name} is {doing}{_again(unit)}", unit.age, seen.limits.loading
    )


def _in_time(state: str, reason: str, seconds: float | None, limit: float | None) -> Verdict:
    """Return a phase of a start, or its failure when it has taken longer than it may."""
    since = "" if seconds is None else f", for {seconds:.0f} s now"
    if seconds is not None and limit is not None and seconds > limit:
        return Verdict("failed", f"{reason}{since}: {state} may take {limit:.0f} s")
    return Verdict(state, f"{reason}{since}", settled=False)


def _judge_health(seen: Witnesses) -> Verdict | None:
    """Judge an open port by what `/health` answers."""
    health, log = seen.health, seen.log
    if health is None or health.status == 200:
        return None
    unreached = _judge_unreached(seen, health)
    if unreached is not None:
        return unreached
    if health.status is not None and health.status != 503:
        return Verdict(
            "degraded",
            f"/health answers {health.status}: is it SGLang that listens at {seen.url}?",
        )
    if log is not None and log.drains and health.status == 503:
        reason = f"it was told to end, and answers what is left: {_last(log)}"
        return Verdict("draining", reason, settled=False)
    if health.status == 503 and health.seconds < SLOW_HEALTH:
        return _judge_warming(seen)
    return _judge_slow_health(seen, health)


def _judge_unreached(seen: Witnesses, health: Reply) -> Verdict | None:
    """Judge a server that cannot be talked to; one that is only slow can."""
    if health.failure == NO_CONNECTION and not _local(seen):
        reason = f"{seen.url} does not answer the attempt to connect: is a firewall in the way?"
        return Verdict("unreachable", reason, settled=False)
    if health.status is None and health.failure not in (NO_ANSWER, NO_CONNECTION):
        reason = f"{seen.url} cannot be talked to: {health.failure}"
        return Verdict("unreachable", reason, settled=False)
    return None


def _judge_warming(seen: Witnesses) -> Verdict:
    """Judge a server that says at once that it is not healthy: mostly it has not generated yet.

    When its warm-up began is in its log. Where that cannot be read both phases together may take
    what both limits allow.
    """
    limits, log, unit = seen.limits, seen.log, seen.unit
    if log is not None and log.ready:
        reason = f"/health answers 503 at once: {_last(log)}"
        return Verdict("degraded", reason, settled=False)
    reason = f"it answers, but has not generated yet: {_last(log)}"
    if log is not None and log.progress == WARMING and log.stage is not None:
        return _in_time("warming", reason, log.stage, limits.warming)
    if limits.loading is None or limits.warming is None:
        return _in_time("warming", reason, None, None)
    age = None if unit is None else unit.age
    return _in_time("warming", reason, age, limits.loading + limits.warming)


def _local(seen: Witnesses) -> bool:
    return seen.listener is not None and seen.listener.open and not seen.listener.elsewhere


def _judge_slow_health(seen: Witnesses, health: Reply) -> Verdict:
    """Tell a scheduler that hangs from one that is busy."""
    what = f"/health {'had no answer' if health.status is None else 'answered 503'} "
    what += f"after {health.seconds:.0f} s"
    if seen.moved is not None:
        reason = f"{what}, but {seen.moved}: it is busy"
        return Verdict("degraded", reason, settled=False)
    if seen.compiler is not None:
        reason = f"{what}, but {seen.compiler} compiles a kernel: it is busy"
        return Verdict("degraded", reason, settled=False)
    if seen.listener is None and health.status is None and seen.metrics is None:
        reason = f"{what}, nor had /metrics: {seen.url} cannot be reached"
        return Verdict("unreachable", reason, settled=False)
    idle = "no token was computed meanwhile"
    if not seen.stands:
        idle = "whether it is busy cannot be told without the flag enable-metrics"
    if seen.stuck is not None:
        idle += f"; {seen.stuck}"
    return Verdict("hung", f"{what}, and {idle}; {_last(seen.log)}", settled=False)


def _judge_answers(seen: Witnesses) -> Verdict | None:
    """Judge a healthy server by its model and its text."""
    if seen.listener is not None and seen.unit is not None and seen.listener.ours is None:
        return Verdict("degraded", "it answers, but whether the unit does is not known")
    if helps_rank_0(seen):
        return None
    fault = _models_fault(seen.models)
    served = model_ids(seen.models)
    if not fault and seen.expected is not None and seen.expected not in served:
        return Verdict("degraded", f"it serves {', '.join(served)}, not {seen.expected}")
    if not fault and seen.generated is not None:
        fault = text_fault(seen.generated)
    return Verdict("degraded", f"it is healthy, but {fault}") if fault else None


def _models_fault(models: Reply | None) -> str | None:
    """Return what is wrong with the answer of `/v1/models`."""
    if models is None:
        return None
    if models.status == 200:
        return None if model_ids(models) else "/v1/models lists no model: is it SGLang?"
    if models.status == 401:
        return "does not take this api_key (401): the key is wrong, or missing"
    return f"/v1/models answers {models.status or models.failure}"


def helps_rank_0(seen: Witnesses) -> bool:
    """Tell whether this is a server of several machines that only computes for the first one.

    Such a one answers `/health` with 200 from the end of its loading on, and nothing else
    (`launch_dummy_health_check_server` in `srt/utils/common.py`, all releases read).
    """
    return seen.log is not None and bool(seen.log.node_rank)


def model_ids(models: Reply | None) -> list[str]:
    """Return the ids that `/v1/models` lists."""
    data = list_of(models.json().get("data")) if models is not None else []
    ids = [text_of(dict_of(model).get("id")) for model in data]
    return [str(redact_fields(one)) for one in ids if one is not None]


def sheds_load(reply: Reply | None) -> bool:
    """Tell whether a generation was refused only as the queue is full (max-queued-requests)."""
    return reply is not None and reply.status == 503 and "queue is full" in reply.body


def text_fault(reply: Reply) -> str | None:
    """Return what is wrong with a generation: broken kernels repeat one character for ever."""
    if sheds_load(reply):
        return None
    if reply.status != 200:
        return f"a generation was answered with {reply.status or reply.failure}"
    text = text_of(reply.json().get("text")) or ""
    characters = set("".join(text.split()))
    if not characters:
        return "a generation came back empty"
    if len(characters) == 1 and len(text.strip()) > 3:
        return f"a generation repeats one character: {text.strip()[:20]!r}"
    return None


def _ready(seen: Witnesses) -> str:
    if helps_rank_0(seen) and seen.log is not None:
        said = f"computes as rank {seen.log.node_rank} of {seen.log.nodes} for rank 0, which alone "
        said += "knows whether requests are answered"
    else:
        said = f"serves {', '.join(model_ids(seen.models)) or 'requests'}"
    if sheds_load(seen.generated):
        said += "; its queue is full, so it refused a generation (503)"
    return said + (_again(seen.unit) if seen.unit is not None else "") + _killed(seen.unit)


def _again(unit: Unit) -> str:
    return f"; systemd has restarted it {unit.restarts} times" if unit.restarts else ""


def _killed(unit: Unit | None) -> str:
    """Return what the kernel has done to a server that still runs."""
    if unit is None or not unit.oom_kills:
        return ""
    return f"; the kernel has killed {unit.oom_kills} of its processes for want of memory"


def _why_failed(unit: Unit, log: Log | None) -> str:
    said = f"{unit.name} ended"
    if unit.result == "oom-kill":
        said += ": the kernel killed it for want of memory"
    elif unit.active in ("active", "activating") and not unit.restarting:
        said = f"{unit.name} is ending{_killed(unit)}"
    elif unit.exit_status is not None:
        meaning = _EXIT.get(unit.exit_status)
        said += f" with status {unit.exit_status}{f' ({meaning})' if meaning else ''}"
    if unit.result == "start-limit-hit":
        said += "; it failed too often, and systemd does not try again"
    if unit.restarting:
        said += (
            f"; systemd will start it again{f' (restart {unit.restarts})' * bool(unit.restarts)}"
        )
    if log is None:
        return f"{said}; its journal could not be read, or is lost"
    if log.decisive is None:
        return f"{said}; {_last(log)}"
    if log.meaning is not None and log.decisive.endswith(log.meaning):
        return f"{said}. Its log: {log.decisive.rstrip('.')}"
    return f"{said}. {log.meaning}. Its log: {log.decisive.rstrip('.')}"


def _progress(log: Log | None) -> str:
    if log is None or log.progress is None:
        return "starting"
    if log.progress == CONNECTING and log.quiet is not None and log.quiet > QUIET:
        return (
            f"{log.progress}, and has said nothing for {log.quiet:.0f} s: GPUs that cannot reach "
            "each other look like this; try NCCL_P2P_DISABLE=1 with disable-custom-all-reduce"
        )
    return log.progress


def _last(log: Log | None) -> str:
    if log is None or log.last is None:
        return "its log says nothing"
    return f"its last line is: {log.last}"


def _holder(listener: Listener) -> str:
    if listener.pid is None:
        return "a process that cannot be looked at"
    return f"process {listener.pid} ({listener.command})"


def _gpu_holder(one: GpuProcess) -> str:
    return f"process {one.pid} ({one.command}) with {' '.join(one.nodes)}"


def _others(seen: Witnesses) -> str:
    """Return who is in the way of a server that does not run: on its port, or on GPUs."""
    said = ""
    if seen.listener is not None and seen.listener.open:
        said += f"; {_holder(seen.listener)} listens on its port"
    for ours, where in ((True, "left of it"), (False, "on GPUs")):
        held = [
            one for one in seen.processes or () if one.ours is ours and one.computes is not False
        ]
        if held:
            said += f"; {where}: {', '.join(map(_gpu_holder, held))}"
    if any(one.ours for one in seen.processes or ()):
        said += ", which must end before the next start"
    return said


def describe(seen: Witnesses) -> Iterator[tuple[str, str, bool | None]]:
    """Yield each witness: its name, what it said, and whether that speaks for a ready server."""
    yield from _describe_service(seen)
    yield from _describe_gpus(seen)
    for name, reply in (
        ("health", seen.health),
        ("models", seen.models),
        ("generation", seen.generated),
    ):
        if reply is None:
            continue
        good = reply.status == 200
        said = f"{reply.status or reply.failure} after {reply.seconds:.1f} s"
        if name == "models" and good:
            said += f": {', '.join(model_ids(reply))}"
            good = seen.expected is None or seen.expected in model_ids(reply)
        elif name == "generation" and sheds_load(reply):
            said += ": its queue is full"
        elif name == "generation":
            fault = text_fault(reply)
            text = redact(text_of(reply.json().get("text")) or "")
            said, good = f"{said}: {fault or repr(text)[:80]}", fault is None
        yield name, said, good
    if seen.moved is not None:
        yield "counters", seen.moved, True
    elif seen.stands:
        yield "counters", "standing still", False


def _describe_service(seen: Witnesses) -> Iterator[tuple[str, str, bool | None]]:
    unit, log, listener = seen.unit, seen.log, seen.listener
    if unit is not None:
        said = f"{unit.active} ({unit.sub}), restarts {unit.restarts}, main PID {unit.main_pid}"
        if unit.load == "not-found":
            said = "not found"
        elif unit.active == "failed":
            said += f", result {unit.result}, status {unit.exit_status}"
        yield "unit", said + _killed(unit), unit.active == "active"
    if unit is not None and log is not None:
        said = log.decisive or ("has said that it is ready" if log.ready else _progress(log))
        yield "journal", f"{said}; {_last(log)}", log.ready and not log.fatal
    elif unit is not None:
        yield "journal", "not readable, or empty", None
    if listener is not None and listener.open:
        where = " and ".join(listener.addresses)
        yield "port", f"{_holder(listener)} listens on {where}", listener.ours
    elif listener is not None:
        yield "port", "closed", False


def _describe_gpus(seen: Witnesses) -> Iterator[tuple[str, str, bool | None]]:
    """Yield who has GPUs open, where it was looked at."""
    if seen.processes is None:
        if seen.listener is not None or seen.unit is not None:
            yield "gpu_processes", "not readable", None
        return
    if seen.processes:
        said = ", ".join(map(_gpu_holder, seen.processes))
        strange = [one for one in seen.processes if one.computes is not False and not one.ours]
        yield "gpu_processes", said, None if seen.unit is None else not strange
    else:
        yield "gpu_processes", "none", None
