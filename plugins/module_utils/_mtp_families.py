# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.

"""Models for which SGLang builds a draft model out of their own MTP layers, by release.

Read from the wheels 0.4.10 to 0.5.23: `_config_draft_model` in `srt/configs/model_config.py` for
the architectures, the loaders in `srt/models/*_nextn.py` and `*_mtp.py` for the tensors. The test
`test_mtp_families.py` compares the table with the wheels when they are at hand.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """Models that SGLang drives in the same way.

    Attributes:
        name: the family's name in results.
        architectures: names in `config.json` with the first release that maps them to a draft
            model.
        prefixes: how the names of the MTP tensors begin, one of them; `{layers}` is the number of
            hidden layers. Empty where it is not known here.
        hybrid: some layers keep a state (Mamba, gated delta net) instead of a key-value cache.
        extra_buffer: the first release whose prefix cache for such states takes the strategy
            `extra_buffer`, `None` when none does or there is no state. Read from
            `_handle_mamba_radix_cache` in `srt/server_args.py`, from 0.5.14 on from
            `_MAMBA_EXTRA_BUFFER_ARCHS` in `srt/arg_groups/overrides.py`.
        needs_count: the server reads `num_nextn_predict_layers`, which must be in `config.json`;
            other families have it set by SGLang.
        own_draft: the MTP layers are in a checkpoint of their own, which must be named with
            `--speculative-draft-model-path`.
    """

    name: str
    architectures: dict[str, str]
    prefixes: tuple[str, ...] = ()
    hybrid: bool = False
    extra_buffer: str | None = None
    needs_count: bool = False
    own_draft: bool = False


_NEXT_LAYER = ("model.layers.{layers}.",)

FAMILIES = (
    Family(
        "qwen3_5",
        {
            "Qwen3_5ForConditionalGeneration": "0.5.9",
            "Qwen3_5MoeForConditionalGeneration": "0.5.9",
            "InternS2PreviewForConditionalGeneration": "0.5.12",
            "Qwen3_5ForCausalLM": "0.5.17",
            "Qwen3_5MoeForCausalLM": "0.5.17",
        },
        ("mtp.",),
        hybrid=True,
        extra_buffer="0.5.9",
    ),
    Family(
        "intern_s2_mobius",
        {"InternS2MobiusForConditionalGeneration": "0.5.18"},
        ("mtp.",),
        hybrid=True,
    ),
    Family(
        "qwen3_next",
        {"Qwen3NextForCausalLM": "0.5.2"},
        ("mtp.",),
        hybrid=True,
        extra_buffer="0.5.7",
    ),
    Family(
        "qwen4_exp",
        {"Qwen4ExpForConditionalGeneration": "0.5.20"},
        ("mtp.",),
        hybrid=True,
        extra_buffer="0.5.20",
    ),
    Family("qwen3_moe", {"Qwen3MoeForCausalLM": "0.5.13"}, ("mtp.",)),
    Family(
        "deepseek",
        {"DeepseekV3ForCausalLM": "0.4.10", "DeepseekV32ForCausalLM": "0.5.12"},
        _NEXT_LAYER,
        needs_count=True,
    ),
    # A checkpoint may bundle a DSpark head instead; it takes the algorithm DSPARK, not NEXTN.
    Family("deepseek_v4", {"DeepseekV4ForCausalLM": "0.5.12"}, ("mtp.",)),
    Family(
        "glm4",
        {
            "Glm4MoeForCausalLM": "0.4.10",
            "Glm4MoeLiteForCausalLM": "0.5.8",
            "GlmMoeDsaForCausalLM": "0.5.9",
        },
        _NEXT_LAYER,
        needs_count=True,
    ),
    Family(
        "glm5_next",
        {"Glm5NextForConditionalGeneration": "0.5.20"},
        ("model.layers.{layers}.", "model.language_model.layers.{layers}."),
        hybrid=True,
        extra_buffer="0.5.20",
    ),
    Family("glm_ocr", {"GlmOcrForConditionalGeneration": "0.5.9"}, needs_count=True),
    Family(
        "longcat_flash",
        {"LongcatFlashForCausalLM": "0.5.2"},
        ("model.mtp.",),
        needs_count=True,  # the draft's number of layers is taken from it
    ),
    Family("mimo", {"MiMoForCausalLM": "0.4.10"}, ("model.mtp_layers.",)),
    Family(
        "mimo_v2",
        {"MiMoV2FlashForCausalLM": "0.5.7", "MiMoV2ForCausalLM": "0.5.11"},
        ("model.mtp.layers.",),
    ),
    Family(
        "step3",
        {"Step3p5ForCausalLM": "0.5.9", "Step3p7ForConditionalGeneration": "0.5.13"},
        _NEXT_LAYER,
        needs_count=True,
    ),
    Family(
        "inkling",
        {"InklingForConditionalGeneration": "0.5.16"},
        ("mtp.", "llm.mtp.", "model.mtp.", "model.llm.mtp."),
        hybrid=True,  # short convolutions
    ),
    Family(
        "gigachat3_5",
        {"GigaChat35ForCausalLM": "0.5.21"},
        _NEXT_LAYER,
        hybrid=True,
        needs_count=True,
    ),
    Family(
        "bailing",
        {"BailingMoeForCausalLM": "0.5.3", "BailingMoeV2ForCausalLM": "0.5.3"},
        _NEXT_LAYER,
        needs_count=True,
    ),
    Family(
        "bailing_linear",
        {"BailingMoeV2_5ForCausalLM": "0.5.9", "BailingMoeV3ForCausalLM": "0.5.19"},
        _NEXT_LAYER,
        hybrid=True,
        extra_buffer="0.5.13",
        needs_count=True,
    ),
    Family("ernie4_5", {"Ernie4_5_MoeForCausalLM": "0.5.1"}, ("model.mtp_",)),
    Family(
        "exaone_moe",
        {"ExaoneMoEForCausalLM": "0.5.9", "ExaoneMoeForCausalLM": "0.5.22"},
        ("mtp.",),
    ),
    Family(
        "nemotron_h",
        {
            "NemotronHForCausalLM": "0.5.8",
            "NemotronHPuzzleForCausalLM": "0.5.13",
            "NemotronH_Omni_Reasoning_V3": "0.5.20",
        },
        ("mtp.layers.", "language_model.mtp.layers."),
        hybrid=True,
        extra_buffer="0.5.13",
    ),
    Family("hunyuan_v3", {"HYV3ForCausalLM": "0.5.11"}, _NEXT_LAYER),
    Family("hunyuan_v4", {"HYV4ForCausalLM": "0.5.20"}, ("model.mtp_layers.0.",)),
    # Not there, but in `_handle_iquest_q1_mtp_draft` of srt/arg_groups/speculative_hook.py
    Family("iquest_q1", {"IQuestQ1ForCausalLM": "0.5.21"}, ("mtp.",), own_draft=True),
)


def family_of(architecture: str | None) -> Family | None:
    """Return the family of an architecture, `None` when it is none that is known to have MTP."""
    return next((family for family in FAMILIES if architecture in family.architectures), None)
