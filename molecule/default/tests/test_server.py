"""The model server in the container serves the declared model, with MTP at work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

testinfra_hosts = ["ansible://ct100"]


def test_server_is_ready_and_mtp_pays(run_module: Callable[..., dict[str, Any]]) -> None:
    server = run_module("sglang_info", model_id="qwen3.5-122b", acceptance_tokens=200)["server"]
    assert server["state"] == "ready", server["reason"]
    assert server["model_id"] == "qwen3.5-122b"
    assert server["speculation"]["accept_length"] > 1.4
