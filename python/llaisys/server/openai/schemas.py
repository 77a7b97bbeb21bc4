"""Request schemas of OpenAI's API with extensions; `fields` handles unknown names."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    Field,
    PrivateAttr,
    ValidationInfo,
    create_model,
    model_validator,
)

from llaisys.chat.style import REASONING_EFFORTS
from llaisys.chat.tool_formats import MAX_CALLS
from llaisys.chat.tools import ToolSet
from llaisys.common.errors import InvalidInputError
from llaisys.common.lora import MAX_NAME_CHARS
from llaisys.common.options import Integer, Kind, Number
from llaisys.common.sampling import (
    ALL_LOGPROBS,
    FIELDS,
    MAX_LOGPROBS,
    MAX_N,
    MAX_SEED,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MAX_TOKENS,
    SamplingParams,
)
from llaisys.common.structured import StructuredOutputs
from llaisys.common.validation import (
    MAX_INT,
    check_int,
    check_token_ids,
    integer_limit,
    invalid_count,
    invalid_value,
)
from llaisys.engine.beam_search import MAX_BEAM_WIDTH, MAX_LENGTH_PENALTY
from llaisys.engine.input_processor import MAX_SALT_CHARS, SEED_BITS, normalize_message
from llaisys.server.config import ServerConfig
from llaisys.server.openai.base_schema import MAX_FIELDS
from llaisys.server.openai.base_schema import ModelName as ModelName
from llaisys.server.openai.base_schema import Schema as Schema
from llaisys.server.openai.base_schema import Text as Text
from llaisys.server.openai.base_schema import conflicting_field as conflicting_field
from llaisys.server.openai.field_kinds import (
    UNLIMITED,
    BiasField,
    BiasPairs,
    Breakers,
    Checked,
    NewTokens,
    StopStrings,
    TopNSigma,
    TopP,
)
from llaisys.server.openai.fields import FieldNotes, Ignored
from llaisys.server.openai.structured import (
    STRUCTURED_FIELDS,
    json_format,
    structured_of,
    with_known_format,
)
from llaisys.server.openai.tool_schemas import (
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
TokenId = Annotated[int, Field(ge=0, le=MAX_INT)]
SessionId = Annotated[str, Field(pattern=SESSION_PATTERN)]
RequestId = Annotated[str, Field(pattern=r"^[\x21-\x7e]{1,128}$")]


class StreamOptions(Schema):
    path: ClassVar[str] = "stream_options."

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM: usage so far in every chunk
    include_obfuscation: bool | None = None  # accepted; no padding is sent


RANDOM_SEED = -1
# Fields of SamplingParams with another form in requests, or none.
SPECIAL = {"max_tokens", "logprobs", "detokenize", "seed", "pooling", "second_text"}
# Fields that accept more values over HTTP.
LENIENT: dict[str, Kind] = {
    "logit_bias": BiasField(),
    "stop": StopStrings(MAX_STOP_STRINGS, MAX_STOP_CHARS),
    "top_p": TopP(0, 1, above_low=True),
    "top_n_sigma": TopNSigma(0, 100),
    "dry_sequence_breakers": Breakers(64, 64),
}
# The other fields, under their own names.
SAMPLING_FIELDS: dict[str, Any] = {
    name: (Annotated[Any, Checked(name, LENIENT.get(name, about.kind))], None)
    for name, about in FIELDS.items()
    if name not in SPECIAL
}
# Aliases of `structured_outputs`.
FORMAT_FIELDS: dict[str, Any] = {
    name: (Annotated[Any, Checked(name, kind)], None) for name, kind in STRUCTURED_FIELDS.items()
}
TableFields: Any = create_model("TableFields", __base__=Schema, **SAMPLING_FIELDS, **FORMAT_FIELDS)
SEED = Integer(-(1 << 63), MAX_SEED)  # OpenAI allows negative seeds
NEW_TOKENS = NewTokens(0, MAX_TOKENS)
LOGPROBS = Integer(0, MAX_LOGPROBS)
ALL_OR_SOME = FIELDS["logprobs"].kind  # within --max-logprobs, see `count_logprobs`
BUDGET = FIELDS["thinking_budget"].kind


LENGTH_PENALTY = Number(-MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
# Fields that beam search, which ranks the model's own logprobs, does not support.
NOT_IN_BEAMS = (
    *("stop", "logit_bias", "bad_words", "allowed_token_ids", "min_tokens", "thinking_budget"),
    *("prompt_logprobs", "logprob_token_ids", "structured_outputs", *STRUCTURED_FIELDS),
)
MAX_SLOTS = 1 << 16
MAX_LORAS = 1024  # entries of llama.cpp's `lora` list


class LoraScale(Schema):
    """An adapter in llama.cpp's `lora` field."""

    path: ClassVar[str] = "lora[]."

    id: int = Field(ge=0)
    scale: float


class SamplingFields(TableFields):
    """Fields of chat and completions: OpenAI's, vLLM's and extensions."""

    has_default_lora: ClassVar[bool] = False  # of llama.cpp's routes

    model: ModelName = None
    seed: Annotated[int | None, Checked("seed", SEED)] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Text | None = Field(None, max_length=1024)
    # vLLM
    cache_salt: Text | None = Field(None, min_length=1, max_length=MAX_SALT_CHARS)
    request_id: RequestId | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    truncate_prompt_tokens: Annotated[
        int | None, Checked("truncate_prompt_tokens", Integer(-1, MAX_TOKENS))
    ] = None
    truncation_side: Literal["left", "right"] | None = None
    # Beam search with `best_of` or `n` beams; otherwise `best_of` choices, of which the `n` most
    # likely are returned.
    use_beam_search: bool | None = None
    length_penalty: Annotated[float | None, Checked("length_penalty", LENGTH_PENALTY)] = None
    best_of: Annotated[int | None, Checked("best_of", Integer(1, MAX_N))] = None
    # llama.cpp: slot whose prefix cache is used, with --slot-save-path
    id_slot: Annotated[int | None, Checked("id_slot", Integer(-1, MAX_SLOTS - 1))] = None
    # llama.cpp, of a stream
    timings_per_token: bool | None = None  # timings in every chunk
    return_progress: bool | None = None  # prompt progress chunks before the first text
    verbose: bool | None = None  # `__verbose` in the response: prompt and settings
    # extension: the name of an adapter; or llama.cpp's list
    lora: (
        Annotated[Text, Field(min_length=1, max_length=MAX_NAME_CHARS)]
        | Annotated[list[LoraScale], Field(max_length=MAX_LORAS)]
        | None
    ) = None
    reuse_prefix: bool | None = None  # False: no prefix caching for this request

    @classmethod
    def prepare(cls, data: dict[str, Any], notes: FieldNotes) -> dict[str, Any]:
        if data.get("stream_options") is not None and not data.get("stream"):
            if notes.strict:
                raise conflicting_field("stream_options", "given", "left out unless stream is true")
            data = {name: value for name, value in data.items() if name != "stream_options"}
            notes.ignore("stream_options", Ignored.HINT)
        return super().prepare(with_known_format(data, notes), notes)

    def set_defaults(self, config: ServerConfig) -> None:
        """Set fields without a value as the server's options say."""
        if config.force_include_usage and self.stream:
            self.stream_options = self.stream_options or StreamOptions(continuous_usage_stats=True)
            self.stream_options.include_usage = True
        if self.return_tokens_as_token_ids is None:
            self.return_tokens_as_token_ids = config.return_tokens_as_token_ids

    @property
    def budget(self) -> tuple[str, int] | None:
        """Name and value of the field that limits reasoning tokens."""
        limit = self.thinking_budget
        return None if limit is None else ("thinking_budget", limit)

    @property
    def num_choices(self) -> int:
        return int(self.n or 1)

    @property
    def generates(self) -> bool:
        """Whether new tokens are requested, for which the context must have room."""
        return True

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        options = self.stream_options
        return bool(options and options.include_usage and options.continuous_usage_stats)

    @property
    def text_chars(self) -> int:
        """Size of the values that `sampling_params` processes."""
        bias: Any = self.logit_bias
        named = bias.num_chars if isinstance(bias, BiasPairs) else 0
        return len(self.allowed_token_ids or ()) + named

    def name_tokens(self, tokenizer: Any) -> None:
        """Replace texts in `logit_bias` with token ids."""
        bias: Any = self.logit_bias
        if isinstance(bias, BiasPairs):
            super().__setattr__("logit_bias", bias.by_token(tokenizer))

    def count_logprobs(self, most: int, vocab_size: int) -> None:
        """Replace -1, which requests all logprobs, by their number. Raises InvalidInputError for
        more than `most`."""
        for name in ("logprobs", "top_logprobs", "prompt_logprobs"):
            given = getattr(self, name, None)
            if given is None or isinstance(given, bool):
                continue
            count = vocab_size if given == ALL_LOGPROBS else given
            if count > most:
                raise invalid_value(name, given, integer_limit(0, most))
            super().__setattr__(name, count)

    def sampling_params(self, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        """Build SamplingParams. Raises InvalidInputError with field, value and limit."""
        values = {name: getattr(self, name) for name in SAMPLING_FIELDS}
        values["structured_outputs"] = structured_of(self)
        given = {name: value for name, value in values.items() if value is not None}
        if self.seed == RANDOM_SEED:  # also on a server with --seed
            given["seed"] = random.getrandbits(SEED_BITS)
        elif self.seed is not None:
            given["seed"] = self.seed % (1 << 64)  # OpenAI allows negative seeds
        most = None if max_tokens == UNLIMITED else max_tokens
        self._check_candidates()
        return SamplingParams(**given, max_tokens=most, logprobs=logprobs)

    @property
    def num_candidates(self) -> int:
        """Choices or beams to compute per prompt, of which the best are returned."""
        return max(self.num_choices, self.best_of or 1)

    def _check_candidates(self) -> None:
        name = "best_of" if self.best_of is not None else "n"
        if self.best_of is not None and self.best_of < self.num_choices:
            raise conflicting_field("best_of", self.best_of, f"at least n, {self.num_choices}")
        if not self.use_beam_search:
            if self.stream and self.num_candidates > self.num_choices:
                raise conflicting_field("stream", "true", "false when best_of is larger than n")
            return
        if self.stream:
            raise conflicting_field("stream", "true", "false with use_beam_search")
        check_int(name, self.num_candidates, 1, MAX_BEAM_WIDTH, label="the number of beams")
        for field in NOT_IN_BEAMS:
            if getattr(self, field, None) not in (None, False, (), 0):
                raise conflicting_field(field, "given", "left out with use_beam_search")


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


class TextPart(Schema):
    path: ClassVar[str] = "messages[].content[]."

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


class ChatMessage(Schema):
    path: ClassVar[str] = "messages[]."

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


class ReasoningField(Schema):
    """OpenRouter's `reasoning` object."""

    path: ClassVar[str] = "reasoning."

    effort: Literal[*REASONING_EFFORTS] | None = None  # type: ignore[valid-type]
    max_tokens: Annotated[int | None, Checked("reasoning.max_tokens", BUDGET)] = None
    enabled: bool | None = None
    exclude: bool | None = None  # omit reasoning from the response
    summary: Text | None = None  # accepted; the reasoning itself is sent


class ThinkingField(Schema):
    """Anthropic's `thinking` object, also sent by clients of DeepSeek and GLM."""

    path: ClassVar[str] = "thinking."

    type: Literal["enabled", "disabled", "adaptive", "auto"]
    budget_tokens: Annotated[int | None, Checked("thinking.budget_tokens", BUDGET)] = None


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
    max_tokens: Annotated[int | None, Checked("max_tokens", NEW_TOKENS)] = None
    max_completion_tokens: Annotated[int | None, Checked("max_completion_tokens", NEW_TOKENS)] = (
        None
    )
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Checked("top_logprobs", ALL_OR_SOME)] = None
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
    def check_tools(self) -> ChatCompletionRequest:
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
        """Name and value of the field that limits reasoning tokens."""
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
    max_tokens: Annotated[int | None, Checked("max_tokens", NEW_TOKENS)] = None
    logprobs: Annotated[int | None, Checked("logprobs", ALL_OR_SOME)] = None
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


class DetokenizeRequest(Schema):
    model: ModelName = None
    tokens: list[TokenId]
    skip_special_tokens: bool | None = None


class SessionRequest(Schema):
    """A new or imported session."""

    session_id: SessionId | None = None
    title: Text | None = Field(None, max_length=256)
    messages: list[ChatMessage] | None = None


class SessionContent(Schema):
    """The new contents of a session."""

    title: Text | None = Field(None, max_length=256)
    messages: list[ChatMessage]
    client_state: Text | None = None


class SessionPatch(Schema):
    title: Text = Field(max_length=256)
