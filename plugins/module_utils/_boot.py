# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.

"""How a host was booted and how it will boot next: command line, boot loader, modules, options.

Sources: `/proc/cmdline` and the kernel's Documentation/admin-guide/kernel-parameters; modprobe.d(5)
and libkmod for module options; `zz-proxmox-boot` of proxmox-kernel-helper for what Proxmox boots;
GRUB's manual and `10_linux`, and systemd's Boot Loader Interface, for which entry is the next one.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ansible_collections.gpuhost.inference.plugins.module_utils._errors import UnreadableError
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader

# libkmod reads these in this order; of two files with one name only the first counts
_MODPROBE_FOLDERS = (
    "/etc/modprobe.d",
    "/run/modprobe.d",
    "/usr/local/lib/modprobe.d",
    "/usr/lib/modprobe.d",
    "/lib/modprobe.d",
)
_EFI_VARIABLE = "/sys/firmware/efi/efivars/{}-4a67b082-0a4c-41cf-b6c7-440b29bb8c4f"
# written once by the boot loader itself: systemd-boot always, GRUB from 2.12 on
_LOADER_INFO = _EFI_VARIABLE.format("LoaderInfo")
# The first that names a kernel counts. The tool puts it in force at its next `refresh`.
_PINS = ("/etc/kernel/next-boot-pin", "/etc/kernel/proxmox-boot-pin")
_GRUB_ENDS = ";|&<>"
# modules this collection has an opinion about; `/sys/module` also lists built-in ones
WATCHED_MODULES = (
    "iommufd",
    "kvm_amd",
    "kvm_intel",
    "nouveau",
    "nova_core",
    "nova_drm",
    "nvidia",
    "nvidia_drm",
    "nvidia_modeset",
    "nvidia_peermem",
    "nvidia_uvm",
    "vfio",
    "vfio_iommu_type1",
    "vfio_pci",
)
# In-tree drivers that take NVIDIA GPUs by themselves, with the folder of their file below
# /lib/modules/RELEASE/kernel/drivers/gpu
RIVAL_DRIVERS = {"nouveau": "drm/nouveau", "nova_core": "nova-core"}
# Parameters whose absence from the wanted line matters while they still run. Any other one may
# come from the boot loader itself (root=, BOOT_IMAGE=) or from scripts of the distribution.
_JUDGED = re.compile(
    r"(?:(?:amd_|intel_)?iommu|mem_encrypt|module_blacklist|pci|pcie_\w+)(?:=|$)"
    r"|(?:iommu|kvm|kvm_amd|kvm_intel|modprobe|nouveau|nvidia[\w-]*|vfio[\w-]*)[.]"
)


@dataclass(frozen=True)
class ModprobeLine:
    """One directive of a modprobe.d file, module names with `_` as the kernel spells them."""

    file: str
    line: int
    command: str
    module: str
    value: str

    @property
    def place(self) -> str:
        """Where it stands, as `file:line: directive`."""
        words = (self.command, self.module, self.value)
        return f"{self.file}:{self.line}: {' '.join(word for word in words if word)}"


@dataclass(frozen=True)
class BootLoader:
    """The boot loader that started the running kernel and the file its parameters come from.

    `name` is `grub`, `systemd-boot` or `unknown`; `tool` is `proxmox-boot-tool` when that keeps
    the boot partitions in step; `wanted` holds the parameters of `file`, `None` when unknown.
    """

    name: str
    tool: str | None
    file: str | None
    wanted: tuple[str, ...] | None
    evidence: str


@dataclass(frozen=True)
class Pending:
    """Difference of the wanted and the running command line, `None` where it cannot be told."""

    reboot_required: bool | None
    missing: tuple[str, ...]
    extra: tuple[str, ...]


@dataclass(frozen=True)
class Kernel:
    """An installed kernel, the running one, or one that the boot loader is told to start.

    `nvidia` and `vfio` tell whether this kernel has the drivers `nvidia` and `vfio-pci`, as modules
    or built in, `None` without its list of modules. `next` is `None` when it cannot be told which
    kernel the boot loader will start.
    """

    release: str
    image: bool  # /boot/vmlinuz-RELEASE exists
    initrd: bool  # /boot/initrd.img-RELEASE exists
    nvidia: bool | None
    vfio: bool | None
    next: bool | None


@dataclass(frozen=True)
class NextBoot:
    """Whether a reboot would end in a kernel that can do what the layout asks for.

    `kernel` is the release that will start, `None` when that cannot be told; `problems` are
    sentences, none when all that can be checked beforehand is right.
    """

    ready: bool
    problems: tuple[str, ...]
    kernel: str | None


@dataclass(frozen=True)
class Boot:
    """Everything about a host that was decided at boot; `unread` holds what could not be read."""

    kernel: str | None
    proxmox_installed: bool
    proxmox_version: str | None
    cmdline: tuple[str, ...]
    boot_loader: BootLoader
    pending: Pending
    modules: tuple[str, ...]
    kernels: tuple[Kernel, ...]  # newest first
    builtin: tuple[str, ...]  # watched modules that are part of the running kernel's image
    modprobe: tuple[ModprobeLine, ...]
    etc_modules: tuple[tuple[str, str], ...]
    rivals: tuple[str, ...]
    iommu_vendor: str | None
    snp: bool | None
    sme_capable: bool | None
    unread: tuple[str, ...]


def split_command_line(text: str) -> tuple[str, ...]:
    """Split a kernel command line into parameters; double quotes protect spaces (lib/cmdline.c)."""
    return tuple(re.findall(r'(?:[^\s"]|"[^"]*"?)+', text))


def split_grub_words(text: str) -> tuple[str, ...]:
    """Split what GRUB's configuration says after `linux FILE` into parameters.

    GRUB takes quotes and backslashes away, and puts quotes around a parameter with spaces. A `;`,
    `|`, `&`, `<` or `>` without quotes ends the command (GRUB manual, "Quoting"): what comes after
    it never reaches the kernel.

    Raises:
        ValueError: a quote is never closed.
    """
    lexer = shlex.shlex(text, posix=True, punctuation_chars=_GRUB_ENDS)
    lexer.whitespace_split = True
    lexer.commenters = ""
    words = []
    for word in lexer:
        if word[:1] in _GRUB_ENDS:
            break
        words.append(f'"{word}"' if re.search(r"\s", word) else word)
    return tuple(words)


def plain(token: str) -> str:
    """Return a parameter so that equal ones are equal text: no quotes, and `_` in its name."""
    name, equals, value = token.replace('"', "").partition("=")
    return f"{name.replace('-', '_')}{equals}{value}"


def parameter(tokens: Sequence[str], name: str) -> str | None:
    """Return the last value of a parameter (`""` for a bare word), `None` when it is absent.

    `-` and `_` are the same in names (kernel/params.c), and the last one wins.
    """
    wanted = name.replace("-", "_")
    for token in reversed(tokens):
        key, _equals, value = token.partition("=")
        if key.replace("-", "_") == wanted:
            return value.strip('"')
    return None


def parse_modprobe(file: str, text: str) -> list[ModprobeLine]:
    """Parse one modprobe.d file, with comments and continued lines; keep unknown directives."""
    lines = []
    number, pending = 0, ""
    for at, raw in enumerate(text.splitlines(), 1):
        number = number or at
        pending += raw
        if pending.endswith("\\"):
            pending = pending[:-1]
            continue
        words = pending.split(None, 2)
        if len(words) > 1 and not words[0].startswith("#"):
            value = words[2].strip() if len(words) > 2 else ""
            module = words[1].replace("-", "_")
            lines.append(ModprobeLine(file, number, words[0], module, value))
        number, pending = 0, ""
    return lines


def parse_grub_defaults(texts: Iterable[str]) -> tuple[str, ...] | None:
    """Return the kernel parameters set by `/etc/default/grub` and its drop-ins, in their order.

    These are shell fragments; plain assignments and references to the two variables themselves
    are understood. `None` when a value needs a shell to be known.
    """
    values = {"GRUB_CMDLINE_LINUX": "", "GRUB_CMDLINE_LINUX_DEFAULT": ""}
    for text in texts:
        for line in text.splitlines():
            match = re.match(r"\s*(?:export\s+)?(GRUB_CMDLINE_LINUX(?:_DEFAULT)?)=(.*)", line)
            if not match:
                continue
            value = re.sub(
                r"\$(?:\{(GRUB_CMDLINE_LINUX(?:_DEFAULT)?)\}|(GRUB_CMDLINE_LINUX(?:_DEFAULT)?\b))",
                lambda found: values[found[1] or found[2]].replace('"', '\\"'),
                match[2],
            )
            try:
                words = shlex.split(value, comments=True)
            except ValueError:
                return None
            if re.search(r"[$`]", value) or len(words) > 1:
                return None
            values[match[1]] = words[0] if words else ""
    both = " ".join((values["GRUB_CMDLINE_LINUX"], values["GRUB_CMDLINE_LINUX_DEFAULT"]))
    try:
        return split_grub_words(both)
    except ValueError:
        return None


def compare(wanted: Sequence[str] | None, running: Sequence[str]) -> Pending:
    """Compare the parameters of the boot loader's file with those of the running kernel."""
    if wanted is None:
        return Pending(None, (), ())
    here, there = set(map(plain, running)), set(map(plain, wanted))
    missing = tuple(token for token in wanted if plain(token) not in here)
    extra = tuple(
        token for token in running if plain(token) not in there and _JUDGED.match(plain(token))
    )
    return Pending(bool(missing or extra), missing, extra)


def blocked(boot: Boot, driver: str) -> str | None:
    """Return the place that keeps a driver from loading by itself, `None` when nothing does.

    A `blacklist` line, an `install` line that runs nothing, `modprobe.blacklist=` (libkmod) and
    `module_blacklist=` (kernel/module/main.c) count.
    """
    for line in boot.modprobe:
        nothing = line.command == "install" and re.match(r"(/usr)?/bin/(false|true)\b", line.value)
        if line.module == driver and (line.command == "blacklist" or nothing):
            return line.place
    for token in boot.cmdline:
        key, _equals, value = token.partition("=")
        names = value.replace("-", "_").split(",")
        if key in ("modprobe.blacklist", "module_blacklist") and driver in names:
            return f"/proc/cmdline: {token}"
    return None


def next_boot(boot: Boot, drivers: Iterable[str]) -> NextBoot:
    """Judge the next boot by the drivers of a layout (`nvidia`, `vfio-pci`); unknown is a problem.

    A parameter that waits for the reboot is none: it is what one reboots for.
    """
    loader = boot.boot_loader
    problems = []
    if loader.wanted is None:
        file = f"{loader.file} cannot be understood" if loader.file else loader.evidence
        problems.append(f"the parameters of the next boot are not known: {file}")
    chosen = [kernel for kernel in boot.kernels if kernel.next]
    if not chosen:
        problems.append(
            f"which kernel {loader.name} starts next cannot be told: pin one with "
            "'proxmox-boot-tool kernel pin RELEASE'"
        )
        return NextBoot(False, tuple(problems), None)
    kernel = chosen[0]
    for exists, file in ((kernel.image, "vmlinuz"), (kernel.initrd, "initrd.img")):
        if not exists:
            problems.append(f"/boot/{file}-{kernel.release} of the next kernel does not exist")
    wanted = set(drivers)
    for driver, there in (("nvidia", kernel.nvidia), ("vfio-pci", kernel.vfio)):
        if driver in wanted and there is None:
            problems.append(
                f"whether the next kernel has {driver} cannot be told: no "
                f"/lib/modules/{kernel.release}/modules.dep; run 'depmod {kernel.release}'"
            )
        elif driver in wanted and not there:
            problems.append(
                f"the next kernel, {kernel.release}, has no module {driver}: install it for that "
                "kernel ('dkms autoinstall -k RELEASE' with DKMS) or pin another kernel"
            )
    return NextBoot(not problems, tuple(problems), kernel.release)


def effective(host: Reader, module: str, option: str) -> str | None:
    """Return the value a loaded module uses for an option, `None` when it does not tell.

    Options of nvidia, `NVreg_…`, are not in sysfs: kernel-open/nvidia/nv-procfs.c shows them in
    `/proc/driver/nvidia/params` without that prefix.

    Raises:
        UnreadableError: the value is there but could not be read.
    """
    name = module.replace("-", "_")
    if name == "nvidia" and option.startswith("NVreg_"):
        for line in (host.text("/proc/driver/nvidia/params") or "").splitlines():
            key, _colon, value = line.partition(":")
            if key.strip() == option[6:]:
                return value.strip().strip('"')
        return None
    return host.text(f"/sys/module/{name}/parameters/{option}")


def same_value(wanted: str, found: str) -> bool:
    """Tell whether two values of a module option mean the same: Y is 1, 0x10 is 16."""
    return _value(wanted) == _value(found)


def read_boot(host: Reader) -> Boot:
    """Read how a host was booted and how it will boot next. Never raises for an unreadable file."""
    reading = _Reading(host)
    kernel = reading.text("/proc/sys/kernel/osrelease")
    cmdline = split_command_line(reading.text("/proc/cmdline") or "")
    boot_loader = _boot_loader(reading, cmdline)
    vendor = _iommu_vendor(reading)
    flags = frozenset[str]() if vendor == "intel" else _cpu_flags(reading)
    return Boot(
        kernel=kernel,
        proxmox_installed=host.exists("/etc/pve"),
        proxmox_version=_proxmox_version(reading),
        cmdline=cmdline,
        boot_loader=boot_loader,
        pending=compare(boot_loader.wanted, cmdline),
        modules=tuple(name for name in WATCHED_MODULES if host.exists(f"/sys/module/{name}")),
        kernels=_kernels(reading, kernel, boot_loader),
        builtin=_builtin(reading, kernel),
        modprobe=_modprobe(reading),
        etc_modules=_etc_modules(reading),
        rivals=_rivals(reading, kernel),
        iommu_vendor=vendor,
        snp=_snp(reading, flags),
        sme_capable=None if flags is None else "sme" in flags,
        unread=tuple(reading.unread),
    )


def _value(text: str) -> str:
    word = text.strip().strip('"')
    if word in ("Y", "y", "N", "n"):
        return "1" if word in "Yy" else "0"
    return str(int(word, 0)) if re.fullmatch(r"-?(0x[0-9A-Fa-f]+|0|[1-9][0-9]*)", word) else word


class _Reading:
    """A reader that notes what it could not read instead of raising, for parts that stand alone."""

    def __init__(self, host: Reader) -> None:
        self._host = host
        self.unread: list[str] = []

    def text(self, path: str) -> str | None:
        try:
            return self._host.text(path)
        except UnreadableError as error:
            self.unread.append(str(error))
            return None

    def names(self, path: str) -> list[str]:
        try:
            return self._host.names(path)
        except UnreadableError as error:
            self.unread.append(str(error))
            return []

    def exists(self, path: str) -> bool:
        return self._host.exists(path)


def _boot_loader(host: _Reading, cmdline: Sequence[str]) -> BootLoader:
    """Decide by what booted, not by which files lie around.

    GRUB passes `BOOT_IMAGE=`; systemd-boot passes an EFI path as `initrd=` or names itself in an
    EFI variable. Without any of them the kernel was started another way (PXE, a virtual machine).
    """
    info = (host.text(_LOADER_INFO) or "").replace("\0", "")
    if any(token.startswith("BOOT_IMAGE=") for token in cmdline):
        name, evidence = "grub", "/proc/cmdline has BOOT_IMAGE="
    elif "systemd-boot" in info:
        name, evidence = "systemd-boot", "EFI variable LoaderInfo says systemd-boot"
    elif any(token.startswith("initrd=\\") for token in cmdline):
        name, evidence = "systemd-boot", "/proc/cmdline has initrd= with an EFI path"
    else:
        return BootLoader("unknown", _tool(host), None, None, "/proc/cmdline names no boot loader")
    file, wanted = _wanted(host, name)
    return BootLoader(name, _tool(host), file, wanted, evidence)


def _tool(host: _Reading) -> str | None:
    return "proxmox-boot-tool" if host.exists("/etc/kernel/proxmox-boot-uuids") else None


def _wanted(host: _Reading, name: str) -> tuple[str | None, tuple[str, ...] | None]:
    """Return the file with the parameters of the next boot and what it says."""
    if name == "systemd-boot":
        text = host.text("/etc/kernel/cmdline")
        if not text:
            return "/etc/kernel/cmdline", None
        return "/etc/kernel/cmdline", split_command_line(text.splitlines()[0])
    texts = _grub_texts(host)
    return "/etc/default/grub", parse_grub_defaults(texts) if texts else None


def _grub_texts(host: _Reading) -> list[str]:
    """Return `/etc/default/grub` and its drop-ins, in the order of grub-mkconfig."""
    names = [name for name in host.names("/etc/default/grub.d") if name.endswith(".cfg")]
    files = ["/etc/default/grub", *(f"/etc/default/grub.d/{name}" for name in names)]
    return [text for text in map(host.text, files) if text is not None]


def _kernels(host: _Reading, running: str | None, loader: BootLoader) -> tuple[Kernel, ...]:
    files = set(host.names("/boot"))
    installed = [name[8:] for name in files if name.startswith("vmlinuz-")]
    following = _next_kernel(host, loader, sorted(installed, key=_version, reverse=True), files)
    releases = {*installed, *filter(None, (running, following))}
    return tuple(
        Kernel(
            release,
            f"vmlinuz-{release}" in files,
            f"initrd.img-{release}" in files,
            *_drivers(host, release),
            None if following is None else release == following,
        )
        for release in sorted(releases, key=_version, reverse=True)
    )


def _version(release: str) -> list[tuple[int, str]]:
    """Order releases as `sort -V` does, whose order GRUB and proxmox-boot-tool follow."""
    return [
        (int(part), "") if part.isdigit() else (-1, part)
        for part in re.findall(r"[0-9]+|[^0-9]+", release)
    ]


def _next_kernel(
    host: _Reading, loader: BootLoader, newest: Sequence[str], files: set[str]
) -> str | None:
    """Return the release the boot loader will start, `None` when that cannot be told."""
    entry = _chosen_entry(host, loader.name)
    if entry:
        match = re.fullmatch(r"proxmox-(.+)\.conf", entry)
        return match[1] if match else None
    if loader.tool and loader.name != "unknown":
        pinned = [text.splitlines()[0].strip() for text in map(host.text, _PINS) if text]
        # it copies only kernels with an initial RAM disk, and the loader starts the newest of them
        return (*pinned, *(name for name in newest if f"initrd.img-{name}" in files), None)[0]
    return _grub_default(_grub_texts(host), newest) if loader.name == "grub" else None


def _chosen_entry(host: _Reading, loader: str) -> str | None:
    """Return the entry chosen by `bootctl`, in the loader's menu, or by `grub-reboot`.

    It goes before the configuration.
    """
    if loader == "grub":
        block = re.search(
            r"^next_entry=(\S.*)", host.text("/boot/grub/grubenv") or "", re.MULTILINE
        )
        return block[1] if block else None
    for variable in ("LoaderEntryOneShot", "LoaderEntryDefault") if loader != "unknown" else ():
        entry = (host.text(_EFI_VARIABLE.format(variable)) or "")[4:].replace("\0", "").strip()
        if entry:
            return entry
    return None


def _grub_default(texts: Iterable[str], newest: Sequence[str]) -> str | None:
    """Return the release that GRUB_DEFAULT stands for: entry 0, or a kernel pinned by Proxmox."""
    default = "0"
    for text in texts:
        for line in text.splitlines():
            match = re.match(r"""\s*GRUB_DEFAULT=["']?([^"'#]*)""", line)
            default = match[1].strip() if match else default
    if default == "0":
        return newest[0] if newest else None
    pinned = re.fullmatch(r"gnulinux-advanced-.+>gnulinux-(.+)-advanced-.+", default)
    return pinned[1] if pinned else None


def _drivers(host: _Reading, release: str) -> tuple[bool | None, bool | None]:
    """Tell whether a kernel has nvidia and vfio-pci, by depmod's list and that of built-ins."""
    listed = host.text(f"/lib/modules/{release}/modules.dep")
    builtin = host.text(f"/lib/modules/{release}/modules.builtin") or ""
    names = _module_names(f"{listed or ''}\n{builtin}")
    absent = None if listed is None else False
    return "nvidia" in names or absent, "vfio_pci" in names or absent


def _builtin(host: _Reading, release: str | None) -> tuple[str, ...]:
    names = _module_names(host.text(f"/lib/modules/{release}/modules.builtin") or "")
    return tuple(name for name in WATCHED_MODULES if name in names)


def _module_names(text: str) -> frozenset[str]:
    """Return the modules of modules.dep or modules.builtin: a file a line, maybe with a colon."""
    files = re.findall(r"^(?:[^\s:]*/)?([^\s:/]+)\.ko(?:\.\w+)?(?=:|$)", text, re.MULTILINE)
    return frozenset(name.replace("-", "_") for name in files)


def _modprobe(host: _Reading) -> tuple[ModprobeLine, ...]:
    found: dict[str, list[ModprobeLine]] = {}
    for folder in _MODPROBE_FOLDERS:
        for name in host.names(folder):
            if name.endswith(".conf") and name not in found:
                found[name] = parse_modprobe(
                    f"{folder}/{name}", host.text(f"{folder}/{name}") or ""
                )
    return tuple(line for name in sorted(found) for line in found[name])


def _etc_modules(host: _Reading) -> tuple[tuple[str, str], ...]:
    """Return (file, module) for every module that is to be loaded early by name."""
    folder = "/etc/modules-load.d"
    files = [f"{folder}/{name}" for name in host.names(folder) if name.endswith(".conf")]
    return tuple(
        (file, line.split()[0].replace("-", "_"))
        for file in ["/etc/modules", *files]
        for line in (host.text(file) or "").splitlines()
        if line.strip() and line.strip()[0] not in "#;"
    )


def _rivals(host: _Reading, kernel: str | None) -> tuple[str, ...]:
    """Return the rival drivers this kernel has, or may have when its modules cannot be seen."""
    if not kernel or not host.exists(f"/lib/modules/{kernel}/kernel"):
        return tuple(RIVAL_DRIVERS)
    gpu = f"/lib/modules/{kernel}/kernel/drivers/gpu"
    return tuple(
        driver
        for driver, folder in RIVAL_DRIVERS.items()
        if any(
            name.split(".ko")[0].replace("-", "_") == driver
            for name in host.names(f"{gpu}/{folder}")
        )
    )


def _iommu_vendor(host: _Reading) -> str | None:
    """Return `amd` or `intel` by the names of the IOMMU units (`ivhd0`, `dmar0`)."""
    for name in host.names("/sys/class/iommu"):
        for prefix, vendor in (("ivhd", "amd"), ("dmar", "intel")):
            if name.startswith(prefix):
                return vendor
    return None


def _cpu_flags(host: _Reading) -> frozenset[str] | None:
    match = re.search(r"^flags\s*:(.*)$", host.text("/proc/cpuinfo") or "", re.MULTILINE)
    return frozenset(match[1].split()) if match else None


def _snp(host: _Reading, flags: frozenset[str] | None) -> bool | None:
    """Tell whether the host runs SEV-SNP guests: arch/x86/kvm/svm/sev.c exports what KVM found.

    Without kvm_amd the processor's flags can only rule it out.
    """
    said = host.text("/sys/module/kvm_amd/parameters/sev_snp")
    if said is not None:
        return said in ("Y", "1")
    return None if flags is None or "sev_snp" in flags else False


def _proxmox_version(host: _Reading) -> str | None:
    """Return the version of pve-manager, as `pveversion` reads it from its own Perl module."""
    text = host.text("/usr/share/perl5/PVE/pvecfg.pm") or ""
    match = re.search(r"sub version\s*\{\s*return '([^']+)'", text)
    return match[1] if match else None


def sme_active(boot: Boot, log: Iterable[str], complete: bool) -> bool | None:
    """Tell whether AMD memory encryption (SME) is active, from this boot's kernel log.

    arch/x86/mm/mem_encrypt.c logs `Memory Encryption Features active: AMD SME`. Without that line
    and without a complete log only the command line and the processor's flags can rule it out.
    """
    if boot.sme_capable is False or parameter(boot.cmdline, "mem_encrypt") == "off":
        return False
    if any(re.search(r"Memory Encryption Features active:.*\bSME\b", line) for line in log):
        return True
    return False if complete else None
