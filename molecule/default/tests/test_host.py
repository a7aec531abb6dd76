"""The Proxmox host is as inventory/lab declares it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from testinfra.host import Host

testinfra_hosts = ["ansible://pve1"]
PCI = "/sys/bus/pci/devices"


def _linked(host: Host, address: str, name: str) -> str:
    return host.check_output(f"readlink {PCI}/{address}/{name}").rpartition("/")[2]


def test_each_gpu_has_its_declared_driver(host: Host) -> None:
    for entry in host.ansible.get_variables()["gpu_layout"]:
        for address in entry["addresses"]:
            assert _linked(host, address, "driver") == entry["driver"], address
            override = host.check_output(f"cat {PCI}/{address}/driver_override")
            assert override == entry["driver"], address


def test_each_group_has_its_declared_type(host: Host) -> None:
    entries = [e for e in host.ansible.get_variables()["gpu_layout"] if "iommu_type" in e]
    assert entries
    for entry in entries:
        for address in entry["addresses"]:
            kind = host.check_output(f"cat {PCI}/{address}/iommu_group/type")
            assert kind == entry["iommu_type"], address


def test_guests_of_the_layout_run(host: Host) -> None:
    assert host.check_output("pct status 100") == "status: running"
    assert host.check_output("qm status 200") == "status: running"


def test_gpus_of_the_other_tenant_are_untouched(
    host: Host, assert_neighbour_undisturbed: Callable[[Host], None]
) -> None:
    for address in ("0000:83:00.0", "0000:84:00.0"):
        assert _linked(host, address, "driver") == "vfio-pci"
        assert host.check_output(f"cat {PCI}/{address}/iommu_group/type") == "DMA"
    assert_neighbour_undisturbed(host)


def test_rival_drivers_are_kept_away(host: Host) -> None:
    assert host.file("/etc/modprobe.d/zz-gpuhost.conf").contains("^blacklist nouveau$")


def test_report_shows_the_host_and_its_server(root: Path) -> None:
    page = (root / ".build/reports/pve1.html").read_text(encoding="utf-8")
    assert "0000:41:00.0" in page
    assert "qwen3.5-122b" in page
    report = json.loads((root / ".build/reports/pve1.json").read_text(encoding="utf-8"))
    assert report["layout"]["problems"] == []
    assert "GPU 0000:81:00.0 has driver vfio-pci and IOMMU group type DMA" in report["changes"]
    assert "lxc guest 100 runs" in report["changes"]
    assert [server["state"] for server in report["servers"]] == ["ready"]
