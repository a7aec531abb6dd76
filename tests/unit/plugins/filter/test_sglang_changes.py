"""What changes between two files of settings, and where a server is reached."""

from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.gpuhost.inference.plugins.filter.sglang_changes import sglang_changes
from ansible_collections.gpuhost.inference.plugins.filter.sglang_url import sglang_url

OLD = "# made by hand\nport: 30000\napi-key: oldkey77\nlog-level: info\nenable-metrics: true\n"
NEW = 'port: 30001\napi-key: "newkey88"\nenable-metrics: true\ntp-size: 4\n'


def test_settings_that_differ_are_told_and_keys_are_not() -> None:
    lines = sglang_changes(NEW, OLD)
    assert lines == [
        "api-key: changed (its value is not shown)",
        "log-level: info -> (gone)",
        "port: 30000 -> 30001",
        "tp-size: 4 (new)",
    ]
    assert sglang_changes("port: 30000\n", "") == ["port: 30000 (new)"]
    gone = sglang_changes("port: 30000\n", "port: 30000\nadmin-api-key: oldkey77\n")
    assert gone == ["admin-api-key: gone (its value is not shown)"]
    assert sglang_changes(NEW, NEW) == []


def test_an_environment_is_told_by_its_names() -> None:
    old, new = 'HF_TOKEN="hf_77"\nNAME="a: b"\n', 'HF_TOKEN="hf_88"\nNAME="a: b"\n'
    said = sglang_changes(new, old, hidden=True)
    assert said == ["HF_TOKEN: changed (its value is not shown)"]


def test_a_file_that_is_not_understood_has_no_settings() -> None:
    assert sglang_changes("port: 30000\n", "api-key: [oldkey77\n") == ["port: 30000 (new)"]


@pytest.mark.parametrize(
    ("flags", "url"),
    [
        ({}, "http://127.0.0.1:30000"),
        ({"host": "0.0.0.0", "port": "31000"}, "http://127.0.0.1:31000"),
        ({"host": "::", "port": 31000}, "http://[::1]:31000"),
        ({"host": "fd00::7", "ssl-certfile": "/etc/c.pem"}, "https://[fd00::7]:30000"),
    ],
)
def test_where_a_server_is_reached(flags: dict[str, Any], url: str) -> None:
    assert sglang_url(flags) == url
