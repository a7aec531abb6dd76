# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.

"""The faults of earlier boots, out of the journal, each boot by its id."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Callable

from ansible_collections.gpuhost.inference.plugins.module_utils._command import run
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from ansible_collections.gpuhost.inference.plugins.module_utils._kernel_log import (
    KernelLog,
    read_live,
    this_boot,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader

# An entry of `journalctl --list-boots`, the oldest first; newer versions print a heading too
_LISTED = re.compile(r"^\s*-?\d+\s+([0-9a-f]{32})\b", re.MULTILINE)


@dataclass(frozen=True)
class PastGpu:
    """A GPU at the end of an earlier boot; words as in the documentation of gpu_health_info."""

    address: str
    verdict: str
    faults: tuple[str, ...]


@dataclass(frozen=True)
class PastBoot:
    """One earlier boot.

    Attributes:
        boot_id: its id, `None` for boots that are not kept.
        first: time of its first message.
        last: time of its last message.
        error: why it could not be judged.
        gpus: the GPUs.
    """

    boot_id: str | None
    first: str | None
    last: str | None
    error: str | None
    gpus: tuple[PastGpu, ...] = ()


# What stood at the end of each boot before, the last one first: kinds of faults by address
Before = Sequence[Mapping[str, Collection[str]]]
_Judge = Callable[[KernelLog], "tuple[Sequence[PastGpu], Mapping[str, Collection[str]]]"]


def read_history(
    host: Reader, count: int, timeout: float, judge: _Judge
) -> tuple[list[PastBoot], Before]:
    """Judge so many boots before this one, the last one first.

    Args:
        host: this host.
        count: how many.
        timeout: seconds for the list of boots, and for the log of each.
        judge: returns the GPUs, and the kinds of faults that stood at the end, by address.
    """
    try:
        kept = _LISTED.findall(
            run(["journalctl", "--no-pager", "--quiet", "--list-boots"], timeout)
        )
    except GpuHostError as error:
        return [PastBoot(None, None, None, str(error))], []
    now = this_boot(host)
    earlier = kept[: kept.index(now)] if now in kept else kept
    boots: list[PastBoot] = []
    before: list[Mapping[str, Collection[str]]] = []
    for boot_id in reversed(earlier[-count:]):
        log = read_live(["journal"], boot=boot_id, timeout=timeout)
        gpus, kinds = judge(log)
        said = log.summary()
        if said.readable:
            boots.append(PastBoot(boot_id, said.first, said.last, None, tuple(gpus)))
        else:
            boots.append(PastBoot(boot_id, None, None, "; ".join(said.gaps)))
        before.append(kinds)
    if len(earlier) < count:
        kept_boots = f"{len(earlier)} earlier boot{'s' if len(earlier) != 1 else ''}"
        boots.append(PastBoot(None, None, None, f"the journal keeps {kept_boots}, not {count}"))
    return boots, before
