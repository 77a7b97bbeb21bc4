"""The actor of a replica: an engine process on the node where Ray put it, and its two sockets."""

from __future__ import annotations

import time
from typing import Any

import zmq

from llaisys.processes.channel import Context, bind_receiver, connect_sender
from llaisys.processes.child import ChildProcess

TAKE_MS = 200  # how long `take` waits for a frame
MOST_FRAMES = 256


class RayEngine:
    """Methods that belong to no group run one after the other in one thread."""

    def clock(self) -> float:
        """time.monotonic() of this machine: requests carry times of the server's."""
        return time.monotonic()

    def start(self, engine_module: str, setup: dict[str, Any], clock_ahead: float) -> None:
        """`setup` of the engine, whose sockets are here and not where it says."""
        for name in ("input_address", "output_address", "socket_directory"):
            setup.pop(name)
        self._child = ChildProcess(engine_module, {**setup, "clock_ahead": clock_ahead})
        context: Context = zmq.Context()
        self._outputs = bind_receiver(context, self._child.output_address)
        self._inputs = connect_sender(context, self._child.input_address, linger_ms=0)

    def give(self, frames: list[bytes]) -> None:
        for frame in frames:
            self._inputs.send(frame)

    def take(self) -> tuple[list[bytes], int | None]:
        """Frames of the engine, and its exit status once it has ended and said all."""
        status = self._child.popen.poll()
        frames: list[bytes] = []
        wait = TAKE_MS if status is None else 0
        while len(frames) < MOST_FRAMES and self._outputs.poll(0 if frames else wait):
            frames.append(self._outputs.recv())
        if status is not None and not frames:
            self._child.remove()
            return frames, status
        return frames, None
