# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""A model folder, and how many requests of it fit: `config.json` in, slots and tokens out.

The formulas are those of SGLang's `srt/mem_cache/kv_cache_configurator.py` (0.5.16 and later).
Only two numbers are assumed: the free memory of a GPU before loading, and nothing else takes any.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

GIB = 1 << 30
MTP_PREFIXES = ("mtp.", "model.mtp")


@dataclass(frozen=True)
class Model:
    """What the stand-in reads of a model folder.

    Attributes:
        architecture: first entry of `architectures`.
        model_type: as in `config.json`.
        context_length: tokens.
        hybrid: it has linear-attention layers, whose state needs a slot per request.
        state_dtype: type of that state unless the command line says otherwise.
        weight_bytes: all tensors, by the index; divided by the ranks.
        has_mtp: the checkpoint holds the tensors of the draft layer.
        text: the language part of `config.json`.
    """

    GPU_GIB: ClassVar[float] = 95.0  # free on a 96 GB card before weights are loaded

    architecture: str
    model_type: str
    context_length: int
    hybrid: bool
    state_dtype: str
    weight_bytes: int
    has_mtp: bool
    text: dict[str, Any]


def read_model(path: str) -> Model:
    """Read a folder as SGLang does: `config.json`, then the names of its tensors.

    Raises:
        OSError, ValueError: there is no such model.
    """
    folder = Path(path)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    text = config.get("text_config", config)
    tensors, size = _tensors(folder)
    draft = (*MTP_PREFIXES, f"model.layers.{text['num_hidden_layers']}.")
    return Model(
        architecture=config["architectures"][0],
        model_type=config.get("model_type", ""),
        context_length=text["max_position_embeddings"],
        hybrid="linear_num_value_heads" in text,
        state_dtype=text.get("mamba_ssm_dtype", "float32"),
        weight_bytes=size,
        has_mtp=any(name.startswith(draft) for name in tensors),
        text=text,
    )


def _tensors(folder: Path) -> tuple[list[str], int]:
    """Return names and total size: of the index, else of the header of the single file."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        content = json.loads(index.read_text(encoding="utf-8"))
        return list(content["weight_map"]), int(content["metadata"]["total_size"])
    single = folder / "model.safetensors"
    if not single.exists():
        return [], 0  # as with --load-format dummy
    with single.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return [name for name in header if name != "__metadata__"], single.stat().st_size


@dataclass(frozen=True)
class Pools:
    """The memory of one rank after loading. Sizes in GiB.

    Attributes:
        weight: the target model.
        state_slots: `max_mamba_cache_size`, 0 for a model without such state.
        slots_per_request: how many of them a running request holds.
        conv, ssm, intermediate: what the states take.
        tokens: `max_total_num_tokens`.
        kv: what their keys and values take.
        max_running: the effective `max_running_requests`.
        capped: it is lower than asked for, because of the states.
        free: left at the end.
    """

    weight: float
    state_slots: int
    slots_per_request: int
    conv: float
    ssm: float
    intermediate: float
    tokens: int
    kv: float
    max_running: int
    capped: bool
    free: float


def plan(args: dict[str, Any], model: Model) -> Pools:
    """Divide the memory of a GPU among weights, states and tokens.

    Raises:
        RuntimeError: it does not fit; the text is SGLang's.
    """
    fraction, tp = args["mem_fraction_static"], args["tp_size"]
    weight = model.weight_bytes / tp / GIB
    rest = (model.GPU_GIB * fraction - weight) * GIB
    if rest <= 0:
        raise RuntimeError("Not enough memory. Please try to increase --mem-fraction-static.")
    conv, ssm = _state_bytes(args, model)
    state = conv + ssm
    draft = args["speculative_num_draft_tokens"] if args["speculative_algorithm"] else 0
    per_request = _slots_per_request(args)
    wanted = args["max_running_requests"]
    slots = intermediate = 0
    if model.hybrid:
        ratio = args["mamba_full_memory_ratio"]
        budget = rest * ratio / (1 + ratio)
        if args["max_mamba_cache_size"]:
            slots = args["max_mamba_cache_size"]
        elif args["disable_radix_cache"] and wanted:
            slots = wanted
        else:
            slots = int((budget - state * (1 + draft)) // (state * (1 + draft / per_request)))
        if draft:
            intermediate = (min(wanted, slots // per_request) + 1) * draft * state
        rest -= slots * state + intermediate
    kv_bytes = _kv_bytes_per_token(model, tp)
    tokens = max(0, int(rest // kv_bytes))
    tokens = min(tokens, args["max_total_tokens"] or tokens) // args["page_size"]
    tokens *= args["page_size"]
    running = min(
        wanted or min(max(int(tokens / args["context_length"] * 512), 2048), 4096), tokens // 2
    )
    states = slots // per_request if model.hybrid else running
    if min(running, states) <= 0:
        raise RuntimeError(
            "Hybrid (mamba/linear-attention) state cache is too small to serve any requests. "
            f"max_mamba_cache_size={slots}, mamba_ratio={per_request}"
        )
    return Pools(
        weight=weight,
        state_slots=slots,
        slots_per_request=per_request,
        conv=slots * conv / GIB,
        ssm=slots * ssm / GIB,
        intermediate=intermediate / GIB,
        tokens=tokens,
        kv=tokens * kv_bytes / GIB,
        max_running=min(running, states),
        capped=states < running,
        free=model.GPU_GIB * (1 - fraction),
    )


def _slots_per_request(args: dict[str, Any]) -> int:
    if args["disable_radix_cache"]:
        return 1
    overlap = not args["disable_overlap_schedule"]
    return {"no_buffer": 3, "extra_buffer": 5 if overlap else 4, "extra_buffer_lazy": 4}.get(
        args["mamba_radix_cache_strategy"], 3
    )


def _state_bytes(args: dict[str, Any], model: Model) -> tuple[int, int]:
    """Return the bytes of one slot on one rank: convolution window and recurrent state."""
    text = model.text
    if not model.hybrid:
        return 0, 0
    layers = text["num_hidden_layers"] - _attention_layers(text)
    value_heads, key_heads = text["linear_num_value_heads"], text["linear_num_key_heads"]
    key, value = text["linear_key_head_dim"], text["linear_value_head_dim"]
    tp = args["tp_size"]
    channels = (2 * key_heads * key + value_heads * value) // tp
    conv = layers * channels * (text["linear_conv_kernel_dim"] - 1) * 2
    number = 4 if args["mamba_ssm_dtype"] == "float32" else 2
    return conv, layers * value_heads // tp * key * value * number


def _attention_layers(text: dict[str, Any]) -> int:
    if "layer_types" in text:
        return int(text["layer_types"].count("full_attention"))
    interval = text.get("full_attention_interval", 4)
    return int(text["num_hidden_layers"]) // int(interval)


def _kv_bytes_per_token(model: Model, tp: int) -> int:
    text = model.text
    layers = _attention_layers(text) if model.hybrid else text["num_hidden_layers"]
    width = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    return int(2 * max(1, text["num_key_value_heads"] // tp) * width * 2 * layers)
