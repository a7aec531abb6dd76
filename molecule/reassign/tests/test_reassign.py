"""A GPU changes hands between two guests that run before and after; nobody else notices."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from testinfra.host import Host

testinfra_hosts = ["ansible://pve1"]
RunPlaybook = Callable[..., subprocess.CompletedProcess[str]]
CONTROL = {"nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"}
MOVED = "0000:44:00.0"
OURS = [f"0000:{bus}:00.0" for bus in ("41", "42", "43", "44", "81", "82")]
# in one command, since each costs a second connection in the lab
LOOK = """
cd /sys/bus/pci/devices
for gpu in 0000:4[1-4]:00.0 0000:8[1-4]:00.0; do
    echo "driver $gpu $(basename $(readlink $gpu/driver))"
    echo "group $gpu $(basename $(readlink $gpu/iommu_group))"
    file=/proc/driver/nvidia/gpus/$gpu/information
    minor=$(sed -n 's/^Device Minor:[^0-9]*//p' $file 2>/dev/null)
    echo "minor $gpu $minor"
done
sed -n 's/^/lxc /p' /etc/pve/lxc/100.conf
sed -n 's/^/qemu /p' /etc/pve/qemu-server/200.conf
pct status 100 | sed 's/^/ct /'
qm status 200 | sed 's/^/vm /'
pct exec 100 -- sh -c 'stat -c "node %n %t:%T" /dev/nvidia*'
echo "pid lxc $(lxc-info -n 100 -pH)"
echo "pid qemu $(cat /run/qemu-server/200.pid)"
cd /proc/$(cat /run/qemu-server/200.pid)/fd
ls -l | sed -n 's|.*-> /dev/vfio/\\([0-9]*\\)$|holds \\1 -|p'
"""


class State:
    """What the host, its two guests and their configurations look like."""

    def __init__(self, host: Host) -> None:
        self.text = host.check_output(LOOK)

    def pairs(self, word: str) -> dict[str, str]:
        """Return the lines that begin with a word, as name and value."""
        lines = re.findall(rf"^{word} (\S+) ?(.*)$", self.text, re.MULTILINE)
        return dict(lines)

    def assert_gpus(self, container: list[str], machine: list[str]) -> None:
        """Check who has which GPU: drivers, configurations, and what the running guests hold."""
        drivers, minors, groups = self.pairs("driver"), self.pairs("minor"), self.pairs("group")
        for address in OURS:
            assert drivers[address] == ("nvidia" if address in container else "vfio-pci"), address
        assert self.pairs("ct") == {"status:": "running"}
        assert self.pairs("vm") == {"status:": "running"}
        config = {k: v for k, v in self.pairs("lxc").items() if k.startswith("dev")}
        listed = {re.sub(r"^/dev/|,.*", "", value) for value in config.values()}
        assert listed == CONTROL | {f"nvidia{minors[address]}" for address in container}
        assert all(value.endswith(",gid=0,mode=0666") for value in config.values())
        nodes = {name.removeprefix("/dev/"): number for name, number in self.pairs("node").items()}
        assert set(nodes) == listed
        for address in container:  # 195 is c3 in stat's words
            assert nodes[f"nvidia{minors[address]}"] == f"c3:{int(minors[address]):x}"
        named = {re.sub(r",.*", "", v) for k, v in self.pairs("qemu").items() if "hostpci" in k}
        assert {(n if "." in n else f"{n}.0") for n in named} == set(machine)
        assert set(self.pairs("holds")) == {groups[address] for address in machine}


@pytest.fixture(scope="module", autouse=True)
def neighbour(host: Host, assert_neighbour_undisturbed: Callable[[Host], None]) -> Iterator[None]:
    """Check after all steps that the other tenant's machine noticed nothing."""
    yield
    assert_neighbour_undisturbed(host)


def layout(container: list[str], machine: list[str]) -> str:
    """Return a layout as a variable for a playbook."""
    entries: list[dict[str, Any]] = [
        {
            "name": "inference",
            "addresses": container,
            "driver": "nvidia",
            "iommu_type": "DMA-FQ",
            "guest": {"kind": "lxc", "vmid": 100},
        },
        {
            "name": "confidential",
            "addresses": machine,
            "driver": "vfio-pci",
            "guest": {"kind": "qemu", "vmid": 200},
        },
    ]
    return json.dumps({"gpu_layout": entries})


@pytest.fixture(scope="module")
def start(host: Host) -> State:
    """Return how everything is before the first test."""
    state = State(host)
    state.assert_gpus(OURS[:4], OURS[4:])
    return state


def test_plan_is_shown_and_nothing_changes(
    host: Host, run_playbook: RunPlaybook, start: State
) -> None:
    run = run_playbook("assign_gpus", "--check", "--diff", "-e", layout(OURS[:3], OURS[3:]))
    assert run.returncode == 0, run.stdout + run.stderr
    for line in (
        '"shut down lxc 100 (ct100)"',
        '"shut down qemu 200 (confidential)"',
        f'"bind {MOVED} to vfio-pci (nvidia now)"',
        "-dev3: /dev/nvidia3,gid=0,mode=0666",
        f"+hostpci2: {MOVED},pcie=1",
    ):
        assert line in run.stdout
    assert State(host).text == start.text


def test_gpu_of_another_tenant_is_refused(
    host: Host, run_playbook: RunPlaybook, start: State
) -> None:
    run = run_playbook("assign_gpus", "-e", layout(OURS[:4], [*OURS[4:], "0000:83:00.0"]))
    assert run.returncode == 2
    said = " ".join((run.stdout + run.stderr).split())
    assert "0000:83:00.0 belongs to qemu guest 201, which runs and is not in the layout" in said
    assert "changed=0" in run.stdout
    assert State(host).text == start.text


@pytest.fixture
def holder(host: Host) -> Iterator[None]:
    """Have a process of the host take the container's GPU as soon as the container is down."""
    wait = "while pct status 100 | grep -q running; do sleep 0.3; done"
    hold = f"{wait}; exec sleep 600 3</dev/nvidia3"
    host.check_output(f"systemd-run --quiet --unit=holder sh -c '{hold}'")
    yield
    host.run("systemctl stop holder")


def test_failed_move_leaves_both_guests_as_they_were(
    host: Host, run_playbook: RunPlaybook, holder: None
) -> None:
    run = run_playbook("assign_gpus", "-e", layout(OURS[:3], OURS[3:]))
    assert run.returncode == 2
    said = " ".join((run.stdout + run.stderr).split())
    assert "in use by process" in said
    assert "were not all moved. Bind all GPUs: nothing was changed" in said
    assert "lxc 100 (ct100) runs" in said
    State(host).assert_gpus(OURS[:4], OURS[4:])


def test_gpu_goes_to_the_machine_and_a_second_run_changes_nothing(
    host: Host, run_playbook: RunPlaybook
) -> None:
    run = run_playbook("assign_gpus", "-e", layout(OURS[:3], OURS[3:]))
    assert run.returncode == 0, run.stdout + run.stderr
    moved = State(host)
    moved.assert_gpus(OURS[:3], OURS[3:])

    run = run_playbook("assign_gpus", "-e", layout(OURS[:3], OURS[3:]))
    assert run.returncode == 0, run.stdout + run.stderr
    assert "changed=0" in run.stdout
    assert State(host).text == moved.text  # nobody was stopped: process numbers are in it


def test_gpu_comes_back_to_the_container(host: Host, run_playbook: RunPlaybook) -> None:
    run = run_playbook("assign_gpus")
    assert run.returncode == 0, run.stdout + run.stderr
    State(host).assert_gpus(OURS[:4], OURS[4:])
    assert not host.file("/var/lib/gpuhost/assign.json").exists
