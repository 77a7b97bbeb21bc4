"""Reading calls of tools out of an answer that grows.

A format says where calls stand in the text; what is not a call is content. A call begins when its
name is known and its arguments begin. What turns out to be no call before that is content, as it
was written; after it, the arguments are passed on as they come, right or wrong. White space beside
calls is dropped.
"""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from contextlib import suppress

from llaisys.chat.json_reader import captured, decoded, drop, expect, read_value, skip_space
from llaisys.chat.records import AnswerEvent, CallArguments, CallStart, ContentText
from llaisys.chat.text_source import Delimiters, Mismatch, Reading, TextSource

MAX_CALLS = 128  # of one answer; further ones are dropped
MAX_KEPT = 64 << 10  # characters that wait to become a call, or content after all
NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")

_ARGUMENTS = ("arguments", "parameters")
_BESIDE = ("id", "type")  # other keys that calls have


class ToolCallParser(ABC):
    """`feed` and `finish` give what is new. Time and memory are in proportion to the text."""

    short_id = 0  # characters of an id, where a template insists on it
    markers: tuple[str, ...] = ()  # what stands around calls; some may be control tokens

    def __init__(
        self, names: Collection[str] = (), max_calls: int = MAX_CALLS, seed: str = ""
    ) -> None:
        """`names`: names of the request's tools. Bare JSON is a call only of one of them; between
        the format's markers any name is a call. `seed`: of the call ids, so that parsing a text
        again gives the same ids; "": random."""
        self._seed = seed or uuid.uuid4().hex
        self.source = TextSource(MAX_KEPT)
        self._names = frozenset(names)
        self._max_calls = min(max_calls, MAX_CALLS)
        self._num_calls = 0
        self._events: list[AnswerEvent] = []
        self._space: list[str] = []  # at the end of the content so far
        self._after_call = False  # nothing but white space since the last call
        self._reading: Reading[None] | None = self._read_all()

    def feed(self, text: str) -> list[AnswerEvent]:
        self.source.push(text)
        return self._advance()

    def finish(self) -> list[AnswerEvent]:
        """No more text comes."""
        self.source.closed = True
        events = self._advance()
        if self._space and not self._num_calls:
            events = [*events, ContentText("".join(self._space))]
        return events

    def _advance(self) -> list[AnswerEvent]:
        if self._reading is not None and next(self._reading, self) is self:
            self._reading = None
        events, self._events = self._events, []
        return events

    def _read_all(self) -> Reading[None]:
        yield from self._read()
        yield from self.source.rest(self.content)

    @abstractmethod
    def _read(self) -> Reading[None]:
        """Read the text up to its end, or to where no call can follow."""

    # ---- what formats are made of --------------------------------------------------------------

    def content(self, text: str) -> None:
        if self._after_call:
            text = text.lstrip()
        bare = text.rstrip()
        if bare:
            self._events.append(ContentText("".join([*self._space, bare])))
            self._space, self._after_call = [], False
        if len(bare) < len(text):
            self._space.append(text[len(bare) :])

    def begin(self, name: str) -> None:
        """A call begins: there is no way back."""
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

    def attempt(self, mark: str, calls: Reading[None]) -> Reading[bool]:
        """Read `calls`. If they turn out to be none, `mark` is content and what follows it is read
        again. Whether there was one."""
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

    def json_calls(self, end: Delimiters | None = None, strict: bool = False) -> Reading[None]:
        """{"name": .., "arguments": ..}, or a list of such objects. `end`: what the calls end with;
        `strict`: nothing but a call of a known tool."""
        if (yield from expect(self.source, "{[")) == "{":
            yield from self._json_call(end, strict)
            return
        while True:
            yield from expect(self.source, "{")
            yield from self._json_call(end, strict)
            if (yield from expect(self.source, ",]")) == "]":
                return

    def _json_call(self, end: Delimiters | None, strict: bool) -> Reading[None]:
        """The rest of a call behind its brace. The name may come before or after the arguments."""
        name: str | None = None
        early: str | None = None  # arguments that came before it
        begun = False
        while True:
            key = yield from self._key()
            if key == "name" and name is None:
                name = self._checked_name((yield from captured(self.source)), strict)
            elif key in _ARGUMENTS and name is not None and not begun:
                begun = True
                yield from self.call_arguments(name, end)
            elif key in _ARGUMENTS and early is None and not begun:
                early = as_arguments((yield from captured(self.source)))
            elif key == "function" and name is None:  # as OpenAI writes calls
                inner = yield from captured(self.source)
                if not isinstance(inner, dict):
                    raise Mismatch
                name = self._checked_name(inner.get("name"), strict)
                early = as_arguments(inner.get("arguments"))
            elif strict and not begun and key not in _BESIDE:
                raise Mismatch
            else:
                yield from read_value(self.source, drop)
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

    def _key(self) -> Reading[str]:
        yield from skip_space(self.source)
        if (yield from self.source.peek()) != '"':
            raise Mismatch
        key = yield from captured(self.source)
        yield from expect(self.source, ":")
        return str(key)

    def _checked_name(self, name: object, strict: bool) -> str:
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise Mismatch
        if strict and name not in self._names:
            raise Mismatch
        return name

    def call_arguments(self, name: str, end: Delimiters | None) -> Reading[None]:
        """The call `name` with the value that follows. When that breaks off, all text up to `end`
        belongs to it."""
        yield from skip_space(self.source)
        first = yield from self.source.peek()
        if first != "{":  # an object as a string, or null
            text = as_arguments((yield from captured(self.source)))
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

    def close(self, *ends: str) -> Reading[None]:
        """Read what closes a call, where it is there; braces that are one too many before it."""
        yield from skip_space(self.source)
        while not self.source.at_end and self.source.text[self.source.pos] == "}":
            self.source.take(1)
            yield from skip_space(self.source)
        for end in ends:
            if (yield from self.source.starts_with(end)):
                self.source.take(len(end))
                return
            rest = self.source.text[self.source.pos :]
            if self.source.closed and end.startswith(rest):  # cut off in the middle of it
                self.source.take(len(rest))

    def marked_calls(self, start: str, calls: Callable[[], Reading[None]]) -> Reading[None]:
        """Calls behind each `start`; and at the very beginning also without it."""
        yield from self.bare_calls()
        mark = Delimiters(start)
        while (yield from self.source.until(mark, self.content)) is not None:
            yield from self.attempt(start, calls())

    def bare_calls(self) -> Reading[bool]:
        """Calls at the very beginning of an answer, without any mark; perhaps fenced."""
        return (yield from self.attempt("", self._bare()))

    def _bare(self) -> Reading[None]:
        yield from skip_space(self.source)
        fenced = False
        for fence in ("```json", "```"):
            if not fenced and (yield from self.source.starts_with(fence)):
                self.source.take(len(fence))
                fenced = True
        yield from self.json_calls(Delimiters("```") if fenced else None, strict=True)
        if fenced:
            yield from self.close("```")


def as_arguments(value: object) -> str:
    """The text of arguments that were read as a whole. Raises Mismatch when they are none."""
    if value is None:
        return "{}"
    if isinstance(value, str):
        value = decoded(value) if value.strip() else {}
    if not isinstance(value, dict):
        raise Mismatch
    return json.dumps(value, ensure_ascii=False)
