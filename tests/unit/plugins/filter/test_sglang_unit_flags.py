from __future__ import annotations

import pytest
from ansible_collections.gpuhost.inference.plugins.filter.sglang_unit_flags import (
    sglang_unit_flags,
)

HEAD = "# /etc/systemd/system/chat.service\n[Service]\nExecStartPre=/bin/true --port 1\n"
OLD = HEAD + (
    "ExecStart=/opt/s/bin/python3 -m sglang.launch_server --model-path '/srv/a b' \\\n"
    '  --port=30001 --enable-metrics --served-model-name "50%% off"\n'
)


def test_flags_of_a_command_line() -> None:
    flags = {
        "model-path": "/srv/a b",
        "port": "30001",
        "enable-metrics": True,
        "served-model-name": "50% off",
    }
    assert sglang_unit_flags(OLD) == flags
    drop_in = "\n[Service]\nExecStart=\nExecStart=/usr/bin/sglang serve --port 30002\n"
    assert sglang_unit_flags(OLD + drop_in) == {"port": "30002"}


def test_flags_of_a_file() -> None:
    unit = HEAD + "ExecStart=python -m sglang.launch_server --config /etc/chat.yaml --port 7\n"
    files = {"/etc/chat.yaml": "host: 0.0.0.0\nport: 30003\n"}
    assert sglang_unit_flags(unit, files) == {"host": "0.0.0.0", "port": "7"}
    assert sglang_unit_flags(unit, {"/etc/other.yaml": "port: 1"}) is None
    assert sglang_unit_flags(unit, {"/etc/chat.yaml": "a: [api-key"}) is None


@pytest.mark.parametrize(
    "command",
    [
        "",
        "ExecStart=/opt/start.sh --port 30001",
        "ExecStart=/usr/bin/python3 -m vllm --port 30001",
        "ExecStart=python -m sglang.launch_server --port ${PORT}",
        "ExecStart=python -m sglang.launch_server --host '0.0.0.0",
    ],
)
def test_a_command_that_does_not_tell(command: str) -> None:
    assert sglang_unit_flags(HEAD + command + "\n") is None
