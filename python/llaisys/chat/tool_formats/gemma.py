"""FunctionGemma format: <start_function_call>call:name{key:<escape>text<escape>,key:1}
<end_function_call>."""

import json
import re

from llaisys.chat.json_reader import read_decoded, skip_space
from llaisys.chat.text_source import Delimiters, EndOfText, Mismatch, Parsing
from llaisys.chat.tool_formats.base import NAME, ToolCallParser

START, END = "<start_function_call>", "<end_function_call>"
ESCAPE = "<escape>"
PREFIX = "call:"
MAX_DEPTH = 64
MAX_WORD = 160  # characters of a name or a key, and its delimiter
_KEY = re.compile(r"[^:{}\[\],<\s]{1,128}")


class FunctionGemmaParser(ToolCallParser):
    """A call is returned when its closing brace has arrived."""

    markers = (START, END, ESCAPE)
    starts = (START,)

    def _calls(self, start: str) -> Parsing[None]:
        yield from skip_space(self.source)
        if not (yield from self.source.skip(PREFIX)):
            raise Mismatch
        name = yield from self._word("{")
        if not NAME.fullmatch(name):
            raise Mismatch
        values = yield from self._value(0)
        self.begin(name)
        self.arguments(json.dumps(values, ensure_ascii=False))
        yield from self.close(END)

    def _word(self, end: str) -> Parsing[str]:
        """Read a short word before `end`, which is not read."""
        word = yield from self.source.up_to(Delimiters(end), MAX_WORD)
        return word.strip()

    def _value(self, depth: int) -> Parsing[object]:
        source = self.source
        yield from skip_space(source)
        first = yield from source.peek()
        if depth > MAX_DEPTH:
            raise Mismatch
        if first == "{":
            return (yield from self._object(depth))
        if first == "[":
            return (yield from self._list(depth))
        if not (yield from source.skip(ESCAPE)):
            return (yield from read_decoded(source))
        pieces: list[str] = []
        if (yield from source.until(Delimiters(ESCAPE), pieces.append)) is None:
            raise EndOfText
        return "".join(pieces)

    def _object(self, depth: int) -> Parsing[dict[str, object]]:
        self.source.take(1)
        found: dict[str, object] = {}
        while not (yield from self._ends("}", bool(found))):
            key = yield from self._word(":")
            key = key.removeprefix(ESCAPE).removesuffix(ESCAPE)
            if not _KEY.fullmatch(key):
                raise Mismatch
            self.source.take(1)
            found[key] = yield from self._value(depth + 1)
        return found

    def _list(self, depth: int) -> Parsing[list[object]]:
        self.source.take(1)
        found: list[object] = []
        while not (yield from self._ends("]", bool(found))):
            found.append((yield from self._value(depth + 1)))
        return found

    def _ends(self, bracket: str, needs_comma: bool) -> Parsing[bool]:
        """Read the closing bracket, or the comma before the next item."""
        yield from skip_space(self.source)
        found = yield from self.source.peek()
        if found == bracket:
            self.source.take(1)
            return True
        if needs_comma:
            if found != ",":
                raise Mismatch
            self.source.take(1)
            yield from skip_space(self.source)
        return False
