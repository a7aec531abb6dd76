"""The lab's Python keeps what it compiles of Ansible's zip files, and runs the same code."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

PACKAGES = Path(__file__).resolve().parents[3] / "lab/rootfs/usr/lib/python3/dist-packages"
SCRIPT = """
import sys
sys.path.insert(0, {packages!r})
import lab_compiled
lab_compiled.FOLDER = {folder!r}
compiled = []
real = lab_compiled._compile
lab_compiled._compile = lambda path, source: compiled.append(path) or real(path, source)
sys.path.insert(0, {zip!r})
import sent
print(sent.value(), sent.__file__, len(compiled))
try:
    sent.fail()
except ValueError as error:
    print(error.__traceback__.tb_next.tb_frame.f_code.co_filename)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "var/cache"


def send(place: Path, folder: Path, value: int) -> list[str]:
    """Import a module of a zip file in a new process; return what it says."""
    place.mkdir()
    with zipfile.ZipFile(place / "payload.zip", "w") as file:
        file.writestr(
            "sent.py", f"def value():\n    return {value}\ndef fail():\n    raise ValueError\n"
        )
    script = SCRIPT.format(
        packages=str(PACKAGES), folder=str(folder), zip=str(place / "payload.zip")
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    return done.stdout.split()


def test_the_same_text_is_compiled_once(tmp_path: Path, folder: Path) -> None:
    """The next payload lies elsewhere, and a traceback names that place."""
    for name, times in (("first", "1"), ("second", "0")):
        file = str(tmp_path / name / "payload.zip/sent.py")
        assert send(tmp_path / name, folder, 7) == ["7", file, times, file]
    assert len(list(folder.iterdir())) == 1


def test_another_text_is_another(tmp_path: Path, folder: Path) -> None:
    assert [send(tmp_path / str(n), folder, n)[0] for n in (1, 2)] == ["1", "2"]


@pytest.mark.parametrize("damage", [b"", b"\x00", b"e\x00\x00\x00\x00", b"N"])
def test_what_was_cut_off_is_made_anew(tmp_path: Path, folder: Path, damage: bytes) -> None:
    """The lab's power goes without a warning."""
    send(tmp_path / "first", folder, 7)
    (kept,) = folder.iterdir()
    whole = kept.read_bytes()
    kept.write_bytes(damage or whole[: len(whole) // 2])
    for name, times in (("second", "1"), ("third", "0")):
        value, _file, compiled, _place = send(tmp_path / name, folder, 7)
        assert (value, compiled) == ("7", times)


def test_without_a_folder_it_only_compiles(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert send(tmp_path / "first", tmp_path / "file" / "cache", 7)[0] == "7"
    assert os.listdir(tmp_path / "first") == ["payload.zip"]
