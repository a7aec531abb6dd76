# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.
"""Workers of a router in front of SGLang servers: read, take out, put back.

Facts are from sglang-router 0.3.2 and smg 1.13.0, both run in front of servers.

- `/health` answers 200 without any worker, so it says nothing; `/workers` is what is looked at.
- The router's probe of a worker is its `/health`, which needs no key: a worker that refuses the key
  is healthy to the router and refuses every request. So each worker is asked with the key as well.
- Adding and removing are done in the background after the answer 202.
- A request that is under way on a removed worker goes on to its end.
"""

from __future__ import annotations

import math
import re
import time
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from ansible_collections.gpuhost.inference.plugins.module_utils._redact import redact
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_http import (
    NO_ANSWER,
    NO_CONNECTION,
    REFUSED,
    Client,
    Reply,
    parse_metrics,
    whole_of,
)

_TIMEOUT = 10.0
_PAUSE = 1.0
# Looks in a row that must find a removed worker idle: a request may be on its way to it
_QUIET_LOOKS = 2


@dataclass(frozen=True)
class Worker:
    """A worker as the router lists it.

    Attributes:
        id: the router's name for it, another one each time it is added.
        url: where the router reaches it, without a slash at the end.
        healthy: whether the router sends requests to it.
        model_id: the model it was found to offer, `None` when the router could not find out.
    """

    id: str
    url: str
    healthy: bool
    model_id: str | None


def worker_url(text: str) -> str:
    """Return the URL of a worker in the form that the router lists.

    Raises:
        GpuHostError: it is no URL of a server, or has a password in it.
    """
    text = text.strip()
    try:
        parts = urllib.parse.urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise _no_url(text, str(error)) from None
    if "@" in text:
        raise _no_url(
            text.rpartition("@")[2], "it had a user or password in it, which logs would show"
        )
    if parts.scheme not in ("http", "https") or not host:
        raise _no_url(text, "it does not begin with http:// or https:// and a host")
    if parts.path.strip("/") or parts.query or parts.fragment:
        raise _no_url(text, "it goes on behind the port")
    if not re.fullmatch(r"[\w.:%-]+", host):
        raise _no_url(text, "that is no name of a host")
    name = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{name}" + (f":{port}" if port is not None else "")


def _no_url(text: str, why: str) -> GpuHostError:
    shown = text.rpartition("@")[2]
    return GpuHostError(
        f"Worker {shown} is no URL for the router: {why}. Write http://HOST:PORT, an IPv6 address"
        " as http://[ADDRESS]:PORT."
    )


def worker_urls(texts: Sequence[str]) -> list[str]:
    """Return the URLs of all workers as the router lists them.

    Raises:
        GpuHostError: one is no URL, or stands there twice.
    """
    urls = [worker_url(text) for text in texts]
    twice = sorted({url for url in urls if urls.count(url) > 1})
    if twice:
        raise GpuHostError(f"Workers stand there twice: {', '.join(twice)}. Name each one once.")
    return urls


def _said(reply: Reply) -> str:
    return reply.failure or f"{reply.status} {redact(reply.body[:200])}".strip()


def read_workers(router: Client) -> list[Worker]:
    """Return the workers that a router has.

    Raises:
        GpuHostError: it does not answer, refuses the key, or is no router.
    """
    reply = router.ask("/workers", _TIMEOUT)
    if reply.status in (401, 403):
        raise GpuHostError(f"The router at {router.url} refuses the key: check its api_key.")
    listed = reply.json().get("workers")
    if reply.status != 200 or not isinstance(listed, list):
        raise GpuHostError(
            f"The router at {router.url} does not list its workers ({_said(reply)}): see that it"
            " runs, and that it is a router and no server."
        )
    return [
        Worker(
            str(one.get("id")),
            redact(str(one.get("url", ""))).rstrip("/"),
            one.get("is_healthy") is True,
            None if one.get("model_id") in (None, "unknown") else str(one["model_id"]),
        )
        for one in listed
        if isinstance(one, dict)
    ]


def refusal(worker: Client) -> str | None:
    """Return why a worker would not serve a request with the key, `None` when it would."""
    reply = worker.ask("/v1/models", _TIMEOUT)
    if reply.status == 200:
        return None
    if reply.status in (401, 403):
        return "it refuses the key; clients, router and servers need one and the same"
    if reply.failure == REFUSED:
        return "nothing listens there; it is stopped or still loading"
    if reply.failure in (NO_ANSWER, NO_CONNECTION):
        return f"it did not answer in {_TIMEOUT:g} seconds"
    return _said(reply)


@dataclass(frozen=True)
class Load:
    """Requests on a server.

    Attributes:
        requests: running and queued ones by each witness that could be asked.
        gone: whether nothing listens there, so that nothing can run.
        said: what the witnesses said, in words.
    """

    requests: tuple[int, ...]
    gone: bool
    said: str

    @property
    def idle(self) -> bool:
        """Whether nothing runs. Without any witness that is not known, and so it is not idle."""
        return self.gone or (bool(self.requests) and not any(self.requests))


def read_load(worker: Client) -> Load:
    """Ask a server how many requests it has, by both of its witnesses.

    They are `/v1/loads` (SGLang 0.5.7 and later) and `/metrics` (with `--enable-metrics`).
    """
    loads, metrics = worker.ask("/v1/loads", _TIMEOUT), worker.ask("/metrics", _TIMEOUT)
    if REFUSED == loads.failure == metrics.failure:
        return Load((), True, "nothing listens there")
    found: list[int] = []
    said: list[str] = []
    ranks = loads.json().get("loads")
    if loads.status == 200 and isinstance(ranks, list) and ranks:
        found.append(sum(_count(rank) for rank in ranks))
        said.append(f"/v1/loads: {found[-1]} requests")
    else:
        said.append(f"/v1/loads: {_said(loads)[:80]}")
    values = parse_metrics(metrics.body) if metrics.status == 200 else {}
    if "num_running_reqs" in values and "num_queue_reqs" in values:
        gauges = (values["num_running_reqs"], values["num_queue_reqs"])
        found.append(sum(math.ceil(abs(gauge.total)) for gauge in gauges))
        said.append(f"/metrics: {found[-1]} requests")
    return Load(tuple(found), False, ", ".join(said))


def _count(rank: Any) -> int:
    """Return the requests of one rank; what it does not say counts as one that runs."""
    rank = rank if isinstance(rank, dict) else {}
    counts = [whole_of(rank.get(name)) for name in ("num_running_reqs", "num_waiting_reqs")]
    return sum(count if count is not None and count >= 0 else 1 for count in counts)


@dataclass(frozen=True)
class Fleet:
    """The router and how its workers are asked directly.

    Attributes:
        router: the router.
        worker: makes the client of a worker from its URL.
    """

    router: Client
    worker: Callable[[str], Client]


def problems(fleet: Fleet, urls: Sequence[str]) -> dict[str, str]:
    """Return for each worker that does not serve through the router why that is so."""
    listed = {worker.url: worker for worker in read_workers(fleet.router)}
    found: dict[str, str] = {}
    for url in urls:
        refused = refusal(fleet.worker(url))
        if url not in listed:
            found[url] = "the router does not list it" + (f", and {refused}" if refused else "")
        elif not listed[url].healthy:
            found[url] = "the router holds it for unhealthy" + (
                f", and {refused}" if refused else "; its probes have not succeeded often enough"
            )
        elif refused:
            found[url] = refused
    return found


def put_in(fleet: Fleet, urls: Sequence[str], api_key: str | None, wait: float) -> None:
    """Add those workers that the router does not list, and wait until all of them serve.

    Args:
        fleet: the router.
        urls: the workers, as `worker_urls` returns them.
        api_key: what the router asks a worker for its model with.
        wait: seconds until all must serve. A refused key is not waited for.

    Raises:
        GpuHostError: the router refuses one, or one does not serve; says which and why.
    """
    _add(fleet, urls, api_key)
    end = time.monotonic() + wait
    while True:
        found = problems(fleet, urls)
        if not found:
            return
        if time.monotonic() >= end or any("refuses the key" in why for why in found.values()):
            raise GpuHostError(
                f"The router at {fleet.router.url} does not serve by all its workers. "
                f"{_listing(found)}."
            )
        time.sleep(_PAUSE)


def take_out(
    fleet: Fleet, urls: Sequence[str], api_key: str | None, min_healthy: int, wait: float | None
) -> None:
    """Remove workers from the router and wait until nothing runs on them.

    Those that are not idle in time are put in again, as nothing else was done to them.

    Args:
        fleet: the router.
        urls: the workers, as `worker_urls` returns them.
        api_key: for putting them in again.
        min_healthy: how many others must serve.
        wait: seconds until they must be idle; `None` only looks whether they may be removed.

    Raises:
        GpuHostError: too few others serve, the router refuses, or one is not idle in time.
    """
    workers = read_workers(fleet.router)
    listed = [worker for worker in workers if worker.url in urls]
    if listed:
        _check_others(fleet, [w.url for w in workers if w.url not in urls], min_healthy, listed)
    if wait is None:
        return
    for worker in listed:
        reply = fleet.router.ask(f"/workers/{worker.id}", _TIMEOUT, delete=True)
        if reply.status not in (200, 202, 204, 404):
            raise GpuHostError(f"The router keeps worker {worker.url}: {_said(reply)}.")
    _wait_gone(fleet.router, urls)
    busy = _wait_idle(fleet, urls, wait)
    if busy:
        _add(fleet, list(busy), api_key)
        raise GpuHostError(
            f"Not idle {wait:g} seconds after leaving the router, and so put into it again:"
            f" {_listing(busy)}. Give it more time, or find the clients that use it directly."
        )


def _listing(found: Mapping[str, str]) -> str:
    return "; ".join(f"{url}: {why}" for url, why in sorted(found.items()))


def _add(fleet: Fleet, urls: Sequence[str], api_key: str | None) -> None:
    listed = {worker.url for worker in read_workers(fleet.router)}
    for url in urls:
        if url in listed:
            continue
        reply = fleet.router.ask(
            "/workers", _TIMEOUT, {"url": url, **({"api_key": api_key} if api_key else {})}
        )
        if reply.status not in (200, 201, 202, 409):  # 409: it is being added already
            raise GpuHostError(f"The router does not take worker {url}: {_said(reply)}.")


def _check_others(
    fleet: Fleet, others: Sequence[str], min_healthy: int, leaving: Sequence[Worker]
) -> None:
    ill = problems(fleet, others)
    if len(others) - len(ill) < min_healthy:
        raise GpuHostError(
            f"{', '.join(worker.url for worker in leaving)} stays in the router, as"
            f" {len(others) - len(ill)} others serve and {min_healthy} must."
            + (f" {_listing(ill)}." if ill else "")
        )


def _wait_gone(router: Client, urls: Sequence[str]) -> None:
    end = time.monotonic() + 3 * _TIMEOUT
    while True:
        left = [worker.url for worker in read_workers(router) if worker.url in urls]
        if not left:
            return
        if time.monotonic() >= end:
            raise GpuHostError(f"The router still lists {', '.join(left)} after being told not to.")
        time.sleep(_PAUSE / 4)


def _wait_idle(fleet: Fleet, urls: Sequence[str], wait: float) -> dict[str, str]:
    """Return what still runs on workers that were taken out, when the time is over."""
    end = time.monotonic() + wait
    quiet = dict.fromkeys(urls, 0)
    while True:
        loads = {url: read_load(fleet.worker(url)) for url in urls}
        quiet = {url: quiet[url] + 1 if load.idle else 0 for url, load in loads.items()}
        busy = {
            url: load.said
            for url, load in loads.items()
            if quiet[url] < _QUIET_LOOKS and not load.gone
        }
        if not busy or time.monotonic() >= end:
            return busy
        time.sleep(_PAUSE)
