"""Formats answers of chat and completions as OpenAI's objects or server-sent events."""

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from llaisys.chat.reader import AnswerReader
from llaisys.chat.records import ContentText
from llaisys.common.types import RequestOutput, StreamOutput, TokenLogprobs, Usage
from llaisys.server.errors import ApiError
from llaisys.server.generation.formatter import PARSE_COST, AnswerFormatter, is_text
from llaisys.server.generation.job import Job
from llaisys.server.generation.llama_object import FinalObject
from llaisys.server.generation.timings import PromptProgressReporter, StreamTimings, timings_object
from llaisys.server.generation.token_names import TokenNames
from llaisys.server.http.response_bodies import json_bytes, sse
from llaisys.server.openai.response_objects import (
    DONE,
    Choice,
    ResponseBuilder,
    TextOffsets,
    delta_object,
    plain_reader,
    usage_object,
)


class OpenAIFormatter(AnswerFormatter):
    """Every choice has exactly one chunk with a finish_reason; a stream ends with [DONE].
    `echoes`: prompt texts to repeat, one per prompt, or empty."""

    def __init__(
        self,
        job: Job,
        chat: bool,
        prompts: Sequence[Sequence[int]],
        n: int,
        echoes: Sequence[str] = (),
        session_id: str | None = None,
        new_reader: Callable[[int], AnswerReader] = plain_reader,
        context_truncated: bool | None = None,
        verbose: FinalObject | None = None,
    ) -> None:
        self.body = job.body
        self.request_id = job.request_id
        self.response_id = (
            f"{'chatcmpl' if chat else 'cmpl'}-{self.body.request_id or uuid.uuid4().hex}"
        )
        self.builder = ResponseBuilder(
            self.response_id,
            int(time.time()),
            job.model,
            chat,
            TokenNames(job.service.engine.tokenizer, bool(self.body.return_tokens_as_token_ids)),
            bool(self.body.return_token_ids),
            session_id,
            new_reader,
            job.service.fingerprint,
            self.body.prompt_logprobs or 0,
            context_truncated,
            bool(getattr(self.body, "functions", None)),
        )
        self._prompts = prompts
        self.char_cost = PARSE_COST if chat else 1
        self._readers: dict[int, AnswerReader] = {}
        self._verbose = verbose
        self.n = n
        self.echoes = echoes
        self.extra_chars = sum(map(len, echoes))
        self.open = dict.fromkeys(
            range(n * len(prompts)), False
        )  # unfinished choice -> has started
        self._offsets: dict[int, TextOffsets] = {}
        self._prompt_tokens = sum(map(len, prompts))
        self._tokens = 0
        self._stream_timings = StreamTimings(self._prompt_tokens)
        self._timings: dict[str, Any] | None = None  # of the last finished prompt
        with_timings = bool(self.body.timings_per_token)
        self._progress = [PromptProgressReporter(with_timings) for _ in prompts]
        counts = self.builder.token_ids or self.body.continuous_usage
        self._text_only = not (counts or with_timings)  # chunks within a text have no other values
        self._text_parts: dict[int, tuple[bytes, bytes]] = {}  # event before and after its text

    def format_whole(self, outputs: Sequence[RequestOutput], usage: Usage) -> Iterator[bytes]:
        choices = [
            Choice(
                number * self.n + choice.index,
                choice,
                self.echoes[number] if self.echoes else "",
                self._echo_logprobs(output.prompt_logprobs),
                output.prompt_logprobs if self.body.prompt_logprobs is not None else None,
                list(self._prompts[number]) if self.builder.token_ids else None,
            )
            for number, output in enumerate(outputs)
            for choice in output.outputs
        ]
        timings = self._timings_of(outputs[0], 0)
        return self.builder.whole(choices, usage, timings, self._verbose_fields(outputs[0]))

    def _verbose_fields(self, output: RequestOutput) -> dict[str, Any]:
        """Return llama.cpp's object, if requested."""
        if self._verbose is None:
            return {}
        first = output.outputs[0]
        return {"__verbose": self._verbose.of(first, first.text, first.index)}

    def _echo_logprobs(self, logprobs: list[TokenLogprobs] | None) -> list[TokenLogprobs] | None:
        """Return the logprobs of an echo if requested, with as many top entries as requested."""
        if not self.echoes or logprobs is None or self.body.logprobs is None or self.builder.chat:
            return None
        most = int(self.body.logprobs)
        return [entry.with_top(most) for entry in logprobs]

    def format_delta(self, number: int, delta: StreamOutput) -> list[bytes]:
        index = number * self.n + delta.index
        if self.open[index] and self._text_only and is_text(delta):
            return self._text_events(index, delta.text)
        events = []
        if delta.progress is not None:
            events += self._progress_events(index, number, delta)
            if not delta.token_ids and delta.finish_reason is None:
                return events
        events += self._begin(index, number, delta)
        self._tokens += len(delta.token_ids)
        self._stream_timings.add(len(delta.token_ids))
        chunks = self._chat(index, delta) if self.builder.chat else self._completion(index, delta)
        if delta.finish_reason is not None:
            self._finish(index, delta, chunks)
        return [*events, *map(self._event, chunks)]

    def _text_events(self, index: int, text: str) -> list[bytes]:
        """Return the events of a delta of a started choice that has nothing but text."""
        if not self.builder.chat:
            return [self._text_event(index, text)] if text else []
        return [
            self._text_event(index, event.text)
            if isinstance(event, ContentText)
            else self._event(
                self.builder.chunk(
                    index, "", delta=delta_object(event, self.builder.uses_functions)
                )
            )
            for event in self._readers[index].feed(text)
        ]

    def _text_event(self, index: int, text: str) -> bytes:
        """Return the event of a text, which differs from another one in the text alone."""
        parts = self._text_parts.get(index)
        if parts is None:
            event = self._event(self.builder.chunk(index, "", delta={"content": ""}))
            before, _, after = event.rpartition(b'""')
            parts = self._text_parts[index] = before, after
        return b"%b%b%b" % (parts[0], json_bytes(text), parts[1])

    def _finish(self, index: int, delta: StreamOutput, chunks: list[dict[str, Any]]) -> None:
        """Add the finish reason as a chunk. With usage in every chunk it is in the last one, as in
        vLLM, so that each chunk has further tokens."""
        self.open.pop(index)
        reader = self._readers.pop(index, None)
        has_calls = reader is not None and reader.has_calls
        reason = self.builder.finish_reason(delta.finish_reason, has_calls)
        chunk = self.builder.chunk(index, "", finish_reason=reason, stop_reason=delta.stop_reason)
        if delta.output is not None:
            self._timings = self._timings_of(delta.output, delta.index)
            if not self.body.include_usage:
                chunk["timings"] = self._timings
            chunk |= self._verbose_fields(delta.output)
        if chunks and self.body.continuous_usage:
            last = chunks.pop()
            chunk["choices"][0] |= {**last["choices"][0], "finish_reason": reason}
            chunk = last | chunk
        chunks.append(chunk)

    def _progress_events(self, index: int, number: int, delta: StreamOutput) -> list[bytes]:
        """Return the prompt progress events: after the role chunk in a chat, else first."""
        events = self._begin(index, number, delta) if self.builder.chat else []
        for fields in self._progress[number].fields(delta.progress):
            events.append(self._event({**self.builder.chunk(index, ""), **fields}))
        return events

    def _chat(self, index: int, delta: StreamOutput) -> list[dict[str, Any]]:
        """Return a chunk per parsed event. The first one has the token ids and logprobs; their text
        may follow in later deltas, once the parser can classify it. A last token without text (EOS)
        has its logprobs in a chunk of its own: clients take a chunk's tokens for its text."""
        reader = self._readers[index]
        found = reader.feed(delta.text)
        if delta.finish_reason is not None:
            found += reader.finish()
        deltas = [delta_object(event, self.builder.uses_functions) for event in found]
        split = len(delta.token_ids)
        if delta.finish_reason == "stop" and not isinstance(delta.stop_reason, str):
            split -= 1
        own = (delta.logprobs or [])[:split], delta.token_ids[:split]
        last = (delta.logprobs or [])[split:], delta.token_ids[split:]
        if not deltas and (own[0] or (own[1] and self.builder.token_ids)):
            deltas = [{}]
        chunks = [(fields, own if not number else ([], [])) for number, fields in enumerate(deltas)]
        if last[0] or (last[1] and self.builder.token_ids):
            chunks.append(({}, last))
        return [
            self._timed(
                self.builder.chunk(
                    index, "", delta=fields, logprobs=logprobs or None, token_ids=token_ids or None
                )
            )
            for fields, (logprobs, token_ids) in chunks
        ]

    def _completion(self, index: int, delta: StreamOutput) -> list[dict[str, Any]]:
        if not (delta.text or delta.logprobs or (delta.token_ids and self.builder.token_ids)):
            return []
        chunk = self.builder.chunk(
            index,
            delta.text,
            logprobs=delta.logprobs,
            offsets=self._offsets[index],
            token_ids=delta.token_ids,
        )
        return [self._timed(chunk)]

    @staticmethod
    def _timings_of(output: RequestOutput, index: int) -> dict[str, Any]:
        return timings_object(output.outputs[index], len(output.prompt_token_ids))

    def _begin(self, index: int, number: int, delta: StreamOutput) -> list[bytes]:
        if self.open[index]:
            return []
        self.open[index] = True
        echo = self.echoes[number] if self.echoes else ""
        logprobs = self._echo_logprobs(delta.prompt_logprobs)
        start = len(echo) if logprobs is None else 0
        self._offsets[index] = offsets = TextOffsets(self.builder.names, start)
        if self.builder.chat:
            self._readers[index] = self.builder.new_reader(index)
            begin = {"role": "assistant", "content": "" if self.body.continuous_usage else None}
            first = self.builder.chunk(index, "", delta=begin)
            if self.builder.token_ids:
                first["prompt_token_ids"] = list(self._prompts[number])
            events = [self._event(first)]
            if echo:
                events.append(self._event(self.builder.chunk(index, "", delta={"content": echo})))
            return events
        if not echo:
            return []
        chunk = self.builder.chunk(index, echo, logprobs=logprobs, offsets=offsets)
        return [self._event(chunk)]

    def _timed(self, chunk: dict[str, Any]) -> dict[str, Any]:
        """Add the current timings if `timings_per_token` is set."""
        if self.body.timings_per_token:
            chunk["timings"] = self._stream_timings.object()
        return chunk

    def _event(self, chunk: dict[str, Any]) -> bytes:
        if self.body.continuous_usage:
            chunk["usage"] = usage_object(Usage(self._prompt_tokens, self._tokens))
        elif self.body.include_usage:
            chunk["usage"] = None
        return sse(chunk)

    def format_end(self, usage: Usage) -> list[bytes]:
        if not self.body.include_usage:
            return [DONE]
        return [sse({**self.builder.usage_chunk(usage), "timings": self._timings}), DONE]

    def format_error(self, error: ApiError) -> list[bytes]:
        """The error, then a chunk with finish_reason `error` for each unfinished choice."""
        events = [
            sse(self.builder.chunk(index, "", finish_reason="error")) for index in sorted(self.open)
        ]
        self.open.clear()
        return [sse(error.body(self.request_id)), *events, DONE]
