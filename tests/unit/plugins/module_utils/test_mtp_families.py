"""The table of families against SGLang's own releases, as they lie on PyPI.

Of each wheel one file is fetched and kept in `.build/sglang`. Where the registry is away the test
is skipped, saying so.
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
from wheels import AWAY, released, wheel

SOURCES = Path(__file__).parents[4] / ".build" / "sglang"
MODEL_CONFIG = "sglang/srt/configs/model_config.py"
# What `_config_draft_model` tests beside architectures of targets
NO_TARGETS = {"DSPARK", "DSparkMiniMaxDraftModel", "quark_mxfp4"}
# Families whose draft is found elsewhere
ELSEWHERE = {"IQuestQ1ForCausalLM"}


# Those that know an architecture more than the one before
RELEASES = (
    "0.4.10.post2",
    "0.5.1.post3",
    "0.5.2",
    "0.5.3.post3",
    "0.5.6.post2",
    "0.5.7",
    "0.5.8.post1",
    "0.5.9",
    "0.5.10.post1",
    "0.5.11",
    "0.5.12.post1",
    "0.5.13.post1",
    "0.5.15.post1",
    "0.5.16",
    "0.5.17",
    "0.5.18",
    "0.5.19",
    "0.5.20",
    "0.5.21",
    "0.5.22",
    "0.5.23",
)


def source(version: str) -> str:
    """Return the file that maps architectures, kept by an earlier run or from the registry."""
    kept = SOURCES / version
    if not (kept / MODEL_CONFIG).exists():
        try:
            with wheel(version, kept) as opened:
                opened.data(f"/{MODEL_CONFIG}")
        except AWAY as error:
            pytest.skip(f"PyPI IS AWAY: families were not compared with SGLang ({error!r})")
    return (kept / MODEL_CONFIG).read_text()


def texts(node: ast.AST, names: dict[str, ast.expr]) -> Iterator[str]:
    """Yield the texts that an expression compares with, names of lists followed."""
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part.value
        elif isinstance(part, ast.Name) and part.id in names:
            yield from texts(names[part.id], {})


def mapped(version: str) -> set[str]:
    """Return the architectures that a release maps to a draft model."""
    tree = ast.parse(source(version))
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


def expected(version: str) -> set[str]:
    """Return the architectures that the table has for a release."""
    table = {name: first for family in FAMILIES for name, first in family.architectures.items()}
    return {
        name
        for name, first in table.items()
        if version_key(first) <= version_key(version) and name not in ELSEWHERE
    }


@pytest.mark.parametrize("version", RELEASES)
def test_every_architecture_that_a_release_drafts_for_is_known_and_no_other(version: str) -> None:
    assert mapped(version) == expected(version)


def test_newest_release() -> None:
    try:
        version = list(released())[-1]
    except AWAY as error:
        pytest.skip(f"PyPI IS AWAY: families were not compared with SGLang ({error!r})")
    assert expected(version) - mapped(version) == set()


def test_no_architecture_is_in_two_families() -> None:
    names = [name for family in FAMILIES for name in family.architectures]
    assert len(names) == len(set(names))
    assert family_of("LlamaForCausalLM") is None
