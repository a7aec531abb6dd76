"""What went wrong for others, in public, and what of this collection answers it.

A report stands for its class. Own words; `where` is an owner/project#number on GitHub, or a place.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Report:
    """One public report: rules that show it, guards that refuse it, and what else helps."""

    where: tuple[str, ...]
    happened: str
    rules: tuple[str, ...] = ()
    guards: tuple[str, ...] = ()
    otherwise: str = ""


_OPEN = "NVIDIA/open-gpu-kernel-modules"
_DRA = "kubernetes-sigs/dra-driver-nvidia-gpu"

REPORTS = {
    "Unbinding, and cards in use": (
        Report(
            (f"{_OPEN}#1119",),
            "An unbind while a process has the GPU open never returns.",
            ("change-refused", "unbind-stuck"),
            ("in-use", "stuck"),
        ),
        Report(
            (f"{_OPEN}#1374",),
            "The same with no process to be seen: a kernel module holds the GPU.",
            ("change-refused", "unbind-stuck"),
            ("kernel-client", "stuck"),
            "writes are made in a child with a deadline",
        ),
        Report(
            ("OpenNebula/one-deploy#251", f"{_DRA}#1076"),
            "The persistence daemon, or an exporter of metrics, holds the GPU.",
            ("change-refused",),
            ("in-use",),
            "`gpu` ends persistence mode for the time, and stops `services` it was given",
        ),
        Report(
            (f"{_DRA}#1037", f"{_DRA}#1038"),
            "Persistence mode cannot come back while only some GPUs are back.",
            otherwise="`gpu` brings it back once, at the end; a failure is a warning",
        ),
        Report(
            ("NVIDIA/gpu-admin-tools#23", "NVIDIA/gpu-admin-tools#24"),
            "Wanted: whole groups, a dry run, a record, a way back.",
            (),
            ("foreign-member",),
            "check mode and diff of `gpu`; its record",
        ),
        Report(
            tuple(f"bryansteiner/gpu-passthrough-tutorial#{n}" for n in (22, 30, 36, 39)),
            "A card that fell off the bus is detached, and the caller hangs.",
            ("off-bus", "power-error"),
            ("off-bus",),
        ),
        Report(
            ("NVIDIA/nvidia-persistenced#15",),
            "A process that hangs on a card makes the shutdown wait.",
            ("unbind-stuck",),
            ("stuck",),
            "role host_reboot",
        ),
        Report(
            (f"{_OPEN}#535",),
            "All functions are unbound while the card sleeps, and the kernel crashes.",
            ("power-error",),
            (),
            "`gpu` keeps card and port awake, and unbinds one function after the other",
        ),
        Report(
            (f"{_DRA}#1255", f"{_DRA}#1256"),
            "A failure in the middle leaves a card without driver.",
            ("unfinished-change",),
            (),
            "`gpu` undoes in reverse, and says what it could not",
        ),
        Report(
            (f"{_DRA}#1331", f"{_DRA}#1333"),
            "After a restart of the manager a card stays where it was half-way.",
            ("unfinished-change",),
            (),
            "the next run of `gpu` ends or undoes it",
        ),
        Report(
            ("NVIDIA/k8s-driver-manager#146", "NVIDIA/gpu-operator#2079"),
            "An update unbinds the cards of running VMs.",
            ("change-refused",),
            ("guest-running", "guest-unknown", "in-use"),
        ),
    ),
    "Groups, and the wrong device": (
        Report(
            ("NVIDIA/gpu-operator#1328", f"{_DRA}#1191"),
            "Of a card with four functions only one goes to vfio-pci.",
            ("companion-left",),
            (),
            "`gpu` takes all functions of a card together",
        ),
        Report(
            ("harvester/harvester#10499", "OpenNebula/one-deploy#175"),
            "The boot disk, or the network card, shares the group of a GPU.",
            ("group-not-viable",),
            ("foreign-member",),
        ),
        Report(
            (
                "harvester/pcidevices#81",
                "harvester/harvester#6228",
                "isc30/ryzen-gpu-passthrough-proxmox#159",
            ),
            "The boot framebuffer owns a window of the card.",
            ("display-for-vm",),
            ("display",),
        ),
        Report(
            ("harvester/harvester#8294",),
            "The group stays busy after the VM has ended.",
            ("vfio-held",),
            ("in-use",),
        ),
        Report(
            ("harvester/pcidevices#49", "ydb-platform/nbs#5296", "OFS/opae-sdk#2735"),
            "The id is known to vfio-pci already, so new_id attaches nothing.",
            otherwise="`gpu` never writes new_id, and reads the driver afterwards",
        ),
        Report(
            tuple(f"NVIDIA/nvtrust#{number}" for number in (19, 30, 54)),
            "new_id takes every free card with that id.",
            ("driverless-twin", "unprotected-twin", "override-missing"),
            ("sibling-taken",),
            "`gpu` sets driver_override on the cards of both sides",
        ),
        Report(
            ("QubesOS/qubes-issues#7792", "QubesOS/qubes-issues#8127"),
            "Addresses moved, and a VM got another device.",
            ("override-missing", "mapping-drift"),
            ("wrong-card",),
            "rules of the boot match address and id",
        ),
        Report(
            ("LukeShort/rootpages#798",),
            "After the end of the VM its card stays on vfio-pci.",
            ("driver-differs", "container-node-missing"),
        ),
        Report(
            ("pve-guest-common, PVE/Mapping/PCI.pm",),
            "A mapping's group or id is another one after an update, and the VM does not start.",
            ("mapping-drift",),
        ),
        Report(
            ("canonical/lxd#10566",),
            "GPU 0 is the graphics of the BMC.",
            ("no-gpu",),
            (),
            "only display devices of vendor 10de count, by address",
        ),
        Report(
            ("MacRimi/ProxMenux#179", "OpenVisualCloud/Media-Transport-Library#1667"),
            "The parent of virtual functions is taken, and they vanish.",
            ("divided-for-vm", "leftover-vfio-ids"),
            ("sriov-vfs", "mig"),
        ),
        Report(
            ("truenas/middleware#11397",),
            "Cards with equal ids cannot be told apart by id.",
            ("leftover-vfio-ids",),
        ),
        Report(
            ("cloud-hypervisor/cloud-hypervisor#8533", "dstackai/dstack#1058"),
            "A reset of the bus would reach cards of others.",
            ("bus-shared",),
            ("reset-reach",),
        ),
        Report(
            ("kubevirt/kubevirt#8549",),
            "A VM claims a device that is on its host driver.",
            ("vm-gpu-on-host-driver",),
            ("guest-config",),
        ),
        Report(
            ("community-scripts/ProxmoxVE, tools for containers",),
            "A container is given the nodes of all cards, those of a VM too.",
            ("two-owners", "guest-differs"),
        ),
    ),
    "Reset, power, windows": (
        Report(
            (f"{_OPEN}#1353",),
            "One card lists another way of reset than before.",
            ("reset-methods-differ",),
            (),
            "`gpu_info` shows the methods, `gpu_reset` tries them in the order asked for",
        ),
        Report(
            tuple(f"{_OPEN}#{number}" for number in (829, 1104, 1230)),
            "Some of eight cards are bound, and do not start.",
            ("fsp-failed", "gpu-failed", "health-unknown"),
            (),
            "`gpu` reads the kernel log since the bind",
        ),
        Report(
            (
                "https://forums.developer.nvidia.com/t/364958",
                "https://forums.developer.nvidia.com/t/371272",
            ),
            "A card fails in its VM; the host sees nothing.",
            ("link-narrow", "gpu-degraded"),
            (),
            "health inside a VM is not visible to the host",
        ),
        Report(
            ("https://forum.proxmox.com/threads/178461/",),
            "The link has half its width after a reset.",
            ("link-narrow",),
        ),
        Report(
            ("zen-kernel/zen-kernel#380",),
            "A kernel release breaks the reset of passed-through cards.",
            ("known-bad-kernel",),
        ),
        Report(
            ("NVIDIA/NV-Kernels#485",),
            "Newer kernels answer a reset with EBUSY.",
            otherwise="`gpu_reset` tells the kernel's answer, and goes on to the next method",
        ),
        Report(
            ("https://forum.proxmox.com/threads/179366/",),
            "A window of the card has no place.",
            ("bar-unassigned",),
        ),
        Report(
            (f"{_OPEN}#510",),
            "One of six cards has a small window.",
            ("bar-small",),
        ),
    ),
    "IOMMU, memory encryption, peer-to-peer": (
        Report(
            tuple(f"AMDESE/AMDSEV#{number}" for number in (80, 88, 113)),
            "With iommu=pt the host has no SEV-SNP.",
            ("snp-with-passthrough", "snp-not-active", "identity-with-snp"),
            ("snp-identity",),
        ),
        Report(
            ("kubevirt/kubevirt#16407",),
            "A confidential VM with GPUs does not start on QEMU 9.1.",
            ("snp-old-qemu",),
        ),
        Report(
            (f"{_OPEN}#340", "AMDESE/AMDSEV#51"),
            "With SME active the driver's DMA fails.",
            ("identity-with-sme", "sme-with-nvidia"),
            ("sme-identity",),
        ),
        Report(
            ("NVIDIA/OpenShell#1780",),
            'A change of type answers "Operation not permitted", and is taken for impossible.',
            ("type-differs", "direct-region"),
            ("type-held",),
            "`gpu` and `iommu_group` explain the kernel's answer",
        ),
        Report(
            ("kernel: drivers/iommu/iommu.c before 6.4",),
            "Groups of several devices keep their type.",
            ("change-refused",),
            ("type-held",),
        ),
        Report(
            (
                "vllm-project/vllm#33041",
                "local-inference-lab/vllm#262",
                "NVIDIA/nccl#257",
                "NVIDIA/nccl-tests#117",
                "tinygrad/open-gpu-kernel-modules#18",
            ),
            "Peer-to-peer copies hang or are wrong under translation with ACS redirect.",
            ("p2p-redirected",),
        ),
        Report(
            ("aikitoria/open-gpu-kernel-modules#6",),
            "With more than 255 processors the IOMMU cannot be switched off.",
            ("iommu-off-many-cpus",),
            (),
            "`kernel_cmdline` refuses to write it",
        ),
        Report(
            ("NVIDIA/nvtrust#56", "kubevirt/kubevirt#11093"),
            "The guest's firmware has no room for large windows.",
            ("mmio-window",),
        ),
        Report(
            ("NVIDIA/nvtrust#109", "NVIDIA/nvtrust#128"),
            "In a confidential VM only some cards start.",
            otherwise="a matter of the guest's driver, not visible to the host",
        ),
        Report(
            ("MacRimi/ProxMenux, quickpassthrough, PECU",),
            "amd_iommu=on is missing, and the IOMMU is taken for off.",
            ("iommu-absent", "amd-iommu-on"),
        ),
    ),
    "Boot": (
        Report(
            ("harvester/harvester#2819", "harvester/pcidevices#14"),
            "After a reboot the cards are on the host's driver again.",
            (
                "persistence-missing",
                "persistence-differs",
                "persistence-broken",
                "override-missing",
            ),
            (),
            "role gpu_passthrough",
        ),
        Report(
            ("truenas/documentation#4576",),
            "An upgrade makes the initramfs anew, without what was added.",
            ("initramfs-incomplete", "initramfs-unchecked", "next-kernel-incomplete"),
            (),
            "each new initramfs is checked",
        ),
        Report(
            (
                "clayfreeman/gpu-passthrough#3",
                "64kramsystem/vga-passthrough#35",
                "anatol/booster#20",
            ),
            "vfio-pci is built in, so its modprobe options do nothing.",
            ("vfio-builtin-options",),
        ),
        Report(
            ("strongtz/i915-sriov-dkms#172", "strongtz/i915-sriov-dkms#435"),
            "GRUB's file is edited on a host that boots by systemd-boot.",
            ("idle-boot-file", "reboot-pending"),
            (),
            "`kernel_cmdline` goes by what booted",
        ),
        Report(
            ("lae/ansible-role-proxmox#274", "seapath/ansible#65"),
            "The line of parameters is overwritten, or says two things.",
            ("cmdline-contradiction",),
            (),
            "`kernel_cmdline` edits single words",
        ),
        Report(
            ("cozystack/cozystack#2763", "NVIDIA/k8s-driver-manager#191"),
            "A tool finds the host's driver, does nothing, and reports success.",
            ("driver-differs",),
            (),
            "`gpu` fails when the driver afterwards is not the wanted one",
        ),
        Report(
            ("ROCm/gpu-operator#417",),
            "A helper lacks a program, and reports success.",
            otherwise="facts are read from files; no program is needed",
        ),
        Report(
            ("jurkovic-nikola/OpenLinkHub#174",),
            "Asking nvidia-smi loads the driver.",
            otherwise="nvidia-smi is not asked",
        ),
    ),
    "Containers and Proxmox": (
        Report(
            (
                "jammsen/proxmox-setup-scripts#7",
                "Jip-Hop/jailmaker#4",
                "NVIDIA/k8s-device-plugin#222",
                "NVIDIA/nvidia-docker#139",
            ),
            "The node nvidia-uvm is missing, or has another number after an update.",
            ("container-device-absent", "container-raw-lines", "uvm-node-stale"),
            (),
            "role gpu_passthrough makes the nodes before guests start",
        ),
        Report(
            ("pve-container, pre-start hook",),
            "A container does not start while a listed node is missing.",
            ("container-node-missing", "container-device-absent"),
            ("guest-config",),
        ),
        Report(
            tuple(f"NVIDIA/nvidia-container-toolkit#{number}" for number in (48, 251, 1227)),
            "daemon-reload takes devices from Docker inside a container.",
            otherwise="role sglang reloads only after a change",
        ),
        Report(
            ("MacRimi/ProxMenux#195",),
            "A hook script on local storage keeps a guest from other nodes.",
            ("hookscript-local",),
        ),
        Report(
            ("fabriziosalmi/proxxx#57",),
            "What cannot be read must not count as free.",
            ("part-unread", "health-unknown"),
            ("in-use-unknown", "guest-unknown"),
        ),
    ),
}
