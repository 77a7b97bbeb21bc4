"""Base class of tool-call parsers for streamed answers.

A format defines where calls are in the text; all other text is content. A call starts when its name
is complete and its arguments start. Text that fails to match before that point is content,
unchanged; after it, arguments are forwarded as they arrive, valid or not. White space around calls
is removed.
"""

import hashlib
import json
import re
import uuid
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

from llaisys.chat.json_reader import decoded, discard, expect, read_decoded, read_value, skip_space
from llaisys.chat.records import AnswerEvent, CallArguments, CallStart, ContentText
from llaisys.chat.text_source import Delimiters, Mismatch, Parsing, StreamParser

MAX_CALLS = 128  # per answer; further calls are ignored
MAX_LOOKAHEAD = 64 << 10  # characters held back until they are a call or content
NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")

_ARGUMENTS = ("arguments", "parameters")
_OTHER_KEYS = ("id", "type")  # ignored keys of a call


class ToolCallParser(StreamParser):
    """Time and memory are linear in the text."""

    short_id = 0  # length of call ids, if the template requires one
    markers: tuple[str, ...] = ()  # delimiters of calls; some may be special tokens
    starts: tuple[str, ...] = ()  # texts before calls

    def __init__(
        self,
        names: Collection[str] = (),
        max_calls: int = MAX_CALLS,
        seed: str = "",
        schemas: Mapping[str, Any] | None = None,
    ) -> None:
        """`names`: names of the request's tools. Bare JSON is a call only of one of them; between
        the format's markers any name is a call. `seed`: of the call ids, so that parsing a text
        again gives the same ids; "": random. `schemas`: of the tools' arguments, by name."""
        super().__init__(MAX_LOOKAHEAD)
        self.schemas = schemas or {}
        self._seed = seed or uuid.uuid4().hex
        self._names = frozenset(names)
        self._max_calls = min(max_calls, MAX_CALLS)
        self._num_calls = 0
        self._after_call = False  # only white space since the last call

    def finish(self) -> list[AnswerEvent]:
        events = super().finish()
        if self._space and not self._num_calls:
            events = [*events, ContentText("".join(self._space))]
        return events

    def _read_all(self) -> Parsing[None]:
        yield from self._read()
        yield from self.source.rest(self.content)

    def _read(self) -> Parsing[None]:
        """Parse the text up to its end, or to where no call can follow: calls after each of
        `starts`, and at the start of an answer also without it."""
        yield from self.bare_calls()
        starts = Delimiters(*self.starts)
        while (start := (yield from self.source.until(starts, self.content))) is not None:
            yield from self.attempt(start, self._calls(start))

    def _calls(self, start: str) -> Parsing[None]:
        """Parse the calls after `start`, one of `starts`."""
        raise NotImplementedError

    # ---- building blocks of formats ------------------------------------------------------------

    def content(self, text: str) -> None:
        ready = self._trimmed(text, self._after_call)
        if ready:
            self._after_call = False
            self._events.append(ContentText(ready))

    def begin(self, name: str) -> None:
        """Start a call; commits to it."""
        self.source.forget()
        self._space, self._after_call = [], True
        self._num_calls += 1
        if self._num_calls <= self._max_calls:
            self._events.append(CallStart(self._num_calls - 1, self._id(self._num_calls), name))

    def _id(self, number: int) -> str:
        digest = hashlib.sha256(f"{self._seed}:{number}".encode()).hexdigest()
        return digest[: self.short_id] if self.short_id else f"call_{digest[:24]}"

    def arguments(self, text: str) -> None:
        if text and self._num_calls <= self._max_calls:
            self._events.append(CallArguments(self._num_calls - 1, text))

    def attempt(self, mark: str, calls: Parsing[None]) -> Parsing[bool]:
        """Run the parser `calls` and return whether it found a call. Otherwise `mark` is content
        and the text after it is read again."""
        before = self._num_calls
        self.source.mark()
        with suppress(Mismatch):
            yield from calls
        if self._num_calls > before:
            self.source.forget()
            return True
        self.source.rewind()
        if mark:
            self.content(mark)
        return False

    def json_calls(self, end: Delimiters | None = None, strict: bool = False) -> Parsing[None]:
        """Parse {"name": .., "arguments": ..}, or a list of such objects. `end`: delimiter after
        the calls; `strict`: accept only calls of known tools."""
        if (yield from expect(self.source, "{[")) == "{":
            yield from self._json_call(end, strict)
            return
        while True:
            yield from expect(self.source, "{")
            yield from self._json_call(end, strict)
            if (yield from expect(self.source, ",]")) == "]":
                return

    def _json_call(self, end: Delimiters | None, strict: bool) -> Parsing[None]:
        """Parse a call after its brace. The name may come before or after the arguments."""
        name: str | None = None
        early: str | None = None  # arguments before the name
        begun = False
        while True:
            key = yield from self._key()
            if key == "name" and name is None:
                name = self._checked_name((yield from read_decoded(self.source)), strict)
            elif key in _ARGUMENTS and name is not None and not begun:
                begun = True
                yield from self.call_arguments(name, end)
            elif key in _ARGUMENTS and early is None and not begun:
                early = as_arguments((yield from read_decoded(self.source)))
            elif key == "function" and name is None:  # OpenAI's format
                inner = yield from read_decoded(self.source)
                if not isinstance(inner, dict):
                    raise Mismatch
                name = self._checked_name(inner.get("name"), strict)
                early = as_arguments(inner.get("arguments"))
            elif strict and not begun and key not in _OTHER_KEYS:
                raise Mismatch
            else:
                yield from read_value(self.source, discard)
            if name is not None and early is not None and not begun:
                begun = True
                self.begin(name)
                self.arguments(early)
            if (yield from expect(self.source, ",}")) == "}":
                break
        if begun:
            return
        if name is None or strict:
            raise Mismatch
        self.begin(name)
        self.arguments("{}")

    def _key(self) -> Parsing[str]:
        yield from skip_space(self.source)
        if (yield from self.source.peek()) != '"':
            raise Mismatch
        key = yield from read_decoded(self.source)
        yield from expect(self.source, ":")
        return str(key)

    def _checked_name(self, name: object, strict: bool) -> str:
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise Mismatch
        if strict and name not in self._names:
            raise Mismatch
        return name

    def call_arguments(self, name: str, end: Delimiters | None) -> Parsing[None]:
        """Parse the arguments of call `name`. If they are invalid JSON, all text up to `end` is
        arguments."""
        yield from skip_space(self.source)
        first = yield from self.source.peek()
        if first != "{":  # an object as a string, or null
            text = as_arguments((yield from read_decoded(self.source)))
            self.begin(name)
            self.arguments(text)
            return
        self.begin(name)
        try:
            yield from read_value(self.source, self.arguments)
        except Mismatch:
            if end is None:
                yield from self.source.rest(self.arguments)
            else:
                yield from self.source.until(end, self.arguments)
            raise

    def close(self, *ends: str) -> Parsing[None]:
        """Skip the closing delimiter of a call, if present, and surplus braces before it."""
        yield from skip_space(self.source)
        while not self.source.at_end and self.source.text[self.source.pos] == "}":
            self.source.take(1)
            yield from skip_space(self.source)
        for end in ends:
            if (yield from self.source.skip(end)):
                return
            rest = self.source.text[self.source.pos :]
            if self.source.closed and end.startswith(rest):  # truncated delimiter
                self.source.take(len(rest))

    def bare_calls(self) -> Parsing[bool]:
        """Parse calls at the start of an answer without a marker, optionally in a code fence."""
        return (yield from self.attempt("", self._bare()))

    def _bare(self) -> Parsing[None]:
        yield from skip_space(self.source)
        fenced = False
        for fence in ("```json", "```"):
            fenced = fenced or (yield from self.source.skip(fence))
        yield from self.json_calls(Delimiters("```") if fenced else None, strict=True)
        if fenced:
            yield from self.close("```")


def as_arguments(value: object) -> str:
    """Decoded arguments as JSON text; Mismatch unless they are an object."""
    if value is None:
        return "{}"
    if isinstance(value, str):
        value = decoded(value) if value.strip() else {}
    if not isinstance(value, dict):
        raise Mismatch
    return json.dumps(value, ensure_ascii=False)
