# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.

"""A set of small text files of a host, kept as a whole: written, corrected and removed together."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError

_RECORDS = ("var", "lib", "gpuhost")


@dataclass(frozen=True)
class File:
    """What is at a path; `link` is where a symbolic link points, a regular file has `content`."""

    path: str
    content: str | None = None
    mode: int = 0
    link: str | None = None


@dataclass(frozen=True)
class Step:
    """One change: what is at the path before and after, `None` where nothing is."""

    path: str
    before: File | None
    after: File | None


def read_file(root: Path, path: str) -> File | None:
    """Return what is at a path, `None` when nothing is; a folder has neither content nor link.

    Raises:
        GpuHostError: it cannot be read.
    """
    at = root / path.lstrip("/")
    try:
        mode = at.lstat().st_mode
        if stat.S_ISLNK(mode):
            return File(path, link=os.readlink(at))
        if stat.S_ISDIR(mode):
            return File(path, mode=stat.S_IMODE(mode))
        return File(path, at.read_text("utf-8", errors="replace"), stat.S_IMODE(mode))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise GpuHostError(f"{path} cannot be read: {error.strerror}") from error


def plan_files(root: Path, wanted: Sequence[File], sweep: Sequence[str]) -> list[Step]:
    """Return what is to be changed: files to write, then those to remove, folders last.

    Args:
        root: top of the host's files.
        wanted: the files there shall be.
        sweep: patterns, as for `Path.glob`, of paths that may only be there when they are wanted. A
            folder is removed when nothing else is in it.

    Raises:
        GpuHostError: a folder or something unreadable is where a file shall be, or a path or a
            pattern is none to be followed.
    """
    _refuse(root, wanted, sweep)
    steps = []
    for file in wanted:
        before = read_file(root, file.path)
        if before and before.content is None and before.link is None:
            raise GpuHostError(f"{file.path} is a folder: move it away, a file shall be there")
        if before != file:
            steps.append(Step(file.path, before, file))
    names = {file.path for file in wanted}
    kept = {str(parent) for name in names for parent in Path(name).parents}
    gone: set[str] = set()
    # deepest first, so that a folder comes after all that is in it
    for path in sorted(_matches(root, sweep), key=lambda one: (-one.count("/"), one)):
        before = read_file(root, path)
        if before is None or path in names or path in kept:
            continue
        if before.content is None and before.link is None:
            inside = os.listdir(root / path.lstrip("/"))
            if not all(f"{path}/{name}" in gone for name in inside):
                continue
        gone.add(path)
        steps.append(Step(path, before, None))
    return steps


def _refuse(root: Path, wanted: Sequence[File], sweep: Sequence[str]) -> None:
    seen = set()
    for file in wanted:
        _check_path("file", file.path)
        if file.path in seen:
            raise GpuHostError(f"file {file.path} is there twice: leave one of them")
        seen.add(file.path)
        if file.link == "":
            raise GpuHostError(f"file {file.path} is a link to nothing: say where it points")
    for pattern in sweep:
        _check_path("sweep", pattern)
        base = _base(pattern)
        if base == "/":
            raise GpuHostError(f"sweep {pattern!r} takes in the whole host: name a folder in it")
        if base and (root / base[1:]).is_symlink():
            raise GpuHostError(
                f"sweep {pattern!r}: {base} is a symbolic link, and what is behind it may be "
                "somebody else's: put a folder in its place"
            )


def _check_path(what: str, path: str) -> None:
    absolute = path.startswith("/") and not path.startswith("//") and path != "/"
    if not absolute or "\0" in path or path != os.path.normpath(path):
        raise GpuHostError(
            f"{what} {path!r} cannot be used: give an absolute path without '.', '..', '//' and "
            "'/' at its end"
        )


def _base(pattern: str) -> str | None:
    """Return the folder in which a pattern looks around, `None` when it stands for one path."""
    parts = pattern.split("/")
    wild = [index for index, part in enumerate(parts) if any(sign in part for sign in "*?[")]
    return "/".join(parts[: wild[0]]) or "/" if wild else None


def _matches(root: Path, patterns: Iterable[str]) -> set[str]:
    """Return the paths that match; none that a symbolic link leads to."""
    matches = set()
    for pattern in patterns:
        base = root / (_base(pattern) or pattern)[1:]
        for found in root.glob(pattern[1:]):
            below = list(found.parents)[: len(found.parts) - len(base.parts)]
            if not any(parent.is_symlink() for parent in below):
                matches.add(f"/{found.relative_to(root)}")
    return matches


def apply_files(root: Path, steps: Sequence[Step]) -> None:
    """Carry out a plan; a file is there as a whole or not at all, whatever happens.

    Raises:
        GpuHostError: one could not be written or removed; those before it are changed.
    """
    for step in steps:
        at = root / step.path.lstrip("/")
        try:
            if step.after is not None:
                _write(at, step.after)
            elif at.is_dir() and not at.is_symlink():
                at.rmdir()
            else:
                at.unlink()
        except OSError as error:
            raise GpuHostError(f"{step.path} cannot be changed: {error.strerror}") from error


def _write(at: Path, file: File) -> None:
    _make_folder(at.parent)
    new = at.with_name(f".{at.name}.new")
    new.unlink(missing_ok=True)
    if file.link is not None:
        new.symlink_to(file.link)
    else:
        with new.open("x", encoding="utf-8") as stream:
            stream.write(file.content or "")
            stream.flush()
            os.fchmod(stream.fileno(), file.mode)
            os.fsync(stream.fileno())
    new.rename(at)


def _make_folder(at: Path) -> None:
    """Make a folder and those above it, with their mode whatever the umask is."""
    if at.is_dir():
        return
    _make_folder(at.parent)
    at.mkdir()
    # it tells who uses what
    at.chmod(0o700 if at.parts[-3:] == _RECORDS else 0o755)


def as_diff(steps: Sequence[Step]) -> list[Mapping[str, Any]]:
    """Return a plan as Ansible shows differences, one for each path."""
    return [
        {
            "before_header": step.path,
            "after_header": step.path,
            "before": _shown(step.before),
            "after": _shown(step.after),
        }
        for step in steps
    ]


def _shown(file: File | None) -> str:
    if file is None:
        return ""
    if file.link is not None:
        return f"link to {file.link}\n"
    if file.content is None:
        return "folder\n"
    return f"mode {file.mode:04o}\n{file.content}"
