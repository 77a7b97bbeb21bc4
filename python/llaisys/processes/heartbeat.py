"""Heartbeats of a child process: a thread reports the age of the last loop iteration."""

import contextlib
import resource
import threading
import time
from collections.abc import Callable

import zmq

from llaisys.processes.channel import Context, connect_sender


class LoopClock:
    """Time of the last loop iteration; written by the loop, read by the heartbeat."""

    def __init__(self) -> None:
        self._ticked = time.monotonic()
        self._busy = False

    def tick(self, busy: bool) -> None:
        self._ticked = time.monotonic()
        self._busy = busy

    @property
    def age(self) -> float:
        """Seconds since the last iteration; 0 while the loop waits for work."""
        return time.monotonic() - self._ticked if self._busy else 0.0


class HeartbeatSender:
    """Sends what `make_frame` returns every `interval` seconds, from the constructor to `stop`."""

    def __init__(
        self, context: Context, address: str, interval: float, make_frame: Callable[[], bytes]
    ) -> None:
        self._stopped = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(context, address, interval, make_frame), daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread; the context may be terminated afterwards."""
        self._stopped.set()
        self._thread.join()

    def _run(
        self, context: Context, address: str, interval: float, make_frame: Callable[[], bytes]
    ) -> None:
        socket = connect_sender(context, address, linger_ms=0)
        try:
            while True:
                with contextlib.suppress(zmq.Again):
                    socket.send(make_frame(), zmq.NOBLOCK)
                if self._stopped.wait(interval):
                    return
        finally:
            socket.close(linger=0)


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
