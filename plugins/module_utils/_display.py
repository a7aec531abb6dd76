# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.

"""Which GPU draws what the host shows: framebuffers, and the memory the firmware gave them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ansible_collections.gpuhost.inference.plugins.module_utils._errors import UnreadableError
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader

_GRAPHICS = "/sys/class/graphics"
_PCI = re.compile(r"/([0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])(?=/)")
# Names under which the kernel and its firmware drivers reserve the screen's memory: sysfb,
# efifb, vesafb, simplefb, and the DRM drivers simpledrm, efidrm and vesadrm
_RESERVED = re.compile(
    r"^ *([0-9a-f]+)-([0-9a-f]+) : "
    r"(BOOTFB|efifb|vesafb|simplefb|simple-framebuffer\S*|simpledrm|efidrm|vesadrm)$",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Framebuffer:
    """A framebuffer of the host; without an address it is one the firmware set up."""

    name: str  # fb0
    driver: str  # the kernel's word for it, as "EFI VGA"
    address: str | None  # of the PCI function that draws it


@dataclass(frozen=True)
class Reserved:
    """Memory reserved for the firmware's framebuffer; both ends belong to it."""

    start: int
    end: int
    name: str


@dataclass(frozen=True)
class Screens:
    """What the host draws on; `unread` says why this is not known."""

    framebuffers: tuple[Framebuffer, ...] = ()
    reserved: tuple[Reserved, ...] = ()
    unread: str = ""


def read_screens(host: Reader) -> Screens:
    """Return the framebuffers of a host, from sysfs and `/proc/iomem`."""
    try:
        framebuffers = tuple(
            _framebuffer(host, name)
            for name in host.names(_GRAPHICS)
            if re.fullmatch(r"fb\d+", name)
        )
        memory = host.text("/proc/iomem") or ""
    except UnreadableError as error:
        return Screens(unread=str(error))
    reserved = tuple(
        Reserved(int(start, 16), int(end, 16), name)
        for start, end, name in _RESERVED.findall(memory)
    )
    if any(one.end == 0 for one in reserved):
        return Screens(framebuffers, unread="/proc/iomem shows addresses to root only")
    return Screens(framebuffers, reserved)


def _framebuffer(host: Reader, name: str) -> Framebuffer:
    devices = _PCI.findall(host.link(f"{_GRAPHICS}/{name}") or "")
    driver = host.text(f"{_GRAPHICS}/{name}/name") or "unnamed"
    return Framebuffer(name, driver, devices[-1] if devices else None)


def display_signs(
    screens: Screens, address: str, boot_vga: str | None, windows: Sequence[tuple[int, int, int]]
) -> tuple[str, ...]:
    """Return the signs that a GPU drives the display of the host, a sentence each.

    That the firmware chose it for its messages (`boot_vga`) counts only while the host draws on a
    framebuffer that no other device owns: mostly that is one of a management controller.

    Args:
        screens: of the host.
        address: of the GPU.
        boot_vga: its file of that name, `None` for none.
        windows: index, first and last address of its memory windows.
    """
    signs = []
    if screens.unread:
        signs.append(f"whether it drives the display of the host is not known: {screens.unread}")
    for one in screens.framebuffers:
        shown = f"{one.name} ({one.driver})"
        if one.address == address:
            signs.append(f"it draws the host's framebuffer {shown}")
        elif one.address is None and boot_vga == "1":
            signs.append(
                f"the firmware uses it as display (boot_vga), and the host draws on {shown}"
            )
    signs += [
        f"the firmware's framebuffer ({one.name}, {one.start:#x}-{one.end:#x} in /proc/iomem) lies "
        f"in its BAR {index}"
        for one in screens.reserved
        for index, first, last in windows
        if one.start <= last and first <= one.end
    ]
    return tuple(signs)
