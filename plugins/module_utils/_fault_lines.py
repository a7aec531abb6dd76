# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.

"""Who speaks in a message; and those of the PCI core and of the IOMMU drivers, taken apart.

The latter are about any device; whether it is a GPU, or a bridge above one, is decided elsewhere.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

BDF = r"[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?:\.[0-7])?"
_SHORT = r"(?:[0-9a-f]{4}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]"  # as the IOMMU drivers write it
# Who says something: what a message begins with, for any user can have a whole message of a driver
# quoted in another (a mount option in a user namespace, the name of a USB device)
SPEAKER = re.compile(
    r"(?P<nvrm>NVRM:?\s+(?:GPU(?P<instance>\d{1,4})\s)?)"
    rf"|(?P<device>(?P<driver>[\w-]{{1,64}}) (?P<address>{BDF}): )"
    r"|(?P<iommu>(?=AMD-Vi: |DMAR: |arm-smmu)|iommu \w{1,64}: (?=AMD-Vi: ))"
    r"|(?P<firmware>(?=\{\d{1,9}\}\[Hardware Error\]:))"
    r"|(?P<drm>\[drm[\]:])"
    r"|(?P<task>INFO: task )"
    r"|(?P<stack>\s+(?:\[<\S{1,64}>\] )?(?:\? )?(?=nv_pci_remove))"
    r"|(?P<other>(?=nvidia(?!-nvswitch)[\w-]{0,64}: |vfio_bar_restore: ))"
)


@lru_cache(maxsize=1024)
def full_address(address: str) -> str:
    """Return a logged address in full form: the domain may be missing or have eight digits."""
    parts = address.lower().partition(".")
    fields = parts[0].split(":")
    if len(fields) < 2:
        return ""
    domain = int(fields[-3], 16) if len(fields) > 2 else 0
    return f"{domain:04x}:{fields[-2]}:{fields[-1]}.{parts[2] or '0'}"


# -- PCIe errors (drivers/pci/pcie/aer.c, dpc.c, err.c; drivers/firmware/efi/cper.c) ---------------

_SEVERITY = r"(?P<severity>(?:Un)?[Cc]orrect(?:ed|able)(?: \((?:Non-)?Fatal\))?)"
# all but the last are looked for behind the driver and the device
_RECEIVED = re.compile(
    rf"AER: (?:Multiple )?{_SEVERITY} error (?:received:|message received from) (?P<device>{BDF})"
)
_DETAIL = re.compile(rf"(?:AER: )?PCIe Bus Error: severity={_SEVERITY}")
_CONTAINED = re.compile(rf"DPC: containment event(?:.* received from (?P<source>{BDF}))?")
_RECOVERED = re.compile(r"AER: device recovery successful")
_FAILED = re.compile(r"AER: (?:device recovery|subordinate device reset) failed")
_UNRECOVERED = re.compile(r"(?:AER: )?can't recover \(no error_detected")
_MAKER = re.compile(r" *(?:AER: +)?device \[(?P<vendor>[0-9a-f]{4}):")
_OTHERS = {
    "link-contained": _CONTAINED,
    "recovered": _RECOVERED,
    "failed": _FAILED,
    "unrecovered": _UNRECOVERED,
    "vendor": _MAKER,
}
_FIRMWARE = re.compile(
    r"\{\d{1,9}\}\[Hardware Error\]:\s+(?:event severity: (?P<severity>\w+)"
    rf"|device_id: (?P<device>{BDF})|vendor_id: 0x(?P<vendor>[0-9a-f]{{4}}))"
)
_KINDS = {
    "corrected": "pcie-corrected",
    "correctable": "pcie-corrected",
    "recoverable": "pcie-nonfatal",  # as firmware says it (UEFI, common platform error record)
    "fatal": "pcie-fatal",
}


@dataclass(frozen=True)
class PcieLine:
    """One message about an error on PCIe.

    Attributes:
        what: an id in the table of kinds; `recovered`, `failed` (a port's recovery of what is
            below it) or `unrecovered` (a device's driver cannot recover it); `vendor` (who made the
            device); `severity` and `reported`, of an error that the firmware saw first.
        device: address of the device with the error; the port for `link-contained`, `recovered`
            and `failed`. Empty for `severity`.
        detail: one of several lines about one error, not the first.
        value: the vendor's id; the id in the table that a severity stands for; the address of the
            device that made a port cut its link.
    """

    what: str
    device: str
    detail: bool = False
    value: str = ""


def pcie_line(text: str, speaker: re.Match[str]) -> PcieLine | None:
    """Take a message about PCIe apart, `None` when it is another.

    Args:
        text: the message.
        speaker: who says it, found by `SPEAKER`.
    """
    if speaker["firmware"] is not None:
        return _by_firmware(text)
    if not any(
        word in text for word in ("AER:", "PCIe Bus Error", "DPC:", "status/mask", "can't r")
    ):
        return None
    at, device = speaker.end(), full_address(speaker["address"])
    received = _RECEIVED.match(text, at)
    if received:
        return PcieLine(_kind(received["severity"]), full_address(received["device"]))
    detail = _DETAIL.match(text, at)
    if detail:
        return PcieLine(_kind(detail["severity"]), device, detail=True)
    for what, pattern in _OTHERS.items():
        found = pattern.match(text, at)
        if found:
            groups = found.groupdict()
            value = groups.get("vendor") or full_address(groups.get("source") or "")
            return PcieLine(what, device, value=value)
    return None


def _by_firmware(text: str) -> PcieLine | None:
    """Take a line of an error that the firmware saw first; its lines share a number in braces."""
    found = _FIRMWARE.match(text)
    if not found:
        return None
    if found["device"]:
        return PcieLine("reported", full_address(found["device"]))
    if found["vendor"]:
        return PcieLine("vendor", "", value=found["vendor"])
    return PcieLine("severity", "", value=_KINDS.get(found["severity"].lower(), ""))


def _kind(severity: str) -> str:
    word = severity.lower()
    if word.startswith("c"):
        return _KINDS["corrected"]
    return _KINDS["fatal" if "(fatal)" in word else "recoverable"]


# -- IOMMU faults (drivers/iommu: amd/iommu.c, intel/dmar.c, arm/arm-smmu*) ------------------------

_AMD = re.compile(
    r"AMD-Vi: (?:Event logged )?\[(?P<event>[A-Z_]{4,})"
    rf"(?: device=(?P<device>{_SHORT}))?(?:.* (?:address|gpa)=(?P<place>0x[0-9a-f]+))?"
)
_INTEL = re.compile(
    rf"DMAR: (?:DMAR:)?\[(?P<event>[^\]]+)\] Request device \[(?P<device>{_SHORT})\]"
    r"(?:.*fault addr (?P<place>(?:0x)?[0-9a-f]+))?"
)
_ARM = re.compile(
    rf"arm-smmu\S* \S+: event: (?P<event>[FC]_\w+) client: (?P<device>{_SHORT})"
    r"(?:.*iova: (?P<place>0x[0-9a-f]+))?"
)
_ARM_OLD = re.compile(
    r"arm-smmu\S* \S+: Unhandled context fault: fsr=\S+ iova=(?P<place>0x[0-9a-f]+),"
    r" fsynr=\S+ cbfrsynra=0x(?P<stream>[0-9a-f]{1,8})\b"
)
# the event as four words of 64 bits, in lines of their own: the stream is in the first
_ARM_RECORD = re.compile(r"arm-smmu-v3 \S+: event 0x[0-9a-f]{2} received:")
_ARM_WORD = re.compile(r"arm-smmu-v3 \S+:\s+0x(?P<stream>[0-9a-f]{8})[0-9a-f]{8}\s*$")


@dataclass(frozen=True)
class IommuLine:
    """One fault that an IOMMU reported.

    Attributes:
        what: `iommu-fault`, `iommu-rmp` or `iommu-interrupt`; `record` when further lines hold the
            words of an event, and `word` for each of those.
        device: full address, empty when the message has none.
        driver: bound to it, when the message begins with it.
        place: the address it used.
        stream: number by which an Arm SMMU knows the device, when it says no more. Of the words
            only the first has one.
    """

    what: str
    device: str
    driver: str | None = None
    place: int | None = None
    stream: int | None = None


def iommu_line(text: str, speaker: re.Match[str]) -> IommuLine | None:
    """Take an IOMMU's report of a fault apart, `None` for another message.

    Args:
        text: the message.
        speaker: who says it, found by `SPEAKER`.
    """
    at = speaker.end()
    found = _AMD.match(text, at) or _INTEL.match(text, at) or _ARM.match(text, at)
    if found:
        what = "iommu-fault"
        if found["event"].startswith("RMP_"):
            what = "iommu-rmp"
        elif found["event"].startswith("INTR"):
            what = "iommu-interrupt"
        return IommuLine(
            what,
            full_address(speaker["address"] or found["device"] or ""),
            speaker["driver"],
            int(found["place"], 16) if found["place"] else None,
        )
    old = _ARM_OLD.match(text, at)
    if old is not None:
        return IommuLine(
            "iommu-fault", "", place=int(old["place"], 16), stream=int(old["stream"], 16)
        )
    if _ARM_RECORD.match(text, at):
        return IommuLine("record", "")
    word = _ARM_WORD.match(text, at)
    return IommuLine("word", "", stream=int(word["stream"], 16)) if word else None


def slot_of_stream(stream: int) -> str:
    """Return `bus:device.function` for a stream, which mostly is the device's PCI requester id."""
    return f"{stream >> 8 & 0xFF:02x}:{stream >> 3 & 0x1F:02x}.{stream & 7}"
