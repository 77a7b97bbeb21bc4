"""Splitting of reasoning and content."""

from __future__ import annotations

import pytest

from llaisys.chat.reader import AnswerReader
from llaisys.chat.reasoning import REASONING_FORMATS, ReasoningSplitter
from llaisys.chat.records import ReasoningText


def split(text: str, opened: bool = False, keep: bool = True) -> tuple[str, str]:
    splitter = ReasoningSplitter(REASONING_FORMATS["think"], opened)
    answer = AnswerReader(splitter, keep_reasoning=keep).read(text)
    return answer.reasoning, answer.content


@pytest.mark.parametrize(
    ("text", "opened", "expected"),
    [
        ("<think>\nhm\n\nso\n</think>\n\nYes.", False, ("hm\n\nso", "Yes.")),
        ("\n<think>hm</think>Yes.", False, ("hm", "Yes.")),
        ("<think>\n\n</think>\n\nYes.", False, ("", "Yes.")),
        ("hm\n</think>\n\nYes.\n", True, ("hm", "Yes.\n")),
        ("cut off ", True, ("cut off", "")),
        ("<think>cut </thi", False, ("cut </thi", "")),
        ("No. <think>late</think>", False, ("", "No. <think>late</think>")),
        (" plain ", False, ("", " plain ")),
        (" " * 2000 + "<think>a</think>b", False, ("", " " * 2000 + "<think>a</think>b")),
        ("", False, ("", "")),
        ("<think>a</think>b</think>c", False, ("a", "b</think>c")),
    ],
)
def test_reasoning_and_answer(text: str, opened: bool, expected: tuple[str, str]) -> None:
    assert split(text, opened) == expected
    stream = AnswerReader(ReasoningSplitter(REASONING_FORMATS["think"], opened))
    for character in text:
        stream.feed(character)
    stream.finish()
    assert (stream.answer.reasoning, stream.answer.content) == expected


def test_reasoning_is_streamed() -> None:
    stream = AnswerReader(ReasoningSplitter(REASONING_FORMATS["think"]))
    stream.feed("<think>\n")
    assert stream.feed("first") == [ReasoningText("first")]
    assert stream.feed(" second </") == [ReasoningText(" second")]
    assert stream.feed("b") == [ReasoningText(" </b")]


def test_reasoning_can_be_omitted() -> None:
    assert split("<think>hm</think>Yes.", keep=False) == ("", "Yes.")
