"""Phi-4-mini format: <|tool_call|>[{"name": .., "arguments": {..}}]<|/tool_call|>, or
functools[..]."""

from __future__ import annotations

from llaisys.chat.text_source import Delimiters, Parsing
from llaisys.chat.tool_formats.base import ToolCallParser

START, END = "<|tool_call|>", "<|/tool_call|>"
FUNCTOOLS = "functools"


class Phi4MiniParser(ToolCallParser):
    markers = (START, END)

    def _read(self) -> Parsing[None]:
        yield from self.bare_calls()
        starts = Delimiters(START, FUNCTOOLS)
        while (start := (yield from self.source.until(starts, self.content))) is not None:
            yield from self.attempt(start, self._calls(start))

    def _calls(self, start: str) -> Parsing[None]:
        yield from self.json_calls(Delimiters(END), strict=start == FUNCTOOLS)
        yield from self.close(END)
