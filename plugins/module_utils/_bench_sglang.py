# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.

"""SGLang's own load generators: which of them an installation has, how they are run and read.

- `srt/rust_extensions/_bench*.so` from 0.5.22 on. It loads without SGLang, takes its settings as
  JSON, and so the key on its standard input.
- `sglang.benchmark.serving` from 0.5.16 on, `sglang.bench_serving` before; the key goes into the
  environment (`OPENAI_API_KEY`).

Neither ever has the key on its command line, which everybody on the host can read.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ansible_collections.gpuhost.inference.plugins.module_utils import _command
from ansible_collections.gpuhost.inference.plugins.module_utils._bench_client import Load, said
from ansible_collections.gpuhost.inference.plugins.module_utils._bench_stats import Request
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from ansible_collections.gpuhost.inference.plugins.module_utils._redact import redact
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_flags import (
    find_package,
    package_version,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_http import (
    dict_of,
    list_of,
    number_of,
    text_of,
    whole_of,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader

_LIVE = Reader()
_RUST_FOLDER = "srt/rust_extensions"
_RUST_CODE = (
    "import sys; sys.path.insert(0, sys.argv[1]); import _bench; "
    "_bench.run_config(sys.stdin.read())"
)
_PROBE = "import sys; sys.path.insert(0, sys.argv[1]); import _bench; _bench.run_config"
_SERVING = (
    ("benchmark/serving.py", "sglang.benchmark.serving"),
    ("bench_serving.py", "sglang.bench_serving"),
)
# What its source must have: without these it fails on the piece that holds the usage, or does not
# see what a model thinks and so takes the end of its thoughts for the first token.
_NEEDED = (
    ("choices", re.compile(r"""\.get\(["']choices["']\) or """), "an event with the usage alone"),
    ("thoughts", re.compile("reasoning_content"), "the text of reasoning models"),
)
_OUTPUT = "/dev/stdout"  # the result holds all texts and the server's keys: none of it in a file
_TAIL = 400  # characters of an error
_NO_HUB = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
_LOADING = 180.0  # seconds that importing SGLang and reading a tokenizer may take

Runner = Callable[..., Iterator[bytes]]


@dataclass(frozen=True)
class Aim:
    """A server as a client of SGLang needs to know it.

    Attributes:
        url: of the server.
        tokenizer: folder of the model.
        api_key: `None` for a server without.
    """

    url: str
    tokenizer: str
    api_key: str | None = None


@dataclass(frozen=True)
class Tool:
    """A load generator.

    Attributes:
        name: `rust`, `python` or `own`.
        version: of SGLang, or of this collection's own.
        reason: why it was chosen.
        python: the interpreter that runs it.
        where: folder of the extension, or name of the module.
    """

    name: str
    version: str | None
    reason: str
    python: str = ""
    where: str = ""


OWN = Tool("own", "1", "")


def choose(
    wanted: str,
    python: str | None,
    host: Reader = _LIVE,
    run: Runner = _command.stream,
    *,
    unproved: bool = False,
) -> Tool:
    """Return the load generator to be used.

    Args:
        wanted: `rust`, `python`, `own`, or `auto` for the first of them that works here.
        python: the interpreter of the installed SGLang, `None` without one.
        host: where to read.
        run: how to run a command.
        unproved: whether the server's certificate is not to be checked, which SGLang's clients
            always do.

    Raises:
        GpuHostError: the wanted one is not there.
    """
    if unproved and wanted == "auto":
        return Tool("own", OWN.version, "SGLang's clients always check the server's certificate")
    if wanted == "own" or (wanted == "auto" and not python):
        reason = "no interpreter of SGLang is given" if wanted == "auto" else "asked for"
        return Tool("own", OWN.version, reason)
    package = find_package(python, None, host)
    version = package_version(package, host)
    rust_fault = None if wanted == "python" else _rust_fault(str(python), package, host, run)
    if wanted in ("auto", "rust") and rust_fault is None:
        reason = f"SGLang {version} has it"
        return Tool("rust", version, reason, str(python), f"{package}/{_RUST_FOLDER}")
    module, python_fault = _serving(package, host)
    if (
        wanted != "rust"
        and python_fault is None
        and not _works(run, _LOADING, python, "-c", f"import {module}")
    ):
        python_fault = f"its Python client cannot be imported by {python}"
    if wanted in ("auto", "python") and python_fault is None:
        reason = f"SGLang {version} has it" + (f"; {rust_fault}" if wanted == "auto" else "")
        return Tool("python", version, reason, str(python), module)
    if wanted == "auto":
        return Tool("own", OWN.version, f"{rust_fault}; {python_fault}")
    fault = rust_fault if wanted == "rust" else python_fault
    raise GpuHostError(f"client {wanted}: {fault}; leave client at auto, or set it to own")


def _rust_fault(python: str, package: str, host: Reader, run: Runner) -> str | None:
    folder = f"{package}/{_RUST_FOLDER}"
    if not any(name.startswith("_bench.") for name in host.names(folder)):
        return "it has no Rust client (before 0.5.22)"
    if not _works(run, 30, python, "-c", _PROBE, folder):
        return f"its Rust client cannot be loaded by {python}"
    return None


def _works(run: Runner, seconds: float, *words: str | None) -> bool:
    try:
        for _block in run(words, seconds):
            pass
    except GpuHostError:
        return False
    return True


def _serving(package: str, host: Reader) -> tuple[str, str | None]:
    """Return the module of the Python client, and why it cannot be used."""
    for path, module in _SERVING:
        source = host.text(f"{package}/{path}")
        if source is None:
            continue
        lacks = [what for _name, pattern, what in _NEEDED if not pattern.search(source)]
        if lacks:
            return module, f"its Python client does not read {' and '.join(lacks)}"
        known = set(re.findall(r"""["'](--[a-z][a-z0-9-]*)["']""", source))
        missing = sorted(set(_flags(_EXAMPLE, Aim("", ""), "")) - known)
        if missing:
            return module, f"its Python client does not know {', '.join(missing)}"
        return module, None
    return "", "it has no Python client"


def _flags(load: Load, aim: Aim, prompts: str) -> dict[str, str | None]:
    """Return what the Python client is given, `None` for a flag without a value."""
    body = {"temperature": load.temperature, "stream_options": {"include_usage": True}}
    return {
        "--backend": "sglang-oai-chat",
        "--base-url": aim.url,
        "--model": aim.tokenizer,  # a folder: the name of the model may be none of the hub
        "--served-model-name": load.model,
        "--tokenizer": aim.tokenizer,
        "--dataset-name": "sharegpt",
        "--dataset-path": prompts,
        "--sharegpt-output-len": str(load.output_tokens),
        "--num-prompts": str(len(load.prompts)),
        "--max-concurrency": str(load.concurrency),
        "--request-rate": "inf",
        "--warmup-requests": "0",
        "--seed": str(load.seed),
        "--disable-tqdm": None,
        "--output-details": None,
        "--extra-request-body": json.dumps(body),
        "--output-file": _OUTPUT,
    }


_EXAMPLE = Load("", (), 1, 1, 0.0, 0.0)


def command(tool: Tool, load: Load, aim: Aim, prompts: str) -> tuple[list[str], dict[str, Any]]:
    """Return the words of a client's command line, and its settings for standard input.

    Args:
        tool: a client of SGLang.
        load: what is to be sent.
        aim: at whom.
        prompts: path of the file with the prompts.
    """
    flags = _flags(load, aim, prompts)
    if tool.name == "python":
        words = [word for pair in flags.items() for word in pair if word is not None]
        return [tool.python, "-m", tool.where, *words], {}
    numbers = ("num_prompts", "max_concurrency", "warmup_requests", "seed", "sharegpt_output_len")
    settings: dict[str, Any] = {
        name[2:].replace("-", "_"): True if value is None else value
        for name, value in flags.items()
    }
    settings.update({name: int(settings[name]) for name in numbers})
    settings["disable_retokenize"] = True
    return [tool.python, "-c", _RUST_CODE, tool.where], settings


def drive(
    tool: Tool,
    load: Load,
    aim: Aim,
    run: Runner = _command.stream,
) -> tuple[list[Request], float]:
    """Let a client of SGLang send everything.

    Returns:
        The requests in the order they were submitted, and the seconds it says that they took.

    Raises:
        GpuHostError: it failed, or its result cannot be read.
    """
    with tempfile.TemporaryDirectory(prefix="sglang_benchmark.") as folder:
        prompts, errors = Path(folder, "prompts.json"), Path(folder, "errors")
        prompts.write_text(json.dumps(as_sharegpt(load.prompts)), encoding="utf-8")
        words, settings = command(tool, load, aim, str(prompts))
        if settings and aim.api_key:
            settings["headers"] = [f"Authorization: Bearer {aim.api_key}"]
        environment = dict(_NO_HUB)
        if aim.api_key and tool.name == "python":
            environment["OPENAI_API_KEY"] = aim.api_key
        line = ["/bin/sh", "-c", 'exec "$@" 2>"$0"', str(errors), *words]
        try:
            with _environment(environment):
                timeout = load.timeout + _LOADING
                given = json.dumps(settings).encode() if settings else b""
                printed = b"".join(run(line, timeout, given=given))
        except _command.CommandError as error:
            told = errors.read_text("utf-8", "replace") if errors.exists() else error.said
            raise GpuHostError(
                f"SGLang's {tool.name} client failed ({error.code}): "
                f"{redact(told.strip())[-_TAIL:] or 'it said nothing'}; with client set to own "
                "nothing of SGLang is needed"
            ) from error
    return parse(printed.decode("utf-8", "replace"))


@contextmanager
def _environment(more: Mapping[str, str]) -> Iterator[None]:
    """Have more in the environment for a while: what a child inherits is not for all to read."""
    before = {name: os.environ.get(name) for name in more}
    os.environ.update(more)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def as_sharegpt(prompts: Sequence[str]) -> list[dict[str, Any]]:
    """Return prompts in the form that the clients read; they drop those without an answer."""
    answer = {"from": "gpt", "value": "An answer that only fills the form."}
    return [{"conversations": [{"from": "human", "value": one}, answer]} for one in prompts]


def parse(printed: str) -> tuple[list[Request], float]:
    """Read the line of JSON that both clients write among what they print.

    Raises:
        GpuHostError: there is none with the single requests.
    """
    lines = [line for line in printed.splitlines() if line.startswith("{")]
    try:
        result = dict_of(json.loads(lines[-1])) if lines else {}
    except (ValueError, RecursionError):
        result = {}
    columns = [list_of(result.get(name)) for name in ("ttfts", "itls", "output_lens", "errors")]
    duration = number_of(result.get("duration"))
    rows = len(columns[0])
    errors = columns[3] or [None] * rows
    uneven = any(len(column) != rows for column in (*columns[:3], errors))
    if not rows or duration is None or uneven:
        raise GpuHostError(
            "SGLang's client printed no result with output details: set client to own"
        )
    inputs = list_of(result.get("input_lens"))
    return [
        _request(columns[0][at], columns[1][at], columns[2][at], errors[at], inputs[at : at + 1])
        for at in range(rows)
    ], duration


def _request(ttft: Any, itls: Any, tokens: Any, error: Any, inputs: Sequence[Any]) -> Request:
    gaps = tuple(gap for gap in map(number_of, list_of(itls)) if gap is not None)
    fault = text_of(error)
    if not fault and not number_of(ttft):
        fault = "an answer without text"
    return Request(
        None,
        number_of(ttft) or 0.0,
        gaps,
        whole_of(tokens) or None,
        whole_of(inputs[0]) if inputs else None,
        said(fault) if fault else None,
    )
