# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.

"""Multi-token prediction (MTP): has a checkpoint its layers, and are their drafts accepted?

SGLang starts and reports ready when a checkpoint has lost its MTP tensors: the draft layer then
stays uninitialised, no draft is ever accepted, and the server is slower than without speculation
(sgl-project/sglang issue 35797). So the weights are looked at before, and acceptance after.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from ansible_collections.gpuhost.inference.plugins.module_utils._mtp_families import Family
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_check import (
    Given,
    Problem,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_model import model_folder
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader

_LIVE = Reader()

# Accepted tokens per verification pass, the one token that never needs a draft included: 1.0 means
# that no draft was accepted. Measured values for three steps lie between 1.7 and 2.8.
DEAD_BELOW = 1.05
LOW_BELOW = 1.4


@dataclass(frozen=True)
class Weights:
    """What a model's folder holds.

    Attributes:
        found: MTP tensors are listed, in files that may be missing; `None` when nothing lists them
            or their names are not known here.
        prefix: what the names of the tensors were searched for, `None` when not known.
        tensors: how many were found.
        missing_files: files that the index names and that are absent or pointers of Git LFS, of the
            whole model: the server could not load it either.
    """

    found: bool | None
    prefix: str | None
    tensors: int
    missing_files: tuple[str, ...]


@dataclass(frozen=True)
class Sizes:
    """Bytes of a checkpoint's tensors: all, and those of MTP; `None` when they cannot be told."""

    total: int | None
    mtp: int | None


@dataclass(frozen=True)
class Acceptance:
    """How speculation does.

    Attributes:
        length: accepted tokens per verification pass, `None` when there was none.
        rate: share of the drafts accepted, computed alike for all releases, which do not agree on
            its definition (0.5.10 and earlier count the bonus token too).
        verdict: `ok`, `low`, `dead` (drafts are never accepted) or `unknown`.
    """

    length: float | None
    rate: float | None
    verdict: str


def judge_acceptance(length: float | None, draft_tokens: int | None) -> Acceptance:
    """Return the verdict on an accept length; `draft_tokens` is the number the server runs with."""
    if length is None or length <= 0:  # the server's gauge reads 0.0 when speculation is off
        return Acceptance(None, None, "unknown")
    rate = None
    if draft_tokens is not None and draft_tokens > 1:
        rate = round((length - 1) / (draft_tokens - 1), 4)
    verdict = "dead" if length < DEAD_BELOW else "low" if length < LOW_BELOW else "ok"
    return Acceptance(round(length, 4), rate, verdict)


def read_config(model_path: str, host: Reader = _LIVE) -> dict[str, Any]:
    """Return a model's `config.json`.

    Raises:
        GpuHostError: the folder or the file is missing, or it is not JSON.
    """
    text = host.text(f"{model_path}/config.json")
    if text is None:
        what = "has no config.json" if host.exists(model_path) else "does not exist"
        raise GpuHostError(f"{model_path} {what}; give the folder of a downloaded model")
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GpuHostError(f"{model_path}/config.json is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise GpuHostError(f"{model_path}/config.json is not a JSON object")
    return config


def architecture_of(config: dict[str, Any]) -> str | None:
    """Return the architecture that SGLang goes by: the first one of the list."""
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else None


def read_weights(
    model_path: str, config: dict[str, Any], family: Family | None, host: Reader = _LIVE
) -> Weights:
    """Look for a family's MTP tensors in a model's folder, and for the files of the model.

    Read are the index, or the headers of single files; no tensor.

    Raises:
        GpuHostError: an index or a header is not readable as such.
    """
    prefixes = _prefixes(config, family)
    index = host.text(f"{model_path}/model.safetensors.index.json")
    missing: list[str] = []
    tensors: list[str] = []
    if index is not None:
        files = _weight_map(index, model_path)
        missing = [name for name in sorted(set(files.values())) if _absent(model_path, name, host)]
        tensors = list(files)
    # Some uploads keep the MTP layer in a file of its own, which SGLang adds by itself.
    listed = index is not None
    for name in ("model.safetensors", "mtp.safetensors"):
        if (index is None or name == "mtp.safetensors") and host.exists(f"{model_path}/{name}"):
            if _absent(model_path, name, host):
                missing.append(name)
            else:
                tensors += _header(f"{model_path}/{name}", host)
            listed = True
    count = sum(name.startswith(prefixes) for name in tensors)
    known = bool(prefixes) and listed
    shown = " or ".join(prefixes) or None
    return Weights(count > 0 if known else None, shown, count, tuple(missing))


def _prefixes(config: dict[str, Any], family: Family | None) -> tuple[str, ...]:
    layers = setting(config, "num_hidden_layers")
    if family is None or (layers is None and "{layers}" in "".join(family.prefixes)):
        return ()
    return tuple(prefix.format(layers=layers) for prefix in family.prefixes)


def setting(config: dict[str, Any], name: str) -> Any:
    """Return a value of the model, which models with images keep one level down."""
    inner = config.get("text_config")
    return config.get(name, inner.get(name) if isinstance(inner, dict) else None)


def _weight_map(text: str, model_path: str) -> dict[str, str]:
    try:
        files = json.loads(text)["weight_map"]
        named = {str(tensor): str(file) for tensor, file in files.items()}
        strange = [file for file in named.values() if not _is_file_name(file)]
        if strange:
            raise ValueError(f"{strange[0][:60]!r} is no file of this folder")
        return named
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise GpuHostError(
            f"{model_path}/model.safetensors.index.json has no usable weight_map "
            "(a Git LFS pointer?); download the model again"
        ) from error


def _is_file_name(name: str) -> bool:
    """Tell whether an index may name this file: one of the folder or below, which can be opened."""
    return name.isprintable() and name[:1] not in ("", "/") and ".." not in name.split("/")


def _absent(model_path: str, name: str, host: Reader) -> bool:
    """Tell whether a file is missing, empty, or only a pointer left by a clone without Git LFS."""
    start = host.head(f"{model_path}/{name}", 40)
    return not start or start.startswith(b"version https://git-lfs")


def _header(path: str, host: Reader) -> dict[str, Any]:
    """Return the tensors of one file: 8 bytes of length, little endian, then a JSON object."""
    size = int.from_bytes((host.head(path, 8) or b"").ljust(8, b"\0"), "little")
    try:
        if size > 100_000_000:  # the limit of the format
            raise ValueError("the header is too long")
        header = json.loads((host.head(path, 8 + size) or b"")[8:])
        if not isinstance(header, dict):
            raise ValueError("the header is no JSON object")
        return header
    except (ValueError, RecursionError) as error:
        raise GpuHostError(f"{path} is no safetensors file: {error}; download it again") from error


def read_sizes(
    model_path: str, config: dict[str, Any], family: Family | None, host: Reader = _LIVE
) -> Sizes:
    """Return how many bytes a checkpoint's tensors take, by its index and the headers of its files.

    Which of them are MTP's is told only where the headers add up to what the index says.
    """
    prefixes = _prefixes(config, family)
    index = host.text(f"{model_path}/model.safetensors.index.json")
    listed = {} if index is None else _weight_map(index, model_path)
    declared = _declared_size(index)
    names = set(listed.values()) or {"model.safetensors"}
    if host.exists(f"{model_path}/mtp.safetensors"):
        names.add("mtp.safetensors")
    total = mtp = 0
    try:
        for name in sorted(names):
            for tensor, entry in _header(f"{model_path}/{name}", host).items():
                if tensor != "__metadata__":
                    start, end = entry["data_offsets"]
                    total += end - start
                    mtp += end - start if tensor.startswith(prefixes) else 0
    except (GpuHostError, KeyError, TypeError, ValueError):
        return Sizes(declared, None)
    if declared is not None and abs(total - declared) > 0.05 * declared:
        return Sizes(declared, None)
    return Sizes(total, mtp if prefixes else None)


def _declared_size(index: str | None) -> int | None:
    """Return the sum of bytes that an index names."""
    metadata = None if index is None else json.loads(index).get("metadata")
    size = metadata.get("total_size") if isinstance(metadata, dict) else None
    if not isinstance(size, (int, float)) or not math.isfinite(size) or size <= 0:
        return None
    return int(size)


def missing_files(weights: Weights) -> Iterable[Problem]:
    """Yield the problem of a model of which files are missing."""
    if weights.missing_files:
        shown = ", ".join(weights.missing_files[:3])
        more = len(weights.missing_files) - 3
        yield Problem(
            "--model-path",
            "missing_file",
            "error",
            f"the model is incomplete: {shown}{f' and {more} more' if more > 0 else ''} "
            "absent, empty or a Git LFS pointer",
            "download the model again",
        )


def check_model_path(
    given: Iterable[Given], hf_home: str | None = None, host: Reader = _LIVE
) -> tuple[str | None, list[Problem]]:
    """Return the architecture of the model a command line names, and what its folder lacks.

    A model of which nothing can be told here, as one in a store of objects, is a note `unchecked`.

    Args:
        given: the command line, from `parse_wanted`.
        hf_home: the folder `HF_HOME` of the server, where a model named by its id is looked for.
        host: where to read.
    """
    values = {
        flag.spelling.replace("--model-path", "--model"): flag.values[0]
        for flag in given
        if flag.values
    }
    model = values.get("--model")
    if model is None:
        return None, []
    if "://" in model or model.endswith(".gguf") or not (model.startswith("/") or hf_home):
        message = f"whether {model} can be loaded is not known here"
        return None, [Problem("--model-path", "unchecked", "note", message)]
    try:
        folder = model_folder(model, hf_home, host, values.get("--revision", "main"))
        config = read_config(folder, host)
        weights = read_weights(folder, config, None, host)
    except GpuHostError as error:
        return None, [Problem("--model-path", "missing_file", "error", str(error))]
    return architecture_of(config), list(missing_files(weights))
