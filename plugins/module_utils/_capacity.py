# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.

"""How many requests and tokens fit a server, with and without MTP, before it is started.

SGLang shares out what `--mem-fraction-static` leaves after the weights: on a model with states
(Mamba, gated delta net) first into slots for states, of which each running request holds several
and MTP takes more, then into the key-value cache. When slots are few, requests wait in the queue.

The formulas are those of the releases, by what they were read in:

- 0.5.9 to 0.5.12: `handle_max_mamba_cache`, `srt/model_executor/model_runner_kv_cache_mixin.py`.
  MTP takes the states of all requested requests off before the rest is shared.
- 0.5.13 to 0.5.16: the same name (0.5.16: `srt/mem_cache/kv_cache_configurator.py`). Slots and the
  states that MTP takes are solved for together.
- 0.5.17 to 0.5.23: `_handle_max_mamba_cache` there. Each pool has one slot more, for padding.
- 0.5.14 to 0.5.23: `_profile_available_bytes` counts the weights of the draft layer too, and
  `srt/model_executor/pool_configurator.py` its share of the key-value cache.
- slots for a request: `_calculate_mamba_ratio` (0.5.10 on), `init_memory_pool` (0.5.9).
- the size of a state: `Mamba2StateShape.create`, `mamba_cache_per_req` in
  `srt/configs/mamba_utils.py`, alike in all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ansible_collections.gpuhost.inference.plugins.module_utils._command import run
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from ansible_collections.gpuhost.inference.plugins.module_utils._mtp_families import (
    Family,
    family_of,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._mtp_plan import (
    ALGORITHM,
    DRAFTS,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_check import (
    number,
    strategy_of,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._speculation import (
    Sizes,
    architecture_of,
    setting,
)

MIB = 1 << 20
# What CUDA, NCCL and the driver hold on a GPU before weights are loaded; the log's first line
# "avail mem" shows the real number. Between 400 and 900 MiB on 4 GPUs, so an assumption.
RUNTIME_MIB = 600
_DEFAULT_RATIO = 0.9  # --mamba-full-memory-ratio in all releases
_CAP = 48  # running requests with speculation and without --max-running-requests
_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "bf16": 2,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
}


class _Unknown(Exception):
    """An input is not known, or a rule for it is not known here; its text says which."""


@dataclass(frozen=True)
class Arm:
    """What one way to run the server is predicted to hold; per worker of data parallelism.

    Attributes:
        max_running_requests: requests that run at once; more of them wait.
        requested: the number asked for, `None` when SGLang chooses it.
        limited_by: `requested`, `states` or `kv_cache`.
        state_slots: slots for states, `None` for a model without.
        slots_per_request: how many of them a running request holds, `None` for a model without.
        state_mib: of one slot on one GPU, `None` for a model without.
        kv_tokens: tokens that the key-value cache holds.
        kv_bytes_per_token: on one GPU.
        weights_mib: on one GPU, those of the draft layer included where they are counted.
        budget_mib: what is shared out on one GPU.
        unknown: why a value is `None` that should not be.
    """

    max_running_requests: int | None = None
    requested: int | None = None
    limited_by: str | None = None
    state_slots: int | None = None
    slots_per_request: int | None = None
    state_mib: float | None = None
    kv_tokens: int | None = None
    kv_bytes_per_token: int | None = None
    weights_mib: int | None = None
    budget_mib: int | None = None
    unknown: tuple[str, ...] = ()


@dataclass(frozen=True)
class Capacity:
    """The two arms, and what was taken for granted."""

    without_mtp: Arm
    with_mtp: Arm
    assumptions: tuple[str, ...]


@dataclass(frozen=True)
class Server:
    """All that decides.

    Attributes:
        release: of SGLang, from `version_key`.
        config: the model's `config.json`.
        values: flags by all their spellings, from `values_of`.
        sizes: of the checkpoint.
        gpu_memory_mib: of the smallest GPU, `None` when not known.
        environment: of the server.
    """

    release: tuple[int, ...]
    config: Mapping[str, Any]
    values: Mapping[str, tuple[str, ...]]
    sizes: Sizes
    gpu_memory_mib: int | None
    environment: Mapping[str, str] = field(default_factory=dict)

    def whole(self, name: str, otherwise: int) -> int:
        """Return a flag's whole number, `otherwise` when it is not given."""
        found = number(self.values, name)
        return otherwise if found is None else found

    def real(self, name: str) -> float | None:
        """Return a flag's number, `None` when it is not given or none."""
        try:
            return float("".join(self.values[name]))
        except (KeyError, ValueError):
            return None

    def text(self, name: str) -> str | None:
        """Return a flag's text, `None` when it is not given."""
        return "".join(self.values[name]) if name in self.values else None

    def size(self, name: str) -> int:
        """Return a whole number of the model's configuration."""
        value = setting(dict(self.config), name)
        if not isinstance(value, int):
            raise _Unknown(f"config.json has no {name}")
        return value


def predict(server: Server, mtp_flags: Mapping[str, Any]) -> Capacity:
    """Return what a server holds with its flags, and with those of MTP added.

    Args:
        server: flags, model and GPU; speculation among its flags counts for the arm with MTP only.
        mtp_flags: what `decide` adds.
    """
    plain = {k: v for k, v in server.values.items() if not k.startswith("--speculative-")}
    added = {k: (() if v is True else (str(v),)) for k, v in mtp_flags.items()}
    without = replace(server, values=plain)
    with_mtp = replace(server, values={**server.values, **added})
    # A strategy that MTP needs changes the plain arm too, were it left in: it is not
    return Capacity(_arm(without), _arm(with_mtp), tuple(_assumptions(server)))


def smallest_gpu(ask: Callable[[Sequence[str], float], str] = run) -> int | None:
    """Return the memory in MiB of the smallest GPU, `None` when the driver does not tell.

    Those that the server takes may be others; the smallest of all is never too much.
    """
    words = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        return min(int(line) for line in ask(words, 20.0).split("\n") if line.strip())
    except (GpuHostError, ValueError):
        return None


def _arm(server: Server) -> Arm:
    spec = ALGORITHM in server.values
    workers = _attention_workers(server)
    asked = number(server.values, "--max-running-requests")
    if asked is None and spec:
        asked = _CAP
    requested = None if asked is None else max(1, asked // workers)
    arm = Arm(requested=requested)
    unknown: list[str] = []
    try:
        family = family_of(architecture_of(dict(server.config)))
        _refuse_unknown_layouts(server, family)
        arm = _memory(server, arm, spec)
        budget = float(arm.budget_mib or 0) * MIB
        if family is not None and family.hybrid:
            arm, budget = _states(server, family, arm, budget)
        arm = replace(arm, **_tokens(server, spec, budget))
    except _Unknown as reason:
        unknown.append(str(reason))
    arm = replace(arm, unknown=tuple(unknown))
    return _running(server, arm)


def _attention_workers(server: Server) -> int:
    """Return among how many workers requests are shared; each has a share of the limits."""
    attention = server.whole("--attn-dp-size", 1)
    if "--enable-dp-attention" in server.values:
        attention = max(attention, server.whole("--data-parallel-size", 1))
    return attention


def _refuse_unknown_layouts(server: Server, family: Family | None) -> None:
    """Raise for what the formulas here do not cover."""
    names = server.values
    if _attention_workers(server) > 1:
        raise _Unknown("what each GPU holds with data-parallel attention is not calculated here")
    if "--quantization" in names and not server.config.get("quantization_config"):
        raise _Unknown("--quantization changes the weights while they are loaded")
    for name in ("--cpu-offload-gb", "--enable-linear-replayssm-spec", "--enable-unified-memory"):
        if name in names and names[name] != ("0",):
            raise _Unknown(f"{name} changes the memory in a way that is not calculated here")
    if family is None and _has_states(server):
        raise _Unknown("the model keeps states, and its family is not known here")
    if family is not None and family.hybrid and server.release < (0, 5, 9):
        raise _Unknown("states before SGLang 0.5.9 are not calculated here")
    if "--disaggregation-mode" in names:
        raise _Unknown("prefill and decode on servers of their own are not calculated here")


def _has_states(server: Server) -> bool:
    names = ("linear_num_value_heads", "mamba_num_heads", "mamba_d_state", "linear_attn_config")
    return any(setting(dict(server.config), name) is not None for name in names)


def _memory(server: Server, arm: Arm, spec: bool) -> Arm:
    """Return an arm with weights and budget."""
    if server.gpu_memory_mib is None:
        raise _Unknown("the memory of the GPUs is not known: give gpu_memory_mib")
    fraction = server.real("--mem-fraction-static")
    if fraction is None:
        raise _Unknown("without --mem-fraction-static SGLang chooses it by the GPU")
    if server.sizes.total is None:
        raise _Unknown("the size of the weights is not known")
    shares = server.whole("--tensor-parallel-size", 1) * _stages(server)
    weights = server.sizes.total
    if server.sizes.mtp is not None and not (spec and server.release >= (0, 5, 14)):
        weights -= server.sizes.mtp  # not loaded, or loaded after the memory is shared out
    weights_mib = weights / shares / MIB
    budget = (server.gpu_memory_mib - RUNTIME_MIB) * fraction - weights_mib
    if server.release >= (0, 5, 18) and server.config.get("vision_config"):
        budget -= 100  # SGLANG_VLM_CACHE_SIZE_MB
    arm = replace(arm, weights_mib=int(weights_mib), budget_mib=int(budget))
    if budget <= 0:
        raise _Unknown(
            f"the weights ({int(weights_mib)} MiB on each GPU) leave nothing below "
            f"--mem-fraction-static {fraction}"
        )
    return arm


def _stages(server: Server) -> int:
    return server.whole("--pipeline-parallel-size", 1)


def _layers(server: Server) -> tuple[int, int]:
    """Return how many layers of a pipeline's fullest stage keep a state, and how many keep KV."""
    stages = _stages(server)
    kinds = _kinds(server)
    if len(kinds) % stages:
        raise _Unknown(f"{len(kinds)} layers do not divide by {stages} stages of a pipeline")
    each = len(kinds) // stages
    parts = [kinds[start : start + each] for start in range(0, len(kinds), each)]
    # Before 0.5.17 a stage was charged for the states of all layers
    states = parts if server.release >= (0, 5, 17) else [kinds]
    return max(part.count("state") for part in states), max(part.count("kv") for part in parts)


def _kinds(server: Server) -> list[str]:
    """Return for each layer `state`, `kv`, or an empty text when it keeps nothing."""
    config = dict(server.config)
    pattern = setting(config, "hybrid_override_pattern")
    if isinstance(pattern, str):  # Nemotron-H: Mamba, attention, and layers without either
        return [{"M": "state", "*": "kv"}.get(letter, "") for letter in pattern]
    blocks = setting(config, "layers_block_type")
    types = blocks if isinstance(blocks, list) else setting(config, "layer_types")
    known = {
        "linear_attention": "state",
        "mamba": "state",
        "full_attention": "kv",
        "attention": "kv",
        "moe": "",
        "mlp": "",
    }
    if isinstance(types, list):
        if not set(types) <= set(known):
            raise _Unknown(f"layers of the kind {sorted(set(types) - set(known))[0]} are not known")
        return [known[kind] for kind in types]
    count = server.size("num_hidden_layers")
    if setting(config, "linear_num_value_heads") is None:
        return ["kv"] * count
    interval = setting(config, "full_attention_interval") or 4
    return ["kv" if (index + 1) % interval == 0 else "state" for index in range(count)]


def state_bytes(server: Server) -> int:
    """Return the bytes of one slot for states on one GPU: `mamba_cache_per_req`.

    Raises:
        _Unknown: the configuration is not of gated delta nets (Qwen) or Mamba 2 (Nemotron-H).
    """
    config = dict(server.config)
    if setting(config, "linear_num_value_heads") is not None:
        heads, width = server.size("linear_num_value_heads"), server.size("linear_value_head_dim")
        groups, depth = server.size("linear_num_key_heads"), server.size("linear_key_head_dim")
        kernel = server.size("linear_conv_kernel_dim")
    elif setting(config, "mamba_num_heads") is not None:
        heads, width = server.size("mamba_num_heads"), server.size("mamba_head_dim")
        groups, depth = server.size("n_groups"), server.size("ssm_state_size")
        kernel = server.size("conv_kernel")
    else:
        raise _Unknown("the size of this family's states is not known here")
    shares = server.whole("--tensor-parallel-size", 1)
    if groups % shares:
        groups = shares if groups == 1 else groups + shares - groups
    convolution = (heads * width + 2 * groups * depth) // shares * (kernel - 1)
    temporal = heads // shares * width * depth
    return (convolution * 2 + temporal * _state_item(server)) * _layers(server)[0]


def _state_item(server: Server) -> int:
    """Return the bytes of one number of a state: flag, then environment, then configuration."""
    name = (
        server.text("--mamba-ssm-dtype")
        or server.environment.get("SGLANG_MAMBA_SSM_DTYPE")
        or setting(dict(server.config), "mamba_ssm_dtype")
        or "float32"
    )
    if name not in _BYTES:
        raise _Unknown(f"{name} is not known as a type of states")
    return _BYTES[name]


def slots_per_request(server: Server, family: Family) -> int:
    """Return how many slots for states a running request holds.

    Source: `_calculate_mamba_ratio` (0.5.10 and later), `init_memory_pool` (0.5.9); the strategy
    that `auto` becomes: `_mamba_radix_cache_resolution` in `srt/arg_groups/overrides.py`.
    """
    release, spec = server.release, ALGORITHM in server.values
    if not _cached(server, family):
        return 1
    strategy = _strategy(server, family)
    overlap = "--disable-overlap-schedule" not in server.values
    lock = server.environment.get("SGLANG_OPT_MAMBA_SKIP_DECODE_LOCK", "").lower() in ("1", "true")
    base = 2 if lock and release >= (0, 5, 17) else 3
    if strategy == "no_buffer":
        return 3
    if strategy == "extra_buffer_lazy":
        return base + 1
    if release < (0, 5, 10):
        return 4 if spec else 5
    return base + (2 if overlap else 1)


def _strategy(server: Server, family: Family) -> str:
    given = strategy_of(server.values)
    if given not in (None, "auto"):
        return str(given)
    overlap = "--disable-overlap-schedule" not in server.values
    paged = server.whole("--page-size", 1) > 1
    can = family.extra_buffer is not None and server.release >= (0, 5, 14)
    return "extra_buffer" if can and (overlap or paged) else "no_buffer"


def _cached(server: Server, family: Family) -> bool:
    """Tell whether the prefix cache is on, which SGLang 0.5.9 switches off by itself."""
    if "--disable-radix-cache" in server.values:
        return False
    alone = ALGORITHM in server.values and _strategy(server, family) == "no_buffer"
    return not (alone and server.release < (0, 5, 10))


def _states(server: Server, family: Family, arm: Arm, budget: float) -> tuple[Arm, float]:
    """Return an arm with its slots, and the bytes that are left for the key-value cache."""
    each = state_bytes(server)
    slots = slots_per_request(server, family)
    drafts = _drafts(server)
    arm = replace(arm, slots_per_request=slots, state_mib=round(each / MIB, 1))
    joint, padding = server.release >= (0, 5, 13), int(server.release >= (0, 5, 17))
    requested = arm.requested
    if not joint and drafts and requested is not None:
        budget -= each * requested * drafts
    ratio = server.real("--mamba-full-memory-ratio") or _DEFAULT_RATIO
    share = budget * ratio / (1 + ratio)
    explicit = number(server.values, "--max-mamba-cache-size")
    if explicit is not None:
        count = explicit
    elif not _cached(server, family) and requested is not None:
        count = requested
    elif joint and drafts:
        count = int((share - each * padding * (1 + drafts)) // (each * (1 + drafts / slots)))
    else:
        count = int((share - each * padding) // each)
    if count <= 0:
        raise _Unknown("not one state fits: SGLang would refuse to start")
    if joint and drafts and requested is not None:
        budget -= each * (min(requested, count // slots) + padding) * drafts
    return replace(arm, state_slots=count), budget - each * (count + padding)


def _drafts(server: Server) -> int:
    if ALGORITHM not in server.values:
        return 0
    return server.whole(DRAFTS, 4)  # the automatic choice 3/1/4 of these families


def _tokens(server: Server, spec: bool, budget: float) -> dict[str, Any]:
    """Return the tokens that the rest of the budget holds, and the bytes of one."""
    if budget <= 0:
        raise _Unknown("the states leave nothing for the key-value cache")
    config = dict(server.config)
    item, layers = _kv_item(server), _layers(server)[1]
    if layers == 0:
        raise _Unknown("no layer has a key-value cache")
    if setting(config, "index_head_dim") is not None or setting(config, "compress_ratios"):
        raise _Unknown("the cache of sparse attention is not calculated here")
    if setting(config, "sliding_window_pattern") or _slides(config):
        raise _Unknown("the caches of sliding windows are not calculated here")
    lora = setting(config, "kv_lora_rank")
    if lora is not None:
        width = lora + server.size("qk_rope_head_dim")  # not divided among GPUs
    else:
        heads = server.size("num_attention_heads")
        keys = setting(config, "num_key_value_heads") or heads
        head = setting(config, "head_dim") or server.size("hidden_size") // heads
        values = setting(config, "v_head_dim") or head
        width = max(1, keys // server.whole("--tensor-parallel-size", 1)) * (head + values)
    cell = width * layers * item
    if spec and server.release >= (0, 5, 14):
        cell += cell // layers  # one layer of the draft model
    page = server.whole("--page-size", 1)
    tokens = int(budget) // cell // page * page
    limit = number(server.values, "--max-total-tokens")
    tokens = tokens if limit is None else min(tokens, limit // page * page)
    return {"kv_tokens": tokens, "kv_bytes_per_token": cell}


def _slides(config: dict[str, Any]) -> bool:
    used = setting(config, "use_sliding_window")
    return setting(config, "sliding_window") is not None and used is not False


def _kv_item(server: Server) -> int:
    name = server.text("--kv-cache-dtype") or "auto"
    if name == "auto":
        quantised = server.config.get("quantization_config") or {}
        if quantised.get("kv_cache_scheme") or quantised.get("kv_cache_quant_algo"):
            raise _Unknown("the checkpoint may choose the type of the key-value cache")
        config = dict(server.config)
        name = str(setting(config, "dtype") or setting(config, "torch_dtype") or "bfloat16")
    if name not in _BYTES:
        raise _Unknown(f"{name} is not known as a type of the key-value cache")
    return _BYTES[name]


def _running(server: Server, arm: Arm) -> Arm:
    """Return an arm with its number of running requests: `resolve_max_num_reqs`."""
    if arm.unknown or arm.kv_tokens is None:
        return arm
    limits = {"kv_cache": arm.kv_tokens // 2}
    if arm.requested is not None:
        limits["requested"] = arm.requested
    else:
        length = number(server.values, "--context-length") or setting(
            dict(server.config), "max_position_embeddings"
        )
        if not isinstance(length, int):
            return replace(arm, unknown=("the context length is not known",))
        limits["requested"] = max(2048, min(4096, int(arm.kv_tokens / length * 512)))
    if arm.state_slots is not None and arm.slots_per_request is not None:
        limits["states"] = arm.state_slots // arm.slots_per_request
    least = min(limits.values())
    name = next(k for k in ("requested", "states", "kv_cache") if limits.get(k) == least)
    return replace(arm, max_running_requests=least, limited_by=name)


def _assumptions(server: Server) -> list[str]:
    """Return what the numbers take for granted."""
    found = [
        f"CUDA and NCCL hold {RUNTIME_MIB} MiB of each GPU before the weights are loaded, and no "
        "other process holds any",
        "the weights are divided evenly among the GPUs",
    ]
    if server.sizes.total is not None and server.sizes.mtp is None:
        found.append(
            "how much of the weights is the MTP layer is not known: it counts with MTP and without"
        )
    elif server.release < (0, 5, 14):
        found.append(
            "the draft layer is loaded after the memory is shared out and must fit what "
            "--mem-fraction-static leaves free"
        )
    if ALGORITHM not in server.values and "--max-running-requests" not in server.values:
        found.append(f"with MTP SGLang takes {_CAP} for --max-running-requests, which is not given")
    if server.release < (0, 5, 9):
        found.append("formulas of SGLang 0.5.9 are taken for an older release")
    if server.release > (0, 5, 23, 99):
        found.append("formulas of SGLang 0.5.23 are taken for a newer release")
    return found
