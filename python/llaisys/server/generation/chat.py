"""A chat from the request to its prompt: what the doors to a chat share.

Every door says what it was asked in the fields of OpenAI's chat request, and goes on from there.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Any

from fastapi.responses import Response
from pydantic import PrivateAttr, ValidationError, model_validator

from llaisys.chat.constraint import call_constraint
from llaisys.chat.reader import AnswerReader
from llaisys.chat.style import ChatStyle
from llaisys.chat.tools import ToolSet
from llaisys.common.errors import InvalidInputError
from llaisys.common.sampling import SamplingParams
from llaisys.common.validation import check_count, invalid_value
from llaisys.engine.context_window import DEFAULT_KEEP
from llaisys.server.generation.answer import Answer
from llaisys.server.generation.history import Recent, answer_room, common_length, num_leading
from llaisys.server.generation.job import Job
from llaisys.server.generation.prompts import encode_messages, encode_prompts, encode_recent
from llaisys.server.http.faults import validation_error
from llaisys.server.openai.fields import note_ignored
from llaisys.server.openai.schemas import (
    ChatCompletionRequest,
    Schema,
    plain_messages,
    refuse_together,
)

Message = dict[str, Any]


class ProtocolRequest(Schema):
    """A body in another door's words. `chat` is the same in OpenAI's, made where the body is
    parsed, which for a large one is beside the event loop."""

    _chat: ChatCompletionRequest = PrivateAttr()

    @model_validator(mode="after")
    def translate(self) -> ProtocolRequest:
        self.set_chat()
        return self

    def set_chat(self) -> None:
        """Translate what the fields are now. Raises InvalidInputError."""
        try:
            self._chat = ChatCompletionRequest.model_validate(self.to_chat())
        except ValidationError as error:
            told = validation_error(error.errors(include_url=False))
            raise InvalidInputError(told.message, field=told.param, code=told.code) from None

    @property
    def chat(self) -> ChatCompletionRequest:
        return self._chat

    def to_chat(self) -> dict[str, Any]:
        """The fields of a ChatCompletionRequest. Raises InvalidInputError."""
        raise NotImplementedError


@dataclass(slots=True)
class Chat:
    """A chat that is ready to run."""

    job: Job
    params: SamplingParams
    prompt: list[int]
    tools: ToolSet | None
    opened: bool  # the prompt ends inside of the reasoning
    keep_reasoning: bool
    context_truncated: bool = False  # the oldest turns were left out
    seed: str = field(default_factory=lambda: uuid.uuid4().hex)  # of the ids of calls

    def new_reader(self, choice: int = 0) -> AnswerReader:
        """Two readers of one choice give its calls the same ids."""
        style = self.job.service.engine.style
        return style.reader(self.tools, self.opened, self.keep_reasoning, f"{self.seed}:{choice}")

    async def run(self, answer: Answer) -> Response:
        return await self.job.run([self.prompt], self.params, answer)


async def open_chat(
    job: Job,
    body: ChatCompletionRequest,
    messages: list[Message] | None = None,
    num_new: int = 1,
) -> Chat:
    """The chat of a body; `messages` are all of its messages where there are more than the body
    has. Where old turns may be left out, the last `num_new` messages are not."""
    params = await job.sampling(body.to_sampling)
    found = plain_messages(body.messages) if messages is None else messages
    drops = _drops_old_turns(job, body)
    if not drops:
        limits = job.service.config.limits
        check_count(job.prompt_name, len(found), limits.max_messages, "messages")
    options: dict[str, Any] = {}
    if body.add_generation_prompt is not None:
        options["add_generation_prompt"] = body.add_generation_prompt
    engine = job.service.engine
    style, tokenizer, tools = engine.style, engine.tokenizer, body.tool_set
    wish = ReasoningWish.of(body, style)
    if wish.variables:
        options["variables"] = wish.variables
    if wish.budget is not None:
        params = params.clone(thinking_budget=wish.budget)
    if wish.is_ignored:
        note_ignored(job.request.scope, "reasoning_effort")
    options["tools"] = tools
    num_dropped = 0
    if drops:
        prompt, num_dropped = await recent_prompt(job, body, found, num_new, options)
    else:
        prompt = await chat_prompt(job, body, found, options)
    params = await _keep_system(job, params, found, prompt, options)
    opened = bool(options.get("add_generation_prompt", True)) and (
        style.opens_reasoning(tokenizer, prompt)
        if not body.continue_final_message
        else style.is_inside_reasoning(found[-1]["content"])
    )
    if tools is not None:
        params = constrain_to_tools(params, tools, style, opened, tokenizer)
    job.visible_ids = style.visible_ids(tokenizer, tools)
    job.count_reasoning = style.reasoning_counter(tokenizer, opened)
    keep_reasoning = body.include_reasoning is not False
    return Chat(job, params, prompt, tools, opened, keep_reasoning, num_dropped > 0)


def constrain_to_tools(
    params: SamplingParams, tools: ToolSet, style: ChatStyle, opened: bool, tokenizer: Any
) -> SamplingParams:
    """The parameters with what holds the answer to its tools; another constraint comes first where
    no call is forced. Raises InvalidInputError."""
    # Of reasoning that the prompt has opened the engine knows the end, if that is a token.
    waits = (
        opened and style.markers is not None and tokenizer.token_id(style.markers.end) is not None
    )
    held = call_constraint(tools, style.writes_tags, None if waits else style.markers, opened)
    if held is None:
        return params
    if params.structured_outputs is None:
        return params.clone(structured_outputs=held)
    if tools.is_forced:
        raise refuse_together("tool_choice", "forced", "auto beside another constraint")
    return params


@dataclass(frozen=True, slots=True)
class ReasoningWish:
    """What a request asks of the model's reasoning, in the template's words and the engine's."""

    variables: dict[str, Any]
    budget: int | None = None  # None: as the sampling parameters say
    is_ignored: bool = False  # the model knows nothing of it

    @classmethod
    def of(cls, body: ChatCompletionRequest, style: ChatStyle) -> ReasoningWish:
        """`reasoning_effort` is for the template; where that has no switch, `none` is a budget of
        no tokens. `chat_template_kwargs` come first."""
        own = body.chat_template_kwargs or {}
        if body.reasoning_effort is None:
            return cls(own)
        variables = style.effort_variables(body.reasoning_effort)
        if variables or style.markers is None:
            return cls(variables | own, is_ignored=not variables)
        if body.reasoning_effort == "none" and body.thinking_budget is None:
            return cls(own, budget=0)
        return cls(own, is_ignored=True)


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
    """Token ids of as much of a conversation as leaves room for an answer, and the number of
    messages that were left out; the last `num_new` stay."""
    limit = job.prompt_limit
    max_tokens = body.max_completion_tokens or body.max_tokens
    room = answer_room(max_tokens, job.max_model_len)
    recent = Recent(history, num_new, min(limit.max_tokens, job.max_model_len - room))
    return await encode_recent(job.service.engine, recent, limit, **options)


async def _keep_system(
    job: Job,
    params: SamplingParams,
    messages: list[Message],
    prompt: list[int],
    options: dict[str, Any],
) -> SamplingParams:
    """With the system messages as what a shift of the context keeps, unless the request says."""
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
    except InvalidInputError:  # a template that wants more than system messages
        return params
    most = min(job.max_model_len // 2, job.max_model_len - job.service.info.block_size - 1)
    return params.clone(n_keep=min(max(DEFAULT_KEEP, common_length(start, prompt)), most))


async def chat_prompt(
    job: Job, body: ChatCompletionRequest, history: list[Message], options: dict[str, Any]
) -> list[int]:
    """Token ids of a chat; with `continue_final_message`, up to the end of the last message's text,
    which the answer then continues."""
    engine, limit = job.service.engine, job.prompt_limit
    if not body.continue_final_message:
        return await encode_messages(engine, history, limit, **options)
    if history[-1]["role"] != "assistant" or len(history) < 2:
        raise invalid_value(
            f"{job.prompt_name}[{len(history) - 1}].role",
            history[-1]["role"],
            "'assistant' when continue_final_message is true",
        )
    options["add_generation_prompt"] = True  # it opens the turn that the text belongs to
    start = await encode_messages(engine, history[:-1], limit, **options)
    (end,) = await encode_prompts(engine, [history[-1]["content"]], False, limit)
    limit.check_tokens(len(start) + len(end))
    return start + end
