"""The module against the real router in front of two stand-ins for SGLang, under load."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_http import Client, Reply
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_router import (
    read_load,
    worker_urls,
)
from ansible_collections.gpuhost.inference.plugins.modules import sglang_router_workers
from routed import KEY, PATIENCE, Clients, Fleet, eventually, free_port, install_router

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


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    package, python = install_router()
    made = Fleet(python, package, tmp_path)
    yield made
    made.stop()


Run = Callable[..., dict[str, Any]]


def test_server_is_restarted_without_a_failed_request(fleet: Fleet, run_module: Run) -> None:
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
        out = workers("absent", urls[0])
        assert out["moved"] == urls[:1], out
        assert workers("absent", urls[0])["changed"] is False
        assert "0 others serve and 1 must" in workers("absent", urls[1])["msg"]
        port = int(urls[0].rpartition(":")[2])
        process = fleet.processes[port]
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
        fleet.start(port)
        assert workers("present", urls[0])["moved"] == urls[:1]
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


@pytest.mark.parametrize(
    ("loads", "metrics"),
    [
        ([{"num_running_reqs": -1, "num_waiting_reqs": 0}, {"num_running_reqs": 1}], ""),
        ([{"num_running_reqs": 10**400, "num_waiting_reqs": 0}], ""),
        ([{"num_running_reqs": False, "num_waiting_reqs": 0}], ""),
        (None, "num_running_reqs -1\nnum_queue_reqs 1\n"),
        (None, "num_running_reqs 0.5\nnum_queue_reqs 0\n"),
        (None, "num_running_reqs 1e999\nnum_queue_reqs 0\n"),
    ],
)
def test_load_of_odd_numbers_is_not_idle(loads: Any, metrics: str) -> None:
    class Odd(Client):
        def ask(self, path: str, *_rest: Any, **_more: Any) -> Reply:
            body = json.dumps({"loads": loads}) if path == "/v1/loads" else metrics
            return Reply(200, body, None, 0.0)

    assert not read_load(Odd("http://a")).idle


def hang_up(server: socket.socket) -> None:
    """Take two connections and answer nothing."""
    for _connection in range(2):
        server.accept()[0].close()
