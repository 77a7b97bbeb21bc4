"""Who runs and who waits, and the blocks they hold. A request moves here and nowhere else."""

from __future__ import annotations

import time

from llaisys.common.request import Request, RequestStatus
from llaisys.engine.block_manager import BlockManager
from llaisys.engine.fair_queue import FairQueue


class RequestQueues:
    """Owner of the queues."""

    def __init__(self, blocks: BlockManager) -> None:
        self.blocks = blocks
        self.waiting = FairQueue()
        self.running: list[Request] = []  # in order of admission
        self.released: list[int] = []  # sequences that the worker may forget
        self.num_preemptions = 0

    def start(self, request: Request, num_cached: int, num_from_host: int = 0) -> None:
        """Out of the queue and among the running ones; `num_cached` tokens are a known prefix, of
        which `num_from_host` come from host memory."""
        self.waiting.start(request)
        request.set_status(RequestStatus.RUNNING)
        request.num_computed_tokens = num_cached
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = num_cached
            request.num_host_cached_tokens = num_from_host
            request.scheduled_time = time.monotonic()
        self.running.append(request)

    def preempt(self, victim: Request) -> None:
        """Take a running request's blocks; it waits, and computes its tokens anew."""
        self._leave(victim)
        self.waiting.preempt(victim)
        victim.set_status(RequestStatus.PREEMPTED)
        victim.num_computed_tokens = victim.num_discarded_tokens = 0
        victim.num_preemptions += 1
        self.num_preemptions += 1

    def finish(self, request: Request, status: RequestStatus) -> None:
        """Wherever it is."""
        self.waiting.remove(request)
        if request.status is RequestStatus.RUNNING:
            self._leave(request)
        else:
            self.blocks.forget_waiting(request)
        request.set_status(status)

    def hand_over_released(self) -> list[int]:
        """The sequences that the worker may forget; they are named once."""
        released, self.released = self.released, []
        return released

    def _leave(self, request: Request) -> None:
        """Out of the running ones: blocks back, and the worker may forget the sequence."""
        self.running.remove(request)
        self.blocks.free(request)
        self.released.append(request.seq_id)
