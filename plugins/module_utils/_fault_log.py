# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.

"""Reads faults of GPUs out of kernel messages, and finds out which GPU each is about.

A message counts for what it is only where its driver begins it, for its text may stand quoted in
another that any user can have the kernel print.

How messages find their GPU, best first: a PCI address in the message; the address in the driver's
own FSP dump, which also carries the instance number of the messages around it; the end of the same
attempt to start a GPU (`RmInitAdapter failed`), which names the address. The number in `GPU0` is
no index: the driver gives the lowest free one to a GPU while it starts it, and takes it back when
that fails, so four GPUs that fail one after another are all `GPU0` (gpumgrAllocGpuInstance). What
cannot be attributed stays so.

One failed attempt has one cause, the row of `KINDS` nearest to its top; the rest is evidence.
The last attempt decides, and loading the driver again makes what was before it history, but for
GPUs of virtual machines, which that driver does not touch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Union

from ansible_collections.gpuhost.inference.plugins.module_utils._fault_kinds import (
    BY_ID,
    PCIE_CLASSES,
    RANK,
    START_CLASSES,
    Kind,
    said,
    said_of_device,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._fault_lines import (
    BDF,
    SPEAKER,
    PcieLine,
    full_address,
    iommu_line,
    pcie_line,
    slot_of_stream,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._log_forms import Record
from ansible_collections.gpuhost.inference.plugins.module_utils._xids import (
    ADVICE,
    MMU_FAULT,
    START,
    Advice,
    advice,
    kind_of,
)

_ADDRESS = re.compile(rf"(?<![\w:])({BDF})(?![\w:])")
_DRM_ID = re.compile(r"\[GPU ID 0x([0-9a-f]{8})\]")
_CALLER = re.compile(r"\[ {0,9}[TC]\d{1,9}\] ?")
_DUMP = re.compile(rf"NVRM:?\s+(?:GPU\d{{1,4}}\s)?kfspDumpDebugState\w{{0,64}}: GPU ({BDF})")
_END = re.compile(
    rf"NVRM:?\s+GPU ({BDF}): RmInitAdapter failed! \(0x([0-9a-f]+):0x([0-9a-f]+):\d+\)",
    re.IGNORECASE,
)
_MINOR = re.compile(rf"NVRM:?\s+GPU ({BDF}): rm_init_adapter failed")
_NO_PROBE = re.compile(
    rf"nvidia(?: {BDF}: probe with driver nvidia|: probe of \S+) failed with error"
)
_STARTED = re.compile(
    rf"(?:nvidia {BDF}: )?\[drm\] Initialized nvidia-drm \S+ (?:\d+ )?for ({BDF}) on minor"
)
_LOADED = re.compile(r"NVRM:?\s+loading NVIDIA UNIX")
_XID = re.compile(rf"NVRM:?\s+(?:GPU\d{{1,4}}\s)?Xid \((?:PCI:)?({BDF})[^)]*\): (\d+)(.*)")
_XID_INSTANCE = re.compile(r"RPC response from GPU(\d{1,4}) GSP")
_ALL_ONES = re.compile(r"(?:Error status|Error code:|regvalue:) 0xffffffff\b", re.IGNORECASE)
_SIDE = re.compile(
    r"Possible bad register read|k[fg]sp\w{1,64}: |nvCheckOkFailedNoLog|nvAssert\w{0,32}Failed"
    r"|gspFmcSysmemOffset|the GPU (?:is likely|may be) in a bad state|note: VBIOS version"
)
_BRIDGE = re.compile(r"PCI bridge to \[bus ([0-9a-f]{2})(?:-([0-9a-f]{2}))?\]")
_ENUMERATED = re.compile(r"\[([0-9a-f]{4}:[0-9a-f]{4})\] .*class (0x[0-9a-f]+)")
_OUR_DRIVERS = re.compile(r"nvidia(?!-nvswitch)|nouveau|NovaCore")
VFIO_DRIVERS = ("vfio-pci", "nvgrace-gpu-vfio-pci")
_CARD = re.compile(rf"NVRM:?\s+The NVIDIA GPU ({BDF})")
_RESET = re.compile(r"(?:not )?ready (\d+)ms after ([^;]+)(?:; (waiting|giving up))?$")
# They tell something only next to a GPU that is lost, or did not come back from a reset
_HINT = re.compile(r"Invalid PCI ROM header sig|timed out waiting for pending transaction")
_HUNG = re.compile(r"INFO: task .{1,64}:\d+ blocked for more than \d+ seconds")
_REMOVING = re.compile(r"nv_pci_remove\w{0,64}\+0x[0-9a-f]+/")
_NO_FSP = re.compile(
    r"WaitForGfwBoot\w+_TU102|SanityCheckRegReadError_GM107|FWSEC|Booter|ksec2|SEC2 "
)
_HAS_FSP = re.compile(r"kfsp|SanityCheckRegReadError_GH100|kgsp\w+_GH100")
_LINKED = re.compile(r"RmInitAdapter: ")  # what an attempt prints right before its end
_CONTENDS = re.compile(r"nvCheckOkFailedNoLog")  # it may be an attempt, without a known cause

_OF_THE_DRIVER = (
    *START_CLASSES,
    *PCIE_CLASSES,
    "gpu_lost",
    "iommu_fault",
    "unbind_blocked",
    "xid",
)

EVIDENCE = 12  # lines kept for one fault
_QUOTED = 400  # characters of a line
_BLOCK_BITS = 24  # one fault address is kept for each 16 MiB, the size of the smallest large BAR
_BLOCKS = 1024
_HINTS = 3  # lines kept for a fault that may follow
_NEAR = 16  # messages within which the lines about one error on PCIe are
_REPORT = 64  # messages within which a port recovers from an error it announced
_MOMENT = 30.0  # seconds for which an instance number is the same GPU's
_LOOKED_AT = 4096  # characters of a message; the kernel's are below 2 KiB
_STACK = 64  # messages within which the stack of a task is


def quote(record: Record) -> str:
    """Return a line as evidence."""
    return record.line[:_QUOTED].strip()


@dataclass
class Seen:
    """One kind of fault of one GPU while the log is read, all repeats together."""

    kind: Kind
    first: Record
    last: Record
    attribution: str | None = None
    count: int = 0
    hour: str = ""  # of the last one
    hourly: int = 0  # in that hour so far
    peak: int = 0  # the most in one hour
    order: int = 0  # when the last one came, in messages
    current: bool = True
    reloaded: bool = False  # history only because the driver was loaded again
    no_fsp: bool = False  # the messages are of a chip without FSP
    evidence: list[str] = field(default_factory=list)
    places: dict[int, int] = field(default_factory=dict)  # fault addresses by block

    @property
    def counts(self) -> bool:
        """Whether it still makes the GPU ill."""
        return self.current and self.peak >= self.kind.flood

    def occur(self, record: Record, order: int) -> None:
        """Count one more occurrence."""
        hour = (record.wall or "").partition(":")[0]
        if record.seconds is not None:
            hour = str(int(record.seconds // 3600))
        self.hourly = self.hourly + 1 if hour == self.hour else 1
        self.hour, self.peak = hour, max(self.peak, self.hourly)
        self.count += 1
        self.last, self.order, self.current, self.reloaded = record, order, True, False
        self.add(record)

    def add(self, *records: Record) -> None:
        """Keep lines as evidence, each once."""
        for record in records:
            if len(self.evidence) == EVIDENCE:
                return
            line = quote(record)
            if line not in (quote(self.first), *self.evidence):
                self.evidence.append(line)


@dataclass
class Card:
    """What the log tells about one PCI address."""

    faults: dict[str, Seen] = field(default_factory=dict)  # the newest last
    driver: str | None = None  # as messages about it name it
    named: bool = False  # a driver for NVIDIA GPUs spoke of it
    started: Record | None = None  # the last attempt that went well
    started_order: int = 0
    cause: Seen | None = None  # since its last good start: explains failures, over reloads too
    no_fsp: bool = False
    application: Record | None = None  # an Xid 31, telling only next to an IOMMU fault
    advice: tuple[Advice, Record] | None = None  # an Xid 154
    hints: list[Record] = field(default_factory=list)

    def current(self, *classes: str) -> Seen | None:
        """Return the newest fault of these classes that still stands."""
        standing = [s for s in self.faults.values() if s.current and s.kind.class_ in classes]
        return standing[-1] if standing else None

    def drop(self, *names: str) -> None:
        """Make the faults of these classes, or with these ids, history."""
        for seen in self.faults.values():
            if seen.kind.class_ in names or seen.kind.id in names:
                seen.current = False

    def reload(self) -> None:
        """Make history what does not outlive the driver."""
        for seen in self.faults.values():
            if seen.counts and seen.kind.class_ in _OF_THE_DRIVER:
                seen.reloaded = True
        self.drop(*_OF_THE_DRIVER)


@dataclass
class _Attempt:
    """Messages of one attempt to start a GPU, until its end or the dump names the GPU."""

    hits: list[tuple[Kind, Record]] = field(default_factory=list)
    side: list[Record] = field(default_factory=list)
    address: str | None = None
    since_dump: int = 0  # index of the first hit after the last dump
    order: int = 0  # when the last of them came, in messages

    def says(self, pattern: re.Pattern[str]) -> bool:
        """Tell whether any of its messages matches."""
        messages = [*(record for _kind, record in self.hits), *self.side]
        return any(pattern.search(record.text) for record in messages)


_Key = Union[int, str, None]  # instance number, address, or "not told"


class Found:
    """Everything a log says, before it is compared with the GPUs of a host."""

    def __init__(self, starts: Mapping[str, float]) -> None:
        self._order = 0
        self._starts = sorted((at, address) for address, at in starts.items())
        self._timed = False
        self._forget()

    def _forget(self) -> None:
        """Begin anew: another boot."""
        self.boot_id: str | None = None
        self.cards: dict[str, Card] = {}
        self.devices: dict[str, tuple[str, str]] = {}  # address -> id, class
        self.buses: dict[str, tuple[int, int]] = {}  # bridge -> first and last bus below it
        self.strangers: set[str] = set()  # devices of other makers
        self.streams = Card()  # faults that tell bus, device and function, not the domain
        self.loose: list[Seen] = []  # unattributed
        self.loaded = 0  # when the driver was loaded last, in messages
        self.highest = 0  # instance number: at one time so many more GPUs than one were started
        self._pending: dict[_Key, _Attempt] = {}
        self._probe: list[tuple[Kind, Record]] = []
        self._instances: dict[int, tuple[str, int, Record]] = {}  # and when that was told
        self._ended: dict[str, Seen] = {}
        self._naming: str | None = None
        self._errors: dict[tuple[str, str], int] = {}  # device and kind -> when it was announced
        self._announced: dict[str, tuple[str, int]] = {}  # device -> by which port, and when
        self._reporting: str | None = None  # device whose error a port announced last
        self._last_error: tuple[int, Seen] | None = None
        self._severity: tuple[str, Record] | None = None  # of an error that the firmware saw
        self._event: Record | None = None  # of an Arm SMMU, whose words are to come
        self._stream: tuple[str, Record] | None = None
        self._hung: tuple[int, Record] | None = None  # when and which task

    def feed(self, record: Record) -> None:
        """Take in one message."""
        self._order += 1
        if record.seconds is not None:
            self._timed = True
            while self._starts and self._starts[0][0] < record.seconds:
                self._note_start()
        if record.begins_boot or (record.boot_id and self.boot_id not in (None, record.boot_id)):
            self._forget()
        self.boot_id = record.boot_id or self.boot_id
        caller = _CALLER.match(record.text) if record.text[:1] == "[" else None
        if caller or len(record.text) > _LOOKED_AT:
            start = caller.end() if caller else 0
            record = replace(record, text=record.text[start : start + _LOOKED_AT])
        speaker = SPEAKER.match(record.text)
        if speaker is None:
            return
        who = speaker.lastgroup
        if who == "nvrm":
            self._driver(record, speaker)
        elif who == "device":
            self._device(record, speaker)
        elif who == "iommu":
            self._iommu(record, speaker)
        elif who == "firmware":
            self._pcie(record, speaker)
        elif who in ("task", "stack"):
            self._hangs(record, speaker)
        elif not self._starts_well(record):
            self._other(record, speaker)

    def _driver(self, record: Record, speaker: re.Match[str]) -> None:
        """Take what NVIDIA's driver says."""
        if _LOADED.match(record.text):
            self._reload()
        elif not (self._xid(record) or self._start(record, speaker)):
            self._other(record, speaker)

    def _device(self, record: Record, speaker: re.Match[str]) -> None:
        """Take what the driver of a device says about it."""
        if self._enumerate(record.text, speaker) or self._supports(record, speaker):
            return
        self._driven(full_address(speaker["address"]), speaker["driver"])
        if not (
            self._reset(record, speaker)
            or self._iommu(record, speaker)
            or self._pcie(record, speaker)
            or self._starts_well(record)
        ):
            self._other(record, speaker)

    def card(self, address: str) -> Card:
        """Return what is known about an address."""
        return self.cards.setdefault(address, Card())

    def _reload(self) -> None:
        """The driver was loaded: its GPUs begin anew, but not those of other drivers."""
        self.finish()
        self.loaded = self._order
        self._instances.clear()
        self.streams.reload()
        for card in self.cards.values():
            if card.driver not in VFIO_DRIVERS:
                card.reload()
                card.started = card.advice = card.application = None
        for seen in self.loose:
            seen.current = False

    def settle_reload(self, address: str) -> None:
        """Take note that a GPU is the driver's, after all, that was loaded."""
        card = self.card(address)
        for seen in card.faults.values():
            if seen.order < self.loaded and seen.kind.class_ in _OF_THE_DRIVER:
                seen.current = False

    def _instance(self, speaker: re.Match[str]) -> int | None:
        """Return the number in `GPU0`, which is no index."""
        if speaker["instance"] is None:
            return None
        self.highest = max(self.highest, int(speaker["instance"]))
        return int(speaker["instance"])

    def _at_instance(self, instance: int, record: Record) -> str | None:
        """Return the GPU that has just been told to have this number; soon another may have it."""
        address, order, told = self._instances.get(instance, (None, 0, record))
        if self._order - order >= _NEAR:
            return None
        if told.seconds is None or record.seconds is None:
            return address
        return address if abs(record.seconds - told.seconds) <= _MOMENT else None

    def _enumerate(self, text: str, speaker: re.Match[str]) -> bool:
        if speaker["driver"] not in ("pci", "pcieport"):
            return False
        address = full_address(speaker["address"])
        found = _ENUMERATED.match(text, speaker.end()) if "] type 0" in text else None
        if found:
            self.devices[address] = (found[1], found[2])
        bridge = _BRIDGE.match(text, speaker.end())
        if bridge:
            self.buses[address] = (int(bridge[1], 16), int(bridge[2] or bridge[1], 16))
        return bool(found or bridge)

    def above(self, address: str) -> tuple[str, ...]:
        """Return the bridges above a device, as far as the log shows the buses."""
        domain, bus, _device = address.split(":")
        return tuple(
            bridge
            for bridge, (first, last) in self.buses.items()
            if bridge.startswith(f"{domain}:") and first <= int(bus, 16) <= last
        )

    def _fault(self, address: str | None, kind: Kind, record: Record, how: str) -> Seen:
        """Count one occurrence; while a GPU is lost, all else is a consequence of that."""
        card = Card(faults={s.kind.id: s for s in self.loose if s.current})
        if address is not None:
            card = self.card(address)
        lost = card.current("gpu_lost") if address else None
        # a port gives its link back, while the driver gives a GPU up for good
        taken = lost is not None and lost.kind.id == "link-contained" and kind.class_ == "gpu_lost"
        if lost is not None and lost.kind.id != kind.id and not taken:
            lost.add(record)
            lost.last = record
            return lost
        seen = card.faults.pop(kind.id, None) or Seen(kind, record, record)
        card.faults[kind.id] = seen
        seen.attribution = how if address else None
        seen.occur(record, self._order)
        if address is None:
            if seen.count == 1:
                self.loose.append(seen)
            return seen
        if kind.class_ in ("gpu_lost", "reset_failed"):
            seen.add(*card.hints)
            card.hints.clear()
        if kind.class_ == "gpu_lost":
            if lost is not None and lost is not seen:
                seen.add(lost.first)
                lost.current = False
            for class_ in ("reset_failed", "pcie_error"):  # the way to it, and what follows from it
                before = card.current(class_)
                if before is not None:
                    seen.add(before.first, before.last)
                    card.drop(class_)
            card.cause = seen
        return seen

    def _xid(self, record: Record) -> bool:
        found = _XID.match(record.text)
        if not found:
            return False
        address, number, rest = full_address(found[1]), int(found[2][:6]), found[3]
        card = self.card(address)
        card.named = True
        instance = _XID_INSTANCE.search(rest)
        if instance:
            self._instances[int(instance[1])] = (address, self._order, record)
            self.highest = max(self.highest, int(instance[1]))
        told = said(record.text) if number == START else None
        kind = kind_of(number, rest)
        if told is not None and told.phase == "start":  # only its text tells of the FSP
            self._hit(address, told, record)
        elif number == MMU_FAULT:
            card.application = record
        elif number == ADVICE:
            wanted = advice(rest)
            card.advice = None if wanted is None else (wanted, record)
        elif kind is not None:
            self._fault(address, kind, record, "line")
        return True

    def _iommu(self, record: Record, speaker: re.Match[str]) -> bool:
        line = iommu_line(record.text, speaker)
        if line is None:
            return False
        if line.what == "record":
            self._end_event()
            self._event = record
            return True
        if line.what == "word":
            if self._event is not None and line.stream is not None:
                self._stream = (slot_of_stream(line.stream), self._event)
            self._event = None
            return True
        if line.stream is not None:
            self._stray(slot_of_stream(line.stream), record)
            return True
        self._stream = None  # this line is about the same event, and names the device
        if not line.device:
            return True
        seen = self._fault(line.device, BY_ID[line.what], record, "line")
        if line.place is not None and len(seen.places) < _BLOCKS:
            seen.places.setdefault(line.place >> _BLOCK_BITS, line.place)
        return True

    def _end_event(self) -> None:
        """Book the event of an Arm SMMU that no further line gave a device's name."""
        if self._stream is not None:
            self._stray(*self._stream)
        self._stream = None

    def _stray(self, slot: str, record: Record) -> None:
        """Book a fault of a device in some PCI domain."""
        seen = self.streams.faults.setdefault(slot, Seen(BY_ID["iommu-fault"], record, record))
        seen.occur(record, self._order)

    def _pcie(self, record: Record, speaker: re.Match[str]) -> bool:
        line = pcie_line(record.text, speaker)
        if line is None:
            return False
        port = full_address(speaker["address"] or "")
        if line.what in BY_ID:
            self._error(line, record, port)
            if line.what == "link-contained" and line.value:
                self._error(PcieLine(line.what, line.value), record, port)
        elif line.what == "recovered":
            for address in {line.device, *self._reported_by(line.device)}:
                self.card(address).drop("pcie_error", "link-contained")
        elif line.what in ("failed", "unrecovered"):
            at, seen = self._last_error or (-_NEAR, None)
            if seen is not None and self._order - at < _NEAR:
                seen.add(record)
            elif line.what == "unrecovered":
                self._fault(line.device, BY_ID["pcie-unrecovered"], record, "line")
        else:
            self._described_error(line, record)
        return True

    def _reported_by(self, port: str) -> list[str]:
        """Return the devices whose errors a port has announced, or one above it for it."""
        return [
            device
            for device, (by, at) in self._announced.items()
            if self._order - at < _REPORT and (port == by or port in self.above(device))
        ]

    def _described_error(self, line: PcieLine, record: Record) -> None:
        """Take lines that only describe an error: how bad it is, of which device, who made it.

        The maker tells in logs that do not show the enumeration whether the device may be ours.
        """
        address = line.device or self._reporting
        if line.what == "severity":
            self._severity = (line.value, record) if line.value else None
        elif line.what == "vendor" and address and line.value != "10de":
            self.strangers.add(address)
        elif line.what == "reported":
            self._reporting = line.device
            if self._severity is not None:
                what, first = self._severity
                self._error(PcieLine(what, line.device), first, "").add(record)

    def _error(self, line: PcieLine, record: Record, port: str) -> Seen:
        """Book an error once, though a port announces it and the device has lines about it."""
        announced = self._errors.pop((line.device, line.what), -_NEAR)
        card = self.card(line.device)
        seen = card.faults.get(line.what) or card.current("gpu_lost")
        if line.detail and seen is not None and self._order - announced < _NEAR:
            seen.add(record)
        else:
            seen = self._fault(line.device, BY_ID[line.what], record, "line")
        if not line.detail:
            self._errors[line.device, line.what] = self._order
            self._announced[line.device] = (port, self._order)
            self._reporting = line.device
        self._last_error = (self._order, seen)
        return seen

    def _driven(self, address: str, driver: str) -> None:
        """Note the driver that a message about a device begins with."""
        card = self.card(address)
        card.driver = driver
        card.named = card.named or driver == "nvidia"

    def _reset(self, record: Record, speaker: re.Match[str]) -> bool:
        found = _RESET.match(record.text.rstrip(), speaker.end())
        if not found:
            return False
        address = full_address(speaker["address"])
        card = self.card(address)
        if found[3] == "giving up":
            waited = card.faults.pop("reset-waiting", None)
            seen = self._fault(address, BY_ID["reset-gave-up"], record, "line")
            if waited is not None and seen.kind.id == "reset-gave-up":
                seen.add(waited.first)
        elif found[3] == "waiting":
            self._fault(address, BY_ID["reset-waiting"], record, "line")
        else:
            card.drop("reset_failed")
        return True

    def _start(self, record: Record, speaker: re.Match[str]) -> bool:
        """Follow the attempts to start a GPU."""
        text = record.text
        end, minor, dump = _END.match(text), _MINOR.match(text), _DUMP.match(text)
        if end:
            self._close(full_address(end[1]), record, int(end[2], 16), int(end[3], 16))
        elif minor:
            ended = self._ended.pop(full_address(minor[1]), None)
            if ended is None:
                self._close(full_address(minor[1]), record)
            else:
                ended.add(record)
        elif dump:
            self._dump(full_address(dump[1]), record, speaker)
        return bool(end or minor or dump)

    def _starts_well(self, record: Record) -> bool:
        """Take the message that a GPU was started."""
        found = _STARTED.match(record.text)
        if found:
            self._started(full_address(found[1]), record)
        return found is not None

    def _started(self, address: str, record: Record) -> None:
        card = self.card(address)
        card.named, card.started, card.cause = True, record, None
        card.started_order = self._order
        card.drop(*START_CLASSES, "gpu_lost", "reset_failed")
        for seen in card.faults.values():
            seen.reloaded = False

    def _note_start(self) -> None:
        """Take a start that is not in the log."""
        seconds, address = self._starts.pop(0)
        text = f"gpu_reset started GPU {address}, as it wrote down"
        record = Record("record", text, f"[{seconds:12.6f}] {text}", seconds)
        self._started(address, record)

    def finish_starts(self) -> None:
        """Take the starts after the last message; without times nobody knows what was first."""
        self._order += 1
        while self._starts and self._timed:
            self._note_start()

    def _other(self, record: Record, speaker: re.Match[str]) -> None:
        """Take rows of the table, and lines that only support them."""
        text, who = record.text, speaker.lastgroup
        address = full_address(speaker["address"]) if who == "device" else _address(text)
        ours = who == "nvrm" or _OUR_DRIVERS.search(text if who == "drm" else text[:64])
        if address and ours and (who != "device" or _OUR_DRIVERS.match(text)):
            self.card(address).named = True
        kind = said_of_device(text, speaker.end()) if who != "nvrm" else said(text)
        if who == "nvrm":
            self._naming = address if _CARD.match(text) else self._naming
            if address and "Continuing with GPU removal" in text:
                self.card(address).drop("unbind_blocked")
        if address and _NO_PROBE.match(text):
            for cause, hit in self._probe:
                self._fault(address, cause, hit, "attempt").add(record)
            self._probe = []
        elif kind is None:
            if who == "nvrm" and _SIDE.search(text):
                self._support(record, speaker)
        elif kind.phase == "start":
            self._hit(address or self._instance(speaker), kind, record)
        elif kind.phase == "probe":
            self._probe.append((kind, record))
        else:
            instance = self._instance(speaker)
            if address is None and kind.id == "fallen-off-bus":
                address, self._naming = self._naming, None
            if address is None and instance is not None:
                address = self._at_instance(instance, record)
            self._fault(address, kind, record, "line")

    def _supports(self, record: Record, speaker: re.Match[str]) -> bool:
        """Take lines about a device that alone say nothing."""
        if not _HINT.match(record.text, speaker.end()):
            return False
        self._hint(full_address(speaker["address"]), record)
        return True

    def _hint(self, address: str, record: Record) -> None:
        """Keep a line that supports a loss or a failed reset, before it or after."""
        card = self.card(address)
        standing = card.current("gpu_lost", "reset_failed")
        if standing is not None:
            standing.add(record)
        elif len(card.hints) < _HINTS:
            card.hints.append(record)

    def _hangs(self, record: Record, speaker: re.Match[str]) -> None:
        """Take a task that hangs in the driver's removal of a GPU; its stack does not say which."""
        if _HUNG.match(record.text):
            self._hung = (self._order, record)
            return
        if not _REMOVING.match(record.text, speaker.end()):
            return
        at, first = self._hung or (-_STACK, record)
        if self._order - at < _STACK:
            waiting = [card.current("unbind_blocked") for card in self.cards.values()]
            known = [seen for seen in waiting if seen is not None]
            seen = known[0] if len(known) == 1 else None
            if seen is None:
                seen = self._fault(None, BY_ID["unbind-hung"], first, "")
            seen.add(first, record)
        self._hung = None

    def _hit(self, key: _Key, kind: Kind, record: Record) -> None:
        attempt = self._pending.setdefault(key, _Attempt())
        attempt.address = key if isinstance(key, str) else attempt.address
        if not any(kind.id == known.id for known, _record in attempt.hits[attempt.since_dump :]):
            attempt.hits.append((kind, record))
        attempt.order = self._order

    def _support(self, record: Record, speaker: re.Match[str]) -> None:
        attempt = self._pending.setdefault(self._instance(speaker), _Attempt())
        if len(attempt.side) < EVIDENCE:
            attempt.side.append(record)

    def _dump(self, address: str, record: Record, speaker: re.Match[str]) -> None:
        """Bind the attempt of this instance to the address that the driver's dump names."""
        instance = self._instance(speaker)
        self.card(address).named = True
        attempt = self._pending.setdefault(instance, _Attempt())
        if attempt.address not in (None, address):
            # the end of the attempt before is missing: what came since its dump is another GPU's
            fresh = _Attempt(hits=attempt.hits[attempt.since_dump :], order=attempt.order)
            del attempt.hits[attempt.since_dump :]
            self._settle(attempt.address, "dump", attempt)
            self._pending[instance] = attempt = fresh
        attempt.address = address
        attempt.since_dump = len(attempt.hits)
        attempt.side.append(record)

    def _close(self, address: str, record: Record, step: int = 0, status: int = 0) -> None:
        """End an attempt: what is pending belongs to this address, unless that is not certain.

        The codes are the driver's own init step and an NV_STATUS (RmInitAdapter in osinit.c).
        """
        self.card(address).named = True
        joined = _Attempt(order=self._order)
        for key in self._belonging(address):
            attempt = self._pending.pop(key)
            joined.hits += attempt.hits
            joined.side += attempt.side
        cause = "start-failed"
        if status == 0x0F:  # NV_ERR_GPU_IS_LOST
            cause = "lost-at-start"
        elif step in (0x60, 0x61):  # firmware policy, firmware fetch
            cause = "firmware-not-loaded"
        joined.hits.append((BY_ID[cause], record))
        seen = self._settle(address, "attempt", joined)
        if seen is not None and step:
            self._ended[address] = seen  # its second line, rm_init_adapter failed, will follow
        self._instances = {n: at for n, at in self._instances.items() if at[0] != address}

    def _belonging(self, address: str) -> list[_Key]:
        """Return the keys of what is pending for an attempt of this GPU that has just ended."""
        bound = [key for key, attempt in self._pending.items() if attempt.address == address]
        free = [key for key, attempt in self._pending.items() if attempt.address is None]
        telling = [k for k in free if self._pending[k].hits or self._pending[k].says(_CONTENDS)]
        linked = [key for key in telling if self._pending[key].says(_LINKED)]
        if any(isinstance(key, int) for key in bound):
            telling = []
        elif len(linked) == 1:  # and what came without a number: starts do not overlap
            telling = [key for key in telling if key in (*linked, None)]
        numbered = [key for key in telling if key is not None]
        if len(numbered) > 1:  # two instances at once: do not guess
            for key in telling:
                self._settle(None, "", self._pending.pop(key))
            telling = []
        if not telling and len(free) == 1:
            telling = free if not self._pending[free[0]].hits else []
        return [*bound, *telling]

    def _settle(self, address: str | None, how: str, attempt: _Attempt) -> Seen | None:
        """Find the one cause of an attempt and book it; the rest becomes its evidence."""
        if not attempt.hits:
            return None
        kind, record = min(attempt.hits, key=lambda hit: RANK[hit[0].id])
        no_fsp = attempt.says(_NO_FSP)
        if kind.id == "fsp-gfw-boot" and (no_fsp or not attempt.says(_HAS_FSP)):
            kind = BY_ID["gfw-boot"]
        if kind.class_ != "gpu_lost" and attempt.says(_ALL_ONES):
            kind = BY_ID["all-ones"]
        card = self.card(address) if address else Card()
        card.no_fsp = card.no_fsp or no_fsp
        standing = card.current(*START_CLASSES)
        lost = card.cause if card.cause and card.cause.kind.class_ == "gpu_lost" else None
        card.drop(*START_CLASSES)
        if lost is not None:  # a GPU that fell off the bus cannot start
            seen, lost.current = lost, True
        else:
            if kind.id == "wpr2-already-up":
                standing = standing or card.cause
            if kind.vague and standing is not None:  # again, without telling a cause of its own
                kind = standing.kind
            seen = self._fault(address, kind, record, how)
        card.cause, seen.no_fsp, seen.order = seen, no_fsp, attempt.order
        seen.add(*(hit for _kind, hit in attempt.hits), *attempt.side)
        return seen

    def finish(self) -> None:
        """End of the log, or of what counts: settle what is still pending."""
        self._end_event()
        pending, self._pending = self._pending, {}
        for attempt in pending.values():
            self._settle(attempt.address, "dump", attempt)
        for kind, record in self._probe:
            self._fault(None, kind, record, "")
        self._probe = []

    def claim(self, address: str) -> None:
        """Give all unattributed faults to one GPU, for when it is the only one there is."""
        card = self.card(address)
        for seen in self.loose:
            lost = card.current("gpu_lost")
            if lost is not None:
                lost.add(seen.first)
                continue
            card.no_fsp = card.no_fsp or seen.no_fsp
            seen.attribution = "only-gpu"
            if seen.kind.class_ in START_CLASSES and seen.current:
                known = [s for s in card.faults.values() if s.kind.class_ in START_CLASSES]
                if max([card.started_order, *(s.order for s in known)]) > seen.order:
                    seen.current = False  # not its last attempt
                else:
                    card.drop(*START_CLASSES)
            alike = card.faults.pop(seen.kind.id, None)
            if alike is not None:
                seen.count += alike.count
                seen.peak = max(seen.peak, alike.peak)
                seen.first = alike.first
            card.faults[seen.kind.id] = seen
        self.loose = []

    def named(self, address: str) -> bool:
        """Tell whether a driver for NVIDIA GPUs spoke of this address."""
        return address in self.cards and self.cards[address].named

    def started_since(self, address: str, seen: Seen) -> bool:
        """Tell whether this GPU started well after a fault."""
        return address in self.cards and self.cards[address].started_order > seen.order


def collect(records: Iterable[Record], starts: Mapping[str, float] | None = None) -> Found:
    """Read all records once; memory grows with the kinds of faults, not with the log.

    Args:
        records: of the log.
        starts: when GPUs started well that is not in the log, in seconds after the boot.
    """
    found = Found(starts or {})
    for record in records:
        found.feed(record)
    found.finish()
    found.finish_starts()
    return found


def _address(text: str) -> str | None:
    found = _ADDRESS.search(text)
    if found:
        return full_address(found[1])
    found = _DRM_ID.search(text)
    if found:  # domain, bus and device in one number
        number = found[1]
        return f"{number[:4]}:{number[4:6]}:{number[6:]}.0"
    return None
