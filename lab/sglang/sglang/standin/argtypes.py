# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What the flags of `srt/server_args.py` refer to: value parsers and actions of SGLang."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

_FACTORS = {"k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_FACTORS.update({"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40})


def human_readable_int(text: str) -> int:
    """Read a number with an optional suffix: `32k`, `8Ki`."""
    for suffix in sorted(_FACTORS, key=len, reverse=True):
        if text.endswith(suffix):
            number = text[: -len(suffix)]
            return int(float(number) * _FACTORS[suffix])
    return int(text)


def nullable_str(text: str) -> str | None:
    """Read a text where an empty one and `None` mean no value."""
    return None if text in ("", "None") else text


json_list_type = json.loads
parse_cuda_graph_config_arg = json.loads
parse_cuda_graph_backend_arg = str


class LoRAPathAction(argparse.Action):
    """Collects adapters; the stand-in has none."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        """Keep the list as given."""
        setattr(namespace, self.dest, list(values))


class _Deprecated(argparse.Action):
    """A flag that works and warns, naming its successor."""

    def __init__(self, option_strings: Any, dest: str, new_flag: Any = None, **keys: Any) -> None:
        self.new_flag = new_flag
        super().__init__(option_strings, dest, **keys)

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        """Store true and warn."""
        print(
            f"'{option_string}' is deprecated and will be removed in a future release."
            + (f" Use '{self.new_flag}' instead." if self.new_flag else ""),
            file=sys.stderr,
        )
        setattr(namespace, self.dest, True)


class DeprecatedStoreTrueAction(_Deprecated):
    """A deprecated switch."""

    def __init__(self, option_strings: Any, dest: str, new_flag: Any = None, **keys: Any) -> None:
        super().__init__(option_strings, dest, new_flag, nargs=0, **{"default": False, **keys})


class DeprecatedStoreConstAction(_Deprecated):
    """A deprecated flag whose only value became a switch."""

    def __init__(self, option_strings: Any, dest: str, new_flag: Any = None, **keys: Any) -> None:
        super().__init__(option_strings, dest, new_flag, **{"nargs": 0, **keys})
