"""`AnswerReader`: splits a streamed answer into reasoning, content and tool calls."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import groupby

from llaisys.chat.reasoning import ReasoningSplitter
from llaisys.chat.records import (
    AnswerEvent,
    CallStart,
    ChatAnswer,
    ContentText,
    ReasoningText,
    ToolCall,
)
from llaisys.chat.repeats import RepeatFilter
from llaisys.chat.tool_formats.base import ToolCallParser


class AnswerReader:
    """Parser of one choice. `feed` and `finish` return new events; `answer` is the whole answer so
    far. Without a splitter there is no reasoning, without a parser no tool calls. `repeats` ends
    the answer at a repeated call."""

    def __init__(
        self,
        splitter: ReasoningSplitter | None = None,
        parser: ToolCallParser | None = None,
        keep_reasoning: bool = True,
        repeats: RepeatFilter | None = None,
    ) -> None:
        self._splitter = splitter
        self._parser = parser
        self._keep_reasoning = keep_reasoning
        self._repeats = repeats
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[tuple[CallStart, list[str]]] = []

    def feed(self, text: str) -> list[AnswerEvent]:
        events: list[AnswerEvent] = [ContentText(text)] if text else []
        if self._splitter is not None:
            events = self._splitter.feed(text)
        return self._record(self._parsed(events))

    def finish(self) -> list[AnswerEvent]:
        events = [] if self._splitter is None else self._splitter.finish()
        events = self._parsed(events)
        if self._parser is not None:
            events += self._parser.finish()
        return self._record(events, ends=True)

    def read(self, text: str) -> ChatAnswer:
        """Parse a complete answer."""
        self.feed(text)
        self.finish()
        return self.answer

    @property
    def answer(self) -> ChatAnswer:
        calls = [ToolCall(start.id, start.name, "".join(rest)) for start, rest in self._calls]
        return ChatAnswer("".join(self._content), "".join(self._reasoning), calls)

    @property
    def has_calls(self) -> bool:
        return bool(self._calls)

    @property
    def has_repeated_call(self) -> bool:
        """Whether the answer ended at a repeated call."""
        return self._repeats is not None and self._repeats.found

    def _parsed(self, events: list[AnswerEvent]) -> list[AnswerEvent]:
        if self._parser is None:
            return events
        found: list[AnswerEvent] = []
        for event in events:
            if isinstance(event, ContentText):
                found += self._parser.feed(event.text)
            else:
                found.append(event)
        return found

    def _record(self, events: list[AnswerEvent], ends: bool = False) -> list[AnswerEvent]:
        if self._repeats is not None:
            events = self._repeats.feed(events)
            events += self._repeats.flush() if ends else []
        if not self._keep_reasoning:
            events = [event for event in events if not isinstance(event, ReasoningText)]
        if len(events) > 1:
            events = merged(events)
        for event in events:
            if isinstance(event, ContentText):
                self._content.append(event.text)
            elif isinstance(event, ReasoningText):
                self._reasoning.append(event.text)
            elif isinstance(event, CallStart):
                self._calls.append((event, []))
            else:
                self._calls[event.index][1].append(event.text)
        return events


def merged(events: Iterable[AnswerEvent]) -> list[AnswerEvent]:
    """Join consecutive text events of the same kind."""
    found: list[AnswerEvent] = []
    for _, group in groupby(events, lambda event: (type(event), getattr(event, "index", 0))):
        first, *others = group
        if not others or isinstance(first, CallStart):
            found += [first, *others]
        else:
            texts = [event.text for event in (first, *others) if not isinstance(event, CallStart)]
            found.append(replace(first, text="".join(texts)))
    return found
