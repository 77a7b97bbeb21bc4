"""The consumer's side: fetches KV blocks of other engines into reserved host slots.

Each producer has a thread and a connection, which are created when first used. Results are queued
for the engine's loop.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from dataclasses import dataclass

from llaisys.engine.kv_transfer.connection import (
    MAX_HELLO,
    VERSION,
    Connection,
    Done,
    Fetch,
    Found,
    Hello,
    TransferError,
    connect,
    decode_challenge,
    decode_found,
    decode_welcome,
    proof_of,
)
from llaisys.engine.kv_transfer.host_memory import HostMemory, KvLayout

logger = logging.getLogger("llaisys.engine")

TIMEOUT = 5.0  # seconds without progress, and for the handshake
IDLE_SECONDS = 5.0  # interval of checks whether a producer has ended: its memory is mapped here


@dataclass(slots=True, eq=False)
class FetchJob:
    """A fetch into `slots`, which nothing else uses until the job is returned."""

    source: str  # address of the producer
    fetch: Fetch
    slots: list[int]
    num_prompt_tokens: int
    start_time: float = 0.0
    # Set by the thread:
    num_tokens: int = 0  # of the prompt, from its beginning, that are in the slots or before them
    num_bytes: int = 0
    seconds: float = 0.0
    error: str = ""
    is_cancelled: bool = False  # by the engine's loop: fetch no block


class KvClient:
    """Owns its threads and connections; borrows the memory."""

    def __init__(self, token: bytes, layout: KvLayout, memory: HostMemory) -> None:
        self._token = token
        self._layout = layout
        self._memory = memory
        self._sources: dict[str, queue.SimpleQueue[FetchJob | None]] = {}  # by address
        self._lock = threading.Lock()  # of _sources
        self._finished: queue.SimpleQueue[FetchJob] = queue.SimpleQueue()

    def start(self, job: FetchJob) -> None:
        job.start_time = time.monotonic()
        with self._lock:
            jobs = self._sources.get(job.source)
            is_new = jobs is None
            if jobs is None:
                jobs = self._sources[job.source] = queue.SimpleQueue()
            jobs.put(job)
        if is_new:
            source = _Source(job.source, self._token, self._layout, self._memory)
            thread = threading.Thread(
                target=self._run, args=(source, jobs), name="kv-fetch", daemon=True
            )
            thread.start()

    def take_finished(self) -> FetchJob | None:
        try:
            return self._finished.get_nowait()
        except queue.Empty:
            return None

    def close(self) -> None:
        """Ends the threads after their current jobs."""
        with self._lock:
            for jobs in self._sources.values():
                jobs.put(None)

    def _next(self, source: _Source, jobs: queue.SimpleQueue[FetchJob | None]) -> FetchJob | None:
        """Wait for a job; None: the thread ends, because the client is closed or the producer has
        ended."""
        while True:
            with contextlib.suppress(queue.Empty):
                return jobs.get(timeout=IDLE_SECONDS)
            with self._lock:
                if source.is_lost and jobs.empty():
                    del self._sources[source.address]
                    return None

    def _run(self, source: _Source, jobs: queue.SimpleQueue[FetchJob | None]) -> None:
        while (job := self._next(source, jobs)) is not None:
            try:
                if job.is_cancelled:
                    job.fetch.max_blocks = 0  # the producer frees the prompt
                source.fetch(job)
            except Exception as error:  # the request is computed here instead
                job.num_tokens, job.error = 0, str(error) or type(error).__name__
                source.close()
                if not isinstance(error, TransferError):
                    logger.exception("KV transfer failed")
            job.seconds = time.monotonic() - job.start_time
            self._finished.put(job)
        source.close()


class _Source:
    """The connection to one producer."""

    def __init__(self, address: str, token: bytes, layout: KvLayout, memory: HostMemory) -> None:
        self.address = address
        self._token = token
        self._layout = layout
        self._memory = memory
        self._connection: Connection | None = None
        self._theirs: HostMemory | None = None  # over a Unix socket

    @property
    def is_lost(self) -> bool:
        return self._connection is None or self._connection.is_closed

    def fetch(self, job: FetchJob) -> None:
        """Fill the slots of a job, which fails with TransferError."""
        connection = self._connection or self._open()
        connection.send(job.fetch)
        found = connection.receive(decode_found)
        self._check(job, found)
        for source, slot in zip(found.slots, job.slots, strict=False):
            if self._theirs is not None:
                if not 0 <= source < self._theirs.num_slots:
                    raise TransferError(f"slot {source} of {self._theirs.num_slots}")
                self._memory.copy_from(self._theirs, source, slot)
            else:
                for view in self._memory.views(slot):
                    connection.receive_into(view)
            job.num_bytes += sum(self._memory.slot_bytes)
        if found.slots:
            connection.send(Done())
        job.num_tokens = found.num_tokens

    def _check(self, job: FetchJob, found: Found) -> None:
        """Reject a reply that does not fit the request."""
        start = job.fetch.start * self._layout.block_size
        blocks = -(-(found.num_tokens - start) // self._layout.block_size)
        is_empty = found.num_tokens == 0 and not found.slots
        if not is_empty and not (
            start < found.num_tokens < job.num_prompt_tokens
            and blocks == len(found.slots) <= len(job.slots)
        ):
            raise TransferError(
                f"{found.num_tokens} tokens in {len(found.slots)} blocks for a prompt of "
                f"{job.num_prompt_tokens} tokens from {start} on"
            )

    def _open(self) -> Connection:
        self.close()
        connection = self._connection = connect(self.address, TIMEOUT)
        challenge = connection.receive(decode_challenge, MAX_HELLO)
        if challenge.version != VERSION:
            raise TransferError(f"protocol version {challenge.version}, not {VERSION}")
        layout = self._layout.text()
        connection.send(Hello(proof_of(self._token, challenge, layout), layout))
        welcome = connection.receive(decode_welcome, MAX_HELLO)
        if welcome.error:
            raise TransferError(welcome.error)
        if connection.is_local:
            self._map(connection)
        return connection

    def _map(self, connection: Connection) -> None:
        descriptors = connection.receive_descriptors(len(self._layout.slot_bytes))
        try:
            num_slots = os.fstat(descriptors[0]).st_size // self._layout.slot_bytes[0]
            self._theirs = HostMemory(descriptors, num_slots, writable=False)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        if self._theirs.slot_bytes != self._layout.slot_bytes:
            raise TransferError(f"slots of {self._theirs.slot_bytes} bytes")

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._theirs is not None:
            self._theirs.close()
            self._theirs = None
