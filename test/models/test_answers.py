"""Answers of the real default model: as many right ones as greedy decoding, and none that loops."""

from __future__ import annotations

import pytest

from llaisys.bench.questions import QUESTIONS, Score, is_right, run_questions
from llaisys.entrypoints.llm import LLM

# Of transformers, greedy, with the weights of the same file in f32 (scripts/score_answers.py).
TRANSFORMERS = 22
MAX_TOKENS = 64


@pytest.fixture(scope="module")
def scores() -> dict[str, Score]:
    with LLM() as llm:
        samplings = [("greedy", {"temperature": 0}), ("defaults", llm.default_sampling)]
        return {score.name: score for score in run_questions(llm, samplings, MAX_TOKENS)}


def test_greedy_score_equals_transformers(scores: dict[str, Score]) -> None:
    """Rounding of quantised products may change one answer."""
    assert abs(scores["greedy"].right - TRANSFORMERS) <= 1, scores["greedy"].answers


def test_defaults_score_like_greedy_decoding(scores: dict[str, Score]) -> None:
    assert scores["defaults"].right >= scores["greedy"].right - 2, scores["defaults"].answers


def test_no_answer_with_defaults_loops(scores: dict[str, Score]) -> None:
    assert scores["defaults"].loops == 0, scores["defaults"].answers


def test_an_answer_is_right_by_whole_words() -> None:
    assert len(QUESTIONS) == 30
    assert is_right("5|five", "2 + 3 = 5.") and not is_right("5|five", "It is 15.")
    assert is_right("Au", "The symbol is au") and not is_right("Au", "August")
