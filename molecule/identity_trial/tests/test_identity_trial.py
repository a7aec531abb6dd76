"""A trial that went well was kept; one that nobody confirms ends by itself.

The latter takes two boots, and runs with TRIALS=all in the environment.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from testinfra.host import Host

testinfra_hosts = ["ansible://pve1"]
GPUS = [f"0000:{bus}:00.0" for bus in ("41", "42", "43", "44")]
TRIAL = "/var/lib/gpuhost/trial.json"
MINUTES = 8 * 60  # two boots under emulation, on a busy machine


def types(host: Host) -> set[str]:
    return {
        host.check_output(f"cat /sys/bus/pci/devices/{address}/iommu_group/type")
        for address in GPUS
    }


def test_identity_was_kept_and_copies_work(
    host: Host, root: Path, run_module: Callable[..., dict[str, Any]]
) -> None:
    assert types(host) == {"identity"}
    health = run_module("gpu_health_info", addresses=GPUS)
    assert [gpu["verdict"] for gpu in health["gpus"]] == ["healthy"] * 4
    report = root / ".build/reports/intel/pve1-identity-trial.json"
    lessons = json.loads(report.read_text(encoding="utf-8"))
    assert lessons["verdict"] == "works", lessons["reason"]
    assert lessons["p2p"] == {"before": "broken", "after": "works"}
    assert lessons["platform"]["iommu"] == "intel"


def test_fallback_flags_are_gone(host: Host) -> None:
    servers = [p for p in host.process.filter() if "sglang" in p.args and "launch" in p.args]
    assert servers
    for server in servers:
        environment = host.check_output(f"tr '\\0' '\\n' </proc/{server.pid}/environ")
        assert "NCCL_P2P_DISABLE" not in environment
        assert "--disable-custom-all-reduce" not in server.args


def test_a_guest_of_somebody_else_that_would_start_is_in_the_way(
    host: Host, run_module: Callable[..., dict[str, Any]]
) -> None:
    host.check_output("qm set 201 --onboot 1")
    refused = run_module("iommu_trial", addresses=GPUS, type="DMA-FQ")
    assert refused["failed"]
    assert "qemu guest 201" in refused["msg"]
    assert not refused["changed"]
    host.check_output("qm set 201 --onboot 0")


@pytest.mark.skipif(os.environ.get("TRIALS") != "all", reason="two boots: set TRIALS=all")
def test_nobody_confirms(host: Host, root: Path, run_module: Callable[..., dict[str, Any]]) -> None:
    armed = run_module("iommu_trial", addresses=GPUS, type="DMA-FQ", confirm_timeout=60)
    assert armed["trial"]["state"] == "armed", armed
    assert types(host) == {"identity"}
    host.run("systemctl reboot")
    end = time.monotonic() + MINUTES
    while (trial := _trial(root)).get("state") != "ended":  # nobody but the host itself reboots it
        assert time.monotonic() < end, trial
        time.sleep(10)
    assert trial["outcome"] == "not confirmed, ended by a reboot"
    assert trial["boot"] != trial["armed_boot"]
    subprocess.run([root / "lab/lab", "up"], check=True, capture_output=True)  # waits for its boot
    assert types(host) == {"identity"}
    said = host.check_output("journalctl --boot=-1 --no-pager --output=cat")
    for address in GPUS:
        assert f"{address} type DMA -> DMA-FQ" in said
    assert "nobody confirmed type DMA-FQ" in said


def _trial(root: Path) -> dict[str, Any]:
    """Return the trial as the host has it, nothing while it does not answer."""
    command = [root / "lab/lab", "ssh", "cat", TRIAL]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except subprocess.TimeoutExpired:
        return {}
    found: dict[str, Any] = json.loads(done.stdout) if done.returncode == 0 else {}
    return found
