# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.

"""What is taken from the runs of a benchmark to compare servers, and from a load."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, TypeVar

from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from ansible_collections.gpuhost.inference.plugins.module_utils._tune_stats import (
    Ratio,
    compare,
)

SCHEMA = 1
_SLOWEST, _FASTEST = 1e-3, 1e9  # tokens/s that a server can have; else it is no speed
# Of what must be the same in all runs, this is what was asked; the rest is the server's
ASKED = frozenset(
    {"model", "corpus", "kinds", "context_tokens", "output_tokens", "requests", "warmup", "flush"}
    | {"seed", "temperature"}
)
_OUTSIDE = ASKED | {"client", "gpus", "power_limit_w"}  # known without a word of the server
_WAITING = frozenset({"above-cap", "queued"})
T = TypeVar("T", int, float)


@dataclass(frozen=True)
class Run:
    """One start of a server in one arm.

    Attributes:
        arm: name of the setting that is compared, `off` for instance.
        start: number of the start within the arm.
        how: what decides the figures beside the server: host, client, prompts, tokens asked for.
        equal: facts of the server that must not differ between arms.
        apart: facts that differ on purpose or are only reported.
        logs: natural logarithm of the output tokens per second, by concurrency.
        left_out: points that do not count, with their reasons.
        cap: requests that the server runs at once, `None` when it does not tell.
        held: concurrencies above the cap, for which the speed at the cap stands.
    """

    arm: str
    start: int
    how: Mapping[str, Any]
    equal: Mapping[str, Any]
    apart: Mapping[str, Any]
    logs: Mapping[int, float]
    left_out: Sequence[Mapping[str, Any]]
    cap: int | None = None
    held: frozenset[int] = frozenset()

    @property
    def tells_itself(self) -> bool:
        """Return whether the server told anything of what it runs with."""
        return any(value is not None for key, value in self.equal.items() if key not in _OUTSIDE)


def read_runs(runs: object, prompts: str | None = None) -> list[Run]:
    """Return the runs in the order given.

    Args:
        runs: results of `sglang_benchmark`.
        prompts: kind of prompts whose points count. By default the only kind, or `mixed`.

    Raises:
        GpuHostError: it is not a list of such runs, one is there twice, or it is not clear which
            prompts count.
    """
    if not isinstance(runs, Sequence) or isinstance(runs, str):
        raise GpuHostError("the runs are not a list: give the results of sglang_benchmark")
    kinds: set[str] = set()
    for number, run in enumerate(runs, 1):
        if not isinstance(run, Mapping) or run.get("schema") != SCHEMA:
            raise GpuHostError(
                f"run {number} is not a result of sglang_benchmark with schema {SCHEMA}: measure "
                "it again, or leave it out"
            )
        try:
            kinds |= {str(point["prompts"]) for point in (*run["points"], *run["rejected"])}
        except (KeyError, TypeError) as error:
            raise _unreadable(number, error) from error
    kind = _kind(kinds, prompts)
    found: list[Run] = []
    seen: set[tuple[str, int, str]] = set()
    servers: dict[tuple[str, str | None], int] = {}
    for number, run in enumerate(runs, 1):
        try:
            one = _read(run, kind)
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise _unreadable(number, error) from error
        check_arms([one.arm])
        key = (one.arm, one.start, str(run.get("at")))
        if key in seen:
            raise GpuHostError(
                f"start {one.start} of the arm {one.arm} is there twice ({run.get('at')}): give "
                "each run once, as a copy would count as a repeat"
            )
        seen.add(key)
        # A file of one kind of prompts may stand beside that of another, of the same start
        known = _server_start(run) if one.logs or one.left_out else None
        if known is not None and (one.arm, known) in servers:
            raise GpuHostError(
                f"starts {servers[one.arm, known]} and {one.start} of the arm {one.arm} are the "
                "same start of the server, so that one is no repeat of the other: restart the "
                "server before each, and leave one out"
            )
        servers[one.arm, known] = one.start
        found.append(one)
    return found


def _server_start(run: Mapping[str, Any]) -> str | None:
    """Return by what a start of the server is known, `None` when it is not."""
    told = run.get("server_start")
    if not isinstance(told, Mapping) or all(value is None for value in told.values()):
        return None
    return json.dumps(told, sort_keys=True, default=str)


def check_arms(names: Sequence[str]) -> None:
    """Refuse a name that the table of differences has for something else.

    Raises:
        GpuHostError: one of them is such a name.
    """
    if "key" in names:
        raise GpuHostError("an arm cannot be named key, which stands for what differs: rename it")


def _unreadable(number: int, error: Exception) -> GpuHostError:
    return GpuHostError(
        f"run {number} cannot be read ({type(error).__name__}: {error}): it is not as "
        "sglang_benchmark returned it; measure it again, or leave it out"
    )


def _kind(kinds: set[str], prompts: str | None) -> str:
    if prompts is None and len(kinds) == 1:
        return next(iter(kinds))
    prompts = prompts or "mixed"
    if kinds and prompts not in kinds:
        raise GpuHostError(
            f"no point is of the prompts {prompts}, only of {', '.join(sorted(kinds))}: name one "
            "of them"
        )
    return prompts


def _read(run: Mapping[str, Any], prompts: str) -> Run:
    arm, start = str(run["arm"]), int(run["start"])
    client, corpus = run["client"], run["corpus"]
    good: dict[int, list[float]] = {}
    asked: set[Any] = set()
    left_out = []
    for point in [*run["points"], *run["rejected"]]:
        if point["prompts"] != prompts:
            continue
        asked.add((point.get("output_tokens") or {}).get("asked"))
        concurrency, speed = int(point["concurrency"]), point["output_tok_s"]
        if concurrency < 1:
            raise ValueError(f"a point at a concurrency of {concurrency}")
        reasons = [
            {"code": str(reason["code"]), "text": str(reason["text"])}
            for reason in point["reasons"]
        ]
        if not reasons and not _is_speed(speed):
            reasons = [{"code": "tokens-unknown", "text": "its tokens were not counted"}]
        if reasons:
            left_out.append(
                {"arm": arm, "start": start, "concurrency": concurrency, "reasons": reasons}
            )
        else:
            good.setdefault(concurrency, []).append(math.log(speed))
    how = {
        "host": run["host"],
        "benchmark client": f"{client['name']} {client['version']}",
        "prompts (sha256)": corpus["sha256"],
        "output tokens asked": asked.pop() if len(asked) == 1 else sorted(map(str, asked)),
    }
    logs = {concurrency: fmean(logs) for concurrency, logs in sorted(good.items())}
    equal, apart = dict(run["equal"]), dict(run["apart"])
    told = apart.get("effective_max_running_requests")
    cap = told if isinstance(told, int) and told > 0 else None
    return Run(arm, start, how, equal, apart, logs, left_out, cap)


def hold(runs: Sequence[Run], levels: Iterable[int] = ()) -> list[Run]:
    """Return the runs, each with the speed at its cap for all concurrencies above it.

    A server that always has others waiting is as fast for any number of clients as for those that
    it runs at once: only they wait longer. So a start that was measured at its cap can be compared
    where another arm runs more.

    Args:
        runs: as they were read.
        levels: concurrencies of interest, beside those that any run has.
    """
    wanted = {*levels, *(concurrency for run in runs for concurrency in run.logs)}
    return [_held(run, wanted) for run in runs]


def _held(run: Run, wanted: Collection[int]) -> Run:
    if run.cap is None or run.cap not in run.logs:
        return run
    above = frozenset(one for one in wanted if one > run.cap)
    logs = {one: log for one, log in run.logs.items() if one not in above}
    return replace(run, logs={**logs, **dict.fromkeys(sorted(above), logs[run.cap])}, held=above)


def _is_speed(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return _SLOWEST < value < _FASTEST


def read_load(load: object) -> dict[int, float] | None:
    """Return a load as shares that sum up to 1.

    Args:
        load: weight by concurrency, in any unit of time; `None` or empty when it is not known.

    Raises:
        GpuHostError: a concurrency is not a whole number from 1 on, or a weight is negative.
    """
    if load is None or load == {}:
        return None
    if not isinstance(load, Mapping):
        raise GpuHostError("the load is not a mapping of concurrencies to shares of the time")
    shares: dict[int, float] = {}
    for key, value in load.items():
        try:
            concurrency, share = int(str(key)), float(str(value))
        except ValueError:
            concurrency, share = 0, 0.0
        if concurrency < 1 or not 0 <= share < math.inf:
            raise GpuHostError(
                f"the load has {key}: {value}, which is no share of the time at a concurrency: "
                "write it as {1: 0.7, 8: 0.3}"
            )
        if share:
            shares[concurrency] = shares.get(concurrency, 0.0) + share
    total = sum(shares.values())
    if total == math.inf:
        raise GpuHostError("the load sums up to inf: give shares of the time, as {1: 0.7, 8: 0.3}")
    if not total:
        raise GpuHostError("all shares of the load are 0: leave the load out when it is not known")
    return {concurrency: share / total for concurrency, share in sorted(shares.items())}


def told_load(load: Mapping[Any, float]) -> str:
    """Return a load in words, its first eight levels.

    Args:
        load: shares that sum up to 1, by concurrency.
    """
    return f"C {first_of([f'{one}: {100 * share:.0f} %' for one, share in load.items()], ', ')}"


def first_of(texts: Sequence[str], between_them: str) -> str:
    """Return the first eight of some texts in one."""
    return between_them.join([*texts[:8], *(["…"] if texts[8:] else [])])


def waited_at(runs: Sequence[Run]) -> set[int]:
    """Return the concurrencies at which a server let requests wait in its queue."""
    return {
        point["concurrency"]
        for run in runs
        for point in run.left_out
        if any(reason["code"] in _WAITING for reason in point["reasons"])
    }


def contrast(
    first: Sequence[Run],
    second: Sequence[Run],
    weights: Mapping[int, float],
    confidence: float,
    *,
    fewest: int = 2,
) -> Ratio:
    """Return how much faster the second arm is where the weights lie.

    Args:
        first: starts of one arm. Those that lack a point with a weight do not count.
        second: starts of the other arm.
        weights: by concurrency; they sum up to 1.
        confidence: of the interval.
        fewest: starts that each arm needs for an interval.
    """
    return compare(_values(first, weights), _values(second, weights), confidence, fewest)


def repeated(first: Sequence[Run], second: Sequence[Run]) -> list[int]:
    """Return the concurrencies that at least two starts of both arms measured well."""
    found = {concurrency for run in first for concurrency in run.logs}
    return sorted(
        one for one in found if all(len(_values(runs, {one: 1.0})) > 1 for runs in (first, second))
    )


def differences(
    sides: Mapping[str, Sequence[Run]], facts: Callable[[Run], Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return the facts that are not the same in all runs.

    Args:
        sides: runs by the name of their arm, or other side.
        facts: returns the facts of a run.

    Returns:
        For each fact its `key` and, under the name of each side, its value (a list where the starts
        of a side differ among themselves). What no run knows is no difference.
    """
    found = []
    keys = {key for mine in sides.values() for run in mine for key in facts(run)}
    for key in sorted(keys):
        texts = {
            name: list(
                dict.fromkeys(json.dumps(facts(run).get(key), sort_keys=True) for run in mine)
            )
            for name, mine in sides.items()
        }
        if len({text for mine in texts.values() for text in mine}) > 1:
            values = {name: [json.loads(text) for text in mine] for name, mine in texts.items()}
            found.append({"key": key, **{n: v[0] if len(v) == 1 else v for n, v in values.items()}})
    return found


def _values(runs: Sequence[Run], weights: Mapping[int, float]) -> list[float]:
    return [
        sum(weight * run.logs[concurrency] for concurrency, weight in weights.items())
        for run in runs
        if all(concurrency in run.logs for concurrency in weights)
    ]


def numbers(kind: Callable[[Any], T], **values: object) -> dict[str, T]:
    """Return options as numbers; templates of ansible-core 2.16 give text.

    Args:
        kind: `int` or `float`.
        **values: by the name of the option.

    Raises:
        GpuHostError: a value is no such number.
    """
    found = {}
    for name, value in values.items():
        try:
            found[name] = kind(value)
        except (TypeError, ValueError) as error:
            raise GpuHostError(f"{name} is {value!r}, which is no number: write one") from error
    return found
