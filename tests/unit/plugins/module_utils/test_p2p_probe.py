"""The program that copies between GPUs: what it tells of copies right, lost, spoilt, refused."""

from __future__ import annotations

import ctypes
import json
import signal
from typing import Any

import pytest
from ansible_collections.gpuhost.inference.plugins.module_utils import _p2p_probe
from ansible_collections.gpuhost.inference.plugins.module_utils._p2p_probe import (
    CudaError,
    Driver,
    main,
    run,
)

A, B, C = "0000:17:00.0", "0000:2a:00.0", "0000:b3:00.0"


class FakeDriver:
    """GPUs with memory; `spoil` changes what a copy brings, by executing GPU and its peer."""

    def __init__(self, *addresses: str) -> None:
        self.addresses = addresses
        self.memory: dict[int, tuple[int, bytes]] = {}
        self.contexts: list[int] = []
        self.enabled: set[tuple[int, int]] = set()
        self.spoil: dict[tuple[int, int], Any] = {}
        self.executed: list[tuple[int, int]] = []
        self.full: set[int] = set()
        self.apart: set[tuple[int, int]] = set()
        self.forgetful: set[int] = set()

    def devices(self) -> dict[str, int]:
        return {address: number for number, address in enumerate(self.addresses)}

    def open(self, device: int) -> int:
        self.contexts.append(device)
        return device

    def close(self, device: int) -> None:
        self.contexts.remove(device)

    def can_access(self, device: int, peer: int) -> bool:
        return (device, peer) not in self.apart

    def enable(self, context: int, peer: int) -> None:
        self.enabled.add((context, peer))

    def allocate(self, context: int, data: bytes) -> int:
        if context in self.full:
            raise CudaError("cuMemAlloc_v2: CUDA_ERROR_OUT_OF_MEMORY")
        self.memory[len(self.memory)] = context, data
        return len(self.memory) - 1

    def content(self, context: int, pointer: int, size: int) -> bytes:
        owner, data = self.memory[pointer]
        assert owner == context, "only the owner tells what really is in its memory"
        return bytes(size) if context in self.forgetful else data

    def copy(self, context: int, target: int, source: int, size: int) -> None:
        owners = self.memory[target][0], self.memory[source][0]
        peer = owners[0] if context == owners[1] else owners[1]
        assert (context, peer) in self.enabled, "without peer access it would go through the host"
        self.executed.append((context, peer))
        spoil = self.spoil.get((context, peer), lambda new, _old: new)
        self.memory[target] = owners[0], spoil(self.memory[source][1], self.memory[target][1])


def told(driver: FakeDriver, *addresses: str) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    run(driver, list(addresses), 4096, lines.append)
    assert driver.contexts == [], "contexts are left open"
    return lines


def words(lines: list[dict[str, Any]]) -> dict[tuple[str, str, str], tuple[str, str | None]]:
    results = [line["result"] for line in lines if "result" in line]
    return {(r["from"], r["to"], r["way"]): (r["word"], r["reason"]) for r in results}


def test_each_ordered_pair_is_written_by_the_one_and_read_by_the_other() -> None:
    driver = FakeDriver(A, B, C)
    lines = told(driver, A, B)
    assert lines[0] == {"gpus": [A, B, C]}
    assert lines[-1] == {"end": True}
    assert [next(iter(line)) for line in lines[1:4]] == ["begin", "copy", "result"]
    assert set(words(lines).values()) == {("right", None)}
    assert driver.executed == [(0, 1), (1, 0), (1, 0), (0, 1)]
    data = [content for _owner, content in driver.memory.values()]
    assert len(set(data)) == 4, "every copy has data of its own"


def nothing(_new: bytes, old: bytes) -> bytes:
    return old


def one_byte(new: bytes, _old: bytes) -> bytes:
    return new[:-1] + bytes([new[-1] ^ 1])


def refused(_new: bytes, _old: bytes) -> bytes:
    raise CudaError("cuStreamSynchronize: CUDA_ERROR_LAUNCH_FAILED")


@pytest.mark.parametrize(
    ("spoil", "word", "reason"),
    [
        (nothing, "wrong", "nothing arrived, and no error was told"),
        (one_byte, "wrong", "1 of 4096 bytes are wrong, and no error was told"),
        (refused, "failed", "cuStreamSynchronize: CUDA_ERROR_LAUNCH_FAILED"),
    ],
)
def test_one_way_of_one_pair_goes_wrong(spoil: Any, word: str, reason: str) -> None:
    driver = FakeDriver(A, B)
    driver.spoil[1, 0] = spoil  # executed by B: its writes to A, its reads from A
    found = words(told(driver, A, B))
    assert found[B, A, "write"] == found[A, B, "read"] == (word, reason)
    assert found[A, B, "write"] == found[B, A, "read"] == ("right", None)


def test_a_peer_out_of_reach_has_failed() -> None:
    driver = FakeDriver(A, B)
    driver.apart.add((0, 1))
    found = words(told(driver, A, B))
    assert found[A, B, "write"][0] == found[B, A, "read"][0] == "failed"
    assert found[A, B, "read"][0] == found[B, A, "write"][0] == "right"


def test_a_gpu_without_free_memory_says_nothing_of_its_peers() -> None:
    driver = FakeDriver(A, B, C)
    driver.full.add(2)
    found = words(told(driver, A, B, C))
    assert found[A, C, "write"] == ("untested", "cuMemAlloc_v2: CUDA_ERROR_OUT_OF_MEMORY")
    assert found[A, B, "write"] == ("right", None)


def test_a_gpu_that_forgets_what_the_host_wrote_says_nothing_of_its_peers() -> None:
    driver = FakeDriver(A, B)
    driver.forgetful.add(0)
    assert words(told(driver, A, B))[A, B, "write"][0] == "untested"


def test_gpus_that_are_not_visible_are_left_out() -> None:
    lines = told(FakeDriver(A, C), A, B)
    assert lines == [{"gpus": [A, C]}, {"end": True}]


class FakeLibrary:
    """A libcuda with one GPU, whose calls fail as told."""

    def __init__(self, **fails: int) -> None:
        self.fails = fails
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name == "cuMemFree_v3":
            raise AttributeError(name)

        def call(*arguments: Any) -> int:
            self.calls.append(name)
            if name == "cuGetErrorName":
                arguments[1]._obj.value = b"CUDA_ERROR_NO_DEVICE"
            elif name == "cuDeviceGetCount":
                arguments[0]._obj.value = 1
            elif name == "cuDeviceGetPCIBusId":
                arguments[0].value = b"0000:B3:00.0"
            return self.fails.get(name, 0)

        return call


def test_calls_of_the_library() -> None:
    library = FakeLibrary()
    assert Driver(library).devices() == {C: 0}
    with pytest.raises(CudaError, match=r"^cuInit: CUDA_ERROR_NO_DEVICE$"):
        Driver(FakeLibrary(cuInit=100))


def test_sizes_and_places_are_passed_as_64_bits() -> None:
    seen: dict[str, tuple[Any, ...]] = {}

    class Library(FakeLibrary):
        def __getattr__(self, name: str) -> Any:
            call = super().__getattr__(name)
            return lambda *arguments: (seen.update({name: arguments}), call(*arguments))[1]

    driver = Driver(Library())
    driver.copy(ctypes.c_void_p(1), 1 << 40, 1 << 41, 1 << 33)
    target, source, size, _stream = seen["cuMemcpyDtoDAsync_v2"]
    assert (target.value, source.value, size.value) == (1 << 40, 1 << 41, 1 << 33)


@pytest.mark.parametrize(
    ("library", "said"),
    [
        (OSError("libcuda.so.1: cannot open shared object file"), "cannot open shared object"),
        (FakeLibrary(cuInit=999), "cuInit: CUDA_ERROR_NO_DEVICE"),
    ],
)
def test_what_cannot_even_begin_is_told(
    library: Any, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[int] = []
    monkeypatch.setattr(signal, "alarm", limits.append)

    def load(_name: str) -> Any:
        if isinstance(library, OSError):
            raise library
        return library

    main([json.dumps({"addresses": [A, B], "size": 1, "seconds": 9})], load)
    [line] = capsys.readouterr().out.splitlines()
    assert said in json.loads(line)["error"]
    assert limits == [9]


def test_it_stands_alone() -> None:
    source = _p2p_probe.__loader__.get_source(_p2p_probe.__name__)  # type: ignore[union-attr]
    assert "ansible" not in source.split('"""')[2], "it is fed to an interpreter without Ansible"
    assert len(source) < 65536, "more than a pipe holds"
