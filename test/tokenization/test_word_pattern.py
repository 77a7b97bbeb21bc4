"""The trie pattern equals trying all words, longest first."""

from __future__ import annotations

import random
import re
import time

import pytest

from llaisys.tokenization.control_tokens import words_pattern


def spans_of_all(words: list[str], text: str) -> list[tuple[int, int]]:
    ordered = sorted((word for word in words if word), key=len, reverse=True)
    naive = "|".join(map(re.escape, ordered)) or "(?!)"
    return [match.span() for match in re.finditer(naive, text)]


@pytest.mark.parametrize("seed", range(40))
def test_longest_word_matches_first(seed: int) -> None:
    rng = random.Random(seed)
    letters = "ab<|>[]^-\\\n é"
    words = ["".join(rng.choices(letters, k=rng.randrange(0, 7))) for _ in range(rng.randrange(40))]
    text = "".join(rng.choices(letters, k=300))
    found = [match.span() for match in re.finditer(words_pattern(words), text)]
    assert found == spans_of_all(words, text)


def test_nested_prefixes_have_bounded_depth() -> None:
    words = ["a" * n for n in range(1, 400)]
    finder = re.compile(words_pattern(words))
    assert [m.span() for m in finder.finditer("a" * 1000)] == [(0, 399), (399, 798), (798, 1000)]


def test_search_takes_linear_time() -> None:
    finder = re.compile(words_pattern(f"<|{i}|>" for i in range(20_000)))
    started = time.thread_time()
    assert finder.findall("<|" * 200_000) == []
    assert time.thread_time() - started < 2
