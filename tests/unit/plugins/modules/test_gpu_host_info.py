"""The module as a whole: shape of the result, unread parts, options."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trees
import yaml
from ansible_collections.gpuhost.inference.plugins.modules import gpu_host_info

Run = Callable[..., dict[str, Any]]
LAYOUT = [{"name": "inference", "numa_node": 0, "driver": "nvidia"}]


@pytest.fixture
def log(tmp_path: Path) -> str:
    file = tmp_path / "kernel.log"
    file.write_text("[    0.000000] Linux version 6.14.11-4-pve\n")
    return str(file)


def test_result_on_eight_gpus(host_tree: Callable[[str], Path], run_module: Run, log: str) -> None:
    result = run_module(
        gpu_host_info,
        sysroot=str(host_tree("eight-gpus")),
        log_file=log,
        layout=LAYOUT,
        layout_unassigned="keep",
    )
    assert result["changed"] is False
    buses = [gpu["address"][5:7] for gpu in result["gpus"]]
    assert buses == ["41", "42", "43", "44", "81", "82", "83", "84"]
    assert result["gpus"][0]["iommu_group"] == result["groups"][0]
    assert [(guest["kind"], guest["vmid"]) for guest in result["guests"]] == [
        ("lxc", 100),
        ("qemu", 200),
        ("qemu", 201),
    ]
    assert result["guests"][0]["settings"][0] == {"key": "dev0", "value": "/dev/nvidia0,gid=44"}
    assert {gpu["verdict"] for gpu in result["health"]["gpus"]} == {"healthy"}
    assert result["host"]["iommu"] == {"present": True, "vendor": "amd", "default_type": "DMA-FQ"}
    assert result["host"]["boot_loader"]["name"] == "grub"
    assert result["layout"]["entries"] == [
        {
            "name": "inference",
            "addresses": [f"0000:4{n}:00.0" for n in range(1, 5)],
            "expect": None,
            "driver": "nvidia",
            "iommu_type": None,
            "guest": None,
        }
    ]
    assert result["layout"]["unassigned"] == [f"0000:8{n}:00.0" for n in range(1, 5)]


def test_keys_are_documented(host_tree: Callable[[str], Path], run_module: Run) -> None:
    documented = yaml.safe_load(gpu_host_info.RETURN)
    result = run_module(gpu_host_info, sysroot=str(host_tree("eight-gpus")))
    assert set(result) - {"changed", "invocation"} == set(documented)
    for part in ("host", "layout"):
        assert set(result[part]) == set(documented[part]["contains"])
    assert set(result["findings"][0]) == set(documented["findings"]["contains"])
    assert set(result["guests"][0]) == set(documented["guests"]["sample"][0])


def test_other_settings_of_a_guest_stay_secret(
    host_tree: Callable[[str], Path], run_module: Run
) -> None:
    root = host_tree("eight-gpus")
    trees.unpack("/etc/pve/qemu-server/202.conf = cipassword: hunter2\\nname: x", root)
    result = run_module(gpu_host_info, sysroot=str(root))
    assert "hunter2" not in str(result)
    assert result["guests"][3]["vmid"] == 202


def test_modprobe_lines_of_other_drivers_are_left_out(
    host_tree: Callable[[str], Path], run_module: Run
) -> None:
    root = host_tree("eight-gpus")
    trees.unpack("/etc/modprobe.d/a.conf = blacklist radeonfb\\nblacklist nouveau", root)
    result = run_module(gpu_host_info, sysroot=str(root))
    assert [line["module"] for line in result["host"]["modprobe"]] == ["nouveau"]


def test_a_captured_host_is_never_judged_by_the_log_of_this_one(
    host_tree: Callable[[str], Path], run_module: Run
) -> None:
    result = run_module(gpu_host_info, sysroot=str(host_tree("eight-gpus")))
    assert {gpu["verdict"] for gpu in result["health"]["gpus"]} == {"unknown"}


def test_a_part_that_cannot_be_read_is_null_and_named(
    host_tree: Callable[[str], Path], run_module: Run
) -> None:
    root = host_tree("eight-gpus")
    trees.unpack("/sys/kernel/iommu_groups/7/type/\n/etc/pve/lxc/102.conf/\n", root)
    result = run_module(gpu_host_info, sysroot=str(root), layout=LAYOUT, layout_unassigned="keep")
    assert not result.get("failed")
    assert result["groups"] is None
    assert result["guests"] is None
    assert len(result["gpus"]) == 8
    assert {f["subject"] for f in result["findings"] if f["id"] == "part-unread"} == {
        "/sys/kernel/iommu_groups/7/type",
        "/etc/pve/lxc/102.conf",
    }
    assert len(result["unread"]) == 2


def test_unread_gpus_make_no_layout_fit(host_tree: Callable[[str], Path], run_module: Run) -> None:
    root = host_tree("eight-gpus")
    trees.unpack("/sys/bus/pci/devices/0000:99:00.0/vendor/", root)
    result = run_module(gpu_host_info, sysroot=str(root), layout=LAYOUT)
    assert result["gpus"] is None
    (problem,) = result["layout"]["problems"]
    assert "could not be read" in problem


def test_a_device_that_is_no_gpu_is_described(
    host_tree: Callable[[str], Path], run_module: Run
) -> None:
    layout = [{"name": "a", "addresses": ["22:00.0"], "driver": "nvidia"}, "text"]
    result = run_module(
        gpu_host_info,
        sysroot=str(host_tree("bmc-and-nvme")),
        layout=layout,
        layout_unassigned="keep",
    )
    first, second = result["layout"]["problems"]
    assert "0000:22:00.0, which is no NVIDIA GPU but 144d:a80a, class 0x010802" in first
    assert "layout entry 2 is 'text'" in second


def test_a_saved_log_of_another_time_says_nothing_of_drivers(run_module: Run, log: str) -> None:
    result = run_module(gpu_host_info, log_file=log)
    assert not result.get("failed")
    assert result["health"]["log"]["complete"] is True


def test_an_unknown_source_is_refused(run_module: Run) -> None:
    result = run_module(gpu_host_info, sources=["syslog"])
    assert result["failed"]
    assert "journal, dmesg" in result["msg"]


@pytest.mark.parametrize(("sight", "bars"), [("there", True), ("off", False), ("earlier", False)])
def test_an_unfinished_change_bars_a_reboot_unless_only_that_ends_it(
    host_tree: Callable[[str], Path], run_module: Run, log: str, sight: str, bars: bool
) -> None:
    root = host_tree("eight-gpus")
    device = root / "sys/bus/pci/devices/0000:43:00.0"
    trees.unpack(
        "/proc/sys/kernel/random/boot_id = b7\n"
        + "/var/lib/gpuhost/transaction.json = "
        + json.dumps(
            {
                "version": 1,
                "boot": "b6" if sight == "earlier" else "b7",
                "started": "2026-02-03T04:05:06Z",
                "wish": "0000:43:00.0 to driver nvidia and a reset by flr",
                "before": {"0000:43:00.0": {"driver": "nvidia", "override": None}},
                **{key: [] for key in ("awake", "services", "persistence")},
                "types": {},
            }
        ),
        root,
    )
    if sight == "off":
        (device / "config").write_bytes(b"\xff" * 64)
    result = run_module(gpu_host_info, sysroot=str(root), log_file=log, layout=LAYOUT)
    found = [one["evidence"] for one in result["findings"] if one["id"] == "unfinished-change"]
    assert len(found) == 1
    assert ("only a reboot or a power-off ends that" in found[0]) == (sight == "off")
    assert any("transaction.json" in one for one in result["host"]["reboot"]["problems"]) == bars
