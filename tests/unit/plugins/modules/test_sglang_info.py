"""The module against the lab's stand-in for SGLang, a real process on loopback."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang import judge_server
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_http import (
    Client,
    parse_metrics,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_look import (
    Question,
    facts,
    look,
    read_journal,
    read_unit,
    wait_until_ready,
    watch_speculation,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_window import watch
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader
from ansible_collections.gpuhost.inference.plugins.modules import sglang_info

Run = Callable[..., dict[str, Any]]
LAB = Path(__file__).parents[4] / "lab" / "sglang"
KEY = "key-hunter2"
PATIENCE = 60


class Server:
    """A stand-in that runs as if systemd had started it."""

    def __init__(
        self, folder: Path, model: str, *flags: str, port: int = 0, **environment: str
    ) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = port or probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = folder / f"{self.port}.log"
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", model]
        given = ["--port", str(self.port), "--served-model-name", "qwen", "--api-key", KEY]
        given += ["--enable-metrics", "--tensor-parallel-size", "4"]
        lab = {"LAB_SGLANG_GPUS": "none", "LAB_SGLANG_LOAD_SECONDS": "0"}
        lab |= {"LAB_SGLANG_WARMUP_SECONDS": "0", "LAB_SGLANG_TIME_SCALE": "0"}
        self._started = time.monotonic()
        with self._log.open("wb") as stderr:
            self.process = subprocess.Popen(
                [*command, *given, *flags],
                env={**os.environ, "PYTHONPATH": str(LAB), **lab, **environment},
                stderr=stderr,
                start_new_session=True,
            )

    def run(self, command: Any) -> str:
        """Answer as `systemctl show` and `journalctl` do for a running service."""
        if command[0] == "journalctl":
            lines, at = [], self._started
            for line in self._log.read_text().splitlines():
                if re.match(r"\[\d{4}-", line):
                    written = time.mktime(time.strptime(line[1:20], "%Y-%m-%d %H:%M:%S"))
                    at = max(at, time.monotonic() - (time.time() - written))
                lines.append(f"[{at:13.6f}] ct100 python[{self.process.pid}]: {line}\n")
            return "".join(lines)
        code = self.process.poll()
        if code is not None:
            how, status = (1, code) if code >= 0 else (2, -code)
            return (
                "LoadState=loaded\nActiveState=failed\nSubState=failed\nNRestarts=0\nMainPID=0\n"
                f"InvocationID=01ab\nExecMainCode={how}\nExecMainStatus={status}\n"
                "Result=exit-code\nControlGroup=\n"
            )
        return (
            "LoadState=loaded\nActiveState=active\nSubState=running\nNRestarts=0\n"
            f"MainPID={self.process.pid}\nInvocationID=01ab\nExecMainStatus=0\nResult=success\n"
            "ControlGroup=/system.slice/nothing.service\n"
        )

    def look(self, timeout: float = 30.0, **asked: Any) -> Any:
        question = Question(self.url, unit="sglang", model_id="qwen", timeout=timeout, **asked)
        return look(question, Client(self.url, KEY), Reader(), self.run)

    def generate(self, tokens: int) -> threading.Thread:
        """Have somebody ask for so many tokens."""
        sampling = {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 0}
        body = {"text": f"a story of {tokens}", "sampling_params": sampling}
        arguments = ("/generate", PATIENCE, body)
        thread = threading.Thread(target=Client(self.url, KEY).ask, args=arguments, daemon=True)
        thread.start()
        return thread

    def until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < end, self._log.read_text()[-2000:]
            time.sleep(0.02)

    def running(self) -> float:
        metrics = parse_metrics(Client(self.url).ask("/metrics", PATIENCE).body)
        return sum(metrics[name].highest for name in ("num_running_reqs", "num_queue_reqs"))

    def schedulers(self) -> list[int]:
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        names = {int(c): Path(f"/proc/{c}/cmdline").read_text() for c in children}
        return [child for child, name in names.items() if "scheduler" in name]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Server]]:
    folder = tmp_path_factory.mktemp("sglang")
    for name, options in {"whole": [], "bare": ["--without-mtp"]}.items():
        subprocess.run([sys.executable, LAB / "make_model", folder / name, *options], check=True)
    started: list[Server] = []

    def begin(*flags: str, model: str = "whole", ready: bool = True, **given: Any) -> Server:
        server = Server(folder, str(folder / model), *flags, **given)
        started.append(server)
        if ready:
            _seen, verdict = wait_until_ready(server.look, PATIENCE)
            assert verdict.state == "ready", verdict
        return server

    yield begin
    for server in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.process.pid, signal.SIGKILL)
        server.process.wait()


MTP = (
    "--speculative-algorithm", "NEXTN", "--speculative-num-steps", "3", "--speculative-eagle-topk",
    "1", "--speculative-num-draft-tokens", "4", "--max-running-requests", "32",
)  # fmt: skip


@pytest.fixture(scope="module")
def server(start: Callable[..., Server]) -> Server:
    return start(*MTP)


def test_ready(run_module: Run, server: Server) -> None:
    result = run_module(
        sglang_info, url=server.url, api_key=KEY, model_id="qwen", generate=True, wait=PATIENCE
    )
    assert result["changed"] is False
    found = result["server"]
    assert found["state"] == "ready"
    assert found["pid"] == server.process.pid
    assert (found["version"], found["model_id"]) == ("0.5.23", "qwen")
    assert found["effective_max_running_requests"] <= 32
    assert found["kv_tokens"] > 0
    assert found["load"]["running"] == 0
    assert found["flags"]["tp_size"] == 4
    assert found["speculation"]["algorithm"] == "EAGLE"
    assert found["speculation"]["num_draft_tokens"] == 4
    names = [(witness["name"], witness["ok"]) for witness in result["witnesses"]]
    assert names == [
        ("port", None), ("gpu_processes", None), ("health", True), ("models", True),
        ("generation", True),
    ]  # fmt: skip
    assert found["settled"] is True


def test_no_key_in_a_result(run_module: Run, server: Server) -> None:
    result = run_module(sglang_info, url=server.url, api_key=KEY)
    assert "hunter2" not in json.dumps({**result, "invocation": None})
    assert result["server"]["flags"]["api_key"] == "(redacted)"
    seen = server.look()
    assert "hunter2" not in json.dumps(facts(seen, judge_server(seen), Question(server.url)))
    assert seen.log is not None
    assert "hunter2" not in repr(seen.log)


@pytest.mark.parametrize(("model", "verdict"), [("whole", "ok"), ("bare", "dead")])
def test_acceptance(
    run_module: Run, start: Callable[..., Server], model: str, verdict: str
) -> None:
    url = start(*MTP, model=model).url
    result = run_module(sglang_info, url=url, api_key=KEY, acceptance_tokens=256)
    found = result["server"]["speculation"]
    assert (found["verdict"], found["source"]) == (verdict, "generate")
    length = found["accept_length"]
    assert found["accept_rate"] == pytest.approx((length - 1) / 3, abs=1e-3)


def test_wrong_key(run_module: Run, server: Server) -> None:
    result = run_module(sglang_info, url=server.url, api_key="wrong")
    assert result["server"]["state"] == "degraded"
    assert "does not take this api_key" in result["server"]["reason"]


def test_phases_of_a_start(start: Callable[..., Server]) -> None:
    server = start(ready=False, LAB_SGLANG_LOAD_SECONDS="2", LAB_SGLANG_WARMUP_SECONDS="2")
    states: list[str] = []

    def once() -> Any:
        seen = server.look()
        states.append(judge_server(seen).state)
        return seen

    _seen, verdict = wait_until_ready(once, PATIENCE, sleep=lambda _seconds: time.sleep(0.05))
    assert verdict.state == "ready"
    assert list(dict.fromkeys(states)) == ["loading", "warming", "ready"]


def test_start_that_cannot_succeed(start: Callable[..., Server]) -> None:
    server = start("--mem-fraction-static", "0.1", ready=False)
    _seen, verdict = wait_until_ready(server.look, PATIENCE)
    assert verdict.state == "failed"
    assert "no memory is left for the cache" in verdict.reason


def test_hung_scheduler(start: Callable[..., Server]) -> None:
    server = start(SGLANG_HEALTH_CHECK_TIMEOUT="4")
    for scheduler in server.schedulers():
        os.kill(scheduler, signal.SIGSTOP)
    seen = server.look()
    assert judge_server(seen).state == "hung"
    assert (seen.health.status, seen.moved, seen.models) == (503, None, None)
    assert (seen.stands, seen.stuck is not None) == (True, True)
    assert judge_server(server.look(timeout=3.5)).state == "hung"


def test_foreign_server_is_told_apart_and_gets_no_key(server: Server) -> None:
    connections: list[Any] = []
    with socket.create_server(("127.0.0.1", 0)) as foreign:
        foreign.settimeout(0.5)

        def accept() -> None:
            try:
                connections.append(foreign.accept())
            except TimeoutError:
                return

        thread = threading.Thread(target=accept)
        thread.start()
        url = f"http://127.0.0.1:{foreign.getsockname()[1]}"
        seen = look(Question(url, unit="sglang"), Client(url, KEY), Reader(), server.run)
        thread.join()
    verdict = judge_server(seen)
    assert verdict.state == "failed"
    assert f"process {os.getpid()}" in verdict.reason
    assert connections == []


def test_port_that_somebody_has(start: Callable[..., Server]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as foreign:
        port = foreign.getsockname()[1]
        server = start(ready=False, port=port)
        verdict = judge_server(server.look())
        assert verdict.state == "failed"
        assert f"process {os.getpid()}" in verdict.reason
        server.until(lambda: server.process.poll() is not None)
        verdict = judge_server(server.look())
        assert "listens on its port" in verdict.reason
    verdict = judge_server(server.look())  # it has gone, and the log still tells why
    assert verdict.state == "failed"
    assert "status 3 (the port is taken). another server owns the port" in verdict.reason


def test_flag_of_another_release(start: Callable[..., Server]) -> None:
    server = start("--mamba-scheduler-strategy", "extra_buffer", ready=False)
    server.until(lambda: server.process.poll() is not None)
    verdict = judge_server(server.look())
    assert verdict.state == "failed"
    assert "status 2 (a flag is wrong). a flag is not one of this release" in verdict.reason
    assert "unrecognized arguments" in verdict.reason


def test_full_queue_is_no_fault(start: Callable[..., Server]) -> None:
    busy = start(
        "--max-running-requests", "1", "--max-queued-requests", "1", LAB_SGLANG_TIME_SCALE="1"
    )
    for count in (1, 2):
        busy.generate(5000 + count)
        busy.until(lambda count=count: busy.running() >= count)  # type: ignore[misc]
    seen = busy.look(generate=True)
    verdict = judge_server(seen)
    assert seen.generated.status == 503
    assert verdict.state == "ready"
    assert "its queue is full" in verdict.reason


def test_draining(start: Callable[..., Server]) -> None:
    server = start(LAB_SGLANG_TIME_SCALE="1")
    server.generate(5000)
    server.until(lambda: server.running() >= 1)
    os.kill(server.process.pid, signal.SIGTERM)
    server.until(lambda: Client(server.url).ask("/health", PATIENCE).status == 503)
    verdict = judge_server(server.look())
    assert (verdict.state, verdict.settled) == ("draining", False)


def test_window(server: Server) -> None:
    question = Question(server.url, unit="sglang", window=1)
    seen = server.look()
    client = Client(server.url, KEY)
    quiet = watch_speculation(seen, question, client, Reader(), server.run)
    assert quiet is not None
    assert (quiet.accept_length, quiet.reason) == (None, "nothing was generated in the window")

    def again() -> tuple[Any, Any]:
        unit = read_unit("sglang", Reader(), server.run)
        return unit, read_journal(unit, server.run)

    found = watch(0, 4, client, again, lambda _seconds: server.generate(400).join())
    assert found.accept_length is not None
    assert (found.generated_tokens or 0) >= 400
    assert 1.0 < found.accept_length <= 4.0
    assert (found.source, found.verdict) == ("metrics", "ok")


def test_waiting_ends_with_what_the_witnesses_said(run_module: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    result = run_module(sglang_info, url=url, wait=1)
    assert result["failed"]
    assert result["msg"].startswith(f"SGLang at {url} is unreachable: ")
    assert "port: closed; gpu_processes: none; health: refused" in result["msg"]
    assert result["server"]["state"] == "unreachable"
    assert "failed" not in run_module(sglang_info, url=url, wait=1, check=True)


def test_metrics_are_summed_over_labels() -> None:
    text = """\
# HELP sglang:num_running_reqs The number
sglang:num_running_reqs{tp_rank="0",model_name="a b}"} 3.0
sglang:num_running_reqs{tp_rank="1"} 4.0
sglang:generation_tokens_total{model_name="qwen"} 1.5e+06
sglang:token_usage NaN
python_info{version="3.12"} 1.0
"""
    found = parse_metrics(text)
    assert (found["num_running_reqs"].total, found["num_running_reqs"].highest) == (7.0, 4.0)
    assert found["generation_tokens_total"].total == 1.5e6
    assert "token_usage" not in found
