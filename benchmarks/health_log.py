"""Measure the reading of kernel logs against grep and journalctl; needs no lab and no privileges.

Usage: health_log.py [ROUNDS [LARGEST MEGABYTES]]. Writes a section of results.md; nothing is
asserted. Logs are made in a temporary folder, 1.1 GB at most. The journal is made with
systemd-journal-remote (Debian package of that name); without it that part is left out, loudly.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / ".build" / "collections")]

from ansible_collections.gpuhost.inference.plugins.module_utils import (  # noqa: E402
    _faults,
    _kernel_log,
    _log_source,
)
from results import machine, put  # noqa: E402
from timing import Timer  # noqa: E402

MEGABYTES = (1, 10, 100, 1000)
EVERY = 1000  # one line in so many matters
FLOOD = 800_000
SLOW_ROUNDS = 2  # of what takes long
ENTRIES = 500_000
BOOT = "7d5e0c3b9a1f4e62b8c7d6e5f4a3b2c1"
BEGINNING = "Linux version 6.14.11-5-pve (build@proxmox)"
OTHERS = (
    "usb 3-{0}: new high-speed USB device number {1} using xhci_hcd",
    "vmbr0: port {0}(tap{1}i0) entered blocking state",
    'audit: type=1400 audit(17{1}.{0}:33): apparmor="STATUS" operation="profile_load" name="lxc"',
    "EXT4-fs (dm-{0}): mounted filesystem with ordered data mode. Quota mode: none. {1}",
    "perf: interrupt took too long ({1}01 > {0}), lowering kernel.perf_event_max_sample_rate",
    "tg3 0000:0{0}:00.0 eno1: Link is up at 1000 Mbps, full duplex {1}",
)
HIT = "NVRM: Xid (PCI:0000:{:02x}:00): {}, pid=77, name=python3, Ch 00000008"


def messages(every: int) -> Iterator[str]:
    """Yield what a kernel might print, one message in so many about a GPU."""
    pool = itertools.cycle([text.format(n % 9, n % 97) for n in range(873) for text in OTHERS])
    yield BEGINNING
    for number in itertools.count(1):
        yield next(pool) if number % every else HIT.format(0x41 + number // every % 8, 13)


def flood() -> Iterator[str]:
    """Yield 29 different messages over and over."""
    yield BEGINNING
    yield from itertools.cycle([HIT.format(0x41 + n % 8, 63 + n) for n in range(29)])


def save(path: Path, texts: Iterator[str], size: int) -> None:
    """Write so many bytes as dmesg prints them."""
    written = 0
    with path.open("w", encoding="utf-8") as file:
        for number, text in enumerate(texts):
            written += file.write(f"[{number / 77:12.6f}] {text}\n")
            if written >= size:
                return


def grep(path: Path) -> None:
    """Search with the same alternation; not into /dev/null, where grep stops at the first match."""
    pattern = _log_source.grep_pattern(_log_source.WORDS)
    subprocess.run(
        ["grep", "-a", "-E", "-e", pattern, str(path)],
        check=True,
        stdout=subprocess.PIPE,
        env={**os.environ, "LC_ALL": "C"},
    )


def ours(path: Path) -> None:
    """Read and judge a saved log."""
    health = _faults.judge(_kernel_log.read_file(str(path)), None)
    if not health.log.complete:
        raise SystemExit(f"{path}: {health.log.gaps}")


def python_alone(path: Path) -> None:
    """Read and judge it without grep."""
    source = _log_source.Source("file", lambda: _kernel_log._file_blocks(str(path)))
    _faults.judge(_kernel_log.KernelLog([source]), None)


def memory(path: Path) -> int:
    """Return the largest memory of a process that judges a log, in MiB."""
    said = subprocess.check_output([sys.executable, __file__, "--memory", str(path)])
    return int(said) // 1024


def files(folder: Path, rounds: int, largest: int) -> list[str]:
    """Compare with grep over sizes, and measure a flood."""
    rows = []
    path = folder / "kern.log"
    peaks = []
    for megabytes in [size for size in MEGABYTES if size <= largest]:
        save(path, messages(EVERY), megabytes * 1_000_000)
        timer = Timer()
        for number in range(rounds):
            timer.measure("grep", lambda: grep(path))
            timer.measure("ours", lambda: ours(path))
            if megabytes <= 100 and number < SLOW_ROUNDS:
                timer.measure("python", lambda: python_alone(path))
        rows.append(timer.row(f"{megabytes} MB, of every {EVERY} lines one", "ours", "grep"))
        if megabytes == 100:
            rows.append(timer.row("the same without grep", "python", "grep"))
        peaks.append(f"{memory(path)} MiB at {megabytes} MB")
        print(rows[-1], flush=True)
    save(path, flood(), FLOOD * 82)
    lines = sum(1 for _line in path.open("rb"))
    timer = Timer()
    for _number in range(SLOW_ROUNDS):
        timer.measure("grep", lambda: grep(path))
        timer.measure("ours", lambda: ours(path))
    rows.append(timer.row(f"flood: {lines:,} lines, every one, 29 different", "ours", "grep"))
    peaks.append(f"{memory(path)} MiB with the flood")
    print(rows[-1], flush=True)
    path.unlink()
    return [
        "| saved log | grep s | read and judged s | times grep | processor time, times grep |",
        "|---|---|---|---|---|",
        *rows,
        "",
        f"Memory of a process that does it: {', '.join(peaks)}.",
    ]


def journal(folder: Path, rounds: int) -> list[str]:
    """Compare with a plain `journalctl -k -b`."""
    path = f"/usr/lib/systemd:/lib/systemd:{os.environ['PATH']}"
    maker = shutil.which("systemd-journal-remote", path=path)
    if maker is None or shutil.which("journalctl") is None:
        print("NO JOURNAL MEASURED: install systemd-journal-remote to make one", file=sys.stderr)
        return ["The journal was NOT measured: systemd-journal-remote is not installed."]
    export = folder / "entries"
    with export.open("w", encoding="utf-8") as file:
        for number, text in enumerate(itertools.islice(messages(EVERY), ENTRIES)):
            micros = number * 13_000
            file.write(
                f"__REALTIME_TIMESTAMP={1_790_000_000_000_000 + micros}\n"
                f"__MONOTONIC_TIMESTAMP={4_000_000 + micros}\n_BOOT_ID={BOOT}\nPRIORITY=6\n"
                "_TRANSPORT=kernel\nSYSLOG_FACILITY=0\nSYSLOG_IDENTIFIER=kernel\n_HOSTNAME=pve\n"
                f"_SOURCE_MONOTONIC_TIMESTAMP={micros}\nMESSAGE={text}\n\n"
            )
    made = folder / "journal"
    made.mkdir()
    subprocess.run(
        [maker, f"--output={made}/kernel.journal", str(export)], check=True, capture_output=True
    )
    export.unlink()
    here = ["journalctl", f"--directory={made}"]

    def plain() -> None:
        subprocess.run(
            [*here, "--no-pager", "-k", "-b", BOOT], check=True, stdout=subprocess.DEVNULL
        )

    def run(command: Sequence[str], timeout: float) -> Iterator[bytes]:
        return _kernel_log.journalctl([*here, *command[1:]], timeout)

    def unable(command: Sequence[str], timeout: float) -> Iterator[bytes]:
        """Run a journalctl that was built without pattern matching."""
        if any(word.startswith("--grep") for word in command):
            raise _kernel_log.CommandError("journalctl failed", 1, "Compiled without")
        return run(command, timeout)

    def judged(runner: _kernel_log.Runner) -> None:
        log = _kernel_log.read_live(["journal"], boot=BOOT, timeout=300, run=runner)
        health = _faults.judge(log, None)
        if not health.log.complete:
            raise SystemExit(f"journal: {health.log.gaps}")

    timer = Timer()
    for number in range(rounds):
        timer.measure("plain", plain)
        timer.measure("ours", lambda: judged(run))
        if number < SLOW_ROUNDS:
            timer.measure("unable", lambda: judged(unable))
    version = subprocess.check_output(["journalctl", "--version"], text=True).split("\n", 1)[0]
    rows = [
        timer.row(f"{ENTRIES:,} entries, of every {EVERY} one", "ours", "plain"),
        timer.row("the same, where journalctl cannot filter", "unable", "plain"),
    ]
    print(*rows, sep="\n", flush=True)
    return [
        "| journal | `journalctl -k -b` s | read and judged s | times that | processor time |",
        "|---|---|---|---|---|",
        *rows,
        "",
        f"Journal made by and read with {version}, into /dev/null.",
    ]


def main(rounds: int = 5, largest: int = 1000) -> None:
    """Measure all in turns, so that a busy moment hits each alike, and write the section."""
    with tempfile.TemporaryDirectory() as folder:
        tables = [*files(Path(folder), rounds, largest), "", *journal(Path(folder), rounds)]
    put(
        "Kernel log",
        [
            f"Logs are made up and in the page cache; the best of {rounds} rounds, in turns, on",
            f"{machine()}. Grep searches for the same words; ours also",
            "counts lines, looks for holes, and judges the GPUs.",
            "",
            *tables,
        ],
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--memory"]:
        ours(Path(sys.argv[2]))
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        print(status.partition("VmHWM:")[2].split()[0])  # ru_maxrss is inherited from the parent
    else:
        main(*map(int, sys.argv[1:3]))
