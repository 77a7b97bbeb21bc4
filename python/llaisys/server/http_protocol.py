"""uvicorn's HTTP protocol with limits on the head of a request and on idle connections."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from llaisys.server.config import Limits
from llaisys.server.errors import ApiError, error_body
from llaisys.server.responses import json_bytes
from llaisys.server.security import RequestContext, send_error

KEEPALIVE = (  # a peer that vanished without a word is noticed after about two minutes
    ("TCP_KEEPIDLE", 60),
    ("TCP_KEEPINTVL", 15),
    ("TCP_KEEPCNT", 4),
)


def limited_protocol(limits: Limits) -> type[HttpToolsProtocol]:
    """The class to give to uvicorn as `http`."""
    return type("BoundProtocol", (LimitedProtocol,), {"limits": limits})


async def refuse_connection(scope: Scope, receive: Receive, send: Send) -> None:
    """The application of a connection above `max_connections`: 503, and it is closed."""

    async def send_and_close(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
        await send(message)

    error = ApiError(
        503, "too many connections are open", code="too_many_connections", retry_after=1
    )
    await send_error(send_and_close, error, scope["state"]["request_id"])


class LimitedProtocol(HttpToolsProtocol):
    """Heads are at most `max_header_bytes` long (431) and complete within `header_timeout`.
    Connections above `max_connections` are answered with 503; the others do not notice."""

    limits = Limits()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_bytes = 0  # fed since the last head was complete
        self._in_head = True
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.limits.max_connections:
            self.app = RequestContext(refuse_connection, lambda *_: None)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in KEEPALIVE:
                if hasattr(socket, name):
                    sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        # The parser takes a head of any size, so it is fed no more than may be one.
        while data and not self.transport.is_closing():
            if not self._in_head:
                super().data_received(data)
                return
            if self._head_timer is None:
                self._start_timer()
            room = self.limits.max_header_bytes - self._head_bytes
            if room <= 0:
                self._refuse(
                    431, f"the header is too large; at most {self.limits.max_header_bytes} bytes"
                )
                return
            piece, data = data[:room], data[room:]
            self._head_bytes += len(piece)
            super().data_received(piece)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop_timer()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_head = True
        self._head_bytes = 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "this is not a valid HTTP request")

    def _refuse(self, status: int, message: str) -> None:
        if self.transport.is_closing():
            return
        body = json_bytes(error_body(status, message))
        self.transport.write(
            STATUS_LINE[status]
            + b"content-type: application/json\r\nconnection: close\r\n"
            + b"content-length: %d\r\n\r\n" % len(body)
            + body
        )
        self.transport.close()

    def _start_timer(self) -> None:
        self._stop_timer()
        self._head_timer = self.loop.call_later(self.limits.header_timeout, self._too_slow)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _too_slow(self) -> None:
        self._head_timer = None
        if self._in_head and not self.transport.is_closing():
            self._refuse(408, f"no complete request in {self.limits.header_timeout:g} s")
