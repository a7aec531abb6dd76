"""The playbook tune_mtp on this machine: every server that was measured gets its report."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from plays import own_collection, run_playbook

TUNE = """
- ansible.builtin.fail:
    msg: "it answers nobody"
  when: inventory_hostname == 'ill'
- ansible.builtin.set_fact:
    sglang_tune_result:
      host: "{{ inventory_hostname }}"
      runs: ["run of {{ inventory_hostname }}"]
      kinds: []
      verdict: {variant: "on", points: []}
      history: [{arm: "off", points: []}, {arm: "on", points: []}]
"""
REPORT = """
- ansible.builtin.debug:
    msg: "REPORT {{ gpu_report_name }} of {{ gpu_report_benchmark | join }},
      {{ gpu_report_history.arm }} before."
"""
HOST = """#!/usr/bin/python
print('{"changed": false}')
"""


def tune(folder: Path, guests: dict[str, Any]) -> str:
    """Run the playbook for a host with these guests; return what it said."""
    own = own_collection(folder, "playbooks", "plugins/module_utils", "plugins/filter")
    for name, text in (("sglang_tune", TUNE), ("gpu_report", REPORT)):
        (own / "roles" / name / "tasks").mkdir(parents=True)
        (own / "roles" / name / "tasks/main.yml").write_text(text)
    (own / "plugins/modules/gpu_host_info.py").write_text(HOST)
    local = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
    inventory = {
        "all": {
            "vars": local,
            "children": {
                "proxmox_hosts": {"hosts": {"pve-a": {}, "pve-b": {}}},
                "inference_guests": {"hosts": guests},
            },
        }
    }
    (folder / "hosts.json").write_text(json.dumps(inventory))
    return " ".join(run_playbook(folder, own / "playbooks/tune_mtp.yml", "hosts.json").split())


HERE, THERE = {"proxmox_node": "pve-a"}, {"proxmox_node": "pve-b"}


def test_each_server_of_a_host_has_its_report(tmp_path: Path) -> None:
    said = tune(tmp_path, {"one": HERE, "ill": HERE, "two": HERE, "far": THERE, "nowhere": {}})
    for name in ("one", "two"):
        assert f"REPORT pve-a-{name} of run of {name}, on before." in said
    # the only one of its host is in the host's own report
    assert "REPORT pve-b of run of far, on before." in said
    assert said.count('"msg": "REPORT') == 3
    assert "ill was not measured. it answers nobody" in said
