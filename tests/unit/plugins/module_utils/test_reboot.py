"""Whether a host may be rebooted: every reason against it, and the order of its guests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import trees
from ansible_collections.gpuhost.inference.plugins.module_utils._boot import (
    Boot,
    NextBoot,
    Pending,
    read_boot,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._layout import Entry, WantedGuest
from ansible_collections.gpuhost.inference.plugins.module_utils._owners import Guest
from ansible_collections.gpuhost.inference.plugins.module_utils._reboot import (
    Reboot,
    Running,
    Trouble,
    plan_reboot,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader

READY = NextBoot(True, (), "6.17.2-1-pve")


@pytest.fixture
def boot(tmp_path: Path) -> Boot:
    tree = "/proc/sys/kernel/osrelease = 6.17.2-1-pve\n"
    return replace(
        read_boot(Reader(str(trees.unpack(tree, tmp_path)))), pending=Pending(False, (), ())
    )


def guest(vmid: int, running: bool | None, kind: str = "lxc", **config: str) -> Guest:
    name = config.pop("name", None)
    return Guest(kind, vmid, name, f"/etc/pve/{vmid}.conf", tuple(config.items()), running)


def layout(*guests: Guest) -> list[Entry]:
    return [
        Entry(str(one.vmid), (), None, "nvidia", None, WantedGuest(one.kind, one.vmid, False))
        for one in guests
    ] + [Entry("spare", (), None, "none", None, None)]


def test_an_idle_host_that_is_as_wanted(boot: Boot) -> None:
    assert plan_reboot(boot, READY, [], [], []) == Reboot((), (), (), ())


def test_reasons(boot: Boot) -> None:
    boot = replace(boot, kernel="6.8.4", pending=Pending(True, ("a=1",), ("iommu=pt",)))
    assert plan_reboot(boot, READY, [], [], []).reasons == (
        "the running kernel was started without a=1",
        "the running kernel was started with iommu=pt",
        "kernel 6.8.4 runs, and 6.17.2-1-pve is installed",
    )
    assert plan_reboot(boot, NextBoot(False, ("x",), None), [], [], []).reasons[2:] == ()


def test_guests_of_others_stand_in_the_way(boot: Boot) -> None:
    ours, off = guest(100, True), guest(102, False)
    others = [guest(201, True, "qemu", name="train"), guest(202, None), guest(203, False)]
    plan = plan_reboot(boot, READY, [ours, off, *others], layout(ours, off), [])
    assert plan.problems == (
        "guest qemu 201 (train) runs and is not of the layout: its owner has to stop it",
        "whether guest lxc 202 runs could not be found out",
    )
    assert plan.guests == (Running("lxc", 100, None),)


def test_a_guest_of_another_kind_with_the_number_of_ours_is_not_ours(boot: Boot) -> None:
    plan = plan_reboot(boot, READY, [guest(100, True, "qemu")], layout(guest(100, True)), [])
    assert len(plan.problems) == 1


def test_unknown_counts_as_running(boot: Boot) -> None:
    ours = guest(100, None)
    assert len(plan_reboot(boot, READY, [ours], layout(ours), []).problems) == 1
    assert plan_reboot(boot, READY, None, layout(ours), []).problems == (
        "the guests of this host could not be read",
    )


def test_guests_come_in_the_order_of_proxmox(boot: Boot) -> None:
    guests = [
        guest(100, True),
        guest(101, True, startup="order=2,up=30"),
        guest(102, True, "qemu", startup="1"),
        guest(103, True, startup="up=30,order=2"),
        guest(104, True, startup="up=1"),
        guest(105, False, startup="order=1"),
    ]
    plan = plan_reboot(boot, READY, guests, layout(*guests), [])
    assert [one.vmid for one in plan.guests] == [102, 101, 103, 100, 104]


def test_what_the_next_kernel_lacks_and_what_was_cut_off(boot: Boot) -> None:
    troubles = [
        Trouble("unfinished-change", "0000:41:00.0", "begun at 10:00"),
        Trouble("trial-armed", "/var/lib/gpuhost/trial.json", "the next boot tries identity"),
        Trouble("initramfs-incomplete", "/boot/initrd.img-6.17.2-1-pve", "no rule"),
        Trouble("initramfs-incomplete", "/boot/initrd.img-6.8.4", "no rule"),
        Trouble("rival-driver", "nouveau", "not blacklisted"),
        Trouble("unbind-stuck", "0000:42:00.0", "remove never returned"),
    ]
    plan = plan_reboot(boot, replace(READY, problems=("no image",)), [], [], troubles)
    assert plan.problems == (
        "no image",
        "0000:41:00.0: begun at 10:00",
        "/var/lib/gpuhost/trial.json: the next boot tries identity",
        "/boot/initrd.img-6.17.2-1-pve: no rule",
    )
    # the hung unbind alone asks for a reboot, and makes it dangerous
    assert plan.reasons == ("nothing but a reboot frees 0000:42:00.0: its removal hangs",)
    assert len(plan.stall) == 1
    assert plan.stall[0].startswith("0000:42:00.0: remove never returned; a clean shutdown may")
