# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.
"""Findings about single cards: on the bus, windows, link, reset, display, health."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ansible_collections.gpuhost.inference.plugins.module_utils._faults import GpuHealth
from ansible_collections.gpuhost.inference.plugins.module_utils._finding import (
    SYSFS_TOOLS,
    Facts,
    Hit,
    Rule,
    configured,
    equals,
    for_vms,
    usual,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._gpu import Gpu
from ansible_collections.gpuhost.inference.plugins.module_utils._pci import DEVICES

_ABI = "kernel: Documentation/ABI/testing/sysfs-bus-pci"
_IO_BAR = 5  # NVIDIA's only I/O window: servers give it no place, and no driver needs it
_LOG = "/dev/kmsg"


def _no_gpu(facts: Facts) -> Iterator[Hit]:
    if not facts.gpus and not facts.unread:
        yield Hit(DEVICES, "there is no NVIDIA display device")


def _off_bus(facts: Facts) -> Iterator[Hit]:
    for gpu in facts.gpus:
        if gpu.config_readable is False:
            yield Hit(
                gpu.address,
                f"its config reads all ones; power state {gpu.power.state}, runtime status "
                f"{gpu.power.runtime_status}",
            )


def _power_error(facts: Facts) -> Iterator[Hit]:
    for gpu in facts.gpus:
        said = (("power_state", gpu.power.state), ("runtime_status", gpu.power.runtime_status))
        wrong = [f"{name} is error" for name, value in said if value == "error"]
        if wrong:
            yield Hit(gpu.address, "; ".join(wrong))


def _windows(gpu: Gpu) -> dict[int, int]:
    return {one.index: one.size_bytes for one in gpu.bars if one.index != _IO_BAR}


def _bar_unassigned(facts: Facts) -> Iterator[Hit]:
    lacks = {
        gpu.address: [index for index, size in _windows(gpu).items() if not size]
        for gpu in facts.gpus
    }
    for lot in equals(facts.gpus):
        known = {index for gpu in lot for index in _windows(gpu)}
        for gpu in lot:
            if gpu.bars:
                lacks[gpu.address] += sorted(known - set(_windows(gpu)))
    for address, indices in lacks.items():
        if indices:
            yield Hit(
                address,
                f"resource: no place for window {', '.join(map(str, indices))}",
            )


def _bar_small(facts: Facts) -> Iterator[Hit]:
    for lot in equals(facts.gpus):
        sizes = {gpu.address: max(_windows(gpu).values(), default=0) for gpu in lot}
        model = max(sizes, key=sizes.__getitem__)
        best = sizes[model]
        for address, size in sizes.items():
            if 0 < size < best:
                yield Hit(
                    address,
                    f"its largest window has {size >> 20} MiB, that of {model} {best >> 20} MiB",
                )


def _reset_differs(facts: Facts) -> Iterator[Hit]:
    for lot in equals(facts.gpus):
        most = usual(gpu.reset_methods for gpu in lot)
        for gpu in lot:
            if isinstance(most, tuple) and gpu.reset_methods != most:
                yield Hit(
                    gpu.address,
                    f"reset_method: {' '.join(gpu.reset_methods) or 'none'}; most cards like it: "
                    f"{' '.join(most) or 'none'}",
                )


def _bus_shared(facts: Facts) -> Iterator[Hit]:
    vms = {gpu.address: {owner.vmid for owner in configured(gpu, "qemu")} for gpu in facts.gpus}
    for gpu, said in for_vms(facts):
        others = [
            address
            for address in facts.extras.neighbours.get(gpu.address, ())
            if not vms[gpu.address] & vms.get(address, set())
        ]
        if others:
            yield Hit(gpu.address, f"on one bus with {', '.join(others)}; {said}")


def _link_narrow(facts: Facts) -> Iterator[Hit]:
    for gpu in facts.gpus:
        width, best = gpu.link.width, gpu.link.max_width
        if width and best and width < best:
            yield Hit(gpu.address, f"width x{width} of x{best}")


def _display_for_vm(facts: Facts) -> Iterator[Hit]:
    for gpu, said in for_vms(facts):
        signs = [sign for sign in gpu.display if sign not in facts.unread]
        if signs:
            yield Hit(gpu.address, "; ".join((*signs, said)))


def _divided_for_vm(facts: Facts) -> Iterator[Hit]:
    for gpu in facts.gpus:
        owner = next(configured(gpu, "qemu"), None)
        if not owner or gpu.driver in (None, "vfio-pci"):
            continue
        if gpu.sriov.num_vfs:
            yield Hit(
                gpu.address,
                f"sriov_numvfs is {gpu.sriov.num_vfs}; VM {owner.vmid} has {owner.detail}",
                f"Give the VM a virtual function, or write 0 to {DEVICES}/{gpu.address}/"
                "sriov_numvfs while nobody uses them.",
            )
        if gpu.mig:
            yield Hit(
                gpu.address,
                "/proc/driver/nvidia/capabilities shows MIG instances; "
                f"VM {owner.vmid} has {owner.detail}",
                "Delete the instances (nvidia-smi mig -dci, -dgi) and end MIG mode, or take the "
                "GPU out of the VM.",
            )


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
            yield Hit(_LOG, f"{fault.id}: {fault.line}{which}", fault.remedy)


RULES = (
    Rule(
        "no-gpu",
        "warning",
        _no_gpu,
        "There is nothing to judge: this is another host than meant, the cards have no power, or "
        "the captured tree is not one.",
        "Check the host, and the cards by lspci -d 10de:.",
        _ABI,
    ),
    Rule(
        "off-bus",
        "error",
        _off_bus,
        "The GPU does not answer on the bus. Binding or unbinding it now may hang for good, and "
        "a VM that has it fails to start.",
        "If its power state is D3cold, write on to power/control of the GPU and look again. Else "
        "power the host off and on; a warm reboot often does not bring it back.",
        "PCI Express Base Specification, reads without completion",
    ),
    Rule(
        "power-error",
        "error",
        _power_error,
        "The kernel could not bring the GPU into the power state it wanted. Until it can, nothing "
        "reaches the GPU.",
        "Look at the kernel log for the GPU's address, then power the host off and on.",
        f"{_ABI}, power_state",
    ),
    Rule(
        "bar-unassigned",
        "error",
        _bar_unassigned,
        "The firmware or the kernel found no place for a memory window of the GPU. Its driver "
        "cannot start it, nor can a VM use it.",
        "Enable decoding above 4G and enlarge the MMIO window in the firmware.",
        f"{_ABI}, resource",
    ),
    Rule(
        "bar-small",
        "warning",
        _bar_small,
        "Cards like it have a larger window to their memory. This one's could not be resized, for "
        "want of room behind its bridge; peer-to-peer copies need the whole memory in it.",
        "Enlarge the MMIO window in the firmware (above 4G, resizable BAR), or use another slot.",
        f"{_ABI}, resource",
    ),
    Rule(
        "reset-methods-differ",
        "note",
        _reset_differs,
        "Cards like it can be reset in another way. A card that lost its function-level reset "
        "may come back from a VM in a state that only a power cycle ends.",
        "Write the methods to reset_method of the GPU as its likes have them, in order of "
        "preference; if the kernel refuses that, power the host off and on.",
        f"{_ABI}, reset_method",
    ),
    Rule(
        "bus-shared",
        "warning",
        _bus_shared,
        "A reset of this bus reaches devices that do not belong to the GPU's VM. The kernel allows "
        "it only to an owner of all, so a GPU that does not recover by itself stays as it is.",
        "Give all devices of the bus to one guest, or use another slot. Never reset the bridge by "
        "hand while a guest runs.",
        "kernel: drivers/pci/pci.c, pci_parent_bus_reset",
    ),
    Rule(
        "link-narrow",
        "warning",
        _link_narrow,
        "The PCI Express link is narrower than card and slot could have it; transfers between host "
        "and GPU are slower by that ratio. A reset or a badly seated card does this. The speed of "
        "a link says nothing: it falls while a card is idle.",
        "Power-cycle the host; if it stays, reseat the card or look at the slot and riser.",
        f"{_ABI}, current_link_width",
    ),
    Rule(
        "display-for-vm",
        "warning",
        _display_for_vm,
        "The host's display holds memory of a GPU that is for a VM: at the start of the VM the "
        "window cannot be reserved.",
        "Set the BMC or another card as first display in the firmware, or boot with "
        "initcall_blacklist=sysfb_init.",
        "https://pve.proxmox.com/wiki/PCI_Passthrough",
    ),
    Rule(
        "divided-for-vm",
        "error",
        _divided_for_vm,
        "The GPU is divided into parts that others may use, and a VM claims the whole. At the "
        "start of the VM Proxmox unbinds it without asking, and the parts vanish.",
        "Give the VM a part, or end the division first.",
        SYSFS_TOOLS,
    ),
    Rule(
        "fsp-failed",
        "error",
        _fsp_failed,
        "The GPU's security processor (FSP) did not start it. The driver may be bound and "
        "nvidia-smi still shows no such device.",
        "Compare the group type with the last boot that worked and set it back; then cut the power "
        "(a warm reboot often does not clear it) and look again. The playbook recover does both.",
        "open-gpu-kernel-modules: src/nvidia/src/kernel/gpu/fsp/kern_fsp.c",
    ),
    Rule(
        "gpu-failed",
        "error",
        _gpu_failed,
        "The kernel log says that the GPU does not work.",
        "Run the playbook recover, first with --check: it begins where this kind of fault is known "
        "to react.",
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
)
