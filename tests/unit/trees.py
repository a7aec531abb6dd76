"""Captured hosts as text: one entry a line, unpacked into a folder for a `Reader`.

/sys/bus/pci/devices/0000:41:00.0/vendor = 0x10de      a file, its text (escapes as in Python)
/sys/bus/pci/devices/0000:41:00.0/driver -> ../../..   a link
/sys/kernel/iommu_groups/12/devices/                   an empty folder
/dev/nvidia0 c 195:0                                   a device node
# a comment
"""

from __future__ import annotations

import re
from pathlib import Path

HOSTS = Path(__file__).parent.parent / "fixtures" / "hosts"
_ENTRY = re.compile(r"(/\S*?)(?:/$| -> (?P<link>.*)| = ?(?P<text>.*)| (?P<node>[bc] \d+:\d+))$")


def unpack(archive: str, root: Path) -> Path:
    """Write the entries of a text archive below `root`."""
    for line in archive.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        entry = _ENTRY.fullmatch(line)
        if not entry:
            raise ValueError(f"not an entry of a host archive: {line!r}")
        at = root / entry[1].lstrip("/")
        if entry["link"] is not None:
            at.parent.mkdir(parents=True, exist_ok=True)
            at.symlink_to(entry["link"])
        elif entry["text"] is not None:
            at.parent.mkdir(parents=True, exist_ok=True)
            at.write_bytes(
                entry["text"].encode("ascii").decode("unicode_escape").encode("latin-1") + b"\n"
            )
        elif entry["node"] is not None:
            at.parent.mkdir(parents=True, exist_ok=True)
            at.write_text(entry["node"])
        else:
            at.mkdir(parents=True, exist_ok=True)
    return root


def host(name: str, root: Path) -> Path:
    """Unpack `tests/fixtures/hosts/NAME.tree`."""
    return unpack((HOSTS / f"{name}.tree").read_text(encoding="ascii"), root)
