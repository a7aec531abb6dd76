# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.

"""Which model servers use which GPUs now, and whether they go without peer-to-peer copies.

Two switches keep a server from them: NCCL_P2P_DISABLE=1 in its environment, for NCCL, and
`--disable-custom-all-reduce`, for the kernels of SGLang and vLLM that reach into other GPUs
themselves. Read are the processes, not unit files: what counts is what runs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Callable

from ansible_collections.gpuhost.inference.plugins.module_utils._child import ask
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import UnreadableError
from ansible_collections.gpuhost.inference.plugins.module_utils._gpu import Gpu
from ansible_collections.gpuhost.inference.plugins.module_utils._p2p_files import read_inside
from ansible_collections.gpuhost.inference.plugins.module_utils._redact import redact
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader

NCCL = "NCCL_P2P_DISABLE=1"
REDUCE = "--disable-custom-all-reduce"

_SERVER = re.compile("sglang|vllm")
_OFF_IN_FILE = re.compile(r"^\s*disable[-_]custom[-_]all[-_]reduce\s*:\s*(\w+)", re.MULTILINE)
_CONTAINER = re.compile(r"/lxc(?:\.payload\.|/)(\d+)(?:/|$)")
_UNIT = re.compile(r"/([^/]+\.(?:service|scope))(?:/|$)")
_NUMBER = re.compile(r"\s*([+-]?(?:0[xX][0-9a-fA-F]+|0[0-7]*|[1-9][0-9]*))")
_GENERATIONS = 12

Settings = Mapping[str, str]


@dataclass(frozen=True)
class Server:
    """A running server, with the GPUs its processes hold.

    Attributes:
        pid: its first process.
        title: what it is, for people.
        command: its command line, without keys.
        subject: its container, `lxc 100`, else its folder in /proc.
        addresses: its GPUs.
        nccl_p2p_disable: NCCL is kept from P2P; `None` when that cannot be seen.
        disable_custom_all_reduce: its own kernels are; `None` when that cannot be seen.
    """

    pid: int
    title: str
    command: str
    subject: str
    addresses: tuple[str, ...]
    nccl_p2p_disable: bool | None
    disable_custom_all_reduce: bool | None

    def switches(self, state: bool | None) -> str:
        """Name the switches that are on (`True`), off (`False`) or cannot be seen (`None`)."""
        both = (NCCL, self.nccl_p2p_disable), (REDUCE, self.disable_custom_all_reduce)
        return " and ".join(name for name, now in both if now is state)


@dataclass(frozen=True)
class _Process:
    pid: int
    parent: int
    words: tuple[str, ...]
    environment: dict[str, str] | None
    cgroup: str


def read_servers(host: Reader, gpus: Iterable[Gpu]) -> list[Server]:
    """Return the SGLang and vLLM servers whose processes hold these GPUs.

    The processes that hold GPUs are children, mostly renamed; environment and command line are
    those of the server they come from. A process that does not answer belongs to no server.
    """
    held: dict[str, set[str]] = {}
    for gpu in gpus:
        for user in gpu.users:
            held.setdefault(str(user.pid), set()).add(gpu.address)
    servers: dict[int, Server] = {}
    holds: dict[int, set[str]] = {}
    for pid, answer in ask(lambda pid: _describe(host, int(pid)), held).items():
        if answer:
            told = json.loads(answer)
            first = told["pid"]
            addresses = holds.setdefault(first, set())
            addresses |= held[pid]
            servers[first] = Server(**{**told, "addresses": tuple(sorted(addresses))})
    return [servers[pid] for pid in sorted(servers)]


def _describe(host: Reader, pid: int) -> str | None:
    """Return as JSON the server that a process belongs to, `None` when it is no server's."""
    family = list(_family(host, pid))
    named = [one for one in family if any(_SERVER.search(word) for word in one.words)]
    if not named:
        return None
    # a process that renamed itself has one word, and no flags
    started = [one for one in named if len(one.words) > 1]
    first = (started or named)[-1]
    container, unit = _CONTAINER.search(first.cgroup), _UNIT.findall(first.cgroup)
    subject = f"lxc {container[1]}" if container else f"/proc/{first.pid}"
    of = [subject] if container else []
    of += unit[-1:]
    return json.dumps(
        {
            "pid": first.pid,
            "title": " of ".join([f"process {first.pid}", *of[::-1]]),
            "command": redact(" ".join(first.words)),
            "subject": subject,
            "nccl_p2p_disable": nccl_is_off(
                [one.environment for one in family], _nccl_files(host, first)
            ),
            "disable_custom_all_reduce": _reduce_is_off(host, started),
        }
    )


def _family(host: Reader, pid: int) -> Iterator[_Process]:
    """Yield a process and those it comes from, within its control group: a service, a container."""
    cgroup = None
    for _generation in range(_GENERATIONS):
        process = _process(host, pid)
        if process is None or process.cgroup != (cgroup or process.cgroup):
            return
        yield process
        cgroup, pid = process.cgroup, process.parent
        if pid <= 1:
            return


def _process(host: Reader, pid: int) -> _Process | None:
    at = f"/proc/{pid}"
    try:
        words = (host.data(f"{at}/cmdline") or b"").decode("utf-8", "replace").rstrip("\n\0")
        parent = re.search(r"^PPid:\s*(\d+)", host.text(f"{at}/status") or "", re.MULTILINE)
        cgroup = (host.text(f"{at}/cgroup") or "").rpartition("::")[2]
    except UnreadableError:
        return None
    if not words:
        return None
    environment = None
    try:
        content = (host.data(f"{at}/environ") or b"").decode("utf-8", "replace")
        pairs = (entry.partition("=") for entry in content.rstrip("\n").split("\0"))
        environment = {name: value for name, equals, value in pairs if equals} or None
    except UnreadableError:
        pass  # unknown, as one that a renamed process has written over
    number = int(parent[1]) if parent else 0
    return _Process(pid, number, tuple(words.split("\0")), environment, cgroup)


def nccl_is_off(
    environments: Sequence[Settings | None], files: Sequence[Settings | None] = ()
) -> bool | None:
    """Tell whether NCCL is kept from P2P, as NCCL itself decides it.

    NCCL_P2P_DISABLE counts when strtol() makes 1 of it, and nothing else does; NCCL_P2P_LEVEL when
    it is LOC, or 0 in its old numbers (src/graph/paths.cc, ncclGetLevel). A file counts for what
    the environment does not set (src/misc/param.cc).

    Args:
        environments: of a process and those it comes from, `None` for one that cannot be read.
        files: NCCL's own, the first counts first, `None` for one that cannot be read.
    """
    known: list[Settings | None] = [one for one in environments if one is not None]
    sources = [*(known or [None]), *files]
    return _any(
        [
            _setting("NCCL_P2P_DISABLE", lambda value: _number(value) == 1, sources),
            _setting("NCCL_P2P_LEVEL", _is_local, sources),
        ]
    )


def _setting(
    name: str, means_off: Callable[[str], bool], sources: Sequence[Settings | None]
) -> bool | None:
    """Tell whether the first source that sets a variable means off; `None` where it may be one."""
    for source in sources:
        if source is None:
            return None
        if name in source:
            return means_off(source[name])
    return False


def _is_local(level: str) -> bool:
    return level == "LOC" or (level[:1].isdigit() and _number(level) == 0)


def _number(text: str) -> int:
    """Return what strtol(3) makes of a text, in base 0."""
    match = _NUMBER.match(text)
    if not match:
        return 0
    octal = re.fullmatch("[+-]?0[0-7]+", match[1])
    return int(match[1], 8 if octal else 0)


def _any(states: Sequence[bool | None]) -> bool | None:
    """Tell whether one is `True`; `None` when one may be."""
    if True in states:
        return True
    return None if None in states else False


def _nccl_files(host: Reader, server: _Process) -> list[Settings | None]:
    """Return the settings in the files that NCCL reads, in its order."""
    if "NCCL_CONF_FILE" in (server.environment or ()):
        return [None]  # newer versions read that one instead of the user's
    try:
        paths = [f"{_home(host, server.pid)}/.nccl.conf", "/etc/nccl.conf"]
        return [_parse_settings(read_inside(host, server.pid, path) or b"") for path in paths]
    except UnreadableError:
        return [None]


def _parse_settings(content: bytes) -> Settings:
    found: dict[str, str] = {}
    for line in content.decode("utf-8", "replace").split("\n"):
        name, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            found.setdefault(name, value)
    return found


def _home(host: Reader, pid: int) -> str:
    """Return the home folder of a process's user, as its container knows it.

    Raises:
        UnreadableError: its user or the container's users cannot be read, or it is none of them.
    """
    status = host.text(f"/proc/{pid}/status") or ""
    outside = re.search(r"^Uid:\s*(\d+)", status, re.MULTILINE)
    inside = None
    for line in (host.text(f"/proc/{pid}/uid_map") or "").splitlines():
        first, place, count = map(int, line.split())
        if outside and place <= int(outside[1]) < place + count:
            inside = str(first + int(outside[1]) - place)
    users = (read_inside(host, pid, "/etc/passwd") or b"").decode("utf-8", "replace")
    for line in users.splitlines():
        words = line.split(":")
        if len(words) > 5 and words[2] == inside:
            return f"/{words[5]}"
    raise UnreadableError(f"the home folder of process {pid} is not known")


def _reduce_is_off(host: Reader, started: Sequence[_Process]) -> bool | None:
    """Tell whether the server's own all-reduce is off, by command line and file of flags."""
    return _any([_flag(host, one) for one in started] or [None])


def _flag(host: Reader, process: _Process) -> bool | None:
    words = process.words
    if REDUCE in words:
        return True
    files = [word[9:] for word in words if word.startswith("--config=")]
    files += [value for word, value in zip(words, words[1:]) if word == "--config"]
    if not files:
        return False
    try:
        content = read_inside(host, process.pid, files[-1])
    except UnreadableError:
        return None
    if content is None:
        return None
    found = _OFF_IN_FILE.search(content.decode("utf-8", "replace"))
    return found is not None and found[1].lower() in ("true", "yes", "on")
