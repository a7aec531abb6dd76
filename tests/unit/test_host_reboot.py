"""The roles host_reboot and host_power up to the host's going down.

Modules answer what a test wants; the command that would shut this machine down is a stand-in.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from plays import own_collection, run_playbook

MODULE = """\
#!/usr/bin/python
print(%r)
"""
TOOL = """\
#!/bin/sh
echo "${0##*/} $*" >>LOG
[ "$1 $2" != "shutdown $STUBBORN" ] || { echo "CT $2: timeout" >&2; exit 255; }
[ "$1 $2" != "start $BROKEN" ] || { echo "no such volume" >&2; exit 255; }
case $1 in start) touch run.$2 ;; shutdown) rm -f run.$2 ;; esac
[ "$1" != status ] || { [ -e run.$2 ] && echo status: running || echo status: stopped; }
"""
CONNECTION = """\
DOCUMENTATION = "name: shaky\\nshort_description: fails at the first ping"
import pathlib
from ansible.errors import AnsibleConnectionFailure
from ansible.plugins.connection.local import Connection as Local
folder = pathlib.Path(%r)
class Connection(Local):
    transport = "shaky"
    def exec_command(self, *args, **options):
        if "AnsiballZ_ping" in args[0] and not (folder / "missed").exists():
            (folder / "missed").touch()
            raise AnsibleConnectionFailure("no route to host")
        return super().exec_command(*args, **options)
"""
REBOOT: dict[str, Any] = {"reasons": ["why"], "problems": [], "stall": [], "guests": []}
GUESTS = [
    {"kind": "lxc", "vmid": 100, "name": None},
    {"kind": "qemu", "vmid": 200, "name": "confidential"},
]


class Play:
    """A host of which `gpu_host_info` and `kernel_cmdline` tell what they are given."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.modules = own_collection(folder, "roles") / "plugins/modules"
        (folder / "bin").mkdir()
        for name in ("pct", "qm", "systemd-run"):
            tool = folder / "bin" / name
            tool.write_text(TOOL.replace("LOG", f"{folder}/log").replace("run.", f"{folder}/run."))
            tool.chmod(0o755)
        self.facts: dict[str, Any] = {
            "host": {"kernel": "1", "next_boot": {"kernel": "1"}, "reboot": REBOOT},
            "layout": {"problems": []},
            "findings": [],
        }
        self.cmdline: dict[str, Any] = {"not_configured": [], "missing": [], "unwanted": []}

    def run(self, role: str = "host_reboot", **variables: Any) -> str:
        """Return what the play said; commands of guests are in `commands`."""
        for name, answer in (("gpu_host_info", self.facts), ("kernel_cmdline", self.cmdline)):
            module = MODULE % json.dumps({"changed": False, **answer})
            (self.modules / f"{name}.py").write_text(module)
        for guest in self.facts["host"]["reboot"]["guests"]:
            (self.folder / f"run.{guest['vmid']}").touch()
        play = {
            "hosts": "localhost",
            "connection": variables.pop("connection", "local"),
            "gather_facts": False,
            "vars": {
                "ansible_python_interpreter": sys.executable,
                "host_reboot_start_timeout": "5",
                **variables,
            },
            "roles": [f"gpuhost.inference.{role}"],
        }
        (self.folder / "play.yml").write_text(yaml.safe_dump([play]))
        environment = {
            name.upper(): str(variables.get(name, "")) for name in ("stubborn", "broken")
        }
        return run_playbook(self.folder, "play.yml", environment=environment)

    @property
    def commands(self) -> list[str]:
        log = self.folder / "log"
        return log.read_text().splitlines() if log.exists() else []


@pytest.fixture
def play(tmp_path: Path) -> Play:
    return Play(tmp_path)


def test_without_permission_it_says_what_it_would_do_and_why(play: Play) -> None:
    play.facts["host"]["reboot"] = {**REBOOT, "problems": ["guest qemu 201 runs"], "guests": GUESTS}
    said = play.run()
    assert "failed=0" in said
    assert all(word in said for word in ('"why"', "guest qemu 201 runs", '"confidential"'))
    assert play.commands == []


def test_with_permission_every_reason_against_it_stops_it_at_once(play: Play) -> None:
    play.facts["host"]["reboot"] = {
        **REBOOT,
        "problems": ["guest qemu 201 runs"],
        "stall": ["0000:41:00.0: remove never returned"],
        "guests": GUESTS,
    }
    play.cmdline["not_configured"] = ["iommu.strict=1"]
    said = play.run(host_reboot_allowed="true")
    assert "failed=1" in said
    assert (
        "localhost must not be rebooted: guest qemu 201 runs; not configured for the next boot: "
        "iommu.strict=1 (role kernel_cmdline); 0000:41:00.0: remove never returned." in said
    )
    assert play.commands == []


def test_without_a_reason_nothing_is_done(play: Play) -> None:
    play.facts["host"]["reboot"] = {**REBOOT, "reasons": [], "guests": GUESTS}
    said = play.run(host_reboot_allowed="true")
    assert "localhost needs no reboot." in said
    assert play.commands == []


def test_a_guest_that_does_not_stop_keeps_the_host_up(play: Play) -> None:
    play.facts["host"]["reboot"] = {**REBOOT, "guests": GUESTS}
    said = play.run(host_reboot_allowed="true", stubborn=100)
    assert "was not rebooted, and its guests run again" in said
    assert "Reboot the host" not in said
    assert [line for line in play.commands if "status" not in line] == [
        "qm shutdown 200 --timeout 180",
        "pct shutdown 100 --timeout 180",
        "pct start 100",
        "qm start 200",
    ]
    assert (play.folder / "run.200").exists()


def test_a_guest_that_cannot_be_started_again_is_named_with_all_else(play: Play) -> None:
    play.facts["host"]["reboot"] = {**REBOOT, "guests": [*GUESTS, {**GUESTS[0], "vmid": 101}]}
    said = play.run(host_reboot_allowed="true", stubborn=200, broken=100)
    assert (
        "localhost was not rebooted, and these guests do not run, start them by hand: lxc 100 "
        "(no such volume). This failed: Shut down the guests of the layout" in said
    )
    assert "run again" not in said
    assert [line for line in play.commands if " start" in line] == [
        "pct start 100",
        "qm start 200",
        "pct start 101",
    ]


def test_force_lifts_the_stall_alone_and_comes_as_far_as_the_reboot(play: Play) -> None:
    play.facts["host"]["reboot"] = {**REBOOT, "stall": ["remove never returned"], "guests": GUESTS}
    said = play.run(host_reboot_allowed="true", host_reboot_force="yes")
    # which Ansible itself refuses on its own machine, so the host did not go down
    assert "was not rebooted, and its guests run again. This failed: Reboot the host" in said
    assert [line for line in play.commands if "status" not in line] == [
        "qm shutdown 200 --timeout 180",
        "pct shutdown 100 --timeout 180",
        "pct start 100",
        "qm start 200",
    ]


def test_power_is_not_cut_without_permission(play: Play) -> None:
    play.facts["host"]["reboot"] = {**REBOOT, "reasons": [], "guests": GUESTS}
    said = play.run("host_power", host_power_tasks="bmc.yml", host_power_reason="its FSP failed")
    assert "failed=0" in said
    assert '"its FSP failed"' in said
    assert play.commands == []


def test_power_is_not_cut_without_a_way_to_or_over_the_heads_of_others(play: Play) -> None:
    play.facts["host"]["reboot"] = {**REBOOT, "problems": ["guest qemu 201 runs"], "guests": GUESTS}
    said = play.run("host_power", host_reboot_allowed="true")
    assert (
        "localhost must not be rebooted: guest qemu 201 runs; nothing can cut its power: "
        "host_power_tasks is not set." in said
    )
    assert play.commands == []


def test_power_is_not_cut_below_a_host_that_does_not_go_down(play: Play) -> None:
    tasks = play.folder / "bmc.yml"
    tasks.write_text("- ansible.builtin.file: {path: cut, state: touch}\n")
    play.facts["host"]["reboot"] = {**REBOOT, "guests": GUESTS}
    said = play.run(
        "host_power",
        host_reboot_allowed="true",
        host_power_tasks=str(tasks),
        host_power_shutdown_timeout="5",
    )
    assert "told to shut down and did not: that is pending, so it may go off" in said
    assert "run again" not in said
    assert "systemd-run --on-active=3 systemctl poweroff" in play.commands
    assert not (play.folder / "cut").exists()
    assert not (play.folder / "run.200").exists()


def test_power_is_not_cut_for_one_connection_that_fails(play: Play) -> None:
    """The first one fails, and the others succeed, so the host is up."""
    tasks = play.folder / "bmc.yml"
    tasks.write_text("- ansible.builtin.file: {path: cut, state: touch}\n")
    plugins = play.folder / "connection_plugins"
    plugins.mkdir()
    (plugins / "shaky.py").write_text(CONNECTION % str(play.folder))
    play.facts["host"]["reboot"] = {**REBOOT, "guests": GUESTS}
    said = play.run(
        "host_power",
        host_reboot_allowed="true",
        host_power_tasks=str(tasks),
        host_power_shutdown_timeout="5",
        connection="shaky",
    )
    assert said.count("Wait until a connection fails] ****") == 2  # and again, since it answered
    assert "that is pending" in said
    assert not (play.folder / "cut").exists()
