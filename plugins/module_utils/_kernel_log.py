# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.

"""Kernel log records out of the journal, the kernel's ring buffer, or a saved log in any form.

Nothing here knows what a fault is. A log is read once, as a stream: lines that cannot matter are
dropped by a search for a few words, the others become `Record`s, and on the way it is noted
whether anything is missing, because "no fault was seen" is worth nothing in a log with holes.
"""

from __future__ import annotations

import contextlib
import errno
import heapq
import json
import os
import re
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Callable

from ansible_collections.gpuhost.inference.plugins.module_utils._command import stream
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader

# A line without any of these words holds nothing that anybody here looks for. The last one keeps
# journal messages that are no UTF-8: there the text is an array of numbers.
WORDS = (
    b"NVRM",
    b"nvidia",
    b"NovaCore",
    b"nouveau",
    b"AMD-Vi",
    b"DMAR",
    b"smmu",
    b"vfio",
    b"ms after",
    b"power state",
    b"] type 0",
    b"PCI bridge to",
    b"AER: ",
    b"PCIe Bus Error",
    b"DPC: containment",
    b"error status/mask",
    b"}[Hardware Error]",
    b"PCI ROM header",
    b"pending transaction",
    b"blocked for more than",
    b"Linux version",
    b"Memory Encryption",
    b"callbacks suppressed",
    b"messages dropped",
    b"kernel messages",
    b"buffer overrun",
    b'"MESSAGE":[',
)
_BLOCK = 1 << 16
_LONGEST_LINE = 1 << 20
_JOURNALD = "journald"  # source of its notes about lost messages; never yielded
_MERGE_WINDOW = 4096  # records; two readers of one ring disagree about order by far less

_KMSG = re.compile(r"(?P<prefix>\d+),\d+,(?P<micros>\d+),[^;]*;(?P<text>.*)", re.DOTALL)
_ESCAPED = re.compile(rb"\\x([0-9a-f]{2})")
_PREFIX = re.compile(
    r"""
    (?:<(?P<level>\d{1,4})>)?                                     # dmesg --raw
    (?:(?:\S+:[ ])?                                               # a remote host's address
       (?P<facility>kern|user|mail|daemon|auth|authpriv|syslog|cron|local[0-7])
       [ ]*:[ ]*\w+[ ]*:[ ]*(?=[\[\d]))?                          # dmesg --decode
    (?: \[[ ]*(?:(?P<seconds>\d{1,12}\.\d{1,9})(?:[ ]*<[^>]*>)?
                |(?P<bracket>\w{3}[ ]\w{3}[ ][^\]]*|\d{4}-[^\]]*))\]:?[ ]?
      | (?P<stamp>(?:(?:[A-Z][a-z]{2}[ ])?\d{4}-\d\d-\d\d[T ]|[A-Z][a-z]{2}[ ][ \d]\d[ ])?
         \d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[ ]UTC|[+-]\d\d:?\d\d)?)[ ])?
    (?:[ ]*\[[ ]*[TC]\d+\][ ]?)?                                  # the caller: thread or CPU
    """,
    re.VERBOSE,
)
_BY_KERNEL = re.compile(r"\S+ kernel: ?(?:\[ *(?P<seconds>\d{1,12}\.\d{1,9})\] ?)?")
_BY_PROCESS = re.compile(r"(?:[^\s:]+ )?[\w@./-]+\[\d+\]: ")
_BY_PROGRAM = re.compile(r"(?!NVRM )[^\s:]+ [\w@./-]+: ")

_LOST = re.compile(
    r"(?:printk )?messages dropped|Missed \d+ kernel messages|buffer overrun|event log overflow"
    r"|dmar_fault: \d+ callbacks suppressed"  # one limit for all devices: any may be hidden
)
_NOTED = (
    "Linux version ",
    "messages dropped",
    "kernel messages",
    "buffer overrun",
    "log overflow",
    "callbacks suppressed",
    "Rate limiting",
)
_SUPPRESSED = re.compile(
    r"((?:amd_iommu|arm_smmu|iommu|nv|rm)\w*): (\d+) callbacks suppressed|Rate limiting GSP RPC"
)


@dataclass(frozen=True)
class Record:
    """One message of the kernel.

    Attributes:
        source: `journal`, `dmesg` or `file`.
        text: the message without time stamp, level or host name.
        line: the line to quote as evidence.
        seconds: time since boot, `None` when the form has none.
        wall: time of day as the source writes it (UTC in ISO form out of the journal), or `None`.
        boot_id: 32 hexadecimal digits, `None` when the form has none.
    """

    source: str
    text: str
    line: str
    seconds: float | None = None
    wall: str | None = None
    boot_id: str | None = None

    @property
    def time(self) -> str | None:
        """The best time known, as text: time of day, else seconds since boot."""
        return self.wall or (None if self.seconds is None else f"{self.seconds:.6f}")


@dataclass(frozen=True)
class SourceState:
    """How reading one source went; `error` is `None` when it could be read."""

    name: str
    error: str | None
    lines: int
    complete: bool


@dataclass(frozen=True)
class LogSummary:
    """What is known about a log as a whole.

    Attributes:
        sources: every source that was asked for.
        boot_id: the boot it is about, `None` when the log does not say.
        complete: one source holds every message since the boot began.
        gaps: sentences about what is missing or only a lower bound.
        first: time of the first message.
        last: time of the last message.
        lines: lines looked at, in all sources.
    """

    sources: list[SourceState] = field(default_factory=list)
    boot_id: str | None = None
    complete: bool = False
    gaps: list[str] = field(default_factory=list)
    first: str | None = None
    last: str | None = None
    lines: int = 0

    @property
    def readable(self) -> bool:
        """Whether any source could be read at all."""
        return any(source.error is None for source in self.sources)


def _unescape(text: str) -> str:
    """Undo the escapes of /dev/kmsg, a backslash, `x` and two digits (kernel/printk/printk.c)."""
    if "\\x" not in text:
        return text
    data = _ESCAPED.sub(lambda found: bytes([int(found[1], 16)]), text.encode("utf-8", "replace"))
    return data.decode("utf-8", "replace")


def _from_journal(line: str, source: str) -> Record | None:
    """Take one object of `journalctl -o json`; fields as in systemd.journal-fields(7)."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(entry, dict):
        return None

    def number(key: str) -> int | None:
        value = str(entry.get(key, ""))
        return int(value) if value.isdecimal() and len(value) < 17 else None

    message = entry.get("MESSAGE")
    if isinstance(message, list):
        numbers = [n for n in message if isinstance(n, int) and 0 <= n < 256]
        message = bytes(numbers).decode("utf-8", "replace")
    by_kernel = entry.get("SYSLOG_IDENTIFIER", "kernel") == "kernel"
    by_journald = entry.get("_TRANSPORT") == "driver"  # its own notes, of what it has lost
    if not isinstance(message, str) or not (by_kernel or by_journald):
        return None
    # the ring's own stamp: equal, to the microsecond, to the one in /dev/kmsg
    micros = number("_SOURCE_MONOTONIC_TIMESTAMP")
    micros = number("__MONOTONIC_TIMESTAMP") if micros is None else micros
    seconds = None if micros is None else micros / 1e6
    real = number("_SOURCE_REALTIME_TIMESTAMP") or number("__REALTIME_TIMESTAMP")
    wall = None
    with contextlib.suppress(OverflowError):
        if real is not None:
            at = datetime.fromtimestamp(0, timezone.utc) + timedelta(microseconds=real)
            wall = at.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    boot_id = entry.get("_BOOT_ID")
    return Record(
        source if by_kernel else _JOURNALD,
        message,
        message if seconds is None else f"[{seconds:12.6f}] {message}",
        seconds,
        wall,
        boot_id if isinstance(boot_id, str) else None,
    )


def _from_kmsg(found: re.Match[str], source: str) -> Record | None:
    """Take one record of /dev/kmsg; see Documentation/ABI/testing/dev-kmsg."""
    if int(found["prefix"][:9]) >> 3:  # the facility: a program wrote it into /dev/kmsg
        return None
    seconds = int(found["micros"][:17]) / 1e6
    text = _unescape(found["text"])
    return Record(source, text, f"[{seconds:12.6f}] {text}", seconds)


def parse(line: str, source: str = "file") -> Record | None:
    """Take one line apart, whatever wrote it: dmesg, journalctl, /dev/kmsg, syslog, or nothing.

    Returns:
        The record, or `None` for an empty line and for a message that is not the kernel's: a
        program that quotes a kernel message in the journal must not count.
    """
    line = line.rstrip("\r\n\0 ")
    if line.startswith("{"):
        return _from_journal(line, source)
    record = _KMSG.match(line)
    if record:
        return _from_kmsg(record, source)
    prefix = _PREFIX.match(line)
    if prefix is None:  # cannot be: every part of it is optional
        return None
    rest = line[prefix.end() :]
    seconds, stamp = prefix["seconds"], prefix["stamp"]
    # behind a stamp with a date, syslog's forms have a host name and a program; dmesg's ISO form
    # is told by its comma
    syslog = stamp is not None and "," not in stamp and len(stamp) > len("hh:mm:ss.000")
    by_others = int(prefix["level"] or 0) >> 3 or prefix["facility"] not in (None, "kern")
    by_kernel = _BY_KERNEL.match(rest)
    if by_kernel:
        rest = rest[by_kernel.end() :]
        seconds = by_kernel["seconds"] or seconds
    elif "systemd-journald[" in rest[:200]:
        source = _JOURNALD
    elif _BY_PROCESS.match(rest) or (syslog and _BY_PROGRAM.match(rest)):
        by_others = True
    if by_others or not rest.strip():
        return None
    wall = prefix["bracket"] or stamp
    return Record(source, rest, line, float(seconds) if seconds else None, wall)


class Source:
    """One source of records, read once as a stream of blocks of bytes."""

    def __init__(
        self, name: str, blocks: Callable[[], Iterable[bytes]], boot_id: str | None = None
    ) -> None:
        self.name = name
        self.error: str | None = None
        self.lines = 0
        self.boot_id = boot_id
        self.first: Record | None = None
        self._blocks = blocks
        self._kmsg: bool | None = None
        self._sequence: int | None = None
        self._last = b""
        self._begins = False
        self._lost: Counter[str] = Counter()
        self._suppressed: Counter[str] = Counter()

    @property
    def complete(self) -> bool:
        """Whether it begins where the boot began and nothing was lost since."""
        return self.error is None and self._begins and not self._lost

    @property
    def last(self) -> Record | None:
        """The last message with a time."""
        return parse(self._last.decode("utf-8", "replace"), self.name)

    def gaps(self) -> list[str]:
        """Say what is missing, one sentence each."""
        said = []
        if self.error is not None:
            said.append(f"{self.name}: {self.error}")
        if not self._begins and self.lines:
            said.append(
                f"{self.name}: the first messages of the boot are missing (no 'Linux version')"
            )
        said += [f"{self.name}: {what} ({n} times)" for what, n in sorted(self._lost.items())]
        said += [
            f"{self.name}: {what} kept back {n} messages: counts are lower bounds"
            for what, n in sorted(self._suppressed.items())
        ]
        return said

    def __iter__(self) -> Iterator[Record]:
        rest = b""
        try:
            for block in self._blocks():
                joined = rest + block
                end = joined.rfind(b"\n") + 1
                if not end and len(joined) > _LONGEST_LINE:
                    end = len(joined)
                whole, rest = joined[:end], joined[end:]
                if whole:
                    yield from self._scan(whole)
        except GpuHostError as error:
            self.error = str(error)
        if rest:
            yield from self._scan(rest)
        if not self.lines and self.error is None:
            self.error = "it holds no kernel messages"

    def _scan(self, whole: bytes) -> Iterator[Record]:
        """Turn whole lines into records; most blocks of a long log hold no word and cost little."""
        self.lines += whole.count(b"\n") or 1
        self._last = whole.rstrip().rpartition(b"\n")[2] or self._last
        if self._kmsg is None:
            self._kmsg = _KMSG.match(whole[:4096].decode("ascii", "replace")) is not None
        if self.first is None:
            heads = (parse(head.decode("utf-8", "replace")) for head in whole[:4096].split(b"\n"))
            self.first = next((head for head in heads if head and head.time), None)
        if self._kmsg:
            self.lines -= whole.count(b"\n ")  # KEY=value lines of a record
            for line in whole.split(b"\n"):
                self._follow(line)
        for line in _promising(whole):
            record = parse(line.decode("utf-8", "replace"), self.name)
            if record is None:
                continue
            if record.boot_id not in (None, self.boot_id):
                self._begin(record)
            if any(word in record.text for word in _NOTED):
                self._note(record)
            if record.source != _JOURNALD:
                yield record

    def _follow(self, line: bytes) -> None:
        """Follow the sequence numbers of /dev/kmsg: a jump tells how many records were lost."""
        fields = line[:64].split(b",", 2)
        if line.startswith(b" ") or len(fields) < 3 or not fields[1].isdigit():
            return  # a continuation line of a record
        sequence = int(fields[1])
        if self._sequence is None or sequence < self._sequence:
            self._lost.clear()
            self._begins = sequence == 0
        elif sequence > self._sequence + 1:
            self._lost["records missing by their sequence number"] += sequence - self._sequence - 1
        self._sequence = sequence

    def _begin(self, record: Record) -> None:
        """Start anew with another boot: only the last one in a log counts."""
        if not self._kmsg:  # there the sequence numbers tell
            self._lost.clear()
            self._suppressed.clear()
        self._begins = "Linux version " in record.text
        self.boot_id = record.boot_id or self.boot_id

    def _note(self, record: Record) -> None:
        """Note where a boot begins, and what the log says about its own gaps."""
        if "Linux version " in record.text:
            self._begin(record)
        found = _LOST.search(record.text)
        if found:
            self._lost[re.sub(r"\d+", "N", found[0])] += 1
        found = _SUPPRESSED.search(record.text)
        if found:
            self._suppressed[found[1] or "the driver"] += int((found[2] or "1")[:12])


def _promising(whole: bytes) -> Iterator[bytes]:
    """Yield the lines with any of `WORDS`, in order; searching blocks is faster than lines."""
    starts: dict[int, int] = {}
    for word in WORDS:
        at = whole.find(word)
        while at >= 0:
            start, end = whole.rfind(b"\n", 0, at) + 1, whole.find(b"\n", at)
            starts[start] = end = len(whole) if end < 0 else end
            at = whole.find(word, end)
    for start in sorted(starts):
        yield whole[start : starts[start]]


class KernelLog:
    """Records of all sources in order, each once; afterwards `summary` tells what was missing."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self.sources = list(sources)

    def __iter__(self) -> Iterator[Record]:
        if len(self.sources) == 1:
            yield from self.sources[0]
            return
        seen: OrderedDict[tuple[int, str], Counter[str]] = OrderedDict()
        for record in heapq.merge(*self.sources, key=lambda record: record.seconds or 0.0):
            # Both copy one ring with its stamps. A line that is there n times in one and m times
            # in the other was printed max(n, m) times.
            key = (round((record.seconds or 0.0) * 1e6), record.text)
            times = seen.setdefault(key, Counter())
            known = max(times.values(), default=0)
            times[record.source] += 1
            if times[record.source] > known:
                yield record
            if len(seen) > _MERGE_WINDOW:
                seen.popitem(last=False)

    def summary(self) -> LogSummary:
        """Sum up; only true after all records were taken."""
        read = [source for source in self.sources if source.error is None]
        firsts = [source.first for source in read if source.first]
        lasts = [last for last in (source.last for source in read) if last and last.time]
        return LogSummary(
            sources=[
                SourceState(source.name, source.error, source.lines, source.complete)
                for source in self.sources
            ],
            boot_id=next((source.boot_id for source in read if source.boot_id), None),
            complete=any(source.complete for source in read),
            gaps=[gap for source in self.sources for gap in source.gaps()],
            first=min(firsts, key=lambda r: r.seconds or 0.0).time if firsts else None,
            last=max(lasts, key=lambda r: r.seconds or 0.0).time if lasts else None,
            lines=sum(source.lines for source in self.sources),
        )


def this_boot(host: Reader) -> str | None:
    """Return the id of the running boot as the journal writes it."""
    text = host.text("/proc/sys/kernel/random/boot_id")
    return None if text is None else text.replace("-", "")


Runner = Callable[[Sequence[str], float], Iterable[bytes]]


def _kmsg_blocks(path: str, timeout: float) -> Iterator[bytes]:
    """Read the ring from its oldest record to now (Documentation/ABI/testing/dev-kmsg)."""
    try:
        ring = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        raise GpuHostError(f"{path} cannot be opened: {error.strerror}") from error
    end = time.monotonic() + timeout
    try:
        while time.monotonic() < end:
            try:
                record = os.read(ring, 1 << 14)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno == errno.EPIPE:  # overwritten while we read: the numbers will tell
                    continue
                raise GpuHostError(f"{path} cannot be read: {error.strerror}") from error
            if not record:
                return
            yield record
        raise GpuHostError(f"{path} was written faster than it could be read for {timeout:g} s")
    finally:
        os.close(ring)


def read_live(
    sources: Sequence[str] = ("journal", "dmesg"),
    *,
    boot: str = "current",
    timeout: float = 30.0,
    run: Runner = stream,
    kmsg: str = "/dev/kmsg",
) -> KernelLog:
    """Read this host's kernel log.

    Args:
        sources: `journal` (journalctl) and `dmesg` (/dev/kmsg, which has sequence numbers).
        boot: `current`, or what `journalctl --boot` takes: an offset such as `-1`, or a boot id.
            The ring only holds the current boot, so for others it is left out.
        timeout: seconds for each source.
        run: runs journalctl; for tests.
        kmsg: the ring's device; for tests.

    Raises:
        GpuHostError: the ring alone was asked for another boot than the current one.
    """
    offset = "0" if boot == "current" else boot
    fields = "MESSAGE,SYSLOG_IDENTIFIER,_TRANSPORT,_SOURCE_MONOTONIC_TIMESTAMP"
    command = ["journalctl", "--no-pager", "--quiet", f"--boot={offset}", "--output=json"]
    command += [f"--output-fields={fields}", "_TRANSPORT=kernel", "+", "_TRANSPORT=driver"]
    made = []
    if "journal" in sources:
        made.append(Source("journal", lambda: run(command, timeout)))
    if "dmesg" in sources and offset == "0":
        boot_id = this_boot(Reader())
        made.append(Source("dmesg", lambda: _kmsg_blocks(kmsg, timeout), boot_id))
    if not made:
        raise GpuHostError(
            f"boot {boot} is only in the journal, not in the kernel's ring buffer: "
            "add 'journal' to the sources"
        )
    return KernelLog(made)


def read_since(host: Reader, seconds: float) -> KernelLog:
    """Read what a host's kernel logged since `seconds` after its start, from its ring."""
    ring = str(host.root / "dev/kmsg")
    return KernelLog([Source("dmesg", lambda: _kmsg_since(ring, seconds))])


def _kmsg_since(ring: str, seconds: float) -> Iterator[bytes]:
    """Leave out older records by their stamp: `priority,number,microseconds,flags;text`."""
    for record in _kmsg_blocks(ring, 30.0):
        fields = record.split(b",", 3)
        if len(fields) == 4 and fields[2].isdigit() and int(fields[2]) / 1e6 >= seconds:
            yield record


def read_file(path: str) -> KernelLog:
    """Read a saved log in any form; memory does not grow with the file.

    Raises:
        GpuHostError: it cannot be opened.
    """
    try:
        file = Path(path).open("rb")  # noqa: SIM115
    except OSError as error:
        raise GpuHostError(f"{path} cannot be read: {error.strerror}") from error

    def blocks() -> Iterator[bytes]:
        with file:
            yield from iter(lambda: file.read(_BLOCK), b"")

    return KernelLog([Source("file", blocks)])


def read_blocks(blocks: Iterable[bytes]) -> KernelLog:
    """Read a log that is already at hand, as blocks of bytes cut anywhere."""
    return KernelLog([Source("file", lambda: blocks)])
