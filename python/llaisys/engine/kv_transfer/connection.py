"""Sockets of the KV transfer: addresses, typed messages, and descriptors of shared memory.

    unix:/path      engines of one machine; blocks are read from the producer's memory
    tcp:host:port   engines of several machines; blocks are sent

A Unix socket is in a directory of mode 0700. TCP is not encrypted: use a trusted network.

A connection begins with Challenge, Hello and Welcome. Then the consumer sends Fetch; the producer
replies Found, followed by the bytes of the blocks unless both map the same memory; the consumer
sends Done. Messages are msgpack frames with a length; nothing in them is executed.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import msgspec
from msgspec import Struct

from llaisys.processes.channel import decoder, encode

T = TypeVar("T")

VERSION = 1
NONCE_BYTES = 32
MAX_FRAME = 64 << 20  # bytes of a message: a prompt of 16 million tokens
MAX_HELLO = 4096  # bytes of a message before the peer is authenticated
LENGTH = struct.Struct("<I")
MAX_DESCRIPTORS = 64


class TransferError(Exception):
    """The transfer failed: the peer is lost, too slow, or its reply is invalid."""


def listen(address: str) -> tuple[socket.socket, str]:
    """Return a listening socket and its address, in which port 0 is replaced."""
    kind, _, rest = address.partition(":")
    if kind == "unix":
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(rest)
        os.chmod(rest, 0o600)
    else:
        host, _, port = rest.rpartition(":")
        listener = socket.create_server((host, int(port)))
        address = f"tcp:{host}:{listener.getsockname()[1]}"
    listener.listen(MAX_DESCRIPTORS)
    return listener, address


def connect(address: str, timeout: float) -> Connection:
    """Raises TransferError."""
    kind, _, rest = address.partition(":")
    try:
        if kind == "unix":
            opened = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            opened.settimeout(timeout)
            opened.connect(rest)
        else:
            host, _, port = rest.rpartition(":")
            opened = socket.create_connection((host, int(port)), timeout)
    except (OSError, ValueError) as error:
        raise TransferError(f"cannot connect to {address}: {error}") from error
    return Connection(opened, timeout)


@contextlib.contextmanager
def _peer_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise TransferError(f"the peer is lost: {error}") from error


class Connection:
    """A connected socket. Each call takes at most `timeout` seconds without progress and raises
    TransferError when it fails."""

    def __init__(self, opened: socket.socket, timeout: float) -> None:
        self._socket = opened
        self._socket.settimeout(timeout)
        self.is_local = opened.family == socket.AF_UNIX
        if not self.is_local:
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def set_timeout(self, timeout: float | None) -> None:
        self._socket.settimeout(timeout)

    def send(self, message: msgspec.Struct) -> None:
        frame = encode(message)
        self.send_bytes(LENGTH.pack(len(frame)) + frame)

    def send_bytes(self, data: bytes | memoryview) -> None:
        with _peer_errors():
            self._socket.sendall(data)

    def receive(self, decode: Callable[[bytes], T], limit: int = MAX_FRAME) -> T:
        header = bytearray(LENGTH.size)
        self.receive_into(memoryview(header))
        [length] = LENGTH.unpack(header)
        if length > limit:
            raise TransferError(f"a message of {length} bytes; at most {limit} are allowed")
        frame = bytearray(length)
        self.receive_into(memoryview(frame))
        try:
            return decode(bytes(frame))
        except (msgspec.MsgspecError, ValueError) as error:
            raise TransferError(f"an invalid message: {error}") from error

    def receive_into(self, view: memoryview) -> None:
        while view:
            with _peer_errors():
                count = self._socket.recv_into(view)
            if not count:
                raise TransferError("the peer has closed the connection")
            view = view[count:]

    @property
    def is_closed(self) -> bool:
        """Whether the peer has closed an idle connection."""
        try:
            return not self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def send_descriptors(self, descriptors: Sequence[int]) -> None:
        with _peer_errors():
            socket.send_fds(self._socket, [b"\0"], list(descriptors))

    def receive_descriptors(self, count: int) -> list[int]:
        """Return `count` descriptors, which the caller owns."""
        with _peer_errors():
            _, found, _, _ = socket.recv_fds(self._socket, 1, MAX_DESCRIPTORS)
        if len(found) != count:
            for descriptor in found:
                os.close(descriptor)
            raise TransferError(f"{len(found)} descriptors of host memory, not {count}")
        return list(found)

    def close(self) -> None:
        """Also ends a call of another thread."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class Challenge(Struct, tag="challenge", forbid_unknown_fields=True):
    nonce: bytes
    version: int = VERSION


class Hello(Struct, tag="hello", forbid_unknown_fields=True):
    """`proof`: see `proof_of`."""

    proof: bytes
    layout: str  # see `KvLayout`


class Welcome(Struct, tag="welcome", forbid_unknown_fields=True):
    """`error`: why the connection is closed; empty: none. Over a Unix socket the descriptors of the
    producer's host slots follow, one per rank."""

    error: str = ""


class Fetch(Struct, tag="fetch", forbid_unknown_fields=True):
    """Ask for the blocks of a published prompt from block `start` on."""

    request_id: str  # of the producer's request
    tokens: bytes  # the whole prompt: int32, little endian
    salt: str
    start: int
    max_blocks: int


class Found(Struct, tag="found", forbid_unknown_fields=True):
    """The blocks that follow `start`. Over a Unix socket they are in `slots` of the producer's host
    memory until Done; otherwise their bytes follow."""

    num_tokens: int  # of the prompt, from its beginning; 0: none
    slots: list[int]


class Done(Struct, tag="done", forbid_unknown_fields=True):
    """The blocks of the last Found are copied."""


def proof_of(token: bytes, challenge: Challenge, layout: str) -> bytes:
    """Return the proof that the sender knows the shared token."""
    text = challenge.nonce + layout.encode()
    return hmac.new(token, text, hashlib.sha256).digest()


decode_challenge = decoder(Challenge)
decode_hello = decoder(Hello)
decode_welcome = decoder(Welcome)
decode_fetch = decoder(Fetch)
decode_found = decoder(Found)
decode_done = decoder(Done)
