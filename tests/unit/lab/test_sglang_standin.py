"""The stand-in for SGLang behaves as the real 0.5.23 does for what the collection looks at."""

from __future__ import annotations

import argparse
import contextlib
import http.client
import importlib
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
from types import SimpleNamespace
from typing import Any

import pytest
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_flags import read_flags

LAB = Path(__file__).resolve().parents[3] / "lab" / "sglang"
PATIENCE = 30  # seconds until a test gives up; nothing is asserted about time
MTP = ("--speculative-algorithm", "NEXTN", "--max-running-requests", "64")
MEMORY = ("--tp", "4", "--mem-fraction-static", "0.80")
STORY = "Please tell me a tale about the ships in the harbour and the people who build them"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a model folder with the draft layer's tensors and one without."""
    top = tmp_path_factory.mktemp("models")
    for name, options in {"whole": [], "bare": ["--without-mtp"]}.items():
        subprocess.run([sys.executable, LAB / "make_model", top / name, *options], check=True)
    return {"whole": top / "whole", "bare": top / "bare"}


class Server:
    """One running stand-in with its log."""

    def __init__(self, log: Path, model: Path, *flags: str, **environment: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port: int = probe.getsockname()[1]
        self._log = log
        given = {"GPUS": "none", "LOAD_SECONDS": "0", "WARMUP_SECONDS": "0", "TIME_SCALE": "0"}
        lab = {f"LAB_SGLANG_{name}": value for name, value in given.items()}
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model)]
        with log.open("wb") as stderr:
            self.process = subprocess.Popen(
                [*command, "--port", str(self.port), *flags],
                env={**os.environ, "PYTHONPATH": str(LAB), **lab, **environment},
                stderr=stderr,
                start_new_session=True,
            )

    @property
    def log(self) -> str:
        return self._log.read_text()

    def ask(
        self, path: str, body: Any = None, key: str = "", timeout: float = PATIENCE
    ) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        with contextlib.closing(connection):
            if body is None:
                connection.request("GET", path, headers=headers)
            else:
                connection.request("POST", path, json.dumps(body), headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()

    def json(self, path: str, body: Any = None, key: str = "") -> Any:
        status, text = self.ask(path, body, key)
        assert status == 200, text
        return json.loads(text)

    def status(self, path: str) -> int | None:
        """Return the status, `None` while nobody listens."""
        with contextlib.suppress(ConnectionError):
            return self.ask(path)[0]
        return None

    def wait(self, path: str, status: int | None) -> None:
        def answered() -> bool:
            assert self.process.poll() is None, self.log[-2000:]
            return self.status(path) == status

        eventually(answered, self)

    def children(self) -> dict[str, int]:
        """Return the child processes by the name that `ps` shows."""
        pid = self.process.pid
        listed = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        names = (Path(f"/proc/{child}/cmdline").read_text().rstrip("\0") for child in listed)
        return dict(zip(names, map(int, listed)))

    def generate(self, text: str, tokens: int = 256, key: str = "", **sampling: Any) -> Any:
        sampling = {"max_new_tokens": tokens, "temperature": 0, **sampling}
        return self.json("/generate", {"text": text, "sampling_params": sampling}, key)


def eventually(condition: Callable[[], bool], server: Server) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, server.log[-2000:]
        time.sleep(0.02)


@pytest.fixture(scope="module")
def launch(
    models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Server]]:
    """Start servers; at the end of the module none of their processes is left."""
    started: list[Server] = []
    logs = tmp_path_factory.mktemp("logs")

    def start(*flags: str, model: str = "whole", ready: bool = True, **environment: str) -> Server:
        log = logs / f"{len(started)}.log"
        started.append(Server(log, models[model], *MEMORY, *flags, **environment))
        if ready:
            started[-1].wait("/ready", 200)
        return started[-1]

    yield start
    for server in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.process.pid, signal.SIGKILL)
        server.process.wait()


@pytest.fixture(scope="module")
def served(launch: Callable[..., Server]) -> Server:
    """Return a ready server with MTP, key and metrics."""
    flags = ("--api-key", "secret", "--served-model-name", "qwen", "--enable-metrics")
    return launch(*MTP, *flags)


# Flags


@pytest.fixture
def standin(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import the stand-in's own modules into this process."""
    monkeypatch.syspath_prepend(str(LAB))
    names: dict[str, Any] = {}
    for module in ("standin.arguments", "standin.engine", "standin.model", "standin.text"):
        names.update(vars(importlib.import_module(f"sglang.{module}")))
    names.update(vars(importlib.import_module("sglang.srt.server_args")))
    return SimpleNamespace(**names)


def test_collection_reads_the_flags_that_the_parser_takes(standin: Any) -> None:
    parser = argparse.ArgumentParser(add_help=False)
    standin.ServerArgs.add_cli_args(parser)
    flags = read_flags(str(LAB / "sglang"))
    assert flags.version == "0.5.23"
    assert set(flags.spellings()) == set(parser._option_string_actions)
    assert flags.spellings()["--tensor-parallel-size"].dest == "tp_size"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--mamba-scheduler-strategy", "extra_buffer"], "unrecognized arguments"),
        (["--cuda-graph-max-bs", "8"], "ambiguous option"),
        (["--mamba-radix-cache-strategy", "extra"], "invalid choice"),
    ],
)
def test_flag_of_another_version_is_refused(
    standin: Any, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as end:
        standin.parse(["--model-path", "x", *flags])
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_abbreviation_is_accepted(standin: Any) -> None:
    args = standin.parse(["--model", "x", "--tp", "4", "--speculative-algo", "nextn"])
    assert (args["tp_size"], args["speculative_algorithm"]) == (4, "nextn")


def test_config_file_gives_flags_and_the_command_line_wins(standin: Any, tmp_path: Path) -> None:
    config = tmp_path / "server.yaml"
    config.write_text(
        "# comment\nmodel-path: '/srv/a b'\nenable-metrics: true\nlog-requests: false\nport: 1\n"
        'api-key: "k: #1"  # secret\ncuda-graph-bs-decode:\n  - 1\n- 2\nnuma-node: [0, 1]\n'
    )
    args = standin.parse(["--port", "2", "--config", str(config)])
    assert (args["model_path"], args["api_key"], args["port"]) == ("/srv/a b", "k: #1", 2)
    assert args["enable_metrics"] is True
    assert args["log_requests"] is False
    assert (args["cuda_graph_bs_decode"], args["numa_node"]) == ([1, 2], [0, 1])


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--speculative-algorithm", "NEXT"], ValueError),
        (["--speculative-algorithm", "NEXTN", "--speculative-num-steps", "3"], TypeError),
        (["--speculative-algorithm", "NEXTN", "--speculative-eagle-topk", "1"], AssertionError),
        (["--mamba-radix-cache-strategy", "no_buffer"], AssertionError),
    ],
)
def test_combination_is_refused(
    standin: Any, models: dict[str, Path], flags: list[str], error: type[Exception]
) -> None:
    args = standin.parse(["--model-path", "x", *flags])
    with pytest.raises(error):
        standin.resolve(args, standin.read_model(str(models["whole"])))


@pytest.mark.parametrize(
    ("fraction", "dtype", "fit"),
    [
        ("0.80", "float32", [45, 24]),
        ("0.85", "float32", [57, 31]),
        ("0.85", "bfloat16", [114, 62]),
        ("0.90", "float32", [70, 38]),
        ("0.90", "bfloat16", [138, 76]),
    ],
)
def test_state_slots_limit_concurrency(
    standin: Any, models: dict[str, Path], fraction: str, dtype: str, fit: list[int]
) -> None:
    model = standin.read_model(str(models["whole"]))
    common = ["--model-path", "x", "--tp", "4", "--mem-fraction-static", fraction]
    common += ["--mamba-ssm-dtype", dtype, "--max-running-requests", "256"]
    found = []
    for flags in ([], ["--speculative-algorithm", "NEXTN"]):
        args = standin.parse([*common, *flags])
        standin.resolve(args, model)
        found.append(standin.plan(args, model).max_running)
    assert found == fit


# Speed and acceptance, without a process


def throughput(standin: Any, models: dict[str, Path], concurrency: int, *flags: str) -> float:
    """Return tokens per second of the engine's own clock in the middle of long answers."""
    model = standin.read_model(str(models["whole"]))
    args = standin.parse(["--model-path", "x", *MEMORY, "--decode-log-interval", "9999", *flags])
    standin.resolve(args, model)
    engine = standin.Engine(args, standin.plan(args, model), has_mtp=True)
    chance = standin.draft_chance("chat", 0.0)
    for number in range(concurrency):
        engine.add(standin.Request(str(number), 64, number, chance, 10**6))
    engine.step()
    made = sum(request.made for request in engine.running)
    seconds = sum(engine.step()[0] for _step in range(300))
    return float(sum(request.made for request in engine.running) - made) / seconds


@pytest.mark.parametrize(("concurrency", "mtp_wins"), [(1, True), (8, True), (64, False)])
def test_mtp_wins_alone_and_loses_in_a_crowd(
    standin: Any, models: dict[str, Path], concurrency: int, mtp_wins: bool
) -> None:
    off = throughput(standin, models, concurrency)
    assert (throughput(standin, models, concurrency, *MTP) > off) is mtp_wins


@pytest.mark.parametrize(
    ("kind", "prompt"),
    [
        ("chat", STORY),
        ("code", "Finish this:\n```python\ndef fib(n):\n"),
        ("reasoning", "Prove step by step that there are infinitely many primes."),
        ("random", "x9f qq7z 0kd vv3b 8sj2 zz1 p0p k3l5 <17x> <4x>"),
        ("repeated", "word " * 50),
    ],
)
def test_prompt_kinds_are_told_apart(standin: Any, kind: str, prompt: str) -> None:
    assert standin.kind_of(prompt) == kind


# A ready server


def test_key_protects_all_but_health_and_metrics(served: Server) -> None:
    assert json.loads(served.ask("/v1/models")[1]) == {"error": "Unauthorized"}
    statuses = {
        p: served.ask(p)[0] for p in ("/v1/models", "/generate", "/nowhere", "/server_info")
    }
    assert set(statuses.values()) == {401}
    assert {p: served.ask(p)[0] for p in ("/health", "/ready", "/metrics")} == {
        "/health": 200,
        "/ready": 200,
        "/metrics": 200,
    }
    card = served.json("/v1/models", key="secret")["data"][0]
    assert (card["id"], card["root"], card["max_model_len"]) == ("qwen", "qwen", 262144)
    assert served.ask("/nowhere", key="secret")[0] == 404
    assert served.ask("/generate", key="secret")[0] == 405
    assert served.ask("/generate", {"text": 5}, key="secret")[0] == 400


def test_effective_limit_differs_from_the_requested_one(served: Server) -> None:
    info = served.json("/server_info", key="secret")
    state = info["internal_states"][0]
    assert (info["max_running_requests"], state["effective_max_running_requests_per_dp"]) == (
        64,
        24,
    )
    assert (info["version"], info["speculative_algorithm"]) == ("0.5.23", "EAGLE")
    assert info["lab_stand_in"] is True
    # The real server shows keys in clear; whoever stores its answers has to redact them.
    assert "--api-key secret" in info["launch_command"]
    assert "'api_key': 'secret'" in served.log
    assert served.json("/v1/loads", key="secret")["loads"][0]["max_running_requests"] == 24
    assert "max_running_requests is capped to 24 by the mamba state cache" in served.log
    assert re.search(r"max_running_requests=24, context_len=262144, available_gpu_mem=", served.log)
    assert "type=Qwen3_5ForCausalLMMTP" in served.log


def test_children_are_named_as_sglang_names_them(served: Server) -> None:
    ranks = [f"sglang::scheduler_TP{rank}" for rank in range(4)]
    assert sorted(served.children()) == sorted([*ranks, "sglang::detokenizer"])


def test_accept_length_from_counters_metrics_and_log(served: Server) -> None:
    served.json("/model_info", key="secret")
    meta = served.generate(STORY, key="secret")["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 256}
    length = meta["completion_tokens"] / meta["spec_verify_ct"]
    assert length == meta["spec_accept_length"]
    assert 1.6 < length < 3.0
    lines = served.ask("/metrics")[1].splitlines()
    values = {
        m[1]: float(m[2]) for m in (re.match(r"sglang:(\w+)\{.*\} (\S+)$", x) for x in lines) if m
    }
    assert 1.6 < values["spec_accept_length"] < 3.0
    assert 1.6 < values["generation_tokens_total"] / values["spec_verify_calls_total"] < 3.0
    assert (values["spec_num_steps"], values["spec_num_draft_tokens"]) == (3, 4)
    assert values["time_to_first_token_seconds_count"] == values["num_requests_total"]
    line = re.findall(r"^\[[^]]+ TP0\] Decode batch, (.*)$", served.log, re.M)[-1]
    pairs = dict(re.findall(r"([#A-Za-z][^:,]*?): ([0-9.]+|True|False)(?=,|$)", line))
    assert 1.6 < float(pairs["accept len"]) < 3.0
    assert {"#running-req", "#full token", "mamba usage", "accept rate", "#queue-req"} <= set(pairs)


def test_average_appears_after_a_log_interval_and_flush_takes_it_away(served: Server) -> None:
    def average() -> Any:
        state = served.json("/server_info", key="secret")["internal_states"][0]
        return state.get("avg_spec_accept_length")

    assert served.ask("/flush_cache", {}, key="secret")[0] == 200
    assert average() is None
    served.generate(STORY, key="secret")
    assert 1.6 < average() < 3.0


def test_answer_is_deterministic_and_not_repetitive(served: Server) -> None:
    first, second = (served.generate(STORY, key="secret") for _step in range(2))
    assert first["text"] == second["text"]
    assert first["text"] != served.generate(STORY + "!", key="secret")["text"]
    assert second["meta_info"]["cached_tokens"] > 0
    words = first["text"].split()
    assert len(words) == 256 == len(first["output_ids"])
    assert len(set(words)) > 80
    assert not any(a == b for a, b in zip(words, words[1:]))


def test_chat_streams_several_tokens_in_a_chunk_and_counts_them(served: Server) -> None:
    body = {
        "model": "anything",
        "messages": [{"role": "user", "content": STORY}],
        "max_tokens": 100,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    status, text = served.ask("/v1/chat/completions", body, "secret")
    events = [line[len("data: ") :] for line in text.splitlines() if line]
    assert status == 200
    assert events.pop() == "[DONE]"
    chunks = [json.loads(event) for event in events]
    assert chunks[-1]["usage"]["completion_tokens"] == 100
    assert chunks[-2]["choices"][0]["finish_reason"] == "length"
    deltas = [c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"]]
    assert len("".join(deltas).split()) == 100
    assert chunks[0]["model"] == "anything"


def test_whole_answers_of_the_openai_endpoints(served: Server) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": STORY}]}]
    chat = served.json(
        "/v1/chat/completions",
        {"messages": messages, "max_tokens": 60, "return_spec_tokens_details": True},
        "secret",
    )
    assert len(chat["choices"][0]["message"]["content"].split()) == 60
    assert chat["sglext"]["spec_tokens_details"]["spec_verify_ct"] > 0
    plain = served.json("/v1/completions", {"prompt": STORY}, "secret")
    assert (plain["usage"]["completion_tokens"], plain["model"]) == (16, "qwen")


# Other starts


def test_without_speculation_there_are_no_fields_of_it(launch: Callable[..., Server]) -> None:
    server = launch("--enable-metrics", "--reasoning-parser", "qwen3")
    meta = server.generate(STORY)["meta_info"]
    assert not [name for name in meta if name.startswith("spec_")]
    states = server.json("/get_server_info")["internal_states"][0]
    assert "avg_spec_accept_length" not in states
    assert states["effective_max_running_requests_per_dp"] == 45
    assert re.search(r"^sglang:spec_accept_length\{.*\} 0\.0$", server.ask("/metrics")[1], re.M)
    body = {"messages": [{"role": "user", "content": STORY}], "max_tokens": 10}
    message = server.json("/v1/chat/completions", body)["choices"][0]["message"]
    assert message["content"] is None
    assert len(message["reasoning_content"].split()) == 10


def test_checkpoint_without_draft_tensors_serves_with_accept_length_one(
    launch: Callable[..., Server],
) -> None:
    server = launch(*MTP, model="bare")
    assert server.status("/metrics") == 404
    meta = server.generate(STORY)["meta_info"]
    assert 1.0 <= meta["spec_accept_length"] < 1.05
    assert (meta["spec_num_correct_drafts"], meta["spec_accept_rate"]) == (0, 0.0)
    assert "accept len: 1.00, accept rate: 0.00" in server.log


def test_warm_up_answers_models_but_not_health_and_sigterm_hangs(
    launch: Callable[..., Server],
) -> None:
    server = launch(ready=False, LAB_SGLANG_WARMUP_SECONDS="3600")
    server.wait("/v1/models", 200)
    assert {server.status(p) for p in ("/health", "/health_generate", "/ready")} == {503}
    server.process.terminate()
    server.wait("/v1/models", None)
    assert server.process.poll() is None
    assert "sglang::scheduler_TP0" in server.children()


def test_sigterm_while_loading_ends_the_main_process_only(launch: Callable[..., Server]) -> None:
    server = launch(ready=False, LAB_SGLANG_LOAD_SECONDS="3600")
    eventually(lambda: "Load weight begin" in server.log or "Init parallel" in server.log, server)
    assert server.status("/health") is None
    children = server.children().values()
    server.process.terminate()
    assert server.process.wait(PATIENCE) == -signal.SIGTERM
    assert all(Path(f"/proc/{child}").exists() for child in children)


def test_sigterm_drains_and_exits_zero(launch: Callable[..., Server]) -> None:
    server = launch(LAB_SGLANG_TIME_SCALE="0.1")
    answers: list[Any] = []
    long = threading.Thread(
        target=lambda: answers.append(server.generate(STORY, 2000, ignore_eos=True))
    )
    long.start()
    eventually(lambda: server.json("/v1/loads")["loads"][0]["num_running_reqs"] == 1, server)
    assert server.ask("/flush_cache", {})[0] == 400
    server.process.terminate()
    server.wait("/ready", 503)
    assert (server.status("/health"), server.status("/v1/models")) == (503, 200)
    long.join()
    assert answers[0]["meta_info"]["completion_tokens"] == 2000
    assert server.process.wait(PATIENCE) == 0
    assert "Gracefully exiting... Remaining number of requests" in server.log


def test_client_that_leaves_frees_its_slot(launch: Callable[..., Server]) -> None:
    server = launch(LAB_SGLANG_TIME_SCALE="1")
    sampling = {"max_new_tokens": 100_000, "ignore_eos": True}
    body = json.dumps({"text": STORY, "sampling_params": sampling, "stream": True})
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    connection.request("POST", "/generate", body)
    answer = connection.getresponse()
    assert answer.readline().startswith(b"data: ")
    answer.close()
    connection.close()
    eventually(lambda: server.ask("/flush_cache", {})[0] == 200, server)


def test_hung_scheduler_is_seen_by_health_only(launch: Callable[..., Server]) -> None:
    server = launch("--enable-metrics", SGLANG_HEALTH_CHECK_TIMEOUT="1")
    scheduler = server.children()["sglang::scheduler_TP0"]
    os.kill(scheduler, signal.SIGSTOP)
    assert server.status("/ready") == 200
    assert server.status("/health") == 503
    statuses = {path: server.status(path) for path in ("/ready", "/v1/models", "/metrics")}
    assert statuses == {"/ready": 503, "/v1/models": 200, "/metrics": 200}
    with pytest.raises(TimeoutError):
        server.ask("/server_info", timeout=0.2)
    os.kill(scheduler, signal.SIGCONT)
    server.wait("/health", 200)
    assert server.status("/ready") == 200


def test_killed_scheduler_is_noticed(launch: Callable[..., Server]) -> None:
    server = launch()
    os.kill(server.children()["sglang::scheduler_TP0"], signal.SIGKILL)
    eventually(lambda: "crashed with exit code -9" in server.log, server)


def test_no_gpu_kills_the_server_as_a_dead_scheduler_does(launch: Callable[..., Server]) -> None:
    server = launch(ready=False, LAB_SGLANG_GPUS="", CUDA_VISIBLE_DEVICES="")
    assert server.process.wait(PATIENCE) == -signal.SIGKILL
    assert "No CUDA devices found via torch.cuda." in server.log
    assert "Rank 0 scheduler died during initialization (exit code: 1)" in server.log


def test_taken_port_is_found_after_loading(launch: Callable[..., Server]) -> None:
    first = launch()
    second = launch("--port", str(first.port), ready=False)
    assert second.process.wait(PATIENCE) == 3
    assert re.search(r"\[Errno 98\].*address already in use", second.log)


def test_bad_flag_ends_with_status_two(launch: Callable[..., Server]) -> None:
    server = launch("--mamba-scheduler-strategy", "extra_buffer", ready=False)
    assert server.process.wait(PATIENCE) == 2
    assert "sglang serve: error: unrecognized arguments" in server.log
