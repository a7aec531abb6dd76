# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.
"""Requests to a server that may be loading, hung, foreign or not there."""

from __future__ import annotations

import http.client
import json
import re
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Reply:
    """What came back, or why nothing did.

    Attributes:
        status: the HTTP status, `None` when there was no answer.
        body: the text of the answer.
        failure: `refused`, `timeout`, or the reason in words; `None` when there was an answer.
        seconds: how long it took.
    """

    status: int | None
    body: str
    failure: str | None
    seconds: float

    def json(self) -> dict[str, Any]:
        """Return the answer's JSON object, an empty one when it is not one."""
        try:
            value = json.loads(self.body)
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Leaves a redirect unfollowed: the key is for the asked server alone."""

    def redirect_request(self, *_arguments: Any) -> None:
        """Follow nothing; the redirect's own status is the answer."""


class Client:
    """Asks one server; proxies of the environment are not used."""

    def __init__(self, url: str, api_key: str | None = None, validate_certs: bool = True) -> None:
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        context = ssl.create_default_context()
        if not validate_certs:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        self._opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}),
            urllib.request.HTTPSHandler(context=context),
            _NoRedirect,
        )

    def ask(self, path: str, timeout: float, body: Mapping[str, Any] | None = None) -> Reply:
        """Send a GET, or a POST when there is a body; no answer is an answer too."""
        data = None if body is None else json.dumps(body).encode()
        headers = {**self._headers, **({"Content-Type": "application/json"} if data else {})}
        request = urllib.request.Request(self.url + path, data, headers)
        start = time.monotonic()
        status: int | None = None
        text, failure = "", None
        try:
            with self._opener.open(request, timeout=timeout) as answer:
                status = answer.status
                text = answer.read().decode("utf-8", "replace")
        except urllib.error.HTTPError as error:
            status = error.code
            with error:
                text = error.read().decode("utf-8", "replace")
        except (OSError, http.client.HTTPException) as error:
            failure = _failure(error)
        return Reply(status, text, failure, time.monotonic() - start)


def _failure(error: Exception) -> str:
    reason = getattr(error, "reason", error)  # URLError wraps what the socket said
    if isinstance(reason, ConnectionRefusedError):
        return "refused"
    if isinstance(reason, TimeoutError) or "timed out" in str(reason):
        return "timeout"
    return str(reason) or type(reason).__name__


@dataclass(frozen=True)
class Metric:
    """One Prometheus metric over all its label sets."""

    total: float
    highest: float


def parse_metrics(text: str) -> dict[str, Metric]:
    """Return the metrics by name, without the prefix `sglang:`.

    Labels differ between releases and ranks, so they are never matched: counters are to be read as
    a total, gauges of one server as the highest value.
    """
    values: dict[str, list[float]] = {}
    for line in text.splitlines():
        match = re.match(r"(?:sglang[:_])?([a-zA-Z_:][\w:]*)(?:\{.*\})? ([-+.\deE]+|NaN)", line)
        if match and match[2] != "NaN":
            values.setdefault(match[1], []).append(float(match[2]))
    return {name: Metric(sum(found), max(found)) for name, found in values.items()}
