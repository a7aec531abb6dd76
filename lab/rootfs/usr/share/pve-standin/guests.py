"""Guests as Proxmox keeps them: configuration files, locks, who runs, how the tools end.

A stand-in for what the lab needs of Proxmox VE, see lab/PROXMOX.md. Forms, words and exit codes are
those of pve-container and qemu-server 9.
"""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

PVE = Path("/etc/pve")
FOLDERS = {"lxc": "lxc", "qemu": "qemu-server"}  # kind of guest: its folder in /etc/pve


class GuestError(Exception):
    """What a tool says before it ends, and its exit status (of Perl's `die`: errno, else 255)."""

    def __init__(self, message: str, code: int = 255) -> None:
        super().__init__(message)
        self.code = code


def parse(text: str) -> list[tuple[str, str]]:
    """Return the settings of a guest in order, without its snapshots and pending changes.

    A list, for raw `lxc.*` keys may come more than once.
    """
    settings = []
    for line in text.splitlines():
        if line.startswith("["):  # a snapshot, or [pve:pending]
            break
        match = re.fullmatch(r"([a-z][\w.]*)\s*:\s*(\S.*?)\s*", line)
        if match:
            settings.append((match[1], match[2]))
    return settings


def edit(text: str, changes: dict[str, str | None]) -> str:
    """Return the file with settings changed (`None` removes one), sorted as Proxmox writes it."""
    sections = re.search(r"^\[", text, re.MULTILINE)
    end = sections.start() if sections else len(text)
    notes = [line for line in text[:end].splitlines() if line.startswith("#")]
    settings = [(key, value) for key, value in parse(text) if key not in changes]
    settings += [(key, value) for key, value in changes.items() if value is not None]
    settings.sort(key=lambda setting: (setting[0].startswith("lxc."), setting[0]))
    lines = [*notes, *(f"{key}: {value}" for key, value in settings)]
    return "\n".join(lines) + "\n" + ("\n" if sections else "") + text[end:]


def properties(value: str, first: str) -> dict[str, str]:
    """Split `83:00.0,pcie=1`; the part without a name is called `first`."""
    named = (part if "=" in part else f"{first}={part}" for part in value.split(","))
    return dict(part.split("=", 1) for part in named)


def config_file(kind: str, vmid: int) -> Path:
    """Return where the configuration of a guest of this node is kept."""
    return PVE / "local" / FOLDERS[kind] / f"{vmid}.conf"


def load(kind: str, vmid: int) -> dict[str, str]:
    """Return a guest's settings; of a raw key that comes more than once, the last.

    Raises:
        GuestError: this node has no such guest.
    """
    return dict(parse(load_text(kind, vmid)))


def load_text(kind: str, vmid: int) -> str:
    """Return a guest's configuration file; see `load`."""
    file = config_file(kind, vmid)
    if not file.exists():
        node = os.path.realpath(PVE / "local").rpartition("/")[2]
        name = f"nodes/{node}/{FOLDERS[kind]}/{vmid}.conf"
        raise GuestError(f"Configuration file '{name}' does not exist", code=2)
    return file.read_text()


def every(kind: str) -> list[int]:
    """Return the ids of this node's guests of one kind."""
    files = (PVE / "local" / FOLDERS[kind]).glob("*.conf")
    return sorted(int(file.stem) for file in files if file.stem.isdigit())


@contextmanager
def locked(path: str) -> Iterator[None]:
    """Hold a lock file; who waits for it waits without a limit."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with Path(path).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def options(words: list[str]) -> dict[str, str]:
    """Read `-key value`, `--key value`, `--key=value`; a key alone means 1, as Proxmox does.

    Raises:
        GuestError: a word that belongs to no option.
    """
    found: dict[str, str] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        key, equals, value = word.lstrip("-").partition("=")
        if not word.startswith("-") or not key:
            raise GuestError("400 too many arguments")
        if not equals:
            value = rest.pop(0) if rest and not rest[0].startswith("-") else "1"
        found[key] = value
    return found


def set_options(kind: str, vmid: int, words: list[str], known: str) -> dict[str, str | None]:
    """Return what `set` shall change; `known` is a pattern of the keys that exist.

    Raises:
        GuestError: nothing to change, or a key that does not exist.
    """
    tool = "pct" if kind == "lxc" else "qm"
    changes: dict[str, str | None] = {}
    for key, value in options(words).items():
        names = value.split(",") if key in ("delete", "-delete") else [key]
        for name in names:
            if not re.fullmatch(known, name):
                usage = f"400 unable to parse option\n{tool} set <vmid> [OPTIONS]"
                raise GuestError(f"Unknown option: {name}\n{usage}")
            changes[name] = None if key == "delete" else value
    if not changes:
        raise GuestError("no options specified")
    return changes


def run(*command: str) -> None:
    """Run a command that has to work.

    Raises:
        GuestError: it ended badly.
    """
    code = subprocess.run(command, check=False).returncode
    if code:
        raise GuestError(f"command '{' '.join(command)}' failed: exit code {code}")


def main(tool: str, commands: dict[str, Callable[..., None]]) -> None:
    """Run `TOOL COMMAND [VMID] [words]` and end the process as Proxmox's tools do."""
    name, words = (sys.argv[1] if len(sys.argv) > 1 else ""), sys.argv[2:]
    try:
        if name not in commands:
            known = "\n".join(f"       {tool} {command}" for command in commands)
            problem = f"unknown command '{tool} {name}'" if name else "no command specified"
            raise GuestError(f"ERROR: {problem}\nUSAGE: {tool} <COMMAND> [ARGS] [OPTIONS]\n{known}")
        if name == "list":
            commands[name]()
        elif not words or not words[0].isdigit():
            raise GuestError(f"400 not enough arguments\n{tool} {name} <vmid> [OPTIONS]")
        else:
            commands[name](int(words[0]), words[1:])
    except GuestError as error:
        print(error, file=sys.stderr)
        sys.exit(error.code)
