"""A reboot with everything in place, what is found when something is not, and the way back."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from testinfra.host import Host

testinfra_hosts = ["ansible://pve1"]
RunModule = Callable[..., dict[str, Any]]
PCI = "/sys/bus/pci/devices"
PROGRAM = "/usr/local/lib/gpuhost/gpuhost-boot"
OURS = ("0000:41:00.0", "0000:42:00.0", "0000:43:00.0", "0000:44:00.0")


def _ansible(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [*words, "-i", "inventory/lab"]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module", autouse=True)
def rebooted(host: Host, root: Path) -> str:
    """Reboot once, before all tests; return the journal of the boot with monotonic times."""
    before = host.check_output("cat /proc/sys/kernel/random/boot_id")
    done = _ansible(
        root, "ansible", "pve1", "-m", "ansible.builtin.reboot", "-a", "reboot_timeout=900"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert host.check_output("cat /proc/sys/kernel/random/boot_id") != before
    host.run("systemctl is-system-running --wait")
    return host.check_output("journalctl -b -o short-monotonic --no-hostname")


def _times(journal: str, pattern: str) -> list[float]:
    """Return when lines of the journal were logged, in seconds since the kernel started."""
    found = re.findall(rf"^\[ *([0-9.]+)\] .*{pattern}", journal, re.MULTILINE)
    assert found, pattern
    return [float(time) for time in found]


def _gpus(host: Host) -> dict[str, list[str]]:
    """Return driver, override and group type of each GPU."""
    driver = "$(readlink $at/driver | sed 's,.*/,,')"
    others = "$(cat $at/driver_override $at/iommu_group/type)"
    loop = f"for at in 0000:[48][1-4]:00.0; do echo $at {driver} {others}; done"
    table = host.check_output(f"cd {PCI}; {loop}")
    return {line.split()[0]: line.split()[1:] for line in table.splitlines()}


def test_drivers_and_types_are_those_of_the_layout(host: Host) -> None:
    gpus = _gpus(host)
    for entry in host.ansible.get_variables()["gpu_layout"]:
        wanted = [entry["driver"], entry["driver"], entry.get("iommu_type", "DMA")]
        for address in entry["addresses"]:
            assert gpus[address] == wanted, address


def test_types_were_set_before_nvidia_was_there_and_all_before_the_guests(rebooted: str) -> None:
    loaded = _times(rebooted, "NVRM: loading NVIDIA")
    assert len(loaded) == 1
    for address in OURS:
        changed = _times(rebooted, f"gpuhost: {address} type DMA -> DMA-FQ")
        assert len(changed) == 1, address
        assert changed < loaded, address
    # it is in the initramfs too, and udev there asks for it
    assert _times(rebooted, r"systemd\[1\]: Hostname set")[0] < loaded[0]
    guests = _times(rebooted, "Starting pve-guests.service")[0]
    assert loaded[0] < guests
    for unit in ("gpuhost-types", "gpuhost-verify"):
        assert _times(rebooted, f"Finished {unit}.service")[0] < guests


def test_container_starts_and_has_its_gpus(host: Host) -> None:
    host.check_output("pct start 100")
    assert host.check_output("pct status 100") == "status: running"
    host.check_output("pct exec 100 -- ls /dev/nvidia0 /dev/nvidia3 /dev/nvidia-uvm")
    host.check_output("pct stop 100")


@pytest.fixture
def gpu_without_driver(host: Host, run_module: RunModule) -> Iterator[str]:
    """Take a GPU of container 100 off its driver, and give it back."""
    address = OURS[3]
    options = {"addresses": [address], "accept": ["guest-config"]}
    taken = run_module("gpu", driver="none", **options)
    assert not taken["failed"], taken
    yield address
    back = run_module("gpu", driver="nvidia", **options)
    assert not back["failed"], back
    host.check_output("systemctl restart gpuhost-verify")


def test_wrong_gpu_keeps_its_own_container_from_starting_and_nothing_else(
    host: Host, gpu_without_driver: str
) -> None:
    wrong = f"{gpu_without_driver} (inference): driver is none, should be nvidia"
    assert host.run("systemctl restart gpuhost-verify").rc != 0
    assert wrong in host.check_output("journalctl -b -u gpuhost-verify")
    assert host.run("pct start 100 || exit 1").rc == 1  # 255 would be the connection's own
    said = host.check_output("journalctl -b -t gpuhost; cat /run/pve/ct-100.stderr")
    assert wrong in said
    assert "guest 100 is not started" in said
    assert host.check_output("pct status 100") == "status: stopped"
    assert host.check_output("qm status 201") == "status: running"
    host.check_output("qm start 200")
    host.check_output("qm stop 200")


@pytest.fixture
def wants_identity(host: Host) -> Iterator[None]:
    """Have the kept layout ask for identity, and nvidia not loaded; the lab's GPUs bear it."""
    host.check_output(
        "cp /etc/gpuhost/layout.json /root/layout.json "
        """&& sed -i 's/"DMA-FQ"/"identity"/; s/"accept": .*/"accept": ["fsp-identity"],/' """
        "/etc/gpuhost/layout.json "
        "&& echo options nvidia fsp_fail_on_identity=N >/etc/modprobe.d/test.conf "
        "&& systemctl stop nvidia-init && modprobe -r nvidia_uvm nvidia"
    )
    yield
    host.check_output(
        "rm /etc/modprobe.d/test.conf && mv /root/layout.json /etc/gpuhost/layout.json "
        "&& modprobe -r nvidia && systemctl start nvidia-init && udevadm control --reload"
    )


@pytest.mark.usefixtures("wants_identity")
def test_type_that_the_kernel_refuses_below_nvidia_is_there_before_it(host: Host) -> None:
    loads = f"udevadm trigger -c add {PCI}/{OURS[0]} && udevadm settle"
    host.check_output(f"udevadm control --reload && {loads}")
    gpus = _gpus(host)
    for address in OURS:
        assert gpus[address] == ["nvidia", "nvidia", "identity"], address
    assert host.run(f"{PROGRAM} hook").rc == 0
    host.check_output("echo softdep nvidia pre: vfio-pci >>/etc/modprobe.d/test.conf")
    found = host.run(f"{PROGRAM} hook")
    assert found.rc == 1
    assert "there is 'softdep nvidia pre: vfio-pci'" in found.stdout


def test_other_tenant_has_its_gpus(
    host: Host, assert_neighbour_undisturbed: Callable[[Host], None]
) -> None:
    assert_neighbour_undisturbed(host)
    gpus = _gpus(host)
    assert gpus["0000:83:00.0"] == gpus["0000:84:00.0"] == ["vfio-pci", "vfio-pci", "DMA"]


def test_image_without_our_rule_is_found(host: Host) -> None:
    image = "/boot/initrd.img-0-test"
    host.check_output(f"{PROGRAM} images")
    # the host's own image but for the rule
    host.check_output(
        "rm -rf /root/image; unmkinitramfs /boot/initrd.img-$(uname -r) /root/image "
        "&& cd /root/image && find . -name 10-gpuhost.rules -delete && touch /boot/vmlinuz-0-test "
        f"&& find . | cpio --quiet -o -H newc >{image}; rm -rf /root/image"
    )
    found = host.run(f"{PROGRAM} images")
    assert found.rc == 3
    assert found.stdout.startswith(f"gpuhost: {image} lacks /etc/udev/rules.d/10-gpuhost.rules")
    kept = json.loads(host.check_output("cat /var/lib/gpuhost/initramfs.json"))["images"]
    assert kept.pop(image)["missing"] == ["/etc/udev/rules.d/10-gpuhost.rules"]
    assert [one["missing"] for one in kept.values() if one["missing"]] == []
    host.check_output(f"rm {image} /boot/vmlinuz-0-test")
    host.check_output(f"{PROGRAM} images")


def test_rules_and_units_are_without_fault(host: Host) -> None:
    host.check_output("udevadm verify --no-summary /etc/udev/rules.d/10-gpuhost.rules")
    units = "/etc/systemd/system/gpuhost-types.service /etc/systemd/system/gpuhost-verify.service"
    assert host.check_output(f"systemd-analyze verify {units} pve-container@100.service 2>&1") == ""


def test_absent_leaves_the_files_as_they_were(host: Host, root: Path) -> None:
    done = _ansible(root, "ansible-playbook", "molecule/staying/absent.yml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert host.check_output("/root/files | diff /root/files.before -") == ""
    assert host.run("lsinitramfs /boot/initrd.img-$(uname -r) | grep gpuhost").stdout == ""
    assert host.run("systemctl list-units --all --plain --no-legend 'gpuhost-*'").stdout == ""
    # what is in force stays until the next boot
    assert _gpus(host)[OURS[0]] == ["nvidia", "nvidia", "DMA-FQ"]
    again = _ansible(root, "ansible-playbook", "molecule/staying/absent.yml")
    assert "changed=0" in again.stdout
