"""Ollama's answers: an object, or a line of JSON for each part."""

from __future__ import annotations

import time
import uuid
from datetime import UTC, datetime
from typing import Any

from llaisys.chat.history import as_object
from llaisys.chat.reader import AnswerReader
from llaisys.chat.records import ChatAnswer
from llaisys.common.types import CompletionOutput, Usage
from llaisys.server.errors import ApiError
from llaisys.server.generation.single_answer import Block, SingleAnswer
from llaisys.server.http.payload import json_bytes


def error_body(error: ApiError, request_id: str | None) -> dict[str, Any]:
    return {"error": error.message}


def now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def nanoseconds(seconds: float | None) -> int:
    return int(1e9 * max(0.0, seconds or 0.0))


def call_object(name: str, arguments: str) -> dict[str, Any]:
    given = as_object(arguments)
    if not isinstance(given, dict):  # cut off, or a mistake of the model
        given = {"arguments": given}
    return {"function": {"name": name, "arguments": given}}


class OllamaAnswer(SingleAnswer):
    """Of /api/chat, or with `chat` false of /api/generate."""

    media_type = "application/x-ndjson"

    def __init__(self, reader: AnswerReader, model: str, chat: bool) -> None:
        super().__init__(reader)
        self.response_id = f"ollama-{uuid.uuid4().hex}"
        self.model = model
        self.chat = chat
        self.started = time.monotonic()

    def _part(
        self, text: str = "", thinking: str = "", calls: list[dict[str, Any]] | None = None
    ) -> dict[str, Any]:
        part: dict[str, Any] = {"model": self.model, "created_at": now()}
        said: dict[str, Any] = {}
        if thinking:
            said["thinking"] = thinking
        if calls:
            said["tool_calls"] = calls
        if self.chat:
            part["message"] = {"role": "assistant", "content": text, **said}
        else:
            part |= {"response": text, **said}
        return {**part, "done": False}

    def _line(self, **said: Any) -> bytes:
        return json_bytes(self._part(**said)) + b"\n"

    def _end(self, output: CompletionOutput, usage: Usage) -> dict[str, Any]:
        times, total = output.timings, time.monotonic() - self.started
        first = times.first_token or 0.0
        return {
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
        part = self._part(answer.content, answer.reasoning, calls)
        return part | self._end(output, usage)

    def begin(self) -> list[bytes]:
        return []

    def open_block(self, block: Block) -> list[bytes]:
        return []

    def add(self, block: Block, text: str) -> list[bytes]:
        if block is Block.CALL:
            return []  # calls are sent whole
        return [self._line(thinking=text) if block is Block.REASONING else self._line(text=text)]

    def close_block(self, block: Block) -> list[bytes]:
        if self.call is None:
            return []
        return [self._line(calls=[call_object(self.call.name, self.text)])]

    def close(self, output: CompletionOutput, usage: Usage) -> list[bytes]:
        return [json_bytes(self._part() | self._end(output, usage)) + b"\n"]

    def break_off(self, error: ApiError) -> list[bytes]:
        return [json_bytes(error_body(error, None)) + b"\n"]
