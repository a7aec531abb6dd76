# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.

"""A run: the points of one start of one arm, each written down as soon as it is measured.

Whatever interrupts a run costs at most the point under way. What is in the file is taken only when
it answers the same question about the same start of the server.
"""

from __future__ import annotations

import json
import math
import platform
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ansible_collections.gpuhost.inference.plugins.module_utils import (
    _bench_client,
    _bench_corpus,
    _bench_judge,
    _bench_server,
    _bench_sglang,
    _bench_stats,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._bench_corpus import Corpus
from ansible_collections.gpuhost.inference.plugins.module_utils._bench_server import Server, Watch
from ansible_collections.gpuhost.inference.plugins.module_utils._bench_sglang import Tool
from ansible_collections.gpuhost.inference.plugins.module_utils._bench_stats import Request
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from ansible_collections.gpuhost.inference.plugins.module_utils._files import (
    File,
    apply_files,
    plan_files,
    read_file,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_http import (
    Client,
    dict_of,
    list_of,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._speculation import (
    judge_acceptance,
)

SCHEMA = 1
WARM_TOKENS = 64  # of an answer of the warm-up: enough for every size of batch and its graphs
GUESS = 30.0  # tokens/s of a request where nothing was measured yet, for the duration told
_ROOT = Path("/")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


@dataclass(frozen=True)
class Question:
    """What is asked.

    Attributes:
        arm: name of the variant that runs, as `off` or `mtp-3`.
        start: which start of this arm it is.
        concurrencies: a point for each.
        corpus: where prompts come from.
        context_tokens: about how long each prompt is, `None` for the question alone.
        output_tokens: of each answer.
        requests: measured for a point, `None` for four for each at a time, at least 32.
        warmup: before a point, `None` for two for each at a time.
        flush: whether the prefix cache is emptied before each point.
        seed: of prompts and their order.
        temperature: of sampling.
        timeout: seconds for the requests of a point.
    """

    arm: str
    start: int
    concurrencies: tuple[int, ...]
    corpus: Corpus
    context_tokens: int | None
    output_tokens: int
    requests: int | None
    warmup: int | None
    flush: bool
    seed: int
    temperature: float
    timeout: float

    def requests_at(self, concurrency: int) -> int:
        """Return how many requests are measured at a concurrency."""
        return self.requests or max(4 * concurrency, 32)

    def warmup_at(self, concurrency: int) -> int:
        """Return how many requests warm up at a concurrency."""
        return 2 * concurrency if self.warmup is None else self.warmup

    def key(self) -> dict[str, Any]:
        """Return what two runs must share for a point of one to answer the other."""
        return {
            "arm": self.arm,
            "start": self.start,
            "corpus": self.corpus.sha256,
            "kinds": list(self.corpus.kinds),
            "context_tokens": self.context_tokens,
            "output_tokens": self.output_tokens,
            "requests": self.requests,
            "warmup": self.warmup,
            "flush": self.flush,
            "seed": self.seed,
            "temperature": self.temperature,
        }


def check(question: Question) -> None:
    """Refuse what cannot be measured.

    Raises:
        GpuHostError: an option is none.
    """
    if not _NAME.fullmatch(question.arm):
        raise GpuHostError(
            f"arm {question.arm!r} names a file: use letters, digits, '.', '_' and '-', as mtp-3"
        )
    low: dict[str, tuple[float, float]] = {
        "start": (question.start, 1),
        "output_tokens": (question.output_tokens, 16),
        "context_tokens": (question.context_tokens or 0, 0),
        "requests": (question.requests or 1, 1),
        "warmup": (question.warmup or 0, 0),
        "timeout": (question.timeout, 1),
        "temperature": (question.temperature, 0),
    }
    for name, (value, least) in low.items():
        if value < least:
            raise GpuHostError(f"{name} must be at least {least:g}, not {value:g}")
    if not math.isfinite(question.temperature):
        raise GpuHostError(f"temperature is {question.temperature}: give a number, as 0.7")
    if not question.concurrencies:
        raise GpuHostError("concurrencies is empty: name at least one, as [1, 8, 32, 128]")
    for concurrency in question.concurrencies:
        if not 1 <= concurrency <= 4096:
            raise GpuHostError(f"concurrencies: {concurrency} is not between 1 and 4096")
        if question.requests_at(concurrency) < 3 * concurrency:
            raise GpuHostError(
                f"requests: {question.requests} are too few with {concurrency} at a time: its "
                f"first wave and its tail are left out, so give {4 * concurrency}, or leave it out"
            )
        _bench_corpus.check_count(
            question.corpus, question.requests_at(concurrency) + question.warmup_at(concurrency)
        )


@dataclass(frozen=True)
class Book:
    """The file of a run, and what of it can be taken.

    Attributes:
        path: of the file.
        content: of it, empty for none.
        refusal: why it cannot be gone on with, `None` when it can.
    """

    path: str
    content: dict[str, Any]
    refusal: str | None

    def concurrencies(self) -> list[int]:
        """Return those that are measured, rejected ones too."""
        return [one["concurrency"] for one in (*self.points(), *self.points("rejected"))]

    def points(self, key: str = "points") -> list[dict[str, Any]]:
        """Return the points, or with `rejected` those that must not be used."""
        return list(self.content.get(key, []))


def open_book(folder: str, question: Question, server: Server, tool: Tool) -> Book:
    """Read the file of a run.

    Raises:
        GpuHostError: it cannot be read, or is none of ours.
    """
    if not re.match("/[^/]", folder):
        raise GpuHostError(f"results {folder!r} must be an absolute path, as /var/lib/gpuhost/tune")
    path = f"{folder.rstrip('/')}/{question.arm}-{question.start}.json"
    file = read_file(_ROOT, path)
    if file is None:
        return Book(path, {}, None)
    try:
        content = dict_of(json.loads(file.content or ""))
        json.dumps(content, allow_nan=False)  # it is written again with what is measured
    except (ValueError, RecursionError):
        content = {}
    if not _is_run(content):
        raise GpuHostError(f"{path} is no run of this module: move it away, or name other results")
    return Book(path, content, _refusal(content, question, server, tool))


def _is_run(content: dict[str, Any]) -> bool:
    lists = [content.get("points"), content.get("rejected")]
    points = [dict_of(point) for some in lists for point in list_of(some)]
    return (
        content.get("schema") == SCHEMA
        and all(isinstance(some, list) for some in lists)
        and all(isinstance(point.get("concurrency"), int) for point in points)
        and all(
            isinstance(point.get("per_request_tok_s"), (int, float, type(None))) for point in points
        )
    )


def _refusal(content: dict[str, Any], question: Question, server: Server, tool: Tool) -> str | None:
    asked, now = dict_of(content.get("question")), question.key()
    other = [name for name in now if asked.get(name) != now[name]]
    if other:
        name = other[0]
        return f"it answers another question: {name} was {asked.get(name)!r}, not {now[name]!r}"
    client = dict_of(content.get("client"))
    if client != {"name": tool.name, "version": tool.version}:
        return (
            f"it was measured with the client {client.get('name')} {client.get('version')}, not "
            f"{tool.name} {tool.version}, and figures of two clients are never mixed"
        )
    started = dict_of(content.get("server_start"))
    if started != server.started or all(value is None for value in started.values()):
        return "it is of another start of the server, or whether it is cannot be told"
    return None


def plan(question: Question, book: Book, again: str) -> list[int]:
    """Return the concurrencies that are still to be measured, in the order asked for.

    Args:
        question: what is asked.
        book: what is there.
        again: `none`, `rejected` or `all`.

    Raises:
        GpuHostError: what is there is of another question or start.
    """
    wanted = list(dict.fromkeys(question.concurrencies))
    if again == "all" or not book.content:
        return wanted
    if book.refusal is not None:
        raise GpuHostError(
            f"{book.path}: {book.refusal}. Count start up for a new start of the server, or set "
            "again to all, which puts the file aside and measures anew"
        )
    there = [point["concurrency"] for point in book.points()]
    if again != "rejected":
        there += [point["concurrency"] for point in book.points("rejected")]
    return [concurrency for concurrency in wanted if concurrency not in there]


def about_seconds(question: Question, book: Book, concurrency: int) -> float:
    """Return about how long a point takes, by one that is there or by a guess."""
    paces = [
        point["per_request_tok_s"]
        for point in (*book.points(), *book.points("rejected"))
        if point.get("concurrency") == concurrency and point.get("per_request_tok_s")
    ]
    pace = paces[0] if paces else GUESS
    waves = -(-question.requests_at(concurrency) // concurrency)
    warm = -(-question.warmup_at(concurrency) // concurrency)
    tokens = waves * question.output_tokens + warm * min(WARM_TOKENS, question.output_tokens)
    return round(tokens / pace, 1)


def new_run(question: Question, server: Server, tool: Tool, url: str) -> dict[str, Any]:
    """Return a run without points."""
    kinds = list(question.corpus.kinds)
    client = {"name": tool.name, "version": tool.version}
    asked = {name: value for name, value in question.key().items() if name not in ("arm", "start")}
    return {
        "schema": SCHEMA,
        "arm": question.arm,
        "start": question.start,
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "host": platform.node(),
        "server": url,
        "client": client,
        "seed": question.seed,
        "corpus": {"sha256": question.corpus.sha256, "kinds": kinds},
        "equal": {
            **_bench_server.equal_facts(server),
            **_bench_server.read_gpus(),
            "client": f"{tool.name} {tool.version}",
            **asked,
        },
        "apart": _bench_server.apart_facts(server),
        "question": question.key(),
        "server_start": server.started,
        "points": [],
        "rejected": [],
    }


def write(book: Book, run: dict[str, Any]) -> None:
    """Write a run as a whole, on the disk before this returns.

    Raises:
        GpuHostError: that is not possible.
    """
    content = json.dumps(run, indent=1, allow_nan=False) + "\n"
    apply_files(_ROOT, plan_files(_ROOT, [File(book.path, content, 0o640)], []))


def put_aside(book: Book) -> None:
    """Keep a file that is to be replaced, under a name with the time.

    Raises:
        GpuHostError: that is not possible.
    """
    if book.content:
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        aside = Path(f"{book.path}.{stamp}")
        while aside.exists():  # of the same second, or the clock was put back
            aside = aside.with_name(f"{aside.name}-")
        try:
            Path(book.path).rename(aside)
        except OSError as error:
            raise GpuHostError(f"{book.path} cannot be renamed: {error.strerror}") from error


@dataclass(frozen=True)
class Bench:
    """What measures: a server, and the client that loads it."""

    client: Client
    server: Server
    tool: Tool
    api_key: str | None


def measure(
    bench: Bench, question: Question, book: Book, todo: Sequence[int], fresh: bool
) -> dict[str, Any]:
    """Measure the points that are left, and return the run with all of them.

    Args:
        bench: with what.
        question: what is asked.
        book: what is there.
        todo: the concurrencies to measure.
        fresh: begin a new file, the old one is kept under another name.

    Raises:
        GpuHostError: the server, the client or the file fails; what was measured is in the file.
    """
    if fresh:
        put_aside(book)
    run = dict(book.content)
    if fresh or not run:
        run = new_run(question, bench.server, bench.tool, bench.client.url)
    for concurrency in todo:
        point = _point(bench, question, concurrency)
        if _bench_server.read_server(bench.client, None, None).started != bench.server.started:
            raise GpuHostError(
                f"{bench.client.url} was started again while it was measured, so the point at "
                f"{concurrency} is of no start: look into its log, and measure the new start"
            )
        for reason in point["reasons"]:  # a server may repeat the key in what it refuses
            reason["text"] = reason["text"].replace(bench.api_key or "\0", "(redacted)")
        for name in ("points", "rejected"):
            run[name] = [one for one in run[name] if one["concurrency"] != concurrency]
        name = "rejected" if point["reasons"] else "points"
        run[name] = sorted([*run[name], point], key=lambda one: int(one["concurrency"]))
        write(book, run)
    return run


def _point(bench: Bench, question: Question, concurrency: int) -> dict[str, Any]:
    """Warm up, empty the cache, measure and judge."""
    count, warmup = question.requests_at(concurrency), question.warmup_at(concurrency)
    seed = f"{question.seed}/{concurrency}"
    texts = _bench_corpus.prompts(question.corpus, count + warmup, seed, question.context_tokens)
    load = _bench_client.Load(
        bench.server.model,
        texts[:count],
        concurrency,
        question.output_tokens,
        question.temperature,
        question.timeout,
        question.seed,
    )
    if warmup:
        _warm_up(bench, replace(load, prompts=texts[count:]))
    if question.flush:
        _bench_server.flush(bench.client)
    with _bench_server.watching(bench.client) as watch:
        began: float | None = None
        duration: float | None = None
        if bench.tool.name == "own":
            began, before = time.monotonic(), _bench_client.occupied()
            found = _bench_client.run(bench.client.target, load)
            after, took = _bench_client.occupied(), time.monotonic() - began
            if before is not None and after is not None:
                watch.client = (after - before) / took
        else:
            tokenizer = bench.server.tokenizer
            if tokenizer is None:
                raise GpuHostError(
                    "the server does not name its tokenizer: give tokenizer, or set client to own"
                )
            aim = _bench_sglang.Aim(bench.client.url, tokenizer, bench.api_key)
            found, duration = _bench_sglang.drive(bench.tool, load, aim)
    watch.length = _bench_server.accept_length(watch, bench.client, bench.server, question.flush)
    return summarise(question, bench.server, found, (concurrency, began, duration), watch)


def _warm_up(bench: Bench, load: _bench_client.Load) -> None:
    """Send answers of a few tokens: kernels are compiled, graphs chosen, clocks raised.

    Raises:
        GpuHostError: none of them was answered.
    """
    short = replace(load, output_tokens=min(WARM_TOKENS, load.output_tokens))
    found = _bench_client.run(bench.client.target, short)
    errors = [one.error for one in found if one.error is not None]
    if len(errors) == len(found):
        raise GpuHostError(
            f"no request of the warm-up was answered by {bench.client.url}, the first with: "
            f"{errors[0]}: look into the server's log"
        )


def summarise(
    question: Question,
    server: Server,
    found: Sequence[Request],
    run: tuple[int, float | None, float | None],
    watch: Watch,
) -> dict[str, Any]:
    """Return a point with its figures and the reasons to reject it.

    Args:
        question: what is asked.
        server: that was measured.
        found: the requests.
        run: concurrency, when the load began, and how long the client says that it took.
        watch: what was seen of the server.
    """
    concurrency, began, duration = run
    figures, part = _bench_stats.figures(found, concurrency, duration)
    looks = watch.within(part, figures["duration_s"], began)
    acceptance = judge_acceptance(watch.length, server.drafts)
    done = [one for one in found if one.error is None]
    outputs = [float(one.tokens) for one in done if one.tokens is not None]
    inputs = [float(one.input_tokens) for one in done if one.input_tokens is not None]
    usage = _bench_server.usage(watch, looks)
    point = {
        **figures,
        "prompts": question.corpus.name,
        "accept_length": None if watch.length is None else round(watch.length, 3),
        "accept_rate": acceptance.rate,
        **usage,
        "output_tokens": {
            "asked": question.output_tokens,
            "median": _bench_stats.median(outputs),
        },
        "input_tokens": {"asked": question.context_tokens, "median": _bench_stats.median(inputs)},
        "slowed_clocks": None if watch.clocks is None else sorted(watch.clocks),
    }
    seen = _bench_judge.Seen(
        server.cap,
        tuple(watch.gauges("num_queue_reqs", looks)),
        usage["running_max"],
        usage["kv_use_max"],
        usage["retracted"],
        watch.delta("generation_tokens_total"),
        None if watch.clocks is None else tuple(sorted(watch.clocks)),
        watch.client,
    )
    asked = {
        "requests": question.requests_at(concurrency),
        "output_tokens": question.output_tokens,
    }
    return {**point, "reasons": _bench_judge.reasons(found, point, part, asked, seen)}
