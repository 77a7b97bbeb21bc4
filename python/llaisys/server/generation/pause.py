"""Pauses in long work on the event loop."""

from __future__ import annotations

import asyncio
import time

# A step of a request with many choices has many deltas, an embedding request many texts. Other
# tasks run after this much work on them.
MAX_BUSY_SECONDS = 0.005


class Pause:
    """Lets other tasks run after MAX_BUSY_SECONDS of work without suspension."""

    def __init__(self) -> None:
        self._busy = 0.0  # seconds of work since the last pause
        self._started = 0.0

    def start(self) -> None:
        """Work starts now; the time before it is not counted."""
        self._started = time.monotonic()

    async def if_busy(self) -> None:
        now = time.monotonic()
        self._busy += now - self._started
        if self._busy > MAX_BUSY_SECONDS:
            self._busy = 0.0
            await asyncio.sleep(0)
            now = time.monotonic()
        self._started = now
