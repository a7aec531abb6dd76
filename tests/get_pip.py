"""Stands for the pip bootstrap script that ansible-test downloads; uses the pip of Python."""

from __future__ import annotations

import ensurepip
import os
import subprocess
import sys

environment = dict(os.environ)  # ensurepip drops PIP_* settings, which pip needs behind a proxy
ensurepip.bootstrap()
arguments = [a for a in sys.argv[1:] if a not in ("--no-setuptools", "--no-wheel")]
command = [sys.executable, "-m", "pip", "install", "--upgrade", *arguments]
subprocess.check_call(command, env=environment)
