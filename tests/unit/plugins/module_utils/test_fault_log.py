"""Who says something, and about what: quotes, other ports, other drivers, old numbers."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuhost.inference.plugins.module_utils._fault_log import collect
from ansible_collections.gpuhost.inference.plugins.module_utils._faults import (
    Health,
    Subject,
    conclude,
    judge,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._kernel_log import (
    read_blocks,
    read_file,
)

LOGS = Path(__file__).parents[3] / "fixtures" / "kernel_logs"
A, B = "0000:41:00.0", "0000:81:00.0"
PORT, OTHER = "0000:40:01.1", "0000:80:03.1"
FIRST = "Linux version 6.14.11-2-pve (build@proxmox)"
LOST = "NVRM: Xid (PCI:0000:41:00): 79, pid=1, name=x, GPU has fallen off the bus."
LOADED = "NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  595.45.04"
FATAL = f"pcieport {PORT}: AER: Uncorrectable (Fatal) error message received from {A}"
CORRECTED = f"pcieport {PORT}: AER: Corrected error message received from {A}"
RECOVERED = "pcieport {}: AER: device recovery successful"


def works(address: str, **fields: Any) -> Subject:
    return Subject(address, **{"driver": "nvidia", "has_fsp": "yes", "initialised": True, **fields})


def log(*lines: str, step: int = 1) -> Any:
    text = (f"[{at * step:5}.000000] {line}\n" for at, line in enumerate((FIRST, *lines)))
    return read_blocks([line.encode() for line in text])


def health(*lines: str, gpus: list[Subject] | None = None, step: int = 1) -> Health:
    return judge(log(*lines, step=step), gpus or [works(A), works(B, has_fsp="no")])


def verdict(judged: Health, address: str = A) -> str:
    [gpu] = [gpu for gpu in judged.gpus if gpu.address == address]
    return gpu.verdict


# -- what others quote: anybody may mount a tmpfs in a user namespace, or plug in a device ------

QUOTES = (
    "tmpfs: Unknown parameter '{}'",
    "usb 1-1: Product: {}",
    "systemd[1]: {}",
    "hid-generic 0003:046D:C52B.0001: input,hidraw0: USB HID v1.11 Mouse [{}] on usb-0000:41:00.0",
    "tmpfs: Unknown parameter 'x\n{}'",
)
# The source's own notes of what is missing: a quoted one makes nobody healthy
NOTES = re.compile(r"suppressed|dropped|overflow|overrun|Missed|Rate limiting")


@pytest.mark.parametrize("name", sorted(path.stem for path in LOGS.glob("*.log")))
def test_a_quoted_message_never_changes_a_verdict(name: str) -> None:
    said = [record.text for record in read_file(str(LOGS / f"{name}.log"))]
    named = {gpu.address for gpu in judge(read_file(str(LOGS / f"{name}.log")), None).gpus}
    gpus = [works(address) for address in sorted(named | {A, B})]
    lines = [quote.format(t) for quote in QUOTES for t in said if not NOTES.search(t)]
    records = [f"5,1,1000000,-;{line}".replace("\n", "\\x0a") for line in (FIRST, *lines)]
    records = [re.sub(r",1,", f",{at},", line, count=1) for at, line in enumerate(records)]
    judged = judge(read_blocks(["".join(f"{line}\n" for line in records).encode()]), gpus)
    assert judged.faults == ()
    assert {gpu.verdict for gpu in judged.gpus} == {"healthy"}
    begun = [records[0], records[0].replace(",0,", ",1,").replace(FIRST, LOST)]
    again = [line.replace(f",{at},", f",{at + 1},", 1) for at, line in enumerate(records)][1:]
    text = "".join(f"{line}\n" for line in (*begun, *again))
    judged = judge(read_blocks([text.encode()]), gpus)
    assert verdict(judged) == "lost"
    assert {gpu.verdict for gpu in judged.gpus if gpu.address != A} == {"healthy"}


# -- which card a message clears ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        pytest.param(
            [f"vfio-pci {A}: Unable to change power state from D3cold to D0, device inaccessible"],
            "lost",
            id="lost",
        ),
        pytest.param(
            [f"vfio-pci {A}: AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x1c address=0x2000]"],
            "degraded",
            id="refused by the IOMMU",
        ),
        pytest.param(
            [FATAL, f"pcieport {PORT}: AER: device recovery failed"], "unknown", id="driver unsaid"
        ),
        pytest.param(
            [f"pcieport {PORT}: DPC: containment event, status:0x1f01 source:0x4100"],
            "unknown",
            id="of the port above",
        ),
    ],
)
def test_loading_nvidia_clears_no_gpu_of_a_machine(lines: list[str], expected: str) -> None:
    gpus = [works(A, driver="vfio-pci", initialised=None, bridges=(PORT,)), works(B)]
    assert verdict(health(*lines, LOADED, gpus=gpus)) == expected
    # the same card, now with the driver that was loaded
    gpus[0] = works(A, bridges=(PORT,))
    assert verdict(health(*lines, LOADED, gpus=gpus)) == "healthy"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        pytest.param([FATAL, RECOVERED.format(PORT)], "healthy", id="its own port"),
        pytest.param([FATAL, RECOVERED.format(OTHER)], "failed", id="another port"),
        pytest.param([FATAL, *["NVRM: x"] * 64, RECOVERED.format(PORT)], "failed", id="long ago"),
        pytest.param([CORRECTED, LOST, RECOVERED.format(OTHER)], "lost", id="another, and lost"),
        pytest.param([FATAL, LOST, RECOVERED.format(PORT)], "lost", id="its own, and lost"),
        pytest.param(
            [
                f"pcieport {PORT}: DPC: containment event, status:0x1f01, ERR_FATAL received "
                f"from {A}",
                LOST,
                RECOVERED.format(PORT),
            ],
            "lost",
            id="link shut down, and lost",
        ),
        pytest.param(
            [
                "pci 0000:45:00.0: PCI bridge to [bus 41]",
                FATAL,
                RECOVERED.format("0000:45:00.0"),
            ],
            "healthy",
            id="the port of a switch",
        ),
    ],
)
def test_a_recovered_port_clears_what_it_reported(lines: list[str], expected: str) -> None:
    assert verdict(health(*lines)) == expected


@pytest.mark.parametrize(("step", "blamed"), [(1, {A}), (900, set())])
def test_an_instance_number_is_a_gpus_for_a_moment(step: int, blamed: set[str]) -> None:
    lines = (
        "NVRM: Xid (PCI:0000:41:00): 119, pid=5, name=x, Timeout after 6s of waiting for RPC "
        "response from GPU0 GSP! Expected function 76",
        "NVRM: GPU0 rpcSendMessage: rpcSendMessage failed with status 0x0000000f for fn 76!",
    )
    judged = health(*lines, gpus=[works(A), works(B)], step=step)
    lost = [fault for fault in judged.faults if fault.class_ == "gpu_lost"]
    assert {fault.address for fault in lost if fault.address} == blamed
    assert blamed or lost[0].candidates == (A, B)
    assert verdict(judged, B) == ("healthy" if blamed else "unknown")


# -- lines that are no kernel's -------------------------------------------------------------------


def test_lines_of_a_megabyte_do_not_take_hours() -> None:
    program = (
        "from ansible_collections.gpuhost.inference.plugins.module_utils._faults import judge\n"
        "from ansible_collections.gpuhost.inference.plugins.module_utils._kernel_log import "
        "read_blocks\n"
        "heads = ('ms after ', 'NVRM: ', 'nouveau 0000:41:00.0: ', 'AMD-Vi: [EVENT', 'DMAR: [',\n"
        "         'arm-smmu a: Unhandled context fault: ', 'INFO: task ', '[drm] ')\n"
        "parts = ('a', 'DMAR: [', 'nouveau x ', 'smmu ', 'kfsp', 'NVRM: Xid (', 'iova=0x1', ' ')\n"
        "for head in heads:\n"
        "    for part in parts:\n"
        "        line = head + part * (900000 // len(part))\n"
        "        judge(read_blocks([line.encode()]), None)\n"
    )
    # what is meant is "ends at all": one such line took hours
    subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": ":".join(path for path in sys.path if path)},
        check=True,
        timeout=300,
    )


# -- a start that gpu_reset wrote down ------------------------------------------------------------

FAILED = (
    "NVRM: GPU0 kfspWaitForResponse: FSP command timed out",
    f"NVRM: GPU {A}: RmInitAdapter failed! (0x62:0xffff:2168)",
)


@pytest.mark.parametrize(
    ("lines", "started", "expected"),
    [
        pytest.param([LOST], 5.0, "healthy", id="lost before"),
        pytest.param(FAILED, 5.0, "healthy", id="failed before"),
        pytest.param(FAILED, 1.5, "failed", id="failed after it"),
        pytest.param([LOST, *FAILED], 1.5, "failed", id="another fault after it"),
        pytest.param([FAILED[0]], 5.0, "healthy", id="nobody's, before"),
        pytest.param(
            [f"nvidia {A}: AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x1 address=0x5]"],
            5.0,
            "degraded",
            id="what no start ends",
        ),
    ],
)
def test_a_start_written_down_is_as_good_as_the_drivers(
    lines: list[str], started: float, expected: str
) -> None:
    records = log(*lines)
    found = collect(records, {A: started})
    judged = conclude(found, records.summary(), [works(A), works(B, has_fsp="no")])
    assert verdict(judged) == expected
    line = f"[drm] Initialized nvidia-drm 0.0.0 for {A} on minor 1"
    at = int(started)
    by_driver = health(*lines[:at], line, *lines[at:])
    assert [gpu.verdict for gpu in judged.gpus] == [gpu.verdict for gpu in by_driver.gpus]
