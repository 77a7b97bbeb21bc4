"""Fill-in-the-middle prompts: special tokens and snippets that fit."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from error_helpers import naming

from llaisys.common.sampling import SamplingParams
from llaisys.server.errors import ApiError
from llaisys.server.generation.infill import (
    FILE_MARKERS,
    FIM_MARKERS,
    Infill,
    Snippet,
    encode_infill,
)
from llaisys.server.generation.prompts import PromptLimit

FIRST_MARK = 300


class Marked:
    """A tokenizer of bytes; FIM markers are the ids after them."""

    def __init__(self, *marks: str) -> None:
        self.marks = marks

    def token_id(self, text: str) -> int | None:
        return FIRST_MARK + self.marks.index(text) if text in self.marks else None

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return ([1] if add_special_tokens else []) + list(text.encode())

    def show(self, ids: list[int]) -> str:
        names = {FIRST_MARK + i: mark for i, mark in enumerate(self.marks)} | {1: "<s>"}
        return "".join(names.get(i) or chr(i) for i in ids)


class Engine:
    def __init__(self, tokenizer: Marked, vocab_size: int = 400) -> None:
        self.tokenizer = tokenizer
        self.inputs = SimpleNamespace(info=SimpleNamespace(vocab_size=vocab_size))
        self.texts = SimpleNamespace(run=self._run)

    def require_tokenizer(self) -> Marked:
        return self.tokenizer

    async def _run(self, size: int, work: Any) -> Any:
        return work()


def made(engine: Engine, snippets: list[Snippet], num_new: int = 0, room: int = 100) -> Infill:
    limit = PromptLimit("prompt", room, room)
    work = encode_infill(engine, "ab", "cd", limit, "suffix", snippets, num_new)  # type: ignore[arg-type]
    return asyncio.run(work)


@pytest.mark.parametrize("marks", FIM_MARKERS)
def test_each_family_has_its_fim_tokens(marks: tuple[str, str, str]) -> None:
    tokenizer = Marked(*marks)
    found = made(Engine(tokenizer), [Snippet("n.h", "int n;")])
    first, second, third = marks
    assert tokenizer.show(found.ids) == f"<s>n.h\nint n;\n{first}ab{second}cd{third}"
    assert found.ends == ()


def test_model_without_fim_tokens_is_rejected() -> None:
    for engine in (
        Engine(Marked(*FIM_MARKERS[0][:2])),
        Engine(Marked(*FIM_MARKERS[0]), vocab_size=302),
    ):
        with naming(ApiError, "suffix") as caught:
            made(engine, [])
        assert caught.value.param == "suffix" and caught.value.code == "no_infill"


def test_uses_last_snippets_that_fit() -> None:
    tokenizer = Marked(*FIM_MARKERS[0], FILE_MARKERS[0])
    engine = Engine(tokenizer)
    snippets = [Snippet("a", "x" * 20), Snippet("b", "y" * 10), Snippet("c", "z")]
    core = len(made(engine, []).ids)

    def names(room: int, num_new: int = 0) -> str:
        text = tokenizer.show(made(engine, snippets, num_new, room).ids)
        return "".join(name for name in "abc" if f"{FILE_MARKERS[0]}{name}\n" in text)

    assert names(core) == "" and names(core + 7) == "c"
    assert names(core + 2 + 5 + 14) == "bc" and names(core + 2 + 5 + 14, num_new=1) == "c"
    assert names(100) == "abc"
    with pytest.raises(ApiError) as caught:
        made(engine, snippets, room=core - 1)
    assert caught.value.code == "context_length_exceeded"


def test_answer_stops_at_another_file() -> None:
    infill = Infill([1], (7, 8))
    assert infill.with_stop_tokens(SamplingParams(stop_token_ids=[5])).stop_token_ids == (5, 7, 8)
    assert infill.with_stop_tokens(SamplingParams(ignore_eos=True)).stop_token_ids == ()
