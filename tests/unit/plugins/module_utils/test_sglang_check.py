"""Each kind of problem that a wanted command line can have."""

from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_check import (
    Given,
    Problem,
    check_flags,
    for_config_file,
    parse_wanted,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_flags import FlagSet
from releases import flag, release

QWEN = "Qwen3_5MoeForConditionalGeneration"
TRIPLE = {
    "speculative-num-steps": 3,
    "speculative-eagle-topk": 1,
    "speculative-num-draft-tokens": 4,
}
NEXTN = {"speculative-algorithm": "NEXTN", "max-running-requests": 32}


NEW = release("0.5.23", flag("--mamba-radix-cache-strategy"))
OLD = release("0.5.12", flag("--mamba-scheduler-strategy"))


def problems(wanted: Any, flags: FlagSet = NEW, model: str | None = None) -> list[Problem]:
    return check_flags(flags, parse_wanted(wanted), model)


@pytest.mark.parametrize(
    ("wanted", "kind", "severity", "suggestion"),
    [
        ({"no-such-thing": 1}, "unknown", "error", None),
        ({"tensor_parallel_size": 1}, "unknown", "error", "--tensor-parallel-size"),
        ({"mem-fraction-statics": 0.8}, "unknown", "error", "--mem-fraction-static"),
        ({"retired": True}, "unknown", "error", None),
        (
            {"mamba-scheduler-strategy": "auto"},
            "renamed",
            "error",
            "--mamba-radix-cache-strategy",
        ),
        ({"tp": 4}, "abbreviation", "error", "--tensor-parallel-size"),
        ({"speculative": "NEXTN"}, "abbreviation", "error", None),
        ({"tp-size": 4, "tensor-parallel-size": 4}, "duplicate", "error", None),
        (["--enable-metrics", "--enable-metrics"], "duplicate", "error", None),
        ({"attention-backend": "tritton"}, "choice", "error", "triton"),
        ({"served-model-name": "qwen3.5:122b"}, "choice", "error", "qwen3.5-122b"),
        ({"tp-size": "four"}, "type", "error", None),
        ({"tp-size": 4.0}, "type", "error", None),
        ({"mem-fraction-static": "80%"}, "type", "error", None),
        ({"extra": "{a: 1}"}, "type", "error", None),
        ({"enable-metrics": "yes"}, "type", "error", None),
        ({"tp-size": True}, "type", "error", None),
        ({"cuda-graph-bs": True}, "type", "error", None),
        ({"tp-size": [1, 2]}, "type", "error", None),
        ({"old": "x"}, "deprecated", "warning", "--extra"),
        ({"computed": "x"}, "unchecked", "note", None),
        ({"odd": "x"}, "unchecked", "note", None),
        ({"size": "8k"}, "unchecked", "note", None),
        (TRIPLE, "missing_partner", "error", "--speculative-algorithm NEXTN"),
        ({**NEXTN, "speculative-num-steps": 3}, "missing_partner", "error", None),
        (
            {**NEXTN, **TRIPLE, "speculative-num-draft-tokens": 3},
            "conflict",
            "error",
            "--speculative-num-draft-tokens 4",
        ),
        ({"speculative-algorithm": "NEXTN"}, "missing_partner", "warning", None),
        ({**NEXTN, "speculative-algorithm": "NEXTEN"}, "choice", "warning", "NEXTN"),
    ],
)
def test_kinds(wanted: Any, kind: str, severity: str, suggestion: str | None) -> None:
    found = problems(wanted)
    assert [(problem.kind, problem.severity) for problem in found] == [(kind, severity)]
    if suggestion is not None:
        assert found[0].suggestion == suggestion


@pytest.mark.parametrize(
    "wanted",
    [
        {},
        {
            "--model-path": "/m",
            "tp-size": "4",
            "enable-metrics": True,
            "disable-radix-cache": False,
            "served-model-name": None,
            "cuda-graph-bs": [1, 2, 4],
            "extra": {"a": 1},
            "size": 8192,
            "mem-fraction-static": 0.85,
        },
        {**NEXTN, **TRIPLE},
        {**NEXTN, "speculative-algorithm": "nextn"},
        {**NEXTN, "speculative-algorithm": "NGRAM", "speculative-num-draft-tokens": 8},
        {**NEXTN, **TRIPLE, "speculative-eagle-topk": 2, "speculative-num-draft-tokens": 8},
        ["--model-path=/m", "--tp-size", "4", "--cuda-graph-bs", "1", "2", "--enable-metrics"],
    ],
)
def test_good(wanted: Any) -> None:
    assert problems(wanted) == []


def test_renamed_back_for_an_older_release() -> None:
    found = problems({"mamba-radix-cache-strategy": "extra_buffer"}, OLD)
    assert [(problem.kind, problem.suggestion) for problem in found] == [
        ("renamed", "--mamba-scheduler-strategy")
    ]


def test_refused_together() -> None:
    wanted = {"mamba-scheduler-strategy": "extra_buffer", "disable-radix-cache": True}
    assert [problem.kind for problem in problems(wanted, OLD)] == ["conflict"]


@pytest.mark.parametrize(
    ("version", "wanted", "expected"),
    [
        ("0.5.8.post1", {}, [("known_bad", "error")]),
        ("0.5.9", {}, [("missing_partner", "warning")]),
        ("0.5.9", {"attention-backend": "triton"}, []),
        ("0.5.13.post1", {**NEXTN, **TRIPLE}, [("known_bad", "warning")]),
        ("0.5.13", {}, []),
        ("0.5.14", {**NEXTN, **TRIPLE}, []),
        (None, {**NEXTN, **TRIPLE}, []),
    ],
)
def test_release_with_a_model(version: str | None, wanted: Any, expected: list[Any]) -> None:
    found = problems(wanted, release(version), QWEN)
    assert [(problem.kind, problem.severity) for problem in found] == expected


def test_what_a_configuration_file_can_hold() -> None:
    wanted = {
        "tp-size": "4",
        "mem-fraction-static": 0.8,
        "enable-metrics": True,
        "cuda-graph-bs": [1, 2],
        "extra": {"a": 1},
        "old": "x",
        "odd": ["/a", "/b"],
        "config": "/etc/server.yaml",
    }
    config, arguments = for_config_file(NEW, parse_wanted(wanted))
    assert config == {
        "tp-size": 4,
        "mem-fraction-static": 0.8,
        "enable-metrics": True,
        "cuda-graph-bs": [1, 2],
        "extra": '{"a": 1}',
    }
    assert arguments == ["--old", "x", "--odd", "/a", "/b"]


def test_list_of_words() -> None:
    assert parse_wanted(["--low", "-1", "--name=a=b"]) == [
        Given("--low", ("-1",)),
        Given("--name", ("a=b",)),
    ]


@pytest.mark.parametrize("wanted", [["tp-size", "4"], "--tp-size 4"])
def test_neither_a_mapping_nor_flags(wanted: Any) -> None:
    with pytest.raises(GpuHostError, match=r"tp-size"):
        parse_wanted(wanted)
