# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.

"""What only the findings need to know of a host, besides what the modules return as facts."""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ansible_collections.gpuhost.inference.plugins.module_utils._boot import (
    Boot,
    parse_grub_defaults,
    split_command_line,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._duties import read_duties
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import (
    GpuHostError,
    UnreadableError,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._gpu import Gpu
from ansible_collections.gpuhost.inference.plugins.module_utils._guests import (
    Surroundings,
    read_surroundings,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._iommu import Member
from ansible_collections.gpuhost.inference.plugins.module_utils._layout import Entry
from ansible_collections.gpuhost.inference.plugins.module_utils._owners import Guest
from ansible_collections.gpuhost.inference.plugins.module_utils._p2p import Saved, saved
from ansible_collections.gpuhost.inference.plugins.module_utils._p2p_servers import (
    Server,
    read_servers,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._pci import (
    DEVICES,
    DRIVERS,
    slot_of,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._persistence import (
    IMAGES,
    LAYOUT,
    Kept,
    read_layout,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader
from ansible_collections.gpuhost.inference.plugins.module_utils._transaction import (
    FOLDER,
    LOCK,
    Record,
    Store,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._trial import (
    Trial,
    present_trial,
)

T = TypeVar("T")

# What the role gpu_passthrough installs beside the layout, and a boot cannot do without
_PARTS = (
    "/usr/local/lib/gpuhost/gpuhost-boot",
    "/etc/udev/rules.d/10-gpuhost.rules",
    "/etc/initramfs-tools/hooks/gpuhost",
    "/etc/systemd/system/multi-user.target.wants/gpuhost-types.service",
    "/etc/systemd/system/multi-user.target.wants/gpuhost-verify.service",
)
_MODESET = "/sys/module/nvidia_drm/parameters/modeset"
UVM_NODE = "/dev/nvidia-uvm"
PACKAGES = "/var/lib/dpkg/status"

_FUNCTION = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[01][0-9a-f]\.[0-7]")
_ACS = 0x0D  # PCI Express extended capability; its control register is at offset 6
_ACS_REDIRECTS_REQUESTS = 0x04


@dataclass(frozen=True)
class Extras:
    """Facts for findings only. `None` or absent: not there, not needed, or unread (see `unread`).

    Attributes:
        cpus: processors this machine may have (`/sys/devices/system/cpu/possible`).
        qemu: version of Proxmox's QEMU, read when a guest is to be confidential.
        idle_file: the boot loader file that is not in force, and the parameters in it.
        around: what guests' configurations are judged by.
        uvm: major number of nvidia-uvm in the kernel, and that of its node; `None` for none.
        neighbours: functions of other cards on the same bus, by address of the GPU.
        duties: what the host does with other devices of the GPUs' groups, by their address.
        redirecting: port above a GPU whose ACS redirects peer-to-peer requests, by its address;
            looked up for GPUs that share a container.
        drivers: PCI drivers there are.
        modeset: nvidia_drm runs with modeset.
        record: of a change that was begun and not ended, unless its process still runs.
        stuck: functions whose unbind never returned in this boot, each with a sentence.
        kept: what the persistence files demand, by address of the GPU; `None` without such files.
        lost: files that belong to them and are gone.
        image_checks: parts each initramfs lacks, by path, as last checked; `None` without check.
        trial: of types, as it is in this boot; `None` for none.
        p2p: tests of peer-to-peer copies that were made earlier.
        servers: running model servers, with the GPUs they hold.
        unread: sentences about what could not be read.
    """

    cpus: int | None
    qemu: str | None
    idle_file: tuple[str, tuple[str, ...]] | None
    around: Surroundings | None
    uvm: tuple[int | None, int | None]
    neighbours: Mapping[str, tuple[str, ...]]
    duties: Mapping[str, tuple[str, ...]]
    redirecting: Mapping[str, str]
    drivers: frozenset[str]
    modeset: bool
    record: Record | None
    stuck: Mapping[str, str]
    kept: Mapping[str, Kept] | None
    lost: tuple[str, ...]
    image_checks: Mapping[str, tuple[str, ...]] | None
    trial: Trial | None
    p2p: tuple[Saved, ...]
    servers: tuple[Server, ...]
    unread: tuple[str, ...]


def read_extras(
    host: Reader,
    boot: Boot,
    gpus: Sequence[Gpu],
    guests: Sequence[Guest],
    layout: Sequence[Entry],
) -> Extras:
    """Read what only the findings need; never raises for an unreadable file."""
    unread: list[str] = []
    unknown: tuple[int | None, int | None] = (None, None)

    def attempt(read: Callable[[], T], otherwise: T) -> T:
        try:
            return read()
        except GpuHostError as error:
            unread.append(str(error))
            return otherwise

    confidential = any(entry.guest and entry.guest.sev_snp for entry in layout) or any(
        is_snp(guest) for guest in guests
    )
    return Extras(
        cpus=attempt(lambda: _cpus(host), None),
        qemu=attempt(lambda: _qemu(host), None) if confidential else None,
        idle_file=attempt(lambda: _idle_file(host, boot.boot_loader.name), None),
        around=attempt(lambda: read_surroundings(host, guests), None),
        uvm=attempt(lambda: _uvm(host), unknown),
        neighbours=attempt(lambda: dict(_neighbours(host, gpus)), {}),
        duties=attempt(lambda: _duties(host, gpus), {}),
        redirecting=attempt(lambda: dict(_redirecting(host, gpus)), {}),
        drivers=attempt(lambda: frozenset(host.names(DRIVERS)), frozenset()),
        modeset=attempt(lambda: host.text(_MODESET), None) in ("Y", "1"),
        record=attempt(lambda: _record(host), None),
        stuck=attempt(lambda: _stuck(host), {}),
        kept=attempt(lambda: _kept(host), None),
        lost=attempt(lambda: _lost(host), ()),
        image_checks=attempt(lambda: _image_checks(host), None),
        trial=attempt(lambda: present_trial(host), None),
        p2p=attempt(lambda: tuple(saved(host, gpus)), ()),
        servers=attempt(lambda: tuple(read_servers(host, gpus)), ()),
        unread=tuple(unread),
    )


def is_snp(guest: Guest) -> bool:
    """Tell whether a VM's configuration asks for SEV-SNP (qm.conf(5), `amd-sev`)."""
    return guest.kind == "qemu" and "type=snp" in dict(guest.config).get("amd-sev", "").split(",")


def _cpus(host: Reader) -> int | None:
    last = re.search(r"(\d+)$", host.text("/sys/devices/system/cpu/possible") or "")
    return int(last[1]) + 1 if last else None


def _qemu(host: Reader) -> str | None:
    """Return the version of the package pve-qemu-kvm (deb822 paragraphs of dpkg's status file)."""
    found = re.search(
        r"^Package: pve-qemu-kvm\n(?:.+\n)*?Version: (?:\d+:)?(\S+)",
        host.text(PACKAGES) or "",
        re.MULTILINE,
    )
    return found[1] if found else None


def _idle_file(host: Reader, loader: str) -> tuple[str, tuple[str, ...]] | None:
    """Return the file that the other boot loader would read, with its parameters."""
    if loader == "grub":
        file = "/etc/kernel/cmdline"
        words = split_command_line(((host.text(file) or "").splitlines() or [""])[0])
        return (file, words) if words else None
    if loader == "systemd-boot":
        folder, file = "/etc/default/grub.d", "/etc/default/grub"
        files = [file, *(f"{folder}/{name}" for name in host.names(folder) if name[-4:] == ".cfg")]
        wanted = parse_grub_defaults([text for text in map(host.text, files) if text])
        return (file, wanted) if wanted else None
    return None


def _uvm(host: Reader) -> tuple[int | None, int | None]:
    listed = re.search(r"^ *(\d+) nvidia-uvm$", host.text("/proc/devices") or "", re.MULTILINE)
    node = host.device_number(UVM_NODE)
    return int(listed[1]) if listed else None, node[0] if node else None


def _bus_above(host: Reader, address: str) -> str | None:
    """Return the folder of the bridge above a device, `None` on a root bus."""
    link = host.link(f"{DEVICES}/{address}")
    above = posixpath.dirname(posixpath.normpath(f"{DEVICES}/{link}")) if link else ""
    return above if _FUNCTION.fullmatch(posixpath.basename(above)) else None


def _neighbours(host: Reader, gpus: Sequence[Gpu]) -> Iterator[tuple[str, tuple[str, ...]]]:
    for gpu in gpus:
        above = _bus_above(host, gpu.address)
        others = [
            name
            for name in (host.names(above) if above and gpu.sriov.physfn is None else ())
            if _FUNCTION.fullmatch(name) and slot_of(name) != slot_of(gpu.address)
            if host.link(f"{above}/{name}/physfn") is None  # parts of a card that is here already
        ]
        if others:
            yield gpu.address, tuple(others)


def is_foreign(member: Member, address: str) -> bool:
    """Tell whether a member is an endpoint of another card; bridges never bar a VM."""
    return not member.class_.startswith("0x06") and slot_of(member.address) != slot_of(address)


def _duties(host: Reader, gpus: Sequence[Gpu]) -> dict[str, tuple[str, ...]]:
    foreign = {
        member.address
        for gpu in gpus
        for member in (gpu.iommu_group.members if gpu.iommu_group else ())
        if is_foreign(member, gpu.address) and not member.is_gpu
    }
    return {address: read_duties(host, address) for address in sorted(foreign)}


def _redirecting(host: Reader, gpus: Sequence[Gpu]) -> Iterator[tuple[str, str]]:
    lots: dict[int, list[str]] = {}
    for gpu in gpus:
        for vmid in {owner.vmid for owner in gpu.owners if owner.kind == "lxc"}:
            lots.setdefault(vmid, []).append(gpu.address)
    for address in sorted({one for lot in lots.values() if len(lot) > 1 for one in lot}):
        above = _bus_above(host, address)
        if above and redirects_requests(host.data(f"{above}/config") or b""):
            yield address, posixpath.basename(above)


def redirects_requests(config: bytes) -> bool | None:
    """Tell whether a port's ACS sends peer-to-peer requests up to the IOMMU.

    `None` when its configuration space could be read only in part (not as root). Layout of the
    capabilities: PCI Express Base Specification, and include/uapi/linux/pci_regs.h.
    """
    if len(config) < 4096:
        return None
    at = 0x100
    for _hop in range(64):  # a broken list may lead in circles
        header = int.from_bytes(config[at : at + 4], "little")
        if header & 0xFFFF == _ACS:
            control = int.from_bytes(config[at + 6 : at + 8], "little")
            return bool(control & _ACS_REDIRECTS_REQUESTS)
        at = header >> 20 & 0xFFC
        if at < 0x100:
            break
    return False


def _record(host: Reader) -> Record | None:
    holder = (host.text(LOCK) or "").partition(" ")[0]
    busy = holder.isdigit() and host.exists(f"/proc/{holder}")
    return None if busy else Store(host).record()


def _stuck(host: Reader) -> dict[str, str]:
    return Store(host).stuck() if host.exists(f"{FOLDER}/stuck.json") else {}


def _kept(host: Reader) -> dict[str, Kept] | None:
    if not host.exists(LAYOUT):
        return None
    return {gpu.address: gpu for gpu in read_layout(host).gpus}


def _lost(host: Reader) -> tuple[str, ...]:
    return tuple(part for part in _PARTS if host.exists(LAYOUT) and not host.exists(part))


def _image_checks(host: Reader) -> dict[str, tuple[str, ...]] | None:
    text = host.text(IMAGES)
    if text is None:
        return None
    try:
        images = json.loads(text)["images"]
        return {path: tuple(image["missing"]) for path, image in images.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnreadableError(f"{IMAGES} cannot be understood: {error}") from error
