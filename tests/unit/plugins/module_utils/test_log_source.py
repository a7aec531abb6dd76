"""What is dropped before it is looked at, and that every way of reading gives the same."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ansible_collections.gpuhost.inference.plugins.module_utils import _kernel_log, _log_source
from ansible_collections.gpuhost.inference.plugins.module_utils._command import (
    CommandError,
    stream,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._fault_kinds import (
    KINDS,
    Kind,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._fault_log import collect
from ansible_collections.gpuhost.inference.plugins.module_utils._faults import conclude, judge
from ansible_collections.gpuhost.inference.plugins.module_utils._kernel_log import (
    LogSummary,
    read_file,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._log_forms import (
    JOURNALD,
    Record,
    parse,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._log_source import Source
from hypothesis import given, settings
from hypothesis import strategies as st

LOGS = sorted((Path(__file__).parents[3] / "fixtures" / "kernel_logs").glob("*.log"))
FIRST = b"[    0.000000] Linux version 6.14.11-5-pve"
FAULT = b"[   71.250000] NVRM: GPU0 kfspWaitForResponse: FSP command timed out"
USB = [b"[    5.500000] usb 1-1: new device"] * 200
SMALL = 1 << 12

LINES = st.sampled_from(
    [
        FIRST,
        FAULT,
        b"",
        b" SUBSYSTEM=pci",
        b"[   72.000000] usb 1-2: new device",
        b"[    3.000000] vfio-pci 0000:c3:00.0: reset done",
        b"[   73.000000] [  T812] NVRM: x\r",
        b"\0\0\0[   74.000000] NVRM: behind zeros",
        b"\0" * 40,
        b"[   75.0] ** 7 printk messages dropped **",
        b"\xff\xfe nouveau \x80",
        b"nothing " * (SMALL // 4),
        b"NVRM: " + b"y" * SMALL,
        b"y" * SMALL + b" NVRM: late",
        b'{"MESSAGE":[78,86,82,77],"_BOOT_ID":"a","SYSLOG_IDENTIFIER":"kernel"}',
        b'{"MESSAGE":[78,79],"_BOOT_ID":"a","SYSLOG_IDENTIFIER":"kernel"}',
        b'{"MESSAGE":"Linux version 6.1","_BOOT_ID":"b","__MONOTONIC_TIMESTAMP":"7",'
        b'"SYSLOG_IDENTIFIER":"kernel","SYSLOG_FACILITY":"0"}',
        b"6,0,0,-;Linux version 6.14",
        b"4,1,71250000,-;NVRM: z",
        b"4,9,71250000,-;other",
        b"\n" * SMALL,
        b"NVRM: " + b"z" * (SMALL // 2) + b" late",
        b"[   74.500000] pve python3[77]: the log says",
        b"Nov 29 14:15:13 pve kernel: NVRM: The NVIDIA GPU 0000:c7:00.0",
        b"      NVRM: a further line",
        b"-- Boot 5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e --",
        b"-- Reboot --",
        b"[   75.5] arm_smmu_evtq_thread: 370 callbacks suppressed",
        b'{"MESSAGE":"NVRM: w","SYSLOG_IDENTIFIER":"kernel","SYSLOG_FACILITY":"1"}',
        b'{"MESSAGE":"NVRM: w","SYSLOG_IDENTIFIER":"kernel","_TRANSPORT":"syslog"}',
        b'{"MESSAGE":"NVRM: w","SYSLOG_IDENTIFIER":"kernel","_BOOT_ID":"b"}',
    ]
)


def plain(path: str) -> tuple[list[Record], Source]:
    source = Source("file", lambda: _kernel_log._file_blocks(path))
    return list(source), source


def quick(path: str) -> tuple[list[Record], Source]:
    [source] = read_file(path).sources
    return list(source), source


def facts(source: Source) -> tuple[object, ...]:
    times = (source.first and source.first.time, source.last and source.last.time)
    return (source.error, source.lines, source.boot_id, source.complete, source.gaps(), times)


@pytest.fixture(autouse=True, scope="module")
def short() -> Iterator[None]:
    """Lines are too long from 4 KiB on, so that short files show it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_log_source, "_LONGEST_LINE", SMALL)
        patch.setattr(_kernel_log, "_BLOCK", SMALL)
        yield


@settings(max_examples=80, deadline=None)
@given(lines=st.lists(LINES, max_size=12), end=st.sampled_from([b"", b"\n", b"\r\n\n"]))
def test_grep_and_python_read_the_same(lines: list[bytes], end: bytes) -> None:
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"\n".join(lines) + end)
        file.flush()
        records, source = quick(file.name)
        expected, by_python = plain(file.name)
    assert records == expected
    # a line that is too long but has no word is only seen by Python, which then doubts the log
    if not any(len(line) > SMALL and b"NVRM" not in line for line in lines):
        assert facts(source) == facts(by_python)
    else:
        assert source.complete >= by_python.complete


TOLD = b"Nov 29 14:15:13 pve kernel: NVRM: The NVIDIA GPU 0000:c7:00.0"
FURTHER = b"      NVRM: a further line"
PROGRAM = b"Nov 29 14:15:13 pve python3[77]: it said"


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        pytest.param([TOLD, FURTHER, FURTHER], 3, id="of the kernel's message"),
        pytest.param([TOLD, PROGRAM, FURTHER, b"      x", FURTHER], 1, id="of a program's"),
        pytest.param([TOLD, PROGRAM, *[b"      x"] * SMALL, FURTHER], 1, id="far away"),
        pytest.param([TOLD, PROGRAM + b"x" * SMALL, FURTHER], 1, id="long"),
        pytest.param([TOLD, FURTHER, PROGRAM, FURTHER, TOLD, FURTHER], 4, id="in turns"),
        pytest.param([FURTHER, PROGRAM, FURTHER], 1, id="none before"),
        pytest.param(
            [b"\n" * 2 * SMALL, b"6,0,0,-;Linux version 6", b"4,1,9,-;NVRM"], 2, id="kmsg"
        ),
        pytest.param([TOLD, b"y" * 70000, b"7: " + FURTHER, FURTHER], 3, id="like grep's"),
    ],
)
def test_whose_further_lines_are_is_known_to_both(
    tmp_path: Path, lines: list[bytes], found: int
) -> None:
    log = tmp_path / "kern.log"
    log.write_bytes(b"\n".join(lines) + b"\n")
    expected, by_python = plain(str(log))
    records, source = quick(str(log))
    assert records == expected
    assert len(records) == found
    assert facts(source) == facts(by_python)


@pytest.mark.parametrize("size", [1, 3, 30, 1000])
def test_the_offsets_of_grep_are_taken_away(tmp_path: Path, size: int) -> None:
    log = tmp_path / "kern.log"
    lines = [TOLD, PROGRAM, FURTHER, b"7: NVRM", b"NVRM " * 40, FURTHER]
    log.write_bytes(b"\n".join(lines) + b"\n")
    said = b"0:%s\n105:%s\n132:%s\n140:%s\n341:%s\n" % (TOLD, *lines[2:])
    blocks = [said[at : at + size] for at in range(0, len(said), size)]
    made = b"".join(_kernel_log._with_first_lines(str(log), blocks))
    assert made == log.read_bytes()


@pytest.mark.parametrize("given_before", [0, 1, 2])
def test_when_grep_fails_python_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given_before: int
) -> None:
    log = tmp_path / "kern.log"
    log.write_bytes(b"\n".join([FIRST, FAULT, FAULT.replace(b"71", b"73"), b"[ 99.0] end"]) + b"\n")
    expected, by_python = plain(str(log))

    def grep(path: str) -> Iterator[bytes]:
        yield b"".join(line + b"\n" for line in [FIRST, FAULT][:given_before])
        raise CommandError("grep failed (2): memory exhausted", 2, "memory exhausted")

    monkeypatch.setattr(_kernel_log, "_grep", grep)
    records, source = quick(str(log))
    assert records == expected
    assert len(records) == 3
    assert facts(source) == facts(by_python)
    assert source.complete


def test_without_grep_python_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "kern.log"
    log.write_bytes(FIRST + b"\n" + FAULT)
    monkeypatch.setenv("PATH", str(tmp_path))
    records, source = quick(str(log))
    assert len(records) == 2
    assert source.complete


def test_a_file_that_is_one_line_of_zeros_needs_little_memory(tmp_path: Path) -> None:
    log = tmp_path / "kern.log"
    with log.open("wb") as file:
        file.write(FIRST + b"\n")
        file.seek(1 << 30)
        file.write(b"\n" + FAULT + b"\n")
    code = (
        "from ansible_collections.gpuhost.inference.plugins.module_utils._kernel_log import *\n"
        f"log = read_file({str(log)!r})\n"
        "print(len(list(log)), log.summary().complete, log.summary().lines)\n"
    )
    said = stream([sys.executable, "-c", code], 300, memory=400 << 20)
    roots = os.pathsep.join(path for path in sys.path if "collections" in path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", roots)
        assert b"".join(said) == b"2 False 3\n"


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.pattern], ids=lambda kind: kind.id)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_what_a_row_of_the_table_matches_is_not_left_out(kind: Kind, data: st.DataObject) -> None:
    """NVIDIA's driver begins its lines with NVRM; what others print must have a word itself."""
    text = data.draw(st.from_regex(re.compile(kind.pattern or "", re.ASCII))).replace("\n", " ")
    by_driver = "open-gpu-kernel-modules" in kind.source or "of the driver" in kind.source
    line = f"NVRM: {text}" if by_driver else text
    assert list(_log_source.promising(line.encode("utf-8", "replace")))


@pytest.mark.parametrize(
    "line",
    [
        "pci 0000:c1:00.0: not ready 65535ms after bus reset; giving up",
        "pci 0000:41:00.0: [10de:2bb5] type 00 class 0x030000 PCIe Endpoint",
        "pci 0000:40:01.1: PCI bridge to [bus 41]",
        "pcieport 0000:40:01.1: AER: Uncorrectable (Fatal) error message received from 41:00.0",
        "pcieport 0000:40:01.1: PCIe Bus Error: severity=Corrected, type=Physical Layer",
        "pcieport 0000:40:01.1: DPC: containment event, status:0x1f01 source:0x4100",
        "AMD-Vi: Event logged [IO_PAGE_FAULT device=41:00.0 domain=0x1c address=0x2000 flags=0x20]",
        "DMAR: [DMA Write NO_PASID] Request device [c1:00.0] fault addr 0x2000 [fault reason 0x71]",
        "arm-smmu-v3 arm-smmu-v3.0.auto: event: F_TRANSLATION client: 0000:41:00.0 sid: 0x100",
        "dmar_fault: 3400 callbacks suppressed",
        "** 21 printk messages dropped **",
    ],
)
def test_what_the_code_looks_for_is_not_left_out(line: str) -> None:
    assert list(_log_source.promising(line.encode()))


def test_each_word_is_found_by_both_patterns() -> None:
    for word in _log_source.WORDS:
        text = b"usb " + word + b"\n"
        assert re.search(_log_source.pcre_pattern(_log_source.WORDS).encode(), text)
        grep = ["grep", "-c", "-E", "-e", _log_source.grep_pattern(_log_source.WORDS)]
        assert subprocess.run(grep, input=text, capture_output=True, check=True).stdout == b"1\n"
    assert not re.search(_log_source.pcre_pattern(_log_source.WORDS), "usb 1-1: new device")


@pytest.mark.parametrize("log", LOGS, ids=lambda log: log.stem)
def test_no_line_that_counts_is_left_out(log: Path) -> None:
    """The words stay in step with the table of faults and all the code around it."""
    lines = log.read_bytes().decode("utf-8", "replace").split("\n")
    everything = [record for record in map(parse, lines) if record]
    found = collect(record for record in everything if record.source != JOURNALD)
    assert conclude(found, LogSummary(), None).faults == judge(read_file(str(log)), None).faults


# -- what may be missing --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "gap"),
    [
        pytest.param([FIRST, b"\0" * 64 + FAULT], "bytes of zero", id="zeros"),
        pytest.param([FIRST, b"\0" * 64, USB[0]], "bytes of zero", id="only zeros"),
        pytest.param([FIRST, b"NVRM: " + b"x" * SMALL], "of more than 1 MiB", id="long"),
        pytest.param([FIRST, b"x" * 3 * SMALL + b"NVRM: x"], "of more than 1 MiB", id="late word"),
        pytest.param([FIRST, FAULT, b"[    2.5] vfio-pci: x"], "time goes back", id="another boot"),
        pytest.param([FIRST, FAULT, b"[    2.5] usb 2-2: x"], "time goes back", id="at the end"),
        pytest.param([FIRST, *USB, b"4,77,9000000,-;NVRM: x"], "after other lines", id="mixed"),
        pytest.param([FIRST, *USB, b"4,77,9000000,-;usb 2-2"], "after other lines", id="mixed end"),
        pytest.param(
            [FIRST, FAULT, USB[0], *[b""] * 2 * SMALL], "time goes back", id="far from the end"
        ),
        pytest.param(
            [FIRST, FAULT, USB[0] + b" " * 2 * SMALL + b"x"], "time goes back", id="a long end"
        ),
        pytest.param([b"[ 9.0] foo: Linux version 9"], "first messages", id="only quoted"),
        pytest.param(
            [b"", b" SUBSYSTEM=usb", b"6,7,0,-;Linux version 6.14"], "first messages", id="kmsg"
        ),
    ],
)
@pytest.mark.parametrize("read", [plain, quick])
def test_a_log_with_a_hole_is_not_complete(
    tmp_path: Path,
    read: Callable[[str], tuple[list[Record], Source]],
    lines: list[bytes],
    gap: str,
) -> None:
    log = tmp_path / "kern.log"
    log.write_bytes(b"\n".join(lines) + b"\n")
    _records, source = read(str(log))
    assert not source.complete
    assert any(gap in said for said in source.gaps()), source.gaps()


def test_the_last_line_may_be_of_another_boot(tmp_path: Path) -> None:
    log = tmp_path / "boots.json"
    log.write_bytes(
        b'{"MESSAGE":"Linux version 6.1","_BOOT_ID":"a","SYSLOG_IDENTIFIER":"kernel"}\n'
        b'{"MESSAGE":"usb","_BOOT_ID":"b","SYSLOG_IDENTIFIER":"kernel"}\n'
    )
    _records, source = quick(str(log))
    assert (source.boot_id, source.complete) == ("b", False)


def test_sequence_numbers_of_two_boots(tmp_path: Path) -> None:
    log = tmp_path / "kmsg.log"
    boot = b"6,0,0,-;Linux version 6.14\n SUBSYSTEM=x\n6,1,90000000,-;usb\n"
    for second, complete in ((boot, True), (boot[::-1], False), (b"6,0,9,-;a\n6,3,9,-;b\n", False)):
        log.write_bytes(boot.replace(b",1,", b",4,") + second)
        _records, source = quick(str(log))
        assert source.complete is complete, second
    log.write_bytes(boot)
    assert quick(str(log))[1].lines == 2
