"""Each rule speaks on a host made wrong in that one way, and no rule speaks on a host in order."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trees
from ansible_collections.gpuhost.inference.plugins.module_utils import _findings, _host
from ansible_collections.gpuhost.inference.plugins.module_utils._iommu import IommuGroup
from ansible_collections.gpuhost.inference.plugins.module_utils._kernel_log import read_blocks
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader
from ansible_collections.gpuhost.inference.plugins.module_utils._trial import TRIAL

BOOTED = "[    0.000000] Linux version 6.14.11-4-pve (build@proxmox)\n"


def gpu(bus: str) -> str:
    return f"/sys/devices/pci0000:{bus}/0000:{int(bus, 16) - 1:02x}:01.1/0000:{bus}:00.0"


def override(bus: str, driver: str) -> tuple[str, str]:
    file = f"{gpu(bus)}/driver_override"
    return f"{file} = (null)", f"{file} = {driver}"


def text(path: str, content: object) -> str:
    """Return an entry of a tree for a file with JSON in it."""
    return f"{path} = {json.dumps(content)}"


KEPT = {
    "version": 1,
    "entries": [
        {
            "name": name,
            "driver": driver,
            "iommu_type": type_,
            "guest": {"kind": kind, "vmid": vmid},
            "gpus": {f"0000:{bus}:00.0": "10de:2bb5" for bus in buses},
        }
        for name, driver, type_, kind, vmid, buses in (
            ("inference", "nvidia", "DMA-FQ", "lxc", 100, ("41", "42", "43", "44")),
            ("confidential", "vfio-pci", "auto", "qemu", 200, ("81", "82")),
            ("tenant", "vfio-pci", None, "qemu", 201, ("83", "84")),
        )
    ],
}
PARTS = [
    f"{path} = x"
    for path in (
        "/usr/local/lib/gpuhost/gpuhost-boot",
        "/etc/udev/rules.d/10-gpuhost.rules",
        "/etc/initramfs-tools/hooks/gpuhost",
        "/etc/systemd/system/multi-user.target.wants/gpuhost-types.service",
        "/etc/systemd/system/multi-user.target.wants/gpuhost-verify.service",
    )
]
ORDERLY = [
    *(override(bus, "nvidia") for bus in ("41", "42", "43", "44")),
    *(override(bus, "vfio-pci") for bus in ("81", "82", "83", "84")),
]
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
        tree = (trees.HOSTS / f"{host}.tree").read_text(encoding="ascii")
        clean = [*CLEAN, *ORDERLY] if host == "eight-gpus" else CLEAN
        for old, new in (*clean, *changes):
            assert old in tree, f"{old!r} is not in the tree any more"
            tree = tree.replace(old, new)
        if host == "eight-gpus":
            tree += "\n".join([text("/etc/gpuhost/layout.json", KEPT), *PARTS])
        lines = [line for line in tree.splitlines() if not drop or drop not in line]
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

FREE = (f"{gpu('81')}/driver_override = vfio-pci", f"{gpu('81')}/driver_override = (null)")
BARE = (f"{gpu('42')}/driver_override = nvidia", f"{gpu('42')}/driver_override = (null)")
CARD_ON_VFIO = (
    "/0000:01:00.0/driver -> ../../../../../sys/bus/pci/drivers/nvidia",
    "/0000:01:00.0/driver -> ../../../../../sys/bus/pci/drivers/vfio-pci",
)
FIRST = "0x00000000d0000000 0x00000000d3ffffff 0x0000000000040200\\n"
WINDOW = "0x0000200000000000 0x0000201fffffffff 0x000000000014220c"
NOTHING = "0x0000000000000000 0x0000000000000000 "


def window(bus: str, line: str) -> tuple[str, str]:
    """Give another line to the large window of a GPU."""
    file = f"{gpu(bus)}/resource = {FIRST}"
    return file + WINDOW, file + line


ACS = 0x148  # where the test's ports have the capability


def port(bus: str, control: int) -> str:
    """Return the configuration space of the port above a GPU, with this ACS control register."""
    config = bytearray(4096)
    config[0x100:0x104] = (0x0001 | 2 << 16 | ACS << 20).to_bytes(4, "little")
    config[ACS : ACS + 4] = (0x000D | 1 << 16).to_bytes(4, "little")
    config[ACS + 6 : ACS + 8] = control.to_bytes(2, "little")
    escaped = "".join(f"\\x{byte:02x}" for byte in config)
    return f"{gpu(bus).rpartition('/')[0]}/config = {escaped}"


def next_kernel(modules: str, release: str = "6.17.2-1-pve") -> str:
    return "\n".join(
        (
            f"/boot/vmlinuz-{release} = x",
            f"/boot/initrd.img-{release} = x",
            f"/lib/modules/{release}/modules.dep = {modules}",
        )
    )


def builtin(module: str) -> str:
    return f"/lib/modules/6.14.11-4-pve/modules.builtin = kernel/drivers/vfio/pci/{module}.ko"


def images(**missing: list[str]) -> str:
    """Return the note of a check of `initrd.img-6.17.2-1-pve` (`next`) or of another image."""
    checked = {
        "/boot/initrd.img-6.17.2-1-pve" if name == "next" else f"/boot/{name}": {
            "size": 1,
            "mtime_ns": 1,
            "missing": lacks,
        }
        for name, lacks in missing.items()
    }
    return text("/var/lib/gpuhost/initramfs.json", {"version": 1, "images": checked})


def serving(*switches: str) -> str:
    """Return a server on two GPUs in container 100; `nccl` and `reduce` keep it from P2P."""
    nccl = int("nccl" in switches)
    reduce = "\\x00--disable-custom-all-reduce" if "reduce" in switches else ""
    return "\n".join(
        (
            f"/proc/3100/cmdline = python3\\x00-m\\x00sglang.launch_server{reduce}\\x00",
            "/proc/3100/status = PPid:\\t1\\nUid:\\t100000",
            "/proc/3100/uid_map = 0 100000 65536",
            "/proc/3100/root/etc/passwd = root:x:0:0::/root:",
            "/proc/3100/cgroup = 0::/lxc/100/ns/system.slice/sglang.service",
            f"/proc/3100/environ = HOME=/\\x00NCCL_P2P_DISABLE={nccl}",
            "/proc/3100/fd/30 -> /dev/nvidia0",
            "/proc/3100/fd/31 -> /dev/nvidia1",
        )
    )


def kept_p2p(verdict: str, *buses: str, kernel: str = "6.14.11-4-pve") -> str:
    """Return what is kept of a test of peer-to-peer copies."""
    addresses = [f"0000:{bus}:00.0" for bus in buses]
    test = {
        "verdict": verdict,
        "reason": "as seen",
        "time": "2026-02-03T04:05:06Z",
        "vmid": 100,
        "addresses": addresses,
        "basis": {
            "kernel": kernel,
            "driver": None,
            "dma_remap_peer_mmio": None,
            "registry_dwords": [],
            "parameters": [],
            "types": dict.fromkeys(addresses, "DMA-FQ"),
            "cards": dict.fromkeys(addresses, "10de:2bb5 10de:204e"),
        },
    }
    return text("/var/lib/gpuhost/p2p.json", {"version": 1, "tests": [test]})


BOTH = "updates/dkms/nvidia.ko:\\nkernel/drivers/vfio/pci/vfio-pci.ko:"
VIRTUAL = "amd-sev: type=snp\\nhostpci0: 0000:81:00"
QEMU = (
    "/var/lib/dpkg/status = Package: zip\\nVersion: 3.0\\n\\n"
    "Package: pve-qemu-kvm\\nStatus: install ok installed\\nVersion: "
)
DIRECT = (
    "iommu_groups/60/reserved_regions = 0x",
    "iommu_groups/60/reserved_regions = 0x000000003f000000 0x000000003f7fffff direct\\n0x",
)
RELAXED = (DIRECT[0], DIRECT[1].replace("direct", "direct-relaxable"))
HOLDER = ("/proc/900/fd/3 -> /dev/nvidiactl", "/proc/900/fd/3 -> /dev/nvidia2")
MOVE = [{"name": "spare", "addresses": ["43:00.0"], "driver": "vfio-pci"}]
RECORD = {
    "version": 1,
    "boot": "b1",
    "started": "2026-11-29T10:00:00Z",
    "wish": "0000:43:00.0 to driver vfio-pci",
    "before": {"0000:43:00.0": {"driver": "nvidia", "override": "nvidia"}},
    "types": {},
    "awake": [],
    "services": ["nvidia-persistenced.service"],
    "persistence": [],
}
CUT_OFF = text("/var/lib/gpuhost/transaction.json", RECORD)


CT = "hostname: inference"
STORAGES = "/etc/pve/storage.cfg = dir: local\\n\\tpath /var/lib/vz\\n\\nnfs: share\\n\\tserver nas"
OVMF = ("\\nname: confidential", "\\nbios: ovmf\\nname: confidential")


BOOT = "/proc/sys/kernel/random/boot_id = b1\n"


def trial(state: str, boot: str) -> str:
    """Return a trial that was armed in that boot, or runs in it; the host is in boot b1."""
    content = {
        "version": 1,
        "state": state,
        "type": "identity",
        "gpus": {"0000:41:00.0": "10de:2bb5"},
        "accept": ["fsp-identity"],
        "armed": "2026-03-04T05:06:07Z",
        "armed_boot": boot if state == "armed" else "b0",
        "since": 0.0,
        "expires": 9e9,
        "confirm": 600,
        "boot": boot if state == "running" else None,
        "outcome": None,
    }
    return BOOT + text(TRIAL, content)


def stuck(boot: str) -> str:
    mark = {"0000:42:00.0": {"pid": 900, "text": "the unbind has not returned"}}
    content = {"version": 1, "boot": "b1", "addresses": mark}
    return f"/proc/sys/kernel/random/boot_id = {boot}\n" + text(
        "/var/lib/gpuhost/stuck.json", content
    )


SUBJECT = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]|(?:lxc|qemu) \d+|/\S*")

# rule, subject, and the one change (or log, layout) that brings it about
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("snp-with-passthrough", "qemu 200", {"changes": [PT], "layout": SNP}),
    ("snp-not-active", "qemu 200", {"layout": SNP}),
    ("identity-with-snp", "0000:41:00.0", {"changes": [SEV_SNP, IDENTITY]}),
    ("identity-with-sme", "0000:41:00.0", {"changes": [IDENTITY], "log": SME}),
    ("identity-with-fsp", "0000:41:00.0", {"changes": [IDENTITY]}),
    ("no-gpu", "/sys/bus/pci/devices", {"changes": [("/vendor = 0x10de", "/vendor = 0x1002")]}),
    ("sme-with-nvidia", "0000:44:00.0", {"log": SME}),
    ("iommu-absent", "/sys/kernel/iommu_groups", {"drop": "iommu_group"}),
    ("amd-iommu-on", "/proc/cmdline", {"changes": [("/pve-1 ro", "/pve-1 ro amd_iommu=on")]}),
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
    ("rival-driver", "/etc/modprobe.d", {"changes": [("blacklist nouveau\\n", "")]}),
    ("rival-driver", "/etc/modprobe.d", {"changes": [("\\nblacklist nova_core", "")]}),
    ("vm-gpu-on-host-driver", "0000:81:00.0", {"changes": [VM_ON_NVIDIA]}),
    (
        "two-owners",
        "0000:83:00.0",
        {"changes": [("hostpci1: host=82:00.0", "hostpci1: host=83:00.0")]},
    ),
    ("container-node-missing", "lxc 100", {"changes": [ON_VFIO]}),
    ("driverless-twin", "0000:81:00.0", {"changes": [UNBOUND, NOT_CLAIMED, FREE]}),
    ("unprotected-twin", "0000:42:00.0", {"changes": [BARE]}),
    (
        "companion-left",
        "0000:01:00.0",
        {"host": "four-functions", "changes": [CARD_ON_VFIO]},
    ),
    ("vfio-held", "0000:83:00.0", {"drop": "201.pid"}),
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
        "/dev/kmsg",
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
        "/etc/default/grub",
        {"changes": [('root=ZFS=rpool/ROOT/pve-1"', 'root=ZFS=rpool/ROOT/pve-1 iommu=nopt"')]},
    ),
    ("part-unread", "/etc/modprobe.d/broken.conf", {"more": "/etc/modprobe.d/broken.conf/"}),
    ("part-unread", "/proc/900/fd/9", {"more": "/proc/900/fd/9 -> 9"}),
    (
        "off-bus",
        "0000:43:00.0",
        {
            "changes": [
                (
                    rf"{gpu('43')}/config = \xde\x10\xb5\x2b",
                    rf"{gpu('43')}/config = \xff\xff\xff\xff",
                )
            ]
        },
    ),
    (
        "power-error",
        "0000:44:00.0",
        {"changes": [(f"{gpu('44')}/power_state = D0", f"{gpu('44')}/power_state = error")]},
    ),
    (
        "power-error",
        "0000:44:00.0",
        {
            "changes": [
                (
                    f"{gpu('44')}/power/runtime_status = active",
                    f"{gpu('44')}/power/runtime_status = error",
                )
            ]
        },
    ),
    ("bar-unassigned", "0000:42:00.0", {"changes": [window("42", f"{NOTHING}0x000000000014220c")]}),
    ("bar-unassigned", "0000:42:00.0", {"changes": [window("42", f"{NOTHING}0x0000000000000000")]}),
    ("bar-small", "0000:42:00.0", {"changes": [window("42", WINDOW.replace("201f", "2000"))]}),
    (
        "reset-methods-differ",
        "0000:42:00.0",
        {"changes": [(f"{gpu('42')}/reset_method = flr bus", f"{gpu('42')}/reset_method = bus")]},
    ),
    ("bus-shared", "0000:81:00.0", {"more": f"{gpu('81')[:-12]}0000:81:03.0/vendor = 0x144d"}),
    (
        "divided-for-vm",
        "0000:81:00.0",
        {
            "changes": [
                VM_ON_NVIDIA,
                (f"{gpu('81')}/sriov_numvfs = 0", f"{gpu('81')}/sriov_numvfs = 4"),
            ]
        },
    ),
    (
        "divided-for-vm",
        "0000:81:00.0",
        {
            "changes": [VM_ON_NVIDIA],
            "more": "/proc/driver/nvidia/gpus/0000:81:00.0/information = Device Minor: 4\n"
            "/proc/driver/nvidia/capabilities/gpu4/mig/gi1/access = DeviceFileMinor: 12",
        },
    ),
    ("snp-old-qemu", "qemu 200", {"layout": SNP, "more": f"{QEMU}9.1.2-3"}),
    (
        "snp-old-qemu",
        "qemu 200",
        {"changes": [("hostpci0: 0000:81:00", VIRTUAL)], "more": f"{QEMU}9.0.0-1"},
    ),
    (
        "iommu-off-many-cpus",
        "/proc/cmdline",
        {
            "changes": [("/pve-1 ro", "/pve-1 ro amd_iommu=off")],
            "more": "/sys/devices/system/cpu/possible = 0-511",
        },
    ),
    (
        "iommu-off-many-cpus",
        "/etc/default/grub",
        {
            "changes": [('/pve-1"', '/pve-1 iommu=off"')],
            "more": "/sys/devices/system/cpu/possible = 0-255",
        },
    ),
    ("bus-shared", "0000:81:00.0", {"more": f"{gpu('81')[:-12]}0000:83:00.0/vendor = 0x10de"}),
    (
        "guest-differs",
        "0000:42:00.0",
        {
            "layout": LAYOUT,
            "more": "/etc/pve/lxc/101.conf = "
            + "".join(f"dev{n}: /dev/nvidia{n}\\n" for n in range(4)),
        },
    ),
    (
        "iommu-absent",
        "/sys/kernel/iommu_groups",
        {"drop": "iommu_group", "changes": [("/pve-1 ro", "/pve-1 ro amd_iommu=on iommu=pt")]},
    ),
    ("direct-region", "0000:81:00.0", {"changes": [DIRECT]}),
    ("p2p-redirected", "lxc 100", {"more": f"{port('41', 0x5C)}\n{port('42', 0x1D)}"}),
    (
        "next-kernel-incomplete",
        "/boot/vmlinuz-6.17.2-1-pve",
        {"more": next_kernel("kernel/drivers/vfio/pci/vfio-pci.ko:")},
    ),
    (
        "next-kernel-incomplete",
        "/boot/vmlinuz-6.17.2-1-pve",
        {"more": next_kernel(BOTH).replace("/boot/initrd.img", "/boot/other")},
    ),
    ("persistence-missing", "/etc/gpuhost/layout.json", {"drop": "/layout.json", "layout": LAYOUT}),
    (
        "persistence-differs",
        "0000:82:00.0",
        {"layout": [{**LAYOUT[1], "driver": "none", "guest": None}]},
    ),
    ("persistence-differs", "0000:41:00.0", {"layout": LAYOUT[1:]}),
    ("persistence-broken", "/etc/udev/rules.d/10-gpuhost.rules", {"drop": "10-gpuhost"}),
    (
        "part-unread",
        "/etc/gpuhost/layout.json",
        {"changes": [], "drop": "/layout.json", "more": "/etc/gpuhost/layout.json = {"},
    ),
    (
        "part-unread",
        "/var/lib/gpuhost/initramfs.json",
        {"more": "/var/lib/gpuhost/initramfs.json = []"},
    ),
    ("override-missing", "0000:42:00.0", {"changes": [BARE]}),
    (
        "initramfs-incomplete",
        "/boot/initrd.img-6.17.2-1-pve",
        {"more": images(next=["/etc/modprobe.d/gpuhost.conf"])},
    ),
    (
        "initramfs-unchecked",
        "/boot/initrd.img-6.17.2-1-pve",
        {"more": f"{images(other=[])}\n{next_kernel(BOTH)}"},
    ),
    (
        "cmdline-contradiction",
        "/proc/cmdline",
        {"changes": [("/pve-1 ro", "/pve-1 ro iommu=pt iommu=nopt")]},
    ),
    (
        "cmdline-contradiction",
        "/etc/default/grub",
        {"changes": [('/pve-1"', '/pve-1 iommu=pt iommu.passthrough=0"')]},
    ),
    (
        "idle-boot-file",
        "/etc/kernel/cmdline",
        {"more": "/etc/kernel/cmdline = root=ZFS=rpool/ROOT/pve-1 iommu=pt"},
    ),
    (
        "idle-boot-file",
        "/etc/default/grub",
        {
            "changes": [
                ("BOOT_IMAGE=/boot/vmlinuz-6.14.11-4-pve", r"initrd=\\EFI\\proxmox\\x"),
                ('/pve-1"', '/pve-1 iommu=pt"'),
            ]
        },
    ),
    (
        "known-bad-kernel",
        "/proc/sys/kernel/osrelease",
        {"changes": [("6.14.11-4-pve", "6.14.2-1-pve")]},
    ),
    (
        "known-bad-kernel",
        "/boot/vmlinuz-6.12.23-1-pve",
        {"more": next_kernel(BOTH, "6.12.23-1-pve")},
    ),
    (
        "vfio-builtin-options",
        "/etc/modprobe.d/vfio.conf",
        {
            "more": "/etc/modprobe.d/vfio.conf = options vfio-pci ids=10de:2bb5\n"
            + builtin("vfio-pci")
        },
    ),
    (
        "display-for-vm",
        "0000:81:00.0",
        {"more": "/proc/iomem = 200000000000-2000003fffff : BOOTFB"},
    ),
    ("part-unread", "/proc/iomem", {"more": "/proc/iomem = 00000000-00000000 : BOOTFB"}),
    ("change-refused", "0000:43:00.0", {"changes": [HOLDER], "layout": MOVE}),
    ("hostpci-invalid", "qemu 200", {"changes": [("\\nmachine: q35\\nname: c", "\\nname: c")]}),
    (
        "hostpci-part-of-card",
        "qemu 300",
        {"host": "four-functions", "more": "/etc/pve/qemu-server/300.conf = hostpci0: 01:00.0"},
    ),
    (
        "two-vms-at-boot",
        "0000:83:00.0",
        {"changes": [("hostpci1: host=82:00.0,pcie=1", "hostpci1: 83:00.0\\nonboot: 1")]},
    ),
    (
        "mapping-drift",
        "/etc/pve/mapping/pci.cfg",
        {"changes": [("iommugroup=62", "iommugroup=13")]},
    ),
    (
        "container-raw-lines",
        "lxc 100",
        {"changes": [(CT, f"{CT}\\nlxc.cgroup2.devices.allow: c 505:* rwm")]},
    ),
    (
        "uvm-node-stale",
        "/dev/nvidia-uvm",
        {"changes": [("195 nvidia", "195 nvidia\\n505 nvidia-uvm")]},
    ),
    ("container-device-absent", "lxc 100", {"drop": "/dev/nvidia-uvm c"}),
    (
        "hookscript-local",
        "lxc 100",
        {
            "changes": [(CT, f"{CT}\\nhookscript: local:snippets/gpu.sh")],
            "more": STORAGES,
        },
    ),
    ("snp-vm-settings", "qemu 200", {"layout": SNP}),
    ("mmio-window", "qemu 200", {"changes": [OVMF]}),
    (
        "p2p-fallback-missing",
        "lxc 100",
        {"more": serving("nccl") + "\n" + kept_p2p("broken", "41", "42")},
    ),
    (
        "p2p-fallback-left-over",
        "lxc 100",
        {"more": serving("reduce") + "\n" + kept_p2p("works", "41", "42", "43")},
    ),
    ("p2p-untested", "lxc 100", {"more": serving()}),
    ("unfinished-change", "/var/lib/gpuhost/transaction.json", {"more": CUT_OFF}),
    ("unbind-stuck", "0000:42:00.0", {"more": stuck("b1")}),
    ("trial-armed", TRIAL, {"more": trial("armed", "b1")}),
    ("trial-running", TRIAL, {"more": trial("running", "b1")}),
    ("trial-running", TRIAL, {"more": trial("armed", "b0")}),
    ("part-unread", TRIAL, {"more": f"{BOOT}{TRIAL} = {{"}),
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
    for one in result["findings"]:
        assert SUBJECT.fullmatch(one["subject"]), one


def test_every_rule_has_a_case_and_an_id_of_its_own() -> None:
    ids = [rule.id for rule in _findings.RULES]
    assert set(ids) == {rule for rule, _subject, _how in CASES}
    assert len(ids) == len(set(ids))
    assert {rule.severity for rule in _findings.RULES} <= set(_findings.SEVERITIES)


OVERRIDE = (f"{gpu('81')}/driver_override = vfio-pci", f"{gpu('81')}/driver_override = nvidia")


@pytest.mark.parametrize(
    ("rule", "how"),
    [
        ("iommu-absent", {"changes": [("/pve-1 ro", "/pve-1 ro quiet")]}),
        (
            "p2p-fallback-missing",
            {"more": serving("nccl", "reduce") + "\n" + kept_p2p("broken", "41", "42")},
        ),
        (
            "p2p-fallback-missing",
            {"more": serving() + "\n" + kept_p2p("broken", "41", "42", kernel="6.8.12-1-pve")},
        ),
        ("p2p-fallback-left-over", {"more": serving() + "\n" + kept_p2p("works", "41", "42")}),
        ("p2p-fallback-left-over", {"more": serving("nccl") + "\n" + kept_p2p("works", "41")}),
        (
            "p2p-fallback-left-over",
            {"more": serving("nccl") + "\n" + kept_p2p("unknown", "41", "42")},
        ),
        ("p2p-untested", {"more": serving("nccl", "reduce")}),
        ("p2p-untested", {"more": serving() + "\n" + kept_p2p("works", "41", "42")}),
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
        ("no-gpu", {"host": "bmc-and-nvme"}),
        ("off-bus", {"drop": "/config = "}),
        (
            "power-error",
            {"changes": [(f"{gpu('84')}/power_state = D0", f"{gpu('84')}/power_state = D3cold")]},
        ),
        ("bar-unassigned", {"drop": f"{gpu('42')}/resource"}),
        ("bar-small", {"changes": [(WINDOW, WINDOW.replace("201f", "2000"))]}),
        ("reset-methods-differ", {"changes": [("reset_method = flr bus", "reset_method = bus")]}),
        (
            "bus-shared",
            {
                "more": f"{gpu('81')[:-12]}0000:81:00.4/vendor = 0x10de\n"
                f"{gpu('81')[:-12]}0000:81:03.1/physfn -> ../0000:81:00.0"
            },
        ),
        ("bus-shared", {"more": f"{gpu('81')[:-12]}0000:82:00.0/vendor = 0x10de"}),
        ("bus-shared", {"more": f"{gpu('41')[:-12]}0000:41:03.0/vendor = 0x144d"}),
        (
            "link-narrow",
            {"changes": [("current_link_speed = 32.0 GT/s", "current_link_speed = 2.5 GT/s")]},
        ),
        (
            "divided-for-vm",
            {"changes": [(f"{gpu('41')}/sriov_numvfs = 0", f"{gpu('41')}/sriov_numvfs = 4")]},
        ),
        ("display-for-vm", {"more": "/proc/iomem = e0000000-e03fffff : BOOTFB"}),
        ("display-for-vm", {"more": "/proc/iomem = 00000000-00000000 : BOOTFB"}),
        ("display-for-vm", {"host": "bmc-and-nvme", "more": "/proc/iomem = 1-2 : BOOTFB"}),
        ("snp-old-qemu", {"layout": SNP, "more": f"{QEMU}9.2.0-5"}),
        ("snp-old-qemu", {"layout": LAYOUT, "more": f"{QEMU}9.1.2-3"}),
        (
            "iommu-off-many-cpus",
            {
                "changes": [("/pve-1 ro", "/pve-1 ro amd_iommu=off")],
                "more": "/sys/devices/system/cpu/possible = 0-254",
            },
        ),
        ("iommu-off-many-cpus", {"more": "/sys/devices/system/cpu/possible = 0-511"}),
        ("direct-region", {"changes": [RELAXED]}),
        (
            "direct-region",
            {"changes": [(DIRECT[0].replace("60", "42"), DIRECT[1].replace("60", "42"))]},
        ),
        ("p2p-redirected", {"more": port("41", 0x59)}),
        ("p2p-redirected", {"more": f"{gpu('41').rpartition('/')[0]}/config = \\x22"}),
        (
            "p2p-redirected",
            {
                "more": port("41", 0x5D),
                "changes": [
                    (f"iommu_groups/{n}/type = DMA-FQ", f"iommu_groups/{n}/type = identity")
                    for n in (42, 43, 44)
                ],
            },
        ),
        ("next-kernel-incomplete", {"more": next_kernel(BOTH)}),
        ("next-kernel-incomplete", {"more": next_kernel(BOTH), "drop": "modules.dep"}),
        ("persistence-missing", {"drop": "/layout.json"}),
        (
            "persistence-missing",
            {"drop": "/layout.json", "layout": [{**LAYOUT[0], "iommu_type": None}]},
        ),
        ("persistence-differs", {"layout": LAYOUT}),
        ("persistence-differs", {}),
        ("persistence-broken", {"drop": "gpuhost"}),
        ("override-missing", {"changes": [BARE], "drop": "/layout.json"}),
        ("initramfs-incomplete", {"more": images(next=[])}),
        ("initramfs-unchecked", {"more": f"{images(next=[])}\n{next_kernel(BOTH)}"}),
        ("initramfs-unchecked", {"more": next_kernel(BOTH)}),
        (
            "cmdline-contradiction",
            {
                "changes": [
                    ("/pve-1 ro", "/pve-1 ro iommu=nopt console=tty0 console=ttyS0 quiet quiet")
                ]
            },
        ),
        ("idle-boot-file", {"more": "/etc/kernel/cmdline = root=ZFS=rpool/ROOT/pve-1 quiet"}),
        (
            "idle-boot-file",
            {"changes": [PT], "more": "/etc/kernel/cmdline = root=ZFS=rpool/ROOT/pve-1 iommu=pt"},
        ),
        (
            "known-bad-kernel",
            {"host": "four-functions", "changes": [("6.14.11-4-pve", "6.14.2-1-pve")]},
        ),
        ("known-bad-kernel", {"changes": [("6.14.11-4-pve", "6.14.20-1-pve")]}),
        ("vfio-builtin-options", {"more": "/etc/modprobe.d/v.conf = options vfio-pci ids=10de:1"}),
        (
            "leftover-vfio-ids",
            {
                "more": "/etc/modprobe.d/v.conf = options vfio-pci ids=10de:2bb5\n"
                + builtin("vfio-pci")
            },
        ),
        ("unprotected-twin", {"changes": [BARE, ("hostpci", "unused")]}),
        ("companion-left", {"host": "four-functions"}),
        ("vfio-held", {"drop": "/etc/pve"}),
        ("change-refused", {"changes": [HOLDER], "layout": LAYOUT[:1]}),
        ("mmio-window", {"changes": [OVMF, ("\\nbios: ovmf", "\\nbios: ovmf\\ncpu: host")]}),
        (
            "container-raw-lines",
            {"changes": [(CT, f"{CT}\\nlxc.cgroup2.devices.allow: c 10:200 rwm")]},
        ),
        (
            "hookscript-local",
            {"changes": [(CT, f"{CT}\\nhookscript: share:snippets/x")], "more": STORAGES},
        ),
        ("uvm-node-stale", {"changes": [("195 nvidia", "195 nvidia\\n510 nvidia-uvm")]}),
        ("uvm-node-stale", {"drop": "/dev/nvidia-uvm"}),
        ("mapping-drift", {"changes": [("iommugroup=1,node=pve2", "iommugroup=9,node=pve2")]}),
        ("two-vms-at-boot", {"changes": [("hostpci1: host=82:00.0", "hostpci1: host=83:00.0")]}),
        ("unfinished-change", {"more": f"{CUT_OFF}\n/run/gpuhost.lock = 900 ansible"}),
        ("unbind-stuck", {"more": stuck("b2")}),
        ("trial-armed", {"more": trial("armed", "b0")}),
        ("trial-running", {"more": trial("running", "b0")}),
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


def test_what_shares_a_group_is_named_with_what_the_host_does_with_it(
    audit: Callable[..., Any],
) -> None:
    disk = "/sys/devices/pci0000:22/0000:20:01.2/0000:22:00.0/nvme/nvme0/nvme0n1"
    result = audit(
        host="bmc-and-nvme",
        more=f"{disk}/dev = 259:0\n/sys/class/block/nvme0n1 -> ../..{disk[4:]}\n"
        "/proc/self/mountinfo = 1 0 259:0 / / rw - ext4 /dev/nvme0n1 rw",
    )
    finding = next(f for f in result["findings"] if f["id"] == "group-not-viable")
    assert "0000:22:00.0 (144d:a80a, class 0x010802, nvme)" in finding["evidence"]
    assert "mounted at /" in finding["evidence"]
    assert finding["remedy"].startswith("Leave this GPU to the host")


def test_a_refused_change_names_guard_and_holder(audit: Callable[..., Any]) -> None:
    result = audit(HOLDER, layout=MOVE)
    said = [f["evidence"] for f in result["findings"] if f["id"] == "change-refused"]
    assert any(text.startswith("in-use: ") and "process 900" in text for text in said)


def test_a_damaged_record_of_a_change_is_named(audit: Callable[..., Any]) -> None:
    result = audit(more="/var/lib/gpuhost/transaction.json = []")
    (sentence,) = result["unread"]
    assert "/var/lib/gpuhost/transaction.json cannot be read" in sentence


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
