"""Incremental JSON parser that forwards values while they are read.

Corrects common mistakes of models (raw line breaks in strings, Python's True and None); any other
invalid JSON raises Mismatch.
"""

import json
import re
from typing import Any

from llaisys.chat.text_source import Mismatch, Parsing, Sink, TextSource

MAX_DEPTH = 128
MAX_WORD = 400  # characters of a number or a literal

_SPACE = re.compile(r"[ \t\r\n]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_WORD = re.compile(r"[-+.\w]*", re.ASCII)
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_LITERALS = {"true": "true", "false": "false", "null": "null"}
_LITERALS |= {"True": "true", "False": "false", "None": "null"}
_CLOSING = {"{": "}", "[": "]"}


def discard(_: str) -> None:
    """A sink that ignores its input."""


def skip_space(source: TextSource, sink: Sink = discard) -> Parsing[None]:
    """Skip white space, forwarding it to `sink`."""
    while True:
        match = _SPACE.match(source.text, source.pos)
        assert match is not None
        if match.end() > source.pos:
            sink(source.take(match.end() - source.pos))
        if not source.at_end or not (yield from source.more()):
            return


def expect(source: TextSource, characters: str) -> Parsing[str]:
    """Read one of `characters`, after white space. Raises Mismatch."""
    yield from skip_space(source)
    found = yield from source.peek()
    if found not in characters:
        raise Mismatch
    return source.take(1)


def read_string(source: TextSource, sink: Sink) -> Parsing[None]:
    """Read a string with its quotes; the next character is the opening quote."""
    sink(source.take(1))
    while True:
        match = _PLAIN.match(source.text, source.pos)
        assert match is not None
        if match.end() > source.pos:
            sink(source.take(match.end() - source.pos))
        found = yield from source.peek()
        if found == '"':
            sink(source.take(1))
            return
        if found == "\\":
            sink((yield from _read_escape(source)))
        elif found < " ":
            sink(json.dumps(source.take(1))[1:-1])


def _read_escape(source: TextSource) -> Parsing[str]:
    while len(source.text) - source.pos < 2:
        if not (yield from source.more()):
            raise Mismatch
    kind = source.text[source.pos + 1]
    if kind in '"\\/bfnrt':
        return source.take(2)
    if kind != "u":
        raise Mismatch
    while len(source.text) - source.pos < 6:
        if not (yield from source.more()):
            raise Mismatch
    digits = source.text[source.pos + 2 : source.pos + 6]
    if not all(digit in "0123456789abcdefABCDEF" for digit in digits):
        raise Mismatch
    return source.take(6)


def _read_word(source: TextSource) -> Parsing[str]:
    """Read a number or a literal, corrected to JSON."""
    while True:
        match = _WORD.match(source.text, source.pos)
        assert match is not None
        if match.end() - source.pos > MAX_WORD:
            raise Mismatch
        if match.end() < len(source.text) or not (yield from source.more()):
            break
    word = match[0]
    if word not in _LITERALS and not _NUMBER.fullmatch(word):
        raise Mismatch
    source.take(len(word))
    return _LITERALS.get(word, word)


def read_value(source: TextSource, sink: Sink) -> Parsing[None]:
    """Read one value after white space, forwarding it to `sink`. Raises Mismatch; `sink` has
    received the valid part."""
    closing: list[str] = []  # closing brackets of the open containers
    may_close = False  # the innermost container is empty so far
    while True:
        yield from skip_space(source, sink if closing else discard)
        found = yield from source.peek()
        if may_close and found == closing[-1]:
            sink(source.take(1))
            closing.pop()
        else:
            if closing and closing[-1] == "}":
                yield from _read_key(source, sink)
                found = yield from source.peek()
            may_close = False
            if found in _CLOSING:
                if len(closing) == MAX_DEPTH:
                    raise Mismatch
                sink(source.take(1))
                closing.append(_CLOSING[found])
                may_close = True
                continue
            if found == '"':
                yield from read_string(source, sink)
            else:
                sink((yield from _read_word(source)))
        may_close = False
        while closing:  # after a value: a comma or closing brackets
            yield from skip_space(source, sink)
            found = yield from source.peek()
            if found == ",":
                sink(source.take(1))
                break
            if found != closing[-1]:
                raise Mismatch
            sink(source.take(1))
            closing.pop()
        if not closing:
            return


def _read_key(source: TextSource, sink: Sink) -> Parsing[None]:
    """Read a key and its colon, up to the value."""
    if (yield from source.peek()) != '"':
        raise Mismatch
    yield from read_string(source, sink)
    yield from skip_space(source, sink)
    if (yield from source.peek()) != ":":
        raise Mismatch
    sink(source.take(1))
    yield from skip_space(source, sink)


def read_decoded(source: TextSource) -> Parsing[Any]:
    """Read one value and decode it."""
    pieces: list[str] = []
    yield from read_value(source, pieces.append)
    return decoded("".join(pieces))


def decoded(text: str) -> Any:
    """Decode JSON; Mismatch for numbers that Python cannot parse."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise Mismatch from None
