"""An asyncio HTTP/1.1 client for benchmarks: one exchange at a time per connection, response bodies
delivered as they arrive."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from llaisys.common.errors import InvalidInputError, LlaisysError

MAX_HEAD_BYTES = 64 << 10
MAX_LINE_BYTES = 1 << 10  # of a chunk header
READ_LIMIT = 64 << 20  # bytes of one response body


class HttpError(LlaisysError, RuntimeError):
    """The server broke the connection or the protocol."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The parts of a server's base URL, without a trailing /v1."""

    host: str
    port: int
    path: str
    tls: ssl.SSLContext | None

    @classmethod
    def of(cls, url: str, insecure: bool = False) -> Endpoint:
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            port = parts.port
        except ValueError:
            raise InvalidInputError(
                f"--url is {url!r}; it must be http(s)://HOST[:PORT]", field="url", value=url
            ) from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidInputError(
                f"--url is {url!r}; it must be http(s)://HOST[:PORT]", field="url", value=url
            )
        context = None
        if parts.scheme == "https":
            context = ssl.create_default_context()
            if insecure:
                context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port or (443 if context else 80), path, context)

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"

    def request(self, method: str, path: str, headers: dict[str, str], body: bytes) -> bytes:
        """A whole request as bytes."""
        lines = [f"{method} {self.path}{path} HTTP/1.1", f"Host: {self.authority}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        if body or method == "POST":
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


@dataclass(slots=True)
class _Response:
    """The response being read."""

    on_body: Callable[[int, bytes], None]  # (status, part of the body)
    done: asyncio.Future[int]  # the status, once the response is complete
    status: int = 0  # 0: header incomplete
    left: int | None = None  # bytes of the body or chunk; None: until the server closes
    chunked: bool = False
    in_trailer: bool = False
    keep_alive: bool = True
    size: int = 0

    @property
    def ends_with_connection(self) -> bool:
        return bool(self.status) and not self.chunked and self.left is None


@dataclass(slots=True)
class Connection(asyncio.Protocol):
    """One connection; a failed exchange closes it."""

    open: bool = False
    _transport: asyncio.Transport | None = None
    _buffer: bytearray = field(default_factory=bytearray)
    _response: _Response | None = None

    @classmethod
    async def to(cls, endpoint: Endpoint) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(
                cls, endpoint.host, endpoint.port, ssl=endpoint.tls
            )
        except OSError as error:
            reason = getattr(error, "reason", None) or error.strerror or "no connection"
            raise HttpError(f"cannot connect: {reason}") from None
        return connection

    async def exchange(self, request: bytes, on_body: Callable[[int, bytes], None]) -> int:
        """Send a request, pass the body to `on_body` as it arrives, return the status at the end.
        `on_body` must not raise. Cancellation (a timeout) closes the connection."""
        assert self._response is None and self._transport is not None
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        response = self._response = _Response(on_body, future)
        self._transport.write(request)
        if not self.open:
            self._fail("the connection was closed")
        try:
            status = await future
        except BaseException:
            self.close()
            raise
        self._response = None
        if not response.keep_alive:
            self.close()
        return status

    def close(self) -> None:
        self.open = False
        if self._transport is not None:
            self._transport.abort()

    # ---- asyncio.Protocol ----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.open = True

    def connection_lost(self, exc: Exception | None) -> None:
        self.open = False
        response = self._response
        if response is not None and response.ends_with_connection:
            self._finish(response)
        self._fail("the connection was closed" if exc is None else f"connection lost: {exc}")

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        response = self._response
        if response is None or response.done.done():
            self.close()  # unexpected data
            return
        try:
            if not response.status and not self._read_head(response):
                return
            while self._read_body(response):
                pass
        except (ValueError, IndexError):
            self._fail("not an HTTP response")

    def _read_head(self, response: _Response) -> bool:
        """Whether the header is complete; 1xx responses are skipped."""
        while True:
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                if len(self._buffer) > MAX_HEAD_BYTES:
                    raise ValueError
                return False
            first, *lines = bytes(self._buffer[:end]).decode("latin-1").split("\r\n")
            del self._buffer[: end + 4]
            version, status = first.split(" ", 2)[:2]
            if not version.startswith("HTTP/1."):
                raise ValueError
            if int(status) >= 200:
                break
        headers = {}
        for line in lines:
            name, _, value = line.partition(":")
            headers[name.strip().lower()] = value.strip().lower()
        response.status = int(status)
        response.keep_alive = version == "HTTP/1.1" and headers.get("connection") != "close"
        response.chunked = headers.get("transfer-encoding", "").endswith("chunked")
        if "content-length" in headers and not response.chunked:
            response.left = int(headers["content-length"])
        elif response.status in (204, 304):
            response.left = 0
        elif not response.chunked:
            response.keep_alive = False
        return True

    def _read_body(self, response: _Response) -> bool:
        """Consume part of the buffer; False: more data is needed, or the response is complete."""
        if response.chunked and (response.left is None or response.in_trailer):
            return self._read_chunk_head(response)
        if response.left != 0:
            if not self._buffer:
                return False
            piece = bytes(self._buffer[: response.left])
            del self._buffer[: len(piece)]
            response.size += len(piece)
            if response.size > READ_LIMIT:
                self._fail(f"a response of more than {READ_LIMIT} bytes")
                return False
            if response.left is not None:
                response.left -= len(piece)
            response.on_body(response.status, piece)
            return True
        if not response.chunked:
            self._finish(response)
            return False
        if len(self._buffer) < 2:
            return False
        if self._buffer[:2] != b"\r\n":
            raise ValueError
        del self._buffer[:2]
        response.left = None
        return True

    def _read_chunk_head(self, response: _Response) -> bool:
        end = self._buffer.find(b"\r\n")
        if end < 0:
            if len(self._buffer) > MAX_LINE_BYTES:
                raise ValueError
            return False
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 2]
        if response.in_trailer:
            if line:
                return True
            self._finish(response)
            return False
        response.left = int(line.partition(b";")[0], 16)
        if response.left < 0:
            raise ValueError
        response.in_trailer = response.left == 0
        return True

    def _finish(self, response: _Response) -> None:
        if not response.done.done():
            response.done.set_result(response.status)

    def _fail(self, reason: str) -> None:
        response = self._response
        if response is not None and not response.done.done():
            response.done.set_exception(HttpError(reason))
        self.close()


class ConnectionPool:
    """Pool of keep-alive connections."""

    def __init__(self, endpoint: Endpoint, headers: dict[str, str]) -> None:
        self.endpoint = endpoint
        self.headers = headers  # of every request
        self._idle: list[Connection] = []

    async def exchange(
        self, method: str, path: str, body: bytes, on_body: Callable[[int, bytes], None]
    ) -> int:
        """Run an exchange and return its status. Retries once if a pooled connection was closed."""
        request = self.endpoint.request(method, path, self.headers, body)
        answered = False

        def note(status: int, piece: bytes) -> None:
            nonlocal answered
            answered = True
            on_body(status, piece)

        while self._idle:
            connection = self._idle.pop()
            if not connection.open:
                continue
            try:
                return await self._on(connection, request, note)
            except HttpError:
                if answered:
                    raise
        return await self._on(await Connection.to(self.endpoint), request, on_body)

    async def _on(
        self, connection: Connection, request: bytes, on_body: Callable[[int, bytes], None]
    ) -> int:
        status = await connection.exchange(request, on_body)
        if connection.open:
            self._idle.append(connection)
        return status

    async def fetch(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """Fetch a complete response."""
        pieces: list[bytes] = []
        status = await self.exchange(method, path, body, lambda _, piece: pieces.append(piece))
        return status, b"".join(pieces)

    async def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0)  # transports close in the next loop iteration
