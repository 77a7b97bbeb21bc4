"""Threads beside the event loop, one lane for each kind of work, so that no kind waits for another.

A lane takes so many jobs and no more: what would have to wait longer is refused with 503 at once,
unless it is the end of a request that was answered already: that one waits.
Python code in a lane lets the loop run every few milliseconds; a single call into a C library does
not unless it says so, which is why what it is given is bounded before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from llaisys.server.errors import ApiError

P = ParamSpec("P")
T = TypeVar("T")


class Lane:
    """Belongs to one event loop. `name` is what the refusal and the threads are called by."""

    def __init__(self, name: str, threads: int, max_waiting: int) -> None:
        self.name = name
        self.max_jobs = threads + max_waiting
        self.jobs = 0  # running or waiting, those that nobody waits for any more included
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=f"llaisys-{name}")

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of `work` in a thread. Cancelled before it begins, it never does."""
        if self.jobs >= self.max_jobs:
            raise ApiError(
                503,
                f"{self.jobs} requests wait for the {self.name} threads; try again",
                code=f"{self.name}_busy",
                retry_after=1,
            )
        return await self.finish(work, *args, **kwargs)

    async def finish(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """`run`, never refused: for the last step of what has been generated, which would be lost.
        There are no more of these than requests that were admitted."""
        loop = asyncio.get_running_loop()
        self.jobs += 1
        job = self._pool.submit(work, *args, **kwargs)
        job.add_done_callback(lambda job: self._ended(loop, job))
        return await asyncio.wrap_future(job)

    def _ended(self, loop: asyncio.AbstractEventLoop, job: Future[T]) -> None:
        def count() -> None:
            self.jobs -= 1

        if not loop.is_closed():
            loop.call_soon_threadsafe(count)

    def close(self) -> None:
        """Jobs that have not begun never do."""
        self._pool.shutdown(wait=False, cancel_futures=True)
