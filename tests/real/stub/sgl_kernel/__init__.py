# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Stands in for SGLang's CUDA kernels: all names can be imported, none can be called."""

import importlib.abc
import importlib.machinery
import sys
import types

__version__ = "99.0"


class _Missing:
    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, item: str) -> "_Missing":
        if item.startswith("__"):
            raise AttributeError(item)
        return _Missing(f"{self._name}.{item}")

    def __call__(self, *_given: object, **_named: object) -> None:
        raise RuntimeError(f"{self._name} is a CUDA kernel, this server runs on the CPU")


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname, path, target=None):  # type: ignore[no-untyped-def]
        if fullname.startswith("sgl_kernel."):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        module.__getattr__ = _Missing(module.__name__).__getattr__  # type: ignore[method-assign]


__getattr__ = _Missing(__name__).__getattr__
sys.meta_path.append(_Submodules())
