# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.

"""Where a model lies on a host: a folder, or a snapshot in the cache of the Hugging Face hub.

The layout of the cache is that of huggingface_hub, 0.13 and later (`file_download.py`):
`HF_HOME/hub/models--ORG--NAME/` holds `refs/BRANCH` (a text file with a commit),
`snapshots/COMMIT/` (links) and `blobs/` (what they point to, `*.incomplete` while it is fetched).
"""

from __future__ import annotations

import re

from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader

_LIVE = Reader()
# Files one of which a snapshot has that can be loaded, or by which a missing part can be told.
_LISTS = ("model.safetensors.index.json", "model.safetensors")


def model_folder(
    model: str, hf_home: str | None, host: Reader = _LIVE, revision: str = "main"
) -> str:
    """Return the folder of a model that the server could load without a network.

    Args:
        model: what `--model-path` is given: an absolute path, which is returned as it is, or the
            id of a model on the hub, as `Qwen/Qwen3.5-0.8B`.
        hf_home: the folder `HF_HOME` of the server; only an id needs it.
        host: where to read.
        revision: a branch, a tag or a commit of an id, the server's `--revision`.

    Raises:
        GpuHostError: it is neither, or the cache does not have it whole. SGLang would then try to
            download it at each start.
        UnreadableError: the cache could not be read.
    """
    for text in (model, hf_home or "", revision):
        if not text.isprintable():
            raise GpuHostError(f"{text[:200]!r} holds characters that no path has; give another")
    if model.startswith("/"):
        return model
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", model, re.A):
        raise GpuHostError(
            f"{model!r} is neither an absolute path nor the id of a model as org/name; give one"
        )
    if hf_home is None:
        raise GpuHostError(
            f"{model} is the id of a model and not a path: give hf_home too, "
            "the folder HF_HOME of the server, or the folder of the model"
        )
    hf_home = hf_home.rstrip("/")
    fetch = f"run HF_HOME={hf_home} hf download {model}"
    if revision != "main":
        fetch += f" --revision {revision}"
    fetch += " where there is a network"
    folder = "models--" + model.replace("/", "--")
    cache = f"{hf_home}/hub/{folder}"
    if not host.exists(cache):
        if host.exists(f"{hf_home}/{folder}"):
            raise GpuHostError(
                f"{hf_home} is a folder for HF_HUB_CACHE, not for HF_HOME: {model} lies in it and "
                "not in its folder hub; give the folder above, or the path of the snapshot"
            )
        raise GpuHostError(f"{model} is not in the cache: {cache} does not exist; {fetch}")
    commit = host.text(f"{cache}/refs/{revision}") or revision
    snapshot = f"{cache}/snapshots/{commit}"
    names = host.names(snapshot)
    if not names:
        raise GpuHostError(f"{model} is not in the cache: {snapshot} holds nothing; {fetch}")
    lost = [name for name in names if not host.exists(f"{snapshot}/{name}")]
    if lost:
        raise GpuHostError(
            f"{model} is incomplete in the cache: {', '.join(lost[:3])} in {snapshot} "
            f"point{'s' if len(lost) == 1 else ''} to what is not there; {fetch}"
        )
    # A part may be left of another, finished download; but not when no list of the parts is there.
    parts = [name for name in host.names(f"{cache}/blobs") if name.endswith(".incomplete")]
    if parts and not any(name in names for name in _LISTS):
        raise GpuHostError(
            f"{model} is incomplete in the cache: its download has not ended "
            f"({cache}/blobs/{parts[0]}); {fetch}"
        )
    return snapshot
