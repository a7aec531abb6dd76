"""Runs ansible-playbook with a collection of a test's own before the real ones."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def own_collection(folder: Path, *linked: str) -> Path:
    """Return a collection gpuhost.inference below a folder, in which these parts are the real ones.

    Modules and roles that a test answers for are written beside them.
    """
    own = folder / "collections/ansible_collections/gpuhost/inference"
    (own / "plugins/modules").mkdir(parents=True)
    for name in ("galaxy.yml", *linked):
        (own / name).symlink_to(ROOT / name)
    return own


def run_playbook(
    folder: Path,
    playbook: Path | str,
    inventory: str = "localhost,",
    variables: dict[str, Any] | None = None,
    environment: dict[str, str] | None = None,
    *,
    options: Sequence[str] = (),
) -> str:
    """Run a playbook with a folder's collections and programs first; return what it said."""
    paths = [str(folder / "collections"), os.environ.get("ANSIBLE_COLLECTIONS_PATH", "")]
    done = subprocess.run(
        [
            "ansible-playbook",
            "-i",
            inventory,
            "-e",
            json.dumps(variables or {}),
            *options,
            str(playbook),
        ],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env={
            **os.environ,
            "ANSIBLE_COLLECTIONS_PATH": ":".join(filter(None, paths)),
            "ANSIBLE_NOCOLOR": "1",
            "PATH": f"{folder}/bin:{os.environ['PATH']}",
            **(environment or {}),
        },
    )
    return done.stdout + done.stderr
