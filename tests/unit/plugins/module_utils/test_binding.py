"""Binding whole cards: plans, guards, failures and the way back, on a fake kernel."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuhost.inference.plugins.module_utils._binding import change
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import (
    GpuHostError,
    UnreadableError,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._kernel_write import Machine
from ansible_collections.gpuhost.inference.plugins.module_utils._moves import Wish
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader
from ansible_collections.gpuhost.inference.plugins.module_utils._transaction import Store
from fake_kernel import FakeKernel

DEVICES = "/sys/bus/pci/devices"
DRIVERS = "/sys/bus/pci/drivers"
PROBE = "/sys/bus/pci/drivers_probe"


@pytest.fixture
def kernel(host_tree: Callable[[str], Path]) -> FakeKernel:
    return FakeKernel(host_tree("eight-gpus"))


@pytest.fixture
def card(host_tree: Callable[[str], Path]) -> FakeKernel:
    return FakeKernel(host_tree("four-functions"))


def bind(
    kernel: FakeKernel,
    address: str,
    driver: str,
    *,
    type_: str | None = None,
    expect_id: str | None = None,
    host: Reader | None = None,
    **options: Any,
) -> dict[str, Any]:
    options.setdefault("accept", ["guest-config"])  # container 100 is stopped and names 41 to 44
    wish = Wish(tuple(address.split()), driver, type_, expect_id)
    return run(kernel, [wish], host=host, **options)


def run(
    kernel: FakeKernel, wishes: list[Wish], *, host: Reader | None = None, **options: Any
) -> dict[str, Any]:
    reader = host or Reader(str(kernel.root))
    machine = Machine(reader, kernel, 30, drain=1, run=kernel.run, log=kernel.log)
    return change(machine, wishes, store=Store(reader), **options)


def refusal(kernel: FakeKernel, address: str, driver: str, **options: Any) -> str:
    """Return why a binding is refused, having made sure that nothing was written."""
    before = state(kernel)
    result = bind(kernel, address, driver, **options)
    assert kernel.writes == []
    assert state(kernel) == before
    assert (result["changed"], result["writes"]) == (False, [])
    assert result["diff"]["before"] == result["diff"]["after"]
    return str(result["msg"])


def use(kernel: FakeKernel, pid: int, node: str) -> None:
    at = kernel.root / f"proc/{pid}"
    (at / "fd").mkdir(parents=True)
    (at / "fd/3").symlink_to(node)
    (at / "cmdline").write_bytes(b"python3\0-m\0sglang.launch_server\0")
    (at / "cgroup").write_text("0::/lxc/100/ns/system.slice/sglang.service\n")


def state(kernel: FakeKernel) -> dict[str, tuple[str | None, str]]:
    devices = sorted(os.listdir(kernel.root / "sys/bus/pci/devices"))
    return {one: (kernel.driver(one), kernel.override(one)) for one in devices}


def test_a_gpu_goes_to_vfio_and_its_siblings_stay(kernel: FakeKernel) -> None:
    before = state(kernel)
    result = bind(kernel, "44:00.0", "vfio-pci")
    assert kernel.writes == [
        (f"{DEVICES}/0000:44:00.0/driver_override", "vfio-pci"),
        (f"{DEVICES}/0000:44:00.0/power/control", "on"),
        (f"{DRIVERS}/nvidia/unbind", "0000:44:00.0"),
        (PROBE, "0000:44:00.0"),
        (f"{DEVICES}/0000:44:00.0/power/control", "auto"),
    ]
    assert [(step["path"], step["value"]) for step in result["writes"]] == kernel.writes
    assert result["changed"]
    assert not result["rolled_back"]
    assert (result["gpus"][0]["driver"], result["gpus"][0]["device_minor"]) == ("vfio-pci", None)
    assert state(kernel) == {**before, "0000:44:00.0": ("vfio-pci", "vfio-pci")}
    assert result["diff"] == {
        "before": {"0000:44:00.0": {"driver": "nvidia", "override": None}},
        "after": {"0000:44:00.0": {"driver": "vfio-pci", "override": "vfio-pci"}},
    }


@pytest.mark.parametrize("driver", ["vfio-pci", "nvidia", "none"])
def test_a_second_run_changes_nothing(kernel: FakeKernel, driver: str) -> None:
    bind(kernel, "44:00.0 82:00.0", driver)
    kernel.writes.clear()
    assert bind(kernel, "44:00.0 82:00.0", driver)["changed"] is False
    assert kernel.writes == []


@pytest.mark.parametrize("driver", ["vfio-pci", "nvidia", "none"])
def test_check_mode_tells_the_same_writes_and_makes_none(card: FakeKernel, driver: str) -> None:
    bind(card, "01:00.0", "none" if driver != "none" else "nvidia")
    card.writes.clear()
    before = state(card)
    planned = bind(card, "01:00.0", driver, check=True)
    assert card.writes == []
    assert state(card) == before
    done = bind(card, "01:00.0", driver)
    assert planned["changed"] is True
    assert planned["writes"] == done["writes"]
    assert planned["diff"]["before"] == done["diff"]["before"]


def test_a_bound_gpu_in_use_is_only_protected(kernel: FakeKernel) -> None:
    use(kernel, 4242, "/dev/nvidia0")
    bind(kernel, "41:00.0", "nvidia")
    assert kernel.writes == [(f"{DEVICES}/0000:41:00.0/driver_override", "nvidia")]


def test_a_gpu_comes_back_to_nvidia_with_a_node(kernel: FakeKernel) -> None:
    result = bind(kernel, "81:00.0", "nvidia")
    assert (result["gpus"][0]["driver"], result["gpus"][0]["device_minor"]) == ("nvidia", 4)


def test_none_keeps_every_driver_away(kernel: FakeKernel) -> None:
    bind(kernel, "44:00.0", "none")
    kernel(PROBE, "0000:44:00.0", 1)
    assert kernel.driver("0000:44:00.0") is None


def test_a_missing_driver_is_loaded_after_the_overrides(kernel: FakeKernel) -> None:
    shutil.rmtree(kernel.root / "sys/bus/pci/drivers/vfio-pci")
    for address in ("81", "82", "83", "84"):
        (kernel.root / f"sys/bus/pci/devices/0000:{address}:00.0/driver").unlink()
    bind(kernel, "44:00.0", "vfio-pci")
    assert kernel.writes[:2] == [
        (f"{DEVICES}/0000:44:00.0/driver_override", "vfio-pci"),
        ("/sbin/modprobe", "vfio-pci"),
    ]
    assert kernel.driver("0000:44:00.0") == "vfio-pci"


def test_all_functions_of_a_card_go_to_vfio_companions_first(card: FakeKernel) -> None:
    bind(card, "01:00.0", "vfio-pci")
    unbound = [value for path, value in card.writes if path.endswith("/unbind")]
    assert unbound == ["0000:01:00.2", "0000:01:00.1", "0000:01:00.0"]
    for function in range(4):
        assert card.driver(f"0000:01:00.{function}") == "vfio-pci"
    assert card.driver("0000:00:01.1") == "pcieport"


def test_a_card_is_awake_while_it_moves_and_power_management_comes_back(card: FakeKernel) -> None:
    controls = [f"{DEVICES}/0000:{one}/power/control" for one in ("00:01.1", "01:00.0")]
    bind(card, "01:00.0", "vfio-pci")
    for control in controls:
        values = [value for path, value in card.writes if path == control]
        assert values == ["on", "auto"]
    card.writes.clear()
    bind(card, "01:00.0", "nvidia")  # vfio-pci's `auto` was its own, and goes with it
    port, own = ([value for path, value in card.writes if path == one] for one in controls)
    assert (port, own) == (["on", "auto"], ["on"])


def test_companions_get_their_own_drivers_back(card: FakeKernel) -> None:
    before = state(card)
    bind(card, "01:00.0", "vfio-pci")
    bind(card, "01:00.0", "nvidia")
    assert state(card) == {**before, "0000:01:00.0": ("nvidia", "nvidia")}


def test_a_companion_with_somebody_elses_override_is_left_alone(card: FakeKernel) -> None:
    (card.device("0000:01:00.1") / "driver_override").write_text("snd_hda_intel\n")
    bind(card, "01:00.0", "nvidia")
    assert card.override("0000:01:00.1") == "snd_hda_intel"


# ---- refusals ----------------------------------------------------------------------------------


def test_a_gpu_held_open_is_refused_with_pid_command_and_cgroup(kernel: FakeKernel) -> None:
    use(kernel, 4242, "/dev/nvidia3")
    text = refusal(kernel, "44:00.0", "vfio-pci")
    assert "0000:44:00.0: in use by process 4242 (python3 -m sglang.launch_server; " in text
    assert "cgroup /lxc/100/ns/system.slice/sglang.service) through /dev/nvidia3" in text


def test_a_gpu_of_a_running_machine_is_refused(kernel: FakeKernel) -> None:
    text = refusal(kernel, "83:00.0", "nvidia")
    assert "belongs to qemu guest 201, which runs" in text
    assert "process 2010" in text
    assert text.count("qemu guest 201") == 1


def test_a_gpu_of_a_running_container_is_refused(kernel: FakeKernel) -> None:
    (kernel.root / "sys/fs/cgroup/lxc/100/cgroup.events").write_text("populated 1\n")
    assert "belongs to lxc guest 100, which runs" in refusal(kernel, "41:00.0", "none")


def test_a_guest_that_may_run_counts_as_running(kernel: FakeKernel) -> None:
    (kernel.root / "sys/fs/cgroup/cgroup.controllers").unlink()
    assert "lxc guest 100, and whether that runs is not known" in refusal(kernel, "41:00.0", "none")


def test_what_cannot_be_looked_at_counts_as_in_use(kernel: FakeKernel) -> None:
    class Blind(Reader):
        def names(self, path: str) -> list[str]:
            if path == "/proc/900/fd":
                raise UnreadableError(f"{path} could not be listed: Permission denied")
            return super().names(path)

    text = refusal(kernel, "44:00.0", "vfio-pci", host=Blind(str(kernel.root)))
    assert "may be in use: /proc/900/fd could not be listed" in text


def test_a_disk_in_the_group_is_named(host_tree: Callable[[str], Path]) -> None:
    kernel = FakeKernel(host_tree("bmc-and-nvme"))
    text = refusal(kernel, "21:00.0", "vfio-pci")
    assert "group 18 also holds 0000:22:00.0 (class 0x010802, driver nvme)" in text
    bind(kernel, "c1:00.0", "vfio-pci")


def test_another_gpu_of_the_group_must_be_listed_too(kernel: FakeKernel) -> None:
    members = kernel.root / "sys/kernel/iommu_groups/45/devices"
    (members / "0000:43:00.0").symlink_to("../../../../bus/pci/devices/0000:43:00.0")
    assert "0000:43:00.0 (class 0x030200, driver nvidia): a GPU, so list it too" in refusal(
        kernel, "44:00.0", "vfio-pci"
    )
    assert bind(kernel, "44:00.0 43:00.0", "vfio-pci")["changed"]


def test_virtual_functions_would_vanish(kernel: FakeKernel) -> None:
    (kernel.device("0000:44:00.0") / "sriov_numvfs").write_text("4\n")
    assert "4 virtual functions" in refusal(kernel, "44:00.0", "vfio-pci")


def test_a_card_off_the_bus_is_not_touched(kernel: FakeKernel) -> None:
    (kernel.device("0000:44:00.0") / "config").write_bytes(b"\xff" * 64)
    assert "off the bus" in refusal(kernel, "44:00.0", "vfio-pci")


def test_another_card_at_the_address_is_refused(kernel: FakeKernel) -> None:
    text = refusal(kernel, "44:00.0", "vfio-pci", expect_id="10DE:2684")
    assert "0000:44:00.0: it is 10de:2bb5, not 10DE:2684" in text
    assert bind(kernel, "44:00.0", "vfio-pci", expect_id="10DE:2BB5")["changed"]


def test_all_reasons_come_in_one_message(kernel: FakeKernel) -> None:
    use(kernel, 4242, "/dev/nvidia3")
    (kernel.device("0000:44:00.0") / "sriov_numvfs").write_text("4\n")
    text = refusal(kernel, "44:00.0 84:00.0", "none")
    for words in ("process 4242", "virtual functions", "qemu guest 201"):
        assert words in text


@pytest.mark.parametrize("address", ["44:00.0 0000:44:00.0", "0000:45:00.0", "x"])
def test_a_wrong_address_is_refused_before_any_write(kernel: FakeKernel, address: str) -> None:
    with pytest.raises(GpuHostError):
        bind(kernel, address, "vfio-pci")
    assert kernel.writes == []


# ---- failures ----------------------------------------------------------------------------------


def test_an_unbind_that_never_returns_ends_it_without_undo(kernel: FakeKernel) -> None:
    kernel.answers["/nvidia/unbind", "0000:43:00.0"] = "stuck"
    result = bind(kernel, "43:00.0 44:00.0", "vfio-pci")
    assert (
        "writing 0000:43:00.0 to /sys/bus/pci/drivers/nvidia/unbind has not returned"
        in (result["msg"])
    )
    assert "reboot is needed" in result["msg"]
    assert not result["rolled_back"]
    assert kernel.writes[-1] == (f"{DRIVERS}/nvidia/unbind", "0000:43:00.0")
    assert kernel.override("0000:43:00.0") == "vfio-pci"  # left, so that nothing else takes it


def test_a_probe_that_fails_is_undone(card: FakeKernel) -> None:
    before = state(card)
    card.refuses_probe.add("vfio-pci")
    result = bind(card, "01:00.0", "vfio-pci")
    assert (f"{DRIVERS}/vfio-pci/bind", "0000:01:00.0") in card.writes  # for the kernel's reason
    assert "EPERM: the driver refused the card in its probe" in result["msg"]
    assert result["msg"].endswith("all is as it was before")
    assert (result["rolled_back"], result["changed"]) == (True, False)
    assert state(card) == before
    assert [(step["path"], step["value"]) for step in result["writes"]] == card.writes


def test_a_bind_that_says_ok_and_binds_nothing_is_no_success(kernel: FakeKernel) -> None:
    kernel.refuses_probe.add("vfio-pci")
    kernel.answers["/vfio-pci/bind", "0000:44:00.0"] = 0
    result = bind(kernel, "44:00.0", "vfio-pci")
    assert "succeeded, but the driver is not bound" in result["msg"]
    assert result["rolled_back"]


def test_what_could_not_be_put_back_is_told(kernel: FakeKernel) -> None:
    kernel.refuses_probe |= {"vfio-pci", "nvidia"}
    result = bind(kernel, "44:00.0", "vfio-pci")
    assert not result["rolled_back"]
    assert result["changed"]
    assert "not all could be put back; drivers shown now: 0000:44:00.0 none" in result["msg"]


@pytest.mark.parametrize(
    ("path", "answer", "words"),
    [
        ("/nvidia/unbind", errno.ENODEV, "ENODEV: it is not bound to that driver"),
        ("/nvidia/unbind", errno.EACCES, "EACCES: run this as root on the host"),
        ("/driver_override", errno.EINVAL, "Invalid argument"),
    ],
)
def test_a_refused_write_is_undone(kernel: FakeKernel, path: str, answer: int, words: str) -> None:
    before = state(kernel)
    value = "vfio-pci" if path == "/driver_override" else "0000:44:00.0"
    kernel.answers[path, value] = answer
    result = bind(kernel, "44:00.0", "vfio-pci")
    assert words in result["msg"]
    assert result["rolled_back"]
    assert state(kernel) == before
    assert (kernel.device("0000:44:00.0") / "power/control").read_text().strip() == "auto"


def test_a_module_that_cannot_be_loaded_is_undone(kernel: FakeKernel) -> None:
    shutil.rmtree(kernel.root / "sys/bus/pci/drivers/vfio-pci")
    before = state(kernel)
    kernel.answers["/modprobe", "vfio-pci"] = errno.ENOENT
    result = bind(kernel, "44:00.0", "vfio-pci")
    assert "module vfio-pci could not be loaded" in result["msg"]
    assert result["rolled_back"]
    assert state(kernel) == before


def test_an_undo_that_gets_stuck_stops(kernel: FakeKernel) -> None:
    kernel.refuses_probe.add("vfio-pci")
    kernel.answers["/driver_override", "nvidia"] = "stuck"
    result = bind(kernel, "44:00.0", "vfio-pci")
    assert not result["rolled_back"]
    assert kernel.writes[-1] == (f"{DEVICES}/0000:44:00.0/driver_override", "nvidia")


def test_a_sibling_that_is_taken_along_fails_the_change(kernel: FakeKernel) -> None:
    real = kernel._probe

    def grab(address: str) -> int:
        real(address)
        kernel._unbind("nvidia", "0000:43:00.0")
        return 0

    kernel._probe = grab  # type: ignore[method-assign]
    result = bind(kernel, "44:00.0", "vfio-pci")
    assert "0000:43:00.0 went from driver nvidia to none" in result["msg"]


def test_a_device_bound_again_behind_our_back_is_no_success(kernel: FakeKernel) -> None:
    kernel.answers["/nvidia/unbind", "0000:44:00.0"] = 0  # taken, and bound again at once
    result = bind(kernel, "44:00.0", "none")
    assert "something bound it again" in result["msg"]
