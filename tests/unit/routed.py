"""The real router, installed from PyPI, stand-ins for SGLang behind it, and clients in front.

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
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_http import Client

ROOT = Path(__file__).parents[2]
LAB = ROOT / "lab" / "sglang"
KEY = "key-of-the-fleet"
PATIENCE = 60
TOKENS = 24
ROUTERS = {"sglang-router": "0.3.2", "smg": "1.13.0"}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    return port


def eventually(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


def install_router() -> tuple[str, Path]:
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
    def environment(self) -> dict[str, str]:
        """Return that of a server."""
        lab = {"GPUS": "none", "LOAD_SECONDS": "0", "WARMUP_SECONDS": "0", "TIME_SCALE": "0.2"}
        return {
            **os.environ,
            "PYTHONPATH": str(LAB),
            "SGLANG_HEALTH_CHECK_TIMEOUT": "3",
            **{f"LAB_SGLANG_{name}": value for name, value in lab.items()},
        }

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __post_init__(self) -> None:
        """Make a model's folder."""
        subprocess.run([sys.executable, LAB / "make_model", self.folder / "m"], check=True)

    def start(self, port: int, key: str = KEY) -> str:
        """Start a server and return its URL."""
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", self.folder / "m"]
        given = ["--port", str(port), "--api-key", key, "--enable-metrics", "--tp", "4"]
        given += ["--served-model-name", "m"]
        with (self.folder / f"{port}.log").open("ab") as log:
            self.processes[port] = subprocess.Popen(
                [*command, *given],
                env=self.environment,
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


class Clients:
    """Asks the router all the time, every other one streaming, and counts what went wrong."""

    def __init__(
        self, port: int, number: int = 4, *, key: str = KEY, model: str = "m", pause: float = 0.1
    ) -> None:
        self._port, self._key, self._model = port, key, model
        self._pause = pause  # else they leave no processor to what is tested
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
            "model": self._model,
            "stream": stream,
            "max_tokens": TOKENS,
            "ignore_eos": True,
            "messages": [{"role": "user", "content": "tell a tale"}],
        }
        headers = {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"}
        while not self._end.wait(self._pause):
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
