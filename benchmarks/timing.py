"""Wall and processor time of things that are compared."""

from __future__ import annotations

import os
import time
from collections.abc import Callable


class Timer:
    """Wall and processor seconds of things measured in turns; the best counts."""

    def __init__(self) -> None:
        self.wall: dict[str, float] = {}
        self.busy: dict[str, float] = {}

    def measure(self, name: str, action: Callable[[], object]) -> None:
        """Do it once."""
        before, start = sum(os.times()[:4]), time.monotonic()
        action()
        wall, busy = time.monotonic() - start, sum(os.times()[:4]) - before
        self.wall[name] = min(wall, self.wall.get(name, wall))
        self.busy[name] = min(busy, self.busy.get(name, busy))

    def row(self, label: str, name: str, base: str) -> str:
        """Return a row of the table."""
        times = self.wall[name] / self.wall[base]
        cells = [f"{self.wall[base]:.3f}", f"{self.wall[name]:.3f}", f"{times:.2f}"]
        short = self.busy[base] < 0.1  # the clock ticks every 10 ms
        cells.append("-" if short else f"{self.busy[name] / self.busy[base]:.2f}")
        return f"| {label} | {' | '.join(cells)} |"
