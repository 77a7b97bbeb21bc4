"""Tools of unsupported types: built-in tools of other servers (web_search, code_interpreter,
computer_20250124, ...) and unknown types. They are dropped and noted like unknown fields; a
`tool_choice` that needs one of them is an error."""

from __future__ import annotations

import re
from typing import Any

from llaisys.common.errors import InvalidInputError
from llaisys.server.openai.fields import UNSUPPORTED, FieldNotes, Ignored

# A type that an error or the header may repeat: words and a date.
_TYPE = re.compile(r"(?=.{1,40}$)[a-z]+(_[a-z]+)*(_[0-9]{2,8})*")
FORCED = ("required", "any")  # at least one call, for OpenAI and Anthropic


def drop_tools(data: dict[str, Any], types: frozenset[str], notes: FieldNotes) -> dict[str, Any]:
    """Return the body without the tools whose `type` is a string outside `types`. Raises
    InvalidInputError when the choice needs one of them. In strict mode all stay, so that the schema
    rejects them."""
    tools = data.get("tools")
    if notes.strict or not isinstance(tools, list):
        return data
    kept: list[Any] = []
    dropped: dict[int, dict[str, Any]] = {}
    for number, tool in enumerate(tools):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind not in types:
            dropped[number] = tool
            notes.ignore(f"tools[{number}].type={printable_type(kind)}", Ignored.TOOL)
        else:
            kept.append(tool)
    if not dropped:
        return data
    check_choice(data.get("tool_choice"), kept, dropped)
    return {**data, "tools": kept}


def printable_type(kind: str) -> str:
    return kind if _TYPE.fullmatch(kind) else "other"


def check_choice(choice: Any, kept: list[Any], dropped: dict[int, dict[str, Any]]) -> None:
    """Raises InvalidInputError when the choice needs a tool that was dropped."""
    kind = choice.get("type") if isinstance(choice, dict) else choice
    types = ", ".join(sorted({printable_type(tool["type"]) for tool in dropped.values()}))
    if kind in FORCED and not kept:
        raise _choice_error(
            f"{kind}; it must be auto or none: this server has no tools of type {types}"
        )
    if not isinstance(choice, dict):
        return
    if kind == "allowed_tools":  # named tools are checked with the others
        return
    name = name_of(choice)
    if name is not None and name in {name_of(tool) for tool in kept}:
        return
    for number, tool in dropped.items():
        if kind == tool["type"] or (name is not None and name == name_of(tool)):
            raise _choice_error(
                f"tools[{number}] of type {printable_type(tool['type'])}, which this server does "
                "not have; it must be another tool of the request"
            )


def name_of(tool: Any) -> str | None:
    """Return the name of a tool or a choice in the format of any API."""
    if not isinstance(tool, dict):
        return None
    for holder in (tool, tool.get("function"), tool.get("custom")):
        if isinstance(holder, dict) and isinstance(holder.get("name"), str):
            return str(holder["name"])
    return None


def _choice_error(text: str) -> InvalidInputError:
    return InvalidInputError(f"tool_choice is {text}", field="tool_choice", code=UNSUPPORTED)
