"""A declared layout against the host of eight GPUs: resolved, or every problem named at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuhost.inference.plugins.module_utils._gpu import Gpu, read_gpus
from ansible_collections.gpuhost.inference.plugins.module_utils._layout import (
    Entry,
    Layout,
    WantedGuest,
    resolve_layout,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader
from hypothesis import given, settings
from hypothesis import strategies as st

GUESTS = {("lxc", 100), ("qemu", 200), ("qemu", 201)}
NODE_0 = tuple(f"0000:4{n}:00.0" for n in range(1, 5))
NODE_1 = tuple(f"0000:8{n}:00.0" for n in range(1, 5))


@pytest.fixture
def gpus(host_tree: Callable[[str], Path]) -> list[Gpu]:
    return read_gpus(Reader(str(host_tree("eight-gpus"))))


def inference(**changes: Any) -> dict[str, Any]:
    return {
        "name": "inference",
        "addresses": list(NODE_0),
        "expect": {"id": "10de:2bb5"},
        "driver": "nvidia",
        "iommu_type": "DMA-FQ",
        "guest": {"kind": "lxc", "vmid": 100},
        **changes,
    }


def confidential(**changes: Any) -> dict[str, Any]:
    return {
        "name": "confidential",
        "numa_node": 1,
        "driver": "vfio-pci",
        "guest": {"kind": "qemu", "vmid": 200, "sev_snp": True},
        **changes,
    }


def problems(gpus: list[Gpu], *layout: object, **options: Any) -> list[str]:
    return list(resolve_layout(list(layout), gpus, GUESTS, **options).problems)


def test_resolves_addresses_and_nodes(gpus: list[Gpu]) -> None:
    layout = resolve_layout([inference(), confidential()], gpus, GUESTS)
    assert layout == Layout(
        entries=(
            Entry(
                "inference", NODE_0, "10de:2bb5", "nvidia", "DMA-FQ", WantedGuest("lxc", 100, False)
            ),
            Entry("confidential", NODE_1, None, "vfio-pci", None, WantedGuest("qemu", 200, True)),
        ),
        unassigned=(),
        problems=(),
    )


def test_understands_text_as_surveys_give_it(gpus: list[Gpu]) -> None:
    written = inference(
        addresses="41:00.0, 42:00.0,00000000:43:00.0,0000:44:00.0",
        driver="NVIDIA",
        iommu_type="dma-fq",
        guest={"kind": "lxc", "vmid": "100", "sev_snp": "false"},
    )
    node = confidential(numa_node="1", guest={"kind": "qemu", "vmid": " 200", "sev_snp": "yes"})
    assert resolve_layout([written, node], gpus, GUESTS) == resolve_layout(
        [inference(), confidential()], gpus, GUESTS
    )


@pytest.mark.parametrize("nothing", [None, []])
def test_no_layout_leaves_all_gpus_unassigned(gpus: list[Gpu], nothing: object) -> None:
    layout = resolve_layout(nothing, gpus, GUESTS, "keep")
    assert layout == Layout((), NODE_0 + NODE_1, ())


def test_forgotten_gpus_are_refused_or_kept(gpus: list[Gpu]) -> None:
    (problem,) = problems(gpus, inference())
    assert problem.startswith(f"no layout entry names {', '.join(NODE_1)}: ")
    layout = resolve_layout([inference()], gpus, GUESTS, "keep")
    assert (layout.unassigned, layout.problems) == (NODE_1, ())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"adresses": []}, "unknown key 'adresses': did you mean addresses?"),
        ({"expect": {"ID": "10de:2bb5", "id": "10de:2bb5"}}, "unknown key 'ID' in expect"),
        ({"expect": "10de:2bb5"}, "has expect '10de:2bb5': write expect: {id:"),
        ({"expect": {}}, "expects the id None: write vendor:device"),
        ({"expect": {"id": 20}}, "expects the id 20: write vendor:device"),
        (
            {"expect": {"id": "10DE:2330"}},
            "expects 10de:2330, but there is 10de:2bb5 at 0000:41:00.0, 10de:2bb5 at 0000:42",
        ),
        ({"name": " "}, "layout entry 1 has no name"),
        ({"addresses": None}, "has neither addresses nor numa_node"),
        ({"numa_node": 0}, "has both addresses and numa_node"),
        ({"addresses": []}, "has addresses []: give a list"),
        ({"addresses": {"a": 1}}, "has addresses {'a': 1}: give a list"),
        ({"addresses": [*NODE_0, "41:00.0"]}, "names 0000:41:00.0 twice"),
        (
            {"addresses": [*NODE_0, 2460.0]},
            "names 2460.0 as an address: put each address in quotes",
        ),
        ({"addresses": [*NODE_0, "gpu0"]}, "names 'gpu0', which is no PCI address"),
        ({"addresses": [*NODE_0, "0000:45:00.0"]}, "no such device: near it are the GPUs 0000:4"),
        (
            {"addresses": [*NODE_0, "0000:22:00.0"]},
            "names 0000:22:00.0, which is no NVIDIA GPU but a disk",
        ),
        (
            {"addresses": None, "numa_node": 7},
            "NUMA node 7, which has no GPU: GPUs are on node 0, 1",
        ),
        ({"addresses": None, "numa_node": True}, "has numa_node True: give a number"),
        ({"driver": None}, "has no driver"),
        ({"driver": "nvidea"}, "has driver 'nvidea': give one of nvidia, vfio-pci, none"),
        ({"driver": ["nvidia"]}, "has driver ['nvidia']"),
        ({"iommu_type": "pt"}, "has iommu_type 'pt': give one of DMA, DMA-FQ, identity, auto"),
        ({"guest": 100}, "has guest 100: write guest: {kind: lxc, vmid: 100}"),
        ({"guest": {"vmid": 100}}, "has guest kind '': give one of lxc, qemu"),
        ({"guest": {"kind": "vm", "vmid": 100}}, "has guest kind 'vm'"),
        ({"guest": {"kind": "lxc"}}, "has guest vmid None: give a number from 100 on"),
        ({"guest": {"kind": "lxc", "vmid": 99}}, "has guest vmid 99: give a number from 100 on"),
        ({"guest": {"kind": "lxc", "vmid": 100, "snp": 1}}, "unknown key 'snp' in guest"),
        (
            {"guest": {"kind": "lxc", "vmid": 100, "sev_snp": "maybe"}},
            "has guest sev_snp 'maybe': give true or false",
        ),
        ({"guest": {"kind": "lxc", "vmid": 100, "sev_snp": True}}, "which containers do not have"),
        ({"guest": {"kind": "lxc", "vmid": 300}}, "lxc 300, but this host has no such guest"),
        ({"guest": {"kind": "lxc", "vmid": 201}}, "lxc 201, but 201 is of kind qemu here"),
        ({"driver": "vfio-pci"}, "driver vfio-pci to a guest of kind lxc, which needs nvidia"),
        ({"iommu_type": "identity"}, "asks for identity, which no group may have"),
    ],
)
def test_each_problem_is_one_sentence(gpus: list[Gpu], changes: dict[str, Any], said: str) -> None:
    found = problems(
        gpus,
        inference(**changes),
        confidential(),
        unassigned="keep",
        describe=lambda address: "a disk" if address == "0000:22:00.0" else None,
    )
    assert len(found) == 1, found
    assert said in found[0]
    assert "layout entry 1" in found[0] or "layout entry 'inference'" in found[0]


def test_a_gpu_belongs_to_one_entry_and_a_name_too(gpus: list[Gpu]) -> None:
    found = problems(gpus, inference(), confidential(numa_node=0, name="inference"), confidential())
    assert [said.partition(" names ")[2][:12] for said in found[:4]] == list(NODE_0)
    assert "which layout entry 1 ('inference') names already" in found[0]
    assert "has the name of layout entry 1" in found[4]
    assert len(found) == 5


def test_all_problems_come_together(gpus: list[Gpu]) -> None:
    found = problems(gpus, inference(driver="x", iommu_type="y", guest="z"), "text", 7)
    assert len(found) == 6, found


@pytest.mark.parametrize("wrong", ["inference", 7, {"name": "inference"}, 0.5, True])
def test_a_layout_is_a_list(gpus: list[Gpu], wrong: object) -> None:
    (problem,) = resolve_layout(wrong, gpus, GUESTS).problems
    assert "not a list" in problem


def test_unread_guests_are_not_taken_for_existing(gpus: list[Gpu]) -> None:
    layout = resolve_layout([inference(), confidential()], gpus, None)
    assert len(layout.problems) == 2
    assert "could not be read: check /etc/pve" in layout.problems[0]


ENTRY_KEYS = ["name", "addresses", "numa_node", "expect", "driver", "iommu_type", "guest"]
KEYS = [*ENTRY_KEYS, "id", "kind", "vmid", "sev_snp"]
YAML = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=12)
    | st.binary(max_size=4)
    | st.dates()
    | st.sampled_from(["nvidia", "lxc", "0000:41:00.0", "identity", "10de:2bb5", "100"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(KEYS) | st.text(max_size=4) | st.integers() | st.none(),
            inner,
            max_size=6,
        )
    ),
    max_leaves=20,
)


@given(layout=YAML, keep=st.booleans())
@settings(max_examples=300, deadline=None)
def test_every_yaml_value_gets_an_answer(layout: object, keep: bool) -> None:
    answer = resolve_layout(layout, [], GUESTS, "keep" if keep else "refuse")
    for problem in answer.problems:
        assert problem.isprintable()
        assert ": " in problem
    if not isinstance(layout, list):
        assert layout is None or answer.problems


def test_a_vm_may_not_take_more_than_its_entry(gpus: list[Gpu]) -> None:
    short = confidential(addresses=["81:00.0"], guest={"kind": "qemu", "vmid": 200})
    del short["numa_node"]
    said = problems(gpus, inference(), short, unassigned="keep")
    assert len(said) == 1
    assert "0000:82:00.0 stands in the configuration of qemu 200" in said[0]
