"""Each kind of problem that a wanted command line can have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_check import (
    Given,
    Problem,
    check_flags,
    check_left_out,
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


NEW_NAME, OLD_NAME = "mamba-radix-cache-strategy", "mamba-scheduler-strategy"
SPECULATING = {**NEXTN, **TRIPLE, "attention-backend": "triton"}
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
        ({"stream-output": True}, "unknown", "error", None),
        ({"config": "/etc/sglang.json"}, "choice", "error", None),
        ({"enable-metrics": "yes"}, "type", "error", "--enable-metrics alone"),
        ({"enable-metrics": "false"}, "type", "error", "leave --enable-metrics out"),
        ({"served-model-name": "-qwen"}, "type", "error", None),
        ({"served-model-name": "qwen\n"}, "type", "warning", "qwen"),
        ({"served-model-name": "qwen\0"}, "type", "error", None),
        ({"tp-size": None, "tp": 2}, "abbreviation", "error", "--tensor-parallel-size"),
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
        assert (found[0].suggestion or "").startswith(suggestion)


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
        {"served-model-name": "", "cuda-graph-bs": [], "tp-size": "-1", "extra": "-0.5"},
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


@pytest.mark.parametrize(
    ("version", "wanted", "expected"),
    [
        # spec and states without a strategy: the prefix cache is lost, then refused, then chosen
        ("0.5.3", SPECULATING, []),
        ("0.5.6", SPECULATING, [("conflict", "warning")]),
        ("0.5.9", SPECULATING, [("conflict", "warning")]),
        ("0.5.9", {**SPECULATING, OLD_NAME: "extra_buffer"}, []),
        ("0.5.10", SPECULATING, [("conflict", "error")]),
        ("0.5.12", {**SPECULATING, OLD_NAME: "no_buffer"}, [("conflict", "error")]),
        ("0.5.12", {**SPECULATING, "disable-radix-cache": True}, []),
        ("0.5.12", {**SPECULATING, OLD_NAME: "extra_buffer"}, []),
        ("0.5.14", SPECULATING, []),
        # no_buffer of the newer releases, with or without speculation
        ("0.5.20", {NEW_NAME: "no_buffer"}, [("conflict", "error")]),
        ("0.5.20", {NEW_NAME: "no_buffer", "disable-overlap-schedule": True}, []),
        (
            "0.5.20",
            {NEW_NAME: "no_buffer", "disable-overlap-schedule": True, "page-size": 64},
            [("conflict", "error")],
        ),
        (
            "0.5.20",
            {
                NEW_NAME: "no_buffer",
                "disable-overlap-schedule": True,
                "attention-backend": "trtllm_mha",
            },
            [("conflict", "error")],
        ),
        # extra_buffer
        ("0.5.23", {**SPECULATING, NEW_NAME: "extra_buffer", "page-size": 64}, []),
        (
            "0.5.23",
            {**SPECULATING, NEW_NAME: "extra_buffer", "page-size": 96},
            [("conflict", "error")],
        ),
        (
            "0.5.23",
            {**SPECULATING, NEW_NAME: "extra_buffer", "mamba-track-interval": 2},
            [("conflict", "error")],
        ),
        ("0.5.16", {**SPECULATING, NEW_NAME: "extra_buffer_lazy"}, [("conflict", "error")]),
        ("0.5.17", {**SPECULATING, NEW_NAME: "extra_buffer_lazy"}, []),
        (
            "0.5.10",
            {
                **SPECULATING,
                OLD_NAME: "extra_buffer",
                "speculative-eagle-topk": 2,
                "speculative-num-draft-tokens": 7,
            },
            [("conflict", "error")],
        ),
    ],
)
def test_models_with_states(version: str, wanted: Any, expected: list[Any]) -> None:
    found = problems(wanted, states(version), "Qwen3NextForCausalLM")
    assert [(problem.kind, problem.severity) for problem in found] == expected
    # nothing of it holds for a model with a plain cache
    found = problems(wanted, states(version), "DeepseekV3ForCausalLM")
    assert [problem for problem in found if problem.kind != "unknown"] == []


def test_strategy_for_a_model_that_is_not_known() -> None:
    for model, version in ((None, "0.5.20"), (QWEN, None)):
        [note] = problems({NEW_NAME: "no_buffer"}, states(version), model)
        assert (note.kind, note.severity) == ("unchecked", "note")


def states(version: str | None) -> FlagSet:
    switch = {"type": "bool", "action": "store_true", "nargs": 0}
    return release(
        version,
        *(flag(f"--{name}") for name in (OLD_NAME, NEW_NAME)),
        flag("--disable-overlap-schedule", **switch),
        flag("--mamba-track-interval", type="int"),
        flag("--page-size", type="int"),
    )


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"attention-backend": "trtllm_mha"}, "error"),
        ({"attention-backend": "fa4", "page-size": 64}, "error"),
        ({"attention-backend": "fa3", "page-size": 64}, None),
        ({"page-size": 64}, None),  # the backend that it chooses is not known
        ({"speculative-use-rejection-sampling": True}, "error"),
        ({"enable-mixed-chunk": True}, None),
    ],
)
def test_drafts_that_branch(more: Any, expected: str | None) -> None:
    tree = {**NEXTN, **TRIPLE, "speculative-eagle-topk": 2, "speculative-num-draft-tokens": 7}
    switch = {"type": "bool", "action": "store_true", "nargs": 0}
    flags = FlagSet(
        "0.5.23",
        "/opt/sglang",
        (
            *(known for known in NEW.flags if known.name != "--attention-backend"),
            flag("--attention-backend"),
            flag("--enable-mixed-chunk", **switch),
            flag("--page-size", type="int"),
            flag("--speculative-use-rejection-sampling", **switch),
        ),
    )
    found = problems({**tree, **more}, flags)
    assert [problem.severity for problem in found] == ([expected] if expected else [])


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ({"nnodes": 2, "node-rank": 1, "dist-init-addr": "192.0.2.7:5000"}, []),
        ({"nnodes": 1}, []),
        ({"nnodes": 2, "node-rank": 0}, [("missing_partner", "error")]),
        ({"nnodes": 2, "dist-init-addr": "192.0.2.7:5000"}, [("missing_partner", "warning")]),
        (
            {"nnodes": 2, "node-rank": 2, "dist-init-addr": "192.0.2.7:5000"},
            [("conflict", "error")],
        ),
        ({"ssl-certfile": "/etc/ssl/a.pem"}, [("missing_partner", "error")]),
    ],
)
def test_hosts_and_certificates(wanted: Any, expected: list[Any]) -> None:
    names = ("--nnodes", "--node-rank", "--dist-init-addr", "--ssl-certfile", "--ssl-keyfile")
    found = problems(wanted, release("0.5.23", *map(flag, names)))
    assert [(problem.kind, problem.severity) for problem in found] == expected


@pytest.mark.parametrize(
    ("version", "name", "other"),
    [
        ("0.5.23", "stream-output", "--incremental-streaming-output"),
        ("0.5.9", "incremental-streaming-output", "--stream-output"),
        ("0.5.9", "dsa-prefill-backend", "--nsa-prefill-backend"),
        ("0.5.20", "enable-breakable-cuda-graph", "--cuda-graph-backend-prefill breakable"),
        ("0.5.4", "enable-deepep-moe", "--moe-a2a-backend deepep"),
    ],
)
def test_renamed(version: str, name: str, other: str) -> None:
    [found] = problems({name: True}, release(version, flag(other.split(maxsplit=1)[0])))
    assert (found.kind, found.suggestion) == ("renamed", other)


def test_algorithm_that_came_later() -> None:
    for version, expected in (("0.5.19", ["choice"]), ("0.5.20", [])):
        found = problems({**NEXTN, "speculative-algorithm": "UNO"}, release(version))
        assert [problem.kind for problem in found] == expected


def test_false_does_not_switch_off() -> None:
    switch = {"type": "bool", "action": "boolean_optional", "nargs": 0}
    flags = release(
        "0.5.23",
        flag("--fused", "--no-fused", default=True, **switch),
        flag("--slow", "--no-slow", default=False, **switch),
    )
    wanted = {"fused": False, "slow": False, "enable-metrics": False, "no-fused": False}
    [found] = check_left_out(flags, wanted)
    assert (found.flag, found.suggestion) == ("--fused", "--no-fused")
    assert check_left_out(flags, ["--fused"]) == []


def test_release_without_a_configuration_file() -> None:
    flags = FlagSet("0.5.2", "/opt/sglang", tuple(f for f in NEW.flags if f.name != "--config"))
    wanted = {"tp-size": 4, "enable-metrics": True}
    assert for_config_file(flags, parse_wanted(wanted)) == (
        {},
        ["--tp-size", "4", "--enable-metrics"],
    )
    [found] = problems({"config": "/etc/server.yaml"}, flags)
    assert "0.5.3 is the first" in found.message


def test_refused_together() -> None:
    wanted = {"mamba-scheduler-strategy": "extra_buffer", "disable-radix-cache": True}
    assert [problem.kind for problem in problems(wanted, OLD)] == ["conflict"]


@pytest.mark.parametrize(
    ("version", "wanted", "expected"),
    [
        ("0.5.8.post1", {}, [("known_bad", "error")]),
        ("0.5.9", {}, [("missing_partner", "warning")]),
        ("0.5.9", {"attention-backend": "triton"}, []),
        ("0.5.9", {"attention-backend": "flashinfer"}, [("conflict", "warning")]),
        ("0.5.13.post1", {**NEXTN, **TRIPLE, OLD_NAME: "extra_buffer"}, [("known_bad", "warning")]),
        ("0.5.13", {}, []),
        ("0.5.14", {**NEXTN, **TRIPLE}, []),
        (None, {**NEXTN, **TRIPLE}, []),
    ],
)
def test_release_with_a_model(version: str | None, wanted: Any, expected: list[Any]) -> None:
    found = problems(wanted, release(version, flag(f"--{OLD_NAME}")), QWEN)
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


def test_values_as_sglang_reads_them() -> None:
    adapters = {"lora-paths": [{"lora_name": "sql", "lora_path": "/srv/sql"}, "/srv/b"], 7: "x"}
    assert parse_wanted(adapters) == [
        Given("--lora-paths", ('{"lora_name": "sql", "lora_path": "/srv/sql"}', "/srv/b")),
        Given("--7", ("x",)),
    ]


@pytest.mark.parametrize("wanted", [["tp-size", "4"], "--tp-size 4", 4711])
def test_neither_a_mapping_nor_flags(wanted: Any) -> None:
    with pytest.raises(GpuHostError, match=r"tp-size|not 4711"):
        parse_wanted(wanted)


@pytest.mark.parametrize(
    ("wanted", "suggestion"),
    [
        ({"mem-fraction-statik": 0.8}, "--mem-fraction-static"),
        ({"mamba-scheduler-strategy": "auto"}, None),
        ({"max-running": 8}, "--max-running-requests"),
        ({"piecewise-cuda-graph-tokens": 8}, None),
    ],
)
def test_flag_that_the_reader_may_have_passed_over(wanted: Any, suggestion: str | None) -> None:
    places = ("srt/server_args.py:12: computed", "srt/server_args.py:90: computed")
    [found] = problems(wanted, replace(release("0.5.23"), passed_over=places))
    assert (found.kind, found.severity, found.suggestion) == ("unchecked", "warning", suggestion)
    assert "srt/server_args.py:12: computed and 1 more could not be read" in found.message


@pytest.mark.parametrize(("version", "count"), [("0.5.18", 1), ("0.5.19", 0)])
def test_mixed_chunks_with_speculation(version: str, count: int) -> None:
    flags = release(version, flag("--enable-mixed-chunk", action="store_true", nargs=0))
    found = problems({**NEXTN, **TRIPLE, "enable-mixed-chunk": True}, flags)
    assert [problem.severity for problem in found] == ["warning"] * count


def test_number_of_thousands_of_digits() -> None:
    found = problems({**NEXTN, **TRIPLE, "speculative-num-steps": "9" * 5000})
    assert [(problem.flag, problem.kind) for problem in found] == [
        ("--speculative-num-steps", "type")
    ]
