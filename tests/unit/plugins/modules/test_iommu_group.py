"""The module `iommu_group` on a fake kernel: types, refusals, idempotence, check mode."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader
from ansible_collections.gpuhost.inference.plugins.modules import iommu_group
from fake_kernel import FakeKernel

Run = Callable[..., dict[str, Any]]
TYPE = "sys/kernel/iommu_groups/{}/type"


@pytest.fixture
def use(
    host_tree: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., FakeKernel]:
    def use(name: str = "eight-gpus", *, old: bool = False) -> FakeKernel:
        fake = FakeKernel(host_tree(name), old=old)
        monkeypatch.setattr(iommu_group, "Reader", lambda: Reader(str(fake.root)))
        monkeypatch.setattr(iommu_group, "write", fake)
        return fake

    return use


@pytest.fixture
def kernel(use: Callable[..., FakeKernel]) -> FakeKernel:
    return use()


def test_an_idle_group_is_changed_once(kernel: FakeKernel, run_module: Run) -> None:
    for changed in (True, False):
        result = run_module(iommu_group, address="81:00.0", type="DMA")
        assert (result["changed"], result["group"]["type"]) == (changed, "DMA")
    assert kernel.writes == [("/sys/kernel/iommu_groups/60/type", "DMA")]
    assert result["diff"] == {
        "before": {"0000:81:00.0": "DMA"},
        "after": {"0000:81:00.0": "DMA"},
    }


def test_auto_is_idempotent_with_a_driver_bound(kernel: FakeKernel, run_module: Run) -> None:
    assert run_module(iommu_group, address="41:00.0", type="auto")["changed"] is False
    assert kernel.writes == []


def test_strict_to_lazy_needs_no_unbinding(kernel: FakeKernel, run_module: Run) -> None:
    (kernel.root / TYPE.format(42)).write_text("DMA\n")
    result = run_module(iommu_group, address="41:00.0", type="auto")
    assert (result["changed"], result["group"]["type"]) == (True, "DMA-FQ")


def test_check_mode_plans_and_writes_nothing(kernel: FakeKernel, run_module: Run) -> None:
    result = run_module(iommu_group, check=True, address="81:00.0", type="DMA")
    assert kernel.writes == []
    assert result["writes"] == [{"path": "/sys/kernel/iommu_groups/60/type", "value": "DMA"}]
    assert (result["changed"], result["group"]["type"]) == (True, "DMA-FQ")
    assert result["diff"]["after"] == {"0000:81:00.0": "DMA"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"address": "41:00.0", "type": "DMA"}, ["driver nvidia", "give the gpu module a type"]),
        ({"address": "83:00.0", "type": "DMA"}, ["process 2010", "/dev/vfio/62 open"]),
        ({"address": "84:00.0", "type": "DMA-FQ"}, ["process 2010", "/dev/vfio/63 open"]),
        ({"address": "81:00.0", "type": "identity"}, ["boots through an FSP", "fsp-identity"]),
        ({"address": "99:00.0", "type": "DMA"}, ["no PCI device there"]),
        ({"address": "x", "type": "DMA"}, ["not a PCI address"]),
        ({"address": "41:00.0", "type": "lazy"}, ["must be one of: identity, DMA, DMA-FQ, auto"]),
    ],
)
def test_refusals_write_nothing(
    kernel: FakeKernel, run_module: Run, options: dict[str, Any], words: list[str]
) -> None:
    (kernel.root / TYPE.format(63)).write_text("DMA\n")
    result = run_module(iommu_group, **options)
    assert result["failed"] is True
    assert kernel.writes == []
    for word in words:
        assert word in result["msg"]


def test_identity_is_possible_when_asked_for_by_name(kernel: FakeKernel, run_module: Run) -> None:
    wish = {"address": "81:00.0", "type": "identity", "accept": ["fsp-identity"]}
    assert run_module(iommu_group, **wish)["group"]["type"] == "identity"


def test_all_members_count_not_only_the_gpu(
    use: Callable[..., FakeKernel], run_module: Run
) -> None:
    use("four-functions")
    text = run_module(iommu_group, address="01:00.0", type="DMA")["msg"]
    assert "0000:01:00.1 (driver snd_hda_intel), 0000:01:00.2 (driver xhci_hcd)" in text
    assert "pcieport" not in text


def test_an_old_kernel_counts_an_idle_vfio_driver(
    use: Callable[..., FakeKernel], run_module: Run
) -> None:
    use(old=True)
    text = run_module(iommu_group, address="81:00.0", type="DMA")["msg"]
    assert "EBUSY: a driver is bound, and kernels before 6.4" in text


def test_an_old_kernel_cannot_change_groups_of_several(
    use: Callable[..., FakeKernel], run_module: Run
) -> None:
    fake = use("four-functions", old=True)
    for function in range(4):
        (fake.device(f"0000:01:00.{function}") / "driver").unlink(missing_ok=True)
    text = run_module(iommu_group, address="01:00.0", type="DMA")["msg"]
    assert "EINVAL: kernels before 6.4 cannot change a group of several devices" in text


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (errno.EPERM, "EPERM, which is no matter of rights"),
        (errno.EACCES, "EACCES: this needs root"),
        ("stuck", "pending in the kernel"),
        (0, "took DMA but kept DMA-FQ"),  # 6.1 with SNP falls back and reports success
    ],
)
def test_what_the_kernel_says_is_explained(
    kernel: FakeKernel, run_module: Run, answer: int | str, words: str
) -> None:
    kernel.answers["/60/type", "DMA"] = answer
    assert words in run_module(iommu_group, address="81:00.0", type="DMA")["msg"]


def test_without_an_iommu_there_is_no_group(kernel: FakeKernel, run_module: Run) -> None:
    (kernel.device("0000:81:00.0") / "iommu_group").unlink()
    assert "no IOMMU is in use" in run_module(iommu_group, address="81:00.0", type="DMA")["msg"]
