"""Answers of APIs with one choice and typed blocks: reasoning, text, tool calls."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Any

from llaisys.chat.reader import AnswerReader
from llaisys.chat.records import (
    AnswerEvent,
    CallArguments,
    CallStart,
    ChatAnswer,
    ContentText,
    ReasoningText,
)
from llaisys.common.types import (
    CompletionOutput,
    PromptProgress,
    RequestOutput,
    StreamOutput,
    TokenLogprobs,
    Usage,
)
from llaisys.server.generation.formatter import PARSE_COST, AnswerFormatter
from llaisys.server.http.payload import json_bytes


class Block(Enum):
    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


class BlockFormatter(AnswerFormatter):
    """Parses the generated text into blocks, one open at a time. Subclasses format the events that
    open, extend and close a block; `begin` is called first, `close` last."""

    char_cost = PARSE_COST

    def __init__(self, reader: AnswerReader) -> None:
        self.reader = reader
        self.block: Block | None = None  # the open one
        self.call: CallStart | None = None  # of an open CALL block
        self.text = ""  # of the open block
        self.output: CompletionOutput | None = None  # when complete
        self._begun = False
        self.was_cut = False  # finish reason `length`
        self._new_logprobs: list[TokenLogprobs] = []  # of a stream, not taken yet

    # ---- formatting, by subclasses -------------------------------------------------------------

    @abstractmethod
    def body(self, answer: ChatAnswer, output: CompletionOutput, usage: Usage) -> dict[str, Any]:
        """Return the response object."""

    @abstractmethod
    def begin(self) -> list[bytes]: ...

    @abstractmethod
    def open_block(self, block: Block) -> list[bytes]:
        """`self.call` is set for a CALL block."""

    @abstractmethod
    def add(self, block: Block, text: str) -> list[bytes]: ...

    @abstractmethod
    def close_block(self, block: Block) -> list[bytes]:
        """`self.text` is the whole text of the block."""

    @abstractmethod
    def close(self, output: CompletionOutput, usage: Usage) -> list[bytes]: ...

    def progress(self, progress: PromptProgress) -> list[bytes]:
        """Format the prompt progress, which is reported if the request asks for it."""
        return []

    # ---- interface of AnswerFormatter ----------------------------------------------------------

    def format_whole(self, outputs: Sequence[RequestOutput], usage: Usage) -> Iterator[bytes]:
        output = outputs[0].outputs[0]
        self.output = output
        yield json_bytes(self.body(self.reader.read(output.text), output, usage))

    def format_delta(self, number: int, delta: StreamOutput) -> list[bytes]:
        found = self._begin()
        self._new_logprobs += text_logprobs(delta)
        if delta.progress is not None:
            found += self.progress(delta.progress)
        self.was_cut = delta.finish_reason == "length"
        events = self.reader.feed(delta.text)
        if delta.finish_reason is not None:
            events += self.reader.finish()
        for event in events:
            found += self._event(event)
        if delta.finish_reason is not None:
            found += self.end_block()
        if delta.output is not None:
            self.output = delta.output.outputs[0]
            found += self.close(self.output, delta.output.usage)
        return found

    def format_end(self, usage: Usage) -> list[bytes]:
        return []  # `close` has written the last events

    def take_logprobs(self) -> list[TokenLogprobs]:
        """Return the logprobs of a stream since the last call. Their text may be part of a later
        delta."""
        found, self._new_logprobs = self._new_logprobs, []
        return found

    def end_block(self) -> list[bytes]:
        """Close the open block, if there is one."""
        if self.block is None:
            return []
        found = self.close_block(self.block)
        self.block, self.call, self.text = None, None, ""
        return found

    def _begin(self) -> list[bytes]:
        if self._begun:
            return []
        self._begun = True
        return self.begin()

    def _event(self, event: AnswerEvent) -> list[bytes]:
        if isinstance(event, CallStart):
            found = self.end_block()
            self.block, self.call = Block.CALL, event
            return found + self.open_block(Block.CALL)
        kind = BLOCKS[type(event)]
        found = []
        if kind is not self.block:
            found = self.end_block()
            self.block = kind
            found += self.open_block(kind)
        self.text += event.text
        return found + self.add(kind, event.text)


def text_logprobs(source: CompletionOutput | StreamOutput) -> list[TokenLogprobs]:
    """Return the logprobs without that of a stop token, which has no text."""
    entries = source.logprobs or []
    is_token = source.finish_reason == "stop" and not isinstance(source.stop_reason, str)
    return entries[:-1] if is_token else entries


BLOCKS: dict[type[AnswerEvent], Block] = {
    ReasoningText: Block.REASONING,
    ContentText: Block.TEXT,
    CallArguments: Block.CALL,
}
