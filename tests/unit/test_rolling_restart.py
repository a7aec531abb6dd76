"""The playbook with the real router, two stand-ins for SGLang and clients; systemd is played."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_http import Client
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_router import read_workers
from plays import own_collection, run_playbook
from routed import KEY, Clients, Fleet, eventually, free_port, install_router

# Restarts the server whose process the test wrote down, as systemd with KillMode=mixed does
SYSTEMCTL = """\
#!{python}
import json, os, signal, subprocess, sys, time
unit = next((word for word in sys.argv if word.endswith(".service")), "")
note = "{folder}/" + unit + ".json"
if "show" in sys.argv:
    print("LoadState=loaded\\nActiveState=active\\nSubState=running\\nUnitFileState=enabled")
elif "restart" in sys.argv:
    server = json.load(open(note))
    if server["broken"]:
        sys.exit("Job for " + unit + " failed")
    os.kill(server["pid"], signal.SIGTERM)
    while os.path.exists("/proc/%d/fd/0" % server["pid"]):
        time.sleep(0.1)
    log = open(note + ".log", "ab")
    started = subprocess.Popen(server["command"], env=server["env"], stdin=subprocess.DEVNULL,
                               stdout=log, stderr=log, start_new_session=True)
    server["pid"] = started.pid
    json.dump(server, open(note, "w"))
    with open("{folder}/restarted", "a") as restarted:
        restarted.write(unit + "\\n")
"""

# Says ready once the server answers to its health check
INFO = """\
import sys, time
from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_http import Client
module = AnsibleModule(argument_spec=dict(url=dict(), unit=dict(), model_id=dict(),
    api_key=dict(no_log=True), generate=dict(type="bool"), wait=dict(type="int", default=0),
    validate_certs=dict(type="bool")))
end = time.monotonic() + module.params["wait"]
while True:
    ready = Client(module.params["url"]).ask("/health", 30).status == 200
    if ready or time.monotonic() > end:
        break
    time.sleep(0.2)
state = "ready" if ready else "stopped"
module.exit_json(server=dict(state=state, reason="as seen by the test"))
"""


class Site:
    """Two servers behind a router, which a playbook finds as hosts g1 and g2."""

    def __init__(self, folder: Path) -> None:
        package, python = install_router()
        self.folder = folder
        self.fleet = Fleet(python, package, folder)
        self.ports = {name: free_port() for name in ("g1", "g2")}
        self.urls = {name: self.fleet.start(port) for name, port in self.ports.items()}
        self.fleet.route(list(self.urls.values()))
        linked = ("playbooks", "plugins/filter", "plugins/module_utils", "plugins/doc_fragments")
        self.own = own_collection(folder, *linked, "plugins/modules/sglang_router_workers.py")
        (self.own / "plugins/modules/sglang_info.py").write_text(INFO)
        (folder / "bin").mkdir()
        program = folder / "bin/systemctl"
        program.write_text(SYSTEMCTL.format(python=sys.executable, folder=folder))
        program.chmod(0o755)
        for name in self.ports:
            self.unit(name)
        self.router = Client(self.fleet.url, KEY)
        eventually(lambda: self.healthy() == sorted(self.urls.values()))

    def unit(self, name: str, broken: bool = False) -> None:
        """Write down what systemd knows of a server."""
        path = self.folder / f"{name}.service.json"
        process = self.fleet.processes[self.ports[name]]
        known = json.loads(path.read_text()) if path.exists() else {"pid": process.pid}
        known |= {"command": list(map(str, process.args)), "broken": broken}
        known |= {"env": self.fleet.environment}
        path.write_text(json.dumps(known))

    def healthy(self) -> list[str]:
        return sorted(worker.url for worker in read_workers(self.router) if worker.healthy)

    def run(self, *names: str) -> str:
        """Run the playbook with the servers in this order."""
        local = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
        key = {"sglang_router_api_key": KEY, "sglang_api_key": KEY}
        guests = {
            name: {**local, **key, "ansible_host": "127.0.0.1", "sglang_port": self.ports[name]}
            | {"sglang_service": name}
            for name in names
        }
        router = {**local, **key, "sglang_router_port": self.fleet.port}
        hosts = {"sglang_routers": {"hosts": {"r": router}}, "inference_guests": {"hosts": guests}}
        (self.folder / "hosts.json").write_text(json.dumps(hosts))
        lock = {"rolling_restart_lock": str(self.folder / "lock")}
        said = run_playbook(
            self.folder,
            self.own / "playbooks/rolling_restart.yml",
            "hosts.json",
            lock,
            {"ANSIBLE_VERBOSITY": "3"},  # where a key would show first
        )
        assert KEY not in said
        return said

    @property
    def restarted(self) -> list[str]:
        path = self.folder / "restarted"
        return path.read_text().split() if path.exists() else []


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    yield made
    for name in made.ports:
        pid = json.loads((tmp_path / f"{name}.service.json").read_text())["pid"]
        if pid != made.fleet.processes[made.ports[name]].pid:
            os.killpg(pid, 9)
    made.fleet.stop()


def test_fleet_is_restarted_and_a_stop_on_the_way_is_recovered(site: Site) -> None:
    site.unit("g1", broken=True)
    clients = Clients(site.fleet.port)
    try:
        said = site.run("g1", "g2")
        assert "g1: Restart it: " in said
        assert "It stays out of the router and the others serve." in said
        assert site.restarted == []
        assert site.healthy() == [site.urls["g2"]]
        site.unit("g1")
        said = site.run("g2", "g1")
        assert "failed=0" in said, said
        assert site.restarted == ["g1.service", "g2.service"]  # what is out comes first
        assert site.healthy() == sorted(site.urls.values())
    finally:
        clients.end()
    assert clients.bad == []
    assert clients.good > 0
    assert not (site.folder / "lock").is_symlink()


def test_nothing_is_begun_by_two_or_with_a_server_that_is_not_ready(site: Site) -> None:
    (site.folder / "lock").symlink_to("begun by somebody")
    assert "begun by somebody" in site.run("g1", "g2")
    os.killpg(site.fleet.processes[site.ports["g2"]].pid, signal.SIGKILL)
    said = site.run("g1", "g2")
    assert "g2 is stopped" in said
    assert "Nothing was restarted" in said.replace("\n", " ")
    assert site.restarted == []
