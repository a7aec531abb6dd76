"""The module against a server whose pace is known, which tells what it was asked."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuhost.inference.plugins.module_utils import (
    _bench,
    _bench_judge,
    _bench_server,
)
from ansible_collections.gpuhost.inference.plugins.modules import sglang_benchmark
from paced_server import Paced

Run = Callable[..., dict[str, Any]]
KEY = "key-hunter2"
INFO: dict[str, Any] = {
    "version": "0.5.23",
    "model_path": "/srv/model",
    "api_key": KEY,
    "admin_api_key": "hunter3",
    "launch_command": f"--api-key {KEY}",
    "mem_fraction_static": 0.8,
    "max_running_requests": 48,
    "random_seed": 1234,
    "startup_time": {"tokenizer_e2e": 12.5},
    "max_total_num_tokens": 5000,
    "speculative_algorithm": "EAGLE",
    "speculative_num_steps": 3,
    "speculative_num_draft_tokens": 4,
    "cuda_graph_config": {"decode": {"backend": "full", "bs": [1, 2, 4], "max_bs": 4}},
    "internal_states": [
        {"api_key": KEY, "effective_max_running_requests_per_dp": 24, "memory_usage": {}}
    ],
}


class Served(Paced):
    """A server with the endpoints that the module asks."""

    def __init__(self, **more: Any) -> None:
        super().__init__(gap=0.001, first=0.002, **more)
        self.info = json.loads(json.dumps(INFO))
        self.flushes = 0
        self.more_tokens = 0
        self.flush_status = 200
        self.metrics = True
        self.passes = 1 / 2.5  # for each token
        models = json.dumps({"data": [{"id": "qwen"}]})
        self.paths = {
            "/v1/models": lambda: (200, models),
            "/server_info": lambda: (200, json.dumps(self.info)),
            "/flush_cache": self._flush,
            "/metrics": self._metrics,
        }

    def _flush(self) -> tuple[int, str]:
        self.flushes += 1
        return self.flush_status, "Cache flushed."

    def _metrics(self) -> tuple[int, str]:
        if not self.metrics:
            return 404, ""
        tokens = self.tokens + self.more_tokens
        lines = [
            f'sglang:generation_tokens_total{{model_name="qwen"}} {tokens}',
            f'sglang:spec_verify_calls_total{{model_name="qwen"}} {tokens * self.passes}',
            f'sglang:num_running_reqs{{tp_rank="0"}} {self.running}',
            'sglang:num_queue_reqs{tp_rank="0"} 0',
            'sglang:token_usage{tp_rank="0"} 0.25',
            'sglang:num_retracted_reqs{tp_rank="0"} 0',
        ]
        return 200, "\n".join(lines) + "\n"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_bench_server, "_LOOK", 0.02)
    monkeypatch.setattr(_bench_server, "_IDLE", 0.1)
    # answers of 20 ms waver with whatever else the machine does
    monkeypatch.setattr(_bench_judge, "wavers", lambda _requests: None)
    monkeypatch.setattr(_bench_judge, "stalled", lambda _requests: 0.0)
    monkeypatch.setattr(_bench_judge, "SATURATED", 0.5)
    monkeypatch.setattr(_bench_judge, "OCCUPIED", 2.0)


@pytest.fixture
def server() -> Iterator[Served]:
    with Served() as started:
        yield started


def asked(server: Served, folder: Path) -> dict[str, Any]:
    """Return the module's options for a short measurement."""
    return {
        "url": server.url,
        "api_key": KEY,
        "concurrencies": [1, 4],
        "output_tokens": 20,
        "requests": 16,
        "results": str(folder / "tune"),
        "arm": "on",
    }


@pytest.fixture
def ask(run_module: Run, server: Served, tmp_path: Path) -> Run:
    def go(**more: Any) -> dict[str, Any]:
        return run_module(sglang_benchmark, **{**asked(server, tmp_path), **more})

    return go


def test_a_run(ask: Run, server: Served, tmp_path: Path) -> None:
    result = ask()
    assert result["changed"] is True
    assert result["file"] == str(tmp_path / "tune" / "on-1.json")
    run = result["run"]
    assert run == json.loads(Path(result["file"]).read_text())
    assert run["rejected"] == []
    assert [one["concurrency"] for one in run["points"]] == [1, 4]
    point = run["points"][1]
    assert set(point) == {
        *("concurrency", "prompts", "requests", "duration_s", "steady_s", "output_tok_s"),
        *("per_request_tok_s", "ttft_ms", "tpot_ms", "itl_ms", "e2e_ms", "in_flight"),
        *("accept_length", "accept_rate", "running_max", "queued_max", "kv_use_max", "retracted"),
        *("output_tokens", "input_tokens", "slowed_clocks", "reasons"),
    }
    assert point["output_tokens"] == {"asked": 20, "median": 20.0}
    assert point["input_tokens"] == {"asked": None, "median": 20.0}
    assert point["accept_length"] == 2.5
    assert point["accept_rate"] == 0.5
    assert point["kv_use_max"] == 0.25
    assert point["retracted"] == 0
    assert server.flushes == 2
    # 16 measured and two for each at a time before, all different
    texts = [body["messages"][0]["content"] for body in server.asked]
    assert len(texts) == len(set(texts)) == 16 + 2 + 16 + 8
    assert [body["max_completion_tokens"] for body in server.asked] == [20] * 42


def test_every_key_is_documented(ask: Run) -> None:
    import yaml  # noqa: PLC0415 - the one test that reads the documentation

    told = yaml.safe_load(sglang_benchmark.RETURN)["run"]["contains"]
    run = ask()["run"]
    assert set(run) == set(told)
    assert set(run["points"][0]) == set(told["points"]["contains"])


def test_facts_of_the_server_without_its_secrets(ask: Run) -> None:
    result = ask()
    run = result["run"]
    assert run["equal"]["mem_fraction_static"] == 0.8
    assert run["equal"]["cuda_graph_decode"] == {"backend": "full", "bs": [1, 2, 4]}
    assert run["equal"]["client"] == "own 1"
    assert run["apart"]["speculative_num_steps"] == 3
    assert run["apart"]["kv_tokens"] == 5000
    assert run["apart"]["effective_max_running_requests"] == 24
    assert "hunter" not in json.dumps(result)
    assert "hunter" not in Path(result["file"]).read_text()


def test_check_mode_sends_nothing(ask: Run, server: Served, tmp_path: Path) -> None:
    result = ask(check=True)
    assert result["changed"] is True
    assert result["run"] is None
    assert result["plan"] == [
        {"concurrency": 1, "requests": 16, "warmup": 2, "about_seconds": 12.0},
        {"concurrency": 4, "requests": 16, "warmup": 8, "about_seconds": 4.0},
    ]
    assert result["client"]["name"] == "own"
    assert (server.asked, server.flushes) == ([], 0)
    assert not (tmp_path / "tune").exists()
    assert not any("POST" in head for head in server.heads)


def test_again_nothing_is_left_to_do(ask: Run, server: Served) -> None:
    first = ask()
    sent = len(server.asked)
    second = ask()
    assert second["changed"] is False
    assert second["run"] == first["run"]
    assert second["plan"] == []
    assert len(server.asked) == sent
    more = ask(concurrencies=[2, 4], check=True)
    assert [one["concurrency"] for one in more["plan"]] == [2]
    assert [one["concurrency"] for one in ask(concurrencies=[2, 4])["run"]["points"]] == [1, 2, 4]


def test_what_was_measured_survives_what_interrupts(
    ask: Run, server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = _bench._point

    def fails(bench: Any, question: Any, concurrency: int) -> dict[str, Any]:
        if concurrency == 4:
            server.flush_status = 400
        return whole(bench, question, concurrency)

    monkeypatch.setattr(_bench, "_point", fails)
    result = ask()
    assert "is not idle (400 from /flush_cache" in result["msg"]
    server.flush_status = 200
    monkeypatch.setattr(_bench, "_point", whole)
    sent = len(server.asked)
    assert [one["concurrency"] for one in ask()["run"]["points"]] == [1, 4]
    assert len(server.asked) == sent + 16 + 8


def test_a_kill_in_the_middle_of_a_point_costs_that_point(
    ask: Run, server: Served, tmp_path: Path
) -> None:
    """SIGKILL: nothing can be tidied up. The process is a real one, as Ansible starts it."""
    arguments = asked(server, tmp_path)
    code = (
        "import json, sys; sys.path[:0] = json.loads(sys.argv[1])\n"
        "from ansible.module_utils import basic\n"
        "basic._ANSIBLE_ARGS = sys.stdin.buffer.read(); basic._ANSIBLE_PROFILE = 'legacy'\n"
        "from ansible_collections.gpuhost.inference.plugins.modules import sglang_benchmark\n"
        "sglang_benchmark.main()"
    )
    command = [sys.executable, "-c", code, json.dumps(sys.path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    assert process.stdin is not None
    process.stdin.write(json.dumps({"ANSIBLE_MODULE_ARGS": arguments}).encode())
    process.stdin.close()
    end = time.monotonic() + 60
    while len(server.asked) < 16 + 2 + 8 + 6:  # in the middle of the second point
        assert time.monotonic() < end
        assert process.poll() is None
        time.sleep(0.002)
    shown = Path(f"/proc/{process.pid}/cmdline").read_text()
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert KEY not in shown
    there = json.loads((tmp_path / "tune" / "on-1.json").read_text())
    assert [one["concurrency"] for one in there["points"]] == [1]
    time.sleep(0.2)  # until the server has noticed
    result = ask()
    assert [one["concurrency"] for one in result["plan"]] == [4]
    assert result["run"]["points"][0] == there["points"][0]
    assert sorted(path.name for path in (tmp_path / "tune").iterdir()) == ["on-1.json"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"output_tokens": 21}, "another question: output_tokens was 20, not 21"),
        ({"kinds": ["code"]}, "another question: kinds was"),
        ({"seed": 2}, "another question: seed was 1, not 2"),
        ({"flush": False}, "another question: flush was True, not False"),
    ],
)
def test_another_question_is_refused(
    ask: Run, server: Served, changes: dict[str, Any], said: str
) -> None:
    kept = Path(ask()["file"]).read_text()
    sent = len(server.asked)
    result = ask(**changes)
    assert said in result["msg"]
    assert "Count start up for a new start of the server, or set again to all" in result["msg"]
    assert len(server.asked) == sent
    assert ask(**changes, check=True)["msg"] == result["msg"]
    anew = ask(**changes, again="all")
    assert [one["concurrency"] for one in anew["plan"]] == [1, 4]
    old = [path for path in Path(anew["file"]).parent.iterdir() if path.name != "on-1.json"]
    assert [path.read_text() for path in old] == [kept]


def test_another_start_of_the_server_is_refused(ask: Run, server: Served) -> None:
    ask()
    server.info["startup_time"] = {"tokenizer_e2e": 12.6}
    assert "it is of another start of the server" in ask()["msg"]
    assert ask(start=2)["run"]["start"] == 2


def test_a_start_that_cannot_be_told_is_another_one(ask: Run, server: Served) -> None:
    del server.info["startup_time"], server.info["random_seed"]
    ask()
    assert "whether it is cannot be told" in ask()["msg"]


def test_rejected_points_are_kept_and_measured_again_when_asked(ask: Run, server: Served) -> None:
    server.length = 19
    first = ask(concurrencies=[4])["run"]
    assert [one["code"] for one in first["rejected"][0]["reasons"]] == ["short-output"]
    assert first["points"] == []
    server.length = 0
    assert ask(concurrencies=[4])["changed"] is False
    second = ask(concurrencies=[4], again="rejected")["run"]
    assert second["rejected"] == []
    assert len(second["points"]) == 1


def test_reasons_from_the_server(ask: Run, server: Served) -> None:
    server.info["internal_states"][0]["effective_max_running_requests_per_dp"] = 3
    (point,) = ask(concurrencies=[4])["run"]["rejected"]
    assert [one["code"] for one in point["reasons"]] == ["above-cap"]


def test_tokens_of_somebody_else(ask: Run, server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    before = _bench._bench_client.run

    def run(*given: Any) -> Any:
        server.more_tokens += 100
        return before(*given)

    monkeypatch.setattr(_bench._bench_client, "run", run)
    (point,) = ask(concurrencies=[4])["run"]["rejected"]
    assert [one["code"] for one in point["reasons"]] == ["tokens-unknown"]


def test_without_metrics_what_is_not_known_is_null(ask: Run, server: Served) -> None:
    server.metrics = False
    (point,) = ask(concurrencies=[4])["run"]["points"]
    unknown = (
        "accept_length",
        "accept_rate",
        "running_max",
        "queued_max",
        "kv_use_max",
        "retracted",
    )
    assert {name: point[name] for name in unknown} == dict.fromkeys(unknown)


def test_accept_length_of_old_releases(ask: Run, server: Served) -> None:
    """Before 0.5.13 there is no counter of verifications, but an average since the flush."""
    server.metrics = False
    server.info["internal_states"][0]["avg_spec_accept_length"] = 2.25
    (point,) = ask(concurrencies=[4])["run"]["points"]
    assert point["accept_length"] == 2.25
    (point,) = ask(concurrencies=[4], start=2, flush=False)["run"]["points"]
    assert point["accept_length"] is None


def test_without_speculation_there_is_no_accept_length(ask: Run, server: Served) -> None:
    server.info["speculative_algorithm"] = None
    (point,) = ask(concurrencies=[4])["run"]["points"]
    assert (point["accept_length"], point["accept_rate"]) == (None, None)


def test_an_old_release_names_the_endpoint_otherwise(ask: Run, server: Served) -> None:
    server.paths["/get_server_info"] = server.paths.pop("/server_info")
    assert ask(concurrencies=[1])["run"]["equal"]["sglang"] == "0.5.23"


def test_prompts_of_a_file(ask: Run, server: Served, tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    lines = [json.dumps({"conversations": [{"value": f"Question {n}?"}]}) for n in range(18)]
    path.write_text("\n".join(lines))
    (point,) = ask(concurrencies=[1], prompts=str(path))["run"]["points"]
    assert point["prompts"] == "file"
    assert {body["messages"][0]["content"].rpartition("\n")[2] for body in server.asked} == {
        f"Question {number}?" for number in range(18)
    }
    asked = len(server.asked)
    for check in (False, True):
        said = ask(concurrencies=[1, 2], prompts=str(path), start=2, check=check)
        assert "holds 18 different prompts, 20 are needed" in said["msg"]
    assert len(server.asked) == asked


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"concurrencies": []}, "concurrencies is empty"),
        ({"concurrencies": [0]}, "concurrencies: 0 is not between 1 and 4096"),
        ({"concurrencies": [8]}, "requests: 16 are too few with 8 at a time"),
        ({"arm": "../x"}, "arm '../x' names a file"),
        ({"output_tokens": 4}, "output_tokens must be at least 16, not 4"),
        ({"start": 0}, "start must be at least 1"),
        ({"results": "//tune"}, "must be an absolute path"),
        ({"kinds": []}, "kinds: none is given"),
        ({"prompts": "/nowhere/x.json"}, "prompts: /nowhere/x.json cannot be read"),
        ({"model": "other"}, "serves qwen, not other: correct model"),
        ({"client": "rust"}, "give python"),
        ({"python": "/nowhere/python"}, "/nowhere/python does not exist"),
        ({"url": "ftp://x"}, "url: 'ftp://x' is not one"),
        ({"temperature": "nan"}, "temperature is nan: give a number, as 0.7"),
        ({"temperature": "inf"}, "temperature is inf: give a number, as 0.7"),
    ],
)
def test_refusals(ask: Run, server: Served, changes: dict[str, Any], said: str) -> None:
    result = ask(**changes)
    assert result.get("failed") is True
    assert said in result["msg"]
    assert server.asked == []


@pytest.mark.parametrize("again", ["none", "all"])
@pytest.mark.parametrize(
    "content",
    [
        "[]",
        "",
        '{"schema": 1, "points": [',
        '{"schema": 1, "points": [], "rejected": NaN}',
        '{"schema": 1, "points": []}',
        '{"schema": 1, "points": [1], "rejected": []}',
        '{"schema": 1, "points": [], "rejected": [{"concurrency": "8"}]}',
        '{"schema": 1, "points": [{"concurrency": 1, "per_request_tok_s": NaN}], "rejected": []}',
        '{"schema": 1, "points": [{"concurrency": 1, "per_request_tok_s": "x"}], "rejected": []}',
        "[" * 100_000,
        "\x00\x1b[31m",
    ],
    ids=[str(number) for number in range(11)],
)
def test_a_file_that_is_none_of_ours(ask: Run, tmp_path: Path, content: str, again: str) -> None:
    (tmp_path / "tune").mkdir()
    (tmp_path / "tune" / "on-1.json").write_text(content)
    assert "is no run of this module: move it away" in ask(again=again)["msg"]
    assert (tmp_path / "tune" / "on-1.json").read_text() == content


def test_a_link_is_not_followed(ask: Run, tmp_path: Path) -> None:
    (tmp_path / "tune").mkdir()
    (tmp_path / "tune" / "on-1.json").symlink_to(tmp_path / "elsewhere.json")
    (tmp_path / "elsewhere.json").write_text("{}")
    assert "is no run of this module: move it away" in ask(again="all")["msg"]
    assert (tmp_path / "elsewhere.json").read_text() == "{}"


def test_files_put_aside_within_a_second_are_all_kept(
    ask: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock may also be put back."""
    monkeypatch.setattr(
        time, "gmtime", lambda *_now: time.struct_time([2026, 11, 1, 2, 0, 0] + [0] * 3)
    )
    for _turn in range(3):
        ask(concurrencies=[1], again="all")
    assert len(list((tmp_path / "tune").iterdir())) == 3


def test_a_restart_meanwhile(ask: Run, server: Served) -> None:
    """With other flags it would be another arm."""

    def restarts() -> tuple[int, str]:
        server.info["startup_time"] = {"tokenizer_e2e": float(server.flushes)}
        return server._flush()

    server.paths["/flush_cache"] = restarts
    server.info["startup_time"] = {"tokenizer_e2e": 0.0}
    assert [one["concurrency"] for one in ask(concurrencies=[1])["run"]["points"]] == [1]
    result = ask(concurrencies=[1, 4], again="all")
    assert "was started again while it was measured" in result["msg"]


def test_a_key_that_the_server_repeats_is_not_kept(ask: Run, server: Served) -> None:
    text = f"no, {KEY} is not allowed more"
    server.breaks = {5}
    server.broken = f"HTTP/1.1 429 No\r\ncontent-length: {len(text)}\r\n\r\n{text}".encode()
    result = ask(concurrencies=[1])
    (point,) = json.loads(Path(result["file"]).read_text())["rejected"]
    assert "429: no, (redacted) is not allowed more" in point["reasons"][0]["text"]
    assert KEY not in json.dumps(result)


@pytest.mark.parametrize("passes", [0.02, 1.4])
def test_an_accept_length_that_cannot_be_is_not_told(
    ask: Run, server: Served, passes: float
) -> None:
    """Counters that were begun anew, or are of something else."""
    server.passes = passes
    (point,) = ask(concurrencies=[1])["run"]["points"]
    assert (point["accept_length"], point["accept_rate"]) == (None, None)


def test_half_a_character_in_the_name_of_a_model(ask: Run, server: Served) -> None:
    server.paths["/v1/models"] = lambda: (200, '{"data": [{"id": "q\\ud800\\u001b[31m"}]}')
    assert "names no model: is it SGLang?" in ask()["msg"]


@pytest.mark.parametrize(
    ("path", "answer", "said"),
    [
        ("/v1/models", (401, ""), "does not take this api_key (401)"),
        ("/v1/models", (503, ""), "/v1/models answers 503: start the server"),
        ("/v1/models", (200, "{}"), "names no model: is it SGLang?"),
        ("/flush_cache", (404, ""), "set flush to false"),
    ],
)
def test_servers_that_are_not_ready(
    ask: Run, server: Served, path: str, answer: tuple[int, str], said: str
) -> None:
    server.paths[path] = lambda: answer
    assert said in ask()["msg"]


def test_nobody_listens(ask: Run) -> None:
    assert (
        "/v1/models refuses connections: start the server" in ask(url="http://127.0.0.1:9")["msg"]
    )


def test_a_server_that_answers_no_request(ask: Run, server: Served) -> None:
    server.status = 500
    said = ask()["msg"]
    assert "no request of the warm-up was answered" in said
    assert "sekret" not in said
