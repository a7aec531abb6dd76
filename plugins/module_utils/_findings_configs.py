# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.
"""Findings about guests' configurations: what `_guest_lint` remarks on, with words for people."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from ansible_collections.gpuhost.inference.plugins.module_utils import _guest_lint
from ansible_collections.gpuhost.inference.plugins.module_utils._finding import Facts, Hit, Rule
from ansible_collections.gpuhost.inference.plugins.module_utils._guest_lint import Remark
from ansible_collections.gpuhost.inference.plugins.module_utils._guests import Surroundings
from ansible_collections.gpuhost.inference.plugins.module_utils._owners import Guest

_PCI = "Proxmox VE: src/PVE/QemuServer/PCI.pm of qemu-server"
_QM = "https://pve.proxmox.com/pve-docs/chapter-qm.html"
_Lint = Callable[[Sequence[Guest], Surroundings, Facts], Iterable[Remark]]


def _remarks(lint: _Lint) -> Callable[[Facts], Iterator[Hit]]:
    """Make a rule's check of a check of guests; without guests or surroundings it is silent."""

    def check(facts: Facts) -> Iterator[Hit]:
        around = facts.extras.around
        if facts.guests is not None and around is not None:
            for remark in lint(facts.guests, around, facts):
                yield Hit(remark.subject, remark.evidence, remark.remedy)

    return check


def _confidential(facts: Facts) -> set[int]:
    return {entry.guest.vmid for entry in facts.layout if entry.guest and entry.guest.sev_snp}


RULES = (
    Rule(
        "hostpci-invalid",
        "error",
        _remarks(lambda guests, around, _facts: _guest_lint.hostpci_invalid(guests, around)),
        "Proxmox does not start a VM with such an entry, or starts it without the device.",
        "Correct the entry: qm set VMID --hostpciN ...",
        f"{_PCI}, parse_hostpci",
    ),
    Rule(
        "hostpci-part-of-card",
        "warning",
        _remarks(lambda guests, around, _facts: _guest_lint.hostpci_part_of_card(guests, around)),
        "The VM gets some functions of a card only. The others stay with the host's drivers, or "
        "Proxmox takes them away at the VM's start, when they share the IOMMU group.",
        "Leave out the function in the entry, as in hostpci0: 0000:01:00,pcie=1.",
        "https://pve.proxmox.com/wiki/PCI_Passthrough",
    ),
    Rule(
        "two-vms-at-boot",
        "error",
        _remarks(lambda guests, around, _facts: _guest_lint.two_vms_at_boot(guests, around)),
        "Two VMs that start with the host claim the GPU: one of them does not start.",
        "Leave the GPU in one of them, or set onboot: 0 for the other.",
        f"{_PCI}, reserve_pci_usage",
    ),
    Rule(
        "mapping-drift",
        "error",
        _remarks(lambda _guests, around, _facts: _guest_lint.mapping_drift(around)),
        "The mapping no longer fits the hardware, so Proxmox refuses to start its VMs. Group "
        "numbers change with kernel, firmware and slots; ids change with the card.",
        "Look whether the card is still the one that was meant, then write the mapping anew.",
        "Proxmox VE: src/PVE/Mapping/PCI.pm of pve-guest-common, assert_valid",
    ),
    Rule(
        "container-raw-lines",
        "warning",
        _remarks(lambda guests, around, _facts: _guest_lint.container_raw_lines(guests, around)),
        "Raw lines hand the driver's nodes to the container past Proxmox. The device number of "
        "nvidia-uvm is given out anew at each load of the module, so they stop working.",
        "Replace them by devN entries, then remove them from the file.",
        "Proxmox VE: src/PVE/LXC/Config.pm of pve-container, devN",
    ),
    Rule(
        "container-device-absent",
        "error",
        _remarks(
            lambda guests, around, _facts: _guest_lint.container_device_absent(guests, around)
        ),
        "The container lists a device that is not there, so Proxmox refuses to start it. "
        "/dev/nvidia-uvm is only there after somebody asked for it since the boot.",
        "nvidia-modprobe -u -c 0 makes the driver's nodes; else remove the entry.",
        "Proxmox VE: src/PVE/LXC/Tools.pm of pve-container, get_device_mode_and_rdev",
    ),
    Rule(
        "hookscript-local",
        "note",
        _remarks(lambda guests, around, _facts: _guest_lint.hookscript_local(guests, around)),
        "The hook script lies on a storage that only this node has: elsewhere the guest does not "
        "start, neither after a migration nor as a failover.",
        "Do its work in a unit of the host, or put it on a shared storage.",
        f"{_QM}, hookscripts",
    ),
    Rule(
        "snp-vm-settings",
        "error",
        _remarks(
            lambda guests, _around, facts: _guest_lint.snp_vm_settings(guests, _confidential(facts))
        ),
        "With these settings the VM that is to be confidential does not start, or is not "
        "confidential.",
        "qm set VMID with the named setting.",
        f"{_QM}, AMD SEV",
    ),
    Rule(
        "mmio-window",
        "warning",
        _remarks(lambda guests, around, facts: _guest_lint.mmio_window(guests, around, facts.gpus)),
        "The VM's firmware makes less room for 64-bit windows than its GPUs have. A GPU without "
        "its windows is there in the guest, and its driver does not start it.",
        "qm set VMID --cpu host, or X-PciMmio64Mb of the firmware in args.",
        "edk2: OvmfPkg/Library/PlatformInitLib/MemDetect.c",
    ),
)
