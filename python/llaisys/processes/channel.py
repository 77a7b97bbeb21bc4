"""Typed msgpack messages over ipc sockets; nothing in a frame is ever executed.

Each sender is the side that connects, so that what it sends before the other side is there waits.
Queues are not bounded here: whoever admits work bounds them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import zmq

logger = logging.getLogger("llaisys.processes")

T = TypeVar("T")
Context = zmq.Context[zmq.Socket[bytes]]

encode = msgspec.msgpack.Encoder().encode


def decoder(messages: Any) -> Callable[[bytes], Any]:
    """The function that reads one frame of a union of tagged structs; another frame is a
    `msgspec.MsgspecError`."""
    return msgspec.msgpack.Decoder(messages).decode


def decode_or_none(decode: Callable[[bytes], T], frame: bytes) -> T | None:
    """The message; None, and a line in the log, for what is not one of ours."""
    try:
        return decode(frame)
    except (msgspec.MsgspecError, ValueError):
        logger.error("a message of %d bytes is not one of ours; dropped", len(frame))
        return None


def connect_sender(context: Context, address: str, linger_ms: int) -> zmq.Socket[bytes]:
    """A socket to send through; `linger_ms`: how long its last words may take after `close`."""
    socket = context.socket(zmq.PUSH)
    socket.set_hwm(0)
    socket.setsockopt(zmq.LINGER, linger_ms)
    socket.setsockopt(zmq.RECONNECT_IVL, 10)
    socket.connect(address)
    return socket


def bind_receiver(context: Any, address: str) -> Any:
    """A socket to receive from: of asyncio when the context is."""
    socket = context.socket(zmq.PULL)
    socket.set_hwm(0)
    socket.setsockopt(zmq.LINGER, 0)
    socket.bind(address)
    return socket
