"""A worker of this process, called directly or in a thread of its own."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextvars import copy_context
from typing import Any

from llaisys.engine.executor.base import ExecutorTimeoutError
from llaisys.engine.worker import Worker


class LocalRank:
    """Runs one call of its worker at a time. A call that was given up on goes on in its thread, and
    the next one waits for it or is refused."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self._thread: ThreadPoolExecutor | None = None
        self._late: Future[Any] | None = None  # a call that runs, or that nobody waited for
        self._timed_out = False  # that one, and not interrupted

    def call(
        self, method: str, timeout: float | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """In the caller's thread unless a timeout asks for another, from then on there."""
        self.settle(timeout)
        if timeout is None and self._thread is None:
            return getattr(self.worker, method)(*args, **kwargs)
        return self.result(self.start(method, args, kwargs), timeout)

    def start(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Future[Any]:
        """In the worker's own thread, which no Ctrl-C interrupts; `settle` comes before it."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="llaisys-worker")
        function = getattr(self.worker, method)
        self._late = self._thread.submit(copy_context().run, function, *args, **kwargs)
        return self._late

    def result(self, future: Future[Any], timeout: float | None) -> Any:
        """Of the last `start`."""
        wait_for([future], timeout)
        if not future.done():
            self.give_up()
            raise ExecutorTimeoutError(f"the worker did not answer in {timeout} s")
        self._late = None
        return future.result()

    def give_up(self) -> None:
        """Nobody waits for the last `start` any more."""
        self._timed_out = True

    def settle(self, timeout: float | None) -> None:
        """A call that was given up on has ended, or a further one is refused. One whose caller was
        interrupted is waited for: it may be about to meet other ranks."""
        if self._late is None:
            return
        if timeout is not None or not self._timed_out:
            wait_for([self._late], timeout)
        if not self._late.done():
            raise ExecutorTimeoutError("the worker is still busy with a call that timed out")
        self._late = None
        self._timed_out = False

    @property
    def is_busy(self) -> bool:
        return self._late is not None and not self._late.done()

    def close(self) -> None:
        """The model is not freed under a running call."""
        if self._thread is not None:
            self._thread.shutdown(wait=True)
        self.worker.close()
