"""The flag reader on small sources in each of SGLang's three styles."""

from __future__ import annotations

import json
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


REGISTER = """
import elsewhere
from sglang.srt.base import Base, MORE
NAME = "--of-a-name"
class ServerArgs{base}:
    {field}
    def add_cli_args(parser):
        parser.add_argument("--port", type=int)
        add_cli_args_from_dataclass(parser, ServerArgs)
        {call}
"""


@pytest.mark.parametrize(
    ("parts", "names", "said"),
    [
        ({}, [], []),
        ({"call": "parser.add_argument(NAME)"}, ["--of-a-name"], []),
        ({"call": "parser.add_argument_group('a').add_argument('--b')"}, ["--b"], []),
        ({"call": "parser.add_argument('--' + MORE)"}, [], [":10: the name of an argument is"]),
        ({"call": "parser.add_argument(*MORE)"}, [], [":10: the name of an argument is computed"]),
        (
            {"call": "parser.add_argument('--b', elsewhere.name())"},
            ["--b"],
            [":10: the name of an argument is computed"],
        ),
        (
            {"call": "for NAME in MORE: parser.add_argument(NAME)"},
            [],
            [":10: the name of an argument is computed"],
        ),
        (
            {"call": "for x, NAME in MORE: parser.add_argument(NAME)"},
            [],
            [":10: the name of an argument is computed"],
        ),
        ({"call": "elsewhere.add(parser)"}, [], [":10: elsewhere.add may add flags, and is not"]),
        ({"call": "add_more(to=parser)"}, [], [":10: add_more may add flags, and is not followed"]),
        (
            {"call": "group = parser.add_argument_group('b'); add_more(group)"},
            [],
            [":10: add_more may add flags, and is not followed"],
        ),
        (
            {"call": "add = parser.add_argument; add('--b')"},
            [],
            [":10: add_argument is called by another name"],
        ),
        ({"base": "(Base)"}, [], [":5: the fields of Base are not read"]),
        ({"base": "(elsewhere.Struct)"}, [], []),
        ({"field": "b: typing.Annotated[int, 'help'] = 1"}, ["--b"], []),
        ({"field": "b: A[int, Arg('help')] = 1"}, ["--b"], []),
        ({"field": "b: A[int, Derived(doc='')] = 1"}, [], []),
        ({"field": "b: A[int, NS('parallel'), Arg()] = 1"}, ["--b"], []),
        ({"field": "b: A[int, elsewhere.meta()] = 1"}, [], [":6: whether b is a flag, and its"]),
        ({"field": "b: A[int, MORE] = 1"}, [], [":6: whether b is a flag, and its name, is"]),
        ({"field": "b: A[int, Arg(**MORE)] = 1"}, [], [":6: whether b is a flag, and its name"]),
        ({"field": "b: A[int, Arg('', MORE)] = 1"}, [], [":6: whether b is a flag, and its"]),
        ({"field": "b: A[int, Arg(no_cli=elsewhere.no())] = 1"}, [], [":6: whether b is a flag"]),
        ({"field": "b: A[int, Arg(cli_name='--' + MORE)] = 1"}, [], [":6: whether b is a flag"]),
        ({"field": "b: A[int, Arg(aliases=MORE)] = 1"}, ["--b"], [":6: other names of b are"]),
        ({"field": "if MORE: b: A[int, ''] = 1"}, [], [":6: the field depends on what is seen"]),
    ],
)
def test_what_may_define_more_flags(
    tmp_path: Path, parts: dict[str, str], names: list[str], said: list[str]
) -> None:
    source = REGISTER.format(**{"base": "", "field": "", "call": "", **parts})
    read = read_flags(package(tmp_path, {"srt/server_args.py": source}))
    assert [flag.name for flag in read.flags] == [*names, "--port"]
    assert read.complete is (said == [])
    assert len(read.passed_over) == len(said)
    for got, begin in zip(read.passed_over, said):
        assert got.startswith(f"srt/server_args.py{begin}")


@pytest.mark.parametrize("text", ["def (", "x = '\0'"])
def test_file_of_fields_that_cannot_be_parsed(tmp_path: Path, text: str) -> None:
    read = read_flags(package(tmp_path, {**FILES, "srt/arg_groups/fields/new.py": text}))
    assert read.passed_over == ("srt/arg_groups/fields/new.py: it cannot be parsed by this Python",)


def test_keywords_with_two_stars_are_not_known(tmp_path: Path) -> None:
    source = REGISTER.format(base="", field="", call="parser.add_argument('--b', **MORE)")
    found = flags(tmp_path, {"srt/server_args.py": source})
    assert found["--b"].unchecked == ("choices", "default", "nargs")


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


@pytest.mark.parametrize("text", ["0.0.0.dev0", "0.0.0", "0.1.dev1+g4f2a9c"])
def test_sources_without_a_tag_have_no_version(tmp_path: Path, text: str) -> None:
    """An unknown version is newer than all; one of 0.0.0 would be older."""
    folder = package(tmp_path, {**FILES, "_version.py": f"__version__ = version = '{text}'\n"})
    assert package_version(folder) == "0.5.23"
    (tmp_path / "sglang-0.5.23.dist-info" / "METADATA").write_text(f"Version: {text}\n")
    assert package_version(folder) is None


def test_two_versions_in_one_folder(tmp_path: Path) -> None:
    """As an upgrade leaves it that broke off."""
    folder = package(tmp_path, FILES, version="0.5.9")
    other = tmp_path / "sglang-0.5.23.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Version: 0.5.23\n")
    with pytest.raises(GpuHostError) as caught:
        package_version(folder)
    said = str(caught.value)
    assert "is of version 0.5.23 or 0.5.9, which cannot be told" in said
    assert f"{other} and {tmp_path}/sglang-0.5.9.dist-info are both there" in said
    with pytest.raises(GpuHostError, match="cannot be told"):
        read_flags(folder)
    (tmp_path / "sglang" / "version.py").write_text('__version__ = "0.5.9"\n')
    assert package_version(folder) == "0.5.9"


def interpreter(folder: Path) -> tuple[str, Path]:
    """Make a virtual environment's interpreter; return its path and its folder of libraries."""
    python = folder / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to("/usr/bin/env")  # as in a virtual environment: must not be resolved
    site = folder / "venv" / "lib" / "python3.12" / "site-packages"
    site.mkdir(parents=True)
    return str(python), site


def test_package_of_an_interpreter(tmp_path: Path) -> None:
    python, site = interpreter(tmp_path)
    with pytest.raises(GpuHostError, match=f"{python} has no SGLang"):
        find_package(python=python)
    source = tmp_path / "checkout"
    package(source, FILES)
    (site / "__editable__.sglang.pth").write_text(f"import this\n{source}\n")
    assert find_package(python=python) == f"{source}/sglang"
    package(site, FILES)
    with pytest.raises(GpuHostError, match=r"may import SGLang from .* or .*; name one"):
        find_package(python=python)


def test_package_of_an_interpreter_under_two_names(tmp_path: Path) -> None:
    """As conda links it."""
    python, site = interpreter(tmp_path)
    package(site, FILES)
    (site.parent.parent / "python3.1").symlink_to("python3.12")
    assert find_package(python=python) == f"{site}/sglang"


def test_path_that_begins_at_the_folder_of_its_file(tmp_path: Path) -> None:
    python, site = interpreter(tmp_path)
    package(site / "below", FILES)
    (site / "more.pth").write_text("# comment\nbelow \n")
    assert find_package(python=python) == f"{site}/below/sglang"


FINDER = """\
from __future__ import annotations
import sys
MAPPING: dict[str, str] = {{'other': '/nowhere', 'sglang': {folder!r}}}
NAMESPACES: dict[str, list[str]] = {{}}
def install(): pass
"""


def test_editable_install_by_a_finder(tmp_path: Path) -> None:
    """What setuptools makes of SGLang's own layout."""
    python, site = interpreter(tmp_path)
    source = package(tmp_path / "check out" / "python", FILES)
    finder = site / "__editable___sglang_0_5_23_finder.py"
    finder.write_text(FINDER.format(folder=source))
    with pytest.raises(GpuHostError, match="has no SGLang"):  # nothing imports it
        find_package(python=python)
    (site / "__editable__.sglang-0.5.23.pth").write_text(
        f"import {finder.stem}; {finder.stem}.install()"
    )
    assert find_package(python=python) == source
    finder.write_text("MAPPING = {'sglang': '/nowhere', **more}\nMAPPING = 5\ndef (")
    with pytest.raises(GpuHostError, match="has no SGLang"):
        find_package(python=python)
    finder.write_text("MAPPING = {'sglang': '/nowhere', **more}\nMAPPING = 5\n")
    with pytest.raises(GpuHostError, match="has no SGLang"):
        find_package(python=python)
    installed = package(site, FILES)  # Python looks into its folders first
    finder.write_text(FINDER.format(folder=source))
    assert find_package(python=python) == installed


@pytest.mark.parametrize("below", ["", "python", "src"])
def test_editable_install_by_its_metadata(tmp_path: Path, below: str) -> None:
    python, site = interpreter(tmp_path)
    tree = tmp_path / "check out"
    source = package(tree / below, FILES)
    metadata = site / "sglang-0.5.23.dist-info"
    metadata.mkdir()
    address = f"file://{str(tree).replace(' ', '%20')}"
    (metadata / "direct_url.json").write_text(
        json.dumps({"dir_info": {"editable": True}, "url": address})
    )
    assert find_package(python=python) == source


@pytest.mark.parametrize(
    "said", ["", "{", "5", "{}", '{"dir_info": 5}', '{"dir_info": {"editable": true}, "url": 5}']
)
def test_metadata_that_names_no_tree(tmp_path: Path, said: str) -> None:
    python, site = interpreter(tmp_path)
    metadata = site / "sglang-0.5.23.dist-info"
    metadata.mkdir()
    (metadata / "direct_url.json").write_text(said)
    with pytest.raises(GpuHostError, match="has no SGLang"):
        find_package(python=python)


def test_package_of_a_folder(tmp_path: Path) -> None:
    folder = package(tmp_path, FILES)
    assert find_package(package=folder) == find_package(package=str(tmp_path)) == folder
    with pytest.raises(GpuHostError, match="holds no SGLang"):
        find_package(package=str(tmp_path / "nothing"))
    for options in ({"package": "/opt/\0"}, {"python": "/opt/\0"}):
        with pytest.raises(GpuHostError, match="characters that no path has"):
            find_package(**options)


@pytest.mark.parametrize(
    ("source", "message"),
    [("class ServerArgs: pass", "defines no flags"), ("def (", "cannot be parsed by this Python")],
)
def test_source_that_is_not_understood(tmp_path: Path, source: str, message: str) -> None:
    with pytest.raises(GpuHostError, match=message):
        read_flags(package(tmp_path, {"srt/server_args.py": source}))
