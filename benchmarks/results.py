"""The file of results: a section for each benchmark, each written by its own run."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Sequence
from pathlib import Path

RESULTS = Path(__file__).parent / "results.md"
TITLE = "# Benchmarks\n"


def put(title: str, lines: Sequence[str]) -> None:
    """Write a section, in the place of the one with the same title; the others stay."""
    text = RESULTS.read_text(encoding="utf-8") if RESULTS.exists() else TITLE
    head, *sections = re.split(r"^(?=## )", text, flags=re.MULTILINE)
    kept = [section.strip() for section in sections if not section.startswith(f"## {title}\n")]
    kept.append("\n".join([f"## {title}", "", *lines]))
    RESULTS.write_text("\n\n".join([head.strip(), *sorted(kept)]) + "\n", encoding="utf-8")


def machine() -> str:
    """Describe this computer: cores, processor and Python."""
    info = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    model = re.search(r"^model name\s*:\s*(.+)$", info, re.MULTILINE)
    name = model[1].strip() if model else platform.machine()
    return f"{os.cpu_count()} cores of {name} with Python {platform.python_version()}"
