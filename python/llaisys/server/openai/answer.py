"""The answer of chat and completions: OpenAI's objects, whole or as server-sent events."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from llaisys.common.types import RequestOutput, StreamOutput, Usage
from llaisys.server.errors import ApiError
from llaisys.server.generation.answer import Answer
from llaisys.server.generation.job import Job
from llaisys.server.generation.token_names import TokenNames
from llaisys.server.http.payload import sse
from llaisys.server.openai.responses import DONE, ResponseBuilder, TextOffsets, usage_object


class OpenAIAnswer(Answer):
    """Every choice gets its chunks and exactly one with a finish_reason; a stream ends in [DONE].
    `echoes`: one per prompt, or none."""

    def __init__(
        self,
        job: Job,
        chat: bool,
        prompts: Sequence[Sequence[int]],
        n: int,
        echoes: Sequence[str] = (),
        session_id: str | None = None,
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
        )
        self.n = n
        self.echoes = echoes
        self.extra_chars = sum(map(len, echoes))
        self.open = dict.fromkeys(range(n * len(prompts)), False)  # choice -> has begun
        self._offsets: dict[int, TextOffsets] = {}
        self._prompt_tokens = sum(map(len, prompts))
        self._tokens = 0

    def whole(self, outputs: Sequence[RequestOutput], usage: Usage) -> Iterator[bytes]:
        choices = [
            (number * self.n + choice.index, choice, self.echoes[number] if self.echoes else "")
            for number, output in enumerate(outputs)
            for choice in output.outputs
        ]
        return self.builder.whole(choices, usage)

    def chunks(self, number: int, part: StreamOutput) -> list[bytes]:
        index = number * self.n + part.index
        events = self._begin(index, number)
        self._tokens += len(part.token_ids)
        if part.text or part.logprobs or (part.token_ids and self.builder.token_ids):
            events.append(self._event(self._content(index, part)))
        if part.finish_reason is not None:
            self.open.pop(index)
            chunk = self.builder.chunk(
                index, "", finish_reason=part.finish_reason, stop_reason=part.stop_reason
            )
            events.append(self._event(chunk))
        return events

    def _begin(self, index: int, number: int) -> list[bytes]:
        if self.open[index]:
            return []
        self.open[index] = True
        echo = self.echoes[number] if self.echoes else ""
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
            chunk["usage"] = usage_object(Usage(self._prompt_tokens, self._tokens))
        elif self.body.include_usage:
            chunk["usage"] = None
        return sse(chunk)

    def end(self, usage: Usage) -> list[bytes]:
        events = [sse(self.builder.usage_chunk(usage))] if self.body.include_usage else []
        return [*events, DONE]

    def break_off(self, error: ApiError) -> list[bytes]:
        """The error, then an end with `error` of each choice that has none."""
        events = [
            sse(self.builder.chunk(index, "", finish_reason="error")) for index in sorted(self.open)
        ]
        self.open.clear()
        return [sse(error.body(self.request_id)), *events, DONE]
