"""Work that stops when the client disconnects: coroutines and streaming ASGI responses. `protocol`
disconnects clients that do not read."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, Protocol, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")


class BodyWriter(Protocol):
    """Writes parts of a streamed body to a connection, without ASGI's messages."""

    @property
    def is_ready(self) -> bool:
        """Whether the response has begun and the client reads it."""

    def write(self, data: bytes) -> None:
        """Write a part that is not empty; only if `is_ready`."""


class ClientDisconnected(Exception):
    """The client disconnected before its response."""


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`. If the client disconnects first, cancel `work` and raise
    ClientDisconnected."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(wait_for_disconnect(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnected
    finally:
        for running in (task, gone):
            running.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends `events` and always closes the generator, which releases its resources at once."""

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        on_close: Callable[[], None],
        media_type: str,
        on_connection: Callable[[BodyWriter], None] | None = None,
    ) -> None:
        """`on_close` is called last, also when the generator never started. `on_connection` gets
        the connection that receives the events, before the first one: while the generator waits,
        its owner may write there."""
        super().__init__()
        self.events = events
        self.on_close = on_close
        self.on_connection = on_connection
        # No content-length; proxies must not buffer the events.
        self.raw_headers = [
            (b"content-type", media_type.encode()),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(ClientDisconnected):
                await unless_disconnected(receive, self._write(scope, send))
        finally:
            with contextlib.suppress(RuntimeError):
                await self.events.aclose()
            self.on_close()

    async def _write(self, scope: Scope, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        # Middleware changes the start of a response only.
        connection = scope["state"].get("connection")
        if connection is not None and self.on_connection is not None:
            self.on_connection(connection)
        write = scope["state"]["write_body"]
        async for event in self.events:
            await write({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
