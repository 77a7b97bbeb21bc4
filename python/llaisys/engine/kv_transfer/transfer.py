"""The KV transfer of one engine: blocks that requests wait for, and prompts that are published.

Owned by the engine core and used in its thread only; `KvServer` and `KvClient` own the threads.
"""

import logging
import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llaisys.common.request import Request, RequestStatus
from llaisys.common.types import BlockCopy, ModelInfo
from llaisys.engine.block_manager import BlockManager
from llaisys.engine.config import EngineConfig
from llaisys.engine.kv_transfer.client import FetchJob, KvClient
from llaisys.engine.kv_transfer.connection import Fetch
from llaisys.engine.kv_transfer.host_memory import HostMemory, KvLayout
from llaisys.engine.kv_transfer.server import KvServer, PublishedPrompt
from llaisys.engine.prefix_nodes import Node

logger = logging.getLogger("llaisys.engine")


@dataclass(slots=True)
class TransferStats:
    """Counters since the start."""

    sent_blocks: int = 0  # published, for other engines
    received_blocks: int = 0
    received_bytes: int = 0
    seconds: float = 0.0  # from the request to the last block, over all transfers
    failures: int = 0


class KvTransfer:
    """A stage of `Admission`. `copy_blocks`: executes copies between blocks and host slots now."""

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
        self._waiting: dict[FetchJob, Sequence[Request]] = {}  # jobs whose blocks are used
        self._num_jobs = 0  # not taken from the client

    @property
    def address(self) -> str:
        """Where other engines fetch published prompts."""
        return self._server.address

    # ---- producer ------------------------------------------------------------------------------

    def publish(self, request: Request) -> None:
        """Make the blocks of a computed prompt available to another engine. A failure is logged:
        the other engine computes the prompt."""
        slots, num_tokens = _export_prefix(self._blocks, request)
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

    def begin(self, requests: Sequence[Request]) -> FetchJob | None:
        """Fetch the blocks of a prompt, if another engine has computed it. None: there is nothing
        to fetch or no host slot."""
        first = requests[0]
        if not first.kv_source:
            return None
        start, slots = 0, list[int]()
        if self._execute_copies():
            start, slots = _reserve_prefix(self._blocks, first)
        name, _, source = first.kv_source.partition("@")
        tokens = _to_wire(first.prompt_token_ids)
        fetch = Fetch(name, tokens, first.cache_salt, start, len(slots))
        job = FetchJob(source, fetch, slots, first.num_prompt_tokens, is_cancelled=not slots)
        self._num_jobs += 1
        self._client.start(job)
        if not slots:
            return None
        for request in requests:
            request.set_status(RequestStatus.WAITING_FOR_REMOTE_KVS)
        self._waiting[job] = requests
        return job

    def poll(self, timeout: float = 0.0) -> None:
        """Take the results of transfers; does not wait."""
        for slots in self._server.take_finished():
            self._blocks.host.unlock(slots)
        while self._num_jobs and (job := self._client.take_finished()) is not None:
            self._num_jobs -= 1
            requests = self._waiting.pop(job, None)
            if requests is None:  # cancelled, or nothing was fetched
                self._blocks.host.cancel(job.slots)
                continue
            self._finish(requests[0], job)
            for request in requests:
                request.set_status(RequestStatus.WAITING)

    def is_ready(self, job: FetchJob) -> bool:
        """Whether the transfer has ended, with the blocks or without."""
        return job not in self._waiting

    def end(self, job: FetchJob) -> None:
        """A cancelled job ends later, and `poll` frees its slots."""
        job.is_cancelled = True
        self._waiting.pop(job, None)

    @property
    def is_busy(self) -> bool:
        """Whether `poll` should be called soon."""
        return self._num_jobs > 0

    def _finish(self, request: Request, job: FetchJob) -> None:
        used = _insert_prefix(self._blocks, request, job.fetch.start, job.slots, job.num_tokens)
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

    def close(self) -> None:
        self._server.close()
        self._client.close()


def _to_wire(tokens: Sequence[int]) -> bytes:
    packed = array("i", tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


# ---- prefixes that enter and leave the prefix cache ----------------------------------------------


def _export_prefix(blocks: BlockManager, request: Request) -> tuple[list[int], int]:
    """Lock host slots with the computed prefix of a prompt, without its last token; return (slots,
    tokens in them). Copies of blocks that have no slot are planned: they must be executed before
    the slots are read. Slots that are not available shorten the prefix."""
    slots: list[int] = []
    num_tokens = 0
    match = blocks.match_prefix(request)
    blocks.forget_waiting(request)
    for node in match.nodes if match.tail is None else [*match.nodes, match.tail]:
        if node.host_slot < 0 and node.block >= 0:
            blocks.save_to_host(node)
        if node.host_slot < 0:  # no slot was available, or another one took its slot
            break
        blocks.host.lock(node.host_slot)
        slots.append(node.host_slot)
        num_tokens += len(node.tokens)
    return slots, num_tokens


def _reserve_prefix(blocks: BlockManager, request: Request) -> tuple[int, list[int]]:
    """Reserve host slots for the blocks of a prompt that are not cached, without its last token;
    return (number of leading blocks that are cached, slots). No slots: nothing is missing, or none
    is available."""
    match = blocks.match_prefix(request)
    num_blocks = len(blocks.keys(request)) + bool(blocks.tail(request))
    blocks.forget_waiting(request)
    if match.pending or match.tail is not None:
        return len(match.nodes), []  # another request computes it, or all is cached
    slots, evicted = blocks.host.reserve(num_blocks - len(match.nodes))
    for node in evicted:
        blocks.nodes.drop(node)
    return len(match.nodes), slots


def _insert_prefix(
    blocks: BlockManager, request: Request, start: int, slots: list[int], num_tokens: int
) -> int:
    """Add the prefix nodes of received blocks from block `start` on; `num_tokens` of the prompt are
    received or were cached. Frees the slots that are not needed; returns the number of used slots.
    """
    keys, salt = list(blocks.keys(request)), request.prefix_salt
    tail = blocks.tail(request)
    blocks.forget_waiting(request)
    parent: Node | None = None
    for key, tokens in keys[:start]:
        parent = blocks.nodes.find(key, parent, salt, tokens)
        if parent is None:  # evicted meanwhile
            num_tokens = 0
            break
    found = keys[start : num_tokens // blocks.block_size]
    if tail and num_tokens == len(keys) * blocks.block_size + len(tail):
        found.append((-1, tail))
    used: list[Node] = []
    for slot, (key, tokens) in zip(slots, found, strict=False):
        if tokens is tail:
            key = blocks.key_after(parent, request, tail)
        node = blocks.nodes.find(key, parent, salt, tokens)
        if node is None:
            node = Node(key, parent, salt, tokens, -1, False)
            blocks.nodes.add(node)
        if node.host_slot < 0:
            blocks.host.fill(slot, node)
            used.append(node)
        else:
            blocks.host.cancel([slot])
        parent = node
    blocks.host.cancel(slots[len(found) :])
    blocks.host.touch(used)
    return len(used)
