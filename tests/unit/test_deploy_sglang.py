"""The playbook deploy_sglang on this machine: a server that fails keeps nobody from the report."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from plays import ROOT, own_collection, run_playbook

ROLE = """
- ansible.builtin.fail:
    msg: its port is taken
  when: inventory_hostname in broken
- ansible.builtin.set_fact:
    sglang_ready: {server: {state: ready}}
"""
PLAYS = """
- import_playbook: PLAYBOOK
  vars:
    deploy_goes_on: WHETHER
- hosts: node
  gather_facts: false
  tasks:
    - ansible.builtin.debug:
        msg: "REPORT {{ groups.inference_guests | map('extract', hostvars)
          | selectattr('deploy_server', 'defined') | map(attribute='inventory_hostname')
          | join(' ') }}"
- hosts: inference_guests
  gather_facts: false
  tasks:
    - ansible.builtin.debug:
        msg: "LATER {{ deploy_failure | default('nothing') }}"
"""


def deploy(folder: Path, broken: list[str], goes_on: bool) -> str:
    own = own_collection(folder, "plugins/module_utils", "plugins/filter", "meta")
    (own / "roles/sglang_mtp/tasks").mkdir(parents=True)
    (own / "roles/sglang_mtp/tasks/main.yml").write_text(ROLE)
    text = PLAYS.replace("PLAYBOOK", str(ROOT / "playbooks/deploy_sglang.yml"))
    (folder / "plays.yml").write_text(text.replace("WHETHER", str(goes_on).lower()))
    local = {
        "ansible_connection": "local",
        "ansible_python_interpreter": sys.executable,
        "broken": broken,
    }
    guests = {"hosts": {"one": {}, "two": {}}}
    inventory = {
        "all": {"vars": local, "hosts": {"node": {}}, "children": {"inference_guests": guests}}
    }
    (folder / "hosts.json").write_text(json.dumps(inventory))
    return " ".join(run_playbook(folder, "plays.yml", str(folder / "hosts.json")).split())


@pytest.mark.parametrize("broken", [["one"], ["one", "two"]], ids=len)
def test_a_failure_is_told_after_the_report(tmp_path: Path, broken: list[str]) -> None:
    said = deploy(tmp_path, broken, goes_on=True)
    assert f"REPORT {'two' if len(broken) == 1 else ''}" in said
    assert said.count("LATER its port is taken") == len(broken)


def test_alone_it_fails_for_the_one_that_is_not_served(tmp_path: Path) -> None:
    said = deploy(tmp_path, ["one"], goes_on=False)
    assert "one is not as it is declared. its port is taken" in said
    assert "LATER nothing" in said
    assert "REPORT two" in said
