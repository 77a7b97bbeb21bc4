"""The interface of protocol adapters that formats the output of a generation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence

from llaisys.common.types import RequestOutput, StreamOutput, Usage
from llaisys.server.errors import ApiError

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

    @abstractmethod
    def format_end(self, usage: Usage) -> list[bytes]:
        """Return the events after the last delta."""

    @abstractmethod
    def format_error(self, error: ApiError) -> list[bytes]:
        """Return the events that end a failed stream: close open blocks, then the error."""
