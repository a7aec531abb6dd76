# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The command line: flags, configuration file, and what SGLang makes of them."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang.srt.server_args import ServerArgs
from sglang.standin.process import log

if TYPE_CHECKING:
    from sglang.standin.model import Model

SPECULATIVE_ALGORITHMS = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM", "DFLASH", "DSPARK")
# Fields of ServerArgs that no flag sets; `/server_info` and the log show them among the flags.
NOT_FLAGS: dict[str, Any] = {
    "_radix_eviction_policy_explicitly_set": False,
    "_speculative_draft_quantization_explicitly_set": False,
    "_swa_full_tokens_ratio_explicitly_set": False,
    "aux_hidden_state_capture": None,
    "custom_sigquit_handler": None,
    "enable_cp_tp_group_sharing": False,
    "grpc_worker_threads": 4,
    "speculative_boundary_reduction": "rs+rsv",
    "stat_loggers": None,
    "uses_mamba_radix_cache": False,
    "watermark_context_window": 4,
    "watermark_default_enabled": False,
    "watermark_enforce_all": False,
    "watermark_key": "",
    "watermark_key_b": "",
    "watermark_max_probability": 1.0,
    "watermark_mixing_probability": 0.5,
}
_TRUE, _FALSE = ("true", "yes", "on"), ("false", "no", "off")


def parse(argv: list[str]) -> dict[str, Any]:
    """Return the value of every flag; a flag that 0.5.23 does not have ends with status 2.

    `launch_command` is among them: the words as given, those of the file included, keys in clear.
    """
    parser = argparse.ArgumentParser(prog="sglang serve")
    ServerArgs.add_cli_args(parser)
    if "--config" in argv:
        at = argv.index("--config")
        argv = _as_flags(read_config(argv[at + 1]), parser) + argv[:at] + argv[at + 2 :]
    args = {**vars(parser.parse_args(argv)), **NOT_FLAGS}
    args.pop("config", None)
    args["launch_command"] = " ".join(argv)
    return args


def read_config(path: str) -> dict[str, Any]:
    """Read a flat YAML mapping: texts, numbers (kept as text), booleans and lists of them.

    Raises:
        ValueError: the file is not of that form.
    """
    if not path.endswith((".yaml", ".yml")):
        raise ValueError(f"Config file must be YAML format, got: {path}")
    entries: dict[str, Any] = {}
    key = ""
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        text = line.strip()
        if not text or text.startswith("#") or text == "---":
            continue
        if text.startswith("- ") and isinstance(entries.get(key), list):
            entries[key].append(_scalar(text[2:]))
        elif line[0].isspace() or ":" not in text:
            raise ValueError(f"{path}:{number}: this stand-in reads flat 'key: value' only")
        else:
            key, _, value = text.partition(":")
            entries[key] = _scalar(value) if value.strip() else []
    return entries


def _scalar(text: str) -> Any:
    text = text.strip()
    if text[:1] in ("'", '"'):
        return text[1 : text.index(text[0], 1)]
    text = text.partition(" #")[0].rstrip()
    if text.startswith("["):
        return [_scalar(item) for item in text.strip("[]").split(",") if item.strip()]
    if text.lower() in _TRUE + _FALSE:
        return text.lower() in _TRUE
    return text


def _as_flags(entries: dict[str, Any], parser: argparse.ArgumentParser) -> list[str]:
    switches = {
        option.lstrip("-").replace("-", "_")
        for action in parser._actions
        if isinstance(action, argparse._StoreTrueAction)
        for option in action.option_strings
    }
    flags: list[str] = []
    # A key is taken as it is written, so one with underscores ends as an unknown flag.
    for key, value in entries.items():
        if isinstance(value, bool):
            if key.replace("-", "_") not in switches:
                flags += [f"--{key}", str(value).lower()]
            elif value:
                flags.append(f"--{key}")
        elif isinstance(value, list):
            flags += [f"--{key}", *map(str, value)] if value else []
        else:
            flags += [f"--{key}", str(value)]
    return flags


def resolve(args: dict[str, Any], model: Model) -> None:
    """Fill in what SGLang decides by itself, in place; `/server_info` and the log show it.

    Raises:
        ValueError, TypeError, AssertionError: a combination that SGLang refuses, as it does.
    """
    args["tokenizer_path"] = args["tokenizer_path"] or args["model_path"]
    args["served_model_name"] = args["served_model_name"] or args["model_path"]
    args["context_length"] = args["context_length"] or model.context_length
    args["chunked_prefill_size"] = args["chunked_prefill_size"] or 8192
    args["page_size"] = args["page_size"] or 1
    args["attention_backend"] = args["attention_backend"] or "triton"
    if args["mem_fraction_static"] is None:
        reserve = 0.5 + 1.5 * args["chunked_prefill_size"] / 1024 + args["tp_size"] / 8 + 10
        args["mem_fraction_static"] = round(1 - reserve / model.GPU_GIB, 3)
    if args["speculative_algorithm"]:
        _resolve_speculation(args)
    strategy = args["mamba_radix_cache_strategy"]
    if model.hybrid:
        _resolve_states(args, model)
    elif strategy.startswith("extra_buffer"):
        raise ValueError(
            f"--mamba-radix-cache-strategy {strategy} needs mamba state, got {model.architecture}."
        )


def _resolve_speculation(args: dict[str, Any]) -> None:
    name = args["speculative_algorithm"].upper()
    if name not in SPECULATIVE_ALGORITHMS:
        raise ValueError(f"Unknown speculative algorithm name: {name}")
    if name not in ("NEXTN", "EAGLE"):
        raise ValueError(f"the lab's stand-in models NEXTN only, not {name}")
    args["speculative_algorithm"] = "EAGLE"
    numbers = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
    steps, topk, draft = (args[key] for key in numbers)
    if steps is None:
        assert topk is None  # SGLang's own answer has no text either
        assert draft is None
        steps, topk, draft = 3, 1, 4
    elif topk is None:
        raise TypeError("'>' not supported between instances of 'NoneType' and 'int'")
    if draft is None:
        draft = steps + 1
    if topk == 1 and draft != steps + 1:
        log("speculative_num_draft_tokens is adjusted to speculative_num_steps + 1 when topk == 1")
        draft = steps + 1
    args.update(zip(numbers, (steps, topk, draft)))
    if args["max_running_requests"] is None:
        args["max_running_requests"] = 48
        log(
            "Max running requests is reset to 48 for speculative decoding. You can override this "
            "by explicitly setting --max-running-requests."
        )


def _resolve_states(args: dict[str, Any], model: Model) -> None:
    args["mamba_ssm_dtype"] = args["mamba_ssm_dtype"] or model.state_dtype
    args["mamba_full_memory_ratio"] = args["mamba_full_memory_ratio"] or 0.9
    overlap = not args["disable_overlap_schedule"]
    strategy = args["mamba_radix_cache_strategy"]
    if strategy == "auto":
        strategy = "extra_buffer" if overlap or args["page_size"] > 1 else "no_buffer"
    args["mamba_radix_cache_strategy"] = strategy
    if args["disable_radix_cache"]:
        return
    if strategy == "no_buffer":
        # SGLang 0.5.23 refuses these by assertions.
        if overlap:
            raise AssertionError("no_buffer do not support overlap schedule.")
        if args["page_size"] != 1:
            raise AssertionError("no_buffer only supports page_size=1.")
    else:
        interval = args["mamba_track_interval"]
        if interval < (args["speculative_num_draft_tokens"] or 0) or interval % args["page_size"]:
            raise AssertionError(f"mamba_track_interval {interval} does not fit")


def dumps(value: Any) -> bytes:
    """Return compact JSON."""
    return json.dumps(value, separators=(",", ":")).encode()
