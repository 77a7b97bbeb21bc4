"""Mistral format: [TOOL_CALLS] [{"name": .., "arguments": {..}}, ..], or [TOOL_CALLS]name[ARGS]{..}
per call (models since 2025)."""

from __future__ import annotations

from llaisys.chat.json_reader import skip_space
from llaisys.chat.text_source import Delimiters, Mismatch, Parsing
from llaisys.chat.tool_formats.base import NAME, ToolCallParser

START = "[TOOL_CALLS]"
ID_CHARS = 9  # required by Mistral's templates


class MistralParser(ToolCallParser):
    markers = (START, "[CALL_ID]", "[ARGS]")
    short_id = ID_CHARS

    def _read(self) -> Parsing[None]:
        yield from self.marked_calls(START, self._calls)

    def _calls(self) -> Parsing[None]:
        yield from skip_space(self.source)
        if (yield from self.source.peek()) in "[{":
            yield from self.json_calls(Delimiters(START))
            return
        name = yield from self._name()
        for mark in ("[CALL_ID]", "[ARGS]"):
            if (yield from self.source.starts_with(mark)):
                self.source.take(len(mark))
                if mark == "[CALL_ID]":
                    yield from self._name()
        yield from self.call_arguments(name, None)

    def _name(self) -> Parsing[str]:
        while True:
            match = NAME.match(self.source.text, self.source.pos)
            if match is None:
                raise Mismatch
            if match.end() < len(self.source.text) or not (yield from self.source.more()):
                return self.source.take(len(match[0]))
