"""How much fits a server: the field's figures, what each release does otherwise, and unknowns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from ansible_collections.gpuhost.inference.plugins.module_utils._capacity import (
    Arm,
    Capacity,
    Server,
    predict,
    smallest_gpu,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_flags import version_key
from ansible_collections.gpuhost.inference.plugins.module_utils._speculation import Sizes

GIB = 1 << 30
# 122 billion parameters, 36 layers of gated delta nets and 12 of attention
QWEN: dict[str, Any] = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "vision_config": {},
    "text_config": {
        "num_hidden_layers": 48,
        "full_attention_interval": 4,
        "hidden_size": 3072,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_value_heads": 64,
        "linear_num_key_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
    },
}
# 58.9 GiB on each of the 4 GPUs, of which nothing is known to be MTP's
FIELD_WEIGHTS = Sizes(int(4 * 58.9 * GIB), None)
FIELD = {
    "tensor-parallel-size": 4,
    "mem-fraction-static": 0.8,
    "max-running-requests": 64,
    "mamba-radix-cache-strategy": "extra_buffer",
}
GLM: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"],
    "num_hidden_layers": 46,
    "hidden_size": 4096,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}
MTP = {
    "--speculative-algorithm": "NEXTN",
    "--speculative-num-steps": 3,
    "--speculative-eagle-topk": 1,
    "--speculative-num-draft-tokens": 4,
}


def capacity(
    wanted: dict[str, Any],
    version: str = "0.5.23",
    config: dict[str, Any] | None = None,
    sizes: Sizes = FIELD_WEIGHTS,
    gpu: int | None = 97887,
    **environment: str,
) -> Capacity:
    values = {f"--{name}": () if value is True else (str(value),) for name, value in wanted.items()}
    server = Server(version_key(version), config or QWEN, values, sizes, gpu, environment)
    return predict(server, MTP)


def running(found: Capacity) -> tuple[int | None, int | None]:
    return found.without_mtp.max_running_requests, found.with_mtp.max_running_requests


@pytest.mark.parametrize(
    ("fraction", "dtype", "expected"),
    [
        (0.8, "float32", (45, 24)),  # the field: 24 ran of 64 requests
        (0.85, "float32", (57, 31)),
        (0.85, "bfloat16", (113, 62)),
        (0.9, "float32", (70, 38)),
        (0.9, "bfloat16", (138, 76)),
    ],
)
def test_the_field(fraction: float, dtype: str, expected: tuple[int, int]) -> None:
    wanted = {
        **FIELD,
        "mem-fraction-static": fraction,
        "mamba-ssm-dtype": dtype,
        "max-running-requests": 256,
    }
    found = capacity(wanted)
    assert running(found) == expected
    assert (found.with_mtp.limited_by, found.with_mtp.slots_per_request) == ("states", 5)
    assert found.with_mtp.state_mib == {"float32": 36.6, "bfloat16": 18.6}[dtype]


def test_the_field_is_capped_at_48_requests_with_mtp_alone() -> None:
    wanted = {k: v for k, v in FIELD.items() if k != "max-running-requests"}
    found = capacity(wanted)
    assert (found.without_mtp.requested, found.with_mtp.requested) == (None, 48)
    assert running(found) == (45, 24)
    assert any("48" in text for text in found.assumptions)
    assert any("MTP layer is not known" in text for text in found.assumptions)


@pytest.mark.parametrize(
    ("version", "wanted", "expected", "slots"),
    [
        # the states of all requested requests are taken off first, and 0.5.9 holds 4 for one
        ("0.5.9", {"max-running-requests": 48}, (45, 33), (5, 4)),
        ("0.5.12", {"max-running-requests": 48}, (45, 27), (5, 5)),
        ("0.5.13", {}, (45, 25), (5, 5)),
        ("0.5.17", {}, (45, 24), (5, 5)),
        # too many requests leave no memory at all up to 0.5.12
        ("0.5.12", {"max-running-requests": 128}, (45, None), (5, None)),
        ("0.5.23", {"disable-overlap-schedule": True}, (56, 27), (4, 4)),
        ("0.5.23", {"mamba-radix-cache-strategy": "extra_buffer_lazy"}, (56, 27), (4, 4)),
        ("0.5.23", {"mamba-radix-cache-strategy": "no_buffer"}, (64, 31), (3, 3)),
        ("0.5.23", {"mamba-radix-cache-strategy": "auto"}, (45, 24), (5, 5)),
        ("0.5.23", {"disable-radix-cache": True}, (64, 64), (1, 1)),
        ("0.5.23", {"max-mamba-cache-size": 100}, (20, 20), (5, 5)),
        ("0.5.23", {"mamba-full-memory-ratio": 9}, (64, 47), (5, 5)),
    ],
)
def test_releases_and_flags(
    version: str,
    wanted: dict[str, Any],
    expected: tuple[int | None, int | None],
    slots: tuple[int, int | None],
) -> None:
    old = version_key(version) < (0, 5, 14)
    field = {
        name.replace("radix-cache", "scheduler")
        if old and name.startswith("mamba-radix")
        else name: v
        for name, v in FIELD.items()
    }
    found = capacity({**field, **wanted}, version)
    assert running(found) == expected
    assert (found.without_mtp.slots_per_request, found.with_mtp.slots_per_request) == slots


def test_mtp_layer_is_counted_where_it_is_loaded_before() -> None:
    sizes = Sizes(int(4 * 58.9 * GIB), int(4 * 1.8 * GIB))
    new, old = capacity(FIELD, sizes=sizes), capacity(FIELD, "0.5.13", sizes=sizes)
    assert new.with_mtp.weights_mib == 60313
    assert new.without_mtp.weights_mib == old.with_mtp.weights_mib == 60313 - 1843
    assert new.with_mtp.kv_bytes_per_token == 13 * 1024
    assert new.without_mtp.kv_bytes_per_token == old.with_mtp.kv_bytes_per_token == 12 * 1024


def test_model_without_states() -> None:
    wanted = {"tensor-parallel-size": 4, "mem-fraction-static": 0.9, "page-size": 64}
    found = capacity(wanted, config=GLM, sizes=Sizes(200 * GIB, 10 * GIB))
    plain, fast = found.without_mtp, found.with_mtp
    assert plain.kv_bytes_per_token == 2 * 2 * 128 * 46 * 2
    assert (plain.state_slots, plain.slots_per_request, plain.unknown) == (None, None, ())
    assert plain.kv_tokens is not None
    assert plain.kv_tokens % 64 == 0
    assert (plain.max_running_requests, fast.max_running_requests) == (3384, 48)
    narrow = capacity({**wanted, "max-total-tokens": 80}, config=GLM)
    assert (narrow.without_mtp.max_running_requests, narrow.without_mtp.limited_by) == (
        32,
        "kv_cache",
    )
    half = capacity({**wanted, "kv-cache-dtype": "fp8_e4m3"}, config=GLM)
    assert half.without_mtp.kv_bytes_per_token == plain.kv_bytes_per_token // 2


def test_latent_attention_is_on_every_gpu() -> None:
    config = {
        **GLM,
        "architectures": ["DeepseekV3ForCausalLM"],
        "num_hidden_layers": 61,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
    }
    wanted = {"tensor-parallel-size": 8, "mem-fraction-static": 0.9}
    found = capacity(wanted, config=config, sizes=Sizes(400 * GIB, None))
    assert found.without_mtp.kv_bytes_per_token == 576 * 61 * 2


def test_pipeline() -> None:
    wanted = {**FIELD, "pipeline-parallel-size": 2, "tensor-parallel-size": 2}
    two = capacity(wanted).without_mtp
    assert (two.state_mib, two.kv_bytes_per_token) == (
        36.6,
        6 * 1024,
    )  # half the layers, states twice as wide
    uneven = capacity({**wanted, "pipeline-parallel-size": 5}).without_mtp
    assert "do not divide" in uneven.unknown[0]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"gpu": None}, "give gpu_memory_mib"),
        ({"sizes": Sizes(None, None)}, "size of the weights"),
        ({"wanted": {"tensor-parallel-size": 4}}, "without --mem-fraction-static"),
        ({"wanted": {**FIELD, "enable-dp-attention": True, "data-parallel-size": 4}}, "data-par"),
        ({"wanted": {**FIELD, "quantization": "fp8"}}, "--quantization"),
        ({"wanted": {**FIELD, "mem-fraction-static": 0.5}}, "leave nothing below"),
        ({"wanted": {**FIELD, "kv-cache-dtype": "fp4_e2m1"}}, "fp4_e2m1 is not known"),
        ({"config": {**QWEN, "architectures": ["Other"]}}, "its family is not known here"),
        (
            {"config": {"architectures": ["InklingForConditionalGeneration"]}},
            "this family's states",
        ),
        ({"config": {**GLM, "sliding_window": 128}}, "sliding windows"),
        ({"config": {**GLM, "index_head_dim": 128}}, "sparse attention"),
        ({"version": "0.5.8"}, "before SGLang 0.5.9"),
    ],
)
def test_unknown_is_no_number(changes: dict[str, Any], reason: str) -> None:
    found = capacity(**{"wanted": FIELD, **changes})
    for arm in (found.without_mtp, found.with_mtp):
        assert isinstance(arm, Arm)
        assert arm.max_running_requests is None
        assert len(arm.unknown) == 1
        assert reason in arm.unknown[0]


def test_smallest_gpu() -> None:
    def ask(said: str) -> int | None:
        def answer(_words: Sequence[str], _seconds: float) -> str:
            if not said:
                raise GpuHostError("nvidia-smi failed (127)")
            return said

        return smallest_gpu(answer)

    assert ask("97887\n81559\n") == 81559
    assert ask("") is None
    assert ask("[N/A]\n") is None
