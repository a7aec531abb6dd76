"""Where a host's server is reached from elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
from ansible.errors import AnsibleFilterError
from ansible_collections.gpuhost.inference.plugins.filter.sglang_worker_url import sglang_worker_url

PCT = {"ansible_connection": "community.proxmox.proxmox_pct_remote", "ansible_host": "192.0.2.1"}


@pytest.mark.parametrize(
    ("variables", "url"),
    [
        ({}, "http://a:30000"),
        ({"ansible_host": "192.0.2.7", "sglang_port": 31000}, "http://192.0.2.7:31000"),
        ({"sglang_worker_url": "http://b:1", **PCT}, "http://b:1"),
    ],
)
def test_url(variables: dict[str, Any], url: str) -> None:
    assert sglang_worker_url({"inventory_hostname": "a", **variables}) == url


def test_address_of_the_proxmox_host_is_not_that_of_the_server() -> None:
    with pytest.raises(AnsibleFilterError, match="give it the variable sglang_worker_url"):
        sglang_worker_url({"inventory_hostname": "a", **PCT})
