"""Formats answers as Ollama's object, or as a line of JSON per delta."""

import time
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from llaisys.chat.reader import AnswerReader
from llaisys.chat.records import ChatAnswer
from llaisys.common.types import CompletionOutput, Usage
from llaisys.server.errors import ApiError
from llaisys.server.generation.formatter import (
    Block,
    BlockFormatter,
    arguments_object,
    text_logprobs,
)
from llaisys.server.generation.token_names import TokenNames
from llaisys.server.http.response_bodies import json_bytes


def error_body(error: ApiError, request_id: str | None) -> dict[str, Any]:
    return {"error": error.message}


def stamp(seconds: float | None = None) -> str:
    """Return a time; None: now."""
    seconds = time.time() if seconds is None else seconds
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def nanoseconds(seconds: float | None) -> int:
    return int(1e9 * max(0.0, seconds or 0.0))


def call_object(name: str, arguments: str) -> dict[str, Any]:
    return {"function": {"name": name, "arguments": arguments_object(arguments)}}


class OllamaFormatter(BlockFormatter):
    """Answers of /api/chat, or of /api/generate when `chat` is false."""

    media_type = "application/x-ndjson"

    def __init__(
        self,
        reader: AnswerReader,
        model: str,
        chat: bool,
        names: TokenNames | None = None,
        prompt: Sequence[int] | None = None,
    ) -> None:
        """`names`: for logprobs, if requested; `prompt`: start of the returned context."""
        super().__init__(reader, names)
        self.prompt = prompt
        self.response_id = f"ollama-{uuid.uuid4().hex}"
        self.model = model
        self.chat = chat
        self.started = time.monotonic()

    def _object(
        self, text: str = "", thinking: str = "", calls: list[dict[str, Any]] | None = None
    ) -> dict[str, Any]:
        found: dict[str, Any] = {"model": self.model, "created_at": stamp()}
        fields: dict[str, Any] = {}
        if thinking:
            fields["thinking"] = thinking
        if calls:
            fields["tool_calls"] = calls
        if self.chat:
            found["message"] = {"role": "assistant", "content": text, **fields}
        else:
            found |= {"response": text, **fields}
        return {**found, "done": False}

    def _line(self, **fields: Any) -> bytes:
        return json_bytes(self._object(**fields) | self._taken_logprobs()) + b"\n"

    def _taken_logprobs(self) -> dict[str, Any]:
        entries = self.take_logprobs()
        return {"logprobs": entries} if entries else {}

    def _end(self, output: CompletionOutput, usage: Usage) -> dict[str, Any]:
        times, total = output.timings, time.monotonic() - self.started
        first = times.first_token or 0.0
        context: dict[str, Any] = {}
        if self.prompt is not None:
            context["context"] = [*self.prompt, *output.token_ids]
        return {
            **context,
            "done": True,
            "done_reason": "length" if output.finish_reason == "length" else "stop",
            "total_duration": nanoseconds(total),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": nanoseconds(first - (times.queue or 0.0)),
            "eval_count": usage.completion_tokens,
            "eval_duration": nanoseconds((times.total or total) - first),
        }

    def body(self, answer: ChatAnswer, output: CompletionOutput, usage: Usage) -> dict[str, Any]:
        calls = [call_object(call.name, call.arguments) for call in answer.tool_calls]
        found = self._object(answer.content, answer.reasoning, calls)
        entries = self.logprob_entries(text_logprobs(output))
        return found | ({"logprobs": entries} if entries else {}) | self._end(output, usage)

    def add(self, block: Block, text: str) -> list[bytes]:
        if block is Block.CALL:
            return []  # a call is sent as a whole
        return [self._line(thinking=text) if block is Block.REASONING else self._line(text=text)]

    def close_block(self, block: Block) -> list[bytes]:
        if self.call is None:
            return []
        return [self._line(calls=[call_object(self.call.name, self.text)])]

    def close(self, output: CompletionOutput, usage: Usage) -> list[bytes]:
        end = self._taken_logprobs() | self._end(output, usage)
        return [json_bytes(self._object() | end) + b"\n"]

    def format_error(self, error: ApiError) -> list[bytes]:
        return [json_bytes(error_body(error, None)) + b"\n"]
