"""Makes the lab host's stand-ins for Proxmox's tools importable."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "lab/rootfs/usr/share/pve-standin"))
