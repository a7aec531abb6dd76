# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.

"""The NVIDIA GPUs of a host: what they are, who drives them, who uses them.

No command is called: nvidia-smi would load the driver and enable cards.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ansible_collections.gpuhost.inference.plugins.module_utils import _iommu, _owners
from ansible_collections.gpuhost.inference.plugins.module_utils._child import ask
from ansible_collections.gpuhost.inference.plugins.module_utils._chips import identify
from ansible_collections.gpuhost.inference.plugins.module_utils._display import (
    Screens,
    display_signs,
    read_screens,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import (
    GpuHostError,
    UnreadableError,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._pci import (
    DEVICES,
    PciDevice,
    normalize_address,
    read_devices,
    slot_of,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader


@dataclass(frozen=True)
class Companion:
    """Another function of a GPU's card: sound, USB, UCSI."""

    address: str
    class_: str
    driver: str | None
    driver_override: str | None


@dataclass(frozen=True)
class Bar:
    """A memory or I/O window; size 0 means that the firmware gave it no place."""

    index: int
    size_bytes: int


@dataclass(frozen=True)
class Link:
    """PCIe link now and at best, `None` where the kernel does not say."""

    speed: str | None  # "32.0 GT/s PCIe"
    width: int | None
    max_speed: str | None
    max_width: int | None


@dataclass(frozen=True)
class Power:
    """Power state and runtime power management, in the kernel's words."""

    state: str | None  # D0, D3hot, D3cold, error
    control: str | None  # on, auto
    runtime_status: str | None
    d3cold_allowed: bool | None


@dataclass(frozen=True)
class Sriov:
    """Virtual functions; `physfn` is set on a virtual function itself."""

    total_vfs: int | None
    num_vfs: int | None
    physfn: str | None


@dataclass(frozen=True)
class Gpu:
    """One GPU; the fields are the keys of the modules' results."""

    address: str
    id: str
    subsystem_id: str | None
    class_: str
    name: str | None
    architecture: str
    has_fsp: str  # yes, no, unknown
    numa_node: int | None
    driver: str | None
    driver_override: str | None
    device_minor: int | None
    iommu_group: _iommu.IommuGroup | None
    companions: tuple[Companion, ...]
    bars: tuple[Bar, ...]
    link: Link
    power: Power
    reset_methods: tuple[str, ...]
    sriov: Sriov
    users: tuple[_owners.User, ...]
    users_unknown: tuple[str, ...]  # while not empty, the GPU may be in use
    owners: tuple[_owners.Owner, ...]
    config_readable: bool | None  # False: it reads all ones, the card is off the bus
    mig: bool | None  # None: not on nvidia, or unreadable
    display: tuple[str, ...]  # signs that it drives the host's display, a sentence each


def read_gpus(
    host: Reader, addresses: Iterable[str] | None = None, wake: Collection[str] = ()
) -> list[Gpu]:
    """Return the GPUs of the host, or those at the given addresses, by address.

    Args:
        host: the host.
        addresses: of the GPUs to return, in any form; `None` for all.
        wake: full addresses of GPUs whose configuration space is read even when they are in D3cold.
            That wakes them, or shows that they do not wake: it then reads all ones.

    Raises:
        GpuHostError: an address is malformed, listed twice, absent, or not a GPU.
        UnreadableError: something needed for every answer could not be read.
    """
    devices = {device.address: device for device in read_devices(host)}
    cards = sorted(address for address, device in devices.items() if device.is_gpu)
    wanted = cards if addresses is None else _chosen(addresses, devices, cards)
    slots: dict[str, list[PciDevice]] = {}
    for device in devices.values():
        slots.setdefault(slot_of(device.address), []).append(device)
    companions = {card: [one for one in slots[slot_of(card)] if not one.is_gpu] for card in cards}
    minors = _read_minors(host, cards)
    doubts: dict[str, list[str]] = {card: [] for card in cards}
    numbers: dict[_owners.Number, list[str]] = {}
    majors = _owners.read_majors(host)
    for card in cards:
        functions = (devices[card], *companions[card])
        groups = {one.group for one in functions if one.group is not None}
        names = [one.address for one in functions]
        try:
            found = _owners.card_numbers(host, majors, minors.get(card), groups, names)
        except UnreadableError as error:
            doubts[card].append(str(error))
            continue
        for number in found:
            numbers.setdefault(number, []).append(card)
    users, unknown = _owners.read_users(host, numbers)
    try:
        owners = _owners.read_owners(host, _owners.read_guests(host), numbers, cards)
    except UnreadableError as error:
        owners = {}
        unknown.append(f"guests: {error}")
    screens = read_screens(host)
    states = _read_states(
        host,
        [one.address for card in wanted for one in (devices[card], *companions[card])],
        wake,
    )
    gpus = []
    for card in wanted:
        gpu = _describe(host, (devices[card], *companions[card]), minors.get(card), states, screens)
        if card not in minors:
            doubts[card].append(f"{_information(card)} gave no answer")
        gpus.append(
            replace(
                gpu,
                users=tuple(users.get(card, [])),
                users_unknown=(*unknown, *doubts[card], *gpu.users_unknown),
                owners=tuple(owners.get(card, [])),
            )
        )
    return gpus


def choose(host: Reader, addresses: Iterable[str]) -> list[str]:
    """Return addresses of GPUs in full form, sorted.

    Raises:
        GpuHostError: an address is malformed, listed twice, absent, or not a GPU.
    """
    devices = {device.address: device for device in read_devices(host)}
    cards = sorted(address for address, device in devices.items() if device.is_gpu)
    return _chosen(addresses, devices, cards)


def _chosen(addresses: Iterable[str], devices: dict[str, PciDevice], cards: list[str]) -> list[str]:
    chosen: list[str] = []
    for text in addresses:
        address = normalize_address(text)
        if address in chosen:
            raise GpuHostError(f"{address} is listed twice: name each GPU once")
        if address not in devices:
            raise GpuHostError(
                f"{address}: this host has no PCI device there; its NVIDIA GPUs are at "
                f"{', '.join(cards) or 'no address'}"
            )
        if address not in cards:
            device = devices[address]
            near = [card for card in cards if slot_of(card) == slot_of(address)]
            hint = f"the GPU of that card is {near[0]}" if near else "use gpu_info to list GPUs"
            raise GpuHostError(
                f"{address} is not an NVIDIA GPU (id {device.id}, class {device.class_}): {hint}"
            )
        chosen.append(address)
    return sorted(chosen)


def _information(address: str) -> str:
    return f"/proc/driver/nvidia/gpus/{address}/information"


def _read_minors(host: Reader, cards: Sequence[str]) -> dict[str, int | None]:
    """Return N of each card's `/dev/nvidiaN`, from the file the driver shows while bound.

    `None` while the driver is not bound. A card whose file gives no answer has no entry: the
    driver is in trouble, perhaps in its remove function, which it enters after the `driver` link
    in sysfs is gone.
    """
    texts = ask(lambda card: host.text(_information(card)), cards)
    found: dict[str, int | None] = {}
    for card, text in texts.items():
        match = re.search(r"^Device Minor:\s*(\d+)\s*$", text or "", re.MULTILINE)
        found[card] = int(match[1]) if match else None
    return found


def _read_states(
    host: Reader, functions: Sequence[str], wake: Collection[str]
) -> dict[str, dict[str, Any]]:
    """Read what the kernel shows under the device lock, or only when the device is awake.

    `driver_override` and `sriov_numvfs` wait for a pending bind or unbind, and the configuration
    space for a change of the power state. The latter is read in D3cold only of those in `wake`, for
    it wakes a device (pci_config_pm_runtime_get in the kernel).

    Returns:
        `override`, `vfs`, `config` (its first four bytes in hexadecimal) and `asleep` of each
        function; those that gave no answer in two seconds are left out.
    """

    def read(address: str) -> str:
        at = f"{DEVICES}/{address}"
        asleep = _optional(host, f"{at}/power_state") == "D3cold"
        try:
            config = None if asleep and address not in wake else host.head(f"{at}/config", 4)
        except UnreadableError:
            config = None
        return json.dumps(
            {
                "override": host.text(f"{at}/driver_override"),
                "vfs": host.text(f"{at}/sriov_numvfs"),
                "config": config and config.hex(),
                "asleep": asleep,
            }
        )

    return {address: json.loads(text or "") for address, text in ask(read, functions).items()}


def _describe(
    host: Reader,
    functions: Sequence[PciDevice],
    minor: int | None,
    states: Mapping[str, Mapping[str, Any]],
    screens: Screens,
) -> Gpu:
    device, *companions = functions
    at = f"{DEVICES}/{device.address}"
    name, architecture, has_fsp = identify(device.id)
    state = states.get(device.address, {})
    config = state.get("config")
    windows = _windows(host.text(f"{at}/resource") or "")
    unknown = []
    if device.driver == "nvidia" and minor is None:
        unknown.append("/proc/driver/nvidia does not say which device node belongs to this GPU")
    unknown += [
        f"driver_override of {function.address} cannot be read: "
        "a bind or unbind of it may be pending in the kernel"
        for function in functions
        if function.address not in states
    ]
    return Gpu(
        address=device.address,
        id=device.id,
        subsystem_id=device.subsystem_id,
        class_=device.class_,
        name=name,
        architecture=architecture,
        has_fsp=has_fsp,
        numa_node=device.numa_node,
        driver=device.driver,
        driver_override=_override(states, device.address),
        device_minor=minor,
        iommu_group=None if device.group is None else _iommu.read_group(host, device.group),
        companions=tuple(
            Companion(
                companion.address,
                companion.class_,
                companion.driver,
                _override(states, companion.address),
            )
            for companion in companions
        ),
        bars=tuple(
            Bar(index, last - first + 1 if last > first else 0) for index, first, last in windows
        ),
        # newer kernels wake a device for this
        link=Link(None, None, None, None) if state.get("asleep") else _link(host, at),
        power=Power(
            state=_optional(host, f"{at}/power_state"),
            control=_optional(host, f"{at}/power/control"),
            runtime_status=_optional(host, f"{at}/power/runtime_status"),
            d3cold_allowed={"0": False, "1": True}.get(
                _optional(host, f"{at}/d3cold_allowed") or ""
            ),
        ),
        reset_methods=tuple((_optional(host, f"{at}/reset_method") or "").split()),
        sriov=Sriov(
            total_vfs=_count(_optional(host, f"{at}/sriov_totalvfs")),
            num_vfs=_count(state.get("vfs")),
            physfn=(host.link(f"{at}/physfn") or "").rpartition("/")[2] or None,
        ),
        users=(),
        users_unknown=tuple(unknown),
        owners=(),
        config_readable=config != "ffffffff" if config else None,
        mig=_mig(host, device.driver, minor),
        display=display_signs(screens, device.address, _boot_vga(host, at), windows),
    )


def _link(host: Reader, at: str) -> Link:
    return Link(
        speed=_optional(host, f"{at}/current_link_speed"),
        width=_count(_optional(host, f"{at}/current_link_width")),
        max_speed=_optional(host, f"{at}/max_link_speed"),
        max_width=_count(_optional(host, f"{at}/max_link_width")),
    )


def _boot_vga(host: Reader, at: str) -> str | None:
    try:
        return host.text(f"{at}/boot_vga")
    except UnreadableError:
        return "1"  # it has one, and nothing says that it is not the one


def _mig(host: Reader, driver: str | None, minor: int | None) -> bool | None:
    """Tell whether the card is divided into MIG instances (drivers since 450 list them)."""
    if driver != "nvidia" or minor is None:
        return None
    try:
        names = host.names(f"{_owners.CAPABILITIES}/gpu{minor}/mig")
    except UnreadableError:
        return None
    return any(re.fullmatch(r"gi\d+", name) for name in names)


def _override(states: Mapping[str, Mapping[str, Any]], address: str) -> str | None:
    text = states.get(address, {}).get("override")
    return None if text in ("", "(null)") else text


def _optional(host: Reader, path: str) -> str | None:
    """Read a fact on which no decision to change anything rests: unreadable is `None` too."""
    try:
        return host.text(path)
    except UnreadableError:
        return None


def _count(text: str | None) -> int | None:
    return int(text) if text and text.isdigit() else None


def _windows(resource: str) -> list[tuple[int, int, int]]:
    """Parse `resource`: a line per window with start, end and flags; the first six are BARs."""
    windows = []
    for index, line in enumerate(resource.splitlines()[:6]):
        first, last, flags = (int(word, 16) for word in line.split())
        if flags:
            windows.append((index, first, last))
    return windows
