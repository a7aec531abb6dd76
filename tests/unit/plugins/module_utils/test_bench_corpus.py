"""Prompts: different from one another, the same for a seed, as long as asked for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from ansible_collections.gpuhost.inference.plugins.module_utils import _bench_corpus, _bench_texts
from ansible_collections.gpuhost.inference.plugins.module_utils._bench_corpus import (
    KINDS,
    built_in,
    estimate,
    from_file,
    prompts,
    repeats_itself,
)
from ansible_collections.gpuhost.inference.plugins.module_utils._errors import GpuHostError

MANY = 768  # 128 at a time: 512 measured and 256 of the warm-up


def body(prompt: str) -> str:
    """Return a prompt without the line that is only there to differ."""
    first, _line, rest = prompt.partition("\n")
    assert first.startswith("Reference ")
    return rest


@pytest.mark.parametrize("kinds", [[kind] for kind in KINDS] + [["code", "chat", "reasoning"]])
def test_there_are_enough_different_prompts(kinds: list[str]) -> None:
    made = prompts(built_in(kinds), MANY, "1/128", None)
    assert len({prompt.split("\n", 1)[0] for prompt in made}) == MANY
    assert len({body(prompt) for prompt in made}) >= 0.98 * MANY
    assert all("{" not in prompt.replace("{{ names }}", "") for prompt in made)


def test_a_seed_gives_the_same_prompts_in_any_process() -> None:
    code = (
        "import sys; sys.path[:0] = sys.argv[1:]\n"
        "from ansible_collections.gpuhost.inference.plugins.module_utils._bench_corpus import *\n"
        "print(prompts(built_in(KINDS), 40, '3/8', 900)[::9], built_in(KINDS).sha256)"
    )
    command = [sys.executable, "-c", code, *sys.path]
    told = {
        subprocess.run(
            command, check=True, capture_output=True, env={"PYTHONHASHSEED": seed}
        ).stdout
        for seed in ("1", "2")
    }
    again = prompts(built_in(KINDS), 40, "3/8", 900)[::9], built_in(KINDS).sha256
    assert told == {f"{again[0]} {again[1]}\n".encode()}
    assert prompts(built_in(KINDS), 4, "4/8", None) != prompts(built_in(KINDS), 4, "3/8", None)


def test_more_prompts_begin_with_the_same_ones() -> None:
    corpus = built_in(["code", "chat"])
    assert prompts(corpus, 50, "1", None)[:20] == prompts(corpus, 20, "1", None)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [500, 8000, 64000])
def test_context_is_met(kind: str, tokens: int) -> None:
    for prompt in prompts(built_in([kind]), 3, "1", tokens):
        assert estimate(len(prompt)) == pytest.approx(tokens, rel=0.12, abs=60)


def test_documents_do_not_repeat_themselves() -> None:
    """Text that repeats is guessed by any draft, and would make speculation look too good."""
    (prompt,) = prompts(built_in(["long"]), 1, "1", 32000)
    words = prompt.split()
    runs = [tuple(words[at : at + 12]) for at in range(len(words) - 12)]
    assert len(set(runs)) > 0.95 * len(runs)


def test_kinds_take_turns() -> None:
    made = prompts(built_in(["code", "chat", "long"]), 9, "1", None)
    assert ["```" in prompt for prompt in made] == [True, False, False] * 3
    assert [len(prompt) > 10000 for prompt in made] == [False, False, True] * 3


def test_names() -> None:
    assert built_in(["chat"]).name == "chat"
    assert built_in(["chat", "code"]).name == "mixed"
    assert built_in(["chat", "chat"]).kinds == ("chat",)


@pytest.mark.parametrize("kinds", [[], ["poems"]])
def test_no_such_kind(kinds: list[str]) -> None:
    with pytest.raises(GpuHostError, match=r"kinds: .* choose from code, chat, reasoning, long"):
        built_in(kinds)


def test_other_phrases_are_another_corpus(monkeypatch: pytest.MonkeyPatch) -> None:
    before = built_in(["chat"]).sha256
    assert built_in(["code"]).sha256 == before  # kinds are told beside it
    monkeypatch.setattr(_bench_texts, "PEOPLE", ("Ada",))
    assert built_in(["chat"]).sha256 != before


def test_it_is_small() -> None:
    files = [Path(module.__file__) for module in (_bench_texts, _bench_corpus)]
    assert sum(file.stat().st_size for file in files) < 150_000


TURNS = [{"from": "human", "value": "One?"}, {"from": "gpt", "value": "Yes."}]


def test_sharegpt_as_a_list_and_as_lines(tmp_path: Path) -> None:
    entries = [{"conversations": TURNS}, {"conversation": [{"value": "Two?"}]}]
    entries += [{"messages": [{"role": "user", "content": "Three?"}]}, {"conversations": TURNS}]
    whole, lines = tmp_path / "a.json", tmp_path / "b.jsonl"
    whole.write_text(json.dumps(entries))
    lines.write_text("\n".join(json.dumps(one) for one in entries) + "\n\n")
    assert from_file(str(whole)).given == from_file(str(lines)).given == ("One?", "Two?", "Three?")
    corpus = from_file(str(whole))
    assert corpus.name == "file"
    assert len(corpus.sha256) == 64
    made = prompts(corpus, 3, "1", None)
    assert sorted(body(prompt) for prompt in made) == ["One?", "Three?", "Two?"]
    (long,) = prompts(corpus, 1, "1", 1000)
    assert long.endswith("?")
    assert estimate(len(long)) == pytest.approx(1000, rel=0.12)


def test_a_file_with_too_few_prompts(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"conversations": TURNS}]))
    with pytest.raises(GpuHostError, match="holds 1 different prompts, 2 are needed"):
        prompts(from_file(str(path)), 2, "1", None)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "holds no prompt"),
        ("[]", "holds no prompt"),
        ("hello", "neither a list in JSON nor an object on each line"),
        ("[1, 2", "neither a list"),
        ('{"conversations": []}', 'line 1: no "conversations" whose first turn has a text'),
        ('[{"conversations": [{"value": ""}]}]', "entry 1: no"),
        ("[3]", "entry 1: no"),
        ('[{"messages": [{"content": "Half: \\ud83d"}]}]', "entry 1: half a character (\\ud83d)"),
    ],
)
def test_files_that_are_none(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(content)
    with pytest.raises(GpuHostError, match="prompts: ") as caught:
        from_file(str(path))
    assert said in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(GpuHostError, match="cannot be read: No such file"):
        from_file(str(tmp_path / "none"))


@pytest.mark.parametrize(
    "text",
    [
        "hello " * 50,
        "Prompt 17 of 64. Go on with this:\n" + "hello world " * 300,
        "The quick brown fox jumps over the lazy dog. " * 40,
        "\u554a" * 200,
        "x" * 70,
        prompts(built_in(["long"]), 1, "1", 2000)[0] + "hello " * 5000,
    ],
    ids=[str(number) for number in range(6)],
)
def test_a_prompt_that_repeats_itself(tmp_path: Path, text: str) -> None:
    """As in the field, where nearly every draft was accepted: what it measures no user sees."""
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"conversations": TURNS}, {"conversations": [{"value": text}]}]))
    with pytest.raises(GpuHostError, match=r"a\.json, entry 2: the text repeats itself"):
        from_file(str(path))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("context", [None, 400, 8000])
def test_real_prompts_do_not_repeat_themselves(kind: str, context: int | None) -> None:
    made = prompts(built_in([kind]), 40, "7", context)
    assert [text for text in made if repeats_itself(text)] == []


@pytest.mark.parametrize(
    "text",
    [
        "Hi!",
        "no no no no no",
        "\n".join(
            f"{n // 60:02}:{n % 60:02} worker-3 request done, 200, {n * 37 % 91} ms"
            for n in range(99)
        ),
        "Sum the columns:\n" + "\n".join(f"0,0,1,0,{n * n * n % 10007},0" for n in range(300)),
    ],
)
def test_short_and_monotonous_prompts_are_prompts(text: str) -> None:
    assert not repeats_itself(text)
