"""The inventories that users copy: they parse, and the API source makes the playbooks' groups."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent.parent
ANSWERS = {
    "/nodes": [{"node": "pve-a", "type": "node", "status": "online"}],
    "/pools": [],
    "/nodes/pve-a/qemu": [{"vmid": 200, "name": "confidential", "status": "running"}],
    "/nodes/pve-a/qemu/200/config": {"tags": "inference"},
    "/nodes/pve-a/qemu/200/status/current": {"status": "running", "qmpstatus": "running"},
    "/nodes/pve-a/lxc": [
        {"vmid": "100", "name": "qwen-a", "status": "running"},
        {"vmid": "101", "name": "mail", "status": "running"},
    ],
    "/nodes/pve-a/lxc/100/config": {"tags": "gpu;inference"},
    "/nodes/pve-a/lxc/101/config": {"hostname": "mail"},
}


class _Api(BaseHTTPRequestHandler):
    """As much of the Proxmox API as the inventory plugin asks for."""

    def do_GET(self) -> None:
        path = self.path.removeprefix("/api2/json").split("?")[0]
        answer = ANSWERS.get(path)
        if answer is None:
            answer = {"status": "running"} if path.endswith("/status/current") else []
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"data": answer}).encode())

    def log_message(self, *_arguments: object) -> None:
        pass


@pytest.fixture
def api() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), _Api)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def _inventory(*sources: str, **environment: str) -> dict[str, Any]:
    command = [str(Path(sys.executable).with_name("ansible-inventory")), "--list"]
    for source in sources:
        command += ["-i", str(ROOT / "inventory" / source)]
    collections = {"ANSIBLE_COLLECTIONS_PATH": str(ROOT / ".build" / "collections")}
    done = subprocess.run(
        command,
        env={
            **os.environ,
            **collections,
            "ANSIBLE_INVENTORY_ANY_UNPARSED_IS_FAILED": "1",
            **environment,
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout, object_hook=_unwrapped)
    return answer


def _unwrapped(found: dict[str, Any]) -> Any:
    """Take values of an API as they are; Ansible marks them, so that nobody templates them."""
    return found.get("__ansible_unsafe", found)


@pytest.mark.parametrize("source", ["lab", "example"])
def test_each_guest_names_a_host_and_a_container_of_its_layout(source: str) -> None:
    found = _inventory(source)
    variables = found["_meta"]["hostvars"]
    for guest in found["inference_guests"]["hosts"]:
        node = variables[guest]["proxmox_node"]
        assert node in found["proxmox_hosts"]["hosts"]
        guests = [entry.get("guest") for entry in variables[node]["gpu_layout"]]
        assert {"kind": "lxc", "vmid": variables[guest]["proxmox_vmid"]} in guests


def test_readme_shows_the_example_and_moves_one_gpu_of_it() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```yaml\n(gpu_layout:.*?)```", readme, re.DOTALL)
    before, after = (yaml.safe_load(block)["gpu_layout"] for block in blocks)
    variables = (ROOT / "inventory/example/host_vars/pve-a.yml").read_text(encoding="utf-8")
    assert before == yaml.safe_load(variables)["gpu_layout"]
    named = [entry.pop("addresses", None) for entry in (*before, *after)]
    assert before[1].pop("numa_node") == 1
    assert before == after  # nothing else was dropped
    assert named[1] is None
    assert set(named[0]) - set(named[2]) == {"0000:71:00.0"} == set(named[0]) & set(named[3])
    assert len(named[2] + named[3]) == len(set(named[2] + named[3])) == 8


def test_api_source_makes_the_groups_of_the_playbooks(api: str) -> None:
    found = _inventory(
        "proxmox.yml",
        "proxmox_groups.yml",
        PROXMOX_URL=api,
        PROXMOX_USER="ansible@pve",
        PROXMOX_TOKEN_ID="inventory",
        PROXMOX_TOKEN_SECRET="secret",
    )
    assert found["proxmox_hosts"]["children"] == ["proxmox_nodes"]
    assert found["proxmox_nodes"]["hosts"] == ["pve-a"]
    assert found["inference_guests"]["hosts"] == ["qwen-a"]
    guest = found["_meta"]["hostvars"]["qwen-a"]
    assert (guest["proxmox_node"], int(guest["proxmox_vmid"])) == ("pve-a", 100)
    assert guest["ansible_connection"] == "community.proxmox.proxmox_pct_remote"
    assert guest["ansible_host"] == "pve-a"
