"""Search for bytes that break the reading of kernel logs, guided by coverage; see `make fuzz`.

Usage: kernel_log.py [OPTIONS OF LIBFUZZER] [CORPUS]. It ends at the first finding, with the bytes
in a file crash-...; add them to FOUND in tests/unit/plugins/module_utils/test_log_fuzz.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

import atheris

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT / ".build" / "collections"), str(ROOT / "tests" / "unit")]

with atheris.instrument_imports(include=["ansible_collections.gpuhost.inference"]):
    import log_cases


def main() -> None:
    """Let the fuzzer run."""
    atheris.Setup(sys.argv, log_cases.check)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
