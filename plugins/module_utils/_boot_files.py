# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.

"""Change the kernel parameters of a host: files, boot loader tool, and a record to take it back.

Which tool a host needs is known from proxmox-kernel-helper: as long as it keeps the boot partitions
(`/etc/kernel/proxmox-boot-uuids` exists), `proxmox-boot-tool refresh` writes the entries of
systemd-boot, and for GRUB, legacy or with secure boot, runs `update-grub` on every boot partition
itself; `update-grub` alone would write a grub.cfg that is not booted. Other hosts have GRUB, and
`update-grub`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

from ansible_collections.gpuhost.inference.plugins.module_utils._boot import (
    WATCHED_MODULES,
    Boot,
    BootLoader,
    compare,
    effective,
    parse_grub_defaults,
    plain,
    read_boot,
    same_value,
    split_command_line,
    split_grub_words,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._cmdline import (
    DEFAULTS,
    DROP_INS,
    LINE,
    Edit,
    Entry,
    Plan,
    Wish,
    grub_order,
    kept,
    parse_wish,
    plan_grub,
    plan_line,
    remember,
    take_back,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._command import stream
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import (
    GpuHostError,
    UnreadableError,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader
from ansible_collections.gpuhost.inference.plugins.module_utils._transaction import (
    FOLDER,
    Store,
    sync_folder,
)

RECORD = f"{FOLDER}/kernel_cmdline.json"
REFRESH = "/usr/sbin/proxmox-boot-tool refresh"
UPDATE_GRUB = "/usr/sbin/update-grub"

_GRUB_CFG = "/boot/grub/grub.cfg"
_VERSION = 1

Run = Callable[[str], str]  # a command line; returns all it said, raises GpuHostError


@dataclass(frozen=True)
class Memory:
    """What is remembered between runs.

    Attributes:
        files: what was changed in each file.
        refreshed: the parameters that the boot loader tool was last run for; `None`: never by us;
            empty: a change was cut off before its end.
    """

    files: Mapping[str, Entry]
    refreshed: str | None


def run_tool(command: str, timeout: float) -> str:
    """Run a boot loader tool; return what it said, errors included.

    Raises:
        GpuHostError: with its last words, when it failed or took more than `timeout` seconds.
    """
    said = b""
    try:
        for block in stream(["/bin/sh", "-c", f"exec {command} 2>&1"], timeout):
            said += block
    except GpuHostError as error:
        words = said.decode("utf-8", "replace").strip()[-1000:]
        raise GpuHostError(f"{command} failed: {words or error}") from error
    return said.decode("utf-8", "replace")


def change(
    host: Reader,
    present: Sequence[str],
    absent: Sequence[str],
    *,
    back: bool = False,
    check: bool = False,
    run: Run,
) -> dict[str, Any]:
    """Bring the parameters of the next boot to a wish, or take back all that was ever changed.

    Args:
        host: The host to read and to write to.
        present: Parameters that must be configured.
        absent: Parameters that must not, or names none of whose values may be.
        back: Leave the files as before the first change; `present` and `absent` do not count.
        check: Only say what would be done.
        run: Runs the boot loader's tool.

    Returns:
        The result of the module `kernel_cmdline`.

    Raises:
        GpuHostError: a wish that would hurt, a boot loader that is not understood, or a tool that
            failed: then the files are as before.
    """
    wish, warnings = parse_wish(present, absent)
    with nullcontext() if check else Store(host).lock():
        boot, memory = read_boot(host), _load(host)
        loader = boot.boot_loader
        if back:
            added = [token for entry in memory.files.values() for token in entry.added]
            wish = Wish((), tuple(added))
        cut_off = memory.refreshed == ""
        if not (memory.files or cut_off if back else wish != Wish()):
            if back and not check:
                _write(host, RECORD, None)
            return _result(boot, Plan((), loader.wanted or (), warnings), "", wish)
        command = _tool(loader)
        texts = _texts(host)
        there = _configured(loader, texts)
        plan = _planned(loader, texts, memory if back else None, wish)
        configured = _configured(
            loader, {**texts, **{edit.path: edit.after for edit in plan.edits}}
        )
        plan = Plan(plan.edits, configured, (*warnings, *plan.warnings))
        missing, unwanted = _differences(wish, boot.cmdline)
        line = " ".join(configured)
        if plan.edits or cut_off or ((missing or unwanted) and memory.refreshed != line):
            if not check:
                new = Memory({} if back else remember(memory.files, plan.edits), line)
                more = _apply(host, loader, plan, (memory, new), (command, run))
                plan = Plan(plan.edits, configured, plan.warnings + more)
                there = configured
        else:
            command = ""
        if back and not check:
            _write(host, RECORD, None)
    return _result(boot, plan, command, wish, there)


def _planned(
    loader: BootLoader, texts: Mapping[str, str | None], back: Memory | None, wish: Wish
) -> Plan:
    if back:
        return take_back(back.files, texts)
    if loader.name == "grub":
        return plan_grub(_grub_files(texts), wish)
    return plan_line(texts.get(LINE), wish)


def _differences(wish: Wish, tokens: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the wanted parameters that are missing, and the unwanted ones that are there."""
    unwanted = tuple(token for token in tokens if kept(token, wish) != token)
    return compare(wish.present, tokens).missing, unwanted


def compare_options(
    host: Reader, options: Mapping[str, Mapping[str, object]]
) -> list[dict[str, Any]]:
    """Compare module options of modprobe.d, and further ones, with those in force.

    Options of modules that this collection knows count. `pending` is true for a loaded module that
    uses another value until it is loaded anew, and `None` for a loaded one that does not tell.

    Raises:
        GpuHostError: the options of a module are no dictionary.
    """
    wanted: dict[tuple[str, str], str] = {}
    for line in read_boot(host).modprobe:
        if line.command == "options" and line.module in WATCHED_MODULES:
            for word in split_command_line(line.value):
                name, equals, value = word.partition("=")
                wanted[line.module, name] = value if equals else "1"
    for module, named in options.items():
        if not isinstance(named, Mapping):
            raise GpuHostError(
                f"modprobe_options of {module} are {named!r}: give its options with their values, "
                'as {NVreg_DmaRemapPeerMmio: "0"}'
            )
        for name, raw in named.items():
            text = ("1" if raw else "0") if isinstance(raw, bool) else str(raw)
            wanted[module.replace("-", "_"), name] = text
    return [_option(host, module, name, value) for (module, name), value in wanted.items()]


def _option(host: Reader, module: str, option: str, wanted: str) -> dict[str, Any]:
    loaded = host.exists(f"/sys/module/{module}")
    try:
        found = effective(host, module, option) if loaded else None
    except UnreadableError:
        found = None
    unknown = None if loaded else False
    return {
        "module": module,
        "option": option,
        "wanted": wanted.replace('"', ""),
        "effective": found,
        "pending": unknown if found is None else not same_value(wanted, found),
    }


def _tool(loader: BootLoader) -> str:
    """Return the command that puts the files of a boot loader in force.

    Raises:
        GpuHostError: it is not known which files this host boots by.
    """
    if loader.name == "unknown":
        raise GpuHostError(
            f"the boot loader of this host is not known ({loader.evidence}: neither BOOT_IMAGE= "
            "nor an initrd= with an EFI path, and no EFI variable LoaderInfo): change the "
            "parameters where this host is booted from"
        )
    if loader.tool:
        return REFRESH
    if loader.name == "systemd-boot":
        raise GpuHostError(
            "this host was booted by systemd-boot, but not under proxmox-boot-tool (there is no "
            "/etc/kernel/proxmox-boot-uuids): another tool keeps its entries, change them there"
        )
    return UPDATE_GRUB


def _texts(host: Reader) -> dict[str, str | None]:
    """Return every file that may hold parameters, exactly as it is."""
    names = [name for name in host.names(DROP_INS) if name.endswith(".cfg")]
    texts: dict[str, str | None] = {}
    for path in (LINE, DEFAULTS, *(f"{DROP_INS}/{name}" for name in names)):
        content = host.data(path)
        if content is not None:
            texts[path] = content.decode("utf-8", "surrogateescape")
    return texts


def _grub_files(texts: Mapping[str, str | None]) -> dict[str, str]:
    return {path: texts[path] or "" for path in sorted(texts, key=grub_order) if path != LINE}


def _configured(loader: BootLoader, texts: Mapping[str, str | None]) -> tuple[str, ...]:
    if loader.name == "grub":
        return parse_grub_defaults(_grub_files(texts).values()) or ()
    return split_command_line((texts.get(LINE) or "").partition("\n")[0])


def _apply(
    host: Reader,
    loader: BootLoader,
    plan: Plan,
    memories: tuple[Memory, Memory],
    tool: tuple[str, Run],
) -> tuple[str, ...]:
    """Write the files, run the tool and look at what it did; put all back when that fails.

    Returns:
        Warnings.
    """
    old, new = memories
    command, run = tool
    try:
        # the record first: it is what tells a later run of a change that was cut off
        _save(host, Memory({**old.files, **new.files}, ""))
        for edit in plan.edits:
            _write(host, edit.path, edit.after)
        warnings = _verify(host, loader, plan.configured, run(command))
    except (GpuHostError, OSError) as error:
        for edit in reversed(plan.edits):
            _write(host, edit.path, edit.before)
        _save(host, old)
        files = ", ".join(edit.path for edit in plan.edits) or "no file"
        raise GpuHostError(
            f"{error}. Files put back: {files}. Find out why, then run this again, or run "
            f"'{command}' to be sure that the boot loader has the old parameters"
        ) from error
    _save(host, new)
    return warnings


def _verify(
    host: Reader, loader: BootLoader, configured: Sequence[str], said: str
) -> tuple[str, ...]:
    """Look whether the tool did its work: proxmox-boot-tool skips what it cannot mount.

    Raises:
        GpuHostError: nothing was written.
    """
    if loader.tool:
        listed = len((host.text("/etc/kernel/proxmox-boot-uuids") or "").split())
        written = said.count("Copying and configuring kernels on")
        skipped = "; ".join(line.strip() for line in said.splitlines() if "skipping" in line)
        if not written:
            raise GpuHostError(f"{REFRESH} wrote to no boot partition: {skipped or said.strip()}")
        if written < listed:
            return (f"{written} of {listed} boot partitions were written: {skipped}",)
        return ()
    entries = [
        line.split(None, 2)
        for line in (host.text(_GRUB_CFG) or "").splitlines()
        if line.split()[:1] in (["linux"], ["linuxefi"])
    ]
    have = set(map(plain, split_grub_words(entries[0][2]) if entries and entries[0][2:] else ()))
    lost = [token for token in configured if plain(token) not in have]
    if lost or not entries:
        raise GpuHostError(f"{UPDATE_GRUB} left {_GRUB_CFG} without {' '.join(lost) or 'an entry'}")
    return ()


def _load(host: Reader) -> Memory:
    text = host.text(RECORD)
    if text is None:
        return Memory({}, None)
    try:
        found = json.loads(text)
        if found["version"] != _VERSION:
            raise ValueError(found["version"])
        files = {
            path: Entry(
                _text(entry["before"]),
                _text(entry["after"]),
                _words(entry["added"]),
                _words(entry["removed"]),
            )
            for path, entry in found["files"].items()
        }
        return Memory(files, _text(found["refreshed"]))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise GpuHostError(
            f"{RECORD} cannot be read or is of another version, so nobody can tell which "
            "parameters are this collection's: look at it, move it away, then run this again"
        ) from error


def _text(found: object) -> str | None:
    if found is not None and not isinstance(found, str):
        raise TypeError(found)
    return found


def _words(found: object) -> tuple[str, ...]:
    if not isinstance(found, list) or not all(isinstance(word, str) for word in found):
        raise TypeError(found)
    return tuple(found)


def _save(host: Reader, memory: Memory) -> None:
    if memory == Memory({}, None):
        _write(host, RECORD, None)
        return
    content = {
        "version": _VERSION,
        "refreshed": memory.refreshed,
        "files": {path: asdict(entry) for path, entry in memory.files.items()},
    }
    _write(host, RECORD, json.dumps(content, indent=1) + "\n")


def _write(host: Reader, path: str, text: str | None) -> None:
    """Put a whole file in place of another, or take it away, so that it survives a power loss."""
    at = host.root / path.lstrip("/")
    if at.is_symlink():
        at = at.resolve()
    if text is None:
        at.unlink(missing_ok=True)
    else:
        at.parent.mkdir(mode=0o700 if path == RECORD else 0o755, parents=True, exist_ok=True)
        new = at.with_name(f".{at.name}.gpuhost-new")
        with new.open("wb") as file:
            file.write(text.encode("utf-8", "surrogateescape"))
            if at.exists():
                status = at.stat()
                os.fchmod(file.fileno(), status.st_mode & 0o7777)
                os.fchown(file.fileno(), status.st_uid, status.st_gid)
            else:
                os.fchmod(file.fileno(), 0o644)
            file.flush()
            os.fsync(file.fileno())
        new.rename(at)
    if at.parent.is_dir():
        sync_folder(at.parent)


def _result(
    boot: Boot, plan: Plan, command: str, wish: Wish, there: Sequence[str] = ()
) -> dict[str, Any]:
    """Put a result together; `there` is what is configured now, in check mode before the change."""
    loader = boot.boot_loader
    files = list(_shown(plan.edits))
    missing, unwanted = _differences(wish, boot.cmdline)
    known = loader.wanted is not None or bool(plan.configured)
    pending = compare(plan.configured, boot.cmdline).reboot_required if known else None
    return {
        "changed": bool(plan.edits or command),
        "files": files,
        "diff": [
            {
                "before_header": file["path"],
                "after_header": file["path"],
                "before": file["before"] or "",
                "after": file["after"] or "",
            }
            for file in files
        ],
        "reboot_required": bool(missing or unwanted) or pending,
        "missing": list(missing),
        "unwanted": list(unwanted),
        "not_configured": [token for part in _differences(wish, there) for token in part],
        "boot_loader": {**asdict(loader), "wanted": list(plan.configured) if known else None},
        "commands": [command] if command else [],
        "warnings": list(plan.warnings),
    }


def _shown(edits: Iterable[Edit]) -> Iterable[dict[str, Any]]:
    for edit in edits:
        texts = {"before": edit.before, "after": edit.after}
        yield {
            "path": edit.path,
            **{
                key: text and text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
                for key, text in texts.items()
            },
        }
