"""Hermes format: <tool_call>{"name": .., "arguments": {..}}</tool_call>. Also Qwen 2.5 and 3, and
models whose template has no tools."""

from __future__ import annotations

from llaisys.chat.text_source import Delimiters, Parsing
from llaisys.chat.tool_formats.base import ToolCallParser

START, END = "<tool_call>", "</tool_call>"


class HermesParser(ToolCallParser):
    markers = (START, END)

    def _read(self) -> Parsing[None]:
        yield from self.marked_calls(START, self._calls)

    def _calls(self) -> Parsing[None]:
        yield from self.json_calls(Delimiters(END))
        yield from self.close(END)
