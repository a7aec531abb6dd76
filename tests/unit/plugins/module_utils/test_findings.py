"""Each rule speaks on a host made wrong in that one way, and no rule speaks on a host in order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trees
from ansible_collections.gpuhost.inference.plugins.module_utils import _findings, _host
from ansible_collections.gpuhost.inference.plugins.module_utils._iommu import IommuGroup
from ansible_collections.gpuhost.inference.plugins.module_utils._kernel_log import read_blocks
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader

BOOTED = "[    0.000000] Linux version 6.14.11-4-pve (build@proxmox)\n"
CLEAN = [
    (" amd_iommu=on", ""),
    (
        "/sys/bus/pci/drivers/nvidia/\n",
        "/sys/bus/pci/drivers/nvidia/\n"
        "/etc/modprobe.d/gpu.conf = blacklist nouveau\\nblacklist nova_core\n"
        '/etc/default/grub = GRUB_CMDLINE_LINUX="root=ZFS=rpool/ROOT/pve-1"\n'
        "/etc/modules = vfio\n"
        "/proc/cpuinfo = flags : fpu sme sev sev_es sev_snp\n",
    ),
]
LAYOUT = [
    {
        "name": "inference",
        "numa_node": 0,
        "expect": {"id": "10de:2bb5"},
        "driver": "nvidia",
        "iommu_type": "DMA-FQ",
        "guest": {"kind": "lxc", "vmid": 100},
    },
    {
        "name": "confidential",
        "addresses": ["81:00.0", "82:00.0"],
        "driver": "vfio-pci",
        "iommu_type": "auto",
        "guest": {"kind": "qemu", "vmid": 200},
    },
    {
        "name": "tenant",
        "addresses": ["83:00.0", "84:00.0"],
        "driver": "vfio-pci",
        "guest": {"kind": "qemu", "vmid": 201},
    },
]
SNP = [{**LAYOUT[1], "guest": {"kind": "qemu", "vmid": 200, "sev_snp": True}}]
FSP = """\
[   10.1] NVRM: GPU0 kfspProcessCommandResponse_GH100: FSP response reported error. Task ID: 0x1 \
Command type: 0x14 Error code: 0x177
[   10.2] NVRM: GPU 0000:41:00.0: RmInitAdapter failed! (0x62:0xffff:2142)
"""


@pytest.fixture
def audit(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    def run(
        *changes: tuple[str, str],
        more: str = "",
        drop: str | None = None,
        log: str = BOOTED,
        layout: object = None,
        host: str = "eight-gpus",
    ) -> dict[str, Any]:
        text = (trees.HOSTS / f"{host}.tree").read_text(encoding="ascii")
        for old, new in (*CLEAN, *changes):
            assert old in text, f"{old!r} is not in the tree any more"
            text = text.replace(old, new)
        lines = [line for line in text.splitlines() if not drop or drop not in line]
        root = trees.unpack("\n".join([*lines, more]), tmp_path / "host")
        blocks = read_blocks([log.encode()])
        return _host.audit(Reader(str(root)), blocks, layout, "keep", observed=True)

    return run


def found(result: dict[str, Any]) -> set[tuple[str, str]]:
    return {(finding["id"], finding["subject"]) for finding in result["findings"]}


@pytest.mark.parametrize("host", ["eight-gpus", "four-functions"])
def test_a_host_in_order_has_no_finding(audit: Callable[..., Any], host: str) -> None:
    result = audit(host=host, layout=LAYOUT if host == "eight-gpus" else None)
    assert result["findings"] == []
    assert result["layout"]["problems"] == ()
    assert result["layout"]["differs"] == []
    assert result["host"]["mode"] == "translated"
    assert result["unread"] == []


def gpu(bus: str) -> str:
    return f"/sys/devices/pci0000:{bus}/0000:{int(bus, 16) - 1:02x}:01.1/0000:{bus}:00.0"


PT = ("/pve-1 ro", "/pve-1 ro iommu=pt")
IDENTITY = ("iommu_groups/42/type = DMA-FQ", "iommu_groups/42/type = identity")
SEV_SNP = ("sev_snp = N", "sev_snp = Y")
SME = BOOTED + "[    0.4] Memory Encryption Features active: AMD SME\n"
ON_VFIO = (
    f"{gpu('41')}/driver -> ../../../../../sys/bus/pci/drivers/nvidia",
    f"{gpu('41')}/driver -> ../../../../../sys/bus/pci/drivers/vfio-pci",
)
VM_ON_NVIDIA = (
    f"{gpu('81')}/driver -> ../../../../../sys/bus/pci/drivers/vfio-pci",
    f"{gpu('81')}/driver -> ../../../../../sys/bus/pci/drivers/nvidia",
)
UNBOUND = (f"{gpu('81')}/driver -> ../../../../../sys/bus/pci/drivers/vfio-pci\n", "")
NOT_CLAIMED = ("hostpci0: 0000:81:00,pcie=1\\n", "")

# rule, subject, and the one change (or log, layout) that brings it about
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("snp-with-passthrough", "qemu 200", {"changes": [PT], "layout": SNP}),
    ("snp-not-active", "qemu 200", {"layout": SNP}),
    ("identity-with-snp", "0000:41:00.0", {"changes": [SEV_SNP, IDENTITY]}),
    ("identity-with-sme", "0000:41:00.0", {"changes": [IDENTITY], "log": SME}),
    ("identity-with-fsp", "0000:41:00.0", {"changes": [IDENTITY]}),
    ("no-gpu", "host", {"changes": [("/vendor = 0x10de", "/vendor = 0x1002")]}),
    ("sme-with-nvidia", "0000:44:00.0", {"log": SME}),
    ("iommu-absent", "host", {"drop": "iommu_group"}),
    ("amd-iommu-on", "host", {"changes": [("/pve-1 ro", "/pve-1 ro amd_iommu=on")]}),
    (
        "leftover-vfio-ids",
        "/proc/cmdline",
        {"changes": [("/pve-1 ro", "/pve-1 ro vfio-pci.ids=10de:2bb5,10de:22e8")]},
    ),
    (
        "leftover-vfio-ids",
        "/etc/modprobe.d/vfio.conf",
        {"more": "/etc/modprobe.d/vfio.conf = options vfio-pci disable_vga=1 ids=10DE:2BB5"},
    ),
    (
        "leftover-vfio-virqfd",
        "/etc/modules",
        {"changes": [("/etc/modules = vfio", "/etc/modules = vfio\\nvfio_virqfd")]},
    ),
    (
        "nvidia-install-hook",
        "/etc/modprobe.d/nvidia-iommu-identity.conf",
        {
            "more": "/etc/modprobe.d/nvidia-iommu-identity.conf = install nvidia "
            "/usr/local/bin/gpu-iommu-identity.sh; modprobe -i nvidia"
        },
    ),
    ("rival-driver", "nouveau", {"changes": [("blacklist nouveau\\n", "")]}),
    ("rival-driver", "nova_core", {"changes": [("\\nblacklist nova_core", "")]}),
    ("vm-gpu-on-host-driver", "0000:81:00.0", {"changes": [VM_ON_NVIDIA]}),
    (
        "two-owners",
        "0000:83:00.0",
        {"changes": [("hostpci1: host=82:00.0", "hostpci1: host=83:00.0")]},
    ),
    ("container-node-missing", "lxc 100", {"changes": [ON_VFIO]}),
    ("driverless-twin", "0000:81:00.0", {"changes": [UNBOUND, NOT_CLAIMED]}),
    ("group-not-viable", "0000:21:00.0", {"host": "bmc-and-nvme"}),
    ("driver-differs", "0000:41:00.0", {"changes": [ON_VFIO], "layout": LAYOUT}),
    ("type-differs", "0000:41:00.0", {"changes": [IDENTITY], "layout": LAYOUT}),
    (
        "type-differs",
        "0000:81:00.0",
        {"changes": [("iommu_groups/60/type = DMA-FQ", "iommu_groups/60/type = DMA")]}
        | {"layout": LAYOUT},
    ),
    (
        "guest-differs",
        "0000:81:00.0",
        {"changes": [NOT_CLAIMED], "layout": LAYOUT},
    ),
    ("fsp-failed", "0000:41:00.0", {"log": BOOTED + FSP}),
    (
        "gpu-failed",
        "0000:42:00.0",
        {
            "log": BOOTED + "[ 99.0] NVRM: GPU at PCI:0000:42:00: GPU-1\n"
            "[ 99.0] NVRM: Xid (PCI:0000:42:00): 79, pid=1, name=x, GPU has fallen off the bus.\n"
        },
    ),
    (
        "gpu-degraded",
        "0000:42:00.0",
        {
            "log": BOOTED + "[ 99.0] vfio-pci 0000:42:00.0: AMD-Vi: Event logged [IO_PAGE_FAULT "
            "domain=0x0021 address=0x20001c0000000 flags=0x0020]\n"
        },
    ),
    (
        "fault-unattributed",
        "fsp-response",
        {"log": BOOTED + FSP.splitlines(keepends=True)[0].replace("GPU0 ", "")},
    ),
    ("health-unknown", "0000:84:00.0", {"log": "[   12.0] NVRM: loading\n"}),
    (
        "link-narrow",
        "0000:43:00.0",
        {
            "changes": [
                (f"{gpu('43')}/current_link_width = 16", f"{gpu('43')}/current_link_width = 8")
            ]
        },
    ),
    (
        "reboot-pending",
        "host",
        {"changes": [('root=ZFS=rpool/ROOT/pve-1"', 'root=ZFS=rpool/ROOT/pve-1 iommu=nopt"')]},
    ),
    ("part-unread", "/etc/modprobe.d/broken.conf", {"more": "/etc/modprobe.d/broken.conf/"}),
]


@pytest.mark.parametrize(("rule", "subject", "how"), CASES)
def test_a_rule_speaks(
    audit: Callable[..., Any], rule: str, subject: str, how: dict[str, Any]
) -> None:
    options = {key: value for key, value in how.items() if key != "changes"}
    result = audit(*how.get("changes", []), **options)
    assert (rule, subject) in found(result)
    finding = next(f for f in result["findings"] if (f["id"], f["subject"]) == (rule, subject))
    assert finding["evidence"]


def test_every_rule_has_a_case_and_an_id_of_its_own() -> None:
    ids = [rule.id for rule in _findings.RULES]
    assert set(ids) == {rule for rule, _subject, _how in CASES}
    assert len(ids) == len(set(ids))
    assert {rule.severity for rule in _findings.RULES} <= set(_findings.SEVERITIES)


OVERRIDE = (f"{gpu('81')}/driver_override = (null)", f"{gpu('81')}/driver_override = nvidia")


@pytest.mark.parametrize(
    ("rule", "how"),
    [
        ("iommu-absent", {"changes": [("/pve-1 ro", "/pve-1 ro quiet")]}),
        ("snp-with-passthrough", {"changes": [PT], "layout": LAYOUT}),
        ("snp-not-active", {"changes": [SEV_SNP], "layout": SNP}),
        ("identity-with-snp", {"changes": [IDENTITY]}),
        ("identity-with-sme", {"changes": [IDENTITY]}),
        ("identity-with-fsp", {"changes": [PT]}),
        ("leftover-vfio-ids", {"changes": [("/pve-1 ro", "/pve-1 ro vfio-pci.ids=8086:1521")]}),
        ("leftover-vfio-ids", {"more": "/etc/modprobe.d/v.conf = options vfio-pci disable_vga=1"}),
        ("nvidia-install-hook", {"more": "/etc/modprobe.d/gpuhost.conf = install nvidia true"}),
        (
            "rival-driver",
            {
                "changes": [("blacklist nouveau\\nblacklist nova_core", "")],
                "more": "/lib/modules/6.14.11-4-pve/kernel/drivers/gpu/",
            },
        ),
        ("driverless-twin", {"changes": [UNBOUND, NOT_CLAIMED, OVERRIDE]}),
        (
            "two-owners",
            {"more": "/etc/pve/lxc/101.conf = dev0: /dev/nvidia0\\ndev1: /dev/nvidiactl"},
        ),
        ("container-node-missing", {"changes": [ON_VFIO, ("dev0: /dev/nvidia0,gid=44\\n", "")]}),
        ("group-not-viable", {"host": "four-functions"}),
        ("guest-differs", {"changes": [ON_VFIO], "layout": LAYOUT[:1]}),
        ("reboot-pending", {"changes": [("/etc/default/grub = ", "/etc/default/other = ")]}),
    ],
)
def test_a_rule_keeps_silent(audit: Callable[..., Any], rule: str, how: dict[str, Any]) -> None:
    options = {key: value for key, value in how.items() if key != "changes"}
    result = audit(*how.get("changes", []), **options)
    assert rule not in {finding["id"] for finding in result["findings"]}


def test_the_remedy_is_that_of_the_fault(audit: Callable[..., Any]) -> None:
    result = audit(log=BOOTED + FSP)
    finding = next(f for f in result["findings"] if f["id"] == "fsp-failed")
    assert "0x177" in finding["evidence"]
    (fault,) = result["health"]["faults"]
    assert finding["remedy"] == fault["remedy"]


def test_errors_come_first(audit: Callable[..., Any]) -> None:
    result = audit(ON_VFIO, layout=LAYOUT, more="/etc/modprobe.d/broken.conf/")
    severities = [finding["severity"] for finding in result["findings"]]
    assert severities == sorted(severities, key=_findings.SEVERITIES.index)
    assert len(set(severities)) > 1


@pytest.mark.parametrize(
    ("default", "snp", "sme", "mode"),
    [
        ("identity", False, False, "passthrough"),
        ("identity", True, None, "passthrough"),
        ("DMA-FQ", True, None, "snp"),
        ("DMA-FQ", False, True, "sme"),
        ("DMA-FQ", False, False, "translated"),
        ("DMA-FQ", None, False, "unknown"),
        ("DMA-FQ", False, None, "unknown"),
        (None, False, False, "unknown"),
    ],
)
def test_the_mode_of_a_host(
    default: str | None, snp: bool | None, sme: bool | None, mode: str
) -> None:
    group = IommuGroup(1, "DMA-FQ", (), ())
    assert _findings.host_mode([group], default, snp, sme) == mode
    assert _findings.host_mode([], default, snp, sme) == "off"


def test_the_mode_is_unknown_while_the_groups_are() -> None:
    assert _findings.host_mode(None, "DMA-FQ", False, False) == "unknown"
