"""The running and the waiting queue: start, preemption and end of requests. Requests change queues
here and nowhere else."""

import time

from llaisys.common.request import Request, RequestStatus
from llaisys.engine.block_manager import BlockManager
from llaisys.engine.fair_queue import FairQueue
from llaisys.engine.lora_slots import LoraSlots


class RequestQueues:
    """Owner of both queues. Running requests own KV blocks and hold the
    LoRA slot of their adapter, waiting requests own none."""

    def __init__(self, blocks: BlockManager, num_lora_slots: int = 0) -> None:
        self.blocks = blocks
        self.loras = LoraSlots(num_lora_slots)
        self.waiting = FairQueue()
        self.running: list[Request] = []  # in order of admission
        self.released: list[int] = []  # sequences to release on the worker
        self.num_preemptions = 0

    def start(self, request: Request, num_cached: int, num_from_host: int = 0) -> None:
        """Move a request from waiting to running. `num_cached`: prompt tokens found in the prefix
        cache, `num_from_host` of them in host memory."""
        self.waiting.start(request)
        self.loras.acquire(request)
        request.set_status(RequestStatus.RUNNING)
        request.num_computed_tokens = num_cached
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = num_cached
            request.num_host_cached_tokens = num_from_host
            request.scheduled_time = time.monotonic()
        self.running.append(request)

    def preempt(self, victim: Request) -> None:
        """Free a running request's blocks and move it to waiting; it is recomputed later."""
        self._release(victim)
        self.waiting.preempt(victim)
        victim.set_status(RequestStatus.PREEMPTED)
        victim.num_computed_tokens = victim.num_discarded_tokens = 0
        victim.draft_token_ids = []  # proposed for the step that does not have it
        victim.num_preemptions += 1
        self.num_preemptions += 1

    def finish(self, request: Request, status: RequestStatus) -> None:
        """Remove a running or waiting request."""
        self.waiting.remove(request)
        if request.status is RequestStatus.RUNNING:
            self._release(request)
        else:
            self.blocks.forget_waiting(request)
            self.loras.forget_waiting(request)
        request.set_status(status)

    def take_released(self) -> list[int]:
        """Return the sequences to release on the worker, each once."""
        released, self.released = self.released, []
        return released

    def _release(self, request: Request) -> None:
        self.running.remove(request)
        self.blocks.free(request)
        self.loras.release(request)
        self.released.append(request.seq_id)
