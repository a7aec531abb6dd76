"""The role sglang: the program it has run before each start, and the files it writes."""

from __future__ import annotations

import ast
import os
import pwd
import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from trees import unpack

ROOT = Path(__file__).parent.parent.parent
ROLE = ROOT / "roles/sglang"
UTILS = ROOT / "plugins/module_utils"
PACKAGE = "ansible_collections.gpuhost.inference.plugins.module_utils"
VARS = yaml.safe_load((ROLE / "vars/main.yml").read_text(encoding="utf-8"))
CONFIG = "/etc/chat.yaml"
FLAGS = "model-path: /srv/m\nport: {port}\ntensor-parallel-size: 2\napi-key: do-not-show\n"
USER = pwd.getpwuid(os.geteuid()).pw_name


@pytest.fixture(scope="module")
def program() -> ModuleType:
    """Load the program, which has no name that could be imported."""
    loader = SourceFileLoader("gpuhost_sglang_start", str(ROLE / "files/gpuhost-sglang-start"))
    module = ModuleType(loader.name)
    module.__file__ = loader.path
    exec(compile(loader.get_data(loader.path), loader.path, "exec"), module.__dict__)
    return module


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        number: int = server.getsockname()[1]
    return number


def process(pid: int, cgroup: str, *nodes: str) -> str:
    at = f"/proc/{pid}"
    lines = [f"{at}/comm = python3", f"{at}/cmdline = python3\\0train.py", f"{at}/maps = "]
    lines += [f"{at}/cgroup = 0::{cgroup}"]
    lines += [f"{at}/fd/{number} -> {node}" for number, node in enumerate(nodes, 3)]
    return "\n".join(lines)


HELD = "process 812 (python3 train.py of session-4.scope) holds /dev/nvidia1"
STRANGER = process(812, "/user.slice/session-4.scope", "/dev/nvidia1", "/dev/nvidia-uvm")


@pytest.fixture
def root(tmp_path: Path, port: int) -> Path:
    """Make a machine with three GPUs, the second on the first bus, and the lab's SGLang."""
    nodes = [f"/dev/nvidia{number} c 195:{number}" for number in range(3)]
    nodes += ["/dev/nvidiactl c 195:255", "/dev/nvidia-uvm c 511:0"]
    for number, bus in enumerate(("43", "21", "c1")):
        text = f"GPU UUID:  GPU-00{number}a\\nDevice Minor:  {number}"
        nodes.append(f"/proc/driver/nvidia/gpus/0000:{bus}:00.0/information = {text}")
    root = unpack("\n".join([*nodes, process(400, "/system.slice/ssh.service")]), tmp_path / "host")
    (root / "etc").mkdir()
    (root / CONFIG[1:]).write_text(FLAGS.format(port=port))
    site = root / "opt/sglang/lib/python3.12/site-packages"
    site.mkdir(parents=True)
    (root / "opt/sglang/bin").mkdir()
    (root / "opt/sglang/bin/python").touch()
    shutil.copytree(ROOT / "lab/sglang/sglang", site / "sglang")
    shutil.copytree(ROOT / "lab/sglang/sglang-0.5.23.dist-info", site / "sglang-0.5.23.dist-info")
    subprocess.run([ROOT / "lab/sglang/make_model", root / "srv/m"], check=True)
    return root


Start = Callable[..., tuple[int, str]]


@pytest.fixture
def start(program: ModuleType, root: Path, capsys: pytest.CaptureFixture[str]) -> Start:
    """Run the program; return its exit status and what it said."""
    words = ["/opt/sglang/bin/python", "-m", "sglang.launch_server", "--config", CONFIG]

    def call(
        *options: str,
        environment: dict[str, str] | None = None,
        memory: str | None = None,
        sleep: Callable[[float], None] = lambda _seconds: None,
        more: Sequence[str] = (),
        modprobe: Callable[[Sequence[str]], None] | None = None,
        look: float = 0.0,
    ) -> tuple[int, str]:
        now = [100.0]

        def run(command: Sequence[str]) -> str:
            if command[0] == "/usr/bin/nvidia-modprobe":
                assert modprobe is not None
                modprobe(command[1:])
                return ""
            now[0] += look
            if memory is None:
                raise GpuHostError("nvidia-smi failed (127)")
            return memory

        def slept(seconds: float) -> None:
            now[0] += seconds
            sleep(seconds)

        called = ["--user", USER, "--wait", "6", *options, "--", *words, *more]
        status = program.main(
            called, str(root), environment or {}, run, sleep=slept, clock=lambda: now[0]
        )
        return status, capsys.readouterr().out

    return call


def test_a_server_that_can_start_is_let_start(start: Start) -> None:
    assert start() == (0, "")


def test_a_key_is_never_said(start: Start, root: Path) -> None:
    config = root / CONFIG[1:]
    config.write_text(config.read_text() + 'admin-api-key: ["do-not-show", "either"]\n')
    status, said = start()
    assert (status, "do-not-show" in said) == (1, False)
    assert said == "gpuhost: will not start: --admin-api-key takes one value, 2 given\n"


def test_a_flag_that_an_upgrade_has_taken_away(start: Start) -> None:
    status, said = start(more=["--mamba-scheduler-strategy", "extra_buffer"])
    assert status == 1
    assert said.startswith("gpuhost: will not start: --mamba-scheduler-strategy is not a flag of")
    assert said.endswith("(write --mamba-radix-cache-strategy)\n")


def test_weights_that_are_gone(start: Start, root: Path) -> None:
    (root / "srv/m/model-00002-of-00004.safetensors").unlink()
    status, said = start()
    assert status == 1
    assert "the model is incomplete: model-00002-of-00004.safetensors" in said


def test_a_port_that_somebody_has(start: Start, port: int) -> None:
    with socket.create_server(("127.0.0.1", port)):
        status, said = start()
    assert status == 1
    assert said == f"gpuhost: will not start: port {port} is taken: stop it, or choose another\n"


def test_an_interpreter_without_sglang(start: Start, root: Path) -> None:
    shutil.rmtree(root / "opt/sglang/lib")
    status, said = start()
    assert (status, "/opt/sglang/bin/python has no SGLang" in said) == (1, True)


def test_a_node_that_was_not_passed_into_the_container(start: Start, root: Path) -> None:
    (root / "dev/nvidia-uvm").unlink()
    status, said = start()
    assert (status, "/dev/nvidia-uvm is missing" in said) == (1, True)
    (root / "dev/nvidia0").unlink()
    (root / "dev/nvidia2").unlink()
    status, said = start()
    assert (status, "of the indices 0 to 1; there is /dev/nvidia1" in said) == (1, True)


def test_nodes_that_nothing_has_made_after_a_boot(start: Start, root: Path) -> None:
    called = []

    def modprobe(words: Sequence[str]) -> None:
        called.append(" ".join(words))
        if "-u" in words:
            unpack("/dev/nvidia-uvm c 511:0", root)
            return
        for word in words[1::2]:
            unpack(f"/dev/nvidia{'ctl' if word == '255' else word} c 195:{word}", root)

    assert start(modprobe=modprobe) == (0, "")
    (root / "usr/bin").mkdir(parents=True)
    (root / "usr/bin/nvidia-modprobe").touch()
    assert start(modprobe=modprobe) == (0, "")
    assert called == []  # it would set the modes of nodes that are there
    for node in (root / "dev").glob("nvidia*"):
        node.unlink()
    assert start(modprobe=modprobe) == (0, "")
    assert called == ["-u -c 0", "-c 0 -c 1 -c 2 -c 255"]

    def fails(_words: Sequence[str]) -> None:
        raise GpuHostError("/usr/bin/nvidia-modprobe failed (1)")

    (root / "dev/nvidia-uvm").unlink()
    status, said = start(modprobe=fails)
    assert (status, "/dev/nvidia-uvm is missing" in said) == (1, True)
    # a container has what was passed into it, also where it could make more
    (root / "run/systemd").mkdir(parents=True)
    (root / "run/systemd/container").write_text("lxc\n")
    assert start(modprobe=modprobe)[0] == 1
    assert len(called) == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another account")
def test_a_node_that_the_account_may_not_open(start: Start, root: Path) -> None:
    (root / "dev").chmod(0o700)
    status, said = start("--user", "nobody")
    assert status == 1
    assert "nobody cannot open /dev/nvidia1 (Permission denied): give the account" in said


def test_leftovers_of_a_killed_run_are_waited_for(start: Start, root: Path) -> None:
    unpack(STRANGER, root)
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 2:
            shutil.rmtree(root / "proc/812")

    status, said = start(sleep=sleep)
    assert (status, slept) == (0, [2.0, 2.0])
    assert said == f"gpuhost: waits at most 6 s more: {HELD}\n"


def test_a_stranger_that_stays(start: Start, root: Path) -> None:
    unpack(STRANGER, root)
    status, said = start()
    assert status == 1
    assert said.endswith(f"gpuhost: will not start: {HELD}\n")
    assert start("--shared") == (0, "")


def test_looks_that_take_long_do_not_make_the_wait_longer(start: Start, root: Path) -> None:
    unpack(STRANGER, root)
    slept: list[float] = []
    status, said = start(sleep=slept.append, look=5.0, memory="")
    assert (status, slept) == (1, [1.0])
    assert said == f"gpuhost: waits at most 1 s more: {HELD}\ngpuhost: will not start: {HELD}\n"


@pytest.mark.parametrize(
    ("nodes", "environment", "status"),
    [
        (("/dev/nvidia1",), {}, 0),  # it only watches: no CUDA context
        (("/dev/nvidia2", "/dev/nvidia-uvm"), {}, 0),  # a GPU of another server
        (("/dev/nvidia2", "/dev/nvidia-uvm"), {"CUDA_VISIBLE_DEVICES": "0,2"}, 1),
        (("/dev/nvidia1", "/dev/nvidia-uvm"), {"CUDA_VISIBLE_DEVICES": "1,2"}, 0),
        (("/dev/nvidia1", "/dev/nvidia-uvm"), {"CUDA_VISIBLE_DEVICES": "GPU-001,GPU-002"}, 1),
        (("/dev/nvidia1", "/dev/nvidia-uvm"), {"CUDA_VISIBLE_DEVICES": "MIG-4,MIG-5"}, 1),
    ],
)
def test_strangers_are_judged_on_its_own_gpus(
    start: Start, root: Path, nodes: Sequence[str], environment: dict[str, str], status: int
) -> None:
    # in the order of the buses the GPUs are nvidia1, nvidia0, nvidia2
    unpack(process(812, "/x.scope", *nodes), root)
    assert start(environment=environment)[0] == status


def test_memory_that_nobody_accounts_for(start: Start) -> None:
    status, said = start(memory="00000000:21:00.0, 90112\n00000000:C1:00.0, 90112\n")
    assert status == 1
    assert "90112 MiB of 0000:21:00.0 are in use by a process that is not seen from here" in said
    assert start(memory="00000000:21:00.0, 4\n00000000:C1:00.0, 90112\n") == (0, "")


def test_who_cannot_be_looked_at_delays_a_start_and_does_not_prevent_it(
    start: Start, root: Path, program: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_users(*_: Any) -> Any:
        return {}, ["the open files of process 7 (init) could not be looked at"]

    monkeypatch.setattr(program.gpus, "read_users", read_users)
    slept: list[float] = []
    status, said = start(sleep=slept.append)
    assert (status, len(slept)) == (0, 3)
    assert "gpuhost: starts, though others may hold its GPUs: the open files of process 7" in said
    assert start(memory="00000000:43:00.0, 4\n00000000:21:00.0, 4\n") == (0, "")


def test_the_role_installs_what_the_program_imports() -> None:
    def imports(path: Path) -> set[str]:
        found: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE):
                rest = (node.module or "")[len(PACKAGE) :].lstrip(".")
                found |= {rest} if rest else {alias.name for alias in node.names}
        return found

    needed: set[str] = set()
    left = imports(ROLE / "files/gpuhost-sglang-start")
    while left:
        name = left.pop()
        needed.add(name)
        left |= imports(UTILS / f"{name}.py") - needed
    assert VARS["__sglang_modules"] == sorted(needed)


def test_the_program_is_understood_by_the_oldest_python() -> None:
    text = (ROLE / "files/gpuhost-sglang-start").read_text(encoding="utf-8")
    ast.parse(text, feature_version=(3, 9))
    assert re.match(r"# Copyright", text)
