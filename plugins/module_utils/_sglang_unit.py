# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.

"""The service of a server, and which processes are its own: on its port, and on the GPUs."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from ansible_collections.gpuhost.inference.plugins.module_utils._errors import (
    GpuHostError,
    UnreadableError,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_gpus import (
    in_group,
    read_holders,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader

UNIT_PROPERTIES = (
    "LoadState,ActiveState,SubState,NRestarts,MainPID,InvocationID,ExecMainCode,ExecMainStatus,"
    "Result,ControlGroup,InactiveExitTimestampMonotonic,ExecMainStartTimestampMonotonic"
)
_UNIT_NAME = re.compile(r"[A-Za-z0-9:_.\\@][A-Za-z0-9:_.\\@-]*")
_OTHER_UNITS = (
    ".socket", ".device", ".mount", ".automount", ".swap", ".target", ".path", ".timer", ".slice",
    ".scope",
)  # fmt: skip
# systemd waits until RestartSec is over; from release 254 on it shows the queued start apart
_RESTARTING = ("auto-restart", "auto-restart-queued")
_NODE = re.compile(r"nvidia\d+")
# Compilers of kernels (Triton, FlashInfer, DeepGEMM): while one runs, nothing is generated.
_COMPILERS = ("nvcc", "cicc", "ptxas", "ninja", "cc1plus", "cudafe++", "fatbinary")


@dataclass(frozen=True)
class Unit:
    """What systemd says about the service; see `systemctl show`.

    Attributes:
        exit_status: of the main process; of one that a signal has ended 128 and the signal, as in
            a shell.
        age: seconds since the main process was started, or since the unit was when it has none
            yet; `None` when it does not run.
        oom_kills: processes of it that the kernel has killed for want of memory, `None` when its
            control group does not tell.
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
    age: float | None = None
    oom_kills: int | None = None

    @property
    def restarting(self) -> bool:
        """Whether systemd has seen it end, and will start it again by itself."""
        return self.sub in _RESTARTING


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
class GpuProcess:
    """A process that has the node of a GPU open.

    Attributes:
        pid: its number.
        command: its name.
        nodes: the GPUs' nodes.
        computes: it has the node of CUDA's memory open too, which programs that only watch GPUs
            have not; `None` when there is no such node.
        ours: it belongs to the unit; `None` without a unit.
    """

    pid: int
    command: str
    nodes: tuple[str, ...]
    computes: bool | None
    ours: bool | None


def service_name(name: str) -> str:
    """Return the full name of a service.

    Raises:
        GpuHostError: the name is not one of a single service.
    """
    if not _UNIT_NAME.fullmatch(name) or name.endswith(_OTHER_UNITS):
        raise GpuHostError(
            f"unit: {name!r} is not the name of a systemd service: give one as sglang or "
            "sglang@a.service"
        )
    return name if name.endswith(".service") else f"{name}.service"


def parse_unit(name: str, text: str, now: float | None = None) -> Unit:
    """Return the properties that `systemctl show` printed.

    Args:
        name: of the unit.
        text: a line for each of `UNIT_PROPERTIES`.
        now: seconds of CLOCK_MONOTONIC, which systemd's stamps count too.

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
    main_pid = number("MainPID") or None
    since = number(f"{'ExecMainStart' if main_pid else 'InactiveExit'}TimestampMonotonic")
    runs = values["ActiveState"] not in ("inactive", "failed") and (
        values.get("SubState") not in _RESTARTING
    )
    return Unit(
        name=name,
        load=values.get("LoadState", ""),
        active=values["ActiveState"],
        sub=values.get("SubState", ""),
        restarts=number("NRestarts"),
        main_pid=main_pid,
        invocation=values.get("InvocationID", ""),
        exit_status=None if status is None else status + (128 if ended in ("2", "3") else 0),
        result=values.get("Result", ""),
        control_group=values.get("ControlGroup", ""),
        age=max(0.0, now - since / 1e6) if now is not None and since and runs else None,
    )


def read_oom_kills(host: Reader, unit: Unit) -> int | None:
    """Return how many processes of a unit the kernel has killed for want of memory.

    Source: `memory.events` of its control group (cgroup v2), `oom_kill`.
    """
    if not unit.control_group:
        return None
    try:
        events = host.text(f"/sys/fs/cgroup{unit.control_group}/memory.events") or ""
    except UnreadableError:
        return None
    found = re.search(r"^oom_kill (\d+)$", events, re.MULTILINE)
    return int(found[1]) if found else None


def read_listener(host: Reader, url: str, unit: Unit | None) -> Listener | None:
    """Return who listens on the port of a URL, on the address that is asked where several do.

    Without a unit, a URL that is not this machine's own has no listener to be looked at: `None`.

    Source: `/proc/net/tcp` and `tcp6` (proc_net_tcp(5)): state 0A is LISTEN, addresses are in the
    byte order of the machine, taken as little endian here.
    """
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    wanted = _asked(parts.hostname or "")
    if unit is None and not any(ipaddress.ip_address(one).is_loopback for one in wanted):
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
    answering = {inode for inode, address in inodes.items() if address in wanted} or {
        inode
        for inode, address in inodes.items()
        if address == "::" or (address == "0.0.0.0" and any(":" not in one for one in wanted))
    }
    addresses = {inodes[inode] for inode in answering or inodes}
    # where several may answer, as for localhost, all must be its own
    sets = [{inode} for inode in sorted(answering)] or [set(inodes)]
    owners = [(pid, _whose(host, pid, unit)) for pid in (_owner(host, one, unit) for one in sets)]
    pid, ours = next((owner for owner in owners if owner[1] is not True), owners[0])
    return Listener(
        open=True,
        pid=pid,
        command=host.text(f"/proc/{pid}/comm") if pid else None,
        addresses=tuple(sorted(addresses)),
        ours=ours,
        elsewhere=bool(wanted) and not answering,
    )


def _asked(name: str) -> tuple[str, ...]:
    """Return the addresses that a host of a URL stands for, none for a name to be resolved."""
    if name == "localhost":
        return ("127.0.0.1", "::1")
    try:
        return (str(ipaddress.ip_address(name)),)
    except ValueError:
        return ()


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return an address of `/proc/net/tcp`: words of four bytes, each reversed."""
    words = [bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8)]
    address = ipaddress.ip_address(b"".join(words))
    # a socket of both families that listens on an address of the old one
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


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


def _whose(host: Reader, pid: int | None, unit: Unit | None) -> bool | None:
    """Tell whether a process is of the unit, `None` when that is not known."""
    return None if pid is None or unit is None else belongs(host, pid, unit)


def belongs(host: Reader, pid: int, unit: Unit) -> bool:
    """Tell whether a process is of the unit: in its control group, or a descendant.

    What a killed server leaves behind stays in the control group, whose path systemd does not tell
    of a unit that has ended: then its name has to do.
    """
    group = unit.control_group.split("/")[-1] or service_name(unit.name)
    try:
        lines = (host.text(f"/proc/{pid}/cgroup") or "").splitlines()
        if any(in_group(line.split(":", 2)[-1], group) for line in lines):
            return True
        at: int | None = pid
        while at and at != 1:
            if at == unit.main_pid:
                return True
            status = host.text(f"/proc/{at}/stat") or ""
            fields = status.rpartition(")")[2].split()
            at = int(fields[1]) if len(fields) > 1 else None
    except UnreadableError:
        return False
    return False


def read_hints(host: Reader, unit: Unit) -> tuple[str | None, str | None]:
    """Return what the processes of a unit show of a server that does not answer.

    Returns:
        The compiler that runs, and the process that is stopped or waits in the kernel, each with
        its number; `None` for none.
    """
    compiler = stuck = None
    for pid in [int(name) for name in host.names("/proc") if name.isdigit()]:
        try:
            name = host.text(f"/proc/{pid}/comm") or ""
            state = (host.text(f"/proc/{pid}/stat") or "").rpartition(")")[2].split()[:1]
        except UnreadableError:
            continue
        if name not in _COMPILERS and state not in (["T"], ["D"]):
            continue
        if belongs(host, pid, unit):
            if name in _COMPILERS:
                compiler = f"process {pid} ({name})"
            else:
                how = "is stopped (SIGSTOP)" if state == ["T"] else "waits in the kernel"
                stuck = stuck or f"process {pid} ({name}) {how}"
    return compiler, stuck


def read_gpu_processes(host: Reader, unit: Unit | None) -> tuple[GpuProcess, ...] | None:
    """Return the processes that have a GPU's node (`/dev/nvidiaN`) open, in the order of numbers.

    Only those of this machine, or of this container when it runs in one. nvidia-persistenced, which
    holds all GPUs on purpose, is left out.

    Returns:
        The processes, `None` when some could not be looked at: then nobody knows.
    """
    try:
        nodes = [f"/dev/{name}" for name in host.names("/dev") if _NODE.fullmatch(name)]
        holders, unknown = read_holders(host, nodes)
    except UnreadableError:
        return None
    if unknown:
        return None
    found = []
    for holder in holders:
        pid = holder.user.pid
        command = host.text(f"/proc/{pid}/comm")
        if command is not None and not command.startswith("nvidia-persist"):  # None has ended
            ours = None if unit is None else belongs(host, pid, unit)
            found.append(GpuProcess(pid, command, holder.nodes, holder.computes, ours))
    return tuple(found)
