"""NVIDIA's aiperf as a load generator of clients.py: out of PyPI, in a Python of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ansible_collections.gpuhost.inference.plugins.module_utils._bench_client import Load
from ansible_collections.gpuhost.inference.plugins.module_utils._bench_stats import Request
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError

VERSION = "0.13.0"
NAME = f"aiperf {VERSION}"
# `RequestRateStrategy.execute_phase`: with a concurrency and no rate it asks again without a pause
# whether a request may go, in a process of its own
COSTS = (
    "aiperf asks without a pause whether the next request may go, as long as any is to be sent. "
    "That keeps one core busy, so what it takes per piece falls with the number of pieces."
)
PYTHONS = ("3.13", "3.12", "3.11")  # those that it is released for
INSTALLING = 1800  # seconds; about 140 packages, 1.2 GB
LOADING = 180  # seconds that it may take to start its services and to write its results
# `aiperf` reads a folder as the name of a repository when it is told to keep off the hub
NOT_ITS = {"PYTHONPATH", "PYTHONHOME", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"}


def install(top: Path, python: str) -> str:
    """Install aiperf, once for each release, and return its program.

    Raises:
        GpuHostError: it cannot be installed.
    """
    done, program = top / "installed", top / "venv" / "bin" / "aiperf"
    wanted = f"aiperf=={VERSION}"
    if done.exists() and done.read_text() == wanted and program.exists():
        return str(program)
    print(f"installing {wanted} into {top}, about two minutes", file=sys.stderr)
    pip = (str(program.with_name("python")), "-m", "pip", "--quiet", "--disable-pip-version-check")
    for words in ((python, "-m", "venv", str(top / "venv")), (*pip, "install", wanted)):
        code, said = _run(words, INSTALLING, dict(os.environ))
        if code:
            raise GpuHostError(f"{wanted} cannot be installed ({code}): {said}")
    done.write_text(wanted)
    return str(program)


def sender(program: str, tokenizer: str) -> Callable[[Load, str], tuple[list[Request], float]]:
    """Return a sender by aiperf.

    Args:
        program: of aiperf.
        tokenizer: a folder that transformers can load. The one it calls builtin is fetched from
            the internet at each start.
    """

    def send(load: Load, url: str) -> tuple[list[Request], float]:
        with tempfile.TemporaryDirectory(prefix="aiperf.") as name:
            folder = Path(name)
            prompts = [{"text": text, "output_length": load.output_tokens} for text in load.prompts]
            (folder / "prompts").write_text("".join(json.dumps(one) + "\n" for one in prompts))
            kept = {key: value for key, value in os.environ.items() if key not in NOT_ITS}
            # what it leaves in those folders goes with them
            environment = {**kept, "HOME": name, "TMPDIR": name}
            words = command(program, load, url, tokenizer, folder)
            code, said = _run(words, load.timeout + LOADING, environment)
            if code:
                raise GpuHostError(f"aiperf failed ({code}): {said}")
            try:
                with (folder / "out" / "profile_export.jsonl").open() as records:
                    requests = parse(records, len(load.prompts))
                whole = json.loads((folder / "out" / "profile_export_aiperf.json").read_text())
                return requests, whole["benchmark_duration"]["avg"]
            except (OSError, ValueError, LookupError) as error:
                raise GpuHostError(f"results of aiperf cannot be read: {error!r}") from error

    return send


def command(program: str, load: Load, url: str, tokenizer: str, folder: Path) -> list[str]:
    """Return the words of its command line.

    Args:
        program: of aiperf.
        load: what is sent.
        url: at whom.
        tokenizer: a folder.
        folder: where the prompts are, and the results go.
    """
    flags = {
        "--model": load.model,
        "--url": url,
        "--endpoint-type": "chat",
        "--input-file": str(folder / "prompts"),
        "--custom-dataset-type": "single-turn",
        "--concurrency": str(load.concurrency),
        "--request-count": str(len(load.prompts)),
        "--extra-inputs": f"temperature:{load.temperature}",
        "--tokenizer": tokenizer,
        "--output-artifact-dir": str(folder / "out"),
        "--export-level": "records",
        "--ui": "none",
    }
    switches = (
        "--streaming",
        "--use-server-token-count",
        "--no-gpu-telemetry",
        "--no-server-metrics",
    )
    return [program, "profile", *(word for pair in flags.items() for word in pair), *switches]


def parse(lines: Iterable[str], expected: int) -> list[Request]:
    """Read its records, one a line for each request: times in ms, moments in ns.

    Raises:
        GpuHostError: a request failed, or some are not there.
    """
    records: list[dict[str, Any]] = [json.loads(line) for line in lines]
    errors = [record["error"] for record in records if record.get("error")]
    if errors or len(records) != expected:
        raise GpuHostError(
            f"aiperf tells of {len(records)} requests, {len(errors)} of them failed, where "
            f"{expected} were to be sent: {errors[:1]}"
        )
    first = min(record["metadata"]["request_start_ns"] for record in records)
    return [_request(record["metadata"], record["metrics"], first) for record in records]


def _request(moments: dict[str, Any], metrics: dict[str, Any], first: int) -> Request:
    return Request(
        (moments["request_start_ns"] - first) / 1e9,
        metrics["time_to_first_token"]["value"] / 1000,
        tuple(gap / 1000 for gap in metrics["inter_chunk_latency"]["value"]),
        metrics["output_sequence_length"]["value"],
        metrics["input_sequence_length"]["value"],
    )


def _run(words: Iterable[str], seconds: float, environment: dict[str, str]) -> tuple[int, str]:
    """Run a command; return its status and the first error it tells, else its last line.

    `timeout` also ends the processes that it started, and its status is then 124.
    """
    done = subprocess.run(
        ["timeout", "-k", "10", str(int(seconds)), *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment,
        check=False,
    )
    lines = [" ".join(line.split()) for line in done.stdout.splitlines() if line.strip()]
    errors = [line for line in lines if "ERROR" in line]
    return done.returncode, (errors or lines[-1:] or ["it said nothing"])[0][:400]
