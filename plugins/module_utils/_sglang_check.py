# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.

"""A wanted command line of SGLang, judged against the flags of an installed release."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_flags import (
    Flag,
    FlagSet,
    version_key,
)

# Spellings of one flag in different releases, the older one first; seen in the released wheels.
_RENAMED = (
    ("--mamba-scheduler-strategy", "--mamba-radix-cache-strategy"),  # both in 0.5.14 to 0.5.19
    ("--cuda-graph-max-bs", "--cuda-graph-max-bs-decode"),
    ("--cuda-graph-bs", "--cuda-graph-bs-decode"),
    ("--disable-piecewise-cuda-graph", "--cuda-graph-backend-prefill disabled"),
    ("--piecewise-cuda-graph-max-tokens", "--cuda-graph-max-bs-prefill"),
    ("--piecewise-cuda-graph-tokens", "--cuda-graph-bs-prefill"),
    ("--nsa-prefill-backend", "--dsa-prefill-backend"),
    ("--nsa-decode-backend", "--dsa-decode-backend"),
    ("--stream-output", "--incremental-streaming-output"),
    ("--speculative-dflash-draft-window-size", "--speculative-draft-window-size"),
    ("--enable-dp-attention", "--attn-dp-size"),
)
# Built into 0.5.23; from 0.5.12 on plug-ins may add names, so that the parser lists no choices.
_ALGORITHMS = ("DFLASH", "DSPARK", "EAGLE", "EAGLE3", "NEXTN", "NGRAM", "STANDALONE", "UNO")
_TRIPLE = (
    "--speculative-num-steps",
    "--speculative-eagle-topk",
    "--speculative-num-draft-tokens",
)


@dataclass(frozen=True)
class Problem:
    """One thing that is or may be wrong with a wanted command line.

    Attributes:
        flag: the flag as it was given, `None` when it concerns the whole command line.
        kind: `unknown`, `renamed`, `abbreviation`, `duplicate`, `choice`, `type`,
            `missing_partner`, `conflict`, `missing_file`, `deprecated`, `known_bad`, `unchecked`.
        severity: `error` when the server would not start or would run something else,
            `warning` when it starts but differs from what one expects, `note` for `unchecked`.
        message: what is wrong, in one sentence.
        suggestion: what to write instead, `None` when there is no single answer.
    """

    flag: str | None
    kind: str
    severity: str
    message: str
    suggestion: str | None = None


@dataclass(frozen=True)
class Given:
    """A flag of a wanted command line: its spelling and its values as text."""

    spelling: str
    values: tuple[str, ...]


def parse_wanted(wanted: Mapping[str, Any] | Sequence[Any]) -> list[Given]:
    """Return the flags of a mapping or of a list of words, in their order.

    In a mapping, the names may be written with or without the two dashes; `true` gives the flag
    without a value, `false` and `None` leave it out, a list gives several values and a mapping
    one value in JSON: the rules of SGLang's own `--config` file.

    Raises:
        GpuHostError: it is neither, or a list does not begin with a flag.
    """
    if isinstance(wanted, str):
        raise GpuHostError(f"wanted is a mapping of flags or a list of words, not {wanted!r}")
    if isinstance(wanted, Mapping):
        return [
            Given(name if name.startswith("-") else f"--{name}", _texts(value))
            for name, value in wanted.items()
            if value is not None and value is not False and value != []
        ]
    given: list[Given] = []
    for word in map(str, wanted):
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word.partition("=")
            given.append(Given(name, (value,) if equals else ()))
        elif given:
            given[-1] = Given(given[-1].spelling, (*given[-1].values, word))
        else:
            raise GpuHostError(f"{word} stands before the first flag; flags begin with --")
    return given


def _texts(value: Any) -> tuple[str, ...]:
    if value is True:
        return ()
    if isinstance(value, Mapping):
        return (json.dumps(value),)
    return tuple(map(str, value)) if isinstance(value, (list, tuple)) else (str(value),)


def for_config_file(flags: FlagSet, wanted: Sequence[Given]) -> tuple[dict[str, Any], list[str]]:
    """Return what SGLang's `--config` file can hold, names without dashes, and the words it cannot.

    The file takes flags with values and plain switches. It refuses flags with an action of their
    own, `--no-…` and `--lora-paths` among them: `ConfigArgumentMerger` in
    `srt/server_args_config_parser.py` (later `srt/utils/`) of 0.5.9 and later.
    """
    spellings = flags.spellings()
    config: dict[str, Any] = {}
    arguments: list[str] = []
    for given in wanted:
        flag = spellings.get(given.spelling)
        if given.spelling == "--config":
            continue
        if flag is None or flag.action not in ("store", "store_true"):
            arguments += [given.spelling, *given.values]
        elif flag.action == "store_true":
            config[flag.name[2:]] = True  # older releases know a switch by this name only
        else:
            values = [_plain(flag, value) for value in given.values]
            config[given.spelling[2:]] = values[0] if len(values) == 1 else values
    return config, arguments


def _plain(flag: Flag, value: str) -> Any:
    """Return a value as YAML shows it best: a number for a flag that takes one."""
    try:
        parsers = {"int": int, "float": float, "human_readable_int": int}  # the last also reads 4k
        return parsers.get(flag.type, str)(value)
    except ValueError:
        return value


def check_flags(
    flags: FlagSet, wanted: Sequence[Given], architecture: str | None = None
) -> list[Problem]:
    """Return the problems of a wanted command line, in its order, those of the whole set last.

    Args:
        flags: what the installed release accepts.
        wanted: the command line, from `parse_wanted`.
        architecture: the model's, from its `config.json`, for releases known to be bad with it.
    """
    spellings = flags.spellings()
    problems: list[Problem] = []
    values: dict[str, tuple[str, ...]] = {}
    first: dict[str, str] = {}
    for given in wanted:
        flag = spellings.get(given.spelling)
        if flag is None:
            problems.append(_not_a_flag(given.spelling, flags, spellings))
            continue
        if flag.dest in first:
            problems.append(
                Problem(
                    given.spelling,
                    "duplicate",
                    "error",
                    f"{given.spelling} sets what {first[flag.dest]} has set already, "
                    "and the last one would win silently",
                    f"keep one {flag.name}",
                )
            )
        first.setdefault(flag.dest, given.spelling)
        values[flag.name] = given.values
        problems += _check_flag(given, flag)
    version = flags.version
    problems += _check_speculation(values, version, "--speculative-algorithm" in spellings)
    problems += _check_together(values, version)
    problems += _check_model(values, version, architecture)
    return problems


def _not_a_flag(spelling: str, flags: FlagSet, spellings: Mapping[str, Flag]) -> Problem:
    version = flags.version or "this version"
    for pair in _RENAMED:
        for name, other in (pair, pair[::-1]):
            if spelling == name.split()[0] and other.split()[0] in spellings:
                return Problem(
                    spelling,
                    "renamed",
                    "error",
                    f"{spelling} is not a flag of SGLang {version}, which calls it {other}",
                    other,
                )
    longer = sorted({flag.name for name, flag in spellings.items() if name.startswith(spelling)})
    if longer:
        return Problem(
            spelling,
            "abbreviation",
            "error",
            f"{spelling} is an abbreviation of {' and '.join(longer)}; abbreviations stop working "
            "when another release adds a flag that begins alike",
            longer[0] if len(longer) == 1 else None,
        )
    near = difflib.get_close_matches(spelling.replace("_", "-"), spellings, n=1, cutoff=0.8)
    return Problem(
        spelling,
        "unknown",
        "error",
        f"{spelling} is not a flag of SGLang {version}",
        spellings[near[0]].name if near else None,
    )


def _check_flag(given: Given, flag: Flag) -> Iterator[Problem]:
    """Yield the problems of one flag with its own definition."""
    name = given.spelling
    if flag.retired:
        yield Problem(
            name,
            "unknown",
            "error",
            f"{name} is retired: SGLang refuses to start with it",
            flag.replacement,
        )
        return
    if flag.replacement or flag.action.startswith("Deprecated"):
        yield Problem(
            name,
            "deprecated",
            "warning",
            f"{name} is deprecated in this release",
            flag.replacement,
        )
    count = len(given.values)
    if "nargs" in flag.unchecked:
        yield Problem(name, "unchecked", "note", f"how many values {name} takes is not known here")
        return
    fault = _count_fault(flag.nargs, count)
    if fault:
        yield Problem(name, "type", "error", f"{name} takes {fault}, {count} given")
        return
    for value in given.values:
        yield from _check_value(name, value, flag)


def _count_fault(nargs: int | str | None, count: int) -> str | None:
    """Return what a flag takes when that is not the number of values given."""
    if nargs is None or nargs == 1:
        return None if count == 1 else "one value"
    if isinstance(nargs, int):
        return None if count == nargs else ("no value" if nargs == 0 else f"{nargs} values")
    if nargs == "?":
        return None if count <= 1 else "one value or none"
    return "at least one value" if nargs == "+" and count == 0 else None


def _check_value(name: str, value: str, flag: Flag) -> Iterator[Problem]:
    parsers: dict[str, Callable[[str], object]] = {
        "int": int,
        "float": float,
        "json.loads": json.loads,
        "str": str,
    }
    if flag.type not in parsers:
        if not re.fullmatch(r"-?\d+", value):  # every parser of SGLang takes a plain number or text
            yield Problem(
                name, "unchecked", "note", f"{flag.type} reads the value of {name}: not checked"
            )
        return
    try:
        parsers[flag.type](value)
    except ValueError:
        what = {"int": "a whole number", "float": "a number"}.get(flag.type, "JSON")
        yield Problem(name, "type", "error", f"{name} takes {what}, not {value!r}")
        return
    if "choices" in flag.unchecked:
        yield Problem(name, "unchecked", "note", f"the choices of {name} are not known here")
    elif flag.choices is not None and value not in map(str, flag.choices):
        choices = [str(choice) for choice in flag.choices]
        near = difflib.get_close_matches(value, choices, n=1)
        yield Problem(
            name,
            "choice",
            "error",
            f"{name} cannot be {value!r}; it is one of {', '.join(choices)}",
            near[0] if near else None,
        )


def _check_speculation(
    values: Mapping[str, tuple[str, ...]], version: str | None, known: bool
) -> Iterator[Problem]:
    """Yield the problems of the speculative flags with each other.

    Source of the rules: `srt/arg_groups/speculative_hook.py`, in older releases `server_args.py`.
    """
    triple = {name: _number(values, name) for name in _TRIPLE if name in values}
    algorithm = "".join(values.get("--speculative-algorithm", ())).upper()
    if not algorithm:
        if triple and known:
            yield Problem(
                min(triple),
                "missing_partner",
                "error",
                f"{', '.join(triple)} have no effect without --speculative-algorithm",
                "--speculative-algorithm NEXTN",
            )
        return
    if algorithm not in _ALGORITHMS and (version_key(version) >= (0, 5, 12)):
        near = difflib.get_close_matches(algorithm, _ALGORITHMS, n=1)
        yield Problem(
            "--speculative-algorithm",
            "choice",
            "warning",
            f"{algorithm} is not built into SGLang; it must come from a plug-in",
            near[0] if near else None,
        )
    if "--max-running-requests" not in values:
        yield Problem(
            "--speculative-algorithm",
            "missing_partner",
            "warning",
            "with speculation and without --max-running-requests SGLang runs 48 requests at most",
            "--max-running-requests N",
        )
    if algorithm not in ("EAGLE", "EAGLE3", "NEXTN"):
        return
    missing = [name for name in _TRIPLE if name not in values]
    if triple and missing:
        yield Problem(
            min(triple),
            "missing_partner",
            "error",
            f"{', '.join(triple)} needs {' and '.join(missing)} too: give all three or none",
            "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4",
        )
        return
    steps, topk, drafts = (triple.get(name) for name in _TRIPLE)
    if topk == 1 and steps is not None and drafts is not None and drafts != steps + 1:
        yield Problem(
            "--speculative-num-draft-tokens",
            "conflict",
            "error",
            f"with top-k 1, {steps} steps make {steps + 1} draft tokens: SGLang would run "
            f"{steps}/1/{steps + 1} instead of {steps}/1/{drafts}",
            f"--speculative-num-draft-tokens {steps + 1}",
        )


def _number(values: Mapping[str, tuple[str, ...]], name: str) -> int | None:
    text = "".join(values.get(name, ()))
    return int(text) if re.fullmatch(r"\d+", text) else None


def _check_together(
    values: Mapping[str, tuple[str, ...]], version: str | None
) -> Iterator[Problem]:
    """Yield flags that a release refuses beside each other."""
    strategy = values.get("--mamba-scheduler-strategy", ())
    if (
        (0, 5, 10) <= version_key(version) < (0, 5, 14)
        and "--disable-radix-cache" in values
        and strategy[:1]
        and strategy[0].startswith("extra_buffer")
    ):
        yield Problem(
            "--disable-radix-cache",
            "conflict",
            "error",
            f"SGLang {version} refuses --disable-radix-cache beside "
            f"--mamba-scheduler-strategy {strategy[0]}",
            "--mamba-scheduler-strategy no_buffer",
        )
    names = values.get("--served-model-name", ())
    if names and ":" in names[0]:
        yield Problem(
            "--served-model-name",
            "choice",
            "error",
            f"a served model name must not contain a colon, as {names[0]} does: "
            "SGLang takes what follows it for a LoRA adapter",
            names[0].replace(":", "-"),
        )


def _check_model(
    values: Mapping[str, tuple[str, ...]], version: str | None, architecture: str | None
) -> Iterator[Problem]:
    """Yield what is known about a release with a family of models."""
    if not architecture or not architecture.startswith("Qwen3_5") or version is None:
        return
    release = version_key(version)
    if release < (0, 5, 9):
        yield Problem(
            "--model-path",
            "known_bad",
            "error",
            f"SGLang {version} has no code for {architecture}; 0.5.9 is the first release with it",
        )
    elif release < (0, 5, 10) and "--attention-backend" not in values:
        yield Problem(
            "--attention-backend",
            "missing_partner",
            "warning",
            f"on Blackwell GPUs SGLang {version} chooses flashinfer for {architecture} "
            "and then refuses it",
            "--attention-backend triton",
        )
    unstable = unstable_with_mtp(version, architecture)
    if unstable and "--speculative-algorithm" in values:
        yield unstable


def unstable_with_mtp(version: str | None, architecture: str) -> Problem | None:
    """Return the warning about a release that often fails to start with MTP and this model."""
    if version_key(version)[:3] != (0, 5, 13) or not architecture.startswith("Qwen3_5"):
        return None
    return Problem(
        "--speculative-algorithm",
        "known_bad",
        "warning",
        f"about one start in five fails with SGLang {version}, {architecture} and MTP "
        "(sgl-project/sglang issues 28312 and 28431)",
        "SGLang 0.5.14 or later",
    )
