# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.

"""Arm, confirm and take back a trial of IOMMU group types; see `_trial` for what one is."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

from ansible_collections.gpuhost.inference.plugins.module_utils._binding import read_situation
from ansible_collections.gpuhost.inference.plugins.module_utils._boot import next_boot, read_boot
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from ansible_collections.gpuhost.inference.plugins.module_utils._gpu import Gpu, choose
from ansible_collections.gpuhost.inference.plugins.module_utils._guards import (
    Reason,
    Situation,
    Target,
    judge,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._iommu import is_old
from ansible_collections.gpuhost.inference.plugins.module_utils._owners import read_guests
from ansible_collections.gpuhost.inference.plugins.module_utils._pci import as_result
from ansible_collections.gpuhost.inference.plugins.module_utils._persistence import (
    Layout,
    check_images,
    hook_problems,
    read_layout,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader
from ansible_collections.gpuhost.inference.plugins.module_utils._transaction import (
    FOLDER,
    Store,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._trial import (
    Trial,
    arm,
    follow,
    overlay,
    read_trial,
    remove_trial,
    save_trial,
    shown,
    told,
)

# Guards that say the same at boot, when no driver has the GPU yet
_AT_BOOT = ("snp-identity", "sme-identity", "fsp-identity", "foreign-type")
_SHORTEST = 60  # seconds; below that a host has not started its guests
_LONGEST = 7 * 24 * 3600  # who has forgotten it by then does not want it
_PROGRAM = "/usr/local/lib/gpuhost/gpuhost-boot"

Run = Callable[[Sequence[str], float], str]


@dataclass(frozen=True)
class Wish:
    """A trial as its user asks for it; see the module iommu_trial."""

    addresses: Sequence[str]
    type: str
    accept: Sequence[str]
    valid_for: int
    confirm_timeout: int


def change_trial(
    host: Reader, state: str, wish: Wish, *, run: Run, now: float, check: bool
) -> dict[str, Any]:
    """Bring the trial of a host to a state, and return the result of the module iommu_trial.

    Args:
        host: the host.
        state: `armed`, `confirmed` or `absent`.
        wish: for `armed`.
        run: runs a command and returns what it prints; see `_command.run`.
        now: seconds since 1970.
        check: tell what would be done, and do nothing.

    Raises:
        GpuHostError: the trial cannot get into that state, and why.
    """
    store = Store(host)
    with nullcontext() if check else store.lock():
        found = read_trial(host)
        current = follow(found, store.boot(), now) if found else None
        if current and state != "confirmed" and _kept(host, current):
            current = replace(current, state="ended", outcome="confirmed, and kept by the layout")
        reasons: list[Reason] = []
        if state == "armed":
            wanted, reasons = _armed(host, current, wish, run)
        elif state == "confirmed":
            wanted = _confirmed(current)
        else:
            _refuse_to_end(current)
            wanted = None
        if current != wanted and not check:
            _save(host, wanted)
    refused = [reason for reason in reasons if not reason.accepted]
    result: dict[str, Any] = {
        "changed": current != wanted,
        "trial": shown(wanted),
        "guards": [as_result(one) for one in reasons],
        "diff": {
            when: told(trial) + "\n" if trial else ""
            for when, trial in (("before", current), ("after", wanted))
        },
    }
    if refused:
        result["msg"] = "nothing was armed: " + "; ".join(map(str, refused))
    return result


def _save(host: Reader, trial: Trial | None) -> None:
    if trial is None:
        remove_trial(host)
    else:
        save_trial(host, trial)


def _kept(host: Reader, trial: Trial) -> bool:
    """Tell whether every boot now gives the GPUs of a confirmed trial its type."""
    if trial.state != "confirmed":
        return False
    types = {gpu.address: gpu.iommu_type for gpu in read_layout(host).gpus}
    return all(types.get(address) == trial.type for address in trial.gpus)


def _confirmed(current: Trial | None) -> Trial:
    if current is None or current.state not in ("running", "confirmed"):
        said = told(current) if current else "there is no trial"
        raise GpuHostError(f"nothing to confirm: {said}. Arm one and reboot first")
    return replace(current, state="confirmed")


def _refuse_to_end(current: Trial | None) -> None:
    if current is not None and current.state in ("running", "confirmed"):
        raise GpuHostError(
            f"{told(current)}: nothing but the end of this boot takes it back. Reboot the host"
        )


def _armed(
    host: Reader, current: Trial | None, wish: Wish, run: Run
) -> tuple[Trial | None, list[Reason]]:
    """Return the trial to keep, the present one when something stands against a new one."""
    if current is not None and current.state in ("running", "confirmed"):
        raise GpuHostError(f"{told(current)}: another one can be armed after its end")
    if not (_SHORTEST <= wish.confirm_timeout <= _LONGEST and 1 <= wish.valid_for <= _LONGEST):
        raise GpuHostError(
            f"confirm_timeout is {wish.confirm_timeout} and valid_for {wish.valid_for}: give "
            f"seconds, at least {_SHORTEST} and 1, at most {_LONGEST}"
        )
    addresses = choose(host, wish.addresses)
    if not addresses:
        raise GpuHostError("addresses is empty: name the GPUs to try the type on")
    situation = read_situation(host, Store(host))
    gpus = [situation.gpus[address] for address in addresses]
    accept = {*wish.accept, "fsp-identity"}  # what a trial is there to find out
    trial = arm(
        host,
        {gpu.address: gpu.id for gpu in gpus},
        wish.type,
        accept,
        (wish.valid_for, wish.confirm_timeout),
    )
    reasons = [
        *_guards(situation, gpus, wish.type, accept),
        *_preconditions(host, trial, situation, run),
    ]
    refused = any(not reason.accepted for reason in reasons)
    same = current is not None and current.state == "armed" and _alike(current, trial)
    return current if refused or same else trial, reasons


def _alike(one: Trial, other: Trial) -> bool:
    """Tell whether two trials differ in nothing but the time they were armed at."""
    return replace(one, armed=other.armed, since=other.since, expires=other.expires) == other


def _guards(
    situation: Situation, gpus: Sequence[Gpu], type_: str, accept: Collection[str]
) -> list[Reason]:
    functions = {at for gpu in gpus for at in (gpu.address, *(c.address for c in gpu.companions))}
    targets = [
        Target(
            gpu=gpu,
            driver=gpu.driver,
            moves=False,
            type=type_,
            by_name=True,
            expect_id=None,
            going=functions,
            together=functions,
            services=(),
        )
        for gpu in gpus
    ]
    return [reason for reason in judge(situation, targets, accept) if reason.id in _AT_BOOT]


def _preconditions(host: Reader, trial: Trial, situation: Situation, run: Run) -> Iterator[Reason]:
    """Yield what keeps the next boot from taking the trial, or the one after from undoing it."""
    store = Store(host)

    def reason(id_: str, subject: str, evidence: str, remedy: str) -> Reason:
        return Reason(id_, subject, evidence, remedy, liftable=False, accepted=False)

    if store.record() is not None:
        yield reason(
            "unfinished-change",
            "/var/lib/gpuhost/transaction.json",
            "a change of this host was cut off",
            "run the playbook site, which ends or undoes it",
        )
    for address in trial.gpus:
        group = situation.gpus[address].iommu_group
        if group is None:
            yield reason("no-group", address, "no IOMMU is in use", "turn the IOMMU on first")
        elif group.type == trial.type:
            yield reason(
                "same-type", address, f"its type is {trial.type} now", "there is nothing to try"
            )
        elif is_old(situation.release) and len(group.members) > 1:
            yield reason(
                "old-kernel",
                address,
                f"kernel {situation.release} cannot change a group of {len(group.members)} devices",
                "boot a kernel from 6.4 on",
            )
    kept = read_layout(host)
    yield from _not_kept(host, kept, trial, reason)
    tried = overlay(kept, replace(trial, state="running", boot=store.boot()), store.boot())
    for problem in hook_problems(host, tried, run(["/sbin/modprobe", "--showconfig"], 30)):
        yield reason("type-too-late", "/etc/modprobe.d", problem, "then arm again")
    boot = read_boot(host)
    following = next_boot(boot, ["nvidia"])
    for problem in following.problems:
        yield reason("next-boot", "the next boot", problem, "put that right, then arm again")
    images = check_images(
        host, kept, lambda path: run(["lsinitramfs", path], 120).splitlines(), remember=False
    )
    image = f"/boot/initrd.img-{following.kernel}"
    if images.get(image):  # nvidia could be loaded from it before the types can be set
        yield reason(
            "initramfs-incomplete",
            image,
            f"it lacks {', '.join(images[image])}",
            "run update-initramfs -u -k all",
        )
    if (host.root / "var/lib").stat().st_dev != host.root.stat().st_dev:
        yield reason(
            "var-apart",
            FOLDER,
            "it is not on the root file system, so it may not be there when nvidia is loaded",
            "a trial is not possible on this host",
        )
    ours = {gpu.vmid for gpu in kept.gpus}
    managed = _managed(host)
    for guest in read_guests(host):
        by_ha = guest.vmid in managed
        if guest.vmid in ours or not (by_ha or dict(guest.config).get("onboot") == "1"):
            continue
        tool = "pct" if guest.kind == "lxc" else "qm"
        yield reason(
            "guest-starts",
            f"{guest.kind} guest {guest.vmid}",
            f"it starts at boot ({'HA' if by_ha else 'onboot'}) and is not of the layout, so it "
            "would run while the way back is a reboot",
            "have its owner take it out for the trial ("
            + ("ha-manager" if by_ha else tool)
            + f" set {guest.vmid} "
            + ("--state stopped)" if by_ha else "--onboot 0)"),
        )


def _managed(host: Reader) -> set[int]:
    """Return the guests that Proxmox's HA manager may start: `vm: 100`, `ct: 101`."""
    text = host.text("/etc/pve/ha/resources.cfg") or ""
    found = set()
    for part in re.split(r"\n(?=\S)", text):
        head = re.match(r"(?:vm|ct):\s*(\d+)", part)
        if head and not re.search(r"^\s+state\s+(?:stopped|disabled|ignored)", part, re.MULTILINE):
            found.add(int(head[1]))
    return found


def _not_kept(
    host: Reader, kept: Layout, trial: Trial, reason: Callable[[str, str, str, str], Reason]
) -> Iterator[Reason]:
    """Yield the GPUs to which the boot program would not give the type."""
    if not host.exists(_PROGRAM) or not host.exists(
        "/etc/systemd/system/multi-user.target.wants/gpuhost-trial.service"
    ):
        yield reason(
            "no-way-back",
            _PROGRAM,
            "the program or its unit that takes a trial and ends it is not installed",
            "apply the role gpu_passthrough with gpu_passthrough_persist",
        )
    known = {gpu.address: gpu for gpu in kept.gpus}
    for address, id_ in trial.gpus.items():
        gpu = known.get(address)
        if gpu is None or gpu.id != id_ or gpu.driver != "nvidia":
            yield reason(
                "not-kept",
                address,
                "the layout that the host keeps does not have it for nvidia",
                "declare it so in gpu_layout, and run the playbook site",
            )
