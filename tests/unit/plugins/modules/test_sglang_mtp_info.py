"""The module's options and result; what it decides is tested with its utilities."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuhost.inference.plugins.modules import sglang_mtp_info
from releases import package

Run = Callable[..., dict[str, Any]]
SOURCE = {
    "srt/server_args.py": """
        class ServerArgs:
            speculative_algorithm: A[Optional[str], "text"] = None
            mamba_radix_cache_strategy: A[str, "text"] = "auto"
        """
}


@pytest.fixture
def installed(tmp_path: Path) -> str:
    (tmp_path / "site").mkdir()
    return package(tmp_path / "site", SOURCE)


def test_result(run_module: Run, tmp_path: Path, installed: str) -> None:
    name = "Qwen3_5MoeForConditionalGeneration"
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [name]}))
    index = {"weight_map": {"mtp.fc.weight": "1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "1.safetensors").write_bytes(b"weights")
    result = run_module(
        sglang_mtp_info, package=installed, model_path=str(tmp_path), num_steps=2, check=True
    )
    assert result["version"] == "0.5.23"
    assert result["mtp"] == {
        "supported": True,
        "architecture": name,
        "family": "qwen3_5",
        "algorithm": "NEXTN",
        "flags": {
            "--speculative-algorithm": "NEXTN",
            "--speculative-num-steps": 2,
            "--speculative-eagle-topk": 1,
            "--speculative-num-draft-tokens": 3,
            "--mamba-radix-cache-strategy": "extra_buffer",
        },
        "environment": {},
        "weights": {"found": True, "prefix": "mtp.", "tensors": 1, "missing_files": []},
        "problems": [],
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model_path": "/nowhere"}, "/nowhere does not exist"),
        ({"model_path": "/nowhere", "num_steps": 0}, "num_steps must be at least 1"),
        ({}, "missing required arguments: model_path"),
    ],
)
def test_bad_options(
    run_module: Run, installed: str, options: dict[str, Any], message: str
) -> None:
    result = run_module(sglang_mtp_info, package=installed, **options)
    assert result["failed"]
    assert message in result["msg"]


def test_capacity_beside_wanted_flags(run_module: Run, tmp_path: Path, installed: str) -> None:
    config = {
        "architectures": ["MiMoForCausalLM"],
        "num_hidden_layers": 36,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 32768,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    layer = {"data_offsets": [0, 1 << 20]}
    text = json.dumps({"model.mtp_layers.0.fc": layer, "lm_head": layer}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    options = {"package": installed, "model_path": str(tmp_path), "gpu_memory_mib": 24576}
    wanted = {"mem-fraction-static": 0.8, "speculative-algorithm": "EAGLE", "api-key": "hidden"}
    result = run_module(sglang_mtp_info, **options, wanted=wanted)
    assert "--speculative-algorithm" not in result["mtp"]["flags"]
    arms = result["capacity"]
    assert arms["with_mtp"]["max_running_requests"] == 48
    assert (arms["without_mtp"]["weights_mib"], arms["with_mtp"]["weights_mib"]) == (1, 2)
    assert "hidden" not in json.dumps({k: result[k] for k in ("mtp", "capacity")})
    environment = {"SGLANG_SIMULATE_ACC_LEN": 3}
    assert run_module(sglang_mtp_info, **options, environment=environment)["mtp"]["supported"] is (
        False
    )


def test_model_by_its_id(run_module: Run, tmp_path: Path, installed: str) -> None:
    options = {"package": installed, "model_path": "org/name", "hf_home": str(tmp_path)}
    assert "org/name is not in the cache" in run_module(sglang_mtp_info, **options)["msg"]
