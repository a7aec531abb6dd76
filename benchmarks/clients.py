"""Measure load generators against a server whose true pace is known; no lab, no GPU, no root.

Usage: clients.py [ROUNDS]. Writes a section of results.md; nothing is asserted. The server is
stub_server.c, which needs a C compiler. SGLang's Python client needs `make test-sglang` to have
installed SGLang into .build/real-sglang (or SGLANG_PYTHON to name an interpreter with it); its Rust
client comes from there, or out of the wheel on PyPI for a Python 3.12. NVIDIA's aiperf is installed
from PyPI into .build/aiperf, once (1.2 GB, a Python 3.11 to 3.13). What cannot be measured is told
on standard error and below the table. A busy computer shows in the load average of the results; on
one, give this priority, which they tell too:
`setsid sh -c 'echo -12 >/proc/self/autogroup; exec python benchmarks/clients.py'`.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / ".build" / "collections"), str(ROOT / "tests" / "unit")]

import aiperf_client  # noqa: E402
from ansible_collections.gpuhost.inference.plugins.module_utils import (  # noqa: E402
    _bench_client,
    _bench_corpus,
    _bench_sglang,
    _bench_stats,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import (  # noqa: E402
    GpuHostError,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_http import (  # noqa: E402
    Client,
)
from results import machine, put  # noqa: E402
from wheels import AWAY, wheel  # noqa: E402

VERSION = "0.5.23"
REAL = ROOT / ".build" / "real-sglang"
Send = Callable[[_bench_client.Load, str], tuple[list[_bench_stats.Request], "float | None"]]


@dataclass(frozen=True)
class Case:
    """A pace: so many requests at a time, a token every so many microseconds for each."""

    concurrency: int
    gap: int
    requests: int
    tokens: int

    @property
    def true(self) -> float:
        """Tokens/s, if the next request comes when one has ended."""
        return self.concurrency * self.tokens / ((self.tokens - 1) * self.gap / 1e6)

    def load(self) -> _bench_client.Load:
        corpus = _bench_corpus.built_in(["code", "chat", "reasoning"])
        texts = _bench_corpus.prompts(corpus, self.requests, "1", None)
        return _bench_client.Load("stub", texts, self.concurrency, self.tokens, 0.0, 300)


CASES = (Case(1, 2000, 16, 256), Case(16, 2000, 64, 256), Case(128, 2500, 512, 512))
IDLE = Case(1, 0, 4, 16)  # what a client costs before it sends much


@contextmanager
def stub(program: Path, gap: int) -> Iterator[str]:
    """Run the server."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    process = subprocess.Popen([program, str(port), str(gap)], stdout=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 10
        while Client(f"http://127.0.0.1:{port}").ask("/v1/models", 1).status != 200:
            if time.monotonic() > end:
                raise SystemExit("the stub does not listen")
            time.sleep(0.02)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def own(load: _bench_client.Load, url: str) -> tuple[list[_bench_stats.Request], float | None]:
    """Send with the collection's own client."""
    return _bench_client.run(Client(url).target, load), None


def sglangs(tool: _bench_sglang.Tool, tokenizer: str) -> Send:
    """Return a sender by a client of SGLang."""

    def send(load: _bench_client.Load, url: str) -> tuple[list[_bench_stats.Request], float | None]:
        return _bench_sglang.drive(tool, load, _bench_sglang.Aim(url, tokenizer))

    return send


def write_tokenizer(folder: Path) -> str:
    """Write a tokenizer of words, which the Rust client and aiperf want to have."""
    model = {"type": "WordLevel", "vocab": {"[UNK]": 0, "word": 1}, "unk_token": "[UNK]"}
    names = ("truncation", "padding", "normalizer", "post_processor", "decoder")
    content = {"version": "1.0", **dict.fromkeys(names), "added_tokens": []}
    content.update(pre_tokenizer={"type": "Whitespace"}, model=model)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(kind))
    return str(folder)


def interpreter(versions: Sequence[str]) -> str:
    """Return the first Python of those versions that runs.

    Raises:
        GpuHostError: there is none.
    """
    for version in versions:
        for path in (ROOT / ".build" / "pythons" / f"python{version}", f"python{version}"):
            found = shutil.which(path)
            # a version manager leaves shims of versions that it lacks
            if found is None:
                continue
            if not subprocess.run([found, "-c", ""], check=False, capture_output=True).returncode:
                return found
    raise GpuHostError(
        f"no Python {' or '.join(versions)} runs here; `nox --list` finds those of pyenv"
    )


def rust(folder: Path, python: str | None) -> _bench_sglang.Tool:
    """Return SGLang's Rust client, of the installation or out of the wheel.

    Raises:
        GpuHostError: there is none.
    """
    if python:
        try:
            return _bench_sglang.choose("rust", python)
        except GpuHostError as error:
            print(f"the installed Rust client cannot be used: {error}", file=sys.stderr)
    loads_it = interpreter(["3.12"])
    try:
        with wheel(VERSION, folder / "wheel") as opened:
            where = "/sglang/srt/rust_extensions"
            for name in opened.names(where):
                if name.startswith("_bench."):
                    opened.head(f"{where}/{name}", 0)
    except AWAY as error:
        raise GpuHostError(f"the registry is away: {error}") from error
    return _bench_sglang.Tool("rust", VERSION, "", loads_it, f"{folder}/wheel{where}")


def python_client(folder: Path, python: str | None) -> _bench_sglang.Tool:
    """Return SGLang's Python client, which needs torch and transformers.

    Raises:
        GpuHostError: it is not there.
    """
    if python is None:
        raise GpuHostError("no SGLang is installed here; make test-sglang installs one")
    if python.startswith(str(REAL)):  # a SGLang for CPUs lacks what its client only imports
        (folder / "datasets.py").write_text("load_dataset = None\n")
        os.environ["PYTHONPATH"] = f"{ROOT}/tests/real/stub:{folder}"
        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    return _bench_sglang.choose("python", python)


def others(folder: Path, python: str | None) -> tuple[dict[str, Send], list[str]]:
    """Return the clients that are not ours, and which are not there and why."""
    words = write_tokenizer(folder)
    there = (REAL / "model" / "tokenizer.json").exists()
    senders: dict[str, Send] = {}
    missing = []
    for name, find in (("Rust", rust), ("Python", python_client)):
        try:
            tool = find(folder, python)
            label = f"SGLang {tool.version}, {name}"
            senders[label] = sglangs(tool, str(REAL / "model") if there else words)
        except GpuHostError as error:
            missing.append(f"SGLang {VERSION}, {name}: {error}")
    try:
        python = interpreter(aiperf_client.PYTHONS)
        program = aiperf_client.install(ROOT / ".build" / "aiperf", python)
        senders[aiperf_client.NAME] = aiperf_client.sender(program, words)
    except GpuHostError as error:
        missing.append(f"{aiperf_client.NAME}: {error}")
    return senders, missing


@dataclass
class Best:
    """The best round of a client in a case: the one nearest to the truth."""

    share: float = 0.0
    whole: float = 0.0
    tpot: float = 0.0
    ttft: float = 0.0
    cpu: float = 0.0


def spent() -> float:
    """Return processor seconds of this process and of those that it has waited for."""
    return sum(os.times()[:4])


def measure(program: Path, case: Case, send: Send) -> tuple[Best, int]:
    """Send a case once; the second value is how many pieces of text came."""
    with stub(program, case.gap) as url:
        before = spent()
        requests, duration = send(case.load(), url)
        busy = spent() - before
    figures, _part = _bench_stats.figures(requests, case.concurrency, duration)
    pieces = sum(1 + len(one.gaps) for one in requests)
    if not case.gap:
        return Best(cpu=busy), pieces
    share = (figures["output_tok_s"] or 0.0) / case.true
    tokens = sum(one.tokens or 0 for one in requests)
    whole = tokens / (duration or figures["duration_s"]) / case.true
    tpot = (figures["tpot_ms"]["median"] or 0.0) * 1000 / case.gap
    return Best(share, whole, tpot, figures["ttft_ms"]["median"] or 0.0, busy), pieces


def rows(program: Path, senders: dict[str, Send], missing: Sequence[str], rounds: int) -> list[str]:
    """Measure all in turns and return the table, and below it what could not be measured."""
    start: dict[str, Best] = {}  # what starting costs each client
    best: dict[tuple[str, Case], Best] = {}
    failed: dict[str, str] = {}

    def turn(name: str, number: int) -> None:
        idle, _few = measure(program, IDLE, senders[name])
        if name not in start or idle.cpu < start[name].cpu:
            start[name] = idle
        for case in CASES:
            found, pieces = measure(program, case, senders[name])
            more = found.cpu - start[name].cpu  # starting differs by as much each time
            found.cpu = more / pieces * 1e6 if more > start[name].cpu / 4 else 0.0
            kept = best.get((name, case))
            if kept is None or abs(found.share - 1) < abs(kept.share - 1):
                best[name, case] = found
            print(f"round {number}, {name}, {case.concurrency}: {found}", flush=True)

    for number in range(1, rounds + 1):
        for name in senders:
            try:
                turn(name, number)
            except GpuHostError as error:
                failed[name] = f"{name}, in round {number}: {error}"
                print(f"NOT MEASURED: {failed[name]}", file=sys.stderr)
    table = [
        "| at once | true tokens/s | client | full part, times true | whole run, times true "
        "| time per token, times true | first token ms | processor µs per piece | times ours |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for case in CASES:
        base = best["ours", case].cpu
        for name in senders:
            one = best.get((name, case))
            head = f"| {case.concurrency} | {case.true:,.0f} | {name} "
            if one is None:
                table.append(f"{head}| - | - | - | - | - | - |")
                continue
            cost = f"{one.cpu:.1f} | {one.cpu / base:.2f}" if one.cpu else "- | -"
            table.append(
                f"{head}| {one.share:.3f} | {one.whole:.3f} | {one.tpot:.3f} | {one.ttft:.1f} "
                f"| {cost} |"
            )
    costs = ", ".join(f"{name} {one.cpu:.2f} s" for name, one in start.items())
    below = [f"Processor time to start and send four short requests: {costs}."]
    if aiperf_client.NAME in start:
        below.append(aiperf_client.COSTS)
    below += [f"NOT MEASURED: {reason}" for reason in (*missing, *failed.values())]
    return [*table, *(line for text in below for line in ("", text))]


def priority() -> str:
    """Tell how this process ranks among other work: `autogroup` of proc(5), sched(7)."""
    path = Path("/proc/self/autogroup")
    nice = path.read_text(encoding="ascii").split()[-1] if path.exists() else "0"
    return "other work" if nice == "0" else f"other work, before which it goes (nice {nice})"


def main(rounds: int = 2) -> None:
    """Build the server, find the clients, measure, and write the section."""
    compiler = shutil.which("cc")
    if compiler is None:
        raise SystemExit("nothing was measured: a C compiler (cc) is needed for the server")
    given = os.environ.get("SGLANG_PYTHON", str(REAL / "venv" / "bin" / "python"))
    python = given if (REAL / "installed").exists() or "SGLANG_PYTHON" in os.environ else None
    busy = os.getloadavg()[1]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        program = folder / "stub"
        source = Path(__file__).parent / "stub_server.c"
        subprocess.run([compiler, "-O2", "-o", str(program), str(source)], check=True)
        senders, missing = others(folder, python)
        for reason in missing:
            print(f"NOT MEASURED: {reason}", file=sys.stderr)
        table = rows(program, {"ours": own, **senders}, missing, rounds)
    put(
        "Load generators",
        [
            "Against a server that sends each token at a known moment. Rates of the full part are",
            "computed as the module does; that of the whole run is all tokens over the time that",
            f"the client says it took. The best of {rounds} round(s), in turns, on",
            f"{machine()}, shared with the server and",
            f"{priority()}; load average before: {busy:.1f}.",
            "",
            *table,
        ],
    )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
