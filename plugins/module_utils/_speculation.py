# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.

"""Multi-token prediction (MTP): what a model takes on a release of SGLang, and whether it works.

SGLang starts and reports ready when a checkpoint has lost its MTP tensors: the draft layer then
stays uninitialised, no draft is ever accepted, and the server is slower than without speculation
(sgl-project/sglang issue 35797). So the weights are looked at before, and acceptance after.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_check import (
    Given,
    Problem,
    unstable_with_mtp,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_flags import (
    FlagSet,
    version_key,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_model import model_folder
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader

_LIVE = Reader()

# Accepted tokens per verification pass, the one token that never needs a draft included: 1.0 means
# that no draft was accepted. Measured values for three steps lie between 1.7 and 2.8.
DEAD_BELOW = 1.05
LOW_BELOW = 1.4


@dataclass(frozen=True)
class Family:
    """Models that SGLang drives in the same way.

    Attributes:
        name: the family's name in results.
        architectures: names in `config.json` with the first release that maps them to a draft
            model, read from `_config_draft_model` in `srt/configs/model_config.py` of the wheels.
        prefix: how the names of the MTP tensors begin; `{layers}` is the number of hidden layers.
            `None` where it is not known here.
        hybrid: some layers keep a state (Mamba, gated delta net) instead of a key-value cache.
        needs_count: the server reads `num_nextn_predict_layers`, which must be in `config.json`.
    """

    name: str
    architectures: dict[str, str]
    prefix: str | None = None
    hybrid: bool = False
    needs_count: bool = False


FAMILIES = (
    Family(
        "qwen3_5",
        {
            "Qwen3_5ForConditionalGeneration": "0.5.9",
            "Qwen3_5MoeForConditionalGeneration": "0.5.9",
            "InternS2PreviewForConditionalGeneration": "0.5.12",
            "Qwen3_5ForCausalLM": "0.5.19",
            "Qwen3_5MoeForCausalLM": "0.5.19",
            "InternS2MobiusForConditionalGeneration": "0.5.19",
        },
        prefix="mtp.",
        hybrid=True,
    ),
    Family("qwen3_next", {"Qwen3NextForCausalLM": "0.5.2"}, prefix="mtp.", hybrid=True),
    Family(
        "deepseek",
        {"DeepseekV3ForCausalLM": "0.4.10", "DeepseekV32ForCausalLM": "0.5.12"},
        prefix="model.layers.{layers}.",
        needs_count=True,
    ),
    Family(
        "glm4",
        {
            "Glm4MoeForCausalLM": "0.4.10",
            "Glm4MoeLiteForCausalLM": "0.5.9",
            "GlmMoeDsaForCausalLM": "0.5.9",
        },
        prefix="model.layers.{layers}.",
        needs_count=True,
    ),
    Family("mimo", {"MiMoForCausalLM": "0.4.10"}, prefix="model.mtp_layers."),
    Family("mimo_v2", {"MiMoV2FlashForCausalLM": "0.5.7"}, prefix="model.mtp.layers."),
    Family("longcat_flash", {"LongcatFlashForCausalLM": "0.5.2"}, prefix="model.mtp.layers."),
    Family("hunyuan_v3", {"HYV3ForCausalLM": "0.5.11"}, prefix="model.layers.{layers}."),
    Family(
        "nemotron_h",
        {"NemotronHForCausalLM": "0.5.9", "NemotronHPuzzleForCausalLM": "0.5.13"},
        prefix="mtp.layers.",
        hybrid=True,
    ),
    Family("qwen3_moe", {"Qwen3MoeForCausalLM": "0.5.13"}),
    Family(
        "bailing",
        {
            "BailingMoeForCausalLM": "0.5.3",
            "BailingMoeV2ForCausalLM": "0.5.3",
            "BailingMoeV2_5ForCausalLM": "0.5.9",
            "BailingMoeV3ForCausalLM": "0.5.19",
        },
    ),
    Family("ernie4_5", {"Ernie4_5_MoeForCausalLM": "0.5.1"}),
    Family("step3", {"Step3p5ForCausalLM": "0.5.9", "Step3p7ForConditionalGeneration": "0.5.13"}),
    Family("exaone_moe", {"ExaoneMoEForCausalLM": "0.5.9"}),
    Family("glm_ocr", {"GlmOcrForConditionalGeneration": "0.5.9"}),
)


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
class Mtp:
    """How to switch on MTP for one model on one release; see `decide`."""

    supported: bool | None
    architecture: str | None
    family: str | None
    algorithm: str | None
    flags: dict[str, Any]
    environment: dict[str, str]
    weights: Weights
    problems: tuple[Problem, ...]


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
    except ValueError as error:
        raise GpuHostError(f"{model_path}/config.json is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise GpuHostError(f"{model_path}/config.json is not a JSON object")
    return config


def architecture_of(config: dict[str, Any]) -> str | None:
    """Return the architecture that SGLang goes by: the first one of the list."""
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else None


def family_of(architecture: str | None) -> Family | None:
    """Return the family of an architecture, `None` when it is none that is known to have MTP."""
    return next((family for family in FAMILIES if architecture in family.architectures), None)


def read_weights(
    model_path: str, config: dict[str, Any], family: Family | None, host: Reader = _LIVE
) -> Weights:
    """Look for a family's MTP tensors in a model's folder, and for the files of the model.

    Read are the index, or the headers of single files; no tensor.

    Raises:
        GpuHostError: an index or a header is not readable as such.
    """
    prefix = _prefix(config, family)
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
    count = sum(name.startswith(prefix) for name in tensors) if prefix else 0
    known = prefix is not None and listed
    return Weights(count > 0 if known else None, prefix, count, tuple(missing))


def _prefix(config: dict[str, Any], family: Family | None) -> str | None:
    if family is None or family.prefix is None:
        return None
    layers = _setting(config, "num_hidden_layers")
    if layers is None and "{layers}" in family.prefix:
        return None
    return family.prefix.format(layers=layers)


def _setting(config: dict[str, Any], name: str) -> Any:
    """Return a value of the model, which models with images keep one level down."""
    inner = config.get("text_config")
    return config.get(name, inner.get(name) if isinstance(inner, dict) else None)


def _weight_map(text: str, model_path: str) -> dict[str, str]:
    try:
        files = json.loads(text)["weight_map"]
        return {str(tensor): str(file) for tensor, file in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise GpuHostError(
            f"{model_path}/model.safetensors.index.json has no usable weight_map "
            "(a Git LFS pointer?); download the model again"
        ) from error


def _absent(model_path: str, name: str, host: Reader) -> bool:
    """Tell whether a file is missing, empty, or only a pointer left by a clone without Git LFS."""
    start = host.head(f"{model_path}/{name}", 40)
    return not start or start.startswith(b"version https://git-lfs")


def _header(path: str, host: Reader) -> list[str]:
    """Return the tensors of one file: 8 bytes of length, little endian, then a JSON object."""
    size = int.from_bytes((host.head(path, 8) or b"").ljust(8, b"\0"), "little")
    try:
        if size > 100_000_000:  # the limit of the format
            raise ValueError("the header is too long")
        return [str(name) for name in json.loads((host.head(path, 8 + size) or b"")[8:])]
    except ValueError as error:
        raise GpuHostError(f"{path} is no safetensors file: {error}; download it again") from error


def decide(flags: FlagSet, config: dict[str, Any], weights: Weights, num_steps: int = 3) -> Mtp:
    """Return the flags and environment that switch on MTP for a model on an installed release.

    Args:
        flags: what the installed release accepts.
        config: the model's `config.json`.
        weights: what `read_weights` found.
        num_steps: how many tokens are drafted before a verification; one more is verified.

    Source of the rules: `srt/server_args.py` and `srt/arg_groups/{speculative,mamba}_hook.py` of
    the releases 0.5.4 to 0.5.23.
    """
    architecture = architecture_of(config)
    family = family_of(architecture)
    release = version_key(flags.version)
    spellings = flags.spellings()
    problems = list(_obstacles(flags, config, architecture, family))
    problems += _weight_problems(weights, family)
    wanted: dict[str, Any] = {}
    environment: dict[str, str] = {}
    if family is not None:
        wanted = {
            "--speculative-algorithm": "NEXTN",
            "--speculative-num-steps": num_steps,
            "--speculative-eagle-topk": 1,
            "--speculative-num-draft-tokens": num_steps + 1,
        }
    if family is not None and family.hybrid:
        # Without it, MTP on a model with state either switches off the prefix cache or is refused.
        for name in ("--mamba-radix-cache-strategy", "--mamba-scheduler-strategy"):
            if name in spellings:
                wanted[name] = "extra_buffer"
                break
        if (0, 5, 7) <= release < (0, 5, 11):
            environment["SGLANG_ENABLE_SPEC_V2"] = "1"
        if release < (0, 5, 10) and family.name != "nemotron_h":
            wanted["--attention-backend"] = "triton"  # the only safe one on Blackwell until 0.5.10
    wrong = any(problem.severity == "error" for problem in problems)
    unsure = any(problem.kind == "unchecked" for problem in problems)
    return Mtp(
        supported=False if wrong else None if unsure else True,
        architecture=architecture,
        family=family.name if family else None,
        algorithm="NEXTN" if family else None,
        flags=wanted,
        environment=environment,
        weights=weights,
        problems=tuple(problems),
    )


def _obstacles(
    flags: FlagSet, config: dict[str, Any], architecture: str | None, family: Family | None
) -> Iterable[Problem]:
    """Yield why this release cannot draft for this model."""
    name, version = "--speculative-algorithm", flags.version
    if family is None or architecture is None:
        yield Problem(
            name,
            "unchecked",
            "warning",
            f"{architecture or 'a model without architectures in its config.json'} is not known "
            "to have MTP layers that SGLang can drive",
        )
        return
    first = family.architectures[architecture]
    if version is None:
        yield Problem(name, "unchecked", "warning", "the version of SGLang is not known")
    elif version_key(version) < version_key(first):
        yield Problem(
            name,
            "known_bad",
            "error",
            f"SGLang {version} has no draft model for {architecture}; {first} is the first with it",
            f"SGLang {first} or later",
        )
    algorithm = flags.spellings().get(name)
    if algorithm is None or (algorithm.choices is not None and "NEXTN" not in algorithm.choices):
        yield Problem(name, "unknown", "error", f"SGLang {version} does not offer {name} NEXTN")
    if family.needs_count and not _setting(config, "num_nextn_predict_layers"):
        yield Problem(
            name,
            "conflict",
            "error",
            f"config.json of {architecture} must have num_nextn_predict_layers, "
            "from which SGLang builds the draft model",
        )
    if family.hybrid and (0, 5, 4) <= version_key(version) < (0, 5, 7):
        yield Problem(
            name,
            "conflict",
            "warning",
            f"SGLang {version} switches off the prefix cache for {architecture} with MTP",
            "SGLang 0.5.10 or later",
        )
    unstable = unstable_with_mtp(version, architecture)
    if unstable:
        yield unstable


def _missing_files(weights: Weights) -> Iterable[Problem]:
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
    return architecture_of(config), list(_missing_files(weights))


def _weight_problems(weights: Weights, family: Family | None) -> Iterable[Problem]:
    yield from _missing_files(weights)
    if family is None:
        return
    if weights.found is None:
        yield Problem(
            "--model-path",
            "unchecked",
            "warning",
            "whether the checkpoint has its MTP tensors cannot be told"
            + (": no safetensors file is there" if weights.prefix else ""),
        )
    elif not weights.found:
        yield Problem(
            "--model-path",
            "missing_file",
            "error",
            f"the checkpoint has no tensor that begins with {weights.prefix}: it has lost its MTP "
            "layer, and SGLang would start all the same and accept no draft",
            "the checkpoint of the model's own publisher",
        )
