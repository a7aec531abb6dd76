"""The layout of a trial, and what a trial has shown."""

from __future__ import annotations

from typing import Any

import pytest
from ansible.errors import AnsibleFilterError
from ansible_collections.gpuhost.inference.plugins.filter.trial_layout import trial_layout
from ansible_collections.gpuhost.inference.plugins.filter.trial_lessons import trial_lessons

ONE, TWO = "0000:41:00.0", "0000:42:00.0"
ENTRY = {
    "name": "inference",
    "addresses": [ONE, TWO],
    "driver": "nvidia",
    "iommu_type": "DMA-FQ",
    "guest": {"kind": "lxc", "vmid": 100, "sev_snp": False},
}
VM = {"name": "vm", "addresses": ["0000:81:00.0"], "driver": "vfio-pci", "iommu_type": None}


def test_layout_changes_only_what_is_tried() -> None:
    assert trial_layout([ENTRY, VM], [ONE, TWO], "identity") == [
        {**ENTRY, "iommu_type": "identity"},
        VM,
    ]
    rest, tried, vm = trial_layout([ENTRY, VM], [TWO], "identity")
    assert (rest["addresses"], rest["iommu_type"]) == ([ONE], "DMA-FQ")
    assert (tried["addresses"], tried["iommu_type"]) == ([TWO], "identity")
    assert rest["guest"] == tried["guest"] == ENTRY["guest"]
    assert rest["name"] != tried["name"]
    assert vm == VM


def host(
    *, fsp: str = "ok", verdict: str = "healthy", reason: str = "started", type_: str = "identity"
) -> dict[str, Any]:
    """Return a host of two GPUs, the second as asked for."""
    judged = [
        {"address": ONE, "fsp": "ok", "verdict": "healthy", "reason": "started", "evidence": []},
        {"address": TWO, "fsp": fsp, "verdict": verdict, "reason": reason, "evidence": ["a line"]},
    ]
    types = ((ONE, "identity"), (TWO, type_))
    return {
        "host": {"kernel": "6.14.11-4-pve", "iommu": {"vendor": "amd"}, "mode": "translated"},
        "gpus": [
            {"address": at, "name": "card", "iommu_group": {"type": one}} for at, one in types
        ],
        "health": {"gpus": judged},
    }


def copies(verdict: str) -> dict[str, Any]:
    reason = f"copies say {verdict}"
    return {"p2p": {"verdict": verdict, "reason": reason, "basis": {"driver": "595.58.03"}}}


def lessons(**known: Any) -> dict[str, Any]:
    return trial_lessons({"addresses": [TWO, ONE], "type": "identity", **known})


def test_it_works_when_every_gpu_and_every_copy_does() -> None:
    found = lessons(after=host(), p2p_before=copies("broken"), p2p_after=copies("works"))
    assert (found["verdict"], found["p2p"]) == ("works", {"before": "broken", "after": "works"})
    assert found["platform"] == {
        "kernel": "6.14.11-4-pve",
        "iommu": "amd",
        "mode": "translated",
        "driver": "595.58.03",
    }
    assert lessons(after=host())["verdict"] == "works"  # copies were not asked for


@pytest.mark.parametrize(
    ("known", "verdict", "words"),
    [
        ({"after": host(fsp="failed", verdict="failed", reason="no FSP")}, "fails", "no FSP"),
        ({"after": host(verdict="lost", reason="gone")}, "fails", f"{TWO}: gone"),
        ({"after": host(verdict="degraded", reason="IOMMU faults")}, "fails", "IOMMU faults"),
        ({"after": host(), "p2p_after": copies("broken")}, "fails", "copies say broken"),
        ({"after": host(), "p2p_after": copies("unknown")}, "unknown", "copies say unknown"),
        ({"after": host(fsp="unknown", verdict="unknown", reason="not opened")}, "unknown", "not"),
        ({"after": host(type_="DMA"), "failure": "EINVAL"}, "unknown", "DMA (EINVAL)"),
        ({"after": host(), "failure": "a guest did not start"}, "unknown", "a guest did not"),
        ({"failure": "no answer"}, "unknown", "was not in force"),
        ({"after": {"gpus": None, "health": None}}, "unknown", "was not in force"),
    ],
)
def test_anything_less_does_not_work(known: dict[str, Any], verdict: str, words: str) -> None:
    found = lessons(**known)
    assert found["verdict"] == verdict
    assert words in found["reason"]
    assert words in found["lines"][0]


def test_evidence_is_quoted() -> None:
    found = lessons(after=host(fsp="failed", verdict="failed", reason="no FSP"))
    assert any("a line" in line for line in found["lines"])


def test_power_is_told_where_nothing_else_helps() -> None:
    ill = host(fsp="failed", verdict="failed")
    assert not lessons(after=ill)["power"]
    ill["health"]["gpus"][1]["ladder"] = ["power-off", "hardware"]
    assert lessons(after=ill)["power"]
    ill["health"]["gpus"][1]["ladder"] = ["reset", "power-off"]
    assert not lessons(after=ill)["power"]


def test_what_is_no_trial_is_an_error() -> None:
    with pytest.raises(AnsibleFilterError, match="addresses and type"):
        trial_lessons({"type": "identity"})
