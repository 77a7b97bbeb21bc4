"""The Ray actor of a replica: an engine process on the actor's node and its two sockets."""

import time
from typing import Any

import zmq

from llaisys.processes.channel import Context, bind_receiver, connect_sender
from llaisys.processes.child import ChildProcess, exit_when_orphaned

RECEIVE_MS = 200  # longest wait of `receive` for a frame
MAX_FRAMES = 256


class RayEngine:
    """Methods outside a concurrency group run in one thread."""

    def __init__(self) -> None:
        exit_when_orphaned()  # of the node's raylet; the engine process then ends too

    def clock(self) -> float:
        """Return time.monotonic() of this machine, to convert the server's times."""
        return time.monotonic()

    def start(self, engine_module: str, setup: dict[str, Any], clock_offset: float) -> None:
        """Start the engine with `setup`, but with sockets of this machine and the GPUs that Ray
        gave this actor, which are not shared with other replicas."""
        import ray

        setup["replicas"] = 1
        for name in ("input_address", "output_address", "socket_directory"):
            setup.pop(name)
        own = {"clock_offset": clock_offset, "kv_host": ray.util.get_node_ip_address()}
        self._child = ChildProcess(engine_module, {**setup, **own})
        context: Context = zmq.Context()
        self._outputs = bind_receiver(context, self._child.output_address)
        self._inputs = connect_sender(context, self._child.input_address, linger_ms=0)

    def send(self, frames: list[bytes]) -> None:
        for frame in frames:
            self._inputs.send(frame)

    def receive(self) -> tuple[list[bytes], int | None]:
        """Return frames of the engine; after the last one its exit status."""
        status = self._child.popen.poll()
        frames: list[bytes] = []
        wait = RECEIVE_MS if status is None else 0
        while len(frames) < MAX_FRAMES and self._outputs.poll(0 if frames else wait):
            frames.append(self._outputs.recv())
        if status is not None and not frames:
            self._child.remove()
            return frames, status
        return frames, None
