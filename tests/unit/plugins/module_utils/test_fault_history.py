"""Earlier boots, out of a stand-in for the journal."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuhost.inference.plugins.module_utils import _faults, _kernel_log
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader
from ansible_collections.gpuhost.inference.plugins.modules import gpu_health_info

Run = Callable[..., dict[str, Any]]
Journal = Callable[[dict[str, list[str]]], None]
NOW, LAST, FIRST = "c" * 32, "b" * 32, "a" * 32
GPU, GONE = "0000:42:00.0", "0000:c9:00.0"
BEGIN = "Linux version 6.14.11-4-pve"
FAILS = [
    BEGIN,
    "NVRM: GPU0 kgspBootstrap_GH100: GSP-FMC reported an error while attempting to boot GSP: 0xb",
    f"NVRM: GPU {GPU}: RmInitAdapter failed! (0x62:0x55:2142)",
]


@pytest.fixture
def journal(
    host_tree: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Journal:
    """Make a captured host this host, with a journalctl that knows boots and their messages.

    A boot without messages is one whose files cannot be read.
    """
    host = host_tree("eight-gpus")
    boot_id = host / "proc/sys/kernel/random/boot_id"
    boot_id.parent.mkdir(parents=True, exist_ok=True)
    boot_id.write_text(f"{NOW[:8]}-{NOW[8:12]}-{NOW[12:16]}-{NOW[16:20]}-{NOW[20:]}\n")
    monkeypatch.setattr(gpu_health_info, "Reader", lambda root: Reader(str(host)))
    monkeypatch.setattr(_faults, "is_captured", lambda host: False)
    monkeypatch.setattr(_kernel_log, "this_boot", lambda host: NOW)
    tools, logs = tmp_path / "tools", tmp_path / "logs"
    tools.mkdir()
    logs.mkdir()
    program = tools / "journalctl"
    program.write_text(
        "#!/bin/sh\n"
        f'echo "$@" >> {logs}/calls\n'
        f'case "$*" in *--list-boots*) cat {logs}/list; exit;; esac\n'
        'for word in "$@"; do case "$word" in --boot=*) boot="${word#--boot=}";; esac; done\n'
        f'[ "$boot" != 0 ] || boot={NOW}\n'
        f'cat "{logs}/$boot" || exit 1\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")

    def keep(boots: dict[str, list[str]]) -> None:
        heading = "IDX BOOT ID                          FIRST ENTRY                 LAST ENTRY\n"
        rows = (
            f"{at - len(boots) + 1:3} {boot} Sat 2026-10-03 06:14:05 UTC—Sun 2026-10-04 07:00:00\n"
            for at, boot in enumerate(boots)
        )
        (logs / "list").write_text(heading + "".join(rows))
        for boot, messages in boots.items():
            entries = (
                {
                    "SYSLOG_IDENTIFIER": "kernel",
                    "_TRANSPORT": "kernel",
                    "_BOOT_ID": boot,
                    "_SOURCE_MONOTONIC_TIMESTAMP": str(at * 1000000),
                    "MESSAGE": message,
                }
                for at, message in enumerate(messages)
            )
            text = "".join(f"{json.dumps(entry)}\n" for entry in entries)
            if messages:
                (logs / boot).write_text(text)

    return keep


def of(result: dict[str, Any], address: str = GPU) -> dict[str, Any]:
    [gpu] = [gpu for gpu in result["gpus"] if gpu["address"] == address]
    return dict(gpu)


def test_the_same_in_three_boots(journal: Journal, run_module: Run) -> None:
    journal({FIRST: FAILS, LAST: FAILS, NOW: FAILS})
    result = run_module(gpu_health_info, sources=["journal"], earlier_boots=2)
    assert [boot["boot_id"] for boot in result["history"]] == [LAST, FIRST]
    assert [boot["error"] for boot in result["history"]] == [None, None]
    for boot in result["history"]:
        past = of(boot)
        assert past == {"address": GPU, "verdict": "failed", "faults": ["gsp-fmc"]}
        assert (boot["first"], boot["last"]) == ("0.000000", "2.000000")
    assert of(result)["ladder"] == ["power-off", "hardware"]
    [fault] = result["faults"]
    assert fault["boots"] == 3


def test_a_boot_in_between_without_the_fault(journal: Journal, run_module: Run) -> None:
    journal({FIRST: FAILS, LAST: [BEGIN], NOW: FAILS})
    result = run_module(gpu_health_info, sources=["journal"], earlier_boots=2)
    assert of(result["history"][0])["verdict"] == "unknown"  # the drivers of now prove nothing
    assert of(result)["ladder"][0] == "reset"
    assert result["faults"][0]["boots"] == 1


def test_a_gpu_that_is_gone_now(journal: Journal, run_module: Run) -> None:
    lost = f"NVRM: Xid (PCI:{GONE[:-2]}): 79, GPU has fallen off the bus."
    journal({LAST: [BEGIN, lost], NOW: [BEGIN]})
    result = run_module(gpu_health_info, sources=["journal"], earlier_boots=1)
    assert of(result["history"][0], GONE)["verdict"] == "lost"
    assert GONE not in {gpu["address"] for gpu in result["gpus"]}


def test_boots_that_are_not_kept_or_cannot_be_read(journal: Journal, run_module: Run) -> None:
    journal({FIRST: FAILS, LAST: [], NOW: FAILS})
    result = run_module(gpu_health_info, sources=["journal"], earlier_boots=5)
    unread, read, missing = result["history"]
    assert (unread["boot_id"], unread["gpus"]) == (LAST, [])
    assert "journalctl" in unread["error"]
    assert (read["boot_id"], read["error"]) == (FIRST, None)
    assert missing["boot_id"] is None
    assert missing["error"] == "the journal keeps 2 earlier boots, not 5"
    assert result["faults"][0]["boots"] == 1


def test_without_a_journal(
    journal: Journal, run_module: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    journal({NOW: FAILS})
    monkeypatch.setenv("PATH", str(tmp_path))
    result = run_module(gpu_health_info, sources=["journal"], earlier_boots=1)
    [boot] = result["history"]
    assert "journalctl" in boot["error"]


def test_by_default_nothing_is_asked(journal: Journal, run_module: Run, tmp_path: Path) -> None:
    journal({LAST: FAILS, NOW: FAILS})
    result = run_module(gpu_health_info, sources=["journal"])
    assert result["history"] == []
    assert "list-boots" not in (tmp_path / "logs/calls").read_text()


def test_only_the_wanted_gpus(journal: Journal, run_module: Run) -> None:
    journal({LAST: FAILS, NOW: FAILS})
    result = run_module(
        gpu_health_info, sources=["journal"], earlier_boots=1, addresses=["0000:41:00.0"]
    )
    assert [gpu["address"] for gpu in result["history"][0]["gpus"]] == ["0000:41:00.0"]


@pytest.mark.parametrize(
    "options", [{"earlier_boots": 1, "boot": "-1"}, {"earlier_boots": -1}], ids=["boot", "negative"]
)
def test_wrong_options(journal: Journal, run_module: Run, options: dict[str, Any]) -> None:
    journal({NOW: FAILS})
    result = run_module(gpu_health_info, **options)
    assert "earlier_boots counts back from the boot that runs now" in result["msg"]
