"""Request schemas of OpenAI's Responses API and their translation to a chat."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field

from llaisys.common.sampling import FIELDS
from llaisys.common.validation import invalid_value
from llaisys.server.generation.chat import ProtocolRequest
from llaisys.server.responses import items
from llaisys.server.schemas.base import ModelName, Schema, Text, conflicting_field
from llaisys.server.schemas.fields import (
    NEVER,
    FieldNotes,
    Ignored,
    Reasons,
    filter_object,
    unsupported,
)
from llaisys.server.schemas.kinds import Checked
from llaisys.server.schemas.sampling import LENIENT, LOGPROBS, NEW_TOKENS, SEED
from llaisys.server.schemas.structured import json_schema_format
from llaisys.server.schemas.tools import FUNCTION_TOOLS

RESPONSE_ID = r"^resp_[0-9a-f]{32}$"
MAX_METADATA = 16  # OpenAI's

INCLUDED_LOGPROBS = "message.output_text.logprobs"
# Accepted values of `include`; only that of logprobs has an effect.
INCLUDED = frozenset({"reasoning.encrypted_content", INCLUDED_LOGPROBS})
TOOL_NAMES = frozenset({"type", "name", "description", "parameters", "strict"})
SAMPLING_NAMES = ("top_k", "seed", "stop", "ignore_eos", "repetition_penalty")  # vLLM
REASONING_EFFORTS = {"minimal": "low", "xhigh": "high"}


class TextFormat(Schema, path="text.format."):
    type: Literal["text", "json_object", "json_schema"]
    name: Text | None = Field(None, max_length=128)
    description: Text | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(Schema, path="text."):
    format: TextFormat | None = None
    verbosity: Text | None = None  # a hint


class Reasoning(Schema, path="reasoning."):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: Text | None = None  # accepted; the reasoning itself is sent
    generate_summary: Text | None = None
    context: Text | None = None


class StreamOptions(Schema, path="stream_options."):
    include_obfuscation: bool | None = None  # accepted; no padding is sent


MetadataText = Annotated[Text, Field(max_length=512)]


class ResponsesRequest(ProtocolRequest):
    tool_types = FUNCTION_TOOLS
    rejected: ClassVar[Reasons | None] = {
        "conversation": (f"{NEVER}; use previous_response_id", (None,)),
        "prompt": (NEVER, (None,)),
    }
    own_names: ClassVar[Mapping[str, str]] = {"reasoning_effort": "reasoning.effort"}

    input: Text | Annotated[list[dict[str, Any]], Field(min_length=1)]
    model: ModelName = None
    instructions: Text | None = None
    previous_response_id: str | None = Field(None, pattern=RESPONSE_ID)
    store: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_output_tokens: Annotated[int | None, Checked(NEW_TOKENS)] = None
    temperature: float | int | None = None
    top_p: float | int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Text | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    # pydantic reports every invalid value of an object, hence a limit that is checked before them
    metadata: Annotated[dict[str, MetadataText], Field(max_length=MAX_METADATA)] | None = None
    include: list[Text] | None = None
    user: Text | None = Field(None, max_length=1024)
    truncation: Literal["disabled", "auto"] | None = None
    background: bool | None = None
    # hints
    service_tier: Text | None = None
    prompt_cache_key: Text | None = None
    prompt_cache_retention: Text | None = None
    safety_identifier: Text | None = None
    max_tool_calls: int | None = None  # of built-in tools, which this server lacks
    top_logprobs: Annotated[int | None, Checked(LOGPROBS)] = None
    # vLLM
    top_k: Annotated[int | None, Checked(FIELDS["top_k"].kind)] = None
    seed: Annotated[int | None, Checked(SEED)] = None
    stop: Annotated[Any, Checked(LENIENT["stop"])] = None
    ignore_eos: bool | None = None
    repetition_penalty: float | int | None = None
    enable_response_messages: bool | None = None  # prompt and answer before they are parsed
    # llama.cpp, of a stream
    timings_per_token: bool | None = None
    return_progress: bool | None = None

    @classmethod
    def prepare(cls, data: dict[str, Any], notes: FieldNotes) -> dict[str, Any]:
        given = data.get("input")
        if isinstance(given, list):
            data = {**data, "input": [items.with_known_fields(item, notes) for item in given]}
        data = super().prepare(data, notes)
        if isinstance(data.get("tools"), list):
            tools = [filter_object(tool, TOOL_NAMES, notes, "tools[]") for tool in data["tools"]]
            data["tools"] = tools
        if not notes.strict and isinstance(data.get("include"), list):
            data["include"] = with_known_parts(data["include"], notes)
        return data

    @property
    def items(self) -> list[dict[str, Any]]:
        if isinstance(self.input, str):
            return [{"type": "message", "role": "user", "content": self.input}]
        return self.input

    @property
    def drops_old_turns(self) -> bool:
        """Whether old turns may be dropped: with `truncation: auto`, and by default in a chain of
        responses."""
        if self.truncation is None:
            return self.previous_response_id is not None
        return self.truncation == "auto"

    def with_items(self, found: list[dict[str, Any]]) -> Self:
        """Return the request with other items. Raises InvalidInputError."""
        copy = self.model_copy(update={"input": found})
        copy.set_chat()
        return copy

    def to_chat(self) -> dict[str, Any]:
        self._check()
        values: dict[str, Any] = {
            # A placeholder for input of references only, until `with_items` resolves them.
            "messages": items.chat_messages(self.items) or [{"role": "user", "content": ""}],
            "model": self.model,
            "stream": True if self.background else self.stream,
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "user": self.user,
            "response_format": self._format(),
            "drop_old_turns": self.drops_old_turns,
            **{name: getattr(self, name) for name in SAMPLING_NAMES},
            "timings_per_token": self.timings_per_token,
            "return_progress": self.return_progress,
        }
        if self.top_logprobs or INCLUDED_LOGPROBS in (self.include or ()):
            values |= {"logprobs": True, "top_logprobs": self.top_logprobs or 0}
        if self.reasoning is not None and self.reasoning.effort is not None:
            effort = self.reasoning.effort
            values["reasoning_effort"] = REASONING_EFFORTS.get(effort, effort)
        return values | self._tools()

    def _check(self) -> None:
        if self.background and self.store is False:
            raise conflicting_field("store", "false", "true with background")
        items.references(self.items)
        for number, name in enumerate(self.include or ()):
            if name not in INCLUDED:
                raise unsupported(f"include[{number}]", NEVER)

    def _format(self) -> dict[str, Any] | None:
        format = self.text.format if self.text is not None else None
        if format is None or format.type == "text":
            return None
        if format.type == "json_object":
            return {"type": "json_object"}
        if format.schema_ is None:
            raise invalid_value("text.format.schema", None, "a JSON schema")
        return json_schema_format(format.schema_, format.name or "answer", format.strict)

    def _tools(self) -> dict[str, Any]:
        if not self.tools:
            return {}
        choice = self.tool_choice
        return {
            "tools": [chat_tool(tool, f"tools[{n}]") for n, tool in enumerate(self.tools)],
            "tool_choice": chat_choice(choice) if isinstance(choice, dict) else choice,
            "parallel_tool_calls": self.parallel_tool_calls,
        }


def chat_choice(choice: dict[str, Any]) -> dict[str, Any]:
    """Translate a choice that names one tool or the allowed ones."""
    if choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    tools = choice.get("tools")
    if choice.get("type") != "allowed_tools" or not isinstance(tools, list):
        raise invalid_value("tool_choice.type", choice.get("type"), "function or allowed_tools")
    named = [
        {"type": "function", "function": {"name": tool.get("name")}}
        for tool in tools
        if isinstance(tool, dict) and tool.get("type") == "function"
    ]
    return {
        "type": "allowed_tools",
        "allowed_tools": {"mode": choice.get("mode", "auto"), "tools": named},
    }


def with_known_parts(include: list[Any], notes: FieldNotes) -> list[Any]:
    """Return `include` without unknown values, which are added to `notes`."""
    kept = []
    for number, name in enumerate(include):
        if isinstance(name, str) and name not in INCLUDED:
            notes.ignore(f"include[{number}]", Ignored.UNKNOWN)
        else:
            kept.append(name)
    return kept


def chat_tool(tool: dict[str, Any], path: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        why = "is of a kind that this server does not have; it must be function"
        raise unsupported(f"{path}.type", why)
    names = TOOL_NAMES - {"type"}
    function = {name: tool[name] for name in names if tool.get(name) is not None}
    return {"type": "function", "function": function}
