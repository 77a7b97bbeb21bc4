"""Who goes next: the requests that wait, and how much of the engine everybody has.

An owner is an API key; a job is what one call of a client asks for with one priority, all its
prompts and choices. The owner with the fewest sequences running goes first; of its jobs the one of
the lowest priority value, then the one with the fewest running, then first come, first served.
Requests that name neither owner nor job are one job. Priorities say what is urgent to their owner:
they take nothing from another's share.

So a job of many choices shares with others as soon as there are any, and nobody starves: an owner
or a job without a running sequence is ahead of all that arrived later. What was preempted waits
like everything else, only ahead of what has never run in its own job. A job that others of a lower
value go ahead of rises by one for every `STARTS_PER_LEVEL` of them, so it does not wait for ever.

Pure bookkeeping: no blocks, no clock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import islice

from llaisys.common.request import Request, RequestStatus

STARTS_PER_LEVEL = 64

# Sequences of the owner that run, the job's level, its sequences that run, the arrival.
Size = tuple[int, int, int, int]


class _Owner:
    __slots__ = ("jobs", "num_running")

    def __init__(self) -> None:
        self.num_running = 0
        # Those with a sequence that runs or waits, by name and priority.
        self.jobs: dict[tuple[str, int], _Job] = {}

    @property
    def has_levels(self) -> bool:
        return len({priority for _, priority in self.jobs}) > 1


class _Job:
    __slots__ = ("num_passed", "num_running", "owner", "preempted", "priority", "waiting")

    def __init__(self, owner: _Owner, priority: int) -> None:
        self.owner = owner
        self.priority = priority  # lower: sooner
        self.num_passed = 0  # starts of what was more urgent while something of it waited
        self.num_running = 0
        self.preempted: dict[int, Request] = {}  # by sequence id; they go first
        self.waiting: OrderedDict[int, Request] = OrderedDict()  # in order of arrival

    @property
    def level(self) -> int:
        """Its priority, and what waiting has added to it."""
        return self.priority - self.num_passed // STARTS_PER_LEVEL

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
        job = owner.jobs.setdefault(_key(request), _Job(owner, request.sampling.priority))
        job.waiting[request.seq_id] = request
        self._num_waiting += 1

    def start(self, request: Request) -> None:
        """From waiting to running."""
        self._forget_waiting(request)
        self._count(request, 1)
        started = self._job_of(request)
        for job in started.owner.jobs.values():
            if job.priority > started.priority and (job.waiting or job.preempted):
                job.num_passed += 1

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
            del owner.jobs[_key(request)]
        if not owner.jobs:
            del self._owners[request.owner]

    def _job_of(self, request: Request) -> _Job:
        return self._owners[request.owner].jobs[_key(request)]

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
            return job.owner.num_running, job.level, job.num_running, heads[job].seq_id

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
        return job.owner.num_running, job.level, job.num_running, request.seq_id

    def largest(self, running: Iterable[Request]) -> Request:
        """Of the owner that has the most what is least urgent, of its largest job, the latest
        arrival. It is never the first in this order of several, so that one always goes on."""
        return max(running, key=self.size)

    def gives_way(self, waiting: Request, running: Iterable[Request]) -> Request | None:
        """The running request whose place `waiting` should have, if there is one: of an owner that
        runs at least two more, or of a job of the same owner that does, or that is less urgent.
        After the exchange the two have not changed roles, so nothing goes back and forth."""
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
    def is_shared(self) -> bool:
        """Whether there is anybody who could give way to another."""
        owners = self._owners.values()
        if len(owners) > 1 and any(owner.num_running > 1 for owner in owners):
            return True
        if any(owner.has_levels for owner in owners):
            return True
        jobs = [job for owner in self._owners.values() for job in owner.jobs.values()]
        return len(jobs) > 1 and any(job.num_running > 1 for job in jobs)


def _key(request: Request) -> tuple[str, int]:
    return request.job, request.sampling.priority
