"""Static checks of the collection, one session each, run by `make test` (see CONTRIBUTING.md)."""

from __future__ import annotations

import os
import shutil
import subprocess
from operator import itemgetter
from pathlib import Path

import antsibull_nox
import nox

ROOT = Path(__file__).parent
COLLECTIONS = ROOT / ".build" / "collections"
OURS = COLLECTIONS / "ansible_collections" / "gpuhost" / "inference"
TOOLS = ROOT / ".build" / "venv" / "bin"

nox.options.sessions = ["lint", "sanity", "docs"]
nox.options.envdir = ROOT / ".build" / "nox"
os.environ["ANSIBLE_COLLECTIONS_PATH"] = str(COLLECTIONS)
antsibull_nox.load_antsibull_nox_toml()

# ansible-core's oldest and newest release that install on each Python; the oldest is what AAP ships
CORES = {"3.11": ["2.16", "2.19"], "3.12": ["2.21"], "3.13": ["2.21"]}


def _pythons() -> list[str]:
    """Link the interpreters that really run into one folder, first on PATH; name their versions.

    Version managers leave shims of versions they lack, which nox and ansible-test would take.
    """
    folder = ROOT / ".build" / "pythons"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for version in ("3.9", "3.10", "3.11", "3.12", "3.13"):
        managed = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin"))
        found = shutil.which(
            f"python{version}",
            path=os.pathsep.join([*map(str, managed), "/usr/local/bin:/usr/bin"]),
        )
        if found and subprocess.run([found, "-c", ""], check=False).returncode == 0:
            (folder / f"python{version}").symlink_to(found)
    os.environ["PATH"] = os.pathsep.join([str(folder), str(TOOLS), os.environ["PATH"]])
    return [link.name.removeprefix("python") for link in folder.iterdir()]


PYTHONS = _pythons()
PAIRS = [(version, core) for version in PYTHONS for core in CORES.get(version, [])]
if PAIRS:
    PAIRS = sorted({min(PAIRS, key=itemgetter(1)), max(PAIRS, key=itemgetter(1))})


def _tracked(*suffixes: str) -> list[str]:
    """List the files of the working tree that git does not ignore."""
    listing = subprocess.check_output(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True
    )
    return [n for n in listing.splitlines() if n.endswith(suffixes) and (ROOT / n).exists()]


@nox.session(venv_backend="none")
def lint(session: nox.Session) -> None:
    """Format, style, types, YAML, shell scripts, Ansible content, change log."""
    session.run("ruff", "format", "--check", ".")
    session.run("ruff", "check", ".")
    session.run("mypy", str(OURS / "plugins"))
    session.run("yamllint", "--strict", ".")
    # a template is a script only after it was rendered, which unit tests do and then run it
    names = [n for n in _tracked("") if not n.endswith(".j2")]
    shells = [n for n in names if (ROOT / n).is_file() and _is_shell(ROOT / n)]
    session.run("shellcheck", *shells, external=True)
    session.run("ansible-lint", "--offline")
    session.run("antsibull-changelog", "lint")


def _is_shell(path: Path) -> bool:
    with path.open("rb") as file:
        first = file.readline()
    return first.startswith(b"#!") and first.rstrip().endswith((b"/sh", b"bash"))


@nox.session
@nox.parametrize(("python", "core"), PAIRS)
def sanity(session: nox.Session, core: str) -> None:
    """Run ansible-test sanity, on the oldest and the newest ansible-core that install here."""
    session.install(f"ansible-core=={core}.*")
    tree = ROOT / ".build" / f"sanity-{core}"
    copy = tree / "ansible_collections" / "gpuhost" / "inference"
    shutil.rmtree(copy, ignore_errors=True)  # ansible-test refuses a symlink
    for name in _tracked(""):
        if name.startswith("lab/"):  # beside the collection: no part of what is installed
            continue
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy / name, follow_symlinks=False)
    # a repository of its own: in ours the copy is ignored, and ansible-test would test nothing
    session.run("git", "init", "-q", str(copy), external=True)
    _bootstrap_pip()
    pythons = ROOT / ".build" / "pythons"
    path = os.pathsep.join([session.bin, str(pythons), "/usr/sbin:/usr/bin:/sbin:/bin"])
    session.chdir(copy)
    session.run("ansible-test", "sanity", "--local", "--color", "no", env={"PATH": path})


def _bootstrap_pip() -> None:
    """Give ansible-test its pip bootstrap file, which it would download from a host of its own."""
    cache = Path.home() / ".ansible" / "test" / "cache"
    cache.mkdir(parents=True, exist_ok=True)
    for release in ("23_1_2", "24_2", "25_2"):  # ansible-core 2.16, 2.18, 2.20 and later
        target = cache / f"get_pip_{release}.py"
        if not target.exists():
            shutil.copy(ROOT / "tests" / "get_pip.py", target)


@nox.session(venv_backend="none")
def docs(session: nox.Session) -> None:
    """Check that the documentation of every module and role is complete and valid."""
    session.chdir(OURS)
    session.run("antsibull-docs", "lint-collection-docs", "--plugin-docs", "--skip-rstcheck", ".")
