# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this plugin util is private to the collection: it may change at any time.

"""What a report says about a comparison with and without MTP: sentences, tables, series to plot."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from statistics import median
from typing import Any

UNKNOWN = "not measured"
_NBSP = "\N{NO-BREAK SPACE}"
_TONES = {"keep": "good", "drop": "attention", "depends": "attention", "tie": "plain"}
_WORDS = {"not-enough-data": "not enough data"}
_HISTORY = {"slower": "problem", "faster": "good", "same": "plain"}


def cell(text: object, tone: str = "") -> dict[str, str]:
    """Return a cell of a table; its tone is a colour only beside a word that says the same."""
    return {"text": UNKNOWN if text is None else str(text), "tone": tone}


def table(
    caption: str, columns: Sequence[str], rows: Iterable[Sequence[dict[str, str] | str]]
) -> dict[str, Any]:
    """Return a table as the template prints it; the first cell of a row is its head.

    Args:
        caption: what it shows.
        columns: heads of the columns, that of the rows' heads first.
        rows: cells, plain text for those without a tone.
    """
    return {
        "caption": caption,
        "columns": list(columns),
        "rows": [
            {
                "head": row[0] if isinstance(row[0], str) else row[0]["text"],
                "cells": [cell(item) if isinstance(item, str) else item for item in row[1:]],
            }
            for row in rows
        ],
    }


def figure(value: float | None, digits: int = 3) -> str:
    """Write a number with about so many digits that count, whole ones in full."""
    if value is None:
        return UNKNOWN
    whole = len(str(int(abs(value))))
    return f"{value:.{max(0, digits - whole)}f}"


def moment(text: object) -> datetime | None:
    """Return a time in UTC, `None` for a text that is none or does not tell its time zone."""
    words = str(text).removesuffix("Z").removesuffix(" UTC")
    zone = "" if words == str(text) else "+00:00"
    try:
        time = datetime.fromisoformat(words + zone)
        return time.astimezone(timezone.utc) if time.tzinfo else None
    except (ValueError, OverflowError):
        return None


def when(text: object) -> str:
    """Write a time as all of the report does, and a text that is none as it is."""
    time = moment(text)
    return f"{time:%Y-%m-%d %H:%M:%S} UTC" if time else UNKNOWN if text is None else str(text)


def wrong_input(
    tests: Sequence[Any],
    runs: Sequence[Any],
    verdict: Mapping[str, Any],
    history: Mapping[str, Any],
) -> str | None:
    """Say what is wrong with the input, `None` when nothing is."""
    for number, test in enumerate(tests, 1):
        if not isinstance(test, Mapping) or "p2p" not in test:
            return (
                f"p2p: entry {number} is not a result of gpuhost.inference.gpu_p2p_info (it has no "
                "p2p): register that module's result and give it in a list"
            )
    for number, run in enumerate(runs, 1):
        if not isinstance(run, Mapping) or not {"arm", "points"} <= run.keys():
            return (
                f"benchmark: entry {number} is not a run of gpuhost.inference.sglang_benchmark (it "
                "has no arm or no points): give the list of what that module returned"
            )
    if verdict and not {"verdict", "points"} <= verdict.keys():
        return (
            "verdict: this is not a result of the filter gpuhost.inference.tune_verdict (it has no "
            "verdict or no points): give what that filter returned"
        )
    if history and "points" not in history:
        return (
            "history: this is not a result of the filter gpuhost.inference.tune_history (it has no "
            "points): give what that filter returned"
        )
    return None


def measured(
    runs: Sequence[Mapping[str, Any]], verdict: Mapping[str, Any], history: Mapping[str, Any]
) -> dict[str, Any]:
    """Return all that a report says about MTP.

    Args:
        runs: results of `sglang_benchmark`, one for each start of an arm; none when not measured.
        verdict: result of the filter `tune_verdict` over them, empty for none.
        history: comparison with earlier runs, empty for none.
    """
    baseline = str(verdict.get("baseline") or "off")
    kind = _kind(runs)
    series = [_series(arm, runs, kind) for arm in _arms(runs, baseline)]
    ratios = _ratios(verdict)
    acceptance = [
        {"arm": arm, "kinds": kinds}
        for arm in _arms(runs, baseline)
        if (kinds := _accepted(arm, runs))
    ]
    conditions = _conditions(runs, kind)
    return {
        "measured": bool(runs or verdict),
        "baseline": baseline,
        "margin": float(verdict.get("margin", 0.05)),
        "confidence": float(verdict.get("confidence") or 0.95),
        **_judged(runs, verdict),
        "conditions": conditions,
        "condition_line": "; ".join(f"{pair['label']} {pair['value']}" for pair in conditions),
        "unequal": [_unequal(item) for item in verdict.get("unequal") or ()],
        "versions": sorted({str(v) for run in runs if (v := _at(run, "equal", "sglang"))}),
        "starts": [
            {"arm": str(run["arm"]), "start": run.get("start"), "at": run.get("at")} for run in runs
        ],
        "room": [_room(arm, runs) for arm in _arms(runs, baseline)],
        "series": series,
        "ratios": ratios,
        "acceptance": acceptance,
        "tables": {
            "ratios": _ratio_table(ratios, verdict),
            "profiles": _profile_table(verdict),
            "speed": _speed_table(series),
            "ttft": _latency_table(series, "ttft", "Time to the first token (TTFT) in ms"),
            "tpot": _latency_table(series, "tpot", "Time for each token after it (TPOT) in ms"),
            "acceptance": _acceptance_table(acceptance),
            "starts": _start_table(runs),
            "left_out": _left_out_table(runs, verdict),
        },
        "history": _history(history),
    }


def _room(arm: str, runs: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return how many requests ran at once in an arm, and how many tokens its cache had."""
    starts = [run for run in runs if str(run["arm"]) == arm]
    tokens = {n for run in starts if (n := _at(run, "apart", "kv_tokens"))}
    most = [n for run in starts for point in run["points"] if (n := point.get("running_max"))]
    return {
        "arm": arm,
        "starts": len(starts),
        "most": int(max(most)) if most else None,
        "kv_tokens": sorted({min(tokens), max(tokens)}) if tokens else [],
    }


def outdated(mtp: Mapping[str, Any], versions: Iterable[str | None]) -> list[str]:
    """Say that a measurement is of another release than what runs now.

    Args:
        mtp: what `measured` returned, now or for an earlier report.
        versions: releases of SGLang that run on the host, `None` for an unknown one.
    """
    now = sorted({version for version in versions if version})
    then = mtp["versions"]
    if not now or not then or set(now) & set(then):
        return []
    return [
        f"MTP was measured with SGLang {', '.join(then)}, and {', '.join(now)} runs now: "
        "measure it anew."
    ]


def _judged(runs: Sequence[Mapping[str, Any]], verdict: Mapping[str, Any]) -> dict[str, Any]:
    """Return the verdict in a sentence, with further ones, and its word and tone."""
    if not verdict:
        said = "not judged: runs were given, and no verdict on them" if runs else UNKNOWN
        return {"word": said.partition(":")[0], "tone": "unknown", "sentence": said, "text": []}
    text = [str(line) for line in verdict.get("text") or ()]
    word = str(verdict["verdict"])
    return {
        "word": _WORDS.get(word, word),
        "tone": _TONES.get(word, "unknown"),
        "sentence": text[0] if text else _sentence(verdict),
        "text": text[1:],
    }


def _sentence(verdict: Mapping[str, Any]) -> str:
    word = str(verdict["verdict"])
    parts = [_WORDS.get(word, word)]
    for name, key in (("keep", "keep_at"), ("drop", "drop_at")):
        if word == "depends" and verdict.get(key):
            parts.append(f"{name} it at {', '.join(map(str, verdict[key]))} requests at once")
    return "; ".join(parts)


def _unequal(item: Mapping[str, Any]) -> str:
    sides = ", ".join(f"{name} {value}" for name, value in item.items() if name != "key")
    return f"{item['key']}: {sides}"


def _arms(runs: Iterable[Mapping[str, Any]], baseline: str) -> list[str]:
    arms = sorted({str(run["arm"]) for run in runs})
    return sorted(arms, key=lambda arm: (arm != baseline, arm))


def _kind(runs: Iterable[Mapping[str, Any]]) -> str:
    """Return the prompts whose speed is shown: mixed ones where there are any."""
    kinds = sorted({str(point["prompts"]) for run in runs for point in run["points"]})
    return "mixed" if "mixed" in kinds or not kinds else kinds[0]


def _middle(values: Iterable[float | None]) -> float | None:
    """Return the median over the starts of an arm, `None` when none has the value."""
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _series(arm: str, runs: Iterable[Mapping[str, Any]], kind: str) -> dict[str, Any]:
    by_load: dict[int, list[Mapping[str, Any]]] = {}
    for run in runs:
        for point in run["points"]:
            if str(run["arm"]) == arm and str(point["prompts"]) == kind:
                by_load.setdefault(int(point["concurrency"]), []).append(point)

    def over(points: Iterable[Mapping[str, Any]], *path: str) -> float | None:
        return _middle(_at(point, *path) for point in points)

    return {
        "arm": arm,
        "points": [
            {
                "concurrency": load,
                "starts": len(points),
                "aggregate": over(points, "output_tok_s"),
                "per_request": over(points, "per_request_tok_s"),
                "ttft": over(points, "ttft_ms", "median"),
                "ttft_p95": over(points, "ttft_ms", "p95"),
                "tpot": over(points, "tpot_ms", "median"),
                "tpot_p95": over(points, "tpot_ms", "p95"),
                "in_flight": over(points, "in_flight"),
            }
            for load, points in sorted(by_load.items())
        ],
    }


def _at(value: Any, *path: str) -> Any:
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _ratios(verdict: Mapping[str, Any]) -> list[dict[str, Any]]:
    by_arm: dict[str, list[dict[str, Any]]] = {}
    for point in verdict.get("points") or ():
        by_arm.setdefault(str(point["arm"]), []).append(
            {
                "concurrency": int(point["concurrency"]),
                **{key: point.get(key) for key in ("ratio", "low", "high", "verdict")},
                "measured": bool(point.get("measured", True)),
                "held": list(point.get("held") or ()),
                "starts": dict(point.get("starts") or {}),
            }
        )
    return [
        {"arm": arm, "points": sorted(points, key=lambda point: int(point["concurrency"]))}
        for arm, points in sorted(by_arm.items())
    ]


def _accepted(arm: str, runs: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the accept lengths of an arm by kind of prompt, over all starts and loads."""
    by_kind: dict[str, list[Mapping[str, Any]]] = {}
    for run in runs:
        for point in run["points"]:
            if str(run["arm"]) == arm and point.get("accept_length") is not None:
                by_kind.setdefault(str(point["prompts"]), []).append(point)
    return [
        {
            "kind": kind,
            "low": min(point["accept_length"] for point in points),
            "length": _middle(point["accept_length"] for point in points),
            "high": max(point["accept_length"] for point in points),
            "rate": _middle(point.get("accept_rate") for point in points),
            "loads": sorted({int(point["concurrency"]) for point in points}),
        }
        for kind, points in sorted(by_kind.items())
    ]


def _conditions(runs: Sequence[Mapping[str, Any]], kind: str) -> list[dict[str, str]]:
    """Return what has to be known to read a figure; what the runs do not tell is said so."""
    if not runs:
        return []
    points = [p for run in runs for p in run["points"] if str(p["prompts"]) == kind]

    def held(key: str, unit: str = "") -> str:
        values = sorted({str(v) for run in runs if (v := _at(run, "equal", key)) is not None})
        return f"{' / '.join(values)}{unit}" if values else "not recorded"

    def tokens(key: str, part: str) -> str:
        values = sorted({v for point in points if (v := _at(point, key, part)) is not None})
        if not values:
            return "not recorded"
        ends = dict.fromkeys(figure(value) for value in (values[0], values[-1]))
        return f"{' to '.join(ends)} tokens"

    starts = [
        f"{len({run.get('start') for run in runs if str(run['arm']) == arm})} of {arm}"
        for arm in _arms(runs, "off")
    ]
    pairs = {
        "SGLang": held("sglang"),
        "Model": held("model"),
        "GPU": held("gpus"),
        "Power limit": held("power_limit_w", " W"),
        "Context": held("context_length", " tokens"),
        "Input": tokens("input_tokens", "median"),
        "Output": tokens("output_tokens", "asked"),
        "Prompts": kind,
        "Starts": ", ".join(starts),
        "Last start": when(max((str(run["at"]) for run in runs if run.get("at")), default=None)),
    }
    return [{"label": label, "value": value} for label, value in pairs.items()]


def _verdict_cell(word: str | None) -> dict[str, str]:
    return cell(_WORDS.get(word or "", word), _TONES.get(word or "", "unknown"))


def share(value: float) -> str:
    """Write a part of 1 as percent."""
    return f"{value * 100:.0f}{_NBSP}%"


def percent(ratio: float | None) -> str:
    """Write a ratio as what it adds or takes away."""
    if ratio is None:
        return UNKNOWN
    return f"{round((ratio - 1) * 100):+d}{_NBSP}%".replace("-", "\N{MINUS SIGN}")


def interval(low: float | None, high: float | None) -> str:
    """Write an interval of ratios."""
    if low is None or high is None:
        return UNKNOWN
    return f"{low:.2f} to {high:.2f}".replace(" ", _NBSP)


def _ratio_table(
    ratios: Iterable[Mapping[str, Any]], verdict: Mapping[str, Any]
) -> dict[str, Any] | None:
    sure = share(float(verdict.get("confidence") or 0.95))
    rows = [
        (
            f"{arm['arm']}, {point['concurrency']}",
            _verdict_cell(point["verdict"]),
            percent(point["ratio"]),
            cell(None if point["ratio"] is None else f"{point['ratio']:.2f}"),
            interval(point["low"], point["high"]),
            ", ".join(f"{number}{_NBSP}{name}" for name, number in point["starts"].items())
            if point["measured"]
            else f"at the cap of {' and '.join(point['held'])}"
            if point.get("held")
            else "interpolated",
        )
        for arm in ratios
        for point in arm["points"]
    ]
    columns = ("Arm, requests at once", "Verdict", "Gain", "Ratio", f"{sure} interval", "Starts")
    return table("Speed with MTP over speed without, by load", columns, rows) if rows else None


def _profile_table(verdict: Mapping[str, Any]) -> dict[str, Any] | None:
    rows = [
        (
            str(profile["name"]).replace("-", " "),
            _verdict_cell(profile.get("verdict")),
            cell(profile.get("arm")),
            percent(profile.get("gain")),
            interval(profile.get("low"), profile.get("high")),
            ", ".join(
                f"{share(float(part))} at {load}".replace(" ", _NBSP)
                for load, part in (profile.get("load") or {}).items()
            ),
        )
        for profile in verdict.get("profiles") or ()
    ]
    columns = (
        "Load",
        "Verdict",
        "Arm",
        "Gain",
        "Interval",
        "Share of time",
    )
    return table("What it means for typical loads", columns, rows) if rows else None


def _each(
    series: Iterable[Mapping[str, Any]], make: Callable[[Mapping[str, Any]], Sequence[str]]
) -> list[tuple[str, ...]]:
    return [
        (f"{arm['arm']}, {point['concurrency']}", *make(point))
        for arm in series
        for point in arm["points"]
    ]


def _speed_table(series: Iterable[Mapping[str, Any]]) -> dict[str, Any] | None:
    rows = _each(
        series,
        lambda point: (
            figure(point["per_request"]),
            figure(point["aggregate"]),
            figure(point["in_flight"]),
            str(point["starts"]),
        ),
    )
    columns = (
        "Arm, requests at once",
        "Tokens/s for each request",
        "Tokens/s of all",
        "Really in flight",
        "Starts",
    )
    return table("Speed by arm and load, median of the starts", columns, rows) if rows else None


def _latency_table(
    series: Iterable[Mapping[str, Any]], key: str, caption: str
) -> dict[str, Any] | None:
    rows = _each(series, lambda point: [figure(point[key]), figure(point[f"{key}_p95"])])
    columns = ("Arm, requests at once", "Median", "95th percentile")
    return table(caption, columns, rows) if rows else None


def _acceptance_table(acceptance: Iterable[Mapping[str, Any]]) -> dict[str, Any] | None:
    rows = [
        (
            f"{arm['arm']}, {kind['kind']}",
            figure(kind["length"]),
            f"{figure(kind['low'])} to {figure(kind['high'])}",
            cell(None if kind["rate"] is None else share(kind["rate"])),
            ", ".join(map(str, kind["loads"])),
        )
        for arm in acceptance
        for kind in arm["kinds"]
    ]
    columns = (
        "Arm, prompts",
        "Accept length",
        "From lowest to highest",
        "Accept rate",
        "Requests at once",
    )
    caption = "Tokens for each pass of the model, by kind of prompt"
    return table(caption, columns, rows) if rows else None


def _start_table(runs: Iterable[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the starts, with what is not the same in all of them.

    A start of which each kind of prompts was measured alone, too, has several runs.
    """
    first: dict[tuple[str, Any], Mapping[str, Any]] = {}
    settings = []
    for run in sorted(runs, key=lambda run: str(run.get("at"))):
        first.setdefault((str(run["arm"]), run.get("start")), run)
        settings.append(run.get("apart") or {})
    apart = {
        key
        for key in {key for setting in settings for key in setting} - {"kv_tokens"}
        if len({str(setting.get(key)) for setting in settings}) > 1
    }
    rows = [
        (
            f"{run['arm']}, start {run.get('start')}",
            when(run.get("at")),
            cell(_at(run, "client", "name")),
            cell(_at(run, "apart", "kv_tokens")),
            ", ".join(
                f"{key}={value}"
                for key, value in sorted((run.get("apart") or {}).items())
                if key in apart and value not in (None, "", False)
            )
            or "nothing",
        )
        for run in first.values()
    ]
    columns = ("Arm, start", "When", "Load generator", "Tokens in the cache", "Only in some starts")
    return table("The starts that were measured", columns, rows) if rows else None


def _left_out_table(
    runs: Iterable[Mapping[str, Any]], verdict: Mapping[str, Any]
) -> dict[str, Any] | None:
    points = [
        {**point, "arm": run["arm"], "start": run.get("start")}
        for run in runs
        for point in run.get("rejected") or ()
    ]
    # the verdict names the same points and those that it left out itself
    reasons: dict[tuple[str, str, int], str] = {}
    for point in [*points, *(verdict.get("left_out") or ())]:
        head = str(point["arm"]), str(point.get("start")), int(point.get("concurrency") or 0)
        said = "; ".join(_reason(reason) for reason in point.get("reasons") or ())
        reasons.setdefault(head, said or "no reason was given")
    starts: dict[tuple[str, int, str], list[str]] = {}
    for (arm, start, load), said in sorted(reasons.items()):
        starts.setdefault((arm, load, said), []).append(start)
    columns = ("Arm, requests at once", "Starts", "Why it does not count")
    rows = [(f"{arm}, {load}", ", ".join(of), said) for (arm, load, said), of in starts.items()]
    return table("Points that do not count", columns, rows) if rows else None


def _reason(reason: Any) -> str:
    if isinstance(reason, Mapping):
        return str(reason.get("text") or reason.get("code"))
    return str(reason)


def _history(history: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the comparison with earlier runs, `None` when there is none."""
    if not history:
        return None
    rows = [
        (
            str(point["concurrency"]),
            cell(point.get("verdict"), _HISTORY.get(str(point.get("verdict")), "unknown")),
            percent(point.get("ratio")),
            interval(point.get("low"), point.get("high")),
        )
        for point in history["points"]
    ]
    columns = ("Requests at once", "Verdict", "Against then", "Interval")
    verdict = history.get("verdict")
    return {
        "verdict": cell(verdict, _HISTORY.get(str(verdict), "unknown")),
        "unequal": [_change(item) for item in history.get("unequal") or ()],
        "table": table("Now against the earlier runs", columns, rows) if rows else None,
        "changed": [_change(item) for item in history.get("changed") or ()],
    }


def _change(item: Any) -> str:
    if not isinstance(item, Mapping):
        return str(item)
    return f"{item.get('key')}: {item.get('before')} \N{RIGHTWARDS ARROW} {item.get('after')}"
