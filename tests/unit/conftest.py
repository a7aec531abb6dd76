"""Fixtures shared by all unit tests."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import trees
from ansible.module_utils import _internal, basic
from ansible.module_utils.common import warnings


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with roles and playbooks, the slowest, so that no core waits at the end."""
    items.sort(key=lambda item: len(item.path.parts))


@pytest.fixture
def host_tree(tmp_path: Path) -> Callable[[str], Path]:
    """Unpack a captured host by name and return the root to open a `Reader` at."""
    return lambda name: trees.host(name, tmp_path / name)


@pytest.fixture
def run_module(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., dict[str, Any]]:
    """Run a module's `main` in this process and return its JSON result."""

    def run(
        module: ModuleType, *, check: bool = False, diff: bool = False, **options: Any
    ) -> dict[str, Any]:
        arguments = {
            "ANSIBLE_MODULE_ARGS": {**options, "_ansible_check_mode": check, "_ansible_diff": diff}
        }
        monkeypatch.setattr(basic, "_ANSIBLE_ARGS", json.dumps(arguments).encode())
        monkeypatch.setattr(basic, "_ANSIBLE_PROFILE", "legacy", raising=False)
        for said in ("_global_warnings", "_global_deprecations"):  # those of an earlier test
            getattr(warnings, said).clear()
        # a module on a managed host has no controller to show its warnings
        monkeypatch.setattr(_internal, "is_controller", False, raising=False)
        monkeypatch.setattr("sys.stdin", io.StringIO())
        capsys.readouterr()
        with pytest.raises(SystemExit):
            module.main()
        result: dict[str, Any] = json.loads(capsys.readouterr().out)
        return result

    return run
