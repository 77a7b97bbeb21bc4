"""Progress of a long start-up: `report` calls the listener of this thread, if any.

`done` and `total` have a unit of their stage; a total of 0 is unknown.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TextIO

Listener = Callable[[str, int, int], None]  # stage, done, total

BAR_WIDTH = 30
REFRESH_SECONDS = 0.1
THREAD_NAME = "progress"
LINE_SECONDS = 4.0  # between two lines where there is no terminal

_listener: ContextVar[Listener | None] = ContextVar("progress_listener", default=None)


def report(stage: str, done: int = 0, total: int = 0) -> None:
    """Report progress; has no effect in threads started inside `progress_listener`."""
    listener = _listener.get()
    if listener is not None:
        listener(stage, done, total)


@contextmanager
def progress_listener(listener: Listener) -> Iterator[None]:
    """Call `listener` for every `report` of this thread inside the block."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


@contextmanager
def show_progress(out: TextIO) -> Iterator[None]:
    """Show stages in one temporary line if `out` is a terminal, else in a line every few seconds,
    for which an enclosing `show_progress` is enough."""
    if out.isatty():
        line = ProgressLine(out)
        try:
            with progress_listener(line.show):
                yield
        finally:
            line.erase()
    elif _listener.get() is not None:
        yield
    else:
        lines = ProgressLines(out)
        try:
            with progress_listener(lines.show):
                yield
        finally:
            lines.stop()


class ProgressLines:
    """The stage and its state in a line every LINE_SECONDS, also while nothing is reported; the
    first one after that time."""

    def __init__(self, out: TextIO) -> None:
        self.out = out
        self._begin = time.monotonic()
        self._state = ("", 0, 0)  # replaced as a whole: two threads
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._write, name=THREAD_NAME, daemon=True)
        self._thread.start()

    def show(self, stage: str, done: int, total: int) -> None:
        self._state = (stage, done, total)

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _write(self) -> None:
        while not self._stopped.wait(LINE_SECONDS):
            stage, done, total = self._state
            if stage:
                share = f"  {100 * min(done, total) // total} %" if total > 0 else ""
                seconds = round(time.monotonic() - self._begin)
                try:
                    print(f"{stage}: {seconds} s{share}", file=self.out, flush=True)
                except (OSError, ValueError):  # closed
                    return


class ProgressLine:
    """One line of a terminal that is rewritten. The cursor stays at its start, so that other output
    starts a line."""

    def __init__(self, out: TextIO) -> None:
        self.out = out
        self._stage = ""
        self._written = 0.0  # time
        self._width = 0  # characters on the screen

    def show(self, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        if stage == self._stage and now - self._written < REFRESH_SECONDS:
            return
        self._stage, self._written = stage, now
        text = f"{stage} ..."
        if total > 0:
            filled = BAR_WIDTH * min(done, total) // total
            bar = "#" * filled + "." * (BAR_WIDTH - filled)
            text = f"{stage} [{bar}] {100 * min(done, total) // total:3d} %"
        self._write(text)

    def erase(self) -> None:
        self._write("")
        self._width = 0

    def _write(self, text: str) -> None:
        if text or self._width:
            self.out.write(text.ljust(self._width) + "\r")
            self.out.flush()
        self._width = max(self._width, len(text))
