"""Records out of every container form, completeness, and the readers."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from ansible_collections.gpuhost.inference.plugins.module_utils import _kernel_log
from ansible_collections.gpuhost.inference.plugins.module_utils._command import (
    CommandError,
    stream,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from ansible_collections.gpuhost.inference.plugins.module_utils._kernel_log import (
    KernelLog,
    LogSummary,
    read_blocks,
    read_file,
    read_live,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._log_forms import Record, parse
from ansible_collections.gpuhost.inference.plugins.module_utils._log_source import Source

FAULT = "NVRM: GPU0 kfspWaitForResponse: FSP command timed out"
FIRST = b"[    0.000000] Linux version 6.14.11-2-pve (build@proxmox)\n"
BOOT = "0f1e2d3c4b5a69788796a5b4c3d2e1f0"


def journal(text: str | list[int], seconds: float, **fields: str) -> bytes:
    entry = {
        "MESSAGE": text,
        "SYSLOG_IDENTIFIER": "kernel",
        "_TRANSPORT": "kernel",
        "_BOOT_ID": BOOT,
        "__REALTIME_TIMESTAMP": str(1_790_000_000_000_000 + round(seconds * 1e6)),
        "__MONOTONIC_TIMESTAMP": str(4_000_000 + round(seconds * 1e6)),
        "_SOURCE_MONOTONIC_TIMESTAMP": str(round(seconds * 1e6)),
        **fields,
    }
    return json.dumps(entry, separators=(",", ":")).encode() + b"\n"


def read(*blocks: bytes) -> tuple[list[Record], LogSummary]:
    log = read_blocks(blocks)
    return list(log), log.summary()


@pytest.mark.parametrize(
    ("line", "seconds", "wall"),
    [
        pytest.param(f"[   12.345678] {FAULT}", 12.345678, None, id="dmesg"),
        pytest.param(f"[   12.345678] [  T123] {FAULT}", 12.345678, None, id="thread"),
        pytest.param(f"[   12.345678][   C11] {FAULT}", 12.345678, None, id="cpu"),
        pytest.param(f"[   12.345678 <    0.000012>] {FAULT}", 12.345678, None, id="delta"),
        pytest.param(f"[<   12.345678>] {FAULT}", None, None, id="time-format delta"),
        pytest.param(f"[Oct 9 14:15] {FAULT}", None, "Oct 9 14:15", id="human"),
        pytest.param(f"[Nov29 14:15] {FAULT}", None, "Nov29 14:15", id="human, two digits"),
        pytest.param(f"[  +0.000031] {FAULT}", None, None, id="human, within a minute"),
        pytest.param(
            f"[Sun Nov 29 14:15:12 2026 <    0.000000>] {FAULT}",
            None,
            "Sun Nov 29 14:15:12 2026",
            id="ctime and delta",
        ),
        pytest.param(
            f"kern  :err   : [Nov29 14:15] [   T77] {FAULT}", None, "Nov29 14:15", id="all at once"
        ),
        pytest.param(f"kern  :warn  : [   12.345678] {FAULT}", 12.345678, None, id="decode"),
        pytest.param(f"<4>[   12.345678] {FAULT}", 12.345678, None, id="raw"),
        pytest.param(
            f"[Sun Nov 29 14:15:12 2026] {FAULT}", None, "Sun Nov 29 14:15:12 2026", id="ctime"
        ),
        pytest.param(
            f"2026-11-29T14:15:12,000000+00:00 {FAULT}",
            None,
            "2026-11-29T14:15:12,000000+00:00",
            id="iso",
        ),
        pytest.param(f"Nov 29 14:15:12 pve kernel: {FAULT}", None, "Nov 29 14:15:12", id="short"),
        pytest.param(
            f"Nov  9 14:15:12.000017 pve kernel: {FAULT}",
            None,
            "Nov  9 14:15:12.000017",
            id="short-precise",
        ),
        pytest.param(f"[   12.345678] pve kernel: {FAULT}", 12.345678, None, id="short-monotonic"),
        pytest.param(
            f"2026-11-29T14:15:12+0000 pve kernel: {FAULT}",
            None,
            "2026-11-29T14:15:12+0000",
            id="short-iso",
        ),
        pytest.param(
            f"Sun 2026-11-29 14:15:12 UTC pve kernel: {FAULT}",
            None,
            "Sun 2026-11-29 14:15:12 UTC",
            id="short-full",
        ),
        pytest.param(
            f"Nov 29 14:15:12 pve kernel: [   12.345678] {FAULT}",
            12.345678,
            "Nov 29 14:15:12",
            id="rsyslog",
        ),
        pytest.param(f"4,77,12345678,-,caller=T9;{FAULT}", 12.345678, None, id="kmsg"),
        pytest.param(
            f"203.0.113.9: kern: warning: [2026-11-29T14:15:12.291213998Z]: {FAULT}",
            None,
            "2026-11-29T14:15:12.291213998Z",
            id="remote",
        ),
        pytest.param(f"14:15:12.438 {FAULT}", None, "14:15:12.438", id="time of day"),
        pytest.param(
            journal(FAULT, 12.345678).decode(), 12.345678, "2026-09-21T14:13:32.345678Z", id="json"
        ),
        pytest.param(FAULT, None, None, id="bare"),
        pytest.param(FAULT + "\r\n", None, None, id="bare with CR"),
    ],
)
def test_every_form_gives_the_message_and_its_time(
    line: str, seconds: float | None, wall: str | None
) -> None:
    record = parse(line)
    assert record is not None
    assert (record.text, record.seconds, record.wall) == (FAULT, seconds, wall)
    assert record.text in record.line


@pytest.mark.parametrize(
    "line",
    [
        "",
        "[   12.345678] ",
        f"12,77,12345678,-;{FAULT}",
        f"<12>[   12.345678] {FAULT}",
        f"user  :notice: [   12.345678] {FAULT}",
        f"203.0.113.9: daemon: info: [2026-11-29T14:15:12.291213998Z]: {FAULT}",
        f"Nov 29 14:15:12 pve collector[91]: {FAULT}",
        f"Nov 29 14:15:12 pve logger: {FAULT}",
        f"2026-11-29T14:15:12+0000 pve sudo: {FAULT}",
        f"[   12.345678] pve collector[91]: {FAULT}",
        f"[   12.345678] systemd[1]: {FAULT}",
        journal(FAULT, 1.0, SYSLOG_IDENTIFIER="collector", _TRANSPORT="journal").decode(),
        journal(FAULT, 1.0, SYSLOG_FACILITY="1").decode(),  # "kernel: ..." written to /dev/kmsg
        journal(FAULT, 1.0, SYSLOG_FACILITY="1").decode().replace("IDENT", "NO_IDENT"),
        journal(FAULT, 1.0).decode().replace("IDENT", "NO_IDENT"),
        journal(FAULT, 1.0, SYSLOG_FACILITY="0", _TRANSPORT="syslog").decode(),  # logger -t kernel
        '{"MESSAGE": null, "SYSLOG_IDENTIFIER": "kernel"}',
        '{"MESSAGE": ',
        "{}",
        "[" * 100_000,
    ],
)
def test_what_is_not_the_kernels_is_no_record(line: str) -> None:
    record = parse(line)
    assert record is None or FAULT not in record.text


def test_a_journal_message_that_is_no_utf_8() -> None:
    record = parse(journal([*FAULT.encode(), 0xFF], 1.0).decode())
    assert record is not None
    assert record.text == FAULT + "\N{REPLACEMENT CHARACTER}"


def test_escapes_of_kmsg() -> None:
    record = parse(r"4,1,1000000,-;NVRM: caf\xc3\xa9 \x09x\x5cn")
    assert record is not None
    assert record.text == "NVRM: café \tx\\n"


def test_only_lines_that_may_matter_become_records() -> None:
    records, summary = read(FIRST + b"[    1.0] usb 1-1: new device\n[    2.0] " + FAULT.encode())
    assert [record.text for record in records][1:] == [FAULT]
    assert summary.lines == 3
    assert summary.complete
    assert (summary.first, summary.last) == ("0.000000", "2.000000")


def test_colours_do_not_hide_a_message() -> None:
    record = parse(f"\x1b[32m[   12.345678] \x1b[0m\x1b[33mNVRM: \x1b[0m\x1b[1m{FAULT[6:]}\x1b[0m")
    assert record is not None
    assert (record.text, record.seconds) == (FAULT, 12.345678)


DMESG_JSON = """{
   "dmesg": [
      {
         "pri": 5,
         "time":     0.000000,
         "msg": "Linux version 6.14.11-2-pve"
      },{
         "pri": 3,
         "time":    12.345678,
         "msg": "NVRM: a \\"quoted\\" \\u00e9 \\\\n"
      },{
         "fac": "user", "pri": "warn", "time": "2026-11-29T14:15:12,000000+00:00",
         "msg": "NVRM: by a program"
      },{
         "fac": "kern", "pri": "warn", "time": "Sun Nov 29 14:15:12 2026",
         "msg": "NVRM: \\"msg\\": \\"x\\""
      }
   ]
}
"""


@pytest.mark.parametrize("text", [DMESG_JSON, DMESG_JSON.replace("\n", "")], ids=["lines", "one"])
@pytest.mark.parametrize("size", [1, 50, 1 << 20])
def test_dmesg_as_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, size: int
) -> None:
    saved = tmp_path / "dmesg.json"
    saved.write_text(text)
    data = text.encode()
    monkeypatch.setattr(
        _kernel_log,
        "_unpacked",
        lambda path: iter([data[:40], *(data[n : n + size] for n in range(40, len(data), size))]),
    )
    log = read_file(str(saved))
    assert [(record.text, record.seconds, record.wall) for record in log] == [
        ("Linux version 6.14.11-2-pve", 0.0, None),
        ('NVRM: a "quoted" \N{LATIN SMALL LETTER E WITH ACUTE} \\n', 12.345678, None),
        ('NVRM: "msg": "x"', None, "Sun Nov 29 14:15:12 2026"),
    ]
    assert log.summary().complete
    assert log.summary().lines == 4


@pytest.mark.parametrize("size", [1, 7, 64, 4096])
def test_blocks_may_be_cut_anywhere(size: int) -> None:
    data = FIRST + f"[    2.0] {FAULT}\n".encode() * 3
    records, summary = read(*(data[at : at + size] for at in range(0, len(data), size)))
    assert [record.text for record in records][1:] == [FAULT] * 3
    assert summary.lines == 4


def test_a_file_without_line_ends_is_no_reason_to_eat_memory() -> None:
    records, summary = read(*[b"x" * 65536] * 40)
    assert records == []
    assert not summary.complete


@pytest.mark.parametrize(
    ("lines", "gap"),
    [
        pytest.param(b"[ 9.0] " + FAULT.encode(), "first messages", id="beginning"),
        pytest.param(FIRST + b"[ 9.0] ** 42 printk messages dropped **\n", "dropped", id="dropped"),
        pytest.param(
            FIRST + b"[ 9.0] AMD-Vi: IOMMU event log overflow\n", "overflow", id="overflow"
        ),
        pytest.param(
            FIRST + b"[ 9.0] dmar_fault: 3400 callbacks suppressed\n", "dmar_fault", id="dmar"
        ),
        pytest.param(
            FIRST + b"[ 9.0] arm_smmu_evtq_thread: 370 callbacks suppressed\n",
            "arm_smmu_evtq_thread",
            id="smmu",
        ),
        pytest.param(
            FIRST + b"[ 9.0] arm_smmu_context_fault: 2 callbacks suppressed\n",
            "arm_smmu_context_fault",
            id="smmu v2",
        ),
        pytest.param(
            b"Nov 29 14:15:12 pve kernel: Linux version 6.14\n-- Boot " + b"5e" * 16 + b" --\n"
            b"Nov 29 15:20:12 pve kernel: usb 1-1: new device\n",
            "first messages",
            id="journalctl's line between boots",
        ),
        pytest.param(
            b"Nov 29 14:15:12 pve kernel: Linux version 6.14\n-- Reboot --\n"
            b"Nov 29 15:20:12 pve kernel: usb 1-1: new device\n",
            "first messages",
            id="the same of systemd before 246",
        ),
        pytest.param(
            FIRST + b"[ 9.0] NVRM: " + b"x" * 9000 + b" Xid\n", "2048 characters", id="long message"
        ),
        pytest.param(
            FIRST + b"Nov 29 14:15:12 pve systemd-journald[300]: Missed 12 kernel messages\n",
            "Missed",
            id="journald",
        ),
        pytest.param(
            journal("Linux version 6.12", 0)
            + journal(
                "/dev/kmsg buffer overrun, some messages lost.",
                5,
                _TRANSPORT="driver",
                SYSLOG_IDENTIFIER="systemd-journald",
            ),
            "overrun",
            id="journal json",
        ),
        pytest.param(
            b"6,0,0,-;Linux version 6.14\n6,1,5,-;x\n DEVICE=+pci:0\n6,4,9,-;y\n",
            "sequence number (2 times)",
            id="sequence",
        ),
        pytest.param(b"6,5,0,-;usb\n6,6,5,-;x\n", "first messages", id="ring overwritten"),
        pytest.param(b"", "no kernel messages", id="empty"),
    ],
)
def test_a_log_with_a_hole_is_not_complete(lines: bytes, gap: str) -> None:
    records, summary = read(lines)
    assert not summary.complete
    assert any(gap in said for said in summary.gaps), summary.gaps
    assert all(record.source == "file" for record in records)


def test_a_suppressed_report_only_makes_counts_lower_bounds() -> None:
    text = b"[ 9.0] amd_iommu_report_page_fault: 44 callbacks suppressed\n"
    _records, summary = read(FIRST + text + text + b"[ 9.1] show_signal: 9 callbacks suppressed\n")
    assert summary.complete
    assert summary.gaps == [
        "file: amd_iommu_report_page_fault kept back 88 messages: counts are lower bounds"
    ]


@pytest.mark.parametrize(
    ("second", "complete"),
    [
        (b"[    0.000000] Linux version 6.14\n", True),
        (b"[    0.0] Linux version 6.14\n[ 1.0] ** 1 printk messages dropped **\n", False),
    ],
)
def test_of_two_boots_in_a_file_the_last_tells_whether_it_is_complete(
    second: bytes, complete: bool
) -> None:
    lost = b"[    9.0] ** 42 printk messages dropped **\n"
    assert read(FIRST + lost + second)[1].complete is complete


@pytest.mark.parametrize("mark", ["-- Reboot --", f"-- Boot {'5e' * 16} --"])
def test_a_boot_that_begins_behind_the_line_of_journalctl(mark: str) -> None:
    lines = [f"Nov 29 14:15:12 pve kernel: {FAULT}", mark, "Nov 29 15:20:12 pve kernel: {}"]
    log = "\n".join(lines).format("Linux version 6.14").encode()
    records, summary = read(log)
    assert summary.complete
    assert [record.begins_boot for record in records] == [False, True, True]
    assert summary.boot_id == ("5e" * 16 if "5e" in mark else None)
    _records, summary = read(
        log.replace(mark.encode(), b"Nov 29 15:20:12 pve kernel: x" + mark.encode())
    )
    assert summary.boot_id is None


@pytest.mark.parametrize(
    ("before", "line", "text"),
    [
        ("Nov 29 14:15:13 pve python3[77]: it said", FAULT, None),
        ("Nov 29 14:15:13 pve logger: it said", FAULT, None),
        ("Nov 29 14:15:13 pve kernel: tmpfs: Unknown parameter 'x", FAULT, None),
        ("Nov 29 14:15:13 pve python3[77]: it said\n    and\n\n", FAULT, None),
        ("Nov 29 14:15:13 pve kernel: NVRM: The NVIDIA GPU 0000:c7:00.0", FAULT, FAULT),
        (
            "[    7.125000] NVRM: The NVIDIA GPU 0000:c7:00.0\n     NVRM: (PCI ID: 10de:2bb5)",
            FAULT,
            FAULT,
        ),
        ("usb 1-1: new device", FAULT, "      " + FAULT),
        ("", FAULT, "      " + FAULT),
    ],
)
@pytest.mark.parametrize("size", [1, 64, 4096])
def test_a_line_that_begins_with_blanks_belongs_to_the_one_before(
    before: str, line: str, text: str | None, size: int
) -> None:
    data = f"{before}\n      {line}\n".encode()
    records, _summary = read(*(data[at : at + size] for at in range(0, len(data), size)))
    found = [record for record in records if FAULT in record.text]
    assert [record.text for record in found] == ([] if text is None else [text])
    assert [record.time for record in found if text == FAULT] == [
        record.time for record in records[:1] if text == FAULT
    ]


def test_of_a_long_message_only_the_beginning_is_looked_at() -> None:
    for form in ("[    9.000000] {}", "Nov 29 14:15:12 pve kernel: {}", "4,1,9000000,-;{}", "{}"):
        log = form.format("NVRM: " + "ms after " * 9000) + "\n" + form.format("NVRM: short")
        long, short = read(log.encode())[0]
        assert (len(long.text), short.text) == (2048, "NVRM: short")
        assert long.line.endswith(long.text)
    _records, summary = read(FIRST + journal("x" * 9000, 1.0, _CMDLINE="nvidia-smi"))
    assert not any("characters" in gap for gap in summary.gaps)


def test_another_boot_id_is_another_boot() -> None:
    other = journal("NVRM: x", 3, _BOOT_ID="f" * 32)
    _records, summary = read(journal("Linux version 6.12", 0) + other)
    assert summary.boot_id == "f" * 32
    assert not summary.complete


def json_lines(*texts: str) -> bytes:
    return b"".join(journal(text, at) for at, text in enumerate(texts))


class Journal:
    """A journalctl that filters as told; it keeps what it was asked."""

    def __init__(self, everything: bytes, filtered: bytes | CommandError) -> None:
        self.asked: list[str] = []
        self._everything = everything
        self._filtered = filtered

    def __call__(self, command: Sequence[str], timeout: float) -> Iterator[bytes]:
        options = [word.partition("=")[0] for word in command if word.startswith("--")]
        [fields] = (
            word.partition("=")[2] for word in command if word.startswith("--output-fields")
        )
        everything = self._only(fields, self._everything)
        how = "grep" if "--grep" in options else "last" if "--lines" in options else "all"
        self.asked.append(how)
        if how == "last":
            yield everything.splitlines(keepends=True)[-1]
        elif how == "all":
            yield everything
        elif isinstance(self._filtered, CommandError):
            raise self._filtered
        else:
            yield self._only(fields, self._filtered)

    @staticmethod
    def _only(fields: str, entries: bytes) -> bytes:
        """Leave out what was not asked for; some fields are always there (journalctl(1))."""
        kept = (*fields.split(","), "__REALTIME_TIMESTAMP", "__MONOTONIC_TIMESTAMP", "_BOOT_ID")
        made = (json.loads(entry) for entry in entries.splitlines())
        return b"".join(
            json.dumps({key: entry[key] for key in kept if key in entry}).encode() + b"\n"
            for entry in made
        )


UNABLE = CommandError("journalctl failed", 1, "Compiled without pattern matching support")
NO_MATCH = CommandError("journalctl failed", 1, "")


@pytest.mark.parametrize(
    ("everything", "filtered", "asked", "expected"),
    [
        pytest.param(
            json_lines("Linux version 6.14", "usb 1-1: new", FAULT, "usb 1-1: gone"),
            journal("Linux version 6.14", 0) + journal(FAULT, 2),
            ["grep", "last"],
            (2, True, "21T14:13:20", "21T14:13:23"),
            id="filtered",
        ),
        pytest.param(
            json_lines("usb 1-1: new", FAULT, "usb 1-1: gone"),
            journal(FAULT, 1),
            ["grep", "all", "last"],
            (1, False, "21T14:13:20", "21T14:13:22"),
            id="vacuumed",
        ),
        pytest.param(
            json_lines("usb 1-1: new", "usb 1-1: gone"),
            NO_MATCH,
            ["grep", "all", "last", "last"],
            (0, False, "21T14:13:20", "21T14:13:21"),
            id="nothing matches",
        ),
        pytest.param(
            json_lines("Linux version 6.14", "usb 1-1: new", FAULT, "usb 1-1: gone"),
            UNABLE,
            ["grep", "all"],
            (2, True, "21T14:13:20", "21T14:13:23"),
            id="no filter",
        ),
    ],
)
def test_journalctl_filters_if_it_can(
    everything: bytes,
    filtered: bytes | CommandError,
    asked: list[str],
    expected: tuple[int, bool, str, str],
) -> None:
    run = Journal(everything, filtered)
    log = read_live(["journal"], run=run)
    found, summary = len(list(log)), log.summary()
    assert run.asked == asked
    assert summary.first is not None
    assert summary.last is not None
    assert (found, summary.complete, summary.first[8:19], summary.last[8:19]) == expected
    assert summary.sources[0].error is None


@pytest.mark.parametrize("able", [True, False])
def test_what_a_program_wrote_into_the_ring_does_not_count_in_the_journal(able: bool) -> None:
    entries = (
        journal("Linux version 6.14", 0, SYSLOG_FACILITY="0")
        + journal(FAULT, 2, SYSLOG_FACILITY="0")
        + journal("Linux version 6.14", 3, SYSLOG_FACILITY="1")
        + journal(FAULT, 4, SYSLOG_FACILITY="1")
    )
    log = read_live(["journal"], run=Journal(entries, entries if able else UNABLE))
    assert [record.seconds for record in log] == [0.0, 2.0]
    assert log.summary().complete


def test_a_journal_with_a_damaged_file_is_not_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of journalctl's own: it says so, and ends with 0 (systemd 252)."""
    (tmp_path / "entries").write_bytes(journal("Linux version 6.14", 0) + journal(FAULT, 2))
    program = tmp_path / "journalctl"
    program.write_text(
        f"#!/bin/sh\ncat {tmp_path}/entries\necho 'Journal file x.journal is truncated' >&2\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    log = read_live(["journal"])
    assert len(list(log)) == 2
    summary = log.summary()
    assert summary.readable
    assert summary.gaps == ["journal: Journal file x.journal is truncated"]
    assert not summary.complete


def runner(*blocks: bytes) -> Callable[..., Iterator[bytes]]:
    return lambda command, timeout: iter(blocks)


@pytest.fixture
def ring(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[list[bytes | OSError]], str]]:
    """A ring buffer that answers each read with the next record or error, then EAGAIN."""
    reading, writing = os.pipe()
    path = f"/proc/self/fd/{reading}"

    def fill(answers: list[bytes | OSError]) -> str:
        left = iter(answers)

        def answer(_fd: int, _size: int) -> bytes:
            item = next(left, BlockingIOError())
            if isinstance(item, OSError):
                raise item
            return item

        monkeypatch.setattr(_kernel_log.os, "read", answer)
        return path

    yield fill
    os.close(reading)
    os.close(writing)


def test_journal_and_ring_are_merged_each_message_once(
    ring: Callable[[list[bytes | OSError]], str],
) -> None:
    same = f"3,1,9000000,-;{FAULT}\n".encode()
    kmsg = ring(
        [
            b"5,0,0,-;Linux version 6.14\n",
            same,
            b"3,2,9000000,-;" + FAULT.encode() + b"\n",  # printed twice at the same time
            b"3,3,9500000,-;NVRM: only in the ring\n",
        ]
    )
    run = runner(
        journal("Linux version 6.14", 0),
        journal(FAULT, 9),
        journal("NVRM: only in the journal", 9.2),
    )
    log = read_live(run=run, kmsg=kmsg)
    assert [(record.source, record.text) for record in log] == [
        ("journal", "Linux version 6.14"),
        ("journal", FAULT),
        ("dmesg", FAULT),
        ("journal", "NVRM: only in the journal"),
        ("dmesg", "NVRM: only in the ring"),
    ]
    summary = log.summary()
    assert summary.complete
    assert (summary.boot_id, summary.gaps) == (BOOT, [])


def test_a_hole_in_one_source_is_filled_by_the_other(
    ring: Callable[[list[bytes | OSError]], str],
) -> None:
    kmsg = ring([b"5,9,9000000,-;NVRM: x\n"])
    log = read_live(run=runner(journal("Linux version 6.14", 0)), kmsg=kmsg)
    assert len(list(log)) == 2
    assert log.summary().complete
    assert [source.complete for source in log.summary().sources] == [True, False]


def test_a_ring_that_was_overwritten_while_it_was_read(
    ring: Callable[[list[bytes | OSError]], str],
) -> None:
    kmsg = ring([b"5,0,0,-;Linux version 6.14\n", BrokenPipeError(32, "x"), b"5,7,9,-;NVRM: x\n"])
    log = read_live(["dmesg"], kmsg=kmsg)
    assert len(list(log)) == 2
    assert log.summary().gaps == ["dmesg: records missing by their sequence number (6 times)"]


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    def absent(command: object, timeout: float) -> Iterator[bytes]:
        return stream([str(tmp_path / "journalctl")], timeout)

    log = read_live(run=absent, kmsg=str(tmp_path / "kmsg"))
    assert list(log) == []
    summary = log.summary()
    assert not summary.readable
    assert len(summary.gaps) == 2
    assert all("No such file" in gap for gap in summary.gaps)


def test_other_boots_are_asked_of_the_journal_only() -> None:
    asked: list[str] = []

    def run(command: list[str], timeout: float) -> Iterator[bytes]:
        asked.extend(command)
        return iter([journal("Linux version 6.12", 0)])

    log = read_live(boot="-2", run=run, kmsg="/nonexistent")
    assert len(list(log)) == 1
    assert "--boot=-2" in asked
    assert [source.name for source in log.summary().sources] == ["journal"]
    with pytest.raises(GpuHostError, match="add 'journal'"):
        read_live(["dmesg"], boot="-2")


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_a_command_that_ends_well() -> None:
    assert b"".join(stream(python("print('x' * 100000)"), 60)) == b"x" * 100000 + b"\n"


def test_a_command_that_fails_or_never_ends() -> None:
    with pytest.raises(GpuHostError, match=r"failed \(3\): no such boot"):
        list(stream(python("import sys; sys.stderr.write('no such boot'); sys.exit(3)"), 60))
    with pytest.raises(GpuHostError, match="was stopped after"):
        list(stream(["sleep", "600"], 0.2))


def test_what_came_before_a_failure_still_counts() -> None:
    def run() -> Iterator[bytes]:
        yield FIRST + f"[    2.0] {FAULT}\n".encode()
        raise GpuHostError("stopped")

    log = KernelLog([Source("journal", run)])
    assert [record.text for record in log][1:] == [FAULT]
    assert not log.summary().complete
    assert log.summary().sources[0].complete is False


def test_a_saved_log_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(GpuHostError, match="cannot be read: No such file"):
        read_file(str(tmp_path / "absent.log"))
    with pytest.raises(GpuHostError, match="cannot be read: Is a directory"):
        read_file(str(tmp_path))


@pytest.mark.parametrize("pack", [gzip.compress, lzma.compress, bz2.compress])
def test_a_packed_log(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    saved = tmp_path / "kern.log.2"
    data = FIRST + b"".join(b"[%9d.0] vfio-pci: %d\n" % (n, n * n) for n in range(50000))
    saved.write_bytes(pack(data))
    log = read_file(str(saved))
    assert sum(1 for _record in log) == 50001
    assert log.summary().complete
    saved.write_bytes(pack(data)[:-20])
    log = read_file(str(saved))
    assert list(log)
    assert not log.summary().complete
    assert "cannot be read to its end" in log.summary().gaps[0]


@pytest.mark.parametrize("pack", [gzip.compress, lzma.compress, bz2.compress])
@pytest.mark.parametrize("size", [7, 1000, 1 << 16])
def test_a_log_packed_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pack: Callable[[bytes], bytes], size: int
) -> None:
    monkeypatch.setattr(_kernel_log, "_BLOCK", size)
    saved = tmp_path / "kern.log.3"
    first, second = pack(FIRST + b"[  1.0] usb\n" * 300), pack(b"[ 2.0] " + FAULT.encode() + b"\n")

    def found(data: bytes) -> tuple[int, bool]:
        saved.write_bytes(data)
        log = read_file(str(saved))
        return len(list(log)), log.summary().complete

    assert found(first + second) == (2, True)
    for at in (0, 1, len(second) // 2, len(second) - 2):
        damaged = bytearray(second)
        damaged[at] ^= 1
        assert not found(first + damaged)[1], at
    assert not found(first + second[:3])[1]
    if pack is lzma.compress:
        assert found(first + b"\0" * 2000 + second + b"\0" * 8) == (2, True)
        assert not found(first + b"\0" * 3 + second)[1]
        assert not found(first + second + b"\0" * 2001)[1]


def test_what_is_no_saved_log_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (str(tmp_path / "pipe"), "/dev/zero"):
        with pytest.raises(GpuHostError, match="is no regular file"):
            read_file(path)
    (tmp_path / "log.zst").write_bytes(bytes.fromhex("28b52ffd") + b"x")
    with pytest.raises(GpuHostError, match=r"unpack it first \(zstd -d\)"):
        read_file(str(tmp_path / "log.zst"))
    log = read_file("/proc/version")  # it says "Linux version", but nothing of /proc is a log
    assert list(log) == []
    assert not log.summary().complete
