"""Work that hands native memory over, out of reach of Ctrl-C.

Python raises KeyboardInterrupt (and what other signal handlers raise) in the main thread, between
any two instructions: also between a native call that takes an object over and the note that it
did. A thread of its own is never interrupted like that.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import copy_context
from threading import Lock, Thread
from typing import Generic, TypeVar

from llaisys.common.closing import Closing

T = TypeVar("T", bound=Closing)


class CancelledError(Exception):
    """Nobody waits for the work any more; only its thread ever sees this."""


class Uninterrupted(Generic[T]):
    """Makes one object on a thread of its own, while the caller waits.

    `make` gets a function that raises CancelledError once the caller no longer waits; it should
    call it now and then. What it returns is the caller's, or closed here when the caller is gone.
    """

    def __init__(self, make: Callable[[Callable[[], None]], T]) -> None:
        self._make = make
        self._made: list[T] = []  # at most one; who pops it owns it
        self._error: BaseException | None = None
        self._started = self._cancelled = self._done = False
        # Released when the work is done. A lock and not an Event: its wait has no Python in it
        # that an interrupt could leave half done.
        self._wake = Lock()

    def run(self) -> T:
        """What `make` returned or raised; an interrupted wait first lets the thread come to its
        end, with nothing left behind."""
        self._wake.acquire()
        try:
            here = copy_context()  # who listens to progress is heard there, too
            Thread(target=here.run, args=(self._work,), name="llaisys-load").start()
            self._wake.acquire()
            if self._error is not None:
                raise self._error
            return self._made[0]
        except BaseException:
            self._cancelled = True
            self._close_made()
            while self._started and not self._done:
                self._wake.acquire(timeout=0.05)
            raise

    def _work(self) -> None:
        self._started = True
        try:
            self._made.append(self._make(self._check))
            if self._cancelled:
                self._close_made()
        except BaseException as error:
            self._error = error
        finally:
            self._done = True
            self._wake.release()

    def _check(self) -> None:
        if self._cancelled:
            raise CancelledError

    def _close_made(self) -> None:
        try:
            made = self._made.pop()
        except IndexError:
            return
        made.close()
