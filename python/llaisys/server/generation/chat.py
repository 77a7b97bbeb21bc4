"""A chat from its request to its prompt, shared by the protocol adapters of chat APIs.

Each adapter translates its body to OpenAI's chat request and continues from there.
"""

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from fastapi import Response
from pydantic import PrivateAttr, ValidationError, ValidationInfo, model_validator

from llaisys.chat.constraint import call_constraint, harmony_constraint
from llaisys.chat.reader import AnswerReader
from llaisys.chat.style import ChatStyle
from llaisys.chat.tools import ToolSet
from llaisys.common.errors import InvalidInputError
from llaisys.common.sampling import SamplingParams
from llaisys.common.structured import StructuredOutputs
from llaisys.common.validation import check_count, invalid_value
from llaisys.engine.context_window import DEFAULT_KEEP
from llaisys.server.generation.formatter import AnswerFormatter
from llaisys.server.generation.history import Recent, answer_room, common_length, num_leading
from llaisys.server.generation.job import Job
from llaisys.server.generation.prompts import (
    convert_messages,
    encode_continued,
    encode_messages,
    encode_recent,
    run_on_messages,
)
from llaisys.server.http.error_handlers import validation_error
from llaisys.server.schemas.base import Schema, conflicting_field
from llaisys.server.schemas.chat import PROMPT_IDS, ChatCompletionRequest
from llaisys.server.schemas.fields import FieldNotes, Ignored

Message = dict[str, Any]


class ProtocolRequest(Schema):
    """A body of another chat API. `chat` is its translation to OpenAI's, made during validation,
    which runs in a thread for large bodies."""

    own_names: ClassVar[Mapping[str, str]] = {}  # field of the chat -> its name here
    _chat: ChatCompletionRequest = PrivateAttr()

    @model_validator(mode="after")
    def translate(self, info: ValidationInfo) -> Self:
        self.set_chat(info.context)
        return self

    def set_chat(self, notes: FieldNotes | None = None) -> None:
        """Translate the current fields. Raises InvalidInputError."""
        try:
            self._chat = ChatCompletionRequest.model_validate(self.to_chat(), context=notes)
            self._chat.set_own_names(self.own_names)
        except ValidationError as error:
            problem = validation_error(error.errors(include_url=False))
            raise InvalidInputError(
                problem.message, field=problem.param, code=problem.code
            ) from None

    @property
    def chat(self) -> ChatCompletionRequest:
        return self._chat

    def to_chat(self) -> dict[str, Any]:
        """Return the fields of a ChatCompletionRequest. Raises InvalidInputError."""
        raise NotImplementedError


@dataclass(slots=True)
class Chat:
    """A chat with its prompt, ready to run."""

    job: Job
    params: SamplingParams
    prompt: list[int]
    tools: ToolSet | None
    opened: bool  # the prompt ends inside reasoning text
    keep_reasoning: bool
    context_truncated: bool = False  # old turns were dropped
    seed: str = field(default_factory=lambda: uuid.uuid4().hex)  # of tool call ids

    def new_reader(self, choice: int = 0) -> AnswerReader:
        """Return a parser for a choice. Parsers of the same choice produce the same call ids."""
        style = self.job.service.engine.style
        return style.reader(self.tools, self.opened, self.keep_reasoning, f"{self.seed}:{choice}")

    async def run(self, formatter: AnswerFormatter) -> Response:
        return await self.job.run([self.prompt], self.params, formatter)


async def open_chat(
    job: Job,
    body: ChatCompletionRequest,
    messages: list[Message] | None = None,
    num_new: int = 1,
) -> Chat:
    """Build the chat of a body. `messages`: the full conversation if longer than the body's. When
    old turns are dropped, the last `num_new` messages stay."""
    job.service.engine.inputs.check_generates()
    params = await job.sampling(body.to_sampling)
    drops = _drops_old_turns(job, body)
    if messages is None:
        name = None if drops else job.prompt_name
        messages = await convert_messages(job.service, body.messages, name)
    elif not drops:
        limits = job.service.config.limits
        check_count(job.prompt_name, len(messages), limits.max_messages, "messages")
    found = messages
    options: dict[str, Any] = {}
    if body.add_generation_prompt is not None:
        options["add_generation_prompt"] = body.add_generation_prompt
    engine = job.service.engine
    style, tokenizer, tools = engine.style, engine.tokenizer, body.tool_set
    reasoning = ReasoningOptions.of(body, style, engine.inputs.limits_reasoning)
    if reasoning.variables:
        options["variables"] = reasoning.variables
    if reasoning.budget is not None:
        params = params.clone(thinking_budget=reasoning.budget)
    if reasoning.ignored is not None:
        job.notes.ignore(reasoning.ignored, Ignored.REASONING)
    options["tools"] = tools
    num_dropped = 0
    if drops:
        prompt, num_dropped = await recent_prompt(job, body, found, num_new, options)
    else:
        prompt = job.truncate(await chat_prompt(job, body, found, options))
    params = await _keep_system(job, params, found, prompt, options)
    if body.continue_final_message:
        opened = style.is_inside_reasoning(found[-1]["content"])
    else:
        opened = body.add_generation_prompt is not False
        opened = opened and style.opens_reasoning(tokenizer, prompt)
    if tools is not None:
        format = body.text_format
        params = constrain_to_tools(params, tools, style, opened, tokenizer, format)
    elif style.is_harmony and body.text_format is not None:
        constraint = harmony_constraint(None, body.text_format)
        params = params.clone(structured_outputs=constraint)
    job.visible_ids = style.visible_ids(tokenizer, tools)
    job.count_reasoning = style.reasoning_counter(tokenizer, opened)
    if tools is not None and tools.ends_at_repeat:
        job.end_check = lambda: repeat_check(style.reader(tools, opened))
    return Chat(job, params, prompt, tools, opened, body.shows_reasoning, num_dropped > 0)


def repeat_check(reader: AnswerReader) -> Callable[[str], bool]:
    """Return a function that reads an answer and returns whether it repeated a call."""

    def ends_after(text: str) -> bool:
        reader.feed(text)
        return reader.has_repeated_call

    return ends_after


def constrain_to_tools(
    params: SamplingParams,
    tools: ToolSet,
    style: ChatStyle,
    opened: bool,
    tokenizer: Any,
    format: StructuredOutputs | None = None,
) -> SamplingParams:
    """Return the parameters with the structured output constraint of the tools. `format`: the JSON
    of `response_format`, which text must have and calls need not. Another constraint takes
    precedence unless a call is forced; then raises InvalidInputError."""
    # The engine detects the end of reasoning that the prompt opened if its end marker is a token.
    detects = (
        opened and style.markers is not None and tokenizer.token_id(style.markers.end) is not None
    )
    markers = None if detects else style.markers
    if style.is_harmony:
        constraint = harmony_constraint(tools, format)
    else:
        constraint = call_constraint(tools, style.uses_tags, markers, opened, format)
    if constraint is None:
        return params
    if params.structured_outputs is None or format is not None:
        return params.clone(structured_outputs=constraint)
    if tools.is_forced:
        raise conflicting_field("tool_choice", "forced", "auto beside another constraint")
    return params


@dataclass(frozen=True, slots=True)
class ReasoningOptions:
    """Reasoning options of a request: template variables and a token budget."""

    variables: dict[str, Any]
    budget: int | None = None  # None: that of the sampling parameters
    ignored: str | None = None  # the field, if it has no effect on this model

    @classmethod
    def of(cls, body: ChatCompletionRequest, style: ChatStyle, limits_reasoning: bool) -> Self:
        """Map the effort or the switch to template variables; if the template has none, off becomes
        a budget of 0 tokens. `chat_template_kwargs` take precedence. `limits_reasoning`: the model
        supports a budget."""
        own = body.chat_template_kwargs or {}
        effort, switch = body.effort, body.reasoning_switch
        if effort is None and switch is not None:
            name, on = switch
            variables = style.switch_variables(on)
        elif effort is not None:
            name, on = effort[0], effort[1] != "none"
            variables = style.effort_variables(effort[1])
        else:
            return cls(own)
        if variables:
            return cls(variables | own)
        if style.markers is None or (on and effort is not None):
            return cls(own, ignored=name)
        if on:  # it reasons anyway
            return cls(own)
        if body.budget is not None:
            return cls(own, ignored=name)
        return cls(own, budget=0) if limits_reasoning else cls(own, ignored=name)


def _drops_old_turns(job: Job, body: ChatCompletionRequest) -> bool:
    if body.drop_old_turns is None:
        return job.turn is not None
    if body.drop_old_turns and body.continue_final_message:
        raise invalid_value("drop_old_turns", True, "false when continue_final_message is true")
    return body.drop_old_turns


async def recent_prompt(
    job: Job,
    body: ChatCompletionRequest,
    history: list[Message],
    num_new: int,
    options: dict[str, Any],
) -> tuple[list[int], int]:
    """Return the token ids of the latest turns that leave room for an answer, and the number of
    dropped messages. The last `num_new` messages stay."""
    limit = job.prompt_limit
    max_tokens = body.max_completion_tokens or body.max_tokens
    room = answer_room(max_tokens, job.max_model_len)
    most = min(limit.max_tokens, job.max_model_len - room)
    recent = await run_on_messages(job.service, len(history), Recent, history, num_new, most)
    return await encode_recent(job.service.engine, recent, limit, **options)


async def _keep_system(
    job: Job,
    params: SamplingParams,
    messages: list[Message],
    prompt: list[int],
    options: dict[str, Any],
) -> SamplingParams:
    """Set `n_keep` to the system messages for context shifts, unless the request sets it."""
    count = num_leading(messages)
    if (
        params.n_keep is not None
        or not count
        or not job.service.config.engine.scheduler.context_shift
    ):
        return params
    alone = {**options, "add_generation_prompt": False}
    try:
        start = await encode_messages(
            job.service.engine, messages[:count], job.prompt_limit, **alone
        )
    except InvalidInputError:  # a template that requires user messages
        return params
    most = min(job.max_model_len // 2, job.max_model_len - job.service.info.block_size - 1)
    return params.clone(n_keep=min(max(DEFAULT_KEEP, common_length(start, prompt)), most))


async def chat_prompt(
    job: Job, body: ChatCompletionRequest, history: list[Message], options: dict[str, Any]
) -> list[int]:
    given = (body.kv_transfer_params or {}).get(PROMPT_IDS)
    if given is not None:
        job.prompt_limit.check_tokens(len(given))
        return list(given)
    encode = encode_continued if body.continue_final_message else encode_messages
    return await encode(job.service.engine, history, job.prompt_limit, **options)
