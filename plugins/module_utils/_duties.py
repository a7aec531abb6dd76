# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.

"""What the host itself does with a PCI function: disks in use, network cards that carry it."""

from __future__ import annotations

import re

from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader


def read_duties(host: Reader, address: str) -> tuple[str, ...]:
    """Return why the host needs the PCI function at this full address, a sentence each."""
    mounts = {}
    for line in (host.text("/proc/self/mountinfo") or "").splitlines():
        fields = line.split()
        mounts.setdefault(fields[2], fields[4])
    duties = []
    for name in host.names("/sys/class/block"):
        if f"/{address}/" in (host.link(f"/sys/class/block/{name}") or ""):
            mounted = mounts.get(host.text(f"/sys/class/block/{name}/dev") or "")
            if mounted:
                duties.append(f"disk {name} is mounted at {mounted}")
    for name in host.names("/sys/class/net"):
        if f"/{address}/" in (host.link(f"/sys/class/net/{name}") or ""):
            default = rf"^{re.escape(name)}\t0{{8}}\t"
            if re.search(default, host.text("/proc/net/route") or "", re.MULTILINE):
                duties.append(f"network card {name} has the default route")
    return tuple(duties)
