"""How a host was booted: parsers on text, and the reading of small trees."""

from __future__ import annotations

from pathlib import Path

import pytest
import trees
from ansible_collections.gpuhost.inference.plugins.module_utils import _boot
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader

GRUB = "/proc/cmdline = BOOT_IMAGE=/boot/vmlinuz-6.14.11-4-pve root=/dev/sda2 ro quiet iommu=pt\n"
SYSTEMD_BOOT = "/proc/cmdline = initrd=\\\\EFI\\\\proxmox\\\\initrd.img root=ZFS=rpool quiet\n"


def read(tmp_path: Path, tree: str) -> _boot.Boot:
    return _boot.read_boot(Reader(str(trees.unpack(tree, tmp_path / "host"))))


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("quiet  iommu=pt\n", ("quiet", "iommu=pt")),
        ('dyndbg="file x.c +p; file y.c +p" ro', ('dyndbg="file x.c +p; file y.c +p"', "ro")),
        ('"a b" open="never closed', ('"a b"', 'open="never closed')),
        ("", ()),
    ],
)
def test_command_line_is_split_as_the_kernel_does(text: str, tokens: tuple[str, ...]) -> None:
    assert _boot.split_command_line(text) == tokens


def test_the_last_value_of_a_parameter_counts() -> None:
    tokens = ("iommu=pt", "iommu=nopt", "quiet", "vfio-pci.ids=10de:2bb5")
    assert _boot.parameter(tokens, "iommu") == "nopt"
    assert _boot.parameter(tokens, "quiet") == ""
    assert _boot.parameter(tokens, "vfio_pci.ids") == "10de:2bb5"
    assert _boot.parameter(tokens, "mem_encrypt") is None


def test_modprobe_lines_keep_their_place() -> None:
    text = """\
# options vfio-pci ids=never
options vfio-pci ids=10de:2bb5,10de:22e8 \\
    disable_vga=1
blacklist nova-core
install nvidia /usr/local/bin/hook; modprobe --ignore-install nvidia
softdep
"""
    lines = _boot.parse_modprobe("/etc/modprobe.d/gpu.conf", text)
    assert [(line.line, line.command, line.module) for line in lines] == [
        (2, "options", "vfio_pci"),
        (4, "blacklist", "nova_core"),
        (5, "install", "nvidia"),
    ]
    assert lines[0].value == "ids=10de:2bb5,10de:22e8     disable_vga=1"
    assert lines[1].place == "/etc/modprobe.d/gpu.conf:4: blacklist nova_core"


@pytest.mark.parametrize(
    ("texts", "tokens"),
    [
        (['GRUB_CMDLINE_LINUX_DEFAULT="quiet iommu=pt"'], ("quiet", "iommu=pt")),
        (["GRUB_CMDLINE_LINUX_DEFAULT=quiet # why", "GRUB_CMDLINE_LINUX='ro'"], ("ro", "quiet")),
        (
            [
                'GRUB_CMDLINE_LINUX_DEFAULT="quiet"\nGRUB_TIMEOUT=5\n',
                'GRUB_CMDLINE_LINUX_DEFAULT="$GRUB_CMDLINE_LINUX_DEFAULT iommu=nopt"',
                'GRUB_CMDLINE_LINUX="${GRUB_CMDLINE_LINUX} console=ttyS0"',
            ],
            ("console=ttyS0", "quiet", "iommu=nopt"),
        ),
        (['GRUB_CMDLINE_LINUX="$(cat /etc/cmdline)"'], None),
        (['GRUB_CMDLINE_LINUX="`hostname`"'], None),
        (['GRUB_CMDLINE_LINUX="never closed'], None),
        (['GRUB_CMDLINE_LINUX="it\'s"'], None),
        # GRUB takes quotes away and adds its own; an open ; ends its command
        (["GRUB_CMDLINE_LINUX=\"a 'pci=x@0;y@1' b\""], ("a", "pci=x@0;y@1", "b")),
        (['GRUB_CMDLINE_LINUX="a pci=x@0;y@1 b"'], ("a", "pci=x@0")),
        (['GRUB_CMDLINE_LINUX="dyndbg=\\"file a.c +p\\" b"'], ('"dyndbg=file a.c +p"', "b")),
        (["# nothing set"], ()),
    ],
)
def test_grub_defaults(texts: list[str], tokens: tuple[str, ...] | None) -> None:
    assert _boot.parse_grub_defaults(texts) == tokens


def test_boot_loader_is_the_one_that_booted_not_the_one_whose_files_are_there(
    tmp_path: Path,
) -> None:
    both = """\
/etc/kernel/proxmox-boot-uuids = 1234-ABCD
/etc/kernel/cmdline = root=ZFS=rpool quiet iommu=nopt
/etc/default/grub = GRUB_CMDLINE_LINUX_DEFAULT="quiet"
"""
    booted = read(tmp_path / "systemd-boot", SYSTEMD_BOOT + both).boot_loader
    assert (booted.name, booted.tool) == ("systemd-boot", "proxmox-boot-tool")
    assert booted.file == "/etc/kernel/cmdline"
    assert booted.wanted == ("root=ZFS=rpool", "quiet", "iommu=nopt")
    booted = read(tmp_path / "grub", GRUB + both).boot_loader
    assert (booted.name, booted.file) == ("grub", "/etc/default/grub")
    assert booted.wanted == ("quiet",)
    booted = read(tmp_path / "none", "/proc/cmdline = console=ttyS0\n" + both).boot_loader
    assert (booted.name, booted.file, booted.wanted) == ("unknown", None, None)


def test_boot_loader_names_itself_in_an_efi_variable(tmp_path: Path) -> None:
    info = "".join(f"{char}\\x00" for char in "systemd-boot 257.8")
    tree = f"{_boot._LOADER_INFO} = \\x06\\x00\\x00\\x00{info}\n/proc/cmdline = root=ZFS=rpool\n"
    assert read(tmp_path, tree).boot_loader.name == "systemd-boot"


@pytest.mark.parametrize(
    ("wanted", "running", "required"),
    [
        ("quiet iommu=nopt", "BOOT_IMAGE=/vmlinuz root=/dev/sda ro quiet iommu=nopt", False),
        ("quiet iommu=nopt", "BOOT_IMAGE=/vmlinuz root=/dev/sda ro quiet", True),
        ("quiet", "BOOT_IMAGE=/vmlinuz ro quiet iommu=pt", True),
        ("quiet", "BOOT_IMAGE=/vmlinuz ro quiet vfio-pci.ids=10de:2bb5", True),
        ("quiet", "BOOT_IMAGE=/vmlinuz ro quiet splash", False),
        ("vfio-pci.ids=10de:2bb5", "ro vfio_pci.ids=10de:2bb5", False),
        ('x.dyndbg="a"', "ro x.dyndbg=a", False),
    ],
)
def test_reboot_is_pending_when_the_file_says_something_else(
    wanted: str, running: str, required: bool
) -> None:
    pending = _boot.compare(wanted.split(), running.split())
    assert pending.reboot_required is required


def test_unknown_wish_is_no_verdict() -> None:
    assert _boot.compare(None, ("quiet",)).reboot_required is None


@pytest.mark.parametrize(
    "tree",
    [
        "/etc/modprobe.d/a.conf = blacklist nouveau\n",
        "/usr/lib/modprobe.d/nvidia.conf = install nouveau /bin/false\n",
        "/proc/cmdline = modprobe.blacklist=foo,nouveau\n",
        "/proc/cmdline = module_blacklist=nouveau\n",
    ],
)
def test_a_driver_is_blocked(tmp_path: Path, tree: str) -> None:
    assert _boot.blocked(read(tmp_path, tree), "nouveau")


@pytest.mark.parametrize(
    "tree",
    [
        "/etc/modprobe.d/a.conf = blacklist nvidiafb\n",
        "/etc/modprobe.d/a.conf = options nouveau modeset=0\n",
        "/etc/modprobe.d/a.conf = install nouveau /usr/local/bin/hook nouveau\n",
        "/etc/modprobe.d/a.conf = \n/usr/lib/modprobe.d/a.conf = blacklist nouveau\n",
        "/etc/modprobe.d/a.dpkg-old = blacklist nouveau\n",
        "/proc/cmdline = rd.driver.blacklist=nouveau\n",
    ],
)
def test_a_driver_is_not_blocked(tmp_path: Path, tree: str) -> None:
    assert _boot.blocked(read(tmp_path, tree), "nouveau") is None


def test_rival_drivers_are_those_the_kernel_has_or_may_have(tmp_path: Path) -> None:
    release = "/proc/sys/kernel/osrelease = 6.14.11-4-pve\n"
    gpu = "/lib/modules/6.14.11-4-pve/kernel/drivers/gpu"
    assert read(tmp_path / "a", release).rivals == ("nouveau", "nova_core")
    tree = f"{release}{gpu}/drm/nouveau/nouveau.ko.zst = \n{gpu}/nova-core/ = \n"
    assert read(tmp_path / "b", tree.replace("/ = ", "/")).rivals == ("nouveau",)
    tree = f"{release}{gpu}/nova-core/nova_core.ko = \n"
    assert read(tmp_path / "c", tree).rivals == ("nova_core",)


@pytest.mark.parametrize(
    ("tree", "snp"),
    [
        ("/sys/module/kvm_amd/parameters/sev_snp = Y\n", True),
        ("/sys/module/kvm_amd/parameters/sev_snp = N\n", False),
        ("/sys/class/iommu/dmar0/ = \n", False),
        ("/proc/cpuinfo = flags\\t\\t: fpu sme sev\n", False),
        ("/proc/cpuinfo = flags\\t\\t: fpu sme sev sev_snp\n", None),
        ("/proc/version = Linux\n", None),
    ],
)
def test_snp(tmp_path: Path, tree: str, snp: bool | None) -> None:
    assert read(tmp_path, tree.replace("/ = ", "/")).snp is snp


SME = "kernel: Memory Encryption Features active: AMD SME"


@pytest.mark.parametrize(
    ("tree", "log", "complete", "sme"),
    [
        ("/proc/cpuinfo = flags : fpu sme\n", [SME], False, True),
        ("/proc/cpuinfo = flags : fpu sme\n", ["x"], True, False),
        ("/proc/cpuinfo = flags : fpu sme\n", ["x"], False, None),
        ("/proc/cpuinfo = flags : fpu\n", ["x"], False, False),
        ("/proc/cmdline = mem_encrypt=off\n", [], False, False),
        ("/proc/cmdline = mem_encrypt=on\n", [], False, None),
    ],
)
def test_sme(tmp_path: Path, tree: str, log: list[str], complete: bool, sme: bool | None) -> None:
    assert _boot.sme_active(read(tmp_path, tree), log, complete) is sme


def test_reads_the_rest(tmp_path: Path) -> None:
    boot = read(
        tmp_path,
        """\
/etc/pve/
/usr/share/perl5/PVE/pvecfg.pm = package PVE::pvecfg;\\nsub version {\\n    return '8.4.1';\\n}
/etc/modules = # early\\nvfio\\nvfio_virqfd\\n
/etc/modules-load.d/x.conf = vfio-pci\\n
/sys/module/nvidia/
/sys/module/snd_hda_intel/
/sys/class/iommu/ivhd0/
""",
    )
    assert boot.proxmox_installed
    assert boot.proxmox_version == "8.4.1"
    assert boot.modules == ("nvidia",)
    assert boot.iommu_vendor == "amd"
    assert boot.etc_modules == (
        ("/etc/modules", "vfio"),
        ("/etc/modules", "vfio_virqfd"),
        ("/etc/modules-load.d/x.conf", "vfio_pci"),
    )
    assert boot.unread == ()


def test_what_could_not_be_read_is_named(tmp_path: Path) -> None:
    boot = read(tmp_path, "/proc/cmdline/\n/etc/modprobe.d/a.conf/\n")
    assert boot.cmdline == ()
    assert [line.split()[0] for line in boot.unread] == ["/proc/cmdline", "/etc/modprobe.d/a.conf"]


TOOL = "/etc/kernel/proxmox-boot-uuids = 1234-ABCD\n"
THREE = """\
/proc/sys/kernel/osrelease = 6.14.11-4-pve
/boot/vmlinuz-6.14.11-4-pve =
/boot/initrd.img-6.14.11-4-pve =
/boot/vmlinuz-6.14.11-10-pve =
/boot/initrd.img-6.14.11-10-pve =
/boot/vmlinuz-6.17.2-1-pve =
"""


def efi(variable: str, text: str) -> str:
    wide = "".join(f"{char}\\x00" for char in text)
    return f"{_boot._EFI_VARIABLE.format(variable)} = \\x07\\x00\\x00\\x00{wide}\n"


def next_kernel(boot: _boot.Boot) -> str | None:
    known = [kernel.next for kernel in boot.kernels]
    assert None not in known or set(known) == {None}
    chosen = [kernel.release for kernel in boot.kernels if kernel.next]
    assert len(chosen) <= 1
    return chosen[0] if chosen else None


@pytest.mark.parametrize(
    ("tree", "release"),
    [
        (GRUB, "6.17.2-1-pve"),  # newest by version, not by letters; GRUB needs no initrd
        (SYSTEMD_BOOT + TOOL, "6.14.11-10-pve"),  # the tool copies none without an initrd
        (GRUB + TOOL, "6.14.11-10-pve"),
        (SYSTEMD_BOOT, None),  # loader entries somebody else keeps
        ("/proc/cmdline = quiet\n" + TOOL, None),
        (SYSTEMD_BOOT + TOOL + "/etc/kernel/proxmox-boot-pin = 6.14.11-4-pve\n", "6.14.11-4-pve"),
        (
            GRUB + TOOL + "/etc/kernel/proxmox-boot-pin = 6.14.11-4-pve\n"
            "/etc/kernel/next-boot-pin = 6.17.2-1-pve\\n\n",
            "6.17.2-1-pve",
        ),
        (SYSTEMD_BOOT + TOOL + "/etc/kernel/proxmox-boot-pin = 6.8.4-2-pve\n", "6.8.4-2-pve"),
        (
            SYSTEMD_BOOT + TOOL + efi("LoaderEntryOneShot", "proxmox-6.14.11-4-pve.conf"),
            "6.14.11-4-pve",
        ),
        (SYSTEMD_BOOT + TOOL + efi("LoaderEntryDefault", "auto-windows"), None),
        (GRUB + "/etc/default/grub = GRUB_DEFAULT=0\n", "6.17.2-1-pve"),
        (GRUB + '/etc/default/grub = GRUB_DEFAULT="saved"\n', None),
        (GRUB + "/etc/default/grub = GRUB_DEFAULT=2\n", None),
        (
            GRUB + "/etc/default/grub = GRUB_DEFAULT=0\n/etc/default/grub.d/proxmox-kernel-pin.cfg"
            ' = GRUB_DEFAULT="gnulinux-advanced-5a>gnulinux-6.14.11-4-pve-advanced-5a"\n',
            "6.14.11-4-pve",
        ),
        (GRUB + "/boot/grub/grubenv = # GRUB Environment Block\\nnext_entry=2\\n###\n", None),
        (GRUB + "/boot/grub/grubenv = next_entry=\\nsaved_entry=1\\n\n", "6.17.2-1-pve"),
    ],
)
def test_the_kernel_of_the_next_boot(tmp_path: Path, tree: str, release: str | None) -> None:
    assert next_kernel(read(tmp_path, THREE + tree)) == release


def test_kernels_are_listed_newest_first_with_what_they_have(tmp_path: Path) -> None:
    modules = "/lib/modules/6.14.11-4-pve"
    boot = read(
        tmp_path,
        THREE
        + GRUB
        + f"""\
{modules}/modules.dep = kernel/x/nvidia-drm.ko.zst: updates/dkms/nvidia.ko\\nupdates/dkms/nvidia.ko:
{modules}/modules.builtin = kernel/drivers/vfio/pci/vfio-pci.ko\\nkernel/drivers/iommu/iommufd.ko
/lib/modules/6.17.2-1-pve/modules.dep = kernel/gpu/nvidia-drm.ko.xz: kernel/gpu/nvidia.ko.xz
/lib/modules/5.15.0-gone/modules.dep = left over
""",
    )
    assert [(k.release, k.image, k.initrd, k.nvidia, k.vfio) for k in boot.kernels] == [
        ("6.17.2-1-pve", True, False, False, False),
        ("6.14.11-10-pve", True, True, None, None),
        ("6.14.11-4-pve", True, True, True, True),
    ]
    assert boot.builtin == ("iommufd", "vfio_pci")


def test_a_running_or_pinned_kernel_that_is_not_installed_is_listed(tmp_path: Path) -> None:
    boot = read(
        tmp_path,
        "/proc/sys/kernel/osrelease = 6.8.4-2-pve\n"
        "/etc/kernel/proxmox-boot-pin = 6.5.1-1-pve\n" + SYSTEMD_BOOT + TOOL,
    )
    assert [(k.release, k.image, k.next) for k in boot.kernels] == [
        ("6.8.4-2-pve", False, False),
        ("6.5.1-1-pve", False, True),
    ]


READY = (
    THREE
    + SYSTEMD_BOOT
    + TOOL
    + """\
/etc/kernel/cmdline = root=ZFS=rpool quiet
/lib/modules/6.14.11-10-pve/modules.dep = updates/dkms/nvidia.ko.zst:\\nkernel/vfio-pci.ko:
"""
)


def test_next_boot_is_ready(tmp_path: Path) -> None:
    found = _boot.next_boot(read(tmp_path, READY), ["nvidia", "vfio-pci", "none"])
    assert found == _boot.NextBoot(True, (), "6.14.11-10-pve")


@pytest.mark.parametrize(
    ("line", "replacement", "drivers", "problem"),
    [
        ("/etc/kernel/cmdline = root=ZFS=rpool quiet\n", "", [], "/etc/kernel/cmdline cannot be"),
        (SYSTEMD_BOOT, "/proc/cmdline = quiet\n", [], "which kernel unknown starts"),
        ("updates/dkms/nvidia.ko.zst:", "", ["nvidia"], "has no module nvidia"),
        ("kernel/vfio-pci.ko:", "", ["vfio-pci"], "has no module vfio-pci"),
        ("modules.dep", "modules.gone", ["nvidia"], "no /lib/modules/6.14.11-10-pve/modules.dep"),
        ("/boot/vmlinuz-6.17.2", TOOL.replace("uuids = 1234-ABCD\n", "pin = 6.99\n") + "/boot/x",
         [], "/boot/vmlinuz-6.99 of the next kernel does not exist"),
        ("6.14.11-10-pve/modules.dep", "/etc/kernel/next-boot-pin = 6.17.2-1-pve\n/x", [],
         "/boot/initrd.img-6.17.2-1-pve of the next kernel does not exist"),
    ],
)  # fmt: skip
def test_next_boot_is_not_ready(
    tmp_path: Path, line: str, replacement: str, drivers: list[str], problem: str
) -> None:
    tree = READY
    if replacement.startswith("/etc/kernel/"):
        tree += replacement.partition("\n")[0] + "\n"
    else:
        assert line in tree
        tree = tree.replace(line, replacement)
    found = _boot.next_boot(read(tmp_path, tree), drivers)
    assert not found.ready
    assert any(problem in said for said in found.problems), found.problems


def test_a_missing_driver_matters_only_when_the_layout_has_it(tmp_path: Path) -> None:
    boot = read(tmp_path, READY.replace("updates/dkms/nvidia.ko.zst:", ""))
    assert _boot.next_boot(boot, ["vfio-pci", "none"]).ready


@pytest.mark.parametrize(
    ("module", "option", "value"),
    [
        ("nvidia", "NVreg_DmaRemapPeerMmio", "1"),
        ("nvidia", "NVreg_RegistryDwords", "a=1;b=2"),
        ("nvidia", "NVreg_Unknown", None),
        ("nvidia-drm", "modeset", "Y"),
        ("vfio_pci", "ids", None),
    ],
)
def test_value_in_force_of_a_module_option(
    tmp_path: Path, module: str, option: str, value: str | None
) -> None:
    tree = """\
/proc/driver/nvidia/params = DmaRemapPeerMmio: 1\\nRegistryDwords: "a=1;b=2"\\n
/sys/module/nvidia_drm/parameters/modeset = Y
"""
    host = Reader(str(trees.unpack(tree, tmp_path)))
    assert _boot.effective(host, module, option) == value


@pytest.mark.parametrize(
    ("wanted", "found", "same"),
    [
        ("1", "Y", True), ("0", "n", True), ("0x10", "16", True), ('"a=1"', "a=1", True),
        ("1", "N", False), ("010", "8", False), ("a", "b", False), ("-1", "-1", True),
    ],
)  # fmt: skip
def test_values_of_module_options_are_compared_by_meaning(
    wanted: str, found: str, same: bool
) -> None:
    assert _boot.same_value(wanted, found) is same
