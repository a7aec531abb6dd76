"""A change that is cut off at any step leaves nothing half done that the next run does not report.

With POWER_CUTS=all in the environment each end comes at every step, else a kill at three of them
and a loss of power at one.
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
RunModule = Callable[..., dict[str, Any]]
GPU = "0000:44:00.0"
LOOK = {"addresses": ["0000:43:00.0"], "driver": "nvidia"}  # a run that is about another GPU
ALL = ("override", "unbind", "type", "probe", "verify")
EVERY = os.environ.get("POWER_CUTS") == "all"
STEPS = ALL if EVERY else ("unbind", "type", "verify")
POWERLESS = ALL if EVERY else ("type",)
BOOT = "cat /proc/sys/kernel/random/boot_id"


@pytest.fixture(scope="module")
def number(host: Host) -> dict[str, int]:
    """Return the number of each step, as the plan has it on this host."""
    paths = json.loads(host.check_output("python3 /root/cut/cut.py count 0"))
    names = {"driver_override": "override", "drivers_probe": "probe"}
    found = {}
    for at, path in enumerate(paths):
        end = path.rpartition("/")[2]
        found.setdefault(names.get(end, end), at)
    return {**found, "verify": len(paths)}


@pytest.fixture
def cut(host: Host, root: Path) -> Callable[[str, int], None]:
    """Change the GPU and end at a step; after a loss of power, wait until the host is up again.

    The host's supervisor does what a board does at a reset.
    """

    def ssh(command: str) -> str:
        words = [root / "lab/lab", "ssh", command]
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=300)
        return done.stdout.strip()

    def end(how: str, step: int) -> None:
        boot = host.check_output(BOOT).strip()
        ssh(f"python3 /root/cut/cut.py {how} {step}; true")
        limit = time.monotonic() + 420
        while how == "power" and ssh(BOOT) in ("", boot) and time.monotonic() < limit:
            time.sleep(3)
        subprocess.run([root / "lab/lab", "up"], check=True, capture_output=True)

    return end


def state(host: Host, address: str = GPU) -> tuple[str, str, str]:
    at = f"/sys/bus/pci/devices/{address}"
    driver = host.run(f"readlink {at}/driver").stdout.strip().rpartition("/")[2]
    override = host.check_output(f"cat {at}/driver_override").strip()
    return driver, override, host.check_output(f"cat {at}/iommu_group/type").strip()


def all_states(host: Host) -> dict[str, tuple[str, str, str]]:
    names = [f"0000:{bus}:00.0" for bus in (41, 42, 43, 44, 81, 82, 83, 84)]
    return {name: state(host, name) for name in names}


@pytest.mark.parametrize("step", STEPS)
def test_the_next_run_undoes_what_a_kill_left(
    host: Host,
    run_module: RunModule,
    cut: Callable[[str, int], None],
    number: dict[str, int],
    step: str,
) -> None:
    run_module("gpu", **LOOK)  # its own override stays from now on
    before = all_states(host)
    assert before[GPU][0] == "nvidia"
    cut("kill", number[step])
    assert "0000:44:00.0" in host.check_output("cat /var/lib/gpuhost/transaction.json")
    if step != "override":
        assert all_states(host) != before
    planned = run_module("gpu", check=True, **LOOK)
    assert not planned["failed"]
    assert host.file("/var/lib/gpuhost/transaction.json").exists  # check mode ends nothing
    result = run_module("gpu", **LOOK)
    assert result["recovered"]["wish"] == f"{GPU} to driver vfio-pci and type DMA"
    assert result["recovered"]["outcome"] == "undone: all is as it was before"
    assert all_states(host) == before
    assert run_module("gpu", **LOOK)["recovered"] is None


@pytest.mark.parametrize("step", POWERLESS)
def test_the_next_run_tells_what_a_loss_of_power_ended(
    host: Host,
    cut: Callable[[str, int], None],
    run_module: RunModule,
    number: dict[str, int],
    step: str,
) -> None:
    run_module("gpu", addresses=[GPU], driver="nvidia", iommu_type="DMA-FQ")
    cut("power", number[step])
    # what the kernel had of the change is gone with that boot; its record is not
    assert "0000:44:00.0" in host.check_output("cat /var/lib/gpuhost/transaction.json")
    assert state(host) == ("nvidia", "(null)", "DMA")
    result = run_module("gpu", **LOOK)
    assert result["recovered"]["wish"] == f"{GPU} to driver vfio-pci and type DMA"
    assert result["recovered"]["outcome"].startswith("ended by a reboot")
    assert result["recovered"]["writes"] == []
    assert not host.file("/var/lib/gpuhost/transaction.json").exists


def test_the_lock_of_a_running_change_keeps_the_next_one_out(
    host: Host, run_module: RunModule
) -> None:
    host.check_output(
        "systemd-run --quiet --unit=hold flock /run/gpuhost.lock "
        "sh -c 'echo $$ somebody >/run/gpuhost.lock; exec sleep infinity'"
    )
    result = run_module("gpu", **LOOK)
    host.check_output("systemctl stop hold")
    assert result["failed"]
    assert "another change of this host is running (process" in result["msg"]


def test_the_neighbour_noticed_nothing_since_the_last_boot(
    host: Host, assert_neighbour_undisturbed: Callable[[Host], None]
) -> None:
    assert_neighbour_undisturbed(host)
