"""Detection of tool and reasoning formats, and prompts rendered with templates of common models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import chat_templates
import pytest
from chat_templates import HISTORY, WEATHER, tokenizer_of
from error_helpers import invalid_input
from model_files import CHATML

from llaisys.chat.reasoning import REASONING_FORMATS
from llaisys.chat.style import ChatStyle
from llaisys.chat.tools import ToolChoice, ToolSet, read_tools
from llaisys.common.errors import InvalidInputError
from llaisys.tokenization import Tokenizer


def rendered(tokenizer: Tokenizer, messages: list[Any], tools: Any = None, **others: Any) -> str:
    """The prompt text, decoded from its tokens."""
    style = ChatStyle.of(tokenizer)
    prepared, listed = style.prepare(messages, read_tools(tools))
    ids = tokenizer.encode_chat(prepared, tools=listed, **others)
    return tokenizer.decode_tokens(ids, skip_special_tokens=False)


@pytest.mark.parametrize(
    ("template", "format_", "lists_tools", "reasons"),
    [
        ("QWEN25", "hermes", True, False),
        ("QWEN3", "hermes", True, True),
        ("LLAMA3", "llama3_json", True, False),
        ("MISTRAL", "mistral", True, False),
        ("DEEPSEEK", "deepseek", True, False),
        ("R1_DISTILL", "json", False, True),
    ],
)
def test_style_is_detected_from_the_template(
    tmp_path: Path, template: str, format_: str, lists_tools: bool, reasons: bool
) -> None:
    style = ChatStyle.of(tokenizer_of(tmp_path, getattr(chat_templates, template)))
    assert (style.tool_format, style.lists_tools) == (format_, lists_tools)
    assert (style.markers is not None) is reasons


def test_named_parser_overrides_detection(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, chat_templates.QWEN3)
    assert ChatStyle.of(tokenizer, "llama3").tool_format == "llama3_json"
    assert ChatStyle.of(tokenizer, reasoning_parser="none").markers is None
    assert ChatStyle.of(None, reasoning_parser="qwen3").markers == REASONING_FORMATS["think"]
    with invalid_input("tool_call_parser"):
        ChatStyle.of(tokenizer, "x")


def test_arguments_are_objects_in_templates(tmp_path: Path) -> None:
    text = rendered(tokenizer_of(tmp_path, chat_templates.QWEN25), HISTORY, [WEATHER])
    assert json.dumps(WEATHER) in text
    call = (
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris <|im_end|>"}}\n</tool_call>'
    )
    assert call in text
    assert "<tool_response>\n21 degrees <|im_end|>\n</tool_response>" in text


def test_control_tokens_in_arguments_and_results_are_text(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, chat_templates.QWEN25)
    prepared, listed = ChatStyle.of(tokenizer).prepare(HISTORY, read_tools([WEATHER]))
    ids = tokenizer.encode_chat(prepared, tools=listed)
    end, call = tokenizer.token_id("<|im_end|>"), tokenizer.token_id("<tool_call>")
    assert ids.count(end) == 5 and ids.count(call) == 2  # written by the template


def test_deepseek_arguments_are_text(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, chat_templates.DEEPSEEK, chat_templates.DEEPSEEK_TOKENS)
    text = rendered(tokenizer, HISTORY, [WEATHER])
    assert '<｜tool▁sep｜>weather\n```json\n{"city": "Paris <|im_end|>"}\n```' in text


def test_mistral_call_ids_are_short(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, chat_templates.MISTRAL, chat_templates.MISTRAL_TOKENS)
    text = rendered(tokenizer, HISTORY, [WEATHER])
    first = text.split('"id": "')[1][:9]
    assert first.isalnum() and f'"call_id": "{first}"' in text


def test_llama_calls_use_parameters(tmp_path: Path) -> None:
    text = rendered(tokenizer_of(tmp_path, chat_templates.LLAMA3), HISTORY, [WEATHER])
    assert '{"name": "weather", "parameters": {"city": "Paris <|im_end|>"}}' in text


@pytest.mark.parametrize("template", [CHATML, chat_templates.R1_DISTILL])
def test_template_without_tools_gets_instructions(tmp_path: Path, template: str) -> None:
    tokenizer = tokenizer_of(tmp_path, template)
    text = rendered(tokenizer, [{"role": "system", "content": "Be kind."}, *HISTORY], [WEATHER])
    assert text.index("Be kind.") < text.index(json.dumps(WEATHER["function"]))
    assert "<|im_start|>user\n<tool_response>\n21 degrees" in text
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris' in text
    assert "<|im_start|>tool" not in text
    without = rendered(tokenizer, HISTORY)  # tool calls in the history, no tools in the request
    assert "<tools>" not in without and "<tool_response>" in without


def test_consecutive_results_are_one_message(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, CHATML)
    text = rendered(tokenizer, [*HISTORY[:3], HISTORY[2], HISTORY[3]])
    assert text.count("<|im_start|>user") == 3


def test_reasoning_in_history_and_thinking_switch(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, chat_templates.QWEN3)
    history = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning_content": "hm"},
    ]
    assert "<think>\nhm\n</think>\n\nb" in rendered(tokenizer, history)
    style = ChatStyle.of(tokenizer)
    assert style.effort_variables("none") == {"enable_thinking": False}
    off = rendered(tokenizer, history, variables=style.effort_variables("none"))
    assert off.endswith("<think>\n\n</think>\n\n")
    assert ChatStyle.of(tokenizer_of(tmp_path, CHATML)).effort_variables("high") == {}


def test_prompt_that_opens_reasoning_is_detected(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, chat_templates.R1_DISTILL)
    style = ChatStyle.of(tokenizer)
    ids = tokenizer.encode_chat([{"role": "user", "content": "a"}])
    assert style.opens_reasoning(tokenizer, ids)
    assert not style.opens_reasoning(tokenizer, ids[:-8])
    answer = style.reader(None, opened=True).read("I\nthink\n</think>\n\nYes.\n")
    assert (answer.reasoning, answer.content) == ("I\nthink", "Yes.\n")


def test_control_tokens_needed_by_parsers_are_visible(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, chat_templates.MISTRAL, chat_templates.MISTRAL_TOKENS)
    style, tools = ChatStyle.of(tokenizer), read_tools([WEATHER])
    assert style.visible_ids(tokenizer, tools) == {tokenizer.token_id("[TOOL_CALLS]")}
    assert style.visible_ids(tokenizer, None) == frozenset()


# ---- the tools of a request ----------------------------------------------------------------------


def tool(name: str = "f", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def test_tool_choice() -> None:
    assert read_tools(None) is None and read_tools([]) is None
    assert read_tools([tool()], "none") is None
    assert read_tools([], "auto") is None
    found = read_tools([tool(), tool("g")], {"type": "function", "function": {"name": "g"}})
    assert found is not None and found.choice is ToolChoice.NAMED and found.max_calls == 1
    assert [each.name for each in found.callable] == ["g"]
    both = read_tools([tool(), tool("g")], "required")
    assert both is not None and both.is_forced and both.max_calls > 1
    alone = read_tools([tool()], parallel=False)
    assert alone is not None and alone.max_calls == 1


DEEP: dict[str, Any] = {}
for _ in range(60):
    DEEP = {"properties": DEEP}


@pytest.mark.parametrize(
    ("tools", "choice", "field"),
    [
        ([tool(f"f{n}") for n in range(129)], None, "tools"),
        ([tool("a b")], None, "tools[0].function.name"),
        ([tool("")], None, "tools[0].function.name"),
        ([tool("x" * 129)], None, "tools[0].function.name"),
        ([tool("a"), tool("b"), tool("a")], None, "tools[2].function.name"),
        ([tool(), tool("g", parameters=[])], None, "tools[1].function.parameters"),
        ([tool(description=7)], None, "tools[0].function.description"),
        ([tool(parameters=DEEP)], None, "tools[0].function.parameters"),
        ([tool(description="x" * 300_000)], None, "tools"),
        ([{"type": "custom", "custom": {}}], None, "tools[0]"),
        (["f"], None, "tools[0]"),
        ([tool()], "maybe", "tool_choice"),
        ([], "required", "tool_choice"),
        ([tool()], {"type": "function", "function": {"name": "g"}}, "tool_choice"),
        ([tool()], {"type": "function"}, "tool_choice"),
    ],
)
def test_invalid_tools_are_named_by_path(tools: Any, choice: Any, field: str) -> None:
    with pytest.raises(InvalidInputError) as error:
        read_tools(tools, choice)
    assert error.value.field == field


def test_protocol_adapter_sets_the_path_in_errors() -> None:
    from llaisys.chat.records import Tool

    with pytest.raises(InvalidInputError) as error:
        ToolSet.of([Tool("a b")], path="tools[{}]")
    assert error.value.field == "tools[0].name"
