# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.

"""Which flags an SGLang package accepts, read from its source without running any of it.

SGLang defines its command line in three styles, all in `sglang/srt`:

- up to 0.5.13 as `parser.add_argument(...)` calls in `server_args.py`,
- 0.5.14 to 0.5.19 also as fields `name: A[type, Arg(...)] = default` of the class `ServerArgs`,
- from 0.5.20 as such fields in `arg_groups/fields/*.py`, a few calls remaining.

An expression that cannot be evaluated from the source (a plug-in registry, a platform query) is
never guessed: the part of the flag that it stands for is named in `Flag.unchecked`. Where that is
its name, or whole flags may come from code that is not followed (a loop, a helper that is given
the parser, a base class), the place is named in `FlagSet.passed_over`.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Iterator, Set
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_source import (
    UNKNOWN,
    Module,
    Package,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader

_LIVE = Reader()

# Which actions take no value, which do: argparse's and those of `arg_groups/argparse_actions.py`.
_PLAIN_ACTIONS = (
    "store_true",
    "store_false",
    "store_const",
    "boolean_optional",
    "DeprecatedAction",
    "DeprecatedStoreTrueAction",
    "DeprecatedStoreConstAction",
)
_SWITCHES = ("store_true", "DeprecatedStoreTrueAction")
_VALUE_ACTIONS = ("store", "append", "LoRAPathAction", "DeprecatedAliasStoreAction")
# The folder of an installed package's metadata, or the one beside the sources
_METADATA = re.compile(r"sglang(-[^-]+)?\.(dist|egg)-info")
# What setuptools-scm, or SGLang itself, makes of sources in which git knows no tag
_NO_TAGS = re.compile(r"0\.(0(\.0)?|1)(\.dev|\+|$)")
# What of argparse makes a part of a parser, to which flags are added too.
_PARTS = ("add_argument_group", "add_mutually_exclusive_group")
# Makes a flag of each field of a class; the fields are read themselves.
_OF_FIELDS = "add_cli_args_from_dataclass"
# Metadata of fields that are no flags: `srt/arg_groups/arg_utils.py`.
_NO_FLAG = ("Derived", "NS")


@dataclass(frozen=True)
class Flag:
    """One flag of the server's command line.

    Attributes:
        name: the canonical spelling, for example `--tensor-parallel-size`.
        aliases: other accepted spellings, `--no-…` forms included.
        dest: the name of the server's field, for example `tp_size`.
        type: `str`, `int`, `float`, `bool`, or the name of the parser function of the source.
        choices: allowed values, `None` when any value of the type is allowed or when the list
            could not be read (then `unchecked` holds `choices`).
        default: the value when the flag is not given, `None` also when it could not be read.
        action: argparse's action: `store`, `store_true`, `boolean_optional`, or a class name.
        nargs: as in argparse; `None` is exactly one value, `0` none.
        required: the server does not start without it.
        replacement: the spelling that a deprecated flag points to, `None` for a current flag.
        retired: the server refuses to start when it is given, and names the reason.
        unchecked: the parts that could not be read: `choices`, `default`, `nargs`, …
    """

    name: str
    aliases: tuple[str, ...]
    dest: str
    type: str
    choices: tuple[Any, ...] | None
    default: Any
    action: str
    nargs: int | str | None
    required: bool
    replacement: str | None
    retired: bool
    unchecked: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return plain lists and values for a module result."""
        return {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in asdict(self).items()
        }


@dataclass(frozen=True)
class FlagSet:
    """All flags of one package.

    Attributes:
        version: `None` when the package says none.
        package: its folder.
        flags: sorted by name.
        passed_over: places of the source that may define more flags, or more names of them, and
            could not be read, as `srt/server_args.py:12: …`, with why.
    """

    version: str | None
    package: str
    flags: tuple[Flag, ...]
    passed_over: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether a name that is not among them is no flag; otherwise nobody knows."""
        return not self.passed_over

    def spellings(self) -> dict[str, Flag]:
        """Return every accepted long spelling with its flag."""
        return {
            spelling: flag
            for flag in self.flags
            for spelling in (flag.name, *flag.aliases)
            if spelling.startswith("--")
        }


def find_package(
    python: str | None = None, package: str | None = None, host: Reader = _LIVE
) -> str:
    """Return the folder `sglang` by the interpreter that would import it, or by a folder.

    Args:
        python: path of an interpreter; its library folders are looked at, it is not run. The path
            is not resolved: in a virtual environment it is a link to the system's interpreter.
        package: the folder `sglang` itself, or the one that holds it.
        host: where to read.

    Raises:
        GpuHostError: there is no SGLang, or there are several and none can be preferred.
    """
    if not f"{python or ''}{package or ''}".isprintable():
        raise GpuHostError(f"{package or python!r} holds characters that no path has; give another")
    if package:
        for candidate in (package, f"{package.rstrip('/')}/sglang"):
            if _is_package(candidate, host):
                return candidate.rstrip("/")
        raise GpuHostError(
            f"{package} holds no SGLang: {package}/srt/server_args.py does not exist; "
            "give the folder of the package, as /opt/sglang/lib/python3.12/site-packages/sglang"
        )
    if not python:
        raise GpuHostError("give python (an interpreter's path) or package (a folder)")
    if not host.exists(python):
        raise GpuHostError(f"{python} does not exist; give the interpreter that runs SGLang")
    folders = _library_folders(python, host)
    added = [path for folder in folders for path in _added_paths(folder, host)]
    found = [
        package
        for package in dict.fromkeys([f"{path}/sglang" for path in (*folders, *added)])
        if _is_package(package, host)
    ]
    # Python asks a finder only for what is in none of these folders
    found = found or list(dict.fromkeys(_editable_packages(folders, host)))
    if not found:
        raise GpuHostError(
            f"{python} has no SGLang: nothing in {PurePosixPath(python).parent.parent}/lib; "
            "install it there, or give the folder with package"
        )
    if len(found) > 1:
        raise GpuHostError(
            f"{python} may import SGLang from {' or '.join(found)}; name one with package"
        )
    return found[0]


def _is_package(folder: str, host: Reader) -> bool:
    return host.exists(f"{folder}/srt/server_args.py")


def _library_folders(python: str, host: Reader) -> list[str]:
    """Return the folders of libraries of an interpreter."""
    prefix = str(PurePosixPath(python).parent.parent)
    folders: list[str] = []
    for base in [prefix, "/usr/local"] if prefix == "/usr" else [prefix]:
        for version in host.names(f"{base}/lib"):
            # conda links python3.1 to python3.12, which would be one folder under two names
            if (
                re.fullmatch(r"python3(\.\d+)?", version)
                and host.link(f"{base}/lib/{version}") is None
            ):
                folders += [f"{base}/lib/{version}/{kind}-packages" for kind in ("site", "dist")]
    return folders


def _pth_lines(folder: str, host: Reader) -> Iterator[str]:
    """Yield the lines of the `.pth` files of a folder of libraries; see `site` of Python."""
    for name in host.names(folder):
        if name.endswith(".pth"):
            yield from map(str.strip, (host.text(f"{folder}/{name}") or "").splitlines())


def _added_paths(folder: str, host: Reader) -> Iterator[str]:
    """Yield the folders that a folder of libraries adds; lines of code are not followed."""
    for line in _pth_lines(folder, host):
        if line and not re.match(r"#|import\s", line):
            yield str(PurePosixPath(folder, line))


def _editable_packages(folders: list[str], host: Reader) -> Iterator[str]:
    """Yield where an editable install (`pip install -e`) imports SGLang from.

    setuptools writes a module with a mapping `MAPPING` of packages to folders, which a `.pth` file
    imports. Other build tools have finders of their own: for these `direct_url.json` of the
    installed metadata (PEP 610) tells the source tree.
    """
    trees: list[str] = []
    mapped: list[str] = []
    for folder in folders:
        for line in _pth_lines(folder, host):
            finder = re.match(r"import (__editable__\w+)", line)
            text = host.data(f"{folder}/{finder[1]}.py") if finder else None
            mapped += _mapped(text) if text else []
        for name in host.names(folder):
            if _METADATA.fullmatch(name):
                trees += _editable_tree(host.text(f"{folder}/{name}/direct_url.json"))
    likely = [f"{tree}/{below}sglang" for tree in trees for below in ("", "python/", "src/")]
    mapped = [path for path in mapped if _is_package(path, host)]
    yield from mapped or [path for path in likely if _is_package(path, host)]


def _mapped(source: bytes) -> list[str]:
    """Return the folder of SGLang by the mapping in a finder of setuptools."""
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError):
        return []
    found = []
    for node in body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        mapping = getattr(node, "value", None)
        if getattr(target, "id", "") == "MAPPING" and isinstance(mapping, ast.Dict):
            for key, folder in zip(mapping.keys, mapping.values):
                if getattr(key, "value", "") == "sglang" and isinstance(folder, ast.Constant):
                    found.append(str(folder.value))
    return found


def _editable_tree(text: str | None) -> list[str]:
    """Return the source tree that a `direct_url.json` names for an editable install."""
    try:
        said = json.loads(text or "null")
    except ValueError:
        return []
    how = said.get("dir_info") if isinstance(said, dict) else None
    url = urlsplit(str(said.get("url"))) if isinstance(how, dict) and how.get("editable") else None
    return [unquote(url.path).rstrip("/")] if url and url.scheme == "file" else []


def package_version(package: str, host: Reader = _LIVE) -> str | None:
    """Return the version of the package in a folder, `None` when nothing tells it.

    Its own file comes first, as it lies beside the sources that are read: an upgrade that broke
    off leaves the metadata of both releases. Sources without tags of git tell no version.

    Raises:
        GpuHostError: there is the metadata of several versions, and the package does not say which.
    """
    for name in ("_version.py", "version.py"):
        text = host.text(f"{package}/{name}") or ""
        match = re.search(r"""^(?:__)?version(?:__)?\b[^'"\n]*['"](\d[^'"]*)['"]""", text, re.M)
        if match and not _NO_TAGS.match(match[1]):
            return match[1]
    site = str(PurePosixPath(package).parent)
    told: dict[str, str] = {}
    for name in host.names(site):
        if _METADATA.fullmatch(name):
            file = "METADATA" if name.endswith(".dist-info") else "PKG-INFO"
            match = re.search(
                r"^Version: (\S+)\s*$", host.text(f"{site}/{name}/{file}") or "", re.M
            )
            if match and not _NO_TAGS.match(match[1]):
                told[match[1]] = f"{site}/{name}"
    if len(told) > 1:
        raise GpuHostError(
            f"{package} is of version {' or '.join(told)}, which cannot be told: "
            f"{' and '.join(told.values())} are both there; install SGLang again with pip's "
            "--force-reinstall, or remove the folder of the version that it is not"
        )
    return next(iter(told), None)


def version_key(version: str | None) -> tuple[int, ...]:
    """Return the numbers of a version for comparison; `0.5.10.post1` is (0, 5, 10, 1).

    An unknown version is newer than all: rules about older releases must not hit it.
    """
    return tuple(map(int, re.findall(r"\d+", version))) if version else (10**6,)


def read_flags(package: str, host: Reader = _LIVE) -> FlagSet:
    """Read the flags of the package in the folder `package`.

    Raises:
        GpuHostError: the folder holds no SGLang, or its source is of a newer Python than the one
            that runs here, or no flag was found in it.
        UnreadableError: a source file could not be read.
    """
    sources = Package(package, host)
    path = "srt/server_args.py"
    module = sources.module(path)
    if module is None:
        raise GpuHostError(
            f"{package}/{path} "
            + ("cannot be parsed by this Python" if sources.exists(path) else "does not exist")
            + "; let ansible_python_interpreter be the one that runs SGLang"
        )
    classes = [module.classes["ServerArgs"]] if "ServerArgs" in module.classes else []
    sources_of_fields = [(path, module, classes), *_field_files(sources, package, host)]
    read = {definition.name for _path, _source, known in sources_of_fields for definition in known}
    found: dict[str, Flag] = {}
    passed: list[str] = []
    defaults: dict[str, Any] = {}

    def take(place: str, entries: Iterable[Flag | _Passed]) -> None:
        for entry in entries:
            if isinstance(entry, Flag):
                found.setdefault(entry.name, entry)
            else:
                passed.append(f"{place}:{entry.line}: {entry.why}")

    for place, source, definitions in sources_of_fields:
        if source is None:
            passed.append(f"{place}: it cannot be parsed by this Python")
            continue
        for definition in definitions:
            take(place, _base_classes(definition, source, read))
            take(place, _flags_of_fields(definition, source, defaults))
    take(path, _flags_of_calls(classes, module, defaults))
    if not found:
        raise GpuHostError(f"{package}/{path} defines no flags in a way that is known here")
    flags = tuple(found[name] for name in sorted(found))
    return FlagSet(package_version(package, host), package, flags, tuple(passed))


@dataclass(frozen=True)
class _Passed:
    """A place of a source that may define flags and could not be read, and why."""

    line: int
    why: str


def _field_files(
    sources: Package, package: str, host: Reader
) -> Iterator[tuple[str, Module | None, list[ast.ClassDef]]]:
    """Yield the files of 0.5.20 and later that hold the fields of `ServerArgs`, by name.

    A file that cannot be parsed is `None`.
    """
    folder = "srt/arg_groups/fields"
    for name in host.names(f"{package}/{folder}"):
        if name.endswith(".py"):
            module = sources.module(f"{folder}/{name}")
            yield f"{folder}/{name}", module, list(module.classes.values()) if module else []


def _base_classes(definition: ast.ClassDef, source: Module, read: Set[str]) -> Iterator[_Passed]:
    """Yield the base classes from SGLang itself of which the fields are not read."""
    for base in definition.bases:
        if isinstance(base, ast.Name) and source.is_own(base.id) and base.id not in read:
            yield _Passed(base.lineno, f"the fields of {base.id} are not read")


def _flags_of_fields(
    definition: ast.ClassDef, source: Module, defaults: dict[str, Any]
) -> Iterator[Flag | _Passed]:
    """Yield the flags of the fields of a class, whose defaults are added to `defaults`."""
    for node in definition.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            if node.value is not None:
                defaults[node.target.id] = source.value(node.value)
            yield from _flag_of_field(node, node.target.id, source)
        elif not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            for inner in ast.walk(node):
                if isinstance(inner, ast.AnnAssign) and _metadata(inner.annotation) is not None:
                    yield _Passed(inner.lineno, "the field depends on what is seen at run time")


def _flags_of_calls(
    classes: list[ast.ClassDef], module: Module, defaults: dict[str, Any]
) -> Iterator[Flag | _Passed]:
    """Yield the flags that `ServerArgs.add_cli_args` registers by `add_argument` calls."""
    for register in (node for definition in classes for node in definition.body):
        if not isinstance(register, ast.FunctionDef) or register.name != "add_cli_args":
            continue
        local = module.locals_of(register)
        parsers = _parsers(register)
        calls = [node for node in ast.walk(register) if isinstance(node, ast.Call)]
        called = {call.func for call in calls}
        for call in calls:
            if isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument":
                yield from _flag_of_call(call, module, local, defaults)
            elif getattr(call.func, "id", "") != _OF_FIELDS and parsers & {
                getattr(given, "id", "")
                for given in (*call.args, *(keyword.value for keyword in call.keywords))
            }:
                said = ast.unparse(call.func)
                yield _Passed(call.lineno, f"{said} may add flags, and is not followed")
        for node in ast.walk(register):
            if (
                isinstance(node, ast.Attribute)
                and node.attr == "add_argument"
                and node not in called
            ):
                yield _Passed(node.lineno, "add_argument is called by another name")


def _parsers(register: ast.FunctionDef) -> set[str]:
    """Return the names of the parser and of its groups in `add_cli_args`."""
    names = {argument.arg for argument in register.args.args} - {"self", "cls"}
    for node in ast.walk(register):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            function = node.value.func
            if isinstance(function, ast.Attribute) and function.attr in _PARTS:
                names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


def _metadata(annotation: ast.expr) -> list[ast.expr] | None:
    """Return type and metadata of `A[type, metadata]`, `None` for another annotation."""
    if isinstance(annotation, ast.Subscript) and isinstance(annotation.slice, ast.Tuple):
        word = annotation.value
        name = word.attr if isinstance(word, ast.Attribute) else getattr(word, "id", "")
        return annotation.slice.elts if name in ("A", "Annotated") else None
    return None


def _flag_of_field(node: ast.AnnAssign, name: str, source: Module) -> Iterator[Flag | _Passed]:
    """Yield the flag that a field `name: A[type, Arg(...)] = default` registers, if any.

    The rules are those of `add_cli_args_from_dataclass` in `srt/arg_groups/arg_utils.py`.
    """
    parts = _metadata(node.annotation)
    arguments = _arguments_of_field(parts[1:], source) if parts else None
    if parts is None or arguments is None:
        return
    hidden, spelling, aliases = (
        source.value(arguments.get(key, ast.Constant(None)))
        for key in ("no_cli", "cli_name", "aliases")
    )
    if "" in arguments or UNKNOWN in (hidden, spelling):
        yield _Passed(node.lineno, f"whether {name} is a flag, and its name, is computed")
        return
    if hidden is True:
        return
    if aliases is UNKNOWN:
        yield _Passed(node.lineno, f"other names of {name} are computed")
    names = [spelling if isinstance(spelling, str) else "--" + name.replace("_", "-")]
    names += aliases if isinstance(aliases, list) else []
    kind, literals, is_list = _inner_type(parts[0], source)
    parser = arguments.get("type_parser")
    keywords = dict(arguments)
    if "action" not in keywords:
        if literals is not None:
            keywords.setdefault("choices", literals)
        elif is_list and parser is None:
            keywords.setdefault("nargs", ast.Constant("+"))
        elif kind == "bool":
            keywords["action"] = ast.Constant("store_true")
    keywords["type"] = parser if parser is not None else ast.Name(kind)
    if node.value is not None:
        keywords.setdefault("default", node.value)
    elif "required" not in keywords and "action" not in keywords:
        keywords["required"] = ast.Constant(True)
    yield _flag(names, name, keywords, _Scope(source, {}, {}))


def _arguments_of_field(metadata: list[ast.expr], source: Module) -> dict[str, ast.expr] | None:
    """Return the keywords of `Arg(...)`, none for a bare help text, `None` for no flag at all.

    What is not understood of them stands under the name "".
    """
    for node in metadata:
        if isinstance(node, ast.Call):
            function = node.func
            name = function.attr if isinstance(function, ast.Attribute) else ast.unparse(function)
            if name == "Arg":
                return _arguments_of(node)
            if name not in _NO_FLAG:
                return {"": node}
        elif isinstance(node, ast.Name) and not isinstance(source.value(node), str):
            return {"": node}
        elif isinstance(node, (ast.Constant, ast.JoinedStr, ast.BinOp, ast.Name)):
            return {}
    return None


def _arguments_of(call: ast.Call) -> dict[str, ast.expr]:
    """Return the keywords of `Arg(...)`; only the help text may come without its name."""
    keywords = {key.arg or "": key.value for key in call.keywords}
    for argument in call.args:
        if isinstance(argument, ast.Starred) or argument is not call.args[0]:
            keywords[""] = argument
    extra = keywords.pop("action_kwargs", None)
    if isinstance(extra, ast.Dict):
        for key, value in zip(extra.keys, extra.values):
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                keywords.setdefault(key.value, value)
    return keywords


def _inner_type(node: ast.expr, source: Module) -> tuple[str, ast.List | None, bool]:
    """Return the type word, the values of a `Literal`, and whether it is a list of that type."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):  # X | None
        sides = [side for side in (node.left, node.right) if not _is_none(side)]
        return _inner_type(sides[0], source) if len(sides) == 1 else ("str", None, False)
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
        outer = node.value.id
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if outer == "Union":
            parts = [part for part in parts if not _is_none(part)]
        if outer in ("Optional", "Union") and len(parts) == 1:
            return _inner_type(parts[0], source)
        if outer == "Literal":
            first = source.value(parts[0])
            kind = type(first).__name__ if isinstance(first, (int, float, str)) else "str"
            return kind, ast.List(elts=parts, ctx=ast.Load()), False
        if outer in ("List", "list"):
            return _inner_type(parts[0], source)[0], None, True
    if isinstance(node, ast.Name) and node.id in ("int", "float", "bool"):
        return node.id, None, False
    return "str", None, False


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _flag_of_call(
    call: ast.Call, source: Module, local: dict[str, Any], defaults: dict[str, Any]
) -> Iterator[Flag | _Passed]:
    """Yield the flag that one `parser.add_argument(...)` call registers; positionals are none."""
    words = [source.value(argument, local) for argument in call.args]
    if UNKNOWN in words:  # as is one with a star
        yield _Passed(call.lineno, "the name of an argument is computed")
    names = [word for word in words if isinstance(word, str) and word.startswith("-")]
    if not names:
        return
    keywords = {key.arg or "": key.value for key in call.keywords}
    dest = source.value(keywords["dest"], local) if "dest" in keywords else None
    if not isinstance(dest, str):
        dest = (
            next((n for n in names if n.startswith("--")), names[0]).lstrip("-").replace("-", "_")
        )
    yield _flag(names, dest, keywords, _Scope(source, local, defaults))


@dataclass(frozen=True)
class _Scope:
    """What an argument of a flag may refer to."""

    source: Module
    local: dict[str, Any]
    defaults: dict[str, Any]

    def value(self, node: ast.expr) -> Any:
        value = self.source.value(node, self.local)
        return _field_default(node, self.defaults) if value is UNKNOWN else value


def _flag(names: list[str], dest: str, keywords: dict[str, ast.expr], scope: _Scope) -> Flag:
    unchecked: list[str] = []

    def known(key: str, otherwise: Any = None) -> Any:
        if key not in keywords:
            return otherwise
        value = scope.value(keywords[key])
        if value is UNKNOWN or (isinstance(value, dict) and UNKNOWN in value.values()):
            unchecked.append(key)
            return otherwise
        return value

    action = _action(keywords.get("action"))
    if action == "boolean_optional":
        names = names + ["--no-" + name[2:] for name in names if name.startswith("--")]
    no_value = action in _PLAIN_ACTIONS
    nargs = known("nargs", 0 if no_value else None)
    boolean = no_value and nargs == 0
    choices = known("choices")
    kind = "bool" if boolean else _type_word(keywords.get("type"))
    if not no_value and action not in _VALUE_ACTIONS:
        unchecked.append("nargs")
    if "" in keywords:  # two stars: any of these may be in there
        unchecked += [key for key in ("choices", "default", "nargs") if key not in keywords]
    replacement = known("new_flag")
    return Flag(
        name=names[0],
        aliases=tuple(names[1:]),
        dest=dest,
        type=kind,
        choices=tuple(choices) if isinstance(choices, list) else None,
        default=known("default", False if action in _SWITCHES else None),
        action=action,
        nargs=nargs,
        required=known("required", False) is True,
        replacement=replacement if isinstance(replacement, str) else None,
        retired="error_message" in keywords,
        unchecked=tuple(sorted(set(unchecked))),
    )


def _field_default(node: ast.expr, defaults: dict[str, Any]) -> Any:
    """Return the default of a field that a call refers to by its class or by name."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return defaults.get(node.attr, UNKNOWN) if node.value.id == "ServerArgs" else UNKNOWN
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "_declared_default"
        and node.args
        and isinstance(node.args[0], ast.Constant)
    ):
        return defaults.get(str(node.args[0].value), UNKNOWN)
    return UNKNOWN


def _action(node: ast.expr | None) -> str:
    if node is None:
        return "store"
    if isinstance(node, ast.Constant):
        return str(node.value)
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "unknown")
    return "boolean_optional" if name == "BooleanOptionalAction" else str(name)


def _type_word(node: ast.expr | None) -> str:
    if node is None:
        return "str"
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return f"{node.value.id}.{node.attr}"
    return "unknown"
