"""Constraints for tool calls: accepted answers, which the parsers can read."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from llaisys.chat.constraint import call_constraint
from llaisys.chat.reasoning import REASONING_FORMATS
from llaisys.chat.tool_formats import TOOL_FORMATS
from llaisys.chat.tools import read_tools
from llaisys.common.structured import StructuredOutputs

BYTES = LLTokenizer("byte")
THINK = REASONING_FORMATS["think"]
CITY = {
    "type": "object",
    "$defs": {"city": {"type": "string", "minLength": 1}},
    "properties": {"city": {"$ref": "#/$defs/city"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY, "strict": True}},
    {"type": "function", "function": {"name": "ping"}},
]
BARE = '{"name": "weather", "arguments": {"city": "Paris"}}'
CALL = f"<tool_call>\n{BARE}\n</tool_call>"
PING = '{"name": "ping", "arguments": {}}'
NAMED = {"type": "function", "function": {"name": "weather"}}


def allows(text: str, choice: Any, tagged: bool, markers: Any = None, opened: bool = False) -> bool:
    """Whether the grammar accepts `text` as a complete answer."""
    tools = read_tools(TOOLS, choice)
    assert tools is not None
    held = call_constraint(tools, tagged, markers, opened)
    assert held is not None and held.grammar is not None
    grammar = json.dumps({"grammars": [{"lark_grammar": held.grammar}]})
    matcher = LLMatcher(BYTES, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = list(text.encode())
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (CALL, True),
        (f"{CALL}\n<tool_call>\n{PING}\n</tool_call>", True),
        ("", False),
        ("Hello.", False),
        (f"I look.\n{CALL}", False),
        (CALL.replace("weather", "nothing"), False),
        (CALL.replace("city", "town"), False),
        (CALL.replace('"Paris"', "7"), False),
        (CALL[:-1], False),
    ],
)
def test_required_choice_forces_a_call(text: str, expected: bool) -> None:
    assert allows(text, "required", tagged=True) is expected


def test_text_format_beside_calls() -> None:
    tools = read_tools(TOOLS, "auto")
    assert tools is not None
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    held = call_constraint(tools, True, None, False, StructuredOutputs(json=schema))
    assert held is not None and held.grammar is not None
    grammar = json.dumps({"grammars": [{"lark_grammar": held.grammar}]})
    for text, expected in (
        (CALL, True),
        (f"{CALL}\n<tool_call>\n{PING}\n</tool_call>", True),
        ('{"a": 1}', True),
        ('{"a": "x"}', False),
        ("Hello.", False),
    ):
        matcher = LLMatcher(BYTES, grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        ids = list(text.encode())
        accepted = matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
        assert accepted is expected, text
    assert call_constraint(tools, False, None, False, StructuredOutputs(json=schema)) is None


def test_named_choice_allows_only_that_tool() -> None:
    assert allows(CALL, NAMED, tagged=True)
    assert not allows(f"{CALL}\n{CALL}", NAMED, tagged=True)
    assert not allows(CALL.replace("weather", "ping"), NAMED, tagged=True)
    assert allows(BARE, NAMED, tagged=False)


def test_reasoning_may_precede_a_forced_call() -> None:
    thought = "hm, <tool_call>?\n</think>\n\n"
    assert allows(f"<think>\n{thought}{CALL}", "required", True, THINK)
    assert allows(CALL, "required", True, THINK)
    assert allows(thought + CALL, "required", True, THINK, opened=True)
    assert not allows(CALL, "required", True, THINK, opened=True)
    assert not allows(f"<think>\n{thought}Hello.", "required", True, THINK)


@pytest.mark.parametrize("format_", sorted(TOOL_FORMATS))
def test_every_parser_reads_bare_json_calls(format_: str) -> None:
    text = f"[{BARE}, {PING}]"
    assert allows(text, "required", tagged=False)
    parser = TOOL_FORMATS[format_](["weather", "ping"])
    names = [event.name for event in parser.feed(text) if hasattr(event, "name")]
    assert names == ["weather", "ping"]


def test_strict_tools_are_constrained_inside_tags() -> None:
    tools = read_tools(TOOLS)
    assert tools is not None
    held = call_constraint(tools, True, None, False)
    assert held is not None and isinstance(held.structural_tag, str)
    tag = json.loads(held.structural_tag)
    begins = [structure["begin"] for structure in tag["structures"]]
    assert begins[0] == '<tool_call>\n{"name": "weather", "arguments": '
    assert tag["structures"][0]["schema"] == CITY
    assert tag["structures"][1]["schema"] == {"type": "object"}
    assert call_constraint(tools, False, None, False) is None
    plain = read_tools(TOOLS[1:])
    assert plain is not None and call_constraint(plain, True, None, False) is None
