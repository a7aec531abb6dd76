# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.

"""Errors that end a module with one sentence for its user."""

from __future__ import annotations


class GpuHostError(Exception):
    """A refusal or failure; the text names the thing, what is wrong with it and the next step."""


class UnreadableError(GpuHostError):
    """Something exists but could not be read. Callers treat it as unknown, never as absent."""
