"""Files of SGLang's wheels on PyPI, of which only the parts that are read are fetched."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import cache
from http.client import HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import sglang_parser
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader

INDEX = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/")
BLOCK = 1 << 18  # bytes a request
AWAY = (OSError, HTTPException, ValueError, KeyError)  # what a registry that is away leads to


class Remote(io.RawIOBase):
    """A file on a server that answers requests for ranges, read in blocks."""

    def __init__(self, url: str, size: int) -> None:
        self._at, self._size, self._position = urlsplit(url), size, 0
        self._connection = HTTPSConnection(self._at.netloc, timeout=20)
        self._blocks: dict[int, bytes] = {}

    def close(self) -> None:
        self._connection.close()
        super().close()

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = (0, self._position, self._size)[whence] + offset
        return self._position

    def read(self, size: int = -1) -> bytes:
        left = self._size - self._position
        size = left if size < 0 else min(size, left)
        parts: list[bytes] = []
        while size > 0:
            number, start = divmod(self._position, BLOCK)
            part = self._block(number)[start : start + size]
            parts.append(part)
            self._position += len(part)
            size -= len(part)
        return b"".join(parts)

    def _block(self, number: int) -> bytes:
        if number not in self._blocks:
            last = min((number + 1) * BLOCK, self._size) - 1
            wanted = {"Range": f"bytes={number * BLOCK}-{last}"}
            self._connection.request("GET", self._at.path, headers=wanted)
            answer = self._connection.getresponse()
            self._blocks[number] = answer.read()
            if answer.status != 206:
                raise HTTPException(f"{self._at.netloc} answers {answer.status} to a range")
        return self._blocks[number]


class Wheel(Reader):
    """An unpacked wheel at `/`, each file kept in a folder once it was read."""

    def __init__(self, archive: zipfile.ZipFile, keep: Path) -> None:
        super().__init__(str(keep))
        self._archive = archive
        self._keep = keep
        self._files = {f"/{name}" for name in archive.namelist()}
        self._folders: dict[str, set[str]] = {}
        for file in self._files:
            parts = file.split("/")
            for depth in range(1, len(parts)):
                self._folders.setdefault("/".join(parts[:depth]), set()).add(parts[depth])

    def names(self, path: str) -> list[str]:
        return sorted(self._folders.get(path.rstrip("/"), ()))

    def exists(self, path: str) -> bool:
        return path in self._files or path in self._folders

    def head(self, path: str, size: int) -> bytes | None:
        if path not in self._files:
            return None
        content = self._archive.read(path[1:])
        kept = self._keep / path[1:]
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_bytes(content)
        return content if size < 0 else content[:size]

    def keep_sources(self) -> None:
        """Keep all sources of the package, for SGLang's own parser imports many."""
        for file in sorted(self._files):
            if file.endswith(".py") and not (self._keep / file[1:]).exists():
                self.head(file, 0)


@cache
def released() -> dict[str, dict[str, Any]]:
    """Return the wheels of the registry by version, the newest version last."""
    kind = {"Accept": "application/vnd.pypi.simple.v1+json"}
    with urlopen(Request(f"{INDEX}/sglang/", headers=kind), timeout=20) as answer:
        listed = json.load(answer)["files"]
    wheels = {
        match[1]: file
        for file in listed
        if (
            match := re.match(
                r"sglang-([\d.]+(?:post\d+)?)-(?:py3|cp312).*\.whl$", file["filename"]
            )
        )
    }
    return dict(
        sorted(wheels.items(), key=lambda item: [int(n) for n in re.findall(r"\d+", item[0])])
    )


@contextmanager
def wheel(version: str, keep: Path) -> Iterator[Wheel]:
    """Open the wheel of a release; one of `AWAY` when the registry is."""
    file = released()[version]
    with closing(Remote(file["url"], file["size"])) as remote:
        yield Wheel(zipfile.ZipFile(remote), keep)  # type: ignore[arg-type]


def own_parser(version: str, folder: Path) -> tuple[list[str], dict[str, str]]:
    """Return command and environment that print the flags of a release by its own parser.

    The whole source of the release is fetched, one of `AWAY` when the registry is, and what the
    parser needs of other packages is installed, both into a folder.
    """
    libraries, sources = folder / "libraries", folder / "whole" / version
    if not libraries.exists():
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(libraries)]
        subprocess.run([*install, "msgspec", "packaging", "typing_extensions"], check=True)
    done = folder / "whole" / f"{version}.done"
    if not done.exists():
        with wheel(version, sources) as opened:
            opened.keep_sources()
        done.touch()
    command = [sys.executable, "-B", sglang_parser.__file__, str(sources)]
    return command, {**os.environ, "PYTHONPATH": str(libraries)}
