"""One generation from the checked body to the response: what chat and completions share."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from llaisys.common.sampling import SamplingParams
from llaisys.common.types import RequestOutput, StreamOutput, Usage
from llaisys.common.validation import check_int
from llaisys.server.engine_client.async_engine import INLINE_CHARS
from llaisys.server.errors import ApiError, is_fault
from llaisys.server.http.event_stream import EventStream
from llaisys.server.http.faults import error_of
from llaisys.server.openai.generation import ClientGone, Generation, unless_disconnected
from llaisys.server.openai.prompts import PromptLimit
from llaisys.server.openai.responses import (
    DONE,
    ResponseBuilder,
    TextOffsets,
    TokenNames,
    add_usage,
    body_response,
    gather,
    sse,
    usage_object,
)
from llaisys.server.openai.schemas import SamplingFields
from llaisys.server.service import Service, service_for
from llaisys.server.sessions.turns import SessionTurn

CHARS_PER_NAME = 32  # characters of an answer cost as much to write as the name of one token


@dataclass(slots=True)
class Job:
    """What chat and completions have in common, from the checked body to the response."""

    service: Service
    request: Request
    body: SamplingFields
    chat: bool
    model: str
    owner: str
    request_id: str
    turn: SessionTurn | None = None
    echoes: list[str] = field(default_factory=list)  # one per prompt, or none
    num_prompt_tokens: int = 0

    @classmethod
    async def of(cls, request: Request, body: SamplingFields, chat: bool) -> Job:
        service = await service_for(request, body.model)
        state = request.scope["state"]
        name = service.check_model(body.model)
        state["log"] = {"model": name, "stream": bool(body.stream), "user": body.user}
        return cls(service, request, body, chat, name, state["owner"], state["request_id"])

    @property
    def max_model_len(self) -> int:
        return self.service.info.max_model_len

    @property
    def prompt_limit(self) -> PromptLimit:
        most = self.max_model_len - 1
        if self.service.config.limits.max_prompt_tokens:
            most = min(most, self.service.config.limits.max_prompt_tokens)
        return PromptLimit("messages" if self.chat else "prompt", self.max_model_len, most)

    async def sampling(self, to_sampling: Callable[[], SamplingParams]) -> SamplingParams:
        """The body's parameters, checked; beside the loop when they name many tokens."""
        size = len(self.body.allowed_token_ids or ())
        return await self.service.engine.text_work(size, to_sampling)

    async def run(self, prompts: list[list[int]], params: SamplingParams) -> Response:
        """Admit, submit, and answer whole or in parts; the prompts' lengths have been checked."""
        limits, body = self.service.config.limits, self.body
        self.num_prompt_tokens = sum(len(prompt) for prompt in prompts)
        count = params.n * len(prompts)
        check_int("n", count, 1, limits.max_n, called="n times the number of prompts")
        prefix = "chatcmpl" if self.chat else "cmpl"
        builder = ResponseBuilder(
            f"{prefix}-{body.request_id or uuid.uuid4().hex}",
            int(time.time()),
            self.model,
            self.chat,
            TokenNames(self.service.engine.tokenizer, bool(body.return_tokens_as_token_ids)),
            bool(body.return_token_ids),
            self.turn.session_id if self.turn is not None else None,
        )
        ids = [
            builder.response_id,
            self.request_id,
            *([body.request_id] if body.request_id else []),
        ]
        generation = self.service.generation(self.owner, ids, count)
        work = self._stream if body.stream else self._whole
        try:
            return await unless_disconnected(
                self.request.receive, work(generation, builder, prompts, params)
            )
        except ClientGone:
            self.request.scope["state"]["log"]["disconnected"] = True
            return Response(status_code=499)

    async def _submit(
        self, generation: Generation, prompts: list[list[int]], params: SamplingParams
    ) -> None:
        body = self.body
        reuse = body.reuse_prefix is not False
        await generation.submit(
            prompts, params, bool(body.stream), body.cache_salt, reuse, self.request_id
        )

    async def _whole(
        self,
        generation: Generation,
        builder: ResponseBuilder,
        prompts: list[list[int]],
        params: SamplingParams,
    ) -> Response:
        async with generation:
            await self._submit(generation, prompts, params)
            outputs = await generation.result()
        if any(choice.finish_reason == "error" for out in outputs for choice in out.outputs):
            raise engine_error()
        usage = add_usage([output.usage for output in outputs])
        self._log_usage(usage, outputs[0].outputs[0].finish_reason)
        body = await self._whole_body(builder, outputs, params, usage)
        if self.turn is not None:
            await self.turn.finish(outputs[0].outputs[0], self.model)
        return body_response(body)

    async def _whole_body(
        self,
        builder: ResponseBuilder,
        outputs: list[RequestOutput],
        params: SamplingParams,
        usage: Usage,
    ) -> list[bytes]:
        choices = [
            (number * params.n + choice.index, choice, self.echoes[number] if self.echoes else "")
            for number, output in enumerate(outputs)
            for choice in output.outputs
        ]
        # Names of tokens and their likely neighbours are texts to find, up to 21 for each token.
        names = 0 if params.logprobs is None else usage.completion_tokens * (params.logprobs + 1)
        chars = sum(len(choice.text) + len(echo) for _, choice, echo in choices)
        pieces = builder.whole(choices, usage)
        if names + chars // CHARS_PER_NAME <= INLINE_CHARS:
            return gather(pieces)
        return await self.service.engine.answer_lane.finish(gather, pieces)

    async def _stream(
        self,
        generation: Generation,
        builder: ResponseBuilder,
        prompts: list[list[int]],
        params: SamplingParams,
    ) -> Response:
        """The response begins with the first part, so that what goes wrong before it still has its
        own status."""
        await generation.__aenter__()
        parts: Any = None
        try:
            await self._submit(generation, prompts, params)
            parts = generation.parts()
            first = await anext(parts)
            if first[1].finish_reason == "error":
                raise engine_error()
        except BaseException as error:
            if parts is not None:
                await parts.aclose()
            generation.close(failed=is_fault(error))
            raise
        events = self._events(generation, builder, params.n, first, parts)
        return EventStream(events, self._release(generation))

    def _release(self, generation: Generation) -> Callable[[], None]:
        """For a stream that never began; harmless after one that did."""

        def release() -> None:
            generation.close()
            if self.turn is not None:
                self.turn.close()

        return release

    async def _events(
        self,
        generation: Generation,
        builder: ResponseBuilder,
        n: int,
        first: tuple[int, StreamOutput],
        parts: Any,
    ) -> AsyncGenerator[bytes, None]:
        """Chunks, then for every choice exactly one with a finish_reason, then [DONE]."""
        writer = ChunkWriter(self, builder, n, generation.num_prompts)
        failed = False
        try:
            item: tuple[int, StreamOutput] | None = first
            while item is not None:
                number, part = item
                if part.output is not None and self.turn is not None:
                    await self.turn.finish(part.output.outputs[0], self.model)
                for event in writer.chunks(number, part):
                    yield event
                item = await anext(parts, None)
            usage = add_usage([output.usage for output in generation.outputs.values()])
            for event in writer.end(usage):
                yield event
        except BaseException as error:
            if not is_fault(error):
                raise
            failed = True
            yield sse(error_of(error).body(self.request_id))
            for event in writer.break_off():
                yield event
        finally:
            await parts.aclose()
            generation.close(failed)
            if self.turn is not None:
                self.turn.close()
            self._log_stream(generation, writer)

    def _log_stream(self, generation: Generation, writer: ChunkWriter) -> None:
        if len(generation.outputs) == writer.num_prompts:
            usage = add_usage([output.usage for output in generation.outputs.values()])
            self._log_usage(usage, generation.outputs[0].finish_reason)
        else:
            self.request.scope["state"]["log"]["finish_reason"] = "abort"

    def _log_usage(self, usage: Usage, reason: str | None) -> None:
        self.request.scope["state"]["log"].update(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
            finish_reason=reason,
        )


class ChunkWriter:
    """Turns parts into events and keeps count of what every choice has been sent."""

    def __init__(self, job: Job, builder: ResponseBuilder, n: int, num_prompts: int) -> None:
        self.job = job
        self.builder = builder
        self.n = n
        self.num_prompts = num_prompts
        self.body = job.body
        self.open = dict.fromkeys(range(n * num_prompts), False)  # choice -> has begun
        self._offsets: dict[int, TextOffsets] = {}
        self._tokens = 0

    def chunks(self, number: int, part: StreamOutput) -> list[bytes]:
        index = number * self.n + part.index
        events = self._begin(index, number)
        self._tokens += len(part.token_ids)
        ends = part.finish_reason is not None
        if part.text or part.logprobs or (part.token_ids and self.builder.token_ids):
            events.append(self._event(self._content(index, part)))
        if ends:
            if part.finish_reason == "error":
                raise engine_error()
            self.open.pop(index)
            events.append(
                self._event(
                    self.builder.chunk(
                        index, "", finish_reason=part.finish_reason, stop_reason=part.stop_reason
                    )
                )
            )
        return events

    def _begin(self, index: int, number: int) -> list[bytes]:
        if self.open[index]:
            return []
        self.open[index] = True
        echo = self.job.echoes[number] if self.job.echoes else ""
        self._offsets[index] = TextOffsets(self.builder.names, len(echo))
        if self.builder.chat:
            return [self._event(self.builder.chunk(index, "", first=True))]
        return [self._event(self.builder.chunk(index, echo))] if echo else []

    def _content(self, index: int, part: StreamOutput) -> dict[str, Any]:
        return self.builder.chunk(
            index,
            part.text,
            logprobs=part.logprobs,
            offsets=self._offsets[index],
            token_ids=part.token_ids,
        )

    def _event(self, chunk: dict[str, Any]) -> bytes:
        if self.body.continuous_usage:
            chunk["usage"] = usage_object(Usage(self.job.num_prompt_tokens, self._tokens))
        elif self.body.include_usage:
            chunk["usage"] = None
        return sse(chunk)

    def end(self, usage: Usage) -> list[bytes]:
        events = [sse(self.builder.usage_chunk(usage))] if self.body.include_usage else []
        return [*events, DONE]

    def break_off(self) -> list[bytes]:
        """The choices that have not finished end with `error`."""
        events = [
            sse(self.builder.chunk(index, "", finish_reason="error")) for index in sorted(self.open)
        ]
        self.open.clear()
        return [*events, DONE]


def engine_error() -> ApiError:
    return ApiError(500, "the engine failed on this request", code="engine_error")
