"""Messages between the engine and its grammar processes: length-prefixed msgpack frames on a stream
socket."""

import socket
import struct
from typing import Any

import msgspec
from msgspec import Struct

from llaisys.tokenization import TokenizerSource

_LENGTH = struct.Struct("<I")
CHUNK = 1 << 16
SMALL_CHUNK = 1 << 12  # for short replies: allocating a CHUNK takes longer than reading them


class Vocabulary(Struct, forbid_unknown_fields=True):
    """The first message to the tokenizer process."""

    source: TokenizerSource
    eos_token_ids: tuple[int, ...]  # beside those of the source
    vocab_size: int  # of the model: larger token ids are never sampled


class Opened(Struct, forbid_unknown_fields=True):
    """The reply to Vocabulary."""

    error: str = ""  # not empty: the process exits


class Compile(Struct, forbid_unknown_fields=True):
    """A grammar to compile; its socket and its shared memory are passed along."""

    structured: dict[str, Any]  # StructuredOutputs.to_wire()
    max_masks: int  # capacity of the memory


class Compiled(Struct, forbid_unknown_fields=True):
    """The first message of a grammar process."""

    error: str = ""  # not empty: the grammar is rejected and the process exits
    cpu_seconds: float = 0.0  # of compilation and trial


class Row(Struct, array_like=True, forbid_unknown_fields=True):
    """A sequence that samples its next token in this step."""

    matcher: int  # sequence id; a new id starts at the beginning of the grammar
    tokens: list[int]  # sampled since the last request
    drafts: list[int]  # draft tokens; one more mask after each that the grammar allows


class MaskRequest(Struct, forbid_unknown_fields=True):
    rows: list[Row]
    released: list[int]  # matchers to free


class Masks(Struct, forbid_unknown_fields=True):
    """The reply to MaskRequest: the masks of the rows are in shared memory, in order."""

    counts: list[int]  # masks of each row; 0: no room was left
    failed: dict[int, str]  # matcher -> error


def send(connection: socket.socket, message: Struct, fds: list[int] | None = None) -> None:
    body = msgspec.msgpack.encode(message)
    frame = _LENGTH.pack(len(body)) + body
    if fds:  # sent with the length
        socket.send_fds(connection, [frame[: _LENGTH.size]], fds)
        frame = frame[_LENGTH.size :]
    connection.sendall(frame)


def receive(connection: socket.socket, kind: Any, max_fds: int = 0) -> tuple[Any, list[int]]:
    """Wait for a message; return it with its file descriptors. EOFError: the peer has exited."""
    fds: list[int] = []
    if max_fds:
        head, fds, _, _ = socket.recv_fds(connection, _LENGTH.size, max_fds)
        head = head + _read_exactly(connection, _LENGTH.size - len(head)) if head else head
        if not head:
            raise EOFError
    else:
        head = _read_exactly(connection, _LENGTH.size)
    body = _read_exactly(connection, _LENGTH.unpack(head)[0])
    return msgspec.msgpack.decode(body, type=kind), fds


def _read_exactly(connection: socket.socket, size: int) -> bytes:
    parts = []
    while size:
        part = connection.recv(min(size, CHUNK))
        if not part:
            raise EOFError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


class FrameBuffer:
    """Frames of a socket that is read without blocking."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._data = bytearray()

    def take(self) -> bytes | None:
        """Return the next frame, or None. EOFError: the peer has exited and no frame is left."""
        while not self._has_frame():
            try:
                part = self._connection.recv(SMALL_CHUNK, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return None
            except OSError:
                part = b""
            if not part:
                raise EOFError
            self._data += part
        size = _LENGTH.unpack_from(self._data)[0]
        frame = bytes(self._data[_LENGTH.size : _LENGTH.size + size])
        del self._data[: _LENGTH.size + size]
        return frame

    def _has_frame(self) -> bool:
        head = _LENGTH.size
        if len(self._data) < head:
            return False
        return len(self._data) >= head + int(_LENGTH.unpack_from(self._data)[0])
