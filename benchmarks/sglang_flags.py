"""Measure the reading of SGLang's flags against SGLang's own parser; needs no lab and no GPU.

Usage: sglang_flags.py [ROUNDS [RELEASES]]. Writes a section of results.md; nothing is asserted.
The wheels' sources come from the Python registry and are kept in .build/sglang (50 MB a release);
when it is away nothing is measured, loudly.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
COLLECTIONS = ROOT / ".build" / "collections"
sys.path[:0] = [str(COLLECTIONS), str(ROOT / "tests" / "unit")]

from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_flags import (  # noqa: E402
    read_flags,
)
from results import machine, put  # noqa: E402
from timing import Timer  # noqa: E402
from wheels import AWAY, own_parser, released  # noqa: E402

KEPT = ROOT / ".build" / "sglang"
READ = """\
import sys
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_flags import read_flags
read_flags(sys.argv[1])
"""


def chosen(count: int) -> list[str]:
    """Return the newest wheel of each of the newest releases, oldest first."""
    newest = {tuple(re.findall(r"\d+", version)[:3]): version for version in released()}
    return list(newest.values())[-count:]


def row(version: str, rounds: int) -> str:
    """Compare both on one release, in turns."""
    command, environment = own_parser(version, KEPT)
    command.remove("-B")  # as an installation, it keeps its bytecode
    package = f"{KEPT}/whole/{version}/sglang"
    ours = [sys.executable, "-B", "-c", READ, package]
    here = {**os.environ, "PYTHONPATH": str(COLLECTIONS)}
    timer = Timer()

    def parse() -> None:
        subprocess.run(command, env=environment, check=True, capture_output=True)

    def read() -> None:
        subprocess.run(ours, env=here, check=True, capture_output=True)

    for _round in range(rounds):
        timer.measure("own", parse)
        timer.measure("process", read)
        timer.measure("reader", lambda: read_flags(package))
    said = json.loads(subprocess.check_output(command, env=environment))["flags"]
    theirs = {spelling for flag in said for spelling in flag["strings"]}
    missing = theirs - read_flags(package).spellings().keys()
    same = "all" if not {one for one in missing if one.startswith("--")} else f"not {missing}"
    own, process = timer.wall["own"], timer.wall["process"]
    cells = [version, len(said), same, f"{own:.2f}", f"{process:.2f}", f"{own / process:.1f}"]
    return f"| {' | '.join(map(str, cells))} | {timer.wall['reader']:.2f} |"


def main(rounds: int = 3, count: int = 14) -> None:
    """Measure, and write the section."""
    rows = []
    try:
        for version in chosen(count):
            rows.append(row(version, rounds))
            print(rows[-1], flush=True)
    except AWAY as error:
        print(f"NO FLAGS MEASURED: the Python registry is away ({error!r})", file=sys.stderr)
        return
    put(
        "Flags of SGLang",
        [
            f"The best of {rounds} rounds, in turns, on {machine()},",
            f"at a load average of {os.getloadavg()[1]:.0f}; above 2 the seconds are those of a",
            "busy machine, and only the ratio says something.",
            "SGLang's own parser is built with stubs in the place of torch, transformers, triton",
            "and all else that it imports, and has its bytecode: `--help` of a real installation",
            "takes longer.",
            "Both are whole processes; the last column is the reading alone.",
            "",
            "| release | flags | found by ours | own parser s | ours s | times ours | reading s |",
            "|---|---|---|---|---|---|---|",
            *rows,
        ],
    )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
