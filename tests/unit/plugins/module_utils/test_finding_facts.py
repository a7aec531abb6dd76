"""What only the findings read: ACS of a port, versions, processors."""

from __future__ import annotations

from pathlib import Path

import pytest
import trees
from ansible_collections.gpuhost.inference.plugins.module_utils._boot import read_boot
from ansible_collections.gpuhost.inference.plugins.module_utils._finding_facts import (
    Extras,
    is_snp,
    read_extras,
    redirects_requests,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._owners import Guest
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader


def space(*capabilities: tuple[int, int, int, int]) -> bytes:
    """Return a configuration space with (place, id, next, control) of extended capabilities."""
    config = bytearray(4096)
    for at, id_, next_, control in capabilities:
        config[at : at + 4] = (id_ | 1 << 16 | next_ << 20).to_bytes(4, "little")
        config[at + 6 : at + 8] = control.to_bytes(2, "little")
    return bytes(config)


@pytest.mark.parametrize(
    ("config", "redirects"),
    [
        (space((0x100, 0x0D, 0, 0x04)), True),
        (space((0x100, 0x0D, 0, 0x1D)), True),
        (space((0x100, 0x0D, 0, 0x19)), False),  # all but request redirect
        (space((0x100, 0x01, 0x200, 0x04), (0x200, 0x0D, 0, 0x04)), True),
        (space((0x100, 0x01, 0, 0xFF)), False),
        (space((0x100, 0x01, 0x140, 0), (0x140, 0x02, 0x100, 0)), False),  # a circle
        (space((0x100, 0x0D, 0, 0x04))[:256], None),  # what others than root may read
        (b"", None),
    ],
)
def test_acs_request_redirect(config: bytes, redirects: bool | None) -> None:
    assert redirects_requests(config) is redirects


def extras(tmp_path: Path, archive: str, *guests: Guest) -> Extras:
    host = Reader(str(trees.unpack(archive, tmp_path)))
    return read_extras(host, read_boot(host), [], guests, [])


def vm(config: str) -> Guest:
    return Guest("qemu", 200, None, None, (("amd-sev", config),), False)


@pytest.mark.parametrize(
    ("config", "confidential"),
    [("type=snp", True), ("type=snp,kernel-hashes=1", True), ("std", False), ("type=es", False)],
)
def test_a_confidential_vm_is_known_by_its_configuration(config: str, confidential: bool) -> None:
    assert is_snp(vm(config)) is confidential


def test_the_version_of_qemu_is_read_when_a_vm_is_confidential(tmp_path: Path) -> None:
    status = (
        "/var/lib/dpkg/status = Package: pve-qemu-kvm-dbg\\nVersion: 1.0\\n\\n"
        "Package: pve-qemu-kvm\\nStatus: install ok installed\\nVersion: 1:9.2.0-5\\n"
    )
    assert extras(tmp_path / "a", status, vm("type=snp")).qemu == "9.2.0-5"
    assert extras(tmp_path / "b", status).qemu is None


@pytest.mark.parametrize(("possible", "cpus"), [("0", 1), ("0-511", 512), ("0-3,8-11", 12)])
def test_processors_are_counted_up_to_the_last(tmp_path: Path, possible: str, cpus: int) -> None:
    assert extras(tmp_path, f"/sys/devices/system/cpu/possible = {possible}").cpus == cpus


def test_a_host_without_anything_has_nothing_unread(tmp_path: Path) -> None:
    found = extras(tmp_path, "/proc/cmdline = quiet")
    assert found.unread == ()
    assert (found.cpus, found.kept, found.image_checks, found.record) == (None,) * 4
