# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.

"""Whether a host needs a reboot, and whether one would hurt anybody. Nothing is done here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ansible_collections.gpuhost.inference.plugins.module_utils._boot import Boot, NextBoot
from ansible_collections.gpuhost.inference.plugins.module_utils._layout import Entry
from ansible_collections.gpuhost.inference.plugins.module_utils._owners import Guest

_STALL = (
    "a clean shutdown may never end, because the kernel waits for this GPU: be ready to cut the "
    "power by the host's BMC (ipmitool chassis power cycle), then set host_reboot_force"
)
_LAST = 1 << 31  # guests without a startup order come after those that have one


@dataclass(frozen=True)
class Trouble:
    """What of a finding matters here."""

    id: str
    subject: str
    evidence: str


@dataclass(frozen=True)
class Running:
    """A guest of the layout that runs and has to be stopped for a reboot."""

    kind: str
    vmid: int
    name: str | None


@dataclass(frozen=True)
class Reboot:
    """A reboot as it would be now.

    Attributes:
        reasons: why one is needed; none: it is not.
        problems: why none may be done, whoever allows it.
        stall: why the host may never come to its end when it shuts down cleanly.
        guests: the running guests of the layout in the order in which Proxmox starts them; they
            are to be stopped the other way round.
    """

    reasons: tuple[str, ...]
    problems: tuple[str, ...]
    stall: tuple[str, ...]
    guests: tuple[Running, ...]


def plan_reboot(
    boot: Boot,
    following: NextBoot,
    guests: Sequence[Guest] | None,
    layout: Iterable[Entry],
    troubles: Iterable[Trouble],
) -> Reboot:
    """Judge a reboot by everything that was read of the host.

    Args:
        boot: How the host was booted.
        following: How it will be booted next.
        guests: Its guests, `None` when they could not be read.
        layout: The entries of the declared layout.
        troubles: Findings; those of an unfinished change, of an armed trial of types, of an
            incomplete initramfs of the next kernel, and of unbinds that never returned count; the
            last are a reason, too.
    """
    ours = {(entry.guest.kind, entry.guest.vmid) for entry in layout if entry.guest}
    problems = [] if guests is not None else ["the guests of this host could not be read"]
    for guest in guests or ():
        name = f"{guest.kind} {guest.vmid}" + (f" ({guest.name})" if guest.name else "")
        if guest.running is None:
            problems.append(f"whether guest {name} runs could not be found out")
        elif guest.running and (guest.kind, guest.vmid) not in ours:
            problems.append(f"guest {name} runs and is not of the layout: its owner has to stop it")
    problems += following.problems
    reasons = [f"the running kernel was started without {word}" for word in boot.pending.missing]
    reasons += [f"the running kernel was started with {word}" for word in boot.pending.extra]
    if following.kernel and boot.kernel != following.kernel:
        reasons.append(f"kernel {boot.kernel} runs, and {following.kernel} is installed")
    stall = []
    for trouble in troubles:
        image = f"/boot/initrd.img-{following.kernel}"
        if trouble.id == "unbind-stuck":
            reasons.append(f"nothing but a reboot frees {trouble.subject}: its removal hangs")
            stall.append(f"{trouble.subject}: {trouble.evidence}; {_STALL}")
        elif trouble.id in ("unfinished-change", "trial-armed") or (
            trouble.id == "initramfs-incomplete" and trouble.subject == image
        ):
            problems.append(f"{trouble.subject}: {trouble.evidence}")
    running = [guest for guest in guests or () if (guest.kind, guest.vmid) in ours if guest.running]
    return Reboot(
        tuple(reasons),
        tuple(problems),
        tuple(stall),
        tuple(
            Running(guest.kind, guest.vmid, guest.name) for guest in sorted(running, key=_startup)
        ),
    )


def _startup(guest: Guest) -> tuple[int, int]:
    """Return the place of a guest when Proxmox starts all: `startup: order=N` first, then by id."""
    order = re.search(r"(?:^|,)(?:order=)?(\d+)(?:,|$)", dict(guest.config).get("startup", ""))
    return (int(order[1]) if order else _LAST, guest.vmid)
