"""Calls in Python syntax: [name(key="value"), ..] as the whole answer (Llama 3.2 and 4), or between
<function_calls> tags, one per line (OLMo 3)."""

import ast
import json
import re
from collections.abc import Iterator

from llaisys.chat.json_reader import expect, skip_space
from llaisys.chat.text_source import Mismatch, Parsing
from llaisys.chat.tool_formats.base import MAX_LOOKAHEAD, NAME, ToolCallParser

START, END = "<function_calls>", "</function_calls>"
PYTHON_START, PYTHON_END = "<|python_start|>", "<|python_end|>"
MAX_NAME = 128  # characters
MAX_DEPTH = 64  # brackets in the arguments of a call
_JSON_NAMES = {"true": True, "false": False, "null": None}
_NAME_END = re.compile(r"[^A-Za-z0-9_.:/-]")


class PythonicParser(ToolCallParser):
    """A call is returned when its closing parenthesis has arrived."""

    markers = (START, END, PYTHON_START, PYTHON_END)

    starts = (START, PYTHON_START)

    def bare_calls(self) -> Parsing[bool]:
        called = yield from super().bare_calls()
        return called or (yield from self.attempt("", self._list(strict=True)))

    def _calls(self, start: str) -> Parsing[None]:
        yield from self._lines() if start == START else self._list(strict=False)

    def _list(self, strict: bool) -> Parsing[None]:
        yield from skip_space(self.source)
        yield from expect(self.source, "[")
        while True:
            yield from self._call(strict)
            if (yield from expect(self.source, ",]")) == "]":
                break
            yield from skip_space(self.source)
            if (yield from self.source.peek()) == "]":
                self.source.take(1)
                break
        yield from self.close(PYTHON_END)

    def _lines(self) -> Parsing[None]:
        while True:
            yield from skip_space(self.source)
            if self.source.at_end or (yield from self.source.starts_with(END)):
                break
            yield from self._call(strict=False)
        yield from self.close(END)

    def _call(self, strict: bool) -> Parsing[None]:
        source = self.source
        yield from skip_space(source)
        name = yield from source.up_to(_NAME_END, MAX_NAME + 1)
        if not NAME.fullmatch(name) or (strict and name not in self._names):
            raise Mismatch
        yield from expect(source, "(")
        arguments = yield from self._arguments()
        self.begin(name)
        self.arguments(arguments)

    def _arguments(self) -> Parsing[str]:
        """The keyword arguments up to the closing parenthesis, as JSON."""
        source, at, state = self.source, 0, _Brackets()
        while True:
            while source.pos + at < len(source.text):
                if at >= MAX_LOOKAHEAD:
                    raise Mismatch
                if state.closes(source.text[source.pos + at]):
                    text = source.take(at)
                    source.take(1)
                    return _keywords(text)
                at += 1
            if not (yield from source.more()):
                raise Mismatch


class _Brackets:
    """Finds the closing parenthesis of a call, character by character."""

    def __init__(self) -> None:
        self._depth = 0
        self._quote = ""  # of the open string
        self._is_escaped = False

    def closes(self, character: str) -> bool:
        if self._quote:
            if self._is_escaped:
                self._is_escaped = False
            elif character == "\\":
                self._is_escaped = True
            elif character == self._quote:
                self._quote = ""
        elif character in "'\"":
            self._quote = character
        elif character in "([{":
            self._depth += 1
            if self._depth > MAX_DEPTH:
                raise Mismatch
        elif character in ")]}":
            self._depth -= 1
            return self._depth < 0
        return False


def _keywords(text: str) -> str:
    """Keyword arguments of Python as a JSON object."""
    # Line breaks in strings are no Python, but models write them.
    text = text.replace("\r", "\\r").replace("\n", "\\n") if "\n" in text else text
    try:
        call = ast.parse(f"f({text})", mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise Mismatch from None
    if not isinstance(call, ast.Call) or call.args or any(k.arg is None for k in call.keywords):
        raise Mismatch
    values = {str(k.arg): _value(k.value) for k in call.keywords}
    try:
        return json.dumps(values, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError):
        raise Mismatch from None


def _value(node: ast.expr) -> object:
    if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float | None):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _value(node.operand)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return -value
    if isinstance(node, ast.Name) and node.id in _JSON_NAMES:
        return _JSON_NAMES[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        return dict(_items(node))
    raise Mismatch


def _items(node: ast.Dict) -> Iterator[tuple[str, object]]:
    for key, value in zip(node.keys, node.values, strict=True):
        name = None if key is None else _value(key)
        if not isinstance(name, str):
            raise Mismatch
        yield name, _value(value)
