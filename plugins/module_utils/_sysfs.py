# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.

"""The one reader of a host's files: `/sys`, `/proc`, `/dev`, `/etc`, live or captured."""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path

from ansible_collections.gpuhost.inference.plugins.module_utils._errors import UnreadableError

_CAPTURED_NODE = re.compile(r"([bc]) (\d+):(\d+)\n?")
_NO_FILES = ("socket:[", "pipe:[", "anon_inode:")  # how /proc/PID/fd calls what has no path
_ABSENT = (FileNotFoundError, NotADirectoryError, ProcessLookupError)


class Reader:
    """Reads files of a host below a root: `/` for the live host, or the top of a captured tree.

    Absent is a value (`None`, `False` or an empty list). Present but unreadable is an
    `UnreadableError`, so that nobody takes "could not look" for "is not there".
    All paths are absolute paths of the host. Absolute links of a captured tree stay inside it.
    """

    def __init__(self, root: str = "/") -> None:
        self.root = Path(root)
        self._live = self.root == Path("/")
        # text, for a scan asks for some 100,000 paths
        self._prefix = "" if self._live else str(self.root)

    def _followed(self, path: str) -> str:
        """Follow absolute links by hand in a captured tree; the live kernel follows its own.

        Raises:
            FileNotFoundError: a captured link stands for what was no file.
        """
        at = self._prefix + path
        if self._live:
            return at
        for _hop in range(8):
            try:
                target = os.readlink(at)
            except OSError:  # no link, or nothing at all
                break
            if target.startswith(_NO_FILES):
                raise FileNotFoundError(path)
            above = self._prefix if target.startswith("/") else at.rpartition("/")[0] + "/"
            at = above + target
        return at

    def data(self, path: str) -> bytes | None:
        """Return the content of a file, `None` when it does not exist.

        Raises:
            UnreadableError: it exists but reading failed, for example EIO, EACCES or ENODEV.
        """
        return self.head(path, -1)

    def head(self, path: str, size: int) -> bytes | None:
        """Return at most `size` first bytes of a file, for files too big to read; see `data`."""
        try:
            # unbuffered: a kernel file is asked once, and for no more than is wanted
            with open(self._followed(path), "rb", buffering=0) as file:  # noqa: PTH123
                return file.read(size)
        except _ABSENT:
            return None
        except OSError as error:
            raise UnreadableError(f"{path} could not be read: {error.strerror}") from error

    def text(self, path: str) -> str | None:
        """Return the content as text without surrounding white space; see `data`."""
        content = self.data(path)
        return None if content is None else content.decode("utf-8", "replace").strip()

    def number(self, path: str) -> int | None:
        """Return the content as an integer (decimal or 0x…), `None` when absent or not a number."""
        content = self.text(path)
        try:
            return None if content is None else int(content, 0)
        except ValueError:
            return None

    def link(self, path: str) -> str | None:
        """Return where a link points (its text), `None` when there is no such link.

        Raises:
            UnreadableError: the link exists but must not be read, as other users' `/proc/PID/fd`.
        """
        try:
            return os.readlink(self._prefix + path)
        except _ABSENT:
            return None
        except OSError as error:
            if error.errno == errno.EINVAL:  # it is there, but it is no link
                return None
            raise UnreadableError(f"{path} could not be read: {error.strerror}") from error

    def names(self, path: str) -> list[str]:
        """Return the sorted names in a folder, an empty list when it does not exist.

        Raises:
            UnreadableError: the folder exists but could not be listed.
        """
        try:
            return sorted(os.listdir(self._followed(path)))
        except _ABSENT:
            return []
        except OSError as error:
            raise UnreadableError(f"{path} could not be listed: {error.strerror}") from error

    def exists(self, path: str) -> bool:
        """Tell whether something is at this path (a dangling link counts as nothing).

        Raises:
            UnreadableError: it must not be looked at.
        """
        return self._status(path) is not None

    def device_number(self, path: str, kind: str = "c") -> tuple[int, int] | None:
        """Return (major, minor) of a device node, `None` for anything else or nothing.

        Character and block devices are numbered apart: c 252:3 and b 252:3 are two devices.
        A captured tree need not hold device nodes: a file that reads `c 195:0` stands for one.

        Args:
            path: of the node, or of a link to it.
            kind: `c` for character devices, `b` for block devices.

        Raises:
            UnreadableError: the node exists but must not be looked at.
        """
        status = self._status(path)
        if status is None:
            return None
        if (stat.S_ISCHR if kind == "c" else stat.S_ISBLK)(status.st_mode):
            return os.major(status.st_rdev), os.minor(status.st_rdev)
        if not self._live and stat.S_ISREG(status.st_mode) and status.st_size < 32:
            match = _CAPTURED_NODE.fullmatch((self.data(path) or b"").decode("ascii", "replace"))
            if match and match[1] == kind:
                return int(match[2]), int(match[3])
        return None

    def _status(self, path: str) -> os.stat_result | None:
        try:
            return os.stat(self._followed(path))  # noqa: PTH116
        except _ABSENT:
            return None
        except OSError as error:
            raise UnreadableError(f"{path} could not be read: {error.strerror}") from error
