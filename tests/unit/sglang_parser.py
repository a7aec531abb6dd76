"""Print the flags of SGLang's own parser as JSON: `python sglang_parser.py FOLDER`.

Run on its own: it imports `sglang` from the folder, with stubs for what that imports from elsewhere
(torch, transformers, triton, …), so that the parser of any release is built in about a second and
without a GPU. Of other packages only msgspec, packaging and typing_extensions must be there.
A module of SGLang that does not survive its stubs becomes a stub itself and is named in `failed`;
what of a flag is then not plain data is shown as `repr`, which no flag of ours equals.
"""

from __future__ import annotations

import abc
import argparse
import importlib.abc
import importlib.machinery
import importlib.metadata
import json
import sys
import types
from typing import Any

REAL = {*sys.stdlib_module_names, "msgspec", "packaging", "typing_extensions"}
# Their presence alone tells SGLang that it runs on such hardware.
ABSENT = {"habana_frameworks", "mlx", "torch_musa", "torch_npu", "torch_xla"}
failed: dict[str, str] = {}


class Anything(abc.ABCMeta):
    """The type of stubs: classes that can be called, inherited from, compared and calculated."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return stub(name)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if not cls.__dict__.get("_stub"):
            return super().__call__(*args, **kwargs)
        if len(args) == 1 and not kwargs and isinstance(args[0], (types.FunctionType, type)):
            return args[0]  # a decorator
        return stub(cls.__name__)

    def register(cls, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        return args[0] if args else cls

    def __bool__(cls) -> bool:
        return False

    def __len__(cls) -> int:
        return 0

    def __iter__(cls) -> Any:
        return iter(())

    def __enter__(cls) -> Any:
        return cls

    def __exit__(cls, *_error: object) -> None:
        return None

    def _same(cls, _other: object = None) -> Any:
        return cls

    def _no(cls, _other: object) -> bool:
        return False

    def _yes(cls, _other: object) -> bool:
        return True

    __getitem__ = __or__ = __ror__ = __add__ = __radd__ = __sub__ = __rsub__ = _same
    __mul__ = __rmul__ = __truediv__ = _same
    __lt__ = __gt__ = _no
    __le__ = __ge__ = _yes


def stub(name: str) -> Any:
    return Anything(name, (), {"_stub": True, "__init_subclass__": lambda _cls, **_kwargs: None})


class Stub(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None if self.__name__ == "torch.version" else stub(name)


class Lenient(importlib.machinery.SourceFileLoader):
    def exec_module(self, module: types.ModuleType) -> None:
        try:
            super().exec_module(module)
        except Exception as error:
            if self.name == "sglang.srt.server_args":
                raise
            failed[self.name] = repr(error)
            module.__class__ = Stub


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, _target: Any = None) -> Any:
        top = name.partition(".")[0]
        if top in REAL or top in ABSENT:
            return None
        if top != "sglang":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = Lenient(name, spec.loader.path)
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = Stub(spec.name)
        module.__path__, module.__version__ = [], "99.0"  # type: ignore[attr-defined]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def plain(value: Any) -> Any:
    try:
        json.dumps(value)
    except TypeError:
        return repr(value)
    return value


def main() -> None:
    sys.path.insert(0, sys.argv[1])
    sys.meta_path.insert(0, Finder())
    importlib.metadata.version = lambda _name: "99.0"
    from sglang.srt.server_args import ServerArgs  # noqa: PLC0415

    parser = argparse.ArgumentParser(add_help=False)
    ServerArgs.add_cli_args(parser)
    flags = [
        {
            "strings": list(action.option_strings),
            "dest": action.dest,
            "choices": None if action.choices is None else [plain(c) for c in action.choices],
            "default": plain(action.default),
            "nargs": action.nargs,
            "required": action.required,
            "type": getattr(action.type, "__name__", None),
            "action": type(action).__name__,
        }
        for action in parser._actions
        if action.option_strings
    ]
    sys.stdout.write(json.dumps({"flags": flags, "failed": failed}))


if __name__ == "__main__":
    main()
