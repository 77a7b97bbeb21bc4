"""Translate input items of the Responses API to chat messages."""

from collections.abc import Iterable, Sequence
from typing import Any

from llaisys.common.errors import InvalidInputError
from llaisys.common.validation import invalid_value
from llaisys.server.schemas.fields import FieldNotes, Ignored, filter_object, unsupported

Item = dict[str, Any]
Message = dict[str, Any]

REFERENCE = "item_reference"
TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
PART_NAMES = frozenset({"type", "text", "refusal", "annotations", "logprobs"})
# Calls of built-in tools in the history: dropped like the tools.
BUILT_IN_CALLS = frozenset(
    "web_search_call file_search_call code_interpreter_call image_generation_call "
    "tool_search_call tool_search_output mcp_list_tools mcp_approval_request "
    "mcp_approval_response".split()
)
# item type -> fields beside `type`, `id` and `status`
ITEM_NAMES = {
    "message": ("role", "content", "phase"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": ("summary", "content", "encrypted_content"),
    REFERENCE: (),
}
ROLES = ("user", "assistant", "system", "developer")


def with_known_fields(item: Any, notes: FieldNotes) -> Any:
    """Return an item without unknown fields. Those and items of built-in tools are added to
    `notes`. Raises InvalidInputError in strict mode."""
    kind = item.get("type", "message") if isinstance(item, dict) else None
    if not isinstance(kind, str):
        return item
    if kind in BUILT_IN_CALLS:
        if notes.strict:
            raise unknown_type("input[]")
        notes.ignore(f"input[].type={kind}", Ignored.TOOL)
    if kind not in ITEM_NAMES:
        return item
    names = frozenset({"type", "id", "status", *ITEM_NAMES[kind]})
    found = filter_object(item, names, notes, "input[]")
    for field in ("content", "output"):
        if kind != "reasoning" and isinstance(found.get(field), list):
            found[field] = [
                filter_object(part, PART_NAMES, notes, f"input[].{field}[]")
                if isinstance(part, dict) and part.get("type") in TEXT_PARTS
                else part
                for part in found[field]
            ]
    return found


def unknown_type(path: str) -> InvalidInputError:
    return unsupported(
        f"{path}.type",
        "is of a kind that this server does not have; it must be message, function_call, "
        "function_call_output, reasoning or item_reference",
    )


def chat_messages(items: Sequence[Any]) -> list[Message]:
    """Translate items. Consecutive reasoning, text and calls become one assistant message.
    Unresolved references are skipped. Raises InvalidInputError."""
    found: list[Message] = []
    answer: Message | None = None  # the open assistant message

    def assistant() -> Message:
        nonlocal answer
        if answer is None:
            answer = {"role": "assistant", "content": ""}
            found.append(answer)
        return answer

    for number, item in enumerate(items):
        path = f"input[{number}]"
        if not isinstance(item, dict):
            raise invalid_value(path, item, "an object")
        kind = item.get("type", "message")
        if kind == "message":
            role = item.get("role")
            if role not in ROLES:
                raise invalid_value(f"{path}.role", role, f"one of {', '.join(ROLES)}")
            text = text_of(item.get("content"), f"{path}.content")
            if role != "assistant":
                answer = None
                found.append({"role": role, "content": text})
                continue
            if answer is not None and (answer["content"] or "tool_calls" in answer):
                answer = None
            assistant()["content"] = text
        elif kind == "function_call":
            assistant().setdefault("tool_calls", []).append(chat_call(item, path))
        elif kind == "function_call_output":
            answer = None
            output = text_of(item.get("output"), f"{path}.output")
            found.append({"role": "tool", "tool_call_id": call_id(item, path), "content": output})
        elif kind == "reasoning":
            if answer is not None and (answer["content"] or "tool_calls" in answer):
                answer = None
            text = reasoning_text(item)
            if text:
                assistant()["reasoning_content"] = text
        elif kind != REFERENCE and kind not in BUILT_IN_CALLS:
            raise unknown_type(path)
    return found


def chat_call(item: Item, path: str) -> dict[str, Any]:
    name, arguments = item.get("name"), item.get("arguments")
    if not isinstance(name, str):
        raise invalid_value(f"{path}.name", name, "a string")
    if not isinstance(arguments, str):
        raise invalid_value(f"{path}.arguments", arguments, "JSON as a string")
    function = {"name": name, "arguments": arguments}
    return {"id": call_id(item, path), "type": "function", "function": function}


def call_id(item: Item, path: str) -> str:
    found = item.get("call_id")
    if not isinstance(found, str) or not found:
        raise invalid_value(f"{path}.call_id", found, "the id of a call")
    return found


def text_of(content: Any, path: str) -> str:
    """Return a string, or the joined texts of parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid_value(path, content, "a string or a list of parts")
    texts = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(part, dict) or kind not in TEXT_PARTS:
            why = "is not text; this is a text model: send input_text parts"
            raise unsupported(f"{path}[{number}]", why)
        text = part.get(TEXT_PARTS[kind])
        if not isinstance(text, str):
            raise invalid_value(f"{path}[{number}].text", text, "a string")
        texts.append(text)
    return "\n".join(texts)


def reasoning_text(item: Item) -> str:
    """Return the reasoning text, or the summary if it has none."""
    for name in ("content", "summary"):
        parts = item.get(name)
        if isinstance(parts, list) and parts:
            texts = (part.get("text") for part in parts if isinstance(part, dict))
            return "\n".join(text for text in texts if isinstance(text, str))
    return ""


def references(items: Iterable[Any]) -> list[str]:
    """Return the ids of item references. Raises InvalidInputError."""
    found = []
    for number, item in enumerate(items):
        if isinstance(item, dict) and item.get("type") == REFERENCE:
            name = item.get("id")
            if not isinstance(name, str):
                raise invalid_value(f"input[{number}].id", name, "the id of an item")
            found.append(name)
    return found


def with_resolved(items: Sequence[Any], known: dict[str, Item]) -> list[Any]:
    return [
        known[item["id"]] if isinstance(item, dict) and item.get("type") == REFERENCE else item
        for item in items
    ]


def input_items(messages: Iterable[Message], key: str) -> list[Item]:
    """Return messages as items. `key`: part of the item ids, which are only those of this list."""
    found: list[Item] = []

    def add(prefix: str, kind: str, **fields: Any) -> None:
        name = f"{prefix}_{key}_in{len(found)}"
        found.append({"id": name, "type": kind, "status": "completed", **fields})

    for message in messages:
        role, text = message["role"], message.get("content") or ""
        if role == "tool":
            add("fco", "function_call_output", call_id=message.get("tool_call_id"), output=text)
            continue
        if text:
            kind = "output_text" if role == "assistant" else "input_text"
            add("msg", "message", role=role, content=[{"type": kind, "text": text}])
        for call in message.get("tool_calls") or ():
            add("fc", "function_call", call_id=call.get("id"), **call["function"])
    return found
