"""Request schemas of Ollama's API and their translation to a chat or a completion."""

import json
import uuid
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from llaisys.common.errors import InvalidInputError
from llaisys.common.options import Integer
from llaisys.common.validation import MAX_INT, check_int, invalid_value
from llaisys.server.generation.chat import ProtocolRequest
from llaisys.server.schemas.base import Schema, Text, TokenId
from llaisys.server.schemas.chat import CompletionRequest
from llaisys.server.schemas.fields import (
    FieldNotes,
    Ignored,
    field_error,
    filter_object,
    unsupported,
)
from llaisys.server.schemas.kinds import Checked
from llaisys.server.schemas.sampling import LOGPROBS
from llaisys.server.schemas.structured import json_schema_format

Number = float | int

# Option -> sampling field.
SAMPLING = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "typical_p": "typical_p",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    **{name: name for name in ("repeat_last_n", "mirostat", "mirostat_tau", "mirostat_eta")},
    "seed": "seed",
}
# Options of loading and running a model, which the server configures, and of samplers that it does
# not have: ignored.
HINTS = frozenset(
    "num_ctx num_keep num_batch num_gpu main_gpu num_thread numa use_mmap use_mlock low_vram "
    "f16_kv vocab_only logits_all embedding_only rope_frequency_base rope_frequency_scale "
    "penalize_newline tfs_z draft_num_predict".split()
)
# Options that affect the answer.
OPTIONS = frozenset({*SAMPLING, "num_predict", "stop"})
CALL_NAMES = frozenset({"id", "type", "function"})
FUNCTION_NAMES = frozenset({"name", "arguments", "index", "description"})


class OllamaMessage(Schema, path="messages[]."):
    role: Literal["system", "user", "assistant", "tool"]
    content: Text | None = None
    thinking: Text | None = None
    images: list[Any] | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_name: Text | None = Field(None, max_length=256)
    tool_call_id: Text | None = Field(None, max_length=256)

    @classmethod
    def prepare(cls, data: dict[str, Any], notes: FieldNotes) -> dict[str, Any]:
        if isinstance(data.get("tool_calls"), list):
            calls = [with_known_call(call, notes) for call in data["tool_calls"]]
            data = {**data, "tool_calls": calls}
        return super().prepare(data, notes)


class OllamaRequest(ProtocolRequest):
    """Fields of /api/chat and /api/generate. Streams unless `stream` is false."""

    own_names: ClassVar[Mapping[str, str]] = {"thinking": "think", "reasoning_effort": "think"}

    model: Text = Field(max_length=1024)
    stream: bool | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    options: dict[str, Any] | None = None
    keep_alive: Text | Number | None = None  # ignored
    think: bool | Literal["low", "medium", "high"] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Checked(LOGPROBS)] = None
    truncate: bool | None = None  # ignored: a prompt that is too long is rejected
    shift: bool | None = None

    @classmethod
    def prepare(cls, data: dict[str, Any], notes: FieldNotes) -> dict[str, Any]:
        return super().prepare(with_known_options(data, notes), notes)

    def shared_fields(self) -> dict[str, Any]:
        fields = sampling_fields(self.options or {})
        fields |= {"model": self.model.removesuffix(":latest"), "stream": self.stream is not False}
        if self.logprobs:
            fields |= {"logprobs": True, "top_logprobs": self.top_logprobs or 0}
        if self.format == "json":
            fields["response_format"] = {"type": "json_object"}
        elif isinstance(self.format, dict):
            fields["response_format"] = json_schema_format(self.format)
        if self.think is False:
            fields["reasoning_effort"] = "none"
        elif isinstance(self.think, str):
            fields["reasoning_effort"] = self.think
        elif self.think:
            fields["thinking"] = True
        return fields


class ChatRequest(OllamaRequest):
    messages: list[OllamaMessage] = Field(default_factory=list)
    tools: list[dict[str, Any]] | None = None

    @property
    def only_loads(self) -> bool:
        return not self.messages

    def to_chat(self) -> dict[str, Any]:
        fields = self.shared_fields()
        if self.tools:
            fields["tools"] = [{"type": "function", **tool} for tool in self.tools]
        fields["messages"] = chat_messages(self.messages) or PLACEHOLDER
        return fields


class GenerateRequest(OllamaRequest):
    prompt: Text | None = None
    system: Text | None = None
    raw: bool | None = None  # without the chat template
    suffix: Text | None = None  # text after the answer, for FIM models
    template: Literal[""] | None = None
    context: list[TokenId] | None = None  # of an answer
    images: list[Any] | None = None

    @property
    def only_loads(self) -> bool:
        return not self.prompt

    def to_chat(self) -> dict[str, Any]:
        if self.images:
            raise no_images("images")
        fields = self.shared_fields()
        system = [{"role": "system", "content": self.system}] if self.system else []
        user = [{"role": "user", "content": self.prompt}] if self.prompt else PLACEHOLDER
        return fields | {"messages": [*system, *user]}


class OllamaEmbeddingRequest(Schema):
    """Fields of /api/embed and the older /api/embeddings."""

    model: Text = Field(max_length=1024)
    options: dict[str, Any] | None = None
    keep_alive: Text | Number | None = None

    @classmethod
    def prepare(cls, data: dict[str, Any], notes: FieldNotes) -> dict[str, Any]:
        return super().prepare(with_known_options(data, notes), notes)

    @property
    def name(self) -> str:
        return self.model.removesuffix(":latest")

    def completion(self) -> CompletionRequest:
        """Return the request without its texts. Raises InvalidInputError for invalid options."""
        sampling_fields(self.options or {})
        return CompletionRequest(model=self.name, prompt="", max_tokens=0)


class EmbedRequest(OllamaEmbeddingRequest):
    input: Text | list[Text] | None = None
    truncate: bool | None = None  # ignored: a text that is too long is rejected
    dimensions: Annotated[int | None, Checked(Integer(1))] = None

    def texts(self) -> list[str]:
        """Return the texts; empty if the request only loads the model."""
        given = self.input or []
        return [given] if isinstance(given, str) else given


class EmbeddingsRequest(OllamaEmbeddingRequest):
    prompt: Text | None = None


class NamedRequest(Schema):
    """Fields of requests about a model."""

    model: Text | None = Field(None, max_length=1024)
    name: Text | None = Field(None, max_length=1024)  # older alias of model

    @property
    def model_name(self) -> str:
        """Raises InvalidInputError without a name."""
        name = self.model or self.name
        if not name:
            raise invalid_value("model", name, "the name of a model")
        return name


class PullRequest(NamedRequest):
    stream: bool | None = None
    insecure: bool | None = None
    username: Text | None = None
    password: Text | None = None


class ShowRequest(NamedRequest):
    verbose: bool | None = None
    system: Text | None = None
    template: Text | None = None
    options: dict[str, Any] | None = None


PLACEHOLDER = [{"role": "user", "content": ""}]  # for requests that only load the model


def no_images(path: str) -> InvalidInputError:
    return unsupported(path, "is given; this is a text model: send text only")


def chat_messages(messages: list[OllamaMessage]) -> list[dict[str, Any]]:
    """Translate messages. Calls have no ids: a result answers the first unanswered call."""
    found: list[dict[str, Any]] = []
    pending: list[tuple[str, str]] = []  # (name, id) of calls without a result
    for number, message in enumerate(messages):
        path = f"messages[{number}]"
        if message.images:
            raise no_images(f"{path}.images")
        chat_message: dict[str, Any] = {"role": message.role, "content": message.content or ""}
        if message.role == "assistant":
            calls = [
                chat_call(call, f"{path}.tool_calls[{i}]")
                for i, call in enumerate(message.tool_calls or ())
            ]
            if calls:
                chat_message["tool_calls"] = calls
                pending = [(call["function"]["name"], call["id"]) for call in calls]
            if message.thinking:
                chat_message["reasoning_content"] = message.thinking
        elif message.role == "tool":
            same = [call for call in pending if call[0] == message.tool_name] or pending
            own = same[0] if same else ("", f"call_{uuid.uuid4().hex[:16]}")
            if own in pending:
                pending.remove(own)
            chat_message["tool_call_id"] = message.tool_call_id or own[1]
        found.append(chat_message)
    return found


def chat_call(call: dict[str, Any], path: str) -> dict[str, Any]:
    function = call.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str):
        raise invalid_value(path, call, "{'function': {'name', 'arguments'}}")
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments or {})
    own = call.get("id")
    return {
        "id": own if isinstance(own, str) and own else f"call_{uuid.uuid4().hex[:16]}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def with_known_call(call: Any, notes: FieldNotes) -> Any:
    """Return a call without unknown fields, which are added to `notes`."""
    found = filter_object(call, CALL_NAMES, notes, "messages[].tool_calls[]")
    if isinstance(found, dict) and "function" in found:
        path = "messages[].tool_calls[].function"
        found["function"] = filter_object(found["function"], FUNCTION_NAMES, notes, path)
    return found


def with_known_options(data: dict[str, Any], notes: FieldNotes) -> dict[str, Any]:
    """Return the body without ignored options, which are added to `notes`. Raises InvalidInputError
    for an unknown option in strict mode."""
    given = data.get("options")
    if not isinstance(given, dict):
        return data
    kept: dict[str, Any] = {}
    for name, value in given.items():
        if name in OPTIONS:
            kept[name] = value
        elif name in HINTS:
            notes.ignore(f"options.{name}", Ignored.HINT)
        elif notes.strict:
            raise field_error(f"options.{name}"[:100], name, OPTIONS)
        else:
            notes.ignore(f"options.{name}")
    return {**data, "options": kept}


def sampling_fields(options: dict[str, Any]) -> dict[str, Any]:
    """Translate `options` to OpenAI's fields. Raises InvalidInputError for invalid values."""
    fields: dict[str, Any] = {}
    for name, value in options.items():
        if value is None:
            continue
        if name in SAMPLING:
            fields[SAMPLING[name]] = value
        elif name == "num_predict":
            # 0 and below: fill the context.
            if check_int("options.num_predict", value, -MAX_INT) > 0:
                fields["max_tokens"] = value
        elif name == "stop":
            texts = [value] if isinstance(value, str) else value
            fields["stop"] = [text for text in texts if text] if isinstance(texts, list) else texts
    return fields
