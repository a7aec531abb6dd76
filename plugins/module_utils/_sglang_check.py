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
from dataclasses import dataclass, replace
from typing import Any

from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from ansible_collections.gpuhost.inference.plugins.module_utils._mtp_families import family_of
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
    ("--piecewise-cuda-graph-max-tokens", "--cuda-graph-max-bs-prefill"),
    ("--piecewise-cuda-graph-tokens", "--cuda-graph-bs-prefill"),
    ("--piecewise-cuda-graph-compiler", "--cuda-graph-tc-compiler"),
    ("--nsa-prefill", "--nsa-prefill-backend"),
    ("--nsa-decode", "--nsa-decode-backend"),
    ("--nsa-prefill-backend", "--dsa-prefill-backend"),
    ("--nsa-decode-backend", "--dsa-decode-backend"),
    ("--stream-output", "--incremental-streaming-output"),
    ("--oltp-traces-endpoint", "--otlp-traces-endpoint"),
    ("--speculative-dflash-draft-window-size", "--speculative-draft-window-size"),
    ("--enable-gdn-replayssm-spec", "--enable-linear-replayssm-spec"),
    ("--enable-prefill-context-parallel", "--enable-prefill-cp"),
)
# Flags whose place another one has taken with a value; there is no way back by the name alone.
_REPLACED = {
    "--disable-piecewise-cuda-graph": "--cuda-graph-backend-prefill disabled",
    "--enable-breakable-cuda-graph": "--cuda-graph-backend-prefill breakable",
    "--enable-dp-attention": "--attn-dp-size N",
    "--enable-dsa-prefill-context-parallel": "--enable-prefill-cp",
    "--enable-nsa-prefill-context-parallel": "--enable-prefill-cp",
    "--dsa-prefill-cp-mode": "--cp-strategy NAME",
    "--nsa-prefill-cp-mode": "--cp-strategy NAME",
    "--prefill-cp-mode": "--cp-strategy NAME",
    "--enable-deepep-moe": "--moe-a2a-backend deepep",
    "--enable-flashinfer-cutlass-moe": "--moe-runner-backend flashinfer_cutlass",
    "--enable-flashinfer-mxfp4-moe": "--moe-runner-backend flashinfer_mxfp4",
    "--enable-flashinfer-trtllm-moe": "--moe-runner-backend flashinfer_trtllm",
    "--enable-triton-kernel-moe": "--moe-runner-backend triton_kernel",
}
# Built in since which release; from 0.5.12 on plug-ins may add names, so that the parser lists no
# choices. Source: `SpeculativeAlgorithm` in `srt/speculative/spec_info.py`.
_ALGORITHMS = {
    "DFLASH": (0, 5, 11),
    "DSPARK": (0, 5, 16),
    "EAGLE": (0,),
    "EAGLE3": (0,),
    "NEXTN": (0,),
    "NGRAM": (0, 5, 3),
    "STANDALONE": (0, 5, 2),
    "UNO": (0, 5, 20),
}
_DRAFTING = ("EAGLE", "EAGLE3", "NEXTN")
STRATEGIES = ("--mamba-radix-cache-strategy", "--mamba-scheduler-strategy")
_SPEC_V2 = ", and SGLANG_ENABLE_SPEC_V2=1 in the environment"
_TRACK_INTERVAL = 256  # the default of --mamba-track-interval
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
    without a value, a list gives several values and a mapping one value in JSON: the rules of
    SGLang's own `--config` file. `false`, `None`, an empty text and an empty list leave it out.

    Raises:
        GpuHostError: it is neither, or a list does not begin with a flag.
    """
    if not isinstance(wanted, (Mapping, list, tuple)):
        raise GpuHostError(f"wanted is a mapping of flags or a list of words, not {wanted!r}")
    if isinstance(wanted, Mapping):
        return [
            Given(_dashed(str(name)), _texts(value))
            for name, value in wanted.items()
            if value is not None and value is not False and value not in ("", [])
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


def _dashed(name: str) -> str:
    return name if name.startswith("-") else f"--{name}"


def _texts(value: Any) -> tuple[str, ...]:
    if value is True:
        return ()
    values = value if isinstance(value, (list, tuple)) else (value,)
    return tuple(json.dumps(v) if isinstance(v, (Mapping, list)) else str(v) for v in values)


def check_left_out(flags: FlagSet, wanted: Any) -> list[Problem]:
    """Return the flags of a mapping that `false` leaves out, though they are on by themselves.

    Args:
        flags: what the installed release accepts.
        wanted: what `parse_wanted` was given.
    """
    spellings = flags.spellings()
    off = (
        [_dashed(str(k)) for k, v in wanted.items() if v is False]
        if isinstance(wanted, Mapping)
        else []
    )
    return [
        Problem(
            name,
            "conflict",
            "warning",
            f"false only leaves {name} out, and SGLang {flags.version or 'of this version'} "
            "switches it on by itself",
            f"--no-{spellings[name].name[2:]}",
        )
        for name in off
        if name in spellings
        and spellings[name].action == "boolean_optional"
        and spellings[name].default is not False
        and not name.startswith("--no-")
    ]


def for_config_file(flags: FlagSet, wanted: Sequence[Given]) -> tuple[dict[str, Any], list[str]]:
    """Return what SGLang's `--config` file can hold, names without dashes, and the words it cannot.

    Releases before 0.5.3 have no such file: all are words then, and no key can be given safely.

    The file takes flags with values and plain switches. It refuses flags with an action of their
    own, `--no-…` and `--lora-paths` among them: `ConfigArgumentMerger` in
    `srt/server_args_config_parser.py` (later `srt/utils/`) of 0.5.9 and later.
    """
    spellings = flags.spellings()
    file = "--config" in spellings
    config: dict[str, Any] = {}
    arguments: list[str] = []
    for given in wanted:
        flag = spellings.get(given.spelling)
        if given.spelling == "--config":
            continue
        switch = flag is not None and flag.action == "store_true"
        if flag is None or not file or not (switch or (flag.action == "store" and given.values)):
            arguments += [given.spelling, *given.values]
        elif switch:
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
    problems += _check_several_hosts(values)
    problems += _check_states(values, version, architecture)
    problems += blackwell_refuses(values, version, architecture)
    problems += _check_model(values, version, architecture)
    return problems


def _not_a_flag(spelling: str, flags: FlagSet, spellings: Mapping[str, Flag]) -> Problem:
    """Return what is wrong with a name that is no flag, or that nobody knows whether it is one."""
    problem = _unknown_flag(spelling, flags, spellings)
    if flags.complete:
        return problem
    return replace(
        problem, kind="unchecked", severity="warning", message=may_be_flag(spelling, flags)
    )


def may_be_flag(spelling: str, flags: FlagSet) -> str:
    """Return a sentence about a name that is not among the flags of a set that is not complete."""
    count = len(flags.passed_over)
    more = f" and {count - 1} more" if count > 1 else ""
    return (
        f"whether {spelling} is a flag of SGLang {flags.version or 'this version'} is not known "
        f"here: what its source defines at {flags.passed_over[0]}{more} could not be read"
    )


def _unknown_flag(spelling: str, flags: FlagSet, spellings: Mapping[str, Flag]) -> Problem:
    version = flags.version or "this version"
    others = [new for old, new in _RENAMED if old == spelling]
    others += [_REPLACED[spelling]] if spelling in _REPLACED else []
    others += [old for old, new in _RENAMED if new == spelling]
    for other in others:
        if other.split()[0] in spellings:
            return Problem(
                spelling,
                "renamed",
                "error",
                f"{spelling} is not a flag of SGLang {version}, which calls it {other}",
                other,
            )
    if spelling == "--config":
        message = f"SGLang {version} reads no configuration file; 0.5.3 is the first that does"
        return Problem(spelling, "unknown", "error", message, "SGLang 0.5.3 or later")
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
        yield Problem(
            name, "type", "error", f"{name} takes {fault}, {count} given", _switch_hint(flag, given)
        )
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


def _switch_hint(flag: Flag, given: Given) -> str | None:
    """Return what to write for a switch that was given a word, as "yes" in quotes."""
    word = given.values[0].lower() if flag.nargs == 0 and len(given.values) == 1 else ""
    if word in ("true", "yes", "on", "1"):
        return f"{given.spelling} alone (true without quotes in a mapping)"
    return f"leave {given.spelling} out" if word in ("false", "no", "off", "0") else None


def _value_fault(value: str) -> str | None:
    """Return what keeps any parser from reading a value."""
    if "\0" in value:
        return "holds a null character"
    # argparse takes such a word for a flag, but not a negative number or a text with a space
    if re.match(r"-[^\s]+$", value) and not re.match(r"-\d+$|-\d*\.\d+$", value):
        return "begins with a dash, which SGLang's parser takes for another flag"
    return None


def _check_value(name: str, value: str, flag: Flag) -> Iterator[Problem]:
    parsers: dict[str, Callable[[str], object]] = {
        "int": int,
        "float": float,
        "json.loads": json.loads,
        "str": str,
    }
    fault = _value_fault(value)
    if fault:
        yield Problem(name, "type", "error", f"the value {value!r} of {name} {fault}")
        return
    if value != value.strip():
        yield Problem(
            name,
            "type",
            "warning",
            f"the value {value!r} of {name} begins or ends with white space",
            value.strip(),
        )
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
    triple = {name: number(values, name) for name in _TRIPLE if name in values}
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
    release = version_key(version)
    if release >= (0, 5, 12) and release < _ALGORITHMS.get(algorithm, (10**7,)):
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
    if algorithm not in _DRAFTING:
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
    if topk is not None and topk > 1:
        yield from _check_trees(values, topk)
    if topk == 1 and steps is not None and drafts is not None:
        yield from chain_conflict(steps, drafts)


def chain_conflict(steps: int, drafts: int) -> Iterator[Problem]:
    """Yield what is wrong with these numbers for drafts that do not branch (top-k 1)."""
    if drafts != steps + 1:
        yield Problem(
            "--speculative-num-draft-tokens",
            "conflict",
            "error",
            f"with top-k 1, {steps} steps make {steps + 1} draft tokens: SGLang would run "
            f"{steps}/1/{steps + 1} instead of {steps}/1/{drafts}",
            f"--speculative-num-draft-tokens {steps + 1}",
        )


def _check_trees(values: Mapping[str, tuple[str, ...]], topk: int) -> Iterator[Problem]:
    """Yield what does not go with drafts that branch (top-k above 1)."""
    backend = "".join(values.get("--attention-backend", ()))
    page = number(values, "--page-size") or 1
    if backend == "trtllm_mha":
        fault = "--attention-backend trtllm_mha"
    elif page > 1 and backend and backend not in ("flashinfer", "fa3", "triton"):
        fault = f"--page-size {page} on --attention-backend {backend}"
    elif "--speculative-use-rejection-sampling" in values:
        fault = "--speculative-use-rejection-sampling"
    else:
        return
    yield Problem(
        "--speculative-eagle-topk",
        "conflict",
        "error",
        f"SGLang refuses --speculative-eagle-topk {topk} with {fault}",
        "--speculative-eagle-topk 1",
    )


def number(values: Mapping[str, tuple[str, ...]], name: str) -> int | None:
    """Return the whole number that a flag is given, `None` when it is not, or is no such."""
    text = "".join(values.get(name, ()))
    # more digits are no number of anything here, and above 4300 Python refuses to read them
    return int(text) if re.fullmatch(r"\d{1,18}", text) else None


def _check_together(
    values: Mapping[str, tuple[str, ...]], version: str | None
) -> Iterator[Problem]:
    """Yield flags that a release refuses beside each other."""
    yield from mixed_chunk_off(values, version)
    file = "".join(values.get("--config", ()))
    if file and not file.lower().endswith((".yaml", ".yml")):
        yield Problem(
            "--config",
            "choice",
            "error",
            f"SGLang takes {file} for no configuration file: its name must end in .yaml or .yml",
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


def _check_several_hosts(values: Mapping[str, tuple[str, ...]]) -> Iterator[Problem]:
    """Yield what keeps servers on several hosts from finding each other, and half a certificate."""
    nodes, rank = number(values, "--nnodes"), number(values, "--node-rank")
    addresses = ("--dist-init-addr", "--nccl-init-addr")
    if nodes is not None and nodes > 1:
        if not any(name in values for name in addresses):
            yield Problem(
                "--nnodes",
                "missing_partner",
                "error",
                f"--nnodes {nodes} needs --dist-init-addr, where the hosts meet",
                "--dist-init-addr HOST:PORT",
            )
        if rank is None:
            yield Problem(
                "--nnodes",
                "missing_partner",
                "warning",
                f"--nnodes {nodes} without --node-rank makes this host the first one, rank 0",
                "--node-rank N",
            )
    if rank is not None and rank >= (nodes or 1):
        yield Problem(
            "--node-rank",
            "conflict",
            "error",
            f"--node-rank {rank} is not one of {nodes or 1} hosts, counted from 0",
        )
    pair = ("--ssl-keyfile", "--ssl-certfile")
    for name, other in (pair, pair[::-1]):
        if name in values and other not in values:
            yield Problem(name, "missing_partner", "error", f"{name} needs {other} too", other)


def mixed_chunk_off(
    values: Mapping[str, tuple[str, ...]], version: str | None
) -> Iterator[Problem]:
    """Yield that speculation switches mixed chunks off: `srt/arg_groups/speculative_hook.py`.

    0.5.19 is the first release that keeps them: `supports_mixed_chunk` in
    `srt/speculative/spec_info.py`.
    """
    algorithm = "".join(values.get("--speculative-algorithm", ())).upper()
    if (
        "--enable-mixed-chunk" in values
        and algorithm in _DRAFTING
        and version_key(version) < (0, 5, 19)
    ):
        yield Problem(
            "--enable-mixed-chunk",
            "conflict",
            "warning",
            f"SGLang {version} switches off --enable-mixed-chunk with {algorithm}",
            "SGLang 0.5.19 or later",
        )


def _check_states(
    values: Mapping[str, tuple[str, ...]], version: str | None, architecture: str | None
) -> Iterator[Problem]:
    """Yield what concerns a model that keeps states (Mamba, gated delta net).

    Without a version, or for a model that is not known, nothing is said but that.
    """
    name = next((name for name in STRATEGIES if name in values), None)
    family = family_of(architecture)
    if (
        (family is None or version is None)
        and name is not None
        and "--disable-radix-cache" not in values
    ):
        what = "the release" if version is None else "the model"
        message = f"whether {name} goes with {what} is not known here"
        yield Problem(name, "unchecked", "note", message)
    yield from state_conflicts(values, version, architecture)
    topk = number(values, "--speculative-eagle-topk")
    if (
        family is not None
        and family.hybrid
        and version_key(version)[:3] == (0, 5, 10)
        and topk is not None
        and topk > 1
        and (strategy_of(values) or "").startswith("extra_buffer")
        and "--speculative-algorithm" in values
    ):  # it needs SGLANG_ENABLE_SPEC_V2
        yield Problem(
            "--speculative-eagle-topk",
            "conflict",
            "error",
            "speculation with extra_buffer needs --speculative-eagle-topk 1 in this release",
            "--speculative-eagle-topk 1",
        )


def strategy_of(values: Mapping[str, tuple[str, ...]]) -> str | None:
    """Return the wanted strategy of the prefix cache for states, by either of its flags."""
    return next(("".join(values[name]) for name in STRATEGIES if name in values), None)


def state_conflicts(
    values: Mapping[str, tuple[str, ...]], version: str | None, architecture: str | None
) -> Iterator[Problem]:
    """Yield what a release refuses beside the prefix cache of a model that keeps states.

    Source: `_handle_mamba_radix_cache` in `srt/server_args.py` of 0.5.4 to 0.5.19, from 0.5.20 on
    `srt/arg_groups/mamba_hook.py`.

    Args:
        values: of the whole command line, by flag.
        version: of SGLang; nothing is said without one.
        architecture: the model's. Of one that is not known, only what holds for all is said.
    """
    name = next((name for name in STRATEGIES if name in values), None)
    release, strategy = version_key(version), strategy_of(values) or "auto"
    buffers = strategy.startswith("extra_buffer")
    if "--disable-radix-cache" in values:
        if name is not None and buffers and (0, 5, 10) <= release < (0, 5, 14):
            yield Problem(
                "--disable-radix-cache",
                "conflict",
                "error",
                f"SGLang {version} refuses --disable-radix-cache beside {name} {strategy}",
                f"{name} no_buffer",
            )
        return
    family = family_of(architecture)
    if family is None or not family.hybrid or version is None or release < (0, 5, 4):
        return
    speculates = "--speculative-algorithm" in values
    if buffers and name is not None:
        yield from _buffer_conflicts(values, version, name, speculates)
    elif speculates and release < (0, 5, 14):
        refused = release >= (0, 5, 10)
        can = family.extra_buffer is not None and release >= version_key(family.extra_buffer)
        buffer = f"{name or STRATEGIES[1]} extra_buffer{_SPEC_V2 if release < (0, 5, 11) else ''}"
        yield Problem(
            name or "--speculative-algorithm",
            "conflict",
            "error" if refused else "warning",
            f"SGLang {version} {'refuses' if refused else 'switches the prefix cache off with'} "
            f"speculation on {architecture} with the strategy {strategy}",
            f"{buffer}, or --disable-radix-cache" if can else "--disable-radix-cache",
        )
    elif strategy == "no_buffer" and name and release >= (0, 5, 14):
        yield from _check_no_buffer(values, name)


def _buffer_conflicts(
    values: Mapping[str, tuple[str, ...]], version: str, name: str, speculates: bool
) -> Iterator[Problem]:
    """Yield what does not go with a strategy `extra_buffer` or `extra_buffer_lazy`."""
    strategy = "".join(values[name])
    interval = number(values, "--mamba-track-interval") or _TRACK_INTERVAL
    page = number(values, "--page-size")
    drafts = number(values, "--speculative-num-draft-tokens")
    if speculates and strategy == "extra_buffer_lazy" and version_key(version) < (0, 5, 17):
        yield Problem(
            name,
            "conflict",
            "error",
            f"SGLang {version} refuses speculation with {name} {strategy}; 0.5.17 is the first "
            "that runs both",
            f"{name} extra_buffer",
        )
    if page and interval % page:
        yield Problem(
            "--page-size",
            "conflict",
            "error",
            f"the strategy {strategy} needs --mamba-track-interval ({interval}) to be a multiple "
            f"of --page-size ({page})",
            "--page-size 64",
        )
    if speculates and drafts is not None and drafts > interval:
        yield Problem(
            "--speculative-num-draft-tokens",
            "conflict",
            "error",
            f"the strategy {strategy} takes {interval} draft tokens at most "
            "(--mamba-track-interval)",
        )


def _check_no_buffer(values: Mapping[str, tuple[str, ...]], name: str) -> Iterator[Problem]:
    page = number(values, "--page-size") or 1
    faults = [
        ("--disable-overlap-schedule", "--disable-overlap-schedule" not in values),
        ("--page-size 1", page > 1),
        (
            "another --attention-backend than trtllm_mha",
            values.get("--attention-backend") == ("trtllm_mha",),
        ),
    ]
    for needed, lacking in faults:
        if lacking:
            yield Problem(
                name,
                "conflict",
                "error",
                f"{name} no_buffer needs {needed}",
                f"{name} extra_buffer",
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
    elif "--attention-backend" not in values and release < (0, 5, 10):
        yield Problem(
            "--attention-backend",
            "missing_partner",
            "warning",
            f"on Blackwell GPUs SGLang {version} runs {architecture} with triton or trtllm_mha "
            "only, and chooses flashinfer by itself",
            "--attention-backend triton",
        )
    unstable = unstable_with_mtp(version, architecture)
    if unstable and "--speculative-algorithm" in values:
        yield unstable


def blackwell_refuses(
    values: Mapping[str, tuple[str, ...]], version: str | None, architecture: str | None
) -> Iterator[Problem]:
    """Yield that a given attention backend does not run a model on Blackwell GPUs (before 0.5.10).

    Source: the checks for `is_sm100_supported` in `srt/server_args.py`.
    """
    family = family_of(architecture)
    backend = "".join(values.get("--attention-backend", ()))
    if (
        family is not None
        and family.name in ("qwen3_5", "qwen3_next")
        and version_key(version) < (0, 5, 10)
        and backend not in ("", "triton", "trtllm_mha")
    ):
        yield Problem(
            "--attention-backend",
            "conflict",
            "warning",
            f"on Blackwell GPUs SGLang {version} refuses --attention-backend {backend} for "
            f"{architecture}",
            "--attention-backend triton",
        )


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
