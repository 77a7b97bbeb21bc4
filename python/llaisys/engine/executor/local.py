"""A worker in this process, called directly or in its own thread, and the errors of workers."""

from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextvars import copy_context
from typing import Any, Self

from llaisys.common.errors import LlaisysError
from llaisys.engine.worker import Worker


class WorkerError(LlaisysError, RuntimeError):
    """A worker raised; the cause is chained. The requests are unchanged."""

    def __init__(self, message: str, rank: int, local_rank: int) -> None:
        super().__init__(f"worker rank {rank} (local rank {local_rank}): {message}")
        self.rank = rank
        self.local_rank = local_rank

    @classmethod
    def of(cls, method: str, worker: Worker, cause: Exception) -> Self:
        message = f"{method}: {type(cause).__name__}: {cause}"
        return cls(message, worker.rank, worker.local_rank)


class WorkerLostError(LlaisysError, RuntimeError):
    """A worker is lost; the engine cannot continue."""


class ExecutorTimeoutError(LlaisysError, TimeoutError):
    """A worker did not reply in time; it may still be busy."""


class LocalRank:
    """Runs one call at a time. A call that timed out continues in its thread; the next call waits
    for it or raises ExecutorTimeoutError."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self._thread: ThreadPoolExecutor | None = None
        self._running: Future[Any] | None = None  # the last call, until its result is read
        self._timed_out = False  # that call

    def call(
        self, method: str, timeout: float | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run in the caller's thread, or in the worker's thread once a timeout was given."""
        self.wait_idle(timeout)
        if timeout is None and self._thread is None:
            return getattr(self.worker, method)(*args, **kwargs)
        return self.result(self.start(method, args, kwargs), timeout)

    def start(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Future[Any]:
        """Start a call in the worker's thread, which Ctrl-C does not interrupt; call `wait_idle`
        before."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="llaisys-worker")
        function = getattr(self.worker, method)
        self._running = self._thread.submit(copy_context().run, function, *args, **kwargs)
        return self._running

    def result(self, future: Future[Any], timeout: float | None) -> Any:
        """Return the result of the last `start`."""
        wait_for([future], timeout)
        if not future.done():
            self.abandon()
            raise ExecutorTimeoutError(f"the worker did not answer in {timeout} s")
        self._running = None
        return future.result()

    def abandon(self) -> None:
        """Stop waiting for the last `start`."""
        self._timed_out = True

    def wait_idle(self, timeout: float | None) -> None:
        """Wait for an earlier call; ExecutorTimeoutError when one that timed out still runs. A call
        whose caller was interrupted is waited for: other ranks may depend on it."""
        if self._running is None:
            return
        if timeout is not None or not self._timed_out:
            wait_for([self._running], timeout)
        if not self._running.done():
            raise ExecutorTimeoutError("the worker is still busy with a call that timed out")
        self._running = None
        self._timed_out = False

    @property
    def is_busy(self) -> bool:
        return self._running is not None and not self._running.done()

    def close(self) -> None:
        """Free the model after a running call has ended."""
        if self._thread is not None:
            self._thread.shutdown(wait=True)
        self.worker.close()
