# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.

"""Command lines and logs without the keys in them: whoever runs a playbook sees them."""

from __future__ import annotations

import re

# How the name of a secret ends: API_KEY, --hf-token, but not tokens, tokenizer, keyfile.
_ENDS = (
    r"(?:token|secret|password|passwd|passphrase|apikey|credentials?|authorization"
    r"|[_.-](?:key|auth|pass|pwd))"
)
_SECRET = re.compile(
    # an option with its value apart, or the scheme of HTTP; #new-token is a count of SGLang's
    rf"""((?<![\w.#-])(?:-[\w.-]*{_ENDS}(?:['"],?)?\s+(?!-)|bearer\s+"""
    rf"""|(?:[\w.-]*{_ENDS})['"]?\s*[=:]\s*(?:(?:bearer|basic|token)\s+)?))"""
    # what the log shows when there is none
    r"""(?!(?:None|null)(?:[\s,)}\]]|$))"""
    r"""(?:'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|\S+)""",
    re.IGNORECASE,
)
_IN_URL = re.compile(r"(://[^\s:/@]*:)[^\s/]+(?=@)")


def redact(text: str) -> str:
    """Return a text with `(redacted)` for each value that looks like a secret.

    Known are options, settings and headers whose name ends like that of a secret, and passwords in
    URLs. A secret that nothing names cannot be told from other words.
    """
    return _IN_URL.sub(r"\1(redacted)", _SECRET.sub(r"\1(redacted)", text))
