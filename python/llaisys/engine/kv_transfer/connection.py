"""Sockets of the KV transfer: addresses, frames with a length, and descriptors of shared memory.

    unix:/path      engines of one machine; blocks are read from the producer's memory
    tcp:host:port   engines of several machines; blocks are sent

A Unix socket is in a directory of mode 0700. TCP is not encrypted: use a trusted network.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import msgspec

from llaisys.engine.kv_transfer.messages import MAX_FRAME
from llaisys.processes.channel import encode

T = TypeVar("T")

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
