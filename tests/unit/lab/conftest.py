"""Makes the lab program and the stand-ins for Proxmox's tools importable."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

LAB = Path(__file__).parents[3] / "lab"
sys.dont_write_bytecode = True  # beside files that go into the image
sys.path[:0] = [str(LAB), str(LAB / "rootfs/usr/share/pve-standin")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model's folder that the stand-in for SGLang can serve, with its MTP weights."""
    folder = tmp_path_factory.mktemp("model") / "whole"
    subprocess.run([sys.executable, LAB / "sglang/make_model", folder], check=True)
    return folder
