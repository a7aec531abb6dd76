"""What a check leaves: the state over several checks, and metrics that Prometheus reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from ansible_collections.gpuhost.inference.plugins.module_utils import _health_state as health_state
from ansible_collections.gpuhost.inference.plugins.module_utils._faults import judge, read_subjects
from ansible_collections.gpuhost.inference.plugins.module_utils._gpu import Gpu, Sriov, read_gpus
from ansible_collections.gpuhost.inference.plugins.module_utils._health_state import (
    Run,
    State,
    as_json,
    conclude,
    failed,
    from_json,
    metrics,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._kernel_log import read_blocks
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader
from prometheus_client.parser import text_string_to_metric_families

BOOT = "0b1d5a7e9c3f4e2d8a6b7c5d4e3f2a10"
FIRST = "[    0.000000] Linux version 6.17.2-1-pve\n"
LOST = (
    "[  901.250000] NVRM: Xid (PCI:0000:43:00): 79, pid='<unknown>', GPU has fallen off the bus.\n"
)
FAULT = (
    "[  77.5{n:05}] nvidia 0000:41:00.0: AMD-Vi: Event logged "
    "[IO_PAGE_FAULT domain=0x0023 address=0xd3c0{n:04x}000 flags=0x0020]\n"
)


@pytest.fixture
def host(host_tree: Callable[[str], Path]) -> Reader:
    return Reader(str(host_tree("eight-gpus")))


def checked(
    host: Reader,
    log: str = FIRST,
    before: State | None = None,
    at: float = 1_900_000_000,
    gone: str = "",
) -> State:
    gpus = [gpu for gpu in read_gpus(host) if gpu.address != gone]
    health = judge(read_blocks([log.encode()]), read_subjects(host, gpus))
    return conclude(Run(at, 0.25, "9.8.7"), health, gpus, BOOT, before)


def samples(state: State) -> dict[str, float]:
    """Return the series of the metrics as Prometheus' own parser reads them."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(metrics(state)):
        assert family.type == "gauge"
        assert family.documentation
        for sample in family.samples:
            name = sample.name + "".join(f" {value}" for value in sorted(sample.labels.values()))
            assert name not in found, f"{name} is there twice"
            found[name] = sample.value
    return found


def holding(series: dict[str, float], name: str) -> list[str]:
    return [
        key.removeprefix(name).strip()
        for key, value in series.items()
        if key.startswith(name) and value
    ]


def test_each_gpu_has_one_verdict_and_one_state_of_its_fsp(host: Reader) -> None:
    series = samples(checked(host, FIRST + LOST))
    assert "0000:43:00.0 lost" in holding(series, "gpuhost_gpu_verdict")
    assert "0000:44:00.0 healthy" in holding(series, "gpuhost_gpu_verdict")
    assert "0000:44:00.0 ok" in holding(series, "gpuhost_gpu_fsp")
    for name, words in (("verdict", health_state.VERDICTS), ("fsp", health_state.FSP_STATES)):
        assert len(holding(series, f"gpuhost_gpu_{name}")) == 8
        assert sum(key.startswith(f"gpuhost_gpu_{name} ") for key in series) == 8 * len(words)
    assert series["gpuhost_info 9.8.7"] == 1
    assert series["gpuhost_health_check_ok"] == 1
    assert series["gpuhost_health_last_success_timestamp_seconds"] == 1_900_000_000
    assert series["gpuhost_log_complete"] == 1
    assert "0000:43:00.0 reboot" in holding(series, "gpuhost_gpu_remedy")


def test_faults_are_counted_for_each_gpu(host: Reader) -> None:
    log = FIRST + "".join(FAULT.format(n=n) for n in range(7))
    series = samples(checked(host, log))
    assert series["gpuhost_gpu_fault_occurrences 0000:41:00.0 iommu-fault iommu_fault"] == 7
    assert series["gpuhost_gpu_fault_current 0000:41:00.0 iommu-fault iommu_fault"] == 1
    assert holding(series, "gpuhost_gpu_verdict").count("0000:41:00.0 degraded") == 1


def test_the_same_fault_on_two_functions_is_one_series(host: Reader) -> None:
    """Node_exporter throws the whole file away when a series is there twice."""
    state = checked(host, FIRST + FAULT.format(n=1))
    [fault] = state.faults
    state = replace(state, faults=(fault, {**fault, "count": 4, "current": False}))
    series = samples(state)
    assert series["gpuhost_gpu_fault_occurrences 0000:41:00.0 iommu-fault iommu_fault"] == 5
    assert series["gpuhost_gpu_fault_current 0000:41:00.0 iommu-fault iommu_fault"] == 1


def test_gaps_of_the_log_and_faults_of_no_gpu_show(host: Reader) -> None:
    loose = "[   9.125000] NVRM: GPU3 kfspPollForResponse_IMPL: FSP command timed out\n"
    series = samples(checked(host, loose))
    assert series["gpuhost_log_complete"] == 0
    assert series["gpuhost_unattributed_faults"] == 1
    assert not any("healthy" in one for one in holding(series, "gpuhost_gpu_verdict"))


def test_a_gpu_that_is_gone_is_lost_until_it_is_back(host: Reader) -> None:
    gone = checked(host, before=checked(host), at=1_900_000_300, gone="0000:42:00.0")
    assert "0000:42:00.0 lost" in holding(samples(gone), "gpuhost_gpu_verdict")
    assert [card.address for card in gone.gpus] == sorted(card.address for card in gone.gpus)
    # neither another check nor a failed one makes it forgotten, and the time is the first one's
    again = failed(Run(1_900_000_600, 1, "9.8.7"), "no answer", BOOT, gone)
    again = checked(host, before=from_json(as_json(again)), at=1_900_000_900, gone="0000:42:00.0")
    [card] = [card for card in again.gpus if card.verdict == "lost"]
    assert card.reason == "it was on the bus at 2030-03-17T17:46:40Z, and is not there now"
    assert (card.driver, card.ladder[0]) == (None, "reboot")
    back = checked(host, before=again)
    assert not [card for card in back.gpus if card.verdict == "lost"]


def test_a_gpu_that_reads_all_ones_is_lost_without_a_line_in_the_log(host: Reader) -> None:
    for address in ("0000:43:00.0", "0000:83:00.0"):  # of nvidia, and of vfio-pci
        (host.root / f"sys/bus/pci/devices/{address}/config").write_bytes(b"\xff" * 64)
    state = checked(host, FIRST + FAULT.format(n=1))
    series = samples(state)
    for address in ("0000:43:00.0", "0000:83:00.0"):
        assert f"{address} lost" in holding(series, "gpuhost_gpu_verdict")
        assert f"{address} unknown" in holding(series, "gpuhost_gpu_fsp")
        assert f"{address} reboot" in holding(series, "gpuhost_gpu_remedy")
    assert "0000:44:00.0 healthy" in holding(series, "gpuhost_gpu_verdict")


def test_a_virtual_function_may_go(host: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    def virtual(host: Reader) -> list[Gpu]:
        return [replace(gpu, sriov=Sriov(None, None, "0000:40:00.0")) for gpu in read_gpus(host)]

    gpus = virtual(host)
    health = judge(read_blocks([FIRST.encode()]), read_subjects(host, gpus))
    before = conclude(Run(1, 0, ""), health, gpus, BOOT, None)
    none = judge(read_blocks([FIRST.encode()]), [])
    assert conclude(Run(2, 0, ""), none, [], BOOT, before).gpus == ()


def test_a_failed_check_leaves_nothing_standing(host: Reader) -> None:
    before = checked(host, FIRST + LOST)
    state = failed(Run(1_900_000_300, 30, "9.8.7"), "the bus could not be listed", BOOT, before)
    series = samples(state)
    assert {one.split()[1] for one in holding(series, "gpuhost_gpu_verdict")} == {"unknown"}
    assert {one.split()[1] for one in holding(series, "gpuhost_gpu_fsp")} == {"unknown"}
    assert len(holding(series, "gpuhost_gpu_verdict")) == 8
    assert series["gpuhost_health_check_ok"] == series["gpuhost_log_complete"] == 0
    assert series["gpuhost_health_last_check_timestamp_seconds"] == 1_900_000_300
    assert series["gpuhost_health_last_success_timestamp_seconds"] == 1_900_000_000
    assert not holding(series, "gpuhost_gpu_fault")
    assert not holding(series, "gpuhost_gpu_remedy")
    assert "gpuhost_unattributed_faults" not in series
    assert (state.error, state.log) == ("the bus could not be listed", None)


def test_a_check_that_never_succeeded_says_so() -> None:
    series = samples(failed(Run(1_900_000_300, 30, "9.8.7"), "no", None, None))
    assert series["gpuhost_health_last_success_timestamp_seconds"] == 0


def test_state_is_read_as_it_was_written(host: Reader) -> None:
    state = checked(host, FIRST + LOST)
    read = from_json(as_json(state))
    assert read is not None
    assert as_json(read) == as_json(state)
    assert read.gpus == state.gpus


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: text.replace('"version": 1', '"version": 2'),
        lambda text: text.replace('"gpus"', '"cards"'),
        lambda text: text.replace('"seen"', '"saw"'),
        lambda text: text.replace("Z", ""),
        lambda text: json.dumps({**json.loads(text), "gpus": 5}),
    ],
)
def test_a_damaged_state_is_none(host: Reader, spoil: Callable[[str], str]) -> None:
    assert from_json(spoil(as_json(checked(host)))) is None


def test_labels_are_escaped(host: Reader) -> None:
    state = replace(checked(host), collection='a"b\\c\nd')
    [family] = [
        f for f in text_string_to_metric_families(metrics(state)) if f.name == "gpuhost_info"
    ]
    assert family.samples[0].labels == {"version": 'a"b\\c\nd'}
