"""The stand-ins of NVIDIA's tools: which GPU `-i` means, who keeps a GPU open and lets it go."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import pytest

BIN = Path(__file__).parents[3] / "lab" / "rootfs" / "usr" / "bin"
ROWS = [
    {
        "index": str(index),
        "uuid": f"GPU-{index}a",
        "pci.bus_id": f"00000000:{bus}:00.0",
        "persistence_mode": "Disabled",
    }
    for index, bus in enumerate(("41", "8A"))
]


def load(name: str) -> ModuleType:
    """Import a program that has no .py in its name."""
    loader = importlib.machinery.SourceFileLoader(name.replace("-", "_"), str(BIN / name))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
    loader.exec_module(module)
    return module


@pytest.fixture
def smi(tmp_path: Path) -> ModuleType:
    module = load("nvidia-smi")
    module.DAEMON = str(tmp_path / "socket")
    module.LEGACY = tmp_path / "legacy"
    return module


@pytest.fixture
def daemon(smi: ModuleType, tmp_path: Path) -> Iterator[dict[str, int]]:
    """Let a daemon answer for two GPUs; return what it holds."""
    module = load("nvidia-persistenced")
    module.GPUS = tmp_path
    for minor, address in enumerate(("0000:41:00.0", "0000:8a:00.0")):
        (tmp_path / address).mkdir()
        (tmp_path / address / "information").write_text(f"IRQ: \t 1\nDevice Minor: \t {minor}\n")
    opened = iter(range(100, 200))
    module.os = type(
        "Os",
        (),
        {
            "O_RDWR": 2,
            "open": lambda *_: next(opened),
            "close": lambda _descriptor: None,
        },
    )
    held: dict[str, int] = {}
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(smi.DAEMON)
        server.listen()

        def serve() -> None:
            with suppress(OSError):  # the test has closed the socket
                module.serve(server, held)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield held
        server.shutdown(socket.SHUT_RDWR)
        thread.join(10)


@pytest.mark.parametrize(
    ("wanted", "indices"),
    [
        (None, ["0", "1"]),
        ("1", ["1"]),
        ("0000:8a:00.0", ["1"]),
        ("00000000:8A:00.0", ["1"]),
        ("GPU-0a", ["0"]),
        ("0, 1", ["0", "1"]),
        ("8a:00.0", []),
        ("0001:8a:00.0", []),
    ],
)
def test_which_gpu(smi: ModuleType, wanted: str | None, indices: list[str]) -> None:
    assert [row["index"] for row in smi.chosen(ROWS, wanted)] == indices


def test_the_daemon_holds_and_lets_go(
    smi: ModuleType, daemon: dict[str, int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert smi.set_persistence(ROWS, "1") == 0
    assert sorted(daemon) == ["0000:41:00.0", "0000:8a:00.0"]
    assert smi.persistence("") == "0000:41:00.0 0000:8a:00.0"
    assert smi.set_persistence([{**ROWS[0], "persistence_mode": "Enabled"}], "0") == 0
    assert sorted(daemon) == ["0000:8a:00.0"]
    assert capsys.readouterr().out.splitlines() == [
        "Enabled persistence mode for GPU 00000000:41:00.0.",
        "Enabled persistence mode for GPU 00000000:8A:00.0.",
        "All done.",
        "Disabled persistence mode for GPU 00000000:41:00.0.",
        "All done.",
    ]


def test_a_gpu_that_the_daemon_cannot_open(
    smi: ModuleType, daemon: dict[str, int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert smi.set_persistence([{**ROWS[0], "pci.bus_id": "00000000:42:00.0"}], "1") == 255
    assert "Unable to set persistence mode for GPU 00000000:42:00.0" in capsys.readouterr().out
    assert not daemon


def test_without_the_daemon_nothing_is_held(
    smi: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    smi.set_persistence(ROWS[:1], "1")
    assert smi.persistence("") == "0000:41:00.0"
    assert "Enabled Legacy persistence mode" in capsys.readouterr().out


def test_capability_is_a_matrix(smi: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert smi.show_capability(ROWS, "w") == 0
    head, first, second, *_legend = capsys.readouterr().out.splitlines()
    assert head == "\t\33[4mGPU0\33[0m\t\33[4mGPU1\33[0m\t"
    assert (first, second) == (" GPU0\tX\tOK\t", " GPU1\tOK\tX\t")
    assert smi.show_capability(ROWS, "") == 2
