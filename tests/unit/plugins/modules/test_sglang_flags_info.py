"""The module's options and result; what it finds is tested with its utilities."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuhost.inference.plugins.modules import sglang_flags_info
from releases import package

Run = Callable[..., dict[str, Any]]
SOURCE = {
    "srt/server_args.py": """
        class ServerArgs:
            def add_cli_args(parser):
                parser.add_argument("--model-path", "--model", required=True)
                parser.add_argument("--config")
                parser.add_argument("--dtype", choices=["auto", "bf16"], default="auto")
        """
}


def test_flags_and_problems(run_module: Run, tmp_path: Path) -> None:
    folder = package(tmp_path, SOURCE, "0.5.20")
    wanted = {"model-path": str(tmp_path), "dtype": "fp4", "model": "x"}
    result = run_module(sglang_flags_info, package=folder, wanted=wanted, check=True)
    assert (result["changed"], result["version"]) == (False, "0.5.20")
    assert result["package"] == folder
    assert (result["complete"], result["passed_over"]) == (True, [])
    assert result["config"] == {"model-path": str(tmp_path), "model": "x", "dtype": "fp4"}
    assert result["arguments"] == []
    assert result["flags"][1] == {
        "name": "--dtype",
        "aliases": [],
        "dest": "dtype",
        "type": "str",
        "choices": ["auto", "bf16"],
        "default": "auto",
        "action": "store",
        "nargs": None,
        "required": False,
        "replacement": None,
        "retired": False,
        "unchecked": [],
    }
    assert [(p["flag"], p["kind"]) for p in result["problems"]] == [
        ("--dtype", "choice"),
        ("--model", "duplicate"),
        ("--model-path", "unchecked"),
    ]


def test_missing_model(run_module: Run, tmp_path: Path) -> None:
    result = run_module(
        sglang_flags_info,
        package=package(tmp_path, SOURCE),
        wanted=["--model-path", f"{tmp_path}/nothing"],
    )
    assert [p["kind"] for p in result["problems"]] == ["missing_file"]


def test_model_by_its_id(run_module: Run, tmp_path: Path) -> None:
    options = {"package": package(tmp_path, SOURCE), "wanted": {"model-path": "Qwen/Qwen3.5-0.8B"}}
    [unknown] = run_module(sglang_flags_info, **options)["problems"]
    assert (unknown["kind"], unknown["severity"]) == ("unchecked", "note")
    [missing] = run_module(sglang_flags_info, **options, hf_home=str(tmp_path))["problems"]
    assert (missing["kind"], missing["severity"]) == ("missing_file", "error")
    assert "hf download Qwen/Qwen3.5-0.8B" in missing["message"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "one of the following is required: python, package"),
        ({"python": "/a", "package": "/b"}, "mutually exclusive"),
        ({"python": "/nowhere/bin/python"}, "/nowhere/bin/python does not exist"),
        ({"package": "SOURCE", "wanted": "--dtype auto"}, "mapping of flags or a list"),
    ],
)
def test_bad_options(
    run_module: Run, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    if options.get("package") == "SOURCE":
        options = {**options, "package": package(tmp_path, SOURCE)}
    result = run_module(sglang_flags_info, **options)
    assert result["failed"]
    assert message in result["msg"]
