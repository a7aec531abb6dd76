"""The filter as Ansible finds it."""

from __future__ import annotations

import pytest
from ansible.errors import AnsibleFilterError
from ansible_collections.gpuhost.inference.plugins.filter.sglang_words import FilterModule


def test_words() -> None:
    filters = FilterModule().filters()
    assert filters["sglang_words"]({"tp-size": 4, "enable-metrics": True, "seed": None}) == [
        "--tp-size",
        "4",
        "--enable-metrics",
    ]
    with pytest.raises(AnsibleFilterError, match="mapping of flags"):
        filters["sglang_words"](["--tp-size"])
