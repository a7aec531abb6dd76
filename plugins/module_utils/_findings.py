# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.

"""What is wrong or risky on a host: one rule per kind of finding, all in the table `RULES`.

A rule is a plain function over the facts. It yields a `Hit` for each subject it has evidence
against, and stays silent about what could not be read (`part-unread` and `health-unknown` speak
of that).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ansible_collections.gpuhost.inference.plugins.module_utils._boot import (
    Boot,
    blocked,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._faults import GpuHealth, Health
from ansible_collections.gpuhost.inference.plugins.module_utils._gpu import Gpu
from ansible_collections.gpuhost.inference.plugins.module_utils._iommu import IommuGroup, Member
from ansible_collections.gpuhost.inference.plugins.module_utils._layout import Entry
from ansible_collections.gpuhost.inference.plugins.module_utils._owners import Guest, Owner
from ansible_collections.gpuhost.inference.plugins.module_utils._pci import slot_of

SEVERITIES = ("error", "warning", "note")


@dataclass(frozen=True)
class Facts:
    """What the rules judge. A part that could not be read is `None` and named in `unread`."""

    boot: Boot
    mode: str
    sme: bool | None
    default_type: str | None
    gpus: Sequence[Gpu]
    groups: Sequence[IommuGroup] | None
    guests: Sequence[Guest] | None
    health: Health
    layout: Sequence[Entry]
    unread: Sequence[str]


@dataclass(frozen=True)
class Hit:
    """One subject a rule speaks about, with what was read and where; `remedy` if it is special."""

    subject: str
    evidence: str
    remedy: str | None = None


@dataclass(frozen=True)
class Rule:
    """One kind of finding. The texts are for people: what it means, what to do, who says so."""

    id: str
    severity: str
    check: Callable[[Facts], Iterable[Hit]]
    why: str
    remedy: str
    reference: str


@dataclass(frozen=True)
class Finding:
    """One judgement about a host."""

    id: str
    severity: str
    subject: str
    evidence: str
    why: str
    remedy: str
    reference: str


def find(facts: Facts) -> list[Finding]:
    """Return the findings of all rules, errors first, then by rule and subject."""
    found = [
        Finding(
            rule.id,
            rule.severity,
            hit.subject,
            hit.evidence,
            rule.why,
            hit.remedy or rule.remedy,
            rule.reference,
        )
        for rule in RULES
        for hit in rule.check(facts)
    ]
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))


def host_mode(
    groups: Sequence[IommuGroup] | None,
    default_type: str | None,
    snp: bool | None,
    sme: bool | None,
) -> str:
    """Name how a host treats DMA, which decides what its groups may be set to.

    `off`: no IOMMU. `passthrough`: identity for all by default, no SEV-SNP guests. `snp`: SEV-SNP,
    so translated for all. `sme`: memory encryption, so a device must be translated. `translated`:
    neither, so a group may be set to identity. `unknown`: one of these could not be told.
    """
    if groups is not None and not groups:
        return "off"
    if default_type == "identity":
        return "passthrough"
    if snp:
        return "snp"
    if sme:
        return "sme"
    if groups is None or default_type is None or snp is None or sme is None:
        return "unknown"
    return "translated"


def _snp_wanted(facts: Facts) -> Iterator[Entry]:
    return (entry for entry in facts.layout if entry.guest and entry.guest.sev_snp)


def _snp_with_passthrough(facts: Facts) -> Iterator[Hit]:
    if facts.mode == "passthrough":
        words = [word for word in facts.boot.cmdline if word.startswith("iommu")]
        evidence = f"default type identity; /proc/cmdline: {' '.join(words) or 'no iommu word'}"
        for entry in _snp_wanted(facts):
            yield Hit(_guest_name(entry), f"layout {entry.name} has sev_snp: true; {evidence}")


def _snp_not_active(facts: Facts) -> Iterator[Hit]:
    if facts.boot.snp is not True and facts.mode != "passthrough":
        said = "off" if facts.boot.snp is False else "not known"
        for entry in _snp_wanted(facts):
            yield Hit(
                _guest_name(entry),
                f"layout {entry.name} has sev_snp: true; host SNP is {said} "
                "(/sys/module/kvm_amd/parameters/sev_snp, flags in /proc/cpuinfo)",
            )


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


def _no_gpu(facts: Facts) -> Iterator[Hit]:
    if not facts.gpus and not facts.unread:
        yield Hit("host", "no NVIDIA display device on the PCI bus")


def _sme_with_nvidia(facts: Facts) -> Iterator[Hit]:
    identity = {gpu.address for gpu, _evidence in _identity_groups(facts)}
    for gpu in facts.gpus if facts.sme else ():
        if gpu.driver == "nvidia" and gpu.address not in identity:
            yield Hit(gpu.address, "driver nvidia; memory encryption (SME) is active")


def _iommu_absent(facts: Facts) -> Iterator[Hit]:
    if facts.groups is not None and not facts.groups and facts.gpus:
        words = [word for word in facts.boot.cmdline if "iommu" in word]
        said = f"; /proc/cmdline: {' '.join(words)}" if words else ""
        yield Hit("host", f"/sys/kernel/iommu_groups is empty{said}")


def _amd_iommu_on(facts: Facts) -> Iterator[Hit]:
    if "amd_iommu=on" in facts.boot.cmdline:
        yield Hit("host", "/proc/cmdline: amd_iommu=on")


def _leftover_ids(facts: Facts) -> Iterator[Hit]:
    for word in facts.boot.cmdline:
        if re.match(r"vfio[-_]pci\.ids=", word) and "10de:" in word.lower():
            yield Hit("/proc/cmdline", word)
    for line in facts.boot.modprobe:
        if (
            line.command == "options"
            and line.module == "vfio_pci"
            and "10de:" in line.value.lower()
        ):
            yield Hit(line.file, line.place)


def _leftover_virqfd(facts: Facts) -> Iterator[Hit]:
    for file, module in facts.boot.etc_modules:
        if module == "vfio_virqfd":
            yield Hit(file, f"{file} lists vfio_virqfd")


def _install_hook(facts: Facts) -> Iterator[Hit]:
    for line in facts.boot.modprobe:
        if line.command == "install" and line.module == "nvidia" and "gpuhost" not in line.file:
            yield Hit(line.file, line.place)


def _rival_driver(facts: Facts) -> Iterator[Hit]:
    for driver in facts.boot.rivals if facts.gpus else ():
        if not blocked(facts.boot, driver):
            now = "loaded now" if driver in facts.boot.modules else "not loaded now"
            yield Hit(driver, f"no blacklist line in modprobe.d, none on /proc/cmdline; {now}")


def _configured(gpu: Gpu, kind: str | None = None) -> Iterator[Owner]:
    """Yield the owners of a GPU by guest configuration."""
    for owner in gpu.owners:
        if owner.source == "config" and kind in (None, owner.kind):
            yield owner


def _vm_gpu_on_host_driver(facts: Facts) -> Iterator[Hit]:
    for gpu in facts.gpus:
        if gpu.driver not in (None, "vfio-pci"):
            for owner in _configured(gpu, "qemu"):
                yield Hit(gpu.address, f"VM {owner.vmid}: {owner.detail}; driver {gpu.driver}")


def _two_owners(facts: Facts) -> Iterator[Hit]:
    for gpu in facts.gpus:
        owners = {(owner.kind, owner.vmid): owner.detail for owner in _configured(gpu)}
        if len(owners) > 1 and any(kind == "qemu" for kind, _vmid in owners):
            listed = [f"{kind} {vmid}: {detail}" for (kind, vmid), detail in sorted(owners.items())]
            yield Hit(gpu.address, "; ".join(listed))


def _container_node_missing(facts: Facts) -> Iterator[Hit]:
    minors = {gpu.device_minor for gpu in facts.gpus if gpu.driver == "nvidia"}
    if None in minors or not facts.gpus:
        return  # which nodes there are is not known
    for guest in facts.guests or ():
        for key, value in guest.config if guest.kind == "lxc" else ():
            node = re.match(r"(?:path=)?/dev/nvidia(\d+)(?:,|$)", value)
            if key.startswith("dev") and node and int(node[1]) not in minors:
                yield Hit(
                    f"lxc {guest.vmid}",
                    f"{guest.path}: {key}: {value}; no GPU on driver nvidia has minor {node[1]}",
                )


def _driverless_twin(facts: Facts) -> Iterator[Hit]:
    claimed = {gpu.id: gpu for gpu in facts.gpus if any(_configured(gpu, "qemu"))}
    for gpu in facts.gpus:
        twin = claimed.get(gpu.id)
        if gpu.driver is None and not gpu.driver_override and twin and not any(_configured(gpu)):
            yield Hit(
                gpu.address,
                f"no driver, no driver_override, id {gpu.id} like {twin.address}, "
                f"which VM {min(owner.vmid for owner in _configured(twin, 'qemu'))} claims",
            )


def _foreign_member(facts: Facts) -> Iterator[Hit]:
    for gpu in facts.gpus:
        members = gpu.iommu_group.members if gpu.iommu_group else ()
        foreign = [member for member in members if _is_foreign(member, gpu.address)]
        if foreign:
            listed = [f"{m.address} ({m.id}, class {m.class_}, {m.driver})" for m in foreign]
            yield Hit(
                gpu.address,
                f"IOMMU group {gpu.iommu_group and gpu.iommu_group.number} also holds "
                + ", ".join(listed),
            )


def _is_foreign(member: Member, address: str) -> bool:
    """Tell whether a member is an endpoint of another card; bridges never bar a VM."""
    return not member.class_.startswith("0x06") and slot_of(member.address) != slot_of(address)


def _type_differs(facts: Facts) -> Iterator[Hit]:
    for entry, gpu in _laid_out(facts):
        wanted = facts.default_type if entry.iommu_type == "auto" else entry.iommu_type
        now = gpu.iommu_group.type if gpu.iommu_group else None
        if wanted and now != wanted:
            yield Hit(gpu.address, f"type is {now}, layout {entry.name} wants {entry.iommu_type}")


def _driver_differs(facts: Facts) -> Iterator[Hit]:
    for entry, gpu in _laid_out(facts):
        now = gpu.driver or "none"
        if now != entry.driver:
            yield Hit(gpu.address, f"driver is {now}, layout {entry.name} wants {entry.driver}")


def _guest_differs(facts: Facts) -> Iterator[Hit]:
    for entry, gpu in _laid_out(facts):
        if not entry.guest or (entry.guest.kind == "lxc" and gpu.driver != "nvidia"):
            continue  # without its driver a GPU has no node that a container could list
        have = {(owner.kind, owner.vmid) for owner in _configured(gpu)}
        wanted = (entry.guest.kind, entry.guest.vmid)
        if have != {wanted}:
            named = ", ".join(f"{kind} {vmid}" for kind, vmid in sorted(have)) or "no guest"
            yield Hit(
                gpu.address, f"{named} names it, layout {entry.name} wants {_guest_name(entry)}"
            )


def _laid_out(facts: Facts) -> Iterator[tuple[Entry, Gpu]]:
    gpus: Mapping[str, Gpu] = {gpu.address: gpu for gpu in facts.gpus}
    for entry in facts.layout:
        for address in entry.addresses:
            yield entry, gpus[address]


def _guest_name(entry: Entry) -> str:
    return f"{entry.guest.kind} {entry.guest.vmid}" if entry.guest else "no guest"


def _fsp_failed(facts: Facts) -> Iterator[Hit]:
    return _judged(facts, lambda gpu: gpu.fsp == "failed")


def _gpu_failed(facts: Facts) -> Iterator[Hit]:
    return _judged(facts, lambda gpu: gpu.fsp != "failed" and gpu.verdict in ("failed", "lost"))


def _gpu_degraded(facts: Facts) -> Iterator[Hit]:
    return _judged(facts, lambda gpu: gpu.fsp != "failed" and gpu.verdict == "degraded")


def _health_unknown(facts: Facts) -> Iterator[Hit]:
    return _judged(facts, lambda gpu: gpu.verdict == "unknown")


def _judged(facts: Facts, guilty: Callable[[GpuHealth], bool]) -> Iterator[Hit]:
    """Yield the GPUs with such a verdict, with the line behind it and what helps against that."""
    remedies = {fault.address: fault.remedy for fault in facts.health.faults if fault.current}
    for gpu in facts.health.gpus:
        if guilty(gpu):
            said = "; ".join(filter(None, (gpu.reason, *gpu.evidence[:1])))
            yield Hit(gpu.address, said, remedies.get(gpu.address))


def _fault_unattributed(facts: Facts) -> Iterator[Hit]:
    for fault in facts.health.unattributed:
        if fault.current:
            which = f"; it may be about {', '.join(fault.candidates)}" if fault.candidates else ""
            yield Hit(fault.id, f"{fault.line}{which}", fault.remedy)


def _link_narrow(facts: Facts) -> Iterator[Hit]:
    for gpu in facts.gpus:
        width, best = gpu.link.width, gpu.link.max_width
        if width and best and width < best:
            yield Hit(gpu.address, f"width x{width} of x{best}")


def _reboot_pending(facts: Facts) -> Iterator[Hit]:
    pending, file = facts.boot.pending, facts.boot.boot_loader.file
    if pending.reboot_required:
        parts = (("not running yet", pending.missing), ("still running", pending.extra))
        said = "; ".join(f"{what}: {' '.join(words)}" for what, words in parts if words)
        yield Hit("host", f"{file} compared with /proc/cmdline: {said}")


def _part_unread(facts: Facts) -> Iterator[Hit]:
    for sentence in facts.unread:
        yield Hit(sentence.split()[0], sentence)


_ABI = "kernel: Documentation/ABI/testing/sysfs-kernel-iommu_groups"
_AMD = "kernel: drivers/iommu/amd/init.c, iommu_snp_enable"
_SYSFS_TOOLS = "Proxmox VE: PVE/SysFSTools.pm of pve-common, pci_dev_group_bind_to_vfio"
_OPEN = "https://github.com/NVIDIA/open-gpu-kernel-modules/issues"

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
        f"{_OPEN}/340",
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
        "no-gpu",
        "warning",
        _no_gpu,
        "There is nothing to judge: this is another host than meant, the cards have no power, or "
        "the captured tree is not one.",
        "Check the host, and the cards by lspci -d 10de:.",
        "kernel: Documentation/ABI/testing/sysfs-bus-pci",
    ),
    Rule(
        "sme-with-nvidia",
        "warning",
        _sme_with_nvidia,
        "The NVIDIA driver's DMA was reported to fail with memory encryption (SME), in which type "
        "of group was not settled.",
        "Watch the health verdict after each start; if in doubt boot without mem_encrypt=on.",
        f"{_OPEN}/340",
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
        "amd-iommu-on",
        "note",
        _amd_iommu_on,
        "The kernel knows no option amd_iommu=on: it says so in its log and goes on. An AMD IOMMU "
        "is on by default.",
        "It may be removed at the next change of the command line.",
        "kernel: drivers/iommu/amd/init.c, parse_amd_iommu_options",
    ),
    Rule(
        "leftover-vfio-ids",
        "warning",
        _leftover_ids,
        "vfio-pci takes every GPU with such an id, also those meant for the driver nvidia: equal "
        "cards have equal ids.",
        "Remove the ids; the layout binds by address. Then update-initramfs -u -k all.",
        "kernel: drivers/vfio/pci/vfio_pci.c, parameter ids",
    ),
    Rule(
        "leftover-vfio-virqfd",
        "warning",
        _leftover_virqfd,
        "The module became part of vfio in Linux 6.2. Listing it makes systemd-modules-load fail "
        "at each boot.",
        "Remove the line, then update-initramfs -u -k all.",
        "https://pve.proxmox.com/wiki/PCI_Passthrough",
    ),
    Rule(
        "nvidia-install-hook",
        "warning",
        _install_hook,
        "A command of somebody else runs each time the module nvidia is loaded. If it sets group "
        "types, they differ from what the layout says after the next boot.",
        "Read the command; remove the file if the layout does its work, then "
        "update-initramfs -u -k all.",
        "modprobe.d(5), install",
    ),
    Rule(
        "rival-driver",
        "warning",
        _rival_driver,
        "This in-tree driver binds NVIDIA GPUs when it is loaded, for example by udev at boot, and "
        "they are then missing for nvidia or vfio-pci.",
        "Add 'blacklist DRIVER' to a file in /etc/modprobe.d, then update-initramfs -u -k all.",
        "modprobe.d(5), blacklist",
    ),
    Rule(
        "vm-gpu-on-host-driver",
        "error",
        _vm_gpu_on_host_driver,
        "A VM's configuration claims the GPU while a host driver has it. At the start of the VM "
        "Proxmox unbinds it without asking who uses it; with the GPU in use that never returns.",
        "Bind it to vfio-pci first (gpu, driver: vfio-pci), or take it out of the VM.",
        _SYSFS_TOOLS,
    ),
    Rule(
        "two-owners",
        "error",
        _two_owners,
        "More than one guest claims the GPU. Whichever starts second fails, or takes it from the "
        "first.",
        "Leave it in one guest only.",
        _SYSFS_TOOLS,
    ),
    Rule(
        "container-node-missing",
        "error",
        _container_node_missing,
        "The container lists a device node of a GPU that the driver nvidia does not have. Its "
        "start fails when the node is missing, or it reaches another GPU than meant.",
        "Write the devN entries anew from the minors of its GPUs (gpu_info), or bind the GPU to "
        "nvidia.",
        "Proxmox VE: src/PVE/LXC.pm of pve-container, devN",
    ),
    Rule(
        "driverless-twin",
        "warning",
        _driverless_twin,
        "At the start of a VM Proxmox teaches vfio-pci the id of its GPUs, which takes every GPU "
        "with that id that has no driver at that moment.",
        "Bind it to the driver it is meant for; gpu also sets driver_override, which protects it.",
        _SYSFS_TOOLS,
    ),
    Rule(
        "group-not-viable",
        "error",
        _foreign_member,
        "The GPU shares its IOMMU group with a device of another card. A VM only gets the GPU if "
        "that device is given away too, and a change of type would stop it.",
        "Move one of the cards to another slot, or enable ACS in the firmware; groups are formed "
        "at boot.",
        "kernel: Documentation/driver-api/vfio.rst",
    ),
    Rule(
        "driver-differs",
        "warning",
        _driver_differs,
        "The GPU is not on the driver that the layout declares.",
        "Run the playbook site; with --check --diff it shows what it would do.",
        "layout",
    ),
    Rule(
        "type-differs",
        "warning",
        _type_differs,
        "The IOMMU group of the GPU does not have the type that the layout declares. The kernel "
        "changes it only while no member has a driver.",
        "Run the playbook site; with --check --diff it shows what it would do.",
        _ABI,
    ),
    Rule(
        "guest-differs",
        "warning",
        _guest_differs,
        "The guests' configurations give the GPU to somebody else than the layout says.",
        "Correct hostpciN or devN of the guests, or the layout.",
        "layout",
    ),
    Rule(
        "fsp-failed",
        "error",
        _fsp_failed,
        "The GPU's security processor (FSP) did not start it. The driver may be bound and "
        "nvidia-smi still shows no such device.",
        "Compare the group type with the last boot that worked and set it back; then cut the power "
        "(a warm reboot often does not clear it) and look again.",
        "open-gpu-kernel-modules: src/nvidia/src/kernel/gpu/fsp/kern_fsp.c",
    ),
    Rule(
        "gpu-failed",
        "error",
        _gpu_failed,
        "The kernel log says that the GPU does not work.",
        "Power the host off and on, and look again.",
        "gpu_health_info",
    ),
    Rule(
        "gpu-degraded",
        "warning",
        _gpu_degraded,
        "The GPU works, and the kernel log shows faults that cost speed or announce a failure.",
        "See the faults in the health verdict.",
        "gpu_health_info",
    ),
    Rule(
        "fault-unattributed",
        "warning",
        _fault_unattributed,
        "The kernel log shows a fault and does not tell which GPU it is about.",
        "See the faults in the health verdict.",
        "gpu_health_info",
    ),
    Rule(
        "health-unknown",
        "warning",
        _health_unknown,
        "There is no proof that the GPU works, nor that it does not. Unknown is not healthy.",
        "Make the kernel log of this boot readable and complete (journalctl -k -b), and see that "
        "the GPU is bound.",
        "gpu_health_info",
    ),
    Rule(
        "link-narrow",
        "warning",
        _link_narrow,
        "The PCI Express link is narrower than card and slot could have it; transfers between host "
        "and GPU are slower by that ratio. A reset or a badly seated card does this.",
        "Power-cycle the host; if it stays, reseat the card or look at the slot and riser.",
        "kernel: Documentation/ABI/testing/sysfs-bus-pci, current_link_width",
    ),
    Rule(
        "reboot-pending",
        "warning",
        _reboot_pending,
        "The running kernel was not started with the parameters in the boot loader's file.",
        "Refresh the boot loader (proxmox-boot-tool refresh, or update-grub) and reboot when the "
        "guests allow it.",
        "proxmox-boot-tool(8)",
    ),
    Rule(
        "part-unread",
        "warning",
        _part_unread,
        "A part of the host could not be read, so nothing was concluded from it.",
        "Run the audit as root, and look at the named file.",
        "gpu_host_info",
    ),
)
