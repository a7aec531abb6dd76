# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.

"""Try IOMMU group types for one boot.

A trial is a file. It is armed in one boot, and the next one takes it: the file says so on disk
before the first type is set. So no second boot takes it, however the first one ends, and no control
node is needed for the way back. A boot that nobody confirms in time reboots by itself.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from ansible_collections.gpuhost.inference.plugins.module_utils._persistence import Kept, Layout
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader
from ansible_collections.gpuhost.inference.plugins.module_utils._transaction import (
    FOLDER,
    Store,
    keep,
    sync_folder,
)

TRIAL = f"{FOLDER}/trial.json"
STATES = ("armed", "running", "confirmed", "ended")
_VERSION = 1
_CLOCK = 300  # seconds that the clock of the board may lag behind


@dataclass(frozen=True)
class Trial:
    """What is tried, and how far it is.

    Attributes:
        state: `armed`, for the next boot; `running`, in force in the boot `boot` and not yet
            confirmed; `confirmed`, in force until that boot ends; `ended`, history.
        type: the type tried, as the kernel names it.
        gpus: vendor and device id of each GPU that gets it, by address.
        accept: guards that were lifted for it.
        armed: when, in UTC.
        armed_boot: id of the boot it was armed in.
        since: when it was armed, in seconds since 1970.
        expires: the time after which a boot does not take it any more.
        confirm: seconds after its start within which a boot has to be confirmed.
        boot: id of the boot that took it, `None` before.
        outcome: how it ended, in words; `None` before.
    """

    state: str
    type: str
    gpus: Mapping[str, str]
    accept: tuple[str, ...]
    armed: str
    armed_boot: str
    since: float
    expires: float
    confirm: int
    boot: str | None = None
    outcome: str | None = None

    def in_force(self, boot: str) -> bool:
        """Tell whether GPUs have the tried type in this boot."""
        return self.state in ("running", "confirmed") and self.boot == boot


def read_trial(host: Reader) -> Trial | None:
    """Return the trial of a host, `None` when there is none.

    Raises:
        GpuHostError: it cannot be understood, so nobody can tell what the next boot will do.
    """
    text = host.text(TRIAL)
    if text is None:
        return None
    try:
        kept = json.loads(text)
        if kept.pop("version") != _VERSION or kept["state"] not in STATES:
            raise ValueError("another version")
        trial = Trial(**{**kept, "accept": tuple(kept["accept"]), "gpus": dict(kept["gpus"])})
        moments = time.gmtime(trial.since), time.gmtime(trial.expires)
        if not (moments and trial.confirm > 0 and trial.armed_boot):
            raise ValueError("a value is wrong")
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, OSError) as error:
        raise GpuHostError(
            f"{TRIAL} cannot be understood ({error}), and no boot will take it: move the file away"
        ) from error
    return trial


def save_trial(host: Reader, trial: Trial) -> None:
    """Put a trial on disk.

    Raises:
        GpuHostError: it cannot be written.
    """
    keep(host.root / TRIAL[1:], {"version": _VERSION, **asdict(trial)})


def remove_trial(host: Reader) -> None:
    """Take a trial off the disk, so that it does not come back after a power loss."""
    file = host.root / TRIAL[1:]
    file.unlink()
    sync_folder(file.parent)


def follow(trial: Trial, boot: str, now: float) -> Trial:
    """Return a trial as it is in this boot; pure, it may be asked at any time.

    Args:
        trial: as it stands in the file.
        boot: id of the running boot.
        now: seconds since 1970.
    """
    if trial.state == "armed" and boot != trial.armed_boot:
        if not trial.since - _CLOCK <= now <= trial.expires:  # a clock without battery began anew
            outcome = "expired: its boot came too late, or the clock is wrong"
            return replace(trial, state="ended", outcome=outcome)
        return replace(trial, state="running", boot=boot)
    if trial.state in ("running", "confirmed") and boot != trial.boot:
        outcome = "confirmed" if trial.state == "confirmed" else "not confirmed"
        return replace(trial, state="ended", outcome=f"{outcome}, ended by a reboot")
    return trial


def present_trial(host: Reader) -> Trial | None:
    """Return the trial of a host as it is in this boot, whether or not the file says so yet.

    Raises:
        GpuHostError: it cannot be understood.
    """
    trial = read_trial(host)
    return follow(trial, Store(host).boot(), time.time()) if trial else None


def take(host: Reader, patience: float, sleep: Callable[[float], None] = time.sleep) -> str | None:
    """Note on disk how far the trial is in this boot. Call this with the lock of the host held.

    Args:
        host: that boots.
        patience: seconds to wait for a folder that is still read-only or not mounted.
        sleep: waits.

    Returns:
        A sentence when that changed, else `None`.

    Raises:
        GpuHostError: that could not be noted, so this boot does not take the trial.
    """
    trial = read_trial(host)
    if trial is None:
        return None
    now = follow(trial, Store(host).boot(), time.time())
    if now == trial:
        return None
    end = time.monotonic() + patience
    while True:
        try:
            save_trial(host, now)
        except GpuHostError as error:
            if time.monotonic() < end:
                sleep(1)
                continue
            raise GpuHostError(f"the trial of {now.type} is left alone: {error}") from error
        return told(now)


def told(trial: Trial) -> str:
    """Say in a sentence how far a trial is."""
    what = f"type {trial.type} for {', '.join(sorted(trial.gpus))}"
    if trial.state == "armed":
        until = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(trial.expires))
        return f"the next boot, if it begins before {until}, tries {what}"
    if trial.state == "running":
        return (
            f"this boot tries {what}, and ends by itself {trial.confirm} s after its start unless "
            "it is confirmed"
        )
    if trial.state == "confirmed":
        return f"this boot has {what}, confirmed, until it ends"
    return f"a trial of {what} has ended: {trial.outcome}"


def overlay(layout: Layout, trial: Trial | None, boot: str) -> Layout:
    """Return the layout with the types that are tried in this boot.

    A card that is not the one the trial was armed for, or for a virtual machine by now, keeps the
    type of the layout.
    """
    if trial is None or not trial.in_force(boot):
        return layout
    gpus = tuple(_tried(gpu, trial) for gpu in layout.gpus)
    return Layout(gpus, layout.accept.union(trial.accept))


def _tried(gpu: Kept, trial: Trial) -> Kept:
    if trial.gpus.get(gpu.address) != gpu.id or gpu.driver != "nvidia":
        return gpu
    return replace(gpu, iommu_type=trial.type)


def watch(
    host: Reader, uptime: Callable[[], float], sleep: Callable[[float], None] = time.sleep
) -> str | None:
    """Wait until this boot is confirmed, or its time is over.

    Args:
        host: that runs.
        uptime: seconds since the boot began.
        sleep: waits.

    Returns:
        Why the host has to reboot now, `None` when it has not to.
    """
    trial = None
    while True:
        # one that this boot may still take counts; one that cannot be read is as it was
        with nullcontext() if trial is None else suppress(GpuHostError):
            trial = present_trial(host)
        if trial is None or trial.state != "running":
            return None
        left = trial.confirm - uptime()
        if left <= 0:
            gpus = ", ".join(sorted(trial.gpus))
            return (
                f"nobody confirmed type {trial.type} of {gpus} within {trial.confirm} s after the "
                "boot: rebooting, after which the types are as before"
            )
        sleep(min(left, 3))


def tried(host: Reader) -> dict[str, str]:
    """Return the GPUs on which this boot tries a type without confirmation, each with a sentence.

    Raises:
        GpuHostError: the trial cannot be understood.
    """
    trial = present_trial(host)
    if trial is None or trial.state != "running":
        return {}
    return dict.fromkeys(trial.gpus, told(trial))


def arm(
    host: Reader,
    gpus: Mapping[str, str],
    type_: str,
    accept: Iterable[str],
    limits: tuple[int, int],
) -> Trial:
    """Return a trial for the next boot.

    Args:
        host: that is to boot.
        gpus: vendor and device id of the GPUs, by address.
        type_: to try.
        accept: guards that were lifted for it.
        limits: seconds until the boot has to begin, and within which it has to be confirmed.
    """
    now = time.time()
    return Trial(
        state="armed",
        type=type_,
        gpus=dict(sorted(gpus.items())),
        accept=tuple(sorted(accept)),
        armed=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now)),
        armed_boot=Store(host).boot(),
        since=now,
        expires=now + limits[0],
        confirm=limits[1],
    )


def shown(trial: Trial | None) -> dict[str, Any] | None:
    """Return a trial as modules show it."""
    return None if trial is None else {**asdict(trial), "text": told(trial)}
