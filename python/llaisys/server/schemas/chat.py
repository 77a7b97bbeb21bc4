"""Request schemas of OpenAI's API with extensions; `fields` handles unknown names."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, PrivateAttr, ValidationInfo, model_validator

from llaisys.chat.style import REASONING_EFFORTS
from llaisys.chat.tool_formats import MAX_CALLS
from llaisys.chat.tools import ToolSet
from llaisys.common.errors import InvalidInputError
from llaisys.common.sampling import SamplingParams
from llaisys.common.structured import StructuredOutputs
from llaisys.common.validation import MAX_INT, check_token_ids, invalid_count
from llaisys.engine.input_processor import normalize_message
from llaisys.server.schemas.base import (
    MAX_FIELDS,
    ModelName,
    Schema,
    Text,
    TokenId,
    conflicting_field,
)
from llaisys.server.schemas.fields import FieldNotes, Ignored
from llaisys.server.schemas.kinds import Checked
from llaisys.server.schemas.sampling import ALL_OR_SOME, BUDGET, NEW_TOKENS, SamplingFields
from llaisys.server.schemas.structured import json_format
from llaisys.server.schemas.tools import (
    FUNCTION_TOOLS,
    CalledFunction,
    FunctionDefinition,
    NamedChoice,
    NamedFunction,
    ToolCall,
    ToolChoiceObject,
    ToolDefinition,
    tool_set_of,
)

ROLE_PATTERN = r"^[A-Za-z][A-Za-z0-9_.-]{0,63}$"  # templates may know further roles
SESSION_PATTERN = r"^[A-Za-z0-9_.:-]{1,128}$"


PROMPT_IDS = "prompt_token_ids"
SessionId = Annotated[str, Field(pattern=SESSION_PATTERN)]


OTHER_PARTS = {
    "image_url": "an image",
    "image": "an image",
    "input_image": "an image",
    "input_audio": "audio",
    "audio_url": "audio",
    "video_url": "a video",
    "file": "a file",
    "input_file": "a file",
}


class TextPart(Schema, path="messages[].content[]."):
    type: Literal["text"]
    text: Text

    @classmethod
    def prepare(cls, data: dict[str, Any], notes: FieldNotes) -> dict[str, Any]:
        kind = data.get("type")
        if isinstance(kind, str) and kind in OTHER_PARTS:
            raise InvalidInputError(
                f"is {OTHER_PARTS[kind]}; this is a text model: send parts of type 'text'",
                code="text_only",
            )
        return super().prepare(data, notes)


class ChatMessage(Schema, path="messages[]."):
    role: Annotated[str, Field(pattern=ROLE_PATTERN)]
    content: Text | list[TextPart] | None = None
    name: Text | None = Field(None, max_length=256)
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_CALLS)] | None = None
    tool_call_id: Text | None = Field(None, max_length=256)
    function_call: CalledFunction | None = None  # with `functions`
    reasoning_content: Text | None = None
    reasoning: Text | None = None  # alias of reasoning_content


def plain_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Convert to the messages of templates and sessions: text, `developer` as `system`."""
    plain = []
    call_id = ""  # of the last `function_call`
    for number, given in enumerate(messages):
        content: Any = given.content
        if isinstance(content, list):
            content = "\n".join(part.text for part in content)
        fields = {"role": given.role, "content": content, "name": given.name}
        if given.tool_calls:
            if given.role != "assistant":
                where = f"messages[{number}].tool_calls"
                raise conflicting_field(where, "given", "left out unless role is 'assistant'")
            fields["tool_calls"] = [call.to_dict() for call in given.tool_calls]
        fields["tool_call_id"] = given.tool_call_id
        if given.function_call is not None and given.role == "assistant":
            call_id = f"call_{number}"
            call = ToolCall.model_construct(id=call_id, function=given.function_call)
            fields["tool_calls"] = [call.to_dict()]
        if given.role == "function":  # the result of a function_call
            fields |= {"role": "tool", "tool_call_id": call_id or None}
        fields["reasoning_content"] = (given.reasoning_content or given.reasoning) or None
        message = normalize_message({k: v for k, v in fields.items() if v is not None}, number)
        if message["role"] == "developer":
            message["role"] = "system"
        plain.append(message)
    return plain


class ReasoningField(Schema, path="reasoning."):
    """OpenRouter's `reasoning` object."""

    effort: Literal[*REASONING_EFFORTS] | None = None  # type: ignore[valid-type]
    max_tokens: Annotated[int | None, Checked(BUDGET, "reasoning.max_tokens")] = None
    enabled: bool | None = None
    exclude: bool | None = None  # omit reasoning from the response
    summary: Text | None = None  # accepted; the reasoning itself is sent


class ThinkingField(Schema, path="thinking."):
    """Anthropic's `thinking` object, also sent by clients of DeepSeek and GLM."""

    type: Literal["enabled", "disabled", "adaptive", "auto"]
    budget_tokens: Annotated[int | None, Checked(BUDGET, "thinking.budget_tokens")] = None


TokenPrompt = Annotated[list[TokenId], Field(min_length=1)]


def check_kv_transfer(given: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
    """Check vLLM's parameters of disaggregated prefill. Those beside `prompt_token_ids` have no
    effect: the prompt is computed here."""
    ids = given.get(PROMPT_IDS)
    if ids is not None:
        ids = check_token_ids(f"kv_transfer_params.{PROMPT_IDS}", ids, MAX_INT, min_count=1)
    notes = info.context or FieldNotes()
    for name in list(given)[:MAX_FIELDS]:
        if name != PROMPT_IDS:
            notes.ignore(f"kv_transfer_params.{name}", Ignored.HINT)
    return {PROMPT_IDS: ids}


class ChatCompletionRequest(SamplingFields):
    tool_types: ClassVar[frozenset[str] | None] = FUNCTION_TOOLS

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_tokens: Annotated[int | None, Checked(NEW_TOKENS)] = None
    max_completion_tokens: Annotated[int | None, Checked(NEW_TOKENS)] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Checked(ALL_OR_SOME)] = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None  # continue the last assistant message
    chat_template_kwargs: dict[str, Any] | None = None
    session_id: SessionId | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: Literal["auto", "none", "required"] | ToolChoiceObject | None = None
    parallel_tool_calls: bool | None = None
    # Names of `tools` and `tool_choice` before 2024; calls are then in `function_call`.
    functions: list[FunctionDefinition] | None = None
    function_call: Literal["auto", "none"] | NamedFunction | None = None
    reasoning_effort: Literal[*REASONING_EFFORTS] | None = None  # type: ignore[valid-type]
    include_reasoning: bool | None = None  # vLLM; False: omit reasoning from the response
    reasoning: ReasoningField | None = None
    thinking: ThinkingField | bool | None = None
    enable_thinking: bool | None = None
    echo: bool | None = None  # repeat a last assistant message before its continuation
    # Drop the oldest turns when the context is too small; None: only in a session.
    drop_old_turns: bool | None = None
    kv_transfer_params: Annotated[dict[str, Any], AfterValidator(check_kv_transfer)] | None = (
        None  # vLLM
    )
    _tool_set: ToolSet | None = PrivateAttr(None)
    # Names of fields in the request's own API, for messages.
    _own_names: Mapping[str, str] = PrivateAttr(default_factory=dict)

    @model_validator(mode="after")
    def check_tools(self) -> Self:
        """Build the tool set during validation, which runs in a thread for large bodies."""
        if not self.functions:
            self._tool_set = tool_set_of(self.tools, self.tool_choice, self.parallel_tool_calls)
            return self
        if self.tools:
            raise conflicting_field("functions", "given", "left out with tools")
        tools = [ToolDefinition.model_construct(function=given) for given in self.functions]
        choice: Any = self.function_call
        if isinstance(choice, NamedFunction):
            choice = NamedChoice.model_construct(function=choice)
        self._tool_set = tool_set_of(tools, choice, False)
        return self

    @property
    def text_format(self) -> StructuredOutputs | None:
        """The JSON of `response_format`, if it is the only constraint."""
        return json_format(self)

    @property
    def tool_set(self) -> ToolSet | None:
        return self._tool_set

    @property
    def effort(self) -> tuple[str, str] | None:
        """Name and value of the field that sets the reasoning effort."""
        if self.reasoning_effort is not None:
            return self.own_name("reasoning_effort"), self.reasoning_effort
        if self.reasoning is not None and self.reasoning.effort is not None:
            return "reasoning.effort", self.reasoning.effort
        return None

    @property
    def reasoning_switch(self) -> tuple[str, bool] | None:
        """Name and value of the field that enables or disables reasoning."""
        if self.enable_thinking is not None:
            return "enable_thinking", self.enable_thinking
        if isinstance(self.thinking, bool):
            return self.own_name("thinking"), self.thinking
        if self.thinking is not None and self.thinking.type in ("enabled", "disabled"):
            return "thinking", self.thinking.type == "enabled"
        if self.reasoning is not None and self.reasoning.enabled is not None:
            return "reasoning.enabled", self.reasoning.enabled
        return None

    @property
    def budget(self) -> tuple[str, int] | None:
        if self.thinking_budget is not None:
            return self.own_name("thinking_budget"), self.thinking_budget
        if self.reasoning is not None and self.reasoning.max_tokens is not None:
            return "reasoning.max_tokens", self.reasoning.max_tokens
        if isinstance(self.thinking, ThinkingField) and self.thinking.budget_tokens is not None:
            return "thinking.budget_tokens", self.thinking.budget_tokens
        return None

    @property
    def shows_reasoning(self) -> bool:
        excluded = self.reasoning is not None and bool(self.reasoning.exclude)
        return self.include_reasoning is not False and not excluded

    def own_name(self, name: str) -> str:
        return self._own_names.get(name, name)

    def set_own_names(self, names: Mapping[str, str]) -> None:
        self._own_names = names

    def to_sampling(self) -> SamplingParams:
        if self.max_tokens is not None and self.max_completion_tokens not in (
            None,
            self.max_tokens,
        ):
            raise conflicting_field(
                "max_completion_tokens",
                self.max_completion_tokens,
                f"left out or equal to max_tokens, {self.max_tokens}",
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise conflicting_field(
                "top_logprobs", self.top_logprobs, "left out unless logprobs is true"
            )
        if self.continue_final_message and self.add_generation_prompt:
            raise conflicting_field(
                "continue_final_message", "true", "false when add_generation_prompt is true"
            )
        if self.continue_final_message and self.session_id is not None:
            raise conflicting_field("continue_final_message", "true", "false with session_id")
        if self.session_id is not None and self.num_choices > 1:
            raise conflicting_field("n", self.n, "1 with session_id")
        if self.prompt_logprobs is not None and self.stream:
            raise conflicting_field("stream", "true", "false with prompt_logprobs")
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        most = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        params = self.sampling_params(most, logprobs)
        return params if self.budget is None else params.clone(thinking_budget=self.budget[1])


DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's


class CompletionRequest(SamplingFields):
    prompt: Text | TokenPrompt | Annotated[list[Text], Field(min_length=1)] | list[TokenPrompt]
    max_tokens: Annotated[int | None, Checked(NEW_TOKENS)] = None
    logprobs: Annotated[int | None, Checked(ALL_OR_SOME)] = None
    echo: bool | None = None
    suffix: Text | None = None  # text after the completion, for FIM models
    add_special_tokens: bool | None = None

    def to_sampling(self) -> SamplingParams:
        most = DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens
        params = self.sampling_params(most, self.logprobs)
        num_logprobs = self.num_prompt_logprobs
        if num_logprobs is not None and self.stream and self.num_choices > 1:
            raise conflicting_field("n", self.n, "1 when a stream has prompt logprobs")
        if self.suffix and (self.echo or not isinstance(self.prompt, str)):
            raise conflicting_field(
                "suffix", "given", "left out unless prompt is one text, no echo"
            )
        if num_logprobs != params.prompt_logprobs:
            params = params.clone(prompt_logprobs=num_logprobs)
        return params

    @property
    def generates(self) -> bool:
        return self.max_tokens != 0

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Top logprobs per prompt token, by `prompt_logprobs` or `echo` with `logprobs`."""
        echoed = self.logprobs if self.echo else None
        counts = [count for count in (self.prompt_logprobs, echoed) if count is not None]
        return max(counts, default=None)

    def prompts(self) -> list[str | list[int]]:
        prompt: Any = self.prompt
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
            return [prompt]
        if not prompt:
            raise invalid_count("prompt", 0, "prompts", "at least 1")
        return list(prompt)


class TokenizeRequest(Schema):
    """vLLM's request; with `content` llama.cpp's, which adds no special tokens by default."""

    tool_types: ClassVar[frozenset[str] | None] = FUNCTION_TOOLS

    model: ModelName = None
    prompt: Text | None = None
    content: Text | None = None
    add_special: bool | None = None  # with content
    parse_special: bool | None = None  # accepted; special tokens in text are never parsed
    with_pieces: bool | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[ToolDefinition] | None = None


def template_options(body: Any) -> dict[str, Any]:
    """Return the template's options of a request that only renders a chat."""
    tools = tool_set_of(body.tools, None, None)
    options = {"variables": body.chat_template_kwargs, "tools": tools}
    if body.add_generation_prompt is not None:
        options["add_generation_prompt"] = body.add_generation_prompt
    return options


class DetokenizeRequest(Schema):
    model: ModelName = None
    tokens: list[TokenId]
    skip_special_tokens: bool | None = None
