# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.

"""PCI addresses and devices, as sysfs shows them (Documentation/ABI/testing/sysfs-bus-pci)."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

from ansible_collections.gpuhost.inference.plugins.module_utils._errors import (
    GpuHostError,
    UnreadableError,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader

DEVICES = "/sys/bus/pci/devices"
DRIVERS = "/sys/bus/pci/drivers"

_ADDRESS = re.compile(r"(?:([0-9a-f]{1,8}):)?([0-9a-f]{2}):([01][0-9a-f])\.([0-7])")


@dataclass(frozen=True)
class PciDevice:
    """One PCI function. Files that can block behind a hung driver are not read here."""

    address: str
    id: str  # "10de:2bb5"
    subsystem_id: str | None
    class_: str  # "0x030200"
    driver: str | None
    numa_node: int | None  # None also where the kernel says -1, unknown
    group: int | None  # number of its IOMMU group
    port: str | None  # the bridge above it

    @property
    def is_gpu(self) -> bool:
        """Tell whether it is an NVIDIA display device: VGA (0x0300) or 3D controller (0x0302)."""
        return self.id.startswith("10de:") and self.class_.startswith(("0x0300", "0x0302"))

    @property
    def is_bridge(self) -> bool:
        """Tell whether it is a host or PCI bridge, which no IOMMU rule counts as an endpoint."""
        return self.class_.startswith(("0x0600", "0x0604"))


def as_result(value: Any) -> dict[str, Any]:
    """Return a dataclass as a module result; `class_` becomes `class`."""
    return asdict(value, dict_factory=lambda items: {key.rstrip("_"): item for key, item in items})


def normalize_address(text: str) -> str:
    """Return a PCI address in full form, `0000:41:00.0`.

    Short (`41:00.0`), upper-case and nvidia-smi's (`00000000:41:00.0`) forms are understood.

    Raises:
        GpuHostError: it is no PCI address.
    """
    match = _ADDRESS.fullmatch(str(text).strip().lower())
    if not match:
        raise GpuHostError(
            f"'{text}' is not a PCI address: write domain:bus:device.function as in 0000:41:00.0 "
            "(lspci -D lists them)"
        )
    return f"{int(match[1] or '0', 16):04x}:{match[2]}:{match[3]}.{match[4]}"


def slot_of(address: str) -> str:
    """Return the address without its function: what all functions of one card share."""
    return address.rpartition(".")[0]


def bridges_above(host: Reader, address: str) -> tuple[str, ...]:
    """Return the addresses of all bridges above a device, the nearest last; empty if unknown."""
    try:
        path = host.link(f"{DEVICES}/{address}") or ""
    except UnreadableError:
        return ()
    return tuple(part for part in path.split("/")[:-1] if _ADDRESS.fullmatch(part))


def read_device(host: Reader, address: str) -> PciDevice | None:
    """Return the device at a full address, `None` when there is none.

    The one-read `uevent` file is avoided on purpose: kernels 6.11 and later may show it under the
    device lock, which a hung unbind holds for ever.

    Raises:
        UnreadableError: it is there but cannot be read.
    """
    at = f"{DEVICES}/{address}"
    vendor, class_ = host.number(f"{at}/vendor"), host.text(f"{at}/class")
    if vendor is None or class_ is None:
        return None
    device = host.number(f"{at}/device") or 0
    maker = host.number(f"{at}/subsystem_vendor")
    product = host.number(f"{at}/subsystem_device")
    node = host.number(f"{at}/numa_node")
    driver = host.link(f"{at}/driver")
    group = host.link(f"{at}/iommu_group")
    above = bridges_above(host, address)
    return PciDevice(
        address=address,
        id=f"{vendor:04x}:{device:04x}",
        subsystem_id=(None if maker is None or product is None else f"{maker:04x}:{product:04x}"),
        class_=class_,
        driver=driver and driver.rpartition("/")[2],
        numa_node=None if node is None or node < 0 else node,
        group=int(group.rpartition("/")[2]) if group else None,
        port=above[-1] if above else None,
    )


def read_devices(host: Reader) -> list[PciDevice]:
    """Return all PCI devices of the host, by address."""
    found = (read_device(host, address) for address in host.names(DEVICES))
    return [device for device in found if device is not None]
