# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""`sglang serve MODEL --flags` and `sglang version`."""

import sys

from sglang import __version__


def main() -> None:
    """Run the command line."""
    command, arguments = "".join(sys.argv[1:2]), sys.argv[2:]
    if command == "version":
        print(f"sglang version: {__version__}")
    elif command == "serve":
        from sglang.standin.main import launch  # noqa: PLC0415 - `version` needs none of it

        if arguments and not arguments[0].startswith("-"):
            arguments = ["--model-path", *arguments]
        launch(arguments)
    else:
        sys.exit("usage: sglang {serve,version} ...")
