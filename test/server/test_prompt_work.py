"""Work on a prompt before it is known to fit: bounded, and in a thread when long."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any
from unittest.mock import MagicMock

import pytest

from llaisys.common.errors import InvalidInputError, LlaisysError
from llaisys.server.engine_client.text_work import TextWork
from llaisys.server.generation.prompts import (
    CHARS_PER_TOKEN,
    WINDOW_CHARS,
    PromptLimit,
    encode_prompts,
)
from llaisys.tokenization import ChatTemplate

CONTEXT = 100_000


class CountingTokenizer:
    """A tokenizer with one token per character; counts its input characters."""

    seen = 0

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.seen += len(text)
        return [7] * len(text)


@pytest.mark.parametrize("chars, most_seen", [
    (CHARS_PER_TOKEN * CONTEXT + 1, 0),  # cannot fit by its length
    (CHARS_PER_TOKEN * CONTEXT, CONTEXT + 2 * WINDOW_CHARS),  # does not fit: detected by windows
])  # fmt: skip
def test_too_long_text_is_tokenised_only_up_to_the_limit(chars: int, most_seen: int) -> None:
    tokenizer, engine = CountingTokenizer(), MagicMock()
    engine.require_tokenizer.return_value = tokenizer

    async def run(size: int, work: Any) -> Any:
        return work()

    engine.texts.run = run
    limit = PromptLimit("prompt", CONTEXT, CONTEXT - 1)
    with pytest.raises(LlaisysError):
        asyncio.run(encode_prompts(engine, ["x" * chars, "never looked at"], True, limit))
    assert tokenizer.seen <= most_seen


SLOW = ChatTemplate("{% for a in range(9999) %}{% for b in range(99) %}{% endfor %}{% endfor %}")


def test_slow_model_template_is_rendered_in_a_thread() -> None:
    """The first rendering starts inline, because its time is unknown."""
    here = threading.get_ident()
    seconds: list[tuple[bool, float]] = []  # on the loop, CPU

    def render() -> str:
        start = time.thread_time()
        try:
            return SLOW.render([{"role": "user", "content": "x"}])
        finally:
            seconds.append((threading.get_ident() == here, time.thread_time() - start))

    async def ask() -> None:
        texts = TextWork()
        for _ in range(2):
            with pytest.raises(InvalidInputError):
                await texts.render(1, False, render)
        assert await texts.render(1, False, lambda: threading.get_ident()) != here
        texts.close()

    asyncio.run(ask())
    assert [on_loop for on_loop, _ in seconds] == [True, False, False]
    assert seconds[0][1] < 0.1 < seconds[1][1]


def test_fast_template_is_rendered_inline() -> None:
    quick, here = ChatTemplate("{{ messages[0].content }}"), threading.get_ident()

    def render() -> tuple[str, int]:
        return quick.render([{"role": "user", "content": "hi"}]), threading.get_ident()

    async def ask() -> None:
        texts = TextWork()
        assert await texts.render(1, False, render) == ("hi", here)
        texts.close()

    asyncio.run(ask())
