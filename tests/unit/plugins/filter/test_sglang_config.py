"""The filter as Ansible finds it."""

from __future__ import annotations

import pytest
from ansible.errors import AnsibleFilterError
from ansible_collections.gpuhost.inference.plugins.filter.sglang_config import FilterModule


def test_config() -> None:
    to_config = FilterModule().filters()["sglang_config"]
    flags = {"--tp-size": 4, "port": 0, "enable-metrics": True, "seed": None, "x": False, "y": ""}
    assert to_config(flags) == {"tp-size": 4, "port": 0, "enable-metrics": True}
    with pytest.raises(AnsibleFilterError, match="mapping of flags"):
        to_config(["--tp-size"])
