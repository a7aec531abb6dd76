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

import ipaddress
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from ansible_collections.gpuhost.inference.plugins.module_utils._errors import (
    GpuHostError,
    UnreadableError,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_http import Metric, Reply
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_log import CONNECTING, Log
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader

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
class Unit:
    """What systemd says about the service; see `systemctl show`.

    `exit_status` of a process that a signal has ended is 128 and the signal, as in a shell.
    """

    name: str
    load: str
    active: str
    sub: str
    restarts: int | None
    main_pid: int | None
    invocation: str
    exit_status: int | None
    result: str
    control_group: str


@dataclass(frozen=True)
class Listener:
    """Who listens on the server's port.

    Attributes:
        open: something does.
        pid: the process, `None` when nothing listens or it could not be looked at.
        command: its name.
        addresses: where it listens.
        ours: the process belongs to the unit; `None` when that is not known.
        elsewhere: it listens, but not on the address that is asked.
    """

    open: bool
    pid: int | None = None
    command: str | None = None
    addresses: tuple[str, ...] = ()
    ours: bool | None = None
    elsewhere: bool = False


@dataclass(frozen=True)
class Witnesses:
    """Everything that was seen of one server. `None` stands for what was not, or cannot be, asked.

    Attributes:
        expected: the model id that the server should have.
        url: where it was asked.
        unit: the service.
        log: the journal of its present or last run.
        listener: the port.
        health: the answer of `/health`.
        models: the answer of `/v1/models`.
        info: the answer of `/server_info`, without keys.
        generated: the text of a short generation, or why there is none.
        moved: the counters of tokens went up while `/health` was waited for.
        metrics: the answer of `/metrics`.
    """

    url: str
    expected: str | None = None
    unit: Unit | None = None
    log: Log | None = None
    listener: Listener | None = None
    health: Reply | None = None
    models: Reply | None = None
    info: dict[str, Any] | None = None
    generated: Reply | None = None
    moved: bool | None = None
    metrics: dict[str, Metric] | None = None


@dataclass(frozen=True)
class Verdict:
    """The state of a server, the sentence that says why, and whether waiting can change it."""

    state: str
    reason: str
    settled: bool = True


def judge_server(seen: Witnesses) -> Verdict:
    """Return the state of a server.

    It is one of `absent`, `stopped`, `failed`, `loading`, `warming`, `ready`, `degraded`, `hung`
    and `unreachable`.
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
    elif unit.load == "not-found":
        verdict = Verdict("absent", f"there is no unit {unit.name}{_foreign(seen)}")
    elif unit.active == "failed" or unit.sub == "auto-restart":
        verdict = Verdict("failed", _why_failed(unit, seen.log))
    elif unit.active == "deactivating":
        verdict = Verdict("stopped", f"{unit.name} is stopping: {_last(seen.log)}")
    elif unit.active == "inactive":
        verdict = Verdict("stopped", f"{unit.name} is not running{_foreign(seen)}")
    return verdict  # none while activating: its process may run already


def _judge_start(seen: Witnesses) -> Verdict | None:
    """Judge a service whose start cannot succeed any more, though its process still runs."""
    unit, log, listener = seen.unit, seen.log, seen.listener
    if unit is None:
        return None
    if log is not None and log.fatal and not log.ready:
        return Verdict("failed", _why_failed(unit, log))
    if listener is not None and listener.open and listener.ours is False:
        return Verdict(
            "failed",
            f"{_holder(listener)} holds the port, which {unit.name} cannot bind when it is loaded: "
            "stop that process or choose another port",
        )
    return None


def _judge_port(seen: Witnesses) -> Verdict | None:
    """Judge a port that is closed, or open on another address."""
    listener, unit = seen.listener, seen.unit
    if listener is not None and listener.elsewhere:
        return Verdict(
            "unreachable",
            f"it listens on {' and '.join(listener.addresses)}, not where {seen.url} asks",
        )
    if seen.health is None or seen.health.failure != "refused":
        return None
    if unit is None:
        return Verdict(
            "unreachable", f"{seen.url} refuses connections, and no unit is known", settled=False
        )
    if seen.log is not None and seen.log.ready:
        return Verdict(
            "unreachable",
            f"{unit.name} runs and has been ready, but {seen.url} refuses connections: "
            "is that its port?",
        )
    return Verdict("loading", f"{unit.name} is {_progress(seen.log)}", settled=False)


def _judge_health(seen: Witnesses) -> Verdict | None:
    """Judge an open port by what `/health` answers."""
    health = seen.health
    if health is None or health.status == 200:
        return None
    if health.status is None and health.failure != "timeout":
        reason = f"{seen.url} cannot be reached: {health.failure}"
        return Verdict("unreachable", reason, settled=False)
    if health.status is not None and health.status != 503:
        return Verdict(
            "degraded",
            f"/health answers {health.status}: is it SGLang that listens at {seen.url}?",
        )
    if health.status == 503 and health.seconds < SLOW_HEALTH:
        if seen.log is not None and seen.log.ready:
            reason = f"/health answers 503 at once: {_last(seen.log)}"
            return Verdict("degraded", reason, settled=False)
        reason = f"it answers, but has not generated yet: {_last(seen.log)}"
        return Verdict("warming", reason, settled=False)
    return _judge_slow_health(seen, health)


def _judge_slow_health(seen: Witnesses, health: Reply) -> Verdict:
    """Tell a scheduler that hangs from one that is busy."""
    what = f"/health {'had no answer' if health.status is None else 'answered 503'} "
    what += f"after {health.seconds:.0f} s"
    if seen.moved:
        reason = f"{what}, but its counters of tokens move: it is busy"
        return Verdict("degraded", reason, settled=False)
    if seen.listener is None and health.status is None and seen.metrics is None:
        reason = f"{what}, nor had /metrics: {seen.url} cannot be reached"
        return Verdict("unreachable", reason, settled=False)
    idle = "no token was computed meanwhile"
    if seen.moved is None:
        idle = "whether it is busy cannot be told without the flag enable-metrics"
    return Verdict("hung", f"{what}, and {idle}; {_last(seen.log)}", settled=False)


def _judge_answers(seen: Witnesses) -> Verdict | None:
    """Judge a healthy server by its model and its text."""
    models = seen.models
    if seen.listener is not None and seen.unit is not None and seen.listener.ours is None:
        return Verdict("degraded", "it answers, but whether the unit does is not known")
    if models is not None and models.status == 401:
        return Verdict("degraded", "it is healthy, but does not take this api_key (401)")
    if models is not None and models.status != 200:
        what = models.status or models.failure
        return Verdict("degraded", f"it is healthy, but /v1/models answers {what}")
    served = model_ids(models)
    if seen.expected is not None and seen.expected not in served:
        return Verdict(
            "degraded", f"it serves {', '.join(served) or 'no model'}, not {seen.expected}"
        )
    fault = None if seen.generated is None else text_fault(seen.generated)
    if fault:
        return Verdict("degraded", f"it is healthy, but {fault}")
    return None


def model_ids(models: Reply | None) -> list[str]:
    """Return the ids that `/v1/models` lists."""
    data = models.json().get("data") if models is not None else None
    return [str(model.get("id")) for model in data] if isinstance(data, list) else []


def text_fault(reply: Reply) -> str | None:
    """Return what is wrong with a generation: broken kernels repeat one character for ever."""
    if reply.status != 200:
        return f"a generation was answered with {reply.status or reply.failure}"
    text = str(reply.json().get("text") or "")
    characters = set("".join(text.split()))
    if not characters:
        return "a generation came back empty"
    if len(characters) == 1 and len(text.strip()) > 3:
        return f"a generation repeats one character: {text.strip()[:20]!r}"
    return None


def _ready(seen: Witnesses) -> str:
    said = f"serves {', '.join(model_ids(seen.models)) or 'requests'}"
    if seen.unit is not None and seen.unit.restarts:
        said += f"; systemd has restarted it {seen.unit.restarts} times"
    return said


def _why_failed(unit: Unit, log: Log | None) -> str:
    said = f"{unit.name} ended"
    if unit.result == "oom-kill":
        said += ": the kernel killed it for want of memory"
    elif unit.active in ("active", "activating") and unit.sub != "auto-restart":
        said = f"{unit.name} is ending"
    elif unit.exit_status is not None:
        meaning = _EXIT.get(unit.exit_status)
        said += f" with status {unit.exit_status}{f' ({meaning})' if meaning else ''}"
    if unit.sub == "auto-restart":
        said += "; systemd will start it again"
    if log is None:
        return f"{said}; its journal could not be read"
    if log.decisive is None:
        return f"{said}; {_last(log)}"
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
    return f"process {listener.pid} ({listener.command})"


def _foreign(seen: Witnesses) -> str:
    if seen.listener is None or not seen.listener.open:
        return ""
    return f"; {_holder(seen.listener)} listens on its port"


def describe(seen: Witnesses) -> Iterator[tuple[str, str, bool | None]]:
    """Yield each witness: its name, what it said, and whether that speaks for a ready server."""
    unit, log, listener = seen.unit, seen.log, seen.listener
    if unit is not None:
        said = f"{unit.active} ({unit.sub}), restarts {unit.restarts}, main PID {unit.main_pid}"
        if unit.load == "not-found":
            said = "not found"
        elif unit.active == "failed":
            said += f", result {unit.result}, status {unit.exit_status}"
        yield "unit", said, unit.active == "active"
    if unit is not None and log is not None:
        said = log.decisive or ("has said that it is ready" if log.ready else _progress(log))
        yield "journal", f"{said}; {_last(log)}", log.ready and not log.fatal
    elif unit is not None:
        yield "journal", "not readable", None
    if listener is not None and listener.open:
        where = " and ".join(listener.addresses)
        yield "port", f"{_holder(listener)} listens on {where}", listener.ours
    elif listener is not None:
        yield "port", "closed", False
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
        elif name == "generation":
            fault = text_fault(reply)
            said, good = f"{said}: {fault or repr(reply.json().get('text'))[:80]}", fault is None
        yield name, said, good
    if seen.moved is not None:
        yield "counters", "moving" if seen.moved else "standing still", seen.moved


def read_listener(host: Reader, url: str, unit: Unit | None) -> Listener | None:
    """Return who listens on the port of a URL.

    Without a unit, a URL that is not this machine's own has no listener to be looked at: `None`.

    Source: `/proc/net/tcp` and `tcp6` (proc_net_tcp(5)): state 0A is LISTEN, addresses are in the
    byte order of the machine, taken as little endian here.
    """
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    wanted = _ip(parts.hostname or "")
    if unit is None and (wanted is None or not ipaddress.ip_address(wanted).is_loopback):
        return None
    inodes: dict[str, str] = {}
    for name in ("tcp", "tcp6"):
        for line in (host.text(f"/proc/net/{name}") or "").splitlines()[1:]:
            fields = line.split()
            address, _colon, number = fields[1].partition(":")
            if fields[3] == "0A" and int(number, 16) == port:
                inodes[fields[9]] = str(_address(address))
    if not inodes:
        return Listener(open=False)
    addresses = tuple(sorted(set(inodes.values())))
    reachable = {"0.0.0.0", "::", wanted}
    pid = _owner(host, set(inodes), unit)
    return Listener(
        open=True,
        pid=pid,
        command=host.text(f"/proc/{pid}/comm") if pid else None,
        addresses=addresses,
        ours=None if pid is None or unit is None else _belongs(host, pid, unit),
        elsewhere=wanted is not None and not reachable.intersection(addresses),
    )


def _ip(name: str) -> str | None:
    """Return the address that a host of a URL stands for, `None` for a name to be resolved."""
    try:
        return str(ipaddress.ip_address("127.0.0.1" if name == "localhost" else name))
    except ValueError:
        return None


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return an address of `/proc/net/tcp`: words of four bytes, each reversed."""
    words = [bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8)]
    return ipaddress.ip_address(b"".join(words))


def _owner(host: Reader, inodes: set[str], unit: Unit | None) -> int | None:
    """Return the process that has one of these sockets open, the unit's own ones first."""
    wanted = {f"socket:[{inode}]" for inode in inodes}
    pids = [int(name) for name in host.names("/proc") if name.isdigit()]
    first = unit.main_pid if unit is not None else None
    for pid in sorted(pids, key=lambda pid: pid != first):
        try:
            for number in host.names(f"/proc/{pid}/fd"):
                if host.link(f"/proc/{pid}/fd/{number}") in wanted:
                    return pid
        except UnreadableError:
            continue  # another user's; the caller answers "not known"
    return None


def _belongs(host: Reader, pid: int, unit: Unit) -> bool:
    """Tell whether a process is of the unit: in its control group, or a descendant."""
    groups = (host.text(f"/proc/{pid}/cgroup") or "").splitlines()
    if unit.control_group and any(
        line.partition("::")[2].split("/")[-1] == unit.control_group.split("/")[-1]
        for line in groups
    ):
        return True
    at: int | None = pid
    while at and at != 1:
        if at == unit.main_pid:
            return True
        status = host.text(f"/proc/{at}/stat") or ""
        fields = status.rpartition(")")[2].split()
        at = int(fields[1]) if len(fields) > 1 else None
    return False


def parse_unit(name: str, text: str) -> Unit:
    """Return the properties that `systemctl show` printed.

    Raises:
        GpuHostError: they are not there.
    """
    values = dict(line.partition("=")[::2] for line in text.splitlines())
    if "ActiveState" not in values:
        raise GpuHostError(f"systemctl show {name} said nothing about ActiveState")

    def number(key: str) -> int | None:
        return int(values[key]) if values.get(key, "").isdigit() else None

    # How it ended, in the codes of waitid(2): 0 not at all, 2 or 3 by a signal
    ended = values.get("ExecMainCode")
    status = None if ended == "0" else number("ExecMainStatus")
    return Unit(
        name=name,
        load=values.get("LoadState", ""),
        active=values["ActiveState"],
        sub=values.get("SubState", ""),
        restarts=number("NRestarts"),
        main_pid=number("MainPID") or None,
        invocation=values.get("InvocationID", ""),
        exit_status=None if status is None else status + (128 if ended in ("2", "3") else 0),
        result=values.get("Result", ""),
        control_group=values.get("ControlGroup", ""),
    )
