"""The playbook recover: the order of its steps; modules and roles answer what a test wants."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
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


def facts(*verdicts: tuple[str, str, list[str]], **more: Any) -> dict[str, Any]:
    """Return a host of which A and B are of container 110, and C of machine 210."""
    return {
        "changed": False,
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
        self.own = folder / "collections/ansible_collections/gpuhost/inference"
        (self.own / "plugins/modules").mkdir(parents=True)
        (folder / "bin").mkdir()
        linked = ("galaxy.yml", "playbooks", "plugins/filter", "plugins/module_utils")
        for name in (*linked, "plugins/modules/sglang_info.py"):
            (self.own / name).symlink_to(ROOT / name)
        log = f"{folder}/log"
        for name in ("gpu_passthrough", "host_reboot", "host_power", "gpu_health", "gpu_report"):
            tasks = self.own / "roles" / name / "tasks"
            tasks.mkdir(parents=True)
            (tasks / "main.yml").write_text(ROLE.replace("NAME", name).replace("LOG", log))
            (tasks / "guests.yml").write_text(ROLE.replace("NAME", "guests").replace("LOG", log))
        (folder / "bin/pct").write_text(TOOL.replace("LOG", log))
        (folder / "bin/pct").chmod(0o755)
        self.reset: dict[str, Any] = {"changed": True, "attempts": [{"method": "flr"}]}

    def run(self, *answers: dict[str, Any], **variables: Any) -> str:
        """Have gpu_host_info give these answers, one after another; return what was said."""
        for name, given in (("gpu_host_info", list(answers)), ("gpu_reset", [self.reset])):
            (self.folder / f"{name}.json").write_text(json.dumps(given))
            module = MODULE.replace("FOLDER", repr(str(self.folder))).replace("NAME", name)
            (self.own / f"plugins/modules/{name}.py").write_text(module)
        hosts = {
            "localhost": {
                "ansible_connection": "local",
                "ansible_python_interpreter": sys.executable,
            }
        }
        inventory = {"proxmox_hosts": {"hosts": hosts}, "inference_guests": {"hosts": {}}}
        (self.folder / "hosts.json").write_text(json.dumps(inventory))
        paths = [str(self.folder / "collections"), os.environ.get("ANSIBLE_COLLECTIONS_PATH", "")]
        command = ["ansible-playbook", "-i", "hosts.json", "-e", json.dumps(variables)]
        done = subprocess.run(
            [*command, str(self.own / "playbooks/recover.yml")],
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
            env={
                **os.environ,
                "ANSIBLE_COLLECTIONS_PATH": ":".join(filter(None, paths)),
                "ANSIBLE_NOCOLOR": "1",
                "PATH": f"{self.folder}/bin:{os.environ['PATH']}",
            },
        )
        return done.stdout + done.stderr

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
        "role guests",
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
        "role guests",
    ]


def test_what_did_not_help_and_what_is_missing_is_told(play: Play) -> None:
    said = play.run(facts(WPR2, FINE, FINE))
    assert (
        "localhost is not recovered. Stop where GPUs are still ill: 0000:21:00.0 is failed: locked "
        "until a reset. Tried without help: reset. Needed: reboot (reboot). Not done: "
        "host_reboot_allowed is false." in said
    )
    assert play.log[-1] == "pct start 110"  # it ran before
    assert not any("role" in one for one in play.log)


def test_a_guard_of_the_reset_ends_the_run(play: Play) -> None:
    play.reset = {"failed": True, "msg": "in use by process 4244", "attempts": []}
    said = play.run(facts(WPR2, FINE, FINE), host_reboot_allowed=True)
    assert "in use by process 4244" in said.replace("\n", " ").split("is not recovered")[1]
    assert "role host_reboot" not in play.log
    assert play.log[-1] == "pct start 110"


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
    assert "role guests" not in play.log


def test_a_container_that_was_stopped_is_not_started_after_a_failure(play: Play) -> None:
    ill = facts(WPR2, FINE, FINE)
    ill["guests"][0]["running"] = False
    play.run(ill)
    assert not any("pct" in one for one in play.log)
