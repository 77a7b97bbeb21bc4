"""`ToolSet`: the validated tools of a request, independent of the API protocol."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Self

from llaisys.chat.records import Tool
from llaisys.chat.tool_formats.base import MAX_CALLS, NAME
from llaisys.common.errors import InvalidInputError
from llaisys.common.validation import check_bool, check_count, invalid_count, invalid_value

MAX_TOOLS = 128  # OpenAI's limit
MAX_TOOL_CHARS = 256 << 10  # of all tools as JSON
MAX_DEPTH = 48  # of a schema; a template accepts 64 levels in total

NAME_LIMIT = "1 to 128 of the characters A-Z a-z 0-9 _ . : / -"


class ToolChoice(Enum):
    AUTO = "auto"  # the model decides
    NONE = "none"
    REQUIRED = "required"  # at least one call
    NAMED = "named"  # a call of the named tool


@dataclass(frozen=True, slots=True)
class ToolSet:
    """Created by `of`; not empty. `named` is one of the tools when the choice is NAMED."""

    tools: tuple[Tool, ...]
    choice: ToolChoice = ToolChoice.AUTO
    named: str | None = None
    parallel: bool = True  # allow several calls per answer
    num_chars: int = 0  # of the tools as JSON

    @classmethod
    def of(
        cls,
        tools: Sequence[Tool],
        choice: str | None = None,
        named: str | None = None,
        parallel: bool = True,
        path: str = "tools[{}].function",
    ) -> Self | None:
        """None without tools or with choice `none`. `path`: of a tool in error messages. Raises
        InvalidInputError."""
        num_chars = check_tools(tools, path)
        kind = ToolChoice.NAMED if named is not None else ToolChoice(choice or "auto")
        names = [tool.name for tool in tools]
        if named is not None and named not in names:
            raise invalid_value("tool_choice", named, "a tool of the request")
        if kind is ToolChoice.REQUIRED and not tools:
            raise invalid_value("tool_choice", choice, "left out without tools")
        if not tools or kind is ToolChoice.NONE:
            return None
        return cls(tuple(tools), kind, named, parallel, num_chars)

    @property
    def names(self) -> list[str]:
        return [tool.name for tool in self.tools]

    @property
    def callable(self) -> tuple[Tool, ...]:
        """The tools that may be called: all, or the named one."""
        return tuple(tool for tool in self.tools if self.named in (None, tool.name))

    @property
    def max_calls(self) -> int:
        return MAX_CALLS if self.parallel and self.named is None else 1

    @property
    def is_forced(self) -> bool:
        return self.choice in (ToolChoice.REQUIRED, ToolChoice.NAMED)

    @property
    def ends_at_repeat(self) -> bool:
        """Whether a repeated call ends the answer. A model that has to call repeats itself; one
        that may stop calls twice on purpose."""
        return self.is_forced and self.max_calls > 1

    def for_template(self) -> list[dict[str, Any]]:
        return [tool.for_template() for tool in self.tools]


def check_tools(tools: Sequence[Tool], path: str) -> int:
    """Validate tools and return their size as JSON in characters. Raises InvalidInputError."""
    check_count("tools", len(tools), MAX_TOOLS, "tools")
    seen: set[str] = set()
    size = 0
    for number, tool in enumerate(tools):
        where = path.format(number)
        if not NAME.fullmatch(tool.name):
            raise invalid_value(f"{where}.name", tool.name, NAME_LIMIT)
        if tool.name in seen:
            raise invalid_value(f"{where}.name", tool.name, "a name that no other tool has")
        seen.add(tool.name)
        if depth_of(tool.parameters, MAX_DEPTH + 1) > MAX_DEPTH:
            field = f"{where}.parameters"
            raise InvalidInputError(f"{field} is nested more than {MAX_DEPTH} deep", field=field)
        size += len(json.dumps(tool.for_template(), ensure_ascii=False))
        if size > MAX_TOOL_CHARS:
            raise invalid_count("tools", size, "characters or more", f"at most {MAX_TOOL_CHARS}")
    return size


def depth_of(value: Any, enough: int) -> int:
    """Nesting depth of lists and objects, counted up to `enough`."""
    level, depth = [value], 0
    while depth < enough:
        level = [
            item
            for parent in level
            if isinstance(parent, (Mapping, list, tuple))
            for item in (parent.values() if isinstance(parent, Mapping) else parent)
        ]
        if not level:
            return depth
        depth += 1
    return depth


def read_tool(definition: Any, path: str) -> Tool:
    """Parse a tool in OpenAI's format: {"type": "function", "function": {"name": ..}}."""
    function = definition.get("function") if isinstance(definition, Mapping) else None
    if not isinstance(function, Mapping) or definition.get("type", "function") != "function":
        raise invalid_value(path, definition, "{'type': 'function', 'function': {'name', ..}}")
    name, description = function.get("name"), function.get("description")
    parameters = function.get("parameters")
    if not isinstance(name, str):
        raise invalid_value(f"{path}.function.name", name, NAME_LIMIT)
    if description is not None and not isinstance(description, str):
        raise invalid_value(f"{path}.function.description", description, "a string")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise invalid_value(f"{path}.function.parameters", parameters, "an object")
    strict = check_bool(f"{path}.function.strict", function.get("strict") or False)
    return Tool(name, description, None if parameters is None else dict(parameters), strict)


def read_tools(
    definitions: Sequence[Any] | None,
    choice: str | Mapping[str, Any] | None = None,
    parallel: bool | None = None,
) -> ToolSet | None:
    """Parse OpenAI's `tools`, `tool_choice` and `parallel_tool_calls`."""
    if definitions is not None and not isinstance(definitions, (list, tuple)):
        raise invalid_value("tools", definitions, "a list")
    check_count("tools", len(definitions or ()), MAX_TOOLS, "tools")
    tools = [read_tool(item, f"tools[{n}]") for n, item in enumerate(definitions or ())]
    named = None
    if isinstance(choice, Mapping):
        function = choice.get("function")
        named = function.get("name") if isinstance(function, Mapping) else None
        if choice.get("type") != "function" or not isinstance(named, str):
            raise invalid_value("tool_choice", choice, "{'type': 'function', 'function': {'name'}}")
        choice = None
    elif choice not in (None, "auto", "none", "required"):
        raise invalid_value("tool_choice", choice, "'auto', 'none', 'required' or a function")
    return ToolSet.of(tools, choice, named, parallel is not False)
