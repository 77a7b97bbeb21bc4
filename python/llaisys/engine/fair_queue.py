"""The waiting queue: fair scheduling between owners and jobs, with priorities.

An owner is an API key. A job is one client call with one priority: all its prompts and choices.
The owner with the fewest running sequences goes first; of its jobs the one with the lowest priority
value, then the one with the fewest running sequences, then first come, first served. Requests
without owner and job form one job. Priorities order the jobs of one owner only.

An owner or job without a running sequence is ahead of all later arrivals, so none starves.
Preempted requests go before the unstarted requests of their job. Aging: a job's level falls by one
for every `STARTS_PER_LEVEL` more urgent requests that start while it waits.

Bookkeeping only: no blocks, no clock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import islice

from llaisys.common.request import Request, RequestStatus

STARTS_PER_LEVEL = 64

# (running sequences of the owner, level of the job, its running sequences, sequence id)
SortKey = tuple[int, int, int, int]


class _Owner:
    __slots__ = ("jobs", "num_running")

    def __init__(self) -> None:
        self.num_running = 0
        # Jobs with running or waiting sequences, by name and priority.
        self.jobs: dict[tuple[str, int], _Job] = {}

    @property
    def has_levels(self) -> bool:
        return len({priority for _, priority in self.jobs}) > 1


class _Job:
    __slots__ = ("num_passed", "num_running", "owner", "preempted", "priority", "waiting")

    def __init__(self, owner: _Owner, priority: int) -> None:
        self.owner = owner
        self.priority = priority  # lower values first
        self.num_passed = 0  # more urgent requests that started while this job waited
        self.num_running = 0
        self.preempted: dict[int, Request] = {}  # by sequence id; they start first
        self.waiting: OrderedDict[int, Request] = OrderedDict()  # in order of arrival

    @property
    def level(self) -> int:
        """The priority after aging; lower values first."""
        return self.priority - self.num_passed // STARTS_PER_LEVEL

    def sort_key(self, request: Request) -> SortKey:
        """The starting order of its requests among those of other jobs."""
        return self.owner.num_running, self.level, self.num_running, request.seq_id

    def in_order(self, limit: int) -> Iterator[Request]:
        """Yield from a copy: requests may leave during the iteration."""
        yield from [self.preempted[seq_id] for seq_id in sorted(self.preempted)]
        yield from list(islice(self.waiting.values(), limit))


class FairQueue:
    """Waiting requests, and counts of the running ones."""

    def __init__(self) -> None:
        self._owners: dict[str, _Owner] = {}
        self._num_waiting = 0

    def __len__(self) -> int:
        """The number of waiting requests, preempted ones included."""
        return self._num_waiting

    # ---- changes of state ----------------------------------------------------------------------

    def add(self, request: Request) -> None:
        owner = self._owners.setdefault(request.owner, _Owner())
        job = owner.jobs.setdefault(_key(request), _Job(owner, request.sampling.priority))
        job.waiting[request.seq_id] = request
        self._num_waiting += 1

    def start(self, request: Request) -> None:
        """Move a request from waiting to running."""
        self._remove_waiting(request)
        self._count(request, 1)
        started = self._job_of(request)
        for job in started.owner.jobs.values():
            if job.priority > started.priority and (job.waiting or job.preempted):
                job.num_passed += 1

    def preempt(self, request: Request) -> None:
        """Move a request from running to waiting."""
        self._count(request, -1)
        self._job_of(request).preempted[request.seq_id] = request
        self._num_waiting += 1

    def remove(self, request: Request) -> None:
        """Remove a request that finishes; its status is still the one before."""
        if request.status is RequestStatus.RUNNING:
            self._count(request, -1)
        else:
            self._remove_waiting(request)
        owner, job = self._owners[request.owner], self._job_of(request)
        if not (job.num_running or job.waiting or job.preempted):
            del owner.jobs[_key(request)]
        if not owner.jobs:
            del self._owners[request.owner]

    def _job_of(self, request: Request) -> _Job:
        return self._owners[request.owner].jobs[_key(request)]

    def _count(self, request: Request, change: int) -> None:
        job = self._job_of(request)
        job.num_running += change
        job.owner.num_running += change

    def _remove_waiting(self, request: Request) -> None:
        job = self._job_of(request)
        if job.preempted.pop(request.seq_id, None) is None:
            del job.waiting[request.seq_id]
        self._num_waiting -= 1

    # ---- order -----------------------------------------------------------------------------------

    def candidates(self, limit: int) -> Iterator[Request]:
        """Yield up to `limit` waiting requests in starting order, which follows the requests that
        start during the iteration."""
        jobs = [job for owner in self._owners.values() for job in owner.jobs.values()]
        queues = {job: job.in_order(limit) for job in jobs if job.waiting or job.preempted}
        heads = {job: next(queue) for job, queue in queues.items()}
        for _ in range(limit):
            if not heads:
                return
            job = next(iter(heads))
            if len(heads) > 1:
                job = min(heads, key=lambda job: job.sort_key(heads[job]))
            request = heads.pop(job)
            yield request
            following = next(queues[job], None)
            if following is not None:
                heads[job] = following

    def largest(self, running: Iterable[Request]) -> Request:
        """Return the first request to preempt: of the owner with the most running sequences, the
        least urgent and largest job, the latest arrival."""
        return max(running, key=lambda request: self._job_of(request).sort_key(request))

    def victim_for(self, waiting: Request, running: Iterable[Request]) -> Request | None:
        """Return the running request to preempt for `waiting`, if any: of an owner with at least
        two more running sequences, or of a job of the same owner that has two more or is less
        urgent. The difference of two keeps the pair from preempting each other in turn."""
        mine = self._job_of(waiting)
        found: list[Request] = []
        for request in running:
            job = self._job_of(request)
            if job.owner is mine.owner:
                is_larger = job.level > mine.level or (
                    job.level == mine.level and job.num_running >= mine.num_running + 2
                )
            else:
                is_larger = job.owner.num_running >= mine.owner.num_running + 2
            if is_larger:
                found.append(request)
        return self.largest(found) if found else None

    @property
    def can_preempt(self) -> bool:
        """Whether `victim_for` could return a request."""
        owners = self._owners.values()
        if len(owners) > 1 and any(owner.num_running > 1 for owner in owners):
            return True
        if any(owner.has_levels for owner in owners):
            return True
        jobs = [job for owner in self._owners.values() for job in owner.jobs.values()]
        return len(jobs) > 1 and any(job.num_running > 1 for job in jobs)


def _key(request: Request) -> tuple[str, int]:
    return request.job, request.sampling.priority
