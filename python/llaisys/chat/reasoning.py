"""Reasoning before an answer: <think> .. </think>, taken apart from it as it comes."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from llaisys.chat.json_reader import skip_space
from llaisys.chat.records import AnswerEvent, ContentText, ReasoningText
from llaisys.chat.text_source import Delimiters, Mismatch, Reading, TextSource

MAX_SPACE = 1024  # characters of white space before the opening mark


@dataclass(frozen=True, slots=True)
class ReasoningMarkers:
    """What a model writes around its reasoning."""

    start: str
    end: str


# By the names that `--reasoning-parser` takes; vLLM's mean the same here.
REASONING_FORMATS: dict[str, ReasoningMarkers] = {
    "think": ReasoningMarkers("<think>", "</think>"),
    "mistral": ReasoningMarkers("[THINK]", "[/THINK]"),
}
ALIASES = {"deepseek_r1": "think", "deepseek-r1": "think", "qwen3": "think"}


class ReasoningSplitter:
    """Reasoning is what stands between the markers at the beginning of an answer, or before the
    closing one when the prompt has opened it. White space around the reasoning is dropped."""

    def __init__(self, markers: ReasoningMarkers, opened: bool = False) -> None:
        """`opened`: the prompt ends inside of the reasoning."""
        self._source = TextSource(MAX_SPACE)
        self._markers = markers
        self._opened = opened
        self._events: list[AnswerEvent] = []
        self._space: list[str] = []  # at the end of the reasoning so far
        self._begun = False  # the reasoning has text
        self._reading: Reading[None] | None = self._read()

    def feed(self, text: str) -> list[AnswerEvent]:
        self._source.push(text)
        return self._advance()

    def finish(self) -> list[AnswerEvent]:
        """No more text comes; an answer that ends inside of the reasoning has nothing else."""
        self._source.closed = True
        return self._advance()

    def _advance(self) -> list[AnswerEvent]:
        if self._reading is not None and next(self._reading, self) is self:
            self._reading = None
        events, self._events = self._events, []
        return events

    def _read(self) -> Reading[None]:
        source, markers = self._source, self._markers
        if self._opened or (yield from self._opens()):
            found = yield from source.until(Delimiters(markers.end), self._reasoning)
            if found is not None:
                yield from skip_space(source)
        yield from source.rest(self._content)

    def _opens(self) -> Reading[bool]:
        """Read the opening mark if it is there, else nothing."""
        source, found = self._source, False
        source.mark()
        with suppress(Mismatch):  # no end of white space
            yield from skip_space(source)
            found = yield from source.starts_with(self._markers.start)
        if not found:
            source.rewind()
            return False
        source.forget()
        source.take(len(self._markers.start))
        return True

    def _reasoning(self, text: str) -> None:
        if not self._begun:
            text = text.lstrip()
        bare = text.rstrip()
        if bare:
            self._begun = True
            self._events.append(ReasoningText("".join([*self._space, bare])))
            self._space = []
        if len(bare) < len(text):
            self._space.append(text[len(bare) :])

    def _content(self, text: str) -> None:
        self._events.append(ContentText(text))
