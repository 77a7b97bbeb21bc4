"""One generation from the checked body to the response: what all doors share."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

from fastapi import Request
from fastapi.responses import Response

from llaisys.common.sampling import MAX_LOGPROBS, SamplingParams
from llaisys.common.types import CompletionOutput, RequestOutput, StreamOutput, Usage
from llaisys.common.validation import check_count, check_int
from llaisys.engine.output_processor import OutputOptions
from llaisys.server.engine_client.text_work import INLINE_CHARS
from llaisys.server.errors import ApiError, is_fault
from llaisys.server.generation.answer import Answer
from llaisys.server.generation.generation import ClientGone, Generation, unless_disconnected
from llaisys.server.generation.prompts import PromptLimit
from llaisys.server.http.event_stream import EventStream
from llaisys.server.http.faults import error_of
from llaisys.server.http.payload import body_response, gather
from llaisys.server.openai.schemas import SamplingFields
from llaisys.server.service import Service, service_for

MAX_SCORES = 1 << 18  # logprobs of the prompts of one request, the best at each place included
MAX_STREAMED_SCORES = 4096  # of those in a stream, which come in one event
CHARS_PER_NAME = 32  # characters of an answer cost as much to write as the name of one token


class Turn(Protocol):
    """Where an answer is kept once it has come to its end."""

    async def finish(self, output: CompletionOutput, model: str) -> None: ...

    def close(self) -> None:
        """Harmless when it is closed already."""


@dataclass(slots=True)
class Job:
    """What every request that generates has in common, from the checked body to the response. The
    doors say everything in the fields of OpenAI's requests, which are the widest."""

    service: Service
    request: Request
    body: SamplingFields
    prompt_name: str  # the field that the prompt came in
    model: str
    owner: str
    request_id: str
    turn: Turn | None = None
    visible_ids: frozenset[int] = frozenset()  # special tokens that the answer parser reads
    line_seconds: float | None = None  # see OutputOptions
    count_reasoning: Callable[[Sequence[int]], int] | None = None  # tokens of it in a choice

    @classmethod
    async def of(cls, request: Request, body: SamplingFields, prompt_name: str) -> Job:
        service = await service_for(request, body.model)
        state = request.scope["state"]
        name = service.check_model(body.model)
        state["log"] = {"model": name, "stream": bool(body.stream), "user": body.user}
        return cls(service, request, body, prompt_name, name, state["owner"], state["request_id"])

    @property
    def max_model_len(self) -> int:
        return self.service.info.max_model_len

    @property
    def prompt_limit(self) -> PromptLimit:
        most = self.max_model_len - int(self.body.generates)
        if self.service.config.limits.max_prompt_tokens:
            most = min(most, self.service.config.limits.max_prompt_tokens)
        return PromptLimit(self.prompt_name, self.max_model_len, most)

    async def sampling(self, to_sampling: Callable[[], SamplingParams]) -> SamplingParams:
        """The body's parameters, checked; beside the loop when they name many tokens."""
        engine, body = self.service.engine, self.body

        def check() -> SamplingParams:
            body.name_tokens(engine.tokenizer)
            return to_sampling()

        return await engine.texts.run(body.text_chars, check)

    async def run(
        self, prompts: list[list[int]], params: SamplingParams, answer: Answer
    ) -> Response:
        """Admit, submit, and answer whole or in parts; the prompts' lengths have been checked."""
        count = params.n * len(prompts)
        most = self.service.config.limits.max_n
        check_int("n", count, 1, most, label="n times the number of prompts")
        most = MAX_STREAMED_SCORES if self.body.stream else MAX_SCORES
        scores = num_scores(params, sum(map(len, prompts)))
        check_count("prompt", scores, most, "logprobs")
        self._hold_logprobs(prompts, params)
        own = [self.body.request_id] if self.body.request_id else []
        ids = [answer.response_id, self.request_id, *own]
        generation = self.service.generation(self.owner, ids, count)
        work = self._stream if self.body.stream else self._whole
        try:
            return await unless_disconnected(
                self.request.receive, work(generation, answer, prompts, params)
            )
        except ClientGone:
            self.request.scope["state"]["log"]["disconnected"] = True
            return Response(status_code=499)

    def _hold_logprobs(self, prompts: list[list[int]], params: SamplingParams) -> None:
        """As many as the answer may come to, until the client has it."""
        if params.logprobs is None and params.prompt_logprobs is None:
            return
        length = self.max_model_len
        wanted = length if params.max_tokens is None else params.max_tokens
        tokens = sum(min(wanted, length - len(prompt)) for prompt in prompts)
        count = 0 if params.logprobs is None else params.n * tokens * (params.logprobs + 1)
        scores = num_scores(params, sum(map(len, prompts)))
        count += scores
        most = (MAX_LOGPROBS + 1) * length + scores  # one answer that fills the context
        held = ExitStack()
        held.enter_context(self.service.logprobs.reserve(count, most))
        self.request.scope["state"]["at_end"].append(held.close)

    async def _submit(
        self, generation: Generation, prompts: list[list[int]], params: SamplingParams
    ) -> None:
        body = self.body
        reuse = body.reuse_prefix is not False
        reading = OutputOptions(self.visible_ids, bool(body.return_progress), self.line_seconds)
        await generation.submit(
            prompts, params, bool(body.stream), body.cache_salt, reuse, self.request_id, reading
        )

    async def _whole(
        self,
        generation: Generation,
        answer: Answer,
        prompts: list[list[int]],
        params: SamplingParams,
    ) -> Response:
        async with generation:
            await self._submit(generation, prompts, params)
            outputs = await generation.result()
        if any(choice.finish_reason == "error" for out in outputs for choice in out.outputs):
            raise engine_error()
        if not any(choice.token_ids for out in outputs for choice in out.outputs):
            check_in_time(outputs[0].finish_reason)
        for output in outputs:
            self._note_reasoning(output)
        usage = add_usage([output.usage for output in outputs])
        self.log_usage(usage, outputs[0].outputs[0].finish_reason)
        body = await self._whole_body(answer, outputs, params, usage)
        if self.turn is not None:
            await self.turn.finish(outputs[0].outputs[0], self.model)
        return body_response(body)

    async def _whole_body(
        self, answer: Answer, outputs: list[RequestOutput], params: SamplingParams, usage: Usage
    ) -> list[bytes]:
        # Names of tokens and their likely neighbours are texts to find, up to 21 for each token.
        names = 0 if params.logprobs is None else usage.completion_tokens * (params.logprobs + 1)
        names += num_scores(params, usage.prompt_tokens)
        chars = sum(len(choice.text) for output in outputs for choice in output.outputs)
        pieces = answer.whole(outputs, usage)
        if (
            names + (chars * answer.char_cost + answer.extra_chars) // CHARS_PER_NAME
            <= INLINE_CHARS
        ):
            return gather(pieces)
        return await self.service.engine.texts.write_answer(gather, pieces)

    async def _stream(
        self,
        generation: Generation,
        answer: Answer,
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
            if not first[1].token_ids and generation.num_prompts * params.n == 1:
                check_in_time(first[1].finish_reason)
        except BaseException as error:
            if parts is not None:
                await parts.aclose()
            generation.close(failed=is_fault(error))
            raise
        events = self._events(generation, answer, first, parts)
        return EventStream(events, self._release(generation), answer.media_type)

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
        answer: Answer,
        first: tuple[int, StreamOutput],
        parts: Any,
    ) -> AsyncGenerator[bytes, None]:
        """The answer's events; what fails on the way ends them in the door's own words."""
        failed = False
        try:
            item: tuple[int, StreamOutput] | None = first
            while item is not None:
                number, part = item
                if part.finish_reason == "error":
                    raise engine_error()
                if part.output is not None:
                    self._note_reasoning(part.output)
                events = answer.chunks(number, part)
                if part.output is not None and self.turn is not None:
                    await self.turn.finish(part.output.outputs[0], self.model)
                item = None
                if len(generation.outputs) < generation.num_prompts:
                    if events:
                        yield b"".join(events)
                        events = []
                    item = await anext(parts, None)
            # What ends the stream goes out together, in one write.
            usage = add_usage([output.usage for output in generation.outputs.values()])
            yield b"".join([*events, *answer.end(usage)])
        except BaseException as error:
            if not is_fault(error):
                raise
            failed = True
            yield b"".join(answer.break_off(error_of(error, self.request_id)))
        finally:
            await parts.aclose()
            generation.close(failed)
            if self.turn is not None:
                self.turn.close()
            self._log_stream(generation)

    def _note_reasoning(self, output: RequestOutput) -> None:
        if self.count_reasoning is not None:
            counts = (self.count_reasoning(choice.token_ids) for choice in output.outputs)
            output.usage.reasoning_tokens = sum(counts)

    def _log_stream(self, generation: Generation) -> None:
        if len(generation.outputs) == generation.num_prompts:
            usage = add_usage([output.usage for output in generation.outputs.values()])
            self.log_usage(usage, generation.outputs[0].finish_reason)
        else:
            self.request.scope["state"]["log"]["finish_reason"] = "abort"

    def log_usage(self, usage: Usage, reason: str | None) -> None:
        """For the line that the access log has of this request."""
        self.request.scope["state"]["log"].update(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
            finish_reason=reason,
        )


def add_usage(parts: Sequence[Usage]) -> Usage:
    return Usage(
        sum(usage.prompt_tokens for usage in parts),
        sum(usage.completion_tokens for usage in parts),
        sum(usage.cached_tokens for usage in parts),
        sum(usage.reasoning_tokens for usage in parts),
        sum(usage.host_cached_tokens for usage in parts),
    )


def num_scores(params: SamplingParams, num_tokens: int) -> int:
    """Logprobs that are kept of prompts of so many tokens in all."""
    return 0 if params.prompt_logprobs is None else num_tokens * (params.prompt_logprobs + 1)


def check_in_time(finish_reason: str | None) -> None:
    """Of an answer without a token: raises ApiError when its time was over before it began."""
    if finish_reason == "timeout":
        raise ApiError(
            504, "the request's timeout was over before its answer began", code="timeout"
        )


def engine_error() -> ApiError:
    return ApiError(500, "the engine failed on this request", code="engine_error")
