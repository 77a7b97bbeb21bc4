"""thinking_budget: when its tokens are spent, the engine ends the reasoning."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_templates import QWEN_TOKENS
from engine_fakes import FakeAdapter, make_engine, run_all
from error_helpers import naming
from model_files import write_tiny_tokenizer

from llaisys.common.errors import InvalidInputError
from llaisys.common.sampling import SamplingParams
from llaisys.common.step import SamplingMetadata
from llaisys.common.types import NewSequence
from llaisys.engine.worker.token_rules import ThinkingBudget
from llaisys.tokenization import Tokenizer

OPEN, CLOSE, LINE = 7, 8, 9


def budget_of(prompt: list[int], budget: int, *closing: int) -> ThinkingBudget:
    return ThinkingBudget(
        NewSequence(
            **{"seq_id": 0, "request_id": "r", "token_ids": prompt, "seed": 0, "choice": 0},
            num_prompt_tokens=len(prompt),
            sampling=SamplingParams(thinking_budget=budget),
            stop_token_ids=frozenset(),
            bad_words=(),
            thinking=(OPEN, *(closing or (CLOSE, LINE))),
        )
    )


def written(prompt: list[int], budget: int, wanted: list[int], *closing: int) -> list[int]:
    """Return the output of a model that samples `wanted`."""
    limit, tokens = budget_of(prompt, budget, *closing), list(prompt)
    for token in wanted:
        forced = limit.forced(len(tokens), np.array(tokens))
        tokens.append(token if forced is None else forced)
    return tokens[len(prompt) :]


def test_reasoning_ends_when_the_budget_is_spent() -> None:
    assert written([1], 2, [OPEN, 2, 3, 4, 5, 6]) == [OPEN, 2, 3, CLOSE, LINE, 6]
    assert written([1], 2, [OPEN, 2, 3, 4, 5], CLOSE) == [OPEN, 2, 3, CLOSE, 5]


def test_prompt_may_open_the_reasoning() -> None:
    assert written([1, OPEN, 4], 1, [2, 3, 4, 5]) == [2, CLOSE, LINE, 5]
    assert written([OPEN, 4, CLOSE], 1, [2, 3, 4, 5]) == [2, 3, 4, 5]
    assert written([OPEN], 0, [2, 3, 4]) == [CLOSE, LINE, 4]


def test_reasoning_within_the_budget_is_unchanged() -> None:
    assert written([1], 5, [OPEN, 2, CLOSE, 3, 4, 5, 6]) == [OPEN, 2, CLOSE, 3, 4, 5, 6]


def test_second_reasoning_section_gets_the_remaining_budget() -> None:
    tokens = written([1], 3, [OPEN, 2, 2, CLOSE, 3, OPEN, 2, 2, 2, 3])
    assert tokens == [OPEN, 2, 2, CLOSE, 3, OPEN, 2, CLOSE, LINE, 3]


def test_rolled_back_tokens_do_not_count() -> None:
    """Positions after drafts are evaluated early, and again after a rejected draft."""
    limit, rng = budget_of([OPEN], 4), random.Random(3)
    tokens = [OPEN, 2, 3, 4, 5, CLOSE, LINE, 6, 7]
    expected = [budget_of([OPEN], 4).forced(n, np.array(tokens)) for n in range(1, 9)]
    for _ in range(200):
        place = rng.randrange(1, 9)
        assert limit.forced(place, np.array(tokens)) == expected[place - 1]
    assert expected == [None, None, None, None, CLOSE, LINE, None, None]


# ---- in the engine -------------------------------------------------------------------------------


class Thinker(FakeAdapter):
    """Opens its reasoning and never closes it."""

    opening: tuple[int, ...] = ()

    def sample(self, sampling: SamplingMetadata) -> Any:
        super().sample(sampling)
        assert sampling.positions is not None
        self._sampled = [
            next(t for t in (self._wish(int(p)), *range(512)) if self._allowed(sampling, i, t))
            for i, p in enumerate(sampling.positions)
        ]
        return np.array(self._sampled, dtype=np.int32)

    def _wish(self, position: int) -> int:
        return self.opening[position - 3] if position - 3 < len(self.opening) else 70


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    write_tiny_tokenizer(tmp_path, more=QWEN_TOKENS)
    return Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize("drafts", [False, True])
def test_every_choice_has_its_budget(tokenizer: Tokenizer, drafts: bool) -> None:
    start, end = (tokenizer.token_id(mark) for mark in ("<think>", "</think>"))
    assert start is not None and end is not None
    Thinker.opening = (start,)
    options: dict[str, Any] = {}
    if drafts:
        options["speculative_config"] = {"method": "ngram"}
    engine = make_engine(tokenizer=tokenizer, adapter_class=Thinker, **options)
    params = SamplingParams(
        n=3, max_tokens=20, thinking_budget=6, temperature=1.0, seed=1, bad_words=["\n"],
        skip_special_tokens=False,
    )  # fmt: skip
    name = engine.submit([10, 11, 12], params)
    for output in run_all(engine)[name].outputs:
        line = tokenizer.encode("\n", add_special_tokens=False)
        assert output.token_ids[:10] == [start, *[70] * 6, end, *line, *line][:10]
        assert output.token_ids[10:] == [70] * 10
        assert output.text.startswith("<think>") and "</think>\n\n" in output.text


def test_model_without_reasoning_markers_is_rejected(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    engine = make_engine(tokenizer=Tokenizer.from_directory(tmp_path))
    with naming(InvalidInputError, "</think>") as error:
        engine.submit([1, 2], SamplingParams(thinking_budget=4))
    assert error.value.field == "thinking_budget"
