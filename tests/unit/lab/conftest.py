"""Makes the lab program and the stand-ins for Proxmox's tools importable."""

from __future__ import annotations

import sys
from pathlib import Path

LAB = Path(__file__).parents[3] / "lab"
sys.dont_write_bytecode = True  # beside files that go into the image
sys.path[:0] = [str(LAB), str(LAB / "rootfs/usr/share/pve-standin")]
