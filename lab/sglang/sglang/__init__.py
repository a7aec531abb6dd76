# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The lab's stand-in for SGLang: no model is computed, no GPU is used. See lab/sglang/README.md."""

__version__ = "0.5.23"
