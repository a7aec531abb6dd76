"""The reader: absent is a value, unreadable is an error, links stay below the root."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
import trees
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import UnreadableError
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader

TREE = """\
/sys/a/vendor = 0x10de
/sys/a/empty/
/sys/a/driver -> ../../drivers/nvidia
/dev/nvidia0 c 195:0
/dev/dm-3 b 252:3
/proc/7/fd/3 -> /dev/nvidia0
/proc/7/fd/4 -> socket:[77]
/proc/7/cmdline = python\\x00-m\\x00sglang
"""


@pytest.fixture
def reader(tmp_path: Path) -> Reader:
    return Reader(str(trees.unpack(TREE, tmp_path)))


def test_reads_values(reader: Reader) -> None:
    assert reader.text("/sys/a/vendor") == "0x10de"
    assert reader.number("/sys/a/vendor") == 0x10DE
    assert reader.link("/sys/a/driver") == "../../drivers/nvidia"
    assert reader.names("/sys/a") == ["driver", "empty", "vendor"]
    assert reader.data("/proc/7/cmdline") == b"python\0-m\0sglang\n"


def test_absent_is_a_value(reader: Reader) -> None:
    assert reader.text("/sys/b") is None
    assert reader.number("/sys/b") is None
    assert reader.link("/sys/b") is None
    assert reader.link("/sys/a/vendor") is None
    assert reader.names("/sys/b") == []
    assert reader.names("/sys/a/vendor") == []
    assert not reader.exists("/sys/b")


def test_unreadable_is_an_error(reader: Reader) -> None:
    with pytest.raises(UnreadableError, match="/sys/a/empty could not be read"):
        reader.text("/sys/a/empty")


def test_device_numbers_follow_links_inside_the_tree(reader: Reader) -> None:
    assert reader.device_number("/dev/nvidia0") == (195, 0)
    assert reader.device_number("/proc/7/fd/3") == (195, 0)
    assert reader.device_number("/sys/a/vendor") is None
    assert reader.device_number("/dev/nvidia1") is None
    assert reader.device_number("/proc/7/fd/4") is None


def test_character_and_block_devices_are_numbered_apart(reader: Reader) -> None:
    assert reader.device_number("/dev/dm-3") is None
    assert reader.device_number("/dev/dm-3", "b") == (252, 3)
    assert reader.device_number("/dev/nvidia0", "b") is None


def test_a_process_that_ended_is_absent(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_arguments: object, **_options: object) -> None:
        raise ProcessLookupError

    monkeypatch.setattr(os, "listdir", gone)
    monkeypatch.setattr(os, "readlink", gone)
    monkeypatch.setattr("builtins.open", gone)
    live = Reader()
    assert live.names("/proc/7/fd") == []
    assert live.link("/proc/7/fd/3") is None
    assert live.data("/proc/7/maps") is None


def test_no_more_is_read_than_wanted(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    """Registers beyond the first ones may be harmful to read."""
    sizes = []

    class File(io.FileIO):
        def read(self, size: int = -1) -> bytes:
            sizes.append(size)
            return super().read(size)

    monkeypatch.setattr("builtins.open", lambda path, mode, buffering: File(path, mode))
    assert reader.head("/sys/a/vendor", 4) == b"0x10"
    assert sizes == [4]


def test_live_host() -> None:
    live = Reader()
    assert live.device_number("/dev/null") == (1, 3)
    assert live.exists(f"/proc/{os.getpid()}/fd")
