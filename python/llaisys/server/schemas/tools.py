"""Tools and tool calls in OpenAI's requests."""

from typing import Annotated, Any, Literal

from pydantic import Field

from llaisys.chat.records import Tool
from llaisys.chat.tools import ToolSet
from llaisys.common.validation import invalid_value
from llaisys.server.schemas.base import Schema, Text

FUNCTION_TOOLS = frozenset({"function"})  # supported tool types
MAX_ARGUMENT_CHARS = 256 << 10  # of one call in a history


class FunctionDefinition(Schema, path="tools[].function."):
    name: Text
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolDefinition(Schema, path="tools[]."):
    type: Literal["function"]
    function: FunctionDefinition

    def to_tool(self) -> Tool:
        function = self.function
        return Tool(function.name, function.description, function.parameters, bool(function.strict))


class NamedFunction(Schema, path="tool_choice.function."):
    name: Text


class NamedChoice(Schema, path="tool_choice."):
    type: Literal["function"]
    function: NamedFunction


class AllowedTools(Schema, path="tool_choice.allowed_tools."):
    mode: Literal["auto", "required"]
    tools: list[NamedChoice] = Field(min_length=1)


class AllowedChoice(Schema, path="tool_choice."):
    """A choice among some of the tools; the others are not in the prompt."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoiceObject = Annotated[NamedChoice | AllowedChoice, Field(discriminator="type")]


class CalledFunction(Schema, path="messages[].tool_calls[].function."):
    name: Text = Field(max_length=256)
    arguments: Text | dict[str, Any] | None = Field(None, max_length=MAX_ARGUMENT_CHARS)


class ToolCall(Schema, path="messages[].tool_calls[]."):
    """A call in the history; the arguments are a JSON string or an object."""

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
    tools: list[ToolDefinition] | None,
    choice: str | NamedChoice | AllowedChoice | None,
    parallel: bool | None,
) -> ToolSet | None:
    """Build the tool set. Raises InvalidInputError."""
    found = [tool.to_tool() for tool in tools or ()]
    if isinstance(choice, AllowedChoice):
        names = {tool.function.name for tool in choice.allowed_tools.tools}
        for name in names - {tool.name for tool in found}:
            raise invalid_value("tool_choice.allowed_tools.tools", name, "tools of the request")
        found, choice = [tool for tool in found if tool.name in names], choice.allowed_tools.mode
    named = choice.function.name if isinstance(choice, NamedChoice) else None
    kind = None if isinstance(choice, NamedChoice) else choice
    return ToolSet.of(found, kind, named, parallel is not False)
