# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.
"""Requests to a server that may be loading, hung, foreign or not there."""

from __future__ import annotations

import http.client
import io
import json
import math
import re
import socket
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError

MOST = 8 * 1024 * 1024  # bytes of an answer that are read; the longest of SGLang has 300 KB

# A count or size beyond it is none: digits without end, which no float holds, or an infinity
_HIGHEST = 2.0**63

REFUSED, NO_ANSWER, NO_CONNECTION = "refused", "timeout", "no connection"


@dataclass(frozen=True)
class Reply:
    """What came back, or why nothing did.

    Attributes:
        status: the HTTP status, `None` when there was no whole answer.
        body: the text of the answer.
        failure: `refused`, `no connection` (nobody answers the attempt), `timeout` (connected, but
            no whole answer), or the reason in words; `None` when there was an answer.
        seconds: how long it took.
    """

    status: int | None
    body: str
    failure: str | None
    seconds: float

    def json(self) -> dict[str, Any]:
        """Return the answer's JSON object, an empty one when it is not one."""
        try:
            value = json.loads(self.body, parse_constant=_nothing, parse_float=_finite)
        except (ValueError, RecursionError):
            return {}
        return value if isinstance(value, dict) else {}


def _nothing(_constant: str) -> None:
    """Stand for NaN and Infinity, which are no JSON."""


def _finite(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None


def text_of(value: Any) -> str | None:
    """Return a field that should be a text, `None` when it is none."""
    return value if isinstance(value, str) else None


def number_of(value: Any) -> float | None:
    """Return a field that should be a number, `None` when it is none that can be computed with."""
    counts = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value if counts and abs(value) <= _HIGHEST else None


def whole_of(value: Any) -> int | None:
    """Return a field that should be a whole number, `None` when it is none."""
    number = number_of(value)
    return None if number is None else int(number)


def dict_of(value: Any) -> dict[str, Any]:
    """Return a field that should be an object, an empty one when it is none."""
    return value if isinstance(value, dict) else {}


def list_of(value: Any) -> list[Any]:
    """Return a field that should be a list, an empty one when it is none."""
    return value if isinstance(value, list) else []


class _Incoming(io.RawIOBase):
    """What a socket receives until a moment: a limit for each read never ends a slow answer."""

    def __init__(self, connected: socket.socket, end: float) -> None:
        self._connected = connected
        self._end = end

    def readable(self) -> bool:
        """Tell that it is for reading."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read what has come, or wait for it until the end."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._connected.settimeout(left)
        return self._connected.recv_into(buffer)


class _Socket:
    """The part of a socket that `http.client` uses."""

    def __init__(self, connected: socket.socket, end: float) -> None:
        self._connected = connected
        self._end = end
        self.sendall = connected.sendall

    def close(self) -> None:
        """Leave it open, as an answer that ends with its connection is still to be read."""

    def makefile(self, _mode: str) -> io.BufferedReader:
        """Return the incoming side."""
        return io.BufferedReader(_Incoming(self._connected, self._end))


@dataclass(frozen=True)
class Target:
    """Where a server is, and what each request to it carries.

    Attributes:
        host: name or address.
        port: of TCP.
        path: that comes before that of an endpoint.
        headers: with the key.
        tls: how to speak TLS, `None` for plain HTTP.
    """

    host: str
    port: int
    path: str
    headers: Mapping[str, str]
    tls: ssl.SSLContext | None


class Client:
    """Asks one server; proxies of the environment are not used, redirects not followed."""

    def __init__(self, url: str, api_key: str | None = None, validate_certs: bool = True) -> None:
        """Take a server's address and key.

        Raises:
            GpuHostError: they cannot be ones.
        """
        self.url = url.rstrip("/")
        self._host, self._port, self._path = _parts(url)
        if api_key and not (api_key.isascii() and api_key.isprintable()):
            raise GpuHostError(
                "api_key holds a character that no HTTP header can carry: is there a line break "
                "at its end?"
            )
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._tls: ssl.SSLContext | None = None
        if urlsplit(url).scheme == "https":
            self._tls = ssl.create_default_context()
            if not validate_certs:
                self._tls.check_hostname = False
                self._tls.verify_mode = ssl.CERT_NONE

    @property
    def target(self) -> Target:
        """Return where it asks."""
        return Target(self._host, self._port, self._path, self._headers, self._tls)

    def ask(
        self,
        path: str,
        timeout: float,
        body: Mapping[str, Any] | None = None,
        *,
        delete: bool = False,
    ) -> Reply:
        """Send a GET, or a POST when there is a body; no answer is an answer too.

        Args:
            path: of the endpoint.
            timeout: seconds in all, however slowly the answer comes.
            body: an object to be sent as JSON.
            delete: send a DELETE instead.
        """
        method = "DELETE" if delete else "GET" if body is None else "POST"
        start = time.monotonic()
        status: int | None = None
        text, failure = "", None
        try:
            connected = self._connect(start + timeout)
        except (OSError, UnicodeError) as error:
            failure = _failure(error, NO_CONNECTION)
            return Reply(None, "", failure, time.monotonic() - start)
        try:
            answer = self._send(connected, start + timeout, (method, path), body)
            content = answer.read(MOST + 1)
            if len(content) > MOST:
                failure = f"an answer of more than {MOST} bytes"
            elif answer.length:  # the rest never came
                raise http.client.IncompleteRead(content, answer.length)
            else:
                status, text = answer.status, content.decode("utf-8", "replace")
        # http.client lets a chunk of less than no bytes through to the reader, which refuses it
        except (OSError, http.client.HTTPException, ValueError) as error:
            failure = _failure(error, NO_ANSWER)
        finally:
            connected.close()
        return Reply(status, text, failure, time.monotonic() - start)

    def _connect(self, end: float) -> socket.socket:
        left = max(0.1, end - time.monotonic())
        connected = socket.create_connection((self._host, self._port), timeout=left)
        if self._tls is None:
            return connected
        try:
            return self._tls.wrap_socket(connected, server_hostname=self._host)
        except OSError:
            connected.close()
            raise

    def _send(
        self,
        connected: socket.socket,
        end: float,
        line: tuple[str, str],
        body: Mapping[str, Any] | None,
    ) -> http.client.HTTPResponse:
        default = 443 if self._tls else 80
        connection = http.client.HTTPConnection(self._host, self._port)
        connection.default_port = default
        connection.sock = _Socket(connected, end)
        data = None if body is None else json.dumps(body).encode()
        headers = {"Connection": "close", **self._headers}
        if data is not None:
            headers["Content-Type"] = "application/json"
        method, path = line
        connection.request(method, self._path + path, data, headers)
        return connection.getresponse()


def _parts(url: str) -> tuple[str, int, str]:
    """Return host, port and path of a URL.

    Raises:
        GpuHostError: it is none of HTTP, or holds a password.
    """
    # before anything of it is quoted, however it is misspelt
    if "@" in url or "?" in url:
        raise GpuHostError(
            "url must not hold a user, a password or a query: a key goes into api_key"
        )
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise GpuHostError(f"url is not one: {error}") from error
    printable = url.isascii() and url.isprintable() and " " not in url
    if parts.scheme not in ("http", "https") or not host or not printable:
        raise GpuHostError(f"url: {url!r} is not one as http://127.0.0.1:30000")
    return host, port or (443 if parts.scheme == "https" else 80), parts.path.rstrip("/")


def _failure(error: Exception, timed_out: str) -> str:
    if isinstance(error, ConnectionRefusedError):
        return REFUSED
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted here ({error.verify_message})"
    if isinstance(error, ssl.SSLError):
        return "it does not speak TLS: is the url one of http?"
    if isinstance(error, TimeoutError) or "timed out" in str(error):
        return timed_out
    if isinstance(error, (http.client.HTTPException, ConnectionResetError, ValueError)) and not (
        isinstance(error, UnicodeError)
    ):
        return "it closed the connection or does not speak HTTP: is the url one of https?"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


@dataclass(frozen=True)
class Metric:
    """One Prometheus metric over all its label sets.

    Attributes:
        total: the sum. Of ranks that work on the same tokens only the highest counts.
        highest: the highest value.
    """

    total: float
    highest: float


_SAME_WORK = re.compile(r'(?:tp_rank|pp_rank|moe_ep_rank)="[^"]*",?')
_SAMPLE = re.compile(
    r"(?:sglang[:_])?([a-zA-Z_:][\w:]*)(?:\{(.*)\})? "
    r"([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)(?:\s|$)",
    re.ASCII,
)


def parse_metrics(text: str) -> dict[str, Metric]:
    """Return the metrics by name, without the prefix `sglang:`.

    Labels differ between releases and ranks, so they are never matched: counters are to be read as
    a total, gauges of one server as the highest value.
    """
    values: dict[str, dict[str, float]] = {}
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if match and abs(float(match[3])) <= _HIGHEST:
            same = values.setdefault(match[1], {})
            labels = _SAME_WORK.sub("", match[2] or "").rstrip(",")
            same[labels] = max(float(match[3]), same.get(labels, -math.inf))
    return {
        name: Metric(sum(found.values()), max(found.values())) for name, found in values.items()
    }
