"""Servers found by the GPUs their processes hold, and whether they go without P2P."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import trees
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import UnreadableError
from ansible_collections.gpuhost.inference.plugins.module_utils._gpu import read_gpus
from ansible_collections.gpuhost.inference.plugins.module_utils._p2p_files import read_inside
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
        f"/proc/{pid}/status = Name:\\tpython3\\nPPid:\\t{parent}\\nUid:\\t100033\\t0",
        f"/proc/{pid}/uid_map = 0 100000 65536",
        f"/proc/{pid}/root/etc/passwd = root:x:0:0::/root:/bin/sh\\nchat:x:33:33:,:/srv/chat:",
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
        ({"NCCL_P2P_DISABLE": " 0x1"}, True),
        ({"NCCL_P2P_DISABLE": "01 "}, True),
        ({"NCCL_P2P_DISABLE": "true"}, False),
        ({"NCCL_P2P_DISABLE": "2"}, False),
        ({"NCCL_P2P_DISABLE": "-1"}, False),
        ({"NCCL_P2P_DISABLE": ""}, False),
        ({"NCCL_P2P_DISABLE": "0", "NCCL_P2P_LEVEL": "LOC"}, True),
        ({"NCCL_P2P_DISABLE": "1", "NCCL_P2P_LEVEL": "SYS"}, True),
        ({"NCCL_P2P_LEVEL": "LOC"}, True),
        ({"NCCL_P2P_LEVEL": "0"}, True),
        ({"NCCL_P2P_LEVEL": "SYS"}, False),
        ({"NCCL_P2P_LEVEL": "loc"}, False),
        ({"NCCL_P2P_LEVEL": "10"}, False),
        ({"HOME": "/"}, False),
    ],
)
def test_switches_of_nccl(environment: dict[str, str], off: bool) -> None:
    assert nccl_is_off([None, environment]) is off
    assert nccl_is_off([None]) is None


def test_the_nearest_process_counts_and_parents_for_what_it_does_not_set() -> None:
    on, off = {"NCCL_P2P_DISABLE": "0"}, {"NCCL_P2P_DISABLE": "1"}
    assert nccl_is_off([on, off]) is False
    assert nccl_is_off([{"HOME": "/"}, off]) is True


@pytest.mark.parametrize(
    ("env", "file", "text", "off"),
    [
        ("HOME=/", "/etc/nccl.conf", "NCCL_P2P_DISABLE=1", True),
        ("HOME=/", "/srv/chat/.nccl.conf", "NCCL_P2P_LEVEL=LOC", True),
        ("HOME=/", "/root/.nccl.conf", "NCCL_P2P_DISABLE=1", False),  # of another user
        ("HOME=/", "/etc/nccl.conf", "#NCCL_P2P_DISABLE=1", False),
        ("NCCL_P2P_DISABLE=0", "/etc/nccl.conf", "NCCL_P2P_DISABLE=1", False),
        ("NCCL_CONF_FILE=/x", "/etc/nccl.conf", "", None),
        ("NCCL_CONF_FILE=/x NCCL_P2P_DISABLE=1", "/etc/nccl.conf", "", True),
        ("HOME=/", "/etc/passwd", "root:x:0:0::/root:", None),  # by whom it runs is not known
    ],
)
def test_files_of_nccl(
    servers: Callable[..., list[Server]], env: str, file: str, text: str, off: bool | None
) -> None:
    main = process(7001, LAUNCH, 1, env=env)
    [server] = servers(main, ranks(), f"/proc/7001/root{file} = {text}")
    assert server.nccl_p2p_disable is off


def test_a_file_of_nccl_that_is_a_link_may_say_anything(
    servers: Callable[..., list[Server]],
) -> None:
    [server] = servers(process(7001, LAUNCH, 1), ranks(), "/proc/7001/root/etc/nccl.conf -> /x")
    assert server.nccl_p2p_disable is None


# ---- files of a container ---------------------------------------------------------------------

OFF = "disable-custom-all-reduce: true"


@pytest.fixture
def inside(tmp_path: Path) -> Path:
    """Return the root of process 7's container, with a file outside and a working folder in it."""
    root = tmp_path / "proc/7/root"
    (root / "srv").mkdir(parents=True)
    (tmp_path / "proc/7/cwd").symlink_to(root / "srv")
    (tmp_path / "outside").write_text("of the host")
    (root / "srv/own").write_text("of the container")
    return root


@pytest.mark.parametrize("path", ["/srv/own", "own", "./own", "//srv/./own"])
def test_a_plain_file_is_read(tmp_path: Path, inside: Path, path: str) -> None:
    assert inside.exists()
    assert read_inside(Reader(str(tmp_path)), 7, path) == b"of the container"
    assert read_inside(Reader(str(tmp_path)), 7, f"{path}-not") is None


def test_nothing_leads_out_and_nothing_acts(tmp_path: Path, inside: Path) -> None:
    (inside / "absolute").symlink_to(tmp_path / "outside")
    (inside / "relative").symlink_to("../../../outside")
    (inside / "folder").symlink_to(tmp_path)
    (inside / "within").symlink_to("srv")
    os.mkfifo(inside / "pipe")
    (inside / "big").write_bytes(bytes(1 << 17))
    names = ["absolute", "relative", "folder/outside", "../../../outside", "within/own", "srv"]
    for name in [*names, "pipe", "big", "srv/own/x", "x\0y", "x" * 300]:
        with pytest.raises(UnreadableError, match="of process 7"):
            read_inside(Reader(str(tmp_path)), 7, f"/{name}")
    with pytest.raises(UnreadableError, match="process 8 could not be looked into"):
        read_inside(Reader(str(tmp_path)), 8, "/srv/own")


def test_another_file_system_is_not_read(tmp_path: Path, inside: Path) -> None:
    """A file of procfs, as of sysfs, may act when it is read."""
    (tmp_path / "proc/7/cwd").unlink()
    (tmp_path / "proc/7/cwd").symlink_to("/proc/self")
    assert inside.exists()
    with pytest.raises(UnreadableError, match="no small file of its root"):
        read_inside(Reader(str(tmp_path)), 7, "status")


@pytest.mark.parametrize("config", ["/etc/chat.yaml", "chat.yaml"])
def test_a_link_in_a_container_is_not_read_from_the_host(
    servers: Callable[..., list[Server]], config: str
) -> None:
    launch = process(7001, LAUNCH.replace("/etc/chat.yaml", config), 1)
    made = [f"/proc/7001/{at}/chat.yaml -> /etc/hostname" for at in ("root/etc", "cwd")]
    [server] = servers(launch, ranks(), f"/etc/hostname = {OFF}", *made)
    assert server.disable_custom_all_reduce is None
