# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.

"""Prompts for a measurement: composed of our own phrases, or read from a file.

How many drafts are accepted depends on the text, so one repeated word or random tokens measure
nothing that users will see. Each prompt is another one and begins with a line of its own, so that
no prefix cache helps; the same seed gives the same prompts on every machine.
"""

from __future__ import annotations

import hashlib
import json
import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ansible_collections.gpuhost.inference.plugins.module_utils import _bench_texts as texts
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError

KINDS = ("code", "chat", "reasoning", "long")
CHARACTERS_PER_TOKEN = 4  # of English, about; what it really was the server tells
LONG_TOKENS = 4000  # of the documents of `long` where no context is asked for
# least bytes of a prompt, and most at its begin and end, by which it is seen if it repeats itself
LOOKED_AT = 64, 4096
# a text that repeats itself is packed into a header and next to nothing; natural text into a third,
# a record of readings into a tenth
PACKED_HEADER, PACKED_SHARE = 24, 0.04


@dataclass(frozen=True)
class Corpus:
    """Where prompts come from.

    Attributes:
        kinds: of the built-in prompts, in turns; one name `file` for a file.
        sha256: of all that decides the texts besides seed and context.
        given: the prompts of a file, `None` for the built-in ones.
    """

    kinds: tuple[str, ...]
    sha256: str
    given: tuple[str, ...] | None = None

    @property
    def name(self) -> str:
        """Return `mixed`, the only kind, or `file`."""
        return self.kinds[0] if len(self.kinds) == 1 else "mixed"


def built_in(kinds: Sequence[str]) -> Corpus:
    """Return the corpus of the collection.

    Raises:
        GpuHostError: there is no such kind, or none is asked for.
    """
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown or not kinds:
        asked = f"{unknown[0]!r} is none" if unknown else "none is given"
        raise GpuHostError(f"kinds: {asked}; choose from {', '.join(KINDS)}")
    phrases = {name: value for name, value in vars(texts).items() if name.isupper()}
    content = json.dumps([phrases, _shape()], sort_keys=True)
    digest = hashlib.sha256(content.encode()).hexdigest()
    return Corpus(tuple(dict.fromkeys(kinds)), digest)


def _shape() -> list[str]:
    """Return a prompt of each kind, so that another way to compose them is another corpus."""
    return [_prompt(kind, 0, 0, 600) for kind in KINDS]


def from_file(path: str) -> Corpus:
    """Read ShareGPT's form, as JSON or one object on each line: the first turn of each.

    Raises:
        GpuHostError: it cannot be read, or holds something else.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise GpuHostError(f"prompts: {path} cannot be read: {error.strerror}") from error
    digest = hashlib.sha256(content).hexdigest()
    found = [_first_turn(path, number, one) for number, one in _entries(path, content)]
    distinct = tuple(dict.fromkeys(found))
    if not distinct:
        raise GpuHostError(f"prompts: {path} holds no prompt")
    return Corpus(("file",), digest, distinct)


def _entries(path: str, content: bytes) -> list[tuple[str, Any]]:
    try:
        text = content.decode()
        if text.lstrip().startswith("["):
            whole = json.loads(text)
            return [(f"entry {number}", one) for number, one in enumerate(whole, 1)]
        lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
        return [(f"line {number}", json.loads(line)) for number, line in lines]
    except (ValueError, RecursionError) as error:
        raise GpuHostError(
            f"prompts: {path} is neither a list in JSON nor an object on each line: {error}"
        ) from error


def _first_turn(path: str, where: str, entry: Any) -> str:
    turns: Any = None
    if isinstance(entry, dict):
        turns = entry.get("conversations") or entry.get("conversation") or entry.get("messages")
    first = turns[0] if isinstance(turns, list) and turns else None
    text = (first.get("value") or first.get("content")) if isinstance(first, dict) else None
    if not isinstance(text, str) or not text.strip():
        raise GpuHostError(
            f'prompts: {path}, {where}: no "conversations" whose first turn has a text in "value"'
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise GpuHostError(
            f"prompts: {path}, {where}: half a character (\\u{ord(text[error.start]):04x}), "
            "which no server takes: take it out"
        ) from error
    if repeats_itself(text):
        raise GpuHostError(
            f"prompts: {path}, {where}: the text repeats itself, so that nearly every draft would "
            "be accepted, as no user's are: take it out, or put a real prompt in its place"
        )
    return text


def repeats_itself(text: str) -> bool:
    """Return whether a prompt is one word or phrase over and over, whatever stands before it.

    A draft of more of the same is always right, so MTP looks better than users will find it.
    """
    content = text.encode()
    least, most = LOOKED_AT
    return len(content) >= least and any(
        len(zlib.compress(part, 9)) < PACKED_HEADER + PACKED_SHARE * len(part)
        for part in (content[:most], content[-most:])
    )


def check_count(corpus: Corpus, count: int) -> None:
    """Refuse a file with fewer prompts than so many.

    Raises:
        GpuHostError: it has fewer.
    """
    if corpus.given is not None and len(corpus.given) < count:
        raise GpuHostError(
            f"prompts: the file holds {len(corpus.given)} different prompts, {count} are needed "
            "for the measured requests and the warm-up: add some, or ask for fewer requests"
        )


def prompts(corpus: Corpus, count: int, seed: str, context_tokens: int | None) -> list[str]:
    """Return so many different prompts, always the same ones for a seed.

    Args:
        corpus: where they come from.
        count: how many.
        seed: another one gives others.
        context_tokens: about how many tokens each has, by a document before its question; `None`
            for the question alone, and 4000 of the kind `long`.

    Raises:
        GpuHostError: a file has fewer.
    """
    if corpus.given is None:
        kinds = corpus.kinds
        rows = range(count)
        return [_prompt(kinds[row % len(kinds)], row, seed, context_tokens) for row in rows]
    check_count(corpus, count)
    order = sorted(corpus.given, key=lambda text: hashlib.sha256(f"{seed}{text}".encode()).digest())
    chosen = []
    for row, text in enumerate(order[:count]):
        document = _document(_Dice(f"{seed}/file/{row}"), (context_tokens or 0) * 4 - len(text))
        chosen.append("\n".join(part for part in (_first_line(seed, row), document, text) if part))
    return chosen


def estimate(characters: int) -> int:
    """Return about how many tokens a text has."""
    return round(characters / CHARACTERS_PER_TOKEN)


class _Dice:
    """Choices from a seed; `random.random` is the one method that never changes its numbers."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)

    def number(self, low: int, high: int) -> int:
        return low + int(self._random.random() * (high - low + 1))

    def one(self, values: Sequence[Any]) -> Any:
        return values[self.number(0, len(values) - 1)]


def _first_line(seed: object, row: int) -> str:
    name = hashlib.sha256(f"{seed}/{row}".encode()).hexdigest()
    return f"Reference {name[:4]}-{name[4:8]}-{name[8:12]}."


def _prompt(kind: str, row: int, seed: object, context_tokens: int | None) -> str:
    dice = _Dice(f"{seed}/{kind}/{row}")
    question = _QUESTIONS[kind](dice)
    wanted = context_tokens or (LONG_TOKENS if kind == "long" else 0)
    document = _document(dice, wanted * CHARACTERS_PER_TOKEN - len(question))
    return "\n".join(part for part in (_first_line(seed, row), document, question) if part)


def _code(dice: _Dice) -> str:
    name, does = dice.one(texts.PROGRAMS)
    return (
        f"I need this in {dice.one(texts.LANGUAGES)}:\n\n```\n{name}\n```\n\nIt {does}. "
        f"{dice.one(texts.CODE_NEEDS)} {dice.one(texts.CODE_TASKS)}"
    )


def _chat(dice: _Dice) -> str:
    topic, detail = dice.one(texts.TOPICS)
    task = dice.one(texts.CHAT_TASKS).format(topic=topic, detail=detail)
    return f"{task} {dice.one(texts.CHAT_TONES)} Call me {dice.one(texts.PEOPLE)}."


def _reasoning(dice: _Dice) -> str:
    x, y = dice.one(texts.PEOPLE), dice.one(texts.PEOPLE)
    numbers = {"a": dice.number(12, 48), "b": dice.number(5, 9), "c": dice.number(2, 4)}
    puzzle = dice.one(texts.PUZZLES).format(
        x=x,
        y=y if y != x else "the neighbour",
        thing=dice.one(texts.THINGS),
        d=dice.number(3, 11),
        **numbers,
    )
    return f"Solve this. {puzzle} {dice.one(texts.REASONING_TASKS)}"


def _long(dice: _Dice) -> str:
    return f"The documents above belong together. {dice.one(texts.LONG_TASKS)}"


_QUESTIONS = {"code": _code, "chat": _chat, "reasoning": _reasoning, "long": _long}


def _document(dice: _Dice, characters: int) -> str:
    """Return documents of about so many characters, none for less than one sentence."""
    if characters < 100:
        return ""
    parts: list[str] = []
    size = number = 0
    while size < characters:
        number += 1
        heading = f"{dice.one(texts.HEADINGS)} {number}, {dice.one(texts.PLACES)}"
        lines = dice.one(_SECTIONS)(dice)
        kept = [f"{heading}, {dice.one(texts.TEAMS)} team"]
        for line in lines:
            kept.append(line)
            if size + sum(map(len, kept)) + len(kept) >= characters:
                break
        parts.append("\n".join(kept))
        size += len(parts[-1]) + 2
    return "\n\n".join(parts) + "\n"


def _report(dice: _Dice) -> list[str]:
    """Return sentences, none of one form twice."""
    forms = list(texts.SENTENCES)
    chosen = [forms.pop(dice.number(0, len(forms) - 1)) for _turn in range(dice.number(5, 14))]
    return [_filled(dice, form) for form in chosen]


def _talk(dice: _Dice) -> list[str]:
    """Return what people said to one another."""
    speakers = [dice.one(texts.PEOPLE) for _turn in range(3)]
    forms = list(texts.REMARKS)
    chosen = [forms.pop(dice.number(0, len(forms) - 1)) for _turn in range(dice.number(4, 9))]
    return [f"{dice.one(speakers)}: {_filled(dice, form)}" for form in chosen]


def _readings(dice: _Dice) -> list[str]:
    """Return lines of a record."""
    part, clock = dice.one(texts.PARTS), dice.number(0, 1200)
    lines = []
    for _line in range(dice.number(6, 16)):
        clock = (clock + dice.number(3, 59)) % 1440
        lines.append(
            f"{clock // 60:02}:{clock % 60:02} {part}: {dice.number(10, 999) / 10} units, "
            f"{dice.one(texts.EVENTS)} ({dice.one(texts.PEOPLE)})"
        )
    return lines


_SECTIONS = (_report, _report, _talk, _readings)


def _filled(dice: _Dice, form: str) -> str:
    return form.format(
        who=dice.one(texts.PEOPLE),
        team=dice.one(texts.TEAMS),
        part=dice.one(texts.PARTS),
        place=dice.one(texts.PLACES),
        n=dice.number(2, 90),
        m=dice.number(11, 97),
    )
