"""Resetting GPUs: what is offered and tried, what helps, and what is told when nothing does."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuhost.inference.plugins.module_utils import _reset
from ansible_collections.gpuhost.inference.plugins.module_utils._binding import read_situation
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from ansible_collections.gpuhost.inference.plugins.module_utils._fault_log import collect
from ansible_collections.gpuhost.inference.plugins.module_utils._faults import (
    conclude,
    read_subjects,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._gpu import read_gpus
from ansible_collections.gpuhost.inference.plugins.module_utils._guards import (
    judge as judge_change,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._kernel_write import Machine
from ansible_collections.gpuhost.inference.plugins.module_utils._moves import Wish, plan_change
from ansible_collections.gpuhost.inference.plugins.module_utils._starts import (
    note_start,
    read_starts,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader
from ansible_collections.gpuhost.inference.plugins.module_utils._transaction import Store
from fake_kernel import FakeKernel

DEVICES = "/sys/bus/pci/devices"
DRIVERS = "/sys/bus/pci/drivers"
PROBE = "/sys/bus/pci/drivers_probe"
GPU = "0000:44:00.0"
FSP = (
    "NVRM: GPU0 kfspProcessCommandResponse_GH100: FSP response reported error. Task ID: 0x1 "
    "Command type: 0x14 Error code: 0x177\n"
    "NVRM: GPU {}: RmInitAdapter failed! (0x62:0xffff:2168)"
)
WPR2 = (
    "NVRM: GPU0 _kgspBootGspRm: unexpected WPR2 already up, cannot proceed with booting GSP\n"
    "NVRM: GPU {}: RmInitAdapter failed! (0x62:0x40:1864)"
)


@pytest.fixture
def kernel(host_tree: Callable[[str], Path]) -> FakeKernel:
    return FakeKernel(host_tree("eight-gpus"))


@pytest.fixture
def card(host_tree: Callable[[str], Path]) -> FakeKernel:
    return FakeKernel(host_tree("four-functions"))


def reset(
    kernel: FakeKernel,
    address: str = GPU,
    methods: list[str] | None = None,
    *,
    check: bool = False,
    services: tuple[str, ...] = (),
) -> dict[str, Any]:
    host = Reader(str(kernel.root))
    machine = Machine(host, kernel, 30, drain=1, run=kernel.run, log=kernel.log, start=kernel.start)
    order = _reset.Order(methods, (), services, 60)
    return _reset.reset(machine, address.split(), order, store=Store(host), check=check)


def tried(result: dict[str, Any]) -> list[tuple[str, str, Any]]:
    return [(one["method"], one["outcome"], one["helped"]) for one in result["attempts"]]


def test_a_method_that_helps_is_the_last_one(kernel: FakeKernel) -> None:
    kernel.cures = {GPU: "flr"}
    kernel.complaint = WPR2
    result = reset(kernel)
    assert kernel.writes == [
        (f"{DEVICES}/{GPU}/driver_override", "nvidia"),
        (f"{DEVICES}/{GPU}/power/control", "on"),
        (f"{DRIVERS}/nvidia/unbind", GPU),
        (f"{DEVICES}/{GPU}/reset_method", "flr"),
        (f"{DEVICES}/{GPU}/reset", "1"),
        (f"{DEVICES}/{GPU}/reset_method", "flr bus"),
        (PROBE, GPU),
        (f"{DEVICES}/{GPU}/power/control", "auto"),
    ]
    assert tried(result) == [("flr", "done", True)]
    assert "msg" not in result
    assert result["changed"] is True
    assert result["diff"]["after"] == {GPU: {"driver": "nvidia", "override": "nvidia"}}


def test_a_start_is_written_down_for_who_reads_the_log_later(kernel: FakeKernel) -> None:
    host = Reader(str(kernel.root))
    kernel.boot("4f1c2b3a-0000-4000-8000-0123456789ab")
    kernel.cures = {GPU: "flr", "0000:41:00.0": "power-off"}
    kernel.complaint = WPR2
    reset(kernel, f"0000:41:00.0 {GPU}")
    file = kernel.root / "var/lib/gpuhost/started.json"
    [(address, seconds)] = read_starts(host).items()
    assert address == GPU
    assert f"4,1,{seconds:.0f}000000,-;" in (kernel.root / "dev/kmsg").read_text()
    assert file.parent.stat().st_mode & 0o777 == 0o700
    note_start(host, "0000:42:00.0")
    assert sorted(read_starts(host)) == ["0000:42:00.0", GPU]
    kernel.boot("5a1c2b3a-0000-4000-8000-0123456789ab")
    assert read_starts(host) == {}
    for text in ("[" * 200000, "{}", '{"version": 2}', "\0"):
        file.write_text(text)
        assert read_starts(host) == {}
    (kernel.root / "dev/kmsg").unlink()
    [attempt] = reset(kernel, "0000:42:00.0", ["flr"])["attempts"]
    assert attempt["helped"] is True
    assert "will count until the next boot" in attempt["reason"]


def test_what_did_not_help_is_told_with_the_log_and_what_is_next(kernel: FakeKernel) -> None:
    kernel.cures = {GPU: "power-off"}
    kernel.complaint = FSP
    result = reset(kernel, methods=["rebind", "flr", "bus"])
    assert tried(result) == [(one, "done", False) for one in ("rebind", "flr", "bus")]
    assert kernel.resets == [(GPU, "flr"), (GPU, "bus")]
    assert (kernel.device(GPU) / "reset_method").read_text() == "flr bus"
    assert "Error code: 0x177" in result["attempts"][0]["log"][0]
    assert result["ill"][0]["ladder"] == ["power-off", "hardware"]
    assert (
        "these steps did not help: rebind, flr, bus; power-off needed: power the" in result["msg"]
    )
    assert "0x177" in result["msg"]
    assert kernel.driver(GPU) == "nvidia"


def test_each_gpu_goes_its_own_way(kernel: FakeKernel) -> None:
    kernel.cures = {"0000:41:00.0": "bus", GPU: "flr"}
    result = reset(kernel, f"0000:41:00.0 {GPU}")
    assert [(one["address"][5:7], one["method"], one["helped"]) for one in result["attempts"]] == [
        ("41", "flr", False),
        ("41", "bus", True),
        ("44", "flr", True),
    ]
    assert "msg" not in result


def test_a_gpu_of_a_machine_is_reset_and_nothing_is_claimed(kernel: FakeKernel) -> None:
    result = reset(kernel, "82:00.0")
    assert tried(result) == [("flr", "done", None)]
    assert kernel.driver("0000:82:00.0") == "vfio-pci"
    assert "whether it works shows when driver vfio-pci uses it" in result["warnings"][0]


def test_a_gpu_that_does_not_answer_afterwards_is_not_helped(kernel: FakeKernel) -> None:
    def unplug(path: str, value: str, timeout: float) -> Any:
        if path == PROBE:
            (kernel.device("0000:82:00.0") / "config").write_bytes(b"\xff" * 4)
        return kernel(path, value, timeout)

    host = Reader(str(kernel.root))
    machine = Machine(host, unplug, 30, drain=1, run=kernel.run, log=kernel.log)
    order = _reset.Order(["flr"], (), (), 60)
    result = _reset.reset(machine, ["82:00.0"], order, store=Store(host))
    assert tried(result) == [("flr", "done", False)]
    assert "configuration space does not answer" in result["msg"]


def test_check_mode_tells_all_writes_and_makes_none(kernel: FakeKernel) -> None:
    result = reset(kernel, check=True)
    assert kernel.writes == []
    assert tried(result) == [("flr", "planned", None), ("bus", "planned", None)]
    assert [one["value"] for one in result["writes"] if one["path"].endswith("/reset_method")] == [
        "flr",
        "flr bus",
        "bus",
        "flr bus",
    ]
    assert result["changed"] is True


def test_a_method_that_is_not_offered_is_one_clear_error(kernel: FakeKernel) -> None:
    with pytest.raises(GpuHostError, match=f"{GPU} offers no pm, acpi: there is rebind, flr, bus"):
        reset(kernel, methods=["flr", "pm", "acpi"])
    assert kernel.writes == []


def test_a_gpu_in_use_is_not_touched(kernel: FakeKernel) -> None:
    at = kernel.root / "proc/4243"
    (at / "fd").mkdir(parents=True)
    (at / "fd/3").symlink_to("/dev/nvidia3")
    (at / "cmdline").write_bytes(b"python3\0train.py\0")
    (at / "cgroup").write_text("0::/user.slice\n")
    result = reset(kernel)
    assert kernel.writes == []
    assert (result["changed"], result["attempts"]) == (False, [])
    assert "in use by process 4243" in result["msg"]


def neighbour(kernel: FakeKernel) -> None:
    """Have a network card below the bridge of GPU 0000:44:00.0."""
    place = kernel.root / "sys/devices/pci0000:44/0000:43:01.1/0000:44:01.0"
    place.mkdir()
    (place / "vendor").write_text("0x15b3")
    (place / "class").write_text("0x020000")
    kernel.device("0000:44:01.0").symlink_to(
        "../../../devices/pci0000:44/0000:43:01.1/0000:44:01.0"
    )


def test_a_bus_reset_must_reach_nothing_else(kernel: FakeKernel) -> None:
    neighbour(kernel)
    refused = reset(kernel, methods=["flr", "bus"])
    assert kernel.writes == []
    assert [guard["id"] for guard in refused["guards"]] == ["reset-reach"]
    assert "would also reset 0000:44:01.0" in refused["msg"]
    assert tried(reset(kernel)) == [("flr", "done", True)]  # and by itself it is not tried


def test_a_card_of_several_functions_goes_by_its_bridge(card: FakeKernel) -> None:
    (card.device("0000:01:00.0") / "reset_method").write_text("flr\n")
    (card.device("0000:00:01.1") / "reset_subordinate").touch()
    card.cures = {"0000:01:00.0": "subordinate"}
    result = reset(card, "01:00.0")
    assert tried(result) == [("flr", "done", False), ("bus", "done", True)]
    assert ("0000:00:01.1", "subordinate") in card.resets
    assert card.driver("0000:01:00.1") == "snd_hda_intel"  # it was taken off meanwhile
    assert (f"{DRIVERS}/snd_hda_intel/unbind", "0000:01:00.1") in card.writes


def test_a_refused_reset_gives_driver_and_methods_back(kernel: FakeKernel) -> None:
    kernel.answers[(f"{GPU}/reset", "1")] = errno.EBUSY
    result = reset(kernel, methods=["flr"])
    assert tried(result) == [("flr", "failed", False)]
    assert "the kernel could not reset the card this way" in result["msg"]
    assert "in use" not in result["msg"]
    assert kernel.driver(GPU) == "nvidia"
    assert (kernel.device(GPU) / "reset_method").read_text() == "flr bus"
    assert Store(Reader(str(kernel.root))).record() is None


def test_a_reset_that_never_returns_ends_the_run(kernel: FakeKernel) -> None:
    kernel.answers[(f"{GPU}/reset", "1")] = "stuck"
    result = reset(kernel, f"{GPU} 0000:43:00.0 0000:81:00.0")
    assert tried(result)[-1] == ("flr", "stuck", False)
    assert "0000:81:00.0 was not tried" in result["msg"]
    again = reset(kernel)
    assert "stuck" in {guard["id"] for guard in again["guards"]}


def test_a_driver_that_does_not_come_back_is_no_help(kernel: FakeKernel) -> None:
    kernel.refuses_probe.add("nvidia")
    result = reset(kernel)
    assert tried(result) == [("flr", "failed", False), ("bus", "failed", False)]
    assert "EPERM" in result["msg"]


def test_a_start_that_never_ends_is_told(kernel: FakeKernel) -> None:
    kernel.starting[GPU] = "stuck"
    result = reset(kernel)
    assert tried(result) == [("flr", "stuck", False)]
    assert "has not returned within 60 s" in result["msg"]


def test_a_run_that_was_cut_off_leaves_no_narrowed_methods(kernel: FakeKernel) -> None:
    class PowerCut(Exception):
        pass

    def cut(path: str, value: str, timeout: float) -> Any:
        if path.endswith("/reset"):
            raise PowerCut
        return kernel(path, value, timeout)

    host = Reader(str(kernel.root))
    with pytest.raises(PowerCut):
        _reset.reset(
            Machine(host, cut, 30, drain=1, run=kernel.run, log=kernel.log, start=kernel.start),
            [GPU],
            _reset.Order(["flr"], (), (), 60),
            store=Store(host),
        )
    assert (kernel.device(GPU) / "reset_method").read_text() == "flr"
    left = json.loads((kernel.root / "var/lib/gpuhost/transaction.json").read_text())
    assert left["resets"] == {f"{DEVICES}/{GPU}/reset_method": "flr bus"}
    result = reset(kernel, methods=["rebind"])
    assert result["recovered"]["wish"] == f"{GPU} to driver nvidia and a reset by flr"
    assert (kernel.device(GPU) / "reset_method").read_text() == "flr bus"
    assert kernel.driver(GPU) == "nvidia"


def test_a_missing_node_is_made_before_the_gpu_is_started(kernel: FakeKernel) -> None:
    def make(command: str) -> str:
        (kernel.root / "dev/nvidia3").write_text("c 195:3")
        return ""

    kernel.answer = make

    def without_nodes(path: str, value: str, timeout: float) -> Any:
        outcome = kernel(path, value, timeout)
        if path == PROBE:
            (kernel.root / "dev/nvidia3").unlink()
        return outcome

    host = Reader(str(kernel.root))
    machine = Machine(
        host, without_nodes, 30, drain=1, run=kernel.run, log=kernel.log, start=kernel.start
    )
    result = _reset.reset(machine, [GPU], _reset.Order(["flr"], (), (), 60), store=Store(host))
    assert kernel.commands == ["nvidia-modprobe -c 3"]
    assert tried(result) == [("flr", "done", True)]


def test_a_start_is_noted_so_that_faults_before_it_are_history(kernel: FakeKernel) -> None:
    host = Reader(str(kernel.root))

    def current() -> list[str]:
        log = kernel.log(host, 0)
        found = collect(log, read_starts(host))
        health = conclude(found, log.summary(), read_subjects(host, read_gpus(host)))
        return [fault.id for fault in health.faults if fault.current and fault.address == GPU]

    kernel.boot("4f1c2b3a-0000-4000-8000-0123456789ab")
    kernel.cures = {GPU: "flr"}
    kernel.complaint = WPR2
    kernel.start("/dev/nvidia3", 1)
    assert current() == ["wpr2-already-up"]
    reset(kernel)
    assert current() == []
    kernel.cures = {GPU: "power-off"}
    kernel.start("/dev/nvidia3", 1)
    assert current() == ["wpr2-already-up"]


def test_a_gpu_that_starts_with_a_fault_is_not_helped(kernel: FakeKernel) -> None:
    def start(path: str, timeout: float) -> Any:
        kernel.say(f"NVRM: Xid (PCI:{GPU[:-2]}): 62, pid=77, 2027(2028) 00000000")
        return kernel.start(path, timeout)

    host = Reader(str(kernel.root))
    machine = Machine(host, kernel, 30, drain=1, run=kernel.run, log=kernel.log, start=start)
    result = _reset.reset(machine, [GPU], _reset.Order(["flr"], (), (), 60), store=Store(host))
    assert tried(result) == [("flr", "done", False)]
    assert "xid-62" in result["msg"]


def test_no_method_turns_into_a_reset_of_the_bus(kernel: FakeKernel) -> None:
    """The kernel tries each method that is written to reset_method, and refuses when one fails."""
    neighbour(kernel)
    (kernel.device(GPU) / "reset_method").write_text("flr pm bus\n")
    port = kernel.root / "sys/devices/pci0000:44/0000:43:01.1"
    (port / "reset_subordinate").touch()
    kernel.device(port.name).symlink_to("../../../devices/pci0000:44/0000:43:01.1")
    kernel.cures = {GPU: "power-off"}
    kernel.answers[(f"{GPU}/reset_method", "flr pm bus")] = errno.EINVAL
    result = reset(kernel)
    assert [path for path, _value in kernel.writes if path.endswith("reset_subordinate")] == []
    assert tried(result) == [("flr", "failed", False), ("pm", "refused", False)]
    assert f"the kernel does not offer pm for {GPU} now" in result["msg"]
    assert kernel.driver(GPU) == "nvidia"


def test_the_guard_judges_what_is_written_not_the_word(kernel: FakeKernel) -> None:
    neighbour(kernel)
    situation = read_situation(Reader(str(kernel.root)), Store(Reader(str(kernel.root))))
    plan = plan_change(situation, [Wish((GPU,), "nvidia", reset="flr")])
    target = plan.targets[0]
    assert judge_change(situation, [target]) == []
    for writes in (
        [(f"{DEVICES}/0000:43:01.1/reset_subordinate", "1")],
        [(f"{DEVICES}/{GPU}/reset", "1")],  # the file has `flr bus`, so that it may be either
        [(f"{DEVICES}/{GPU}/reset_method", "bus"), (f"{DEVICES}/{GPU}/reset", "1")],
    ):
        reasons = judge_change(situation, [replace(target, reset_writes=writes)])
        assert [reason.id for reason in reasons] == ["reset-reach"]


def lose(kernel: FakeKernel, at: str, *, gone: bool = False) -> Machine:
    """Return a machine whose GPU falls off the bus when it is reset, or vanishes from it."""

    def write(path: str, value: str, timeout: float) -> Any:
        if path == f"{DEVICES}/{at}/reset" and not gone:
            (kernel.device(at) / "config").write_bytes(b"\xff" * 64)
            kernel.answers[(f"{at}/reset", "1")] = errno.ENOTTY
        outcome = kernel(path, value, timeout)
        if path == PROBE and gone:
            kernel.device(at).unlink()
        return outcome

    host = Reader(str(kernel.root))
    return Machine(host, write, 30, drain=1, run=kernel.run, log=kernel.log, start=kernel.start)


def test_a_reset_that_loses_the_card_is_told_and_bars_no_other_gpu(kernel: FakeKernel) -> None:
    store = Store(Reader(str(kernel.root)))
    order = _reset.Order(None, (), (), 60)
    result = _reset.reset(lose(kernel, GPU), [GPU, "82:00.0"], order, store=store)
    assert tried(result) == [("flr", "failed", False)]  # and no other method after that
    assert [one["address"] for one in result["ill"]] == [GPU]
    assert "0000:82:00.0 was not tried" in result["msg"]
    assert store.record() is not None
    again = reset(kernel, "82:00.0")
    assert tried(again) == [("flr", "done", None)]
    assert f"except for {GPU}, off the bus" in again["recovered"]["outcome"]
    assert store.record() is None
    assert "off-bus" in {guard["id"] for guard in reset(kernel)["guards"]}


def test_a_card_that_vanishes_is_told_with_what_was_tried(kernel: FakeKernel) -> None:
    machine = lose(kernel, "0000:82:00.0", gone=True)
    order = _reset.Order(["flr"], (), (), 60)
    result = _reset.reset(machine, ["82:00.0"], order, store=Store(machine.host))
    assert [one["method"] for one in result["attempts"]] == ["flr"]
    assert result["ill"][0]["ladder"][0] == "reboot"


def test_what_was_refused_is_not_called_ill_and_what_has_no_reset_is(kernel: FakeKernel) -> None:
    (kernel.device(GPU) / "reset_method").write_text("bus\n")
    neighbour(kernel)
    result = reset(kernel)
    assert (result["attempts"], result["changed"]) == ([], False)
    assert [(one["address"], one["ladder"][0]) for one in result["ill"]] == [(GPU, "reboot")]
    assert "offers no reset that reaches it alone" in result["msg"]
    (kernel.root / "proc/4243/fd").mkdir(parents=True)
    (kernel.root / "proc/4243/fd/3").symlink_to("/dev/nvidia3")
    (kernel.root / "proc/4243/cmdline").write_bytes(b"python3\0train.py\0")
    (kernel.root / "proc/4243/cgroup").write_text("0::/user.slice\n")
    assert reset(kernel, methods=["rebind"])["ill"] == []
