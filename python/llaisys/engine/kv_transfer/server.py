"""The producer's side: serves published KV blocks of this engine to other engines.

A thread accepts connections and each has a thread of its own, so that a transfer does not wait for
the engine's step. They never touch the block manager.
"""

import contextlib
import hmac
import logging
import os
import queue
import socket
import threading
import time
from dataclasses import dataclass

from llaisys.engine.kv_transfer.connection import (
    MAX_HELLO,
    NONCE_BYTES,
    VERSION,
    Challenge,
    Connection,
    Fetch,
    Found,
    TransferError,
    Welcome,
    decode_done,
    decode_fetch,
    decode_hello,
    listen,
    proof_of,
)
from llaisys.engine.kv_transfer.host_memory import HostMemory, KvLayout

logger = logging.getLogger("llaisys.engine")

MAX_CONNECTIONS = 256
HELLO_TIMEOUT = 5.0  # seconds for the handshake
SEND_TIMEOUT = 10.0  # seconds without progress
PUBLISHED_SECONDS = 60.0  # until a prompt that is not fetched is forgotten


@dataclass(slots=True, eq=False)
class PublishedPrompt:
    """The KV blocks of a computed prompt in locked host slots."""

    tokens: bytes  # as in Fetch
    salt: str
    slots: list[int]  # from the beginning of the prompt
    num_tokens: int  # in the slots
    expires: float = 0.0  # time.monotonic()


class KvServer:
    """Owns its sockets and threads; borrows the memory."""

    def __init__(self, address: str, token: bytes, layout: KvLayout, memory: HostMemory) -> None:
        self._token = token
        self._layout = layout
        self._memory = memory
        self._published: dict[str, PublishedPrompt] = {}  # by request id
        self._finished: queue.SimpleQueue[list[int]] = queue.SimpleQueue()  # slots to unlock
        self._connections: set[Connection] = set()
        self._lock = threading.Lock()  # of _published and _connections
        self._is_closed = False
        self._listener, self.address = listen(address)
        threading.Thread(target=self._accept, name="kv-accept", daemon=True).start()

    # ---- for the engine's loop -----------------------------------------------------------------

    def publish(self, request_id: str, prompt: PublishedPrompt) -> None:
        """Serve a prompt to the first consumer that asks for it; see `take_finished`."""
        prompt.expires = time.monotonic() + PUBLISHED_SECONDS
        with self._lock:
            self._published[request_id] = prompt

    def take_finished(self) -> list[list[int]]:
        """Return the slots of each prompt that was sent, failed or expired."""
        now = time.monotonic()
        with self._lock:
            expired = [name for name, p in self._published.items() if p.expires < now]
            found = [self._published.pop(name).slots for name in expired]
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._finished.get_nowait())
        return found

    def close(self) -> None:
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            connection.close()

    # ---- threads -------------------------------------------------------------------------------

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                opened, _ = self._listener.accept()
            except OSError:
                return
            connection = Connection(opened, HELLO_TIMEOUT)
            with self._lock:
                is_full = len(self._connections) >= MAX_CONNECTIONS
                if not is_full:
                    self._connections.add(connection)
            if is_full or self._is_closed:
                connection.close()
                continue
            thread = threading.Thread(
                target=self._serve, args=(connection,), name="kv-serve", daemon=True
            )
            thread.start()

    def _serve(self, connection: Connection) -> None:
        try:
            if self._handshake(connection):
                while not self._is_closed:
                    connection.set_timeout(None)  # a consumer may be idle
                    fetch = connection.receive(decode_fetch)
                    connection.set_timeout(SEND_TIMEOUT)
                    self._answer(connection, fetch)
        except TransferError as error:
            logger.debug("KV transfer: %s", error)
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()

    def _handshake(self, connection: Connection) -> bool:
        challenge = Challenge(os.urandom(NONCE_BYTES), VERSION)
        connection.send(challenge)
        hello = connection.receive(decode_hello, MAX_HELLO)
        if not hmac.compare_digest(hello.proof, proof_of(self._token, challenge, hello.layout)):
            logger.warning("KV transfer: a peer without the token was rejected")
            return False
        error = ""
        if hello.layout != self._layout.text():
            error = f"the KV layouts differ: {self._layout.text()} here, {hello.layout} there"
        connection.send(Welcome(error))
        if not error and connection.is_local:
            connection.send_descriptors(self._memory.descriptors)
        return not error

    def _answer(self, connection: Connection, fetch: Fetch) -> None:
        """Send the blocks of a published prompt, which is then finished."""
        with self._lock:
            prompt = self._published.pop(fetch.request_id, None)
        if prompt is None:
            connection.send(Found(0, []))
            return
        try:
            found = self._select(prompt, fetch)
            connection.send(found)
            if not connection.is_local:
                for slot in found.slots:
                    for view in self._memory.views(slot):
                        connection.send_bytes(view)
            if found.slots:
                connection.receive(decode_done)
        finally:
            self._finished.put(prompt.slots)

    def _select(self, prompt: PublishedPrompt, fetch: Fetch) -> Found:
        """Return the part of a prompt that was asked for; none when it is another prompt."""
        slots = prompt.slots[max(0, fetch.start) :][: max(0, fetch.max_blocks)]
        if not slots or prompt.tokens != fetch.tokens or prompt.salt != fetch.salt:
            return Found(0, [])
        end = (fetch.start + len(slots)) * self._layout.block_size
        return Found(min(end, prompt.num_tokens), slots)
