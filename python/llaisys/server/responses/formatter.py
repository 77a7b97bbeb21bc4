"""Formats answers as OpenAI's response object, whole or as events."""

import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from llaisys.chat.reader import AnswerReader
from llaisys.chat.records import ChatAnswer
from llaisys.common.types import CompletionOutput, PromptProgress, StreamOutput, Usage
from llaisys.server.errors import ApiError
from llaisys.server.generation.formatter import Block, BlockFormatter, text_logprobs
from llaisys.server.generation.timings import PromptProgressReporter, StreamTimings, timings_object
from llaisys.server.generation.token_names import TokenNames
from llaisys.server.http.response_bodies import json_bytes, named_event
from llaisys.server.responses.schemas import ResponsesRequest

PREFIXES = {Block.REASONING: "rs", Block.TEXT: "msg", Block.CALL: "fc"}
ERROR_CODES = {429: "rate_limit_exceeded"}
INCOMPLETE = {"length": "max_output_tokens", "timeout": "timeout"}  # by finish reason


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.total_tokens,
    }


class ResponsesFormatter(BlockFormatter):
    """Item ids contain the response id, so that references can be resolved."""

    def __init__(
        self,
        reader: AnswerReader,
        body: ResponsesRequest,
        model: str,
        defaults: Mapping[str, Any],
        request_id: str,
        context_truncated: bool,
        names: TokenNames,
        num_prompt_tokens: int,
    ) -> None:
        super().__init__(reader, names if body.chat.logprobs else None)
        self._logprobs: list[msgspec.Raw] = []  # of the open text block
        self._progress = PromptProgressReporter()
        self._timings = StreamTimings(num_prompt_tokens) if body.timings_per_token else None
        self._num_prompt_tokens = num_prompt_tokens
        self.key = uuid.uuid4().hex
        self.response_id = f"resp_{self.key}"
        self.request_id = request_id
        self.items: list[dict[str, Any]] = []  # completed
        self.complete: dict[str, Any] | None = None  # the response, when complete
        self.raw_prompt: tuple[str, list[int]] | None = None  # of `enable_response_messages`
        self._head = response_head(body, self.response_id, model, defaults)
        if body.drops_old_turns:
            self._head["context_truncated"] = context_truncated
        self._sequence = 0

    def _response(self, status: str, usage: Usage | None = None, **others: Any) -> dict[str, Any]:
        return {
            **self._head,
            "status": status,
            "output": list(self.items),
            "usage": None if usage is None else usage_object(usage),
            **others,
        }

    def snapshot(self, status: str) -> dict[str, Any]:
        """Return the response as it is now; `status`: of one that has not ended."""
        return self.complete if self.complete is not None else self._response(status)

    def format_cancelled(self) -> bytes:
        """Return the last event of a response that was cancelled by its id."""
        self.complete = self._response("cancelled")
        return self._sse_event("response.cancelled", response=self.complete)

    def _finished(self, output: CompletionOutput, usage: Usage) -> dict[str, Any]:
        if output.finish_reason in INCOMPLETE:
            details = {"reason": INCOMPLETE[output.finish_reason]}
            found = self._response("incomplete", usage, incomplete_details=details)
        elif output.finish_reason == "abort":
            found = self._response("cancelled", usage)
        else:
            found = self._response("completed", usage, completed_at=int(time.time()))
        if self.raw_prompt is not None:
            found["input_messages"] = [raw_message(*self.raw_prompt)]
            found["output_messages"] = [raw_message(output.text, output.token_ids)]
        self.complete = found
        return found

    def format_not_stored(self) -> bytes:
        """Format the last bytes again, the body or the last event, with `store` false."""
        assert self.complete is not None
        self.complete["store"] = False
        if self._sequence == 0:
            return json_bytes(self.complete)
        self._sequence -= 1
        return self._last_event(self.complete)

    def stored(self) -> dict[str, Any]:
        """Return the complete response as it is stored: without logprobs."""
        assert self.complete is not None
        items = [
            {**item, "content": [{**part, "logprobs": []} for part in item["content"]]}
            if item["type"] == "message"
            else item
            for item in self.items
        ]
        return {**self.complete, "output": items}

    # ---- items ---------------------------------------------------------------------------------

    def _id(self, block: Block) -> str:
        return f"{PREFIXES[block]}_{self.key}_{len(self.items)}"

    def _item(self, block: Block, text: str, status: str, call: Any = None) -> dict[str, Any]:
        item: dict[str, Any] = {"id": self._id(block), "status": status}
        if block is Block.REASONING:
            content = [{"type": "reasoning_text", "text": text}] if text else []
            return {**item, "type": "reasoning", "summary": [], "content": content}
        if block is Block.CALL:
            names = {"call_id": call.id, "name": call.name, "arguments": text}
            return {**item, "type": "function_call", **names}
        content = [part_of(block, text, self._logprobs)] if status != "in_progress" else []
        return {**item, "type": "message", "role": "assistant", "content": content}

    def body(self, answer: ChatAnswer, output: CompletionOutput, usage: Usage) -> dict[str, Any]:
        status = "incomplete" if output.finish_reason == "length" else "completed"
        if answer.reasoning:
            self.items.append(self._item(Block.REASONING, answer.reasoning, status))
        self._logprobs = self.logprob_entries(text_logprobs(output)[usage.reasoning_tokens :])
        if answer.content or not answer.tool_calls:
            self.items.append(self._item(Block.TEXT, answer.content, status))
        for call in answer.tool_calls:
            self.items.append(self._item(Block.CALL, call.arguments, status, call))
        return self._finished(output, usage)

    # ---- events --------------------------------------------------------------------------------

    def _sse_event(self, kind: str, **fields: Any) -> bytes:
        number, self._sequence = self._sequence, self._sequence + 1
        return named_event(kind, {"type": kind, "sequence_number": number, **fields})

    def _item_event(self, kind: str, **fields: Any) -> bytes:
        """Return an event of the open item."""
        assert self.block is not None
        item = {"item_id": self._id(self.block), "output_index": len(self.items)}
        return self._sse_event(kind, **item, **fields)

    def begin(self) -> list[bytes]:
        response = self._response("in_progress")
        return [
            self._sse_event("response.created", response=response),
            self._sse_event("response.in_progress", response=response),
        ]

    def open_block(self, block: Block) -> list[bytes]:
        self.block = block
        item = self._item(block, "", "in_progress", self.call)
        found = [
            self._sse_event("response.output_item.added", output_index=len(self.items), item=item)
        ]
        if block is not Block.CALL:
            part = part_of(block, "", [])
            found.append(
                self._item_event("response.content_part.added", content_index=0, part=part)
            )
        return found

    def progress(self, progress: PromptProgress) -> list[bytes]:
        response = self._response("in_progress")
        return [
            self._sse_event("response.in_progress", response=response, **fields)
            for fields in self._progress.fields(progress)
        ]

    def format_delta(self, number: int, delta: StreamOutput) -> Iterator[bytes]:
        if self._timings is not None:
            self._timings.add(len(delta.token_ids))
        return super().format_delta(number, delta)

    def add(self, block: Block, text: str) -> list[bytes]:
        logprobs = self.take_logprobs()
        if block is Block.TEXT:
            self._logprobs += logprobs
            more: dict[str, Any] = {"content_index": 0, "logprobs": logprobs}
            if self._timings is not None:
                more["timings"] = self._timings.object()
            return [self._item_event("response.output_text.delta", delta=text, **more)]
        if block is Block.REASONING:
            return [self._item_event("response.reasoning_text.delta", delta=text, content_index=0)]
        return [self._item_event("response.function_call_arguments.delta", delta=text)]

    def close_block(self, block: Block) -> Iterator[bytes]:
        text, index = self.text, {"content_index": 0}
        done: dict[str, Any]
        if block is Block.CALL:
            assert self.call is not None
            done = {"arguments": text, "name": self.call.name}
            yield self._item_event("response.function_call_arguments.done", **done)
        else:
            kind = "output_text" if block is Block.TEXT else "reasoning_text"
            done = {"text": text, **index}
            if block is Block.TEXT:
                done["logprobs"] = self._logprobs
            part = part_of(block, text, self._logprobs)
            yield self._item_event(f"response.{kind}.done", **done)
            yield self._item_event("response.content_part.done", part=part, **index)
        item = self._item(block, text, "incomplete" if self.was_cut else "completed", self.call)
        yield self._sse_event("response.output_item.done", output_index=len(self.items), item=item)
        self.items.append(item)
        self._logprobs = []

    def close(self, output: CompletionOutput, usage: Usage) -> Iterator[bytes]:
        if not self.items:  # empty answer: an empty message
            yield from self.open_block(Block.TEXT)
            yield from self.end_block()
        yield self._last_event(self._finished(output, usage))

    def _last_event(self, response: dict[str, Any]) -> bytes:
        is_complete = response["status"] == "completed"
        kind = "response.completed" if is_complete else "response.incomplete"
        more = {}
        if self._timings is not None and self.output is not None:
            more["timings"] = timings_object(self.output, self._num_prompt_tokens)
        return self._sse_event(kind, response=response, **more)

    def format_error(self, error: ApiError) -> list[bytes]:
        code = ERROR_CODES.get(error.status, "server_error")
        details = {"code": code, "message": error.message}
        self.complete = self._response("failed", error=details)
        return [self._sse_event("response.failed", response=self.complete)]


def raw_message(text: str, token_ids: list[int]) -> dict[str, Any]:
    """Return vLLM's object with a prompt or an answer before it is parsed."""
    return {"type": "raw_message_tokens", "message": text, "tokens": token_ids}


def part_of(block: Block, text: str, logprobs: list[msgspec.Raw]) -> dict[str, Any]:
    if block is Block.TEXT:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
    return {"type": "reasoning_text", "text": text}


def response_head(
    body: ResponsesRequest, response_id: str, model: str, defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the response fields that repeat the request, with defaults."""
    format: dict[str, Any] = {"type": "text"}
    if body.text is not None and body.text.format is not None:
        format = body.text.format.model_dump(by_alias=True, exclude_none=True)
    effort = None if body.reasoning is None else body.reasoning.effort
    numbers = {
        name: getattr(body, name) if getattr(body, name) is not None else defaults.get(name, 1.0)
        for name in ("temperature", "top_p")
    }
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": bool(body.background),
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": effort, "summary": None},
        "service_tier": "default",
        "store": body.store is not False,
        **numbers,
        "text": {"format": format},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_logprobs": body.top_logprobs or 0,
        "truncation": "auto" if body.drops_old_turns else "disabled",
        "usage": None,
        "user": body.user,
        "metadata": body.metadata or {},
    }
