"""Deferred Ctrl-C and a progress bar for batches of requests."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def deferred_interrupt() -> Iterator[None]:
    """Defer Ctrl-C to the end of a step, so that it leaves no inconsistent state."""
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield
        return
    caught: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: caught.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        if caught:
            previous(*caught[0])


@contextmanager
def progress_bar(total: int, enabled: bool) -> Iterator[Any]:
    """Yield a function to call with the number of finished prompts."""
    if not enabled:
        yield lambda count: None
        return
    from tqdm import tqdm

    with tqdm(total=total, unit="prompt") as bar:
        yield bar.update
