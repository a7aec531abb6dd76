# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.

"""Which GPUs an SGLang server uses by its flags and environment, and who holds them now.

A server that starts on a GPU whose memory a killed run still has, or another program, fails when
the whole model is loaded, or hangs (sgl-project/sglang issues 22779 and 23627). In a container
nothing outside it is seen in `/proc`: there the memory in use is the second witness.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ansible_collections.gpuhost.inference.plugins.module_utils import _command
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from ansible_collections.gpuhost.inference.plugins.module_utils._owners import (
    Number,
    User,
    read_users,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_check import Given
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader

Runner = Callable[[Sequence[str]], str]

# Memory in use that no process accounts for, in MiB: an idle GPU has some hundred.
HIDDEN_MIB = 2048
_INFORMATION = "/proc/driver/nvidia/gpus"
_UVM = "/dev/nvidia-uvm"
_QUERY = ["nvidia-smi", "--query-gpu=pci.bus_id,memory.used", "--format=csv,noheader,nounits"]


@dataclass(frozen=True)
class Gpu:
    """A GPU as this machine or container sees it.

    Attributes:
        node: its device node, such as `/dev/nvidia0`.
        address: its PCI address, `None` when the driver does not tell.
        uuid: what `CUDA_VISIBLE_DEVICES` may name it by, `None` when the driver does not tell.
    """

    node: str
    address: str | None = None
    uuid: str | None = None


@dataclass(frozen=True)
class Share:
    """The GPUs of one server: those it will open, and why they are not enough, if so."""

    gpus: tuple[Gpu, ...]
    fault: str | None = None


@dataclass(frozen=True)
class Holder:
    """A process that has nodes of GPUs open.

    Attributes:
        user: the process, by the first of the nodes.
        nodes: which of those that were asked for.
        computes: it has the node of CUDA's memory open too, which programs that only watch GPUs
            have not; `None` when there is no such node.
    """

    user: User
    nodes: tuple[str, ...]
    computes: bool | None


@dataclass(frozen=True)
class Holding:
    """Who holds some GPUs.

    Attributes:
        users: processes with a CUDA context on one of them, each once.
        unknown: what could not be looked at; while it is not empty, there may be more.
        used: MiB of memory in use by address, without those the driver does not tell of.
    """

    users: tuple[User, ...]
    unknown: tuple[str, ...]
    used: Mapping[str, int]


def value_of(given: Iterable[Given], *spellings: str) -> str | None:
    """Return the value of a flag by any of its spellings, the last one as argparse does."""
    values = [one.values for one in given if one.spelling in spellings]
    return " ".join(values[-1]) if values else None


def _number(given: Sequence[Given], default: int, *spellings: str) -> int:
    text = value_of(given, *spellings) or ""
    return int(text) if re.fullmatch(r"\d+", text) else default


def gpu_numbers(given: Sequence[Given]) -> list[int]:
    """Return the indices of the GPUs that the ranks on this machine take.

    Source: `_launch_scheduler_processes` in `srt/entrypoints/engine.py` and
    `srt/managers/data_parallel_controller.py`: ranks of this node, in steps from the base; without
    attention in data parallel each replica has GPUs of its own.
    """
    device = value_of(given, "--device")
    if device is not None and device != "cuda":
        return []
    ranks = _number(given, 1, "--tensor-parallel-size", "--tp-size", "--tp")
    ranks *= _number(given, 1, "--pipeline-parallel-size", "--pp-size")
    if value_of(given, "--enable-dp-attention") is None:
        ranks *= _number(given, 1, "--data-parallel-size", "--dp-size", "--dp")
    ranks = max(1, ranks // max(1, _number(given, 1, "--nnodes")))
    first = _number(given, 0, "--base-gpu-id")
    step = max(1, _number(given, 1, "--gpu-id-step"))
    return list(range(first, first + ranks * step, step))


def read_cards(host: Reader) -> list[Gpu]:
    """Return the GPUs with a device node here, in the order of their PCI addresses, as CUDA does.

    Source: `/proc/driver/nvidia/gpus/ADDRESS/information` of the driver, which a container shows
    too; without it the numbers of the nodes are the order.
    """
    told: dict[str, tuple[str, str | None]] = {}
    for minor, (address, text) in _information(host).items():
        uuid = re.search(r"^GPU UUID:\s*(GPU-[0-9a-f-]+)", text, re.M)
        told[f"/dev/nvidia{minor}"] = (address, uuid[1] if uuid else None)
    nodes = [f"/dev/{name}" for name in host.names("/dev") if re.fullmatch(r"nvidia\d+", name)]
    nodes = [node for node in nodes if host.device_number(node) is not None]
    nodes.sort(key=lambda node: (told.get(node, ("~", None))[0], int(node[len("/dev/nvidia") :])))
    return [Gpu(node, *told.get(node, (None, None))) for node in nodes]


def read_minors(host: Reader) -> list[int]:
    """Return the numbers that the driver's nodes `/dev/nvidiaN` have, made or not."""
    return sorted(_information(host))


def _information(host: Reader) -> dict[int, tuple[str, str]]:
    """Return the address and what the driver tells of each GPU, by the number of its node."""
    found = {}
    for address in host.names(_INFORMATION):
        text = host.text(f"{_INFORMATION}/{address}/information") or ""
        minor = re.search(r"^Device Minor:\s*(\d+)", text, re.M)
        if minor:
            found[int(minor[1])] = (address.lower(), text)
    return found


def share_of(cards: Sequence[Gpu], given: Sequence[Given], environment: Mapping[str, str]) -> Share:
    """Return the GPUs that a server with these flags and this environment takes.

    `CUDA_VISIBLE_DEVICES` names GPUs by index or by (a beginning of) their UUID. One that it names
    in another way, as parts of a GPU, leaves all GPUs as possibly meant.
    """
    wanted = gpu_numbers(given)
    if not wanted:
        return Share(())
    visible = list(cards)
    names = environment.get("CUDA_VISIBLE_DEVICES")
    if names is not None:
        words = [word.strip() for word in names.split(",") if word.strip()]
        visible = []
        for word in words:
            if not re.fullmatch(r"\d+|GPU-[0-9a-f-]+", word):
                return Share(tuple(cards))
            found = [
                card
                for index, card in enumerate(cards)
                if word == str(index) or (card.uuid or "").startswith(word)
            ]
            if not found:
                return Share((), f"CUDA_VISIBLE_DEVICES names GPU {word}; {_there(cards)}")
            visible += found[:1]
    if wanted[-1] >= len(visible):
        indices = f"{len(wanted)} GPUs, of the indices {wanted[0]} to {wanted[-1]}"
        if len(wanted) == 1:
            indices = f"the GPU of index {wanted[0]}"
        return Share((), f"its flags want {indices}; {_there(visible)}")
    return Share(tuple(visible[index] for index in wanted))


def _there(cards: Sequence[Gpu]) -> str:
    nodes = ", ".join(card.node for card in cards)
    return f"there {'is' if len(cards) == 1 else 'are'} {nodes}" if nodes else "there is none here"


def read_holding(host: Reader, gpus: Sequence[Gpu], run: Runner = _command.run) -> Holding:
    """Return who holds these GPUs.

    A process with a GPU's node but without `/dev/nvidia-uvm` has no CUDA context: it watches the
    GPU, as nvidia-persistenced and the exporters of metrics do.
    """
    holders, unknown = read_holders(host, [gpu.node for gpu in gpus])
    users = tuple(holder.user for holder in holders if holder.computes is not False)
    used = _memory(run) if gpus else {}
    mine = {gpu.address: used[gpu.address] for gpu in gpus if gpu.address and gpu.address in used}
    return Holding(users, tuple(unknown), mine)


def read_holders(host: Reader, nodes: Iterable[str]) -> tuple[list[Holder], list[str]]:
    """Return the processes that have one of these nodes of GPUs open, by their numbers.

    Returns:
        The processes, and what could not be looked at: while that is not empty, there may be more.

    Raises:
        UnreadableError: a node, or the list of processes, must not be looked at.
    """
    numbers: dict[Number, list[str]] = {}
    for node in nodes:
        number = host.device_number(node)
        if number:
            numbers.setdefault(number, []).append(node)
    uvm = host.device_number(_UVM) if numbers else None
    if uvm:
        numbers.setdefault(uvm, []).append(_UVM)
    users, unknown = read_users(host, numbers)
    computing = {user.pid for user in users.pop(_UVM, [])}
    held: dict[int, list[tuple[str, User]]] = {}
    for node in sorted(users, key=lambda name: (len(name), name)):
        for user in users[node]:
            held.setdefault(user.pid, []).append((node, user))
    holders = [
        Holder(
            entries[0][1], tuple(node for node, _user in entries), pid in computing if uvm else None
        )
        for pid, entries in sorted(held.items())
    ]
    return holders, unknown


def _memory(run: Runner) -> dict[str, int]:
    """Return MiB in use by address, from nvidia-smi; empty when it cannot tell."""
    try:
        text = run(_QUERY)
    except GpuHostError:
        return {}
    rows = re.findall(r"^\s*[0-9a-f]{0,4}([0-9a-f]{4}:\S+),\s*(\d+)\s*$", text.lower(), re.M)
    return {address: int(number) for address, number in rows}


def in_group(cgroup: str | None, name: str) -> bool:
    """Tell whether a process's control group is that of a unit, by its full name, or below it."""
    return name in (cgroup or "").split("/")


def strangers(holding: Holding, unit: str | None) -> list[str]:
    """Return a sentence for each reason to say that the GPUs are taken.

    Args:
        holding: from `read_holding`.
        unit: the service whose own processes are none; `None` counts every process.
    """
    own = None if unit is None else f"{unit.removesuffix('.service')}.service"
    others = [user for user in holding.users if own is None or not in_group(user.cgroup, own)]
    said = [
        f"process {user.pid} ({user.command[:60]}"
        f"{f' of {user.unit}' if user.unit else ''}) holds {user.node}"
        for user in others
    ]
    if not holding.users and not holding.unknown:
        said += [
            f"{mib} MiB of {address} are in use by a process that is not seen from here"
            for address, mib in sorted(holding.used.items())
            if mib > HIDDEN_MIB
        ]
    return said


def doubts(holding: Holding) -> list[str]:
    """Return what speaks for a hidden user, where not even the memory in use says that none is."""
    if not holding.unknown:
        return []
    if holding.used and max(holding.used.values()) <= HIDDEN_MIB:
        return []
    return list(holding.unknown)
