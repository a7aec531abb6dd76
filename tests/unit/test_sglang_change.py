"""A change of the role sglang as one transaction: what it does when the new server fails.

systemd, the server's state and its GPUs are stand-ins; files, flags and templates are real.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from plays import ROOT, own_collection, run_playbook

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the role gives files to root")

KEY = "not-for-anybody"
PLAY = """
- hosts: localhost
  connection: local
  gather_facts: false
  tasks:
    - ansible.builtin.import_role:
        name: gpuhost.inference.sglang
"""
SYSTEMCTL = """#!/bin/sh
echo "$@" >> HERE/called
case "$1" in
  start) echo active > HERE/state ;;
  stop) echo inactive > HERE/state ;;
  show) echo LoadState=loaded; echo ActiveState=$(cat HERE/state) ;;
esac
"""
INFO = """#!/usr/bin/python
import json, pathlib
here = pathlib.Path("HERE")
config = here / "etc/chat.yaml"
state = "ready" if here.joinpath("state").read_text().strip() == "active" else "stopped"
if state == "ready" and config.exists() and "mem-fraction-static: 0.2" in config.read_text():
    state = "failed"
server = {"state": state, "reason": "as the test wants", "settled": True, "listener": None}
print(json.dumps({"changed": False, "server": server, "witnesses": []}))
"""
GPUS = """#!/usr/bin/python
print('{"changed": false, "gpus": [], "fault": null, "strangers": [], "unknown": []}')
"""
FILES = """#!/usr/bin/python
print('{"changed": false, "files": []}')
"""


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """Make a machine without a server: nothing runs, nothing is written."""
    own = own_collection(tmp_path, "plugins/module_utils", "plugins/filter", "roles", "meta")
    for name, text in (("sglang_info", INFO), ("sglang_gpus_info", GPUS), ("host_files", FILES)):
        (own / f"plugins/modules/{name}.py").write_text(text.replace("HERE", str(tmp_path)))
    flags = "sglang_flags_info.py"
    (own / "plugins/modules" / flags).symlink_to(ROOT / "plugins/modules" / flags)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/systemctl").write_text(SYSTEMCTL.replace("HERE", str(tmp_path)))
    (tmp_path / "bin/systemctl").chmod(0o755)
    (tmp_path / "etc").mkdir()
    (tmp_path / "state").write_text("inactive\n")
    (tmp_path / "play.yml").write_text(PLAY)
    site = tmp_path / "opt/lib/python3.12/site-packages"
    site.mkdir(parents=True)
    (site / "sglang").symlink_to(ROOT / "lab/sglang/sglang")
    (tmp_path / "opt/bin").mkdir()
    (tmp_path / "opt/bin/python").touch()
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    return tmp_path


def serve(here: Path, fraction: float) -> str:
    """Run the role with one flag; return what it said."""
    variables = {
        "ansible_python_interpreter": sys.executable,
        "sglang_service": "chat",
        "sglang_user": "root",
        "sglang_python": f"{here}/opt/bin/python",
        "sglang_model_path": f"{here}/model",
        "sglang_mem_fraction_static": fraction,
        "sglang_api_key": KEY,
        "sglang_environment": {"HF_TOKEN": f"{KEY}-either", "ODD": 'a $b `c` \\ "d" %e\nf'},
        "__sglang_unit": f"{here}/etc/chat.service",
        "__sglang_config": f"{here}/etc/chat.yaml",
        "__sglang_env": f"{here}/etc/chat.env",
        "__sglang_records": f"{here}/var",
    }
    options = {"ANSIBLE_VERBOSITY": "3", "ANSIBLE_DIFF_ALWAYS": "1", "ANSIBLE_PIPELINING": "1"}
    said = run_playbook(here, "play.yml", variables=variables, environment=options)
    assert KEY not in said.replace(json.dumps(variables), "")
    (here / "said").write_text(said)
    return said


OLD = {
    "chat.service": "[Service]\n",
    "chat.yaml": "model-path: /srv/old\napi-key: not-for-anybody-old\n",
}


def write(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)


def test_a_server_that_fails_gives_way_to_the_one_before(here: Path) -> None:
    # a change was cut off: what was kept then is gone back to, not the half-done files
    change = {"began": "2031-05-06 07:08:09 UTC", "previous": True, "ran": True}
    write(here / "var/sglang/chat", {**OLD, "change.json": json.dumps(change)})
    write(here / "etc", {**OLD, "chat.yaml": "model-path: /half\n"})
    said = serve(here, 0.2)
    assert "that began 2031-05-06 07:08:09 UTC was interrupted" in said
    assert "mem-fraction-static: 0.2 (new)" in said
    assert "chat could not be changed. chat is failed: as the test wants" in said
    assert "The previous one serves again." in said
    assert {name: (here / "etc" / name).read_text() for name in OLD} == OLD
    assert (here / "state").read_text() == "active\n"
    assert sorted(os.listdir(here / "var/sglang/chat")) == sorted(OLD)
    environment = here / "etc/chat.env"  # new, and of no concern to the old unit
    assert 'ODD="a \\$b \\`c\\` \\\\ \\"d\\" %e\nf"\n' in environment.read_text()
    assert environment.stat().st_mode & 0o777 == 0o600
