# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.

"""Names and chips of NVIDIA GPUs by PCI device id."""

from __future__ import annotations

# Device ids: g_nv_name_released.h of the open driver 595.45.04, and pci.ids.
NAMES = {
    "20b0": "A100",
    "20b2": "A100",
    "20b5": "A100",
    "20b7": "A30",
    "2204": "GeForce RTX 3090",
    "2230": "RTX A6000",
    "2231": "RTX A5000",
    "2235": "A40",
    "2236": "A10",
    "2321": "H100 NVL",
    "2322": "H800",
    "2324": "H800",
    "2329": "H20",
    "2330": "H100 SXM",
    "2331": "H100 PCIe",
    "2335": "H200",
    "2339": "H100 SXM 94 GB",
    "233a": "H800",
    "233b": "H200 NVL",
    "2342": "GH200",
    "2348": "GH200 144 GB",
    "24b0": "RTX A4000",
    "2684": "GeForce RTX 4090",
    "26b1": "RTX 6000 Ada",
    "26b5": "L40",
    "26b9": "L40S",
    "27b8": "L4",
    "2901": "B200",
    "2920": "B100",
    "2941": "GB200",
    "29bc": "B100",
    "2b85": "GeForce RTX 5090",
    "2b87": "GeForce RTX 5090 D",
    "2b8c": "GeForce RTX 5090 D v2",
    "2bb1": "RTX PRO 6000 Blackwell Workstation Edition",
    "2bb2": "RTX PRO 6000D",
    "2bb3": "RTX PRO 5000 Blackwell",
    "2bb4": "RTX PRO 6000 Blackwell Max-Q Workstation Edition",
    "2bb5": "RTX PRO 6000 Blackwell Server Edition",
    "2bb9": "RTX 6000D",
    "2bbc": "RTX PRO 6000D",
    "2c02": "GeForce RTX 5080",
    "2c05": "GeForce RTX 5070 Ti",
    "2c31": "RTX PRO 4500 Blackwell",
    "2c33": "RTX PRO 4000 Blackwell SFF Edition",
    "2c34": "RTX PRO 4000 Blackwell",
    "2d04": "GeForce RTX 5060 Ti",
    "2d05": "GeForce RTX 5060",
    "2d30": "RTX PRO 2000 Blackwell",
    "2d83": "GeForce RTX 5050",
    "2f04": "GeForce RTX 5070",
    "3182": "B300 SXM6",
    "31a1": "GB300 MaxQ",
    "31c2": "GB300",
}

# Ids are given out in blocks per chip. Which chips boot through an FSP: HAL tables of the same
# driver; the SoC chips (GB10B, GB20B) boot through SEC2 instead.
CHIPS = (
    (0x1D80, 0x1DFF, "Volta", "no"),
    (0x1E00, 0x1FFF, "Turing", "no"),
    (0x2080, 0x20FF, "Ampere", "no"),
    (0x2180, 0x21FF, "Turing", "no"),
    (0x2200, 0x228A, "Ampere", "no"),
    (0x2300, 0x23FF, "Hopper", "yes"),
    (0x2400, 0x25FF, "Ampere", "no"),
    (0x2680, 0x28FF, "Ada", "no"),
    (0x2900, 0x29FF, "Blackwell", "yes"),
    (0x2B00, 0x2B7F, "Blackwell", "no"),
    (0x2B80, 0x2C7F, "Blackwell", "yes"),
    (0x2D00, 0x2DFF, "Blackwell", "yes"),
    (0x2E00, 0x2E7F, "Blackwell", "no"),
    (0x2F00, 0x2F7F, "Blackwell", "yes"),
    (0x3000, 0x30FF, "Rubin", "unknown"),
    (0x3180, 0x327F, "Blackwell", "yes"),
)


def identify(id_: str) -> tuple[str | None, str, str]:
    """Return (name, architecture, has_fsp) for an id such as `10de:2bb5`.

    An id outside the table gets `unknown`, never "no": a newer chip most likely has an FSP.
    """
    device = id_.partition(":")[2]
    for first, last, architecture, has_fsp in CHIPS:
        if first <= int(device, 16) <= last:
            return NAMES.get(device), architecture, has_fsp
    return NAMES.get(device), "unknown", "unknown"
