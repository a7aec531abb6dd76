"""What is decided for MTP beside the flags that somebody gives himself."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from ansible_collections.gpuhost.inference.plugins.module_utils._mtp_plan import (
    Mtp,
    decide,
    values_of,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_check import (
    check_flags,
    parse_wanted,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_flags import (
    FlagSet,
    version_key,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._speculation import Weights
from releases import flag, release

WHOLE = Weights(found=True, prefix="mtp.", tensors=9, missing_files=())
QWEN = "Qwen3_5MoeForConditionalGeneration"
NEMOTRON = "NemotronHForCausalLM"
MIMO = "MiMoForCausalLM"
RADIX, OVERLAP = "--disable-radix-cache", "--disable-overlap-schedule"
OLD, NEW = "--mamba-scheduler-strategy", "--mamba-radix-cache-strategy"
STEPS = "--speculative-num-steps"
TOPK = "--speculative-eagle-topk"
DRAFTS = "--speculative-num-draft-tokens"


def installed(version: str) -> FlagSet:
    switch = {"type": "bool", "action": "store_true", "nargs": 0}
    names = [OLD] if version_key(version) < (0, 5, 14) else [NEW]
    return release(
        version,
        *map(flag, names),
        flag(OVERLAP, **switch),
        flag("--enable-mixed-chunk", **switch),
        flag("--page-size", type="int"),
    )


def plan(version: str, wanted: dict[str, Any], name: str = QWEN, **environment: str) -> Mtp:
    flags = installed(version)
    config = {"architectures": [name]}
    given = parse_wanted(wanted)
    return decide(flags, config, WHOLE, wanted=given, environment=environment)


def strategy(found: Mtp) -> str | None:
    return next((found.flags[name] for name in (OLD, NEW) if name in found.flags), None)


@pytest.mark.parametrize(
    ("version", "wanted", "decided"),
    [
        ("0.5.9", {RADIX: True}, None),
        ("0.5.12", {RADIX: True}, None),  # extra_buffer would be refused beside it
        ("0.5.23", {RADIX: True}, None),
        ("0.5.12", {OVERLAP: True}, "extra_buffer"),
        ("0.5.23", {OVERLAP: True}, "extra_buffer"),
        ("0.5.23", {NEW: "extra_buffer_lazy"}, None),
        ("0.5.12", {RADIX: True, OLD: "no_buffer"}, None),
        ("0.5.23", {"--page-size": 64}, "extra_buffer"),
    ],
)
def test_what_is_given_is_kept(version: str, wanted: dict[str, Any], decided: str | None) -> None:
    found = plan(version, wanted)
    assert found.supported is True
    assert strategy(found) == decided
    assert not set(found.flags) & set(wanted)
    whole = {"--max-running-requests": 8, **wanted, **found.flags}
    assert check_flags(installed(version), parse_wanted(whole), QWEN) == []


@pytest.mark.parametrize(
    ("version", "wanted", "problem"),
    [
        ("0.5.12", {RADIX: True, OLD: "extra_buffer"}, f"refuses {RADIX} beside"),
        ("0.5.11", {OLD: "no_buffer"}, "refuses speculation on .* no_buffer"),
        ("0.5.14", {NEW: "extra_buffer_lazy"}, "0.5.17 is the first"),
        ("0.5.23", {NEW: "no_buffer", OVERLAP: True, "--page-size": 64}, "needs --page-size 1"),
        ("0.5.23", {"--page-size": 48}, "multiple of --page-size"),
        ("0.5.10", {TOPK: 4, STEPS: 3, DRAFTS: 8}, "needs top-k 1"),
        ("0.5.23", {TOPK: 4}, "drafts a tree"),
        ("0.5.23", {STEPS: 4, TOPK: 1, DRAFTS: 3}, "4/1/5 instead of 4/1/3"),
        ("0.5.23", {DRAFTS: 1}, "at least 1"),
        ("0.5.23", {"--speculative-algorithm": "NGRAM"}, "one server runs one of them"),
    ],
)
def test_what_cannot_be_is_one_problem(version: str, wanted: dict[str, Any], problem: str) -> None:
    found = plan(version, wanted)
    errors = [item.message for item in found.problems if item.severity == "error"]
    assert found.supported is False
    assert len(errors) == 1
    assert re.search(problem, errors[0])


@pytest.mark.parametrize(
    ("version", "wanted", "added", "problem"),
    [
        ("0.5.9", {OLD: "no_buffer"}, {}, "switches the prefix cache off"),
        ("0.5.23", {NEW: "no_buffer"}, {OVERLAP: True}, "refuses overlapped"),
        ("0.5.18", {"--enable-mixed-chunk": True}, {}, "switches off --enable-mixed-chunk"),
        ("0.5.9", {"--attention-backend": "flashinfer"}, {}, "on Blackwell"),
    ],
)
def test_what_surprises_is_a_warning(
    version: str, wanted: dict[str, Any], added: dict[str, Any], problem: str
) -> None:
    found = plan(version, wanted)
    assert found.supported is True
    assert {name: found.flags.get(name) for name in added} == added
    assert [item.severity for item in found.problems] == ["warning"]
    assert re.search(problem, found.problems[0].message)


@pytest.mark.parametrize(
    ("wanted", "triple"),
    [
        ({}, (3, 1, 4)),
        ({STEPS: 2}, (None, 1, 3)),
        ({DRAFTS: 6}, (5, 1, None)),
        ({STEPS: 5, TOPK: 4, DRAFTS: 8}, (None, None, None)),
    ],
)
def test_triple_is_completed(wanted: dict[str, Any], triple: tuple[int | None, ...]) -> None:
    found = plan("0.5.23", wanted)
    assert tuple(found.flags.get(name) for name in (STEPS, TOPK, DRAFTS)) == triple


def test_overlap_that_is_switched_off_stays_off_in_old_releases() -> None:
    assert plan("0.5.10", {OVERLAP: True}).environment == {}
    assert plan("0.5.10", {}).environment == {"SGLANG_ENABLE_SPEC_V2": "1"}
    assert plan("0.5.10", {}, SGLANG_ENABLE_SPEC_V2="0").environment == {}


def test_flag_by_another_spelling() -> None:
    wanted = parse_wanted({"--tp-size": 4, "--unknown": 1})
    assert values_of(installed("0.5.23"), wanted) == {
        "--tensor-parallel-size": ("4",),
        "--tp-size": ("4",),
        "--unknown": ("1",),
    }


def test_states_without_a_strategy_for_them() -> None:
    found = plan("0.5.11", {}, NEMOTRON)
    assert (found.supported, found.flags[RADIX]) == (True, True)
    assert RADIX not in plan("0.5.16", {}, NEMOTRON).flags
    assert plan("0.5.11", {"--attention-backend": "triton"}, NEMOTRON).supported is False


def test_made_up_acceptance_is_refused() -> None:
    found = plan("0.5.23", {}, MIMO, SGLANG_SIMULATE_ACC_LEN="3")
    assert found.supported is False
    assert "made up" in found.problems[0].message


def test_draft_checkpoint_of_its_own() -> None:
    name = "IQuestQ1ForCausalLM"
    draft = {"--speculative-draft-model-path": "/srv/draft"}
    assert plan("0.5.23", {}, name).problems[0].kind == "missing_partner"
    assert plan("0.5.23", draft, name).supported is True


def test_head_that_is_bundled_instead() -> None:
    config = {"architectures": ["DeepseekV4ForCausalLM"], "dspark_block_size": 8}
    found = decide(installed("0.5.23"), config, WHOLE)
    assert found.flags == {"--speculative-algorithm": "DSPARK"}
    both = decide(installed("0.5.23"), {**config, "num_nextn_predict_layers": 1}, WHOLE)
    assert both.algorithm == "NEXTN"


def test_flags_that_the_reader_may_have_passed_over() -> None:
    """Neither MTP nor the strategy for states is called missing where it may be offered."""
    known = installed("0.5.23")
    names = ("--speculative-algorithm", NEW)
    few = replace(known, flags=tuple(one for one in known.flags if one.name not in names))
    config = {"architectures": [QWEN]}
    refused = decide(few, config, WHOLE)
    assert (refused.supported, [found.kind for found in refused.problems]) == (False, ["unknown"])
    unsure = decide(replace(few, passed_over=("srt/server_args.py:12: computed",)), config, WHOLE)
    assert unsure.supported is None
    assert [(found.flag, found.kind) for found in unsure.problems] == [
        ("--speculative-algorithm", "unchecked"),
        (NEW, "unchecked"),
    ]
