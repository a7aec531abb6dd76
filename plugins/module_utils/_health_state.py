# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.

"""What a scheduled check leaves on a host: a state in JSON, and metrics for node_exporter.

`conclude` and `failed` make the state after a check; `as_json` and `metrics` write it down. A check
that failed makes every verdict `unknown`: what was found before it is not known to be true now.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import Any

from ansible_collections.gpuhost.inference.plugins.module_utils._fault_kinds import BY_ID
from ansible_collections.gpuhost.inference.plugins.module_utils._faults import Health
from ansible_collections.gpuhost.inference.plugins.module_utils._gpu import Gpu
from ansible_collections.gpuhost.inference.plugins.module_utils._pci import as_result

STATE = "/var/lib/gpuhost/health.json"
VERSION = 1
VERDICTS = ("healthy", "degraded", "failed", "lost", "unknown")
FSP_STATES = ("ok", "failed", "unknown", "not_applicable")

_FORM = "%Y-%m-%dT%H:%M:%SZ"


@dataclass(frozen=True)
class Card:
    """A GPU as it is, or was when it was last on the bus.

    Attributes:
        address: full PCI address.
        name: of the chip's products, `None` when the id is not known.
        driver: bound now, `None` for none.
        seen: time of the last check that found it on the bus; `None` for a virtual function, which
            is not lost when it goes.
        fsp, verdict, reason, faults: as in the documentation of gpu_health_info.
        ladder: rungs of the remedy, the first is known to help.
    """

    address: str
    name: str | None
    driver: str | None
    seen: str | None
    fsp: str
    verdict: str
    reason: str
    faults: tuple[str, ...]
    ladder: tuple[str, ...]


@dataclass(frozen=True)
class State:
    """What one check found, or that it found nothing.

    Attributes:
        version: of this form.
        collection: version of the collection the program is of.
        checked: time of the check, of day in UTC like all times here.
        seconds: how long it took; 0 when it was ended from outside.
        ok: whether it came to its end; all below is only of it when it did.
        error: why it did not.
        last_success: time of the last check that came to its end, `None` when none did.
        boot_id: of the boot that was judged, without dashes.
        gpus: by address; also those that are not on the bus any more.
        faults: as in the result of gpu_health_info.
        log: how much of the log there was, as there; `None` when the check failed.
        metrics_dir: folder of the metrics, empty for none: in another they would stand for ever.
    """

    version: int
    collection: str
    checked: str
    seconds: float
    ok: bool
    error: str | None
    last_success: str | None
    boot_id: str | None
    gpus: tuple[Card, ...]
    faults: tuple[Mapping[str, Any], ...]
    log: Mapping[str, Any] | None
    metrics_dir: str = ""

    @property
    def unattributed(self) -> int:
        """Number of current faults whose GPU is not known."""
        return sum(1 for one in self.faults if one["current"] and one["address"] is None)


@dataclass(frozen=True)
class Run:
    """One run of the check.

    Attributes:
        at: its time in seconds since 1970.
        seconds: how long it took.
        collection: version of the collection the program is of.
        metrics_dir: folder of the metrics, empty for none.
    """

    at: float
    seconds: float
    collection: str
    metrics_dir: str = ""


def stamp(at: float) -> str:
    """Return a time in seconds since 1970 as it stands in the state."""
    return datetime.fromtimestamp(at, timezone.utc).strftime(_FORM)


def seconds_of(text: str | None) -> float:
    """Return the seconds since 1970 of a time in the state, 0 for `None`.

    Raises:
        ValueError: it is none.
    """
    if text is None:
        return 0.0
    return datetime.strptime(text, _FORM).replace(tzinfo=timezone.utc).timestamp()


def conclude(
    run: Run, health: Health, gpus: Sequence[Gpu], boot_id: str | None, before: State | None
) -> State:
    """Return the state after a check.

    Args:
        run: when it was.
        health: what it found.
        gpus: the GPUs on the bus.
        boot_id: of the running boot.
        before: the state that the check before left, `None` when there is none. A GPU that is in it
            and not on the bus now is lost, also when a reboot lies between.
    """
    now = stamp(run.at)
    on_bus = {gpu.address: gpu for gpu in gpus}
    judged = [
        Card(
            address=one.address,
            name=on_bus[one.address].name,
            driver=on_bus[one.address].driver,
            # virtual functions come and go
            seen=now if on_bus[one.address].sriov.physfn is None else None,
            fsp=one.fsp,
            verdict=one.verdict,
            reason=one.reason,
            faults=one.faults,
            ladder=one.ladder,
        )
        for one in health.gpus
    ]
    gone = [
        replace(
            card,
            driver=None,
            fsp="unknown",
            verdict="lost",
            reason=f"it was on the bus at {card.seen}, and is not there now",
            faults=(),
            ladder=BY_ID["all-ones"].ladder,
        )
        for card in (() if before is None else before.gpus)
        if card.address not in on_bus and card.seen is not None
    ]
    return State(
        version=VERSION,
        collection=run.collection,
        checked=now,
        seconds=round(run.seconds, 3),
        ok=True,
        error=None,
        last_success=now,
        boot_id=boot_id,
        gpus=tuple(sorted(judged + gone, key=lambda card: card.address)),
        faults=tuple(as_result(fault) for fault in health.faults),
        log=as_result(health.log),
        metrics_dir=run.metrics_dir,
    )


def failed(run: Run, error: str, boot_id: str | None, before: State | None) -> State:
    """Return the state after a check that did not come to its end, and why."""
    return State(
        version=VERSION,
        collection=run.collection,
        checked=stamp(run.at),
        seconds=round(run.seconds, 3),
        ok=False,
        error=error,
        last_success=None if before is None else before.last_success,
        boot_id=boot_id,
        gpus=tuple(
            replace(
                card,
                fsp="unknown",
                verdict="unknown",
                reason=f"the check failed: {error}",
                faults=(),
                ladder=(),
            )
            for card in (() if before is None else before.gpus)
        ),
        faults=(),
        log=None,
        metrics_dir=run.metrics_dir,
    )


def as_json(state: State) -> str:
    """Return the text of the state's file."""
    return json.dumps(as_result(state), indent=1, sort_keys=True) + "\n"


def from_json(text: str | None) -> State | None:
    """Return the state that a text holds, `None` when it is none of this version."""
    try:
        found = json.loads(text or "null")
        if not isinstance(found, dict) or found.get("version") != VERSION:
            return None
        cards = [
            Card(**{**card, "faults": tuple(card["faults"]), "ladder": tuple(card["ladder"])})
            for card in found["gpus"]
        ]
        state = State(**{**found, "gpus": tuple(cards), "faults": tuple(found["faults"])})
        for time in (state.last_success, *(card.seen for card in cards)):
            seconds_of(time)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return state


# -- metrics --------------------------------------------------------------------------------------

Sample = tuple[dict[str, str], float]


@dataclass(frozen=True)
class Family:
    """One metric, a gauge, with what its help says."""

    name: str
    help: str
    samples: list[Sample]


def families(state: State) -> list[Family]:
    """Return the metrics of a state.

    All are gauges: what is counted lies in the log of this boot, which begins anew. What a failed
    check did not find out is left out, but for the verdicts: they are there as `unknown`.
    """
    ok, log = state.ok, state.log or {}
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for fault in state.faults:
        if fault["address"] is None:
            continue
        # one GPU may have the same fault on two functions of its card, and a series is there once
        known = found.setdefault((fault["address"], fault["id"]), {**fault, "count": 0})
        known["count"] += fault["count"]
        known["current"] |= fault["current"]
    labelled = [
        ({"address": one["address"], "fault": one["id"], "class": one["class"]}, one)
        for one in found.values()
    ]
    return [
        Family(
            "gpuhost_info",
            "Version of the collection whose check this is.",
            [({"version": state.collection}, 1)],
        ),
        Family(
            "gpuhost_health_check_ok",
            "Whether the last check came to its end; if not, all verdicts are unknown.",
            [({}, ok)],
        ),
        Family(
            "gpuhost_health_last_check_timestamp_seconds",
            "Time of the last check.",
            [({}, seconds_of(state.checked))],
        ),
        Family(
            "gpuhost_health_last_success_timestamp_seconds",
            "Time of the last check that came to its end, 0 for never.",
            [({}, seconds_of(state.last_success))],
        ),
        Family(
            "gpuhost_health_check_duration_seconds",
            "How long the last check took.",
            [({}, state.seconds)] if ok else [],
        ),
        Family(
            "gpuhost_log_complete",
            "Whether one source has all kernel messages since the boot.",
            [({}, bool(log.get("complete")))],
        ),
        Family(
            "gpuhost_unattributed_faults",
            "Faults that still count and whose GPU the log does not tell.",
            [({}, state.unattributed)] if ok else [],
        ),
        Family(
            "gpuhost_gpu_info",
            "A GPU: its name and the driver bound to it.",
            [
                (
                    {
                        "address": card.address,
                        "name": card.name or "unknown",
                        "driver": card.driver or "none",
                    },
                    1,
                )
                for card in state.gpus
            ],
        ),
        Family(
            "gpuhost_gpu_verdict",
            "Verdict on a GPU, 1 for the one that holds.",
            _state_set(state, "verdict", VERDICTS, lambda card: card.verdict),
        ),
        Family(
            "gpuhost_gpu_fsp",
            "State of a GPU's Foundation Security Processor, 1 for the one that holds.",
            _state_set(state, "state", FSP_STATES, lambda card: card.fsp),
        ),
        Family(
            "gpuhost_gpu_remedy",
            "First step that is known to help an ill GPU.",
            [
                ({"address": card.address, "rung": card.ladder[0]}, 1)
                for card in state.gpus
                if card.ladder
            ],
        ),
        Family(
            "gpuhost_gpu_fault_occurrences",
            "How often a fault is in the log of this boot; a lower bound while that has gaps.",
            [(labels, one["count"]) for labels, one in labelled],
        ),
        Family(
            "gpuhost_gpu_fault_current",
            "Whether the fault still counts: the GPU was not started again since.",
            [(labels, one["current"]) for labels, one in labelled],
        ),
    ]


def _state_set(
    state: State, label: str, words: Sequence[str], of: Callable[[Card], str]
) -> list[Sample]:
    return [
        ({"address": card.address, label: word}, of(card) == word)
        for card in state.gpus
        for word in words
    ]


def metrics(state: State) -> str:
    """Return the metrics of a state in Prometheus' text format, as node_exporter reads it."""
    return "".join(f"{line}\n" for family in families(state) for line in _lines(family))


def _lines(family: Family) -> Iterator[str]:
    yield f"# HELP {family.name} {family.help}"
    yield f"# TYPE {family.name} gauge"
    for labels, value in family.samples:
        inside = ",".join(f'{name}="{_escaped(text)}"' for name, text in labels.items())
        yield f"{family.name}{'{' + inside + '}' if inside else ''} {float(value):.15g}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
