"""Calling the witnesses of servers that the stand-in cannot play: old, odd, busy, spread."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang import (
    describe,
    judge_server,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_http import Client, Reply
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_look import (
    Question,
    facts,
    look,
    wait_until_ready,
    watch_speculation,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader

URL = "http://127.0.0.1:30111"
MONOTONIC = 5000.0  # the clock of the machine, in all of these tests


def answer(status: int | None, body: Any = None, seconds: float = 0.01) -> Reply:
    failure = "timeout" if status is None else None
    text = body if isinstance(body, str) else json.dumps(body)
    return Reply(status, text, failure, seconds)


WELL = answer(200, "", 1.02)
MODELS = answer(200, {"data": [{"id": "qwen", "max_model_len": 4096}]})
INFO = answer(200, {"version": "0.5.23", "internal_states": [{}]})


class Scripted(Client):
    """A server that gives each endpoint's answers in turn, and its last one from then on."""

    def __init__(self, **answers: Reply | list[Reply]) -> None:
        super().__init__(URL, "key-hunter2")
        given = {"health": WELL, "v1_models": MODELS, "server_info": INFO, **answers}
        self._left = {
            name: list(one) if isinstance(one, list) else [one] for name, one in given.items()
        }
        self.asked: list[str] = []

    def ask(self, path: str, timeout: float, body: Mapping[str, Any] | None = None) -> Reply:
        del timeout, body
        self.asked.append(path)
        left = self._left.get(path[1:].replace("/", "_"), [answer(404)])
        return left.pop(0) if len(left) > 1 else left[0]


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.monotonic", lambda: MONOTONIC)


@pytest.fixture
def host(tmp_path: Path) -> Reader:
    """Return a machine on which process 42 of the unit listens on port 30111 (759F)."""
    process = tmp_path / "proc/42"
    (process / "fd").mkdir(parents=True)
    (process / "fd/7").symlink_to("socket:[900]")
    (process / "comm").write_text("python\n")
    (process / "stat").write_text("42 (python) S 1 0 0")
    (process / "cgroup").write_text("0::/system.slice/sglang.service\n")
    (tmp_path / "proc/net").mkdir()
    line = "  0: 0100007F:759F 00000000:0000 0A 0:0 00:0 0  0  0 900 1\n"
    (tmp_path / "proc/net/tcp").write_text(f"header\n{line}")
    return Reader(str(tmp_path))


STARTED = "server_args=ServerArgs(model_path='/m', x)"
READY = "The server is fired up and ready to roll!"


def systemd(*lines: tuple[float, str], **properties: str) -> Callable[[Sequence[str]], str]:
    """Play systemctl and journalctl for one service."""
    values = {"LoadState": "loaded", "ActiveState": "active", "SubState": "running"}
    values |= {"NRestarts": "0", "MainPID": "42", "InvocationID": "ab", "ExecMainCode": "0"}
    values |= {"ControlGroup": "/system.slice/sglang.service", **properties}

    def run(command: Sequence[str]) -> str:
        if command[0] == "journalctl":
            return "".join(f"[{at:12.6f}] ct100 python[42]: {text}\n" for at, text in lines)
        return "".join(f"{name}={value}\n" for name, value in values.items())

    return run


SERVES = systemd((4000.0, STARTED), (4100.0, READY))


def verdict_of(host: Reader, client: Client, run: Any = SERVES, **asked: Any) -> tuple[str, str]:
    verdict = judge_server(look(Question(URL, unit="sglang", **asked), client, host, run))
    return verdict.state, verdict.reason


def counters(tokens: int) -> Reply:
    return answer(200, f'sglang:prompt_tokens_total{{model_name="q"}} {tokens}.0\n')


SLOW = answer(503, "", 20.0)


@pytest.mark.parametrize(
    ("metrics", "lines", "state", "reason"),
    [
        ([counters(5), counters(9)], (), "degraded", "counters of tokens move"),
        ([counters(5), counters(5)], (), "hung", "no token was computed"),
        ([answer(404)], (), "hung", "without the flag enable-metrics"),
        # a long prompt: its tokens are counted at its end, its chunks are in the log
        ([counters(5)], ((5001.0, "Prefill batch, #new-seq: 1"),), "degraded", "new batches"),
        ([counters(5)], ((4999.0, "Prefill batch, #new-seq: 1"),), "hung", "no token"),
    ],
)
def test_busy_or_hung(
    host: Reader, metrics: list[Reply], lines: Any, state: str, reason: str
) -> None:
    client = Scripted(metrics=metrics, health=SLOW)
    run = systemd((4000.0, STARTED), (4100.0, READY), *lines)
    found = verdict_of(host, client, run)
    assert found[0] == state
    assert reason in found[1]


def test_compiler_of_the_unit_is_work(host: Reader) -> None:
    compiler = host.root / "proc/43"
    (compiler / "fd").mkdir(parents=True)
    (compiler / "comm").write_text("ptxas\n")
    (compiler / "stat").write_text("43 (ptxas) R 42 0 0")
    (compiler / "cgroup").write_text("0::/system.slice/sglang.service\n")
    client = Scripted(metrics=counters(5), health=SLOW)
    assert verdict_of(host, client)[0] == "degraded"
    (compiler / "cgroup").write_text("0::/system.slice/other.service\n")
    (compiler / "stat").write_text("43 (ptxas) R 1 0 0")
    assert verdict_of(host, client)[0] == "hung"


def test_health_without_a_generation_is_not_believed(host: Reader) -> None:
    """SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION=false makes a flag of `/health`."""
    flag = answer(200, "", 0.003)
    assert verdict_of(host, Scripted(health=flag, health_generate=SLOW))[0] == "hung"
    assert verdict_of(host, Scripted(health=flag, health_generate=WELL))[0] == "ready"
    for status in (401, 500):  # it says no, whatever the flag says
        said = verdict_of(host, Scripted(health=flag, health_generate=answer(status)))
        assert said == (
            "degraded",
            f"/health answers {status}: is it SGLang that listens at {URL}?",
        )
    assert verdict_of(host, Scripted(health=flag))[0] == "ready"  # a release without the other
    client = Scripted()
    verdict_of(host, client)
    assert "/health_generate" not in client.asked


def test_server_of_another_machine_only_computes(host: Reader) -> None:
    args = "server_args=ServerArgs(model_path='/m', nnodes=2, dist_init_addr='a:1', node_rank=1)"
    client = Scripted(health=answer(200, "", 0.002), v1_models=answer(404))
    state, reason = verdict_of(host, client, systemd((4000.0, args)), model_id="qwen")
    assert (state, reason[:27]) == ("ready", "computes as rank 1 of 2 for")
    assert client.asked == ["/metrics", "/health"]


def test_endpoints_of_an_old_release(host: Reader) -> None:
    summary = "max_total_num_tokens=99, chunked_prefill_size=8192, max_running_requests=24, x=1"
    old = answer(200, {"version": "0.4.10", "model_path": "/m", "internal_states": [{}]})
    client = Scripted(server_info=answer(404), get_server_info=old)
    run = systemd((4000.0, STARTED), (4050.0, summary), (4100.0, READY))
    question = Question(URL, unit="sglang")
    seen = look(question, client, host, run)
    found = facts(seen, judge_server(seen), question)
    assert (found["state"], found["version"], found["model_path"]) == ("ready", "0.4.10", "/m")
    # neither is in its answer; its log has both
    assert (found["effective_max_running_requests"], found["kv_tokens"]) == (24, 99)


def test_ranks_of_data_parallelism_are_added(host: Reader) -> None:
    states = [
        {"effective_max_running_requests_per_dp": 12, "avg_spec_accept_length": length}
        for length in (2.0, 3.0)
    ]
    info = answer(200, {"internal_states": states, "speculative_num_draft_tokens": 4})
    seen = look(Question(URL, unit="sglang"), Scripted(server_info=info), host, SERVES)
    found = facts(seen, judge_server(seen), Question(URL))
    assert found["effective_max_running_requests"] == 24
    assert found["speculation"]["accept_length"] == 2.5


ODD: tuple[Any, ...] = (
    None, True, "text", 7, -1.5, 10**400, "\ud800", [], [None], ["a", [1]], {}, {"id": {"a": 1}},
)  # fmt: skip
FIELDS = (
    "version", "model_path", "max_total_num_tokens", "internal_states", "status",
    "speculative_algorithm", "speculative_num_draft_tokens", "speculative_num_steps", "api_key",
)  # fmt: skip
INNER = ("memory_usage", "avg_spec_accept_length", "effective_max_running_requests_per_dp")


@pytest.mark.parametrize("odd", ODD)
def test_odd_answers_are_no_traceback(host: Reader, odd: Any) -> None:
    infos = [odd, dict.fromkeys(FIELDS, odd), {"internal_states": [odd, dict.fromkeys(INNER, odd)]}]
    infos.append({"internal_states": [{"memory_usage": {"kvcache": odd, "token_capacity": odd}}]})
    models = [odd, {"data": odd}, {"data": [odd]}, {"data": [{"id": odd, "max_model_len": odd}]}]
    texts = [odd, {"text": odd, "meta_info": odd}]
    texts.append({"meta_info": {"spec_verify_ct": odd, "completion_tokens": odd}})
    question = Question(URL, unit="sglang", model_id="qwen", acceptance_tokens=8)
    for info, model, text in itertools.product(infos, [*models, MODELS], texts):
        client = Scripted(
            server_info=answer(200, info),
            v1_models=model if isinstance(model, Reply) else answer(200, model),
            generate=answer(200, text),
            metrics=answer(200, str(odd)),
        )
        seen = look(question, client, host, SERVES)
        verdict = judge_server(seen)
        assert verdict.state in ("ready", "degraded")
        said = [facts(seen, verdict, question), list(describe(seen))]
        json.dumps(said, allow_nan=False, ensure_ascii=False).encode()  # which is printed


@pytest.mark.parametrize("models", ["<html>welcome</html>", {"data": []}])
def test_a_program_that_answers_all_with_200_is_no_server(host: Reader, models: Any) -> None:
    client = Scripted(v1_models=answer(200, models), health_generate=answer(200, "<html>"))
    state, reason = verdict_of(host, client)
    assert (state, reason) == (
        "degraded",
        "it is healthy, but /v1/models lists no model: is it SGLang?",
    )


@pytest.mark.parametrize(
    ("tokens", "passes", "verdict"),
    [
        (256, 255, "dead"),
        (32, 31, "dead"),
        (256, 64, "ok"),
        # the model ended early: with drafts that are never accepted these would look well
        (3, 2, "unknown"),
        (21, 20, "unknown"),
        # more than can be
        (256, 10, "unknown"),
        (-256, -64, "unknown"),
    ],
)
def test_acceptance_of_a_measurement(host: Reader, tokens: int, passes: int, verdict: str) -> None:
    meta = {"spec_verify_ct": passes, "completion_tokens": tokens}
    client = Scripted(
        server_info=answer(200, {"speculative_num_draft_tokens": 4}),
        generate=answer(200, {"text": "a text", "meta_info": meta}),
    )
    question = Question(URL, unit="sglang", acceptance_tokens=256)
    seen = look(question, client, host, SERVES)
    assert facts(seen, judge_server(seen), question)["speculation"]["verdict"] == verdict


def test_no_secret_of_a_server_in_a_result(host: Reader) -> None:
    info = {
        "api_key": "hunter2-a", "admin_api_key": ["hunter2-b"], "ssl_keyfile_password": "hunter2-c",
        "launch_command": "python -m sglang --api-key hunter2-d", "served_model_name": "qwen",
        "env": {"HF_TOKEN": "hunter2-e", "OTHER": "hf_hunter2hunter2hunter2"},
        "headers": [{"Authorization": "Bearer hunter2-f"}], "note": "--api-key hunter2-g",
        "watermark_key_b": "hunter2-j",
        "internal_states": [{"api_key": "hunter2-k"}],
        "max_prefill_tokens": 16384, "bucket_time_to_first_token": [0.5], "tokenizer_path": "/m",
    }  # fmt: skip
    models = answer(200, {"data": [{"id": "qwen api_key=hunter2-h"}]})
    client = Scripted(server_info=answer(200, info), v1_models=models)
    run = systemd(
        (4000.0, "server_args=ServerArgs(api_key='hunter2-i', x)"), (4001.0, "hf_" + "hunter2" * 4)
    )
    question = Question(URL, unit="sglang", model_id="qwen")
    seen = look(question, client, host, run)
    found = facts(seen, judge_server(seen), question)
    assert "hunter2" not in json.dumps([found, list(describe(seen))])
    assert found["flags"]["max_prefill_tokens"] == 16384
    assert found["flags"]["tokenizer_path"] == "/m"
    assert found["flags"]["env"]["HF_TOKEN"] == "(redacted)"


@pytest.mark.parametrize("lost", ["", "-- No entries --\n\n", None])
def test_journal_that_is_lost_is_a_witness_less(host: Reader, lost: str | None) -> None:
    def run(command: Sequence[str]) -> str:
        if command[0] != "journalctl":
            return SERVES(command)
        if lost is None:
            raise GpuHostError("journalctl failed (1): no permission")
        return lost

    assert verdict_of(host, Scripted(), run)[0] == "ready"
    assert verdict_of(host, Scripted(health=answer(503)), run)[0] == "warming"
    assert verdict_of(host, Scripted(health=SLOW), run)[0] == "hung"


def test_restart_in_a_window(host: Reader) -> None:
    answers = iter(["ab", "ab", "cd"])

    def run(command: Sequence[str]) -> str:
        if command[0] == "journalctl":
            return ""
        return systemd(InvocationID=next(answers))(command)

    question = Question(URL, unit="sglang", window=1)
    client = Scripted(metrics=answer(200, "generation_tokens_total 5\n"))
    seen = look(question, client, host, run)
    found = watch_speculation(seen, question, client, host, run)
    assert found is not None
    assert found.reason == "the server was restarted in the window"


def test_wait_ends_when_nothing_can_change_and_asks_a_hung_server_seldom(host: Reader) -> None:
    slept: list[float] = []
    clients = [Scripted(health=answer(503)), Scripted(health=SLOW), Scripted(v1_models=answer(401))]
    left = iter(clients)
    seen, verdict = wait_until_ready(
        lambda: look(Question(URL, unit="sglang"), next(left), host, systemd((4000.0, STARTED))),
        1e9,
        sleep=slept.append,
    )
    assert slept == [2.0, 10.0]
    assert (verdict.state, verdict.settled) == ("degraded", True)
    assert "the key is wrong" in verdict.reason
    assert seen.health is not None
