"""The table of families against the releases of SGLang, where their sources lie in `.build/sglang`.

`SGLANG_WHEELS=1 pytest tests/unit -k releases` brings them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from ansible_collections.gpuhost.inference.plugins.module_utils._mtp_families import (
    FAMILIES,
    family_of,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_flags import version_key

SOURCES = Path(__file__).parents[4] / ".build" / "sglang"
MODEL_CONFIG = "sglang/srt/configs/model_config.py"
# What `_config_draft_model` tests beside architectures of targets
NO_TARGETS = {"DSPARK", "DSparkMiniMaxDraftModel", "quark_mxfp4"}
# Families whose draft is found elsewhere
ELSEWHERE = {"IQuestQ1ForCausalLM"}


def releases() -> list[str]:
    return sorted(
        (path.parents[3].name for path in SOURCES.glob(f"*/{MODEL_CONFIG}")), key=version_key
    )


def texts(node: ast.AST, names: dict[str, ast.expr]) -> Iterator[str]:
    """Yield the texts that an expression compares with, names of lists followed."""
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part.value
        elif isinstance(part, ast.Name) and part.id in names:
            yield from texts(names[part.id], {})


def mapped(version: str) -> set[str]:
    """Return the architectures that a release maps to a draft model."""
    tree = ast.parse((SOURCES / version / MODEL_CONFIG).read_text())
    names = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    return {
        text
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "is_draft_model" in ast.unparse(node.test)
        for test in ast.walk(node.test)
        if isinstance(test, ast.Compare)
        for right in test.comparators
        for text in texts(right, names)
    } - NO_TARGETS


def test_every_architecture_that_a_release_drafts_for_is_known_and_no_other() -> None:
    found = releases()
    if len(found) < 10:
        pytest.skip("sources of SGLang are not in .build/sglang: see SGLANG_WHEELS")
    table = {name: first for family in FAMILIES for name, first in family.architectures.items()}
    for version in found:
        expected = {
            name
            for name, first in table.items()
            if version_key(first) <= version_key(version) and name not in ELSEWHERE
        }
        assert mapped(version) == expected, version


def test_no_architecture_is_in_two_families() -> None:
    names = [name for family in FAMILIES for name in family.architectures]
    assert len(names) == len(set(names))
    assert family_of("LlamaForCausalLM") is None
