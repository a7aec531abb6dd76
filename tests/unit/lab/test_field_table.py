"""How MTP is measured in the field, run on the stand-in in virtual time: the same shape comes out.

Prompts of one repeated word, one draft token, another memory fraction in each arm, and clients that
wait above the cap. Both flaws of it are then refused: the prompts before a start, the arms in the
verdict. With real prompts and equal arms the same server tells something else.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import bench_runs
import pytest
from ansible_collections.gpuhost.inference.plugins.module_utils._bench_corpus import from_file
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from ansible_collections.gpuhost.inference.plugins.module_utils._tune_verdict import judge

LAB = Path(__file__).resolve().parents[3] / "lab" / "sglang"
ONE_DRAFT = {"num-steps": 1, "eagle-topk": 1, "num-draft-tokens": 2}
FRACTIONS = {"off": 0.85, "on": 0.76}  # of the field; equal arms have that of `on`
POINTS = (1, 4, 16, 64, 128)
Table = dict[str, dict[int, dict[str, float]]]


def table(model: Path, kinds: str, fractions: dict[str, float]) -> Table:
    """Return what the engine does in each arm at each concurrency."""
    found: Table = {}
    for arm, fraction in fractions.items():
        command = [sys.executable, "-m", "sglang.standin.truth", "--model-path", str(model)]
        command += ["--tp", "4", "--mem-fraction-static", str(fraction)]
        if arm == "on":
            command += ["--speculative-algorithm", "NEXTN"]
            command += [f"--speculative-{name}={number}" for name, number in ONE_DRAFT.items()]
        asked = {"TRUTH_KINDS": kinds, "TRUTH_CONCURRENCIES": ",".join(map(str, POINTS))}
        done = subprocess.run(
            command,
            env={**os.environ, "PYTHONPATH": str(LAB), **asked},
            capture_output=True,
            text=True,
            check=True,
        )
        rows = [json.loads(line) for line in done.stdout.splitlines()]
        found[arm] = {row["concurrency"]: row for row in rows}
    return found


@pytest.fixture(scope="module")
def field(model: Path) -> Table:
    return table(model, "repeated", FRACTIONS)


@pytest.fixture(scope="module")
def fair(model: Path) -> Table:
    return table(model, "code,chat,reasoning", dict.fromkeys(FRACTIONS, FRACTIONS["on"]))


def gain(rows: Table, concurrency: int, what: str) -> float:
    return rows["on"][concurrency][what] / rows["off"][concurrency][what] - 1


def runs(rows: Table, fractions: dict[str, float]) -> list[dict[str, Any]]:
    """Return three starts of each arm; what waits above the cap is told by the benchmark."""
    made = []
    for arm, row in rows.items():
        full = [one for one in POINTS if row[one]["runs"] < one]
        for start, luck in enumerate((0.997, 1.0, 1.004), 1):
            made.append(
                bench_runs.run(
                    arm,
                    start,
                    {one: row[one]["output_tok_s"] * luck for one in POINTS if one not in full},
                    equal={"mem_fraction_static": fractions[arm]},
                    rejected=dict.fromkeys(full, "above-cap"),
                )
            )
    return made


def test_the_shape_of_the_field(field: Table) -> None:
    """Each request is faster at all concurrencies, all together are not from the cap on."""
    for one in POINTS:
        assert gain(field, one, "per_request_tok_s") > 0.10
    assert all(gain(field, one, "output_tok_s") > 0.10 for one in (1, 4, 16))
    assert all(gain(field, one, "output_tok_s") < -0.15 for one in (64, 128))
    assert field["on"][64]["runs"] == 24
    assert field["off"][64]["runs"] == 57


def test_its_prompts_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "field.jsonl"
    texts = (f"{number}: " + "hello " * 500 for number in range(64))
    file.write_text(
        "".join(json.dumps({"conversations": [{"value": text}]}) + "\n" for text in texts)
    )
    with pytest.raises(GpuHostError, match="line 1: the text repeats itself"):
        from_file(str(file))


def test_its_arms_are_not_compared(field: Table) -> None:
    found = judge(runs(field, FRACTIONS))
    assert found["verdict"] == "not-enough-data"
    assert found["winner"] is None
    assert found["unequal"] == [{"key": "mem_fraction_static", "off": 0.85, "on": 0.76}]


def test_its_points_above_the_cap_do_not_count(field: Table) -> None:
    found = judge(runs(field, dict.fromkeys(FRACTIONS, 0.76)))
    assert {(one["arm"], one["concurrency"]) for one in found["left_out"]} == {
        ("off", 64),
        ("off", 128),
        ("on", 64),
        ("on", 128),
    }
    assert max(one["concurrency"] for one in found["points"] if one["measured"]) == 16


def test_real_prompts_and_equal_arms_tell_something_else(field: Table, fair: Table) -> None:
    """Less than the field's gain for one user, and none with sixteen, where the field saw one."""
    assert gain(fair, 1, "output_tok_s") < 0.75 * gain(field, 1, "output_tok_s")
    found = judge(runs(fair, dict.fromkeys(FRACTIONS, 0.76)))
    assert found["unequal"] == []
    words = {one["concurrency"]: one["verdict"] for one in found["points"] if one["measured"]}
    assert words == {1: "keep", 4: "keep", 16: "tie"}
