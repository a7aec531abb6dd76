# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.

"""The audit of a whole host: every part is read once, judged, and returned as plain values."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from ansible_collections.gpuhost.inference.plugins.module_utils._apply import out_of_reach
from ansible_collections.gpuhost.inference.plugins.module_utils._boot import (
    Boot,
    next_boot,
    read_boot,
    sme_active,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import UnreadableError
from ansible_collections.gpuhost.inference.plugins.module_utils._fault_log import collect
from ansible_collections.gpuhost.inference.plugins.module_utils._faults import (
    Health,
    conclude,
    read_subjects,
    unobserved,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._finding import Facts
from ansible_collections.gpuhost.inference.plugins.module_utils._finding_facts import (
    Extras,
    read_extras,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._findings import (
    Finding,
    find,
    host_mode,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._gpu import Gpu, read_gpus
from ansible_collections.gpuhost.inference.plugins.module_utils._iommu import (
    default_type,
    read_groups,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._kernel_log import (
    KernelLog,
    read_blocks,
    read_file,
    read_live,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._layout import (
    Layout,
    entry_as_result,
    resolve_layout,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._log_forms import Record
from ansible_collections.gpuhost.inference.plugins.module_utils._owners import Guest, read_guests
from ansible_collections.gpuhost.inference.plugins.module_utils._pci import as_result, read_device
from ansible_collections.gpuhost.inference.plugins.module_utils._reboot import (
    Trouble,
    plan_reboot,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._starts import read_starts
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader
from ansible_collections.gpuhost.inference.plugins.module_utils._trial import shown

T = TypeVar("T")
_DIFFERENCES = ("driver-differs", "type-differs", "guest-differs")
_MODULES = re.compile("nvidia|nouveau|nova|vfio|iommufd|kvm|snd_hda")
_NOT_KNOWN = " is not known: "  # in a sign of a display that could not be looked for
_GPU_SETTINGS = ("hostpci", "dev", "lxc.mount.entry", "lxc.cgroup")
_STARTS_WITH_GPUS = ("amd-sev", "bios", "cpu", "hookscript", "machine", "startup")


def open_log(
    sources: Sequence[str], log_file: str | None, timeout: float, *, captured: bool
) -> KernelLog:
    """Return the kernel log to judge by; a captured host without a saved log has none."""
    if log_file:
        return read_file(log_file)
    return read_blocks([]) if captured else read_live(sources, timeout=timeout)


def audit(
    host: Reader, log: KernelLog, layout: object, unassigned: str, *, observed: bool
) -> dict[str, Any]:
    """Read and judge a host. Only a part that could not be read is `None`, and it is named.

    Args:
        host: The host, live or captured.
        log: The kernel log of the host, not yet read.
        layout: The declared layout as its user wrote it, `None` for none.
        unassigned: `keep` allows GPUs that no layout entry names, `refuse` does not.
        observed: The log is of the time at which the host is read.
    """
    boot = read_boot(host)
    unread = list(boot.unread)
    gpus = _attempt(lambda: read_gpus(host), unread)
    groups = _attempt(lambda: read_groups(host), unread)
    guests = _attempt(lambda: read_guests(host), unread)
    default = _attempt(lambda: default_type(host), unread)
    memory_lines: list[str] = []
    starts = read_starts(host) if observed else None
    found = collect(_note_memory(log, memory_lines), starts)
    subjects = read_subjects(host, gpus or ())
    subjects = subjects if observed else unobserved(subjects)
    health = conclude(found, log.summary(), subjects)
    sme = sme_active(boot, memory_lines, health.log.complete)
    mode = host_mode(groups, default, boot.snp, sme)
    resolved = _resolve(host, layout, gpus, guests, unassigned)
    extras = read_extras(host, boot, gpus or (), guests or (), resolved.entries)
    unread += extras.unread
    unread += _unknown_of(gpus or ())
    findings = find(
        Facts(
            boot=boot,
            mode=mode,
            sme=sme,
            default_type=default,
            gpus=gpus or (),
            groups=groups,
            guests=guests,
            health=health,
            layout=resolved.entries,
            extras=extras,
            unread=unread,
        )
    )
    following = next_boot(boot, [entry.driver for entry in resolved.entries])
    over = _ends_at_reboot(host, extras, gpus or ())
    troubles = [
        Trouble(found.id, found.subject, found.evidence)
        for found in findings
        if not (over and found.id == "unfinished-change")
    ]
    return {
        "host": {
            **_host(boot, bool(groups), default, mode, sme),
            "next_boot": asdict(following),
            "trial": shown(extras.trial),
            "reboot": asdict(plan_reboot(boot, following, guests, resolved.entries, troubles)),
        },
        "gpus": None if gpus is None else [as_result(gpu) for gpu in gpus],
        "groups": None if groups is None else [as_result(group) for group in groups],
        "guests": None if guests is None else [_guest(guest) for guest in guests],
        "health": _health(health),
        "p2p": {
            "tests": [asdict(test) for test in extras.p2p],
            "servers": [asdict(server) for server in extras.servers],
        },
        "findings": [asdict(finding) for finding in findings],
        "layout": _layout(resolved, findings),
        "unread": unread,
    }


def _attempt(read: Callable[[], T], unread: list[str]) -> T | None:
    try:
        return read()
    except UnreadableError as error:
        unread.append(str(error))
        return None


def _unknown_of(gpus: Iterable[Gpu]) -> list[str]:
    """Return once what could not be told of single GPUs; unread guests are named elsewhere."""
    said = dict.fromkeys(
        text
        for gpu in gpus
        for text in (*gpu.users_unknown, *(sign for sign in gpu.display if _NOT_KNOWN in sign))
    )
    return [text for text in said if not text.startswith("guests: ")]


def _note_memory(log: KernelLog, lines: list[str]) -> Iterator[Record]:
    """Pass all records on, and keep those about memory encryption."""
    for record in log:
        if "Memory Encryption" in record.text:
            lines.append(record.text)
        yield record


def _resolve(
    host: Reader,
    layout: object,
    gpus: Sequence[Gpu] | None,
    guests: Iterable[Guest] | None,
    unassigned: str,
) -> Layout:
    if gpus is None:
        said = "the GPUs of this host could not be read: run as root, and see findings"
        return Layout((), (), () if layout is None else (said,))

    def describe(address: str) -> str | None:
        try:
            device = read_device(host, address)
        except UnreadableError:
            return "a device that cannot be read"
        return f"{device.id}, class {device.class_}" if device else None

    known = None if guests is None else {(guest.kind, guest.vmid) for guest in guests}
    return resolve_layout(layout, gpus, known, unassigned, describe)


def _ends_at_reboot(host: Reader, extras: Extras, gpus: Iterable[Gpu]) -> bool:
    """Tell whether a reboot has ended an unfinished change, or is the only thing that can."""
    if extras.record is None:
        return False
    now = host.text("/proc/sys/kernel/random/boot_id")
    earlier = now is not None and extras.record.boot != now
    return earlier or any(out_of_reach(extras.record, gpus, extras.stuck))


def _host(
    boot: Boot, iommu: bool, default: str | None, mode: str, sme: bool | None
) -> dict[str, Any]:
    return {
        "kernel": boot.kernel,
        "proxmox": {"installed": boot.proxmox_installed, "version": boot.proxmox_version},
        "iommu": {"present": iommu, "vendor": boot.iommu_vendor, "default_type": default},
        "mode": mode,
        "snp": boot.snp,
        "sme": sme,
        "cmdline": boot.cmdline,
        "boot_loader": asdict(boot.boot_loader),
        "reboot_required": boot.pending.reboot_required,
        "pending": {"missing": boot.pending.missing, "extra": boot.pending.extra},
        "modules": boot.modules,
        "modprobe": [asdict(line) for line in boot.modprobe if _MODULES.match(line.module)],
    }


def _guest(guest: Guest) -> dict[str, Any]:
    """Return a guest without settings that say nothing of GPUs: some hold passwords."""
    settings = dict(guest.config)
    return {
        "kind": guest.kind,
        "vmid": guest.vmid,
        "name": guest.name,
        "path": guest.path,
        "running": guest.running,
        "pid": guest.pid,
        "onboot": settings.get("onboot") == "1",
        "settings": [
            {"key": key, "value": value}
            for key, value in guest.config
            if key.startswith(_GPU_SETTINGS) or key in _STARTS_WITH_GPUS
        ],
    }


def _health(health: Health) -> dict[str, Any]:
    return {**as_result(health), "unattributed": [as_result(f) for f in health.unattributed]}


def _layout(layout: Layout, findings: Iterable[Finding]) -> dict[str, Any]:
    differs = {finding.subject for finding in findings if finding.id in _DIFFERENCES}
    return {
        "entries": [entry_as_result(entry) for entry in layout.entries],
        "unassigned": layout.unassigned,
        "problems": layout.problems,
        "differs": sorted(differs),
    }
