"""Request schemas of Anthropic's Messages API and their translation to a chat."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from llaisys.common.errors import InvalidInputError
from llaisys.server.generation.chat import ProtocolRequest
from llaisys.server.schemas.base import ModelName, Schema, Text
from llaisys.server.schemas.fields import UNSUPPORTED, FieldNotes, Ignored, unsupported
from llaisys.server.schemas.kinds import Checked
from llaisys.server.schemas.sampling import NEW_TOKENS
from llaisys.server.schemas.structured import json_schema_format

CacheControl = dict[str, Any] | None  # a hint: prefix caching is automatic
NAME = Field(max_length=128)


class BlockSchema(Schema, path="messages[].content[]."):
    """A block of a message."""


class TextBlock(BlockSchema):
    type: Literal["text"]
    text: Text
    cache_control: CacheControl = None
    citations: list[Any] | None = None


class SystemBlock(TextBlock, path="system[]."):
    pass


class ThinkingBlock(BlockSchema):
    type: Literal["thinking"]
    thinking: Text
    signature: Text | None = None
    cache_control: CacheControl = None


class RedactedThinkingBlock(BlockSchema):
    type: Literal["redacted_thinking"]
    data: Text


class ToolUseBlock(BlockSchema):
    type: Literal["tool_use"]
    id: Text = NAME
    name: Text = NAME
    input: dict[str, Any]
    caller: dict[str, Any] | None = None
    cache_control: CacheControl = None


class UnsupportedBlock(BlockSchema):
    """An image or a document: rejected with a specific message."""

    type: Literal["image", "document", "search_result"]
    source: Any = None
    title: Any = None
    context: Any = None
    content: Any = None
    citations: Any = None
    cache_control: CacheControl = None


class ServerToolBlock(BlockSchema):
    """A call or result of a tool that Anthropic's servers run: dropped like the tool."""

    type: Literal[
        "server_tool_use",
        "web_search_tool_result",
        "web_fetch_tool_result",
        "code_execution_tool_result",
        "bash_code_execution_tool_result",
        "text_editor_code_execution_tool_result",
        "tool_search_tool_result",
        "mcp_tool_use",
        "mcp_tool_result",
    ]

    @classmethod
    def prepare(cls, data: dict[str, Any], notes: FieldNotes) -> dict[str, Any]:
        """Return only the type, which is one of the above: the discriminator of the union."""
        if notes.strict:
            limit = "a block of another type: this server does not have these tools"
            raise InvalidInputError(
                f"is of a tool that Anthropic runs; it must be {limit}", code=UNSUPPORTED
            )
        kind = data.get("type")
        notes.ignore(f"{cls.path}type={kind}", Ignored.TOOL)
        return {"type": kind}


class ToolResultBlock(BlockSchema):
    type: Literal["tool_result"]
    tool_use_id: Text = NAME
    content: (
        Text | list[Annotated[TextBlock | UnsupportedBlock, Field(discriminator="type")]] | None
    ) = None
    is_error: bool | None = None
    cache_control: CacheControl = None


Block = Annotated[
    TextBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | ToolUseBlock
    | ToolResultBlock
    | ServerToolBlock
    | UnsupportedBlock,
    Field(discriminator="type"),
]


class InputMessage(Schema, path="messages[]."):
    role: Literal["user", "assistant", "system"]
    content: Text | list[Block]


class ToolDefinition(Schema, path="tools[]."):
    name: Text = NAME
    description: Text | None = None
    input_schema: dict[str, Any] | None = None
    type: Text | None = None
    strict: bool | None = None
    cache_control: CacheControl = None
    eager_input_streaming: bool | None = None
    input_examples: list[Any] | None = None
    allowed_callers: list[Any] | None = None


class ToolChoice(Schema, path="tool_choice."):
    type: Literal["auto", "any", "tool", "none"]
    name: Text | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Schema, path="thinking."):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=1)
    display: Text | None = None


class OutputFormat(Schema, path="output_format."):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Schema, path="output_config."):
    effort: Text | None = None
    format: OutputFormat | None = None


class Metadata(Schema, path="metadata."):
    user_id: Text | None = Field(None, max_length=1024)


class CountTokensRequest(ProtocolRequest):
    """The fields that determine the prompt."""

    tool_types = frozenset({"custom"})
    own_names: ClassVar[Mapping[str, str]] = {
        "thinking": "thinking",
        "thinking_budget": "thinking.budget_tokens",
        "reasoning_effort": "output_config.effort",
    }

    model: ModelName = None
    messages: Annotated[list[InputMessage], Field(min_length=1)]
    system: Text | list[SystemBlock] | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    cache_control: CacheControl = None

    def to_chat(self) -> dict[str, Any]:
        chat: dict[str, Any] = {"model": self.model, "messages": self._messages(), **self._tools()}
        if self.messages[-1].role == "assistant":  # a prefill, which the answer continues
            chat["continue_final_message"] = True
        if self.thinking is not None:
            chat |= thinking_fields(self.thinking)
        format = self.output_format
        if self.output_config is not None:
            format = self.output_config.format or format
            if self.output_config.effort is not None and chat.get("thinking") is not False:
                chat["reasoning_effort"] = REASONING_EFFORTS.get(
                    self.output_config.effort, self.output_config.effort
                )
        if format is not None:
            chat["response_format"] = json_schema_format(format.schema_)
        return chat

    def _messages(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        if self.system:
            system = self.system
            if not isinstance(system, str):
                system = "\n".join(block.text for block in system)
            found.append({"role": "system", "content": system})
        for number, message in enumerate(self.messages):
            found += chat_messages(message, f"messages[{number}]")
        return found

    def _tools(self) -> dict[str, Any]:
        if not self.tools:
            return {}
        for number, tool in enumerate(self.tools):
            if tool.type not in (None, "custom") or tool.input_schema is None:
                raise InvalidInputError(
                    f"tools[{number}] is of a kind that this server does not have; it must be a "
                    "custom tool with an input_schema",
                    field=f"tools[{number}].type",
                    code=UNSUPPORTED,
                )
        fields: dict[str, Any] = {"tools": [chat_tool(tool) for tool in self.tools]}
        choice = self.tool_choice
        if choice is not None:
            if choice.type == "tool":
                fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
            else:
                fields["tool_choice"] = "required" if choice.type == "any" else choice.type
            if choice.disable_parallel_tool_use:
                fields["parallel_tool_calls"] = False
        return fields


class MessagesRequest(CountTokensRequest):
    max_tokens: Annotated[int | None, Checked(NEW_TOKENS)] = None
    stop_sequences: list[Text] | None = None
    stream: bool | None = None
    temperature: float | int | None = None
    top_k: int | None = None
    top_p: float | int | None = None
    metadata: Metadata | None = None
    service_tier: Text | None = None  # a hint
    inference_geo: Text | None = None  # a hint

    def to_chat(self) -> dict[str, Any]:
        return super().to_chat() | {
            "max_tokens": self.max_tokens,
            "stop": [text for text in self.stop_sequences or () if text] or None,
            "stream": self.stream,
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "user": None if self.metadata is None else self.metadata.user_id,
        }


REASONING_EFFORTS = {"max": "high", "xhigh": "high"}


def thinking_fields(thinking: Thinking) -> dict[str, Any]:
    if thinking.type == "disabled":
        return {"thinking": False}
    fields: dict[str, Any] = {"thinking": True} if thinking.type == "enabled" else {}
    return fields | {"thinking_budget": thinking.budget_tokens}


def chat_tool(tool: ToolDefinition) -> dict[str, Any]:
    function = {
        "name": tool.name,
        "parameters": tool.input_schema,
        "description": tool.description,
        "strict": tool.strict,
    }
    return {"type": "function", "function": function}


def chat_messages(message: InputMessage, path: str) -> list[dict[str, Any]]:
    """Translate a message. Each tool result becomes a message of its own."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for number, block in enumerate(message.content):
        block_path = f"{path}.content[{number}]"
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ThinkingBlock):
            thoughts.append(block.thinking)
        elif isinstance(block, ToolUseBlock):
            function = {"name": block.name, "arguments": json.dumps(block.input)}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif isinstance(block, ToolResultBlock):
            content = result_text(block, block_path)
            results.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content})
        elif isinstance(block, UnsupportedBlock):
            raise unsupported_block(block, block_path)
    if calls and message.role != "assistant":
        raise InvalidInputError(
            f"{path} has a tool_use block; only messages of the assistant may", field=path
        )
    found = results
    if texts or calls or thoughts or not results:
        chat_message: dict[str, Any] = {"role": message.role, "content": "\n".join(texts)}
        if calls:
            chat_message["tool_calls"] = calls
        if thoughts and message.role == "assistant":
            chat_message["reasoning_content"] = "\n".join(thoughts)
        found.append(chat_message)
    return found


def result_text(block: ToolResultBlock, path: str) -> str:
    content = block.content or ""
    if not isinstance(content, str):
        texts = []
        for number, part in enumerate(content):
            if isinstance(part, UnsupportedBlock):
                raise unsupported_block(part, f"{path}.content[{number}]")
            texts.append(part.text)
        content = "\n".join(texts)
    return f"Error: {content}" if block.is_error else content


def unsupported_block(block: UnsupportedBlock, path: str) -> InvalidInputError:
    return unsupported(path, f"is of type {block.type}; this is a text model: send text blocks")
