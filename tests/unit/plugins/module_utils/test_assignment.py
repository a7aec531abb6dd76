"""Whom a changed layout stops, what it binds, whom it starts, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuhost.inference.plugins.module_utils._assignment import read_assignment
from ansible_collections.gpuhost.inference.plugins.module_utils._binding import change
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import UnreadableError
from ansible_collections.gpuhost.inference.plugins.module_utils._kernel_write import Machine
from ansible_collections.gpuhost.inference.plugins.module_utils._moves import Wish
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader
from ansible_collections.gpuhost.inference.plugins.module_utils._transaction import Store
from fake_kernel import FakeKernel

CT = ["0000:41:00.0", "0000:42:00.0", "0000:43:00.0", "0000:44:00.0"]
VM = ["0000:81:00.0", "0000:82:00.0"]
LXC, QEMU = "etc/pve/lxc/100.conf", "etc/pve/qemu-server/200.conf"


@pytest.fixture
def root(host_tree: Callable[[str], Path]) -> Path:
    """Return a host that is as `layout()` says, with container 100 and VM 200 running."""
    tree = host_tree("eight-gpus")
    (tree / LXC).write_text(f"dev6: /dev/nvidia-uvm-tools\n{(tree / LXC).read_text()}")
    (tree / QEMU).write_text(f"machine: q35\n{(tree / QEMU).read_text()}")
    (tree / "dev/nvidia-uvm-tools").write_text("c 510:1")
    run(tree, "lxc", True)
    run(tree, "qemu", True)
    return tree


def run(root: Path, kind: str, running: bool) -> None:
    """Start or stop container 100 or VM 200."""
    if kind == "lxc":
        file = root / "sys/fs/cgroup/lxc/100/cgroup.events"
        file.write_text(f"populated {int(running)}\n")
    elif running:
        (root / "proc/2000/fd").mkdir(parents=True)
        (root / "proc/2000/cmdline").write_bytes(b"/usr/bin/kvm\0-id\x00200\0")
        (root / "proc/2000/cgroup").write_text("0::/qemu.slice/200.scope\n")
        (root / "run/qemu-server/200.pid").write_text("2000\n")
    else:
        (root / "run/qemu-server/200.pid").unlink()


def layout(ct: list[str], vm: list[str], **more: Any) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = []
    if ct:
        guest = {"kind": "lxc", "vmid": 100}
        entries.append({"name": "a", "addresses": ct, "driver": "nvidia", "guest": guest, **more})
    if vm:
        guest = {"kind": "qemu", "vmid": 200}
        entries.append({"name": "b", "addresses": vm, "driver": "vfio-pci", "guest": guest})
    return entries


def plan(root: Path, entries: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return read_assignment(Reader(str(root)), entries, "keep", **more)


def of(found: dict[str, Any], vmid: int) -> dict[str, Any]:
    return next(guest for guest in found["guests"] if guest["vmid"] == vmid)


def test_a_host_as_its_layout_says_needs_nothing(root: Path) -> None:
    found = plan(root, layout(CT, VM))
    assert (found["problems"], found["needed"], found["steps"]) == ([], False, [])
    assert [(guest["vmid"], guest["fit"]) for guest in found["guests"]] == [
        (100, True),
        (200, True),
    ]


def test_a_gpu_moves_to_the_machine(root: Path) -> None:
    found = plan(root, layout(CT[:3], [CT[3], *VM]))
    assert found["problems"] == []
    assert found["steps"] == [
        "shut down qemu 200 (confidential)",
        "shut down lxc 100 (inference)",
        "take 0000:44:00.0 from lxc 100 (inference)",
        "bind 0000:44:00.0 to vfio-pci (nvidia now)",
        "give 0000:44:00.0 to qemu 200 (confidential)",
        "start lxc 100 (inference)",
        "start qemu 200 (confidential)",
    ]
    container, machine = of(found, 100), of(found, 200)
    assert (container["loses"], container["gains"], container["keeps"]) == (True, False, (*CT[:3],))
    assert (machine["loses"], machine["gains"]) == (False, True)
    assert [one["address"] for one in found["bindings"]] == [CT[3]]


def test_a_gpu_moves_to_the_container_though_the_machine_names_it(root: Path) -> None:
    found = plan(root, layout([*CT, VM[1]], VM[:1]))
    assert found["problems"] == []
    assert of(found, 200)["loses"]
    assert of(found, 100)["gains"]


def test_a_swap_takes_and_gives_in_both(root: Path) -> None:
    found = plan(root, layout([*CT[:3], VM[1]], [VM[0], CT[3]]))
    for vmid in (100, 200):
        assert (of(found, vmid)["loses"], of(found, vmid)["gains"]) == (True, True)
    assert sorted(one["wanted_driver"] for one in found["bindings"]) == ["nvidia", "vfio-pci"]


def test_stopped_guests_are_neither_stopped_nor_started(root: Path) -> None:
    run(root, "lxc", False)
    run(root, "qemu", False)
    found = plan(root, layout(CT[:3], [CT[3], *VM]))
    assert not any(guest["stop"] or guest["start"] for guest in found["guests"])
    assert of(found, 100)["changes"]


def test_a_guest_whose_gpus_stay_runs_on(root: Path) -> None:
    found = plan(root, layout(CT[:3], VM))
    assert (of(found, 100)["stop"], of(found, 200)["stop"]) == (True, False)


def test_guests_are_started_in_proxmox_order(root: Path) -> None:
    file = root / QEMU
    file.write_text(f"startup: order=2,up=30\n{file.read_text()}")
    found = plan(root, layout(CT[:3], [CT[3], *VM]))
    assert [guest["vmid"] for guest in found["guests"]] == [200, 100]


def test_a_type_is_changed_below_a_running_guest_only_where_the_kernel_allows(root: Path) -> None:
    for address in CT:
        group = root / f"sys/bus/pci/devices/{address}/iommu_group"
        (group / "type").write_text("DMA\n")
    found = plan(root, layout(CT, VM, iommu_type="DMA-FQ"))
    assert found["needed"]
    assert not of(found, 100)["stop"]
    found = plan(root, layout(CT, VM, iommu_type="identity"))
    assert of(found, 100)["stop"]
    assert f"set the group type of {CT[0]} to identity (DMA now)" in found["steps"]


def test_a_guest_outside_the_layout_is_never_touched(root: Path) -> None:
    found = plan(root, layout(CT, [*VM, "0000:83:00.0"]))
    assert [one for one in found["problems"] if "0000:83:00.0 belongs to qemu guest 201" in one]
    assert [guest["vmid"] for guest in found["guests"]] == [100, 200]


def test_a_stopped_guest_outside_the_layout_keeps_its_gpus_too(root: Path) -> None:
    run(root, "qemu", False)
    found = plan(root, layout([*CT, *VM], []))
    assert (
        "0000:81:00.0 belongs to qemu guest 200, which is stopped and is not in the layout"
        in (found["problems"][0])
    )


def test_a_guest_of_ours_may_lose_all_its_gpus(root: Path) -> None:
    found = plan(root, layout([*CT, *VM], []), release=[200])
    assert found["problems"] == []
    machine = of(found, 200)
    assert (machine["wants"], machine["stop"], machine["start"]) == ((), True, True)
    assert plan(root, layout(CT, VM), release=[999])["problems"] == [
        "guest 999 of the option release is not on this host"
    ]


def test_a_process_of_the_host_on_a_moving_gpu_is_refused(root: Path) -> None:
    at = root / "proc/4242"
    (at / "fd").mkdir(parents=True)
    (at / "cmdline").write_bytes(b"nvtop\0")
    (at / "fd/3").symlink_to("/dev/nvidia3")
    cgroup = at / "cgroup"
    moved = layout(CT[:3], [CT[3], *VM])

    cgroup.write_text("0::/user.slice/user-0.slice\n")
    assert "0000:44:00.0 is in use by process 4242 (nvtop" in plan(root, moved)["problems"][0]
    assert plan(root, layout(CT, VM))["problems"] == []

    cgroup.write_text("0::/lxc/100/ns/system.slice/sglang.service\n")
    assert plan(root, moved)["problems"] == []  # it goes with the container
    cgroup.write_text("0::/lxc/1001/ns\n")
    assert plan(root, moved)["problems"] != []
    cgroup.write_text("0::/system.slice/nvidia-persistenced.service\n")
    assert plan(root, moved, services=["nvidia-persistenced.service"])["problems"] == []


def test_what_stands_against_a_configuration_is_said_before_anybody_stops(root: Path) -> None:
    file = root / LXC
    file.write_text(f"lxc.cgroup2.devices.allow: c 195:* rwm\n{file.read_text()}")
    file = root / QEMU
    file.write_text("lock: backup\n" + file.read_text().replace("q35", "pc"))
    problems = " ".join(plan(root, layout(CT[:3], [CT[3], *VM]))["problems"])
    for words in ("c 195:* rwm", "machine type q35", "qemu guest 200 is locked"):
        assert words in problems
    assert (
        plan(root, layout(CT, VM))["problems"] == []
    )  # nobody is touched, so nothing is in the way


def test_a_guest_of_unknown_state_is_not_stopped_on_suspicion(root: Path) -> None:
    (root / "sys/fs/cgroup/cgroup.controllers").unlink()
    problems = plan(root, layout(CT[:3], [CT[3], *VM]))["problems"]
    assert "whether lxc guest 100 runs could not be found out" in problems


def test_a_wrong_layout_is_a_problem(root: Path) -> None:
    problems = plan(root, layout(["0000:99:00.0"], VM))["problems"]
    assert "0000:99:00.0, and this host has no such device" in problems[0]


def test_guests_that_an_unfinished_run_stopped_are_started(root: Path) -> None:
    run(root, "lxc", False)
    file = root / "var/lib/gpuhost/assign.json"
    file.parent.mkdir(parents=True)
    file.write_text('{"version": 1, "stopped": [100, 200]}')
    found = plan(root, layout(CT, VM))
    assert found["steps"] == ["start lxc 100 (inference)"]
    assert found["needed"]
    file.write_text("{}")
    with pytest.raises(UnreadableError, match=r"assign\.json is not what a run"):
        plan(root, layout(CT, VM))


def test_a_half_done_move_is_gone_on_with(root: Path) -> None:
    file = root / LXC
    file.write_text(file.read_text().replace("dev3: /dev/nvidia3,gid=44\n", ""))
    found = plan(root, layout(CT, VM))
    assert of(found, 100)["has"] == (*CT[:3],)
    assert "give 0000:44:00.0 to lxc 100 (inference)" in found["steps"]


def test_a_guest_whose_gpus_are_not_right_must_not_be_started(root: Path) -> None:
    run(root, "lxc", False)
    run(root, "qemu", False)
    file = root / LXC
    file.write_text(f"dev9: /dev/nvidia7\n{file.read_text()}")  # a card that went to a machine
    with (root / QEMU).open("r+") as config:
        text = config.read()
        config.seek(0)
        config.write(f"hostpci5: 0000:44:00.0\n{text}")  # still on nvidia
    found = plan(root, layout(CT, VM))
    assert [guest["fit"] for guest in found["guests"]] == [False, False]
    assert found["state"][0].endswith("and it must not be started so")


def test_a_kept_layout_is_seen(root: Path) -> None:
    assert not plan(root, layout(CT, VM))["kept"]
    (root / "etc/gpuhost").mkdir()
    (root / "etc/gpuhost/layout.json").write_text("{}")
    assert plan(root, layout(CT, VM))["kept"]


def remember(root: Path, text: str) -> None:
    file = root / "var/lib/gpuhost/assign.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@pytest.mark.parametrize(
    "text",
    ["[Infinity]", '{"stopped": "100"}', '{"stopped": [1e999]}', '{"stopped": [true]}', "7", "{"],
)
def test_a_note_of_another_form_is_refused_by_name(root: Path, text: str) -> None:
    remember(root, text)
    with pytest.raises(UnreadableError, match=r"gpuhost/assign\.json is not what.*remove the file"):
        plan(root, layout(CT, VM))


def test_a_guest_that_an_unfinished_run_stopped_is_not_left_down_unsaid(root: Path) -> None:
    run(root, "qemu", False)
    (root / QEMU).write_text("machine: q35\nname: confidential\n")
    remember(root, '{"version": 1, "stopped": [200, 999]}')
    found = plan(root, layout(CT, []))
    assert [text.partition(",")[0] for text in found["problems"]] == [
        "an unfinished run stopped qemu 200 (confidential)"
    ]
    assert "qm start 200" in found["problems"][0]
    assert plan(root, layout(CT, []), release=[200])["steps"] == [
        "start qemu 200 (confidential)",
    ]


def test_a_note_is_forgotten_once_all_its_guests_run_or_are_gone(root: Path) -> None:
    assert not plan(root, layout(CT, VM))["forget"]
    remember(root, '{"version": 1, "stopped": [100, 999]}')
    assert plan(root, layout(CT, VM))["forget"]
    run(root, "lxc", False)
    assert not plan(root, layout(CT, VM))["forget"]


@pytest.mark.parametrize("order", ["²", "9" * 5000, "1x"])
def test_an_order_that_proxmox_does_not_read_is_none(root: Path, order: str) -> None:
    (root / LXC).write_text(f"{(root / LXC).read_text()}startup: order={order}\n")
    assert plan(root, layout(CT, VM))["problems"] == []


def test_a_type_that_renumbers_the_nodes_is_seen_by_the_second_look(root: Path) -> None:
    """The driver hands out the lowest free minor at each probe, so containers swap their GPUs."""
    kernel = FakeKernel(root)
    reader = Reader(str(root))
    machine = Machine(reader, kernel, 30, drain=1, run=kernel.run, log=kernel.log)
    run(root, "qemu", False)
    (root / QEMU).write_text("machine: q35\n")
    control = "dev1: /dev/nvidiactl\ndev2: /dev/nvidia-uvm\ndev3: /dev/nvidia-uvm-tools\n"
    # 0000:41:00.0 went to a machine, so minor 0 is free
    (root / LXC).write_text(f"dev0: /dev/nvidia1\n{control}")
    run(root, "lxc", False)
    change(machine, [Wish((CT[0],), "vfio-pci")], store=Store(reader))
    (root / "etc/pve/lxc/101.conf").write_text(f"dev0: /dev/nvidia2\n{control}")
    (root / "sys/fs/cgroup/lxc/101").mkdir(parents=True)
    (root / "sys/fs/cgroup/lxc/101/cgroup.events").write_text("populated 0\n")
    (root / "etc/pve/lxc/102.conf").write_text("dev0: /dev/nvidia0\n")  # somebody else's, stale
    (root / "sys/fs/cgroup/lxc/102").mkdir(parents=True)
    (root / "sys/fs/cgroup/lxc/102/cgroup.events").write_text("populated 0\n")
    entries = [
        {
            "name": f"ct{vmid}",
            "addresses": [address],
            "driver": "nvidia",
            "iommu_type": "DMA",
            "guest": {"kind": "lxc", "vmid": vmid},
        }
        for vmid, address in ((100, CT[1]), (101, CT[2]))
    ]
    before = plan(root, entries)
    assert before["problems"] == []
    assert not any(guest["loses"] or guest["gains"] for guest in before["guests"])
    moved = change(
        machine,
        [Wish(tuple(one["addresses"]), one["driver"], one["iommu_type"]) for one in entries],
        store=Store(reader),
    )
    assert moved["changed"]
    after = plan(root, entries)
    assert [guest["changes"] for guest in after["guests"]] == [True, True]
    assert [list(guest["has"]) for guest in after["guests"]] == [[CT[2]], []]
    assert [text.partition(",")[0] for text in after["problems"]] == [
        "0000:42:00.0 belongs to lxc guest 102"
    ]
