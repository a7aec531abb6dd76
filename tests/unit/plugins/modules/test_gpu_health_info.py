"""The module as a whole: which log and which GPUs it judges, and the shape of its result."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.gpuhost.inference.plugins.module_utils import _faults, _kernel_log
from ansible_collections.gpuhost.inference.plugins.module_utils._kernel_log import Source
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader
from ansible_collections.gpuhost.inference.plugins.modules import gpu_health_info

Run = Callable[..., dict[str, Any]]
FIRST = "[    0.000000] Linux version 6.14.11-4-pve\n"
FSP = (
    "[   12.345678] NVRM: GPU0 kfspProcessCommandResponse_GH100: FSP response reported error. "
    "Task ID: 0x1 Command type: 0x14 Error code: 0x177\n"
    "[   12.345999] NVRM: GPU 0000:42:00.0: RmInitAdapter failed! (0x62:0xffff:2168)\n"
)
BOOT = "6f0c1d5e-2b7a-4f3d-9c8e-7a6b5d4c3b2a"


@pytest.fixture
def saved(tmp_path: Path) -> Callable[[str], str]:
    def save(text: str) -> str:
        file = tmp_path / "kernel.log"
        file.write_text(text)
        return str(file)

    return save


@pytest.fixture
def eight(host_tree: Callable[[str], Path]) -> str:
    return str(host_tree("eight-gpus"))


def words(result: dict[str, Any]) -> dict[str, str]:
    return {gpu["address"]: f"{gpu['verdict']} {gpu['fsp']}" for gpu in result["gpus"]}


def test_a_captured_host_and_its_log(
    eight: str, saved: Callable[[str], str], run_module: Run
) -> None:
    result = run_module(gpu_health_info, sysroot=eight, log_file=saved(FIRST + FSP))
    assert result["changed"] is False
    verdicts = words(result)
    assert verdicts.pop("0000:42:00.0") == "failed failed"
    assert {verdicts[f"0000:4{n}:00.0"] for n in (1, 3, 4)} == {"healthy ok"}
    assert {verdicts[f"0000:8{n}:00.0"] for n in (1, 2, 3, 4)} == {"healthy unknown"}  # vfio-pci
    [gpu] = [gpu for gpu in result["gpus"] if gpu["fsp"] == "failed"]
    assert "0x177" in gpu["evidence"][0]
    assert gpu["reason"] == "its FSP did not come up (fsp-response, logged once)"


def test_result_has_the_documented_keys_and_no_others(
    eight: str, saved: Callable[[str], str], run_module: Run
) -> None:
    documented = yaml.safe_load(gpu_health_info.RETURN)
    result = run_module(gpu_health_info, sysroot=eight, log_file=saved(FIRST + FSP))
    result.pop("invocation")
    assert set(result) == {"changed", *documented}
    for key in ("gpus", "faults"):
        for item in result[key]:
            assert set(item) == set(documented[key]["contains"])
    assert set(result["log"]) == set(documented["log"]["contains"])


def test_a_captured_host_without_its_log_is_unknown(eight: str, run_module: Run) -> None:
    result = run_module(gpu_health_info, sysroot=eight)
    assert set(words(result).values()) == {"unknown unknown"}
    assert result["log"]["complete"] is False


@pytest.mark.parametrize(
    "addresses", [["42:00.0", "0000:83:00.0"], "42:00.0, 0000:83:00.0"], ids=["list", "text"]
)
def test_only_the_wanted_gpus(
    eight: str, saved: Callable[[str], str], run_module: Run, addresses: object
) -> None:
    log = FIRST + FSP + FSP.replace("42:00.0", "41:00.0")
    result = run_module(gpu_health_info, sysroot=eight, log_file=saved(log), addresses=addresses)
    assert sorted(words(result)) == ["0000:42:00.0", "0000:83:00.0"]
    assert [fault["address"] for fault in result["faults"]] == ["0000:42:00.0"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"addresses": ["0000:99:00.0"]}, "0000:99:00.0 is no NVIDIA GPU of this host or log"),
        ({"addresses": ["gpu0"]}, "'gpu0' is not a PCI address"),
        ({"log_file": "/nonexistent/kernel.log"}, "cannot be read: No such file"),
        ({"sources": ["syslog"]}, "value of sources must be one or more of"),
        ({"sysroot": "/", "sources": ["dmesg"], "boot": "-1"}, "add 'journal' to the sources"),
    ],
)
def test_wrong_options(eight: str, run_module: Run, options: dict[str, Any], message: str) -> None:
    result = run_module(gpu_health_info, **{"sysroot": eight, **options})
    assert result["failed"] is True
    assert message in result["msg"]


@pytest.fixture
def live(eight: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Make the captured host this host, with a journal as given."""
    boot_id = Path(eight) / "proc/sys/kernel/random/boot_id"
    boot_id.parent.mkdir(parents=True, exist_ok=True)
    boot_id.write_text(BOOT + "\n")

    monkeypatch.setattr(gpu_health_info, "Reader", lambda root: Reader(eight))
    monkeypatch.setattr(_faults, "is_captured", lambda host: False)

    def journal(text: str) -> None:
        monkeypatch.setattr(
            _faults,
            "read_live",
            lambda sources, boot, timeout: _kernel_log.KernelLog(
                [Source("journal", lambda: [text.encode()])]
            ),
        )

    return journal


def test_this_host(live: Callable[[str], None], run_module: Run) -> None:
    live(FIRST + FSP)
    verdicts = words(run_module(gpu_health_info))
    assert verdicts["0000:41:00.0"] == "healthy ok"
    assert verdicts["0000:42:00.0"] == "failed failed"


def test_another_boot_says_nothing_about_the_drivers_of_now(
    live: Callable[[str], None], run_module: Run
) -> None:
    live(FIRST + FSP)
    verdicts = words(run_module(gpu_health_info, boot="-1"))
    assert verdicts["0000:41:00.0"] == "unknown unknown"
    assert verdicts["0000:42:00.0"] == "failed failed"


def test_a_saved_log_of_this_host_may_be_of_another_time(
    live: Callable[[str], None], saved: Callable[[str], str], run_module: Run
) -> None:
    verdicts = words(run_module(gpu_health_info, log_file=saved(FIRST + FSP)))
    assert len(verdicts) == 8
    assert verdicts["0000:41:00.0"] == "unknown unknown"
    assert verdicts["0000:42:00.0"] == "failed failed"


def test_a_saved_log_of_this_very_boot(
    live: Callable[[str], None], saved: Callable[[str], str], run_module: Run
) -> None:
    entry = '{{"_BOOT_ID":"{}","SYSLOG_IDENTIFIER":"kernel","MESSAGE":"{}"}}\n'
    boot = BOOT.replace("-", "")
    log = entry.format(boot, "Linux version 6.14") + entry.format(
        boot, "NVRM: GPU 0000:42:00.0: RmInitAdapter failed! (0x62:0xffff:2168)"
    )
    verdicts = words(run_module(gpu_health_info, log_file=saved(log)))
    assert verdicts["0000:41:00.0"] == "healthy ok"
    assert verdicts["0000:42:00.0"] == "failed unknown"


def test_a_saved_log_of_another_host_is_judged_alone(
    live: Callable[[str], None], saved: Callable[[str], str], run_module: Run
) -> None:
    result = run_module(gpu_health_info, log_file=saved(FIRST + FSP.replace("42:00", "c2:00")))
    assert words(result) == {"0000:c2:00.0": "failed failed"}
