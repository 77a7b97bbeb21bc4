"""Incremental parsing of streamed text with generators.

A generator yields when it needs more text and is resumed when there is more or at the end. A parser
is written as if it had the whole text; the result does not depend on how the text is split.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from typing import TypeVar

from llaisys.chat.records import AnswerEvent

T = TypeVar("T")
Parsing = Generator[None, None, T]  # a parser that returns a T
Sink = Callable[[str], None]


class Mismatch(Exception):
    """The text does not match; the text since `mark` may be read again."""


class EndOfText(Mismatch):
    """The text ends before the match is complete."""


class TextSource:
    """A text buffer with backtracking: text since `mark` is retained until `forget` or `rewind`.
    More than `max_lookahead` retained characters raise Mismatch."""

    def __init__(self, max_lookahead: int) -> None:
        self.text = ""
        self.pos = 0
        self.closed = False
        self._max_lookahead = max_lookahead
        self._mark: int | None = None

    def push(self, text: str) -> None:
        start = self.pos if self._mark is None else self._mark
        self.text = self.text[start:] + text
        self.pos -= start
        if self._mark is not None:
            self._mark = 0

    @property
    def at_end(self) -> bool:
        """Whether all received text is read."""
        return self.pos >= len(self.text)

    def more(self) -> Parsing[bool]:
        """Wait for more text; False: the text has ended."""
        unread = len(self.text) - self.pos
        while len(self.text) - self.pos == unread:
            if self.closed:
                return False
            yield
        return True

    def peek(self) -> Parsing[str]:
        """The next character. Raises EndOfText."""
        if self.at_end and not (yield from self.more()):
            raise EndOfText
        return self.text[self.pos]

    def take(self, count: int) -> str:
        """Read `count` received characters."""
        piece = self.text[self.pos : self.pos + count]
        self.pos += len(piece)
        if self._mark is not None and self.pos - self._mark > self._max_lookahead:
            raise Mismatch
        return piece

    def starts_with(self, word: str) -> Parsing[bool]:
        """Whether `word` comes next; reads nothing."""
        while len(self.text) - self.pos < len(word):
            if not word.startswith(self.text[self.pos :]) or not (yield from self.more()):
                return False
        return self.text.startswith(word, self.pos)

    def skip(self, word: str) -> Parsing[bool]:
        """Read `word` if it comes next; return whether it did."""
        found = yield from self.starts_with(word)
        if found:
            self.take(len(word))
        return found

    def up_to(self, words: Delimiters | re.Pattern[str], limit: int) -> Parsing[str]:
        """Read up to one of `words`, which is not read. Raises Mismatch if there is none within
        `limit` characters."""
        while (found := words.search(self.text, self.pos, self.pos + limit)) is None:
            if len(self.text) - self.pos >= limit or not (yield from self.more()):
                raise Mismatch
        return self.take(found.start() - self.pos)

    def until(self, words: Delimiters, sink: Sink) -> Parsing[str | None]:
        """Read through the first of `words` and return it; None at the end of the text. The text
        before it goes to `sink` as soon as it cannot be the start of a delimiter."""
        while True:
            found = words.search(self.text, self.pos)
            if found is not None:
                if found.start() > self.pos:
                    sink(self.take(found.start() - self.pos))
                return self.take(len(found[0]))
            partial = 0 if self.closed else words.partial_match(self.text, self.pos)
            ready = len(self.text) - partial - self.pos
            if ready:
                sink(self.take(ready))
            if not (yield from self.more()):
                if not self.at_end:
                    sink(self.take(len(self.text) - self.pos))
                return None

    def rest(self, sink: Sink) -> Parsing[None]:
        """Read to the end of the text."""
        while True:
            if not self.at_end:
                sink(self.take(len(self.text) - self.pos))
            if not (yield from self.more()):
                return

    def mark(self) -> None:
        self._mark = self.pos

    def forget(self) -> None:
        self._mark = None

    def rewind(self) -> None:
        """Return to `mark`."""
        if self._mark is not None:
            self.pos, self._mark = self._mark, None


class Delimiters:
    """Words to search for; at one offset the longest matches."""

    def __init__(self, *words: str) -> None:
        self.words = sorted(words, key=len, reverse=True)
        self.search = re.compile("|".join(map(re.escape, self.words))).search

    def partial_match(self, text: str, start: int) -> int:
        """Length of the longest end of `text` (from `start` on) that is a proper prefix of a
        word."""
        for at in range(max(start, len(text) - len(self.words[0]) + 1), len(text)):
            end = text[at:]
            if any(word.startswith(end) for word in self.words):
                return len(end)
        return 0


class StreamParser(ABC):
    """A parser of one answer; `feed` and `finish` return new events."""

    def __init__(self, max_lookahead: int) -> None:
        self.source = TextSource(max_lookahead)
        self._events: list[AnswerEvent] = []
        self._space: list[str] = []  # trailing white space so far
        self._parsing: Parsing[None] | None = self._read_all()

    def feed(self, text: str) -> list[AnswerEvent]:
        self.source.push(text)
        return self._advance()

    def finish(self) -> list[AnswerEvent]:
        """End of the answer."""
        self.source.closed = True
        return self._advance()

    def _advance(self) -> list[AnswerEvent]:
        if self._parsing is not None and next(self._parsing, self) is self:
            self._parsing = None
        events, self._events = self._events, []
        return events

    @abstractmethod
    def _read_all(self) -> Parsing[None]:
        """Parse the text up to its end."""

    def _trimmed(self, text: str, is_first: bool) -> str:
        """The text to forward: white space at its end is held back until more text follows, and
        white space before the first text is dropped."""
        text = text.lstrip() if is_first else text
        bare = text.rstrip()
        ready = "".join([*self._space, bare]) if bare else ""
        self._space = [] if bare else self._space
        if len(bare) < len(text):
            self._space.append(text[len(bare) :])
        return ready
