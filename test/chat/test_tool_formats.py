"""Tool-call parsers: every format, invalid calls, and independence of stream chunks. Hostile texts:
test/attack."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llaisys.chat.reader import AnswerReader
from llaisys.chat.reasoning import REASONING_FORMATS, ReasoningSplitter
from llaisys.chat.records import CallArguments, CallStart
from llaisys.chat.repeats import RepeatFilter
from llaisys.chat.tool_formats import TOOL_FORMATS

NAMES = ("weather", "add")

CALL = '{"name": "weather", "arguments": {"city": "Paris", "days": [1, 2.5e3]}}'
ARGUMENTS = '{"city": "Paris", "days": [1, 2.5e3]}'


def reader(format_: str, reasoning: bool = False, opened: bool = False, **options: Any) -> Any:
    splitter = ReasoningSplitter(REASONING_FORMATS["think"], opened) if reasoning else None
    return AnswerReader(splitter, TOOL_FORMATS[format_](NAMES, **options))


def without_ids(answer: Any) -> tuple[str, str, list[tuple[str, str]]]:
    """An answer without its call ids, which are random."""
    calls = [(call.name, call.arguments) for call in answer.tool_calls]
    return answer.content, answer.reasoning, calls


def read(format_: str, text: str, **options: Any) -> tuple[str, str, list[tuple[str, str]]]:
    return without_ids(reader(format_, **options).read(text))


# ---- the formats ---------------------------------------------------------------------------------


def test_tagged_calls_with_content_before_them() -> None:
    text = (
        f'I look.\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{{"name": "add"}}\n</tool_call>'
    )
    assert read("hermes", text) == ("I look.", "", [("weather", ARGUMENTS), ("add", "{}")])


def test_list_of_calls_in_one_tag() -> None:
    text = f'<tool_call>[{CALL}, {{"arguments": {{"a": 1}}, "name": "add"}}]</tool_call>'
    assert read("json", text) == ("", "", [("weather", ARGUMENTS), ("add", '{"a": 1}')])


def test_llama_calls_without_tags() -> None:
    text = '{"type": "function", "name": "add", "parameters": {"a": 1}}'
    one = ("add", '{"a": 1}')
    assert read("llama3_json", text) == ("", "", [one])
    assert read("llama3_json", f"<|python_tag|>{text}; {text}\n{text}") == ("", "", [one] * 3)


def test_both_mistral_formats() -> None:
    text = f'[TOOL_CALLS] [{CALL}, {{"name": "add", "arguments": {{}}}}]'
    assert read("mistral", text) == ("", "", [("weather", ARGUMENTS), ("add", "{}")])
    text = f"Well.[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{ARGUMENTS}[TOOL_CALLS]add{{}}"
    assert read("mistral", text) == ("Well.", "", [("weather", ARGUMENTS), ("add", "{}")])
    ids = [call.id for call in reader("mistral").read(text).tool_calls]
    assert all(len(name) == 9 and name.isalnum() for name in ids) and ids[0] != ids[1]


def test_both_deepseek_formats() -> None:
    call = f"function<｜tool▁sep｜>weather\n```json\n{ARGUMENTS}\n```<｜tool▁call▁end｜>"
    new = "add<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
    begin = "<｜tool▁call▁begin｜>"
    text = f"So<｜tool▁calls▁begin｜>{begin}{call}\n{begin}{new}<｜tool▁calls▁end｜>"
    assert read("deepseek", text) == ("So", "", [("weather", ARGUMENTS), ("add", "{}")])


@pytest.mark.parametrize("text", [CALL, f"\n```json\n{CALL}\n```\n", f"```\n[{CALL}]\n```"])
@pytest.mark.parametrize("format_", ["hermes", "json", "llama3_json", "mistral"])
def test_bare_json_with_a_tool_name_is_a_call(format_: str, text: str) -> None:
    assert read(format_, text) == ("", "", [("weather", ARGUMENTS)])


def test_openai_style_calls_are_parsed() -> None:
    inner = {"name": "add", "arguments": '{"a": 1}'}
    text = json.dumps({"id": "x", "type": "function", "function": inner})
    assert read("json", f"<tool_call>{text}</tool_call>") == ("", "", [("add", '{"a": 1}')])


def test_common_json_mistakes_are_corrected() -> None:
    text = (
        '<tool_call>{"name": "add", "arguments": {"a": True, "b": None, "c": "x\ny"}}}</tool_call>'
    )
    ((_, arguments),) = read("hermes", text)[2]
    assert json.loads(arguments) == {"a": True, "b": None, "c": "x\ny"}


# ---- invalid calls -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "<tool_call>\n</tool_call>",
        "<tool_call>I would call weather</tool_call>",
        '<tool_call>{"name": "weather", "argum',
        '<tool_call>{"name": 7, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "no such name!", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": [1, 2]}</tool_call>',
        '<tool_call>{"name": "add", "arguments": "no json"}</tool_call>',
        "<tool_call>{'name': 'add', 'arguments': {}}</tool_call>",
        "<tool_call>{}</tool_call>",
        '{"name": "unknown", "arguments": {}}',
        '{"name": "weather"}',
        '{"city": "Paris", "name": "weather", "arguments": {}}',
        '["weather", {}]',
        "```json\n[1, 2]\n```\n",
        "  plain words with < and { \n",
        "\x00",
        "",
    ],
)
def test_invalid_call_is_content(text: str) -> None:
    assert read("hermes", text) == (text, "", [])


def test_call_after_an_invalid_one_is_found() -> None:
    text = f"<tool_call>no <tool_call>{CALL}</tool_call>"
    assert read("hermes", text) == ("<tool_call>no", "", [("weather", ARGUMENTS)])


def test_truncated_arguments_stay_with_their_call() -> None:
    text = '<tool_call>{"name": "add", "arguments": {"a": }}</tool_call> Done. '
    assert read("hermes", text) == ("Done.", "", [("add", '{"a": }}')])
    assert read("hermes", f"<tool_call>{CALL}</tool_ca") == ("", "", [("weather", ARGUMENTS)])
    text = '<tool_call>{"name": "add", "arguments": {"a": "cut'
    assert read("hermes", text) == ("", "", [("add", '{"a": "cut')])


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("calls", "kept"),
    [
        ([("add", '{"a": 1}')] * 3, 1),
        ([("add", '{"a": 1}'), ("add", '{"a": 12}'), ("add", '{"a": 1}'), ("add", '{"a": 3}')], 2),
        ([("add", "{}"), ("weather", "{}"), ("add", '{"a": 1}')], 3),
    ],
)
def test_repeated_call_ends_the_answer(size: int, calls: list[tuple[str, str]], kept: int) -> None:
    text = "\n".join(
        f'<tool_call>{{"name": "{name}", "arguments": {args}}}</tool_call>' for name, args in calls
    )
    answers = AnswerReader(None, TOOL_FORMATS["hermes"](NAMES), repeats=RepeatFilter())
    for start in range(0, len(text), size):
        answers.feed(text[start : start + size])
    answers.finish()
    assert without_ids(answers.answer) == ("", "", calls[:kept])
    assert answers.has_repeated_call is (kept < len(calls))


def test_cut_repetition_stays_a_call() -> None:
    call = '<tool_call>{"name": "add", "arguments": {"a": 1'
    answers = AnswerReader(None, TOOL_FORMATS["hermes"](NAMES), repeats=RepeatFilter())
    found = answers.read(f"{call}}}}}</tool_call>\n{call}")
    assert without_ids(found)[2] == [("add", '{"a": 1}'), ("add", '{"a": 1')]


def test_max_calls_limits_the_calls() -> None:
    text = f"<tool_call>{CALL}</tool_call>" * 3
    assert len(read("hermes", text, max_calls=1)[2]) == 1
    assert len(read("hermes", f"<tool_call>{CALL}</tool_call>" * 200)[2]) == 128


# ---- streams -------------------------------------------------------------------------------------


def test_call_arguments_are_streamed() -> None:
    stream = reader("hermes")
    events = [stream.feed(c) for c in f"<tool_call>\n{CALL}"]
    flat = [event for found in events for event in found]
    assert isinstance(flat[0], CallStart) and flat[0].name == "weather" and flat[0].index == 0
    assert all(isinstance(event, CallArguments) for event in flat[1:]) and len(flat) > 10
    assert "".join(event.text for event in flat[1:]) == ARGUMENTS


# Random texts are built from the delimiters that parsers search for.
PIECES = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<tool_", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"),
        *(
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁sep｜>",
            "<｜tool▁call▁end｜>",
        ),
        *("<|channel|>", "<|start|>", "<|message|>", "<|end|>", "<|call|>", "analysis", "final"),
        *(
            "commentary to=functions.add",
            "<function=",
            "<parameter=",
            "</parameter>",
            "</function>",
        ),
        *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", ">", "(", ")", "=", "'"),
        *(
            "<function_calls>",
            "</function_calls>",
            "[add(",
            "add(a=1",
            "functools",
            "<|tool_call|>",
        ),
        *("<start_function_call>", "call:add{", "<escape>", "<end_function_call>", "a:1"),
        *("<think>", "</think>", "</th", "```json", "```", "function", "weather", "add", "\n"),
        *("{", "}", "[", "]", ",", ":", '"', "\\", " ", "\t", ";", '"name"', '"arguments"'),
        *('{"name": "add", "arguments": {', CALL, '"parameters": ', "true", "None", "1.5", "\\u00"),
        *("é", "\x00", "\ufffd", "}}", '{"a": "b', "name[ARGS]{", ARGUMENTS),
    ]
)
TEXTS = st.lists(st.one_of(PIECES, st.text(max_size=4)), max_size=25).map("".join)


@settings(max_examples=400, deadline=None)
@given(text=TEXTS, cuts=st.lists(st.integers(1, 7), max_size=40), data=st.data())
def test_result_is_independent_of_stream_chunks(
    text: str, cuts: list[int], data: st.DataObject
) -> None:
    format_ = data.draw(st.sampled_from(sorted(TOOL_FORMATS)))
    options = {
        "reasoning": data.draw(st.booleans()),
        "opened": data.draw(st.booleans()),
    }
    whole = without_ids(reader(format_, **options).read(text))
    stream, at = reader(format_, **options), 0
    for cut in [*cuts, *[3] * len(text)]:
        stream.feed(text[at : at + cut])
        at += cut
    stream.finish()
    assert without_ids(stream.answer) == whole
    # Nothing is lost but the headers of Harmony's messages.
    if not options["reasoning"] and not whole[2] and format_ != "harmony":
        assert whole[0] == text
