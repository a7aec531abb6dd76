"""Measure the guard scan, `read_gpus`, on constructed hosts; needs no lab and no privileges.

Usage: scan.py [ROUNDS]. Writes a section of results.md; nothing is asserted.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / ".build" / "collections"), str(ROOT / "tests" / "unit")]

import trees  # noqa: E402
from ansible_collections.gpuhost.inference.plugins.module_utils._gpu import (  # noqa: E402
    read_gpus,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader  # noqa: E402
from build_trees import Tree  # noqa: E402
from results import machine, put  # noqa: E402

OPEN_FILES = 40
MAPPINGS = 120
PROCESSES = (500, 1000, 2000)
GPUS = (8, 16, 32, 64)


def build(root: Path, gpus: int, processes: int) -> Reader:
    """Write a host of which every 20th process has a GPU open, and every 40th mapped."""
    tree = Tree("")
    tree.host()
    for at in range(gpus):
        address = f"{at // 16:04x}:{0x21 + 2 * (at % 16):02x}:00.0"
        tree.gpu(address, group=at, driver="nvidia", node=at % 2)
    trees.unpack("\n".join(tree.lines), root)
    kinds = ("socket:[{}]", "pipe:[{}]", "anon_inode:[eventpoll]", "/usr/lib/file{}", "socket:[{}]")
    for number in range(10):
        file = root / f"usr/lib/file{number}"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("library of some length, not a node\n")
    library = "7f{:08x}000-7f{:08x}000 r-xp 00001000 00:1c {} {}/usr/lib/file{}\n"
    blank = " " * 20
    maps = "".join(library.format(at, at + 1, at, blank, at % 10) for at in range(MAPPINGS - 1))
    for at in range(processes):
        folder = root / f"proc/{1000 + at}"
        (folder / "fd").mkdir(parents=True)
        (folder / "cmdline").write_bytes(b"/usr/bin/program\0--option\0")
        (folder / "cgroup").write_text("0::/system.slice/program.service\n")
        for fd in range(OPEN_FILES - 1):
            (folder / "fd" / str(fd)).symlink_to(kinds[fd % 5].format(fd % 10))
        node = f"/dev/nvidia{at % gpus}" if at % 20 == 0 else "/dev/null"
        (folder / "fd" / str(OPEN_FILES)).symlink_to(node)
        held = f"/dev/nvidia{at % gpus}" if at % 40 == 0 else "/memfd:buffer (deleted)"
        mapped = "7ffc00000000-7ffc00001000 rw-s 00000000 00:05 700"
        (folder / "maps").write_text(f"{maps}{mapped} {blank}{held}\n")
        if at % 40 == 0:
            (folder / "map_files").mkdir()
            (folder / "map_files/7ffc00000000-7ffc00001000").symlink_to(held)
    return Reader(str(root))


def measure(host: Reader, rounds: int) -> tuple[list[float], list[float]]:
    """Return wall and processor seconds of some scans, children included."""
    wall, busy = [], []
    read_gpus(host)  # the first one reads from disk
    for _number in range(rounds):
        before, start = sum(os.times()[:4]), time.monotonic()
        read_gpus(host)
        wall.append(time.monotonic() - start)
        busy.append(sum(os.times()[:4]) - before)
    return wall, busy


def main(rounds: int = 5) -> None:
    """Measure all sizes and write the table."""
    sizes = [(gpus, PROCESSES[-1]) for gpus in GPUS[:-1]]
    sizes += [(GPUS[-1], processes) for processes in PROCESSES]  # the largest comes last
    results = []
    for gpus, processes in sizes:
        with tempfile.TemporaryDirectory() as folder:
            wall, busy = measure(build(Path(folder), gpus, processes), rounds)
        results.append((gpus, processes, wall, statistics.median(busy)))
        print(f"{gpus} GPUs, {processes} processes: {min(wall):.2f} s", flush=True)
    largest = results[-1][3]
    rows = [
        f"| {gpus} | {processes} | {min(wall):.2f} | {statistics.median(wall):.2f} "
        f"| {max(wall):.2f} | {busy:.2f} | {busy / largest:.2f} |"
        for gpus, processes, wall, busy in results
    ]
    put(
        "Guard scan",
        [
            "`read_gpus` on a constructed host: all that the guards of a change ask about GPUs.",
            f"Each process has {OPEN_FILES} open files and {MAPPINGS} mappings; every 20th holds a",
            f"GPU. {rounds} scans after a first one, on {machine()}.",
            "Processor seconds are the work itself, wall seconds also other work on the computer.",
            "",
            "| GPUs | processes | best s | median s | worst s | processor s | to the last row |",
            "|---|---|---|---|---|---|---|",
            *rows,
        ],
    )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
