# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.

"""Whether GPUs reach each other's memory: what the driver says, and what really arrives.

The driver's word is no proof. Behind a translating IOMMU it says OK, and copies then hang, fault,
or end without an error and without the data. So copies are made and compared, in both directions
of each ordered pair, while the kernel log is watched for new faults.
"""

from __future__ import annotations

import inspect
import json
import math
import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from typing import Any, Callable

from ansible_collections.gpuhost.inference.plugins.module_utils import _command, _p2p_probe
from ansible_collections.gpuhost.inference.plugins.module_utils._command import CommandError
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import (
    GpuHostError,
    UnreadableError,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._fault_log import collect
from ansible_collections.gpuhost.inference.plugins.module_utils._faults import (
    Fault,
    conclude,
    read_subjects,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._gpu import Gpu, read_gpus
from ansible_collections.gpuhost.inference.plugins.module_utils._guests import choose
from ansible_collections.gpuhost.inference.plugins.module_utils._kernel_log import (
    newest,
    read_since,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._p2p_servers import (
    Server,
    read_servers,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._pci import (
    as_result,
    normalize_address,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._redact import one_line
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader

SAVED = "/var/lib/gpuhost/p2p.json"
WAYS = ("write", "read")
WORDS = ("right", "wrong", "failed", "untested")

_VERSION = 1
_SMI_SECONDS = 20.0  # it takes half a minute only when a GPU is ill
_LOGGED_SECONDS = 0.5  # the IOMMU drivers print from a thread of their interrupt
_HANGS_SECONDS = 5.0  # a copy takes milliseconds
_OUTPUT_BYTES = 1 << 20  # of the test; a fifth of it is enough for 16 GPUs
_LINE_CHARACTERS = 8192
_REASON_CHARACTERS = 300
_BY_ALARM = (-14, 142)  # SIGALRM, as `pct exec` passes it on: its own time limit
_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_GPU = re.compile(r"GPU(\d+)")
_OF_BOOT = re.compile(r"(?:pci|pcie_acs_override|iommu|amd_iommu|intel_iommu)(?:\.|=)")
_REGISTRY = re.compile(r"^RegistryDwords(?:PerDevice)?: (.*\S)", re.MULTILINE)
_NO_START = "no 'Linux version'"  # the one gap that a part of a log has to have

Copy = tuple[str, str, str]  # from, to, way
Answer = tuple[str, "str | None"]  # one of WORDS, and why


@dataclass(frozen=True)
class Pair:
    """One ordered pair of GPUs.

    Attributes:
        from_: the GPU that has the data.
        to: the GPU that gets it.
        capability: what the driver says, in nvidia-smi's words (OK, CNS, …), by way.
        write: what became of the data when `from_` executed the copy: right, wrong, failed or
            untested.
        read: the same when `to` executed it.
        reason: why not right, both ways together.
    """

    from_: str
    to: str
    capability: Mapping[str, str | None]
    write: str
    read: str
    reason: str | None


@dataclass(frozen=True)
class Basis:
    """What a verdict depends on: when any of it changes, the test has to be made again."""

    kernel: str | None
    driver: str | None
    dma_remap_peer_mmio: str | None
    registry_dwords: tuple[str, ...]  # of the driver, where P2P is forced; the second by device
    parameters: tuple[str, ...]  # of the running kernel, about PCI and the IOMMU
    types: Mapping[str, str | None]  # of the GPUs' groups, by address
    cards: Mapping[str, str]  # what card is at an address: vendor, device, subsystem


@dataclass(frozen=True)
class Saved:
    """A test made earlier, as `SAVED` keeps it.

    Attributes:
        verdict: works, broken or unknown.
        reason: a sentence.
        time: when it was made, UTC.
        vmid: the container in which it was made, `None` for the host.
        addresses: the GPUs.
        valid: nothing it depends on has changed since.
        changed: what has, one sentence each.
    """

    verdict: str
    reason: str
    time: str | None
    vmid: int | None
    addresses: tuple[str, ...]
    valid: bool
    changed: tuple[str, ...]


@dataclass(frozen=True)
class Truth:
    """What the data test told.

    Attributes:
        visible: GPUs that CUDA sees where the test ran; `None` when it did not come so far.
        copies: what became of each copy.
        error: what ended the test before its end.
    """

    visible: Collection[str] | None = None
    copies: Mapping[Copy, Answer] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True)
class Wish:
    """Options of the module, checked."""

    addresses: Sequence[str] | None
    vmid: int | None
    python: str
    test: bool
    timeout: float
    size: int  # MiB


Run = Callable[..., Iterable[bytes]]  # command, timeout, and `given`, as `_command.stream`


# ---- capability -------------------------------------------------------------------------------


def parse_capability(text: str) -> dict[tuple[int, int], str]:
    """Return the matrix of `nvidia-smi topo -p2p`, by index of row and column.

    It is a table with tabs, its head may be underlined by escape sequences, whatever it is
    printed to, and a legend follows. Cells are X (itself), OK, CNS, GNS, TNS, NS, DR or U.

    Raises:
        GpuHostError: there is no such table in it.
    """
    columns: list[int] = []
    found = {}
    for line in _ESCAPES.sub("", text).splitlines():
        numbers = [_GPU.fullmatch(word) for word in line.split()]
        row = numbers[0] if numbers else None
        if numbers and all(numbers):
            columns = [int(number[1]) for number in numbers if number]
        elif row and len(numbers) == len(columns) + 1:
            cells = line.split()[1:]
            found.update({(int(row[1]), at): cell for at, cell in zip(columns, cells)})
    if not found:
        said = " ".join(text.split())[:120] or "nothing"
        raise GpuHostError(f"nvidia-smi topo -p2p printed no matrix, but: {said}")
    return found


def parse_indices(text: str) -> dict[int, str]:
    """Return addresses by nvidia-smi's index out of `--query-gpu=index,pci.bus_id`.

    Raises:
        GpuHostError: a line with an index has no address.
    """
    rows = (line.split(",") for line in text.splitlines())
    return {int(row[0]): normalize_address(row[1]) for row in rows if row[0].strip().isdigit()}


def read_capability(
    addresses: Sequence[str], run: Run, left: Callable[[], float]
) -> tuple[dict[Copy, str], list[str]]:
    """Ask nvidia-smi what each pair may do; the executing GPU is the row of its matrix.

    Returns:
        The words by copy, and what could not be found out.
    """
    found: dict[Copy, str] = {}
    try:
        query = ["nvidia-smi", "--query-gpu=index,pci.bus_id", "--format=csv,noheader"]
        index = {at: number for number, at in parse_indices(_text(run, query, left)).items()}
        for way in WAYS:
            command = ["nvidia-smi", "topo", "-p2p", way[0]]
            matrix = parse_capability(_text(run, command, left))
            for source, target in pairs_of([at for at in addresses if at in index]):
                row, column = (source, target) if way == "write" else (target, source)
                word = matrix.get((index[row], index[column]))
                if word is not None:
                    found[source, target, way] = word
    except GpuHostError as error:
        return found, [f"what the driver says of the pairs is not known: {error}"]
    missing = [address for address in addresses if address not in index]
    problems = [f"nvidia-smi does not show {', '.join(missing)}"] if missing else []
    return found, problems


def _text(run: Run, command: Sequence[str], left: Callable[[], float]) -> str:
    blocks = run(command, min(_SMI_SECONDS, left()))
    return b"".join(blocks).decode("utf-8", "replace")


def pairs_of(addresses: Sequence[str]) -> list[tuple[str, str]]:
    """Return all ordered pairs."""
    return [(one, other) for one in addresses for other in addresses if one != other]


# ---- truth ------------------------------------------------------------------------------------


def run_test(
    wish: Wish, addresses: Sequence[str], run: Run, seconds: float, clock: Callable[[], float]
) -> Truth:
    """Make the copies, where the wish says; what was told before an end in the middle counts."""
    task = {"addresses": addresses, "size": wish.size << 20, "seconds": math.ceil(seconds)}
    command = [wish.python, "-", json.dumps(task)]
    if wish.vmid is not None:
        command = ["pct", "exec", str(wish.vmid), "--", *command]
    program = inspect.getsource(_p2p_probe).encode()
    output = bytearray()
    told = clock()
    error, hangs = None, False
    try:
        for block in run(command, seconds + 2, given=program):
            told = clock()
            output += block
            if len(output) > _OUTPUT_BYTES:  # a container must not use up the host's memory
                error = f"it was stopped, for it printed more than {_OUTPUT_BYTES >> 20} MiB"
                break
    except GpuHostError as failure:
        error = str(failure).replace(json.dumps(task), "…")
        died = isinstance(failure, CommandError) and failure.code not in _BY_ALARM
        # one that was only stopped may have been at work
        hangs = died or clock() - told >= _HANGS_SECONDS
    return parse_truth(output.decode("utf-8", "replace"), addresses, error, hangs)


def parse_truth(text: str, addresses: Sequence[str], error: str | None, hangs: bool) -> Truth:
    """Take the lines of `_p2p_probe`; other output, such as a library's warnings, is left out.

    They come out of a container: only what is known there counts, and its text is cut.

    Args:
        text: its output.
        addresses: the GPUs it was to test.
        error: what ended it, `None` when nobody did.
        hangs: at its end it did not come any further.
    """
    visible: Collection[str] | None = None
    copies: dict[Copy, Answer] = {}
    begun: tuple[Copy, str] | None = None
    ended = False
    for line in text.splitlines():
        try:
            told = json.loads(line[:_LINE_CHARACTERS])
        except (ValueError, RecursionError):
            continue
        if not isinstance(told, dict):
            continue
        for step in ("begin", "copy", "result"):
            copy = _copy(told.get(step), addresses)
            if copy and step == "result":
                copies[copy], begun = _answer(told[step]), None
            elif copy:
                begun = copy, step
        if isinstance(told.get("gpus"), list):
            seen = [str(address).lower() for address in told["gpus"]]
            visible = [address for address in addresses if address in seen]
        if "error" in told:
            error = _reason(told["error"])
        ended = ended or "end" in told
    if error is None and not ended:
        error = "it ended in the middle"
    if begun is not None and error is not None:
        copy, step = begun
        # getting memory of a GPU says nothing of its peers, a copy that never ends does
        word = "failed" if step == "copy" and hangs else "untested"
        what = "the copy" if step == "copy" else "what precedes the copy"
        copies[copy] = word, f"{what} did not end: {error}"
    return Truth(visible, copies, error)


def _copy(told: object, addresses: Sequence[str]) -> Copy | None:
    """Return which copy is meant, `None` for none that was asked for."""
    if not isinstance(told, dict):
        return None
    source, target, way = told.get("from"), told.get("to"), told.get("way")
    if source in addresses and target in addresses and source != target and way in WAYS:
        return str(source), str(target), str(way)
    return None


def _answer(told: Mapping[str, object]) -> Answer:
    word = told.get("word")
    if word not in WORDS:
        return "untested", f"the test's word for it is not known: {_reason(word)}"
    return str(word), None if word == "right" else _reason(told.get("reason"))


def _reason(said: object) -> str:
    """Return text of a container as one short line."""
    return one_line(said[:_REASON_CHARACTERS] if isinstance(said, str) else "no text")


def answer_of(truth: Truth | None, copy: Copy) -> Answer:
    """Return what became of a copy, and why if it was not tried."""
    if truth is None:
        return "untested", "the test was not asked for"
    if copy in truth.copies:
        return truth.copies[copy]
    if truth.visible is None:
        return "untested", f"the test did not start: {truth.error}"
    hidden = [address for address in copy[:2] if address not in truth.visible]
    if hidden:
        return "untested", f"CUDA does not see {' and '.join(hidden)} there"
    return "untested", f"the test did not get there: {truth.error}"


def judge_pair(
    source: str, target: str, capability: Mapping[Copy, str], truth: Truth | None
) -> Pair:
    """Put together what is known of an ordered pair."""
    answers = {way: answer_of(truth, (source, target, way)) for way in WAYS}
    reasons = {answer[1]: way for way, answer in answers.items() if answer[1]}
    both = len(reasons) == 1 and answers["write"][1] == answers["read"][1]
    said = list(reasons) if both else [f"{way}: {why}" for why, way in reasons.items()]
    return Pair(
        from_=source,
        to=target,
        capability={way: capability.get((source, target, way)) for way in ("read", "write")},
        write=answers["write"][0],
        read=answers["read"][0],
        reason="; ".join(said) or None,
    )


def judge(
    pairs: Sequence[Pair], faults: Sequence[Fault], unwatched: Sequence[str]
) -> tuple[str, str]:
    """Return the verdict on a set of GPUs, and a sentence.

    Args:
        pairs: all ordered pairs of the set.
        faults: what the kernel logged about them during the test.
        unwatched: why such faults may have gone unseen.
    """
    words = [(pair, way, getattr(pair, way)) for pair in pairs for way in WAYS]
    bad = [(pair, way) for pair, way, word in words if word in ("wrong", "failed")]
    untested = [pair for pair, _way, word in words if word != "right"]
    if bad:
        pair, way = bad[0]
        return "broken", (
            f"{len(bad)} of {len(words)} copies did not arrive, first the {way} from {pair.from_} "
            f"to {pair.to} ({pair.reason})"
        )
    if faults:
        gpus = ", ".join(sorted({fault.address or "a GPU not named" for fault in faults}))
        return "broken", f"the data was right, but the kernel logged faults of {gpus} meanwhile"
    if not pairs:
        return "unknown", "there are no two GPUs to test"
    if untested:
        return "unknown", (
            f"{len(untested)} of {len(words)} copies were not tested, first from "
            f"{untested[0].from_} to {untested[0].to} ({untested[0].reason})"
        )
    if unwatched:
        return "unknown", f"the data was right, but faults may be unseen: {'; '.join(unwatched)}"
    return "works", f"{len(words)} copies arrived right, and the kernel logged no fault"


def new_faults(host: Reader, gpus: Sequence[Gpu], mark: float) -> tuple[list[Fault], list[str]]:
    """Return what the kernel logged about these GPUs since a mark, and why some may be missing."""
    log = read_since(host, mark)
    # the record at the mark is older; it is only there to prove that the ring was read
    found = collect(record for record in log if (record.seconds or 0.0) > mark)
    summary = log.summary()
    health = conclude(found, summary, read_subjects(host, gpus))
    wanted = {gpu.address for gpu in gpus}
    faults = [
        fault
        for fault in health.faults
        if fault.address in wanted or (fault.address is None and wanted & set(fault.candidates))
    ]
    unwatched = [gap for gap in summary.gaps if _NO_START not in gap]
    if log.sources[0].first is None or (log.sources[0].first.seconds or 0.0) > mark:
        unwatched.append("the kernel wrote over the older part of its log meanwhile")
    return faults, unwatched


# ---- all together -----------------------------------------------------------------------------


def examine(
    host: Reader,
    wish: Wish,
    *,
    run: Run = _command.stream,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Any]:
    """Return the result of module `gpu_p2p_info`.

    Raises:
        GpuHostError: an option is wrong, or something needed for every answer is unreadable.
    """
    end = clock() + wish.timeout
    present = read_gpus(host)
    gpus = _chosen(present, wish)
    addresses = [gpu.address for gpu in gpus]
    capability, problems = read_capability(addresses, run, lambda: max(0.1, end - clock()))
    truth: Truth | None = None
    faults: list[Fault] = []
    unwatched: list[str] = []
    if wish.test and len(gpus) > 1:
        mark = newest(host)
        truth = run_test(wish, addresses, run, max(1.0, end - clock()), clock)
        sleep(_LOGGED_SECONDS)
        if mark is None:
            unwatched = ["the kernel log cannot be read"]
        else:
            faults, unwatched = new_faults(host, gpus, mark)
        if truth.error:
            problems.append(f"the data test did not come to its end: {truth.error}")
    pairs = [judge_pair(one, other, capability, truth) for one, other in pairs_of(addresses)]
    verdict, reason = judge(pairs, faults, unwatched)
    servers = [server for server in read_servers(host, gpus) if len(server.addresses) > 1]
    wanted = {"works": False, "broken": True, "unknown": None}[verdict]
    kept: list[dict[str, Any]] = []
    known = False
    try:
        known = any(
            test.valid and test.vmid == wish.vmid and test.verdict != "unknown"
            for test in saved(host, present)
        )
        kept = _read_kept(host)
    except UnreadableError as failure:
        problems.append(str(failure))
    return {
        "p2p": {
            "verdict": verdict,
            "reason": reason,
            "time": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "vmid": wish.vmid,
            "addresses": addresses,
            "pairs": [as_result(pair) for pair in pairs],
            "faults": [as_result(fault) for fault in faults],
            "fallback": {"wanted": wanted, "servers": [asdict(server) for server in servers]},
            "problems": [
                *problems,
                *(unwatched if verdict == "unknown" else ()),
                *fallback_problems(servers, wanted),
            ],
            "basis": asdict(read_basis(host, gpus)),
        },
        "kept": kept,
        "worth_keeping": verdict != "unknown" or not known,
    }


def _chosen(gpus: Sequence[Gpu], wish: Wish) -> list[Gpu]:
    """Return the wanted GPUs: those on nvidia, of the container if one is named."""
    if wish.addresses is not None:
        wanted = choose(gpus, wish.addresses)
        return [gpu for gpu in gpus if gpu.address in wanted]
    return [
        gpu
        for gpu in gpus
        if gpu.driver == "nvidia"
        and (
            wish.vmid is None
            or any((owner.kind, owner.vmid) == ("lxc", wish.vmid) for owner in gpu.owners)
        )
    ]


def fallback_problems(servers: Iterable[Server], wanted: bool | None) -> Iterator[str]:
    """Yield what is wrong with the servers' switches against P2P."""
    for server in servers:
        off, on, unseen = (server.switches(state) for state in (False, True, None))
        if wanted is True and off:
            yield f"{server.title} uses GPUs whose P2P is broken, and lacks {off}"
        elif wanted is True and unseen:
            yield f"{server.title} uses GPUs whose P2P is broken; not to be seen is {unseen}"
        elif wanted is False and on:
            yield f"{server.title} goes without P2P, which works: {on} can be removed"


# ---- what is kept of it -----------------------------------------------------------------------


def read_basis(host: Reader, gpus: Iterable[Gpu]) -> Basis:
    """Return what a verdict on these GPUs depends on; what cannot be read is `None`."""
    version = re.search(r"  (\d+\.[\d.]+)  ", _quietly(host, "/proc/driver/nvidia/version"))
    options = _quietly(host, "/proc/driver/nvidia/params")
    remap = re.search(r"^DmaRemapPeerMmio: (\S+)", options, re.MULTILINE)
    words = _quietly(host, "/proc/cmdline").split()
    return Basis(
        kernel=_quietly(host, "/proc/sys/kernel/osrelease") or None,
        driver=version[1] if version else None,
        dma_remap_peer_mmio=remap[1] if remap else None,
        registry_dwords=tuple(_REGISTRY.findall(options)),
        parameters=tuple(word for word in words if _OF_BOOT.match(word)),
        types={gpu.address: gpu.iommu_group.type if gpu.iommu_group else None for gpu in gpus},
        cards={gpu.address: f"{gpu.id} {gpu.subsystem_id or ''}".strip() for gpu in gpus},
    )


def _quietly(host: Reader, path: str) -> str:
    try:
        return host.text(path) or ""
    except UnreadableError:
        return ""


def saved(host: Reader, gpus: Sequence[Gpu]) -> list[Saved]:
    """Return the tests that were made earlier, each with what has changed since.

    Raises:
        UnreadableError: they are there but cannot be understood.
    """
    try:
        return [_saved(host, gpus, test) for test in _read_kept(host)]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnreadableError(f"{SAVED} cannot be understood: {error!r}") from error


def _read_kept(host: Reader) -> list[dict[str, Any]]:
    text = host.text(SAVED)
    if text is None:
        return []
    kept = json.loads(text)
    if kept["version"] != _VERSION:
        raise UnreadableError(f"{SAVED} has version {kept['version']}: make the test again")
    return list(kept["tests"])


def _saved(host: Reader, gpus: Sequence[Gpu], test: Mapping[str, Any]) -> Saved:
    addresses = tuple(test["addresses"])
    now = asdict(read_basis(host, [gpu for gpu in gpus if gpu.address in addresses]))
    then = test["basis"]
    changed = [
        f"{name.replace('_', ' ')} was {_shown(then[name])} then, and is {_shown(now[name])}"
        for name in ("kernel", "driver", "dma_remap_peer_mmio", "registry_dwords", "parameters")
        if _shown(then[name]) != _shown(now[name])
    ]
    changed += [
        f"{what} {address} was {_shown(then[name][address])} then, and is "
        f"{_shown(now[name].get(address))}"
        for name, what in (("types", "the type of the group of"), ("cards", "the card at"))
        for address in addresses
        if now[name].get(address) != then[name][address]
    ]
    return Saved(
        verdict=str(test["verdict"]),
        reason=str(test["reason"]),
        time=test["time"],
        vmid=test["vmid"],
        addresses=addresses,
        valid=not changed,
        changed=tuple(changed),
    )


def _shown(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return " ".join(value) or "empty"
    return "not known" if value is None else str(value)
