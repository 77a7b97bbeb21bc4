"""A generation request from its validated body to its response, for all protocol adapters."""

import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, fields
from functools import partial
from operator import attrgetter
from typing import Any, Protocol, Self

from fastapi import Request, Response

from llaisys.common.sampling import ALL_LOGPROBS, MAX_LOGPROBS, SamplingParams
from llaisys.common.types import CompletionOutput, RequestOutput, StreamOutput, Usage
from llaisys.common.validation import check_count, check_int, invalid_value
from llaisys.engine.output_processor import OutputOptions
from llaisys.server.engine_client.text_work import INLINE_CHARS
from llaisys.server.errors import ApiError, is_fault
from llaisys.server.generation.candidates import best_choices, candidate_params, search_beams
from llaisys.server.generation.formatter import AnswerFormatter, is_text
from llaisys.server.generation.generation import Generation, Pause
from llaisys.server.generation.prompts import CHARS_PER_TOKEN, PromptLimit
from llaisys.server.generation.service import Service, service_for
from llaisys.server.http.error_handlers import to_api_error
from llaisys.server.http.event_stream import (
    BodyWriter,
    ClientDisconnected,
    EventStream,
    unless_disconnected,
)
from llaisys.server.http.response_bodies import body_response, join_chunks
from llaisys.server.schemas.fields import FieldNotes, Ignored
from llaisys.server.schemas.sampling import SamplingFields

MAX_PROMPT_LOGPROBS = 1 << 18  # of one request, top logprobs included
MAX_STREAMED_PROMPT_LOGPROBS = 4096  # in a stream, where one event has them all
MAX_WRITE_BYTES = 1 << 20  # of events that are sent together
LOAD_FORMAT_HEADER = "endpoint-load-metrics-format"  # of a request: TEXT or JSON
LOAD_HEADER = "endpoint-load-metrics"
CHARS_PER_NAME = 32  # cost of writing a token's text in logprobs, in characters


class Turn(Protocol):
    """Stores a complete answer."""

    async def finish(self, output: CompletionOutput, model: str) -> bytes | None:
        """Store the answer, after it was formatted. Returns a replacement of the last formatted
        bytes, where these depend on whether it is stored."""

    def close(self) -> None:
        """Close the turn; may be called more than once."""


@dataclass(slots=True)
class Job:
    """A generation request. Protocol adapters translate their bodies to OpenAI's fields, the widest
    set."""

    service: Service
    request: Request
    body: SamplingFields
    prompt_name: str  # field of the prompt, for error messages
    model: str
    owner: str
    request_id: str
    lora: str | None = None  # name of its adapter
    turn: Turn | None = None
    visible_ids: frozenset[int] = frozenset()  # special tokens that the answer parser reads
    line_seconds: float | None = None  # see OutputOptions
    end_check: Callable[[], Callable[[str], bool]] | None = None  # see OutputOptions
    count_reasoning: Callable[[Sequence[int]], int] | None = None  # reasoning tokens of a choice
    # set by `run`
    prompts: list[list[int]] = field(init=False)
    params: SamplingParams = field(init=False)
    formatter: AnswerFormatter = field(init=False)
    _fault: BaseException | None = None  # of `_write_delta`, raised by `_events`

    @classmethod
    async def of(cls, request: Request, body: SamplingFields, prompt_name: str) -> Self:
        service = await service_for(request, body.model)
        state = request.scope["state"]
        name = service.check_model(body.model)
        lora = service.lora_of(name, body)
        state["log"] = {"model": name, "stream": bool(body.stream), "user": body.user}
        owner, request_id = state["owner"], state["request_id"]
        config = service.config
        body.set_defaults(config.force_include_usage, config.return_tokens_as_token_ids)
        return cls(service, request, body, prompt_name, name, owner, request_id, lora)

    @property
    def notes(self) -> FieldNotes:
        found: FieldNotes = self.request.scope["state"]["field_notes"]
        return found

    @property
    def max_model_len(self) -> int:
        return self.service.info.max_model_len

    @property
    def prompt_limit(self) -> PromptLimit:
        most = self.max_prompt_tokens
        if self.body.truncate_prompt_tokens:  # the text itself is limited
            most = CHARS_PER_TOKEN * self.max_model_len
        return PromptLimit(self.prompt_name, self.max_model_len, most)

    @property
    def max_prompt_tokens(self) -> int:
        most = self.max_model_len - int(self.body.generates)
        limit = self.service.config.limits.max_prompt_tokens
        return min(most, limit) if limit else most

    @property
    def max_logprobs(self) -> int:
        most = self.service.config.limits.max_logprobs
        return self.service.info.vocab_size if most == ALL_LOGPROBS else most

    def truncate(self, prompt: list[int]) -> list[int]:
        """Return the tokens of a prompt that `truncate_prompt_tokens` keeps."""
        count, most = self.body.truncate_prompt_tokens, self.max_prompt_tokens
        if not count:
            return prompt
        if count > most:
            raise invalid_value("truncate_prompt_tokens", count, f"at most {most}")
        count = most if count < 0 else count
        return prompt[:count] if self.body.truncation_side == "right" else prompt[-count:]

    async def sampling(self, to_sampling: Callable[[], SamplingParams]) -> SamplingParams:
        """Return the validated sampling parameters; in a thread if they name many tokens."""
        engine, body = self.service.engine, self.body

        vocab_size, most = self.service.info.vocab_size, self.max_logprobs

        def check() -> SamplingParams:
            body.name_tokens(engine.tokenizer)
            body.count_logprobs(most, vocab_size)
            return to_sampling()

        params = await engine.texts.run(body.text_chars, check)
        if body.budget is not None and not self.notes.strict and not engine.inputs.limits_reasoning:
            self.notes.ignore(body.budget[0], Ignored.REASONING)
            params = params.clone(thinking_budget=None)
        return params

    async def run(
        self, prompts: list[list[int]], params: SamplingParams, formatter: AnswerFormatter
    ) -> Response:
        """Admit and submit the prompts, whose lengths are checked, and return the response."""
        self.prompts, self.params, self.formatter = prompts, params, formatter
        computed = candidate_params(self.body, params)
        count = computed.n * len(prompts)
        most = self.service.config.limits.max_n
        check_int("n", count, 1, most, label="n times the number of prompts")
        most = MAX_STREAMED_PROMPT_LOGPROBS if self.body.stream else MAX_PROMPT_LOGPROBS
        if self.max_logprobs > MAX_LOGPROBS:  # as the options allow
            most = self.service.config.limits.max_total_logprobs
        prompt_logprobs = num_prompt_logprobs(params, sum(map(len, prompts)))
        check_count("prompt", prompt_logprobs, most, "logprobs")
        self._reserve_logprobs(computed)
        self._note_cap()
        own = [self.body.request_id] if self.body.request_id else []
        ids = [formatter.response_id, self.request_id, *own]
        generation = self.service.generation(self.owner, ids, count)
        work = self._stream if self.body.stream else self._whole
        return await self.respond(work(generation))

    async def respond(self, work: Coroutine[Any, Any, Response]) -> Response:
        """Return the response of `work`, which ends when the client disconnects."""
        try:
            return await unless_disconnected(self.request.receive, work)
        except ClientDisconnected:
            self.request.scope["state"]["log"]["disconnected"] = True
            return Response(status_code=499)

    def hold(self, reservation: AbstractContextManager[None]) -> None:
        """Enter a reservation, which ends with the request."""
        stack = ExitStack()
        stack.enter_context(reservation)
        self.request.scope["state"]["at_end"].append(stack.close)

    def _note_cap(self) -> None:
        """Note max_tokens if the context ends an answer earlier."""
        most = self.params.max_tokens
        if most is None or self.service.config.engine.scheduler.context_shift:
            return
        room = self.max_model_len - max(map(len, self.prompts))
        if most > room:
            self.notes.ignore(f"max_tokens={room}", Ignored.CAPPED)

    def _reserve_logprobs(self, params: SamplingParams) -> None:
        """Reserve the maximum number of logprobs of the answer until the request ends."""
        if params.logprobs is None and params.prompt_logprobs is None:
            return
        length = self.max_model_len
        max_tokens = length if params.max_tokens is None else params.max_tokens
        tokens = sum(min(max_tokens, length - len(prompt)) for prompt in self.prompts)
        count = 0 if params.logprobs is None else params.n * tokens * (params.logprobs + 1)
        prompt_logprobs = num_prompt_logprobs(params, sum(map(len, self.prompts)))
        count += prompt_logprobs
        # one answer that fills the context
        most = (MAX_LOGPROBS + 1) * length + prompt_logprobs
        budget = self.service.logprob_budget
        label = "the number of logprobs: n x max_tokens x each"
        check_int("logprobs", count, 0, max(budget.most, most), label=label)
        self.hold(budget.reserve("logprobs", count, most))

    async def _submit(self, generation: Generation, params: SamplingParams) -> None:
        body = self.body
        reuse = body.reuse_prefix is not False
        reading = OutputOptions(
            self.visible_ids, bool(body.return_progress), self.line_seconds, self.end_check
        )
        await generation.submit(
            self.prompts,
            params,
            bool(body.stream),
            body.cache_salt or self.service.slots.salt(self.owner, body.id_slot),
            reuse,
            self.request_id,
            reading,
            self.lora,
        )

    async def _whole(self, generation: Generation) -> Response:
        params = self.params
        async with generation:
            if self.body.use_beam_search:
                outputs = await search_beams(
                    generation,
                    self.body,
                    self.prompts,
                    params,
                    max_model_len=self.max_model_len,
                    visible_ids=self.visible_ids,
                    lora=self.lora,
                )
            else:
                await self._submit(generation, candidate_params(self.body, params))
                outputs = best_choices(await generation.result(), params)
        if any(choice.finish_reason == "error" for out in outputs for choice in out.outputs):
            raise engine_error()
        if not any(choice.token_ids for out in outputs for choice in out.outputs):
            check_in_time(outputs[0].finish_reason)
        for output in outputs:
            self._finish_output(output)
        usage = add_usage([output.usage for output in outputs])
        self.log_usage(usage, outputs[0].outputs[0].finish_reason)
        body = await self._whole_body(outputs, usage)
        if self.turn is not None:
            last = await self.turn.finish(outputs[0].outputs[0], self.model)
            if last is not None:
                body[-1] = last
        return self._with_load_report(body_response(body))

    async def _whole_body(self, outputs: list[RequestOutput], usage: Usage) -> list[bytes]:
        params, formatter = self.params, self.formatter
        # Logprobs need the text of every token and its alternatives, up to 21 per token.
        names = 0 if params.logprobs is None else usage.completion_tokens * (params.logprobs + 1)
        names += num_prompt_logprobs(params, usage.prompt_tokens)
        chars = sum(len(choice.text) for output in outputs for choice in output.outputs)
        pieces = formatter.format_whole(outputs, usage)
        names += (chars * formatter.char_cost + formatter.extra_chars) // CHARS_PER_NAME
        if names <= INLINE_CHARS:
            return join_chunks(pieces)
        return await self.service.engine.texts.write_answer(join_chunks, pieces)

    async def _stream(self, generation: Generation) -> Response:
        """Start the response after the first delta, so that earlier errors have their own status
        code."""
        await generation.__aenter__()
        deltas: Any = None
        try:
            await self._submit(generation, self.params)
            deltas = generation.deltas()
            first = await anext(deltas)
            if first[1].finish_reason == "error":
                raise engine_error()
            if not first[1].token_ids and generation.num_prompts * self.params.n == 1:
                check_in_time(first[1].finish_reason)
        except BaseException as error:
            if deltas is not None:
                await deltas.aclose()
            generation.close(failed=is_fault(error))
            raise
        events = self._events(generation, first, deltas)

        def write_to(connection: BodyWriter) -> None:
            generation.set_sink(partial(self._write_delta, connection))

        close = partial(self._close, generation)
        return EventStream(events, close, self.formatter.media_type, write_to)

    def _close(self, generation: Generation, failed: bool = False) -> None:
        """Release everything; may be called more than once."""
        generation.close(failed)
        if self.turn is not None:
            self.turn.close()

    async def _events(
        self, generation: Generation, first: tuple[int, StreamOutput], deltas: Any
    ) -> AsyncGenerator[bytes, None]:
        """Yield the events of the answer. A failure ends them with the API's error event."""
        formatter = self.formatter
        failed = False
        pause = Pause()
        try:
            item: tuple[int, StreamOutput] | None = first
            while item is not None:
                if self._fault is not None:
                    raise self._fault
                number, delta = item
                if delta.finish_reason == "error":
                    raise engine_error()
                if delta.output is not None:
                    self._finish_output(delta.output)
                events: list[bytes] = []
                size = 0
                pause.start()
                for event in formatter.format_delta(number, delta):
                    if size + len(event) > MAX_WRITE_BYTES and events:
                        yield b"".join(events)
                        events, size = [], 0
                    events.append(event)
                    size += len(event)
                    await pause.if_busy()
                if delta.output is not None and self.turn is not None:
                    last = await self.turn.finish(delta.output.outputs[0], self.model)
                    if last is not None:
                        events[-1] = last
                item = None
                if len(generation.outputs) < generation.num_prompts:
                    if events:
                        yield b"".join(events)
                        events = []
                    item = await anext(deltas, None)
            # The last events are sent in one write.
            usage = add_usage([output.usage for output in generation.outputs.values()])
            yield b"".join([*events, *formatter.format_end(usage)])
        except BaseException as error:
            if not is_fault(error):
                raise
            failed = True
            yield b"".join(formatter.format_error(to_api_error(error, self.request_id)))
        finally:
            await deltas.aclose()
            self._close(generation, failed)
            self._log_stream(generation)

    def _write_delta(self, connection: BodyWriter, delta: StreamOutput) -> bool:
        """Write the events of a delta at once, if they are few and the client reads. Otherwise
        return False: `_events` has to yield them."""
        if self._fault is not None or not is_text(delta) or not connection.is_ready:
            return False
        try:
            events = b"".join(self.formatter.format_delta(0, delta))
            if events:
                connection.write(events)
        except BaseException as error:
            if not is_fault(error):
                raise
            self._fault = error
            return False
        return True

    def _finish_output(self, output: RequestOutput) -> None:
        """Count reasoning tokens and record the tokens of the slot."""
        cached = [*output.prompt_token_ids, *output.token_ids[:-1]]  # tokens in the KV cache
        self.service.slots.record(self.owner, self.body.id_slot, cached)
        if self.count_reasoning is not None:
            counts = (self.count_reasoning(choice.token_ids) for choice in output.outputs)
            output.usage.reasoning_tokens = sum(counts)

    def _log_stream(self, generation: Generation) -> None:
        if len(generation.outputs) == generation.num_prompts:
            usage = add_usage([output.usage for output in generation.outputs.values()])
            self.log_usage(usage, generation.outputs[0].finish_reason)
        else:
            self.request.scope["state"]["log"]["finish_reason"] = "abort"

    def _with_load_report(self, response: Response) -> Response:
        """Add the load of the engine to the response, if the request asks for it."""
        format = self.request.headers.get(LOAD_FORMAT_HEADER, "").upper()
        if format in ("JSON", "TEXT"):
            stats = self.service.engine.stats
            usage, waiting = float(stats.kv_usage), float(stats.num_waiting)
            values = {"kv_cache_usage_perc": usage, "num_requests_waiting": waiting}
            pairs = ", ".join(f"named_metrics.{name}={value}" for name, value in values.items())
            report = pairs if format == "TEXT" else json.dumps({"named_metrics": values})
            response.headers[LOAD_HEADER] = f"{format} {report}"
        return response

    def log_usage(self, usage: Usage, reason: str | None) -> None:
        """Add the usage to the log line of the request."""
        self.request.scope["state"]["log"].update(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
            finish_reason=reason,
        )


_COUNTS = attrgetter(*(field.name for field in fields(Usage)))  # astuple() copies, 10 us each


def add_usage(usages: Sequence[Usage]) -> Usage:
    return Usage(*map(sum, zip(*map(_COUNTS, usages), strict=True)))


def num_prompt_logprobs(params: SamplingParams, num_tokens: int) -> int:
    return 0 if params.prompt_logprobs is None else num_tokens * (params.prompt_logprobs + 1)


def check_in_time(finish_reason: str | None) -> None:
    """Raise ApiError 504 when an answer without tokens timed out."""
    if finish_reason == "timeout":
        raise ApiError(504, "the request timed out before its first token", code="timeout")


def engine_error() -> ApiError:
    return ApiError(500, "the engine failed on this request", code="engine_error")
