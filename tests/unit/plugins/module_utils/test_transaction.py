"""The lock, the record that survives a power loss, and the marks of hung unbinds."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import asdict
from pathlib import Path

import pytest
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader
from ansible_collections.gpuhost.inference.plugins.module_utils._transaction import (
    HELD,
    Had,
    Record,
    Store,
)

RECORD = Record(
    boot="one",
    started="2026-11-02T07:00:00Z",
    wish="0000:41:00.0 to driver vfio-pci",
    before={"0000:41:00.0": Had("nvidia", None)},
    types={"0000:41:00.0": "DMA"},
    awake=("/sys/bus/pci/devices/0000:41:00.0/power/control",),
    services=("nvidia-dcgm.service",),
    persistence=("0000:41:00.0",),
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    boot(tmp_path, "one")
    (tmp_path / "run").mkdir()
    return tmp_path


@pytest.fixture
def store(root: Path) -> Store:
    return Store(Reader(str(root)))


def boot(root: Path, name: str) -> None:
    file = root / "proc/sys/kernel/random/boot_id"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{name}\n")


def test_a_record_comes_back_as_it_was(root: Path, store: Store) -> None:
    assert store.record() is None
    store.begin(RECORD)
    assert Store(Reader(str(root))).record() == RECORD
    store.end()
    assert store.record() is None
    assert os.listdir(root / "var/lib/gpuhost") == []


def test_a_record_half_written_is_no_record(root: Path, store: Store) -> None:
    (root / "var/lib/gpuhost").mkdir(parents=True)
    (root / "var/lib/gpuhost/transaction.new").write_text('{"version": 1, "bo')
    assert store.record() is None
    store.begin(RECORD)
    assert store.record() == RECORD


@pytest.mark.parametrize(
    "content",
    [
        *("", "{", "[]", "null", '{"version": 2}', '{"version": 1}', '{"version": 1, "before": 3}'),
        *(
            json.dumps({"version": 1, **asdict(RECORD), **wrong})
            for wrong in (
                {"types": []},
                {"types": {"0000:41:00.0": 1}},
                {"awake": [1]},
                {"services": "abc"},
                {"boot": None},
                {"before": {"0000:41:00.0": {"driver": 5, "override": None}}},
                {"before": {"0000:41:00.0": {"driver": None}}},
                {"before": {"0000:41:00.0": "nvidia"}},
            )
        ),
    ],
)
def test_a_record_nobody_understands_stops_everything(
    root: Path, store: Store, content: str
) -> None:
    store.begin(RECORD)
    (root / "var/lib/gpuhost/transaction.json").write_text(content)
    with pytest.raises(GpuHostError, match=r"transaction.json cannot be read .* move the"):
        store.record()


def test_a_record_that_cannot_be_written_is_an_error(root: Path, store: Store) -> None:
    (root / "var").write_text("no folder")
    with pytest.raises(GpuHostError, match="so none is begun"):
        store.begin(RECORD)


def test_the_lock_names_its_holder(store: Store, root: Path) -> None:
    with store.lock(1), pytest.raises(GpuHostError) as error, Store(Reader(str(root))).lock(0):
        pass
    assert f"process {os.getpid()} " in str(error.value)
    assert "/run/gpuhost.lock" in str(error.value)
    with store.lock(0):
        assert os.environ[HELD] == str(os.getpid())
    assert HELD not in os.environ


def test_the_lock_is_free_after_a_failure(store: Store) -> None:
    with pytest.raises(ZeroDivisionError), store.lock(0):
        raise ZeroDivisionError
    with store.lock(0):
        pass


def test_a_mark_holds_while_the_write_hangs_and_until_the_next_boot(
    root: Path, store: Store
) -> None:
    (root / "proc/77").mkdir()
    (root / "proc/78").mkdir()
    store.mark_stuck(["0000:41:00.0"], 77, "hangs")
    store.mark_stuck(["0000:42:00.0"], 78, "hangs too")
    assert store.stuck() == {"0000:41:00.0": "hangs", "0000:42:00.0": "hangs too"}
    (root / "proc/77").rmdir()
    assert store.stuck() == {"0000:42:00.0": "hangs too"}
    boot(root, "two")
    assert store.stuck() == {}
    store.mark_stuck(["0000:43:00.0"], 78, "later")
    assert store.stuck() == {"0000:43:00.0": "later"}
    marks = json.loads((root / "var/lib/gpuhost/stuck.json").read_text())
    assert list(marks["addresses"]) == ["0000:43:00.0"]


@pytest.mark.parametrize("marks", [[], {"a": "x"}, {"a": {"pid": 1}}, {"a": {"text": "t"}}, None])
def test_marks_nobody_understands_stop_everything(root: Path, store: Store, marks: object) -> None:
    store.mark_stuck(["0000:41:00.0"], 77, "hangs")
    content = {"version": 1, "boot": "one", "addresses": marks}
    (root / "var/lib/gpuhost/stuck.json").write_text(json.dumps(content))
    with pytest.raises(GpuHostError, match=r"stuck.json cannot be read"):
        store.stuck()


def test_the_folder_is_for_root_alone(root: Path, store: Store) -> None:
    folder = root / "var/lib/gpuhost"
    folder.mkdir(parents=True)
    folder.chmod(0o755)
    store.begin(RECORD)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_lock_that_cannot_be_opened_is_told(root: Path) -> None:
    (root / "run").rmdir()
    with pytest.raises(GpuHostError, match="run this as root"), Store(Reader(str(root))).lock(0):
        pass
