"""JSON values inside a growing text, passed on while they are read.

What a model writes is nearly JSON: a raw line break in a string, Python's True or None. Those are
put right on the way; anything else that is no JSON is a Mismatch where it stands.
"""

from __future__ import annotations

import json
import re
from typing import Any

from llaisys.chat.text_source import Mismatch, Reading, Sink, TextSource

MAX_DEPTH = 128
MAX_WORD = 400  # characters of a number or a literal

_SPACE = re.compile(r"[ \t\r\n]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_WORD = re.compile(r"[-+.\w]*", re.ASCII)
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_LITERALS = {"true": "true", "false": "false", "null": "null"}
_LITERALS |= {"True": "true", "False": "false", "None": "null"}
_CLOSING = {"{": "}", "[": "]"}


def drop(_: str) -> None:
    """A sink for what nobody wants."""


def skip_space(source: TextSource, sink: Sink = drop) -> Reading[None]:
    """To the next character that is no white space, or to the end of the text."""
    while True:
        match = _SPACE.match(source.text, source.pos)
        assert match is not None
        if match.end() > source.pos:
            sink(source.take(match.end() - source.pos))
        if not source.at_end or not (yield from source.more()):
            return


def expect(source: TextSource, characters: str) -> Reading[str]:
    """Read one of `characters`, after white space. Raises Mismatch."""
    yield from skip_space(source)
    found = yield from source.peek()
    if found not in characters:
        raise Mismatch
    return source.take(1)


def read_string(source: TextSource, sink: Sink) -> Reading[None]:
    """A string with its quotes; the next character is the first of them."""
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


def _read_escape(source: TextSource) -> Reading[str]:
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


def _read_word(source: TextSource) -> Reading[str]:
    """A number or a literal, put right."""
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


def read_value(source: TextSource, sink: Sink) -> Reading[None]:
    """One value, after white space, into `sink` as it comes. What follows it stays unread. Raises
    Mismatch; `sink` then has what was right."""
    closing: list[str] = []  # of what is open
    may_close = False  # the innermost has just been opened
    while True:
        yield from skip_space(source, sink if closing else drop)
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
        while closing:  # behind a value: a comma, or ends
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


def _read_key(source: TextSource, sink: Sink) -> Reading[None]:
    """A key and its colon, up to the value."""
    if (yield from source.peek()) != '"':
        raise Mismatch
    yield from read_string(source, sink)
    yield from skip_space(source, sink)
    if (yield from source.peek()) != ":":
        raise Mismatch
    sink(source.take(1))
    yield from skip_space(source, sink)


def captured(source: TextSource) -> Reading[Any]:
    """One value, decoded."""
    pieces: list[str] = []
    yield from read_value(source, pieces.append)
    return decoded("".join(pieces))


def decoded(text: str) -> Any:
    """What was read as JSON; a number too long for Python is a Mismatch."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise Mismatch from None
