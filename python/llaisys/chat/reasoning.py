"""Splits reasoning (<think> .. </think>) from a streamed answer."""

from contextlib import suppress
from dataclasses import dataclass

from llaisys.chat.json_reader import skip_space
from llaisys.chat.records import ContentText, ReasoningText
from llaisys.chat.text_source import Delimiters, Mismatch, Parsing, StreamParser

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


class ReasoningSplitter(StreamParser):
    """Reasoning is the text between the markers at the start of an answer, or before the closing
    marker when the prompt ends with the opening one. White space around it is removed. An answer
    that ends inside the reasoning has no content."""

    def __init__(self, markers: ReasoningMarkers, opened: bool = False) -> None:
        """`opened`: the prompt ends inside the reasoning."""
        super().__init__(MAX_SPACE)
        self._markers = markers
        self._opened = opened
        self._has_text = False

    def _read_all(self) -> Parsing[None]:
        source, markers = self.source, self._markers
        if self._opened or (yield from self._opens()):
            found = yield from source.until(Delimiters(markers.end), self._reasoning)
            if found is not None:
                yield from skip_space(source)
        yield from source.rest(lambda text: self._events.append(ContentText(text)))

    def _opens(self) -> Parsing[bool]:
        """Read the opening marker if present, else nothing."""
        source, found = self.source, False
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
        ready = self._trimmed(text, not self._has_text)
        if ready:
            self._has_text = True
            self._events.append(ReasoningText(ready))
