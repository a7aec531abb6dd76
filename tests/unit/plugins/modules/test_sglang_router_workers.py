"""The real router, installed from PyPI, in front of two stand-ins for SGLang, under load.

`TEST_ROUTER=smg pytest ...` takes the router's successor.
"""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_http import Client
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_router import (
    read_load,
    worker_urls,
)
from ansible_collections.gpuhost.inference.plugins.modules import sglang_router_workers

ROOT = Path(__file__).parents[4]
LAB = ROOT / "lab" / "sglang"
KEY = "key-of-the-fleet"
PATIENCE = 60
TOKENS = 24
ROUTERS = {"sglang-router": "0.3.2", "smg": "1.13.0"}


# URLs


def test_urls_are_written_as_the_router_lists_them() -> None:
    given = ["http://10.1.2.3:30000/", " https://GPU-A.example ", "http://[fd00::5]:30001"]
    assert worker_urls(given) == [
        "http://10.1.2.3:30000",
        "https://gpu-a.example",
        "http://[fd00::5]:30001",
    ]


@pytest.mark.parametrize(
    ("urls", "why"),
    [
        (["http://a:1", "http://A:1/"], "twice"),
        (["10.1.2.3:30000"], "does not begin with"),
        (["gpu-a"], "does not begin with"),
        (["http://me:hunter2@a:1"], "user or password"),
        (["http://a:1/v1"], "goes on behind the port"),
        (["http://a:port"], "Port could not"),
        (["http://fd00::5:30001"], "Port could not"),
        (["http://a b:1"], "no name of a host"),
    ],
)
def test_what_is_no_url_of_a_worker_is_refused(urls: list[str], why: str) -> None:
    with pytest.raises(GpuHostError, match=why) as refused:
        worker_urls(urls)
    assert "hunter2" not in str(refused.value)


# The real processes


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    return port


def eventually(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.fixture(scope="module")
def router_python() -> tuple[str, Path]:
    """Return package and interpreter of a router; it is installed once for a checkout."""
    package = os.environ.get("TEST_ROUTER", "sglang-router")
    folder = ROOT / ".build" / f"{package}-{ROUTERS[package]}"
    python = folder / "bin" / "python"
    with (ROOT / ".build" / f"{package}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests run in several processes
        if not (folder / "complete").exists():
            subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
            pip = [python, "-m", "pip", "--retries", "1", "install", "--only-binary", ":all:"]
            done = subprocess.run(
                [*pip, f"{package}=={ROUTERS[package]}"],
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                said = done.stderr.strip().splitlines()[-1:]
                pytest.skip(f"NOT TESTED: {package} could not be installed from PyPI: {said}")
            (folder / "complete").touch()
    return package, python


@dataclass
class Fleet:
    """A router and its servers."""

    python: Path
    package: str
    folder: Path
    port: int = field(default_factory=free_port)
    processes: dict[int, Any] = field(default_factory=dict)
    router: Any = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, port: int, key: str = KEY) -> str:
        """Start a server and return its URL."""
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", self.folder / "m"]
        given = ["--port", str(port), "--api-key", key, "--enable-metrics", "--tp", "4"]
        given += ["--served-model-name", "m"]
        lab = {"GPUS": "none", "LOAD_SECONDS": "0", "WARMUP_SECONDS": "0", "TIME_SCALE": "0.2"}
        with (self.folder / f"{port}.log").open("ab") as log:
            self.processes[port] = subprocess.Popen(
                [*command, *given],
                env={
                    **os.environ,
                    "PYTHONPATH": str(LAB),
                    "SGLANG_HEALTH_CHECK_TIMEOUT": "3",
                    **{f"LAB_SGLANG_{name}": value for name, value in lab.items()},
                },
                stderr=log,
                start_new_session=True,
            )
        return f"http://127.0.0.1:{port}"

    def route(self, urls: list[str]) -> None:
        """Start the router as the role's unit does, with its key from a file."""
        config = self.folder / "router.json"
        variables = yaml.safe_load((ROOT / "roles/sglang_router/vars/main.yml").read_text())
        launch = variables["__sglang_router_launch"].replace(
            "{{ __sglang_router_config }}", str(config)
        )
        arguments = ["--host", "127.0.0.1", "--port", str(self.port), "--worker-urls", *urls]
        arguments += ["--policy", "round_robin", "--api-key", KEY]
        arguments += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]
        arguments += ["--health-check-interval-secs", "1", "--health-check-timeout-secs", "2"]
        arguments += ["--health-failure-threshold", "2", "--health-success-threshold", "1"]
        arguments += ["--worker-startup-check-interval", "1"]
        module = f"{self.package.replace('-', '_')}.launch_router"
        config.write_text(json.dumps({"module": module, "arguments": arguments}))
        with (self.folder / "router.log").open("wb") as log:
            self.router = subprocess.Popen(
                [self.python, "-c", launch], stdout=log, stderr=subprocess.STDOUT
            )
        client = Client(self.url, KEY)
        eventually(lambda: client.ask("/readiness", 5).status is not None)

    def stop(self) -> None:
        if self.router is not None:
            self.router.kill()
            self.router.wait()
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture
def fleet(router_python: tuple[str, Path], tmp_path: Path) -> Iterator[Fleet]:
    package, python = router_python
    subprocess.run([sys.executable, LAB / "make_model", tmp_path / "m"], check=True)
    made = Fleet(python, package, tmp_path)
    yield made
    made.stop()


class Clients:
    """Asks the router without a pause, every other one streaming, and counts what went wrong."""

    def __init__(self, port: int, number: int = 4) -> None:
        self._port = port
        self._end = threading.Event()
        self.good = 0
        self.bad: list[Any] = []
        self._threads = [
            threading.Thread(target=self._ask, args=(bool(one % 2),)) for one in range(number)
        ]
        for thread in self._threads:
            thread.start()

    def _ask(self, stream: bool) -> None:
        body = {
            "model": "m",
            "stream": stream,
            "max_tokens": TOKENS,
            "ignore_eos": True,
            "messages": [{"role": "user", "content": "tell a tale"}],
        }
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
        while not self._end.is_set():
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)
            try:
                connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
                answer = connection.getresponse()
                text = answer.read().decode()
                whole = (
                    text.rstrip().endswith("data: [DONE]")
                    if stream
                    else json.loads(text)["usage"]["completion_tokens"] == TOKENS
                )
                if answer.status == 200 and whole:
                    self.good += 1
                else:
                    self.bad.append((answer.status, text[-200:]))
            except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
                self.bad.append(repr(error))
            finally:
                connection.close()

    def end(self) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join()


Run = Callable[..., dict[str, Any]]


def test_servers_are_restarted_without_a_failed_request(fleet: Fleet, run_module: Run) -> None:
    def workers(state: str, url: str, **options: Any) -> dict[str, Any]:
        options = {"wait": PATIENCE, **options, "url": fleet.url, "api_key": KEY, "state": state}
        return run_module(sglang_router_workers, workers=[url], **options)

    urls = [fleet.start(free_port()) for _server in range(2)]
    fleet.route(urls)
    for url in urls:
        assert "failed" not in workers("present", url)
    planned = workers("absent", urls[0], check=True)
    assert planned["changed"] is True
    assert workers("present", urls[0])["changed"] is False  # it is still in it
    clients = Clients(fleet.port)
    try:
        for url in urls:
            out = workers("absent", url)
            assert out["moved"] == [url], out
            assert workers("absent", url)["changed"] is False
            other = workers("absent", next(one for one in urls if one != url))
            assert "0 others serve and 1 must" in other["msg"]
            port = int(url.rpartition(":")[2])
            process = fleet.processes[port]
            os.kill(process.pid, signal.SIGTERM)
            assert process.wait(PATIENCE) == 0
            fleet.start(port)
            assert workers("present", url)["moved"] == [url]
        served = clients.good
        eventually(lambda: clients.good > served + 20 or bool(clients.bad))
    finally:
        clients.end()
    assert clients.bad == []
    listed = {worker["url"]: worker["healthy"] for worker in workers("present", urls[0])["workers"]}
    assert listed == dict.fromkeys(urls, True)
    # the key was given in no command line and came into no log
    line = Path(f"/proc/{fleet.router.pid}/cmdline").read_text()
    assert KEY not in line + (fleet.folder / "router.log").read_text()


def test_worker_that_does_not_serve_is_named_with_the_reason(fleet: Fleet, run_module: Run) -> None:
    def present(url: str, wait: int = 1) -> str:
        options = {"url": fleet.url, "api_key": KEY, "wait": wait, "workers": [url]}
        return str(run_module(sglang_router_workers, **options).get("msg", "serves"))

    good, strange = fleet.start(free_port()), fleet.start(free_port(), "another-key")
    dead = f"http://127.0.0.1:{free_port()}"
    fleet.route([good, strange, dead])
    assert present(good, PATIENCE) == "serves"
    eventually(lambda: Client(strange).ask("/health", 5).status == 200)
    assert f"{strange}: " in present(strange, PATIENCE)
    assert "it refuses the key" in present(strange, PATIENCE)
    said = present(dead)
    assert f"{dead}: " in said
    assert "nothing listens there" in said
    assert good not in said.partition("workers. ")[2]

    scheduler = hung(fleet.processes[int(good.rpartition(":")[2])].pid)
    try:
        eventually(lambda: "holds it for unhealthy" in present(good, 0))
    finally:
        for pid in scheduler:
            os.kill(pid, signal.SIGCONT)
    assert present(good, PATIENCE) == "serves"
    wrong = run_module(sglang_router_workers, url=fleet.url, api_key="no", workers=[good])
    assert "refuses the key" in wrong["msg"]
    wrong = run_module(sglang_router_workers, url=good, api_key=KEY, workers=[good])
    assert "is a router and no server" in wrong["msg"]


def hung(pid: int) -> list[int]:
    """Stop the schedulers of a server."""
    children = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    found = [one for one in children if "scheduler" in Path(f"/proc/{one}/cmdline").read_text()]
    for one in found:
        os.kill(one, signal.SIGSTOP)
    return found


def test_server_that_does_not_become_idle_is_put_back(fleet: Fleet, run_module: Run) -> None:
    urls = [fleet.start(free_port()) for _server in range(2)]
    fleet.route(urls)
    options = {"url": fleet.url, "api_key": KEY, "wait": PATIENCE}
    assert "failed" not in run_module(sglang_router_workers, workers=urls, **options)
    direct = Clients(int(urls[0].rpartition(":")[2]))  # a client that goes past the router
    try:
        eventually(lambda: not read_load(Client(urls[0], KEY)).idle)
        busy = run_module(
            sglang_router_workers, workers=urls[:1], state="absent", **{**options, "wait": 2}
        )
    finally:
        direct.end()
    assert "put into it again" in busy["msg"]
    again = run_module(sglang_router_workers, workers=urls, **options)
    assert sorted(worker["url"] for worker in again["workers"]) == sorted(urls)


def test_load_that_no_witness_tells_is_not_idle() -> None:
    load = read_load(Client(f"http://127.0.0.1:{free_port()}"))
    assert load.gone
    assert load.idle
    with socket.create_server(("127.0.0.1", 0)) as silent:
        threading.Thread(target=hang_up, args=(silent,)).start()
        load = read_load(Client(f"http://127.0.0.1:{silent.getsockname()[1]}"))
    assert not load.gone
    assert not load.idle


def hang_up(server: socket.socket) -> None:
    """Take two connections and answer nothing."""
    for _connection in range(2):
        server.accept()[0].close()
