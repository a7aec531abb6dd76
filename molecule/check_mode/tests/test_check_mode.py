"""The plan is shown, nothing is changed, and the run ends well on a host that has nothing yet."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from typing import Any

from testinfra.host import Host

testinfra_hosts = ["ansible://pve1"]


def _state(host: Host, run_module: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    facts = run_module("gpu_host_info", check=True)
    keys = ("driver", "driver_override", "iommu_group", "power", "users", "owners")
    return {
        "gpus": {gpu["address"]: [gpu[key] for key in keys] for gpu in facts["gpus"]},
        "guests": [(guest["vmid"], guest["running"], guest["pid"]) for guest in facts["guests"]],
        "modules": facts["host"]["modules"],
        "etc": host.check_output("find /etc -xdev -type f -exec sha256sum {} + | sort | sha256sum"),
    }


def test_check_mode_shows_the_plan_and_changes_nothing(
    host: Host,
    run_module: Callable[..., dict[str, Any]],
    run_playbook: Callable[..., subprocess.CompletedProcess[str]],
    assert_neighbour_undisturbed: Callable[[Host], None],
) -> None:
    before = _state(host, run_module)
    assert [guest[1] for guest in before["guests"]] == [False, False, True]

    run = run_playbook("site", "--check", "--diff")

    assert run.returncode == 0, run.stdout + run.stderr
    assert _state(host, run_module) == before
    assert_neighbour_undisturbed(host)
    # the plan: types, drivers, file, guests; and a word on what cannot be planned yet
    assert re.search(r'^-\s+"type": "DMA"$', run.stdout, re.MULTILINE)
    assert re.search(r'^\+\s+"driver": "vfio-pci"', run.stdout, re.MULTILINE)
    assert re.search(r"^\+blacklist nouveau$", run.stdout, re.MULTILINE)
    assert re.search(r"^changed: .*lxc 100", run.stdout, re.MULTILINE)
    assert "ct100 is not running" in run.stdout
