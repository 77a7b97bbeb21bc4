"""Typed msgpack messages over ipc sockets.

The sender connects, so its messages are queued until the receiver binds. Queues are not bounded
here; admission bounds the work.
"""

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
    """Return a function that decodes a frame of a union of tagged structs, or raises
    `msgspec.MsgspecError`."""
    return msgspec.msgpack.Decoder(messages).decode


def decode_or_none(decode: Callable[[bytes], T], frame: bytes) -> T | None:
    """Return the message; log and return None for an invalid frame."""
    try:
        return decode(frame)
    except (msgspec.MsgspecError, ValueError):
        logger.error("discarded an invalid message of %d bytes", len(frame))
        return None


def connect_sender(context: Context, address: str, linger_ms: int) -> zmq.Socket[bytes]:
    """Return a sending socket; `linger_ms`: time to send pending messages after `close`."""
    socket = context.socket(zmq.PUSH)
    socket.set_hwm(0)
    socket.setsockopt(zmq.LINGER, linger_ms)
    socket.setsockopt(zmq.RECONNECT_IVL, 10)
    socket.connect(address)
    return socket


def bind_receiver(context: Any, address: str) -> Any:
    """Return a receiving socket; asynchronous if the context is."""
    socket = context.socket(zmq.PULL)
    socket.set_hwm(0)
    socket.setsockopt(zmq.LINGER, 0)
    socket.bind(address)
    return socket
