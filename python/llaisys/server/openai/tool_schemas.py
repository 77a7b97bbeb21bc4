"""Tools and tool calls in OpenAI's requests."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from llaisys.chat.records import Tool
from llaisys.chat.tools import ToolSet
from llaisys.server.openai.base_schema import Schema, Text

FUNCTION_TOOLS = frozenset({"function"})  # supported tool types
MAX_ARGUMENT_CHARS = 256 << 10  # of one call in a history


class FunctionDefinition(Schema):
    path: ClassVar[str] = "tools[].function."

    name: Text
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolDefinition(Schema):
    path: ClassVar[str] = "tools[]."

    type: Literal["function"]
    function: FunctionDefinition

    def to_tool(self) -> Tool:
        function = self.function
        return Tool(function.name, function.description, function.parameters, bool(function.strict))


class NamedFunction(Schema):
    path: ClassVar[str] = "tool_choice.function."

    name: Text


class NamedChoice(Schema):
    path: ClassVar[str] = "tool_choice."

    type: Literal["function"]
    function: NamedFunction


class CalledFunction(Schema):
    path: ClassVar[str] = "messages[].tool_calls[].function."

    name: Text = Field(max_length=256)
    arguments: Text | dict[str, Any] | None = Field(None, max_length=MAX_ARGUMENT_CHARS)


class ToolCall(Schema):
    """A call in the history; the arguments are a JSON string or an object."""

    path: ClassVar[str] = "messages[].tool_calls[]."

    id: Text | None = Field(None, max_length=256)
    type: Literal["function"] = "function"
    function: CalledFunction

    def to_dict(self) -> dict[str, Any]:
        arguments = "{}" if self.function.arguments is None else self.function.arguments
        call: dict[str, Any] = {
            "type": "function",
            "function": {"name": self.function.name, "arguments": arguments},
        }
        return call if self.id is None else {"id": self.id, **call}


def tool_set_of(
    tools: list[ToolDefinition] | None, choice: str | NamedChoice | None, parallel: bool | None
) -> ToolSet | None:
    """Build the tool set. Raises InvalidInputError."""
    found = [tool.to_tool() for tool in tools or ()]
    named = choice.function.name if isinstance(choice, NamedChoice) else None
    kind = None if isinstance(choice, NamedChoice) else choice
    return ToolSet.of(found, kind, named, parallel is not False)
