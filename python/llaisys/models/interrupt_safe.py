"""Runs work that transfers native memory on a thread where Ctrl-C cannot interrupt it.

Python raises KeyboardInterrupt, and exceptions of other signal handlers, between any two
instructions of the main thread: also between a native call that takes ownership of an object and
the Python statement that records it. Other threads are never interrupted.
"""

from collections.abc import Callable
from contextvars import copy_context
from threading import Lock, Thread
from typing import Generic, TypeVar

from llaisys.common.closing import Closing

T = TypeVar("T", bound=Closing)


class CancelledError(Exception):
    """The caller was interrupted; raised only inside the worker thread."""


class InterruptSafeTask(Generic[T]):
    """Creates one object on a separate thread while the caller waits.

    `make` receives a function that raises CancelledError after the caller was interrupted, and
    should call it regularly. Its result is returned to the caller, or closed after an interrupt.
    """

    def __init__(self, make: Callable[[Callable[[], None]], T]) -> None:
        self._make = make
        self._made: list[T] = []  # at most one; popping it takes ownership
        self._error: BaseException | None = None
        self._started = self._cancelled = self._done = False
        # Released when the work is done. A lock instead of an Event: its wait runs no Python code
        # that an interrupt could leave inconsistent.
        self._wake = Lock()

    def run(self) -> T:
        """Return or raise the result of `make`. After an interrupt, wait for the thread to end and
        close its result."""
        self._wake.acquire()
        try:
            context = copy_context()  # with the progress listener
            Thread(target=context.run, args=(self._work,), name="llaisys-load").start()
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
