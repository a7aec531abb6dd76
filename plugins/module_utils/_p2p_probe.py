# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.

"""Copies data between GPUs and compares every byte: a program of its own, for any Python 3.9.

`_p2p` feeds this file to an interpreter where the GPUs are used, in a container or on the host.
It takes the driver API out of libcuda.so.1, which every CUDA program has, and not PyTorch: that is
not there on the host, its copies between GPUs always run in the source's stream, so it cannot pull,
and it copies through host memory without saying so where peer access is off. Then the data would
be right and prove nothing.

For each ordered pair there are two copies: a write, executed by the GPU that has the data, and a
read, executed by the one that wants it. Both take place only with peer access on, and which GPU
executes a copy is decided by the context its stream belongs to (as in NVIDIA's nvbandwidth). The
data is different for each copy, and what the destination held before is known, too.

Each line of the output is a JSON object, written at once, so that a crash keeps what was learned:
`{"gpus": [...]}` the visible ones by address; for each copy `{"begin": ...}` before it is prepared,
`{"copy": ...}` before it is executed and `{"result": ...}` after it; `{"error": ...}` when nothing
can be tried; `{"end": true}` after the last.
"""

from __future__ import annotations

import ctypes
import json
import random
import signal
import sys
from functools import partial
from typing import Any, Callable, Optional

_OTHER = bytes(byte ^ 0xFF for byte in range(256))


class CudaError(Exception):
    """A call of the driver API failed: its name and CUDA's name of the error."""


class Driver:
    """The calls of libcuda that a copy between two GPUs takes.

    Contexts are the GPUs' primary ones, which nobody else has in this process; they end when they
    are closed. Pointers and sizes are in bytes.
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        self._call("cuInit", 0)

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            said = ctypes.c_char_p()
            self._library.cuGetErrorName(code, ctypes.byref(said))
            raise CudaError(f"{name}: {(said.value or str(code).encode()).decode()}")

    def devices(self) -> dict[str, int]:
        """Return the device numbers of the GPUs that are visible here, by address."""
        count = ctypes.c_int()
        self._call("cuDeviceGetCount", ctypes.byref(count))
        found = {}
        for ordinal in range(count.value):
            device, text = ctypes.c_int(), ctypes.create_string_buffer(32)
            self._call("cuDeviceGet", ctypes.byref(device), ordinal)
            self._call("cuDeviceGetPCIBusId", text, len(text), device)
            found[text.value.decode().lower()] = device.value
        return found

    def open(self, device: int) -> ctypes.c_void_p:
        """Return the context of a GPU."""
        context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        return context

    def close(self, device: int) -> None:
        """End the context of a GPU, with all its memory."""
        self._call("cuDevicePrimaryCtxRelease_v2", device)

    def can_access(self, device: int, peer: int) -> bool:
        """Tell whether the driver lets one GPU reach the memory of another."""
        can = ctypes.c_int()
        self._call("cuDeviceCanAccessPeer", ctypes.byref(can), device, peer)
        return bool(can.value)

    def enable(self, context: ctypes.c_void_p, peer: ctypes.c_void_p) -> None:
        """Let what runs in a context reach the memory of a peer."""
        self._call("cuCtxSetCurrent", context)
        self._call("cuCtxEnablePeerAccess", peer, 0)

    def allocate(self, context: ctypes.c_void_p, data: bytes) -> int:
        """Return the place of new memory with this content on the context's GPU."""
        pointer = ctypes.c_uint64()
        self._call("cuCtxSetCurrent", context)
        self._call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(len(data)))
        self._call("cuMemcpyHtoD_v2", pointer, data, ctypes.c_size_t(len(data)))
        return pointer.value

    def content(self, context: ctypes.c_void_p, pointer: int, size: int) -> bytes:
        """Return what is in memory of the context's GPU, read by that GPU itself."""
        data = ctypes.create_string_buffer(size)
        self._call("cuCtxSetCurrent", context)
        self._call("cuCtxSynchronize")
        place = ctypes.c_uint64(pointer)
        self._call("cuMemcpyDtoH_v2", data, place, ctypes.c_size_t(size))
        return data.raw

    def copy(self, context: ctypes.c_void_p, target: int, source: int, size: int) -> None:
        """Have the context's GPU copy memory, and wait for the end."""
        stream = ctypes.c_void_p()
        self._call("cuCtxSetCurrent", context)
        self._call("cuStreamCreate", ctypes.byref(stream), 1)  # not tied to the default stream
        places = ctypes.c_uint64(target), ctypes.c_uint64(source)
        self._call("cuMemcpyDtoDAsync_v2", *places, ctypes.c_size_t(size), stream)
        self._call("cuStreamSynchronize", stream)
        self._call("cuStreamDestroy_v2", stream)


Answer = tuple[str, Optional[str]]  # right, wrong, failed, untested; and why


def try_pair(
    driver: Any, pair: tuple[int, int], way: str, data: bytes, note: Callable[[], object]
) -> Answer:
    """Copy data from one GPU to another, executed by the first (`write`) or the second (`read`).

    `note` is called when all is prepared, right before the copy.
    """
    opened: list[int] = []
    order = 1 if way == "write" else -1
    word = "untested"  # no memory left beside a server, for one: says nothing of the peer
    try:
        contexts = []
        for device in pair:
            contexts.append(driver.open(device))
            opened.append(device)
        before = data.translate(_OTHER)
        there = driver.allocate(contexts[0], data)
        here = driver.allocate(contexts[1], before)
        if driver.content(contexts[0], there, len(data)) != data:
            return word, "the source does not even give back what the host wrote into it"
        note()
        word = "failed"
        if not driver.can_access(*pair[::order]):
            return word, "CUDA does not let the executing GPU reach the other"
        executing, peer = contexts[::order]
        driver.enable(executing, peer)
        driver.copy(executing, here, there, len(data))
        return compare(data, driver.content(contexts[1], here, len(data)), before)
    except CudaError as error:
        return word, str(error)
    finally:
        close_all(driver, opened)


def close_all(driver: Any, devices: list[int]) -> None:
    """End contexts; one that is broken does not keep the others."""
    for device in devices:
        try:
            driver.close(device)
        except CudaError:
            continue


def compare(wanted: bytes, got: bytes, before: bytes) -> Answer:
    """Judge what arrived."""
    if got == wanted:
        return "right", None
    if got == before:
        return "wrong", "nothing arrived, and no error was told"
    differing = int.from_bytes(wanted, "little") ^ int.from_bytes(got, "little")
    count = len(wanted) - differing.to_bytes(len(wanted), "little").count(0)
    return "wrong", f"{count} of {len(wanted)} bytes are wrong, and no error was told"


def run(
    driver: Any, addresses: list[str], size: int, tell: Callable[[dict[str, Any]], object]
) -> None:
    """Try the wanted GPUs, pair by pair, and tell of each step at once."""
    devices = driver.devices()
    tell({"gpus": sorted(devices)})
    wanted = [address for address in addresses if address in devices]
    pairs = [(source, target) for source in wanted for target in wanted if source != target]
    for source, target in pairs:
        for way in ("write", "read"):
            name = {"from": source, "to": target, "way": way}
            tell({"begin": name})
            data = random.Random(f"{source} {target} {way}").randbytes(size)
            numbers = (devices[source], devices[target])
            word, reason = try_pair(driver, numbers, way, data, partial(tell, {"copy": name}))
            tell({"result": {**name, "word": word, "reason": reason}})
    tell({"end": True})


def say(line: dict[str, Any]) -> None:
    """Write one line, at once."""
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def main(words: list[str], load: Callable[[str], Any] = ctypes.CDLL) -> None:
    """Test as told by a JSON object: `addresses`, `size` in bytes, `seconds` until it must end."""
    wish = json.loads(words[0])
    signal.alarm(wish["seconds"])  # who started it may have lost hold of it, as in a container
    try:
        run(Driver(load("libcuda.so.1")), wish["addresses"], wish["size"], say)
    except (OSError, AttributeError, CudaError) as error:  # no library, or one too old
        say({"error": str(error)})


if __name__ == "__main__":
    main(sys.argv[1:])
