"""How far a long start has come: said by whoever does the work, heard by whoever listens.

The work calls `report`, which costs nothing while nobody listens. `done` and `total` are in a unit
of the stage's own; a total of 0 is unknown.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TextIO

Listener = Callable[[str, int, int], None]  # stage, done, total

BAR_WIDTH = 30
REDRAW_SECONDS = 0.1

_listener: ContextVar[Listener | None] = ContextVar("progress_listener", default=None)


def report(stage: str, done: int = 0, total: int = 0) -> None:
    """Called in the thread that began the work; threads that it starts are not heard."""
    listener = _listener.get()
    if listener is not None:
        listener(stage, done, total)


@contextmanager
def progress_listener(listener: Listener) -> Iterator[None]:
    """`listener` hears every `report` of this thread inside the block."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


@contextmanager
def show_progress(out: TextIO) -> Iterator[None]:
    """Stages as one line that is gone afterwards, where `out` is a terminal; else nothing."""
    if not out.isatty():
        yield
        return
    line = ProgressLine(out)
    try:
        with progress_listener(line.show):
            yield
    finally:
        line.erase()


class ProgressLine:
    """One line of a terminal, drawn again and again. The cursor stays at its beginning, so that
    whatever else is written there begins a line, too."""

    def __init__(self, out: TextIO) -> None:
        self.out = out
        self._stage = ""
        self._drawn = 0.0  # when
        self._width = 0  # characters that are on the screen

    def show(self, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        if stage == self._stage and now - self._drawn < REDRAW_SECONDS:
            return
        self._stage, self._drawn = stage, now
        text = f"{stage} ..."
        if total > 0:
            filled = BAR_WIDTH * min(done, total) // total
            bar = "#" * filled + "." * (BAR_WIDTH - filled)
            text = f"{stage} [{bar}] {100 * min(done, total) // total:3d} %"
        self._draw(text)

    def erase(self) -> None:
        self._draw("")
        self._width = 0

    def _draw(self, text: str) -> None:
        if text or self._width:
            self.out.write(text.ljust(self._width) + "\r")
            self.out.flush()
        self._width = max(self._width, len(text))
