"""The playbook recover: the order of its steps; modules and roles answer what a test wants."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from plays import own_collection, run_playbook

A, B, C = "0000:21:00.0", "0000:22:00.0", "0000:a1:00.0"
FINE = ("healthy", "it was started", [])
WPR2 = ("failed", "locked until a reset", ["reset", "reboot", "power-off", "hardware"])
FIRMWARE = ("failed", "its firmware was not loaded", ["driver", "reset", "reboot"])
LOST = ("lost", "it does not answer on the bus", ["reboot", "power-off", "hardware"])
# Answers one after another, the last one again and again
MODULE = """\
#!/usr/bin/python
# WANT_JSON
import json, pathlib, sys
folder = pathlib.Path(FOLDER)
options = json.loads(pathlib.Path(sys.argv[1]).read_text())
words = [f"{key}={options[key]}" for key in ("addresses", "methods") if key in options]
with open(folder / "log", "a") as log:
    print("NAME", *words, file=log)
answers = json.loads((folder / "NAME.json").read_text())
print(json.dumps(answers[0]))
(folder / "NAME.json").write_text(json.dumps(answers[1:] or answers))
"""
TOOL = """\
#!/bin/sh
echo "pct $*" >>LOG
"""
ROLE = """\
- ansible.builtin.shell: "echo role NAME {{ gpu_passthrough_start_guests | default('') }} >>LOG"
"""

GUESTS = """\
- ansible.builtin.shell: "echo role guests {{ gpu_passthrough_facts.layout.entries
    | map(attribute='guest.vmid')
    | join(' ') }} >>LOG"
"""


def facts(*verdicts: tuple[str, str, list[str]], **more: Any) -> dict[str, Any]:
    """Return a host of which A and B are of container 110, and C of machine 210."""
    return {
        "changed": False,
        "gpus": [
            {"address": at, "driver": driver}
            for at, driver in ((A, "nvidia"), (B, "nvidia"), (C, "vfio-pci"))
        ],
        "health": {
            "gpus": [
                {"address": at, "verdict": verdict, "reason": reason, "ladder": ladder}
                for at, (verdict, reason, ladder) in zip((A, B, C), verdicts)
            ]
        },
        "layout": {
            "problems": [],
            "entries": [
                {"addresses": [A, B], "guest": {"kind": "lxc", "vmid": 110}},
                {"addresses": [C], "guest": {"kind": "qemu", "vmid": 210}},
            ],
        },
        "guests": [
            {"kind": "lxc", "vmid": 110, "running": True},
            {"kind": "qemu", "vmid": 210, "running": True},
        ],
        "findings": [],
        "host": {"reboot": {"problems": []}},
        **more,
    }


class Play:
    """A host of which the modules tell what they are given; `log` says what was done."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        linked = ("playbooks", "plugins/filter", "plugins/module_utils")
        self.own = own_collection(folder, *linked, "plugins/modules/sglang_info.py")
        (folder / "bin").mkdir()
        log = f"{folder}/log"
        for name in ("gpu_passthrough", "host_reboot", "host_power", "gpu_health", "gpu_report"):
            tasks = self.own / "roles" / name / "tasks"
            tasks.mkdir(parents=True)
            (tasks / "main.yml").write_text(ROLE.replace("NAME", name).replace("LOG", log))
            (tasks / "guests.yml").write_text(GUESTS.replace("LOG", log))
        (folder / "bin/pct").write_text(TOOL.replace("LOG", log))
        (folder / "bin/pct").chmod(0o755)
        self.reset: dict[str, Any] = {"changed": True, "attempts": [{"method": "flr"}], "ill": []}
        self.guests: dict[str, Any] = {}

    def run(self, *answers: dict[str, Any], hosts: str = "localhost", **variables: Any) -> str:
        """Have gpu_host_info give these answers, one after another; return what was said."""
        for name, given in (("gpu_host_info", list(answers)), ("gpu_reset", [self.reset])):
            (self.folder / f"{name}.json").write_text(json.dumps(given))
            module = MODULE.replace("FOLDER", repr(str(self.folder))).replace("NAME", name)
            (self.own / f"plugins/modules/{name}.py").write_text(module)
        local = {
            "ansible_connection": "local",
            "ansible_python_interpreter": sys.executable,
        }
        inventory = {
            "proxmox_hosts": {"hosts": dict.fromkeys(hosts.split(), local)},
            "inference_guests": {"hosts": self.guests},
        }
        (self.folder / "hosts.json").write_text(json.dumps(inventory))
        return run_playbook(
            self.folder, self.own / "playbooks/recover.yml", "hosts.json", variables
        )

    @property
    def log(self) -> list[str]:
        return [one.strip() for one in (self.folder / "log").read_text().splitlines()]


@pytest.fixture
def play(tmp_path: Path) -> Play:
    return Play(tmp_path)


def test_a_healthy_host_is_left_alone(play: Play) -> None:
    said = play.run(facts(FINE, FINE, FINE))
    assert "No GPU of localhost is ill" in said
    assert play.log == ["gpu_host_info"]


def test_a_gpu_that_a_reset_helps(play: Play) -> None:
    said = play.run(facts(FINE, WPR2, FINE), facts(FINE, FINE, FINE))
    assert "failed=0" in said, said
    assert play.log == [
        "gpu_host_info",
        "pct shutdown 110 --timeout 180",
        f"gpu_reset addresses=['{B}']",
        "gpu_host_info",
        "role guests 110",
        "role gpu_health",
        "gpu_host_info",
        "role gpu_report",
    ]
    steps = ["judged:", f"reset for {B}", "GPUs, types and drivers are right", "healthy, with the"]
    places = [said.rfind(f'"what": "{step}') for step in steps]
    assert -1 not in places
    assert places == sorted(places)


def test_rung_after_rung_until_it_helps(play: Play) -> None:
    ill = facts(FIRMWARE, FINE, FINE)
    said = play.run(ill, ill, ill, facts(FINE, FINE, FINE), host_reboot_allowed=True)
    assert "failed=0" in said, said
    done = [one for one in play.log if one != "gpu_host_info"]
    assert done[1:5] == [
        f"gpu_reset addresses=['{A}'] methods=['rebind']",
        f"gpu_reset addresses=['{A}']",
        "role host_reboot",
        "role guests 110",
    ]


def test_what_did_not_help_and_what_is_missing_is_told(play: Play) -> None:
    said = play.run(facts(WPR2, FINE, FINE))
    assert (
        "localhost is not recovered. Stop where GPUs are still ill: 0000:21:00.0 is failed: locked "
        "until a reset. Tried without help: reset. Needed: reboot (reboot). Not done: "
        "host_reboot_allowed is false." in said
    )
    assert play.log[-2:] == ["gpu_host_info", "role guests 110"]  # for the container ran before
    assert play.log.count("role guests 110") == 1


def test_a_guard_of_the_reset_ends_the_run(play: Play) -> None:
    play.reset = {"failed": True, "msg": "in use by process 4244", "attempts": [], "ill": []}
    said = play.run(facts(WPR2, FINE, FINE), host_reboot_allowed=True)
    assert "in use by process 4244" in said.replace("\n", " ").split("is not recovered")[1]
    assert "role host_reboot" not in play.log
    assert play.log[-1] == "role guests 110"


def test_a_reset_that_could_not_be_tried_leads_to_no_reboot(play: Play) -> None:
    play.reset = {"failed": True, "msg": "another change of this host is running"}
    said = play.run(facts(WPR2, FINE, FINE), host_reboot_allowed=True)
    assert "another change of this host" in said.replace("\n", " ").split("is not recovered")[1]
    assert "role host_reboot" not in play.log


def test_a_gpu_without_a_reset_of_its_own_goes_on_to_the_reboot(play: Play) -> None:
    play.reset = {"failed": True, "msg": "no reset", "attempts": [], "ill": [{"address": A}]}
    ill = facts(WPR2, FINE, FINE)
    assert "failed=0" in play.run(ill, ill, facts(FINE, FINE, FINE), host_reboot_allowed=True)
    assert "role host_reboot" in play.log


def test_who_has_not_used_the_gpu_since_the_reboot_is_not_asked(play: Play) -> None:
    """Nobody knows whether it works, so the driver starts it."""
    unused = facts(("unknown", "no sign that it was started", []), FINE, FINE)
    said = play.run(facts(LOST, FINE, FINE), unused, facts(FINE, FINE, FINE), host_reboot_allowed=1)
    assert "failed=0" in said, said
    assert play.log[2:6] == [
        "role host_reboot",
        "gpu_host_info",
        f"gpu_reset addresses=['{A}'] methods=['rebind']",
        "gpu_host_info",
    ]
    (play.folder / "log").unlink()
    said = play.run(facts(LOST, FINE, FINE), unused, host_reboot_allowed=True)
    assert "nobody can tell whether that helped" in said.replace("\n", " ")
    assert "is not recovered" in said


def test_a_gpu_that_is_not_there_any_more_is_no_recovered_one(play: Play) -> None:
    gone = facts(FINE, FINE, FINE)
    gone["layout"]["problems"] = ["entry 1 names 0000:23:00.0, which is not there"]
    said = play.run(facts(WPR2, FINE, FINE), gone)
    assert "which is not there" in said.replace("\n", " ").split("is not recovered")[1]


def test_a_host_that_fails_stops_none_after_it(play: Play) -> None:
    bad, well = facts(WPR2, FINE, FINE), facts(FINE, FINE, FINE)
    said = play.run(bad, bad, bad, bad, well, hosts="first second")
    assert "first is not recovered" in said
    summary = dict(
        one.split(":", 1) for one in said.split("PLAY RECAP")[1].splitlines() if ":" in one
    )
    words = {host.strip(): text for host, text in summary.items()}
    assert "failed=1" in words["first"]
    assert "failed=0" in words["second"]
    assert play.log[-1] == "role gpu_report"


def test_a_container_without_any_of_its_gpus_is_named(play: Play) -> None:
    left = facts(WPR2, FINE, FINE)
    left["layout"]["entries"] = left["layout"]["entries"][1:]
    said = play.run(facts(WPR2, FINE, FINE), left)
    assert "Not started: lxc 110, of whose GPUs none is there." in said.replace("\n", " ")


def test_a_guest_whose_server_does_not_come_is_told_with_its_host(play: Play) -> None:
    dead = {"ansible_connection": "ssh", "ansible_host": "192.0.2.1", "ansible_timeout": 1}
    play.guests = {"guest": {**dead, "proxmox_node": "localhost", "proxmox_vmid": 110}}
    said = play.run(
        facts(WPR2, FINE, FINE),
        facts(FINE, FINE, FINE),
        recover_guest_timeout=1,
    )
    told = said.replace("\n", " ")
    assert "these servers are not ready: guest: Wait for the guest: timed out waiting" in told


# systemd as it tells of a server that it starts again, and the second time of one that is gone
SYSTEMCTL = """\
#!/bin/sh
[ "$1" = show ] || exit 0
if [ -e FOLDER/asked ]; then echo LoadState=not-found; echo ActiveState=inactive
else echo ActiveState=activating; echo SubState=auto-restart; fi
echo "$@" >>FOLDER/asked
"""


def test_a_server_that_systemd_starts_again_is_waited_for(play: Play) -> None:
    (play.folder / "bin/systemctl").write_text(SYSTEMCTL.replace("FOLDER", str(play.folder)))
    (play.folder / "bin/systemctl").chmod(0o755)
    local = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
    at = {"proxmox_node": "localhost", "proxmox_vmid": 110, "sglang_port": 9}
    play.guests = {"guest": {**local, **at}}
    said = play.run(facts(WPR2, FINE, FINE), facts(FINE, FINE, FINE))
    assert "the server of guest is absent" in said
    assert len((play.folder / "asked").read_text().splitlines()) == 2


def test_types_are_set_back_first_and_both_gpus_share_one_power_cut(play: Play) -> None:
    fsp = ("failed", "its FSP did not come up", ["power-off", "hardware"])
    wrong = [{"id": "type-differs", "subject": A, "evidence": "type is identity"}]
    said = play.run(
        facts(fsp, LOST, FINE, findings=wrong),
        facts(FINE, FINE, FINE),
        host_reboot_allowed=True,
        host_power_tasks="bmc.yml",
    )
    assert "failed=0" in said, said
    done = [one for one in play.log if one != "gpu_host_info"]
    assert done[:3] == [
        "pct shutdown 110 --timeout 180",
        "role gpu_passthrough False",
        "role host_power",
    ]
    assert "role host_reboot" not in done


@pytest.mark.parametrize(
    ("finding", "words"),
    [("type-differs", "These types are not"), ("driver-differs", "These drivers are not")],
)
def test_a_check_that_fails_afterwards_says_which(play: Play, finding: str, words: str) -> None:
    wrong = [{"id": finding, "subject": C, "evidence": "it is another"}]
    said = play.run(facts(WPR2, FINE, FINE), facts(FINE, FINE, FINE, findings=wrong))
    assert f"{words} as declared: {C}: it is another." in said
    assert play.log.count("role guests 110") == 1


def test_a_container_that_was_stopped_is_not_started_after_a_failure(play: Play) -> None:
    ill = facts(WPR2, FINE, FINE)
    ill["guests"][0]["running"] = False
    play.run(ill)
    assert not any("pct" in one or "guests" in one for one in play.log)


def test_nor_is_it_after_a_recovery(play: Play) -> None:
    ill = facts(WPR2, FINE, FINE)
    ill["guests"][0]["running"] = False
    assert "failed=0" in play.run(ill, facts(FINE, FINE, FINE))
    assert "role guests 110" not in play.log
