"""Measure load generators against a server whose true pace is known; no lab, no GPU, no root.

Usage: clients.py [ROUNDS]. Writes a section of results.md; nothing is asserted. The server is
stub_server.c, which needs a C compiler. SGLang's Python client needs `make test-sglang` to have
installed SGLang into .build/real-sglang (or SGLANG_PYTHON to name an interpreter with it); its Rust
client comes from there, or out of the wheel on PyPI for a Python 3.12. What is not there is left
out, loudly. On a busy computer give it priority, which the results then tell:
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / ".build" / "collections"), str(ROOT / "tests" / "unit")]

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
    """Write a tokenizer of words, which the Rust client wants to have."""
    model = {"type": "WordLevel", "vocab": {"[UNK]": 0, "word": 1}, "unk_token": "[UNK]"}
    names = ("truncation", "padding", "normalizer", "post_processor", "decoder")
    content = {"version": "1.0", **dict.fromkeys(names), "added_tokens": []}
    content.update(pre_tokenizer={"type": "Whitespace"}, model=model)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return str(folder)


def rust(folder: Path, python: str | None) -> _bench_sglang.Tool | None:
    """Return SGLang's Rust client, of the installation or out of the wheel."""
    if python:
        try:
            return _bench_sglang.choose("rust", python)
        except GpuHostError as error:
            print(f"the installed Rust client cannot be used: {error}", file=sys.stderr)
    older = ROOT / ".build" / "pythons" / "python3.12"
    interpreter = str(older) if older.exists() else shutil.which("python3.12")
    if interpreter is None:
        print("NO RUST CLIENT MEASURED: no Python 3.12 to load it", file=sys.stderr)
        return None
    try:
        with wheel(VERSION, folder) as opened:
            where = "/sglang/srt/rust_extensions"
            for name in opened.names(where):
                if name.startswith("_bench."):
                    opened.head(f"{where}/{name}", 0)
    except AWAY as error:
        print(f"NO RUST CLIENT MEASURED: the registry is away: {error}", file=sys.stderr)
        return None
    return _bench_sglang.Tool("rust", VERSION, "", interpreter, f"{folder}{where}")


def python_client(folder: Path, python: str | None) -> _bench_sglang.Tool | None:
    """Return SGLang's Python client, which needs torch and transformers."""
    if python is None:
        print("NO PYTHON CLIENT MEASURED: make test-sglang installs it", file=sys.stderr)
        return None
    if python.startswith(str(REAL)):  # a SGLang for CPUs lacks what its client only imports
        (folder / "datasets.py").write_text("load_dataset = None\n")
        os.environ["PYTHONPATH"] = f"{ROOT}/tests/real/stub:{folder}"
        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    try:
        return _bench_sglang.choose("python", python)
    except GpuHostError as error:
        print(f"NO PYTHON CLIENT MEASURED: {error}", file=sys.stderr)
        return None


@dataclass
class Best:
    """The best round of a client in a case: the one nearest to the truth."""

    share: float = 0.0
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
    tpot = (figures["tpot_ms"]["median"] or 0.0) * 1000 / case.gap
    return Best(share, tpot, figures["ttft_ms"]["median"] or 0.0, busy), pieces


def rows(program: Path, senders: dict[str, Send], rounds: int) -> list[str]:
    """Measure all in turns and return the table."""
    start: dict[str, Best] = {}
    best: dict[tuple[str, Case], Best] = {}
    for number in range(rounds):
        for name, send in senders.items():
            idle, _few = measure(program, IDLE, send)
            if number == 0 or idle.cpu < start[name].cpu:
                start[name] = idle
            for case in CASES:
                found, pieces = measure(program, case, send)
                more = found.cpu - start[name].cpu  # starting differs by as much each time
                found.cpu = more / pieces * 1e6 if more > start[name].cpu / 4 else 0.0
                kept = best.get((name, case))
                if kept is None or abs(found.share - 1) < abs(kept.share - 1):
                    best[name, case] = found
                print(f"round {number + 1}, {name}, {case.concurrency}: {found}", flush=True)
    table = [
        "| at once | true tokens/s | client | reported, times true | time per token, times true "
        "| first token ms | processor µs per piece | times ours |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case in CASES:
        base = best["ours", case].cpu
        for name in senders:
            one = best[name, case]
            cost = f"{one.cpu:.1f} | {one.cpu / base:.2f}" if one.cpu else "- | -"
            table.append(
                f"| {case.concurrency} | {case.true:,.0f} | {name} | {one.share:.3f} "
                f"| {one.tpot:.3f} | {one.ttft:.1f} | {cost} |"
            )
    costs = ", ".join(f"{name} {one.cpu:.2f} s" for name, one in start.items())
    return [*table, "", f"Processor time to start and send four short requests: {costs}."]


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
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        program = folder / "stub"
        source = Path(__file__).parent / "stub_server.c"
        subprocess.run([compiler, "-O2", "-o", str(program), str(source)], check=True)
        there = (REAL / "model" / "tokenizer.json").exists()
        tokenizer = str(REAL / "model") if there else write_tokenizer(folder)
        senders: dict[str, Send] = {"ours": own}
        tools = (rust(folder / "wheel", python), python_client(folder, python))
        for tool in tools:
            if tool is not None:
                label = f"SGLang {tool.version}, {tool.name.capitalize()}"
                senders[label] = sglangs(tool, tokenizer)
        table = rows(program, senders, rounds)
    put(
        "Load generators",
        [
            "Against a server that sends each token at a known moment. Rates are those of the full",
            f"part, as the module computes them; the best of {rounds} round(s), in turns, on",
            f"{machine()}, shared with the server and",
            f"{priority()}.",
            "",
            *table,
        ],
    )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
