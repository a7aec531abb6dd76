# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.

"""Kernel log records out of the journal, the kernel's ring buffer, or a saved log in any form.

Programs that are on every host leave out the lines that cannot matter, several times faster than
Python could: grep for files, journalctl itself for the journal. Where they cannot, Python does.
"""

from __future__ import annotations

import bz2
import errno
import gzip
import heapq
import lzma
import os
import re
import stat
import time
import zlib
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import IO, Callable, Union

from ansible_collections.gpuhost.inference.plugins.module_utils._command import (
    CommandError,
    stream,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from ansible_collections.gpuhost.inference.plugins.module_utils._log_forms import (
    Record,
    from_dmesg_json,
    is_dmesg_json,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._log_source import (
    NUMBERS,
    WORDS,
    Quick,
    Source,
    grep_pattern,
    is_kmsg,
    message_start,
    pcre_pattern,
    promising,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader

_BLOCK = 1 << 16
_MERGE_WINDOW = 4096  # records; two readers of one ring disagree about order by far less
_FILE_SECONDS = 3600.0  # for grep on a saved log; a disk reads hundreds of GB in that time
_GREP_MEMORY = 256 << 20  # it holds whole lines, and a file of zeros is one line
_OFFSET = re.compile(rb"^(\d+):(?=( ?))", re.MULTILINE)
_LONGEST_OFFSET = 24  # with the colon and a blank
_Unpacker = Union[lzma.LZMADecompressor, bz2.BZ2Decompressor]
_PACKED = {b"\x28\xb5\x2f\xfd": "zstd -d", b"\x04\x22\x4d\x18": "lz4 -d", b"PK\x03\x04": "unzip"}


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


# -- the journal ----------------------------------------------------------------------------------

Runner = Callable[[Sequence[str], float], Iterable[bytes]]


def journalctl(command: Sequence[str], timeout: float) -> Iterator[bytes]:
    """Run journalctl: it leaves out a damaged file, says so, and ends as if all were well."""
    return stream(command, timeout, silent=True)


class _Journal:
    """The kernel's messages of one boot, as objects of JSON, one a line."""

    def __init__(self, run: Runner, boot: str, timeout: float) -> None:
        fields = "MESSAGE,SYSLOG_FACILITY,SYSLOG_IDENTIFIER,_TRANSPORT,_SOURCE_MONOTONIC_TIMESTAMP"
        self._command = ["journalctl", "--no-pager", "--quiet", f"--boot={boot}"]
        self._command += ["--output=json", f"--output-fields={fields}"]
        self._run = run
        self._timeout = timeout
        self._first = b""
        self._lines = 0

    def all(self, *options: str) -> Iterable[bytes]:
        """Run the query; writing all entries as JSON takes thrice as long as choosing some."""
        command = [*self._command, *options, "_TRANSPORT=kernel", "+", "_TRANSPORT=driver"]
        return self._run(command, self._timeout)

    def matching(self) -> Iterator[bytes]:
        """Let journalctl leave out entries without any of the words."""
        pattern = pcre_pattern(word for word in WORDS if word != NUMBERS)
        try:
            for block in self.all("--case-sensitive=yes", f"--grep={pattern}"):
                self._first = self._first or block.partition(b"\n")[0]
                self._lines += block.count(b"\n")
                yield block
        except CommandError as error:
            if error.code != 1 or error.said:  # 1 without a word: there are none
                raise

    def head(self) -> bytes:
        """Return the first entry, and what may come behind it."""
        if b"Linux version" in self._first:
            return self._first
        return self._block()

    def last(self) -> bytes:
        """Return the last entry."""
        return self._block("--lines=1").rstrip().rpartition(b"\n")[2]

    def count(self) -> int:
        """Return the number of entries that were let through, or 1 if there are only others."""
        return self._lines or bool(self.last())

    def _block(self, *options: str) -> bytes:
        try:
            for block in self.all(*options):
                return block
        except CommandError as error:
            if error.said and error.code:
                raise
        return b""


# -- the ring -------------------------------------------------------------------------------------


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


def _gathered(records: Iterable[bytes]) -> Iterator[bytes]:
    """Join records to blocks."""
    block = bytearray()
    try:
        for record in records:
            block += record
            if len(block) >= _BLOCK:
                yield bytes(block)
                block.clear()
    except GpuHostError:
        yield bytes(block)
        raise
    yield bytes(block)


def read_live(
    sources: Sequence[str] = ("journal", "dmesg"),
    *,
    boot: str = "current",
    timeout: float = 30.0,
    run: Runner = journalctl,
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
    made = []
    if "journal" in sources:
        log = _Journal(run, offset, timeout)
        made.append(
            Source("journal", log.all, None, Quick(log.matching, log.head, log.last, log.count))
        )
    if "dmesg" in sources and offset == "0":
        boot_id = this_boot(Reader())
        made.append(Source("dmesg", lambda: _gathered(_kmsg_blocks(kmsg, timeout)), boot_id))
    if not made:
        raise GpuHostError(
            f"boot {boot} is only in the journal, not in the kernel's ring buffer: "
            "add 'journal' to the sources"
        )
    return KernelLog(made)


def newest(host: Reader) -> float | None:
    """Return the stamp of the newest record in a host's ring, in seconds after its start.

    It marks a moment for `read_since`: the clock of these stamps is not corrected, and after
    weeks it is seconds away from every other. `None` when the ring cannot be read.
    """
    stamp = None
    try:
        for record in _kmsg_blocks(str(host.root / "dev/kmsg"), 30.0):
            fields = record.split(b",", 3)
            if len(fields) == 4 and fields[2].isdigit():
                stamp = int(fields[2]) / 1e6
    except GpuHostError:
        return None
    return stamp


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


# -- saved logs -----------------------------------------------------------------------------------


def read_file(path: str) -> KernelLog:
    """Read a saved log in any form; memory does not grow with the file.

    gzip, xz and bzip2 are unpacked, as logrotate leaves older files.

    Raises:
        GpuHostError: it cannot be opened, is no regular file, or is packed in another way.
    """
    try:
        facts = Path(path).stat()
        if not stat.S_ISREG(facts.st_mode) and not stat.S_ISDIR(facts.st_mode):
            raise GpuHostError(
                f"{path} is no regular file, and may never end: save what it gives into a file"
            )
        with Path(path).open("rb") as file:
            # files of /proc have no size, and reading may wait
            head = file.read(_BLOCK) if facts.st_size else b""
    except OSError as error:
        raise GpuHostError(f"{path} cannot be read: {error.strerror}") from error
    for magic, tool in _PACKED.items():
        if head.startswith(magic):
            raise GpuHostError(f"{path} is packed: unpack it first ({tool})")
    if not head:
        return read_blocks([])
    # None: what kind of lines they are comes later
    if head.startswith(tuple(_COMPRESSED)) or is_dmesg_json(head) or is_kmsg(head) is not False:
        return KernelLog([Source("file", lambda: _file_blocks(path))])
    quick = Quick(
        lambda: _grep(path), lambda: head, lambda: _last_line(path), lambda: _count_lines(path)
    )
    return KernelLog([Source("file", lambda: _file_blocks(path), None, quick)])


def _grep(path: str) -> Iterator[bytes]:
    """Let grep leave out the lines without a word or a zero."""
    pattern = grep_pattern(WORDS) + "|" + os.fsdecode(b"[^\x01-\xff]")
    command = [
        "env",
        "LC_ALL=C",
        "grep",
        "-a",
        "-b",
        "-E",
        "-e",
        pattern,
        "--",
        str(Path(path).absolute()),
    ]
    blocks = stream(command, _FILE_SECONDS, good=(0, 1), memory=_GREP_MEMORY)
    return _with_first_lines(path, blocks)


def _with_first_lines(path: str, blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Take away the offsets that grep wrote, and add what tells whose message a line belongs to.

    Before a line that begins with blanks comes the nearest one that does not, if grep left it out.
    """
    rest, within, known = b"", False, 0  # within a line of which some was passed on
    for block in blocks:
        data = rest + block
        end = data.rfind(b"\n") + 1
        if len(data) - end > _LONGEST_OFFSET:
            end = len(data)
        rest, data, made = data[end:], data[:end], []
        last = (data.find(b"\n") + 1 or len(data)) if within else 0
        made.append(data[:last])
        for found in _OFFSET.finditer(data, last):
            made.append(data[last : found.start()])
            last = found.end()
            if found[2]:
                made.append(_first_line(path, known, int(found[1])))
                known = int(found[1])
        made.append(data[last:])
        within = not data.endswith(b"\n") if data else within
        yield b"".join(made)
    yield rest


def _first_line(path: str, known: int, offset: int) -> bytes:
    """Return the last line before `offset` that does not begin with blanks, if grep left it out.

    It is empty when there is none behind `known`.
    """
    begin = max(known, offset - _BLOCK)
    part = _piece(path, begin, offset - begin)
    at = message_start(part)
    if at <= 0 and begin > known:
        raise CommandError("the line before is too far away", 1, "")
    line = part[at:].partition(b"\n")[0] + b"\n" if at >= 0 else b""
    return b"" if list(promising(line)) else line


def _count_lines(path: str) -> int:
    """Return the number of lines; the last one may have no end."""
    said = b"".join(stream(["wc", "-l", "--", str(Path(path).absolute())], _FILE_SECONDS))
    return int(said.split()[0]) + (not _tail(path).endswith(b"\n"))


def _last_line(path: str) -> bytes:
    tail = _tail(path)
    _before, end, line = tail.rstrip().rpartition(b"\n")
    if not end and len(tail) == _BLOCK:  # it may begin further up
        raise CommandError("the last line is too far from the end", 1, "")
    return line


def _tail(path: str) -> bytes:
    return _piece(path, -_BLOCK, _BLOCK)


def _piece(path: str, begin: int, size: int) -> bytes:
    """Read so many bytes of a file; `begin` is below zero when it is counted from the end."""
    try:
        with Path(path).open("rb") as file:
            file.seek(max(0, begin if begin >= 0 else os.fstat(file.fileno()).st_size + begin))
            return file.read(size)
    except OSError as error:
        raise GpuHostError(f"{path} cannot be read: {error.strerror}") from error


def _file_blocks(path: str) -> Iterator[bytes]:
    """Read a file, unpacked, and in a form of lines."""
    blocks = _unpacked(path)
    for first in blocks:
        if is_dmesg_json(first):
            yield from from_dmesg_json(chain([first], blocks))
        else:
            yield first
            yield from blocks


def _plainly(file: IO[bytes]) -> Iterator[bytes]:
    return iter(lambda: file.read(_BLOCK), b"")


def _gzip(raw: IO[bytes]) -> Iterator[bytes]:
    with gzip.GzipFile(fileobj=raw) as file:
        yield from iter(lambda: file.read(_BLOCK), b"")


def _xz(raw: IO[bytes]) -> Iterator[bytes]:
    return _streams(raw, lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ), padded=True)


def _bzip2(raw: IO[bytes]) -> Iterator[bytes]:
    return _streams(raw, bz2.BZ2Decompressor, padded=False)


_COMPRESSED: dict[bytes, Callable[[IO[bytes]], Iterator[bytes]]] = {
    b"\x1f\x8b": _gzip,
    b"\xfd7zXZ\0": _xz,
    b"BZh": _bzip2,
}


def _streams(raw: IO[bytes], make: Callable[[], _Unpacker], *, padded: bool) -> Iterator[bytes]:
    """Unpack streams one after the other; `LZMAFile` and `BZ2File` end silently at a damaged one.

    Args:
        raw: the packed file.
        make: makes what unpacks one stream.
        padded: zeros may follow a stream, four or a multiple (xz, its file format, 2.2).
    """
    data = raw.read(_BLOCK)
    while data:
        stream_ = make()
        while not stream_.eof:
            yield stream_.decompress(data, _BLOCK)
            data = b""
            if not stream_.eof and stream_.needs_input:
                data = raw.read(_BLOCK)
                if not data:
                    raise EOFError("its last part is not whole")
        data, zeros = stream_.unused_data or raw.read(_BLOCK), 0
        while padded and data.startswith(b"\0"):
            zeros += len(data) - len(data.lstrip(b"\0"))
            data = data.lstrip(b"\0") or raw.read(_BLOCK)
        if zeros % 4:
            raise EOFError("zeros between its parts, of which some are missing")


def _unpacked(path: str) -> Iterator[bytes]:
    try:
        with Path(path).open("rb") as raw:
            head = raw.peek(8)
            unpack = next(
                (o for magic, o in _COMPRESSED.items() if head.startswith(magic)), _plainly
            )
            yield from unpack(raw)
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise GpuHostError(f"{path} cannot be read to its end: {error}") from error


def read_blocks(blocks: Iterable[bytes]) -> KernelLog:
    """Read a log that is already at hand, as blocks of bytes cut anywhere."""
    return KernelLog([Source("file", lambda: blocks)])
