"""The KV transfer of one engine: requests that wait for blocks, and prompts that are published.

Owned by the engine core and used in its thread only; `KvServer` and `KvClient` own the threads.
"""

from __future__ import annotations

import logging
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from llaisys.common.request import Request, RequestStatus
from llaisys.common.types import BlockCopy, ModelInfo
from llaisys.engine.block_manager import BlockManager
from llaisys.engine.config import EngineConfig
from llaisys.engine.kv_transfer.client import FetchJob, KvClient
from llaisys.engine.kv_transfer.host_memory import HostMemory, KvLayout
from llaisys.engine.kv_transfer.messages import Fetch
from llaisys.engine.kv_transfer.prefixes import export_prefix, insert_prefix, reserve_prefix
from llaisys.engine.kv_transfer.server import KvServer, PublishedPrompt

logger = logging.getLogger("llaisys.engine")


@dataclass(slots=True)
class PendingTransfer:
    """The choices of a prompt whose blocks are being received."""

    requests: Sequence[Request]
    deadline: float | None
    job: FetchJob


@dataclass(slots=True)
class TransferStats:
    """Counters since the start."""

    sent_blocks: int = 0  # published, for other engines
    received_blocks: int = 0
    received_bytes: int = 0
    seconds: float = 0.0  # from the request to the last block, over all transfers
    failures: int = 0


class KvTransfer:
    """`copy_blocks`: executes copies between blocks and host slots at once."""

    def __init__(
        self,
        config: EngineConfig,
        info: ModelInfo,
        blocks: BlockManager,
        host_files: Sequence[int],
        copy_blocks: Callable[[list[BlockCopy]], None],
        address: str,
        token: bytes,
    ) -> None:
        self.stats = TransferStats()
        self._blocks = blocks
        self._copy_blocks = copy_blocks
        self._memory = HostMemory(host_files, info.num_host_blocks, writable=True)
        layout = KvLayout.of(config, info, self._memory)
        self._client = KvClient(token, layout, self._memory)
        self._server = KvServer(address, token, layout, self._memory)
        self._pending: list[PendingTransfer] = []
        self._num_jobs = 0  # not taken from the client

    @property
    def address(self) -> str:
        """Where other engines fetch published prompts."""
        return self._server.address

    # ---- producer ------------------------------------------------------------------------------

    def publish(self, request: Request) -> None:
        """Make the blocks of a computed prompt available to another engine. A failure is logged:
        the other engine computes the prompt."""
        slots, num_tokens = export_prefix(self._blocks, request)
        if not self._execute_copies():
            self._blocks.host.unlock(slots)
            return
        self.stats.sent_blocks += len(slots)
        tokens = _to_wire(request.prompt_token_ids)
        prompt = PublishedPrompt(tokens, request.cache_salt, slots, num_tokens)
        self._server.publish(request.request_id, prompt)

    def _execute_copies(self) -> bool:
        """Execute the copies that are planned for the next step: host slots are about to be used
        outside of steps. Returns False when that fails."""
        copies = self._blocks.host.take_copies()
        try:
            if copies:
                self._copy_blocks(copies)
        except Exception:
            self._blocks.undo_copies(copies)
            self.stats.failures += 1
            logger.exception("KV transfer: blocks could not be copied")
            return False
        return True

    # ---- consumer ------------------------------------------------------------------------------

    def add(self, requests: Sequence[Request], deadline: float | None) -> bool:
        """Fetch the blocks of a prompt; `poll` returns the requests. False: there is nothing to
        fetch or no host slot, and the requests can be queued."""
        first = requests[0]
        start, slots = 0, list[int]()
        if self._execute_copies():
            start, slots = reserve_prefix(self._blocks, first)
        name, _, source = first.kv_source.partition("@")
        tokens = _to_wire(first.prompt_token_ids)
        fetch = Fetch(name, tokens, first.cache_salt, start, len(slots))
        job = FetchJob(source, fetch, slots, first.num_prompt_tokens, is_cancelled=not slots)
        if slots:
            for request in requests:
                request.set_status(RequestStatus.WAITING_FOR_REMOTE_KVS)
            self._pending.append(PendingTransfer(requests, deadline, job))
        self._num_jobs += 1
        self._client.start(job)
        return bool(slots)

    def poll(self) -> list[PendingTransfer]:
        """Return the requests whose transfer has ended, with their blocks or without."""
        for slots in self._server.take_finished():
            self._blocks.host.unlock(slots)
        ready = []
        while self._num_jobs and (job := self._client.take_finished()) is not None:
            self._num_jobs -= 1
            pending = next((p for p in self._pending if p.job is job), None)
            if pending is None:  # cancelled, or nothing was fetched
                self._blocks.host.cancel(job.slots)
                continue
            self._pending.remove(pending)
            self._finish(pending.requests[0], job)
            for request in pending.requests:
                request.set_status(RequestStatus.WAITING)
            ready.append(pending)
        return ready

    def _finish(self, request: Request, job: FetchJob) -> None:
        used = insert_prefix(self._blocks, request, job.fetch.start, job.slots, job.num_tokens)
        stats = self.stats
        stats.received_blocks += used
        stats.received_bytes += job.num_bytes
        stats.seconds += job.seconds
        if not job.num_tokens:
            stats.failures += 1
            logger.warning(
                "KV transfer: request %s computes its prompt of %d tokens: %s",
                request.request_id,
                request.num_prompt_tokens,
                job.error or "the producer does not have its blocks",
            )

    # ---- pending requests ----------------------------------------------------------------------

    @property
    def num_pending(self) -> int:
        return sum(len(pending.requests) for pending in self._pending)

    @property
    def is_busy(self) -> bool:
        """Whether `poll` should be called soon."""
        return self._num_jobs > 0

    def pending_requests(self) -> Iterator[Request]:
        for pending in self._pending:
            yield from pending.requests

    def expire(self, now: float) -> list[PendingTransfer]:
        """Remove and return the pending requests whose deadline has passed."""
        expired = [p for p in self._pending if p.deadline is not None and p.deadline <= now]
        for pending in expired:
            self._drop(pending)
        return expired

    def cancel(self, request_id: str) -> Request | None:
        """Remove and return a pending request; None when it is not pending."""
        for pending in self._pending:
            for request in pending.requests:
                if request.request_id == request_id:
                    pending.requests = [r for r in pending.requests if r is not request]
                    if not pending.requests:
                        self._drop(pending)
                    return request
        return None

    def _drop(self, pending: PendingTransfer) -> None:
        """The job ends later, and `poll` frees its slots."""
        self._pending.remove(pending)
        pending.job.is_cancelled = True

    def close(self) -> None:
        self._server.close()
        self._client.close()


def _to_wire(tokens: Sequence[int]) -> bytes:
    packed = array("i", tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()
