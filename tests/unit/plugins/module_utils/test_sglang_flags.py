"""The flag reader on small sources in each of SGLang's three styles."""

from __future__ import annotations

from pathlib import Path

import pytest
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_flags import (
    Flag,
    find_package,
    package_version,
    read_flags,
)
from releases import package

CALLS = {
    "srt/server_args.py": """
        from typing import Literal, Optional
        from sglang.srt.parsers import Registry
        from sglang.srt.utils import TARGETS, ALL
        import elsewhere
        BACKENDS = ["triton", "fa3"]
        BACKENDS += elsewhere.more()
        DTYPES = ["auto", *["bf16", "fp8"]]
        KINDS = ["a"]
        if elsewhere.flag():
            KINDS = ["a", "b"]

        def add_choices(more):
            DTYPES.extend(more)

        class ServerArgs:
            model_path: str
            tp_size: int = 1
            port: int = 30000
            dtype: str = DTYPES[0]

            @staticmethod
            def add_cli_args(parser):
                names = list(Registry.Map.keys())
                doubtful = set(DTYPES)
                if elsewhere.flag():
                    doubtful.add("more")
                parser.add_argument("model", nargs="?")
                parser.add_argument("--model-path", "--model", type=str, required=True)
                parser.add_argument(
                    "--tensor-parallel-size", "--tp-size", type=int, default=ServerArgs.tp_size
                )
                parser.add_argument("--dtype", choices=DTYPES, default=ServerArgs.dtype)
                parser.add_argument("--backend", choices=BACKENDS)
                parser.add_argument("--doubtful", choices=doubtful)
                parser.add_argument("--kind", choices=KINDS)
                parser.add_argument("--parser", choices=["auto"] + names)
                parser.add_argument("--targets", nargs="*", choices=TARGETS + [ALL])
                parser.add_argument("--enable-metrics", action="store_true")
                parser.add_argument("--old", action=DeprecatedAliasStoreAction, new_flag="--dtype")
                parser.add_argument("--gone", action=DeprecatedAction, error_message="use --dtype")
                parser.add_argument("--odd", action=elsewhere.Strange)
        """,
    "srt/parsers.py": """
        class Registry:
            Map: dict = {"qwen3": A, "glm": B}
        """,
    "srt/utils/__init__.py": "TARGETS = ['q', 'k']\nALL = 'all'\n",
}
FIELDS = {
    "srt/server_args.py": """
        class Other:
            ignored: A[int, "not a field of the server"] = 1

        class ServerArgs:
            model_path: A[str, Arg(help="weights", aliases=["--model"])]
            tp_size: A[int, Arg(cli_name="--tensor-parallel-size", aliases=["--tp-size"])] = 1
            port: A[int, "The port" " to listen on."] = 30000
            context_length: A[Optional[int], f"text {1}"] = None
            skip: A[bool, Arg(help="")] = False
            mode: A[Literal["a", "b"], ""] = "a"
            level: A[Literal[1, 2] | None, ""] = None
            ids: A[Optional[List[int]], ""] = None
            packed: A[list[str], Arg(type_parser=json_list_type)] = None
            fused: A[bool, Arg(action=argparse.BooleanOptionalAction)] = True
            hidden: A[bool, Arg(no_cli=True)] = False
            internal: dict = None
            loras: A[list, Arg(action=LoRAPathAction, action_kwargs={"nargs": "*"})] = None

            @staticmethod
            def add_cli_args(parser):
                add_cli_args_from_dataclass(parser, ServerArgs)
                parser.add_argument("--config", type=str)
        """,
}
FILES = {
    "srt/server_args.py": """
        def _names():
            if loaded():
                return everything()
            from sglang.srt.names import NAMES
            return list(NAMES)

        class ServerArgs:
            @staticmethod
            def add_cli_args(parser):
                names = _names()
                parser.add_argument(
                    "--parser", choices=["auto"] + names, default=_declared_default("parser")
                )
        """,
    "srt/names.py": "NAMES = ['x', 'y']\n",
    "srt/arg_groups/choices.py": "KINDS = ['one', 'two']\n",
    "srt/arg_groups/fields/memory.py": """
        from sglang.srt.arg_groups.choices import KINDS

        class Memory(msgspec.Struct):
            parser: A[Optional[str], Arg(no_cli=True)] = "x"
            kind: A[Optional[str], Arg(choices=KINDS)] = None
            fraction: A[Optional[float], "share"] = None
            held: A[int, Derived(doc="not an input")] = 0
        """,
}


def flags(folder: Path, sources: dict[str, str]) -> dict[str, Flag]:
    return {flag.name: flag for flag in read_flags(package(folder, sources)).flags}


def test_calls(tmp_path: Path) -> None:
    found = flags(tmp_path, CALLS)
    assert sorted(found) == [
        "--backend", "--doubtful", "--dtype", "--enable-metrics", "--gone", "--kind",
        "--model-path", "--odd", "--old", "--parser", "--targets", "--tensor-parallel-size",
    ]  # fmt: skip
    size = found["--tensor-parallel-size"]
    assert (size.aliases, size.type, size.default) == (("--tp-size",), "int", 1)
    assert found["--model-path"].required
    assert found["--dtype"].choices == ("auto", "bf16", "fp8")
    assert found["--dtype"].default == "auto"
    assert found["--parser"].choices == ("auto", "qwen3", "glm")
    assert found["--targets"].choices == ("q", "k", "all")
    metrics = found["--enable-metrics"]
    assert (metrics.type, metrics.nargs, metrics.default) == ("bool", 0, False)
    assert found["--old"].replacement == "--dtype"
    assert found["--gone"].retired


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("--backend", "choices"),
        ("--doubtful", "choices"),
        ("--kind", "choices"),
        ("--odd", "nargs"),
    ],
)
def test_what_code_computes_is_not_guessed(tmp_path: Path, name: str, part: str) -> None:
    flag = flags(tmp_path, CALLS)[name]
    assert flag.choices is None
    assert flag.unchecked == (part,)


def test_fields(tmp_path: Path) -> None:
    found = flags(tmp_path, FIELDS)
    shape = {n: (f.aliases, f.type, f.action, f.nargs, f.choices) for n, f in found.items()}
    assert shape == {
        "--config": ((), "str", "store", None, None),
        "--context-length": ((), "int", "store", None, None),
        "--fused": (("--no-fused",), "bool", "boolean_optional", 0, None),
        "--ids": ((), "int", "store", "+", None),
        "--level": ((), "int", "store", None, (1, 2)),
        "--loras": ((), "str", "LoRAPathAction", "*", None),
        "--mode": ((), "str", "store", None, ("a", "b")),
        "--model-path": (("--model",), "str", "store", None, None),
        "--packed": ((), "json_list_type", "store", None, None),
        "--port": ((), "int", "store", None, None),
        "--skip": ((), "bool", "store_true", 0, None),
        "--tensor-parallel-size": (("--tp-size",), "int", "store", None, None),
    }
    assert [flag.name for flag in found.values() if flag.required] == ["--model-path"]
    assert found["--tensor-parallel-size"].dest == "tp_size"


def test_files_of_fields(tmp_path: Path) -> None:
    found = flags(tmp_path, FILES)
    assert sorted(found) == ["--fraction", "--kind", "--parser"]
    assert found["--kind"].choices == ("one", "two")
    assert found["--fraction"].type == "float"
    assert found["--parser"].choices == ("auto", "x", "y")
    assert found["--parser"].default == "x"


def test_version(tmp_path: Path) -> None:
    folder = package(tmp_path, FILES, version="0.5.10.post1")
    assert package_version(folder) == "0.5.10.post1"
    (tmp_path / "sglang-0.5.10.post1.dist-info" / "METADATA").unlink()
    assert package_version(folder) is None
    (tmp_path / "sglang" / "version.py").write_text('__version__ = "0.5.9"\n')
    assert package_version(folder) == "0.5.9"


def test_package_of_an_interpreter(tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.symlink_to("/usr/bin/env")  # as in a virtual environment: must not be resolved
    site = tmp_path / "lib" / "python3.12" / "site-packages"
    site.mkdir(parents=True)
    with pytest.raises(GpuHostError, match=f"{python} has no SGLang"):
        find_package(python=str(python))
    source = tmp_path / "checkout"
    package(source, FILES)
    (site / "__editable__.sglang.pth").write_text(f"import this\n{source}\n")
    assert find_package(python=str(python)) == f"{source}/sglang"
    package(site, FILES)
    with pytest.raises(GpuHostError, match=r"may import SGLang from .* or .*; name one"):
        find_package(python=str(python))


def test_package_of_a_folder(tmp_path: Path) -> None:
    folder = package(tmp_path, FILES)
    assert find_package(package=folder) == find_package(package=str(tmp_path)) == folder
    with pytest.raises(GpuHostError, match="holds no SGLang"):
        find_package(package=str(tmp_path / "nothing"))


@pytest.mark.parametrize(
    ("source", "message"),
    [("class ServerArgs: pass", "defines no flags"), ("def (", "cannot be parsed by this Python")],
)
def test_source_that_is_not_understood(tmp_path: Path, source: str, message: str) -> None:
    with pytest.raises(GpuHostError, match=message):
        read_flags(package(tmp_path, {"srt/server_args.py": source}))
