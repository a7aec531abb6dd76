"""Kernel logs made out of any bytes, and what must hold for each; for unit tests and fuzzing.

The bytes choose messages, the form each is written in, what is taken away, and where blocks are
cut; what is left of them is a log by itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from ansible_collections.gpuhost.inference.plugins.module_utils._faults import (
    Health,
    Subject,
    judge,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._kernel_log import read_blocks
from ansible_collections.gpuhost.inference.plugins.module_utils._log_forms import from_dmesg_json

GPUS = [
    Subject("0000:41:00.0", driver="nvidia", has_fsp="yes", initialised=True),
    Subject("0000:42:00.0", driver="nvidia", has_fsp="no", initialised=True),
    Subject("0000:c1:00.0", driver="vfio-pci", has_fsp="yes", bars=((0x1000, 0xFFFFFF),)),
]
BEGINNING = "Linux version 6.14.11-5-pve (build@proxmox)"
HARMLESS = (
    "usb 1-4: new high-speed USB device number 4",
    "pci 0000:41:00.0: [10de:2bb5] type 00 class 0x030000 PCIe Endpoint",
    "NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  595.45.04",
    "[drm] Initialized nvidia-drm 0.0.0 for 0000:41:00.0 on minor 1",
    "vfio-pci 0000:c1:00.0: enabling device (0000 -> 0003)",
    "NVRM: Xid (PCI:0000:42:00): 13, pid=77, name=python3, Graphics Exception",
    'systemd[1]: said "NVRM: \\ it fell" {é}',
    "",
)
FAULTS = (
    "NVRM: GPU0 kfspWaitForResponse: FSP command timed out",
    "NVRM: GPU 0000:41:00.0: RmInitAdapter failed! (0x62:0x65:2168)",
    "NVRM: GPU 0000:41:00.0: rm_init_adapter failed, device minor number 1",
    "NVRM: kfspDumpDebugState_GB202: GPU 0000:42:00",
    "NVRM: Xid (PCI:0000:42:00): 143, Error status 0xffffffff while polling for FSP boot complete",
    "NVRM: Xid (PCI:0000:41:00): 79, GPU has fallen off the bus.",
    "NVRM: Xid (PCI:0000:41:00): 154, GPU recovery action changed from 0x0 (None) to 0x2",
    "nvidia 0000:41:00.0: AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x1c address=0x2000]",
    "DMAR: [DMA Write NO_PASID] Request device [c1:00.0] fault addr 0x2000 [fault reason 0x71]",
    "vfio-pci 0000:c1:00.0: not ready 65535ms after FLR; giving up",
    "vfio-pci 0000:c1:00.0: Unable to change power state from D3cold to D0, device inaccessible",
    "NVRM: unexpected WPR2 already up, cannot proceed with booting GSP",
    "pcieport 0000:40:01.1: AER: Uncorrectable (Fatal) error message received from 0000:41:00.0",
    "pcieport 0000:40:01.1: DPC: containment event, status:0x1f01 source:0x4100",
)
LOSSES = (
    "** 21 printk messages dropped **",
    "AMD-Vi: IOMMU event log overflow",
    "arm_smmu_evtq_thread: 370 callbacks suppressed",
    "systemd-journald[300]: Missed 9 kernel messages",
)

Form = Callable[[int, str], str]


def _kmsg(at: int, text: str) -> str:
    escaped = "".join(
        char if char.isascii() and char.isprintable() and char != "\\" else f"\\x{byte:02x}"
        for char in text
        for byte in char.encode()
    )
    return f"4,{at},{at * 250000},-,caller=T{at};{escaped}\n SUBSYSTEM=pci"


def _journal(at: int, text: str) -> str:
    message = text if at % 3 else list(text.encode())
    entry = {
        "MESSAGE": message,
        "SYSLOG_IDENTIFIER": "kernel",
        "_SOURCE_MONOTONIC_TIMESTAMP": str(at * 250000),
        "__REALTIME_TIMESTAMP": str(1_790_000_000_000_000 + at * 250000),
        "_BOOT_ID": "6f0c1d5e2b7a4f3d9c8e7a6b5d4c3b2a",
    }
    return json.dumps(entry, separators=(",", ":"))


FORMS: dict[str, Form] = {
    "dmesg": lambda at, text: f"[{at / 4:12.6f}] {text}",
    "caller": lambda at, text: f"[{at / 4:12.6f}] [  T{at}] {text}",
    "delta": lambda at, text: f"[{at / 4:12.6f} <    0.250000>] {text}",
    "raw": lambda at, text: f"<4>[{at / 4:12.6f}] {text}",
    "decode": lambda at, text: f"kern  :warn  : [{at / 4:12.6f}] {text}",
    "ctime": lambda at, text: f"[Sun Nov 29 14:{at % 60:02}:12 2026] {text}",
    "human": lambda at, text: f"[Nov29 14:{at % 60:02}] {text}" if at % 2 else f"[  +0.25] {text}",
    "iso": lambda at, text: f"2026-11-29T14:{at % 60:02}:12,000000+00:00 {text}",
    "short": lambda at, text: f"Nov 29 14:{at % 60:02}:12 pve kernel: {text}",
    "monotonic": lambda at, text: f"[{at / 4:12.6f}] pve kernel: {text}",
    "rsyslog": lambda at, text: f"Nov 29 14:15:12 pve kernel: [{at / 4:12.6f}] {text}",
    "remote": lambda at, text: f"203.0.113.9: kern: warning: [2026-11-29T14:15:12.2Z]: {text}",
    "bare": lambda _at, text: text,
    "journal": _journal,
    "kmsg": _kmsg,
}


class Choices:
    """Bytes, taken one after the other; zeros when there are no more."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def below(self, limit: int) -> int:
        """Return a number from 0 to `limit` - 1."""
        self._at += 1
        return self._data[self._at - 1] % limit if self._at <= len(self._data) else 0

    def rest(self) -> bytes:
        """Return what was not used."""
        return self._data[self._at :]


def cut(data: bytes, choices: Choices) -> list[bytes]:
    """Cut bytes into blocks."""
    blocks, at = [], 0
    while at < len(data):
        size = 1 + choices.below(256) * (1 + choices.below(8))
        blocks.append(data[at : at + size])
        at += size
    return blocks


def check(data: bytes) -> None:
    """Make logs of these bytes and judge them.

    Raises:
        AssertionError: a GPU was called healthy that may not be, or the same log was read
            differently.
    """
    choices = Choices(data)
    made = (_anything, _whole, _beheaded, _with_a_gap, _mixed, _dmesg_json)
    made[choices.below(len(made))](choices)


def _judged(log: bytes, choices: Choices) -> Health:
    """Judge a log in one block and in several, with and without known GPUs."""
    whole = read_blocks([log])
    parts = read_blocks(cut(log, choices))
    assert list(whole) == list(parts)
    assert whole.summary() == parts.summary()
    judge(read_blocks([log]), None)
    judged = judge(read_blocks(cut(log, choices)), GPUS)
    assert [gpu.address for gpu in judged.gpus] == [gpu.address for gpu in GPUS]
    if not judged.log.complete:
        _none_is_healthy(judged)
    return judged


def _none_is_healthy(judged: Health) -> None:
    for gpu in judged.gpus:
        assert gpu.verdict != "healthy", (gpu, judged.log)
        assert gpu.fsp != "ok", (gpu, judged.log)


def _messages(choices: Choices, pool: tuple[str, ...]) -> list[str]:
    return [pool[choices.below(len(pool))] for _at in range(choices.below(20))]


def _written(messages: list[str], form: str) -> list[bytes]:
    write = FORMS[form]
    lines = [write(at, text).encode() + b"\n" for at, text in enumerate(messages)]
    return lines if choices_crlf(form) else [line.replace(b"\n", b"\r\n") for line in lines]


def choices_crlf(form: str) -> bool:
    """Tell whether a form keeps its line ends; the ring's is never saved by other systems."""
    return form in ("kmsg", "bare", "dmesg", "journal")


def _form(choices: Choices) -> str:
    return sorted(FORMS)[choices.below(len(FORMS))]


def _anything(choices: Choices) -> None:
    """Judge bytes as they are."""
    judged = _judged(choices.rest(), Choices(choices.rest()[::-1]))
    if b"Linux version" not in choices.rest() and not judged.log.complete:
        _none_is_healthy(judged)


def _whole(choices: Choices) -> None:
    """A complete log without a fault is worth something, whatever form it has."""
    lines = _written([BEGINNING, *_messages(choices, HARMLESS)], _form(choices))
    judged = _judged(b"".join(lines), choices)
    assert judged.log.complete, judged.log
    assert {gpu.verdict for gpu in judged.gpus} <= {"healthy", "unknown"}


def _beheaded(choices: Choices) -> None:
    """The beginning is missing, from some bytes of the first message to many lines."""
    form = _form(choices)
    lines = _written([BEGINNING, *_messages(choices, HARMLESS + FAULTS)], form)
    first = lines[0].index(b"Linux" if b"Linux" in lines[0] else b"[76,")
    log = b"".join(lines)[first + 1 + choices.below(256) :]
    if form == "kmsg":
        log = b"".join(lines)[len(lines[0]) :]  # half a record does not come out of the ring
    _none_is_healthy(_judged(log, choices))


def _with_a_gap(choices: Choices) -> None:
    """Messages are missing in between, and either a number or a note tells of it."""
    messages = [BEGINNING, *_messages(choices, HARMLESS + FAULTS), HARMLESS[0], HARMLESS[1]]
    at = 1 + choices.below(len(messages) - 2)
    if choices.below(2):
        lines = _written(messages, "kmsg")
        del lines[at]
    else:
        messages[at] = LOSSES[choices.below(len(LOSSES))]
        form = _form(choices)
        lines = _written(messages, form)
    _none_is_healthy(_judged(b"".join(lines), choices))


def _mixed(choices: Choices) -> None:
    """Lines of all forms and any bytes, without the beginning."""
    lines = []
    for at, text in enumerate(_messages(choices, HARMLESS + FAULTS + LOSSES), start=1):
        lines += _written([text], _form(choices)) if at % 3 else []
        lines.append(FORMS[_form(choices)](at, text).encode() + b"\n")
    rest = choices.rest().replace(b"Linux version", b"").replace(b",0,", b"")
    log = b"".join(lines).replace(b",0,", b",1,") + rest
    judged = _judged(log, choices)
    if not judged.log.complete:
        _none_is_healthy(judged)


def _dmesg_json(choices: Choices) -> None:
    """`dmesg --json`, cut off somewhere, or as it is."""
    messages = [BEGINNING, *_messages(choices, HARMLESS + FAULTS)]
    entries = [{"pri": 4, "time": at / 4, "msg": text} for at, text in enumerate(messages)]
    text = json.dumps({"dmesg": entries}, indent=3 if choices.below(2) else None).encode()
    text = text[: len(text) - choices.below(256)]
    converted = b"".join(from_dmesg_json(cut(text, choices)))
    assert converted == b"".join(from_dmesg_json([text]))
    judged = _judged(converted, choices)
    if b"version" not in text:
        _none_is_healthy(judged)
    list(from_dmesg_json(cut(choices.rest(), choices)))
