"""Requests on their way to the waiting queue, and the ends that time sets them.

A request is pending until every stage that it needs has prepared it, in order: its LoRA adapter is
read into host memory, its KV blocks are received from another engine, its grammar is compiled. Then
it is queued. The choices of a prompt are admitted and rejected together.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Any, Protocol

from llaisys.common.errors import InvalidInputError
from llaisys.common.request import Request, RequestStatus
from llaisys.engine.scheduler import RequestScheduler
from llaisys.engine.structured.requests import GrammarFaultError

logger = logging.getLogger("llaisys.engine")

Rejected = tuple[Sequence[Request], Exception]


class Stage(Protocol):
    """Prepares something that requests need. A ticket identifies one preparation."""

    def begin(self, requests: Sequence[Request]) -> Any:
        """Start to prepare the choices of a prompt and return a ticket; None: nothing to wait for.
        InvalidInputError rejects them."""

    def poll(self, timeout: float) -> None:
        """Make progress; may wait for at most `timeout` seconds."""

    def is_ready(self, ticket: Any) -> bool:
        """Whether the requests can go on; raises when the preparation has failed."""

    def end(self, ticket: Any) -> None:
        """The requests have gone on, or were cancelled or rejected."""


@dataclass(slots=True, eq=False)
class _Pending:
    """The choices of a prompt in one stage."""

    requests: list[Request]
    deadline: float | None
    stage: Stage
    ticket: Any


class Admission:
    """Owner of the pending requests. `stages` may be changed while nothing is pending."""

    def __init__(
        self,
        scheduler: RequestScheduler,
        stages: list[Stage],
        on_queued: Callable[[Sequence[Request]], None],
    ) -> None:
        self.stages = stages
        self._scheduler = scheduler
        self._on_queued = on_queued
        self._pending: list[_Pending] = []
        # Heaps of (deadline, sequence id, request ids of one prompt): to start, and to finish.
        self._deadlines: list[tuple[float, int, list[str]]] = []
        self._timeouts: list[tuple[float, int, list[str]]] = []

    @property
    def num_timeouts(self) -> int:
        """Entries of the heap of timeouts, those of some finished requests included."""
        return len(self._timeouts)

    def add(self, requests: Sequence[Request], deadline: float | None) -> None:
        """Admit the choices of a prompt, all or none; InvalidInputError when one can never fit."""
        self._scheduler.check(requests)
        self._advance(list(requests), deadline, 0)

    def _advance(self, requests: list[Request], deadline: float | None, first: int) -> None:
        """Begin the next stage from `first` on that the requests need, or queue them."""
        for stage in self.stages[first:]:
            ticket = stage.begin(requests)
            if ticket is not None:
                self._pending.append(_Pending(requests, deadline, stage, ticket))
                return
        self._scheduler.add(requests)
        self._on_queued(requests)
        head, names = requests[0], [request.request_id for request in requests]
        if deadline is not None:
            heappush(self._deadlines, (deadline, head.seq_id, names))
        if head.sampling.timeout is not None:
            until = head.arrival_time + head.sampling.timeout
            heappush(self._timeouts, (until, head.seq_id, names))
            self._prune_timeouts()

    def poll(self, timeout: float = 0.0) -> list[Rejected]:
        """Queue the requests that are ready; return the rejected ones with their errors."""
        rejected: list[Rejected] = []
        for number, stage in enumerate(self.stages, 1):
            stage.poll(timeout)
            for pending in [p for p in self._pending if p.stage is stage]:
                try:
                    if not stage.is_ready(pending.ticket):
                        continue
                    self._advance(pending.requests, pending.deadline, number)
                except (InvalidInputError, GrammarFaultError) as error:
                    if isinstance(error, GrammarFaultError):
                        names = [request.request_id for request in pending.requests]
                        logger.error("requests %s: structured output: %s", names, error)
                    rejected.append((pending.requests, error))
                self._remove(pending)
        return rejected

    def _remove(self, pending: _Pending) -> None:
        self._pending.remove(pending)
        pending.stage.end(pending.ticket)

    @property
    def is_busy(self) -> bool:
        """Whether `poll` should be called soon."""
        return bool(self._pending)

    def pending(self, stage: Stage | None = None) -> Iterator[Request]:
        """Yield the pending requests of a stage; None: of all."""
        for pending in self._pending:
            if stage is None or pending.stage is stage:
                yield from pending.requests

    def cancel(self, request_id: str) -> bool:
        """End a pending request; False when it is not pending."""
        for pending in self._pending:
            for request in pending.requests:
                if request.request_id == request_id:
                    request.set_status(RequestStatus.FINISHED_ABORTED)
                    pending.requests.remove(request)
                    if not pending.requests:
                        self._remove(pending)
                    return True
        return False

    def expire(self) -> list[list[Request]]:
        """End and return the prompts of which no choice started before the deadline."""
        now, expired = time.monotonic(), []
        for pending in tuple(self._pending):
            if pending.deadline is not None and pending.deadline <= now:
                self._remove(pending)
                expired.append(pending.requests)
                for request in pending.requests:
                    request.set_status(RequestStatus.FINISHED_ABORTED)
        while self._deadlines and self._deadlines[0][0] <= now:
            names = heappop(self._deadlines)[2]
            found = self._scheduler.requests
            queued = [found[name] for name in names if name in found]
            if queued and all(r.status is RequestStatus.WAITING for r in queued):
                expired.append(queued)
                for request in queued:
                    self._scheduler.finish(request.request_id, RequestStatus.FINISHED_ABORTED)
        return expired

    def take_timed_out(self) -> list[str]:
        """Return the requests whose `timeout` has passed; some may have finished."""
        names: list[str] = []
        while self._timeouts and self._timeouts[0][0] <= time.monotonic():
            names += heappop(self._timeouts)[2]
        return names

    def _prune_timeouts(self) -> None:
        """Remove the entries of finished requests when they are the majority."""
        unfinished = self._scheduler.requests
        if len(self._timeouts) > 64 + 2 * len(unfinished):
            self._timeouts = [e for e in self._timeouts if any(n in unfinished for n in e[2])]
            heapify(self._timeouts)
