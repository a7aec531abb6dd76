"""A container is started only after its device entries fit the nodes that a new binding made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parent.parent.parent


def _moves() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the tasks of assign_gpus that move the GPUs, and those after a failure."""
    plays = yaml.safe_load((ROOT / "playbooks/assign_gpus.yml").read_text(encoding="utf-8"))
    block = next(task for task in plays[0]["tasks"] if "block" in task)
    return block["block"], block["rescue"]


def _named(tasks: list[dict[str, Any]], name: str) -> int:
    return [task["name"] for task in tasks].index(name)


def test_assign_gpus_looks_at_all_containers_between_binding_and_start() -> None:
    tasks, _rescue = _moves()
    bound = _named(tasks, "Bind all GPUs")
    again = _named(tasks, "Compare the guests with the new device nodes")
    given = _named(tasks, "Give the guests their GPUs")
    start = _named(tasks, "Start the guests that ran")
    assert bound < again < given < start
    assert "gpuhost.inference.guest_gpus_info" in tasks[again]
    assert tasks[again]["when"].startswith("__assign_bound is changed")
    assert "__assign_again" in tasks[given]["vars"]["__assign_given"]
    refusal = _named(tasks, "Refuse to start guests while another guest names their GPUs")
    assert given < refusal < start


def test_assign_gpus_keeps_a_layout_as_soon_as_it_holds() -> None:
    tasks, _rescue = _moves()
    assert _named(tasks, "Keep the new layout at boot") == _named(tasks, "Bind all GPUs") + 1


def test_assign_gpus_tells_whom_proxmox_did_not_start() -> None:
    _tasks, rescue = _moves()
    start = rescue[_named(rescue, "Start the guests that ran and whose GPUs are right")]
    said = rescue[_named(rescue, "Say how things stand")]
    assert start["register"] in said["vars"]["__assign_refused"]
    assert "__assign_refused" in said["ansible.builtin.fail"]["msg"]


def test_role_starts_no_container_with_the_gpu_of_another() -> None:
    role = ROOT / "roles/gpu_passthrough"
    tasks = yaml.safe_load((role / "tasks/guests.yml").read_text(encoding="utf-8"))
    read = _named(tasks, "Read the host again after the GPUs were bound")
    start = _named(tasks, "Start the stopped guests of the layout")
    assert read < start
    assert "__gpu_passthrough_startable" in tasks[start]["loop"]
    assert tasks[-1]["when"].startswith("__gpu_passthrough_misled")
    texts = yaml.safe_load((role / "vars/main.yml").read_text(encoding="utf-8"))
    for finding in ("guest-differs", "container-node-missing"):
        assert finding in texts["__gpu_passthrough_wrong"]
