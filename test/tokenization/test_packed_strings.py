"""`PackedStrings`: a sequence of str that can be serialized."""

from __future__ import annotations

import msgspec
import pytest

from llaisys.tokenization.source import PackedStrings

WORDS = ["a", "", "ß€", "🙂 b", "\0", "last"]


def test_packed_strings_is_a_sequence() -> None:
    texts = PackedStrings.of(WORDS)
    assert list(texts) == WORDS and len(texts) == len(WORDS)
    assert [texts[i] for i in range(-len(WORDS), len(WORDS))] == WORDS * 2
    assert texts[1:5:2] == WORDS[1:5:2] and texts.index("ß€") == 2 and "🙂 b" in texts
    assert texts == PackedStrings.of(tuple(WORDS)) != PackedStrings.of(WORDS[:-1])
    assert not PackedStrings() and list(PackedStrings.of(())) == []
    for number in (len(WORDS), -len(WORDS) - 1):
        with pytest.raises(IndexError):
            texts[number]


def test_packed_strings_survive_serialization() -> None:
    texts = PackedStrings.of(WORDS)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(texts), type=PackedStrings) == texts
