"""Formats with one tag per argument: Qwen3-Coder and GLM-4.5.

Arguments are text. The tool's JSON schema tells strings from other values.
"""

import json
from typing import Any

from llaisys.chat.json_reader import decoded, skip_space
from llaisys.chat.text_source import Delimiters, EndOfText, Mismatch, Parsing
from llaisys.chat.tool_formats.base import NAME, ToolCallParser

START, END = "<tool_call>", "</tool_call>"
MAX_NAME = 256  # characters of a function or an argument name
_PYTHON = {"True": True, "False": False, "None": None}


class XmlParser(ToolCallParser):
    """A call is `function_start` name `function_end`, then arguments: `key_start` name `key_end`
    value `value_end`."""

    markers: tuple[str, ...] = (START, END)
    function_start = ""
    function_ends: tuple[str, ...] = ()
    key_start = ""
    key_ends: tuple[str, ...] = ()
    value_ends: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()  # of the call

    def _calls(self, start: str) -> Parsing[None]:
        yield from skip_space(self.source)
        if start != self.function_start:
            yield from self._expect(self.function_start)
        name = yield from self._name(self.function_ends)
        if not NAME.fullmatch(name):
            raise Mismatch
        self.begin(name)
        self.arguments("{")
        schema = self.schemas.get(name)
        properties = schema.get("properties") if isinstance(schema, dict) else None
        properties = properties if isinstance(properties, dict) else {}
        comma = ""
        while True:
            yield from skip_space(self.source)
            if not (yield from self.source.skip(self.key_start)):
                break
            key = yield from self._name(self.key_ends)
            self.arguments(f"{comma}{json.dumps(key, ensure_ascii=False)}: ")
            comma = ", "
            yield from self._value(properties.get(key))
        yield from self.source.peek()  # raises if the answer is cut off
        self.arguments("}")
        for end in self.ends:
            yield from self.close(end)

    def _value(self, schema: Any) -> Parsing[None]:
        """Read an argument up to its end. A string is streamed."""
        ends = Delimiters(*(f"\n{end}" for end in self.value_ends), *self.value_ends)
        yield from self.source.skip("\n")
        if not isinstance(schema, dict) or schema.get("type") == "string":
            self.arguments('"')
            found = yield from self.source.until(
                ends, lambda text: self.arguments(json.dumps(text, ensure_ascii=False)[1:-1])
            )
            if found is None:
                raise EndOfText
            self.arguments('"')
            return
        pieces: list[str] = []
        if (yield from self.source.until(ends, pieces.append)) is None:
            raise EndOfText
        self.arguments(_as_json("".join(pieces), schema.get("type")))

    def _expect(self, word: str) -> Parsing[None]:
        if not (yield from self.source.skip(word)):
            raise Mismatch

    def _name(self, ends: tuple[str, ...]) -> Parsing[str]:
        """Read a short text through one of `ends`; the last one is not read if it is a tag."""
        name = yield from self.source.up_to(Delimiters(*ends), MAX_NAME)
        for end in ends:
            if end not in (self.key_start, *self.ends):
                yield from self.source.skip(end)
        return name.strip()


class Qwen3CoderParser(XmlParser):
    """<tool_call><function=name><parameter=key>value</parameter></function></tool_call>; the outer
    tags may be missing."""

    function_start = "<function="
    starts = (START, function_start)
    function_ends = (">",)
    key_start = "<parameter="
    key_ends = (">",)
    value_ends = ("</parameter>",)
    ends = ("</function>", END)


class Glm4Parser(XmlParser):
    """<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>"""

    starts = (START,)
    function_ends = ("\n", "<arg_key>", END)
    key_start = "<arg_key>"
    key_ends = ("</arg_key>",)
    value_ends = ("</arg_value>",)
    ends = (END,)

    def _value(self, schema: Any) -> Parsing[None]:
        yield from skip_space(self.source)
        yield from self._expect("<arg_value>")
        yield from super()._value(schema)


def _as_json(text: str, types: Any) -> str:
    """A value that need not be a string, as JSON; `types`: of its schema."""
    bare = text.strip()
    try:
        value = _PYTHON[bare] if bare in _PYTHON else decoded(bare)
    except Mismatch:
        value = text
    if isinstance(types, list) and "string" in types and _type_of(value) not in types:
        value = text
    return json.dumps(value, ensure_ascii=False)


def _type_of(value: Any) -> str:
    """The type of a decoded value in a JSON schema."""
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    return "null" if value is None else names.get(type(value), "object")
