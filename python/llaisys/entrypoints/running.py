"""While many requests run: Ctrl-C between steps, and a bar that shows how far they are."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def deferred_interrupt() -> Iterator[None]:
    """Let Ctrl-C wait for the end of a step, so that no bookkeeping is cut in half."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.getsignal(signal.SIGINT)
    if not callable(previous):
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
def progress_bar(total: int, wanted: bool) -> Iterator[Any]:
    """A function to call with the number of prompts that have finished."""
    if not wanted:
        yield lambda count: None
        return
    from tqdm import tqdm

    with tqdm(total=total, unit="prompt") as bar:
        yield bar.update
