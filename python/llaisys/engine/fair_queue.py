"""Who goes next: the requests that wait, and how much of the engine everybody has.

An owner is an API key; a job is one call of a client with all its prompts and choices. Whoever has
the fewest sequences running goes first: owners compared with owners, then jobs of that owner, then
first come, first served. Requests that name neither owner nor job are one job.

So a job of many choices shares with others as soon as there are any, and nobody starves: an owner
or a job without a running sequence is ahead of all that arrived later. What was preempted waits
like everything else, only ahead of what has never run in its own job.

Pure bookkeeping: no blocks, no clock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import islice

from llaisys.common.types import Request, RequestStatus

Size = tuple[int, int, int]  # sequences that run: of the owner, of the job; then the arrival


class _Owner:
    __slots__ = ("jobs", "num_running")

    def __init__(self) -> None:
        self.num_running = 0
        self.jobs: dict[str, _Job] = {}  # those with a sequence that runs or waits


class _Job:
    __slots__ = ("num_running", "owner", "preempted", "waiting")

    def __init__(self, owner: _Owner) -> None:
        self.owner = owner
        self.num_running = 0
        self.preempted: dict[int, Request] = {}  # by sequence id; they go first
        self.waiting: OrderedDict[int, Request] = OrderedDict()  # in order of arrival

    def in_order(self, limit: int) -> Iterator[Request]:
        """A copy, so that requests may leave meanwhile."""
        yield from [self.preempted[seq_id] for seq_id in sorted(self.preempted)]
        yield from list(islice(self.waiting.values(), limit))


class FairQueue:
    """The scheduler tells it who is added, started, preempted and finished."""

    def __init__(self) -> None:
        self._owners: dict[str, _Owner] = {}
        self._num_waiting = 0

    def __len__(self) -> int:
        """Requests that wait, preempted ones included."""
        return self._num_waiting

    # ---- what happens to a request -------------------------------------------------------------

    def add(self, request: Request) -> None:
        owner = self._owners.setdefault(request.owner, _Owner())
        job = owner.jobs.setdefault(request.job, _Job(owner))
        job.waiting[request.seq_id] = request
        self._num_waiting += 1

    def start(self, request: Request) -> None:
        """From waiting to running."""
        self._forget_waiting(request)
        self._count(request, 1)

    def preempt(self, request: Request) -> None:
        """From running back to waiting."""
        self._count(request, -1)
        self._job_of(request).preempted[request.seq_id] = request
        self._num_waiting += 1

    def remove(self, request: Request) -> None:
        """It has finished; its status still says where it stood."""
        if request.status is RequestStatus.RUNNING:
            self._count(request, -1)
        else:
            self._forget_waiting(request)
        owner, job = self._owners[request.owner], self._job_of(request)
        if not (job.num_running or job.waiting or job.preempted):
            del owner.jobs[request.job]
        if not owner.jobs:
            del self._owners[request.owner]

    def _job_of(self, request: Request) -> _Job:
        return self._owners[request.owner].jobs[request.job]

    def _count(self, request: Request, change: int) -> None:
        job = self._job_of(request)
        job.num_running += change
        job.owner.num_running += change

    def _forget_waiting(self, request: Request) -> None:
        job = self._job_of(request)
        if job.preempted.pop(request.seq_id, None) is None:
            del job.waiting[request.seq_id]
        self._num_waiting -= 1

    # ---- who goes next, and who gives way --------------------------------------------------------

    def candidates(self, limit: int) -> Iterator[Request]:
        """The waiting requests in the order in which they should start, at most `limit`; the order
        takes account of those that are started meanwhile."""
        jobs = [job for owner in self._owners.values() for job in owner.jobs.values()]
        queues = {job: job.in_order(limit) for job in jobs if job.waiting or job.preempted}
        heads = {job: next(queue) for job, queue in queues.items()}

        def share(job: _Job) -> Size:
            return job.owner.num_running, job.num_running, heads[job].seq_id

        for _ in range(limit):
            if not heads:
                return
            job = min(heads, key=share) if len(heads) > 1 else next(iter(heads))
            request = heads.pop(job)
            yield request
            following = next(queues[job], None)
            if following is not None:
                heads[job] = following

    def size(self, request: Request) -> Size:
        job = self._job_of(request)
        return job.owner.num_running, job.num_running, request.seq_id

    def largest(self, running: Iterable[Request]) -> Request:
        """Of the owner that has the most, and of its largest job, the latest arrival. It is never
        the oldest of several, so the oldest always goes on."""
        return max(running, key=self.size)

    def gives_way(self, waiting: Request, running: Iterable[Request]) -> Request | None:
        """The running request whose place `waiting` should have, if there is one: of an owner that
        runs at least two more, or of a job of the same owner that does. After the exchange the two
        have not changed roles, so nothing goes back and forth."""
        mine = self._job_of(waiting)
        found: list[Request] = []
        for request in running:
            job = self._job_of(request)
            if job.owner is mine.owner:
                is_larger = job.num_running >= mine.num_running + 2
            else:
                is_larger = job.owner.num_running >= mine.owner.num_running + 2
            if is_larger:
                found.append(request)
        return self.largest(found) if found else None

    @property
    def is_shared(self) -> bool:
        """Whether there is anybody who could give way to another."""
        if len(self._owners) > 1:
            return any(owner.num_running > 1 for owner in self._owners.values())
        jobs = [job for owner in self._owners.values() for job in owner.jobs.values()]
        return len(jobs) > 1 and any(job.num_running > 1 for job in jobs)
