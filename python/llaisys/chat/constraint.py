"""Structured output constraints for tool calls: a grammar when a call is required, a structural tag
when a tool is strict."""

import json
from typing import Any

from llaisys.chat.reasoning import ReasoningMarkers
from llaisys.chat.records import Tool
from llaisys.chat.tool_formats.harmony import ANALYSIS, CHANNEL, CONSTRAIN, MESSAGE, RECIPIENT
from llaisys.chat.tool_formats.harmony import END as HARMONY_END
from llaisys.chat.tool_formats.harmony import START as HARMONY_START
from llaisys.chat.tool_formats.json_formats import END, START
from llaisys.chat.tools import ToolSet
from llaisys.common.closed_schema import closed
from llaisys.common.structured import StructuredOutputs

MAX_FORCED_CALLS = 16  # per answer with a required call; bounds its length
DEFINITIONS = ("$defs", "definitions")
WHITE_SPACE = r"[\x20\x0A\x09]{1,16}"  # between JSON tokens; bounded, so that answers end


def call_constraint(
    tools: ToolSet,
    is_tagged: bool,
    markers: ReasoningMarkers | None,
    opened: bool,
    text: StructuredOutputs | None = None,
) -> StructuredOutputs | None:
    """None: unconstrained. `is_tagged`: calls are between tags, else bare JSON. `markers`: of
    reasoning before the calls; None: no reasoning, or the engine waits for its end. `opened`: the
    prompt ends inside the reasoning. `text`: JSON that an answer without calls must be; calls
    without tags could not be distinguished from it."""
    if tools.is_forced:
        return StructuredOutputs(grammar=_calls(tools, is_tagged, markers, opened, None))
    if text is not None and is_tagged:
        return StructuredOutputs(grammar=_calls(tools, is_tagged, markers, opened, text))
    if is_tagged and any(tool.strict for tool in tools.tools):
        structures = [_structure(tool) for tool in tools.tools]
        tag = {"structures": structures, "triggers": [START]}
        return StructuredOutputs(
            structural_tag=tag, lenient=not all(tool.strict for tool in tools.tools)
        )
    return None


def harmony_constraint(
    tools: ToolSet | None, text: StructuredOutputs | None = None
) -> StructuredOutputs | None:
    """For the format of gpt-oss: a required call, or a call or `text` in the final channel. One
    message of reasoning may precede them. None: unconstrained. Markers are special tokens."""
    is_forced = tools is not None and tools.is_forced
    if not is_forced and text is None:
        return None
    rules = [
        r"TEXT: /(.|\n)*/",
        f'thought: {CHANNEL} "{ANALYSIS}" {MESSAGE} TEXT {HARMONY_END} {HARMONY_START} "assistant"',
    ]
    names = []
    for number, tool in enumerate(() if tools is None else tools.callable):
        to = _text(f"commentary to={RECIPIENT}{tool.name} ")
        schema = _arguments(tool) | {
            "x-guidance": {"lenient": not tool.strict, "whitespace_pattern": WHITE_SPACE}
        }
        names.append(f"call_{number}")
        rules.append(
            f'{names[-1]}: {CHANNEL} {to} {CONSTRAIN} "json" {MESSAGE} %json {_json(schema)}'
        )
    if text is not None and not is_forced:
        names.append("final")
        rules.append(f'final: {CHANNEL} "final" {MESSAGE} text')
        rules.append(f"text: %json {_json(_text_schema(text))}")
    return StructuredOutputs(grammar="\n".join([f"start: thought? ({' | '.join(names)})", *rules]))


def _calls(
    tools: ToolSet,
    is_tagged: bool,
    markers: ReasoningMarkers | None,
    opened: bool,
    text: StructuredOutputs | None,
) -> str:
    """A Lark grammar of llguidance: calls, or the text if there is one."""
    calls = " | ".join(f"call_{number}" for number in range(len(tools.callable)))
    one, most = "call", min(tools.max_calls, MAX_FORCED_CALLS)
    body = [f"call_{n}: %json {_json(_call_schema(t))}" for n, t in enumerate(tools.callable)]
    if is_tagged:
        one = f"{_text(START + chr(10))} call {_text(chr(10) + END)}"
        several = f'{one} ("\\n" {one}){{0,{most - 1}}}'
    else:
        several = f'"[" call (", " call){{0,{most - 1}}} "]"'
    rules = [f"answer: {several if most > 1 else one}", f"call: {calls}", *body]
    rules.append(r"SPACE: /[\x20\x0A]{1,4}/")
    start = "SPACE? answer"
    if text is not None:
        start = "SPACE? (answer | text)"
        rules.append(f"text: %json {_json(_text_schema(text))}")
    if markers is not None:
        rules += [
            r"TEXT: /(.|\n)*/",
            f"thought[lazy]: TEXT {_text(markers.end)}",
        ]
        thinks = "thought" if opened else f"({_text(markers.start)} thought)?"
        start = f"{thinks} {start}"
    return "\n".join([f"start: {start}", *rules])


def _text_schema(text: StructuredOutputs) -> dict[str, Any]:
    schema = json.loads(str(text.json)) if text.json is not None else {"type": "object"}
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    options = {"lenient": text.lenient, "coerce_one_of": text.lenient}
    return {**closed(schema), "x-guidance": {**options, "whitespace_pattern": WHITE_SPACE}}


def _call_schema(tool: Tool) -> dict[str, Any]:
    parameters = tool.parameters or {}
    shared = {name: parameters[name] for name in DEFINITIONS if name in parameters}
    return {
        **shared,  # "$ref" resolves from the root
        "type": "object",
        "properties": {"name": {"const": tool.name}, "arguments": _arguments(tool)},
        "required": ["name", "arguments"],
        "additionalProperties": False,
        "x-guidance": {"lenient": not tool.strict, "whitespace_pattern": WHITE_SPACE},
    }


def _structure(tool: Tool) -> dict[str, Any]:
    begin = f'{START}\n{{"name": {_json(tool.name)}, "arguments": '
    schema = _arguments(tool) if tool.strict else {"type": "object"}
    return {"begin": begin, "schema": schema, "end": f"}}\n{END}"}


def _arguments(tool: Tool) -> dict[str, Any]:
    """The schema of the arguments, which are always an object."""
    schema = {"type": "object", **(tool.parameters or {"properties": {}})}
    return dict(closed(schema))


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


_text = _json  # a grammar string has the syntax of a JSON string
