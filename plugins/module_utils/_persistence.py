# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.

"""What a host does by itself at boot so that its GPUs are again as the layout declares them.

The kernel forgets overrides and group types at power-off, so the host keeps the layout in a file.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Callable

from ansible_collections.gpuhost.inference.plugins.module_utils import _iommu
from ansible_collections.gpuhost.inference.plugins.module_utils._child import ask
from ansible_collections.gpuhost.inference.plugins.module_utils._chips import identify
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from ansible_collections.gpuhost.inference.plugins.module_utils._kernel_write import Machine
from ansible_collections.gpuhost.inference.plugins.module_utils._pci import (
    DEVICES,
    PciDevice,
    read_device,
    slot_of,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader
from ansible_collections.gpuhost.inference.plugins.module_utils._transaction import keep

LAYOUT = "/etc/gpuhost/layout.json"
IMAGES = "/var/lib/gpuhost/initramfs.json"

_VERSION = 1
_LIFTABLE = ("sme-identity", "fsp-identity")  # nothing lifts snp-identity
_NO_DRIVER = "none"
_RULES = "/etc/udev/rules.d/10-gpuhost.rules"
# Its name sorts last, so that an install line of a driver package wins, and nvidia can be loaded
_MODPROBE = "/etc/modprobe.d/zz-gpuhost.conf"
_HOOK = "/etc/initramfs-tools/hooks/gpuhost"


@dataclass(frozen=True)
class Kept:
    """One GPU as the layout declares it; `None` where it asks for nothing."""

    address: str
    id: str  # vendor and device of the card that was there when the layout was written
    entry: str
    driver: str  # nvidia, vfio-pci, none
    iommu_type: str | None
    vmid: int | None


@dataclass(frozen=True)
class Layout:
    """The layout of a host, and the names of the guards its operator has lifted for it."""

    gpus: tuple[Kept, ...]
    accept: frozenset[str]


def read_layout(host: Reader) -> Layout:
    """Return the layout that the host keeps.

    Raises:
        GpuHostError: there is none, or it cannot be understood.
    """
    text = host.text(LAYOUT)
    if text is None:
        raise GpuHostError(
            f"{LAYOUT} is missing: apply the role gpu_passthrough, or let it remove what is left "
            "of it (gpu_passthrough_state: absent)"
        )
    try:
        kept = json.loads(text)
        if kept["version"] != _VERSION:
            raise GpuHostError(
                f"{LAYOUT} has version {kept['version']}, and this program knows {_VERSION}: "
                "apply the role gpu_passthrough of the version that wrote it, or a newer one"
            )
        gpus = [
            Kept(
                address=address,
                id=id_,
                entry=entry["name"],
                driver=entry["driver"],
                iommu_type=entry["iommu_type"],
                vmid=entry["guest"]["vmid"] if entry["guest"] else None,
            )
            for entry in kept["entries"]
            for address, id_ in entry["gpus"].items()
        ]
        accept = frozenset(kept.get("accept", ()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise GpuHostError(
            f"{LAYOUT} cannot be understood ({error}): apply the role gpu_passthrough again"
        ) from error
    return Layout(tuple(sorted(gpus, key=lambda gpu: gpu.address)), accept)


def _other_card(host: Reader, gpu: Kept) -> tuple[PciDevice | None, str]:
    """Return the device at a GPU's address, or why that is not the GPU."""
    device = read_device(host, gpu.address)
    if device is None:
        return None, "no device is there, the layout has a card of id " + gpu.id
    if device.id != gpu.id:
        return None, f"the card there is {device.id}, the layout has {gpu.id}: cards have moved"
    return device, ""


def verify(host: Reader, layout: Layout, vmid: int | None = None) -> list[str]:
    """Return a line for each GPU that is not as declared; of one guest's GPUs if `vmid` is given.

    Raises:
        UnreadableError: something could not be read, so nobody may call it right.
    """
    gpus = [gpu for gpu in layout.gpus if vmid in (None, gpu.vmid)]
    files = {gpu.address: f"{DEVICES}/{gpu.address}/driver_override" for gpu in gpus}
    overrides = ask(host.text, files.values())
    mode = _iommu.read_mode(host)
    lines = []
    for gpu in gpus:
        wrong = list(_differences(host, gpu, mode, overrides, files[gpu.address]))
        if wrong:
            lines.append(f"{gpu.address} ({gpu.entry}): {', '.join(wrong)}")
    return lines


def _differences(
    host: Reader,
    gpu: Kept,
    mode: _iommu.HostMode,
    overrides: Mapping[str, str | None],
    file: str,
) -> Iterator[str]:
    device, problem = _other_card(host, gpu)
    if device is None:
        yield problem
        return
    driver = device.driver or _NO_DRIVER
    if driver != gpu.driver:
        yield f"driver is {driver}, should be {gpu.driver}"
    if file not in overrides:
        yield "driver_override cannot be read, a bind or unbind may be pending in the kernel"
    elif overrides[file] != gpu.driver:
        override = overrides[file]
        shown = "not set" if override in (None, "", "(null)") else override
        yield f"driver_override is {shown}, should be {gpu.driver}"
    if gpu.iommu_type and device.group is None:
        yield f"it is in no IOMMU group, should have type {gpu.iommu_type}"
    elif gpu.iommu_type and device.group is not None:
        group = _iommu.read_group(host, device.group)
        try:
            target = _iommu.target_type(group, gpu.iommu_type, mode)
        except GpuHostError as error:
            yield str(error)
        else:
            if group.type != target:
                yield f"IOMMU group type is {group.type}, should be {target}"


def set_types(machine: Machine, layout: Layout, say: Callable[[str], object]) -> list[str]:
    """Set the group types of the layout where the kernel allows it now.

    A driver is never taken off for it. Call this with the lock of the host held.

    Args:
        machine: to change.
        layout: what it is to have.
        say: is told each change.

    Returns:
        A line for each GPU whose type is still wrong.
    """
    mode = _iommu.read_mode(machine.host)
    release = machine.host.text("/proc/sys/kernel/osrelease") or ""
    cards = {slot_of(gpu.address) for gpu in layout.gpus}
    lines = []
    for gpu in layout.gpus:
        if gpu.iommu_type is None:
            continue
        try:
            change = _set_type(machine, gpu, mode, release, (cards, layout.accept))
        except GpuHostError as error:
            lines.append(f"{gpu.address} ({gpu.entry}): {error}")
        else:
            if change:
                say(f"{gpu.address} type {change}")
    return lines


def _set_type(
    machine: Machine,
    gpu: Kept,
    mode: _iommu.HostMode,
    release: str,
    rules: tuple[set[str], frozenset[str]],
) -> str:
    """Set one type and return `DMA -> DMA-FQ`, an empty text when it is right already.

    Raises:
        GpuHostError: why it cannot be set, or was not.
    """
    wanted, (cards, accept) = gpu.iommu_type, rules
    device, problem = _other_card(machine.host, gpu)
    if device is None:
        raise GpuHostError(problem)
    if device.group is None or wanted is None:
        raise GpuHostError("it is in no IOMMU group: no IOMMU is in use on this host")
    group = _iommu.read_group(machine.host, device.group)
    target = _iommu.target_type(group, wanted, mode)
    if target == group.type:
        return ""
    reasons = [
        f"its group also holds {member.address} (class {member.class_}), which is not ours"
        for member in group.members
        if slot_of(member.address) not in cards
        if not member.class_.startswith(("0x0600", "0x0604"))  # bridges
    ]
    if target == "identity" and wanted != "auto":
        fsp = any(member.is_gpu and identify(member.id)[2] != "no" for member in group.members)
        reasons += [
            f"{evidence} ({id_})"
            for id_, evidence, _remedy in _iommu.identity_risks(mode, fsp=fsp)
            if id_ not in accept or id_ not in _LIFTABLE
        ]
    if _iommu.needs_idle_group(group.type, target):
        reasons += [
            f"{member.address} has driver {member.driver}, below which the kernel changes no type"
            for member in group.members
            if _iommu.holds_group(member.driver, release)
        ]
    if reasons:
        raise GpuHostError(f"type stays {group.type}, not {target}: {'; '.join(reasons)}")
    path = f"{_iommu.GROUPS}/{group.number}/type"
    outcome = machine.write(path, target, machine.timeout)
    after = machine.host.text(path)
    if outcome.state != "ok":
        raise GpuHostError(_iommu.explain_refusal(group, outcome, target))
    if after != target:
        raise GpuHostError(f"the kernel took type {target} but kept {after}: look at its log")
    return f"{group.type} -> {target}"


def hook_problems(host: Reader, layout: Layout, config: str) -> list[str]:
    """Return why modprobe will not set the types of GPUs for `nvidia` before it loads that.

    modprobe runs the first install line it finds for a module, and none at all when there is a
    softdep line for it (libkmod, `__kmod_module_fill_softdep`; seen with kmod 34). Packages that
    name the module otherwise, as Debian's nvidia-current, come with an install line of their own,
    and udev loads such a module by its alias.

    Args:
        host: says which type groups get at boot.
        layout: decides whether that needs a change without driver.
        config: what `modprobe --showconfig` prints.
    """
    default = _iommu.read_mode(host).default_type
    if not any(
        gpu.driver == "nvidia"
        and gpu.iommu_type not in (None, "auto", default)
        and _iommu.needs_idle_group(default, gpu.iommu_type or "")
        for gpu in layout.gpus
    ):
        return []
    lines = [line.split(None, 2) for line in config.splitlines()]
    found: dict[str, list[str]] = {"install": [], "softdep": []}
    for words in lines:
        if len(words) == 3 and words[0] in found and words[1] == "nvidia":
            found[words[0]].append(" ".join(words))
    if found["softdep"]:
        return [
            f"modprobe ignores the install line of {_MODPROBE}, because there is "
            f"'{found['softdep'][0]}', so nvidia gets GPUs before their type is set: take that "
            "line out of its file (grep -r softdep /etc/modprobe.d /lib/modprobe.d)"
        ]
    others = [line for line in found["install"] if "gpuhost-boot types" not in line]
    if others or not found["install"]:
        seen = f"there is '{others[0]}', too" if others else "it is not there"
        return [
            f"modprobe may not use the install line of {_MODPROBE}, {seen}, so nvidia gets GPUs "
            "before their type is set: let there be one install line for nvidia (a driver package "
            "whose module is nvidia needs none), or ask for a type that the boot gives"
        ]
    release = host.text("/proc/sys/kernel/osrelease") or ""
    modules = host.text(f"/lib/modules/{release}/modules.dep") or ""
    if not re.search(r"^(?:[^:\n]*/)?nvidia\.ko", modules, re.MULTILINE):
        return [
            f"/lib/modules/{release}/modules.dep has no module nvidia, so the driver of GPUs is "
            "loaded by another name and gets them before their type is set: install a driver "
            "package whose module is nvidia, or ask for a type that the boot gives"
        ]
    return []


def stamp(host: Reader) -> str:
    """Return the name that an initramfs made from the present files has inside.

    The hook for initramfs-tools computes the same in shell: a hash over rules, modprobe file and
    the hook itself. So a listing of names tells whether an image is up to date.
    """
    content = b"".join(host.data(path) or b"" for path in (_RULES, _MODPROBE, _HOOK))
    return f"etc/gpuhost/made-from-{hashlib.sha256(content).hexdigest()[:16]}"


def lacking(
    names: Iterable[str], *, stamp_name: str, modules: Sequence[str] = ()
) -> tuple[str, ...]:
    """Return what an initramfs lacks, in words.

    Args:
        names: of the files in it, as `lsinitramfs` prints them.
        stamp_name: see `stamp`.
        modules: kernel modules it must hold, `vfio-pci`.
    """
    have = set(names)
    missing = []
    for path in (_RULES, _MODPROBE):
        if path[1:] not in have:
            missing.append(path)
    if not missing and stamp_name not in have:
        missing.append(f"the present content of {_RULES} and {_MODPROBE}")
    files = {name.rpartition("/")[2].partition(".ko")[0].replace("_", "-") for name in have}
    missing += [f"module {module}" for module in modules if module not in files]
    return tuple(missing)


def check_images(
    host: Reader,
    layout: Layout,
    listing: Callable[[str], Sequence[str]],
    only: Sequence[str] = (),
    *,
    remember: bool = True,
) -> dict[str, tuple[str, ...]]:
    """Check the initramfs of every kernel, and return what they lack; the result is in `IMAGES`.

    An image that is the file it was at the last check is not read again.

    Args:
        host: whose `/boot` to look at.
        layout: decides which modules an image needs.
        listing: returns the names in an image, by its path.
        only: paths of the images to look at; the others keep their result.
        remember: keep the result for the next check.

    Raises:
        GpuHostError: the result cannot be kept.
    """
    name = stamp(host)
    known = _known_images(host)
    images = {}
    for path in _initramfs_files(host):
        status = (host.root / path[1:]).stat()
        seen = {"size": status.st_size, "mtime_ns": status.st_mtime_ns, "made_from": name}
        kept = known.get(path)
        if kept and (({**kept, **seen} == kept) or (only and path not in only)):
            images[path] = kept
        elif not only or path in only:
            try:
                missing = lacking(
                    listing(path), stamp_name=name, modules=_modules(host, layout, path)
                )
            except GpuHostError as error:
                missing = (f"a list of its files ({error})",)
            images[path] = {**seen, "missing": list(missing)}
    if remember:
        keep(host.root / IMAGES[1:], {"version": _VERSION, "images": images})
    return {path: tuple(image["missing"]) for path, image in images.items()}


def _initramfs_files(host: Reader) -> list[str]:
    """Return the initramfs of each kernel; copies such as `initrd.img-6.8.dpkg-bak` are none."""
    return [
        f"/boot/{name}"
        for name in host.names("/boot")
        if name.startswith("initrd.img-")
        if host.exists(f"/boot/vmlinuz-{name.partition('-')[2]}")
    ]


def _modules(host: Reader, layout: Layout, image: str) -> tuple[str, ...]:
    if all(gpu.driver != "vfio-pci" for gpu in layout.gpus):
        return ()
    release = image.partition("initrd.img-")[2]
    builtin = host.text(f"/lib/modules/{release}/modules.builtin") or ""
    return () if re.search(r"/vfio[-_]pci\.ko", builtin) else ("vfio-pci",)


def _known_images(host: Reader) -> dict[str, dict[str, Any]]:
    """Return the result of the last check; one that cannot be understood is made anew."""
    try:
        found = json.loads(host.text(IMAGES) or "null")
    except ValueError:
        return {}
    if not isinstance(found, dict) or found.get("version") != _VERSION:
        return {}
    images = found.get("images")
    if not isinstance(images, dict):
        return {}
    return {path: image for path, image in images.items() if _is_result(image)}


def _is_result(image: object) -> bool:
    missing = image.get("missing") if isinstance(image, dict) else None
    return isinstance(missing, list) and all(isinstance(one, str) for one in missing)
