"""Kernel parameters of a host in a temporary folder, with the lab's boot loader tools."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trees
from ansible_collections.gpuhost.inference.plugins.module_utils import _boot_files
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader
from ansible_collections.gpuhost.inference.plugins.modules import kernel_cmdline

TOOL = Path(__file__).parents[4] / "lab/rootfs/usr/sbin/proxmox-boot-tool"
LINE = "root=ZFS=rpool/ROOT/pve-1 boot=zfs iommu=pt\nan old line\n"
DEFAULTS = """\
GRUB_DEFAULT=0
GRUB_CMDLINE_LINUX_DEFAULT="quiet iommu=pt"
GRUB_CMDLINE_LINUX="console=ttyS0 hugepages=16"
"""
TREE = f"""\
/run/
/boot/vmlinuz-6.14.11-4-pve = x
/boot/initrd.img-6.14.11-4-pve = x
/etc/fstab = /dev/sda2 / ext4 defaults 0 1
/etc/kernel/proxmox-boot-uuids = 5A5A-0C1E
/etc/kernel/cmdline = {LINE.encode("unicode_escape").decode().removesuffix(chr(92) + "n")}
/etc/default/grub = {DEFAULTS.encode("unicode_escape").decode().removesuffix(chr(92) + "n")}
/etc/default/grub.d/
"""
SYSTEMD_BOOT = "initrd=\\EFI\\proxmox\\6.14.11-4-pve\\initrd.img root=ZFS=rpool/ROOT/pve-1 boot=zfs"
GRUB = "BOOT_IMAGE=/boot/vmlinuz-6.14.11-4-pve root=/dev/sda2 ro console=ttyS0 hugepages=16 quiet"


class Host:
    """A host whose boot loader tools are the lab's."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.commands: list[str] = []
        self.tool = TOOL.read_text(encoding="utf-8")

    def read(self, path: str) -> str | None:
        at = self.root / path.lstrip("/")
        return at.read_text(encoding="utf-8") if at.exists() else None

    def write(self, path: str, text: str) -> None:
        (self.root / path.lstrip("/")).write_text(text, encoding="utf-8")

    def boots(self, cmdline: str) -> None:
        self.write("/proc/cmdline", cmdline)

    def files(self) -> dict[str, bytes]:
        etc = self.root / "etc"
        return {str(path): path.read_bytes() for path in etc.rglob("*") if path.is_file()}

    def run(self, command: str) -> str:
        self.commands.append(command)
        path, *words = command.split()
        name = Path(path).name
        text = self.tool.replace("/etc/", f"{self.root}/etc/")
        for place in ("/boot/vmlinuz-*", '/boot/initrd.img-$1"', "=/boot/lab", "/boot/grub"):
            lead = place[: place.index("/")]
            text = text.replace(place, f"{lead}{self.root}{place[len(lead) :]}")
        text = text.replace("file#/boot", f"file#{self.root}/boot")
        (self.root / name).write_text(text, encoding="utf-8")
        return _boot_files.run_tool(" ".join(["sh", str(self.root / name), *words]), 30)

    def booted_next(self) -> str:
        text = self.read("/boot/lab-loader.conf") or ""
        return text.partition("cmdline=")[2].strip()

    def change(self, present: str = "", absent: str = "", **options: Any) -> dict[str, Any]:
        options.setdefault("run", self.run)
        reader = Reader(str(self.root))
        return _boot_files.change(reader, present.split(), absent.split(), **options)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    trees.unpack(TREE, tmp_path)
    (tmp_path / "proc").mkdir()
    found = Host(tmp_path)
    found.boots(SYSTEMD_BOOT)
    return found


@pytest.fixture
def grub(host: Host) -> Host:
    host.boots(GRUB)
    (host.root / "etc/kernel/proxmox-boot-uuids").unlink()
    return host


def test_systemd_boot(host: Host) -> None:
    before = host.files()
    result = host.change("iommu.strict=1", "iommu")
    assert host.read("/etc/kernel/cmdline") == LINE.replace("iommu=pt", "iommu.strict=1")
    assert host.booted_next().endswith("root=ZFS=rpool/ROOT/pve-1 boot=zfs iommu.strict=1")
    assert (result["changed"], result["reboot_required"]) == (True, True)
    assert result["commands"] == ["/usr/sbin/proxmox-boot-tool refresh"]
    assert [file["path"] for file in result["files"]] == ["/etc/kernel/cmdline"]
    assert result["diff"][0]["before"] == LINE
    assert result["boot_loader"]["wanted"][-1] == "iommu.strict=1"
    assert len(host.files()) == len(before)

    again = host.change("iommu.strict=1", "iommu")
    assert (again["changed"], again["commands"], again["reboot_required"]) == (False, [], True)
    assert (again["missing"], again["unwanted"]) == (["iommu.strict=1"], [])
    assert again["not_configured"] == []
    host.boots(host.booted_next() + " iommu=soft")
    again = host.change("iommu.strict=1", "iommu")
    assert (again["changed"], again["reboot_required"]) == (False, True)
    assert (again["missing"], again["unwanted"]) == ([], ["iommu=soft"])
    host.boots(host.booted_next())
    assert host.change("iommu.strict=1", "iommu")["reboot_required"] is False

    back = host.change(back=True)
    assert (back["changed"], back["reboot_required"]) == (True, True)
    assert host.files() == before
    assert host.booted_next().endswith("boot=zfs iommu=pt")
    assert host.read(_boot_files.RECORD) is None
    assert host.change(back=True)["changed"] is False
    assert len(host.commands) == 2


def test_grub(grub: Host) -> None:
    before = grub.files()
    result = grub.change("iommu.strict=1 pci=config_acs=1@0:1.0;1@0:2.0", "iommu=pt")
    assert result["commands"] == ["/usr/sbin/update-grub"]
    assert {file["path"] for file in result["files"]} == {
        "/etc/default/grub",
        "/etc/default/grub.d/zz-gpuhost.cfg",
    }
    assert grub.read("/etc/default/grub") == DEFAULTS.replace(" iommu=pt", "")
    line = "console=ttyS0 hugepages=16 iommu.strict=1 'pci=config_acs=1@0:1.0;1@0:2.0' quiet"
    assert grub.booted_next().endswith(line)
    assert grub.change("iommu.strict=1", "iommu=pt")["changed"] is False
    grub.change(back=True)
    assert grub.files() == before
    assert len(grub.commands) == 2


def test_grub_on_synced_boot_partitions_is_refreshed_by_their_tool(host: Host) -> None:
    host.boots(GRUB)
    result = host.change("iommu.strict=1")
    assert result["commands"] == ["/usr/sbin/proxmox-boot-tool refresh"]
    assert [file["path"] for file in result["files"]] == ["/etc/default/grub.d/zz-gpuhost.cfg"]
    assert host.read("/etc/kernel/cmdline") == LINE


def test_check_mode_changes_nothing(host: Host) -> None:
    before = host.files()
    planned = host.change("iommu.strict=1", "boot", check=True)
    assert (host.files(), host.commands, host.read(_boot_files.RECORD)) == (before, [], None)
    assert planned["not_configured"] == ["iommu.strict=1", "boot=zfs"]
    done = host.change("iommu.strict=1", "boot")
    assert {**planned, "not_configured": []} == done
    planned = host.change(back=True, check=True)
    assert len(host.commands) == 1
    assert {**planned, "not_configured": []} == host.change(back=True)


def test_what_is_right_already_is_not_touched(host: Host) -> None:
    host.boots(SYSTEMD_BOOT + " iommu=pt")
    result = host.change("iommu=pt", "amd_iommu=on")
    assert (result["changed"], result["reboot_required"], host.commands) == (False, False, [])
    assert host.read(_boot_files.RECORD) is None


def test_an_edit_that_was_never_put_in_force_is(host: Host) -> None:
    """The file has the parameter, the running kernel does not, and nobody ran the tool."""
    result = host.change("iommu=pt")
    assert (result["files"], result["changed"]) == ([], True)
    assert host.booted_next().endswith("iommu=pt")
    assert host.change("iommu=pt")["changed"] is False
    assert len(host.commands) == 1


def test_without_a_wish_nothing_is_done(host: Host) -> None:
    result = host.change()
    assert (result["changed"], result["reboot_required"], host.commands) == (False, True, [])


@pytest.mark.parametrize("loader", ["host", "grub"])
def test_a_failing_tool_leaves_the_files_as_they_were(
    loader: str, request: pytest.FixtureRequest
) -> None:
    host: Host = request.getfixturevalue(loader)
    before = host.files()
    host.tool = "echo mounting >&2; echo 'E: no space left' >&2; exit 3\n"
    with pytest.raises(GpuHostError, match=r"(?s)failed: mounting.E: no space left\. Files put"):
        host.change("iommu.strict=1", "iommu")
    assert (host.files(), host.read(_boot_files.RECORD)) == (before, None)


def test_a_tool_that_skips_every_boot_partition_has_failed(host: Host) -> None:
    before = host.files()
    host.tool = "echo 'WARN: /dev/disk/by-uuid/5A5A-0C1E does not exist - skipping'\n"
    with pytest.raises(GpuHostError, match=r"wrote to no boot partition: WARN: .* - skipping"):
        host.change("a=1")
    assert host.files() == before


def test_a_tool_that_skips_one_boot_partition_is_told(host: Host) -> None:
    host.write("/etc/kernel/proxmox-boot-uuids", "5A5A-0C1E\nFFFF-FFFF\n")
    host.tool = (
        "echo 'Copying and configuring kernels on /dev/disk/by-uuid/5A5A-0C1E'\n"
        "echo 'mount of /dev/disk/by-uuid/FFFF-FFFF failed - skipping'\n"
    )
    (warning,) = host.change("a=1")["warnings"]
    assert warning.startswith("1 of 2 boot partitions were written: mount of")


def test_a_grub_configuration_without_the_parameters_is_a_failure(grub: Host) -> None:
    grub.tool = "echo done\n"
    (grub.root / "boot/grub").mkdir()
    grub.write("/boot/grub/grub.cfg", "menuentry 'x' {\n\tlinux /boot/vmlinuz root=/dev/sda2 ro\n}")
    with pytest.raises(GpuHostError, match=r"grub\.cfg without .*a=1"):
        grub.change("a=1")
    assert grub.read("/etc/default/grub.d/zz-gpuhost.cfg") is None


@pytest.mark.parametrize("back", [False, True])
def test_a_change_that_was_cut_off_is_finished(host: Host, back: bool) -> None:
    before = host.files()
    if back:
        host.change("a=1")

    def power_cut(command: str) -> str:
        raise KeyboardInterrupt(command)

    with pytest.raises(KeyboardInterrupt):
        host.change("" if back else "a=1", back=back, run=power_cut)
    result = host.change("" if back else "a=1", back=back)
    assert (result["changed"], result["files"]) == (True, [])
    assert ("a=1" in host.booted_next()) is not back
    host.change(back=True)
    assert host.files() == before


def test_of_a_file_that_somebody_edited_only_our_own_is_taken_back(host: Host) -> None:
    host.change("a=1", "iommu")
    line = host.read("/etc/kernel/cmdline") or ""
    host.write("/etc/kernel/cmdline", line.replace("a=1", "a=1 mine"))
    result = host.change(back=True)
    assert (host.read("/etc/kernel/cmdline") or "").startswith(
        "root=ZFS=rpool/ROOT/pve-1 boot=zfs mine\n"
    )
    assert ["edited by somebody else" in said for said in result["warnings"]] == [True]


def test_mode_and_links_of_a_file_stay(host: Host) -> None:
    target = host.root / "etc/kernel/real"
    (host.root / "etc/kernel/cmdline").rename(target)
    (host.root / "etc/kernel/cmdline").symlink_to("real")
    target.chmod(0o600)
    host.change("a=1")
    assert "a=1" in target.read_text()
    assert (host.root / "etc/kernel/cmdline").is_symlink()
    assert target.stat().st_mode & 0o777 == 0o600
    assert not list((host.root / "etc/kernel").glob(".*"))


def test_bytes_that_are_no_text_survive(host: Host) -> None:
    at = host.root / "etc/kernel/cmdline"
    at.write_bytes(b"root=x \xff\xfe=1\n")
    result = host.change("a=1")
    assert at.read_bytes() == b"root=x \xff\xfe=1 a=1\n"
    json.dumps(result).encode()
    host.change(back=True)
    assert at.read_bytes() == b"root=x \xff\xfe=1\n"


@pytest.mark.parametrize(
    ("cmdline", "uuids", "said"),
    [
        ("console=ttyS0", True, "boot loader of this host is not known (/proc/cmdline names no"),
        (SYSTEMD_BOOT, False, "not under proxmox-boot-tool"),
    ],
)
def test_boot_loaders_that_are_not_understood_are_refused(
    host: Host, cmdline: str, uuids: bool, said: str
) -> None:
    host.boots(cmdline)
    if not uuids:
        (host.root / "etc/kernel/proxmox-boot-uuids").unlink()
    before = host.files()
    with pytest.raises(GpuHostError) as refusal:
        host.change("a=1")
    assert said in str(refusal.value)
    assert host.files() == before


@pytest.mark.parametrize("text", ["{", '{"version": 2}', "[]", '{"version": 1, "files": 3}'])
def test_a_record_of_another_version_stops_all(host: Host, text: str) -> None:
    host.change("a=1")
    host.write(_boot_files.RECORD, text)
    with pytest.raises(GpuHostError, match=r"kernel_cmdline\.json cannot be read or is of another"):
        host.change("b=1")


@pytest.mark.parametrize(
    "wrong",
    [
        {"before": 5},
        {"after": ["x"]},
        {"added": [1]},
        {"added": "a=1"},
        {"removed": None},
    ],
)
def test_a_record_with_values_of_another_kind_stops_all(host: Host, wrong: object) -> None:
    host.change("a=1")
    record = json.loads(host.read(_boot_files.RECORD) or "")
    for entry in record["files"].values():
        entry.update(wrong)
    folder = (host.root / _boot_files.RECORD[1:]).parent
    assert folder.stat().st_mode & 0o777 == 0o700
    for content in (record, {**record, "files": {}, "refreshed": 5}):
        host.write(_boot_files.RECORD, json.dumps(content))
        before = host.files()
        with pytest.raises(GpuHostError, match=r"kernel_cmdline\.json cannot be .* move it away"):
            host.change("b=1")
        assert host.files() == before


def test_a_tool_that_is_not_there_is_named() -> None:
    with pytest.raises(GpuHostError, match=r"^/nowhere/update-grub failed: .*not found"):
        _boot_files.run_tool("/nowhere/update-grub", 10)


def test_a_tool_that_never_ends_is_stopped() -> None:
    with pytest.raises(GpuHostError, match=r"^sleep 60 failed: .*was stopped after 0\.2 s"):
        _boot_files.run_tool("sleep 60", 0.2)


def test_module_options_are_compared(tmp_path: Path) -> None:
    tree = """\
/etc/modprobe.d/a.conf = options nvidia NVreg_DmaRemapPeerMmio=1 NVreg_RegistryDwords="a=1;b=2"\\n
/etc/modprobe.d/b.conf = options nvidia NVreg_DmaRemapPeerMmio=0\\noptions snd_hda_intel model=x\\n
/etc/modprobe.d/c.conf = options vfio_iommu_type1 allow_unsafe_interrupts
/sys/module/nvidia/parameters/
/sys/module/vfio_pci/parameters/disable_vga = Y
/sys/module/vfio_iommu_type1/parameters/allow_unsafe_interrupts = Y
/proc/driver/nvidia/params = DmaRemapPeerMmio: 1\\nRegistryDwords: "a=1;b=2"
"""
    reader = Reader(str(trees.unpack(tree, tmp_path)))
    options = {
        "nvidia": {"NVreg_Gone": 1},
        "vfio-pci": {"disable_vga": True},
        "nouveau": {"modeset": 0},
    }
    found = _boot_files.compare_options(reader, options)
    assert [list(item.values()) for item in found] == [
        ["nvidia", "NVreg_DmaRemapPeerMmio", "0", "1", True],
        ["nvidia", "NVreg_RegistryDwords", "a=1;b=2", "a=1;b=2", False],
        ["vfio_iommu_type1", "allow_unsafe_interrupts", "1", "Y", False],
        ["nvidia", "NVreg_Gone", "1", None, None],
        ["vfio_pci", "disable_vga", "1", "Y", False],
        ["nouveau", "modeset", "0", None, False],
    ]
    with pytest.raises(GpuHostError, match="modprobe_options of nvidia are 'x'"):
        _boot_files.compare_options(reader, {"nvidia": "x"})  # type: ignore[dict-item]


def test_the_module_passes_all_on(
    host: Host, monkeypatch: pytest.MonkeyPatch, run_module: Callable[..., dict[str, Any]]
) -> None:
    monkeypatch.setattr(kernel_cmdline, "Reader", lambda: Reader(str(host.root)))
    monkeypatch.setattr(kernel_cmdline, "run_tool", lambda command, _seconds: host.run(command))
    wish = {"present": ["a=1", "amd_iommu=on"], "modprobe_options": {"nvidia": {"x": 1}}}
    planned = run_module(kernel_cmdline, check=True, **wish)
    assert (planned["changed"], host.commands) == (True, [])
    done = run_module(kernel_cmdline, **wish)
    assert done["modprobe"][0]["pending"] is False
    assert "amd_iommu=on: the kernel does not know this word" in str(done["warnings"])
    assert run_module(kernel_cmdline, **wish)["changed"] is False
    assert run_module(kernel_cmdline, state="absent")["changed"] is True
    assert host.read("/etc/kernel/cmdline") == LINE
    failed = run_module(kernel_cmdline, present=["amd_iommu=off"])
    assert failed["failed"]
    assert "refused" in failed["msg"]
