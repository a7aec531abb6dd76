"""Measure the guard scan, then compare an audit of the lab host with ping and stock modules.

Usage: make lab-up bench, or run.py ROUNDS. Writes results.md; nothing is asserted. The guard scan
needs no lab: scan.py measures it alone.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import scan
from results import put

ROOT = Path(__file__).parent.parent
INVENTORY = ["-i", str(ROOT / "inventory" / "lab")]
ROUNDS = int(sys.argv[1]) if len(sys.argv) > 1 else 5
COMMANDS = {
    "ping": ["ansible", *INVENTORY, "proxmox_hosts", "-m", "ansible.builtin.ping"],
    "audit.yml": ["ansible-playbook", *INVENTORY, str(ROOT / "playbooks" / "audit.yml")],
    "gpu_host_info": [
        "ansible",
        *INVENTORY,
        "proxmox_hosts",
        "-m",
        "gpuhost.inference.gpu_host_info",
    ],
    "stock modules": ["ansible-playbook", *INVENTORY, str(ROOT / "benchmarks" / "stock_facts.yml")],
}


def seconds(command: list[str]) -> float:
    """Run a command to its end and return its wall time; a failure ends the benchmark."""
    start = time.monotonic()
    subprocess.run(
        command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "LC_ALL": "C.UTF-8"}
    )
    return time.monotonic() - start


def main() -> None:
    """Measure all commands in turns, so that a busy moment hits each alike, and write the table."""
    scan.main(ROUNDS)
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for number in range(ROUNDS):
        for name, command in COMMANDS.items():
            times[name].append(seconds(command))
            print(f"round {number + 1}/{ROUNDS} {name}: {times[name][-1]:.1f} s", flush=True)
    median = {name: statistics.median(values) for name, values in times.items()}
    rows = [
        f"| {name} | {median[name]:.1f} | {min(values):.1f} to {max(values):.1f} "
        f"| {median[name] / median['ping']:.2f} |"
        for name, values in times.items()
    ]
    stock = median["stock modules"] / median["audit.yml"]
    put(
        "Audit of a host",
        [
            f"Lab host with eight GPUs under software emulation on {os.cpu_count()} cores,",
            f"{ROUNDS} interleaved round(s). Read the ratios: a real host is many times faster.",
            "",
            "| what | median s | range s | times ping |",
            "|---|---|---|---|",
            *rows,
            "",
            f"Stock modules take {stock:.1f} times as long as `audit.yml`.",
        ],
    )


if __name__ == "__main__":
    main()
