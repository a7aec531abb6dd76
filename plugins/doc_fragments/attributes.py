# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this doc fragment is private to the collection: it may change at any time.

"""Attributes of modules, worded once."""

from __future__ import annotations


class ModuleDocFragment:
    # what every module says
    DOCUMENTATION = r"""
options: {}
attributes:
  check_mode:
    description: Can run in check mode and tell what would change, without changing anything.
  diff_mode:
    description: Returns what changed, or in check mode would change, when run in diff mode.
  platform:
    description: Operating systems of the managed host that the module works on.
    support: full
    platforms: linux
"""

    # modules that only look
    INFO_MODULE = r"""
options: {}
attributes:
  check_mode:
    support: full
    details:
      - This module does not change anything.
  diff_mode:
    support: N/A
    details:
      - This module does not change anything.
"""

    # modules that bring about a state
    STATE_MODULE = r"""
options: {}
attributes:
  check_mode:
    support: full
  diff_mode:
    support: full
"""
