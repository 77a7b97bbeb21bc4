"""A transport that closes without a reset: a client that is still sending can read the response."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

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
