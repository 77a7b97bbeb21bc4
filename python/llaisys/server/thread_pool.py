"""Bounded thread pools beside the event loop, one for each kind of work.

A pool accepts a limited number of jobs per API key and rejects more with 503 at once. Jobs that
complete an already generated answer are never rejected. Keys are served round-robin, so a key with
many jobs delays only its own.
Python code in a pool releases the GIL every few milliseconds. A call into a C library may hold it
throughout, so callers bound the size of its input.
"""

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, ParamSpec, TypeVar

from llaisys.server.errors import ApiError

P = ParamSpec("P")
T = TypeVar("T")

# Owner of the request that the current task serves, set by `KeyGuard`; "": the server itself.
current_owner: ContextVar[str] = ContextVar("request_owner", default="")


class TaskSet(set[asyncio.Task[None]]):
    """Running tasks; the event loop itself keeps only weak references to them."""

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self.add(task)
        task.add_done_callback(self.discard)
        return task


@dataclass(slots=True, eq=False)
class _Job:
    owner: str
    work: Callable[[], Any]
    result: asyncio.Future[Any]  # awaited by the caller


class BoundedThreadPool:
    """Threads with a job limit per owner, used on one event loop. `name` appears in error messages
    and thread names."""

    def __init__(self, name: str, threads: int, max_waiting: int) -> None:
        self.name = name
        self.max_jobs = threads + max_waiting  # of one owner
        # Running and waiting jobs by owner, including running jobs whose caller was cancelled.
        self._jobs: Counter[str] = Counter()
        self._free = threads
        self._waiting: OrderedDict[str, deque[_Job]] = OrderedDict()  # next owner first
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=f"llaisys-{name}")

    @property
    def jobs(self) -> int:
        return self._jobs.total()

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `work` in a thread and return its result. A job cancelled before it starts is
        discarded. Raises ApiError 503 when the owner has too many jobs."""
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
        """Like `run`, but never rejected: for the last step of a generated answer. Admission bounds
        the number of such jobs."""
        result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        job = _Job(current_owner.get(), lambda: work(*args, **kwargs), result)
        self._jobs[job.owner] += 1
        self._waiting.setdefault(job.owner, deque()).append(job)
        self._start()
        try:
            return await result
        except asyncio.CancelledError:
            self._discard(job)
            raise

    def _start(self) -> None:
        """Start waiting jobs on free threads, round-robin over owners."""
        while self._free and self._waiting:
            owner, queue = self._waiting.popitem(last=False)
            job = queue.popleft()
            if queue:
                self._waiting[owner] = queue
            self._free -= 1
            loop = job.result.get_loop()
            self._pool.submit(job.work).add_done_callback(partial(self._on_thread_done, loop, job))

    def _on_thread_done(
        self, loop: asyncio.AbstractEventLoop, job: _Job, done: Future[Any]
    ) -> None:
        """Called in the worker thread."""
        if not loop.is_closed():
            loop.call_soon_threadsafe(self._on_job_done, job, done)

    def _on_job_done(self, job: _Job, done: Future[Any]) -> None:
        self._free += 1
        self._uncount(job)
        if done.cancelled():  # by `close`
            job.result.cancel()
        elif not job.result.done():
            error = done.exception()
            if error is None:
                job.result.set_result(done.result())
            else:
                job.result.set_exception(error)
        self._start()

    def _discard(self, job: _Job) -> None:
        """Remove a job that has not started."""
        queue = self._waiting.get(job.owner)
        if queue is not None and job in queue:
            queue.remove(job)
            if not queue:
                del self._waiting[job.owner]
            self._uncount(job)

    def _uncount(self, job: _Job) -> None:
        self._jobs[job.owner] -= 1
        if not self._jobs[job.owner]:
            del self._jobs[job.owner]

    def close(self) -> None:
        """Cancel jobs that have not started. Does not wait for running ones."""
        for queue in self._waiting.values():
            for job in queue:
                job.result.cancel()
        self._pool.shutdown(wait=False, cancel_futures=True)
