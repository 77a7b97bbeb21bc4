"""Model output that attacks the parsers of tool calls and reasoning."""

from __future__ import annotations

import time

import pytest

from llaisys.chat.reader import AnswerReader
from llaisys.chat.reasoning import REASONING_FORMATS, ReasoningSplitter
from llaisys.chat.tool_formats import TOOL_FORMATS

MAX_SECONDS = 10.0  # for what takes less than one


def reader(format_: str) -> AnswerReader:
    splitter = ReasoningSplitter(REASONING_FORMATS["think"])
    return AnswerReader(splitter, TOOL_FORMATS[format_](["weather", "add"]))


HOSTILE = {
    "marks": "<tool_call>",
    "open objects": '<tool_call>{"a": ',
    "open strings": '<tool_call>{"a',
    "escapes": '<tool_call>{"\\"',
    "spaces": "<tool_call>    ",
    "white space": " \n",
    "half marks": "<tool_cal",
    "brackets": "[",
    "braces": '{"name": {',
    "lists of calls": '[{"name": "add", "arguments": {}},',
    "mistral": "[TOOL_CALLS]a",
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>",
    "heads": "<｜tool▁call▁begin｜>" + "f" * 200,
    "python": "<|python_tag|>{",
    "digits": "1",
    "thinking": "<think></think>",
    "long name": '<tool_call>{"name": "' + "n" * 1000,
}


@pytest.mark.parametrize("kind", sorted(HOSTILE))
def test_parsing_hostile_text_is_linear(kind: str) -> None:
    """Quadratic work on 200,000 characters would take minutes."""
    text = (HOSTILE[kind] * 200_000)[:200_000]
    start = time.process_time()
    for format_ in TOOL_FORMATS:
        answer = reader(format_).read(text)
        arguments = sum(len(call.arguments) for call in answer.tool_calls)
        assert len(answer.content) + len(answer.reasoning) + arguments <= len(text)
    stream = reader("hermes")
    for at in range(0, len(text), 16):
        stream.feed(text[at : at + 3])
    stream.finish()
    assert time.process_time() - start < MAX_SECONDS
