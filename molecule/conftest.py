"""What the tests of all scenarios share: running a playbook, running a module, the tenant's VM."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from testinfra.host import Host

ROOT = Path(__file__).parent.parent
SCENARIO = Path(os.environ.get("MOLECULE_SCENARIO_DIRECTORY", ROOT / "molecule/default"))
# that of the lab, and what a scenario says beside it
INVENTORY = ["-i", "inventory/lab"]
INVENTORY += ["-i", str(SCENARIO / "inventory")] if (SCENARIO / "inventory").exists() else []
ANSWER = r"^(\S+) \| (SUCCESS|CHANGED|FAILED!) => (\{.*?^\})$"
ALIVE = "/run/qemu-server/201.alive"  # VM 201 writes a line a second: count, pid, time, verdict


@pytest.fixture(scope="session")
def root() -> Path:
    """Return the top of the repository."""
    return ROOT


@pytest.fixture(scope="session")
def run_playbook() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run one of the collection's playbooks on the lab; the caller judges its exit status."""

    def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = ["ansible-playbook", *INVENTORY, f"playbooks/{name}.yml", *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    return run


@pytest.fixture(scope="session")
def ask() -> Callable[..., dict[str, dict[str, Any]]]:
    """Run one of the collection's modules on some hosts; `failed` is always in a result."""

    def run(
        hosts: str, name: str, *, check: bool = False, **options: Any
    ) -> dict[str, dict[str, Any]]:
        command = ["ansible", *INVENTORY, hosts, "-m", f"gpuhost.inference.{name}"]
        command += ["-a", json.dumps(options)] if options else []
        command += ["--check"] if check else []
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        answers = re.findall(ANSWER, done.stdout, re.DOTALL | re.MULTILINE)
        assert answers, done.stdout + done.stderr
        return {
            host: {"failed": word == "FAILED!", **json.loads(answer)}
            for host, word, answer in answers
        }

    return run


@pytest.fixture
def run_module(
    host: Host, ask: Callable[..., dict[str, dict[str, Any]]]
) -> Callable[..., dict[str, Any]]:
    """Run one of the collection's modules on the test's host; `failed` is always in the result."""
    here = host.backend.get_hostname()
    return lambda name, **options: ask(here, name, **options)[here]


@pytest.fixture(scope="session")
def assert_neighbour_undisturbed() -> Callable[[Host], None]:
    """Check that VM 201 has had its devices all the time since boot, in one process."""

    def check(host: Host) -> None:
        lines = [line.split(maxsplit=3) for line in host.check_output(f"cat {ALIVE}").splitlines()]
        assert len(lines) > 5
        assert [int(line[0]) for line in lines] == list(range(1, len(lines) + 1))
        assert {line[1] for line in lines} == {host.check_output("cat /run/qemu-server/201.pid")}
        assert {line[-1] for line in lines} == {"ok"}
        now = float(host.check_output("cut -d' ' -f1 /proc/uptime"))
        assert now - float(lines[-1][2]) < 30

    return check
