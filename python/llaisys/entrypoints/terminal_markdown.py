"""Markdown in a terminal, written as it arrives.

Text is shown as soon as its markup is unambiguous: at most the start of a line, a run of `*` or a
run of backticks is held back. Styles end with their line. Markup that is not known (links, tables,
formulas) is shown as it is. Control characters of the text are removed: a terminal would obey them.
"""

import os
import re
from collections.abc import Callable
from typing import TextIO

RESET, BOLD, DIM, ITALIC, CYAN = (f"\033[{code}m" for code in (0, 1, 2, 3, 36))

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_FENCE = re.compile(r" {0,3}(```+|~~~+)")
_HEADING = re.compile(r" {0,3}#{1,6} ")
_BULLET = re.compile(r"( *)[-*+] ")
_QUOTE = re.compile(r" {0,3}> ?")
# A line start that may still become one of the above.
_UNDECIDED = re.compile(r" *(?:#{0,6}|`{0,2}|~{0,2}|[-*+]|>)")


def has_styles(out: TextIO) -> bool:
    """Whether `out` is a terminal that shows styles."""
    return (
        out.isatty() and os.environ.get("TERM", "dumb") != "dumb" and not os.environ.get("NO_COLOR")
    )


def without_control(text: str) -> str:
    return _CONTROL.sub("", text)


class MarkdownWriter:
    """Call `feed` with pieces of Markdown and `finish` at the end; `write` receives styled text."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write = write
        self._start: str | None = ""  # held back start of a line; None: the line has begun
        self._held = ""  # run of '*' or '`' in a line, whose next character decides
        self._previous = ""  # last character shown in the line
        self._line_style = ""
        self._is_bold = self._is_italic = False
        self._ticks = 0  # backticks that opened the current code span; 0: none
        self._fence = ""  # of the current code block

    def feed(self, text: str) -> None:
        for char in without_control(text):
            self._feed_char(char)

    def finish(self) -> None:
        """Show what is held back and end all styles; the line is not ended."""
        self._begin_line()
        self._resolve("")
        self._end_styles()

    def _feed_char(self, char: str) -> None:
        if self._start is not None:
            if char == "\n":
                self._begin_line()
                self._end_line()
                return
            self._start += char
            if self._is_undecided(self._start):
                return
            self._begin_line()
        elif char == "\n":
            self._resolve("")
            self._end_line()
        else:
            self._inline(char)

    def _is_undecided(self, start: str) -> bool:
        if self._fence:  # only the end of the block matters
            return self._fence.startswith(start.strip(" ")) or not start.strip(" ")
        if _FENCE.match(start):
            return True  # the whole line is the fence with its language
        return _UNDECIDED.fullmatch(start) is not None

    def _begin_line(self) -> None:
        """Show the start of a line with the style that it determines."""
        start, self._start = self._start, None
        if not start:
            return
        if self._fence:
            if start.strip(" ").startswith(self._fence):
                self._fence = ""
                self._write(DIM + start + RESET)
            else:
                self._write(CYAN + start)
                self._previous = start[-1]
        elif match := _FENCE.match(start):
            self._fence = match[1]
            self._write(DIM + start + RESET)
        elif _HEADING.match(start):
            self._open_line(BOLD, start)
        elif match := _BULLET.fullmatch(start):
            self._write(f"{match[1]}• ")
        elif match := _QUOTE.match(start):
            self._open_line(DIM, "│ ")
            self._inline_all(start[match.end() :])
        else:
            self._inline_all(start)

    def _open_line(self, style: str, text: str) -> None:
        self._line_style = style
        self._write(style + text)

    def _end_line(self) -> None:
        self._end_styles()
        self._write("\n")
        self._start, self._previous = "", ""

    def _end_styles(self) -> None:
        is_styled = self._line_style or self._is_bold or self._is_italic or self._ticks
        if is_styled or self._fence:
            self._write(RESET)
        self._line_style = ""
        self._is_bold = self._is_italic = False
        self._ticks = 0

    def _inline_all(self, text: str) -> None:
        for char in text:
            self._inline(char)

    def _inline(self, char: str) -> None:
        if self._fence:
            self._write(char if self._previous else CYAN + char)
            self._previous = char
            return
        if char in "*`" and (not self._held or self._held[0] == char):
            self._held += char
            return
        self._resolve(char)
        if char in "*`":
            self._held = char
        else:
            self._write(char)
            self._previous = char

    def _resolve(self, following: str) -> None:
        """Decide what the held back run means, now that the next character is known."""
        run, self._held = self._held, ""
        if not run:
            return
        if run[0] == "`":
            if not self._ticks or len(run) == self._ticks:
                self._ticks = 0 if self._ticks else len(run)
                self._restyle()
                return
        elif not self._ticks and len(run) <= 3:
            is_open = (len(run) != 2 and self._is_italic) or (len(run) != 1 and self._is_bold)
            opens = bool(following.strip()) and not self._previous.isalnum()
            if is_open or opens:
                self._is_bold ^= len(run) >= 2
                self._is_italic ^= len(run) != 2
                self._restyle()
                return
        self._write(run)
        self._previous = run[-1]

    def _restyle(self) -> None:
        styles = self._line_style + BOLD * self._is_bold + ITALIC * self._is_italic
        self._write(RESET + styles + CYAN * bool(self._ticks))
