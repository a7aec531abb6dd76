"""The page of states is up to date, and has each state that can be concluded."""

from __future__ import annotations

import re
from pathlib import Path

import states_page
from ansible_collections.gpuhost.inference.plugins.module_utils import _sglang


def test_the_page_is_what_the_module_says() -> None:
    written = states_page.PAGE.read_text(encoding="utf-8")
    assert written == states_page.page(), f"write it anew: {states_page.__doc__}"


def test_every_state_there_is_has_a_row() -> None:
    source = Path(_sglang.__file__).read_text(encoding="utf-8")
    concluded = set(re.findall(r'(?:Verdict|_in_time)\(\s*"(\w+)"', source))
    assert set(states_page.ROWS) == set(states_page.documented()) == concluded
