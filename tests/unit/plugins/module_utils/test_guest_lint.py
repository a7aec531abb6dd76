"""What is wrong in guests' configurations; each public report stands for its class."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from ansible_collections.gpuhost.inference.plugins.module_utils._gpu import Bar, Gpu, read_gpus
from ansible_collections.gpuhost.inference.plugins.module_utils._guest_lint import (
    Remark,
    container_device_absent,
    container_raw_lines,
    hookscript_local,
    hostpci_invalid,
    hostpci_part_of_card,
    mapping_drift,
    mmio_window,
    snp_vm_settings,
    two_vms_at_boot,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._guests import (
    Surroundings,
    read_surroundings,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._owners import Guest, read_guests
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader

GOOD_VM = [
    "bios: ovmf",
    "cpu: host",
    "machine: q35",
    "amd-sev: type=snp,allow-smt=1",
    "hostpci0: 0000:81:00,pcie=1",
]


@pytest.fixture
def root(host_tree: Callable[[str], Path]) -> Path:
    return host_tree("eight-gpus")


def vm(lines: Iterable[str], vmid: int = 200, kind: str = "qemu") -> Guest:
    pairs = [line.partition(": ") for line in lines]
    config = tuple((key, value) for key, _colon, value in pairs)
    return Guest(kind, vmid, "x", f"/etc/pve/{vmid}.conf", config, False)


def around(root: Path, guests: Sequence[Guest] = ()) -> Surroundings:
    return read_surroundings(Reader(str(root)), guests)


def said(remarks: Iterable[Remark]) -> list[str]:
    return [f"{one.subject}: {one.evidence}" for one in remarks]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("hostpci0: 0000:81:00.0,pcie=1", None),
        ("hostpci0: 81:00.0,pcie=1,rombar=0,x-vga=on", None),
        ("hostpci15: host=0000:81:00,driver=keep", None),
        ("hostpci0: mapping=spare,pcie=1", None),
        ("hostpci0: 0000:81:00.0;0000:82:00.0,device-id=0x2bb5", None),
        ("hostpci16: 0000:81:00.0", "hostpci0 to hostpci15 only"),
        ("hostpci0: 0000:99:00.0", "there is no device 0000:99:00.0"),
        ("hostpci0: 0000:81:0.0", "0000:81:0.0 is no value for host"),
        ("hostpci0: 0000:81:00.0,pci=1", "there is no option pci"),
        ("hostpci0: 0000:81:00.0,rombar=maybe", "maybe is no value for rombar"),
        ("hostpci0: 0000:81:00.0,driver=nvidia", "nvidia is no value for driver"),
        ("hostpci0: 0000:81:00.0,vendor-id=10de", "10de is no value for vendor-id"),
        ("hostpci0: pcie=1", "either an address or a mapping"),
        ("hostpci0: 0000:81:00.0,mapping=spare", "either an address or a mapping"),
        ("hostpci0: mapping=elsewhere", "no mapping elsewhere for node pve1"),
    ],
)
def test_hostpci_entries(root: Path, line: str, problem: str | None) -> None:
    found = said(hostpci_invalid([vm(["machine: q35", line])], around(root)))
    assert len(found) == (1 if problem else 0), found
    assert not problem or (problem in found[0] and found[0].startswith("qemu 200: /etc/pve/200"))


def test_pcie_without_q35(root: Path) -> None:
    found = said(hostpci_invalid([vm(["hostpci0: 0000:81:00.0,pcie=1"])], around(root)))
    assert "pcie=1 needs machine q35, and it is not set" in found[0]


def test_a_device_twice_in_one_machine(root: Path) -> None:
    lines = ["hostpci0: 0000:81:00", "hostpci3: 81:00.0"]
    found = said(hostpci_invalid([vm(lines)], around(root)))
    assert len(found) == 1
    assert "hostpci3" in found[0]
    assert "0000:81:00.0 is in hostpci0 already" in found[0]


def test_gpu_operator_1328_one_function_of_four(host_tree: Callable[[str], Path]) -> None:
    root = host_tree("four-functions")
    found = list(hostpci_part_of_card([vm(["hostpci0: 0000:01:00.0,pcie=1"])], around(root)))
    assert len(found) == 1
    assert "0000:01:00.1, 0000:01:00.2, 0000:01:00.3" in found[0].evidence
    assert "0000:01:00" in (found[0].remedy or "")
    whole = [f"hostpci{at}: 01:00.{at}" for at in range(4)]
    for lines in (["hostpci0: 01:00,pcie=1"], whole, ["hostpci0: 01:00.0;01:00.1;01:00.2;01:00.3"]):
        assert not said(hostpci_part_of_card([vm(lines)], around(root)))


def test_two_machines_with_one_gpu_at_boot(root: Path) -> None:
    first = vm(["onboot: 1", "hostpci0: 0000:81:00"], 200)
    for second, clash in (
        (["onboot: 1", "hostpci4: 81:00.0,pcie=1"], True),
        (["onboot: 0", "hostpci4: 81:00.0,pcie=1"], False),
        (["onboot: 1", "hostpci4: 82:00.0,pcie=1"], False),
    ):
        found = said(two_vms_at_boot([first, vm(second, 300)], around(root)))
        assert bool(found) == clash
        assert not clash or found[0].startswith("0000:81:00.0: /etc/pve/200.conf: hostpci0")


def test_two_machines_with_one_mapping_at_boot(root: Path) -> None:
    guests = [vm(["onboot: 1", "hostpci0: mapping=spare"], vmid) for vmid in (200, 300)]
    found = list(two_vms_at_boot(guests, around(root)))
    assert [one.subject for one in found] == ["0000:83:00.0", "0000:84:00.0"]


def mapping(root: Path, line: str) -> list[Remark]:
    other = "\tmap id=10de:2bb5,node=pve2,path=0000:41:00.0\n"
    (root / "etc/pve/mapping/pci.cfg").write_text(f"card\n\tmap {line}\n{other}")
    return list(mapping_drift(around(root)))


FITS = "id=10de:2bb5,iommugroup=62,node=pve1,path=0000:83:00.0,subsystem-id=10de:204e"


def test_a_mapping_that_fits(root: Path) -> None:
    assert mapping(root, FITS) == []
    two = FITS.replace("83:00.0", "83:00.0;0000:84:00.0")  # the group counts for the first alone
    assert mapping(root, two) == []
    assert mapping(root, FITS.replace("83:00.0", "83:00")) == []


def test_pve_guest_common_group_number_of_a_mapping_changed(root: Path) -> None:
    found = mapping(root, FITS.replace("iommugroup=62", "iommugroup=60"))
    assert found[0].subject == "/etc/pve/mapping/pci.cfg"
    assert "mapping card" in found[0].evidence
    assert "iommugroup is 60, 0000:83:00.0 is in 62" in found[0].evidence
    assert (found[0].remedy or "").endswith(
        "pvesh set /cluster/mapping/pci/card --map 'node=pve1,path=0000:83:00.0,id=10de:2bb5,"
        "subsystem-id=10de:204e,iommugroup=62' --map 'id=10de:2bb5,node=pve2,path=0000:41:00.0'"
    )


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("id=10de:2bb5,", "id=10de:2330,", "id is 10de:2330, 0000:83:00.0 has 10de:2bb5"),
        (",subsystem-id=10de:204e", "", "subsystem-id is None, 0000:83:00.0 has 10de:204e"),
        ("iommugroup=62,", "", "iommugroup is None, 0000:83:00.0 is in 62"),
        ("0000:83:00.0", "0000:93:00.0", "there is no device 0000:93:00.0"),
    ],
)
def test_a_mapping_of_other_hardware(root: Path, old: str, new: str, words: str) -> None:
    found = mapping(root, FITS.replace(old, new))
    assert len(found) == 1
    assert words in found[0].evidence


def test_a_mapping_of_another_node_is_its_own_business(root: Path) -> None:
    assert mapping(root, FITS.replace("node=pve1", "node=pve3").replace("62", "1")) == []


def test_jailmaker_4_raw_lines_with_a_major_that_moved(root: Path) -> None:
    (root / "proc/devices").write_text(
        "Character devices:\n 10 misc\n195 nvidia\n505 nvidia-uvm\n\nBlock devices:\n510 sd\n"
    )
    lines = ["lxc.cgroup2.devices.allow: c 510:* rwm", "lxc.cgroup2.devices.allow: c 10:200 rwm"]
    found = list(container_raw_lines([vm(lines, 100, "lxc")], around(root)))
    assert [one.subject for one in found] == ["lxc 100"]
    assert "c 510:* rwm" in found[0].evidence
    assert "nvidia-uvm has 505 now" in (found[0].remedy or "")


def test_pve_container_a_listed_node_that_is_missing_stops_the_start(root: Path) -> None:
    lines = ["dev0: /dev/nvidia6", "dev1: /dev/nvidia-uvm", "dev2: /dev/nvidia-modeset,gid=44"]
    guests = [vm(lines, 100, "lxc")]
    assert said(container_device_absent(guests, around(root, guests))) == [
        "lxc 100: /etc/pve/100.conf: dev2: /dev/nvidia-modeset,gid=44; "
        "/dev/nvidia-modeset does not exist"
    ]
    (root / "dev/nvidia-uvm").unlink()
    assert len(said(container_device_absent(guests, around(root, guests)))) == 2


def test_proxmenux_195_hook_script_on_storage_of_one_node(root: Path) -> None:
    (root / "etc/pve/storage.cfg").write_text(
        "dir: local\n\tpath /var/lib/vz\n\tcontent snippets\n\n"
        "dir: shelf\n\tpath /mnt/shelf\n\tshared 1\n\nnfs: far\n\tserver x\n"
    )
    gpu = "hostpci0: 0000:81:00"
    for lines, kind, bad in (
        ([gpu, "hookscript: local:snippets/gpu.sh"], "qemu", True),
        (["dev0: /dev/nvidia0", "hookscript: local:snippets/gpu.sh"], "lxc", True),
        ([gpu, "hookscript: shelf:snippets/gpu.sh"], "qemu", False),
        ([gpu, "hookscript: far:snippets/gpu.sh"], "qemu", False),
        (["hookscript: local:snippets/gpu.sh"], "qemu", False),
        ([gpu], "qemu", False),
    ):
        found = said(hookscript_local([vm(lines, 300, kind)], around(root)))
        assert bool(found) == bad, lines
        assert not bad or f"{kind} 300: /etc/pve/300.conf: hookscript: local" in found[0]


def test_a_machine_that_is_right_for_snp() -> None:
    assert said(snp_vm_settings([vm(GOOD_VM)], [200])) == []
    epyc = [line.replace("cpu: host", "cpu: cputype=EPYC-Genoa,flags=+x") for line in GOOD_VM]
    assert said(snp_vm_settings([vm(epyc)], [200])) == []


@pytest.mark.parametrize(
    ("old", "new", "command"),
    [
        ("amd-sev: type=snp,allow-smt=1", "", "qm set 200 --amd-sev type=snp"),
        ("amd-sev: type=snp,allow-smt=1", "amd-sev: es", "qm set 200 --amd-sev type=snp"),
        ("bios: ovmf", "bios: seabios", "qm set 200 --bios ovmf"),
        ("machine: q35", "", "qm set 200 --machine q35"),
        ("cpu: host", "cpu: x86-64-v3", "qm set 200 --cpu host"),
        ("cpu: host", "", "qm set 200 --cpu host"),
        ("bios: ovmf", "bios: ovmf\nefidisk0: local:200/d.raw", "qm set 200 --delete efidisk0"),
        ("bios: ovmf", "bios: ovmf\nhugepages: 1024", "qm set 200 --delete hugepages"),
    ],
)
def test_a_machine_that_is_wrong_for_snp(old: str, new: str, command: str) -> None:
    lines = "\n".join(GOOD_VM).replace(old, new).splitlines()
    found = list(snp_vm_settings([vm([line for line in lines if line])], [200]))
    assert [one.remedy for one in found] == [command]


def test_snp_is_asked_of_nobody_else() -> None:
    assert said(snp_vm_settings([vm(["name: x"]), vm(["hostname: y"], 300, "lxc")], [300])) == []
    found = snp_vm_settings([vm(["amd-sev: type=snp", *GOOD_VM[1:3]])], [])
    assert [one.remedy for one in found] == ["qm set 200 --bios ovmf"]


def test_snp_type_may_come_without_its_name() -> None:
    lines = [line.replace("type=snp", "snp") for line in GOOD_VM]
    assert said(snp_vm_settings([vm(lines)], [200])) == []


def window(root: Path, *lines: str, gpus: Sequence[Gpu] | None = None) -> list[Remark]:
    cards = read_gpus(Reader(str(root))) if gpus is None else gpus
    four = [f"hostpci{at}: 0000:8{at + 1}:00,pcie=1" for at in range(4)]
    return list(mmio_window([vm(["bios: ovmf", *four, *lines])], around(root), cards))


def test_nvtrust_56_four_large_cards_need_a_window(root: Path) -> None:
    found = window(root, "cpu: x86-64-v3")
    assert len(found) == 1
    assert "4 GPUs" in found[0].evidence
    assert "512.4 GiB in all need 1024 GiB, the firmware makes 128 GiB" in found[0].evidence
    assert "X-PciMmio64Mb,string=1048576" in (found[0].remedy or "")


@pytest.mark.parametrize(
    "line",
    [
        "cpu: host",
        "cpu: x86-64-v3,phys-bits=host",
        "cpu: EPYC,phys-bits=43",
        "cpu: custom-ours",  # what it stands for is in another file
        "args: -fw_cfg name=opt/ovmf/X-PciMmio64Mb,string=1048576",
        "bios: seabios",
    ],
)
def test_machines_whose_window_is_wide_enough_or_not_known(root: Path, line: str) -> None:
    assert window(root, line) == []


def test_kubevirt_11093_a_window_that_is_set_too_small(root: Path) -> None:
    assert window(root, "args: -fw_cfg name=opt/ovmf/X-PciMmio64Mb,string=524288")
    assert window(root, "cpu: EPYC,phys-bits=42")


def test_small_cards_need_no_window(root: Path) -> None:
    gpus = [
        replace(one, bars=(Bar(0, 16 << 20), Bar(1, 16 << 30)))
        for one in read_gpus(Reader(str(root)))
    ]
    assert window(root, gpus=gpus) == []


def test_the_constructed_host_has_nothing_to_remark_on(root: Path) -> None:
    host = Reader(str(root))
    guests = read_guests(host)
    found = read_surroundings(host, guests)
    for remarks in (
        hostpci_invalid(guests, found),
        hostpci_part_of_card(guests, found),
        two_vms_at_boot(guests, found),
        mapping_drift(found),
        container_raw_lines(guests, found),
        container_device_absent(guests, found),
        hookscript_local(guests, found),
        mmio_window(guests, found, read_gpus(host)),
    ):
        assert list(remarks) == []
