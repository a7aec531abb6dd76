"""What changes between two files of settings, and where a server is reached."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ansible.errors import AnsibleFilterError
from ansible_collections.gpuhost.inference.plugins.filter.sglang_changes import sglang_changes
from ansible_collections.gpuhost.inference.plugins.filter.sglang_url import sglang_url
from ansible_collections.gpuhost.inference.plugins.filter.sglang_worker_url import (
    sglang_worker_url,
)
from plays import run_playbook

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


@pytest.mark.parametrize(
    ("variables", "url"),
    [
        ({"inventory_hostname": "g1"}, "http://g1:30000"),
        ({"inventory_hostname": "g1", "ansible_host": "fd00::7"}, "http://[fd00::7]:30000"),
        (
            {"inventory_hostname": "g1", "sglang_port": 31000, "sglang_ssl_certfile": "/etc/c.pem"},
            "https://g1:31000",
        ),
    ],
)
def test_where_a_worker_is_reached(variables: dict[str, Any], url: str) -> None:
    assert sglang_worker_url(variables) == url


def test_no_variables_of_a_host() -> None:
    with pytest.raises(AnsibleFilterError, match="variables of a host"):
        sglang_worker_url({"host": "g1"})


def test_workers_of_a_group(tmp_path: Path) -> None:
    """Ansible gives `hostvars` and their templates in types of its own."""
    inventory = tmp_path / "hosts.yml"
    inventory.write_text(
        "inference_guests:\n  hosts:\n    g1: {ansible_host: 10.0.0.5}\n"
        "    g2: {base: 31000, sglang_port: '{{ base + 1 }}'}\n"
    )
    play = tmp_path / "play.yml"
    play.write_text(
        "- hosts: localhost\n  gather_facts: false\n  tasks:\n    - debug:\n"
        "        msg: \"{{ groups.inference_guests | map('extract', hostvars)"
        " | map('gpuhost.inference.sglang_worker_url') | join(' and ') }}\"\n"
    )
    said = run_playbook(tmp_path, play, str(inventory))
    assert "http://10.0.0.5:30000 and http://g2:31001" in said, said
