"""Does MTP pay on this server? The lab's stand-in has a known truth, and it is found.

The tests are one story and run in order.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from testinfra.host import Host

testinfra_hosts = ["ansible://pve1"]
RunPlaybook = Callable[..., subprocess.CompletedProcess[str]]
LEVELS = (1, 8, 16, 128)
CAPS = {"off": "45", "on": "24"}
# users who are mostly alone, and now and then send a batch
LOAD = {1: 0.95, 128: 0.05}
# what emulated processors may add to a gain: they are busier with many requests than with one
EMULATED = 0.08


@pytest.fixture(scope="module")
def true_gains(root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """Return how many times faster the engine is with MTP for each load, run in virtual time."""
    model = tmp_path_factory.mktemp("model") / "whole"
    subprocess.run([sys.executable, root / "lab/sglang/make_model", model], check=True)
    rates = {}
    for arm, flags in (("off", []), ("on", ["--speculative-algorithm", "NEXTN"])):
        command = [sys.executable, "-m", "sglang.standin.truth", "--model-path", str(model)]
        command += ["--tp", "4", "--mem-fraction-static", "0.8", "--max-running-requests", "48"]
        asked = {
            "PYTHONPATH": str(root / "lab/sglang"),
            "TRUTH_CONCURRENCIES": ",".join(map(str, LEVELS)),
            "TRUTH_OUTPUT_TOKENS": "32",
        }
        done = subprocess.run(
            [*command, *flags], env={**os.environ, **asked}, capture_output=True, check=True
        )
        rates[arm] = {
            row["concurrency"]: row["output_tok_s"]
            for row in map(json.loads, done.stdout.splitlines())
        }
    gain = {level: rates["on"][level] / rates["off"][level] for level in LEVELS}
    return {
        "yours": sum(share * gain[level] for level, share in LOAD.items()),
        "single-user": gain[1],
        "team": (gain[8] + gain[16]) / 2,
        "batch": gain[128],
    }


@pytest.fixture(scope="module")
def reports(root: Path) -> Path:
    machine = os.environ.get("LAB_MACHINE", "amd")
    return root / ".build/reports" / ("" if machine == "amd" else machine)


@pytest.fixture(scope="module")
def said(run_playbook: RunPlaybook, reports: Path) -> str:
    for old in reports.glob("ct100-sglang-tune-*"):
        old.unlink()
    load = {"sglang_tune_load": LOAD, "sglang_tune_allowed": True}
    done = run_playbook("tune_mtp", "-e", json.dumps(load))
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr
    return " ".join(done.stdout.split())


@pytest.fixture(scope="module")
def result(said: str, reports: Path) -> dict[str, Any]:
    assert said
    (file,) = reports.glob("ct100-sglang-tune-*.json")
    read: dict[str, Any] = json.loads(file.read_text())
    return read


def test_without_leave_only_the_plan_is_shown(host: Host, run_playbook: RunPlaybook) -> None:
    script = "pct exec 100 -- systemctl show sglang -P InvocationID"
    before = host.check_output(script)
    done = run_playbook("tune_mtp")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "next: off on on off, each at C=1" in done.stdout
    assert "Nothing is done without sglang_tune_allowed" in " ".join(done.stdout.split())
    assert host.check_output(script) == before


def test_prompts_of_one_repeated_word_are_refused(host: Host, run_playbook: RunPlaybook) -> None:
    """The field's table was measured with such; nearly every draft of more of the same is right."""
    line = json.dumps({"conversations": [{"value": "hello " * 500}]})
    host.check_output("pct exec 100 -- sh -c %s", f"echo '{line}' >/root/field.jsonl")
    done = run_playbook("tune_mtp", "-e", "sglang_tune_prompts=/root/field.jsonl")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "line 1: the text repeats itself" in done.stdout + done.stderr


def test_the_truth_is_found(result: dict[str, Any], true_gains: dict[str, float]) -> None:
    verdict = result["verdict"]
    assert verdict["unequal"] == []
    assert verdict["left_out"] == []
    caps = {run["arm"]: run["apart"]["effective_max_running_requests"] for run in result["runs"]}
    assert {arm: str(cap) for arm, cap in caps.items()} == CAPS
    profiles = {profile["name"]: profile for profile in verdict["profiles"]}
    for name, true in true_gains.items():
        told = profiles[name]
        assert told["low"] * (1 - EMULATED) < true < told["high"] * (1 + EMULATED), (true, told)
    assert profiles["yours"]["verdict"] == profiles["single-user"]["verdict"] == "keep"
    assert profiles["batch"]["verdict"] == "drop"
    # a few percent slower: near the margin, where more starts would tell a tie from a loss
    assert profiles["team"]["verdict"] != "keep"


def test_it_is_applied_and_reported(
    host: Host, said: str, result: dict[str, Any], reports: Path
) -> None:
    assert result["verdict"]["winner"] == "on"
    assert "sglang now runs on" in said
    assert "speculative-algorithm" in host.check_output("pct exec 100 -- cat /etc/sglang.yaml")
    (table,) = reports.glob("ct100-sglang-tune-*.csv")
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert [(row["arm"], row["concurrency"]) for row in rows] == [
        (run["arm"], str(point["concurrency"])) for run in result["runs"] for point in run["points"]
    ]
    assert [row["arm"] for row in rows if row["concurrency"] == "1"] == ["off", "on", "on", "off"]
    assert {row["arm"]: row["concurrency"] for row in rows} == CAPS  # the last of each start
    page = (reports / "pve1.html").read_text()
    assert "keep on: it gains more than 5 % over off" in page
    assert "<svg" in page
    kinds = {
        run["points"][0]["prompts"]: run["points"][0]["accept_length"] for run in result["kinds"]
    }
    assert kinds["code"] > kinds["chat"] > kinds["reasoning"] > 1


def test_arms_with_unequal_memory_are_not_compared(host: Host, run_playbook: RunPlaybook) -> None:
    """As those of the field's table; told after one start of each, and the server put back."""
    flags = {"mem-fraction-static": 0.76}
    arms = [{"name": "off", "mtp": False}, {"name": "on", "mtp": True, "flags": flags}]
    options = {"sglang_tune_arms": arms, "sglang_tune_concurrencies": [1]}
    done = run_playbook("tune_mtp", "-e", json.dumps({**options, "sglang_tune_allowed": True}))
    said = " ".join((done.stdout + done.stderr).split()).replace(chr(92), "")
    assert done.returncode == 2, said[-6000:]
    assert "off and on cannot be compared" in said
    assert '"mem_fraction_static", "off": 0.8, "on": 0.76' in said
    assert "sglang serves again as it is declared; 2 starts are kept" in said
    assert "mem-fraction-static: 0.8\n" in host.check_output("pct exec 100 -- cat /etc/sglang.yaml")
