"""Protocol-independent records: tools, tool calls, answers and their streaming events."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None  # JSON schema of an object; None: no arguments
    strict: bool = False  # constrain the arguments to the schema

    def for_template(self) -> dict[str, Any]:
        """The tool in the format of chat templates."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = self.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call in an answer. `arguments` is the model's text: JSON, unless truncated or invalid."""

    id: str
    name: str
    arguments: str

    def to_dict(self) -> dict[str, Any]:
        """The call in OpenAI's format."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(slots=True)
class ChatAnswer:
    """A parsed answer."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)

    def to_message(self) -> dict[str, Any]:
        """The answer as an assistant message; empty fields other than content are omitted."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["content"] = self.content or None
            message["tool_calls"] = [call.to_dict() for call in self.tool_calls]
        return message


@dataclass(frozen=True, slots=True)
class ReasoningText:
    text: str


@dataclass(frozen=True, slots=True)
class ContentText:
    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """Start of call `index`; CallArguments events follow. Calls do not overlap."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    index: int
    text: str


AnswerEvent = ReasoningText | ContentText | CallStart | CallArguments
