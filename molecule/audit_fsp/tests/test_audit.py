"""A host whose GPUs failed in their security processor (FSP): the audit says so."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from testinfra.host import Host

testinfra_hosts = ["ansible://pve1"]
BROKEN = [f"0000:{bus}:00.0" for bus in ("41", "42", "43", "44", "81", "82")]


def test_verdict_names_each_gpu_and_quotes_the_log(
    host: Host, run_module: Callable[..., dict[str, Any]]
) -> None:
    assert "iommu=pt" in host.check_output("cat /proc/cmdline")
    health = run_module("gpu_health_info", check=True)
    assert [gpu["address"] for gpu in health["gpus"] if gpu["fsp"] == "failed"] == BROKEN
    for gpu in health["gpus"]:
        if gpu["fsp"] == "failed":
            assert gpu["verdict"] == "failed"
            assert any("0x177" in line for line in gpu["evidence"]), gpu


def test_audit_reports_and_fails_only_when_asked(
    root: Path, run_playbook: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    audit = run_playbook("audit")
    assert audit.returncode == 0, audit.stdout + audit.stderr
    page = (root / ".build/reports/pve1.html").read_text(encoding="utf-8")
    for address in BROKEN:
        assert address in page
    assert "Error code: 0x177" in page
    assert (
        json.loads((root / ".build/reports/pve1.json").read_text())["headline"]["tone"] == "problem"
    )

    asked = run_playbook("audit", "-e", "audit_fail_on=error")
    assert asked.returncode == 2
    for address in BROKEN:
        assert f"error fsp-failed on {address}" in asked.stdout + asked.stderr


def test_audit_changes_nothing(
    host: Host,
    run_playbook: Callable[..., subprocess.CompletedProcess[str]],
    assert_neighbour_undisturbed: Callable[[Host], None],
) -> None:
    run = run_playbook("audit")
    assert "changed=0" in run.stdout
    assert host.check_output("pct status 100") == "status: stopped"
    assert_neighbour_undisturbed(host)
