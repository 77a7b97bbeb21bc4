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

from collections import Counter, OrderedDict, deque
from collections.abc import Generator, Iterable
from heapq import heapify, heappop, heappush
from itertools import islice

from llaisys.common.request import Request, RequestStatus

STARTS_PER_LEVEL = 64
MAX_STALE_ENTRIES = 64  # of an owner's heap, beside those that are as many as the valid ones

# (running sequences of the owner, level of the job, its running sequences, sequence id)
SortKey = tuple[int, int, int, int]
# (level of the job, its running sequences, sequence id of its first waiting request, the job)
Entry = tuple[int, int, int, "_Job"]


class _Owner:
    __slots__ = ("heap", "jobs", "num_running", "priorities")

    def __init__(self) -> None:
        self.num_running = 0
        # Jobs with running or waiting sequences, by name and priority.
        self.jobs: dict[tuple[str, int], _Job] = {}
        self.priorities: Counter[int] = Counter()  # of the jobs
        self.heap: list[Entry] = []  # of the jobs with waiting requests; an entry may be stale

    @property
    def has_levels(self) -> bool:
        return len(self.priorities) > 1

    def first_entry(self) -> Entry | None:
        """Return the entry of the next job to start a request; None: no request waits."""
        heap = self.heap
        while heap and heap[0][3].entry is not heap[0]:
            heappop(heap)
        return heap[0] if heap else None

    def set_entry(self, job: _Job, head: Request | None) -> None:
        """Order a job by its next request; None: none waits."""
        job.entry = None
        if head is not None:
            job.entry = job.level, job.num_running, head.seq_id, job
            heappush(self.heap, job.entry)
            if len(self.heap) > MAX_STALE_ENTRIES + 2 * len(self.jobs):
                self.heap = [entry for entry in self.heap if entry[3].entry is entry]
                heapify(self.heap)


class _Job:
    __slots__ = ("entry", "num_passed", "num_running", "owner", "preempted", "priority", "waiting")

    def __init__(self, owner: _Owner, priority: int) -> None:
        self.owner = owner
        self.priority = priority  # lower values first
        self.num_passed = 0  # more urgent requests that started while this job waited
        self.num_running = 0
        self.preempted: dict[int, Request] = {}  # by sequence id; they start first
        self.waiting: OrderedDict[int, Request] = OrderedDict()  # in order of arrival
        self.entry: Entry | None = None  # the valid one of the owner's heap

    @property
    def level(self) -> int:
        """The priority after aging; lower values first."""
        return self.priority - self.num_passed // STARTS_PER_LEVEL

    def sort_key(self, request: Request) -> SortKey:
        """The starting order of its requests among those of other jobs."""
        return self.owner.num_running, self.level, self.num_running, request.seq_id

    def in_order(self, limit: int) -> deque[Request]:
        """Return the preempted and up to `limit` other requests in starting order."""
        preempted = [self.preempted[seq_id] for seq_id in sorted(self.preempted)]
        return deque([*preempted, *islice(self.waiting.values(), limit)])

    def update_entry(self) -> None:
        """Order the job again, after any change of its requests."""
        head = None
        if self.preempted:
            head = self.preempted[min(self.preempted)]
        elif self.waiting:
            head = next(iter(self.waiting.values()))
        self.owner.set_entry(self, head)


class FairQueue:
    """Waiting requests, and counts of the running ones."""

    def __init__(self) -> None:
        self._owners: dict[str, _Owner] = {}
        self._num_waiting = 0
        self._num_large_jobs = 0  # with more than one running sequence

    def __len__(self) -> int:
        """The number of waiting requests, preempted ones included."""
        return self._num_waiting

    @property
    def num_owners(self) -> int:
        """Owners of unfinished requests."""
        return len(self._owners)

    # ---- changes of state ----------------------------------------------------------------------

    def add(self, request: Request) -> None:
        owner = self._owners.setdefault(request.owner, _Owner())
        job = owner.jobs.get(_key(request))
        if job is None:
            job = owner.jobs[_key(request)] = _Job(owner, request.sampling.priority)
            owner.priorities[job.priority] += 1
        job.waiting[request.seq_id] = request
        self._num_waiting += 1
        if job.entry is None:
            job.update_entry()

    def start(self, request: Request) -> None:
        """Move a request from waiting to running."""
        started = self._job_of(request)
        self._remove_waiting(started, request)
        self._count(started, 1)
        if not started.owner.has_levels:
            return
        for job in started.owner.jobs.values():
            if job.priority > started.priority and (job.waiting or job.preempted):
                job.num_passed += 1
                if not job.num_passed % STARTS_PER_LEVEL:
                    job.update_entry()

    def preempt(self, request: Request) -> None:
        """Move a request from running to waiting."""
        job = self._job_of(request)
        job.preempted[request.seq_id] = request
        self._num_waiting += 1
        self._count(job, -1)

    def remove(self, request: Request) -> None:
        """Remove a request that finishes; its status is still the one before."""
        owner, job = self._owners[request.owner], self._job_of(request)
        if request.status is RequestStatus.RUNNING:
            self._count(job, -1)
        else:
            self._remove_waiting(job, request)
            job.update_entry()
        if not (job.num_running or job.waiting or job.preempted):
            del owner.jobs[_key(request)]
            owner.priorities[job.priority] -= 1
            if not owner.priorities[job.priority]:
                del owner.priorities[job.priority]
        if not owner.jobs:
            del self._owners[request.owner]

    def _job_of(self, request: Request) -> _Job:
        return self._owners[request.owner].jobs[_key(request)]

    def _count(self, job: _Job, change: int) -> None:
        was_large = job.num_running > 1
        job.num_running += change
        job.owner.num_running += change
        self._num_large_jobs += (job.num_running > 1) - was_large
        job.update_entry()

    def _remove_waiting(self, job: _Job, request: Request) -> None:
        if job.preempted.pop(request.seq_id, None) is None:
            del job.waiting[request.seq_id]
        self._num_waiting -= 1

    # ---- order -----------------------------------------------------------------------------------

    def candidates(self, limit: int) -> Generator[Request, None, None]:
        """Yield up to `limit` waiting requests in starting order, which follows the requests that
        start during the iteration. Each costs the time of a heap operation, however many wait.
        Close it before another iteration."""
        queues: dict[_Job, deque[Request]] = {}  # of the jobs reached so far
        try:
            for _ in range(limit):
                entries = [
                    (owner.num_running, entry)
                    for owner in self._owners.values()
                    if (entry := owner.first_entry()) is not None
                ]
                if not entries:
                    return
                job = min(entries)[1][3]
                if job not in queues:
                    queues[job] = job.in_order(limit)
                queue = queues[job]
                if queue:  # empty: only a request that was preempted meanwhile
                    yield queue.popleft()
                job.owner.set_entry(job, queue[0] if queue else None)
        finally:
            for job in queues:
                job.update_entry()

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
        return self._num_large_jobs > 0 and any(len(owner.jobs) > 1 for owner in owners)


def _key(request: Request) -> tuple[str, int]:
    return request.job, request.sampling.priority
