"""Change a GPU's driver and type on the lab host, and end before one of the writes.

usage: cut.py kill|power STEP     A step behind the last write is the verification after them.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from ansible_collections.gpuhost.inference.plugins.module_utils._binding import change
from ansible_collections.gpuhost.inference.plugins.module_utils._kernel_log import (
    KernelLog,
    read_since,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._kernel_write import (
    Machine,
    Outcome,
    write,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._moves import Wish
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader
from ansible_collections.gpuhost.inference.plugins.module_utils._transaction import Store

HOW, STEP = sys.argv[1], int(sys.argv[2])
WISH = Wish(("0000:44:00.0",), "vfio-pci", "DMA")
done: list[str] = []


def end() -> None:
    """End as if somebody pulled the plug, or killed the process."""
    if HOW == "power":
        Path("/proc/sysrq-trigger").write_text("b", encoding="ascii")  # at once, no sync
        time.sleep(60)
    os.kill(os.getpid(), signal.SIGKILL)


def write_or_end(path: str, value: str, timeout: float) -> Outcome:
    """Write to the kernel, unless this is the step."""
    if len(done) == STEP:
        end()
    done.append(path)
    return write(path, value, timeout)


def log_or_end(host: Reader, seconds: float) -> KernelLog:
    """Read the log for the verification, unless this is the step."""
    if len(done) == STEP:
        end()
    return read_since(host, seconds)


host = Reader()
machine = Machine(host, write_or_end, 30, log=log_or_end)
result = change(machine, [WISH], store=Store(host), accept=["guest-config"], check=HOW == "count")
print(json.dumps([step["path"] for step in result["writes"]]))
