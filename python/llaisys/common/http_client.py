"""HTTP/1.1 client of one server: pooled connections, response bodies as they arrive."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import httptools

from llaisys.common.errors import LlaisysError

Header = tuple[bytes, bytes]

READ_BYTES = 64 << 10


class HttpError(LlaisysError, RuntimeError):
    """No connection, or the server broke it or the protocol."""


@dataclass(slots=True)
class Response:
    """Callbacks of the parser; `pieces` are parts of the body that were not read yet."""

    status: int = 0  # 0: the header is incomplete
    headers: list[Header] = field(default_factory=list)
    pieces: list[bytes] = field(default_factory=list)
    is_complete: bool = False
    keep_alive: bool = False
    parser: httptools.HttpResponseParser = field(init=False)

    def __post_init__(self) -> None:
        self.parser = httptools.HttpResponseParser(self)

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self.parser.get_status_code()
        if status >= 200:
            self.status = status
            self.keep_alive = self.parser.should_keep_alive()
        else:
            self.headers.clear()

    def on_body(self, body: bytes) -> None:
        self.pieces.append(body)

    def on_message_complete(self) -> None:
        self.is_complete = self.status >= 200


class Exchange:
    """A response whose header has arrived. The caller reads `body` to its end or calls `close`."""

    def __init__(self, client: HttpClient, streams: Streams, response: Response) -> None:
        self.status = response.status
        self.headers = response.headers
        self._client = client
        self._streams = streams
        self._response = response

    async def body(self) -> AsyncIterator[bytes]:
        response = self._response
        while True:
            while response.pieces:
                yield response.pieces.pop(0)
            if response.is_complete:
                break
            await receive(self._streams, response)
        self._client.release(self._streams, response.keep_alive)

    def close(self) -> None:
        """Close the connection unless the body was read; the server then ends the request."""
        if not self._response.is_complete or self._response.pieces:
            self._streams[1].transport.abort()


Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def receive(streams: Streams, response: Response) -> None:
    """Read and parse a part of the response. Raises HttpError when there is none."""
    try:
        data = await streams[0].read(READ_BYTES)
        if data:
            response.parser.feed_data(data)
            return
    except (OSError, httptools.HttpParserError) as error:
        streams[1].transport.abort()
        is_lost = isinstance(error, OSError)
        raise HttpError(
            f"connection lost: {error}" if is_lost else "not an HTTP response"
        ) from None
    streams[1].transport.abort()
    framed = {name for name, _ in response.headers} & {b"content-length", b"transfer-encoding"}
    if not response.status or framed:
        raise HttpError("the connection was closed")
    response.is_complete = True  # a body without a length


@dataclass(slots=True)
class HttpClient:
    """Connections to one server."""

    host: str
    port: int
    tls: ssl.SSLContext | None = None
    connect_timeout: float | None = None  # seconds
    max_idle: int = 1 << 16  # pooled connections
    _idle: list[Streams] = field(default_factory=list)

    async def send(
        self, method: str, target: bytes, headers: Sequence[Header], body: bytes
    ) -> Exchange:
        """Send a request and return when the response header has arrived. A pooled connection that
        the server closed is replaced once. Raises HttpError."""
        lines = [method.encode() + b" " + target + b" HTTP/1.1"]
        lines += [name + b": " + value for name, value in headers]
        if body or method == "POST":
            lines.append(b"content-length: %d" % len(body))
        request = b"\r\n".join([*lines, b"", b""]) + body
        while self._idle:
            streams = self._idle.pop()
            if not streams[0].at_eof() and not streams[1].is_closing():
                with contextlib.suppress(HttpError):
                    return await self._exchange(streams, request)
                break
        return await self._exchange(await self._connect(), request)

    async def _connect(self) -> Streams:
        try:
            async with asyncio.timeout(self.connect_timeout):
                return await asyncio.open_connection(
                    self.host, self.port, ssl=self.tls, limit=READ_BYTES
                )
        except (OSError, TimeoutError) as error:
            reason = getattr(error, "reason", None) or error.strerror or "no connection"
            raise HttpError(f"cannot connect: {reason}") from None

    async def _exchange(self, streams: Streams, request: bytes) -> Exchange:
        response = Response()
        try:
            streams[1].write(request)
            await streams[1].drain()
            while not response.status:
                await receive(streams, response)
        except OSError as error:
            streams[1].transport.abort()
            raise HttpError(f"connection lost: {error}") from None
        except asyncio.CancelledError:
            streams[1].transport.abort()
            raise
        return Exchange(self, streams, response)

    def release(self, streams: Streams, keep_alive: bool) -> None:
        if keep_alive and len(self._idle) < self.max_idle:
            self._idle.append(streams)
        else:
            streams[1].close()

    def close(self) -> None:
        while self._idle:
            self._idle.pop()[1].close()
