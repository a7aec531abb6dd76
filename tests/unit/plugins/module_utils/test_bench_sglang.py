"""SGLang's own load generators: which is chosen, what it is given, how its result is read.

The installations are made up, but run by a real interpreter; what releases really hold is looked up
in their wheels on PyPI (three files; skipped where the registry is away).
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuhost.inference.plugins.module_utils import _bench_sglang
from ansible_collections.gpuhost.inference.plugins.module_utils._bench_client import Load
from ansible_collections.gpuhost.inference.plugins.module_utils._bench_sglang import (
    Aim,
    Tool,
    choose,
    drive,
    parse,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader
from wheels import AWAY, wheel

KEY = "key-hunter2-of-a-client"  # no other test has it on a command line
LOAD = Load("qwen", ["one?", "two?", "three?"], 2, 32, 0.5, 20, 7)
AIM = Aim("http://127.0.0.1:30000", "/srv/model", KEY)
SOURCES = Path(__file__).parents[4] / ".build" / "sglang"

# what both clients write: a table, then the line
COLUMNS = {
    "ttfts": [0.05, 0.06, 0.07],
    "itls": [[0.01, 0.02], [0.01], []],
    "output_lens": [32, 32, 0],
    "input_lens": [20, 21, 22],
    "generated_texts": ["a", "b", ""],
    "errors": ["", "", "Service Unavailable: Bearer key-hunter2"],
}
RESULT = {
    "tag": None,
    "backend": "sglang-oai-chat",
    "dataset_name": "sharegpt",
    "request_rate": "inf",
    "max_concurrency": 2,
    "server_info": {"api_key": KEY},
    "duration": 1.5,
    "completed": 2,
    "output_throughput": 42.0,
    "accept_length": None,
    **COLUMNS,
}

# Both stand-ins tell by a file what they were given, and who could see it.
SAY = """
import glob, json, os, sys
def say(settings):
    lines = []
    for path in glob.glob("/proc/[0-9]*/cmdline"):
        try:
            lines.append(open(path).read())
        except OSError:
            pass
    seen = {"argv": sys.argv, "settings": settings, "lines": lines}
    seen["key"] = os.environ.get("OPENAI_API_KEY")
    seen["offline"] = os.environ.get("HF_HUB_OFFLINE")
    seen["prompts"] = json.load(open(settings["dataset_path"]))
    json.dump(seen, open(os.path.join(os.path.dirname(__file__), "seen.json"), "w"))
    if os.path.exists(os.path.join(os.path.dirname(__file__), "fail")):
        sys.exit("Traceback: no server, api_key=hunter3")
    print("============ Serving Benchmark Result ============")
    with open(settings["output_file"], "a") as output:
        output.write(RESULT + "\\n")
    print("Result appended")
"""
SERVING = """
import argparse
options = argparse.ArgumentParser()
for name in {names!r}:
    options.add_argument(name)
for name in ("--disable-tqdm", "--output-details"):
    options.add_argument(name, action="store_true")
choices = {{}}.get("choices") or []
thoughts = "reasoning_content"
if __name__ == "__main__":
    say(vars(options.parse_args()))
"""
NAMES = (
    *("--backend", "--base-url", "--model", "--served-model-name", "--tokenizer", "--seed"),
    *("--dataset-name", "--dataset-path", "--sharegpt-output-len", "--num-prompts"),
    *("--max-concurrency", "--request-rate", "--warmup-requests", "--extra-request-body"),
    "--output-file",
)


class Install:
    """A virtual environment with a package of SGLang's name."""

    def __init__(self, top: Path) -> None:
        self.python = top / "bin" / "python"
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        self.site = top / "lib" / version / "site-packages"
        self.package = self.site / "sglang"
        (self.package / "srt").mkdir(parents=True)
        self.python.parent.mkdir()
        self.python.symlink_to(os.path.realpath(sys.executable))
        home = Path(os.path.realpath(sys.executable)).parent
        (top / "pyvenv.cfg").write_text(f"home = {home}\n")
        for folder in (self.package, self.package / "srt"):
            (folder / "__init__.py").touch()
        (self.package / "srt" / "server_args.py").touch()
        self.said = "RESULT = " + repr(json.dumps(RESULT)) + SAY
        info = self.site / "sglang-0.5.23.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Name: sglang\nVersion: 0.5.23\n")

    def rust(self, more: str = "") -> Path:
        folder = self.package / "srt" / "rust_extensions"
        folder.mkdir()
        run = "\ndef run_config(text):\n    say(json.loads(text))\n"
        (folder / "_bench.py").write_text(more + self.said + run)
        return folder / "seen.json"

    def serving(self, name: str = "benchmark/serving.py", names: tuple[str, ...] = NAMES) -> Path:
        path = self.package / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(self.said + SERVING.format(names=names))
        return path.parent / "seen.json"


@pytest.fixture
def install(tmp_path: Path) -> Install:
    return Install(tmp_path / "venv")


def test_auto_prefers_rust_then_python_then_our_own(install: Install) -> None:
    assert choose("auto", None).name == "own"
    bare = choose("auto", str(install.python))
    assert (bare.name, bare.reason) == (
        "own",
        "it has no Rust client (before 0.5.22); it has no Python client",
    )
    install.serving("bench_serving.py")
    assert choose("auto", str(install.python)).where == "sglang.bench_serving"
    install.serving()
    found = choose("auto", str(install.python))
    assert (found.name, found.version, found.where) == (
        "python",
        "0.5.23",
        "sglang.benchmark.serving",
    )
    install.rust()
    assert choose("auto", str(install.python)).name == "rust"
    assert choose("python", str(install.python)).name == "python"
    assert choose("own", str(install.python)).name == "own"


def test_an_extension_of_another_python_is_passed_over(install: Install) -> None:
    install.rust("raise ImportError('for CPython 3.99')\n")
    install.serving()
    found = choose("auto", str(install.python))
    assert found.name == "python"
    assert "its Rust client cannot be loaded" in found.reason
    with pytest.raises(GpuHostError, match="client rust: its Rust client cannot be loaded"):
        choose("rust", str(install.python))


def test_a_certificate_that_is_not_checked_is_for_our_own(install: Install) -> None:
    install.serving()
    assert choose("auto", str(install.python)).name == "python"
    found = choose("auto", str(install.python), unproved=True)
    assert (found.name, found.reason) == (
        "own",
        "SGLang's clients always check the server's certificate",
    )
    assert choose("python", str(install.python), unproved=True).name == "python"


def test_a_python_client_that_lacks_a_package_is_passed_over(install: Install) -> None:
    install.serving()
    path = install.package / "benchmark" / "serving.py"
    path.write_text("import no_such_package\n" + path.read_text())
    found = choose("auto", str(install.python))
    assert found.name == "own"
    assert "its Python client cannot be imported" in found.reason


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('.get("choices") or []', "", "does not read an event with the usage alone"),
        ("reasoning_content", "", "does not read the text of reasoning models"),
        ("'--seed', ", "", "does not know --seed"),
    ],
)
def test_a_client_that_would_count_wrong(install: Install, old: str, new: str, said: str) -> None:
    install.serving()
    path = install.package / "benchmark" / "serving.py"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    assert choose("auto", str(install.python)).name == "own"
    with pytest.raises(GpuHostError, match=f"client python: its Python client {said}"):
        choose("python", str(install.python))


def test_the_wanted_client_is_not_there(install: Install) -> None:
    with pytest.raises(GpuHostError, match="client python: it has no Python client; leave client"):
        choose("python", str(install.python))
    with pytest.raises(GpuHostError, match="give python"):
        choose("rust", None)


@pytest.mark.parametrize("name", ["rust", "python"])
def test_what_a_client_is_given(install: Install, name: str) -> None:
    where = install.rust() if name == "rust" else install.serving()
    requests, duration = drive(choose(name, str(install.python)), LOAD, AIM)
    seen = json.loads(where.read_text())
    settings = {key: value for key, value in seen["settings"].items() if value is not None}
    for changes in ("dataset_path", "headers"):
        settings.pop(changes, None)
    body = json.loads(settings.pop("extra_request_body"))
    assert body == {"temperature": 0.5, "stream_options": {"include_usage": True}}
    expected: dict[str, Any] = {
        "backend": "sglang-oai-chat",
        "base_url": "http://127.0.0.1:30000",
        "model": "/srv/model",
        "served_model_name": "qwen",
        "tokenizer": "/srv/model",
        "dataset_name": "sharegpt",
        "sharegpt_output_len": 32,
        "num_prompts": 3,
        "max_concurrency": 2,
        "request_rate": "inf",
        "warmup_requests": 0,
        "seed": 7,
        "disable_tqdm": True,
        "output_details": True,
        "output_file": "/dev/stdout",
    }
    if name == "rust":
        expected["disable_retokenize"] = True
    else:
        settings = {key: value for key, value in settings.items() if key not in ("choices",)}
        expected = {
            key: str(value) if not isinstance(value, (bool, str)) else value
            for key, value in expected.items()
        }
    assert settings == expected
    assert seen["offline"] == "1"
    assert [one["conversations"][0]["value"] for one in seen["prompts"]] == LOAD.prompts
    assert all(len(one["conversations"]) == 2 for one in seen["prompts"])
    assert duration == 1.5
    assert len(requests) == 3


@pytest.mark.parametrize("name", ["rust", "python"])
def test_no_command_line_shows_the_key(install: Install, name: str) -> None:
    where = install.rust() if name == "rust" else install.serving()
    drive(choose(name, str(install.python)), LOAD, AIM)
    seen = json.loads(where.read_text())
    got = seen["settings"].get("headers") if name == "rust" else seen["key"]
    assert got == ([f"Authorization: Bearer {KEY}"] if name == "rust" else KEY)
    assert any("sharegpt" in line or "_bench.run_config" in line for line in seen["lines"])
    assert not any(KEY in line for line in seen["lines"])
    assert "OPENAI_API_KEY" not in os.environ
    assert "HF_HUB_OFFLINE" not in os.environ


@pytest.mark.parametrize("name", ["rust", "python"])
def test_a_client_that_fails_tells_its_last_words(install: Install, name: str) -> None:
    where = install.rust() if name == "rust" else install.serving()
    (where.parent / "fail").touch()
    with pytest.raises(GpuHostError) as caught:
        drive(choose(name, str(install.python)), LOAD, AIM)
    said = str(caught.value)
    assert f"SGLang's {name} client failed (1): " in said
    assert "Traceback: no server, api_key=(redacted)" in said
    assert said.endswith("with client set to own nothing of SGLang is needed")


def test_nothing_is_left_behind(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers and the server's keys are in the result of a client: it is in no file."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    install.rust()
    drive(choose("rust", str(install.python)), LOAD, AIM)
    assert list(temporary.iterdir()) == []


def test_a_result_is_read() -> None:
    requests, duration = parse(f"== table ==\n{{not json\n{json.dumps(RESULT)}\nResult appended\n")
    assert duration == 1.5
    assert [(one.start, one.ttft, one.gaps, one.tokens, one.input_tokens) for one in requests] == [
        (None, 0.05, (0.01, 0.02), 32, 20),
        (None, 0.06, (0.01,), 32, 21),
        (None, 0.07, (), None, 22),
    ]
    assert [one.error for one in requests] == [
        None,
        None,
        "Service Unavailable: Bearer (redacted)",
    ]


def test_an_answer_without_any_text_has_failed() -> None:
    result = {**RESULT, "ttfts": [0.0] * 3, "errors": [""] * 3}
    assert {one.error for one in parse(json.dumps(result))[0]} == {"an answer without text"}


def test_an_error_is_harmless_on_a_terminal() -> None:
    result = {**RESULT, "errors": ["", "", "no\x1b[2J\u202e\x07!"]}
    assert parse(json.dumps(result))[0][2].error == "no [2J !"


@pytest.mark.parametrize(
    "printed",
    [
        "",
        "no line",
        "{",
        "{}",
        json.dumps({**RESULT, "itls": []}),
        json.dumps({**RESULT, "errors": [""]}),
        json.dumps({"duration": 1.0}),
        '{"a":' * 100_000,
    ],
    ids=[str(number) for number in range(8)],
)
def test_a_result_that_is_none(printed: str) -> None:
    with pytest.raises(GpuHostError, match="printed no result with output details"):
        parse(printed)


RELEASES = {
    "0.5.10.post1": ("sglang.bench_serving", False, False),
    "0.5.11": ("sglang.bench_serving", True, False),
    "0.5.23": ("sglang.benchmark.serving", True, True),
}


@pytest.mark.parametrize("version", RELEASES)
def test_releases(version: str) -> None:
    kept, done = SOURCES / version, SOURCES / f"{version}.clients"
    names: list[str] = json.loads(done.read_text()) if done.exists() else []
    if names:
        module, fault = _bench_sglang._serving("/sglang", Reader(str(kept)))
    else:
        try:
            with wheel(version, kept) as opened:
                names = ["", *opened.names("/sglang/srt/rust_extensions")]
                module, fault = _bench_sglang._serving("/sglang", opened)
        except AWAY as error:
            pytest.skip(f"the registry is away, so SGLang {version} is not looked at: {error}")
        done.write_text(json.dumps(names))
    rust = any(name.startswith("_bench.") for name in names)
    assert (module, fault is None, rust) == RELEASES[version]


def test_tools_are_told_apart() -> None:
    assert Tool("own", "1", "") == _bench_sglang.OWN
