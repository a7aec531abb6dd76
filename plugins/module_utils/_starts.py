# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.

"""Starts of GPUs after a reset, written down where only root can.

The driver says nothing when a GPU starts well without a display, and what a program writes into the
kernel's log counts for nothing there, for any other could write it too.
"""

from __future__ import annotations

import json
import re

from ansible_collections.gpuhost.inference.plugins.module_utils._errors import (
    GpuHostError,
    UnreadableError,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._kernel_log import newest, this_boot
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader
from ansible_collections.gpuhost.inference.plugins.module_utils._transaction import FOLDER, keep

PATH = f"{FOLDER}/started.json"
_VERSION = 1
_FULL = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


def read_starts(host: Reader) -> dict[str, float]:
    """Return when GPUs were started in this boot, in seconds after it, by address.

    What cannot be read says nothing: then the faults before a start count on.
    """
    try:
        found = json.loads(host.text(PATH) or "null")
        boot = this_boot(host)
    except (UnreadableError, ValueError, RecursionError):
        return {}
    if not isinstance(found, dict) or found.get("version") != _VERSION:
        return {}
    addresses = found.get("addresses")
    if boot is None or found.get("boot") != boot or not isinstance(addresses, dict):
        return {}
    return {
        address: float(seconds)
        for address, seconds in addresses.items()
        if _FULL.fullmatch(address) and isinstance(seconds, (int, float))
    }


def note_start(host: Reader, address: str) -> None:
    """Write down that a GPU works as of the newest message of the kernel.

    Raises:
        GpuHostError: that time or the boot is not known, or it cannot be written.
    """
    seconds, boot = newest(host), this_boot(host)
    if seconds is None or boot is None:
        raise GpuHostError("the time of the kernel's log could not be read")
    addresses = {**read_starts(host), address: seconds}
    keep(host.root / PATH[1:], {"version": _VERSION, "boot": boot, "addresses": addresses})
