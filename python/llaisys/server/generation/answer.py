"""What a door makes of a generation: the one interface between the job and a door's own JSON."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

from llaisys.common.types import RequestOutput, StreamOutput, Usage
from llaisys.server.errors import ApiError

READ_COST = 8  # what it costs to read a character of an answer, in characters to write


class Answer(ABC):
    """How a door writes one generation, whole or in parts as they come. It makes bytes and nothing
    else: what is sent when, kept, counted and given back is the job's."""

    response_id: str
    media_type = "text/event-stream; charset=utf-8"  # of a stream; whole answers are JSON
    extra_chars = 0  # that `whole` writes beside the generated texts
    char_cost = 1  # of a generated character, where it is not only written

    @abstractmethod
    def whole(self, outputs: Sequence[RequestOutput], usage: Usage) -> Iterator[bytes]:
        """The body of an answer that has come to its end, by prompt, in pieces of which none takes
        long to make. Long ones are asked for in a thread."""

    @abstractmethod
    def chunks(self, number: int, part: StreamOutput) -> list[bytes]:
        """The events of the next part of prompt `number`. A part never ends with reason `error`:
        the job breaks off instead."""

    @abstractmethod
    def end(self, usage: Usage) -> list[bytes]:
        """What follows the last part."""

    @abstractmethod
    def break_off(self, error: ApiError) -> list[bytes]:
        """The end of a stream that failed on its way: what has begun is closed, with the error."""
