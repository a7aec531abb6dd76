"""Group types: the computed default, what is refused before writing, and the kernel's refusals."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from ansible_collections.gpuhost.inference.plugins.module_utils._iommu import (
    HostMode,
    IommuGroup,
    Member,
    Region,
    default_type,
    explain_refusal,
    holds_group,
    identity_risks,
    needs_idle_group,
    read_groups,
    read_mode,
    target_type,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._kernel_write import Outcome
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader

CONFIG = "boot/config-6.14.11-4-pve"
PLAIN = HostMode(snp=False, sme=False, default_type="DMA-FQ")


def group(
    *drivers: str | None, type_: str = "DMA-FQ", regions: tuple[Region, ...] = ()
) -> IommuGroup:
    members = tuple(
        Member(f"0000:41:00.{at}", "0x030200", "10de:2bb5", driver, at == 0)
        for at, driver in enumerate(drivers)
    )
    return IommuGroup(42, type_, members, regions)


@pytest.mark.parametrize(
    ("cmdline", "config", "expected"),
    [
        ("ro quiet", "CONFIG_IOMMU_DEFAULT_DMA_LAZY=y", "DMA-FQ"),
        ("ro quiet", "CONFIG_IOMMU_DEFAULT_DMA_STRICT=y", "DMA"),
        ("ro quiet", "CONFIG_IOMMU_DEFAULT_PASSTHROUGH=y", "identity"),
        ("mem_encrypt=on", "CONFIG_IOMMU_DEFAULT_PASSTHROUGH=y", "DMA-FQ"),
        ("mem_encrypt=on iommu=pt", "CONFIG_IOMMU_DEFAULT_DMA_LAZY=y", "identity"),
        ("iommu=pt", None, "identity"),
        ("iommu.passthrough=1", None, "identity"),
        ("iommu=pt iommu.passthrough=0", "CONFIG_IOMMU_DEFAULT_DMA_LAZY=y", "DMA-FQ"),
        ("iommu=soft,pt,nopt iommu.strict=1", None, "DMA"),
        ("iommu=nopt", None, None),
        ("iommu.strict=0 iommu=nopt", None, "DMA-FQ"),
        ("amd_iommu=on", "CONFIG_IOMMU_DEFAULT_DMA_LAZY=y", "DMA-FQ"),  # no word of the kernel's
        ("amd_iommu=fullflush", "CONFIG_IOMMU_DEFAULT_DMA_LAZY=y", "DMA"),
        ("intel_iommu=on,strict", "CONFIG_IOMMU_DEFAULT_DMA_LAZY=y", "DMA"),
        ("ro quiet", None, None),
    ],
)
def test_the_default_is_computed(
    host_tree: Callable[[str], Path], cmdline: str, config: str | None, expected: str | None
) -> None:
    root = host_tree("eight-gpus")
    (root / "proc/cmdline").write_text(cmdline)
    if config is None:
        (root / CONFIG).unlink()
    else:
        (root / CONFIG).write_text(f"CONFIG_X=y\n{config}\n# CONFIG_IOMMU_DEFAULT_Y is not set\n")
    assert default_type(Reader(str(root))) == expected


@pytest.mark.parametrize(
    ("vendor", "capability", "expected"),
    [
        ("amd", "190b640f", "DMA-FQ"),
        ("amd", "1d0b640f", "DMA"),
        ("intel", "d2008c40660462", "DMA-FQ"),
        ("intel", "d2008c406604e2", "DMA"),
    ],
)
def test_an_emulated_iommu_is_strict(
    host_tree: Callable[[str], Path], vendor: str, capability: str, expected: str
) -> None:
    root = host_tree("eight-gpus")
    (root / "sys/class/iommu/ivhd0/amd-iommu/cap").unlink()
    at = root / f"sys/class/iommu/unit0/{vendor}-iommu"
    at.mkdir(parents=True)
    (at / "cap").write_text(f"{capability}\n")
    assert default_type(Reader(str(root))) == expected


def test_without_groups_there_is_no_default(tmp_path: Path) -> None:
    host = Reader(str(tmp_path))
    assert (read_groups(host), default_type(host)) == ([], None)


def test_groups_carry_members_and_reserved_regions(host_tree: Callable[[str], Path]) -> None:
    [_bmc, shared, _other] = read_groups(Reader(str(host_tree("bmc-and-nvme"))))
    assert (shared.number, shared.type) == (18, "DMA-FQ")
    assert [(member.id, member.driver, member.is_gpu) for member in shared.members] == [
        ("10de:2bb5", "nvidia", True),
        ("144d:a80a", "nvme", False),
    ]
    assert shared.reserved_regions[0] == Region(0xFEE00000, 0xFEEFFFFF, "msi")


def test_a_group_whose_member_cannot_be_found_is_not_shown_smaller(
    host_tree: Callable[[str], Path],
) -> None:
    root = host_tree("bmc-and-nvme")
    (root / "sys/bus/pci/devices/0000:22:00.0").unlink()
    with pytest.raises(GpuHostError, match=r"0000:22:00.0 of IOMMU group 18 vanished"):
        read_groups(Reader(str(root)))


@pytest.mark.parametrize(
    ("present", "wanted", "idle"),
    [("DMA", "DMA-FQ", False), ("DMA-FQ", "DMA", True), ("identity", "DMA-FQ", True)],
)
def test_only_flushing_lazily_needs_no_idle_group(present: str, wanted: str, idle: bool) -> None:
    assert needs_idle_group(present, wanted) is idle


@pytest.mark.parametrize(
    ("driver", "new", "old"),
    [
        ("nvidia", True, True),
        ("snd_hda_intel", True, True),
        ("vfio-pci", False, True),
        ("nvgrace-gpu-vfio-pci", False, True),
        ("pci-stub", False, True),
        (None, False, False),
    ],
)
def test_which_drivers_hold_a_group(driver: str | None, new: bool, old: bool) -> None:
    assert holds_group(driver, "6.14.11-4-pve") is new
    assert holds_group(driver, "6.4.0") is new
    assert holds_group(driver, "6.1.0-44-amd64") is old
    assert holds_group(driver, "5.15.158-2-pve") is old


def test_auto_is_the_computed_type() -> None:
    assert target_type(group(None, type_="identity"), "auto", PLAIN) == "DMA-FQ"
    assert target_type(group(None), "identity", PLAIN) == "identity"
    with pytest.raises(GpuHostError, match=r"boot default.*cannot be computed.*name a type"):
        target_type(group(None), "auto", replace(PLAIN, default_type=None))


def test_an_old_kernel_without_type_files_is_named() -> None:
    with pytest.raises(GpuHostError, match=r"5\.11"):
        target_type(replace(group(None), type=None), "DMA", PLAIN)


@pytest.mark.parametrize(
    ("snp", "sme", "fsp", "guards"),
    [
        (False, False, False, []),
        (True, False, False, ["snp-identity"]),
        (True, True, True, ["snp-identity", "sme-identity", "fsp-identity"]),
    ],
)
def test_each_risk_of_identity_has_its_guard(
    snp: bool, sme: bool, fsp: bool, guards: list[str]
) -> None:
    risks = list(identity_risks(HostMode(snp, sme, "DMA-FQ"), fsp=fsp))
    assert [guard for guard, _evidence, _remedy in risks] == guards


@pytest.mark.parametrize(
    ("number", "drivers", "regions", "words"),
    [
        (errno.EPERM, ("nvidia",), (), ["no matter of rights", "0000:41:00.0 nvidia"]),
        (errno.EBUSY, ("vfio-pci",), (), ["before 6.4", "0000:41:00.0 vfio-pci"]),
        (errno.EINVAL, (None, None), (), ["before 6.4", "several devices", "has 2"]),
        (
            errno.EINVAL,
            (None,),
            (Region(0x1000, 0x1FFF, "direct"),),
            ["direct-mapped regions (0x1000-0x1fff)"],
        ),
        (errno.EINVAL, (None,), (), ["PASID", "5.15"]),
        (errno.EACCES, (None,), (), ["CAP_SYS_RAWIO", "not in a container"]),
        (errno.ENODEV, (None,), (), ["vanished"]),
        (errno.ENOMEM, (None,), (), ["Cannot allocate memory"]),
    ],
)
def test_each_refusal_has_its_sentence(
    number: int, drivers: tuple[str | None, ...], regions: tuple[Region, ...], words: list[str]
) -> None:
    outcome = Outcome("refused", number, "Cannot allocate memory")
    text = explain_refusal(group(*drivers, regions=regions), outcome, "identity")
    assert text.startswith("type of IOMMU group 42 was not set to identity")
    for word in words:
        assert word in text


def test_a_write_that_never_returned_is_told_as_pending() -> None:
    text = explain_refusal(group(None), Outcome("stuck"), "DMA")
    assert "pending in the kernel" in text
    assert "reboot" in text


@pytest.mark.parametrize(("value", "on"), [("Y", True), ("N", False), (None, False)])
def test_snp_is_what_kvm_says(
    host_tree: Callable[[str], Path], value: str | None, on: bool
) -> None:
    root = host_tree("eight-gpus")
    file = root / "sys/module/kvm_amd/parameters/sev_snp"
    if value is None:
        file.unlink()
    else:
        file.write_text(f"{value}\n")
    assert read_mode(Reader(str(root))).snp is on
