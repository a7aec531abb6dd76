"""Which GPU is ill and what comes next, from the result of gpu_host_info alone."""

from __future__ import annotations

from typing import Any

import pytest
from ansible.errors import AnsibleFilterError
from ansible_collections.gpuhost.inference.plugins.filter.recovery import recovery

FSP = ("failed", "its FSP did not come up", ["power-off", "hardware"])
WPR2 = ("failed", "locked until a reset", ["reset", "reboot", "power-off", "hardware"])
LOST = ("lost", "it does not answer on the bus", ["reboot", "power-off", "hardware"])
FIRMWARE = ("failed", "its firmware was not loaded", ["driver", "reboot"])
FINE = ("healthy", "it was started", [])
WAITS = ("degraded", "its removal waits", ["application", "reboot", "power-off"])
A, B, C, D = (f"0000:{bus}:00.0" for bus in ("21", "22", "a1", "a2"))
ALLOWED = {"reboot_allowed": True, "power_tasks": "bmc.yml"}


def host(
    *verdicts: tuple[str, str, list[str]], running: bool = True, against: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Return a host: A and B are of container 110, C of machine 210, D of nobody's entry."""
    return {
        "health": {
            "gpus": [
                {"address": at, "verdict": verdict, "reason": reason, "ladder": ladder}
                for at, (verdict, reason, ladder) in zip((A, B, C, D), verdicts)
            ]
        },
        "layout": {
            "problems": [],
            "entries": [
                {"addresses": [A, B], "guest": {"kind": "lxc", "vmid": 110}},
                {"addresses": [C], "guest": {"kind": "qemu", "vmid": 210}},
            ],
        },
        "guests": [
            {"kind": "lxc", "vmid": 110, "running": running},
            {"kind": "qemu", "vmid": 210, "running": True},
        ],
        "findings": [],
        "host": {"reboot": {"problems": list(against)}},
    }


def step(rung: str, *addresses: str) -> dict[str, Any]:
    return {"at": "07:00:00", "what": "tried", "rung": rung, "addresses": list(addresses)}


def test_on_a_healthy_host_there_is_nothing_to_do() -> None:
    plan = recovery(host(FINE, FINE, FINE, FSP), **ALLOWED)  # D is not of the layout
    assert (plan["ill"], plan["rung"], plan["addresses"], plan["say"]) == ([], None, [], [])
    assert plan["entries"] == []


@pytest.mark.parametrize(
    ("fault", "rung"),
    [(FSP, "power-off"), (WPR2, "reset"), (LOST, "reboot"), (FIRMWARE, "driver")],
)
def test_each_fault_begins_where_it_is_known_to_react(fault: Any, rung: str) -> None:
    plan = recovery(host(FINE, fault, FINE, FINE), **ALLOWED)
    assert (plan["rung"], plan["addresses"]) == (rung, [B])
    assert plan["running"] == [110]


def test_a_rung_that_did_not_help_leads_to_the_next_one_that_is_known() -> None:
    assert recovery(host(WPR2), [step("reset", A)], **ALLOWED)["rung"] == "reboot"
    assert recovery(host(FIRMWARE), [step("driver", A)], **ALLOWED)["rung"] == "reboot"
    over = recovery(host(WPR2), [step("power-off", A)], **ALLOWED)
    assert over["rung"] is None
    assert over["ill"][0]["left"] == ["hardware"]
    assert over["say"] == [
        f"{A} is failed: locked until a reset. Tried without help: power-off. Needed: hardware "
        "(check seating, power cable, riser and slot, then have the GPU replaced). "
        "Not done: that is for a person to do."
    ]


def test_a_fault_of_another_kind_after_a_rung_goes_on_above_it() -> None:
    assert recovery(host(WPR2), [step("reboot", A)], **ALLOWED)["rung"] == "power-off"


def test_the_lowest_rung_comes_first_and_a_power_off_spares_a_reboot() -> None:
    assert recovery(host(FSP, WPR2), **ALLOWED)["addresses"] == [B]
    both = recovery(host(FSP, LOST), **ALLOWED)
    assert (both["rung"], both["addresses"]) == ("power-off", [A, B])
    without = recovery(host(FSP, LOST), reboot_allowed=True)
    assert (without["rung"], without["addresses"]) == ("reboot", [A, B])


def test_what_is_missing_for_a_rung_is_told() -> None:
    facts = host(FSP, against=("guest qemu 201 runs",))
    forbidden = recovery(facts, power_tasks="bmc.yml")
    assert forbidden["rung"] is None
    assert forbidden["say"] == [
        f"{A} is failed: its FSP did not come up. Needed: power-off (power the host off and take "
        "it from the mains for 30 s). Not done: host_reboot_allowed is false; "
        "guest qemu 201 runs."
    ]
    powerless = recovery(facts, reboot_allowed=True)
    assert powerless["rung"] is None
    assert "Not done: host_power_tasks is not set; guest qemu 201" in powerless["say"][0]
    assert recovery(facts, **ALLOWED)["rung"] is None
    assert recovery(host(WPR2, against=("guest qemu 201 runs",)))["rung"] == "reset"


def test_what_is_for_people_is_told_and_not_climbed_over() -> None:
    plan = recovery(host(WAITS), addresses=[A], **ALLOWED)
    assert plan["rung"] is None
    assert "that is for a person to do" in plan["say"][0]


def test_named_gpus_are_looked_at_whatever_their_verdict() -> None:
    degraded = ("degraded", "slow to come back", ["reset", "power-off"])
    assert recovery(host(degraded, FSP), **ALLOWED)["addresses"] == [B]
    assert recovery(host(degraded, FSP), addresses=["21:00.0"], **ALLOWED)["addresses"] == [A]
    assert recovery(host(FINE, FINE, FINE, FSP), addresses=[D], **ALLOWED)["rung"] == "power-off"
    with pytest.raises(AnsibleFilterError, match="is no NVIDIA GPU of this host"):
        recovery(host(FINE), addresses=["99:00.0"])


def test_an_unknown_gpu_that_is_named_has_no_way() -> None:
    plan = recovery(host(("unknown", "no log", [])), addresses=[A], **ALLOWED)
    assert plan["rung"] is None
    assert "Nothing else is known to help" in plan["say"][0]


def test_wrong_types_of_ill_gpus_are_named() -> None:
    facts = host(FSP, FINE)
    facts["findings"] = [{"id": "type-differs", "subject": at} for at in (A, B)]
    assert recovery(facts)["retype"] == [A]


def test_the_container_stays_known_when_its_gpu_is_well_again() -> None:
    plan = recovery(host(FINE, FINE, running=False), [step("power-off", A)])
    assert [entry["guest"]["vmid"] for entry in plan["entries"]] == [110]
    assert plan["running"] == []
    assert recovery(host(FINE, FINE, FSP), **ALLOWED)["entries"] == []  # of a machine


def test_what_was_treated_is_ill_until_it_is_healthy() -> None:
    doubt = ("unknown", "its log is not complete", [])
    plan = recovery(host(doubt, FINE), [step("reset", A)], **ALLOWED)
    assert ([one["address"] for one in plan["ill"]], plan["rung"]) == ([A], None)
    assert "Tried: reset. So nobody can tell whether that helped." in plan["say"][0]
    slow = ("degraded", "its link is slow", ["power-off"])
    assert recovery(host(slow, FINE), [step("reset", A)], **ALLOWED)["rung"] == "power-off"
    assert recovery(host(doubt, slow), **ALLOWED)["ill"] == []  # nobody has treated these


def test_a_gpu_that_vanished_is_lost() -> None:
    facts = host(FINE, FINE)
    facts["health"]["gpus"] = facts["health"]["gpus"][1:]
    facts["layout"]["entries"][0]["addresses"] = [B]
    for named in ([], [A]):
        plan = recovery(facts, [step("reset", A)], addresses=named, **ALLOWED)
        assert (plan["rung"], plan["addresses"]) == ("reboot", [A])
    over = recovery(facts, [step("power-off", A)], **ALLOWED)
    assert over["rung"] is None
    assert over["say"][0].startswith(f"{A} is lost: it is not on the PCI bus any more. Tried")


@pytest.mark.parametrize(
    "text", ["21:00.0,0000:22:00.0", " 21:00.0, 22:00.0\n", "21:00.0\n22:00.0"]
)
def test_addresses_may_be_text(text: str) -> None:
    assert recovery(host(FSP, WPR2, FINE), addresses=text)["ill"][1]["address"] == B
    assert recovery(host(FINE, FSP), addresses="")["ill"][0]["address"] == B
