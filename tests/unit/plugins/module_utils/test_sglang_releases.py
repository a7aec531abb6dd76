"""The flag reader on the releases themselves, as they lie on PyPI.

Of each wheel only what the reader opens is fetched (requests for ranges, under 1 MiB a release) and
kept in `.build/sglang`. Where the registry is away these tests are skipped, saying so.

`SGLANG_PARSER=1` compares every flag with SGLang's own parser, which `sglang_parser.py` builds of
the whole source of each release; it needs msgspec, which is then installed into `.build/sglang`.
"""

from __future__ import annotations

import json
import os
import subprocess
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import pytest
from ansible_collections.gpuhost.inference.plugins.module_utils._mtp_families import FAMILIES
from ansible_collections.gpuhost.inference.plugins.module_utils._mtp_plan import decide
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_check import (
    check_flags,
    parse_wanted,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_flags import (
    Flag,
    FlagSet,
    read_flags,
    version_key,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._speculation import Weights
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader
from wheels import AWAY, own_parser, released, wheel

SOURCES = Path(__file__).parents[4] / ".build" / "sglang"
QWEN = "Qwen3_5MoeForConditionalGeneration"
# Release: option strings that its own parser registers, counted by `sglang_parser.py` on
# 2026-11-30. On all of these releases, and on the 21 others since 0.4.10, the reader was found to
# agree with that parser in names, fields, types, choices, defaults and numbers of values.
RELEASES = {
    "0.4.10.post2": 192,
    "0.5.1.post3": 207,
    "0.5.2": 218,
    "0.5.3.post3": 271,
    "0.5.4.post3": 280,
    "0.5.5.post3": 287,
    "0.5.6.post2": 300,
    "0.5.7": 321,
    "0.5.8.post1": 336,
    "0.5.9": 341,
    "0.5.10.post1": 365,
    "0.5.11": 387,
    "0.5.12.post1": 402,
    "0.5.13.post1": 419,
    "0.5.14": 433,
    "0.5.15.post1": 451,
    "0.5.16": 476,
    "0.5.17": 491,
    "0.5.18": 506,
    "0.5.19": 521,
    "0.5.20": 513,
    "0.5.21": 532,
    "0.5.22": 544,
    "0.5.23": 559,
}
# How argparse calls the actions that the reader names as a source does.
ACTIONS = {
    "store": "_StoreAction",
    "store_true": "_StoreTrueAction",
    "store_false": "_StoreFalseAction",
    "boolean_optional": "BooleanOptionalAction",
}


def skip_as_away(error: Exception) -> NoReturn:
    pytest.skip(f"PyPI IS AWAY: the reader was not tried on SGLang's own releases ({error!r})")


@cache
def known(version: str) -> FlagSet:
    """Return the flags of a release, read from what an earlier run kept or from the registry."""
    kept, done = SOURCES / version, SOURCES / f"{version}.done"
    if done.exists():
        return read_flags("/sglang", Reader(str(kept)))
    try:
        with wheel(version, kept) as opened:
            flags = read_flags("/sglang", opened)
    except AWAY as error:
        skip_as_away(error)
    done.touch()
    return flags


@pytest.mark.parametrize("version", RELEASES)
def test_release(version: str) -> None:
    release = known(version)
    assert release.version == version
    assert sum(1 + len(flag.aliases) for flag in release.flags) == RELEASES[version]
    check(release)


def test_newest_release() -> None:
    """A release that came out since must be readable too, with whatever flags it has."""
    try:
        version = list(released())[-1]
    except AWAY as error:
        skip_as_away(error)
    release = known(version)
    assert release.version == version
    assert sum(1 + len(flag.aliases) for flag in release.flags) > 500
    check(release)


def check(release: FlagSet) -> None:
    assert release.passed_over == ()
    assert sum("choices" in flag.unchecked for flag in release.flags) <= 3
    assert not any("nargs" in flag.unchecked for flag in release.flags)
    weights = Weights(found=True, prefix="mtp.", tensors=1, missing_files=())
    mtp = decide(release, {"architectures": [QWEN]}, weights)
    assert mtp.supported is (version_key(release.version) >= (0, 5, 9))
    wanted = {
        "--model-path": "/srv/models/qwen3.5-122b",
        "--tensor-parallel-size": 4,
        "--host": "0.0.0.0",
        "--port": 30000,
        "--context-length": 65536,
        "--max-running-requests": 24,
        "--mem-fraction-static": 0.85,
        "--served-model-name": "qwen3.5-122b",
        "--enable-metrics": True,
        "--reasoning-parser": "qwen3",
        "--tool-call-parser": "qwen3_coder",
        **mtp.flags,
    }
    found = check_flags(release, parse_wanted(wanted))
    assert [problem for problem in found if problem.severity == "error"] == []
    check_families(release)


def check_families(release: FlagSet) -> None:
    """What is decided for MTP is accepted by the release, for every model that it drafts for."""
    for family in FAMILIES:
        for name, first in family.architectures.items():
            if version_key(first) <= version_key(release.version):
                weights = Weights(found=True, prefix="mtp.", tensors=1, missing_files=())
                mtp = decide(release, {"architectures": [name]}, weights)
                found = check_flags(release, parse_wanted(mtp.flags), name)
                assert [problem for problem in found if problem.severity == "error"] == [], name


@pytest.mark.skipif("SGLANG_PARSER" not in os.environ, reason="SGLANG_PARSER=1 compares them")
@pytest.mark.parametrize("version", RELEASES)
def test_own_parser_agrees(version: str) -> None:
    parsed = {tuple(flag["strings"]): flag for flag in parsed_flags(version)}
    read = {(flag.name, *flag.aliases): flag for flag in known(version).flags}
    assert sorted(read) == sorted(parsed)
    differences = [
        (names[0], part, ours, theirs)
        for names, flag in read.items()
        for part, ours, theirs in differing(flag, parsed[names])
    ]
    assert differences == []


def parsed_flags(version: str) -> list[dict[str, Any]]:
    command, environment = own_parser(version, SOURCES)
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 0, result.stderr
    flags: list[dict[str, Any]] = json.loads(result.stdout)["flags"]
    return flags


def differing(flag: Flag, parsed: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    def texts(choices: Any) -> Any:
        return None if choices is None else sorted(map(str, choices))

    kind = None if flag.nargs == 0 or flag.type == "str" else flag.type.rpartition(".")[2]
    pairs = {
        "dest": (flag.dest, parsed["dest"]),
        "type": (kind, None if parsed["type"] == "str" else parsed["type"]),
        "choices": (texts(flag.choices), texts(parsed["choices"])),
        "default": (json.loads(json.dumps(flag.default)), parsed["default"]),
        "nargs": (flag.nargs, parsed["nargs"]),
        "required": (flag.required, parsed["required"]),
        "action": (ACTIONS.get(flag.action, flag.action), parsed["action"]),
    }
    return [
        (part, ours, theirs)
        for part, (ours, theirs) in pairs.items()
        if ours != theirs and part not in flag.unchecked
    ]
