"""<tool_call>{"name": .., "arguments": {..}}</tool_call>: Hermes, Qwen 2.5 and 3, and what we ask
of models whose template knows no tools."""

from __future__ import annotations

from llaisys.chat.text_source import Delimiters, Reading
from llaisys.chat.tool_formats.base import ToolCallParser

START, END = "<tool_call>", "</tool_call>"


class TaggedParser(ToolCallParser):
    markers = (START, END)

    def _read(self) -> Reading[None]:
        yield from self.marked_calls(START, self._calls)

    def _calls(self) -> Reading[None]:
        yield from self.json_calls(Delimiters(END))
        yield from self.close(END)
