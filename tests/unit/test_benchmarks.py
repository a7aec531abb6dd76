"""The file of benchmark results: each run writes its own section and leaves the others."""

from __future__ import annotations

import json
import runpy
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"


def test_a_section_is_replaced_and_others_stay(tmp_path: Path) -> None:
    names = runpy.run_path(str(BENCHMARKS / "results.py"))
    put = names["put"]
    put.__globals__["RESULTS"] = tmp_path / "results.md"
    put("Scan", ["| a |", "| 1 |"])
    put("Audit", ["first"])
    put("Scan", ["| a |", "| 2 |"])
    assert (tmp_path / "results.md").read_text() == (
        "# Benchmarks\n\n## Audit\n\nfirst\n\n## Scan\n\n| a |\n| 2 |\n"
    )


def test_the_constructed_host_has_the_users_it_should(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scan that finds nothing would be fast for the wrong reason."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    scan = runpy.run_path(str(BENCHMARKS / "scan.py"))
    gpus = scan["read_gpus"](scan["build"](tmp_path, 8, 120))
    assert len(gpus) == 8
    assert sorted(user.pid for gpu in gpus for user in gpu.users) == [
        1000 + at for at in range(0, 120, 20)
    ]
    assert {text for gpu in gpus for text in gpu.users_unknown} == set()


@pytest.fixture
def clients(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return what the benchmark of load generators defines."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return runpy.run_path(str(BENCHMARKS / "clients.py"))


@pytest.fixture
def stub(tmp_path: Path) -> Path:
    """Return its server, built without a warning."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler to build the server with")
    program, source = tmp_path / "stub", str(BENCHMARKS / "stub_server.c")
    subprocess.run(["cc", "-Wall", "-Wextra", "-Werror", "-o", program, source], check=True)
    return program


def test_the_server_for_clients_has_the_pace_it_should(clients: dict[str, Any], stub: Path) -> None:
    """Also for requests that follow one another on a connection, and of every length."""
    case = clients["Case"](4, 10_000, 16, 30)
    assert case.true == pytest.approx(4 * 30 / 0.29)
    found, pieces = clients["measure"](stub, case, clients["own"])
    assert pieces == 16 * 30
    assert found.tpot == pytest.approx(1, rel=0.05)
    assert found.share == pytest.approx(1, rel=0.1)


def test_a_client_that_fails_is_told_and_the_others_stay(
    clients: dict[str, Any], stub: Path
) -> None:
    rows = clients["rows"]
    rows.__globals__["CASES"] = (clients["Case"](2, 1000, 8, 20),)

    def breaks(load: Any, url: str) -> Any:
        raise clients["GpuHostError"]("it does not start")

    lines = rows(stub, {"ours": clients["own"], "other": breaks}, ["third: not here"], 1)
    assert [line.split(" | ")[2] for line in lines[2:4]] == ["ours", "other"]
    assert lines[3].endswith("| other | - | - | - | - | - | - |")
    assert [line for line in lines if line.startswith("NOT MEASURED")] == [
        "NOT MEASURED: third: not here",
        "NOT MEASURED: other, in round 1: it does not start",
    ]


def test_records_of_aiperf_are_read_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their times are in ms and ns, and the first request's start counts as zero."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    client = runpy.run_path(str(BENCHMARKS / "aiperf_client.py"))
    values = {
        "time_to_first_token": 84.0,
        "inter_chunk_latency": [32.0, 0.0],
        "output_sequence_length": 3,
        "input_sequence_length": 20,
    }
    metrics = {name: {"value": value, "unit": "-"} for name, value in values.items()}
    good = [
        json.dumps({"metadata": {"request_start_ns": 10**18 + at}, "metrics": metrics})
        for at in (500_000_000, 0)
    ]
    request = client["Request"]
    assert client["parse"](good, 2) == [
        request(0.5, 0.084, (0.032, 0.0), 3, 20),
        request(0.0, 0.084, (0.032, 0.0), 3, 20),
    ]
    bad = json.dumps({"metadata": {}, "metrics": {}, "error": {"type": "ClientConnectorError"}})
    with pytest.raises(client["GpuHostError"], match=r"2 requests, 1 of them failed.*Connector"):
        client["parse"]([good[0], bad], 2)
    with pytest.raises(client["GpuHostError"], match=r"2 requests, 0 of them failed, where 3 were"):
        client["parse"](good, 3)


def test_the_constructed_log_has_the_hits_it_should(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    bench = runpy.run_path(str(BENCHMARKS / "health_log.py"))
    log = tmp_path / "kern.log"
    for texts, every in ((bench["messages"](1000), 1000), (bench["flood"](), 1)):
        bench["save"](log, texts, 500_000)
        lines = log.read_bytes().count(b"\n")
        records = list(bench["_kernel_log"].read_file(str(log)))
        assert len(records) == 1 + (lines - 1) // every
        bench["ours"](log)
        bench["grep"](log)


def test_one_wheel_of_each_release_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    chosen = runpy.run_path(str(BENCHMARKS / "sglang_flags.py"))["chosen"]
    wheels = dict.fromkeys(["0.5.8", "0.5.9", "0.5.10", "0.5.10.post1", "0.5.11"])
    chosen.__globals__["released"] = lambda: wheels
    assert chosen(3) == ["0.5.9", "0.5.10.post1", "0.5.11"]
