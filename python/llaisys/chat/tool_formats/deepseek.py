"""DeepSeek format: kind, name and a fenced block (V3, R1), or name and arguments (V3.1)."""

from llaisys.chat.json_reader import skip_space
from llaisys.chat.text_source import Delimiters, Mismatch, Parsing
from llaisys.chat.tool_formats.base import NAME, ToolCallParser

CALLS_START, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
START, END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
MAX_HEAD = 256  # characters of a kind or a name


class DeepSeekParser(ToolCallParser):
    markers = (CALLS_START, CALLS_END, START, END, SEPARATOR)
    starts = (CALLS_START, START)

    def _calls(self, start: str) -> Parsing[None]:
        is_begun = start == START
        while True:
            yield from skip_space(self.source)
            if not is_begun and not (yield from self.source.skip(START)):
                break
            is_begun = False
            yield from self._call()
            yield from self.close("```")
            yield from self.close(END)
        yield from self.close(CALLS_END)

    def _call(self) -> Parsing[None]:
        head = yield from self._through(SEPARATOR)
        yield from skip_space(self.source)
        if (yield from self.source.peek()) != "{":  # `head` is the kind
            head = yield from self._through("\n")
            yield from skip_space(self.source)
            yield from self.source.skip("```json")
        if not NAME.fullmatch(head):
            raise Mismatch
        yield from self.call_arguments(head, Delimiters(END))

    def _through(self, word: str) -> Parsing[str]:
        """Read a short text and the `word` after it; return the text."""
        head = yield from self.source.up_to(Delimiters(word), MAX_HEAD + len(word))
        self.source.take(len(word))
        return head.strip()
