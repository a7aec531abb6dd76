"""Two GPUs whose security processor (FSP) failed: told, not made worse, and brought back.

The tests are one story and run in order. The power is cut once.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from testinfra.host import Host

testinfra_hosts = ["ansible://pve1"]
RunModule = Callable[..., dict[str, Any]]
RunPlaybook = Callable[..., subprocess.CompletedProcess[str]]
BROKEN = ["0000:41:00.0", "0000:42:00.0"]
# what the layout declares, and what belongs to the other tenant
DECLARED = """\
0000:41:00.0 nvidia DMA-FQ
0000:42:00.0 nvidia DMA-FQ
0000:43:00.0 nvidia DMA-FQ
0000:44:00.0 nvidia DMA-FQ
0000:81:00.0 vfio-pci
0000:82:00.0 vfio-pci
lxc running
qemu running"""
LOOK = """
cd /sys/bus/pci/devices
for gpu in 0000:4[1-4]:00.0; do
    echo $gpu $(basename $(readlink $gpu/driver)) $(cat $gpu/iommu_group/type)
done
for gpu in 0000:8[12]:00.0; do echo $gpu $(basename $(readlink $gpu/driver)); done
pct status 100 | sed s/status:/lxc/
qm status 200 | sed s/status:/qemu/
"""


def test_verdict_names_each_gpu_and_quotes_the_log(run_module: RunModule) -> None:
    health = run_module("gpu_health_info", check=True)
    assert [gpu["address"] for gpu in health["gpus"] if gpu["fsp"] == "failed"] == BROKEN
    for gpu in health["gpus"]:
        if gpu["address"] in BROKEN:
            assert gpu["verdict"] == "failed"
            assert gpu["ladder"][0] == "power-off"
            assert any("0x177" in line for line in gpu["evidence"]), gpu


def test_audit_reports_and_fails_only_when_asked_and_changes_nothing(
    host: Host,
    root: Path,
    run_playbook: RunPlaybook,
    assert_neighbour_undisturbed: Callable[[Host], None],
) -> None:
    before = host.check_output(LOOK)
    audit = run_playbook("audit")
    assert audit.returncode == 0, audit.stdout + audit.stderr
    page = (root / ".build/reports/pve1.html").read_text(encoding="utf-8")
    for address in BROKEN:
        assert address in page
    assert "Error code: 0x177" in page
    report = json.loads((root / ".build/reports/pve1.json").read_text())
    assert report["headline"]["tone"] == "problem"

    asked = run_playbook("audit", "-e", "audit_fail_on=error")
    assert asked.returncode == 2
    assert "changed=0" in asked.stdout
    for address in BROKEN:
        assert f"error fsp-failed on {address}" in asked.stdout + asked.stderr
    assert host.check_output(LOOK) == before
    assert_neighbour_undisturbed(host)


def test_no_reset_helps_and_that_is_told(host: Host, run_module: RunModule) -> None:
    result = run_module("gpu_reset", addresses=BROKEN[:1], methods=["rebind", "bus"])
    assert result["failed"]
    assert [(one["method"], one["outcome"], one["helped"]) for one in result["attempts"]] == [
        ("rebind", "done", False),
        ("bus", "done", False),
    ]
    assert all("0x177" in one["log"][0] for one in result["attempts"])
    assert "these steps did not help: rebind, bus; power-off needed" in result["msg"]
    assert f"{BROKEN[0]} nvidia identity" in host.check_output(LOOK)


def test_nothing_is_done_while_the_machine_of_another_tenant_runs(
    host: Host, run_playbook: RunPlaybook, assert_neighbour_undisturbed: Callable[[Host], None]
) -> None:
    before = host.check_output(LOOK)
    for power in ([], ["-e", "host_power_tasks="]):
        run = run_playbook("recover", "-e", "host_reboot_allowed=true", *power)
        said = run.stdout + run.stderr
        assert run.returncode == 2, said
        assert f"{BROKEN[1]} is failed: its FSP did not come up" in said
        assert "Needed: power-off (power the host off and take it from the mains" in said
        assert ("host_power_tasks is not set" in said) == bool(power)
        assert "guest qemu 201 (northlight-train) runs and is not of the layout" in said
        assert "changed=0" in said
    assert host.check_output(LOOK) == before
    assert_neighbour_undisturbed(host)


def test_the_way_back(host: Host, run_module: RunModule, run_playbook: RunPlaybook) -> None:
    host.check_output("qm shutdown 201")  # by its owner
    # it cannot run as long as its GPUs have another type, so nobody starts it again by itself
    assert host.run("pct start 100 || exit 1").rc == 1
    boot = host.check_output("cat /proc/sys/kernel/random/boot_id")
    run = run_playbook("recover", "-e", "host_reboot_allowed=true")
    said = run.stdout + run.stderr
    assert run.returncode == 0, said
    assert host.check_output("cat /proc/sys/kernel/random/boot_id") != boot
    host.check_output("pct status 100 | grep running || pct start 100")
    assert host.check_output(LOOK) == DECLARED
    health = run_module("gpu_health_info")
    assert {gpu["address"]: gpu["fsp"] for gpu in health["gpus"] if gpu["fsp"] != "unknown"} == {
        f"0000:{bus}:00.0": "ok" for bus in ("41", "42", "43", "44")
    }
    steps = [
        "judged:",
        "set the declared types",
        "power-off for",
        "GPUs, types and drivers",
        "healthy",
    ]
    places = [said.rfind(f'"what": "{step}') for step in steps]
    host.check_output("qm status 201 | grep running || qm start 201")  # its owner again
    assert -1 not in places
    assert places == sorted(places)


def test_afterwards_there_is_nothing_to_do(run_playbook: RunPlaybook) -> None:
    run = run_playbook("recover", "-e", "host_reboot_allowed=true")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "No GPU of pve1 is ill" in run.stdout
    assert "changed=0" in run.stdout
