"""Formats answers of /completion as llama.cpp's object, or as events without [DONE]."""

import math
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from llaisys.common.sampling import SamplingParams
from llaisys.common.types import CompletionOutput, RequestOutput, StreamOutput, TokenLogprobs, Usage
from llaisys.server.errors import ApiError
from llaisys.server.generation.formatter import AnswerFormatter
from llaisys.server.generation.job import Job
from llaisys.server.generation.llama_object import FinalObject
from llaisys.server.generation.timings import PromptProgressReporter, StreamTimings
from llaisys.server.generation.token_names import TokenNames
from llaisys.server.http.response_bodies import json_bytes, sse
from llaisys.server.llamacpp.schemas import LlamaSampling

LOGPROBS_PER_CHUNK = 64


class LlamaFormatter(AnswerFormatter):
    """One object per prompt and choice; several are a list."""

    def __init__(
        self,
        job: Job,
        body: LlamaSampling,
        objects: Sequence[FinalObject],
        params: SamplingParams,
    ) -> None:
        self.request_id = job.request_id
        self.response_id = f"llama-{body.request_id or uuid.uuid4().hex}"
        self.body = body
        self.params = params
        self._objects = objects  # of the prompts
        self.names = TokenNames(job.service.engine.tokenizer)
        self.extra_chars = sum(len(found.prompt) for found in objects)
        self._id_slot = -1 if body.id_slot is None else body.id_slot
        self._sent: dict[int, int] = {}  # choice -> sent tokens
        with_timings = bool(body.timings_per_token)
        self._progress = [PromptProgressReporter(with_timings) for _ in objects]
        self._timings = [StreamTimings(found.num_prompt_tokens) for found in objects]

    def format_whole(self, outputs: Sequence[RequestOutput], usage: Usage) -> Iterator[bytes]:
        several = len(outputs) * self.params.n > 1
        if several:
            yield b"["
        for number, output in enumerate(outputs):
            for choice in output.outputs:
                if number or choice.index:
                    yield b","
                yield from self._object(number, choice)
        if several:
            yield b"]"

    def _object(self, number: int, output: CompletionOutput) -> Iterator[bytes]:
        final = self._final(number, output, output.text)
        final["tokens"] = output.token_ids if self.body.return_tokens else []
        yield json_bytes(self._selected(final))[:-1]
        if output.logprobs is not None and self.body.shows("completion_probabilities"):
            yield b',"completion_probabilities":['
            for start in range(0, len(output.logprobs), LOGPROBS_PER_CHUNK):
                block = output.logprobs[start : start + LOGPROBS_PER_CHUNK]
                text = json_bytes([self._probabilities(entry) for entry in block])
                yield (b"," if start else b"") + text[1:-1]
            yield b"]"
        yield b"}"

    def _final(self, number: int, output: CompletionOutput, text: str) -> dict[str, Any]:
        found = self._objects[number].of(output, text, number * self.params.n + output.index)
        return {**found, "id_slot": self._id_slot}

    def _selected(self, final: dict[str, Any]) -> dict[str, Any]:
        """Return the `response_fields`; "a/b" is field b of a. Missing ones are omitted."""
        if not self.body.response_fields:
            return final
        found = {}
        for path in self.body.response_fields:
            outer, _, inner = path.partition("/")
            value = final.get(outer)
            if inner and isinstance(value, dict) and inner in value:
                found[path] = value[inner]
            elif not inner and outer in final:
                found[path] = value
        return found

    def _probabilities(self, entry: TokenLogprobs) -> dict[str, Any]:
        is_post = self.params.post_sampling_probs

        def entry_object(token_id: int, logprob: float) -> dict[str, Any]:
            named = self.names.entry(token_id, logprob)
            if is_post:
                del named["logprob"]
                named["prob"] = math.exp(logprob)
            return {"id": token_id, **named}

        top = [entry_object(token, value) for token, value in entry.top]
        name = "top_probs" if is_post else "top_logprobs"
        return {**entry_object(entry.token_id, entry.logprob), name: top}

    def format_delta(self, number: int, delta: StreamOutput) -> Iterator[bytes]:
        index = number * self.params.n + delta.index
        self._sent[index] = self._sent.get(index, 0) + len(delta.token_ids)
        self._timings[number].add(len(delta.token_ids))
        for fields in self._progress[number].fields(delta.progress):
            yield sse(self._chunk(number, index, "", []) | fields)
        if delta.text or delta.logprobs or (delta.token_ids and delta.finish_reason is None):
            chunk = self._chunk(number, index, delta.text, delta.token_ids)
            if delta.logprobs:
                probabilities = [self._probabilities(entry) for entry in delta.logprobs]
                chunk["completion_probabilities"] = probabilities
            yield sse(chunk)
        if delta.output is not None:
            for output in delta.output.outputs:
                yield sse(self._selected(self._final(number, output, "")))

    def _chunk(self, number: int, index: int, text: str, tokens: list[int]) -> dict[str, Any]:
        chunk: dict[str, Any] = {
            "index": index,
            "content": text,
            "tokens": tokens,
            "stop": False,
            "id_slot": self._id_slot,
            "tokens_predicted": self._sent[index],
            "tokens_evaluated": self._objects[number].num_prompt_tokens,
        }
        if self.body.timings_per_token:
            chunk["timings"] = self._timings[number].object()
        return chunk

    def format_error(self, error: ApiError) -> list[bytes]:
        return [sse(error.body(self.request_id))]
