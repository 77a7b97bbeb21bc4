"""FunctionGemma format: <start_function_call>call:name{key:<escape>text<escape>,key:1}
<end_function_call>."""

from __future__ import annotations

import json
import re

from llaisys.chat.json_reader import read_decoded, skip_space
from llaisys.chat.text_source import Delimiters, EndOfText, Mismatch, Parsing
from llaisys.chat.tool_formats.base import NAME, ToolCallParser

START, END = "<start_function_call>", "<end_function_call>"
ESCAPE = "<escape>"
PREFIX = "call:"
MAX_DEPTH = 64
_KEY = re.compile(r"[^:{}\[\],<\s]{1,128}")


class FunctionGemmaParser(ToolCallParser):
    """A call is returned when its closing brace has arrived."""

    markers = (START, END, ESCAPE)

    def _read(self) -> Parsing[None]:
        yield from self.marked_calls(START, self._calls)

    def _calls(self) -> Parsing[None]:
        yield from skip_space(self.source)
        if not (yield from self.source.starts_with(PREFIX)):
            raise Mismatch
        self.source.take(len(PREFIX))
        name = yield from self._word("{")
        if not NAME.fullmatch(name):
            raise Mismatch
        values = yield from self._value(0)
        self.begin(name)
        self.arguments(json.dumps(values, ensure_ascii=False))
        yield from self.close(END)

    def _word(self, end: str) -> Parsing[str]:
        """Read a short word before `end`, which is not read."""
        source = self.source
        while (at := source.text.find(end, source.pos, source.pos + 160)) < 0:
            if len(source.text) - source.pos >= 160 or not (yield from source.more()):
                raise Mismatch
        return source.take(at - source.pos).strip()

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
        if not (yield from source.starts_with(ESCAPE)):
            return (yield from read_decoded(source))
        source.take(len(ESCAPE))
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
