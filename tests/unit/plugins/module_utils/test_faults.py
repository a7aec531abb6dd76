"""Verdicts: logs with the diagnosis each must get, GPUs of a host, and any bytes at all."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from ansible_collections.gpuhost.inference.plugins.module_utils import _child
from ansible_collections.gpuhost.inference.plugins.module_utils._fault_kinds import (
    CLASSES,
    KINDS,
    RUNGS,
    remedy,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._fault_log import collect
from ansible_collections.gpuhost.inference.plugins.module_utils._faults import (
    Health,
    Subject,
    conclude,
    judge,
    read_subjects,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._gpu import read_gpus
from ansible_collections.gpuhost.inference.plugins.module_utils._kernel_log import (
    read_blocks,
    read_file,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader
from ansible_collections.gpuhost.inference.plugins.module_utils._xids import (
    HARMLESS as HARMLESS_XIDS,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._xids import (
    advice,
    raised,
)
from hypothesis import given, settings
from hypothesis import strategies as st

LOGS = Path(__file__).parents[3] / "fixtures" / "kernel_logs"
INDEX: dict[str, dict[str, Any]] = yaml.safe_load((LOGS / "index.yml").read_text())
SHARED = Path(__file__).resolve().parents[4].parent / "shared" / "kernel_logs"

FIRST = "Linux version 6.14.11-2-pve (build@proxmox)"
FSP = "NVRM: GPU0 kfspWaitForResponse: FSP command timed out"
A, B, C = "0000:41:00.0", "0000:42:00.0", "0000:c1:00.0"


def health(*lines: str, gpus: list[Subject] | None = None) -> Health:
    log = "".join(f"[{at:5}.000000] {line}\n" for at, line in enumerate(lines))
    return judge(read_blocks([log.encode()]), gpus)


def end(address: str, codes: str = "0x62:0xffff") -> str:
    return f"NVRM: GPU {address}: RmInitAdapter failed! ({codes}:2168)"


def works(address: str, **fields: Any) -> Subject:
    return Subject(address, **{"driver": "nvidia", "has_fsp": "yes", "initialised": True, **fields})


def words(judged: Health) -> dict[str, str]:
    return {gpu.address: f"{gpu.verdict} {gpu.fsp}" for gpu in judged.gpus}


def test_every_log_is_in_the_index() -> None:
    assert sorted(INDEX) == sorted(path.stem for path in LOGS.glob("*.log"))
    assert len(INDEX) >= 80
    assert sum("faults" not in entry for entry in INDEX.values()) >= 25


@pytest.mark.parametrize("name", sorted(INDEX))
def test_logs_are_judged_as_the_index_says(name: str) -> None:
    judged = judge(read_file(str(LOGS / f"{name}.log")), None)
    expected = INDEX[name]
    assert [
        f"{fault.class_} {fault.address or 'unattributed'} x{fault.count}"
        for fault in judged.faults
        if fault.current
    ] == expected.get("faults", [])
    assert {gpu.address: f"{gpu.verdict}, FSP {gpu.fsp}" for gpu in judged.gpus} == expected.get(
        "gpus", {}
    )
    assert judged.log.complete is expected.get("complete", False)


def shared_logs() -> list[tuple[str, str]]:
    if not SHARED.is_dir():
        return []
    rows = re.findall(
        r"^\| (\d\S+) \| [^|]+ \| (\w+) \|", (SHARED / "index.md").read_text(), re.MULTILINE
    )
    return [(name, class_) for name, class_ in rows if (SHARED / f"{name}.log").exists()]


@pytest.mark.skipif(not shared_logs(), reason="no ../shared/kernel_logs beside the project")
@pytest.mark.parametrize(("name", "class_"), shared_logs())
def test_public_logs_are_judged_as_their_index_says(name: str, class_: str) -> None:
    judged = judge(read_file(str(SHARED / f"{name}.log")), None)
    found = {fault.class_ for fault in judged.faults if fault.current}
    assert found == (set() if class_ in HARMLESS else {class_})
    failed = {"fsp_failed", "fsp_timeout"}
    for gpu in judged.gpus:
        assert gpu.verdict != "healthy"  # excerpts are never complete
        assert (gpu.fsp == "failed") == (class_ in failed)


HARMLESS = ("benign", "healthy", "format_only")


def standing(log: bytes) -> set[str]:
    """Return the classes of the faults that count in a log."""
    return {fault.class_ for fault in judge(read_blocks([log]), None).faults if fault.current}


def confusion() -> Counter[tuple[str, str]]:
    """Count logs by the class they have and the class that is found in them, `none` for none."""
    logs = [
        ((LOGS / f"{name}.log").read_bytes(), {row.split()[0] for row in entry.get("faults", [])})
        for name, entry in INDEX.items()
    ]
    logs.append((corrected(range(100, 3100, 6)).encode(), {"pcie_corrected"}))
    logs += [
        ((SHARED / f"{name}.log").read_bytes(), set() if class_ in HARMLESS else {class_})
        for name, class_ in shared_logs()
    ]
    table: Counter[tuple[str, str]] = Counter()
    for log, classes in logs:
        found = standing(log)
        table.update((class_, class_) for class_ in classes & found)
        missed, wrong = sorted(classes - found), sorted(found - classes)
        table.update(zip_longest(missed, wrong, fillvalue="none"))
        table["none", "none"] += not classes and not found
    return table


def test_every_class_is_told_from_every_other() -> None:
    """Prints the table with `pytest -s`: a row for each class, a column for each that is found."""
    table = confusion()
    names = sorted({name for pair in table for name in pair})
    width = max(map(len, names)) + 2
    print("\n" + " " * width + "".join(name.rjust(width) for name in names))
    for name in names:
        cells = (str(table[name, other] or ".").rjust(width) for other in names)
        print(name.ljust(width) + "".join(cells))
    assert set(names) == {*CLASSES, "none"}
    assert {pair: n for pair, n in table.items() if n and pair[0] != pair[1]} == {}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.pattern], ids=lambda kind: kind.id)
def test_every_row_of_the_table_is_seen_in_a_log(kind: Any) -> None:
    rare = {
        "fsp-message": "NVRM: kfspPollForQueueEmpty_IMPL: Received error message from FSP while "
        "waiting for queue to be empty.",
        "fsp-fuse-check": "NVRM: Xid (PCI:0000:c1:00): 143, FSP fuse error check has failed. "
        "Status = 0x2.",
        "fsp-boot-commands": "NVRM: kfspSendBootCommands_GH100: FSP boot cmds failed. "
        "RM cannot boot.",
        "gsp-start": "NVRM: GPU1 RmInitAdapter: Cannot initialize GSP firmware RM",
        "gsp-init": "NVRM: Xid (PCI:0000:c1:00): 143, a message that is new",
        "fallen-off-bus": "NVRM: GPU at 0000:c1:00.0 has fallen off the bus.",
    }
    if kind.id in rare:
        judged = health(rare[kind.id], end(C))
        assert [fault.id for fault in judged.faults] == [kind.id]
        return
    seen = {
        fault.id
        for name in INDEX
        for fault in judge(read_file(str(LOGS / f"{name}.log")), None).faults
    }
    assert kind.id in seen


# -- GPUs of a host -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpu", "lines", "expected"),
    [
        pytest.param(works(A), [FIRST], "healthy ok", id="started"),
        pytest.param(works(A, has_fsp="no"), [FIRST], "healthy not_applicable", id="no FSP"),
        pytest.param(works(A, has_fsp="unknown"), [FIRST], "healthy unknown", id="unknown chip"),
        pytest.param(works(A), [], "unknown unknown", id="no log"),
        pytest.param(works(A), ["NVRM: x"], "unknown unknown", id="incomplete log"),
        pytest.param(works(A, initialised=False), [FIRST], "unknown unknown", id="never opened"),
        pytest.param(works(A, initialised=None), [FIRST], "unknown unknown", id="no proof"),
        pytest.param(
            works(A, initialised=None),
            [FIRST, f"[drm] Initialized nvidia-drm 0.0.0 for {A} on minor 1"],
            "healthy ok",
            id="success line",
        ),
        pytest.param(works(A, driver=None), [FIRST], "unknown unknown", id="no driver"),
        pytest.param(works(A, driver="nouveau"), [FIRST], "unknown unknown", id="other driver"),
        pytest.param(
            works(A, driver="vfio-pci", initialised=None), [FIRST], "healthy unknown", id="vfio"
        ),
        pytest.param(
            works(A, driver="vfio-pci", has_fsp="no"),
            [FIRST],
            "healthy not_applicable",
            id="vfio, no FSP",
        ),
        pytest.param(
            works(A, driver="vfio-pci"), ["x"], "unknown unknown", id="vfio, incomplete log"
        ),
        pytest.param(
            works(A, driver="vfio-pci"),
            [FIRST, f"vfio-pci {A}: not ready 65535ms after FLR; giving up"],
            "failed unknown",
            id="vfio, reset failed",
        ),
        pytest.param(works(A), [FIRST, FSP, end(A)], "failed failed", id="FSP"),
        pytest.param(
            works(A, has_fsp="no"), [FIRST, FSP, end(A)], "failed not_applicable", id="no FSP fails"
        ),
        pytest.param(
            works(A),
            [FIRST, "NVRM: kgspX: failed to wait for GFW boot complete: 0x65", end(A)],
            "failed failed",
            id="GFW with FSP",
        ),
        pytest.param(
            works(A, driver="vfio-pci"), [FIRST, FSP, end(A)], "failed failed", id="moved to vfio"
        ),
        pytest.param(
            works(A),
            [FIRST, f"nvidia {A}: AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x1 address=0x5]"],
            "degraded ok",
            id="works with IOMMU faults",
        ),
        pytest.param(
            works(A),
            [f"nvidia {A}: AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x1 address=0x5]"],
            "degraded unknown",
            id="IOMMU faults in an incomplete log",
        ),
        pytest.param(
            works(A),
            [FIRST, FSP, end(A), f"[drm] Initialized nvidia-drm 0.0.0 for {A} on minor 1"],
            "healthy ok",
            id="a later success",
        ),
        pytest.param(
            works(A),
            [FIRST, "snd_hda_intel 0000:41:00.1: not ready 65535ms after bus reset; giving up"],
            "failed unknown",
            id="another function of the card",
        ),
        pytest.param(
            works(A),
            [FIRST, "NVRM: GPU0 kgspX: x", FSP, "NVRM: loading NVIDIA UNIX Open Kernel Module"],
            "healthy ok",
            id="unattributed, but before a reload",
        ),
    ],
)
def test_one_gpu(gpu: Subject, lines: list[str], expected: str) -> None:
    # the second one is there so that the fault is not its only possible owner's
    judged = health(*lines, gpus=[gpu, works(C)])
    assert words(judged)[A] == expected
    assert all(found.reason for found in judged.gpus)


def test_devices_of_others_are_not_ours() -> None:
    judged = health(
        FIRST,
        "vfio-pci 0000:5e:00.0: not ready 65535ms after FLR; giving up",
        "DMAR: [DMA Read NO_PASID] Request device [5e:00.0] fault addr 0x1000 [fault reason 0x06]",
        gpus=[works(A)],
    )
    assert judged.faults == ()
    assert words(judged) == {A: "healthy ok"}


def test_an_unattributed_fault_makes_no_candidate_healthy() -> None:
    gpus = [works(A), works(B, driver="vfio-pci"), works(C, has_fsp="no")]
    judged = health(FIRST, FSP, gpus=gpus)
    [fault] = judged.unattributed
    assert (fault.class_, fault.candidates) == ("fsp_timeout", (A, B))
    assert words(judged) == {
        A: "unknown unknown",
        B: "unknown unknown",
        C: "healthy not_applicable",
    }


def test_a_gpu_that_started_since_is_no_candidate() -> None:
    started = f"[drm] Initialized nvidia-drm 0.0.0 for {A} on minor 1"
    judged = health(FIRST, FSP, started, gpus=[works(A), works(B)])
    assert judged.unattributed[0].candidates == (B,)


def test_the_only_gpu_of_a_host_is_it() -> None:
    judged = health(FIRST, FSP, gpus=[works(A)])
    assert [(fault.address, fault.attribution) for fault in judged.faults] == [(A, "only-gpu")]
    assert words(judged) == {A: "failed failed"}


def test_an_instance_number_proves_that_a_log_does_not_name_all_gpus() -> None:
    alone = health(f"nvidia {A}: enabling device", FSP)
    assert alone.faults[0].address == A
    more = health(f"nvidia {A}: enabling device", FSP.replace("GPU0", "GPU3"))
    assert more.faults[0].address is None


def test_lines_of_different_attempts_are_not_mixed() -> None:
    dump = "NVRM: GPU0 kfspDumpDebugState_GB100: GPU 0000:42:00"
    judged = health(FIRST, FSP, end(A), FSP, dump, FSP, end(C), gpus=[works(A), works(B), works(C)])
    assert {fault.address: fault.id for fault in judged.faults} == {
        A: "fsp-command-timeout",
        B: "fsp-command-timeout",
        C: "start-failed",
    }


def test_a_dump_of_another_gpu_ends_the_attempt_before() -> None:
    dump = "NVRM: kfspDumpDebugState_GH100: GPU 0000:{}:00"
    lines = [FIRST, FSP.replace("GPU0 ", ""), dump.format("41"), "x", FSP.replace("GPU0 ", "")]
    judged = health(*lines, dump.format("42"), gpus=[works(A), works(B), works(C)])
    assert words(judged) == {A: "failed failed", B: "failed failed", C: "healthy ok"}


def test_a_started_neighbour_does_not_take_the_blame() -> None:
    """Messages of instance 7, which runs, next to instance 6, which fails to start."""
    judged = health(
        FIRST,
        FSP.replace("GPU0", "GPU6"),
        "NVRM: GPU7 nvCheckOkFailedNoLog: Check failed: Generic Error [NV_ERR_GENERIC]",
        "NVRM: GPU6 RmInitAdapter: Cannot initialize GSP firmware RM",
        end(A),
        gpus=[works(A), works(B)],
    )
    assert words(judged) == {A: "failed failed", B: "healthy ok"}


def test_one_cause_for_one_attempt_and_the_rest_is_evidence() -> None:
    bad = "NVRM: GPU0 gpuHandleSanityCheckRegReadError_GH100: Possible bad register read: addr: 0x1"
    boot = "NVRM: GPU0 kfspSendBootCommands_GH100: FSP boot cmds failed. RM cannot boot."
    offset = "NVRM: GPU0 kfspSendBootCommands_GH100: version=0x2, gspFmcSysmemOffset=0x3fff0000"
    minor = f"NVRM: GPU {A}: rm_init_adapter failed, device minor number 0"
    judged = health(bad, FSP, boot, offset, end(A), minor)
    [fault] = judged.faults
    assert (fault.id, fault.count) == ("fsp-command-timeout", 1)
    assert [FSP in fault.line, *(len(line) > 0 for line in fault.evidence)] == [True] * 6


def test_repeats_are_one_fault_with_first_last_and_count() -> None:
    lines = [
        f"vfio-pci {A}: AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x1 address=0x{n:x}000 flags=0]"
        for n in range(500)
    ]
    [fault] = health(*lines).faults
    assert (fault.count, fault.first, fault.last) == (500, "0.000000", "499.000000")
    assert len(fault.evidence) < 20


def test_p2p_is_told_by_the_bars_of_the_other_gpus() -> None:
    gpus = [works(A, bars=((0x2000_0000, 0x2FFF_FFFF),)), works(B, bars=((1 << 40, 1 << 41),))]
    fault = "nvidia {}: AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x1 address={} flags=0x20]"

    def diagnosed(address: str, place: str) -> list[str]:
        return [f.id for f in health(FIRST, fault.format(address, place), gpus=gpus).faults]

    assert diagnosed(A, "0x10000001000") == ["iommu-p2p"]
    assert diagnosed(B, "0x20001000") == ["iommu-p2p"]
    assert diagnosed(A, "0x20001000") == ["iommu-fault"]  # its own
    assert diagnosed(A, "0x30001000") == ["iommu-fault"]  # nobody's
    dmar = "DMAR: [DMA Write NO_PASID] Request device [42:00.0] fault addr 0x20001000 [fault reason"
    assert [f.id for f in health(FIRST, dmar, gpus=gpus).faults] == ["iommu-p2p"]


# -- PCIe -----------------------------------------------------------------------------------------

PORT, SWITCH = "0000:40:01.1", "0000:40:03.1"
BELOW = [
    works(A, bridges=(PORT,)),
    works(B, bridges=(SWITCH, "0000:41:01.0")),
    works(C, bridges=(SWITCH, "0000:41:02.0")),
]
ANNOUNCED = "pcieport 0000:00:01.0: AER: {} error message received from {}"
CONTAINED = "pcieport {}: DPC: containment event, status:0x1f01 source:0x0000"
SUCCESS = "[drm] Initialized nvidia-drm 0.0.0 for {} on minor 1"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        pytest.param(
            [ANNOUNCED.format("Uncorrectable (Fatal)", A)],
            ["pcie-fatal 0000:41:00.0 line"],
            id="of a GPU",
        ),
        pytest.param(
            [ANNOUNCED.format("Uncorrectable (Fatal)", "0000:41:00.1")],
            ["pcie-fatal 0000:41:00.0 line"],
            id="of its sound",
        ),
        pytest.param(
            [ANNOUNCED.format("Uncorrectable (Non-Fatal)", PORT)],
            ["pcie-nonfatal 0000:41:00.0 bridge"],
            id="of a bridge above one",
        ),
        pytest.param(
            [ANNOUNCED.format("Uncorrectable (Non-Fatal)", SWITCH)],
            ["pcie-nonfatal None None 0000:42:00.0 0000:c1:00.0"],
            id="of a bridge above two",
        ),
        pytest.param(
            [ANNOUNCED.format("Uncorrectable (Fatal)", "0000:80:01.0")],
            [],
            id="of a bridge above none",
        ),
        pytest.param(
            [ANNOUNCED.format("Uncorrectable (Fatal)", "0000:81:00.0")], [], id="of a disk"
        ),
        pytest.param(
            [CONTAINED.format(SWITCH)],
            ["link-contained 0000:42:00.0 bridge", "link-contained 0000:c1:00.0 bridge"],
            id="contained above two",
        ),
        pytest.param(
            [CONTAINED.format(SWITCH), SUCCESS.format(B)],
            ["link-contained 0000:c1:00.0 bridge"],
            id="one of them started since",
        ),
        pytest.param(
            [CONTAINED.format(SWITCH), f"pcieport {SWITCH}: AER: device recovery successful"],
            [],
            id="recovered",
        ),
        pytest.param(
            [
                ANNOUNCED.format("Uncorrectable (Fatal)", SWITCH),
                "NVRM: Xid (PCI:0000:c1:00): 79, GPU has fallen off the bus.",
            ],
            ["xid-79 0000:c1:00.0 line"],
            id="one of two was lost by it",
        ),
        pytest.param(
            [ANNOUNCED.format("Uncorrectable (Fatal)", A), "NVRM: loading NVIDIA UNIX Open"],
            [],
            id="before the driver was loaded again",
        ),
    ],
)
def test_pcie_errors_find_their_gpu(lines: list[str], expected: list[str]) -> None:
    judged = health(FIRST, *lines, gpus=BELOW)
    assert [
        " ".join((fault.id, str(fault.address), str(fault.attribution), *fault.candidates))
        for fault in judged.faults
        if fault.current
    ] == expected


def corrected(seconds: range) -> str:
    line = "[{}.000000] nvidia {}: PCIe Bus Error: severity=Corrected, type=Physical Layer\n"
    return f"[0.000000] {FIRST}\n" + "".join(line.format(at, A) for at in seconds)


@pytest.mark.parametrize(
    ("seconds", "verdict"),
    [
        pytest.param(range(100, 3100, 6), "degraded", id="a flood"),
        pytest.param(range(100, 600000, 60), "healthy", id="often, but never many in an hour"),
        pytest.param(range(100, 101), "healthy", id="once"),
    ],
)
def test_corrected_pcie_errors_count_only_in_floods(seconds: range, verdict: str) -> None:
    judged = judge(read_blocks([corrected(seconds).encode()]), [works(A)])
    assert judged.gpus[0].verdict == verdict
    [fault] = judged.faults
    assert (fault.class_, fault.count) == ("pcie_corrected", len(seconds))
    assert (fault.verdict, fault.current) == (verdict, verdict == "degraded")


def test_corrected_errors_above_two_gpus_make_none_of_them_unknown() -> None:
    judged = health(FIRST, ANNOUNCED.format("Corrected", SWITCH), gpus=BELOW)
    assert {gpu.verdict for gpu in judged.gpus} == {"healthy"}


def test_an_error_is_counted_once_though_several_lines_tell_of_it() -> None:
    lines = [
        ANNOUNCED.format("Uncorrectable (Non-Fatal)", A),
        f"nvidia {A}: PCIe Bus Error: severity=Uncorrectable (Non-Fatal), type=Transaction Layer",
        f"nvidia {A}: AER: can't recover (no error_detected callback)",
        f"pcieport {PORT}: AER: device recovery failed",
    ]
    [fault] = health(*lines, *lines, gpus=BELOW).faults
    assert fault.count == 2
    assert any("can't recover" in line for line in fault.evidence)


def test_bridges_above_a_gpu_are_read_from_sysfs(host_tree: Callable[[str], Path]) -> None:
    host = Reader(str(host_tree("eight-gpus")))
    [subject] = [s for s in read_subjects(host, read_gpus(host)) if s.address == A]
    assert subject.bridges == (PORT,)


# -- Xids -----------------------------------------------------------------------------------------


def xid(number: int, rest: str = "") -> str:
    return f"NVRM: Xid (PCI:0000:41:00): {number}, {rest or 'pid=1, name=x, some text'}"


@pytest.mark.parametrize("number", [*range(1, 180), 4711])
def test_an_xid_makes_a_gpu_ill_or_is_an_applications_own(number: int) -> None:
    judged = health(FIRST, xid(number), gpus=[works(A), works(B)])
    verdict = judged.gpus[0].verdict
    assert judged.gpus[1].verdict == "healthy"
    if number in HARMLESS_XIDS:
        assert (verdict, judged.faults) == ("healthy", ())
        return
    assert verdict in ("degraded", "failed", "lost")
    [fault] = [fault for fault in judged.faults if fault.current]
    assert fault.ladder == judged.gpus[0].ladder
    assert list(fault.ladder) == [rung for rung in RUNGS if rung in fault.ladder]
    assert fault.remedy


@pytest.mark.parametrize(
    ("number", "verdict", "rung"),
    [
        (94, "degraded", "application"),
        (95, "failed", "reset"),
        (63, "degraded", "reset"),
        (157, "degraded", "hardware"),
        (110, "failed", "power-off"),
        (119, "failed", "reset"),
        (79, "lost", "reboot"),
    ],
)
def test_xids_begin_on_the_rung_of_the_catalog(number: int, verdict: str, rung: str) -> None:
    gpu = health(FIRST, xid(number), gpus=[works(A)]).gpus[0]
    assert (gpu.verdict, gpu.ladder[0]) == (verdict, rung)


def test_an_unknown_xid_says_so() -> None:
    [fault] = health(FIRST, xid(4711), gpus=[works(A)]).faults
    assert (fault.id, fault.verdict) == ("xid-4711", "degraded")
    assert "not known here" in fault.meaning


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("from 0x0 (None) to 0x1 (GPU Reset Required)", ("reset", "failed")),
        ("from 0x0 (None) to 0x1 (PF FLR)", ("reset", "failed")),
        ("from 0x0 (None) to 0x2 (Node Reboot Required)", ("reboot", "failed")),
        ("from 0x0 (None) to 0x2 (OS Reboot)", ("reboot", "failed")),
        ("from 0x0 (None) to 0x3 (Drain P2P)", ("application", "degraded")),
        ("from 0x0 (None) to 0x4 (Drain and Reset)", ("reset", "degraded")),
        ("from 0x0 (None) to 0x1 (Drain and Reset)", ("reset", "degraded")),
        ("from 0x0 to 0x2", ("reboot", "failed")),
        ("from 0x0 (None) to 0x9 (Something New)", ("application", "degraded")),
        ("from 0x2 (Node Reboot Required) to 0x0 (None)", None),
    ],
)
def test_the_action_that_the_driver_wants(text: str, expected: tuple[str, str] | None) -> None:
    wanted = advice(f", GPU recovery action changed {text}")
    assert (wanted and (wanted.rung, wanted.verdict)) == expected


def test_advice_raises_the_ladder_of_the_xid_before_and_never_lowers_it() -> None:
    reboot = xid(154, "GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)")
    reset = xid(154, "GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)")
    [fault] = health(xid(94), reboot, gpus=[works(A)]).faults
    assert (fault.ladder[0], fault.verdict, fault.count) == ("reboot", "failed", 1)
    assert "Node Reboot Required" in fault.remedy
    [lost] = health(xid(79), reset, gpus=[works(A)]).faults
    assert (lost.ladder[0], lost.verdict) == ("reboot", "lost")
    assert raised(("reset", "hardware"), "reboot") == ("reboot", "hardware")
    assert raised((), "reset") == ("reset",)


def test_an_xid_143_is_part_of_an_attempt_to_start() -> None:
    [fault] = health(xid(143, "a message that is new"), end(A), gpus=[works(A), works(B)]).faults
    assert (fault.id, fault.count) == ("gsp-init", 1)
    all_ones = xid(143, "Error status 0xffffffff while polling for FSP boot complete, 0xffffffff")
    assert health(all_ones, end(A), gpus=[works(A)]).faults[0].class_ == "gpu_lost"


# -- boot after boot ------------------------------------------------------------------------------


def conclusion(before: list[dict[str, set[str]]], *lines: str) -> Any:
    log = read_blocks([f"[0.000000] {FIRST}\n".encode(), *(f"{n}\n".encode() for n in lines)])
    found = collect(log)
    return conclude(found, log.summary(), [works(A), works(B)], before)


def test_the_same_in_three_boots_is_the_hardware() -> None:
    lines = (FSP, end(A))
    same = {A: {"fsp_failed", "fsp_timeout"}}
    for before, boots, rungs in (
        ([], 1, ("power-off", "hardware")),
        ([same], 2, ("power-off", "hardware")),
        ([same, same], 3, ("power-off", "hardware")),
    ):
        [fault] = conclusion(before, *lines).faults
        assert (fault.boots, fault.ladder) == (boots, rungs)
    reset = [{A: {"gsp_failed"}}] * 2
    gsp = "NVRM: GPU0 kgspX: GSP-FMC reported an error while attempting to boot GSP: 0xb"
    judged = conclusion(reset, gsp, end(A))
    assert judged.faults[0].ladder == judged.gpus[0].ladder == ("power-off", "hardware")
    assert "3 boots" in judged.faults[0].remedy
    assert "in 3 boots in a row" in judged.gpus[0].reason
    # what is known to stand in the way is told all the same, and nothing that nobody knows
    assert "identity" in conclusion([same, same], *lines).faults[0].remedy
    assert "did not help" not in judged.faults[0].remedy.partition("Power")[0]
    d3cold = f"nvidia {A}: Unable to change power state from D3cold to D0, device inaccessible"
    [fault] = conclusion([{A: {"gpu_lost"}}] * 2, d3cold).faults
    assert "D3cold" in fault.remedy
    assert fault.ladder == ("power-off", "hardware")


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("NVRM: Xid (PCI:0000:41:00): 8, pid=1", "xid-8"),
        ("NVRM: Xid (PCI:0000:41:00): 94, pid=1", "xid-94"),
        (f"NVRM: Attempting to remove device {A} with non-zero usage count", "unbind_blocked"),
    ],
)
def test_what_an_application_does_boot_after_boot_is_no_hardware(line: str, kind: str) -> None:
    [fault] = conclusion([{A: {kind}}] * 2, line).faults
    assert fault.ladder[0] == "application"
    assert fault.boots == 3


@pytest.mark.parametrize(
    "before",
    [
        pytest.param([{A: {"gsp_failed"}}, {}], id="not in the one before that"),
        pytest.param([{}, {A: {"gsp_failed"}}, {A: {"gsp_failed"}}], id="not in the last"),
        pytest.param([{B: {"gsp_failed"}}] * 2, id="another GPU"),
        pytest.param([{A: {"gpu_lost"}}] * 2, id="another class"),
    ],
)
def test_otherwise_the_ladder_begins_as_ever(before: list[dict[str, set[str]]]) -> None:
    gsp = "NVRM: GPU0 kgspX: GSP-FMC reported an error while attempting to boot GSP: 0xb"
    [fault] = conclusion(before, gsp, end(A)).faults
    assert fault.ladder[0] == "reset"


def test_an_iommu_fault_boot_after_boot_is_no_hardware() -> None:
    line = f"nvidia {A}: AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x1 address=0x5 flags=0x20]"
    [fault] = conclusion([{A: {"iommu_fault"}}] * 2, line).faults
    assert (fault.boots, fault.ladder) == (3, ("application",))


def test_an_xid_31_is_evidence_next_to_an_iommu_fault_only() -> None:
    xid = "NVRM: Xid (PCI:0000:41:00): 31, pid=1, name=x, Ch 00000010"
    fault = f"nvidia {A}: AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x1 address=0x5 flags=0x20]"
    assert health(xid).faults == ()
    [found] = health(xid, fault).faults
    assert found.class_ == "iommu_fault"
    assert any("Xid" in line for line in found.evidence)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.id)
def test_a_ladder_climbs_and_something_is_said(kind: Any) -> None:
    assert list(kind.ladder) == [rung for rung in RUNGS if rung in kind.ladder]
    assert remedy(kind.advice, kind.ladder)


def test_a_remedy_is_the_advice_and_the_rungs_in_words() -> None:
    said = remedy("Mind the cat.", ("reboot", "power-off"))
    off = "power the host off and take it from the mains for 30 s."
    assert said == f"Mind the cat. Reboot; if that does not help, {off}"
    assert remedy("Wait.", ()) == "Wait."


def test_a_gpu_gets_the_ladder_of_its_worst_fault() -> None:
    iommu = f"nvidia {A}: AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x1 address=0x5 flags=0x20]"
    both = health(iommu, FSP, end(A), gpus=[works(A), works(B)])
    assert [fault.ladder[0] for fault in both.faults] == ["application", "power-off"]
    assert [gpu.ladder for gpu in both.gpus] == [("power-off", "hardware"), ()]
    waiting = health(iommu, f"nvidia {A}: not ready 1023ms after FLR; waiting", gpus=[works(A)])
    assert waiting.gpus[0].ladder == ("application",)


def test_wpr2_after_a_reload_still_follows_from_the_failure_before() -> None:
    wpr2 = "NVRM: GPU0 _kgspBootGspRm: unexpected WPR2 already up, cannot proceed with booting GSP"
    judged = health(FSP, end(A), "NVRM: loading NVIDIA UNIX Open Kernel Module", wpr2, end(A))
    assert [(f.class_, f.current, f.count) for f in judged.faults] == [("fsp_timeout", True, 2)]


def test_subjects_of_a_captured_host(host_tree: Callable[[str], Path]) -> None:
    host = Reader(str(host_tree("eight-gpus")))
    subjects = read_subjects(host, read_gpus(host))
    assert [s.initialised for s in subjects if s.driver == "nvidia"] == [True] * 4
    assert {s.initialised for s in subjects if s.driver != "nvidia"} == {None}
    assert all(s.bars for s in subjects)


def test_before_the_first_start_the_information_file_has_question_marks(tmp_path: Path) -> None:
    file = tmp_path / "proc/driver/nvidia/gpus" / A / "information"
    file.parent.mkdir(parents=True)
    gpu: Any = SimpleNamespace(**vars(works(A)), config_readable=True)
    for uuid, firmware, expected in (
        ("GPU-????????-????-????-????-????????????", "N/A", False),
        ("GPU-00000000-1111-2222-3333-444444444444", "N/A", False),
        ("GPU-00000000-1111-2222-3333-444444444444", "595.45.04", True),
    ):
        file.write_text(f"Model: \t\t X\nGPU UUID: \t {uuid}\nGPU Firmware: \t {firmware}\n")
        assert read_subjects(Reader(str(tmp_path)), [gpu])[0].initialised is expected


def test_an_information_file_that_never_answers_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_child, "_SECONDS", 0.5)
    for address in (A, B):
        folder = tmp_path / "proc/driver/nvidia/gpus" / address
        folder.mkdir(parents=True)
        device = tmp_path / "sys/bus/pci/devices" / address
        device.mkdir(parents=True)
        (device / "resource").write_text("0x1000 0x1fff 0x40200\n")
    hung = tmp_path / "proc/driver/nvidia/gpus" / A / "information"
    os.mkfifo(hung)  # as behind a lock of the driver
    (hung.parents[1] / B / "information").write_text("GPU UUID: GPU-1\n")
    gpus: Any = [SimpleNamespace(**vars(works(at)), config_readable=True) for at in (A, B)]
    subjects = read_subjects(Reader(str(tmp_path)), gpus)
    os.close(os.open(hung, os.O_RDWR | os.O_NONBLOCK))
    assert [(s.initialised, s.bars) for s in subjects] == [
        (None, ((0x1000, 0x1FFF),)),
        (True, ((0x1000, 0x1FFF),)),
    ]


# -- any bytes ------------------------------------------------------------------------------------

PIECES = sorted(
    {line for name in INDEX for line in (LOGS / f"{name}.log").read_bytes().splitlines()}
)
GPUS = [
    works(A, bars=((0, 1 << 60),)),
    works(B, driver="vfio-pci"),
    works(C, has_fsp="no"),
]


@settings(max_examples=150, deadline=None, database=None)
@given(st.lists(st.one_of(st.sampled_from(PIECES), st.binary(max_size=80)), max_size=30))
def test_no_bytes_make_an_exception_and_none_make_an_incomplete_log_healthy(
    lines: list[bytes],
) -> None:
    data = b"\n".join(lines)
    for gpus in (None, GPUS):
        judged = judge(read_blocks([data]), gpus)
        if not judged.log.complete:
            assert "healthy" not in {gpu.verdict for gpu in judged.gpus}
            assert "ok" not in {gpu.fsp for gpu in judged.gpus}
        for fault in judged.faults:
            assert fault.address is None or not fault.candidates


@settings(max_examples=150, deadline=None, database=None)
@given(
    st.sampled_from(PIECES),
    st.integers(0, 200),
    st.integers(0, 200),
    st.one_of(st.binary(max_size=12), st.text(max_size=6).map(str.encode)),
)
def test_damaged_lines(line: bytes, start: int, length: int, insert: bytes) -> None:
    damaged = line[:start] + insert + line[start + length :]
    judged = judge(read_blocks([damaged]), GPUS)
    if b"Linux version" not in damaged and not damaged[:8].partition(b",")[2].startswith(b"0"):
        assert "healthy" not in {gpu.verdict for gpu in judged.gpus}
