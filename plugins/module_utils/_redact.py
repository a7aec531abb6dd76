# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.

"""Command lines and logs without the keys in them: whoever runs a playbook sees them."""

from __future__ import annotations

import re
from typing import Any

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
# tokens that can be told by their own form: those of the Hugging Face hub
_BARE = re.compile(r"\bhf_[A-Za-z0-9]{16,}")
_IN_URL = re.compile(r"(://[^\s:/@]*:)[^\s/]+(?=@)")


def one_line(text: str) -> str:
    """Return a stranger's text as one line, without signs that a terminal obeys."""
    shown = "".join(sign if sign.isprintable() else " " for sign in text)
    return " ".join(shown.split())


def redact(text: str) -> str:
    """Return a text with `(redacted)` for each value that looks like a secret.

    Known are options, settings and headers whose name ends like that of a secret, passwords in
    URLs, and tokens of the Hugging Face hub. A secret that nothing names cannot be told from other
    words.
    """
    named = _IN_URL.sub(r"\1(redacted)", _SECRET.sub(r"\1(redacted)", text))
    return _BARE.sub("(redacted)", named)


# Fields whose whole value is a secret, or holds one: a command line with a key among its words.
_SECRET_FIELD = re.compile(
    rf"(?:^|[\w.-]*){_ENDS}s?$|(?:^|_)key(?:_|$)|api_?key|password|secret|^launch_command$",
    re.IGNORECASE,
)


def redact_fields(value: Any) -> Any:
    """Return JSON-like data without secrets: by the names of fields, and in each text by `redact`.

    Numbers stay, as `first_token` is one of a count or a time; a key is a text.
    """
    if isinstance(value, dict):
        return {
            str(name): "(redacted)"
            if _SECRET_FIELD.search(str(name)) and isinstance(one, (str, list, dict))
            else redact_fields(one)
            for name, one in value.items()
        }
    if isinstance(value, list):
        return [redact_fields(one) for one in value]
    if isinstance(value, str):  # JSON can hold halves of characters, which nothing can print
        return redact(value.encode("utf-8", "replace").decode())
    return value
