"""DeepSeek format: kind, name and a fenced block (V3, R1), or name and arguments (V3.1)."""

from __future__ import annotations

from llaisys.chat.json_reader import skip_space
from llaisys.chat.text_source import Delimiters, Mismatch, Parsing
from llaisys.chat.tool_formats.base import NAME, ToolCallParser

CALLS_START, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
START, END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
MAX_HEAD = 256  # characters of a kind or a name


class DeepSeekParser(ToolCallParser):
    markers = (CALLS_START, CALLS_END, START, END, SEPARATOR)

    def _read(self) -> Parsing[None]:
        yield from self.bare_calls()
        starts = Delimiters(CALLS_START, START)
        while (start := (yield from self.source.until(starts, self.content))) is not None:
            yield from self.attempt(start, self._calls(start == START))

    def _calls(self, begun: bool) -> Parsing[None]:
        while True:
            yield from skip_space(self.source)
            if not begun:
                if not (yield from self.source.starts_with(START)):
                    break
                self.source.take(len(START))
            begun = False
            yield from self._call()
            yield from self.close("```")
            yield from self.close(END)
        yield from self.close(CALLS_END)

    def _call(self) -> Parsing[None]:
        head = yield from self._up_to(SEPARATOR)
        yield from skip_space(self.source)
        if (yield from self.source.peek()) != "{":  # `head` is the kind
            head = yield from self._up_to("\n")
            yield from skip_space(self.source)
            if (yield from self.source.starts_with("```json")):
                self.source.take(len("```json"))
        if not NAME.fullmatch(head):
            raise Mismatch
        yield from self.call_arguments(head, Delimiters(END))

    def _up_to(self, word: str) -> Parsing[str]:
        """Read a short text and the `word` after it; return the text."""
        source, most = self.source, MAX_HEAD + len(word)
        while (at := source.text.find(word, source.pos, source.pos + most)) < 0:
            if len(source.text) - source.pos >= most or not (yield from source.more()):
                raise Mismatch
        head = source.take(at - source.pos)
        source.take(len(word))
        return head.strip()
