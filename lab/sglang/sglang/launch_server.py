# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""`python -m sglang.launch_server`: the lab's stand-in, no model is computed, no GPU is used."""

import sys

from sglang.standin.main import launch

if __name__ == "__main__":
    launch(sys.argv[1:])
