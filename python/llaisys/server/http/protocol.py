"""uvicorn's HTTP/1.1 protocol with limits per connection: size and time of a header, unread bodies,
clients that do not read their response."""

import asyncio
import logging
import socket
import struct
from collections.abc import Callable
from typing import Any, cast

import httptools
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from llaisys.common.logs import log_event
from llaisys.server.config import Limits
from llaisys.server.errors import ApiError, error_body
from llaisys.server.http.middleware import RequestContext, respond_error
from llaisys.server.http.response_bodies import json_bytes

LINGER_SECONDS = 5.0
LINGER_BYTES = 64 << 20  # discarded


class LingeringTransport:
    """Forwards to a transport. While `is_receiving()`, `close` sends the end of the stream and
    keeps the connection until the client closes it, for at most LINGER_SECONDS and LINGER_BYTES:
    closing with unread data resets the connection, and the client loses the response.

    The owner calls `discard` with the data that it receives while `is_closing()`."""

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        is_receiving: Callable[[], bool],
    ) -> None:
        self._transport = transport
        self._loop = loop
        self._is_receiving = is_receiving
        self._timer: asyncio.TimerHandle | None = None  # set while lingering
        self._discarded = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        return self._timer is not None or self._transport.is_closing()

    def write(self, data: bytes) -> None:
        if not self.is_closing():
            self._transport.write(data)

    def close(self) -> None:
        if self.is_closing():
            return
        if not self._is_receiving():
            self._transport.close()
            return
        self._timer = self._loop.call_later(LINGER_SECONDS, self._transport.close)
        self._transport.resume_reading()
        if self._transport.can_write_eof():
            self._transport.write_eof()

    def discard(self, size: int) -> None:
        self._discarded += size
        if self._discarded > LINGER_BYTES:
            self._transport.close()

    def stop(self) -> None:
        """The connection is lost."""
        if self._timer is not None:
            self._timer.cancel()


logger = logging.getLogger("llaisys.server")

TCP_OPTIONS = (
    # Send each event at once. asyncio sets it only for sockets whose protocol number is set.
    ("TCP_NODELAY", 1),
    # Detect a vanished peer after about two minutes.
    ("TCP_KEEPIDLE", 60),
    ("TCP_KEEPINTVL", 15),
    ("TCP_KEEPCNT", 4),
    # Keep unsent data in the process, where it is bounded and monitored, rather than in megabytes
    # of kernel buffers.
    ("TCP_NOTSENT_LOWAT", 64 << 10),
)
RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER: discard unsent data
MIN_READ = 32 << 10  # bytes that a client must read per `send_timeout`
MAX_PIPELINED = 8  # requests read ahead; beyond it, disconnects are not detected


class ChunkWriter:
    """The `event_stream.BodyWriter` of a chunked response; never ready with another encoding."""

    __slots__ = ("_cycle", "_flow", "_write")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._flow = cycle.flow
        self._write = cycle.transport.write

    @property
    def is_ready(self) -> bool:
        cycle = self._cycle
        is_open = cycle.chunked_encoding and not (cycle.disconnected or cycle.response_complete)
        return bool(is_open) and not self._flow.write_paused

    def write(self, data: bytes) -> None:
        self._write(b"%x\r\n%b\r\n" % (len(data), data))


def limited_protocol(limits: Limits) -> type[HttpToolsProtocol]:
    """Return the class for uvicorn's `http` option."""
    return type("BoundProtocol", (LimitedProtocol,), {"limits": limits})


async def reject_connection(scope: Scope, receive: Receive, send: Send) -> None:
    """The application of connections above `max_connections`: respond 503 and close."""

    async def send_and_close(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
        await send(message)

    error = ApiError(
        503, "too many connections are open", code="too_many_connections", retry_after=1
    )
    await respond_error(scope, send_and_close, error)


class LimitedProtocol(HttpToolsProtocol):
    """Headers have at most `max_header_bytes` (431) and are complete within `header_timeout` (408),
    which also limits the rest of a body after its response. A client that reads less than MIN_READ
    per `send_timeout` is disconnected. A disconnect ends every request of the connection.
    Connections above `max_connections` get 503."""

    limits = Limits()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_header = True
        self._resuming = False  # the parser is fed framing headers again
        self._fed = 0  # bytes since the last complete header or body chunk
        self._open: list[RequestResponseCycle] = []  # unanswered requests, in order
        self._read_timer: asyncio.TimerHandle | None = None
        self._unsent_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        lingering = LingeringTransport(transport, self.loop, self._is_receiving)
        super().connection_made(cast(asyncio.Transport, lingering))
        self._lingering = lingering
        if len(self.connections) > self.limits.max_connections:
            self.app = RequestContext(reject_connection, lambda *_: None)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in TCP_OPTIONS:
                if hasattr(socket, name):
                    sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._start_read_timer()

    def _is_receiving(self) -> bool:
        """Whether the client may be sending the rest of a request, and no other one is open."""
        is_open = any(not cycle.response_complete for cycle in self._open)
        return not is_open and (not self._in_header or self._fed > 0)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lingering.stop()
        self._stop_read_timer()
        self._stop_unsent_timer()
        super().connection_lost(exc)
        for cycle in self._open:  # uvicorn notifies only the last one
            if not cycle.response_complete:
                cycle.disconnected = True
            cycle.message_event.set()

    # ---- receiving -----------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            self._lingering.discard(len(data))
            return
        # The parser accepts headers and trailers of any size, so it is fed at most the limit.
        while data and not self.transport.is_closing():
            if self._in_header and self._read_timer is None:
                self._start_read_timer()
            room = self.limits.max_header_bytes - self._fed
            if room <= 0:
                self._reject(
                    431, f"the header is too large; at most {self.limits.max_header_bytes} bytes"
                )
                return
            piece, data = data[:room], data[room:]
            self._fed += len(piece)
            self._feed(piece)

    def _feed(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade()
            if rest := data[upgrade.args[0] :]:
                self._feed(rest)
        except httptools.HttpParserError:
            self.send_400_response("")

    def _ignore_upgrade(self) -> None:
        """Continue as HTTP/1.1 after an upgrade offer (h2c: curl --http2, Java). The parser treats
        such a request as its last and the body as another protocol, so a new parser gets only the
        framing headers and continues with the body."""
        framing = [
            name + b": " + value + b"\r\n"
            for name, value in self.headers
            if name in (b"content-length", b"transfer-encoding")
        ]
        version = self.parser.get_http_version().encode()
        self.parser = httptools.HttpRequestParser(self)
        self._resuming = True
        self._feed(b"POST / HTTP/%b\r\n%b\r\n" % (version, b"".join(framing)))
        self._resuming = False

    def on_url(self, url: bytes) -> None:
        if not self._resuming:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_header and not self._resuming:  # not for trailers
            super().on_header(name, value)

    def on_message_begin(self) -> None:
        if self._resuming:
            return
        super().on_message_begin()
        if self._read_timer is None:  # it arrived together with the previous request
            self._start_read_timer()

    def on_headers_complete(self) -> None:
        if self._resuming:
            return
        self._in_header = False
        self._fed = 0
        self._stop_read_timer()
        if not self.flow.write_paused:
            self._stop_unsent_timer()  # a response follows
        super().on_headers_complete()
        self.cycle.scope["state"]["connection"] = ChunkWriter(self.cycle)
        self._open.append(self.cycle)
        if len(self._open) <= MAX_PIPELINED:
            self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        self._fed = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():  # reported before the body
            return
        self._in_header = True
        self._fed = 0
        super().on_message_complete()
        if self.cycle.response_complete:  # the body ended after its response: wait for a request
            self._stop_read_timer()
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def send_400_response(self, msg: str) -> None:
        self._reject(400, "this is not a valid HTTP request")

    def _reject(self, status: int, message: str) -> None:
        if self.transport.is_closing():
            return
        log_event(logger, logging.INFO, "rejected", status=status, reason=message)
        body = json_bytes(error_body(status, message))
        self.transport.write(
            STATUS_LINE[status]
            + b"content-type: application/json\r\nconnection: close\r\n"
            + b"content-length: %d\r\n\r\n" % len(body)
            + body
        )
        self.transport.close()
        self._watch_unsent()

    def _start_read_timer(self) -> None:
        self._stop_read_timer()
        self._read_timer = self.loop.call_later(self.limits.header_timeout, self._too_slow)

    def _stop_read_timer(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _too_slow(self) -> None:
        self._read_timer = None
        if self._open:  # pipelined data waits for the open request
            self._start_read_timer()
        elif self._in_header:
            self._reject(408, f"no complete request in {self.limits.header_timeout:g} s")
        else:  # the request is answered
            self.transport.close()

    # ---- sending -------------------------------------------------------------------------------

    def on_response_complete(self) -> None:
        self._open = [cycle for cycle in self._open if not cycle.response_complete]
        super().on_response_complete()
        self._watch_unsent()
        if self.cycle.response_complete and not self._in_header:
            self._start_read_timer()  # for the unread rest of a body

    def eof_received(self) -> None:
        self._watch_unsent()  # the transport closes now

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_unsent()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_unsent_timer()
        if not self._open:
            self._watch_unsent()

    def _watch_unsent(self) -> None:
        """Monitor unsent data until the client has read it, also while closing."""
        unsent = self.transport.get_write_buffer_size()
        if unsent and self._unsent_timer is None:
            self._unsent_timer = self.loop.call_later(
                self.limits.send_timeout, self._check_unsent, unsent
            )

    def _check_unsent(self, before: int) -> None:
        self._unsent_timer = None
        unsent = self.transport.get_write_buffer_size()
        if unsent <= max(0, before - MIN_READ):
            self._watch_unsent()
            return
        log_event(
            logger,
            logging.WARNING,
            "a client read nothing and was disconnected",
            request_id=self._unsent_request,
            seconds=self.limits.send_timeout,
        )
        sock = self.transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
        self.transport.abort()

    @property
    def _unsent_request(self) -> str | None:
        """Id of the request whose response is unsent; None without a valid request."""
        cycle = self._open[0] if self._open else self.cycle
        state = {} if cycle is None else cycle.scope.get("state", {})
        return state.get("request_id")

    def _stop_unsent_timer(self) -> None:
        if self._unsent_timer is not None:
            self._unsent_timer.cancel()
            self._unsent_timer = None
