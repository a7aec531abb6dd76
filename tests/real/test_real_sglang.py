"""The recordings in tests/fixtures/sglang are what a real SGLang says (`make test-sglang`)."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sglang_states as states

ROOT = Path(__file__).resolve().parents[2]
REAL = ROOT / ".build" / "real-sglang"
STUB = ROOT / "tests" / "real" / "stub"
RECORDING = ROOT / "tests" / "fixtures" / "sglang" / "0.5.23.json"
CPU = (
    *("--device", "cpu", "--load-format", "dummy", "--attention-backend", "torch_native"),
    *("--disable-overlap-schedule", "--mem-fraction-static", "0.05", "--max-total-tokens", "4096"),
)
TOKENS = 400  # of the long request: seconds


class Starter:
    """Starts real servers, each on a port of its own, and ends them all."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self.started: list[states.Server] = []

    def __call__(self, *flags: str, **environment: str) -> states.Server:
        given = list(flags)
        if "--port" not in given:
            with socket.create_server(("127.0.0.1", 0)) as probe:
                given += ["--port", str(probe.getsockname()[1])]
        python = str(REAL / "venv" / "bin" / "python")
        command = ["nice", "-n", "10", python, "-m", "sglang.launch_server"]
        command += ["--model-path", str(REAL / "model"), *CPU, *given]
        variables = {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": str(STUB), "OMP_NUM_THREADS": "1"}
        variables.update(environment)
        log = self._logs / f"{len(self.started)}.log"
        self.started.append(states.Server(command, variables, log))
        return self.started[-1]


STORIES: dict[str, Any] = {
    "life": lambda start: states.life(start, TOKENS),
    "full queue": lambda start: states.full(start, TOKENS),
    "SIGTERM to all processes": lambda start: states.to_all(start, TOKENS),
    "SIGTERM while loading": lambda start: states.loading(start, 15),
    "SIGTERM during warm-up": lambda start: states.warming(start, 15),
    "SIGTERM when idle": states.idle,
    "scheduler killed": states.killed,
    "start-up failure in a scheduler": lambda start: states.failed(
        start, "--mem-fraction-static", "0.000001"
    ),
    "port taken": states.taken,
    "unknown flag": lambda start: states.refused(start, "--mamba-scheduler-strategy", "x"),
    "ambiguous flag": lambda start: states.refused(start, "--cuda-graph-max-bs", "8"),
    "bad choice": lambda start: states.refused(start, "--kv-cache-dtype", "none"),
}


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starter]:
    if not (REAL / "installed").exists():
        pytest.fail("no real SGLang here: run `make test-sglang`")
    starter = Starter(tmp_path_factory.mktemp("real-sglang"))
    yield starter
    for server in starter.started:
        server.kill()


@pytest.mark.parametrize("story", STORIES)
def test_recording_is_what_the_real_server_says(
    start: Starter, story: str, request: pytest.FixtureRequest
) -> None:
    told = STORIES[story](start)
    for server in start.started:
        server.kill()
    recorded = json.loads(RECORDING.read_text()) if RECORDING.exists() else {}
    if request.config.getoption("--record"):
        recorded[story] = told
        text = json.dumps(dict(sorted(recorded.items())), indent=1, sort_keys=True)
        assert states.KEY not in text
        assert str(ROOT) not in text
        RECORDING.write_text(text + "\n")
        return
    assert states.differences(recorded[story], json.loads(json.dumps(told))) == []
