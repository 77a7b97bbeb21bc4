"""Formats whose calls are JSON objects: Hermes, Llama 3, Mistral and Phi-4-mini."""

from llaisys.chat.json_reader import skip_space
from llaisys.chat.text_source import Delimiters, Mismatch, Parsing
from llaisys.chat.tool_formats.base import NAME, ToolCallParser

START, END = "<tool_call>", "</tool_call>"
ID_CHARS = 9  # required by Mistral's templates
_PYTHON_TAG = "<|python_tag|>"
_TOOL_CALLS, _CALL_ID, _ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_PHI_START, _PHI_END = "<|tool_call|>", "<|/tool_call|>"
_FUNCTOOLS = "functools"


class HermesParser(ToolCallParser):
    """<tool_call>{"name": .., "arguments": {..}}</tool_call>. Also Qwen 2.5 and 3, and models whose
    template has no tools."""

    markers = (START, END)
    starts = (START,)

    def _calls(self, start: str) -> Parsing[None]:
        yield from self.json_calls(Delimiters(END))
        yield from self.close(END)


class Phi4MiniParser(ToolCallParser):
    """<|tool_call|>[{"name": .., "arguments": {..}}]<|/tool_call|>, or functools[..]."""

    markers = (_PHI_START, _PHI_END)
    starts = (_PHI_START, _FUNCTOOLS)

    def _calls(self, start: str) -> Parsing[None]:
        yield from self.json_calls(Delimiters(_PHI_END), strict=start == _FUNCTOOLS)
        yield from self.close(_PHI_END)


class Llama3Parser(ToolCallParser):
    """{"name": .., "parameters": {..}} as the whole answer, several calls separated by ";",
    optionally after <|python_tag|>."""

    markers = (_PYTHON_TAG,)
    starts = (_PYTHON_TAG,)

    def bare_calls(self) -> Parsing[bool]:
        called = yield from super().bare_calls()
        if called:
            yield from self._following()
        return called

    def _calls(self, start: str) -> Parsing[None]:
        yield from self.json_calls()
        yield from self._following()

    def _following(self) -> Parsing[None]:
        """Parse calls directly after another one."""
        called = True
        while called:
            called = yield from self.attempt("", self._next())

    def _next(self) -> Parsing[None]:
        yield from skip_space(self.source)
        yield from self.source.skip(";")
        yield from self.json_calls(strict=True)


class MistralParser(ToolCallParser):
    """[TOOL_CALLS] [{"name": .., "arguments": {..}}, ..], or [TOOL_CALLS]name[ARGS]{..} per call
    (models since 2025)."""

    markers = (_TOOL_CALLS, _CALL_ID, _ARGS)
    starts = (_TOOL_CALLS,)
    short_id = ID_CHARS

    def _calls(self, start: str) -> Parsing[None]:
        yield from skip_space(self.source)
        if (yield from self.source.peek()) in "[{":
            yield from self.json_calls(Delimiters(_TOOL_CALLS))
            return
        name = yield from self._name()
        if (yield from self.source.skip(_CALL_ID)):
            yield from self._name()
        yield from self.source.skip(_ARGS)
        yield from self.call_arguments(name, None)

    def _name(self) -> Parsing[str]:
        while True:
            match = NAME.match(self.source.text, self.source.pos)
            if match is None:
                raise Mismatch
            if match.end() < len(self.source.text) or not (yield from self.source.more()):
                return self.source.take(len(match[0]))
