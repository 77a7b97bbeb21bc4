"""The interface of protocol adapters that formats the output of a generation, and the base of those
with one choice and typed blocks: reasoning, text, tool calls."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from typing import Any

import msgspec

from llaisys.chat.history import as_object
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
from llaisys.server.errors import ApiError
from llaisys.server.generation.token_names import TokenNames, chat_logprobs
from llaisys.server.http.response_bodies import encoded, json_bytes

PARSE_COST = 8  # CPU cost of parsing a generated character, in written characters


class AnswerFormatter(ABC):
    """Formats one generation, whole or as a stream of events. It only makes bytes; `Job` sends,
    stores and counts them and releases resources."""

    response_id: str
    media_type = "text/event-stream; charset=utf-8"  # of a stream; a whole response is JSON
    extra_chars = 0  # written by `format_whole` besides the generated text
    char_cost = 1  # cost of a generated character in written characters

    @abstractmethod
    def format_whole(self, outputs: Sequence[RequestOutput], usage: Usage) -> Iterator[bytes]:
        """Yield the response body of a complete generation in pieces that are each cheap to make.
        `outputs` has one entry per prompt. Long answers are formatted in a thread."""

    @abstractmethod
    def format_delta(self, number: int, delta: StreamOutput) -> Iterable[bytes]:
        """Return the events of the next delta of prompt `number`, as an iterator if they are many.
        The finish reason is never `error`: `Job` calls `format_error` instead."""

    def format_end(self, usage: Usage) -> list[bytes]:
        """Return the events after the last delta."""
        return []

    @abstractmethod
    def format_error(self, error: ApiError) -> list[bytes]:
        """Return the events that end a failed stream: close open blocks, then the error."""


class Block(Enum):
    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


class BlockFormatter(AnswerFormatter):
    """Parses the generated text into blocks, one open at a time. Subclasses format the events that
    open, extend and close a block; `begin` is called first, `close` last."""

    char_cost = PARSE_COST

    def __init__(self, reader: AnswerReader, names: TokenNames | None = None) -> None:
        """`names`: for logprobs, if requested."""
        self.reader = reader
        self.names = names
        self.block: Block | None = None  # the open one
        self.call: CallStart | None = None  # of an open CALL block
        self.text = ""  # of the open block
        self.output: CompletionOutput | None = None  # when complete
        self._begun = False
        self.was_cut = False  # finish reason `length`
        # Of a stream, not taken yet. Encoded when they arrive, a few per step: later events that
        # repeat all of them only copy bytes.
        self._new_logprobs: list[msgspec.Raw] = []

    # ---- formatting, by subclasses -------------------------------------------------------------

    @abstractmethod
    def body(self, answer: ChatAnswer, output: CompletionOutput, usage: Usage) -> dict[str, Any]:
        """Return the response object."""

    def begin(self) -> list[bytes]:
        return []

    def open_block(self, block: Block) -> list[bytes]:
        """`self.call` is set for a CALL block."""
        return []

    @abstractmethod
    def add(self, block: Block, text: str) -> list[bytes]: ...

    @abstractmethod
    def close_block(self, block: Block) -> Iterable[bytes]:
        """`self.text` is the whole text of the block."""

    @abstractmethod
    def close(self, output: CompletionOutput, usage: Usage) -> Iterable[bytes]: ...

    def progress(self, progress: PromptProgress) -> list[bytes]:
        """Format the prompt progress, which is reported if the request asks for it."""
        return []

    # ---- interface of AnswerFormatter ----------------------------------------------------------

    def format_whole(self, outputs: Sequence[RequestOutput], usage: Usage) -> Iterator[bytes]:
        output = outputs[0].outputs[0]
        self.output = output
        yield json_bytes(self.body(self.reader.read(output.text), output, usage))

    def format_delta(self, number: int, delta: StreamOutput) -> Iterator[bytes]:
        yield from self._begin()
        self._new_logprobs += self.logprob_entries(text_logprobs(delta))
        if delta.progress is not None:
            yield from self.progress(delta.progress)
        self.was_cut = delta.finish_reason == "length"
        events = self.reader.feed(delta.text)
        if delta.finish_reason is not None:
            events += self.reader.finish()
        for event in events:
            yield from self._event(event)
        if delta.finish_reason is not None:
            yield from self.end_block()
        if delta.output is not None:
            self.output = delta.output.outputs[0]
            yield from self.close(self.output, delta.output.usage)

    def logprob_entries(self, logprobs: Sequence[TokenLogprobs]) -> list[msgspec.Raw]:
        """Return the encoded logprob object of each token; none if not requested."""
        if self.names is None:
            return []
        found: list[msgspec.Raw] = []
        for entry in logprobs:
            objects: Any = chat_logprobs([entry], self.names)
            found.append(encoded(objects["content"][0]))
        return found

    def take_logprobs(self) -> list[msgspec.Raw]:
        """Return the logprobs of a stream since the last call. Their text may be part of a later
        delta."""
        found, self._new_logprobs = self._new_logprobs, []
        return found

    def end_block(self) -> Iterator[bytes]:
        if self.block is not None:
            yield from self.close_block(self.block)
            self.block, self.call, self.text = None, None, ""

    def _begin(self) -> list[bytes]:
        if self._begun:
            return []
        self._begun = True
        return self.begin()

    def _event(self, event: AnswerEvent) -> Iterator[bytes]:
        if isinstance(event, CallStart):
            yield from self.end_block()
            self.block, self.call = Block.CALL, event
            yield from self.open_block(Block.CALL)
            return
        kind = BLOCKS[type(event)]
        if kind is not self.block:
            yield from self.end_block()
            self.block = kind
            yield from self.open_block(kind)
        self.text += event.text
        yield from self.add(kind, event.text)


def arguments_object(arguments: str) -> dict[str, Any]:
    """Return the arguments of a call; truncated or malformed ones as a text in an object."""
    given = as_object(arguments)
    return given if isinstance(given, dict) else {"arguments": given}


def is_text(delta: StreamOutput) -> bool:
    """Whether a delta has nothing but tokens and their text."""
    return delta.finish_reason is None and delta.logprobs is None and delta.progress is None


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
