"""What is done to our GPUs, well or badly, leaves the running machine of another tenant alone.

VM 201 has 0000:83:00.0 and 0000:84:00.0. It proves itself, second by second, that it has them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from testinfra.host import Host

testinfra_hosts = ["ansible://pve1"]
RunModule = Callable[..., dict[str, Any]]
OURS = ["0000:81:00.0", "0000:82:00.0"]
LIFTABLE = ["mig", "guest-config", "display", "kernel-client", "sme-identity", "fsp-identity"]
PROBE_FAILS = "/sys/module/nvidia/parameters/lab_probe_fails"
# Drivers, overrides and types of all but OURS, and the process of VM 201
OTHERS = """
cd /sys/bus/pci/devices
for gpu in 0000:4[1-4]:00.0 0000:8[34]:00.0; do
    echo $gpu $(readlink $gpu/driver) $(cat $gpu/driver_override $gpu/iommu_group/type)
done
cat /run/qemu-server/201.pid
grep ' 201 ' /run/qemu-server/pci-id-reservations
"""
# As Proxmox does at a VM's start: vfio-pci takes every device of that id that is free to take.
# Linux refuses an id that is known already, and takes nothing then.
NEW_ID = """
{ cd /sys/bus/pci/drivers/vfio-pci
  echo 10de 2bb5 >remove_id 2>/dev/null
  echo 10de 2bb5 >new_id && echo 10de 2bb5 >remove_id; }"""


@pytest.fixture(scope="module", autouse=True)
def neighbour(host: Host, assert_neighbour_undisturbed: Callable[[Host], None]) -> Iterator[str]:
    """Have our machine off; at the end VM 201 has had its GPUs all the time."""
    host.check_output("qm stop 200")
    yield host.check_output(OTHERS)
    assert_neighbour_undisturbed(host)


@pytest.fixture(autouse=True)
def others_stay(host: Host, neighbour: str) -> Iterator[None]:
    """Compare everybody else after each test with the beginning."""
    yield
    assert host.check_output(OTHERS) == neighbour


def drivers(host: Host) -> list[str]:
    """Return the drivers of our two GPUs, `-` for none."""
    links = [f"/sys/bus/pci/devices/{gpu}/driver" for gpu in OURS]
    script = "; ".join(f"basename $(readlink {link} || echo -)" for link in links)
    return host.check_output(script).split()


def test_a_starting_machine_takes_its_own_gpu_alone(host: Host, run_module: RunModule) -> None:
    bindings = [
        {"addresses": OURS[:1], "driver": "vfio-pci"},
        {"addresses": OURS[1:], "driver": "none"},
    ]
    result = run_module("gpu", bindings=bindings, accept=["guest-config"])
    assert not result["failed"], result["msg"]
    second = host.check_output("sed -n 's/^hostpci1: //p' /etc/pve/qemu-server/200.conf")
    host.check_output("qm set 200 --delete hostpci1 && qm start 200")
    host.check_output(f"qm status 200 | grep running && {NEW_ID}")
    assert drivers(host) == ["vfio-pci", "-"]

    host.check_output(f"echo >/sys/bus/pci/devices/{OURS[1]}/driver_override && {NEW_ID}")
    assert drivers(host) == ["vfio-pci", "vfio-pci"]  # what the mark has prevented
    host.check_output(f"qm stop 200 && qm set 200 --hostpci1 {second}")


def test_ours_go_to_nvidia(host: Host, run_module: RunModule) -> None:
    moved = run_module("gpu", addresses=OURS, driver="nvidia", accept=["guest-config"])
    assert not moved["failed"], moved["msg"]
    assert drivers(host) == ["nvidia", "nvidia"]


@pytest.mark.parametrize(
    "wish",
    [
        {"addresses": ["83:00.0", "84:00.0"], "driver": "nvidia"},
        {"addresses": ["0000:83:00.0"], "driver": "vfio-pci", "iommu_type": "DMA-FQ"},
        {
            "bindings": [
                {"addresses": OURS, "driver": "vfio-pci"},
                {"addresses": ["0000:84:00.0"], "driver": "none"},
            ]
        },
    ],
    ids=["other driver", "other type", "together with ours"],
)
def test_wishes_for_its_gpus_are_refused(
    host: Host, run_module: RunModule, wish: dict[str, Any]
) -> None:
    result = run_module("gpu", accept=LIFTABLE, **wish)
    assert result["failed"]
    assert result["writes"] == []
    guards = [guard for guard in result["guards"] if guard["address"] not in OURS]
    assert any("201" in guard["evidence"] for guard in guards)
    assert not any(guard["accepted"] for guard in guards)
    assert drivers(host) == ["nvidia", "nvidia"]


def test_its_type_is_not_changed_in_place(run_module: RunModule) -> None:
    result = run_module("iommu_group", address="0000:83:00.0", type="DMA-FQ")
    assert result["failed"]
    assert "201" in result["msg"]


@pytest.fixture
def held(host: Host) -> Iterator[Callable[[], int]]:
    """Run the persistence daemon; return how to count the GPUs that it holds."""
    host.check_output("systemctl start nvidia-persistenced")
    nodes = "/proc/$(systemctl show -P MainPID nvidia-persistenced)/fd -lname '/dev/nvidia*'"
    yield lambda: int(host.check_output(f"find {nodes} | wc -l"))
    host.check_output("systemctl stop nvidia-persistenced")


def test_ours_go_to_vfio_and_another_type_under_the_persistence_daemon(
    host: Host, run_module: RunModule, held: Callable[[], int]
) -> None:
    before = held()
    wish = {"addresses": OURS, "driver": "vfio-pci", "iommu_type": "DMA-FQ"}
    moved = run_module("gpu", accept=["guest-config"], **wish)
    assert not moved["failed"], moved["msg"]
    assert moved["quiesced"]["persistence"] == OURS
    assert drivers(host) == ["vfio-pci", "vfio-pci"]
    assert held() == before - 2


@pytest.fixture
def failing_probe(host: Host) -> Iterator[None]:
    """Let the driver refuse the second of our GPUs."""
    host.check_output(f"echo {OURS[1]} >{PROBE_FAILS}")
    yield
    host.check_output(f"echo >{PROBE_FAILS}")


@pytest.mark.usefixtures("failing_probe")
def test_a_way_back_that_fails_is_undone(host: Host, run_module: RunModule) -> None:
    failed = run_module("gpu", addresses=OURS, driver="nvidia", accept=["guest-config"])
    assert failed["failed"]
    assert failed["rolled_back"]
    assert drivers(host) == ["vfio-pci", "vfio-pci"]


def test_ours_come_back(host: Host, run_module: RunModule) -> None:
    wish = {"addresses": OURS, "driver": "nvidia", "iommu_type": "auto"}
    back = run_module("gpu", accept=["guest-config"], **wish)
    assert not back["failed"], back["msg"]
    assert drivers(host) == ["nvidia", "nvidia"]
