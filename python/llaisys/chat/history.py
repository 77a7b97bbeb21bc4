"""Converts messages for a chat template: tool calls and results in the template's format, or as
text for a template without tools."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from llaisys.chat.records import Tool
from llaisys.chat.tool_formats.json_formats import END, ID_CHARS, START

Message = dict[str, Any]

# System prompt for a template that does not list tools.
_INSTRUCTIONS = """\
You can call functions. These are the functions that there are, with the JSON schemas of their \
arguments:
<tools>
{tools}
</tools>
To call one, write its name and its arguments as JSON inside of tags, once for each call, and wait \
for the results:
{start}
{{"name": "function-name", "arguments": {{"argument-name": "value"}}}}
{end}
Call a function only when it helps; else answer in plain words."""


def native_messages(
    messages: Sequence[Message], arguments_as_text: bool, short_ids: bool
) -> list[Message]:
    """For a template with tools. `arguments_as_text`: keep arguments as JSON text; most templates
    need objects. `short_ids`: ids are 9 letters and digits."""
    found = []
    for message in messages:
        changed = dict(message)
        if message.get("tool_calls"):
            changed["content"] = message.get("content") or None
            changed["tool_calls"] = [
                _native_call(call, arguments_as_text, short_ids) for call in message["tool_calls"]
            ]
        if short_ids and isinstance(message.get("tool_call_id"), str):
            changed["tool_call_id"] = short_id(message["tool_call_id"])
        found.append(changed)
    return found


def harmony_messages(messages: Sequence[Message]) -> list[Message]:
    """For the template of gpt-oss, which reads reasoning as `thinking`, and one call per message:
    each call is followed by its result."""
    found: list[Message] = []
    results = {
        message["tool_call_id"]: message
        for message in messages
        if message.get("role") == "tool" and isinstance(message.get("tool_call_id"), str)
    }
    moved: list[Message] = []  # results that follow their call
    for message in messages:
        if any(message is other for other in moved):
            continue
        changed = dict(message)
        thinking = changed.pop("reasoning_content", None) or changed.pop("reasoning", None)
        calls = message.get("tool_calls") or []
        if thinking:
            changed["thinking"] = thinking
        if calls and thinking and changed.get("content"):  # the template rejects both
            changed["thinking"] = f"{thinking}\n\n{changed['content']}"
            changed["content"] = None
        if len(calls) < 2:
            found.append(changed)
            continue
        for number, call in enumerate(calls):
            first = changed if number == 0 else {"role": "assistant", "content": None}
            found.append({**first, "tool_calls": [call]})
            result = results.get(call.get("id"))
            if result is not None:
                found.append(result)
                moved.append(result)
    return found


def with_system_tools(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """For the template of Phi-4-mini, which reads the tools of the system message."""
    listed = _json([tool.for_template()["function"] for tool in tools])
    system: Message = {"role": "system", "content": ""}
    rest = list(messages)
    if rest and rest[0].get("role") == "system":
        system = rest.pop(0)
    return [{**system, "tools": listed}, *rest]


def _native_call(call: Mapping[str, Any], as_text: bool, short_ids: bool) -> Message:
    function = dict(call["function"])
    arguments = function.get("arguments")
    if as_text:
        function["arguments"] = arguments if isinstance(arguments, str) else _json(arguments or {})
    else:
        function["arguments"] = as_object(arguments)
    changed = {**call, "type": "function", "function": function}
    if short_ids:
        changed["id"] = short_id(str(call.get("id") or ""))
    return changed


def as_object(arguments: Any) -> Any:
    """Arguments as an object; invalid JSON stays a string."""
    if not isinstance(arguments, str):
        return arguments if arguments is not None else {}
    if not arguments.strip():
        return {}
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def short_id(name: str) -> str:
    """The id if it is short, else a hash of it."""
    if len(name) == ID_CHARS and name.isalnum() and name.isascii():
        return name
    return hashlib.sha256(name.encode("utf-8", "replace")).hexdigest()[:ID_CHARS]


def plain_messages(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """For a template without tools: definitions in the system prompt, calls in the assistant's
    messages, results in user messages."""
    found: list[Message] = []
    for message in messages:
        if message.get("role") == "tool":
            result = f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"
            if found and found[-1].get("role") == "user" and found[-1].get("results"):
                found[-1]["content"] += "\n" + result
            else:
                found.append({"role": "user", "content": result, "results": True})
        elif message.get("tool_calls"):
            texts = [message.get("content") or ""] + [_call_text(c) for c in message["tool_calls"]]
            content = "\n".join(text for text in texts if text)
            others = {k: v for k, v in message.items() if k not in ("tool_calls", "content")}
            found.append({**others, "content": content})
        else:
            found.append(dict(message))
    for message in found:
        message.pop("results", None)
    return _instructed(found, tools) if tools else found


def _call_text(call: Mapping[str, Any]) -> str:
    function = call["function"]
    body = {"name": function.get("name"), "arguments": as_object(function.get("arguments"))}
    return f"{START}\n{_json(body)}\n{END}"


def _instructed(messages: list[Message], tools: Sequence[Tool]) -> list[Message]:
    lines = "\n".join(_json(tool.for_template()["function"]) for tool in tools)
    text = _INSTRUCTIONS.format(tools=lines, start=START, end=END)
    if messages and messages[0].get("role") == "system":
        first = {**messages[0], "content": f"{messages[0].get('content') or ''}\n\n{text}".strip()}
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
