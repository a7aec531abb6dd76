"""The playbook check_p2p: what it keeps; the modules answer what a test wants."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from plays import own_collection, run_playbook

# The first answers by container, the second notes what it is to write
TESTER = """\
#!/usr/bin/python
# WANT_JSON
import json, pathlib, sys
options = json.loads(pathlib.Path(sys.argv[1]).read_text())
print(json.dumps(json.loads(pathlib.Path(ANSWERS).read_text())[str(options.get("vmid"))]))
"""
WRITER = """\
#!/usr/bin/python
# WANT_JSON
import json, pathlib, sys
[file] = json.loads(pathlib.Path(sys.argv[1]).read_text())["files"]
pathlib.Path(WRITTEN).write_text(json.dumps(file))
print('{"changed": true}')
"""


def made(vmid: int | None, verdict: str) -> dict[str, Any]:
    return {"vmid": vmid, "verdict": verdict, "reason": f"as seen in {vmid}", "problems": []}


def answer(
    vmid: int | None, verdict: str, *kept: dict[str, Any], worth: bool = True
) -> dict[str, Any]:
    told = {"p2p": made(vmid, verdict), "kept": kept, "worth_keeping": worth}
    return {"changed": False, **told}


def play(folder: Path, *answers: dict[str, Any], **variables: Any) -> tuple[Any, str]:
    """Return what is kept, and what the playbook says."""
    own = own_collection(folder, "playbooks")
    given, written = folder / "answers.json", folder / "written.json"
    given.write_text(json.dumps({str(one["p2p"]["vmid"]): one for one in answers}))
    modules = own / "plugins/modules"
    (modules / "gpu_p2p_info.py").write_text(TESTER.replace("ANSWERS", repr(str(given))))
    (modules / "host_files.py").write_text(WRITER.replace("WRITTEN", repr(str(written))))
    host = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
    inventory = {"proxmox_hosts": {"hosts": {"localhost": host}}}
    (folder / "hosts.json").write_text(json.dumps(inventory))
    said = run_playbook(folder, own / "playbooks/check_p2p.yml", "hosts.json", variables)
    assert written.exists(), said
    file = json.loads(written.read_text())
    assert (file["path"], file["mode"]) == ("/var/lib/gpuhost/p2p.json", "0600")
    content = file["content"]
    return content if isinstance(content, dict) else json.loads(content), said


def verdicts(content: dict[str, Any]) -> list[tuple[int | None, str]]:
    assert content["version"] == 1
    return [(test["vmid"], test["verdict"]) for test in content["tests"]]


def test_a_test_replaces_its_own_and_keeps_those_of_others(tmp_path: Path) -> None:
    kept = made(100, "works"), made(101, "broken"), made(None, "works"), made(102, "broken")
    content, said = play(
        tmp_path,
        answer(101, "works", *kept),
        answer(102, "unknown", *kept, worth=False),
        check_p2p_guests=[101, 102],
    )
    assert verdicts(content) == [
        (100, "works"),
        (None, "works"),
        (102, "broken"),
        (101, "works"),
    ], said
    assert "unknown: as seen in 102" in said


@pytest.mark.parametrize("verdict", ["broken", "unknown"])
def test_the_first_test_of_the_host_itself(tmp_path: Path, verdict: str) -> None:
    content, said = play(tmp_path, answer(None, verdict), check_p2p_fail=True)
    assert verdicts(content) == [(None, verdict)]
    assert "Peer-to-peer copies on localhost: as seen in None." in said
