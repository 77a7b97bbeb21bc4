"""What the engine and the processes of its grammars say to each other: msgpack frames, each behind
its length, on a stream socket."""

from __future__ import annotations

import socket
import struct
from typing import Any

import msgspec
from msgspec import Struct

from llaisys.tokenization import BpeVocabulary

_LENGTH = struct.Struct("<I")
CHUNK = 1 << 16
SMALL_CHUNK = 1 << 12  # of answers: memory for a whole CHUNK costs more than they do


class Vocabulary(Struct, forbid_unknown_fields=True):
    """The first message to the tokenizer process: whose tokens it deals in."""

    directory: str | None  # as in TokenizerSource
    bpe: BpeVocabulary | None
    special_ids: tuple[tuple[str, int], ...]
    eos_token_ids: tuple[int, ...]
    vocab_size: int  # of the model: tokens from here on are never drawn


class Opened(Struct, forbid_unknown_fields=True):
    """Its answer."""

    error: str = ""  # why it cannot be used; then the process ends


class Compile(Struct, forbid_unknown_fields=True):
    """A grammar, for a process of its own; the socket to it and its memory come along."""

    structured: dict[str, Any]  # StructuredOutputs.to_wire()
    max_masks: int  # that the memory has room for


class Compiled(Struct, forbid_unknown_fields=True):
    """The grammar process's first message."""

    error: str = ""  # why the grammar is refused; then the process ends


class Row(Struct, array_like=True, forbid_unknown_fields=True):
    """A sequence whose next token is about to be drawn."""

    matcher: int  # the sequence's number; a new one begins at the grammar's start
    tokens: list[int]  # drawn since the last time
    drafts: list[int]  # that may follow; a mask behind each as long as the grammar allows it


class Ask(Struct, forbid_unknown_fields=True):
    rows: list[Row]
    released: list[int]  # matchers that nobody needs any more


class Masks(Struct, forbid_unknown_fields=True):
    """The answer: the masks of the rows stand in the memory one after the other."""

    counts: list[int]  # of each row; 0: no room was left, ask again
    failed: dict[int, str]  # matcher -> why it cannot go on


def send(connection: socket.socket, message: Struct, fds: list[int] | None = None) -> None:
    body = msgspec.msgpack.encode(message)
    frame = _LENGTH.pack(len(body)) + body
    if fds:  # they come with the length, which goes alone
        socket.send_fds(connection, [frame[: _LENGTH.size]], fds)
        frame = frame[_LENGTH.size :]
    connection.sendall(frame)


def receive(connection: socket.socket, kind: Any, max_fds: int = 0) -> tuple[Any, list[int]]:
    """(message, descriptors that came with it); waits. EOFError: the other side is gone."""
    fds: list[int] = []
    if max_fds:
        head, fds, _, _ = socket.recv_fds(connection, _LENGTH.size, max_fds)
        head = head + _exactly(connection, _LENGTH.size - len(head)) if head else head
        if not head:
            raise EOFError
    else:
        head = _exactly(connection, _LENGTH.size)
    body = _exactly(connection, _LENGTH.unpack(head)[0])
    return msgspec.msgpack.decode(body, type=kind), fds


def _exactly(connection: socket.socket, size: int) -> bytes:
    parts = []
    while size:
        part = connection.recv(min(size, CHUNK))
        if not part:
            raise EOFError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


class FrameBuffer:
    """What has arrived on a socket that is not waited for."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._data = bytearray()

    def take(self) -> bytes | None:
        """The next frame if it is there. EOFError: the other side is gone, and nothing is left."""
        ended = False
        while not self._has_frame():
            try:
                part = self._connection.recv(SMALL_CHUNK, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return None
            except OSError:
                ended = True
                break
            if not part:
                ended = True
                break
            self._data += part
        if ended:
            raise EOFError
        size = _LENGTH.unpack_from(self._data)[0]
        frame = bytes(self._data[_LENGTH.size : _LENGTH.size + size])
        del self._data[: _LENGTH.size + size]
        return frame

    def _has_frame(self) -> bool:
        head = _LENGTH.size
        if len(self._data) < head:
            return False
        return len(self._data) >= head + int(_LENGTH.unpack_from(self._data)[0])
