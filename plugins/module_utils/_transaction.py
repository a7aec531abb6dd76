# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.

"""What must outlive the process that changes a host: one lock, one record, marks of hung unbinds.

The record is on disk before the first write to the kernel and is taken away after the last one.
Whoever comes next and finds one knows that a change was cut off, and what there was before it.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ansible_collections.gpuhost.inference.plugins.module_utils._errors import (
    GpuHostError,
    UnreadableError,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader

FOLDER = "/var/lib/gpuhost"
LOCK = "/run/gpuhost.lock"  # only root may make files in /run, so nobody else can hold it
HELD = "GPUHOST_LOCKED"  # in the environment of what runs below the holder, as a modprobe hook
_VERSION = 1


@dataclass(frozen=True)
class Had:
    """What one PCI function had before a change; `None` is no driver, and no override."""

    driver: str | None
    override: str | None


@dataclass(frozen=True)
class Record:
    """A change that was begun.

    Attributes:
        boot: id of the boot it belongs to. Nothing of it is in force after another boot.
        started: when, in UTC.
        wish: what was to be done, in words.
        before: of each function, by address.
        types: of the IOMMU group of each GPU whose type was to change, by address.
        awake: files `power/control` that read `auto` before.
        services: systemd units that were stopped for the time of the change.
        persistence: GPUs whose persistence mode was switched off for it.
        resets: files `reset_method` that name one method for the time of a reset, and what they
            read before.
    """

    boot: str
    started: str
    wish: str
    before: Mapping[str, Had]
    types: Mapping[str, str]
    awake: tuple[str, ...]
    services: tuple[str, ...] = ()
    persistence: tuple[str, ...] = ()
    resets: Mapping[str, str] = field(default_factory=dict)


class Store:
    """The folder of records and the host-wide lock of the host that a reader is opened at."""

    def __init__(self, host: Reader) -> None:
        self._host = host
        self._folder = host.root / FOLDER.lstrip("/")
        self._lock = host.root / LOCK.lstrip("/")
        self._record = self._folder / "transaction.json"
        self._stuck = self._folder / "stuck.json"

    def boot(self) -> str:
        """Return the id of the running boot.

        Raises:
            UnreadableError: the kernel does not tell it.
        """
        boot = self._host.text("/proc/sys/kernel/random/boot_id")
        if not boot:
            raise UnreadableError("/proc/sys/kernel/random/boot_id could not be read")
        return boot

    @contextmanager
    def lock(self, timeout: float = 60.0) -> Iterator[None]:
        """Hold the host-wide lock; wait for it at most `timeout` seconds.

        Raises:
            GpuHostError: another process has it and did not let go in time; it is named.
        """
        try:
            descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise GpuHostError(
                f"{LOCK} cannot be opened ({error.strerror}): run this as root (become: true)"
            ) from error
        end = time.monotonic() + timeout
        try:
            while not _taken(descriptor):
                if time.monotonic() >= end:
                    holder = os.pread(descriptor, 200, 0).decode("utf-8", "replace").strip()
                    raise GpuHostError(
                        f"another change of this host is running (process {holder or 'unknown'}, "
                        f"lock {LOCK}): wait for its end, then run this again"
                    )
                time.sleep(0.1)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()} {self._own_command()}\n".encode(), 0)
            os.environ[HELD] = str(os.getpid())
            yield
        finally:
            os.environ.pop(HELD, None)
            os.close(descriptor)

    def _own_command(self) -> str:
        content = Reader().data("/proc/self/cmdline") or b""
        return content.replace(b"\0", b" ").decode("utf-8", "replace").strip()[:100]

    def record(self) -> Record | None:
        """Return the record of a change that was begun and not ended.

        Raises:
            GpuHostError: there is one that this version does not understand.
        """
        found = self._load(self._record)
        if found is None:
            return None
        record = _as_record(found)
        if record is None:
            raise GpuHostError(self._foreign(self._record))
        return record

    def begin(self, record: Record) -> None:
        """Put a record on disk before anything is changed.

        Raises:
            GpuHostError: it cannot be written, so nothing may be changed.
        """
        self._save(self._record, {"version": _VERSION, **asdict(record)})

    def end(self) -> None:
        """Take the record away: the change is complete, or completely undone, or reported."""
        self._record.unlink(missing_ok=True)
        if self._folder.is_dir():
            sync_folder(self._folder)

    def stuck(self) -> dict[str, str]:
        """Return the functions whose unbind never returned in this boot, each with a sentence.

        A write that has returned meanwhile is no longer in the way: its process is gone.
        """
        found = self._load(self._stuck)
        if found is None or found.get("boot") != self.boot():
            return {}
        marks = found.get("addresses")
        if not isinstance(marks, dict) or not all(map(_is_mark, marks.values())):
            raise GpuHostError(self._foreign(self._stuck))
        return {
            address: mark["text"]
            for address, mark in marks.items()
            if mark["pid"] is None or self._host.exists(f"/proc/{mark['pid']}")
        }

    def mark_stuck(self, addresses: Iterable[str], pid: int | None, text: str) -> None:
        """Remember until the next boot that a write to these functions did not return."""
        marks = self._load(self._stuck) or {}
        known = marks.get("addresses", {}) if marks.get("boot") == self.boot() else {}
        known.update({address: {"pid": pid, "text": text} for address in addresses})
        self._save(self._stuck, {"version": _VERSION, "boot": self.boot(), "addresses": known})

    def _load(self, path: Path) -> dict[str, Any] | None:
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise GpuHostError(self._foreign(path)) from error
        if not isinstance(found, dict) or found.get("version") != _VERSION:
            raise GpuHostError(self._foreign(path))
        return found

    @staticmethod
    def _foreign(path: Path) -> str:
        return (
            f"{path} cannot be read or is of another version, so nobody can tell what an earlier "
            "change left behind: compare drivers, overrides and types with gpu_info, then move the "
            "file away"
        )

    def _save(self, path: Path, content: Mapping[str, Any]) -> None:
        try:
            keep(path, content)
        except GpuHostError as error:
            raise GpuHostError(
                f"{error}: without it nobody could undo a change that is cut off, so none is begun"
            ) from error


def _as_record(found: Mapping[str, Any]) -> Record | None:
    """Return a record that was read, `None` when it is not of the right form."""
    texts = [found.get(key) for key in ("boot", "started", "wish")]
    lists = [found.get(key) for key in ("awake", "services", "persistence")]
    before, types = found.get("before"), found.get("types")
    resets = found.get("resets", {})  # a record of 0.1 has none
    if not (
        all(isinstance(text, str) for text in texts)
        and all(isinstance(one, list) and all(isinstance(n, str) for n in one) for one in lists)
        and isinstance(types, dict)
        and isinstance(resets, dict)
        and all(isinstance(text, str) for text in (*types.values(), *resets.values()))
        and isinstance(before, dict)
        and all(map(_is_had, before.values()))
    ):
        return None
    return Record(
        boot=found["boot"],
        started=found["started"],
        wish=found["wish"],
        before={address: Had(one["driver"], one["override"]) for address, one in before.items()},
        types=types,
        awake=tuple(found["awake"]),
        services=tuple(found["services"]),
        persistence=tuple(found["persistence"]),
        resets=resets,
    )


def _is_had(one: object) -> bool:
    return (
        isinstance(one, dict)
        and {"driver", "override"} <= one.keys()
        and all(one[key] is None or isinstance(one[key], str) for key in ("driver", "override"))
    )


def _is_mark(mark: object) -> bool:
    return (
        isinstance(mark, dict)
        and isinstance(mark.get("text"), str)
        and (mark.get("pid", "") is None or isinstance(mark.get("pid"), int))
    )


def _taken(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def keep(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file so that after a power loss it is there as a whole, or as it was before.

    Raises:
        GpuHostError: it cannot be written.
    """
    new = path.with_suffix(".new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.parent.chmod(0o700)  # it tells who uses what
        with new.open("w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        new.rename(path)
        sync_folder(path.parent)
        sync_folder(path.parent.parent)
    except OSError as error:
        raise GpuHostError(f"{path} cannot be written ({error.strerror})") from error


def sync_folder(folder: Path) -> None:
    """Put the names in a folder on disk, so that a renamed file is there after a power loss."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
