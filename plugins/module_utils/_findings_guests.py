# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.
"""Findings about guests: who claims a GPU, who has it, and what else goes along with it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ansible_collections.gpuhost.inference.plugins.module_utils._finding import (
    SYSFS_TOOLS,
    Facts,
    Hit,
    Rule,
    configured,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._finding_facts import (
    UVM_NODE,
    is_foreign,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._gpu import Gpu


def _vm_gpu_on_host_driver(facts: Facts) -> Iterator[Hit]:
    for gpu in facts.gpus:
        if gpu.driver not in (None, "vfio-pci"):
            for owner in configured(gpu, "qemu"):
                yield Hit(gpu.address, f"VM {owner.vmid}: {owner.detail}; driver {gpu.driver}")


def _two_owners(facts: Facts) -> Iterator[Hit]:
    for gpu in facts.gpus:
        owners = {(owner.kind, owner.vmid): owner.detail for owner in configured(gpu)}
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


def _uvm_node_stale(facts: Facts) -> Iterator[Hit]:
    kernel, node = facts.extras.uvm
    if None not in (kernel, node) and kernel != node:
        yield Hit(UVM_NODE, f"its major number is {node}; /proc/devices: {kernel} nvidia-uvm")


def _driverless_twin(facts: Facts) -> Iterator[Hit]:
    for gpu, said in _twins(facts):
        if gpu.driver is None:
            yield Hit(gpu.address, f"no driver, no driver_override, {said}")


def _unprotected_twin(facts: Facts) -> Iterator[Hit]:
    for gpu, said in _twins(facts):
        if gpu.driver == "nvidia":
            yield Hit(gpu.address, f"driver nvidia, no driver_override, {said}")


def _twins(facts: Facts) -> Iterator[tuple[Gpu, str]]:
    """Yield GPUs that nothing protects from what Proxmox does when a VM with their like starts."""
    claimed = {gpu.id: gpu for gpu in facts.gpus if any(configured(gpu, "qemu"))}
    for gpu in facts.gpus:
        twin = claimed.get(gpu.id)
        if not gpu.driver_override and twin and not any(configured(gpu, "qemu")):
            vmid = min(owner.vmid for owner in configured(twin, "qemu"))
            yield gpu, f"id {gpu.id} like {twin.address}, which VM {vmid} claims"


def _companion_left(facts: Facts) -> Iterator[Hit]:
    for gpu in facts.gpus if facts.groups else ():
        members = gpu.iommu_group.members if gpu.iommu_group else ()
        grouped = {member.address for member in members}
        left = [
            f"{companion.address} (class {companion.class_}, {companion.driver})"
            for companion in gpu.companions
            if companion.address in grouped and companion.driver not in (None, "vfio-pci")
        ]
        if gpu.driver == "vfio-pci" and left:
            yield Hit(gpu.address, f"driver vfio-pci; in its group still {', '.join(left)}")


def _group_not_viable(facts: Facts) -> Iterator[Hit]:
    vms = {gpu.address: {owner.vmid for owner in configured(gpu, "qemu")} for gpu in facts.gpus}
    for gpu in facts.gpus:
        group = gpu.iommu_group
        foreign = [
            member
            for member in (group.members if group else ())
            if is_foreign(member, gpu.address)
            and not vms[gpu.address] & vms.get(member.address, set())
        ]
        if group and foreign:
            listed = [f"{m.address} ({m.id}, class {m.class_}, {m.driver})" for m in foreign]
            duties = [duty for m in foreign for duty in facts.extras.duties.get(m.address, ())]
            yield Hit(
                gpu.address,
                f"IOMMU group {group.number} also holds {', '.join(listed)}"
                + "".join(f"; {duty}" for duty in duties),
                "Leave this GPU to the host or a container: what shares its group keeps the host "
                "running. Else move one of the cards to another slot, or enable ACS in the "
                "firmware."
                if duties
                else None,
            )


def _vfio_held(facts: Facts) -> Iterator[Hit]:
    if not facts.boot.proxmox_installed or facts.guests is None:
        return  # another manager's machines are not known here
    known = {guest.pid for guest in facts.guests if guest.pid}
    for gpu in facts.gpus:
        for user in gpu.users:
            if user.node.startswith("/dev/vfio/") and user.pid not in known:
                yield Hit(
                    gpu.address,
                    f"process {user.pid} ({user.command[:80]}; cgroup {user.cgroup}) has "
                    f"{user.node} {user.how}, and is no VM that runs",
                )


RULES = (
    Rule(
        "vm-gpu-on-host-driver",
        "error",
        _vm_gpu_on_host_driver,
        "A VM's configuration claims the GPU while a host driver has it. At the start of the VM "
        "Proxmox unbinds it without asking who uses it; with the GPU in use that never returns.",
        "Bind it to vfio-pci first (gpu, driver: vfio-pci), or take it out of the VM.",
        SYSFS_TOOLS,
    ),
    Rule(
        "two-owners",
        "error",
        _two_owners,
        "More than one guest claims the GPU. Whichever starts second fails, or takes it from the "
        "first.",
        "Leave it in one guest only.",
        SYSFS_TOOLS,
    ),
    Rule(
        "container-node-missing",
        "error",
        _container_node_missing,
        "The container lists a device node of a GPU that the driver nvidia does not have. Its "
        "start fails when the node is missing, or it reaches another GPU than meant.",
        "Write the devN entries anew from the minors of its GPUs (guest_gpus), or bind the GPU to "
        "nvidia.",
        "Proxmox VE: src/PVE/LXC.pm of pve-container, devN",
    ),
    Rule(
        "uvm-node-stale",
        "error",
        _uvm_node_stale,
        "The node is of an earlier load of the module, which got another number since. Programs "
        "start, and CUDA finds no device.",
        "Remove the node, run nvidia-modprobe -u -c 0, and restart the containers that have it.",
        "open-gpu-kernel-modules: kernel-open/nvidia-uvm/uvm.c, alloc_chrdev_region",
    ),
    Rule(
        "driverless-twin",
        "warning",
        _driverless_twin,
        "At the start of a VM Proxmox teaches vfio-pci the id of its GPUs, which takes every GPU "
        "with that id that has no driver at that moment.",
        "Bind it to the driver it is meant for; gpu also sets driver_override, which protects it.",
        SYSFS_TOOLS,
    ),
    Rule(
        "unprotected-twin",
        "note",
        _unprotected_twin,
        "While its driver is away (an update of the driver, a bind that fails), the start of a VM "
        "would take this GPU along: Proxmox teaches vfio-pci the id they share.",
        "Let gpu bind it, or run the playbook site: both set driver_override, which protects it.",
        SYSFS_TOOLS,
    ),
    Rule(
        "companion-left",
        "warning",
        _companion_left,
        "Only a part of the card went to vfio-pci. A VM gets the card when nothing in the group "
        "has a host driver; Proxmox takes the rest away by force at the VM's start.",
        "Bind the card with gpu, which takes all its functions together.",
        "kernel: Documentation/driver-api/vfio.rst",
    ),
    Rule(
        "group-not-viable",
        "error",
        _group_not_viable,
        "The GPU shares its IOMMU group with a device of another card. A VM only gets the GPU if "
        "that device is given away too, and a change of type would stop it.",
        "Move one of the cards to another slot, or enable ACS in the firmware; groups are formed "
        "at boot.",
        "kernel: Documentation/driver-api/vfio.rst",
    ),
    Rule(
        "vfio-held",
        "warning",
        _vfio_held,
        "Something that is no running VM has the GPU open through VFIO: a machine that did not "
        "end, or another program. No VM can start with the GPU until it lets go.",
        "Look at the process; end it if it is what a VM left behind.",
        "kernel: Documentation/driver-api/vfio.rst",
    ),
)
