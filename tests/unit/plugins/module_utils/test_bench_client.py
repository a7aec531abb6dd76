"""The load generator of our own against a server whose pace is known."""

from __future__ import annotations

import gc
import time
from typing import Any

import pytest
from ansible_collections.gpuhost.inference.plugins.module_utils._bench_client import (
    Load,
    occupied,
    run,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._bench_stats import (
    Request,
    figures,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_http import Client
from paced_server import Paced

KEY = "key-hunter2"


def send(
    server: Paced, concurrency: int, count: int, tokens: int = 40, **more: Any
) -> list[Request]:
    load = Load(
        "qwen",
        [f"prompt {n}" for n in range(count)],
        concurrency,
        tokens,
        0.5,
        more.pop("timeout", 30),
    )
    return run(Client(server.url, **more).target, load)


@pytest.mark.parametrize(("concurrency", "packed"), [(1, 1), (4, 1), (4, 3)])
def test_pace_is_read_right(concurrency: int, packed: int) -> None:
    """With some room, as other tests run on the same machine; `benchmarks/clients.py` has less."""
    with Paced(gap=0.004, first=0.02, packed=packed) as server:
        found = send(server, concurrency, 8 * concurrency, 61)
    assert [one.error for one in found] == [None] * len(found)
    assert {one.tokens for one in found} == {61}
    assert {one.input_tokens for one in found} == {20}
    assert server.most == concurrency
    assert server.connections == concurrency  # they are kept
    point, _part = figures(found, concurrency, None)
    gap = 0.004 / packed
    assert point["tpot_ms"]["median"] == pytest.approx(gap * 1000, rel=0.05)
    assert point["ttft_ms"]["median"] == pytest.approx(20, rel=0.5)
    true = concurrency * 61 / (0.02 + 60 * gap)
    assert point["output_tok_s"] == pytest.approx(true, rel=0.1)
    assert point["in_flight"] == pytest.approx(concurrency, rel=0.05)


@pytest.mark.parametrize("pieces", [1, 7])
def test_the_stream_may_be_cut_anywhere(pieces: int) -> None:
    with Paced(gap=0, first=0, pieces=pieces) as server:
        found = send(server, 2, 4, 30)
    assert [(one.tokens, len(one.gaps), one.error) for one in found] == [(30, 29, None)] * 4


def test_what_is_sent() -> None:
    with Paced(gap=0, first=0) as server:
        send(server, 2, 5, 4, api_key=KEY)
    assert sorted(body["messages"][0]["content"] for body in server.asked) == [
        f"prompt {number}" for number in range(5)
    ]
    body = server.asked[0]
    del body["messages"]
    assert body == {
        "model": "qwen",
        "max_completion_tokens": 4,
        "temperature": 0.5,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert all(f"Authorization: Bearer {KEY}\r\n" in head for head in server.heads)


def test_answers_come_in_the_order_of_the_prompts() -> None:
    with Paced(gap=0.001, first=0.005) as server:
        found = send(server, 3, 12, 10)
    starts = [one.start for one in found]
    assert starts == sorted(starts, key=lambda start: start or 0.0)


def test_thoughts_are_tokens_too() -> None:
    """A reasoning model may think for the whole answer: its first thought is the first token."""
    with Paced(gap=0.01, first=0.01, thinks=30) as server:
        (found,) = send(server, 1, 1, 30)
    assert found.ttft < 0.1
    assert len(found.gaps) == 29


def test_without_usage_the_count_is_unknown() -> None:
    with Paced(gap=0, first=0, usage=False) as server:
        found = send(server, 1, 2, 5)
    assert [(one.tokens, one.error) for one in found] == [(None, None)] * 2


def test_a_server_that_closes_after_each_answer() -> None:
    with Paced(gap=0, first=0, closes=True) as server:
        found = send(server, 2, 6, 5)
    assert [one.error for one in found] == [None] * 6
    assert server.connections == 6


def test_a_connection_lost_in_the_middle_is_one_failure() -> None:
    with Paced(gap=0.001, first=0, breaks={2}) as server:
        found = send(server, 1, 5, 20)
    assert [one.error for one in found] == [
        None,
        None,
        "the server closed the connection",
        None,
        None,
    ]


def test_a_refusal_is_told_without_secrets() -> None:
    with Paced(status=503) as server:
        found = send(server, 2, 3, 5)
    assert {one.error for one in found} == {'503: {"message": "no, with api_key=(redacted)'}
    assert server.connections == 2  # a refusal keeps its connection


def test_nobody_listens() -> None:
    with Paced() as server:
        pass
    found = send(server, 2, 3, 5)
    assert all("Connect call failed" in str(one.error) for one in found)


def test_an_error_within_a_stream() -> None:
    event = b'data: {"error": {"message": "out of memory"}}\n\n'
    head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(event)
    with Paced(said=head + event) as server:
        (found,) = send(server, 1, 1, 5)
    assert "out of memory" in str(found.error)


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", "0: "),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", "the answer is no HTTP"),
        (
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n8\r\ndata: {\n\r\n",
            "the answer is no HTTP",
        ),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", "an answer without text"),
    ],
)
def test_what_is_no_stream(said: bytes, error: str) -> None:
    with Paced(said=said, closes=True) as server:
        (found,) = send(server, 1, 1, 5)
    assert str(found.error).startswith(error)


OPEN = b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n"
CHUNKS = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
WORD = b'data: {"choices": [{"delta": {"content": "word"}}]}\n\n'
USAGE = b'data: {"choices": [], "usage": {"completion_tokens": 2}}\n\n'
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("said", "error"),
    [
        # each would be followed by the same chunk again, for ever
        (CHUNKS + b"-6\r\ndata: 1\r\n", "the answer is no HTTP"),
        (b"HTTP/1.1 \xb2\xb0\xb0 OK\r\n\r\n", "0: "),
        (OPEN + b"data: " + b"[" * 100_000 + b"\n\n", "the answer is no HTTP"),
        (OPEN + b"data: 5\n\ndata: [1]\n\n" + DONE, "an answer without text"),
        (
            OPEN
            + b'data: {"choices": {"a": 1}}\n\ndata: {"choices": [5]}\n\n'
            + b'data: {"choices": [{"delta": "x"}]}\n\n'
            + DONE,
            "an answer without text",
        ),
        (OPEN + WORD + USAGE, "the answer ended without [DONE]"),
        (CHUNKS + b"%x\r\n%b\r\n0\r\n\r\n" % (len(WORD), WORD), "the answer ended without [DONE]"),
        (b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 2_000_000, "the answer is no HTTP"),
        (OPEN + b"data: " + b"x" * 9_000_000, "the answer is no HTTP"),
        (b"HTTP/1.1 503 No\r\ncontent-length: 12\r\n\r\nfull\n\x1b[31m!\n\n", "503: full [31m!"),
    ],
    ids=[str(number) for number in range(10)],
)
def test_servers_that_lie(said: bytes, error: str) -> None:
    with Paced(said=said, closes=True) as server:
        began = time.monotonic()
        (found,) = send(server, 1, 1, 5, timeout=5)
    assert str(found.error).startswith(error)
    assert time.monotonic() - began < 4


@pytest.mark.parametrize("event", [b'"error": null', b'"x": [{"y": null}]'])
def test_what_more_an_event_holds_is_no_error(event: bytes) -> None:
    with Paced(
        said=OPEN + WORD.replace(b'{"choices"', b"{" + event + b', "choices"') + USAGE + DONE,
        closes=True,
    ) as server:
        (found,) = send(server, 1, 1, 2)
    assert (found.error, found.tokens) == (None, 2)


def test_http_1_0_closes_after_each_answer() -> None:
    body = WORD + USAGE + DONE
    head = b"HTTP/1.0 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body)
    with Paced(said=head + body, closes=True) as server:
        found = send(server, 1, 3, 2)
    assert [one.error for one in found] == [None] * 3


def test_what_has_not_ended_in_time_has_failed() -> None:
    with Paced(gap=0.01, first=0) as server:
        began = time.monotonic()
        found = send(server, 2, 6, 60, timeout=1)
        assert time.monotonic() - began < 5
    errors = [one.error for one in found]
    assert errors[:2] == [None, None]
    assert errors[-1] == "no end within 1 s"


def test_time_that_is_spent_is_known_here() -> None:
    before = occupied()
    end = time.process_time() + 0.1
    while time.process_time() < end:
        pass
    after = occupied()
    assert before is not None
    assert after is not None
    assert after - before > 0.09


def test_garbage_is_collected_again_afterwards() -> None:
    with Paced(gap=0, first=0) as server:
        send(server, 1, 1, 2)
    assert gc.isenabled()
