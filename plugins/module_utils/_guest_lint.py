# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.

"""What is wrong in guests' configurations as far as GPUs are concerned: pure checks, one a kind.

Each check yields a remark for each subject it has evidence against. Its docstring tells why that
is wrong, what to do, and who says so.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ansible_collections.gpuhost.inference.plugins.module_utils._gpu import Gpu
from ansible_collections.gpuhost.inference.plugins.module_utils._guests import (
    MAX_HOSTPCI,
    MapLine,
    Surroundings,
    functions_of,
    leftovers,
    lines_of,
    numbered,
    parse_options,
    settings_of,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._owners import MAPPINGS, Guest
from ansible_collections.gpuhost.inference.plugins.module_utils._pci import slot_of

GIB = 1 << 30

_PATH = re.compile(r"(?:[a-f0-9]{4,}:)?[a-f0-9]{2}:[a-f0-9]{2}(?:\.[a-f0-9])?")
_BOOLEAN = re.compile(r"0|1|yes|no|on|off|true|false", re.IGNORECASE)
_HEX = re.compile(r"0x[0-9a-fA-F]{4}")
_TEXT = re.compile(r"[^,;]+")
_HOSTPCI: dict[str, re.Pattern[str]] = {  # option of hostpci: values Proxmox takes
    "host": re.compile(rf"{_PATH.pattern}(?:;{_PATH.pattern})*"),
    "mapping": re.compile(r"[A-Za-z][\w-]+"),
    "rombar": _BOOLEAN,
    "pcie": _BOOLEAN,
    "x-vga": _BOOLEAN,
    "legacy-igd": _BOOLEAN,
    "romfile": _TEXT,
    "mdev": re.compile(r"[^/.:]+"),
    "vendor-id": _HEX,
    "device-id": _HEX,
    "sub-vendor-id": _HEX,
    "sub-device-id": _HEX,
    "driver": re.compile("vfio|keep"),
}
_KNOWN_BITS = 46  # OVMF counts on no more, whatever the processor has
_UNTOLD_BITS = 40  # what QEMU's processor models have unless told otherwise


@dataclass(frozen=True)
class Remark:
    """One subject a check speaks about, with what was read and where; `remedy` if it is special."""

    subject: str
    evidence: str
    remedy: str | None = None


def _label(guest: Guest) -> str:
    return f"{guest.kind} {guest.vmid}"


def _machines(guests: Iterable[Guest]) -> Iterator[tuple[Guest, dict[str, str]]]:
    """Yield the virtual machines with the settings they will start with."""
    for guest in guests:
        if guest.kind == "qemu":
            yield guest, dict(settings_of(guest.config))


def _entries(guest: Guest) -> dict[int, dict[str, str]]:
    return numbered(settings_of(guest.config), "hostpci", "host")


def _functions(options: Mapping[str, str], around: Surroundings) -> list[str]:
    """Return the functions an entry surely takes: none for a mapping with a choice."""
    if "mapping" in options:
        lines = lines_of(options["mapping"], around)
        paths = lines[0].paths if len(lines) == 1 else ()
    else:
        paths = tuple(options.get("host", "").split(";"))
    return [one for path in paths for one in functions_of(path, around.devices)]


def hostpci_invalid(guests: Iterable[Guest], around: Surroundings) -> Iterator[Remark]:
    """Yield `hostpci` entries with which Proxmox does not start the machine, or does without.

    Remedy: correct the entry (`qm set VMID --hostpciN ...`).
    Source: qemu-server, src/PVE/QemuServer/PCI.pm, parse_hostpci and choose_hostpci_devices.
    """
    for guest, settings in _machines(guests):
        used: dict[str, int] = {}
        for number, options in _entries(guest).items():
            line = f"{guest.path}: hostpci{number}: {settings[f'hostpci{number}']}"
            problems = list(_entry_problems(number, options, settings, around))
            for function in _functions(options, around):
                if function in used:
                    problems.append(f"{function} is in hostpci{used[function]} already")
                used.setdefault(function, number)
            for problem in problems:
                yield Remark(_label(guest), f"{line}; {problem}")


def _entry_problems(
    number: int, options: Mapping[str, str], settings: Mapping[str, str], around: Surroundings
) -> Iterator[str]:
    if number >= MAX_HOSTPCI:
        yield f"Proxmox reads hostpci0 to hostpci{MAX_HOSTPCI - 1} only"
    if ("host" in options) == ("mapping" in options):
        yield "it needs either an address or a mapping"
    for name, value in options.items():
        if name not in _HOSTPCI:
            yield f"there is no option {name}"
        elif not _HOSTPCI[name].fullmatch(value):
            yield f"{value} is no value for {name}"
    for path in options.get("host", "").split(";") if "host" in options else ():
        if _PATH.fullmatch(path) and not functions_of(path, around.devices):
            yield f"there is no device {path}"
    if "mapping" in options and not lines_of(options["mapping"], around):
        yield f"{MAPPINGS} has no mapping {options['mapping']} for node {around.node}"
    pcie = options.get("pcie", "0").lower() in ("1", "yes", "on", "true")
    if pcie and "q35" not in settings.get("machine", ""):
        yield f"pcie=1 needs machine q35, and it is {settings.get('machine', 'not set')}"


def hostpci_part_of_card(guests: Iterable[Guest], around: Surroundings) -> Iterator[Remark]:
    """Yield GPUs of which a machine gets some functions only.

    The functions that are left, sound or USB, stay with the host's drivers. When they share the
    IOMMU group, Proxmox takes them away at the start without asking.

    Remedy: leave out the function, as in `hostpci0: 0000:01:00,pcie=1`.
    Source: https://pve.proxmox.com/wiki/PCI_Passthrough
    """
    cards = {slot_of(one.address) for one in around.devices.values() if one.is_gpu}
    for guest, settings in _machines(guests):
        taken = {
            function: number
            for number, options in _entries(guest).items()
            for function in _functions(options, around)
        }
        for card in sorted(cards & {slot_of(one) for one in taken}):
            left = [one for one in around.devices if slot_of(one) == card and one not in taken]
            number = min(at for one, at in taken.items() if slot_of(one) == card)
            if left:
                yield Remark(
                    _label(guest),
                    f"{guest.path}: hostpci{number}: {settings[f'hostpci{number}']}; the card also "
                    f"has {', '.join(left)}",
                    f"qm set {guest.vmid} --hostpci{number} with the address {card}",
                )


def two_vms_at_boot(guests: Iterable[Guest], around: Surroundings) -> Iterator[Remark]:
    """Yield GPUs that two machines with `onboot` claim: at boot one of them does not start.

    Remedy: leave the GPU in one of them, or set `onboot: 0` for the other.
    Source: qemu-server, src/PVE/QemuServer/PCI.pm, reserve_pci_usage.
    """
    claims: dict[str, dict[int, str]] = {}
    for guest, settings in _machines(guests):
        if settings.get("onboot") == "1":
            for number, options in _entries(guest).items():
                for function in _functions(options, around):
                    line = f"{guest.path}: hostpci{number}: {settings[f'hostpci{number}']}"
                    claims.setdefault(function, {})[guest.vmid] = line
    for address, device in around.devices.items():
        if device.is_gpu and len(claims.get(address, {})) > 1:
            lines = "; ".join(line for _vmid, line in sorted(claims[address].items()))
            yield Remark(address, f"{lines}; all have onboot: 1")


def mapping_drift(around: Surroundings) -> Iterator[Remark]:
    """Yield mappings that no longer fit the hardware: Proxmox refuses to start their machines.

    IOMMU group numbers change with kernel, firmware and slots; ids with the card.

    Remedy: write the mapping anew, after a look whether the card is still the one meant.
    Source: pve-guest-common, src/PVE/Mapping/PCI.pm, assert_valid.
    """
    for line in around.mappings:
        if line.node != around.node:
            continue
        differences, fitting = [], line
        for index, path in enumerate(line.paths):
            device = around.devices.get(path if "." in path else f"{path}.0")
            if device is None:
                differences.append(f"there is no device {path}")
                continue
            if line.id != device.id:
                differences.append(f"id is {line.id}, {device.address} has {device.id}")
            if line.subsystem_id != device.subsystem_id:
                differences.append(
                    f"subsystem-id is {line.subsystem_id}, {device.address} has "
                    f"{device.subsystem_id}"
                )
            if index == 0 and line.iommugroup != device.group:
                differences.append(
                    f"iommugroup is {line.iommugroup}, {device.address} is in {device.group}"
                )
            if index == 0:
                fitting = replace(
                    line, id=device.id, subsystem_id=device.subsystem_id, iommugroup=device.group
                )
        if differences:
            yield Remark(
                MAPPINGS,
                f"mapping {line.mapping}, {line.text}: {'; '.join(differences)}",
                _rewrite(line, fitting, around.mappings) if fitting != line else None,
            )


def _rewrite(line: MapLine, fitting: MapLine, all_lines: Iterable[MapLine]) -> str:
    """Return the command that replaces one line of a mapping; it has to name the others too."""
    options = parse_options(line.text, "node")
    wanted = {
        "id": fitting.id,
        "subsystem-id": fitting.subsystem_id,
        "iommugroup": None if fitting.iommugroup is None else str(fitting.iommugroup),
    }
    for name, value in wanted.items():
        options.pop(name, None)
        if value is not None:
            options[name] = value
    text = ",".join(f"{name}={value}" for name, value in options.items())
    maps = [text if one == line else one.text for one in all_lines if one.mapping == line.mapping]
    words = " ".join(f"--map '{one}'" for one in maps)
    return f"if it is the card that is meant: pvesh set /cluster/mapping/pci/{line.mapping} {words}"


def container_raw_lines(guests: Iterable[Guest], around: Surroundings) -> Iterator[Remark]:
    """Yield raw lines of containers for NVIDIA nodes.

    They hand in nodes that no layout knows of, and name device numbers that change: that of
    nvidia-uvm is given out anew at each load of the module.

    Remedy: replace them by `devN` entries (module guest_gpus), then remove them from the file.
    Source: lxc.container.conf(5); pve-container, src/PVE/LXC/Config.pm, devN.
    """
    for guest in guests:
        for one in leftovers(guest.config, around.majors) if guest.kind == "lxc" else ():
            yield Remark(_label(guest), f"{guest.path}: {one.line}", one.remedy)


def container_device_absent(guests: Iterable[Guest], around: Surroundings) -> Iterator[Remark]:
    """Yield `devN` entries of containers for which there is no device; GPUs' own nodes aside.

    Proxmox refuses to start the container. /dev/nvidia-uvm is there only after somebody asked for
    it since the boot.

    Remedy: `nvidia-modprobe -u -c 0` for the driver's nodes; else remove the entry.
    Source: pve-container, src/PVE/LXC/Tools.pm, get_device_mode_and_rdev.
    """
    for guest in guests:
        if guest.kind != "lxc":
            continue
        settings = dict(settings_of(guest.config))
        for number, options in numbered(list(settings.items()), "dev", "path").items():
            path = options.get("path", "")
            if path in around.absent and not re.fullmatch(r"/dev/nvidia\d+", path):
                yield Remark(
                    _label(guest),
                    f"{guest.path}: dev{number}: {settings[f'dev{number}']}; {path} does not exist",
                )


def hookscript_local(guests: Iterable[Guest], around: Surroundings) -> Iterator[Remark]:
    """Yield guests with GPUs whose hook script lies on a storage that only this node has.

    Elsewhere the guest does not start: neither after a migration nor as a failover.

    Remedy: do the work in a unit of the host, or put the script on a shared storage.
    Source: https://pve.proxmox.com/pve-docs/chapter-qm.html, hookscripts
    """
    for guest in guests:
        settings = dict(settings_of(guest.config))
        script = settings.get("hookscript", "")
        has_gpu = any(
            re.fullmatch(r"hostpci\d+", key)
            or (re.fullmatch(r"dev\d+", key) and "/dev/nvidia" in value)
            for key, value in settings.items()
        )
        if has_gpu and script.partition(":")[0] in around.local_storages:
            yield Remark(_label(guest), f"{guest.path}: hookscript: {script}")


def snp_vm_settings(guests: Iterable[Guest], vmids: Collection[int]) -> Iterator[Remark]:
    """Yield settings with which a machine that is to be confidential does not start, or is not.

    `vmids` are the machines the layout wants with SEV-SNP; those that have it set count too.

    Remedy: `qm set VMID` with the named setting.
    Source: https://pve.proxmox.com/pve-docs/chapter-qm.html, AMD SEV; qemu-server,
    src/PVE/QemuServer/CPUConfig.pm and OVMF.pm.
    """
    for guest, settings in _machines(guests):
        sev = parse_options(settings.get("amd-sev", ""), "type").get("type")
        if sev != "snp" and guest.vmid not in vmids:
            continue
        cpu = parse_options(settings.get("cpu", ""), "cputype").get("cputype", "")
        checks = (
            (sev == "snp", "amd-sev", "--amd-sev type=snp", "it is not confidential"),
            (settings.get("bios") == "ovmf", "bios", "--bios ovmf", "SEV needs OVMF"),
            ("q35" in settings.get("machine", ""), "machine", "--machine q35", "q35 is advised"),
            (
                cpu == "host" or cpu.startswith(("EPYC", "custom-")),
                "cpu",
                "--cpu host",
                "the guest needs a processor model with SEV, host or an EPYC one",
            ),
            (
                "efidisk0" not in settings,
                "efidisk0",
                "--delete efidisk0",
                "SEV-SNP has no EFI disk, its firmware is read-only",
            ),
            (
                "hugepages" not in settings,
                "hugepages",
                "--delete hugepages",
                "private memory of a SEV-SNP guest does not come from huge pages",
            ),
        )
        for right, key, words, why in checks:
            if not right:
                have = f"{key}: {settings[key]}" if key in settings else f"no {key}"
                yield Remark(
                    _label(guest), f"{guest.path}: {have}; {why}", f"qm set {guest.vmid} {words}"
                )


def mmio_window(
    guests: Iterable[Guest], around: Surroundings, gpus: Sequence[Gpu]
) -> Iterator[Remark]:
    """Yield machines whose firmware makes less room for 64-bit windows than their GPUs have.

    A GPU without its windows (BARs) is there in the guest, and its driver does not start it. OVMF
    takes an eighth of the address space; a processor model without `phys-bits` has 40 bits, which
    makes 128 GiB at most. Needed is the sum of all windows up to the next power of two, since
    each lies at a multiple of its size.

    Remedy: `--cpu host`, or the option X-PciMmio64Mb of the firmware in `args`.
    Source: edk2, OvmfPkg/Library/PlatformInitLib/MemDetect.c.
    """
    sizes = {gpu.address: sum(window.size_bytes for window in gpu.bars) for gpu in gpus}
    for guest, settings in _machines(guests):
        functions = {
            one for options in _entries(guest).values() for one in _functions(options, around)
        }
        total = sum(size for address, size in sizes.items() if address in functions)
        needed = 1 << max(total - 1, 1).bit_length()
        window = _window(settings)
        if settings.get("bios") == "ovmf" and total and window and needed > window:
            count = len(functions & set(sizes))
            yield Remark(
                _label(guest),
                f"{guest.path}: {count} GPUs with windows of {total / GIB:.1f} GiB in all need "
                f"{needed // GIB} GiB, the firmware makes {window // GIB} GiB at most "
                f"(cpu: {settings.get('cpu', 'not set')}, no X-PciMmio64Mb of that size in args)",
                f"qm set {guest.vmid} --cpu host, or --args '-fw_cfg "
                f"name=opt/ovmf/X-PciMmio64Mb,string={needed >> 20}' beside what args has",
            )


def _window(settings: Mapping[str, str]) -> int | None:
    """Return how many bytes OVMF sets aside for 64-bit windows at most, `None` when not known."""
    asked = re.search(r"opt/ovmf/X-PciMmio64Mb,string=(\d+)", settings.get("args", ""))
    cpu = parse_options(settings.get("cpu", ""), "cputype")
    type_, bits = cpu.get("cputype", ""), cpu.get("phys-bits", "")
    if type_.startswith("custom-"):
        return None
    known = _KNOWN_BITS if type_ in ("host", "max") or bits == "host" else _UNTOLD_BITS
    if bits.isdigit():
        known = min(int(bits), _KNOWN_BITS)
    # what is asked for is a lower bound, edk2 pull request 10856
    return max(1 << (known - 3), int(asked[1]) << 20 if asked else 0)
