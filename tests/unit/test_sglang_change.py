"""A change of the role sglang as one transaction: what it does when the new server fails.

systemd, the server's state and its GPUs are stand-ins; files, flags and templates are real.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

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
        name: gpuhost.inference.ROLE
"""
# systemd: of one unit it knows how it runs (state), at which boots (enabled), and its file
SYSTEMCTL = """#!/bin/sh
cd HERE
echo "$@" >> called
case "$1" in
  start) echo active > state; cp var/sglang/chat/change.json noted ;;
  stop) echo inactive > state ;;
  enable) echo "enabled${3:+-runtime}" > enabled ;;
  disable) echo disabled > enabled ;;
  is-enabled) cat enabled; grep -q enabled enabled ;;
  cat) cat etc/chat.service ;;
  show)
    load=loaded
    [ -e "$(cat fragment)" ] || [ -e cached ] || load=not-found
    [ $load = loaded ] && at=$(cat fragment)
    [ -e etc/chat.service ] && file=$(cat enabled)
    echo "LoadState=$load"
    echo "ActiveState=$(cat state)"
    echo "UnitFileState=$file"
    echo "FragmentPath=$at"
    echo "DropInPaths=$(cat drop-ins)" ;;
  daemon-reload) rm -f cached ;;
esac
"""
INFO = """#!/usr/bin/python
# WANT_JSON
import json, pathlib, sys
here = pathlib.Path("HERE")
asked = json.loads(pathlib.Path(sys.argv[1]).read_text())
with (here / "asked").open("a") as log:
    log.write(asked["url"] + chr(10))
config = here / "etc/chat.yaml"
text = config.read_text() if config.exists() else ""
state = here.joinpath("state").read_text().strip()
state = {"active": "ready", "deactivating": "draining", "activating": "failed"}.get(
    state, "stopped"
)
if state == "ready" and "mem-fraction-static: 0.2" in text:
    state = "failed"
verdict = "dead" if "speculative" in text else "unknown"
server = {
    "state": state, "reason": "as the test wants", "settled": True, "listener": None,
    "speculation": {"verdict": verdict, "accept_length": 1.0, "accept_rate": 0.0},
}
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
    for name in ("sglang_flags_info.py", "sglang_mtp_info.py"):
        (own / "plugins/modules" / name).symlink_to(ROOT / "plugins/modules" / name)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/systemctl").write_text(SYSTEMCTL.replace("HERE", str(tmp_path)))
    (tmp_path / "bin/systemctl").chmod(0o755)
    (tmp_path / "etc").mkdir()
    told = {"state": "inactive", "enabled": "disabled", "drop-ins": "", "called": "", "asked": ""}
    told["fragment"] = str(tmp_path / "etc/chat.service")
    write(tmp_path, {name: f"{text}\n" for name, text in told.items()})
    site = tmp_path / "opt/lib/python3.12/site-packages"
    site.mkdir(parents=True)
    for name in ("sglang", "sglang-0.5.23.dist-info"):
        (site / name).symlink_to(ROOT / "lab/sglang" / name)
    (tmp_path / "opt/bin").mkdir()
    (tmp_path / "opt/bin/python").touch()
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    return tmp_path


def serve(here: Path, fraction: float = 0.8, role: str = "sglang", **more: Any) -> str:
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
        "__sglang_wanted_by": f"{here}/etc/wants/chat.service",
        "__sglang_cache": f"{here}/cache",
        "__sglang_records": f"{here}/var",
        **more,
    }
    options = {"ANSIBLE_VERBOSITY": "3", "ANSIBLE_DIFF_ALWAYS": "1", "ANSIBLE_PIPELINING": "1"}
    (here / "play.yml").write_text(PLAY.replace("ROLE", role))
    said = run_playbook(here, "play.yml", variables=variables, environment=options)
    assert KEY not in said.replace(json.dumps(variables), "")
    (here / "said").write_text(said)
    return " ".join(said.split())


OLD = {
    "chat.service": "[Service]\nExecStart=python -m sglang.launch_server --config CONFIG\n",
    "chat.yaml": "model-path: /srv/old\nport: 30007\napi-key: not-for-anybody-old\n",
}


def write(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)


def old(here: Path) -> dict[str, str]:
    return {name: text.replace("CONFIG", f"{here}/etc/chat.yaml") for name, text in OLD.items()}


def found(here: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in (here / "etc").iterdir() if path.is_file()}


def told(here: Path, name: str) -> str:
    return (here / name).read_text().strip()


def test_a_server_that_fails_gives_way_to_the_one_before(here: Path) -> None:
    # a change was cut off: what was kept then is gone back to, not the half-done files
    change = {"began": "2031-05-06 07:08:09 UTC", "previous": True, "ran": True}
    marker = {"change.json": json.dumps({**change, "enabled": "enabled", "wrote": []})}
    write(here / "var/sglang/chat", {**old(here), **marker})
    write(here / "etc", {**old(here), "chat.yaml": "model-path: /by/hand\n"})
    said = serve(here, 0.2)
    assert "that began 2031-05-06 07:08:09 UTC was interrupted" in said
    assert "mem-fraction-static: 0.2 (new)" in said
    assert "chat could not be changed. chat is failed: as the test wants" in said
    assert "The previous one serves again." in said
    assert found(here) == old(here)  # the environment is of the failed one alone
    assert (told(here, "state"), told(here, "enabled")) == ("active", "enabled")
    assert told(here, "asked").endswith("\nhttp://127.0.0.1:30007")
    # what somebody made in between is neither of before nor of the change
    kept = here / "var/sglang/chat"
    (aside,) = kept.glob("by-hand-*")
    assert f"{here}/etc/chat.yaml: changed by hand" in said
    assert {path.name: path.read_text() for path in aside.iterdir()} == {
        "chat.yaml": "model-path: /by/hand\n"
    }
    assert {path.name for path in kept.iterdir()} == {*OLD, aside.name}


def test_a_server_with_flags_on_its_command_line_is_waited_for_at_its_port(here: Path) -> None:
    # as release 0.1.0 and many an administrator wrote it: with tokens, which no --diff may show
    unit = f"[Service]\nEnvironment=HF_TOKEN={KEY}\n"
    unit += f"ExecStart=python -m sglang.launch_server --port 30009 --api-key {KEY}\n"
    write(here / "etc", {"chat.service": unit})
    write(here, {"state": "deactivating\n"})  # it was asked to end, and answers still
    said = serve(here, 0.2)
    assert "The previous one serves again." in said
    assert found(here) == {"chat.service": unit}
    assert told(here, "asked").endswith("\nhttp://127.0.0.1:30009")
    assert (told(here, "state"), told(here, "enabled")) == ("active", "disabled")
    # one that systemd would start again soon, in a way that tells no port
    unit = "[Service]\nExecStart=/opt/start-chat\n"
    write(here / "etc", {"chat.service": unit})
    write(here, {"state": "activating\n", "enabled": "enabled-runtime\n"})
    said = serve(here, 0.2)
    assert "Its previous files are back, but it is not seen to serve again: it was started" in said
    assert found(here) == {"chat.service": unit}
    assert (told(here, "state"), told(here, "enabled")) == ("active", "enabled-runtime")
    # one that systemd has given up
    write(here, {"state": "failed\n"})
    assert "it did not run before either" in serve(here, 0.2)
    assert told(here, "state") == "inactive"


def test_a_change_that_is_interrupted_twice_finds_its_own_files(here: Path) -> None:
    assert "failed=0" in serve(here)
    mine = found(here)
    for name in ("chat.yaml", "chat.env"):
        assert (here / "etc" / name).stat().st_mode & 0o777 == 0o600
    assert 'ODD="a \\$b \\`c\\` \\\\ \\"d\\" %e\nf"\n' in mine["chat.env"]
    for path in ("opt", "model", "cache/huggingface"):
        assert f'RequiresMountsFor="{here}/{path}"\n' in mine["chat.service"]
    unit = dict(re.findall(r"^(\w+)=(\d+)h?$", mine["chat.service"], re.MULTILINE))
    seconds, starts = int(unit["RestartSec"]), int(unit["StartLimitBurst"])
    assert seconds * (starts - 1) > 600  # a slow boot
    # and not for ever where each start loads for half an hour first
    assert (seconds + 1800) * starts < int(unit["StartLimitIntervalSec"]) * 3600
    # files are as they should be, who may read them is not
    for name in mine:
        (here / "etc" / name).chmod(0o666)
    write(here, {"called": ""})
    said = serve(here)
    assert "changed=3" in said
    assert found(here) == mine
    modes = {name: (here / "etc" / name).stat().st_mode & 0o777 for name in mine}
    assert modes == {"chat.service": 0o644, "chat.yaml": 0o600, "chat.env": 0o600}
    assert not {"stop chat.service", "start chat.service"} & set(told(here, "called").splitlines())
    # cut off as it was starting: these are the files it wrote itself
    marker = here / "var/sglang/chat/change.json"
    for fraction in (0.7, 0.6):
        (here / "noted").replace(marker)
        said = serve(here, fraction)
        assert "was interrupted" in said
        assert "changed by hand" not in said
        assert "failed=0" in said
        assert not marker.exists()


def test_the_name_of_another_service_is_refused(here: Path) -> None:
    unit = here / "usr/chat.service"
    write(unit.parent, {unit.name: "[Service]\n"})
    write(here, {"fragment": f"{unit}\n", "state": "active\n"})
    for state in ("present", "absent"):
        said = serve(here, sglang_state=state)
        assert f"systemd has it from {unit}, not from {here}/etc/chat.service. Choose" in said
    assert found(here) == {}
    assert told(here, "state") == "active"
    assert not (here / "var").exists()
    # drop-ins of a unit that the role may have are somebody's, and are told
    write(here, {"fragment": f"{here}/etc/chat.service\n"})
    mine, others = "/etc/systemd/system/chat.service.d/a.conf", "/run/systemd/service.d/z.conf"
    write(here, {"drop-ins": f"{others} {mine}\n"})
    said = serve(here)
    assert f'"msg": "{mine}: these change the service' in said
    assert "failed=0" in said


def test_absent_finishes_what_was_interrupted_and_loses_no_model(here: Path) -> None:
    assert "failed=0" in serve(here)
    cache = here / "cache"
    for name in ("triton/a", "cuda/b", ".cache/flashinfer/c", ".cache/other/d", "models/e"):
        write((cache / name).parent, {Path(name).name: "x"})
    write(here / "etc/wants", {"chat.service": ""})
    # its unit went, and then the connection: systemd has it still, and it runs
    (here / "etc/chat.service").unlink()
    (here / "cached").touch()
    said = serve(here, sglang_state="absent")
    assert "failed=0" in said
    assert told(here, "state") == "inactive"
    assert found(here) == {}
    assert list((here / "etc/wants").iterdir()) == []
    assert not (here / "var/sglang/chat").exists()
    assert "daemon-reload" in told(here, "called").split("stop chat.service")[1]
    left = {str(path.relative_to(cache)) for path in cache.rglob("*") if path.is_file()}
    assert left == {".cache/other/d", "models/e"}
    assert f"{cache}/.cache, {cache}/models: not removed" in said
    said = serve(here, sglang_state="absent")
    assert "changed=0" in said
    assert "failed=0" in said
    # and where systemd has forgotten it, but not its process
    write(here, {"state": "active\n"})
    assert "failed=0" in serve(here, sglang_state="absent")
    assert told(here, "state") == "inactive"


def test_a_dead_drafter_goes_and_the_server_before_comes_back(here: Path) -> None:
    (here / "model/config.json").unlink()
    subprocess.run([ROOT / "lab/sglang/make_model", here / "model"], check=True)
    write(here / "etc", old(here))
    write(here, {"state": "active\n", "enabled": "enabled\n"})
    said = serve(here, role="sglang_mtp", sglang_mtp_gpu_memory_mib=97887)
    assert "chat is ready, but of its drafts none is accepted (accept length 1.0)" in said
    assert "The previous one serves again." in said
    assert found(here) == old(here)
    assert (told(here, "state"), told(here, "enabled")) == ("active", "enabled")
