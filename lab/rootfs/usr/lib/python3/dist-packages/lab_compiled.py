"""Keeps what Python compiles when it imports from zip files.

Ansible sends each module as a zip of sources, and Python compiles all of them on every run: under
software emulation that is most of a module's time. What runs is the same code; only the work of
compiling is done once for each text.
"""
# pathlib would cost each start of a Python more than this is
# ruff: noqa: PTH103, PTH105, PTH123

import _imp
import contextlib
import marshal
import os
import sys
import zipimport

FOLDER = "/var/cache/lab-python"
_compile = zipimport._compile_source


def compile_source(path, source):
    """Return the code of a source file, from the cache when it has the same text."""
    kept = f"{FOLDER}/{_imp.source_hash(sys.hexversion, source).hex()}"
    try:
        with open(kept, "rb") as file:
            code = marshal.load(file)
        _imp._fix_co_filename(code, path)
        return code
    except (OSError, EOFError, ValueError, TypeError):
        pass
    code = _compile(path, source)
    with contextlib.suppress(OSError):
        os.makedirs(FOLDER, exist_ok=True)
        whole = f"{kept}.{os.getpid()}"
        with open(whole, "wb") as file:
            marshal.dump(code, file)
        os.replace(whole, kept)
    return code


zipimport._compile_source = compile_source
