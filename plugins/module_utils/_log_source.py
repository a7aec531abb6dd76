# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.

"""One source of kernel messages, read once as a stream, and what is missing in it.

Nothing here knows what a fault is. Lines that cannot matter are dropped by a search for a few
words, the others become `Record`s, and on the way it is noted whether anything is missing,
because "no fault was seen" is worth nothing in a log with holes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Callable

from ansible_collections.gpuhost.inference.plugins.module_utils._command import CommandError
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from ansible_collections.gpuhost.inference.plugins.module_utils._log_forms import (
    JOURNALD,
    KMSG_LINE,
    Record,
    parse,
    parse_further,
)

# A line without any of these words holds nothing that anybody here looks for. The last one keeps
# messages of a journal in JSON that are no UTF-8: there the text is an array of numbers.
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
    b"-- Boot ",
    b"-- Reboot --",
    b"Memory Encryption",
    b"callbacks suppressed",
    b"messages dropped",
    b"kernel messages",
    b"buffer overrun",
    b'"MESSAGE":[',
)
NUMBERS = WORDS[-1]
_LONGEST_LINE = 1 << 20  # the kernel's are below 2 KiB, journald's below 48 KiB
# Characters of a message; the kernel's have 1 KiB at most (PRINTKRB_RECORD_MAX in kernel/printk).
# The time that patterns take may grow with the square of it.
_LONGEST_TEXT = 2048
_OVERLAP = max(map(len, WORDS))
_HEAD = 4096
_BACK = 30.0  # seconds; stamps of two CPUs differ by far less, boots mostly by far more

_LOST = re.compile(
    r"(?:printk )?messages dropped|Missed \d+ kernel messages|buffer overrun|event log overflow"
    # one limit for all devices: any may be hidden
    r"|(?:dmar_fault|(?:arm|nvidia|qcom)_smmu_\w+): \d+ callbacks suppressed"
)
# Blocks without any of these hold no message that tells of boots or gaps, unless they hide it
_NOTED = (
    b"Linux version ",
    b"-- Boot ",
    b"-- Reboot --",
    b"messages dropped",
    b"kernel messages",
    b"buffer overrun",
    b"log overflow",
    b"callbacks suppressed",
    b"Rate limiting",
    NUMBERS,
    b"\x1b",  # of a colour
    b"\0",
)
_SUPPRESSED = re.compile(
    r"((?:amd_iommu|iommu|nv(?!idia_smmu)|rm)\w*): (\d+) callbacks suppressed|Rate limiting GSP RPC"
)


_GAP_NUMBERS = "records missing by their sequence number"
_GAP_LONG = "a line of more than 1 MiB, of which the rest was left out"
_GAP_TEXT = f"a message of more than {_LONGEST_TEXT} characters, of which the rest was left out"
_GAP_ZEROS = "bytes of zero, as after a power cut: what was to be written there is missing"
_GAP_BACK = "the time goes back, and no boot begins there"
_GAP_MIXED = "records of /dev/kmsg after other lines: their sequence numbers tell nothing"


def grep_pattern(words: Iterable[bytes]) -> str:
    """Return an extended regular expression that finds any of the words, for grep."""
    return "|".join(map(_escaped, sorted(word.decode() for word in words)))


def pcre_pattern(words: Iterable[bytes]) -> str:
    """Return an expression for journalctl, whose engine tries one alternative after the other."""
    groups = groupby(sorted(word.decode() for word in words), key=lambda word: word[0])
    return "|".join(
        f"{_escaped(first)}(?:{'|'.join(_escaped(word[1:]) for word in group)})"
        for first, group in groups
    )


def _escaped(text: str) -> str:
    return re.sub(r"[\[\\.*+?^$(){|]", r"\\\g<0>", text)


@dataclass(frozen=True)
class Quick:
    """A faster way to read a source: another program leaves out lines without any of `WORDS`.

    Attributes:
        blocks: what is left. It may raise `CommandError` at any time: then all is read anew.
        head: the first bytes of the source itself.
        last: its last line.
        count: the number of lines looked at.
    """

    blocks: Callable[[], Iterable[bytes]]
    head: Callable[[], bytes]
    last: Callable[[], bytes]
    count: Callable[[], int]


class Source:
    """One source of records, read once as a stream of blocks of bytes.

    Args:
        name: `journal`, `dmesg` or `file`.
        blocks: gives the blocks, cut anywhere.
        boot_id: the boot it is about, if that is known beforehand.
        quick: a faster way, which gives the same records.
    """

    def __init__(
        self,
        name: str,
        blocks: Callable[[], Iterable[bytes]],
        boot_id: str | None = None,
        quick: Quick | None = None,
    ) -> None:
        self.name = name
        self.error: str | None = None
        self._blocks = blocks
        self._boot_id = boot_id
        self._quick = quick
        self._reset()

    def _reset(self) -> None:
        self.lines = 0
        self.boot_id = self._boot_id
        self._head = self._last = b""
        self._timed: Record | None = None
        self._seconds: float | None = None
        self._kmsg: bool | None = None  # not known yet
        self._sequence: int | None = None
        self._first_line = b""  # of a message whose other lines begin with blanks
        self._begins = False
        self._lost: Counter[str] = Counter()
        self._suppressed: Counter[str] = Counter()

    @property
    def complete(self) -> bool:
        """Whether it begins where the boot began and nothing was lost since."""
        return self.error is None and self._begins and not self._lost

    @property
    def first(self) -> Record | None:
        """The first message with a time."""
        heads = (parse(line.decode("utf-8", "replace")) for line in self._head.split(b"\n"))
        return next((head for head in heads if head and head.time), self._timed)

    @property
    def last(self) -> Record | None:
        """The last message."""
        return parse(self._last.decode("utf-8", "replace"), self.name)

    def lose(self, what: str) -> None:
        """Note that something is missing."""
        self._lost[what] += 1

    def gaps(self) -> list[str]:
        """Say what is missing, one sentence each."""
        said = []
        if self.error is not None:
            said.append(f"{self.name}: {self.error}")
        if not self._begins and self.lines:
            said.append(
                f"{self.name}: the first messages of the boot are missing (no 'Linux version')"
            )
        said += [
            f"{self.name}: {what}" + (f" ({n} times)" if n > 1 else "")
            for what, n in sorted(self._lost.items())
        ]
        said += [
            f"{self.name}: {what} kept back {n} messages: counts are lower bounds"
            for what, n in sorted(self._suppressed.items())
        ]
        return said

    def __iter__(self) -> Iterator[Record]:
        given = 0
        try:
            if self._quick is not None:
                for record in self._quickly(self._quick):
                    given += 1
                    yield record
            if self._quick is None:
                yield from islice(self._read(self._blocks(), whole=True), given, None)
        except CommandError as error:
            if error.code:
                self.error = str(error)
            else:  # it worked, but complained
                self.lose(error.said)
        except GpuHostError as error:
            self.error = str(error)
        self._end()
        if not self.lines and self.error is None:
            self.error = "it holds no kernel messages"

    def _quickly(self, quick: Quick) -> Iterator[Record]:
        """Read the quick way; `_quick` is `None` afterwards if that did not work."""
        try:
            try:
                yield from self._read(quick.blocks(), whole=False)
            except CommandError as error:
                if error.code:
                    raise
                self.lose(error.said)
            self._head, self._last = quick.head()[:_HEAD], quick.last()
            self.lines = quick.count()
        except CommandError:
            self._quick = None
            self._reset()

    def _read(self, blocks: Iterable[bytes], *, whole: bool) -> Iterator[Record]:
        """Read blocks; `whole`: nobody has left out anything."""
        for lines in self._cut(blocks):
            for part in self._parts(lines) if whole else (lines,):
                noted, known = any(word in part for word in _NOTED), 0
                for start, line in promising(part):
                    if line.startswith(b" "):
                        self._find_first_line(part[known:start])
                        known = start
                    record = self._take(line, noted)
                    if record is not None:
                        yield record
                self._find_first_line(part[known:])

    def _find_first_line(self, part: bytes) -> None:
        at = message_start(part)
        if at >= 0:
            self._first_line = part[at:].partition(b"\n")[0][: 2 * _LONGEST_TEXT]

    def _cut(self, blocks: Iterable[bytes]) -> Iterator[bytes]:
        """Cut blocks behind line ends; of a line that is too long only the beginning is given."""
        rest = bytearray()
        over = b""  # the last bytes of a line that is too long
        try:
            for block in blocks:
                part = block
                if over:
                    end = part.find(b"\n")
                    self._skip(over + (part if end < 0 else part[:end]))
                    if end < 0:
                        over = (over + part)[-_OVERLAP:]
                        continue
                    over, part = b"", part[end + 1 :]
                end = part.rfind(b"\n") + 1
                rest += part[:end] if end else part
                if end:
                    yield bytes(rest)
                    rest = bytearray(part[end:])
                if len(rest) > _LONGEST_LINE:
                    yield bytes(rest[:_LONGEST_LINE])
                    self._skip(bytes(rest[_LONGEST_LINE - _OVERLAP :]))
                    over, rest = bytes(rest[-_OVERLAP:]), bytearray()
        except GpuHostError as error:
            failed = isinstance(error, CommandError) and error.code
            if rest and not failed:  # stopped: what came before it still counts
                yield bytes(rest)
            raise
        if rest:
            yield bytes(rest)

    def _skip(self, part: bytes) -> None:
        """Look whether there is something in what is left out."""
        if _GAP_LONG in self._lost:
            return
        if b"\0" in part:
            self._lost[_GAP_ZEROS] = 1
        if _has_word(part):
            self._lost[_GAP_LONG] = 1

    def _parts(self, whole: bytes) -> Iterator[bytes]:
        """Count lines, keep the first and the last, and follow the numbers of /dev/kmsg."""
        self.lines += whole.count(b"\n") or 1
        self._last = whole.rstrip().rpartition(b"\n")[2] or self._last
        if self._kmsg is None:
            self._kmsg = is_kmsg(whole)
        self._head += whole[: max(0, _HEAD - len(self._head))]
        if not self._kmsg:
            yield whole
            return
        self.lines -= whole.count(b"\n ") + whole.startswith(b" ")  # KEY=value lines of a record
        numbers = [int(number) for number in KMSG_LINE.findall(whole)]
        if self._sequence is not None:
            follows = range(self._sequence + 1, self._sequence + 1 + len(numbers))
            if numbers == list(follows):
                self._sequence += len(numbers)
                yield whole
                return
        for line in whole.split(b"\n"):
            number = KMSG_LINE.match(line)
            if number:
                self._follow(int(number[1]))
            yield line

    def _follow(self, number: int) -> None:
        """Follow the sequence numbers of /dev/kmsg: a jump tells how many records were lost."""
        if self._sequence is None or number < self._sequence:
            self._lost.clear()
            self._begins = number == 0
        elif number > self._sequence + 1:
            self._lost[_GAP_NUMBERS] += number - self._sequence - 1
        self._sequence = number

    def _take(self, line: bytes, noted: bool) -> Record | None:
        """Turn a line into a record, and note what it tells about boots, times and gaps."""
        record = self._parse(line)
        long = len(line) >= _LONGEST_LINE
        if (noted or long) and record is not None:
            hidden = long or b"\0" in line or NUMBERS in line
            if hidden and not _has_word(record.text.encode("utf-8", "replace")):
                record = None
        if record is not None:
            record = self._shortened(record)
            if record.boot_id not in (None, self.boot_id):
                self._begin(record)
            if noted:
                self._note(record)
            self._pass(record)
            if self._timed is None and record.time:
                self._timed = record
        if noted and b"\0" in line:
            self._lost[_GAP_ZEROS] = 1
        if long:
            self._lost[_GAP_LONG] = 1
        if not self._kmsg and line[:1].isdigit() and KMSG_LINE.match(line):
            self._lost[_GAP_MIXED] = 1
        return None if record is None or record.source == JOURNALD else record

    def _parse(self, line: bytes) -> Record | None:
        text = line.decode("utf-8", "replace")
        if not line.startswith(b" "):
            return parse(text, self.name)
        return parse_further(text, self._first_line.decode("utf-8", "replace"), self.name)

    def _shortened(self, record: Record) -> Record:
        """Leave out the rest of a long message, and note that if anything in it may matter."""
        if len(record.text) > _LONGEST_TEXT and _has_word(record.text.encode("utf-8", "replace")):
            self._lost[_GAP_TEXT] = 1
        return record.shortened(_LONGEST_TEXT)

    def _pass(self, record: Record) -> None:
        """Watch the time: lines of another boot, without its beginning, may have been appended."""
        if record.seconds is None:
            return
        if self._seconds is not None and record.seconds < self._seconds - _BACK:
            self._lost[_GAP_BACK] = 1
        self._seconds = record.seconds

    def _end(self) -> None:
        """Look at the last line: nothing else may have told that it is of another boot."""
        last = self.last
        if last is not None:
            if last.boot_id not in (None, self.boot_id):
                self._begin(last)
            self._pass(last)
        if not self._kmsg and KMSG_LINE.match(self._last):
            self._lost[_GAP_MIXED] = 1

    def _begin(self, record: Record) -> None:
        """Start anew with another boot: only the last one in a log counts."""
        self._seconds = record.seconds
        self._suppressed.clear()
        if not self._kmsg:  # there the sequence numbers tell
            self._lost.clear()
            self._begins = record.is_first
            self.boot_id = record.boot_id or self.boot_id

    def _note(self, record: Record) -> None:
        """Note where a boot begins, and what the log says about its own gaps."""
        if record.begins_boot:
            self._begin(record)
        found = _LOST.search(record.text)
        if found:
            self._lost[re.sub(r"\d+", "N", found[0])] += 1
        found = _SUPPRESSED.search(record.text)
        if found:
            self._suppressed[found[1] or "the driver"] += int((found[2] or "1")[:12])


def message_start(part: bytes) -> int:
    """Return where the last line begins that does not begin with blanks, -1 if there is none."""
    end = len(part)
    while end > 0:
        start = part.rfind(b"\n", 0, end - 1) + 1
        if part[start : start + 1] not in (b" ", b"\n", b"\r"):
            return start
        end = start
    return -1


def is_kmsg(whole: bytes) -> bool | None:
    """Tell whether lines begin with a record of /dev/kmsg; `None` when there is no line."""
    for line in whole.split(b"\n"):
        if line.strip() and not line.startswith(b" "):
            return KMSG_LINE.match(line) is not None
    return None


def _has_word(line: bytes) -> bool:
    return any(word in line for word in WORDS)


def promising(whole: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the lines with any of `WORDS` or a zero, in order, and before each where it is.

    Of a long one the beginning is given.

    Searching blocks is faster than looking at lines.
    """
    starts: dict[int, int] = {}
    for word in (*WORDS, b"\0"):
        at = whole.find(word)
        while at >= 0:
            start, end = whole.rfind(b"\n", 0, at) + 1, whole.find(b"\n", at)
            starts[start] = end = len(whole) if end < 0 else end
            at = whole.find(word, end)
    for start in sorted(starts):
        yield start, whole[start : min(starts[start], start + _LONGEST_LINE)]
