# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.

"""Findings about the IOMMU: group types, memory encryption, SEV-SNP, peer-to-peer DMA."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ansible_collections.gpuhost.inference.plugins.module_utils._finding import (
    Facts,
    Hit,
    Rule,
    for_vms,
    guest_name,
    laid_out,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._finding_facts import is_snp
from ansible_collections.gpuhost.inference.plugins.module_utils._gpu import Gpu
from ansible_collections.gpuhost.inference.plugins.module_utils._iommu import GROUPS
from ansible_collections.gpuhost.inference.plugins.module_utils._layout import Entry

_ABI = "kernel: Documentation/ABI/testing/sysfs-kernel-iommu_groups"
_AMD = "kernel: drivers/iommu/amd/init.c, iommu_snp_enable"
_CMDLINE = "/proc/cmdline"
_IOMMU_OFF = re.compile(r"(?:amd_|intel_)?iommu=(?:\w+,)*off\b")


def _snp_wanted(facts: Facts) -> Iterator[Entry]:
    return (entry for entry in facts.layout if entry.guest and entry.guest.sev_snp)


def _snp_with_passthrough(facts: Facts) -> Iterator[Hit]:
    if facts.mode == "passthrough":
        words = [word for word in facts.boot.cmdline if word.startswith("iommu")]
        evidence = f"default type identity; {_CMDLINE}: {' '.join(words) or 'no iommu word'}"
        for entry in _snp_wanted(facts):
            yield Hit(guest_name(entry), f"layout {entry.name} has sev_snp: true; {evidence}")


def _snp_not_active(facts: Facts) -> Iterator[Hit]:
    if facts.boot.snp is not True and facts.mode != "passthrough":
        said = "off" if facts.boot.snp is False else "not known"
        for entry in _snp_wanted(facts):
            yield Hit(
                guest_name(entry),
                f"layout {entry.name} has sev_snp: true; host SNP is {said} "
                "(/sys/module/kvm_amd/parameters/sev_snp, flags in /proc/cpuinfo)",
            )


def _snp_old_qemu(facts: Facts) -> Iterator[Hit]:
    version = facts.extras.qemu
    parts = re.match(r"(\d+)\.(\d+)", version or "")
    if parts is None or (int(parts[1]), int(parts[2])) >= (9, 2):
        return
    by_layout = {guest_name(entry) for entry in _snp_wanted(facts)}
    by_config = {
        f"qemu {guest.vmid}"
        for guest in facts.guests or ()
        if is_snp(guest) and any(key.startswith("hostpci") for key, _value in guest.config)
    }
    for name in sorted(by_layout | by_config):
        yield Hit(name, f"it is to have SEV-SNP and GPUs; /var/lib/dpkg/status: {version}")


def _identity_groups(facts: Facts) -> Iterator[tuple[Gpu, str]]:
    for gpu in facts.gpus:
        if gpu.iommu_group and gpu.iommu_group.type == "identity":
            yield gpu, f"IOMMU group {gpu.iommu_group.number} has type identity"


def _identity_with_snp(facts: Facts) -> Iterator[Hit]:
    if facts.boot.snp:
        for gpu, evidence in _identity_groups(facts):
            yield Hit(gpu.address, f"{evidence}; kvm_amd sev_snp is Y")


def _identity_with_sme(facts: Facts) -> Iterator[Hit]:
    if facts.sme:
        for gpu, evidence in _identity_groups(facts):
            yield Hit(gpu.address, f"{evidence}; memory encryption (SME) is active")


def _identity_with_fsp(facts: Facts) -> Iterator[Hit]:
    for gpu, evidence in _identity_groups(facts):
        if gpu.driver == "nvidia" and gpu.has_fsp != "no":
            yield Hit(gpu.address, f"{evidence}; its FSP: {gpu.has_fsp}")


def _sme_with_nvidia(facts: Facts) -> Iterator[Hit]:
    identity = {gpu.address for gpu, _evidence in _identity_groups(facts)}
    for gpu in facts.gpus if facts.sme else ():
        if gpu.driver == "nvidia" and gpu.address not in identity:
            yield Hit(gpu.address, "driver nvidia; memory encryption (SME) is active")


def _iommu_absent(facts: Facts) -> Iterator[Hit]:
    if facts.groups is not None and not facts.groups and facts.gpus:
        words = [word for word in facts.boot.cmdline if "iommu" in word]
        said = f"; {_CMDLINE}: {' '.join(words)}" if words else ""
        yield Hit(GROUPS, f"there is no group{said}")


def _iommu_off_many_cpus(facts: Facts) -> Iterator[Hit]:
    cpus = facts.extras.cpus
    if cpus is None or cpus <= 255:
        return
    loader = facts.boot.boot_loader
    for file, words in ((_CMDLINE, facts.boot.cmdline), (loader.file, loader.wanted)):
        off = [word for word in words or () if _IOMMU_OFF.match(word)]
        if file and off:
            yield Hit(file, f"{' '.join(off)}; this machine may have {cpus} processors")


def _amd_iommu_on(facts: Facts) -> Iterator[Hit]:
    if "amd_iommu=on" in facts.boot.cmdline:
        yield Hit(_CMDLINE, "amd_iommu=on")


def _direct_region(facts: Facts) -> Iterator[Hit]:
    reasons = {gpu.address: said for gpu, said in for_vms(facts)}
    for entry, gpu in laid_out(facts):
        now = gpu.iommu_group.type if gpu.iommu_group else None
        if entry.iommu_type not in (None, now):
            reasons.setdefault(
                gpu.address, f"layout {entry.name} wants {entry.iommu_type}, it is {now}"
            )
    for gpu in facts.gpus:
        group = gpu.iommu_group
        direct = [r for r in group.reserved_regions if r.type == "direct"] if group else []
        if group and direct and gpu.address in reasons:
            regions = ", ".join(f"{region.start:#x}-{region.end:#x}" for region in direct)
            yield Hit(
                gpu.address,
                f"{GROUPS}/{group.number}/reserved_regions: {regions} direct; "
                f"{reasons[gpu.address]}",
            )


def _p2p_redirected(facts: Facts) -> Iterator[Hit]:
    for guest in facts.guests or ():
        mine = [
            gpu
            for gpu in facts.gpus
            if ("lxc", guest.vmid) in {(owner.kind, owner.vmid) for owner in gpu.owners}
            and gpu.iommu_group
            and (gpu.iommu_group.type or "").startswith("DMA")
        ]
        ports = [
            f"{facts.extras.redirecting[gpu.address]} (above {gpu.address})"
            for gpu in mine
            if gpu.address in facts.extras.redirecting
        ]
        if guest.kind == "lxc" and len(mine) > 1 and ports:
            yield Hit(
                f"lxc {guest.vmid}",
                f"{len(mine)} of its GPUs are in translated groups, and ACS redirects peer-to-peer "
                f"requests at {', '.join(ports)}",
            )


RULES = (
    Rule(
        "snp-with-passthrough",
        "error",
        _snp_with_passthrough,
        "With identity as the default type the AMD IOMMU driver turns SEV-SNP off for the host, so "
        "the confidential VM cannot start.",
        "Remove iommu=pt (or iommu.passthrough=1) from the kernel command line and reboot, or give "
        "up sev_snp in the layout.",
        _AMD,
    ),
    Rule(
        "snp-not-active",
        "error",
        _snp_not_active,
        "The layout wants a confidential VM, and this host does not offer SEV-SNP.",
        "Enable SEV-SNP in the firmware, do not use iommu=pt nor amd_iommu=pgtbl_v2, and see that "
        "kvm_amd is loaded.",
        _AMD,
    ),
    Rule(
        "snp-old-qemu",
        "error",
        _snp_old_qemu,
        "QEMU before 9.2 refuses to start a confidential VM with PCI devices: it cannot discard "
        "memory that VFIO has mapped.",
        "Update pve-qemu-kvm to 9.2 or later.",
        "https://github.com/kubevirt/kubevirt/issues/16407",
    ),
    Rule(
        "identity-with-snp",
        "error",
        _identity_with_snp,
        "With SEV-SNP on no group may have type identity, and kernels from 6.13 on do not always "
        "refuse it. GPUs were seen whose security processor (FSP) then failed until power-off.",
        "Set the type back to auto with the GPU unbound (iommu_group), remove what sets it at "
        "boot, and reboot; check the FSP verdict afterwards.",
        "kernel: drivers/iommu/amd/iommu.c, amd_iommu_def_domain_type",
    ),
    Rule(
        "identity-with-sme",
        "error",
        _identity_with_sme,
        "With memory encryption a device that is not translated has to set the encryption bit in "
        "each address itself. GPUs do not, so they read ciphertext.",
        "Set the type to DMA-FQ, or boot without mem_encrypt=on.",
        "kernel: Documentation/arch/x86/amd-memory-encryption.rst",
    ),
    Rule(
        "identity-with-fsp",
        "warning",
        _identity_with_fsp,
        "On some platforms the security processor (FSP) of a GPU in an identity group fails to "
        "start it, until the power is cut. On others it works.",
        "Look at the FSP verdict after each start. If it fails: set the type to auto, remove what "
        "sets it at boot, and cut the power.",
        "open-gpu-kernel-modules: src/nvidia/src/kernel/gpu/fsp/kern_fsp.c",
    ),
    Rule(
        "sme-with-nvidia",
        "warning",
        _sme_with_nvidia,
        "The NVIDIA driver's DMA was reported to fail with memory encryption (SME), in which type "
        "of group was not settled.",
        "Watch the health verdict after each start; if in doubt boot without mem_encrypt=on.",
        "kernel: Documentation/arch/x86/amd-memory-encryption.rst",
    ),
    Rule(
        "iommu-absent",
        "error",
        _iommu_absent,
        "There are no IOMMU groups, so no GPU can be given to a VM. What counts is what the kernel "
        "did, not which words are on its command line.",
        "Enable the IOMMU (AMD-Vi, VT-d) in the firmware; remove iommu=off, amd_iommu=off and "
        "intel_iommu=off.",
        "kernel: Documentation/admin-guide/kernel-parameters.txt",
    ),
    Rule(
        "iommu-off-many-cpus",
        "error",
        _iommu_off_many_cpus,
        "With more than 255 processors interrupts need the IOMMU's remapping: without it the "
        "kernel leaves processors out, or does not start.",
        "Remove the word. Set the type of single groups instead, or iommu=pt where no SEV-SNP "
        "guest is wanted.",
        "kernel: arch/x86/kernel/apic/apic.c, try_to_enable_x2apic",
    ),
    Rule(
        "amd-iommu-on",
        "note",
        _amd_iommu_on,
        "The kernel knows no option amd_iommu=on: it says so in its log and goes on. An AMD IOMMU "
        "is on by default.",
        "It may be removed at the next change of the command line.",
        "kernel: drivers/iommu/amd/init.c, parse_amd_iommu_options",
    ),
    Rule(
        "direct-region",
        "warning",
        _direct_region,
        "The firmware wants memory of the GPU's group mapped one to one. For such a device the "
        "kernel refuses VFIO, and may refuse another type with no better word than EINVAL.",
        "Look for a firmware setting (RMRR, IVMD, USB or management engine emulation on that slot) "
        "or use another slot.",
        "kernel: drivers/iommu/iommu.c, require_direct",
    ),
    Rule(
        "p2p-redirected",
        "note",
        _p2p_redirected,
        "Direct copies between these GPUs go up to the IOMMU and are translated there. They were "
        "seen to hang, to fault, and to complete with wrong data.",
        "Verify peer-to-peer copies by content (playbook check_p2p), or switch them off in the "
        "server (role sglang: sglang_p2p_fallback: true). Where SEV-SNP, SME and the FSP allow "
        "it, identity for their groups avoids the translation, which the playbook identity_trial "
        "tries for one boot. ACS can be changed at boot only.",
        "kernel: Documentation/admin-guide/kernel-parameters.txt, pci=config_acs=",
    ),
)
