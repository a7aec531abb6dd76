# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.

"""Constants of an SGLang package, evaluated from its source without running any of it.

An expression that cannot be told from the source (a plug-in registry that code fills, a query of
the platform, a file this Python cannot parse) has the value `UNKNOWN`, which is never a guess.
"""

from __future__ import annotations

import ast
from typing import Any

from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader


class _Unknown:
    """The value of an expression that cannot be told from the source."""


UNKNOWN = _Unknown()


class Package:
    """The source files of the package, each parsed at most once."""

    def __init__(self, folder: str, host: Reader) -> None:
        self._folder = folder
        self._host = host
        self._modules: dict[str, Module | None] = {}

    def exists(self, path: str) -> bool:
        return self._host.exists(f"{self._folder}/{path}")

    def module(self, path: str) -> Module | None:
        """Return the file at a path, `None` when there is none or it cannot be parsed here."""
        if path not in self._modules:
            # as bytes, for a text has lost its blank lines, by which places are counted
            source = self._host.data(f"{self._folder}/{path}")
            try:
                tree = None if source is None else ast.parse(source)
            # source of a newer Python than this one, or no source: null characters are a ValueError
            except (SyntaxError, ValueError):
                tree = None
            self._modules[path] = None if tree is None else Module(tree, self)
        return self._modules[path]

    def imported(self, name: str) -> Module | None:
        """Return a module by its dotted name, `None` for one outside this package."""
        if not name.startswith("sglang."):
            return None
        path = name[len("sglang.") :].replace(".", "/")
        return self.module(f"{path}.py") or self.module(f"{path}/__init__.py")


class Module:
    """One source file. Names are evaluated only when an expression needs them."""

    def __init__(self, tree: ast.Module, package: Package) -> None:
        self._package = package
        self.classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
        self._functions = {
            node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)
        }
        self._imports = _imports(tree.body)
        self._starred = [
            node.module
            for node in tree.body
            if isinstance(node, ast.ImportFrom) and node.module and node.names[0].name == "*"
        ]
        self._assigned = _assignments(tree.body)
        self._attributes: dict[str, dict[str, ast.expr | None]] = {}

    def is_own(self, name: str) -> bool:
        """Tell whether a name stands for something of this package, rather than of another."""
        module = self._imports.get(name, ("sglang" if name in self.classes else "", ""))[0]
        return module.partition(".")[0] == "sglang"

    def value(self, node: ast.expr, local: dict[str, Any] | None = None, depth: int = 0) -> Any:
        """Evaluate an expression from literals, constants, imports and parameterless functions."""
        local = local or {}

        def inner(part: ast.expr) -> Any:
            return self.value(part, local, depth)

        result: Any = UNKNOWN
        if isinstance(node, ast.Name):
            result = local[node.id] if node.id in local else self._named(node.id, depth)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            result = self._class_attribute(node.value.id, node.attr, depth)
        elif isinstance(node, (ast.List, ast.Tuple, ast.Set)):
            result = self._items(node.elts, local, depth)
        elif isinstance(node, ast.Dict):
            # The values of a registry are classes, which stay unknown; its keys are names.
            keys = self._items([key for key in node.keys if key is not None], local, depth)
            if isinstance(keys, list) and len(keys) == len(node.values):
                result = dict(zip(keys, map(inner, node.values)))
        elif isinstance(node, ast.BinOp):
            result = _operate(node.op, inner(node.left), inner(node.right))
        elif isinstance(node, ast.Subscript):
            values, index = inner(node.value), inner(node.slice)
            if isinstance(values, list) and isinstance(index, int) and index < len(values):
                result = values[index]
        elif isinstance(node, ast.Call):
            result = self._called(node, local, depth)
            if result is UNKNOWN:
                result = _default_of_field(node)
        else:
            try:
                result = ast.literal_eval(node)
            except (ValueError, TypeError):
                result = UNKNOWN
        return result

    def locals_of(self, function: ast.FunctionDef, depth: int = 0) -> dict[str, Any]:
        """Return the values that a function's own statements give to names.

        A name that is assigned twice, or changed by a method call, is unknown.
        """
        imports = _imports(list(ast.walk(function)))
        local = {name: self._of_import(imports[name], depth) for name in imports}
        for name, node in _assignments(function.body).items():
            local[name] = UNKNOWN if node is None else self.value(node, local, depth)
        return local

    def _named(self, name: str, depth: int) -> Any:
        if depth > 8:  # a circle of imports
            return UNKNOWN
        node = self._assigned.get(name)
        if node is not None:
            return self.value(node, None, depth + 1)
        if name in self._imports and name not in self._assigned:
            return self._of_import(self._imports[name], depth + 1)
        if name not in self._assigned and name not in self.classes and len(self._starred) == 1:
            return self._of_import((self._starred[0], name), depth + 1)
        return UNKNOWN

    def _of_import(self, origin: tuple[str, str], depth: int) -> Any:
        module = self._package.imported(origin[0]) if depth <= 8 else None
        return module._named(origin[1], depth + 1) if module else UNKNOWN

    def _class_attribute(self, name: str, attribute: str, depth: int) -> Any:
        definition = self.classes.get(name)
        if definition is None:
            origin = self._imports.get(name)
            module = self._package.imported(origin[0]) if origin and depth <= 8 else None
            if origin is None or module is None:
                return UNKNOWN
            return module._class_attribute(origin[1], attribute, depth + 1)
        if name not in self._attributes:
            self._attributes[name] = _assignments(definition.body)
        attributes = self._attributes[name]
        node = attributes.get(attribute)
        near = {  # an attribute may be made of others, as ALL = (FULL, DISABLED)
            other: value.value
            for other, value in attributes.items()
            if isinstance(value, ast.Constant)
        }
        return UNKNOWN if node is None else self.value(node, near, depth + 1)

    def _items(self, nodes: list[ast.expr], local: dict[str, Any], depth: int) -> Any:
        items: list[Any] = []
        for node in nodes:
            starred = isinstance(node, ast.Starred)
            value = self.value(node.value if isinstance(node, ast.Starred) else node, local, depth)
            if value is UNKNOWN or (starred and not isinstance(value, list)):
                return UNKNOWN
            items += value if starred else [value]
        return items

    def _called(self, node: ast.Call, local: dict[str, Any], depth: int) -> Any:
        function = node.func
        if isinstance(function, ast.Attribute) and function.attr == "keys" and not node.args:
            registry = self.value(function.value, local, depth)
            return list(registry) if isinstance(registry, dict) else UNKNOWN
        if not isinstance(function, ast.Name):
            return UNKNOWN
        if function.id in ("list", "tuple", "set", "frozenset", "sorted") and len(node.args) == 1:
            values = self.value(node.args[0], local, depth)
            return list(values) if isinstance(values, (list, dict)) else UNKNOWN
        defined = self._functions.get(function.id)
        if defined is None or node.args or node.keywords or depth > 8:
            return UNKNOWN
        final = defined.body[-1]
        if not isinstance(final, ast.Return) or final.value is None:
            return UNKNOWN
        return self.value(final.value, self.locals_of(defined, depth + 1), depth + 1)


def _default_of_field(node: ast.Call) -> Any:
    """Return what `field(default_factory=list)` of dataclasses or of msgspec makes."""
    function = node.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    factories = [key.value for key in node.keywords if key.arg == "default_factory"]
    if name == "field" and factories and isinstance(factories[0], ast.Name):
        return {"list": [], "dict": {}}.get(factories[0].id, UNKNOWN)
    return UNKNOWN


def _imports(nodes: list[Any]) -> dict[str, tuple[str, str]]:
    """Return names with the module and the name they were imported from."""
    return {
        alias.asname or alias.name: (node.module, alias.name)
        for node in nodes
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0
        for alias in node.names
    }


def _assignments(body: list[ast.stmt]) -> dict[str, ast.expr | None]:
    """Return the names given a value in a body; `None` when it is not one plain assignment."""
    values: dict[str, ast.expr | None] = {}
    for statement in body:
        if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
            continue
        plain = isinstance(statement, (ast.Assign, ast.AnnAssign))
        for node in ast.walk(statement):
            targets: list[ast.expr] = []
            value: ast.expr | None = None
            if isinstance(node, ast.Assign):
                targets, value = node.targets, node.value
            elif isinstance(node, ast.AnnAssign) and node.value is not None:
                targets, value = [node.target], node.value
            elif isinstance(node, (ast.AugAssign, ast.For, ast.NamedExpr)):
                targets = [node.target]
            elif (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in ("append", "extend", "add", "update", "remove", "insert")
            ):
                targets = [node.func.value]
            for target in targets:
                if isinstance(target, (ast.Tuple, ast.List)):
                    values.update(dict.fromkeys(_names_of(target)))
                elif isinstance(target, ast.Name):
                    known = plain and target.id not in values
                    values[target.id] = value if known else None
    return values


def _names_of(target: ast.expr) -> list[str]:
    return [node.id for node in ast.walk(target) if isinstance(node, ast.Name)]


def _operate(operator: ast.operator, left: Any, right: Any) -> Any:
    """Join lists or texts, multiply numbers; anything else is unknown."""
    if isinstance(operator, ast.Add) and isinstance(left, list) and isinstance(right, list):
        return left + right
    if isinstance(operator, ast.Add) and isinstance(left, str) and isinstance(right, str):
        return left + right
    if isinstance(operator, ast.Mult) and isinstance(left, int) and isinstance(right, int):
        return left * right
    return UNKNOWN
