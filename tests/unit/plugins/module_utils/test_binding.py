"""Binding whole cards: plans, guards, failures and the way back, on a fake kernel."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuhost.inference.plugins.module_utils import _binding
from ansible_collections.gpuhost.inference.plugins.module_utils._binding import change
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import (
    GpuHostError,
    UnreadableError,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._gpu import read_gpus
from ansible_collections.gpuhost.inference.plugins.module_utils._kernel_write import Machine
from ansible_collections.gpuhost.inference.plugins.module_utils._moves import Wish
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader
from ansible_collections.gpuhost.inference.plugins.module_utils._transaction import Store
from ansible_collections.gpuhost.inference.plugins.module_utils._trial import Trial, save_trial
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


def test_a_sleeping_card_is_woken_before_it_moves(kernel: FakeKernel) -> None:
    device = kernel.device("0000:44:00.0")
    (device / "power_state").write_text("D3cold\n")
    assert bind(kernel, "44:00.0", "vfio-pci", check=True)["changed"]
    (device / "config").write_bytes(b"\xff" * 64)  # it does not wake
    assert "off the bus" in refusal(kernel, "44:00.0", "vfio-pci")
    (device / "config").write_bytes(b"\xde\x10\xb5\x2b" + bytes(60))
    assert bind(kernel, "44:00.0", "vfio-pci")["changed"]


def test_a_card_in_an_error_state_is_not_touched(kernel: FakeKernel) -> None:
    (kernel.device("0000:44:00.0") / "power_state").write_text("error\n")
    assert "its power state is error" in refusal(kernel, "44:00.0", "vfio-pci")


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


# ---- types, swaps and several wishes in one transaction ----------------------------------------


def group_type(kernel: FakeKernel, address: str) -> str:
    link = os.readlink(kernel.device(address) / "iommu_group")
    return (kernel.root / "sys/kernel/iommu_groups" / Path(link).name / "type").read_text().strip()


def test_a_type_is_set_while_the_driver_is_off(kernel: FakeKernel) -> None:
    result = bind(kernel, "44:00.0", "nvidia", type_="DMA")
    steps = [(path.rpartition("/")[2], value) for path, value in kernel.writes]
    assert steps == [
        ("driver_override", "nvidia"),
        ("control", "on"),
        ("unbind", "0000:44:00.0"),
        ("type", "DMA"),
        ("drivers_probe", "0000:44:00.0"),
        ("control", "auto"),
    ]
    assert (kernel.driver("0000:44:00.0"), group_type(kernel, "0000:44:00.0")) == ("nvidia", "DMA")
    assert result["diff"]["before"]["0000:44:00.0"]["type"] == "DMA-FQ"
    assert result["diff"]["after"]["0000:44:00.0"]["type"] == "DMA"
    kernel.writes.clear()
    assert bind(kernel, "44:00.0", "nvidia", type_="DMA")["changed"] is False


def test_flushing_lazily_is_set_below_the_driver(kernel: FakeKernel) -> None:
    bind(kernel, "44:00.0", "nvidia", type_="DMA")
    kernel.writes.clear()
    bind(kernel, "44:00.0", "nvidia", type_="DMA-FQ")
    assert [value for _path, value in kernel.writes] == ["DMA-FQ"]


def test_nvidia_is_loaded_after_the_type_is_set(kernel: FakeKernel) -> None:
    for address in ("41", "42", "43", "44"):
        kernel._unbind("nvidia", f"0000:{address}:00.0")
        (kernel.device(f"0000:{address}:00.0") / "driver_override").write_text("none\n")
    shutil.rmtree(kernel.root / "sys/bus/pci/drivers/nvidia")
    bind(kernel, "44:00.0", "nvidia", type_="DMA")
    steps = [path.rpartition("/")[2] for path, _value in kernel.writes]
    assert steps.index("type") < steps.index("modprobe") < steps.index("drivers_probe")
    assert kernel.driver("0000:44:00.0") == "nvidia"


def test_loading_nvidia_must_not_take_a_free_sibling(kernel: FakeKernel) -> None:
    for address in ("41", "42", "43", "44"):
        kernel._unbind("nvidia", f"0000:{address}:00.0")
    shutil.rmtree(kernel.root / "sys/bus/pci/drivers/nvidia")
    text = refusal(kernel, "44:00.0", "nvidia")
    assert "would take 0000:41:00.0, 0000:42:00.0, 0000:43:00.0 as well" in text


def test_two_gpus_swap_sides_at_once(kernel: FakeKernel) -> None:
    before = state(kernel)
    swap = [Wish(("0000:44:00.0",), "vfio-pci"), Wish(("0000:81:00.0",), "nvidia")]
    accept = ["guest-config"]
    planned = run(kernel, swap, accept=accept, check=True)
    assert kernel.writes == []
    result = run(kernel, swap, accept=accept)
    assert planned["writes"] == result["writes"]
    assert state(kernel) == {
        **before,
        "0000:44:00.0": ("vfio-pci", "vfio-pci"),
        "0000:81:00.0": ("nvidia", "nvidia"),
    }


def test_a_failed_swap_brings_both_back(kernel: FakeKernel) -> None:
    before = state(kernel)
    types = {at: group_type(kernel, at) for at in ("0000:44:00.0", "0000:81:00.0")}
    kernel.refuses_probe.add("vfio-pci")
    swap = [
        Wish(("0000:44:00.0",), "vfio-pci", "DMA"),
        Wish(("0000:81:00.0",), "nvidia", "DMA"),
    ]

    def allow(path: str, value: str, timeout: float) -> Any:
        if path.endswith("/vfio-pci/bind"):  # what fails there works again on the way back
            outcome = kernel(path, value, timeout)
            kernel.refuses_probe.clear()
            return outcome
        return kernel(path, value, timeout)

    reader = Reader(str(kernel.root))
    machine = Machine(reader, allow, 30, run=kernel.run, log=kernel.log)
    result = change(machine, swap, store=Store(reader), accept=["guest-config"])
    assert result["rolled_back"] is True
    assert state(kernel) == before
    assert {at: group_type(kernel, at) for at in types} == types
    assert Store(reader).record() is None


def test_a_whole_side_goes_together_or_not_at_all(kernel: FakeKernel) -> None:
    use(kernel, 4242, "/dev/nvidia2")
    text = refusal(kernel, "41:00.0 42:00.0 43:00.0 44:00.0", "vfio-pci")
    assert "0000:43:00.0: in use by process 4242" in text


def test_one_group_cannot_have_two_types(kernel: FakeKernel) -> None:
    members = kernel.root / "sys/kernel/iommu_groups/45/devices"
    (members / "0000:43:00.0").symlink_to("../../../../bus/pci/devices/0000:43:00.0")
    (kernel.device("0000:43:00.0") / "iommu_group").unlink()
    (kernel.device("0000:43:00.0") / "iommu_group").symlink_to("../../../../kernel/iommu_groups/45")
    with pytest.raises(GpuHostError, match="ask for one type"):
        run(
            kernel,
            [Wish(("0000:43:00.0",), type="DMA"), Wish(("0000:44:00.0",), type="identity")],
        )


@pytest.mark.parametrize(
    ("snp", "sme", "lifted"),
    [(True, False, []), (False, True, ["fsp-identity"]), (False, False, [])],
)
def test_identity_is_planned_only_where_nothing_speaks_against_it(
    kernel: FakeKernel, snp: bool, sme: bool, lifted: list[str]
) -> None:
    (kernel.root / "sys/module/kvm_amd/parameters/sev_snp").write_text("Y" if snp else "N")
    with (kernel.root / "proc/cmdline").open("a") as line:
        line.write(" mem_encrypt=on" if sme else "")
    result = bind(kernel, "44:00.0", "nvidia", type_="identity", accept=lifted, check=True)
    left = {guard["id"] for guard in result["guards"] if not guard["accepted"]}
    assert left == (
        {"snp-identity", "fsp-identity"} if snp else {"sme-identity"} if sme else {"fsp-identity"}
    )
    assert result["changed"] is False


# ---- guards ------------------------------------------------------------------------------------


def test_every_liftable_guard_says_so_and_others_cannot_be_lifted(kernel: FakeKernel) -> None:
    text = refusal(kernel, "44:00.0", "vfio-pci", accept=[])
    assert "configuration of lxc guest 100 names it (dev3: /dev/nvidia3" in text
    assert "(or accept guest-config)" in text
    result = bind(kernel, "44:00.0", "vfio-pci", accept=["guest-config"])
    assert result["guards"][0]["accepted"] is True
    assert any("accepted guest-config" in warning for warning in result["warnings"])
    with pytest.raises(GpuHostError, match="accept names in-use, which cannot be lifted"):
        bind(kernel, "44:00.0", "vfio-pci", accept=["in-use"])


def test_a_gpu_a_stopped_machine_is_configured_to_have(kernel: FakeKernel) -> None:
    text = refusal(kernel, "81:00.0", "nvidia", accept=[])
    assert "configuration of qemu guest 200 names it" in text
    assert "whoever uses it then" in text


def test_a_gpu_that_drives_a_display_is_named(
    kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    sign = "/sys/class/graphics/fb0 is on it"
    monkeypatch.setattr(
        _binding,
        "read_gpus",
        lambda host, wake=(): [replace(g, display=(sign,)) for g in read_gpus(host)],
    )
    text = refusal(kernel, "44:00.0", "vfio-pci")
    assert f"{sign}: give the host another display, or none (or accept display)" in text


def test_nvidia_drm_with_modeset_holds_every_gpu(kernel: FakeKernel) -> None:
    at = kernel.root / "sys/module/nvidia_drm/parameters"
    at.mkdir(parents=True)
    (at / "modeset").write_text("Y\n")
    assert "accept kernel-client" in refusal(kernel, "44:00.0", "vfio-pci")
    bind(kernel, "81:00.0", "none")  # not on nvidia: none of its business


def test_a_disk_in_the_group_is_named_with_what_it_does(
    host_tree: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = FakeKernel(host_tree("bmc-and-nvme"))
    duties = {"0000:22:00.0": ("disk nvme0n1 is mounted at /",)}
    monkeypatch.setattr(_binding, "read_duties", lambda host, at: duties.get(at, ()))
    text = refusal(kernel, "21:00.0", "vfio-pci")
    assert "driver nvme; disk nvme0n1 is mounted at /)" in text


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf"), 1e10])
def test_a_time_limit_must_be_one(kernel: FakeKernel, seconds: float) -> None:
    reader = Reader(str(kernel.root))
    machine = Machine(reader, kernel, seconds)
    with pytest.raises(GpuHostError, match="seconds above 0"):
        change(machine, [Wish(("44:00.0",), "none")], store=Store(reader))


# ---- those who let go when asked ---------------------------------------------------------------


def service(kernel: FakeKernel, pid: int, node: str, unit: str, command: str) -> Path:
    use(kernel, pid, node)
    at = kernel.root / f"proc/{pid}"
    (at / "cmdline").write_bytes(command.encode() + b"\0--verbose\0")
    (at / "cgroup").write_text(f"0::/system.slice/{unit}\n")
    return at


def test_the_persistence_daemon_lets_go_and_takes_the_gpu_again(kernel: FakeKernel) -> None:
    unit, program = "nvidia-persistenced.service", "/usr/bin/nvidia-persistenced"
    at = service(kernel, 950, "/dev/nvidia3", unit, program)

    def answer(command: str) -> str:
        if command.endswith("-pm 0"):
            shutil.rmtree(at)
        return ""

    kernel.answer = answer
    result = bind(kernel, "44:00.0", "nvidia", type_="DMA")
    assert result["changed"] is True
    assert kernel.commands == [
        "nvidia-smi -i 0000:44:00.0 -pm 0",
        "nvidia-smi -i 0000:44:00.0 -pm 1",
    ]
    assert result["quiesced"] == {"persistence": ("0000:44:00.0",), "services": ()}


def test_a_daemon_that_does_not_let_go_leaves_everything_as_it_was(kernel: FakeKernel) -> None:
    unit, program = "nvidia-persistenced.service", "/usr/bin/nvidia-persistenced"
    service(kernel, 950, "/dev/nvidia3", unit, program)
    before = state(kernel)
    result = bind(kernel, "44:00.0", "vfio-pci")
    assert "still held by process 950" in result["msg"]
    assert result["rolled_back"] is True
    assert state(kernel) == before
    assert kernel.commands[-1] == "nvidia-smi -i 0000:44:00.0 -pm 1"


def test_persistence_that_does_not_come_back_is_a_warning(kernel: FakeKernel) -> None:
    unit, program = "nvidia-persistenced.service", "/usr/bin/nvidia-persistenced"
    at = service(kernel, 950, "/dev/nvidia3", unit, program)

    def answer(command: str) -> str:
        if command.endswith("-pm 0"):
            shutil.rmtree(at)
            return ""
        raise GpuHostError(f"{command} failed (1): no")

    kernel.answer = answer
    result = bind(kernel, "44:00.0", "nvidia", type_="DMA")
    assert result["changed"] is True
    assert "run nvidia-smi -i 0000:44:00.0 -pm 1 by hand" in result["warnings"][-1]


def test_a_listed_unit_is_stopped_and_started_once(kernel: FakeKernel) -> None:
    unit = "nvidia-dcgm.service"
    paths = [service(kernel, 901 + n, f"/dev/nvidia{n + 2}", unit, "nv-hostengine") for n in (0, 1)]
    text = refusal(kernel, "43:00.0 44:00.0", "vfio-pci")
    assert "in use by process 901 (nv-hostengine" in text

    def answer(command: str) -> str:
        if command == f"systemctl stop {unit}":
            for at in paths:
                shutil.rmtree(at)
        return ""

    kernel.answer = answer
    kernel.refuses_probe.add("vfio-pci")  # also when the change fails
    result = bind(kernel, "43:00.0 44:00.0", "vfio-pci", services=[unit])
    assert result["rolled_back"] is True
    assert kernel.commands == [f"systemctl stop {unit}", f"systemctl start {unit}"]


def test_a_unit_of_a_container_is_nobody_to_stop(kernel: FakeKernel) -> None:
    use(kernel, 4242, "/dev/nvidia3")
    text = refusal(kernel, "44:00.0", "vfio-pci", services=["sglang.service"])
    assert "in use by process 4242" in text


# ---- verification ------------------------------------------------------------------------------


def test_a_fault_logged_meanwhile_is_a_failure(kernel: FakeKernel) -> None:
    before = state(kernel)
    kernel.logged = (
        "4,900,812000000,-;NVRM: GPU 0000:81:00.0: RmInitAdapter failed! (0x62:0xffff:2168)\n"
    )
    result = bind(kernel, "81:00.0", "nvidia")
    assert "the kernel logged a fault meanwhile: 0000:81:00.0: " in result["msg"]
    assert result["rolled_back"] is True
    assert state(kernel) == before


def test_a_fault_of_another_gpu_is_not_ours(kernel: FakeKernel) -> None:
    kernel.logged = (
        "4,900,812000000,-;NVRM: GPU 0000:42:00.0: RmInitAdapter failed! (0x62:0xffff:2168)\n"
    )
    assert "msg" not in bind(kernel, "81:00.0", "nvidia")


def test_a_bound_gpu_the_driver_knows_nothing_of_is_a_failure(kernel: FakeKernel) -> None:
    kernel._make_node = lambda address: None  # type: ignore[method-assign]
    result = bind(kernel, "81:00.0", "nvidia")
    assert "shows nothing of it below /proc/driver/nvidia/gpus" in result["msg"]


# ---- cut off -----------------------------------------------------------------------------------


class Cut(Exception):
    """The power goes, or somebody kills the process."""


def cut_after(kernel: FakeKernel, count: int) -> Callable[[str, str, float], Any]:
    def write(path: str, value: str, timeout: float) -> Any:
        if len(kernel.writes) >= count:
            raise Cut
        return kernel(path, value, timeout)

    return write


def all_cuts(kernel: FakeKernel) -> int:
    result = bind(kernel, "44:00.0", "vfio-pci", type_="DMA", check=True)
    return len(result["writes"])


@pytest.mark.parametrize("count", range(6))
def test_a_run_that_was_cut_off_is_undone_by_the_next(kernel: FakeKernel, count: int) -> None:
    assert all_cuts(kernel) == 6
    before, kind = state(kernel), group_type(kernel, "0000:44:00.0")
    reader = Reader(str(kernel.root))
    store, accept = Store(reader), ["guest-config"]
    wish = Wish(("0000:44:00.0",), "vfio-pci", "DMA")
    cut = Machine(reader, cut_after(kernel, count), 30, run=kernel.run, log=kernel.log)
    with pytest.raises(Cut):
        change(cut, [wish], store=store, accept=accept)
    assert store.record() is not None
    preview = run(kernel, [wish], accept=accept, check=True)
    assert "was cut off" in preview["warnings"][-1]
    assert preview["recovered"] is None
    result = run(kernel, [Wish(("0000:43:00.0",), "nvidia")], accept=accept)
    assert result["recovered"]["wish"] == "0000:44:00.0 to driver vfio-pci and type DMA"
    assert result["recovered"]["outcome"] == "undone: all is as it was before"
    assert (state(kernel), group_type(kernel, "0000:44:00.0")) == (
        {**before, "0000:43:00.0": ("nvidia", "nvidia")},
        kind,
    )
    control = kernel.device("0000:44:00.0") / "power/control"
    assert control.read_text().strip() == "auto"
    assert run(kernel, [wish], accept=accept)["recovered"] is None


def test_what_a_reboot_ended_is_told_and_not_touched(kernel: FakeKernel) -> None:
    reader = Reader(str(kernel.root))
    store, accept = Store(reader), ["guest-config"]
    wish = Wish(("0000:44:00.0",), "vfio-pci")
    with pytest.raises(Cut):
        change(Machine(reader, cut_after(kernel, 3), 30), [wish], store=store, accept=accept)
    kernel.boot("another")
    kernel.writes.clear()
    result = run(kernel, [Wish(("0000:44:00.0",), "none")], accept=accept, check=True)
    assert kernel.writes == []
    result = run(kernel, [Wish(("0000:41:00.0",), "nvidia")])
    assert result["recovered"]["outcome"].startswith("ended by a reboot")
    assert result["recovered"]["writes"] == []
    assert store.record() is None


def test_a_record_whose_undoing_hangs_bars_that_gpu_and_no_reboot(kernel: FakeKernel) -> None:
    reader = Reader(str(kernel.root))
    store = Store(reader)
    wish = Wish(("0000:44:00.0",), "vfio-pci")
    cut = Machine(reader, cut_after(kernel, 3), 30)
    with pytest.raises(Cut):
        change(cut, [wish], store=store, accept=["guest-config"])
    left = store.record()
    assert left is not None
    kernel.answers["/driver_override", "nvidia"] = "stuck"
    with pytest.raises(GpuHostError, match="undoing it hangs"):
        run(kernel, [Wish(("0000:41:00.0",), "nvidia")])
    assert store.record() is None
    store.begin(left)  # as a run leaves it that is cut off once more, after the mark
    kernel.writes.clear()
    result = run(kernel, [Wish(("0000:44:00.0",), "nvidia")])
    assert result["recovered"]["outcome"].startswith("left as it is: 0000:44:00.0 hangs")
    assert store.record() is None
    assert [guard["id"] for guard in result["guards"]] == ["stuck"]
    assert kernel.writes == []


def test_services_stopped_by_a_run_that_was_cut_off_come_back(kernel: FakeKernel) -> None:
    unit = "nvidia-dcgm.service"
    at = service(kernel, 901, "/dev/nvidia3", unit, "nv-hostengine")

    def answer(command: str) -> str:
        shutil.rmtree(at, ignore_errors=True)
        return ""

    kernel.answer = answer
    reader = Reader(str(kernel.root))
    cut = Machine(reader, cut_after(kernel, 2), 30, run=kernel.run, log=kernel.log)
    with pytest.raises(Cut):
        change(
            cut,
            [Wish(("0000:44:00.0",), "vfio-pci")],
            store=Store(reader),
            accept=["guest-config"],
            services=[unit],
        )
    run(kernel, [Wish(("0000:41:00.0",), "nvidia")])
    assert kernel.commands == [f"systemctl stop {unit}", f"systemctl start {unit}"]


def test_a_half_moved_gpu_somebody_took_meanwhile_is_left_alone(kernel: FakeKernel) -> None:
    reader = Reader(str(kernel.root))
    store, accept = Store(reader), ["guest-config"]
    wish = Wish(("0000:44:00.0",), "vfio-pci")
    with pytest.raises(Cut):
        change(
            Machine(reader, cut_after(kernel, 4), 30, run=kernel.run, log=kernel.log),
            [wish],
            store=store,
            accept=accept,
        )
    assert kernel.driver("0000:44:00.0") == "vfio-pci"
    at = kernel.root / "proc/4343"
    (at / "fd").mkdir(parents=True)
    (at / "fd/9").symlink_to("/dev/vfio/45")
    (at / "cmdline").write_bytes(b"kvm\0")
    (at / "cgroup").write_text("0::/qemu.slice/300.scope\n")
    node = kernel.root / "dev/vfio/45"
    node.parent.mkdir(parents=True, exist_ok=True)
    node.write_text("c 240:45")
    number = kernel.root / "sys/class/vfio/45"
    number.mkdir(parents=True, exist_ok=True)
    (number / "dev").write_text("240:45\n")
    kernel.writes.clear()
    with pytest.raises(GpuHostError, match=r"cut off and cannot be undone now.*process 4343"):
        run(kernel, [wish], accept=accept)
    assert kernel.writes == []
    assert store.record() is not None


def test_a_hung_unbind_is_marked_and_later_runs_stop_at_once(kernel: FakeKernel) -> None:
    kernel.answers["/nvidia/unbind", "0000:44:00.0"] = "stuck"
    result = bind(kernel, "44:00.0", "vfio-pci")
    assert "reboot is needed" in result["msg"]
    assert Store(Reader(str(kernel.root))).record() is None  # told, marked and left
    kernel.writes.clear()
    again = bind(kernel, "44:00.0", "nvidia")
    assert [guard["id"] for guard in again["guards"]] == ["stuck"]
    assert kernel.writes == []
    assert bind(kernel, "43:00.0", "vfio-pci")["changed"]  # the others still work
    kernel.boot("another")
    kernel.answers.clear()
    assert bind(kernel, "44:00.0", "vfio-pci")["changed"]


def test_a_gpu_in_a_trial_is_left_until_that_ends(kernel: FakeKernel) -> None:
    host = Reader(str(kernel.root))
    trial = Trial(
        state="running",
        type="identity",
        gpus={"0000:44:00.0": "10de:2bb5"},
        accept=(),
        armed="",
        armed_boot="before",
        since=0,
        expires=1,
        confirm=600,
        boot=Store(host).boot(),
    )
    save_trial(host, trial)
    result = bind(kernel, "44:00.0", "vfio-pci")
    assert "trial-running" in {guard["id"] for guard in result["guards"]}
    assert kernel.writes == []
    assert bind(kernel, "43:00.0", "vfio-pci")["changed"]
    save_trial(host, replace(trial, state="confirmed"))
    assert bind(kernel, "44:00.0", "vfio-pci")["changed"]


# ---- what an attack found ------------------------------------------------------------------------


def record_of(kernel: FakeKernel, count: int, wish: Wish) -> Store:
    """Leave the record of a run that was killed before its write number `count`."""
    reader = Reader(str(kernel.root))
    store = Store(reader)
    cut = Machine(reader, cut_after(kernel, count), 30, drain=1, run=kernel.run, log=kernel.log)
    with pytest.raises(Cut):
        change(cut, [wish], store=store, accept=["guest-config"])
    return store


def test_undoing_has_the_persistence_daemon_let_go_first(kernel: FakeKernel) -> None:
    store = record_of(kernel, 5, Wish(("0000:44:00.0",), "nvidia", "DMA"))
    kernel(PROBE, "0000:44:00.0", 1)
    unit, program = "nvidia-persistenced.service", "/usr/bin/nvidia-persistenced"
    at = service(kernel, 950, "/dev/nvidia3", unit, program)

    def answer(command: str) -> str:
        if command.endswith("-pm 0"):
            assert kernel.driver("0000:44:00.0") == "nvidia"
            shutil.rmtree(at)
        return ""

    kernel.answer = answer
    run(kernel, [Wish(("0000:41:00.0",), "nvidia")])
    assert kernel.commands[0] == "nvidia-smi -i 0000:44:00.0 -pm 0"
    assert store.record() is None


def test_nobody_is_brought_back_before_the_record_is_gone(kernel: FakeKernel) -> None:
    unit = "nvidia-dcgm.service"
    at = service(kernel, 901, "/dev/nvidia3", unit, "nv-hostengine")
    store = Store(Reader(str(kernel.root)))
    seen = {}

    def answer(command: str) -> str:
        shutil.rmtree(at, ignore_errors=True)
        seen[command] = store.record() is None
        return ""

    kernel.answer = answer
    bind(kernel, "44:00.0", "vfio-pci", services=[unit])
    assert seen == {f"systemctl stop {unit}": False, f"systemctl start {unit}": True}


def test_a_gpu_somebody_took_meanwhile_is_not_undone(kernel: FakeKernel) -> None:
    real = kernel._bind

    def taken(name: str, address: str) -> int:
        code = real(name, address)
        use(kernel, 999, "/dev/nvidia4")
        kernel.logged = (
            "4,900,812000000,-;NVRM: GPU 0000:81:00.0: RmInitAdapter failed! (0x62:0xffff:2168)\n"
        )
        return code

    kernel._bind = taken  # type: ignore[method-assign]
    result = bind(kernel, "81:00.0", "nvidia")
    assert "it was not undone (0000:81:00.0: in use by process 999" in result["msg"]
    assert result["rolled_back"] is False
    assert ("/sys/bus/pci/drivers/nvidia/unbind", "0000:81:00.0") not in kernel.writes
    assert Store(Reader(str(kernel.root))).record() is not None


def remove(kernel: FakeKernel, address: str) -> None:
    shutil.rmtree(kernel.device(address).resolve())
    kernel.device(address).unlink()
    (kernel.root / f"sys/kernel/iommu_groups/45/devices/{address}").unlink()


def test_a_gpu_that_vanishes_is_told(kernel: FakeKernel) -> None:
    real = kernel._unbind

    def vanish(name: str, address: str) -> int:
        code = real(name, address)
        remove(kernel, address)
        return code

    kernel._unbind = vanish  # type: ignore[method-assign]
    result = bind(kernel, "44:00.0", "vfio-pci")
    assert "0000:44:00.0 gone" in result["msg"]
    assert result["rolled_back"] is False


def test_undoing_tells_of_a_gpu_that_is_gone(kernel: FakeKernel) -> None:
    record_of(kernel, 3, Wish(("0000:44:00.0",), "vfio-pci", "DMA"))
    remove(kernel, "0000:44:00.0")
    result = run(kernel, [Wish(("0000:41:00.0",), "nvidia")])
    assert (
        "except for 0000:44:00.0, which this host does not have" in (result["recovered"]["outcome"])
    )


def test_services_come_back_when_the_host_cannot_be_read_any_more(kernel: FakeKernel) -> None:
    unit = "nvidia-dcgm.service"
    at = service(kernel, 901, "/dev/nvidia3", unit, "nv-hostengine")

    class Failing(Reader):
        broken = False

        def names(self, path: str) -> list[str]:
            if self.broken and path == "/sys/bus/pci/devices":
                raise UnreadableError(f"{path} could not be listed: Input/output error")
            return super().names(path)

    reader = Failing(str(kernel.root))

    def answer(command: str) -> str:
        shutil.rmtree(at, ignore_errors=True)
        reader.broken = True
        return ""

    kernel.answer = answer
    result = bind(kernel, "44:00.0", "vfio-pci", services=[unit], host=reader)
    assert kernel.commands == [f"systemctl stop {unit}", f"systemctl start {unit}"]
    assert "could not be listed" in result["msg"]
    assert result["rolled_back"] is False


def test_a_module_that_hangs_while_it_is_loaded_bars_those_that_wait_for_it(
    kernel: FakeKernel,
) -> None:
    shutil.rmtree(kernel.root / "sys/bus/pci/drivers/vfio-pci")
    kernel.answers["/modprobe", "vfio-pci"] = "stuck"
    assert "has not returned" in bind(kernel, "44:00.0", "vfio-pci")["msg"]
    kernel.writes.clear()
    assert "stuck" in [g["id"] for g in bind(kernel, "44:00.0", "vfio-pci")["guards"]]
    assert kernel.writes == []


def test_the_type_of_others_is_not_changed_along(kernel: FakeKernel) -> None:
    members = kernel.root / "sys/kernel/iommu_groups/45/devices"
    (members / "0000:83:00.0").symlink_to("../../../../bus/pci/devices/0000:83:00.0")
    text = refusal(kernel, "44:00.0", "nvidia", type_="DMA")
    assert "the type would change for 0000:83:00.0 as well (class 0x030200" in text
    assert "accept foreign-type" in text


def test_a_gpu_with_another_node_than_before_is_warned_of(kernel: FakeKernel) -> None:
    bind(kernel, "41:00.0", "vfio-pci")
    result = bind(kernel, "44:00.0", "nvidia", type_="DMA")
    assert "0000:44:00.0 is /dev/nvidia0 now and was /dev/nvidia3" in result["warnings"][-1]


@pytest.mark.parametrize("expected", ["", "2bb5", "10de:2bb5 ", "x"])
def test_an_expected_card_must_be_an_id(kernel: FakeKernel, expected: str) -> None:
    with pytest.raises(GpuHostError, match="write vendor:device"):
        bind(kernel, "44:00.0", "vfio-pci", expect_id=expected)


def test_an_empty_type_is_no_type(kernel: FakeKernel) -> None:
    with pytest.raises(GpuHostError, match="there is no type"):
        bind(kernel, "44:00.0", "nvidia", type_="")
    assert kernel.writes == []
