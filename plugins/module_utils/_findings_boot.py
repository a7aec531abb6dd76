# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.
"""Findings about how a host boots: command line, boot loader, kernels, modules, initramfs."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ansible_collections.gpuhost.inference.plugins.module_utils._boot import blocked, compare
from ansible_collections.gpuhost.inference.plugins.module_utils._cmdline import contradictions
from ansible_collections.gpuhost.inference.plugins.module_utils._finding import (
    Facts,
    Hit,
    Rule,
    for_vms,
    laid_out,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._persistence import LAYOUT

_CMDLINE = "/proc/cmdline"
_RELEASE = "/proc/sys/kernel/osrelease"
_MODPROBE = "/etc/modprobe.d"
_UPDATE = "update-initramfs -u -k all"

# Kernels (upstream version) that were reported to break what VMs do with GPUs, and where
KNOWN_BAD = {
    "6.12.23": ("a GPU is not reset when its VM stops or restarts", "zen-kernel/zen-kernel#380"),
    "6.14.2": ("a GPU is not reset when its VM stops or restarts", "zen-kernel/zen-kernel#380"),
}


def _contradiction(facts: Facts) -> Iterator[Hit]:
    loader = facts.boot.boot_loader
    sources = [(_CMDLINE, facts.boot.cmdline)]
    if loader.file and loader.wanted:
        sources.append((loader.file, loader.wanted))
    for file, words in sources:
        for one, other in contradictions(words):
            yield Hit(file, f"{one} and {other}")


def _reboot_pending(facts: Facts) -> Iterator[Hit]:
    pending, file = facts.boot.pending, facts.boot.boot_loader.file
    if pending.reboot_required and file:
        parts = (("not running yet", pending.missing), ("still running", pending.extra))
        said = "; ".join(f"{what}: {' '.join(words)}" for what, words in parts if words)
        yield Hit(file, f"compared with {_CMDLINE}: {said}")


def _idle_boot_file(facts: Facts) -> Iterator[Hit]:
    if facts.extras.idle_file:
        file, words = facts.extras.idle_file
        loader = facts.boot.boot_loader
        idle = compare((*facts.boot.cmdline, *(loader.wanted or ())), words).extra
        if idle:
            yield Hit(
                file,
                f"{' '.join(idle)} stands only there; this host boots by {loader.name}, which "
                f"reads {loader.file} ({loader.evidence})",
            )


def _next_kernel(facts: Facts) -> Iterator[Hit]:
    needed = {gpu.driver for gpu in facts.gpus} | {entry.driver for entry in facts.layout}
    named_so = facts.boot.proxmox_installed or any(kernel.initrd for kernel in facts.boot.kernels)
    for kernel in facts.boot.kernels:
        if not kernel.next:
            continue
        lacks = [
            what
            for what, absent in (
                (f"/boot/vmlinuz-{kernel.release}", not kernel.image),
                (f"/boot/initrd.img-{kernel.release}", named_so and not kernel.initrd),
                ("the module nvidia", "nvidia" in needed and kernel.nvidia is False),
                ("the module vfio-pci", "vfio-pci" in needed and kernel.vfio is False),
            )
            if absent
        ]
        if lacks:
            yield Hit(
                f"/boot/vmlinuz-{kernel.release}",
                f"the boot loader starts it next, and it lacks {', '.join(lacks)} "
                f"(/lib/modules/{kernel.release}/modules.dep)",
            )


def _known_bad_kernel(facts: Facts) -> Iterator[Hit]:
    if not any(for_vms(facts)):
        return
    places = {facts.boot.kernel or "": _RELEASE}
    for kernel in facts.boot.kernels:
        if kernel.next:
            places.setdefault(kernel.release, f"/boot/vmlinuz-{kernel.release}")
    for release, place in places.items():
        version = re.match(r"\d+\.\d+\.\d+", release)
        if version and version[0] in KNOWN_BAD:
            harm, report = KNOWN_BAD[version[0]]
            yield Hit(place, f"kernel {release}: {harm} ({report})")


def _leftover_ids(facts: Facts) -> Iterator[Hit]:
    for word in facts.boot.cmdline:
        if re.match(r"vfio[-_]pci\.ids=", word) and "10de:" in word.lower():
            yield Hit(_CMDLINE, word)
    for line in facts.boot.modprobe if "vfio_pci" not in facts.boot.builtin else ():
        if (
            line.command == "options"
            and line.module == "vfio_pci"
            and "10de:" in line.value.lower()
        ):
            yield Hit(line.file, line.place)


def _builtin_options(facts: Facts) -> Iterator[Hit]:
    for line in facts.boot.modprobe if "vfio_pci" in facts.boot.builtin else ():
        if line.command == "options" and line.module == "vfio_pci":
            yield Hit(
                line.file,
                f"{line.place}; /lib/modules/{facts.boot.kernel}/modules.builtin lists vfio-pci",
            )


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
            yield Hit(
                _MODPROBE, f"{driver}: no blacklist line there, none in {_CMDLINE}; it is {now}"
            )


def _persistence_missing(facts: Facts) -> Iterator[Hit]:
    lost = [
        f"{gpu.address} ({entry.driver}, {entry.iommu_type or 'any type'})"
        for entry, gpu in laid_out(facts)
        if entry.driver != "nvidia" or entry.iommu_type not in (None, "auto", facts.default_type)
    ]
    kept_unread = any(LAYOUT in sentence for sentence in facts.unread)
    if facts.extras.kept is None and lost and not kept_unread:
        yield Hit(LAYOUT, f"it does not exist, and the layout wants {', '.join(lost)}")


def _persistence_differs(facts: Facts) -> Iterator[Hit]:
    kept = facts.extras.kept
    if kept is None:
        return
    laid = set()
    for entry, gpu in laid_out(facts):
        laid.add(gpu.address)
        have = kept.get(gpu.address)
        if have is None:
            yield Hit(gpu.address, f"layout {entry.name} names it, {LAYOUT} does not")
        elif (have.driver, have.iommu_type) != (entry.driver, entry.iommu_type):
            yield Hit(
                gpu.address,
                f"{LAYOUT}: {have.driver}, {have.iommu_type or 'any type'}; layout "
                f"{entry.name}: {entry.driver}, {entry.iommu_type or 'any type'}",
            )
    for address in sorted(set(kept) - laid) if laid else ():
        yield Hit(address, f"{LAYOUT} names it, the layout does not")


def _persistence_broken(facts: Facts) -> Iterator[Hit]:
    for part in facts.extras.lost:
        yield Hit(part, f"it is gone, and {LAYOUT} is there")


def _override_missing(facts: Facts) -> Iterator[Hit]:
    for gpu in facts.gpus:
        kept = (facts.extras.kept or {}).get(gpu.address)
        if kept and gpu.driver_override is None:
            yield Hit(
                gpu.address, f"{LAYOUT}: {kept.driver}; driver_override of the GPU is not set"
            )


def _initramfs_incomplete(facts: Facts) -> Iterator[Hit]:
    for image, missing in (facts.extras.image_checks or {}).items():
        if missing:
            yield Hit(image, f"it lacks {', '.join(missing)}")


def _initramfs_unchecked(facts: Facts) -> Iterator[Hit]:
    checks = facts.extras.image_checks
    for kernel in facts.boot.kernels if checks is not None else ():
        image = f"/boot/initrd.img-{kernel.release}"
        if kernel.initrd and checks is not None and image not in checks:
            yield Hit(image, "it is there, and no check of its content was noted")


RULES = (
    Rule(
        "next-kernel-incomplete",
        "error",
        _next_kernel,
        "After the next reboot the GPUs would lack their driver, or the host would not start.",
        "Build the module for it (dkms autoinstall -k RELEASE), reinstall the kernel's package, or "
        "pin the running kernel (proxmox-boot-tool kernel pin).",
        "modules.dep(5), proxmox-boot-tool(8)",
    ),
    Rule(
        "persistence-missing",
        "warning",
        _persistence_missing,
        "Drivers and types of the layout are gone after the next boot: nothing sets them again, "
        "and a VM may start before somebody does.",
        "Run the playbook site, whose role gpu_passthrough installs the rules for the boot.",
        "role gpu_passthrough",
    ),
    Rule(
        "persistence-differs",
        "warning",
        _persistence_differs,
        "After the next boot the GPU gets what the files of the last run say, which is not what "
        "the layout says now.",
        "Run the playbook site; with --check --diff it shows what it would do.",
        "role gpu_passthrough",
    ),
    Rule(
        "persistence-broken",
        "warning",
        _persistence_broken,
        "A part of what sets drivers and types at boot was removed or switched off, so after the "
        "next boot some GPUs may be wrong without a word.",
        "Run the playbook site, which installs it again, or remove all of it (role "
        "gpu_passthrough, gpu_passthrough_state: absent).",
        "role gpu_passthrough",
    ),
    Rule(
        "override-missing",
        "warning",
        _override_missing,
        "The udev rule that protects the GPU did not act: another card is at that address, or the "
        "rule was not read. Whichever driver comes first takes the GPU.",
        "Compare address and id with /etc/udev/rules.d/10-gpuhost.rules, then run the playbook "
        "site.",
        "kernel: Documentation/ABI/testing/sysfs-bus-pci, driver_override",
    ),
    Rule(
        "initramfs-incomplete",
        "warning",
        _initramfs_incomplete,
        "With this kernel, drivers may bind in the initramfs before the rules of this host are "
        "read: a VM's GPU can end on nvidia, a container's on vfio-pci.",
        f"{_UPDATE}, which also checks the images again.",
        "initramfs-tools(7)",
    ),
    Rule(
        "initramfs-unchecked",
        "note",
        _initramfs_unchecked,
        "It is not known whether this image holds the rules of this host.",
        f"{_UPDATE}, which also checks the images.",
        "initramfs-tools(7)",
    ),
    Rule(
        "cmdline-contradiction",
        "warning",
        _contradiction,
        "The command line says two things about one matter. The kernel takes the last one; people "
        "and tools may read the first.",
        "Remove the word that is not meant, refresh the boot loader and reboot when the guests "
        "allow it.",
        "kernel: Documentation/admin-guide/kernel-parameters.txt",
    ),
    Rule(
        "idle-boot-file",
        "note",
        _idle_boot_file,
        "Parameters about the IOMMU or GPU drivers stand in the file of the boot loader that does "
        "not start this host. They have no effect.",
        "Move them to the file that counts, or remove them.",
        "proxmox-boot-tool(8)",
    ),
    Rule(
        "reboot-pending",
        "warning",
        _reboot_pending,
        "The running kernel was not started with the parameters in the boot loader's file.",
        "Refresh the boot loader (proxmox-boot-tool refresh, or update-grub) and reboot when the "
        "guests allow it (role host_reboot).",
        "proxmox-boot-tool(8)",
    ),
    Rule(
        "known-bad-kernel",
        "warning",
        _known_bad_kernel,
        "This version was reported to break GPUs of VMs.",
        "Boot another version, and pin it (proxmox-boot-tool kernel pin).",
        "the report named in the evidence",
    ),
    Rule(
        "leftover-vfio-ids",
        "warning",
        _leftover_ids,
        "vfio-pci takes every GPU with such an id, also those meant for the driver nvidia: equal "
        "cards have equal ids.",
        f"Remove the ids; the layout binds by address. Then {_UPDATE}.",
        "kernel: drivers/vfio/pci/vfio_pci.c, parameter ids",
    ),
    Rule(
        "vfio-builtin-options",
        "warning",
        _builtin_options,
        "vfio-pci is part of this kernel's image, so lines for it in modprobe.d do nothing.",
        "Remove the line; the layout binds by address. What has to be an option goes to the "
        "kernel's command line (vfio-pci.NAME=VALUE).",
        "modprobe.d(5), options",
    ),
    Rule(
        "leftover-vfio-virqfd",
        "warning",
        _leftover_virqfd,
        "The module became part of vfio in Linux 6.2. Listing it makes systemd-modules-load fail "
        "at each boot.",
        f"Remove the line, then {_UPDATE}.",
        "https://pve.proxmox.com/wiki/PCI_Passthrough",
    ),
    Rule(
        "nvidia-install-hook",
        "warning",
        _install_hook,
        "A command of somebody else runs each time the module nvidia is loaded. If it sets group "
        "types, they differ from what the layout says after the next boot.",
        f"Read the command; remove the file if the layout does its work, then {_UPDATE}.",
        "modprobe.d(5), install",
    ),
    Rule(
        "rival-driver",
        "warning",
        _rival_driver,
        "This in-tree driver binds NVIDIA GPUs when it is loaded, for example by udev at boot, and "
        "they are then missing for nvidia or vfio-pci.",
        f"Add 'blacklist DRIVER' to a file in {_MODPROBE}, then {_UPDATE}.",
        "modprobe.d(5), blacklist",
    ),
)
