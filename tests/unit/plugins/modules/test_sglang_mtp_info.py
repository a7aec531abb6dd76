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
