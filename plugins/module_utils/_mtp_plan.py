# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.

"""How to switch on MTP for a model on a release of SGLang, beside the flags somebody wants.

What he has set is kept where the release runs it, and one problem says so where it does not: SGLang
itself would overrule it silently, or stop with an assertion that has no text.

Source of the rules: `srt/server_args.py` and `srt/arg_groups/{speculative,mamba}_hook.py`, the
latter two from 0.5.13 on, of the releases 0.5.4 to 0.5.23.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ansible_collections.gpuhost.inference.plugins.module_utils._mtp_families import (
    Family,
    family_of,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_check import (
    STRATEGIES,
    Given,
    Problem,
    blackwell_refuses,
    chain_conflict,
    may_be_flag,
    mixed_chunk_off,
    number,
    state_conflicts,
    strategy_of,
    unstable_with_mtp,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_flags import (
    FlagSet,
    version_key,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._speculation import (
    Weights,
    architecture_of,
    missing_files,
    setting,
)

ALGORITHM = "--speculative-algorithm"
STEPS = "--speculative-num-steps"
TOPK = "--speculative-eagle-topk"
DRAFTS = "--speculative-num-draft-tokens"
_RADIX_OFF = "--disable-radix-cache"
_OVERLAP_OFF = "--disable-overlap-schedule"
_BACKEND = "--attention-backend"
_DRAFT_PATH = "--speculative-draft-model-path"
# Names of it on which SGLang bundles a DSpark head: `checkpoint_bundles_dspark_draft` in
# srt/speculative/dspark_components/dspark_config.py of 0.5.23
_DSPARK = ("dspark_block_size", "dspark_markov_rank", "dspark_noise_token_id")


@dataclass(frozen=True)
class Mtp:
    """How to switch on MTP for one model on one release; see `decide`.

    Attributes:
        supported: `None` when it cannot be told.
        architecture: the model's, `None` when its configuration names none.
        family: models that are driven alike, `None` when the architecture is not known here.
        algorithm: of speculation, `None` without a family.
        flags: to add to the wanted ones; none of them is among these.
        environment: to add.
        weights: what the folder with the MTP layers holds.
        problems: what stands in the way, or should be known.
    """

    supported: bool | None
    architecture: str | None
    family: str | None
    algorithm: str | None
    flags: dict[str, Any]
    environment: dict[str, str]
    weights: Weights
    problems: tuple[Problem, ...]


def values_of(flags: FlagSet, wanted: Sequence[Given]) -> dict[str, tuple[str, ...]]:
    """Return the values of wanted flags by every spelling of them that the release knows.

    Which spelling is the canonical one has changed, and rules here name one of them.
    """
    known = flags.spellings()
    found: dict[str, tuple[str, ...]] = {}
    for given in wanted:
        flag = known.get(given.spelling)
        for name in (given.spelling,) if flag is None else (flag.name, *flag.aliases):
            found[name] = given.values
    return found


def decide(
    flags: FlagSet,
    config: dict[str, Any],
    weights: Weights,
    num_steps: int = 3,
    *,
    wanted: Sequence[Given] = (),
    environment: Mapping[str, str] | None = None,
) -> Mtp:
    """Return the flags and environment that switch on MTP for a model on an installed release.

    Args:
        flags: what the installed release accepts.
        config: the model's `config.json`.
        weights: what `read_weights` found; of the draft checkpoint for a family that needs one.
        num_steps: how many tokens are drafted before a verification; one more is verified. What
            `wanted` says wins.
        wanted: the flags that somebody gives himself.
        environment: the variables that somebody gives the server.
    """
    architecture = architecture_of(config)
    family = family_of(architecture)
    values = values_of(flags, wanted)
    asked = _Asked(flags, version_key(flags.version), family, values, environment or {})
    problems = [*_obstacles(asked, config, architecture), *_weight_problems(weights, family)]
    added: dict[str, Any] = {}
    variables: dict[str, str] = {}
    if family is not None:
        algorithm = _algorithm(config, family)
        problems += _algorithm_conflicts(asked, algorithm)
        added = {ALGORITHM: algorithm}
        if algorithm == "NEXTN":
            triple, faults = _triple(asked, num_steps)
            added.update(triple)
            problems += faults
        if family.hybrid:
            hybrid, variables, faults = _hybrid(asked)
            added.update(hybrid)
            problems += faults
        # A switch that is added has no value, as in a command line
        texts = {name: () if one is True else (str(one),) for name, one in added.items()}
        whole = {**texts, **values}
        if asked.release >= version_key(family.architectures[architecture or ""]):
            problems += state_conflicts(whole, flags.version, architecture)
            problems += mixed_chunk_off(whole, flags.version)
            problems += blackwell_refuses(whole, flags.version, architecture)
        problems += _own_needs(asked)
    wrong = any(problem.severity == "error" for problem in problems)
    unsure = any(problem.kind == "unchecked" for problem in problems)
    return Mtp(
        supported=False if wrong else None if unsure else True,
        architecture=architecture,
        family=family.name if family else None,
        algorithm=added.get(ALGORITHM),
        flags={name: value for name, value in added.items() if name not in values},
        environment={k: v for k, v in variables.items() if k not in asked.environment},
        weights=weights,
        problems=tuple(problems),
    )


@dataclass(frozen=True)
class _Asked:
    """What is to be decided: the release, the family, and what somebody gives himself."""

    flags: FlagSet
    release: tuple[int, ...]
    family: Family | None
    values: Mapping[str, tuple[str, ...]]
    environment: Mapping[str, str]

    def has(self, name: str) -> bool:
        return name in self.values

    def text(self, name: str) -> str | None:
        return "".join(self.values[name]) if name in self.values else None


def _conflict(flag: str, message: str, suggestion: str | None = None) -> Problem:
    return Problem(flag, "conflict", "error", message, suggestion)


def _surprise(flag: str, message: str, suggestion: str | None = None) -> Problem:
    return Problem(flag, "conflict", "warning", message, suggestion)


def _algorithm(config: dict[str, Any], family: Family) -> str:
    """Return DSPARK for a checkpoint that bundles such a head and no MTP layer, else NEXTN."""
    bundles = any(setting(config, name) is not None for name in _DSPARK)
    if family.name == "deepseek_v4" and bundles and not setting(config, "num_nextn_predict_layers"):
        return "DSPARK"
    return "NEXTN"


def _algorithm_conflicts(asked: _Asked, algorithm: str) -> Iterable[Problem]:
    given = asked.text(ALGORITHM)
    # EAGLE is what SGLang makes of NEXTN
    if given is not None and given.upper() not in {
        algorithm,
        "EAGLE" if algorithm == "NEXTN" else "",
    }:
        yield _conflict(
            ALGORITHM,
            f"{ALGORITHM} {given} is wanted, and MTP is {algorithm}: one server runs one of them",
            f"{ALGORITHM} {algorithm}, or no MTP",
        )
    known = asked.flags.spellings().get(ALGORITHM)
    if known is None and not asked.flags.complete:
        yield Problem(ALGORITHM, "unchecked", "warning", may_be_flag(ALGORITHM, asked.flags))
    elif known is None or (known.choices is not None and algorithm not in known.choices):
        yield Problem(
            ALGORITHM,
            "unknown",
            "error",
            f"SGLang {asked.flags.version} does not offer {ALGORITHM} {algorithm}",
        )


def _triple(asked: _Asked, num_steps: int) -> tuple[dict[str, Any], list[Problem]]:
    """Return steps, top-k and draft tokens, as somebody began them."""
    values = asked.values
    topk = number(values, TOPK) or 1
    steps, drafts = number(values, STEPS), number(values, DRAFTS)
    problems: list[Problem] = []
    if steps is None:
        steps = drafts - 1 if drafts and topk == 1 else num_steps
    if drafts is None:
        drafts = steps + 1
    if topk == 1:
        problems += chain_conflict(steps, drafts)
    if steps < 1:
        problems.append(_conflict(STEPS, f"{STEPS} must be at least 1 for MTP"))
    if topk > 1:
        if asked.family is not None and asked.family.hybrid and asked.release < (0, 5, 11):
            problems.append(
                _conflict(
                    TOPK, "speculation of this release with states needs top-k 1", f"{TOPK} 1"
                )
            )
        elif not asked.has(DRAFTS):
            problems.append(
                Problem(
                    TOPK,
                    "missing_partner",
                    "error",
                    f"{TOPK} {topk} drafts a tree, whose size is to be given too",
                    f"{STEPS} {steps} {TOPK} {topk} {DRAFTS} N",
                )
            )
    return {STEPS: steps, TOPK: topk, DRAFTS: drafts}, problems


def _hybrid(asked: _Asked) -> tuple[dict[str, Any], dict[str, str], list[Problem]]:
    """Return flags, environment and problems of a model with states.

    Its prefix cache (radix cache) needs a strategy that goes with speculation, and which releases
    refuse which has changed: `_handle_mamba_radix_cache`, `validate_mamba_no_buffer`.
    """
    family, release = asked.family, asked.release
    if family is None:
        return {}, {}, []
    added: dict[str, Any] = {}
    variables: dict[str, str] = {}
    problems: list[Problem] = []
    can_buffer = family.extra_buffer is not None and release >= version_key(family.extra_buffer)
    name = next((name for name in STRATEGIES if name in asked.flags.spellings()), None)
    given = strategy_of(asked.values)
    cached = not asked.has(_RADIX_OFF)
    if cached and given is None and can_buffer and name is not None:
        added[name] = "extra_buffer"
    if cached and given is None and can_buffer and name is None and not asked.flags.complete:
        message = may_be_flag(STRATEGIES[0], asked.flags)
        problems.append(Problem(STRATEGIES[0], "unchecked", "warning", message))
    if cached and not can_buffer and (0, 5, 10) <= release < (0, 5, 14) and given is None:
        added[_RADIX_OFF] = True
        problems.append(
            _surprise(
                _RADIX_OFF,
                f"SGLang {asked.flags.version} runs MTP with {family.name} only without its prefix "
                f"cache: {_RADIX_OFF} is added",
                "SGLang 0.5.14 or later",
            )
        )
    if cached and given == "no_buffer" and release >= (0, 5, 14) and not asked.has(_OVERLAP_OFF):
        added[_OVERLAP_OFF] = True
        problems.append(
            _surprise(
                _OVERLAP_OFF,
                f"the strategy no_buffer refuses overlapped scheduling: {_OVERLAP_OFF} is added",
                "the strategy extra_buffer",
            )
        )
    # Up to 0.5.10 it switches overlapped scheduling on, against --disable-overlap-schedule
    if (0, 5, 7) <= release < (0, 5, 11) and not asked.has(_OVERLAP_OFF):
        variables["SGLANG_ENABLE_SPEC_V2"] = "1"
    if release < (0, 5, 10) and family.name != "nemotron_h":
        added[_BACKEND] = "triton"  # the only safe one on Blackwell until 0.5.10
    return added, variables, problems


def _own_needs(asked: _Asked) -> Iterable[Problem]:
    """Yield what single families need for MTP."""
    family, release = asked.family, asked.release
    if family is None:
        return
    if family.own_draft and not asked.has(_DRAFT_PATH):
        yield Problem(
            _DRAFT_PATH,
            "missing_partner",
            "error",
            f"{family.name} keeps its MTP layers in a checkpoint of their own, to be named with "
            f"{_DRAFT_PATH}",
            f"{_DRAFT_PATH} FOLDER",
        )
    if family.name == "nemotron_h" and asked.text(_BACKEND) == "triton" and release < (0, 5, 14):
        yield _conflict(
            _BACKEND,
            f"SGLang {asked.flags.version} refuses {_BACKEND} triton for nemotron_h",
            f"{_BACKEND} flashinfer",
        )


def _obstacles(
    asked: _Asked, config: dict[str, Any], architecture: str | None
) -> Iterable[Problem]:
    """Yield why this release cannot draft for this model."""
    version, family = asked.flags.version, asked.family
    if asked.environment.get("SGLANG_SIMULATE_ACC_LEN"):
        yield Problem(
            None,
            "conflict",
            "error",
            "SGLANG_SIMULATE_ACC_LEN is in the environment of the server: its acceptance would be "
            "made up",
            "remove it",
        )
    if family is None or architecture is None:
        yield Problem(
            ALGORITHM,
            "unchecked",
            "warning",
            f"{architecture or 'a model without architectures in its config.json'} is not known "
            "to have MTP layers that SGLang can drive",
        )
        return
    first = family.architectures[architecture]
    if version is None:
        yield Problem(ALGORITHM, "unchecked", "warning", "the version of SGLang is not known")
    elif asked.release < version_key(first):
        yield Problem(
            ALGORITHM,
            "known_bad",
            "error",
            f"SGLang {version} has no draft model for {architecture}; {first} is the first with it",
            f"SGLang {first} or later",
        )
    if family.needs_count and not setting(config, "num_nextn_predict_layers"):
        yield _conflict(
            ALGORITHM,
            f"config.json of {architecture} must have num_nextn_predict_layers, "
            "from which SGLang builds the draft model",
        )
    unstable = unstable_with_mtp(version, architecture)
    if unstable:
        yield unstable


def _weight_problems(weights: Weights, family: Family | None) -> Iterable[Problem]:
    yield from missing_files(weights)
    if family is None:
        return
    if weights.found is None:
        yield Problem(
            "--model-path",
            "unchecked",
            "warning",
            "whether the checkpoint has its MTP tensors cannot be told"
            + (": no safetensors file is there" if weights.prefix else ""),
        )
    elif not weights.found:
        yield Problem(
            "--model-path",
            "missing_file",
            "error",
            f"the checkpoint has no tensor that begins with {weights.prefix}: it has lost its MTP "
            "layer, and SGLang would start all the same and accept no draft",
            "the checkpoint of the model's own publisher",
        )
