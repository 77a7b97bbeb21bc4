"""Threads beside the event loop, one pool for each kind of work, so that no kind waits for another.

A pool takes so many jobs of each API key and no more: what would have to wait longer is refused
with 503 at once, unless it is the end of a request that was answered already: that one waits. Keys
that wait take turns, so a key with many jobs holds up its own.
Python code in a pool lets the loop run every few milliseconds; a single call into a C library does
not unless it says so, which is why what it is given is bounded before.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, ParamSpec, TypeVar

from llaisys.server.errors import ApiError

P = ParamSpec("P")
T = TypeVar("T")

# Whose request the running task answers; `KeyGuard` sets it. "": nobody's, the server's own.
current_owner: ContextVar[str] = ContextVar("request_owner", default="")


@dataclass(slots=True, eq=False)
class _Job:
    owner: str
    work: Callable[[], Any]
    result: asyncio.Future[Any]  # what the caller waits for


class BoundedThreadPool:
    """Belongs to one event loop. `name` is what the refusal and the threads are called by."""

    def __init__(self, name: str, threads: int, max_waiting: int) -> None:
        self.name = name
        self.max_jobs = threads + max_waiting  # of one owner
        # Running or waiting, by owner; those that nobody waits for any more included.
        self._jobs: Counter[str] = Counter()
        self._free = threads
        self._waiting: OrderedDict[str, deque[_Job]] = OrderedDict()  # the next owner first
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=f"llaisys-{name}")

    @property
    def jobs(self) -> int:
        return self._jobs.total()

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of `work` in a thread. Cancelled before it begins, it never does."""
        count = self._jobs[current_owner.get()]
        if count >= self.max_jobs:
            raise ApiError(
                503,
                f"{count} requests wait for the {self.name} threads; try again",
                code=f"{self.name}_busy",
                retry_after=1,
            )
        return await self.finish(work, *args, **kwargs)

    async def finish(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """`run`, never refused: for the last step of what has been generated, which would be lost.
        There are no more of these than requests that were admitted."""
        result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        job = _Job(current_owner.get(), lambda: work(*args, **kwargs), result)
        self._jobs[job.owner] += 1
        self._waiting.setdefault(job.owner, deque()).append(job)
        self._start()
        try:
            return await result
        except asyncio.CancelledError:
            self._forget(job)
            raise

    def _start(self) -> None:
        """Give the free threads to the owners that wait, in turn."""
        while self._free and self._waiting:
            owner, queue = self._waiting.popitem(last=False)
            job = queue.popleft()
            if queue:
                self._waiting[owner] = queue
            self._free -= 1
            loop = job.result.get_loop()
            self._pool.submit(job.work).add_done_callback(partial(self._tell, loop, job))

    def _tell(self, loop: asyncio.AbstractEventLoop, job: _Job, done: Future[Any]) -> None:
        """In the thread that did the work."""
        if not loop.is_closed():
            loop.call_soon_threadsafe(self._ended, job, done)

    def _ended(self, job: _Job, done: Future[Any]) -> None:
        self._free += 1
        self._discount(job)
        if done.cancelled():  # the pool was closed
            job.result.cancel()
        elif not job.result.done():
            error = done.exception()
            if error is None:
                job.result.set_result(done.result())
            else:
                job.result.set_exception(error)
        self._start()

    def _forget(self, job: _Job) -> None:
        """Nobody waits for it: one that has not begun never does."""
        queue = self._waiting.get(job.owner)
        if queue is not None and job in queue:
            queue.remove(job)
            if not queue:
                del self._waiting[job.owner]
            self._discount(job)

    def _discount(self, job: _Job) -> None:
        self._jobs[job.owner] -= 1
        if not self._jobs[job.owner]:
            del self._jobs[job.owner]

    def close(self) -> None:
        """Jobs that have not begun never do."""
        for queue in self._waiting.values():
            for job in queue:
                job.result.cancel()
        self._pool.shutdown(wait=False, cancel_futures=True)
