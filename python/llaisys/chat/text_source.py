"""Text that comes in pieces, read by generators that wait where it ends.

A generator `yield`s when it needs more text and is resumed when there is some, or when there will
be none. So a parser is written as if it had the whole text, and any cut of the text into pieces
gives the same result.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]  # a reading that ends with a T
Sink = Callable[[str], None]


class Mismatch(Exception):
    """The text is not what was looked for; what was read since `mark` may be read again."""


class EndOfText(Mismatch):
    """The text ends inside of what was looked for."""


class TextSource:
    """The unread rest of a text, and what is kept to be read again: everything from `mark` on,
    until `forget` or `rewind`. More than `max_kept` characters of that are a Mismatch."""

    def __init__(self, max_kept: int) -> None:
        self.text = ""
        self.pos = 0
        self.closed = False
        self._max_kept = max_kept
        self._mark: int | None = None

    def push(self, text: str) -> None:
        kept = self.pos if self._mark is None else self._mark
        self.text = self.text[kept:] + text
        self.pos -= kept
        if self._mark is not None:
            self._mark = 0

    @property
    def at_end(self) -> bool:
        """Whether everything that has come is read."""
        return self.pos >= len(self.text)

    def more(self) -> Reading[bool]:
        """Wait for text behind what has come; False: there is none."""
        unread = len(self.text) - self.pos
        while len(self.text) - self.pos == unread:
            if self.closed:
                return False
            yield
        return True

    def peek(self) -> Reading[str]:
        """The next character. Raises EndOfText."""
        if self.at_end and not (yield from self.more()):
            raise EndOfText
        return self.text[self.pos]

    def take(self, count: int) -> str:
        """Read `count` characters that have come."""
        piece = self.text[self.pos : self.pos + count]
        self.pos += len(piece)
        if self._mark is not None and self.pos - self._mark > self._max_kept:
            raise Mismatch
        return piece

    def starts_with(self, word: str) -> Reading[bool]:
        """Whether `word` is next; nothing is read."""
        while len(self.text) - self.pos < len(word):
            if not word.startswith(self.text[self.pos :]) or not (yield from self.more()):
                return False
        return self.text.startswith(word, self.pos)

    def until(self, words: Delimiters, sink: Sink) -> Reading[str | None]:
        """Read up to the first of `words` and past it, everything before it into `sink` as soon as
        it cannot be the beginning of one; None: the text has ended."""
        while True:
            found = words.search(self.text, self.pos)
            if found is not None:
                if found.start() > self.pos:
                    sink(self.take(found.start() - self.pos))
                return self.take(len(found[0]))
            held = 0 if self.closed else words.beginning(self.text, self.pos)
            free = len(self.text) - held - self.pos
            if free:
                sink(self.take(free))
            if not (yield from self.more()):
                if not self.at_end:
                    sink(self.take(len(self.text) - self.pos))
                return None

    def rest(self, sink: Sink) -> Reading[None]:
        """Read up to the end of the text."""
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
        """Everything since `mark` is unread again."""
        if self._mark is not None:
            self.pos, self._mark = self._mark, None


class Delimiters:
    """Some words to look for; of those that begin at one place the longest is meant."""

    def __init__(self, *words: str) -> None:
        self.words = sorted(words, key=len, reverse=True)
        self.search = re.compile("|".join(map(re.escape, self.words))).search

    def beginning(self, text: str, start: int) -> int:
        """How many characters at the end of `text` (from `start` on) may be the beginning of one of
        the words, with none of them whole."""
        for at in range(max(start, len(text) - len(self.words[0]) + 1), len(text)):
            end = text[at:]
            if any(word.startswith(end) for word in self.words):
                return len(end)
        return 0
