# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.

"""The forms in which kernel messages are shown and saved, one line at a time.

Forms of dmesg as printed by util-linux 2.38, of journalctl by systemd 252, of /dev/kmsg as in
Documentation/ABI/testing/dev-kmsg, of files by rsyslog, and of Talos' remote log.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone

JOURNALD = "journald"  # source of its notes about lost messages; never yielded by a log

KMSG_LINE = re.compile(rb"^\d{1,4},(\d{1,18}),\d+,[^;\n]*;", re.MULTILINE)
_KMSG = re.compile(r"(?P<prefix>\d+),\d+,(?P<micros>\d+),[^;]*;(?P<text>.*)", re.DOTALL)
_ESCAPED = re.compile(rb"\\x([0-9a-f]{2})")
_COLOUR = re.compile(r"\x1b\[[\d;]*[mK]")
_PREFIX = re.compile(
    r"""
    (?:<(?P<level>\d{1,4})>)?                                     # dmesg --raw
    (?:(?:\S+:[ ])?                                               # a remote host's address
       (?P<facility>kern|user|mail|daemon|auth|authpriv|syslog|cron|local[0-7])
       [ ]*:[ ]*\w+[ ]*:[ ]*(?=[\[\d]))?                          # dmesg --decode
    (?: \[[ ]*(?:(?P<seconds>\d{1,12}\.\d{1,9})
                |(?P<bracket>\w{3}[ ]\w{3}[ ][^\]<]*[^\]<\s]       # --ctime
                   |[A-Z][a-z]{2}[ \d]\d[ ]\d\d:\d\d               # --human, once a minute
                   |\d{4}-[^\]]*)
                |\+\d{1,12}\.\d{1,9}                               # --human, since the line before
                |(?=<))
          (?:[ ]*<[^>\]]*>)?\]:?[ ]?                               # --show-delta
      | (?P<stamp>(?:(?:[A-Z][a-z]{2}[ ])?\d{4}-\d\d-\d\d[T ]|[A-Z][a-z]{2}[ ][ \d]\d[ ])?
         \d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[ ]UTC|[+-]\d\d:?\d\d)?)[ ])?
    (?:[ ]*\[[ ]*[TC]\d+\][ ]?)?                                  # the caller: thread or CPU
    """,
    re.VERBOSE,
)
# journalctl's own line between two boots; a message does not begin a line of its output
_BOOT = re.compile(r"-- (?:Boot (?P<id>[0-9a-f]{32})|Reboot) --")
_PLAIN = re.compile(r"\[ *(\d{1,12}\.\d{1,9})\] (?=[^\s\[])")  # dmesg without options
_BY_KERNEL = re.compile(r"\S+ kernel: ?(?:\[ *(?P<seconds>\d{1,12}\.\d{1,9})\] ?)?")
_BY_PROCESS = re.compile(r"(?:[^\s:]+ )?[\w@./-]+\[\d+\]: ")
_BY_PROGRAM = re.compile(r"(?!NVRM )[^\s:]+ [\w@./-]+: ")

_DMESG_JSON = re.compile(rb'\s*\{\s*"dmesg"\s*:\s*\[')
_MEMBER = re.compile(
    rb'"(fac|pri|time|msg)"\s*:\s*'
    rb'(?:"([^"\\]*(?:\\.[^"\\]*)*)"|(-?[\d.]{1,30})(?=[\s,}]))'
)
_LONGEST_OBJECT = 1 << 20


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

    @property
    def is_first(self) -> bool:
        """Whether it is the first message of a boot (`linux_banner` in init/version.c)."""
        return self.text.startswith("Linux version ")

    @property
    def begins_boot(self) -> bool:
        """Whether another boot begins: with its first message, or with journalctl's own line."""
        return self.is_first or _BOOT.fullmatch(self.line) is not None

    def shortened(self, limit: int) -> Record:
        """Return it without what is behind so many characters of its message."""
        over = len(self.text) - limit
        return self if over <= 0 else replace(self, text=self.text[:-over], line=self.line[:-over])


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
    transport = entry.get("_TRANSPORT", "kernel")
    by_journald = transport == "driver"  # its own notes, of what it has lost
    # What a program writes into /dev/kmsg has the identifier that it likes, but never the kernel's
    # facility (kernel/printk/printk.c, journald-kmsg.c)
    by_kernel = (
        transport == "kernel"
        and entry.get("SYSLOG_FACILITY", "0") == "0"
        and entry.get("SYSLOG_IDENTIFIER") == "kernel"
    )
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
        source if by_kernel else JOURNALD,
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
    if "\x1b" in line:
        line = _COLOUR.sub("", line)
    line = line.rstrip("\r\n\0 ").lstrip("\0\ufeff")
    if line.startswith("{"):
        return _from_journal(line, source)
    record = _KMSG.match(line) if line[:1].isdigit() else None
    if record:
        return _from_kmsg(record, source)
    plain = _PLAIN.match(line)
    if plain:
        found = _whose(line[plain.end() :], False)
        seconds, wall = plain[1], None
    else:
        prefix = _PREFIX.match(line)
        if prefix is None:  # cannot be: every part of it is optional
            return None
        level, facility, seconds, bracket, stamp = prefix.groups()
        if int(level or 0) >> 3 or facility not in (None, "kern"):
            return None
        # behind a stamp with a date, syslog's forms have a host name and a program; dmesg's ISO
        # form is told by its comma
        syslog = stamp is not None and "," not in stamp and len(stamp) > len("hh:mm:ss.000")
        found = _whose(line[prefix.end() :], syslog)
        wall = bracket or stamp
    if found is None:
        return None
    text, inner, by_journald = found
    seconds = inner or seconds
    boot = _BOOT.fullmatch(line)
    return Record(
        JOURNALD if by_journald else source,
        text,
        line,
        float(seconds) if seconds else None,
        wall,
        boot["id"] if boot else None,
    )


def parse_further(line: str, first: str, source: str = "file") -> Record | None:
    """Take a line apart that begins with blanks.

    So, without a stamp, dmesg and journalctl write all lines of a message but the first.

    Args:
        line: the line.
        first: the nearest line before it that begins otherwise, empty when there is none.
        source: as for `parse`.

    Returns:
        The record, or `None` when the message is not the kernel's, or when this line of it does
        not begin as its first line does: then it may be what the kernel was given to quote.
    """
    record = parse(first, source) if first else None
    if record is None and first:
        return None
    if record is None or not record.time:  # nothing here has a stamp
        return parse(line, source)
    text = _COLOUR.sub("", line).strip("\r\n\0 ")
    if record.source == JOURNALD or text.partition(":")[0] != record.text.partition(":")[0]:
        return None
    return replace(record, text=text, line=text)


def _whose(rest: str, syslog: bool) -> tuple[str, str | None, bool] | None:
    """Tell who wrote a message, from what follows its time.

    Returns:
        The message, the stamp of the ring before it, and whether journald wrote it; or `None`
        when it is of another program, or empty.
    """
    by_kernel = _BY_KERNEL.match(rest)
    if by_kernel:
        text = rest[by_kernel.end() :]
        return (text, by_kernel["seconds"], False) if text.strip() else None
    if "systemd-journald[" in rest[:200]:
        return rest, None, True
    if _BY_PROCESS.match(rest) or (syslog and _BY_PROGRAM.match(rest)) or not rest.strip():
        return None
    return rest, None, False


def is_dmesg_json(head: bytes) -> bool:
    """Tell whether a saved log begins as `dmesg --json` does (util-linux 2.38)."""
    return _DMESG_JSON.match(head) is not None


def from_dmesg_json(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Turn the output of `dmesg --json`, with or without `--decode`, into that of `dmesg --raw`.

    Only members of the objects are looked for, so a file that breaks off gives what is there.
    """
    rest, level, time = b"", b"0", b""
    for block in blocks:
        rest += block
        lines, end = [], 0
        for found in _MEMBER.finditer(rest):
            end = found.end()
            name, text, number = found.groups()
            if name == b"fac":  # by name with --decode, else a part of pri
                level = b"0" if text == b"kern" else b"8"
            elif name == b"pri" and number is not None:
                level = number.partition(b".")[0][:4]
            elif name == b"time":
                time = number or text or b""
            elif name == b"msg":
                # a line feed in a message would begin another one
                message = _json_text(text or b"").replace("\n", " ").encode("utf-8", "replace")
                lines.append(b"<%s>[%s] %s\n" % (level, time, message))
        rest = rest[max(end, len(rest) - _LONGEST_OBJECT) :]
        yield b"".join(lines)


def _json_text(text: bytes) -> str:
    """Return the text of a JSON string, given without its quotes."""
    plain = text.decode("utf-8", "replace")
    try:
        decoded = json.loads(f'"{plain}"', strict=False)
    except ValueError:  # an escape that JSON does not know
        return plain
    return str(decoded)
