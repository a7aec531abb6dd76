# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.

"""Files of a process in a container, read from the host without trust in what they are.

An absolute link in a container is followed from the root of who opens it, here the host's. A device
may act when it is opened, and a pipe waits for its other end. So no link is followed, and nothing
is opened for reading before it is known to be a regular file of the container's own file system.
"""

from __future__ import annotations

import os
import stat

from ansible_collections.gpuhost.inference.plugins.module_utils._errors import UnreadableError
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader

_BYTES = 1 << 16
_LOOK = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC  # opens nothing: open(2)
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC  # not even a lease makes it wait: fcntl(2)


def read_inside(host: Reader, pid: int, path: str) -> bytes | None:
    """Return the content of a file as a process names it, `None` when it does not exist.

    Args:
        host: the host.
        pid: the process.
        path: absolute in the process's root, or relative to its working folder.

    Raises:
        UnreadableError: the process is gone, or there is anything but a small regular file, which
            links and `..` do not lead to, on the file system of the process's root.
    """
    of = f"{host.root}/proc/{pid}"
    names = [name for name in path.split("/") if name not in ("", ".")]
    if ".." in names or "\0" in path:
        raise UnreadableError(f"{path} of process {pid} is not followed")
    try:
        system = os.stat(f"{of}/root").st_dev  # noqa: PTH116
        at = os.open(f"{of}/{'root' if path.startswith('/') else 'cwd'}", os.O_PATH | os.O_CLOEXEC)
    except OSError as error:
        raise UnreadableError(f"process {pid} could not be looked into: {error}") from error
    try:
        for name in names:
            inner = os.open(name, _LOOK, dir_fd=at)
            os.close(at)
            at = inner
        status = os.fstat(at)
        if stat.S_ISREG(status.st_mode) and status.st_dev == system:
            with open(os.open(f"/proc/self/fd/{at}", _READ), "rb", buffering=0) as file:  # noqa: PTH123
                content = file.read(_BYTES + 1)
            if content is not None and len(content) <= _BYTES:
                return content
    except FileNotFoundError:
        return None
    except OSError as error:  # a link is no folder, for one
        raise UnreadableError(f"{path} of process {pid} could not be read: {error}") from error
    finally:
        os.close(at)
    raise UnreadableError(f"{path} of process {pid} is no small file of its root file system")
