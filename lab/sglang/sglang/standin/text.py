# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What is generated: words from a seed, and how well a draft layer would guess them."""

from __future__ import annotations

import re
from zlib import crc32

# Chance that the next draft token is right, at temperature 0. With three steps the mean accept
# length is 1 + p + p^2 + p^3. Public figures for this family lie between 1.7 and 2.8.
ACCEPTANCE = {"repeated": 0.97, "code": 0.76, "chat": 0.65, "reasoning": 0.53, "random": 0.12}
TEMPERATURE_LOSS = 0.12  # of the chance, for one unit of temperature

_TALE = (
    "the river carries cold water past an old mill where two brothers grind grain for bread while "
    "a narrow bridge of stone leads over to fields in which barley and flax grow under wide skies "
    "every morning someone opens heavy doors so that light falls on tools hanging along one wall "
    "later carts arrive from nearby villages bringing sacks news letters and sometimes music after "
    "noon children run between barrels until rain begins then all wait inside telling stories "
    "about ships mountains lost maps winter wolves clever foxes distant cities bright lanterns "
    "silent forests hidden gardens strange clocks copper bells broken wheels patient horses blue "
    "glass paper kites salt wind thunder harvest honey candles evening chairs neighbours questions"
)
WORDS = _TALE.split()

_CODE = re.compile(r"```|\bdef \w+\(|\bclass \w+|#include|\bfunction\b|[{};]\s*$|\breturn\b", re.M)
_REASONING = re.compile(r"step by step|\bprove\b|\bproof\b|\breason|\bsolve\b|\bhow many\b", re.I)
_WORD = re.compile(r"[A-Za-z]+(?:['-][A-Za-z]+)*[.,;:!?)\"]*|[0-9.,%]+|\W+")


def kind_of(prompt: str) -> str:
    """Return which kind of prompt a text is, by simple signs."""
    words = prompt.split()[-300:]  # long documents use few words often
    if len(words) >= 8 and len(set(words)) * 5 <= len(words):
        return "repeated"
    if _CODE.search(prompt):
        return "code"
    if len(words) >= 8 and sum(bool(_WORD.fullmatch(word)) for word in words) * 2 < len(words):
        return "random"
    return "reasoning" if _REASONING.search(prompt) else "chat"


def draft_chance(kind: str, temperature: float) -> float:
    """Return the chance that a draft token is accepted."""
    return ACCEPTANCE[kind] * (1 - TEMPERATURE_LOSS * min(temperature, 2.0))


class Dice:
    """A small generator of its own for each request, so that order and timing change nothing."""

    def __init__(self, seed: int) -> None:
        self._state = seed * 2862933555777941757 + 3037000493

    def below(self, limit: int) -> int:
        """Return a number from 0 to `limit` - 1."""
        self._state = (self._state * 6364136223846793005 + 1442695040888963407) & (2**64 - 1)
        return (self._state >> 33) % limit

    def hit(self, chance: float) -> bool:
        """Return true with a chance."""
        return self.below(1_000_000) < chance * 1_000_000


class Words:
    """The answer to one prompt, a word for each token. The same prompt has the same answer."""

    def __init__(self, seed: int) -> None:
        self._dice = Dice(seed)
        self._last = -1
        self._sentence = 0
        # Where the model would stop by itself.
        self.natural_length = 300 + self._dice.below(300)

    def more(self, count: int) -> tuple[str, list[int]]:
        """Return the next words as text, and their token numbers."""
        text, numbers = "", []
        for _ in range(count):
            at = self._dice.below(len(WORDS))
            if at == self._last:
                at = (at + 1) % len(WORDS)
            word = WORDS[at]
            if self._sentence == 0:
                word = word.capitalize()
                self._sentence = 6 + self._dice.below(9)
            self._sentence -= 1
            text += word + (" " if self._sentence else ". ")
            numbers.append(1000 + at)
            self._last = at
        return text, numbers


def seed_of(prompt: str, base: int) -> int:
    """Return the seed of a prompt."""
    return crc32(prompt.encode(), base)


def token_count(prompt: str) -> int:
    """Return about how many tokens a text has: four characters each."""
    return len(prompt) // 4 + 1
