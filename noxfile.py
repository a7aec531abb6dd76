"""Checks of the collection, one session each; `make test` runs them all (see CONTRIBUTING.md)."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import antsibull_nox
import nox

ROOT = Path(__file__).parent
COLLECTIONS = ROOT / ".build" / "collections"
OURS = COLLECTIONS / "ansible_collections" / "gpuhost" / "inference"
TOOLS = ROOT / ".build" / "venv" / "bin"

nox.options.sessions = ["lint", "unit", "sanity", "docs"]
nox.options.envdir = ROOT / ".build" / "nox"
os.environ["ANSIBLE_COLLECTIONS_PATH"] = str(COLLECTIONS)
os.environ["PATH"] = f"{TOOLS}{os.pathsep}{os.environ['PATH']}"
antsibull_nox.load_antsibull_nox_toml()

# ansible-core's oldest and newest release that install on each Python; the oldest is what AAP ships
CORES = {"3.11": ["2.16", "2.19"], "3.12": ["2.21"], "3.13": ["2.21"]}


def _python(version: str) -> str | None:
    """Find an interpreter that really runs: version managers leave shims of versions they lack."""
    versions = (Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin")
    path = os.pathsep.join([*map(str, sorted(versions)), os.environ["PATH"]])
    found = shutil.which(f"python{version}", path=path)
    works = found and subprocess.run([found, "-c", ""], check=False, capture_output=True)
    return found if works and works.returncode == 0 else None


PYTHONS = {v: p for v in ("3.9", "3.10", "3.11", "3.12", "3.13") if (p := _python(v))}
# Beside the oldest and newest pair that this machine can run, nothing new shows.
PAIRS = [(v, core) for v, cores in CORES.items() if v in PYTHONS for core in cores]
PAIRS = sorted({min(PAIRS, key=lambda p: p[1]), max(PAIRS, key=lambda p: p[1])}) if PAIRS else []


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
    shells = [n for n in _tracked("") if (ROOT / n).is_file() and _is_shell(ROOT / n)]
    session.run("shellcheck", *shells, external=True)
    session.run("ansible-lint", "--offline")
    session.run("antsibull-changelog", "lint")


def _is_shell(path: Path) -> bool:
    with path.open("rb") as file:
        first = file.readline()
    return first.startswith(b"#!") and first.rstrip().endswith((b"/sh", b"bash"))


@nox.session(venv_backend="none")
def unit(session: nox.Session) -> None:
    """Unit tests, in seconds, without root, network or lab."""
    session.run("pytest", *session.posargs)


@nox.session
@nox.parametrize(("python", "core"), PAIRS)
def sanity(session: nox.Session, core: str) -> None:
    """Run ansible-test sanity, on the oldest and the newest ansible-core that install here."""
    session.install(f"ansible-core=={core}.*")
    tree = ROOT / ".build" / f"sanity-{core}"
    copy = tree / "ansible_collections" / "gpuhost" / "inference"
    shutil.rmtree(copy, ignore_errors=True)  # ansible-test refuses a symlink
    for name in _tracked(""):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy / name, follow_symlinks=False)
    _bootstrap_pip()
    pythons = ROOT / ".build" / "pythons"
    pythons.mkdir(exist_ok=True)
    for version, interpreter in PYTHONS.items():
        (pythons / f"python{version}").unlink(missing_ok=True)
        (pythons / f"python{version}").symlink_to(interpreter)
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
