# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.

"""What the Xids of the driver mean for a GPU (NVIDIA's Xid catalog, and nverror.h of the driver).

Some have rows of their own in `_fault_kinds`: 79 (off the bus), 119 and 120 (GSP), and 143, which
is part of an attempt to start the GPU. 154 names the action that the driver wants.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from ansible_collections.gpuhost.inference.plugins.module_utils._fault_kinds import (
    BY_ID,
    RUNGS,
    XID_SOURCE,
    Kind,
)

GONE = 79
GSP = (119, 120)
MMU_FAULT = 31  # of an application, but telling next to an IOMMU fault
START = 143
ADVICE = 154

# The application did something wrong, or ended, or the driver took note of something that needs
# nothing: the catalog restarts or ignores, and looks into the application. Never ill health.
HARMLESS = frozenset(
    (
        *(11, 13, 14, 25, 31, 37, 38, 43, 44, 45, 66, 67, 69, 80),
        *(106, 107, 108, 137, 141, 152, 153, 160, 161, 162, 176),
    )
)

_APPLICATION = ("application", "reset", "reboot", "power-off", "hardware")
_RESET = _APPLICATION[1:]
_REBOOT = _APPLICATION[2:]
_POWER_OFF = _APPLICATION[3:]
_WEAR = ("hardware",)

_ENGINES = (
    *(39, 40, 41, 60, 68, 70, 71, 72, 75, 76, 77, 82, 83, 84, 85, 86, 88, 89, 139, 142),
    *range(96, 106),
    *range(126, 136),
)
# numbers, verdict, what happened, ladder
_ROWS: tuple[tuple[tuple[int, ...], str, str, tuple[str, ...]], ...] = (
    (_ENGINES, "degraded", "an engine of it raised an exception", _APPLICATION),
    ((8,), "degraded", "it stopped processing for an application", _APPLICATION),
    ((32,), "degraded", "a command stream to it was corrupted", _APPLICATION),
    ((46,), "failed", "it stopped processing", _RESET),
    ((48,), "degraded", "a memory error could not be corrected", _RESET),
    ((54,), "failed", "its power cable is not connected", _WEAR),
    ((61,), "degraded", "its power controller stopped at a breakpoint", _RESET),
    ((62, 169), "failed", "one of its micro-controllers halted", _RESET),
    ((63, 156), "degraded", "a broken part of its memory is set aside by a reset", _RESET),
    ((64,), "degraded", "a broken part of its memory could not be set aside", ("reset", *_WEAR)),
    ((74,), "degraded", "an NVLink of it failed", _RESET),
    ((78,), "degraded", "a vGPU could not start: host and guest driver must match", ("driver",)),
    ((92,), "degraded", "it corrects many memory errors", _WEAR),
    ((93,), "degraded", "its InfoROM is worn, or protected against writing", _WEAR),
    ((94,), "degraded", "a memory error ended one application, others run on", _APPLICATION),
    ((95,), "failed", "a memory error reached several applications", _RESET),
    ((109,), "degraded", "it could not switch between applications in time", _RESET),
    ((110,), "failed", "it reported a security fault", _POWER_OFF),
    ((121,), "degraded", "its link to the CPU had errors that were corrected", _RESET),
    ((136,), "degraded", "an NVLink of it could not be trained", _RESET),
    ((140,), "failed", "memory errors could not be handled", _RESET),
    ((*range(144, 151), 155), "degraded", "an NVLink of it failed", _RESET),
    ((151,), "degraded", "the keys of a confidential guest could not be changed", ("application",)),
    ((157,), "degraded", "a broken part of its memory has no spare left", _WEAR),
    ((158,), "failed", "it does not answer in time", _RESET),
    ((159,), "degraded", "its link to the CPU had an error", _APPLICATION),
    ((163,), "degraded", "its power smoothing is off", ("driver", *_RESET)),
    ((164, 165), "degraded", "its power smoothing is worn", _WEAR),
    ((166, 170), "degraded", "an NVLink was not ready for encrypted traffic", _RESET),
    ((167,), "failed", "its PCIe interface does not answer in time", _REBOOT),
    ((168,), "degraded", "it holds back memory with errors", _RESET),
    ((171, 175), "degraded", "a memory error could not be corrected", _RESET),
    ((172,), "degraded", "an error in its on-chip memory could not be corrected", _RESET),
)
_MEANINGS = {
    number: (verdict, meaning, ladder)
    for numbers, verdict, meaning, ladder in _ROWS
    for number in numbers
}
_UNKNOWN = (
    "degraded",
    "the driver reported an Xid whose meaning is not known here",
    _APPLICATION,
)
_NVLINK = frozenset((*range(144, 151),))

_ACTION = re.compile(r" to 0x(?P<code>[0-9a-f]+)(?: \((?P<words>[^)]*)\))?", re.IGNORECASE)
# Beginnings of the ladder by what the action's text contains, first match; nvml.h tells what they
# mean: after the first two the GPU works on with less
_BY_WORDS = (
    ("drain and reset", "reset", "degraded"),
    ("drain", "application", "degraded"),
    ("reboot", "reboot", "failed"),
    ("reset", "reset", "failed"),
    ("flr", "reset", "failed"),
    ("imex", "application", "degraded"),
)
# NV2080_CTRL_GPU_RECOVERY_ACTION: the code decides only where the text does not
_BY_CODE = {
    1: ("reset", "failed"),
    2: ("reboot", "failed"),
    3: ("application", "degraded"),
    4: ("reset", "degraded"),
}


@dataclass(frozen=True)
class Advice:
    """The action that the driver wants (Xid 154).

    Attributes:
        words: the driver's name for it.
        rung: the lowest one that does as much.
        verdict: on a GPU that waits for it.
    """

    words: str
    rung: str
    verdict: str


@lru_cache(maxsize=256)
def _kind(number: int) -> Kind:
    """Return the kind of fault of an Xid without a row of its own."""
    verdict, meaning, ladder = _MEANINGS.get(number, _UNKNOWN)
    return Kind(
        f"xid-{number}",
        "xid",
        "event",
        None,
        ladder,
        "" if number in _MEANINGS else "See NVIDIA's Xid catalog.",
        XID_SOURCE,
        verdict=verdict,
        meaning=meaning,
    )


def kind_of(number: int, rest: str) -> Kind | None:
    """Return the kind of fault an Xid is, `None` for those that are none.

    Args:
        number: of the Xid.
        rest: its message, behind the number.
    """
    if number == GONE:
        return BY_ID["xid-79"]
    if number in GSP:
        return BY_ID["gsp-rpc"]
    if number in HARMLESS or (number in _NVLINK and "Nonfatal" in rest):
        return None
    return _kind(number)


def advice(rest: str) -> Advice | None:
    """Return what the driver wants by an Xid 154; `None` when it wants nothing any more.

    Args:
        rest: its message, behind the number.
    """
    found = _ACTION.search(rest)
    code = int(found["code"][:8], 16) if found else -1
    words = ((found["words"] if found else None) or "").strip()
    if not code or words.lower() == "none":
        return None
    for part, rung, verdict in _BY_WORDS:
        if part in words.lower():
            return Advice(words, rung, verdict)
    rung, verdict = _BY_CODE.get(code, ("application", "degraded"))
    return Advice(words or f"action 0x{code:x}", rung, verdict)


def raised(ladder: Sequence[str], rung: str) -> tuple[str, ...]:
    """Return a ladder that begins at a rung, or higher where it did so already."""
    names = list(RUNGS)
    least = names.index(rung)
    above = [name for name in ladder if names.index(name) >= least]
    if ladder and names.index(ladder[0]) >= least:
        return tuple(above)
    return (rung, *(name for name in above if name != rung))
