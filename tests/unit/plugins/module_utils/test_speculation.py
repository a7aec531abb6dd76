"""What a model takes on a release, what its weights hold, and whether drafts are accepted."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from ansible_collections.gpuhost.inference.plugins.module_utils._mtp_families import family_of
from ansible_collections.gpuhost.inference.plugins.module_utils._mtp_plan import Mtp, decide
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_check import (
    check_flags,
    parse_wanted,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_flags import FlagSet
from ansible_collections.gpuhost.inference.plugins.module_utils._speculation import (
    Sizes,
    Weights,
    check_model_path,
    judge_acceptance,
    read_config,
    read_sizes,
    read_weights,
)
from releases import flag, release

QWEN = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "text_config": {"num_hidden_layers": 48, "mtp_num_hidden_layers": 1},
}
GLM = {
    "architectures": ["Glm4MoeForCausalLM"],
    "num_hidden_layers": 92,
    "num_nextn_predict_layers": 1,
}
WHOLE = Weights(found=True, prefix="mtp.", tensors=9, missing_files=())
SPEC = {
    "--speculative-algorithm": "NEXTN",
    "--speculative-num-steps": 3,
    "--speculative-eagle-topk": 1,
    "--speculative-num-draft-tokens": 4,
}


def installed(version: str | None) -> FlagSet:
    numbers = [int(part) for part in (version or "0.5.23").split(".")[:3]]
    names = [
        name
        for name, first, last in (
            ("--mamba-scheduler-strategy", [0, 5, 7], [0, 5, 19]),
            ("--mamba-radix-cache-strategy", [0, 5, 14], [9, 9, 9]),
        )
        if first <= numbers <= last
    ]
    return release(version, *map(flag, names))


def mtp(version: str | None, config: dict[str, Any], weights: Weights = WHOLE) -> Mtp:
    return decide(installed(version), config, weights)


@pytest.mark.parametrize(
    ("version", "flags", "environment"),
    [
        (
            "0.5.9",
            {"--mamba-scheduler-strategy": "extra_buffer", "--attention-backend": "triton"},
            {"SGLANG_ENABLE_SPEC_V2": "1"},
        ),
        (
            "0.5.10.post1",
            {"--mamba-scheduler-strategy": "extra_buffer"},
            {"SGLANG_ENABLE_SPEC_V2": "1"},
        ),
        ("0.5.11", {"--mamba-scheduler-strategy": "extra_buffer"}, {}),
        ("0.5.14", {"--mamba-radix-cache-strategy": "extra_buffer"}, {}),
        ("0.5.19", {"--mamba-radix-cache-strategy": "extra_buffer"}, {}),
        ("0.5.23", {"--mamba-radix-cache-strategy": "extra_buffer"}, {}),
    ],
)
def test_hybrid_model_by_release(
    version: str, flags: dict[str, Any], environment: dict[str, str]
) -> None:
    found = mtp(version, QWEN)
    assert found.supported is True
    assert found.family == "qwen3_5"
    assert found.flags == {**SPEC, **flags}
    assert found.environment == environment
    assert found.problems == ()
    checked = {**found.flags, "max-running-requests": 8}
    assert check_flags(installed(version), parse_wanted(checked), found.architecture) == []


def test_plain_model_needs_only_the_triple() -> None:
    found = mtp("0.5.9", GLM)
    assert (found.supported, found.flags, found.environment) == (True, SPEC, {})


def test_steps() -> None:
    flags = decide(installed("0.5.23"), GLM, WHOLE, num_steps=2).flags
    assert flags["--speculative-num-draft-tokens"] == 3


@pytest.mark.parametrize(
    ("version", "config", "weights", "supported", "problem"),
    [
        ("0.5.8", QWEN, WHOLE, False, "0.5.9 is the first with it"),
        ("0.5.13", QWEN, WHOLE, True, "one start in five"),
        ("0.5.23", {"architectures": ["LlamaForCausalLM"]}, WHOLE, None, "Llama.* not known"),
        ("0.5.23", {}, WHOLE, None, "without architectures"),
        (None, QWEN, WHOLE, None, "version of SGLang is not known"),
        (
            "0.5.23",
            {**GLM, "num_nextn_predict_layers": 0},
            WHOLE,
            False,
            "num_nextn_predict_layers",
        ),
        ("0.5.23", QWEN, Weights(False, "mtp.", 0, ()), False, "lost its MTP layer"),
        ("0.5.23", QWEN, Weights(None, "mtp.", 0, ()), None, "cannot be told"),
        ("0.5.23", QWEN, Weights(True, "mtp.", 9, ("a",)), False, "incomplete: a absent"),
        (
            "0.5.6",
            {"architectures": ["Qwen3NextForCausalLM"]},
            WHOLE,
            True,
            "switches the prefix cache off",
        ),
    ],
)
def test_obstacles(
    version: str, config: Any, weights: Weights, supported: bool | None, problem: str
) -> None:
    found = mtp(version, config, weights)
    assert found.supported is supported
    assert len(found.problems) == 1
    assert re.search(problem, found.problems[0].message)


def test_release_without_the_algorithm() -> None:
    flags = FlagSet("0.5.23", "/opt/sglang", (flag("--speculative-algorithm", choices=("EAGLE",)),))
    assert decide(flags, QWEN, WHOLE).supported is False


def model(folder: Path, config: dict[str, Any], tensors: dict[str, str] | None) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if tensors is not None:
        index = folder / "model.safetensors.index.json"
        index.write_text(json.dumps({"metadata": {}, "weight_map": tensors}))
        for name in tensors.values():
            (folder / name).write_bytes(header({}))
    return str(folder)


def header(tensors: dict[str, Any]) -> bytes:
    text = json.dumps(tensors).encode()
    return len(text).to_bytes(8, "little") + text


def weights(path: str, config: dict[str, Any]) -> Weights:
    return read_weights(path, config, family_of(config["architectures"][0]))


@pytest.mark.parametrize(
    ("config", "tensor", "found"),
    [
        (QWEN, "mtp.fc.weight", True),
        (QWEN, "model.layers.47.mtp.weight", False),
        (GLM, "model.layers.92.eh_proj.weight", True),
        (GLM, "model.layers.9.eh_proj.weight", False),
        ({**GLM, "num_hidden_layers": None}, "model.layers.92.eh_proj.weight", None),
        ({"architectures": ["GlmOcrForConditionalGeneration"]}, "mtp.fc.weight", None),
    ],
)
def test_index(tmp_path: Path, config: dict[str, Any], tensor: str, found: bool | None) -> None:
    path = model(tmp_path, config, {"a": "1.safetensors", tensor: "2.safetensors"})
    assert weights(path, config).found is found


def test_files_of_the_index_are_looked_at(tmp_path: Path) -> None:
    names = {"a": "1.safetensors", "b": "2.safetensors", "mtp.c": "3.safetensors", "d": "4"}
    path = model(tmp_path, QWEN, names)
    (tmp_path / "1.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha")
    (tmp_path / "2.safetensors").write_bytes(b"")
    (tmp_path / "3.safetensors").unlink()
    found = weights(path, QWEN)
    assert found.missing_files == ("1.safetensors", "2.safetensors", "3.safetensors")
    assert (found.found, found.tensors) == (True, 1)


def test_single_file(tmp_path: Path) -> None:
    path = model(tmp_path, QWEN, None)
    assert weights(path, QWEN).found is None
    (tmp_path / "model.safetensors").write_bytes(header({"mtp.fc": {}, "__metadata__": {}}))
    assert weights(path, QWEN).found is True
    (tmp_path / "model.safetensors").write_bytes(header({"lm_head": {}}))
    assert weights(path, QWEN).found is False


def test_layer_in_a_file_of_its_own(tmp_path: Path) -> None:
    path = model(tmp_path, GLM, {"a": "1.safetensors"})
    (tmp_path / "mtp.safetensors").write_bytes(header({"model.layers.92.eh_proj": {}}))
    assert weights(path, GLM).found is True


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("model.safetensors.index.json", b"version https://git-lfs.github.com/spec/v1", "LFS"),
        ("model.safetensors", b"\xff" * 20, "no safetensors file"),
        ("model.safetensors", b"\x09" + b"\0" * 7 + b"{", "no safetensors file"),
    ],
)
def test_damaged_files(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = model(tmp_path, QWEN, None)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(GpuHostError, match=message):
        weights(path, QWEN)


def test_config(tmp_path: Path) -> None:
    with pytest.raises(GpuHostError, match=r"nothing does not exist; give"):
        read_config(str(tmp_path / "nothing"))
    with pytest.raises(GpuHostError, match=r"has no config\.json"):
        read_config(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(GpuHostError, match="is not JSON"):
        read_config(str(tmp_path))


def test_model_of_a_command_line(tmp_path: Path) -> None:
    path = model(tmp_path, QWEN, {"a": "1.safetensors"})
    name = QWEN["architectures"][0]
    assert check_model_path(parse_wanted({"model": path})) == (name, [])
    for unseen in ("Qwen/Qwen3.5", "s3://models/qwen", "/srv/models/qwen.gguf"):
        found = check_model_path(parse_wanted({"model-path": unseen}))[1]
        assert [(p.kind, p.severity) for p in found] == [("unchecked", "note")]
    (tmp_path / "1.safetensors").unlink()
    assert [p.kind for p in check_model_path(parse_wanted({"model": path}))[1]] == ["missing_file"]
    gone = check_model_path(parse_wanted({"model-path": f"{path}/gone"}))[1]
    assert [(p.kind, p.severity) for p in gone] == [("missing_file", "error")]


@pytest.mark.parametrize(
    ("length", "draft_tokens", "rate", "verdict"),
    [
        (1.0, 4, 0.0, "dead"),
        (1.04, 4, 0.0133, "dead"),
        (1.05, 4, 0.0167, "low"),
        (1.39, 4, 0.13, "low"),
        (1.4, 4, 0.1333, "ok"),
        (1.95, 4, 0.3167, "ok"),
        (1.95, None, None, "ok"),
        (1.0, 1, None, "dead"),
        (0.0, 4, None, "unknown"),
        (None, 4, None, "unknown"),
    ],
)
def test_acceptance(
    length: float | None, draft_tokens: int | None, rate: float | None, verdict: str
) -> None:
    found = judge_acceptance(length, draft_tokens)
    assert (found.rate, found.verdict) == (rate, verdict)


def sized(tmp_path: Path, total: int | None, mtp: int, other: int) -> Sizes:
    path = model(tmp_path, QWEN, {"a": "1.safetensors", "mtp.b": "2.safetensors"})
    parts = {"1.safetensors": {"a": (0, other)}, "2.safetensors": {"mtp.b": (other, other + mtp)}}
    for name, tensors in parts.items():
        entries = {tensor: {"data_offsets": list(ends)} for tensor, ends in tensors.items()}
        (tmp_path / name).write_bytes(header({"__metadata__": {}, **entries}))
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["metadata"] = {} if total is None else {"total_size": total}
    index.write_text(json.dumps(content))
    return read_sizes(path, QWEN, family_of(QWEN["architectures"][0]))


def test_sizes(tmp_path: Path) -> None:
    assert sized(tmp_path, 1000, mtp=100, other=900) == Sizes(1000, 100)
    assert sized(tmp_path, None, mtp=100, other=900) == Sizes(1000, 100)
    # only the headers of files whose tensors were left out: what is MTP's cannot be told
    assert sized(tmp_path, 50_000, mtp=100, other=900) == Sizes(50_000, None)
    (tmp_path / "2.safetensors").write_bytes(b"")
    index = (tmp_path / "model.safetensors.index.json").read_text()
    assert "50000" in index
    family = family_of(QWEN["architectures"][0])
    assert read_sizes(str(tmp_path), QWEN, family) == Sizes(50_000, None)
    assert read_sizes(str(tmp_path / "none"), QWEN, family) == Sizes(None, None)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"weight_map": {"mtp.a": "a\\u0000b"}}',
        '{"weight_map": {"mtp.a": "\\ud800"}}',
        '{"weight_map": {"mtp.a": "../a"}}',
        '{"weight_map": {"mtp.a": "/etc/passwd"}}',
        '{"weight_map": {"mtp.a": ""}}',
    ],
)
def test_index_that_names_no_files(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(GpuHostError, match="no usable weight_map"):
        weights(str(tmp_path), QWEN)


@pytest.mark.parametrize("metadata", ["5", "[]", '{"total_size": 1e400}', '{"total_size": NaN}'])
def test_index_that_tells_no_size(tmp_path: Path, metadata: str) -> None:
    text = f'{{"weight_map": {{}}, "metadata": {metadata}}}'
    (tmp_path / "model.safetensors.index.json").write_text(text)
    assert read_sizes(str(tmp_path), QWEN, None).total is None


@pytest.mark.parametrize("text", [b"[[1, 2]]", b"5", b"[" * 100_000])
def test_header_that_is_no_object(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(GpuHostError, match="is no safetensors file"):
        weights(str(tmp_path), QWEN)


def test_config_without_an_end(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(GpuHostError, match="is not JSON"):
        read_config(str(tmp_path))
