"""Formats answers as Anthropic's message, whole or as events."""

import uuid
from typing import Any

from llaisys.chat.reader import AnswerReader
from llaisys.chat.records import ChatAnswer
from llaisys.common.types import CompletionOutput, Usage
from llaisys.server.errors import ApiError
from llaisys.server.generation.formatter import Block, BlockFormatter, arguments_object
from llaisys.server.http.response_bodies import named_event

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_body(error: ApiError, request_id: str | None) -> dict[str, Any]:
    default = "api_error" if error.status >= 500 else "invalid_request_error"
    kind = TYPES.get(error.status, default)
    return {
        "type": "error",
        "error": {"type": kind, "message": error.message},
        "request_id": request_id,
    }


def usage_object(usage: Usage) -> dict[str, Any]:
    """Return Anthropic's usage object, which counts cached tokens separately."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


class AnthropicFormatter(BlockFormatter):
    def __init__(self, reader: AnswerReader, model: str, prompt_tokens: int, request_id: str):
        super().__init__(reader)
        self.response_id = f"msg_{uuid.uuid4().hex}"
        self.model = model
        self.prompt_tokens = prompt_tokens
        self.request_id = request_id
        self.index = -1  # of the open block

    def _message(
        self, content: list[dict[str, Any]], usage: Usage, end: dict[str, Any] | None
    ) -> dict[str, Any]:
        return {
            "id": self.response_id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            **(end or {"stop_reason": None, "stop_sequence": None}),
            "usage": usage_object(usage),
        }

    def _end(self, output: CompletionOutput) -> dict[str, Any]:
        sequence = output.stop_reason if isinstance(output.stop_reason, str) else None
        reason = "end_turn"
        if output.finish_reason == "length":
            reason = "max_tokens"
        elif self.reader.has_calls:
            reason = "tool_use"
        elif sequence is not None:
            reason = "stop_sequence"
        return {
            "stop_reason": reason,
            "stop_sequence": sequence if reason == "stop_sequence" else None,
        }

    def body(self, answer: ChatAnswer, output: CompletionOutput, usage: Usage) -> dict[str, Any]:
        content: list[dict[str, Any]] = []
        if answer.reasoning:
            content.append({"type": "thinking", "thinking": answer.reasoning, "signature": ""})
        if answer.content or not answer.tool_calls:
            content.append({"type": "text", "text": answer.content})
        for call in answer.tool_calls:
            given = arguments_object(call.arguments)
            content.append({"type": "tool_use", "id": call.id, "name": call.name, "input": given})
        return self._message(content, usage, self._end(output))

    def _sse_event(self, kind: str, **fields: Any) -> bytes:
        return named_event(kind, {"type": kind, **fields})

    def begin(self) -> list[bytes]:
        message = self._message([], Usage(self.prompt_tokens, 0), None)
        return [self._sse_event("message_start", message=message), self._sse_event("ping")]

    def open_block(self, block: Block) -> list[bytes]:
        self.index += 1
        content: dict[str, Any] = {"type": "text", "text": ""}
        if block is Block.REASONING:
            content = {"type": "thinking", "thinking": "", "signature": ""}
        elif self.call is not None:
            content = {
                "type": "tool_use",
                "id": self.call.id,
                "name": self.call.name,
                "input": {},
            }
        return [self._sse_event("content_block_start", index=self.index, content_block=content)]

    def add(self, block: Block, text: str) -> list[bytes]:
        delta = {"type": "text_delta", "text": text}
        if block is Block.REASONING:
            delta = {"type": "thinking_delta", "thinking": text}
        elif block is Block.CALL:
            delta = {"type": "input_json_delta", "partial_json": text}
        return [self._sse_event("content_block_delta", index=self.index, delta=delta)]

    def close_block(self, block: Block) -> list[bytes]:
        return [self._sse_event("content_block_stop", index=self.index)]

    def close(self, output: CompletionOutput, usage: Usage) -> list[bytes]:
        found = []
        if self.index < 0:  # empty answer: clients expect a block
            found = [*self.open_block(Block.TEXT), *self.close_block(Block.TEXT)]
        return [
            *found,
            self._sse_event("message_delta", delta=self._end(output), usage=usage_object(usage)),
            self._sse_event("message_stop"),
        ]

    def format_error(self, error: ApiError) -> list[bytes]:
        return [named_event("error", error_body(error, self.request_id))]
