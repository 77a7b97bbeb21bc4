"""Llama 3.1+ format: {"name": .., "parameters": {..}} as the whole answer, several calls separated
by ";", optionally after <|python_tag|>."""

from __future__ import annotations

from llaisys.chat.json_reader import skip_space
from llaisys.chat.text_source import Delimiters, Parsing
from llaisys.chat.tool_formats.base import ToolCallParser

START = "<|python_tag|>"


class Llama3Parser(ToolCallParser):
    markers = (START,)

    def _read(self) -> Parsing[None]:
        if (yield from self.bare_calls()):
            yield from self._following()
        start = Delimiters(START)
        while (yield from self.source.until(start, self.content)) is not None:
            if (yield from self.attempt(START, self.json_calls())):
                yield from self._following()

    def _following(self) -> Parsing[None]:
        """Parse calls directly after another one."""
        called = True
        while called:
            called = yield from self.attempt("", self._next())

    def _next(self) -> Parsing[None]:
        yield from skip_space(self.source)
        if (yield from self.source.starts_with(";")):
            self.source.take(1)
        yield from self.json_calls(strict=True)
