"""The filters that plan, judge and compare runs: their options, errors and examples."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.errors import AnsibleFilterError
from ansible_collections.gpuhost.inference.plugins.filter import (
    tune_history,
    tune_load,
    tune_plan,
    tune_verdict,
)
from bench_runs import run
from plays import run_playbook

PLAN = tune_plan.FilterModule().filters()["tune_plan"]
VERDICT = tune_verdict.FilterModule().filters()["tune_verdict"]
HISTORY = tune_history.FilterModule().filters()["tune_history"]
LOAD = tune_load.FilterModule().filters()["tune_load"]

RUNS = [
    run(arm, start, {1: speed * (1 + 0.001 * start), 8: 5 * speed, 32: 12 * speed})
    for arm, speed in (("off", 60.0), ("on", 90.0))
    for start in (1, 2)
]


def test_text_is_read_as_numbers() -> None:
    """Templates of ansible-core 2.16 turn every number into text."""
    options = {"minutes": "60", "restart_s": "300", "point_s": "100", "points": "6"}
    assert PLAN([], **options, levels=["1", "8"], max_concurrency="8", blocks="1") == PLAN(
        [], minutes=60, restart_s=300, point_s=100, levels=[1, 8], max_concurrency=8, blocks=1
    )
    assert VERDICT(RUNS, margin="0.05", confidence="0.95") == VERDICT(RUNS)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda: PLAN([], minutes="soon"), "tune_plan: minutes is 'soon', which is no number"),
        (lambda: PLAN([], minutes=60, levels=["x"]), "tune_plan: level is 'x'"),
        (lambda: PLAN({}, minutes=60), "tune_plan: the runs are not a list"),
        (lambda: VERDICT(RUNS, margin=5), "tune_verdict: margin is 5"),
        (lambda: VERDICT("text"), "tune_verdict: the runs are not a list"),
        (lambda: HISTORY(RUNS, RUNS), "tune_history: the runs are of 2 arms"),
        (lambda: LOAD([{"text": ""}]), "tune_load: each look needs at"),
        (lambda: LOAD([]), "tune_load: 0 looks"),
    ],
)
def test_errors(ask: Any, message: str) -> None:
    with pytest.raises(AnsibleFilterError, match=message):
        ask()


def test_history_compares_its_input_with_what_was_before() -> None:
    slower = [run("off", start, {1: 30.0 + start / 100}) for start in (5, 6)]
    assert HISTORY(slower, RUNS, arm="off")["points"][0]["verdict"] == "slower"


ON_A_SERVER = ("systemd_service", "include_role", "sglang_benchmark")


def test_examples(tmp_path: Path) -> None:
    """Run in a playbook all that needs no server, on runs where the examples read them."""
    kept, reports = tmp_path / "tune", tmp_path / "reports"
    kept.mkdir()
    reports.mkdir()
    for one in RUNS:
        (kept / f"{one['arm']}-{one['start']}.json").write_text(json.dumps(one))
    for day in ("20261130", "20261207"):
        whole = reports / f"qwen-a-sglang-tune-{day}T140000Z.json"
        whole.write_text(json.dumps({"runs": RUNS}))
    texts = [one.EXAMPLES for one in (tune_plan, tune_verdict, tune_history, tune_load)]
    listed = yaml.safe_load("".join(texts).replace("/var/lib/gpuhost/tune", str(kept)))
    tasks = [task for task in listed if not any(key.endswith(ON_A_SERVER) for key in task)]
    assert len(listed) - len(tasks) == len(ON_A_SERVER)
    play = {"hosts": "localhost", "connection": "local", "gather_facts": False, "tasks": tasks}
    (tmp_path / "examples.yml").write_text(yaml.safe_dump([play]), encoding="utf-8")
    python = {"ansible_python_interpreter": sys.executable}
    said = run_playbook(tmp_path, tmp_path / "examples.yml", variables=python)
    assert "next: off on on off, each at C=1, 4, 8, 32, 64, 128; about 60 minutes" in said
    assert said.count("keep on: it gains more than 5 % over off") == 2
    assert re.search(r'"1": 0.5,\s+"3": 0.5', said)
    assert "failed=0" in said
