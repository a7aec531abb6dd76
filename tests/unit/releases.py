"""Small releases of SGLang: flags of every kind that is told apart, and packages of own source."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent
from typing import Any

from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_flags import Flag, FlagSet


def flag(name: str, *aliases: str, **parts: Any) -> Flag:
    plain: dict[str, Any] = {
        "dest": name.lstrip("-").replace("-", "_"),
        "type": "str",
        "choices": None,
        "default": None,
        "action": "store",
        "nargs": None,
        "required": False,
        "replacement": None,
        "retired": False,
        "unchecked": (),
    }
    return Flag(name=name, aliases=aliases, **{**plain, **parts})


def release(version: str | None, *more: Flag) -> FlagSet:
    switch = {"type": "bool", "action": "store_true", "nargs": 0}
    flags = (
        flag("--attention-backend", choices=("triton", "flashinfer", "trtllm_mha")),
        flag("--computed", choices=None, unchecked=("choices",)),
        flag("--config"),
        flag("--cuda-graph-bs", nargs="+", type="int"),
        flag("--disable-radix-cache", **switch),
        flag("--enable-metrics", **switch),
        flag("--extra", type="json.loads"),
        flag("--max-running-requests", type="int"),
        flag("--mem-fraction-static", type="float"),
        flag("--model-path", "--model", required=True),
        flag("--odd", action="Strange", unchecked=("nargs",)),
        flag("--old", action="DeprecatedAliasStoreAction", replacement="--extra"),
        flag("--retired", action="DeprecatedAction", retired=True, nargs=0),
        flag("--served-model-name"),
        flag("--size", type="human_readable_int"),
        flag("--speculative-algorithm"),
        flag("--speculative-eagle-topk", type="int"),
        flag("--speculative-num-draft-tokens", type="int"),
        flag("--speculative-num-steps", type="int"),
        flag("--tensor-parallel-size", "--tp-size", dest="tp_size", type="int"),
    )
    return FlagSet(version, "/opt/sglang", (*flags, *more))


def package(folder: Path, sources: dict[str, str], version: str = "0.5.23") -> str:
    """Write a package with its metadata into a folder, and return where it is."""
    for name, text in sources.items():
        path = folder / "sglang" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text))
    metadata = folder / f"sglang-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.4\nName: sglang\nVersion: {version}\n")
    return str(folder / "sglang")
