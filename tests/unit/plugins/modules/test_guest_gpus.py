"""The modules about guests' GPUs: options in, results and refusals out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader
from ansible_collections.gpuhost.inference.plugins.modules import guest_gpus, guest_gpus_info

RunModule = Callable[..., dict[str, Any]]


@pytest.fixture
def commands(host_tree: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Let the modules see a captured host, and return the list of commands they run."""
    root = host_tree("eight-gpus")
    called: list[list[str]] = []
    for module in (guest_gpus, guest_gpus_info):
        monkeypatch.setattr(module, "Reader", lambda: Reader(str(root)))

    def run(command: list[str]) -> str:
        called.append(command)
        file = root / "etc/pve/qemu-server/200.conf"
        file.write_text(file.read_text().replace("hostpci1: host=82:00.0,pcie=1\n", ""))
        return ""

    monkeypatch.setattr(guest_gpus, "run", run)
    return called


def test_a_gpu_is_taken_from_a_machine(run_module: RunModule, commands: list[list[str]]) -> None:
    options = {"kind": "qemu", "vmid": 200, "addresses": ["81:00.0"]}
    plan = run_module(guest_gpus, check=True, diff=True, **options)
    assert plan["changed"]
    assert commands == []
    assert plan["diff"]["before"] == "hostpci1: host=82:00.0,pcie=1\n"
    done = run_module(guest_gpus, **options)
    assert done["guest"]["addresses"] == ["0000:81:00.0"]
    assert done["writes"] == [
        {"path": "/etc/pve/qemu-server/200.conf", "key": "hostpci1", "value": None}
    ]
    assert commands == [["qm", "set", "200", "--delete", "hostpci1"]]
    assert not run_module(guest_gpus, **options)["changed"]


def test_options_reach_the_plan(run_module: RunModule, commands: list[list[str]]) -> None:
    plan = run_module(
        guest_gpus,
        check=True,
        kind="lxc",
        vmid=100,
        addresses=["41:00.0", "81:00.0"],
        uid=1,
        gid=2,
        mode="0666",
        control_nodes=False,
        allow_from=[200],
        assume_ready=True,
    )
    assert "msg" not in plan
    assert plan["writes"][:2] == [
        {
            "path": plan["guest"]["path"],
            "key": "dev0",
            "value": "/dev/nvidia0,gid=2,uid=1,mode=0666",
        },
        {
            "path": plan["guest"]["path"],
            "key": "dev1",
            "value": "/dev/nvidia(of 0000:81:00.0),gid=2,uid=1,mode=0666",
        },
    ]
    assert commands == []


def test_readiness_is_assumed_in_check_mode_only(
    run_module: RunModule, commands: list[list[str]]
) -> None:
    refused = run_module(
        guest_gpus, kind="lxc", vmid=100, addresses=["81:00.0"], assume_ready=True, allow_from=[200]
    )
    assert refused["failed"]
    assert "is on driver vfio-pci" in refused["msg"]
    assert commands == []


def test_a_refusal_carries_what_was_found(run_module: RunModule, commands: list[list[str]]) -> None:
    refused = run_module(guest_gpus, kind="qemu", vmid=200, addresses=["81:00.0", "83:00.0"])
    assert refused["failed"]
    assert not refused["changed"]
    assert "qemu guest 201" in refused["msg"]
    assert refused["mapping_problems"] == []
    assert commands == []


def test_a_guest_that_is_not_there(run_module: RunModule, commands: list[list[str]]) -> None:
    refused = run_module(guest_gpus, kind="lxc", vmid=7, addresses=[])
    assert refused["failed"]
    assert "there is no lxc guest 7" in refused["msg"]


def test_a_move_is_planned(run_module: RunModule, commands: list[list[str]]) -> None:
    guest = {"kind": "qemu", "vmid": 200}
    layout = [{"name": "b", "addresses": ["81:00.0"], "driver": "vfio-pci", "guest": guest}]
    found = run_module(guest_gpus_info, layout=layout, layout_unassigned="keep")
    assert found["problems"] == []
    assert found["steps"] == ["take 0000:82:00.0 from qemu 200 (confidential)"]
    assert found["entries"][0]["addresses"] == ["0000:81:00.0"]
    assert commands == []
    assert "no layout entry names" in run_module(guest_gpus_info, layout=layout)["problems"][0]
