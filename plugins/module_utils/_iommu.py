# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.

"""IOMMU groups: their type, and the kernel's rules for changing it (drivers/iommu/iommu.c)."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from dataclasses import dataclass

from ansible_collections.gpuhost.inference.plugins.module_utils._errors import (
    GpuHostError,
    UnreadableError,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._kernel_write import Outcome
from ansible_collections.gpuhost.inference.plugins.module_utils._pci import read_device
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader

GROUPS = "/sys/kernel/iommu_groups"
TYPES = ("identity", "DMA", "DMA-FQ", "auto")

# These leave DMA to somebody else and do not hold the group until that somebody opens it.
_SELF_MANAGED = re.compile(r"^pcieport$|^pci-stub$|vfio[-_]pci$")


@dataclass(frozen=True)
class Member:
    """One device of a group."""

    address: str
    class_: str
    id: str
    driver: str | None
    is_gpu: bool


@dataclass(frozen=True)
class Region:
    """Bus addresses the firmware or the IOMMU keeps for itself; `direct` ones force a type."""

    start: int
    end: int
    type: str  # direct, direct-relaxable, reserved, msi


@dataclass(frozen=True)
class IommuGroup:
    """One group. Its number may differ after the next boot: remember addresses instead."""

    number: int
    type: str | None  # identity, DMA, DMA-FQ, blocked, unmanaged; None before kernel 5.11
    members: tuple[Member, ...]
    reserved_regions: tuple[Region, ...]


@dataclass(frozen=True)
class HostMode:
    """What the whole host allows: memory encryption, and what a group gets by default."""

    snp: bool
    sme: bool
    default_type: str | None


def read_group(host: Reader, number: int) -> IommuGroup:
    """Return one group.

    Raises:
        UnreadableError: part of it cannot be read, so nobody may conclude that it is free.
    """
    at = f"{GROUPS}/{number}"
    members = []
    for address in host.names(f"{at}/devices"):
        device = read_device(host, address)
        if device is None:
            raise UnreadableError(f"{address} of IOMMU group {number} vanished while it was read")
        members.append(
            Member(address, device.class_, device.id, device.driver, is_gpu=device.is_gpu)
        )
    regions = [line.split() for line in (host.text(f"{at}/reserved_regions") or "").splitlines()]
    return IommuGroup(
        number=number,
        type=host.text(f"{at}/type"),
        members=tuple(members),
        reserved_regions=tuple(
            Region(int(start, 16), int(end, 16), kind) for start, end, kind in regions
        ),
    )


def read_groups(host: Reader) -> list[IommuGroup]:
    """Return all groups by number; none means that no IOMMU is in use."""
    numbers = sorted(int(name) for name in host.names(GROUPS) if name.isdigit())
    return [read_group(host, number) for number in numbers]


def read_mode(host: Reader) -> HostMode:
    """Return SEV-SNP and SME state and the computed default type of the host.

    SNP is what kvm_amd says it offers. SME counts only when asked for on the command line: the
    processor's flag says no more than that it could.
    """
    words = (host.text("/proc/cmdline") or "").split()
    return HostMode(
        snp=host.text("/sys/module/kvm_amd/parameters/sev_snp") in ("Y", "1"),
        sme="mem_encrypt=on" in words,
        default_type=default_type(host),
    )


def default_type(host: Reader) -> str | None:
    """Compute the type a group gets at boot and by writing `auto`; `None` when it is not known.

    The last word of the command line wins, then the kernel's build options, as in
    `iommu_subsys_init`. An emulated IOMMU always flushes strictly: its driver refuses batching
    when the hardware caches absent entries (AMD capability bit 26, Intel capability bit 7).
    A single device may still get another type, when its vendor driver or firmware demands it.
    """
    if not host.names(GROUPS):
        return None
    words = (host.text("/proc/cmdline") or "").split()
    build = host.text(f"/boot/config-{host.text('/proc/sys/kernel/osrelease')}")
    passthrough, strict = _asked(words)
    if passthrough is None and build is not None:
        passthrough = _built(build, "PASSTHROUGH") and "mem_encrypt=on" not in words
    if passthrough:
        return "identity"
    if strict is None and build is not None:
        strict = _built(build, "DMA_STRICT")
    if _caches_absent_entries(host):
        strict = True
    if passthrough is None or strict is None:
        return None
    return "DMA" if strict else "DMA-FQ"


def _asked(words: list[str]) -> tuple[bool | None, bool | None]:
    """Return (passthrough, strict) as the command line asks for, `None` where it does not."""
    passthrough: bool | None = None
    strict: bool | None = None
    for word in words:
        name, _equals, value = word.partition("=")
        options = value.split(",")
        if name == "iommu" and {"pt", "nopt"} & set(options):
            passthrough = [option for option in options if option in ("pt", "nopt")][-1] == "pt"
        elif name == "iommu.passthrough" and value:
            passthrough = _is_yes(value)
        elif name == "iommu.strict" and value:
            strict = _is_yes(value)
        elif (name == "amd_iommu" and "fullflush" in options) or (
            name == "intel_iommu" and "strict" in options
        ):
            strict = True
    return passthrough, strict


def _is_yes(value: str) -> bool:
    return value[0] in "1yYtT" or value.lower() == "on"


def _built(config: str, option: str) -> bool:
    return re.search(rf"^CONFIG_IOMMU_DEFAULT_{option}=y$", config, re.MULTILINE) is not None


def _caches_absent_entries(host: Reader) -> bool:
    for name in host.names("/sys/class/iommu"):
        at = f"/sys/class/iommu/{name}"
        for folder, bit in (("amd-iommu", 26), ("intel-iommu", 7)):
            capability = host.text(f"{at}/{folder}/cap")
            if capability and int(capability, 16) >> bit & 1:
                return True
    return False


def target_type(group: IommuGroup, wanted: str, mode: HostMode) -> str:
    """Return the type a group is to have; `auto` stands for the one it would get at boot.

    Raises:
        GpuHostError: this kernel has no types, or the boot default is not known.
    """
    name = f"IOMMU group {group.number} ({', '.join(member.address for member in group.members)})"
    if group.type is None:
        raise GpuHostError(f"{name} has no type file: kernel 5.11 or later is needed")
    target = mode.default_type if wanted == "auto" else wanted
    if target is None:
        raise GpuHostError(
            f"{name}: the boot default that auto stands for cannot be computed, because the "
            "command line does not name it and the kernel's /boot/config is missing; name a type"
        )
    return target


def needs_idle_group(now: str | None, target: str) -> bool:
    """Tell whether a change needs a group without owner; flushing lazily is the one that does not.

    Writing the present type is refused by the kernel like any other change, so it is never tried.
    """
    return (now, target) != ("DMA", "DMA-FQ")


def holds_group(driver: str | None, release: str) -> bool:
    """Tell whether a bound driver bars a change of type; before 6.4 each does, also vfio-pci."""
    if driver is None:
        return False
    return is_old(release) or not _SELF_MANAGED.search(driver)


def is_old(release: str) -> bool:
    """Tell whether a kernel is older than 6.4, where the rules for changing a type became new."""
    version = re.match(r"(\d+)\.(\d+)", release)
    return version is not None and (int(version[1]), int(version[2])) < (6, 4)


def identity_risks(mode: HostMode, *, fsp: bool) -> Iterator[tuple[str, str, str]]:
    """Yield guard, evidence and remedy of each reason against identity.

    Args:
        mode: of the host.
        fsp: a GPU of the group has a security processor, or may have one.
    """
    if mode.snp:
        yield (
            "snp-identity",
            "SEV-SNP is on (kvm_amd sev_snp), which allows identity for no device; some kernels "
            "only warn",
            "keep a translated type, or give SEV-SNP up for this host",
        )
    if mode.sme:
        yield (
            "sme-identity",
            "memory encryption is on (mem_encrypt=on), so under identity the GPU would read "
            "encrypted memory",
            "keep a translated type",
        )
    if fsp:
        yield (
            "fsp-identity",
            "it boots through an FSP, which is known to fail under identity on some platforms "
            "until power is cut",
            "keep a translated type",
        )


def explain_refusal(group: IommuGroup, outcome: Outcome, wanted: str) -> str:
    """Say in a sentence why the kernel did not take a type; the meanings changed in Linux 6.4."""
    drivers = ", ".join(
        f"{member.address} {member.driver or 'without driver'}" for member in group.members
    )
    meanings = {
        errno.EPERM: "EPERM, which is no matter of rights: a driver of the group uses DMA, or "
        f"VFIO has the group open (members: {drivers})",
        errno.EBUSY: f"EBUSY: a driver is bound, and kernels before 6.4 count every driver, "
        f"vfio-pci too (members: {drivers}); unbind them all",
        errno.EACCES: "EACCES: this needs root with CAP_SYS_ADMIN and CAP_SYS_RAWIO, on the host "
        "itself and not in a container",
        errno.ENODEV: "ENODEV: the device or its group vanished; look at the kernel log",
        errno.EINVAL: "EINVAL: " + _invalid(group),
    }
    if outcome.state == "stuck":
        reason = (
            "the write has not returned and is pending in the kernel, probably behind a hung "
            "unbind; it may still take effect, and only a reboot ends it"
        )
    else:
        reason = f"the kernel answers {meanings.get(outcome.errno or 0, outcome.detail)}"
    return f"type of IOMMU group {group.number} was not set to {wanted}: {reason}"


def _invalid(group: IommuGroup) -> str:
    direct = [region for region in group.reserved_regions if region.type == "direct"]
    if direct:
        regions = ", ".join(f"{region.start:#x}-{region.end:#x}" for region in direct)
        return f"firmware keeps direct-mapped regions ({regions}), which force another type"
    if len(group.members) > 1:
        return (
            f"kernels before 6.4 cannot change a group of several devices, and this one has "
            f"{len(group.members)}; later kernels say so when the vendor's IOMMU driver demands "
            "another type"
        )
    return (
        "the IOMMU driver demands another type (SEV-SNP, PASID, untrusted port), or this kernel "
        "does not know the word (DMA-FQ: 5.15)"
    )
