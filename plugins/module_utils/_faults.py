# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.

"""Verdict for each GPU: what the kernel log says, compared with the GPUs of the host.

`judge(log, subjects)` is all that others need.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ansible_collections.gpuhost.inference.plugins.module_utils._child import ask
from ansible_collections.gpuhost.inference.plugins.module_utils._chips import identify
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import (
    GpuHostError,
    UnreadableError,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._fault_history import (
    Before,
    PastBoot,
    PastGpu,
    read_history,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._fault_kinds import (
    BY_ID,
    CLASSES,
    FSP_CLASSES,
    PCIE_CLASSES,
    RUNGS,
    START_CLASSES,
    XID_SOURCE,
    remedy,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._fault_log import (
    EVIDENCE,
    VFIO_DRIVERS,
    Card,
    Found,
    Seen,
    collect,
    quote,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._gpu import Gpu, read_gpus
from ansible_collections.gpuhost.inference.plugins.module_utils._kernel_log import (
    KernelLog,
    LogSummary,
    read_blocks,
    read_file,
    read_live,
    this_boot,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._log_forms import Record
from ansible_collections.gpuhost.inference.plugins.module_utils._pci import (
    DEVICES,
    bridges_above,
    normalize_address,
    slot_of,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._starts import read_starts
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader
from ansible_collections.gpuhost.inference.plugins.module_utils._xids import Advice, raised

_WORST = ("lost", "failed", "degraded", "healthy")
# drivers whose messages may be about a GPU
_MAY_HOLD_OURS = ("nvidia", *VFIO_DRIVERS)
_PLACE = re.compile(r"\w+:(\w\w):00\.0")
_AGAIN = 3  # boots in a row with the same fault, after which only the hardware is left
_OF_THE_HARDWARE = ("power-off", "hardware")  # rungs; a warm reboot keeps slot power


@dataclass(frozen=True)
class Subject:
    """A GPU to judge.

    Attributes:
        address: full PCI address.
        driver: bound now; `None` for none, or when `observed` is false.
        has_fsp: `yes`, `no` or `unknown`.
        bars: memory windows as (first, last) address.
        initialised: the driver shows the UUID and firmware it got from the GPU; `None` if unknown.
        bridges: addresses of all bridges above it.
        observed: driver and `initialised` are of the time of the log; false for a saved log.
        answers: its configuration space can be read; false when it reads all ones, as of a card
            that is off the bus, `None` if unknown.
    """

    address: str
    driver: str | None = None
    has_fsp: str = "unknown"
    bars: tuple[tuple[int, int], ...] = ()
    initialised: bool | None = None
    bridges: tuple[str, ...] = ()
    observed: bool = True
    answers: bool | None = None


@dataclass(frozen=True)
class Fault:
    """One kind of fault of one GPU, all its repeats together.

    Attributes:
        id: name of its row in `KINDS` (`xid-N` for an Xid without a row of its own).
        class_: class of the fault.
        address: of the GPU, `None` when the log does not tell.
        attribution: how the address was found: `line`, `dump`, `attempt`, `bridge`, `only-gpu`, or
            `None`.
        candidates: the GPUs it may be about while `address` is `None`.
        verdict: on a GPU with it, while it is current.
        meaning: what it means for a GPU.
        current: false when a later start or load of the driver made it history, and for what is
            harmless while there is little of it.
        boots: in a row, this one included, in which the GPU had it, as far as one looked.
        first: time of the first occurrence.
        last: time of the last one.
        count: occurrences, a lower bound where the log has gaps.
        line: the message itself, its first occurrence.
        ladder: names in `RUNGS` to try in this order.
        remedy: what to do, in words.
        source: who prints such messages.
        evidence: further lines that belong to it.
    """

    id: str
    class_: str
    address: str | None
    attribution: str | None
    candidates: tuple[str, ...]
    verdict: str
    meaning: str
    current: bool
    boots: int
    first: str | None
    last: str | None
    count: int
    line: str
    ladder: tuple[str, ...]
    remedy: str
    source: str
    evidence: tuple[str, ...]

    @property
    def told(self) -> str:
        """Say it in a sentence's end."""
        times = "once" if self.count == 1 else f"{self.count} times"
        again = f", in {self.boots} boots in a row" if self.boots > 1 else ""
        return f"{self.meaning} ({self.id}, logged {times}{again})"


@dataclass(frozen=True)
class GpuHealth:
    """Verdict for one GPU; words as in the documentation of gpu_health_info."""

    address: str
    fsp: str
    verdict: str
    reason: str
    faults: tuple[str, ...]
    ladder: tuple[str, ...]  # of its worst fault
    evidence: tuple[str, ...]


@dataclass(frozen=True)
class Health:
    """Verdicts, the faults behind them, and how much of the log there was."""

    gpus: tuple[GpuHealth, ...]
    faults: tuple[Fault, ...]
    log: LogSummary
    history: tuple[PastBoot, ...] = ()

    @property
    def unattributed(self) -> tuple[Fault, ...]:
        """The faults that could not be tied to a GPU."""
        return tuple(fault for fault in self.faults if fault.address is None)


def read_subjects(host: Reader, gpus: Iterable[Gpu]) -> list[Subject]:
    """Add to GPUs what only the verdict needs.

    The UUID in `/proc/driver/nvidia/gpus/ADDRESS/information` is of question marks until the first
    start since the driver was bound, and kept from then on (RmGetGpuUuidRaw in the driver's
    osapi.c caches it): it proves that the GPU once started, not that its last start went well.
    """
    subjects, gpus = [], list(gpus)
    # the driver answers under a lock, which it may hold forever when a GPU is in trouble
    texts = ask(
        lambda address: host.text(f"/proc/driver/nvidia/gpus/{address}/information"),
        [gpu.address for gpu in gpus],
    )
    for gpu in gpus:
        try:
            windows = host.text(f"{DEVICES}/{gpu.address}/resource") or ""
        except UnreadableError:
            windows = ""
        lines = (texts.get(gpu.address) or "").splitlines()
        said = {key: value.strip() for key, _colon, value in (n.partition(":") for n in lines)}
        initialised = None
        if "GPU UUID" in said:
            firmware = said.get("GPU Firmware", "")
            initialised = "?" not in said["GPU UUID"] and firmware not in ("N/A", "?")
        subjects.append(
            Subject(
                gpu.address,
                gpu.driver,
                gpu.has_fsp,
                _windows(windows),
                initialised,
                bridges_above(host, gpu.address),
                answers=gpu.config_readable,
            )
        )
    return subjects


def _windows(resource: str) -> tuple[tuple[int, int], ...]:
    """Parse sysfs `resource`: start, end and flags of each window, the first six are BARs."""
    found = []
    for line in resource.splitlines()[:6]:
        start, end, flags = (int(word, 16) for word in line.split())
        if flags and end > start:
            found.append((start, end))
    return tuple(found)


def examine(
    host: Reader,
    *,
    addresses: Sequence[str] | None,
    sources: Sequence[str],
    boot: str,
    log_file: str | None,
    timeout: float,
    earlier_boots: int = 0,
) -> Health:
    """Judge the GPUs of a host; options as in the documentation of gpu_health_info.

    Raises:
        GpuHostError: an option is wrong, or the saved log cannot be opened.
    """
    captured = is_captured(host)
    if earlier_boots < 0 or (earlier_boots and (captured or log_file or boot != "current")):
        raise GpuHostError(
            "earlier_boots counts back from the boot that runs now: give a number from 0, and "
            "neither boot, log_file nor sysroot with it"
        )
    subjects: Sequence[Subject] | None = read_subjects(host, read_gpus(host))
    if log_file is not None:
        log = read_file(log_file)
    else:
        log = read_blocks([]) if captured else read_live(sources, boot=boot, timeout=timeout)
    # a saved log may be of another boot, or of another host
    ours = log_file is None and boot == "current" and not captured
    found = collect(log, read_starts(host) if ours else None)
    if log_file is not None and not captured:
        subjects = of_saved_log(host, found, log.summary(), subjects or ())
    elif boot != "current":
        subjects = unobserved(subjects or ())
    history: Sequence[PastBoot] = ()
    before: Before = ()
    if earlier_boots:
        history, before = read_history(
            host, earlier_boots, timeout, lambda past: _past(past, subjects or ())
        )
    health = conclude(found, log.summary(), subjects, before)
    health = replace(health, history=tuple(history))
    return health if addresses is None else _chosen(health, addresses)


def _past(log: KernelLog, subjects: Sequence[Subject]) -> tuple[list[PastGpu], dict[str, set[str]]]:
    """Judge the GPUs of an earlier boot: those of now, and those that only its log names."""
    found = collect(log)
    gone = [gpu for gpu in named_by(found) if _owner(gpu.address, subjects) is None]
    health = conclude(found, log.summary(), [*unobserved(subjects), *gone])
    kinds: dict[str, set[str]] = {}
    for fault in health.faults:
        if fault.current and fault.address is not None:
            kinds.setdefault(fault.address, set()).add(kind_over_boots(fault))
    return [PastGpu(gpu.address, gpu.verdict, gpu.faults) for gpu in health.gpus], kinds


def is_captured(host: Reader) -> bool:
    """Tell whether a host is read from a folder with a copy of its files."""
    return host.root != Path("/")


def _chosen(health: Health, addresses: Sequence[str]) -> Health:
    """Leave out what is about other GPUs."""
    wanted = {normalize_address(address) for address in addresses}
    known = [gpu.address for gpu in health.gpus]
    for address in sorted(wanted.difference(known)):
        raise GpuHostError(
            f"{address} is no NVIDIA GPU of this host or log; they are at "
            f"{', '.join(known) or 'no address'}"
        )
    return replace(
        health,
        gpus=tuple(gpu for gpu in health.gpus if gpu.address in wanted),
        faults=tuple(f for f in health.faults if f.address is None or f.address in wanted),
        history=tuple(
            replace(boot, gpus=tuple(gpu for gpu in boot.gpus if gpu.address in wanted))
            for boot in health.history
        ),
    )


def of_saved_log(
    host: Reader, found: Found, log: LogSummary, subjects: Sequence[Subject]
) -> Sequence[Subject] | None:
    """Return the GPUs of a live host as far as they can be compared with a saved log.

    A log that names none of them is of another host: `None`. And what the drivers show now says
    nothing about the time of the log, unless it is of this very boot.
    """
    if not any(_owner(address, subjects) for address in (*found.cards, *found.devices)):
        return None
    of_this_boot = log.boot_id is not None and log.boot_id == this_boot(host)
    return subjects if of_this_boot else unobserved(subjects)


def unobserved(subjects: Sequence[Subject]) -> list[Subject]:
    """Return the GPUs without what is only true now."""
    return [
        replace(s, driver=None, initialised=None, observed=False, answers=None) for s in subjects
    ]


def judge(log: KernelLog, subjects: Sequence[Subject] | None) -> Health:
    """Read a log to its end and judge the GPUs; with `None`, those that the log names."""
    found = collect(log)
    return conclude(found, log.summary(), subjects)


def conclude(
    found: Found, log: LogSummary, subjects: Sequence[Subject] | None, before: Before = ()
) -> Health:
    """Judge GPUs by what a log says; with `None`, those that the log itself names.

    Args:
        found: what the log says.
        log: how much of it there was.
        subjects: the GPUs.
        before: for each boot before, the last one first, `kind_over_boots` of the faults that stood
            at its end, by address.
    """
    known = list(named_by(found) if subjects is None else subjects)
    for address in found.cards:
        owner = _owner(address, known)
        if owner is not None and owner.observed and owner.driver == "nvidia":
            found.settle_reload(address)
    faults = [
        _again(fault, before) for fault in _attributed(found, known, all_known=subjects is not None)
    ]
    faults = [replace(one, remedy=remedy(one.remedy, one.ladder)) for one in faults]
    judged = [
        _verdict(
            subject,
            [fault for fault in faults if fault.address == subject.address],
            [fault for fault in faults if fault.current and subject.address in fault.candidates],
            _known_of(found, subject, known),
            log,
        )
        for subject in sorted(known, key=lambda subject: subject.address)
    ]
    return Health(tuple(judged), tuple(faults), log)


@dataclass(frozen=True)
class _Known:
    """What the log tells about a GPU besides its faults.

    Attributes:
        started: the last attempt to start it that went well.
        no_fsp: its messages are of a chip without FSP.
        open: it is a machine's, and had faults that only the loading of nvidia made history.
    """

    started: Record | None
    no_fsp: bool
    open: bool


def _known_of(found: Found, subject: Subject, known: Sequence[Subject]) -> _Known:
    cards = [card for at, card in found.cards.items() if _owner(at, known) is subject]
    above = [found.cards[bridge] for bridge in subject.bridges if bridge in found.cards]
    slot = subject.address.partition(":")[2]
    left = [seen for card in (*cards, *above) for seen in card.faults.values()]
    left += [seen for at, seen in found.streams.faults.items() if at == slot]
    return _Known(
        next((card.started for card in cards if card.started), None),
        any(card.no_fsp for card in cards),
        subject.driver in VFIO_DRIVERS and any(seen.reloaded for seen in left),
    )


def kind_over_boots(fault: Fault) -> str:
    """Return what must be the same for a fault to be the same again in another boot."""
    return fault.id if fault.class_ == "xid" else fault.class_


def _again(fault: Fault, before: Before) -> Fault:
    """Look for the same fault in the boots before: if it was there too, it is the hardware.

    But not what an application does: it may do the same in each boot.
    """
    if fault.address is None or not fault.current:
        return fault
    boots = 1
    for had in before:
        if kind_over_boots(fault) not in had.get(fault.address, ()):
            break
        boots += 1
    ladder = tuple(rung for rung in fault.ladder if rung in _OF_THE_HARDWARE)
    if boots < _AGAIN or not ladder or fault.ladder[0] == "application":
        return replace(fault, boots=boots)
    advice = f"It is there since {boots} boots or more. {fault.remedy}".rstrip()
    return replace(fault, boots=boots, ladder=ladder, remedy=advice)


def named_by(found: Found) -> Iterator[Subject]:
    """Tell which addresses in a log are NVIDIA GPUs, or may be."""
    named = any(card.named for card in found.cards.values()) or any(
        id_.startswith("10de:") for id_, _class in found.devices.values()
    )
    for address in sorted({*found.cards, *found.devices}):
        card = found.cards.get(address, Card())
        id_, class_ = found.devices.get(address, ("", ""))
        if id_:
            ours = id_.startswith("10de:") and class_.startswith(("0x0300", "0x0302"))
        elif address in found.strangers or _other_function(address, found):
            ours = False
        else:
            ours = card.named or _may_be_ours(address, card, alone=not named)
        if ours:
            has_fsp = identify(id_)[2] if id_ else "unknown"
            yield Subject(address, None, has_fsp, bridges=found.above(address), observed=False)


def _other_function(address: str, found: Found) -> bool:
    """Tell whether it is the sound of a card, say, whose first function the log tells about."""
    first = f"{slot_of(address)}.0"
    return address != first and first in found.cards and not found.named(address)


def _may_be_ours(address: str, card: Card, *, alone: bool) -> bool:
    """Tell whether faults of a device that nothing names may be of an NVIDIA GPU.

    The IOMMU's drivers do not always say what the device is. In a log that names GPUs it is none of
    them; and no GPU is on a bus 0, or has another number there than 00.0.
    """
    classes = {seen.kind.class_ for seen in card.faults.values()}
    if card.driver in _MAY_HOLD_OURS:
        return bool(classes)
    # a port reports PCIe errors of any device, without its driver
    at = _PLACE.fullmatch(address)
    return (
        alone
        and card.driver in (None, "pci")
        and bool(classes.difference(PCIE_CLASSES))
        and at is not None
        and at[1] != "00"
    )


def _owner(address: str, subjects: Sequence[Subject]) -> Subject | None:
    """Return the GPU an address belongs to: itself, or the card whose other function it is."""
    exact = [subject for subject in subjects if subject.address == address]
    slot = [subject for subject in subjects if slot_of(subject.address) == slot_of(address)]
    return exact[0] if exact else slot[0] if len(slot) == 1 else None


def _attributed(found: Found, known: Sequence[Subject], *, all_known: bool) -> list[Fault]:
    """Give each fault its GPU, and leave out what is not of an NVIDIA GPU.

    As remedy they have only what the ladder does not tell.
    """
    sure = [
        subject.address
        for subject in known
        if all_known or subject.address in found.devices or found.named(subject.address)
    ]
    # a log names the GPUs it has messages about, not all there are; an instance number above 0
    # proves that there are more
    if len(sure) == 1 and (all_known or not found.highest):
        found.claim(sure[0])
    faults = []
    of_bridges = []
    for address, card in sorted(found.cards.items()):
        owner = _owner(address, known)
        if owner is None:
            of_bridges.append((address, card))
            continue
        if card.advice and not any(map(_by_xid, card.faults.values())):
            seen = Seen(BY_ID["xid-154"], card.advice[1], card.advice[1], "line")
            seen.occur(card.advice[1], 0)
            card.faults[seen.kind.id] = seen
        for seen in card.faults.values():
            if seen.kind.class_ == "iommu_fault" and card.application:
                seen.add(card.application)
            wanted = card.advice if _by_xid(seen) else None
            if wanted:
                seen.add(wanted[1])
            faults.append(_described(seen, owner, known, wanted and wanted[0]))
    for address, card in of_bridges:
        faults += _of_bridge(address, card, found, known)
    lost = [fault.address for fault in faults if fault.class_ == "gpu_lost" and fault.current]
    able = {subject.address for subject in known if subject.has_fsp != "no"}
    for seen in found.loose:
        if seen.kind.id == "rpc-gpu-lost" and lost:
            continue  # follows from a loss that did name its GPU
        candidates = [
            address
            for address in sure
            if (address in able or seen.kind.class_ not in FSP_CLASSES)
            and not found.started_since(address, seen)
        ]
        faults.append(replace(_described(seen, None, known), candidates=tuple(candidates)))
    for slot, seen in found.streams.faults.items():
        alike = tuple(s.address for s in known if s.address.partition(":")[2] == slot)
        if alike:
            fault = _described(seen, None, known)
            faults.append(replace(fault, candidates=alike))
    return faults


def _of_bridge(address: str, card: Card, found: Found, known: Sequence[Subject]) -> Iterator[Fault]:
    """Give the PCIe errors of a bridge to the GPUs below it.

    A link that was shut down takes every GPU below with it. Of other errors one GPU is the cause,
    or suffers from them, and which one is known only when there is just one.
    """
    below = [subject for subject in known if address in subject.bridges]
    for seen in card.faults.values():
        kind = seen.kind
        if kind.class_ not in PCIE_CLASSES and kind.id != "link-contained":
            continue
        hit = []
        for gpu in below:
            own = found.cards.get(gpu.address, Card()).current("gpu_lost")
            if own is not None:
                own.add(seen.first)
            elif not found.started_since(gpu.address, seen):
                hit.append(gpu)
        if kind.id == "link-contained" or len(below) == 1:
            for gpu in hit:
                yield replace(_described(seen, gpu, known), attribution="bridge")
        elif len(hit) == len(below) > 0:
            candidates = tuple(gpu.address for gpu in hit)
            yield replace(_described(seen, None, known), attribution=None, candidates=candidates)


def _by_xid(seen: Seen) -> bool:
    """Tell whether an Xid 154 may be about this fault."""
    return seen.counts and (seen.kind.source == XID_SOURCE or seen.kind.class_ == "gpu_lost")


def _described(
    seen: Seen, owner: Subject | None, known: Sequence[Subject], wanted: Advice | None = None
) -> Fault:
    """Turn what was seen into a result, with what the GPU itself adds to the diagnosis."""
    kind, evidence = seen.kind, list(seen.evidence)
    if owner is not None and owner.has_fsp == "yes" and kind.id == "gfw-boot":
        kind = BY_ID["fsp-gfw-boot"]  # from Hopper on, waiting for GFW is waiting for the FSP
    elif owner is not None and owner.has_fsp == "no" and kind.class_ in FSP_CLASSES:
        kind = BY_ID["gfw-boot" if kind.id == "fsp-gfw-boot" else "gsp-start"]
    elif owner is not None and kind.class_ == "iommu_fault":
        hits = [
            f"{place:#x} lies in a BAR of {other.address}"
            for place in seen.places.values()
            for other in known
            if other is not owner and any(start <= place <= end for start, end in other.bars)
        ]
        kind = BY_ID["iommu-p2p"] if hits else kind
        evidence += hits[:EVIDENCE]
    verdict, meaning = CLASSES[kind.class_]
    verdict = (kind.verdict or verdict) if seen.peak >= kind.flood else "healthy"
    ladder, told = kind.ladder, kind.advice
    if wanted:
        verdict = min(verdict, wanted.verdict, key=_WORST.index)
        ladder = raised(ladder, wanted.rung)
        told = f"The driver asks for: {wanted.words}. {told}".rstrip()
    return Fault(
        id=kind.id,
        class_=kind.class_,
        address=None if owner is None else owner.address,
        attribution=seen.attribution,
        candidates=(),
        verdict=verdict,
        meaning=kind.meaning or meaning,
        current=seen.counts,
        boots=1,
        first=seen.first.time,
        last=seen.last.time,
        count=seen.count,
        line=quote(seen.first),
        ladder=ladder,
        remedy=told,
        source=kind.source,
        evidence=tuple(evidence),
    )


def _verdict(
    gpu: Subject,
    faults: Sequence[Fault],
    suspected: Sequence[Fault],
    known: _Known,
    log: LogSummary,
) -> GpuHealth:
    """Judge one GPU: its own faults first, then everything that forbids to call it healthy."""
    standing = [fault for fault in faults if fault.current]
    started = known.started
    works = gpu.driver != "vfio-pci" and (gpu.initialised is True or started is not None)
    evidence = [line for fault in standing for line in (fault.line, *fault.evidence)]
    verdict, reason = "unknown", ""
    if standing:
        verdict = min((fault.verdict for fault in standing), key=_WORST.index)
        reason = "; ".join(fault.told for fault in standing if fault.verdict == verdict)
    elif suspected:
        reason = f"of this GPU or of another: {suspected[0].told}"
        evidence = [suspected[0].line]
    elif not log.readable:
        reason = "no kernel log could be read: " + "; ".join(log.gaps)
    elif not log.complete:
        reason = "no fault was seen, but the log is not complete: " + "; ".join(log.gaps)
    elif gpu.observed and gpu.driver is None:
        reason = "no driver is bound"
    elif gpu.driver == "vfio-pci" and not known.open:
        verdict, reason = "healthy", "bound to vfio-pci, and no fault in the log of this boot"
    elif works and gpu.driver in (None, "nvidia"):
        verdict, reason = "healthy", "it was started, and no fault in the log of this boot"
        evidence = [started.line] if started else ["its information file has a UUID"]
    elif known.open or any(fault.class_ in START_CLASSES for fault in faults):
        reason = "it failed before the driver was loaded again, and was not started since"
    else:
        reason = f"driver {gpu.driver}: no sign that it was started since"
    fsp = "unknown"
    if any(fault.class_ in FSP_CLASSES for fault in standing):
        fsp = "failed"
    elif gpu.has_fsp == "no" or (gpu.has_fsp == "unknown" and known.no_fsp):
        fsp = "not_applicable"
    elif (
        gpu.has_fsp == "yes"
        and works
        and log.complete
        and not suspected
        and verdict in ("healthy", "degraded")
    ):
        fsp = "ok"
    judged = GpuHealth(
        gpu.address,
        fsp,
        verdict,
        reason,
        tuple(dict.fromkeys(fault.id for fault in standing)),
        _worst_ladder([fault for fault in standing if fault.verdict == verdict]),
        tuple(evidence[:EVIDENCE]),
    )
    return _silent(judged, standing) if gpu.answers is False else judged


def _silent(judged: GpuHealth, standing: Sequence[Fault]) -> GpuHealth:
    """Judge a GPU that is off the bus: the log says so only once somebody has asked the GPU."""
    if judged.verdict == "lost":
        return judged
    return replace(
        judged,
        fsp="unknown" if judged.fsp == "ok" else judged.fsp,
        verdict="lost",
        reason="it does not answer on the bus: its configuration space reads all ones",
        ladder=BY_ID["all-ones"].ladder,
        evidence=tuple(fault.line for fault in standing)[:EVIDENCE],
    )


def _worst_ladder(faults: Sequence[Fault]) -> tuple[str, ...]:
    """Return the ladder that begins highest: what is below would leave that fault in place."""
    rungs = list(RUNGS)
    return max(
        (fault.ladder for fault in faults),
        key=lambda ladder: rungs.index(ladder[0]) if ladder else -1,
        default=(),
    )
