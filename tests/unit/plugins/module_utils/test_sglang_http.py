"""Servers that are slow, endless, foreign or broken: each answer ends, none is a traceback."""

from __future__ import annotations

import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuhost.inference.plugins.module_utils import _sglang_http
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_http import (
    Client,
    Reply,
    parse_metrics,
)
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

Talk = Callable[[socket.socket], None]
HEAD = b"HTTP/1.1 200 OK\r\n"
PATIENCE = 20.0


class Server:
    """A server that says what a test wants; it keeps what it was asked."""

    def __init__(self, talk: Talk, address: str = "127.0.0.1") -> None:
        self.asked: list[bytes] = []
        self._talk = talk
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family)
        self.port: int = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connected, _peer = self._listener.accept()
            except OSError:  # closed
                return
            with connected:
                try:
                    self.asked.append(connected.recv(65536))
                    self._talk(connected)
                except OSError:  # the client has gone
                    continue

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    started: list[Server] = []

    def begin(talk: Talk, address: str = "127.0.0.1") -> Server:
        started.append(Server(talk, address))
        return started[-1]

    yield begin
    for server in started:
        server.close()


def drip(text: bytes) -> Talk:
    """Send a beginning, and then a byte each tenth of a second for ever."""

    def talk(connected: socket.socket) -> None:
        connected.sendall(text)
        while True:
            connected.sendall(b"x")
            time.sleep(0.1)

    return talk


@pytest.mark.parametrize(
    "beginning",
    [
        HEAD + b"X-Never: ends",
        HEAD + b"Content-Length: 100000\r\n\r\n",
        HEAD + b"Connection: close\r\n\r\n",
    ],
)
def test_slow_answer_ends(serve: Callable[..., Server], beginning: bytes) -> None:
    reply = Client(serve(drip(beginning)).url).ask("/health", 0.5)
    assert (reply.status, reply.body, reply.failure) == (None, "", "timeout")


def test_giant_answer_is_not_kept(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_sglang_http, "MOST", 100_000)

    def talk(connected: socket.socket) -> None:
        connected.sendall(HEAD + b"\r\n")
        while True:
            connected.sendall(b"x" * 65536)

    reply = Client(serve(talk).url).ask("/metrics", PATIENCE)
    assert (reply.status, reply.body) == (None, "")
    assert reply.failure == "an answer of more than 100000 bytes"


@pytest.mark.parametrize(
    ("answer", "status", "failure"),
    [
        (HEAD + b"Content-Length: 2\r\n\r\n{}", 200, None),
        (b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n", 503, None),
        # the key is for the asked server alone, so nobody is followed
        (
            b"HTTP/1.1 307 Go\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n",
            307,
            None,
        ),
        (b"SSH-2.0-OpenSSH_9.2p1\r\n", None, "does not speak HTTP"),
        (b"", None, "closed the connection"),
        (HEAD + b"Content-Length: 9\r\n\r\nhalf", None, "closed the connection"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", None, "closed the connection"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n-5\r\nhi", None, "closed the connection"),
    ],
)
def test_answers(
    serve: Callable[..., Server], answer: bytes, status: int | None, failure: str | None
) -> None:
    server = serve(lambda connected: connected.sendall(answer))
    reply = Client(server.url, "key-hunter2").ask("/health", PATIENCE)
    assert reply.status == status
    assert (failure or "") in (reply.failure or "")
    assert (reply.failure is None) is (failure is None)
    assert [b"Authorization: Bearer key-hunter2" in text for text in server.asked] == [True]


def test_nobody_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    assert Client(f"http://127.0.0.1:{port}").ask("/", 5).failure == "refused"


def test_nobody_answers_the_attempt() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        port = full.getsockname()[1]
        waiting = [socket.socket() for _each in range(4)]
        for one in waiting:
            one.setblocking(False)
            one.connect_ex(("127.0.0.1", port))
        time.sleep(0.1)
        assert Client(f"http://127.0.0.1:{port}").ask("/", 0.3).failure == "no connection"
        for one in waiting:
            one.close()


def test_ipv6(serve: Callable[..., Server]) -> None:
    try:
        server = serve(lambda connected: connected.sendall(HEAD + b"\r\n{}"), "::1")
    except OSError:
        pytest.skip("this machine has no IPv6")
    assert Client(f"http://[::1]:{server.port}/").ask("/v1/models", PATIENCE).status == 200
    assert f"Host: [::1]:{server.port}".encode() in server.asked[0]


def certificate(folder: Path) -> str:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "server.example")])
    now = datetime.now(timezone.utc)
    names = x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))])
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(7)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(names, critical=False)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    path = folder / "both.pem"
    path.write_bytes(private + made.public_bytes(serialization.Encoding.PEM))
    return str(path)


def test_tls(serve: Callable[..., Server], tmp_path: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate(tmp_path))
    connections = socket.create_server(("127.0.0.1", 0))

    def talk() -> None:
        while True:
            try:
                plain, _peer = connections.accept()
            except OSError:
                return
            try:
                with context.wrap_socket(plain, server_side=True) as connected:
                    connected.recv(65536)
                    connected.sendall(HEAD + b"Content-Length: 2\r\n\r\n{}")
            except OSError:
                plain.close()

    threading.Thread(target=talk, daemon=True).start()
    at = f"127.0.0.1:{connections.getsockname()[1]}"
    assert Client(f"https://{at}", validate_certs=False).ask("/", PATIENCE).status == 200
    failure = Client(f"https://{at}").ask("/", PATIENCE).failure or ""
    assert "certificate is not trusted here" in failure
    assert "url one of https" in (Client(f"http://{at}").ask("/", PATIENCE).failure or "")
    connections.close()
    plain = serve(lambda connected: connected.sendall(b"HTTP/1.1 400 Bad\r\n\r\n"))
    spoken = Client(f"https://127.0.0.1:{plain.port}", validate_certs=False).ask("/", PATIENCE)
    assert "url one of http?" in (spoken.failure or "")


@pytest.mark.parametrize(
    "url",
    [
        "",
        "127.0.0.1:30000",
        "ftp://a",
        "http://",
        "http://a:99999",
        "http://a b",
        "http://u:p@a",
        "http://[::1",
        "http://a?x=1",
        "http://\xe4",
        "http://a/?api_key=hunter2",
        # a user and a password, however misspelt
        "me:hunter2@a:30000",
        "http:/me:hunter2@a",
        "http://me:hunter2/x@a",
        "http://me:x@y:hunter2#@a",
    ],
)
def test_no_url(url: str) -> None:
    with pytest.raises(GpuHostError, match=r"^url") as error:
        Client(url)
    assert "hunter2" not in str(error.value)


def test_key_that_no_header_can_carry() -> None:
    with pytest.raises(GpuHostError, match="line break") as error:
        Client("http://a", "hunter2\n")
    assert "hunter2" not in str(error.value)


@pytest.mark.parametrize("text", ["", "<html>", "[1]", "null", "{", "[" * 100_000, '"text"'])
def test_no_object_is_an_empty_one(text: str) -> None:
    assert Reply(200, text, None, 0.0).json() == {}


def test_numbers_that_are_no_json() -> None:
    found = Reply(200, '{"a": NaN, "b": -Infinity, "c": 1e999, "d": 1.5}', None, 0.0).json()
    assert found == {"a": None, "b": None, "c": None, "d": 1.5}
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize(
    "line", ["x 1.2.3", "x .", "x e", "x", "x{ 1", "x +", "x 1e", "", "x NaN", "x -.e5", "x 1e999"]
)
def test_what_is_no_metric(line: str) -> None:
    found: dict[str, Any] = parse_metrics(f"{line}\ny 2\n")
    assert found.keys() == {"y"}


def test_ranks_that_do_the_same_work_count_once() -> None:
    text = """\
sglang:calls_total{tp_rank="0",pp_rank="0",dp_rank="0",model_name="a}b"} 5.0
sglang:calls_total{dp_rank="0",model_name="a}b",tp_rank="1",pp_rank="0"} 4.0
sglang:calls_total{tp_rank="0",pp_rank="0",dp_rank="1",model_name="a}b"} 7.0 1790000000
"""
    assert parse_metrics(text)["calls_total"] == _sglang_http.Metric(12.0, 7.0)
