"""What users read about a role is what the role does: defaults, argument specs and README agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

ROLES = Path(__file__).parent.parent.parent / "roles"
NAMES = sorted(path.name for path in ROLES.iterdir() if path.is_dir())


def _options(role: str) -> dict[str, dict[str, Any]]:
    specs = yaml.safe_load((ROLES / role / "meta/argument_specs.yml").read_text(encoding="utf-8"))
    options: dict[str, dict[str, Any]] = specs["argument_specs"]["main"]["options"]
    return options


@pytest.mark.parametrize("role", NAMES)
def test_defaults_are_those_of_the_argument_specs(role: str) -> None:
    options = _options(role)
    defaults = yaml.safe_load((ROLES / role / "defaults/main.yml").read_text(encoding="utf-8"))
    required = {name for name, option in options.items() if option.get("required")}
    assert defaults.keys() | required == options.keys()
    for name in defaults.keys() - required:
        if "{{" not in str(defaults[name]):  # taken from another variable: the text says from which
            assert defaults[name] == options[name].get("default"), name


@pytest.mark.parametrize("role", NAMES)
def test_variables_carry_the_name_of_their_role(role: str) -> None:
    assert all(name.startswith(f"{role}_") for name in _options(role))


def test_kernel_cmdline_rebuilds_before_it_may_fail() -> None:
    # a failed play runs no handlers, and the next one has no change that would notify them
    tasks = yaml.safe_load((ROLES / "kernel_cmdline/tasks/main.yml").read_text(encoding="utf-8"))
    does = [task.get("ansible.builtin.meta") or next(k for k in task if "." in k) for task in tasks]
    assert does.index("flush_handlers") < does.index("ansible.builtin.fail")
    assert "ansible.builtin.include_tasks" not in does[does.index("flush_handlers") :]


@pytest.mark.parametrize("role", NAMES)
def test_readme_names_each_variable_or_the_file_with_all(role: str) -> None:
    readme = (ROLES / role / "README.md").read_text(encoding="utf-8")
    if "(defaults/main.yml)" not in readme:
        assert [name for name in _options(role) if f"`{name}`" not in readme] == []
