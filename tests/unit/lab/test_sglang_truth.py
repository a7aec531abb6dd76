"""The module finds of the stand-in what its engine, run in virtual time, says is true."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuhost.inference.plugins.module_utils import (
    _bench,
    _bench_judge,
    _bench_sglang,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._bench import Bench, Question
from ansible_collections.gpuhost.inference.plugins.module_utils._bench_corpus import (
    built_in,
    prompts,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._bench_server import read_server
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_http import Client

LAB = Path(__file__).resolve().parents[3] / "lab" / "sglang"
KEY = "key-hunter2"
SERVER = ["--tp", "4", "--mem-fraction-static", "0.80", "--max-running-requests", "48"]
ARMS = {"off": [], "on": ["--speculative-algorithm", "NEXTN"]}
SCALE = 0.5  # of the engine's times
KINDS = ("code", "chat", "reasoning")
CORPUS = built_in(KINDS)
POINTS = (1, 8, 32)


def question(arm: str) -> Question:
    return Question(arm, 1, POINTS, CORPUS, None, 48, None, None, True, 1, 0.0, 120)


@contextlib.contextmanager
def serve(model: Path, flags: list[str]) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    lab = {"GPUS": "none", "LOAD_SECONDS": "0", "WARMUP_SECONDS": "0", "TIME_SCALE": str(SCALE)}
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model)]
    command += ["--port", str(port), "--api-key", KEY, "--enable-metrics", *SERVER, *flags]
    process = subprocess.Popen(
        command,
        env={
            **os.environ,
            "PYTHONPATH": str(LAB),
            **{f"LAB_SGLANG_{name}": value for name, value in lab.items()},
        },
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    client, end = Client(f"http://127.0.0.1:{port}", KEY), time.monotonic() + 30
    try:
        while client.ask("/ready", 5).status != 200:
            assert time.monotonic() < end
            time.sleep(0.05)
        yield client.url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture(scope="module")
def measured(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Return a run of each arm, both servers measured side by side."""
    results = str(tmp_path_factory.mktemp("results"))

    def run(arm: str) -> dict[str, Any]:
        with serve(model, ARMS[arm]) as url:
            client = Client(url, KEY)
            asked, server = question(arm), read_server(client, None, None)
            book = _bench.open_book(results, asked, server, _bench_sglang.OWN)
            todo = _bench.plan(asked, book, "none")
            bench = Bench(client, server, _bench_sglang.OWN, KEY)
            return _bench.measure(bench, asked, book, todo, False)

    with ThreadPoolExecutor(2) as pool, pytest.MonkeyPatch.context() as patched:
        # other tests run on these cores too
        patched.setattr(_bench_judge, "OCCUPIED", 2.0)
        patched.setattr(_bench_judge, "wavers", lambda _requests: None)
        patched.setattr(_bench_judge, "stalled", lambda _requests: 0.0)
        found = dict(zip(ARMS, pool.map(run, ARMS)))
    assert KEY not in json.dumps(found)
    return found


@pytest.fixture
def true_rate(model: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], float]:
    """Return what an arm does with the very prompts that are sent."""
    monkeypatch.syspath_prepend(str(LAB))
    names = ("arguments", "engine", "model", "text", "truth")
    part = {name: importlib.import_module(f"sglang.standin.{name}") for name in names}
    for module in part.values():
        if hasattr(module, "log"):
            monkeypatch.setattr(module, "log", lambda _text: None)

    def rate(arm: str, concurrency: int) -> float:
        args = part["arguments"].parse(["--model-path", str(model), *SERVER, *ARMS[arm]])
        read = part["model"].read_model(str(model))
        part["arguments"].resolve(args, read)
        engine = part["engine"].Engine(args, part["model"].plan(args, read), read.has_mtp)
        asked, text = question(arm), part["text"]
        sent = prompts(CORPUS, asked.requests_at(concurrency), f"1/{concurrency}", None)
        load = [
            part["engine"].Request(
                str(number),
                text.token_count(prompt),
                text.seed_of(prompt, 0),
                text.draft_chance(text.kind_of(prompt), 0.0),
                asked.output_tokens,
            )
            for number, prompt in enumerate(sent)
        ]
        found: float = part["truth"].steady(
            part["truth"].run(engine, load, concurrency), concurrency
        )[0]
        return found / SCALE

    return rate


@pytest.mark.parametrize("kind", ["code", "chat", "reasoning", "long"])
@pytest.mark.parametrize("context", [None, 8000])
def test_the_stand_in_knows_the_kinds(
    kind: str, context: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its acceptance would be that of another kind, and that of one repeated word the best."""
    monkeypatch.syspath_prepend(str(LAB))
    text = importlib.import_module("sglang.standin.text")
    found = {text.kind_of(prompt) for prompt in prompts(built_in([kind]), 60, "1", context)}
    assert found <= (
        {"chat", "reasoning"} if kind == "long" else {kind} | ({"reasoning"} if context else set())
    )


def at(run: dict[str, Any], concurrency: int) -> dict[str, Any]:
    (point,) = [
        one for one in (*run["points"], *run["rejected"]) if one["concurrency"] == concurrency
    ]
    return dict(point)


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("concurrency", POINTS)
def test_rate(
    measured: dict[str, dict[str, Any]],
    true_rate: Callable[[str, int], float],
    arm: str,
    concurrency: int,
) -> None:
    """No more than the truth: how much less it is, on a busy machine, is that machine's."""
    point = at(measured[arm], concurrency)
    assert 0 < point["output_tok_s"] < 1.1 * true_rate(arm, concurrency)
    assert point["requests"] == max(4 * concurrency, 32)
    assert point["output_tokens"]["median"] == 48
    assert (point["accept_length"] is None) == (arm == "off")


def test_only_what_fits_the_server_counts(measured: dict[str, dict[str, Any]]) -> None:
    """48 requests are asked for in both arms; with MTP the states leave room for 24."""
    assert [one["concurrency"] for one in measured["on"]["points"]] == [1, 8]
    codes = {one["code"] for one in at(measured["on"], 32)["reasons"]}
    assert "above-cap" in codes
    assert at(measured["on"], 32)["running_max"] == 24
    assert [one["reasons"] for one in measured["off"]["rejected"]] == []
    arms = measured.values()
    assert [run["apart"]["effective_max_running_requests"] for run in arms] == [45, 24]
    assert [run["equal"]["max_running_requests"] for run in arms] == [48, 48]
    assert measured["off"]["equal"] == measured["on"]["equal"]


def test_speculation_wins_with_one_request_and_loses_with_many(
    measured: dict[str, dict[str, Any]], true_rate: Callable[[str, int], float]
) -> None:
    ratio = {one: true_rate("on", one) / true_rate("off", one) for one in POINTS}
    assert ratio[1] > 1.2
    assert ratio[32] < 0.9
    assert at(measured["on"], 1)["accept_length"] == pytest.approx(2.4, abs=0.25)


def test_the_readme_shows_what_the_engine_does(model: Path) -> None:
    """Its table of rates is the one to compute scenarios from."""
    text = (LAB / "README.md").read_text()
    rows = re.findall(r"^\| MTP (off|on)[^|]*\|(.+)\|$", text, re.M)
    columns = re.search(r"^\| running requests asked for \|(.+)\|$", text, re.M)
    assert columns is not None
    concurrencies = [int(cell) for cell in columns[1].split("|")]
    assert [arm for arm, _cells in rows] == ["off", "on"]
    for arm, cells in rows:
        told = subprocess.run(
            [
                sys.executable,
                "-m",
                "sglang.standin.truth",
                "--model-path",
                model,
                *SERVER,
                *ARMS[arm],
            ],
            check=True,
            capture_output=True,
            text=True,
            env={
                "PYTHONPATH": str(LAB),
                "TRUTH_CONCURRENCIES": ",".join(map(str, concurrencies)),
            },
        ).stdout
        true = [round(json.loads(line)["output_tok_s"]) for line in told.splitlines()]
        assert [int(cell) for cell in cells.split("|")] == true
