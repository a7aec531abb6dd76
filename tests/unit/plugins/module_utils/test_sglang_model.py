"""Where a model lies: each state of a cache, made as huggingface_hub makes it."""

from __future__ import annotations

from pathlib import Path

import pytest
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError
from ansible_collections.gpuhost.inference.plugins.module_utils._sglang_model import model_folder
from ansible_collections.gpuhost.inference.plugins.module_utils._sysfs import Reader

MODEL, COMMIT = "Qwen/Qwen3.5-0.8B", "5c1b0a7e"
FILES = ("config.json", "model.safetensors")


def cache(home: Path, files: tuple[str, ...] = FILES, branch: str = "main") -> Path:
    folder = home / "hub" / "models--Qwen--Qwen3.5-0.8B"
    for name in ("blobs", "refs", f"snapshots/{COMMIT}"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "refs" / branch).write_text(COMMIT)
    for name in files:
        (folder / "blobs" / f"of-{name}").write_text("{}")
        (folder / "snapshots" / COMMIT / name).symlink_to(f"../../blobs/of-{name}")
    return folder


def test_path_is_itself(tmp_path: Path) -> None:
    assert model_folder("/srv/models/qwen", None) == "/srv/models/qwen"
    assert model_folder("/srv/models/qwen", str(tmp_path)) == "/srv/models/qwen"


def test_snapshot(tmp_path: Path) -> None:
    folder = cache(tmp_path)
    expected = str(folder / "snapshots" / COMMIT)
    assert model_folder(MODEL, str(tmp_path)) == expected
    assert model_folder(MODEL, f"{tmp_path}/") == expected
    assert model_folder(MODEL, str(tmp_path), revision=COMMIT) == expected
    # a part of another download, beside a snapshot that has all of its own
    (folder / "blobs" / "77aa.incomplete").write_text("")
    assert model_folder(MODEL, str(tmp_path)) == expected


def test_snapshot_of_a_captured_host(tmp_path: Path) -> None:
    cache(tmp_path / "var" / "hf")
    found = model_folder(MODEL, "/var/hf", Reader(str(tmp_path)))
    assert found == f"/var/hf/hub/models--Qwen--Qwen3.5-0.8B/snapshots/{COMMIT}"


def test_model_without_organisation(tmp_path: Path) -> None:
    (tmp_path / "hub" / "models--gpt2" / "snapshots" / "main").mkdir(parents=True)
    (tmp_path / "hub" / "models--gpt2" / "snapshots" / "main" / "config.json").write_text("{}")
    assert model_folder("gpt2", str(tmp_path)).endswith("models--gpt2/snapshots/main")


@pytest.mark.parametrize("model", ["./qwen", "~/qwen", "a/b/c", "", "s3://bucket/qwen", "../x/y"])
def test_neither_path_nor_id(tmp_path: Path, model: str) -> None:
    with pytest.raises(GpuHostError, match="neither an absolute path nor the id"):
        model_folder(model, str(tmp_path))


def test_id_without_a_cache() -> None:
    with pytest.raises(GpuHostError, match="give hf_home too"):
        model_folder(MODEL, None)


def test_never_downloaded(tmp_path: Path) -> None:
    with pytest.raises(GpuHostError, match=f"run HF_HOME={tmp_path} hf download {MODEL}"):
        model_folder(MODEL, str(tmp_path))


def test_other_revision_only(tmp_path: Path) -> None:
    cache(tmp_path)
    with pytest.raises(GpuHostError, match=r"snapshots/v2 holds nothing; .* --revision v2"):
        model_folder(MODEL, str(tmp_path), revision="v2")


def test_folder_of_the_other_variable(tmp_path: Path) -> None:
    cache(tmp_path)
    with pytest.raises(GpuHostError, match="HF_HUB_CACHE"):
        model_folder(MODEL, str(tmp_path / "hub"))


def test_snapshot_that_a_branch_names_is_gone(tmp_path: Path) -> None:
    folder = cache(tmp_path, files=())
    (folder / "refs" / "main").write_text("0123")
    with pytest.raises(GpuHostError, match="snapshots/0123 holds nothing"):
        model_folder(MODEL, str(tmp_path))


def test_blob_is_gone(tmp_path: Path) -> None:
    folder = cache(tmp_path)
    (folder / "blobs" / "of-model.safetensors").unlink()
    with pytest.raises(GpuHostError, match=r"incomplete.*model\.safetensors in .* points to"):
        model_folder(MODEL, str(tmp_path))


def test_download_under_way(tmp_path: Path) -> None:
    folder = cache(tmp_path, files=("config.json",))
    (folder / "blobs" / "77aa.incomplete").write_text("")
    with pytest.raises(GpuHostError, match=r"has not ended \(.*77aa\.incomplete\)"):
        model_folder(MODEL, str(tmp_path))


@pytest.mark.parametrize(
    ("model", "home", "revision"),
    [("/srv/\0", None, "main"), (MODEL, "/srv/\0", "main"), (MODEL, "/srv", "\ud800")],
)
def test_characters_that_no_path_has(model: str, home: str | None, revision: str) -> None:
    with pytest.raises(GpuHostError, match="holds characters that no path has"):
        model_folder(model, home, revision=revision)
