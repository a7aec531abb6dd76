# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.

"""Have those let go of a GPU who do so when asked, and bring them back once afterwards.

nvidia-persistenced lets go of one GPU when its persistence mode is switched off, which nvidia-smi
asks of it; it keeps the others. A systemd unit is only stopped when the operator listed it.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from ansible_collections.gpuhost.inference.plugins.module_utils._gpu import Gpu, read_gpus
from ansible_collections.gpuhost.inference.plugins.module_utils._guards import (
    Target,
    host_unit,
    is_persistence,
    leaves_when_asked,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._kernel_write import Machine

_PAUSE = 0.5  # seconds between two looks


@dataclass(frozen=True)
class Quiet:
    """Who is asked to let go: GPUs by persistence mode, and units to stop."""

    persistence: tuple[str, ...]
    services: tuple[str, ...]


def plan_quiet(targets: Iterable[Target], services: Collection[str]) -> Quiet:
    """Return who has to be asked before these GPUs move."""
    persistence, units = set(), set()
    for target in targets:
        for user in target.gpu.users if target.moves else ():
            unit = host_unit(user)
            if unit is not None and unit in services:
                units.add(unit)
            elif is_persistence(user):
                persistence.add(target.gpu.address)
    return Quiet(tuple(sorted(persistence)), tuple(sorted(units)))


def quiesce(
    machine: Machine, quiet: Quiet, moving: Sequence[str], services: Collection[str]
) -> list[str]:
    """Ask them, and wait until nobody of them holds one of the GPUs any more.

    Returns:
        What went wrong, in sentences; the GPUs are free when it is empty.
    """
    try:
        for address in quiet.persistence:
            machine.run(["nvidia-smi", "-i", address, "-pm", "0"], machine.timeout)
        for unit in quiet.services:
            machine.run(["systemctl", "stop", unit], machine.drain)
    except GpuHostError as error:
        return [f"asking to let go of a GPU failed: {error}"]
    return _drained(machine, moving, services)


def _drained(machine: Machine, moving: Sequence[str], services: Collection[str]) -> list[str]:
    end = time.monotonic() + machine.drain
    while True:
        left = [
            f"{gpu.address} is still held by process {user.pid} ({user.command[:80]}) after "
            f"{machine.drain:g} s, although it was asked to let go"
            for gpu in read_gpus(machine.host, moving)
            for user in gpu.users
            if leaves_when_asked(user, services)
        ]
        if not left or time.monotonic() > end:
            return left
        time.sleep(_PAUSE)


def resume(machine: Machine, quiet: Quiet, gpus: Iterable[Gpu]) -> list[str]:
    """Bring back what was quiesced: units, and persistence mode where nvidia has the GPU again.

    Returns:
        Warnings: what did not come back. The GPUs themselves are not undone for that.
    """
    again = [g.address for g in gpus if g.driver == "nvidia" and g.address in quiet.persistence]
    commands = [["systemctl", "start", unit] for unit in reversed(quiet.services)]
    commands += [["nvidia-smi", "-i", address, "-pm", "1"] for address in again]
    warnings = []
    for command in commands:
        try:
            machine.run(command, machine.drain)
        except GpuHostError as error:
            warnings.append(f"{error}; run {' '.join(command)} by hand")
    return warnings
