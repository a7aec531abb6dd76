"""Servers found by the GPUs their processes hold, and whether they go without P2P."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import trees
from ansible_collections.gpuhost.inference.plugins.module_utils._gpu import read_gpus
from ansible_collections.gpuhost.inference.plugins.module_utils._p2p_servers import (
    NCCL,
    REDUCE,
    Server,
    nccl_is_off,
    read_servers,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader

GROUP = "/lxc/104/ns/system.slice/chat.service"
LAUNCH = "python3 -m sglang.launch_server --config /etc/chat.yaml --api-key hunter2"


def process(
    pid: int,
    command: str,
    parent: int,
    *,
    cgroup: str = GROUP,
    env: str | None = "HOME=/",
    gpu: str = "",
) -> str:
    lines = [
        f"/proc/{pid}/cmdline = {command.replace(' ', chr(92) + 'x00')}\\x00",
        f"/proc/{pid}/status = Name:\\tpython3\\nPPid:\\t{parent}",
        f"/proc/{pid}/cgroup = 0::{cgroup}",
    ]
    lines += [f"/proc/{pid}/environ = {env.replace(' ', chr(92) + 'x00')}\\x00"] if env else []
    lines += [f"/proc/{pid}/fd/3{number} -> /dev/nvidia{number}" for number in gpu]
    return "\n".join(lines)


def ranks(env: str | None = None) -> str:
    """Return two workers as they rename themselves, writing over their environment."""
    return "\n".join(
        process(7002 + at, f"sglang::scheduler_TP{at}", 7001, env=env, gpu=str(at)) for at in (0, 1)
    )


@pytest.fixture
def servers(host_tree: Callable[[str], Path]) -> Callable[..., list[Server]]:
    def read(*more: str) -> list[Server]:
        root = trees.unpack("\n".join(more), host_tree("eight-gpus"))
        return read_servers(Reader(str(root)), read_gpus(Reader(str(root))))

    return read


def test_workers_belong_to_the_server_they_come_from(servers: Callable[..., list[Server]]) -> None:
    main = process(7001, LAUNCH, 1, env="NCCL_P2P_DISABLE=1 PATH=/bin")
    [server] = servers(main, ranks())
    assert server.pid == 7001
    assert server.addresses == ("0000:41:00.0", "0000:42:00.0")
    assert server.title == "process 7001 of chat.service of lxc 104"
    assert server.subject == "lxc 104"
    assert "hunter2" not in server.command
    assert server.nccl_p2p_disable is True
    assert server.disable_custom_all_reduce is None, "its file of flags is not there"
    assert server.switches(None) == REDUCE


def test_what_a_service_was_started_by_does_not_count(
    servers: Callable[..., list[Server]],
) -> None:
    init = process(6000, "/sbin/init", 1, cgroup="/init.scope", env="NCCL_P2P_DISABLE=1")
    [server] = servers(process(7001, LAUNCH, 6000, gpu="01"), init)
    assert server.nccl_p2p_disable is False


@pytest.mark.parametrize(
    ("content", "off"),
    [
        ("tp-size: 2\\ndisable-custom-all-reduce: true", True),
        ("disable_custom_all_reduce: True", True),
        ("disable-custom-all-reduce: false", False),
        ("# disable-custom-all-reduce: true", False),
        ("tp-size: 2", False),
    ],
)
def test_flags_in_the_file_of_the_container(
    servers: Callable[..., list[Server]], content: str, off: bool
) -> None:
    file = f"/proc/7001/root/etc/chat.yaml = {content}"
    [server] = servers(process(7001, LAUNCH, 1), ranks(), file)
    assert server.disable_custom_all_reduce is off
    assert server.nccl_p2p_disable is False


def test_a_flag_on_the_command_line(servers: Callable[..., list[Server]]) -> None:
    command = f"/usr/bin/python3 /usr/bin/vllm serve m {REDUCE}"
    [server] = servers(process(7001, command, 1, cgroup="/system.slice/v.service", gpu="03"))
    assert server.switches(True) == REDUCE
    assert server.switches(False) == NCCL
    assert (server.title, server.subject) == ("process 7001 of v.service", "/proc/7001")


def test_what_nothing_tells_is_unknown(servers: Callable[..., list[Server]]) -> None:
    [server] = servers(process(7002, "sglang::scheduler_TP0", 1, env=None, gpu="0"))
    assert server.switches(None) == f"{NCCL} and {REDUCE}"


def test_others_that_hold_gpus_are_no_servers(servers: Callable[..., list[Server]]) -> None:
    assert servers(process(7001, "/usr/bin/nv-hostengine -n", 1, gpu="01")) == []


@pytest.mark.parametrize(
    ("environment", "off"),
    [
        ({"NCCL_P2P_DISABLE": "1"}, True),
        ({"NCCL_P2P_DISABLE": "0", "NCCL_P2P_LEVEL": "LOC"}, False),
        ({"NCCL_P2P_LEVEL": "LOC"}, True),
        ({"NCCL_P2P_LEVEL": "SYS"}, False),
        ({"HOME": "/"}, False),
    ],
)
def test_switches_of_nccl(environment: dict[str, str], off: bool) -> None:
    assert nccl_is_off([None, environment]) is off
    assert nccl_is_off([None]) is None
