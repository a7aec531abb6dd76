"""Builds the constructed hosts in tests/fixtures/hosts: `python tests/unit/build_trees.py`.

They follow what a Proxmox VE 9 host shows in sysfs, with round numbers; nothing was captured.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

HOSTS = Path(__file__).parent.parent / "fixtures" / "hosts"
CMDLINE = "BOOT_IMAGE=/boot/vmlinuz-6.14.11-4-pve root=ZFS=rpool/ROOT/pve-1 ro amd_iommu=on"
BLACKWELL = "10de:2bb5"


@dataclass
class Tree:
    """Lines of an archive, see trees.py."""

    title: str
    lines: list[str] = field(default_factory=list)
    minor: int = 0

    def file(self, path: str, text: str) -> None:
        self.lines.append(f"{path} = {text}")

    def device(
        self,
        address: str,
        id_: str,
        class_: str,
        *,
        group: int,
        port: str | None = None,
        driver: str | None = None,
        node: int = -1,
        subsystem: str = "0000:0000",
        extra: dict[str, str] | None = None,
    ) -> None:
        """Add a function; the driver's folder and the group are made with it."""
        root = f"pci{address[:7]}"
        self.lines.append("")
        self.lines.append(
            f"/sys/bus/pci/devices/{address} -> ../../../devices/{root}/"
            + (f"{port}/{address}" if port else address)
        )
        at = f"/sys/devices/{root}/" + (f"{port}/{address}" if port else address)
        up = "../" * at.count("/")
        files = {
            "vendor": f"0x{id_[:4]}",
            "device": f"0x{id_[5:]}",
            "subsystem_vendor": f"0x{subsystem[:4]}",
            "subsystem_device": f"0x{subsystem[5:]}",
            "class": class_,
            "numa_node": str(node),
            "driver_override": "(null)",
            "power/control": "auto",
            "power/runtime_status": "active",
            **(extra or {}),
        }
        for name, text in files.items():
            self.file(f"{at}/{name}", text)
        if driver:
            self.lines.append(f"{at}/driver -> {up}sys/bus/pci/drivers/{driver}")
            self.lines.append(f"/sys/bus/pci/drivers/{driver}/")
        self.lines.append(f"{at}/iommu_group -> {up}sys/kernel/iommu_groups/{group}")
        self.lines.append(
            f"/sys/kernel/iommu_groups/{group}/devices/{address} -> "
            f"../../../../bus/pci/devices/{address}"
        )
        if f"/sys/kernel/iommu_groups/{group}/type = DMA-FQ" not in self.lines:
            self.file(f"/sys/kernel/iommu_groups/{group}/type", "DMA-FQ")
            self.file(
                f"/sys/kernel/iommu_groups/{group}/reserved_regions",
                "0x00000000fee00000 0x00000000feefffff msi\\n"
                "0x000000fd00000000 0x000000ffffffffff reserved",
            )

    def gpu(
        self, address: str, *, group: int, driver: str, node: int, class_: str = "0x030200"
    ) -> None:
        """Add an RTX PRO 6000 Server with what its driver shows."""
        self.device(
            address,
            BLACKWELL,
            class_,
            group=group,
            port=f"{address[:5]}{int(address[5:7], 16) - 1:02x}:01.1",
            driver=driver,
            node=node,
            subsystem="10de:204e",
            extra={
                "resource": "0x00000000d0000000 0x00000000d3ffffff 0x0000000000040200\\n"
                "0x0000200000000000 0x0000201fffffffff 0x000000000014220c\\n"
                "0x0000000000000000 0x0000000000000000 0x0000000000000000\\n"
                "0x0000202000000000 0x0000202001ffffff 0x000000000014220c\\n"
                + "\\n".join(["0x0000000000000000 0x0000000000000000 0x0000000000000000"] * 9),
                "current_link_speed": "32.0 GT/s PCIe",
                "current_link_width": "16",
                "max_link_speed": "32.0 GT/s PCIe",
                "max_link_width": "16",
                "power_state": "D0",
                "d3cold_allowed": "1",
                "reset_method": "flr bus",
                "sriov_totalvfs": "48",
                "sriov_numvfs": "0",
                "config": "\\xde\\x10\\xb5\\x2b",
            },
        )
        if driver == "nvidia":
            self.file(
                f"/proc/driver/nvidia/gpus/{address}/information",
                "Model: \\t\\t NVIDIA RTX PRO 6000 Blackwell Server Edition\\nIRQ:   \\t\\t 120\\n"
                f"GPU UUID: \\t GPU-{self.minor:08x}-0000-0000-0000-000000000000\\n"
                "Video BIOS: \\t 98.02.5e.00.02\\nBus Type: \\t PCIe\\nDMA Size: \\t 52 bits\\n"
                f"DMA Mask: \\t 0xfffffffffffff\\nBus Location: \\t {address}\\n"
                f"Device Minor: \\t {self.minor}\\nGPU Firmware: \\t 580.126.09\\n"
                "GPU Excluded:\\t No",
            )
            self.lines.append(f"/dev/nvidia{self.minor} c 195:{self.minor}")
            self.minor += 1
        else:
            self.file(f"/sys/class/vfio/{group}/dev", f"240:{group}")

    def host(self) -> None:
        """Add what every host has."""
        self.file("/proc/cmdline", CMDLINE)
        self.file("/proc/sys/kernel/osrelease", "6.14.11-4-pve")
        self.file("/proc/sys/kernel/hostname", "pve1")
        self.file("/proc/devices", "Character devices:\\n  1 mem\\n195 nvidia\\n240 vfio")
        self.file("/boot/config-6.14.11-4-pve", "CONFIG_IOMMU_DEFAULT_DMA_LAZY=y")
        self.file("/sys/fs/cgroup/cgroup.controllers", "cpuset cpu io memory pids")
        self.file("/sys/class/iommu/ivhd0/amd-iommu/cap", "190b640f")
        self.file("/sys/module/kvm_amd/parameters/sev_snp", "N")
        for driver in ("nvidia", "vfio-pci"):
            self.lines.append(f"/sys/bus/pci/drivers/{driver}/")
        for name, number in (("nvidiactl", "195:255"), ("nvidia-uvm", "510:0")):
            self.lines.append(f"/dev/{name} c {number}")

    def process(self, pid: int, command: str, *, cgroup: str = "/init.scope", **fds: str) -> None:
        """Add a process; fds are given as f3="/dev/nvidia0"."""
        self.lines.append("")
        self.file(f"/proc/{pid}/cmdline", command.replace(" ", "\\x00") + "\\x00")
        self.file(f"/proc/{pid}/cgroup", f"0::{cgroup}")
        for name, target in fds.items():
            self.lines.append(f"/proc/{pid}/fd/{name[1:]} -> {target}")

    def save(self, name: str) -> None:
        """Write the archive; a repeated line is kept once."""
        text = "\n".join(
            line for at, line in enumerate(self.lines) if not line or line not in self.lines[:at]
        )
        (HOSTS / f"{name}.tree").write_text(f"# {self.title}\n{text.strip()}\n", encoding="ascii")


def eight_gpus() -> None:
    """Four cards of a container, four of a running virtual machine; both NUMA nodes."""
    tree = Tree("Eight equal GPUs on two NUMA nodes: four on nvidia for CT 100, four on vfio-pci")
    tree.host()
    for at, bus in enumerate((0x41, 0x42, 0x43, 0x44)):
        tree.gpu(f"0000:{bus:02x}:00.0", group=42 + at, driver="nvidia", node=0)
    for at, bus in enumerate((0x81, 0x82, 0x83, 0x84)):
        tree.gpu(f"0000:{bus:02x}:00.0", group=60 + at, driver="vfio-pci", node=1)
    tree.lines.append("")
    nodes = [*(f"nvidia{minor}" for minor in range(4)), "nvidiactl", "nvidia-uvm"]
    devs = "".join(f"dev{at}: /dev/{node},gid=44\\n" for at, node in enumerate(nodes))
    tree.file(
        "/etc/pve/lxc/100.conf",
        f"#model server\\narch: amd64\\n{devs}hostname: inference\\nmemory: 65536\\n"
        "\\n[before]\\ndev6: /dev/nvidia5",
    )
    tree.file("/sys/fs/cgroup/lxc/100/cgroup.events", "populated 0\\nfrozen 0")
    tree.file(
        "/etc/pve/qemu-server/200.conf",
        "hostpci0: 0000:81:00,pcie=1\\nhostpci1: host=82:00.0,pcie=1\\nmachine: q35\\n"
        "name: confidential\\n\\n[snap]\\nhostpci2: 0000:41:00.0",
    )
    tree.file(
        "/etc/pve/qemu-server/201.conf",
        "hostpci0: mapping=spare,pcie=1\\nmachine: q35\\nname: tenant\\nonboot: 1",
    )
    tree.file(
        "/etc/pve/mapping/pci.cfg",
        "spare\\n\\tdescription two cards\\n"
        "\\tmap id=10de:2bb5,iommugroup=62,node=pve1,path=0000:83:00.0;0000:84:00.0,"
        "subsystem-id=10de:204e\\n"
        "\\tmap id=10de:2bb5,iommugroup=1,node=pve2,path=0000:41:00.0",
    )
    tree.file("/run/qemu-server/201.pid", "2010")
    tree.file(
        "/run/qemu-server/pci-id-reservations",
        "0000:83:00.0 201 pid:2010\\n0000:84:00.0 201 pid:2010",
    )
    for group in (62, 63):
        tree.lines.append(f"/dev/vfio/{group} c 240:{group}")
    tree.process(1, "/sbin/init")
    tree.process(
        2010,
        "/usr/bin/kvm -id 201 -name tenant,debug-threads=on "
        "-device vfio-pci,host=0000:83:00.0,id=hostpci0 "
        "-device vfio-pci,host=0000:84:00.0,id=hostpci1",
        cgroup="/qemu.slice/201.scope",
        f20="/dev/vfio/62",
        f21="/dev/vfio/63",
    )
    tree.process(900, "/usr/bin/nvidia-smi", f3="/dev/nvidiactl")
    tree.save("eight-gpus")


def four_functions() -> None:
    """One card with sound, USB and UCSI functions in its group, as workstation cards have."""
    tree = Tree("A four-function card in one group")
    tree.host()
    tree.gpu("0000:01:00.0", group=14, driver="nvidia", node=0, class_="0x030000")
    for function, id_, class_, driver in (
        (1, "10de:22e8", "0x040300", "snd_hda_intel"),
        (2, "10de:22e9", "0x0c0330", "xhci_hcd"),
        (3, "10de:22ea", "0x0c8000", None),
    ):
        tree.device(
            f"0000:01:00.{function}",
            id_,
            class_,
            group=14,
            port="0000:00:01.1",
            driver=driver,
            node=0,
            subsystem="10de:204e",
        )
    tree.device("0000:00:01.1", "1022:1483", "0x060400", group=14, driver="pcieport", node=0)
    tree.save("four-functions")


def bmc_and_nvme() -> None:
    """A GPU whose group also holds the boot disk; the first VGA device is the BMC's."""
    tree = Tree("A BMC VGA, and an NVMe disk in the group of a GPU")
    tree.host()
    tree.device("0000:c2:00.0", "1a03:2000", "0x030000", group=5, driver="ast", node=0)
    tree.gpu("0000:21:00.0", group=18, driver="nvidia", node=0)
    tree.gpu("0000:c1:00.0", group=71, driver="nvidia", node=1)
    tree.device(
        "0000:22:00.0",
        "144d:a80a",
        "0x010802",
        group=18,
        port="0000:20:01.2",
        driver="nvme",
        node=0,
    )
    tree.save("bmc-and-nvme")


def busy_host() -> None:
    """A GPU among devices the host needs, one divided by MIG, one that fell off the bus."""
    tree = Tree(
        "A GPU in one group with the root disk and the network card of the host; another with MIG, "
        "another off the bus; the display is the BMC's"
    )
    tree.host()
    tree.file(
        "/proc/devices",
        "Character devices:\\n  1 mem\\n195 nvidia\\n237 nvidia-caps\\n240 vfio\\n\\n"
        "Block devices:\\n237 blkext\\n252 device-mapper",
    )
    tree.device(
        "0000:c2:00.0", "1a03:2000", "0x030000", group=5, driver="ast", extra={"boot_vga": "1"}
    )
    tree.lines.append(
        "/sys/class/graphics/fb0 -> ../../devices/pci0000:c2/0000:c2:00.0/graphics/fb0"
    )
    tree.file("/sys/devices/pci0000:c2/0000:c2:00.0/graphics/fb0/name", "astdrmfb")
    tree.file("/proc/iomem", "d6000000-d6ffffff : 0000:c2:00.0\\n  d6000000-d62fffff : BOOTFB")
    tree.gpu("0000:21:00.0", group=18, driver="nvidia", node=0)
    tree.gpu("0000:c1:00.0", group=71, driver="nvidia", node=1)
    tree.gpu("0000:e1:00.0", group=80, driver="vfio-pci", node=1)
    tree.lines = [
        line.replace("\\xde\\x10\\xb5\\x2b", "\\xff\\xff\\xff\\xff")
        if "e1:00.0/config" in line
        else line
        for line in tree.lines
    ]
    for part, number in (("", 3), ("/ci0", 4)):
        tree.file(
            f"/proc/driver/nvidia/capabilities/gpu1/mig/gi2{part}/access",
            f"DeviceFileMinor: {number}\\nDeviceFileMode: 292\\nDeviceFileModify: 1",
        )
    tree.lines.append("/proc/driver/nvidia/capabilities/gpu0/mig/")
    tree.device(
        "0000:22:00.0", "144d:a80a", "0x010802", group=18, port="0000:20:01.2", driver="nvme"
    )
    at = "/sys/devices/pci0000:22/0000:20:01.2/0000:22:00.0/nvme/nvme0/nvme0n1"
    for name, minor in (("nvme0n1", 0), ("nvme0n1p1", 1), ("nvme0n1p2", 2), ("nvme0n1p3", 3)):
        folder = at if name == "nvme0n1" else f"{at}/{name}"
        tree.lines.append(f"/sys/class/block/{name} -> ../..{folder[4:]}")
        tree.file(f"{folder}/dev", f"259:{minor}")
    for name, minor, label in (("dm-0", 0, "pve-swap"), ("dm-1", 1, "pve-root")):
        tree.lines.append(f"/sys/class/block/{name} -> ../../devices/virtual/block/{name}")
        tree.file(f"/sys/devices/virtual/block/{name}/dev", f"252:{minor}")
        tree.file(f"/sys/devices/virtual/block/{name}/dm/name", label)
        tree.lines.append(
            f"{at}/nvme0n1p3/holders/{name} -> ../../../../../../../../virtual/block/{name}"
        )
    tree.file(
        "/proc/self/mountinfo",
        "22 1 252:1 / / rw,relatime shared:1 - ext4 /dev/mapper/pve-root rw\\n"
        "23 22 0:21 / /proc rw,nosuid shared:2 - proc proc rw\\n"
        "31 22 259:2 / /boot/efi rw,relatime shared:9 - vfat /dev/nvme0n1p2 rw",
    )
    tree.file(
        "/proc/swaps", "Filename\\tType\\tSize\\tUsed\\tPriority\\n/dev/dm-0 partition 8388604 0 -2"
    )
    tree.device(
        "0000:23:00.0", "8086:1593", "0x020000", group=18, port="0000:20:01.3", driver="ice"
    )
    card = "/sys/devices/pci0000:23/0000:20:01.3/0000:23:00.0/net/eno1"
    tree.lines.append(f"/sys/class/net/eno1 -> ../..{card[4:]}")
    tree.lines.append(f"{card}/master -> ../../../../../virtual/net/vmbr0")
    tree.lines.append(f"{card}/upper_vmbr0 -> ../../../../../virtual/net/vmbr0")
    tree.lines.append("/sys/class/net/vmbr0 -> ../../devices/virtual/net/vmbr0")
    tree.lines.append("/sys/devices/virtual/net/vmbr0/bridge/")
    tree.file(
        "/proc/net/route",
        "Iface\\tDestination\\tGateway\\tFlags\\tRefCnt\\tUse\\tMetric\\tMask\\tMTU\\tWindow\\tIRTT\\n"
        "vmbr0\\t00000000\\t0101A8C0\\t0003\\t0\\t0\\t0\\t00000000\\t0\\t0\\t0\\n"
        "vmbr0\\t0001A8C0\\t00000000\\t0001\\t0\\t0\\t0\\t00FFFFFF\\t0\\t0\\t0",
    )
    tree.process(1, "/sbin/init")
    tree.save("busy-host")


if __name__ == "__main__":
    eight_gpus()
    four_functions()
    bmc_and_nvme()
    busy_host()
