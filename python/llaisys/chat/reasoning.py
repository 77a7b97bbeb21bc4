"""Splits reasoning (<think> .. </think>) from a streamed answer."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from llaisys.chat.json_reader import skip_space
from llaisys.chat.records import AnswerEvent, ContentText, ReasoningText
from llaisys.chat.text_source import Delimiters, Mismatch, Parsing, TextSource

MAX_SPACE = 1024  # characters of white space before the opening marker


@dataclass(frozen=True, slots=True)
class ReasoningMarkers:
    """Delimiters of a model's reasoning."""

    start: str
    end: str


# Values of `--reasoning-parser`; vLLM's names are aliases.
REASONING_FORMATS: dict[str, ReasoningMarkers] = {
    "think": ReasoningMarkers("<think>", "</think>"),
    "mistral": ReasoningMarkers("[THINK]", "[/THINK]"),
    # Read by HarmonyParser; its markers are several tokens each.
    "harmony": ReasoningMarkers("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
}
ALIASES = {
    **dict.fromkeys(("deepseek_r1", "deepseek-r1", "qwen3", "glm45", "olmo3"), "think"),
    "openai_gptoss": "harmony",
}


class ReasoningSplitter:
    """Reasoning is the text between the markers at the start of an answer, or before the closing
    marker when the prompt ends with the opening one. White space around it is removed."""

    def __init__(self, markers: ReasoningMarkers, opened: bool = False) -> None:
        """`opened`: the prompt ends inside the reasoning."""
        self._source = TextSource(MAX_SPACE)
        self._markers = markers
        self._opened = opened
        self._events: list[AnswerEvent] = []
        self._space: list[str] = []  # trailing white space so far
        self._has_text = False
        self._parsing: Parsing[None] | None = self._read()

    def feed(self, text: str) -> list[AnswerEvent]:
        self._source.push(text)
        return self._advance()

    def finish(self) -> list[AnswerEvent]:
        """End of the answer; an answer that ends inside the reasoning has no content."""
        self._source.closed = True
        return self._advance()

    def _advance(self) -> list[AnswerEvent]:
        if self._parsing is not None and next(self._parsing, self) is self:
            self._parsing = None
        events, self._events = self._events, []
        return events

    def _read(self) -> Parsing[None]:
        source, markers = self._source, self._markers
        if self._opened or (yield from self._opens()):
            found = yield from source.until(Delimiters(markers.end), self._reasoning)
            if found is not None:
                yield from skip_space(source)
        yield from source.rest(self._content)

    def _opens(self) -> Parsing[bool]:
        """Read the opening marker if present, else nothing."""
        source, found = self._source, False
        source.mark()
        with suppress(Mismatch):  # too much white space
            yield from skip_space(source)
            found = yield from source.starts_with(self._markers.start)
        if not found:
            source.rewind()
            return False
        source.forget()
        source.take(len(self._markers.start))
        return True

    def _reasoning(self, text: str) -> None:
        if not self._has_text:
            text = text.lstrip()
        bare = text.rstrip()
        if bare:
            self._has_text = True
            self._events.append(ReasoningText("".join([*self._space, bare])))
            self._space = []
        if len(bare) < len(text):
            self._space.append(text[len(bare) :])

    def _content(self, text: str) -> None:
        self._events.append(ContentText(text))
