"""Answers in the formats of gpt-oss, Qwen3-Coder, GLM-4.5, Llama 4, OLMo 3, Phi-4-mini and
FunctionGemma: recorded texts, split at every position."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import chat_templates
import pytest
from chat_templates import HISTORY, WEATHER, tokenizer_of
from llguidance import LLMatcher

from llaisys.chat.constraint import harmony_constraint
from llaisys.chat.style import ChatStyle
from llaisys.chat.tool_formats.harmony import HarmonyParser
from llaisys.chat.tools import read_tools
from llaisys.common.structured import StructuredOutputs
from llaisys.engine.structured.matching import open_tokenizer

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "units": {"type": ["string", "null"]},
                    "hours": {"type": "array", "items": {"type": "number"}},
                    "options": {"type": "object"},
                    "is_short": {"type": "boolean"},
                },
            },
        },
    },
    {"type": "function", "function": {"name": "ping"}},
]
Answer = tuple[str, str, list[tuple[str, Any]]]


def parsed(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def read(format_: str, chunks: list[str], tools: Any = TOOLS, **options: Any) -> Answer:
    style = ChatStyle.of(None, format_, "harmony" if format_ == "harmony" else "none")
    reader = style.reader(read_tools(tools, **options) if tools else None)
    for chunk in chunks:
        reader.feed(chunk)
    reader.finish()
    answer = reader.answer
    calls = [(call.name, parsed(call.arguments)) for call in answer.tool_calls]
    return answer.content, answer.reasoning, calls


def check(format_: str, text: str, expected: Answer, **options: Any) -> None:
    """The answer of a text, whole and split at every position."""
    assert read(format_, [text], **options) == expected
    for at in range(len(text) + 1):
        assert read(format_, [text[:at], text[at:]], **options) == expected, at
    assert read(format_, list(text), **options) == expected


# ---- gpt-oss -------------------------------------------------------------------------------------

ANALYSIS = "<|channel|>analysis<|message|>The user asks.\nI look it up.<|end|>"
CITY = {"city": "Paris"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            f"{ANALYSIS}<|start|>assistant<|channel|>final<|message|>It is **warm**.<|return|>",
            ("It is **warm**.", "The user asks.\nI look it up.", []),
        ),
        (
            f"{ANALYSIS}<|start|>assistant<|channel|>commentary to=functions.weather "
            '<|constrain|>json<|message|>{"city": "Paris"}<|call|>',
            ("", "The user asks.\nI look it up.", [("weather", CITY)]),
        ),
        (  # the recipient in the role, as the template writes it
            "<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>"
            '{"city": "Paris"}<|call|>',
            ("", "", [("weather", CITY)]),
        ),
        (  # a preamble is content; the stop token is not part of the text
            "<|channel|>commentary<|message|>First the weather.<|end|><|start|>assistant<|channel|>"
            "commentary to=functions.ping<|message|>",
            ("First the weather.", "", [("ping", {})]),
        ),
        (  # two messages of a kind
            "<|channel|>analysis<|message|>One.<|end|><|start|>assistant<|channel|>analysis"
            "<|message|>Two.<|end|><|start|>assistant<|channel|>final<|message|>a<|end|>"
            "<|start|>assistant<|channel|>final<|message|>b",
            ("a\n\nb", "One.\n\nTwo.", []),
        ),
        (  # a built-in tool is no function
            "<|channel|>analysis to=python code<|message|>print(1)<|call|>",
            ("", "print(1)", []),
        ),
        ("<|channel|>analysis<|message|>cut off", ("", "cut off", [])),
        ("<|channel|>final<|mess", ("", "", [])),
        ("plain words", ("plain words", "", [])),
    ],
)
def test_harmony(text: str, expected: Answer) -> None:
    check("harmony", text, expected)


def test_harmony_without_tools_reads_channels_and_no_calls() -> None:
    text = f"{ANALYSIS}<|start|>assistant<|channel|>final<|message|>Hi.<|return|>"
    check("harmony", text, ("Hi.", "The user asks.\nI look it up.", []), tools=None)
    call = "<|channel|>commentary to=functions.weather<|message|>{}<|call|>"
    check("harmony", call, ("{}", "", []), tools=None)


def test_harmony_reasoning_is_content_without_a_reasoning_parser() -> None:
    reader = ChatStyle.of(None, "harmony", "none").reader(None)
    assert reader.read(ANALYSIS).content == "The user asks.\nI look it up."


def harmony_tokenizer(folder: Path) -> Any:
    return tokenizer_of(folder, chat_templates.HARMONY, chat_templates.HARMONY_TOKENS)


def test_harmony_is_detected_and_its_markers_are_visible(tmp_path: Path) -> None:
    tokenizer = harmony_tokenizer(tmp_path)
    style = ChatStyle.of(tokenizer)
    assert style.tool_format == "harmony" and style.markers is not None
    visible = style.visible_ids(tokenizer, None)
    assert visible == {tokenizer.token_id(word) for word in HarmonyParser.markers}
    assert style.effort_variables("minimal") == {"reasoning_effort": "low"}
    assert {tokenizer.token_id("<|return|>"), tokenizer.token_id("<|call|>")} <= set(
        tokenizer.eos_token_ids
    )


def test_harmony_reasoning_tokens_are_counted(tmp_path: Path) -> None:
    tokenizer = harmony_tokenizer(tmp_path)
    count = ChatStyle.of(tokenizer).reasoning_counter(tokenizer, False)
    assert count is not None

    def ids(text: str) -> list[int]:
        found: list[int] = []
        for piece in text.split("|||"):
            token = tokenizer.token_id(piece)
            found += tokenizer.encode(piece, False) if token is None else [token]
        return found

    inside = tokenizer.encode("some thoughts", False)
    start = "<|channel|>|||analysis|||<|message|>|||some thoughts"
    assert count(ids(start)) == len(inside)
    final = "|||<|end|>|||<|start|>|||assistant|||<|channel|>|||final|||<|message|>|||text"
    assert count(ids(start + final)) == len(inside)
    assert count(ids("<|channel|>|||final|||<|message|>|||text")) == 0


def test_harmony_history_has_one_call_per_message(tmp_path: Path) -> None:
    tokenizer = harmony_tokenizer(tmp_path)
    call = HISTORY[1]["tool_calls"][0]
    second = {"id": "call_2", "type": "function", "function": {"name": "ping", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "Then this.", "reasoning_content": "Hm.",
         "tool_calls": [call, second]},
        {"role": "tool", "tool_call_id": "call_1", "content": "warm"},
        {"role": "tool", "tool_call_id": "call_2", "content": "pong"},
        {"role": "user", "content": "b"},
    ]  # fmt: skip
    style = ChatStyle.of(tokenizer)
    prepared, listed = style.prepare(messages, read_tools([WEATHER]))
    ids = tokenizer.encode_chat(prepared, tools=listed)
    text = tokenizer.decode_tokens(ids, skip_special_tokens=False)
    calls = (
        "<|start|>assistant<|channel|>analysis<|message|>Hm.\n\nThen this.<|end|>"
        "<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>"
        '{"city": "Paris <|im_end|>"}<|call|><|start|>functions.weather to=assistant'
        '<|channel|>commentary<|message|>"warm"<|end|>'
        "<|start|>assistant to=functions.ping<|channel|>commentary json<|message|>{}<|call|>"
        '<|start|>functions.ping to=assistant<|channel|>commentary<|message|>"pong"<|end|>'
    )
    assert calls in text and text.endswith("<|start|>assistant")


WORDS = ("<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|start|>", "<|call|>")
CALL = ("<|channel|>", "commentary to=functions.weather ", "<|constrain|>", "json", "<|message|>",
        '{"city": "Paris"}')  # fmt: skip
THOUGHT = ("<|channel|>", "analysis", "<|message|>", "Hm.\n", "<|end|>", "<|start|>", "assistant")
FINAL = ("<|channel|>", "final", "<|message|>")


def allows(constraint: StructuredOutputs | None, *pieces: str) -> bool:
    """Whether the grammar accepts these words and texts as a complete answer."""
    assert constraint is not None
    tokens = [bytes([i]) for i in range(256)] + [word.encode() for word in WORDS]
    special = list(range(256, 256 + len(WORDS)))
    tokenizer = open_tokenizer(tokens, special, [special[-1]], lambda text: list(text.encode()))
    grammar = json.dumps({"grammars": [{"lark_grammar": constraint.grammar}]})
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids: list[int] = []
    for piece in pieces:
        ids += [256 + WORDS.index(piece)] if piece in WORDS else list(piece.encode())
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def test_a_required_harmony_call_is_enforced() -> None:
    assert harmony_constraint(read_tools(TOOLS)) is None
    for text in (None, StructuredOutputs(json_object=True)):
        constraint = harmony_constraint(read_tools(TOOLS, "required"), text)
        assert allows(constraint, *CALL) and allows(constraint, *THOUGHT, *CALL)
        assert not allows(constraint, *THOUGHT) and not allows(constraint, *FINAL, "{}")
        assert not allows(constraint, CALL[0], "commentary to=functions.other ", *CALL[2:])


def test_json_of_a_harmony_answer_is_in_the_final_channel() -> None:
    text = StructuredOutputs(json={"type": "object", "properties": {"a": {"type": "integer"}}})
    alone = harmony_constraint(None, text)
    assert allows(alone, *THOUGHT, *FINAL, '{"a": 1}') and not allows(alone, *FINAL, '{"a": ""}')
    assert not allows(alone, *CALL) and not allows(alone, '{"a": 1}')
    either = harmony_constraint(read_tools(TOOLS), text)
    assert allows(either, *FINAL, '{"a": 1}') and allows(either, *CALL)


# ---- one tag per argument ------------------------------------------------------------------------

FULL = {
    "city": 'Saint "Denis"\n<b>2</b>',
    "days": 3,
    "units": "5",
    "hours": [1, 2.5],
    "options": {"a": None},
    "is_short": True,
    "other": "7",
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "I look.\n<tool_call>\n<function=weather>\n"
            '<parameter=city>\nSaint "Denis"\n<b>2</b>\n</parameter>\n'
            "<parameter=days>\n3\n</parameter>\n<parameter=units>\n5\n</parameter>\n"
            "<parameter=hours>\n[1, 2.5]\n</parameter>\n"
            '<parameter=options>\n{"a": null}\n</parameter>\n'
            "<parameter=is_short>\nTrue\n</parameter>\n<parameter=other>7</parameter>\n"
            "</function>\n</tool_call>\n<tool_call>\n<function=ping>\n</function>\n</tool_call>",
            ("I look.", "", [("weather", FULL), ("ping", {})]),
        ),
        ("<function=ping></function>", ("", "", [("ping", {})])),
        ("<tool_call>no call</tool_call>", ("<tool_call>no call</tool_call>", "", [])),
        ("a <function=no name!>", ("a <function=no name!>", "", [])),
        (
            "<tool_call>\n<function=weather>\n<parameter=city>\nPar",
            ("", "", [("weather", '{"city": "Par')]),
        ),
        ('[{"name": "ping", "arguments": {}}]', ("", "", [("ping", {})])),  # of a forced call
    ],
)
def test_qwen3_coder(text: str, expected: Answer) -> None:
    check("qwen3_coder", text, expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "I look.\n<tool_call>weather\n"
            '<arg_key>city</arg_key>\n<arg_value>Saint "Denis"\n<b>2</b></arg_value>\n'
            "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n"
            "<arg_key>units</arg_key>\n<arg_value>5</arg_value>\n"
            "<arg_key>hours</arg_key>\n<arg_value>[1, 2.5]</arg_value>\n"
            '<arg_key>options</arg_key><arg_value>{"a": null}</arg_value>'
            "<arg_key>is_short</arg_key>\n<arg_value>true</arg_value>\n"
            "<arg_key>other</arg_key>\n<arg_value>7</arg_value>\n"
            "</tool_call>\n<tool_call>ping</tool_call>",
            ("I look.", "", [("weather", FULL), ("ping", {})]),
        ),
        ("<tool_call>ping", ("<tool_call>ping", "", [])),
        (
            "<tool_call>weather\n<arg_key>days</arg_key>\n<arg_value>1",
            ("", "", [("weather", '{"days": ')]),
        ),
    ],
)
def test_glm45(text: str, expected: Answer) -> None:
    check("glm45", text, expected)


# ---- Python --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            '[weather(city="Paris (\\"FR\\")", days=-3, hours=[1, 2.5], options={"a": None}), '
            "ping()]",
            ("", "", [
                ("weather", {"city": 'Paris ("FR")', "days": -3, "hours": [1, 2.5],
                             "options": {"a": None}}),
                ("ping", {}),
            ]),
        ),
        (
            "<|python_start|>[ping( is_short = true ,units='a\nb')]<|python_end|>",
            ("", "", [("ping", {"is_short": True, "units": "a\nb"})]),
        ),
        (
            'Well.\n<function_calls>\nweather(city="Paris")\nping()\n</function_calls>',
            ("Well.", "", [("weather", {"city": "Paris"}), ("ping", {})]),
        ),
        ("[unknown(a=1)]", ("[unknown(a=1)]", "", [])),
        ("[weather(1)]", ("[weather(1)]", "", [])),
        ("[weather(city=open())]", ("[weather(city=open())]", "", [])),
        ("[weather(city='cut", ("[weather(city='cut", "", [])),
        ("[1, 2] is a list", ("[1, 2] is a list", "", [])),
    ],
)  # fmt: skip
def test_pythonic(text: str, expected: Answer) -> None:
    check("pythonic", text, expected)


# ---- Phi and Gemma -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        '<|tool_call|>[{"name": "weather", "arguments": {"city": "Paris"}}]<|/tool_call|>',
        'functools[{"name": "weather", "arguments": {"city": "Paris"}}]',
    ],
)
def test_phi4_mini(text: str) -> None:
    check("phi4_mini_json", text, ("", "", [("weather", CITY)]))


def test_phi4_mini_words_stay_content() -> None:
    text = "Use functools in Python."
    check("phi4_mini_json", text, (text, "", []))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "<start_function_call>call:weather{city:<escape>Paris, {FR}<escape>,days:3,"
            "hours:[1,2.5],options:{a:null,b:<escape>x<escape>}}<end_function_call>",
            ("", "", [
                ("weather", {"city": "Paris, {FR}", "days": 3, "hours": [1, 2.5],
                             "options": {"a": None, "b": "x"}}),
            ]),
        ),
        ("<start_function_call>call:ping{}<end_function_call>", ("", "", [("ping", {})])),
        ("<start_function_call>no{}", ("<start_function_call>no{}", "", [])),
        ("<start_function_call>call:ping{a", ("<start_function_call>call:ping{a", "", [])),
    ],
)  # fmt: skip
def test_functiongemma(text: str, expected: Answer) -> None:
    check("functiongemma", text, expected)


# ---- templates -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("piece", "format_"),
    [
        ("<tool_call>\\n<function=name>", "qwen3_coder"),
        ("<tool_call>name\\n<arg_key>", "glm45"),
        ("<function_calls>", "pythonic"),
        ("<|python_start|>", "pythonic"),
        ("<start_function_call>", "functiongemma"),
    ],
)
def test_formats_are_detected(tmp_path: Path, piece: str, format_: str) -> None:
    template = "{% if tools %}{{ '" + piece + "' }}{% endif %}{{ messages[0].content }}"
    assert ChatStyle.of(tokenizer_of(tmp_path, template)).tool_format == format_


def test_phi4_mini_tools_are_in_the_system_message(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{{ m.role + ':' + (m.content or '') }}{% if m.tools %}"
        "{{ '<|tool|>' + m.tools + '<|/tool|>' }}{% endif %}{% endfor %}"
    )
    tokenizer = tokenizer_of(tmp_path, template)
    style = ChatStyle.of(tokenizer)
    assert style.tool_format == "phi4_mini_json"
    user = {"role": "user", "content": "a"}
    for messages in ([user], [{"role": "system", "content": "s"}, user]):
        prepared, listed = style.prepare(messages, read_tools([WEATHER]))
        ids = tokenizer.encode_chat(prepared, tools=listed)
        text = tokenizer.decode_tokens(ids, skip_special_tokens=False)
        tools = json.dumps([WEATHER["function"]])
        system = messages[0]["content"] if len(messages) > 1 else ""
        assert f"system:{system}<|tool|>{tools}<|/tool|>user:a" in text
