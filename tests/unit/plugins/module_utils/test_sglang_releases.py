"""The flag reader on the releases themselves, as they lie on PyPI.

Runs where the sources are: `SGLANG_WHEELS=1 pytest tests/unit -k releases -rs` downloads about
400 MB once, keeps the sources in `.build/sglang`, and later runs use them without the variable.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from functools import cache
from pathlib import Path

import pytest
from ansible_collections.gpuhost.inference.plugins.module_utils._mtp_plan import decide
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_check import (
    check_flags,
    parse_wanted,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_flags import (
    FlagSet,
    find_package,
    read_flags,
    version_key,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._speculation import Weights

SOURCES = Path(__file__).parents[4] / ".build" / "sglang"
QWEN = "Qwen3_5MoeForConditionalGeneration"
# Release: option strings that its own parser registers. The first and the last number, 0.5.21 and
# 0.5.22 were taken from the parser itself, the others from this reader.
RELEASES = {
    "0.4.10.post2": 192,
    "0.5.2": 218,
    "0.5.4.post3": 280,
    "0.5.7": 321,
    "0.5.9": 341,
    "0.5.10.post1": 365,
    "0.5.11": 387,
    "0.5.12.post1": 402,
    "0.5.13": 419,
    "0.5.14": 433,
    "0.5.16": 476,
    "0.5.19": 521,
    "0.5.20": 513,
    "0.5.21": 532,
    "0.5.22": 544,
    "0.5.23": 559,
}


def download(version: str, folder: Path) -> None:
    """Fetch one wheel and keep what the reader may look at."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
    platform = ["--python-version", "3.12", "--only-binary=:all:"]
    subprocess.run([*command, *platform, f"sglang=={version}"], check=True, timeout=300)
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if name.endswith("/METADATA") or name.startswith("sglang/srt/"):
                    archive.extract(name, folder)
        wheel.unlink()


@pytest.fixture(params=RELEASES)
def release(request: pytest.FixtureRequest) -> FlagSet:
    version = str(request.param)
    folder = SOURCES / version
    if not (folder / "sglang").is_dir():
        if not os.environ.get("SGLANG_WHEELS"):
            pytest.skip(
                f"sources of SGLang {version} are not here: set SGLANG_WHEELS=1 to download"
            )
        folder.mkdir(parents=True, exist_ok=True)
        try:
            download(version, folder)
        except subprocess.SubprocessError as error:
            pytest.skip(f"SGLang {version} could not be downloaded: {error}")
    return flags_of(str(folder))


@cache
def flags_of(folder: str) -> FlagSet:
    return read_flags(find_package(package=folder))


def test_as_many_as_the_parser_registers(release: FlagSet) -> None:
    assert release.version is not None
    spellings = sum(1 + len(flag.aliases) for flag in release.flags)
    assert spellings == RELEASES[release.version]


def test_almost_nothing_is_unchecked(release: FlagSet) -> None:
    assert sum("choices" in flag.unchecked for flag in release.flags) <= 4
    assert not any("nargs" in flag.unchecked for flag in release.flags)


def test_mtp_flags_are_flags_of_the_release(release: FlagSet) -> None:
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
