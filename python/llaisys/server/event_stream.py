"""Server-sent events as an ASGI response: stops when the client is gone or takes nothing."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from llaisys.server.generation import wait_for_disconnect

logger = logging.getLogger("llaisys.server")


class EventStream(Response):
    """`events` is closed in every case, so whatever it holds is released at once."""

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        send_timeout: float,
        on_close: Callable[[], None],
    ) -> None:
        """`on_close` is called last: a generator that never began has no `finally` to run."""
        super().__init__()
        self.events = events
        self.on_close = on_close
        self.send_timeout = send_timeout
        # No content-length, and no proxy may collect the events.
        self.raw_headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = asyncio.create_task(self._write(send))
        gone = asyncio.create_task(wait_for_disconnect(receive))
        try:
            await asyncio.wait({writer, gone}, return_when=asyncio.FIRST_COMPLETED)
            if writer.done():
                writer.result()
        finally:
            for task in (writer, gone):
                task.cancel()
            await asyncio.gather(writer, gone, return_exceptions=True)
            with contextlib.suppress(RuntimeError):
                await self.events.aclose()
            self.on_close()

    async def _write(self, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        with SendWatch(self.send_timeout) as watch:
            async for event in self.events:
                watch.begin()
                await send({"type": "http.response.body", "body": event, "more_body": True})
                watch.end()
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        if watch.expired:
            logger.warning("a client took nothing for %g s and was dropped", self.send_timeout)


class SendWatch:
    """Cancels its task, and swallows that, when one send takes longer than `limit` seconds (at most
    a quarter more). One timer a stream instead of one a token."""

    def __init__(self, limit: float) -> None:
        self.expired = False
        self._limit = limit
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._since: float | None = None  # when the send that is waiting began
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        self._since = self._loop.time()

    def end(self) -> None:
        self._since = None

    def __enter__(self) -> SendWatch:
        self._check()
        return self

    def _check(self) -> None:
        if self._since is not None and self._loop.time() - self._since >= self._limit:
            self.expired = True
            if self._task is not None:
                self._task.cancel()
            return
        self._timer = self._loop.call_later(self._limit / 4, self._check)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        if self._timer is not None:
            self._timer.cancel()
        if not (self.expired and kind is not None and issubclass(kind, asyncio.CancelledError)):
            return False
        # Cancelled by somebody else as well: then it is not ours to swallow.
        return self._task is None or self._task.uncancel() == 0
