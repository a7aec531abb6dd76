"""Two servers with MTP behind a router: changed, restarted and rebooted while clients ask them.

The tests are one story and run in order. All that Ansible says is kept in .build/serve-MACHINE,
where the last test looks for the keys.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from routed import Clients, eventually, free_port
from testinfra.host import Host

testinfra_hosts = ["ansible://pve1"]
Run = Callable[..., str]
SCENARIO = Path(__file__).parents[1]
ROOT = SCENARIO.parents[1]
MACHINE = os.environ.get("LAB_MACHINE", "amd")
LOGS = ROOT / ".build" / f"serve-{MACHINE}"
SERVED = yaml.safe_load((SCENARIO / "inventory/group_vars/inference_guests.yml").read_text())
KEY, TOKEN = SERVED["sglang_api_key"], SERVED["sglang_environment"]["HF_TOKEN"]
MODEL = SERVED["sglang_served_model_name"]
CONTAINERS = (100, 101)
WORKERS = {f"http://ct{number}:30000" for number in CONTAINERS}
FILES = "/etc/sglang.yaml /etc/sglang.env /etc/systemd/system/sglang.service"
# where the inventory has 24
CHANGED = {"sglang_max_running_requests": 16}
# what may hold the key or the token: files of one account
SERVERS = FILES.split()[:2]
HOLDERS = {*SERVERS, *(f"/var/lib/gpuhost/sglang/sglang/{Path(name).name}" for name in SERVERS)}
# a pattern that does not find itself on a command line
SECRETS = f"'[{KEY[0]}]{KEY[1:]}|[{TOKEN[0]}]{TOKEN[1:]}'"
SEEK = f"grep -rlsE --exclude-dir=journal {SECRETS}"
PLACES = "/etc /root /tmp /run /usr/local /opt/sglang /var/cache /var/lib /var/log /var/tmp"
# SGLang itself writes its key into its journal (README of the role), which not everybody may read
SPOKEN = "journalctl --no-pager | grep -v server_args=;"
PUBLIC = "find /run/log/journal /var/log/journal -type f -perm -o+r -exec cat {} + || true"


@pytest.fixture(scope="module")
def run(run_playbook: Callable[..., subprocess.CompletedProcess[str]]) -> Run:
    """Run a playbook and keep all that it can tell; return that when it ended as expected."""
    shutil.rmtree(LOGS, ignore_errors=True)
    LOGS.mkdir(parents=True)

    def kept(name: str, *arguments: str, status: int = 0) -> str:
        done = run_playbook(name, "-vvv", "--diff", *arguments)
        said = done.stdout + done.stderr
        (LOGS / f"{len(list(LOGS.iterdir())) + 1}-{Path(name).name}.log").write_text(said)
        assert done.returncode == status, said[-6000:]
        return said

    return kept


@pytest.fixture
def servers(ask: Callable[..., dict[str, dict[str, Any]]]) -> Callable[..., list[dict[str, Any]]]:
    """Look at both servers at once."""

    def look(**options: Any) -> list[dict[str, Any]]:
        options = {
            "unit": "sglang",
            "model_id": MODEL,
            "api_key": "{{ sglang_api_key }}",
            **options,
        }
        answers = ask("inference_guests", "sglang_info", **options)
        assert len(answers) == len(CONTAINERS)
        assert not {KEY, TOKEN} & set(re.findall(r"\w+", json.dumps(answers)))
        return [answers[name]["server"] for name in sorted(answers)]

    return look


@pytest.fixture
def port() -> Iterator[int]:
    """Give a port of this machine that leads to the router."""
    here = free_port()
    config = ROOT / ".build/lab" / MACHINE / "ssh_config"
    words = ["ssh", "-F", str(config), "-N", "-L", f"{here}:10.10.10.101:31000", "pve1"]
    with subprocess.Popen(words) as ssh:
        eventually(lambda: _ask(here, "/readiness")[0] == 200)
        yield here
        ssh.kill()


def _ask(port: int, path: str, key: str = KEY) -> tuple[int, Any]:
    """Return status and JSON of the router's answer; status 0 when there is none."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET", path, headers={"Authorization": f"Bearer {key}"})
        answer = connection.getresponse()
        text = answer.read()
        return answer.status, json.loads(text) if text.startswith(b"{") else {}
    except (OSError, http.client.HTTPException):
        return 0, {}
    finally:
        connection.close()


def _inside(host: Host, number: int, script: str) -> str:
    return str(host.check_output("pct exec %s -- sh -c %s", str(number), script))


def _invocations(host: Host) -> list[str]:
    """Return of each server which run of its unit this is."""
    script = "systemctl show sglang -P InvocationID"
    return [_inside(host, number, script) for number in CONTAINERS]


def _assert_routed(port: int) -> None:
    """Check that the router sends requests with the key to both servers, and others to none."""
    eventually(lambda: _workers(port) == WORKERS)
    assert _ask(port, "/readiness")[0] == 200
    assert _ask(port, "/workers", "another")[0] == 401


def _workers(port: int) -> set[str]:
    listed = _ask(port, "/workers")[1].get("workers", [])
    return {worker["url"] for worker in listed if worker["is_healthy"]}


def _assert_serving(servers: list[dict[str, Any]]) -> None:
    for server in servers:
        assert server["state"] == "ready", server["reason"]
        assert server["speculation"]["accept_length"] > 1.4


def test_both_serve_with_mtp_behind_the_router(
    host: Host, run: Run, servers: Callable[..., list[dict[str, Any]]], request: Any
) -> None:
    run("../molecule/serve/converge")
    _assert_serving(servers(acceptance_tokens=200))
    _assert_routed(request.getfixturevalue("port"))
    for number, units in ((100, "sglang"), (101, "sglang sglang-router")):
        _inside(host, number, f"systemctl is-active {units} && systemctl is-enabled {units}")


@pytest.fixture
def declare(tmp_path: Path) -> Callable[..., list[str]]:
    """Give the words for a run in which a container has these variables, too."""

    def words(**containers: dict[str, Any]) -> list[str]:
        declared = tmp_path / "declared.yml"
        declared.write_text(json.dumps({"inference_guests": {"hosts": containers}}))
        return ["-i", str(declared)]

    return words


def test_change_takes_effect_and_one_that_cannot_start_is_taken_back(
    host: Host,
    run: Run,
    servers: Callable[..., list[dict[str, Any]]],
    declare: Callable[..., list[str]],
) -> None:
    before, files = _invocations(host), _inside(host, 101, f"sha256sum {FILES}")
    # the weights do not fit into a third of the memory
    changes = declare(ct100=CHANGED, ct101={"sglang_mem_fraction_static": 0.3})
    told = " ".join(run("deploy_sglang", *changes, status=2).split())
    assert "sglang could not be changed." in told
    assert "Not enough memory. Please try to increase --mem-fraction-static" in told
    assert "The previous one serves again." in told
    assert _inside(host, 101, f"sha256sum {FILES}") == files
    assert [server["effective_max_running_requests"] for server in servers()] == [16, 24]
    assert not set(_invocations(host)) & set(before)


def test_no_request_fails_while_both_are_restarted(host: Host, run: Run, port: int) -> None:
    before = _invocations(host)
    clients = Clients(port, 2, key=KEY, model=MODEL, pause=0.5)
    try:
        run("rolling_restart")
    finally:
        clients.end()
    assert clients.bad == []
    assert clients.good > 20
    assert not set(_invocations(host)) & set(before)
    _assert_routed(port)


def test_second_run_changes_nothing(host: Host, run: Run) -> None:
    before = _invocations(host)
    # of the one that has all: the server that was taken back, and the router
    said = run("../molecule/serve/converge", "--limit", "ct101")
    assert re.findall(r"changed=(\d+)", said.partition("PLAY RECAP")[2]) == ["0"]
    assert _invocations(host) == before


def test_all_is_back_after_a_reboot(
    host: Host, servers: Callable[..., list[dict[str, Any]]], request: Any
) -> None:
    boot = "cat /proc/sys/kernel/random/boot_id"
    before = host.check_output(boot)
    words = ["ansible", "-i", "inventory/lab", "pve1", "-m", "ansible.builtin.reboot"]
    subprocess.run([*words, "-a", "reboot_timeout=900"], cwd=ROOT, check=True)
    assert host.check_output(boot) != before
    for number in CONTAINERS:
        host.check_output(f"until pct status {number} | grep running; do sleep 1; done")
        _inside(host, number, "until systemctl is-active ssh; do sleep 1; done")
    _assert_serving(servers(acceptance_tokens=200, wait=300))
    _assert_routed(request.getfixturevalue("port"))


def test_keys_are_only_where_they_belong(host: Host) -> None:
    for log in LOGS.iterdir():
        said = log.read_text()
        assert "PLAY RECAP" in said
        assert KEY not in said, log
        assert TOKEN not in said, log

    # processes of the containers are among the host's
    asked = f"{SEEK} /proc/[0-9]*/cmdline /etc /root /tmp /run /var/lib/gpuhost /var/log"
    assert host.run(f"{asked}; journalctl --no-pager | grep -E {SECRETS}").stdout == ""
    for number in CONTAINERS:
        expected = HOLDERS | ({"/etc/sglang-router.json"} if number == 101 else set())
        assert set(_inside(host, number, f"{SEEK} {PLACES} || true").split()) == expected
        modes = _inside(host, number, f"stat -c %a {' '.join(expected)}").split()
        assert set(modes) == {"600"}
        shown = f"systemctl show 'sglang*'; {SPOKEN} {PUBLIC}"
        assert not re.search(f"{KEY}|{TOKEN}", _inside(host, number, shown))
