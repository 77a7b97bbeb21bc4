"""A replica on a Ray cluster, as the server sees it: a child process like any engine's, which hands
the frames on to an actor, under which the engine runs on its node.

    python -m llaisys.server.replicas.ray_relay      (started by `start`, never by hand)

    server <- ipc -> relay <- Ray -> actor <- ipc -> engine process

What the frames say is not looked at: heartbeats, loading and failures are the engine's own. When
the actor, its node or the engine is gone, the relay ends, and the server sees a replica that died;
when the server is gone, the relay ends and Ray ends the actor, which ends the engine.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from typing import Any

import msgspec
import zmq

from llaisys.common.logs import setup_logging
from llaisys.engine.executor.ray import import_ray
from llaisys.processes.channel import Context, bind_receiver, connect_sender, encode
from llaisys.processes.child import EXIT_FAILED, exit_with_parent
from llaisys.server.engine_client.messages import EngineSetup, Failed
from llaisys.server.replicas.ray_engine import RayEngine

logger = logging.getLogger("llaisys.server.replicas")

MOST_FRAMES = 256  # handed on together
LAST_WORDS_MS = 10_000
PLACING = 60.0  # seconds in which the cluster must have room


class Relay:
    """Between the server's two sockets and one actor."""

    def __init__(self, setup: EngineSetup, engine_module: str) -> None:
        self._context: Context = zmq.Context()
        self._outputs = connect_sender(self._context, setup.output_address, LAST_WORDS_MS)
        self._inputs = bind_receiver(self._context, setup.input_address)
        self._setup = setup
        self._engine_module = engine_module
        self._actor: Any

    def run(self) -> int:
        """Until the engine has ended; the exit status."""
        ray = import_ray()
        ray.init(log_to_driver=False, logging_level=logging.WARNING, namespace="llaisys")
        try:
            self._actor = self._place(ray)
            threading.Thread(target=self._forward_to_engine, daemon=True).start()
            return self._forward_to_server(ray)
        except ray.exceptions.RayError as error:
            return self._fail(f"the replica's Ray actor is lost: {error}")
        finally:
            ray.shutdown()
            self._outputs.close()
            self._context.destroy(linger=0)

    def _place(self, ray: Any) -> Any:
        """The actor, with an engine process of its own that loads its model."""
        config = self._setup.engine_config()
        ranks = config.parallel.tensor_parallel_size
        cpus = max(1, config.n_threads) * ranks
        actor_class = ray.remote(concurrency_groups={"down": 1, "clock": 1})(RayEngine)
        actor = actor_class.options(num_cpus=cpus, max_restarts=0).remote()
        clock = actor.clock.options(concurrency_group="clock")
        ready, _ = ray.wait([clock.remote()], timeout=PLACING)
        if not ready:
            has = ray.cluster_resources().get("CPU", 0)
            raise ray.exceptions.RayError(
                f"the cluster has no room for an engine with {cpus} CPUs: it has {has:g} in all"
            )
        asked = time.monotonic()
        theirs = ray.get(clock.remote())
        ahead = theirs - (asked + time.monotonic()) / 2
        ray.get(actor.start.remote(self._engine_module, msgspec.to_builtins(self._setup), ahead))
        return actor

    def _forward_to_engine(self) -> None:
        while True:
            frames = [self._inputs.recv()]
            while len(frames) < MOST_FRAMES and self._inputs.poll(0):
                frames.append(self._inputs.recv())
            self._actor.give.options(concurrency_group="down").remote(frames)

    def _forward_to_server(self, ray: Any) -> int:
        while True:
            frames, status = ray.get(self._actor.take.remote())
            for frame in frames:
                self._outputs.send(frame)
            if status is not None:
                return int(status)

    def _fail(self, reason: str) -> int:
        logger.error("%s", reason)
        self._outputs.send(encode(Failed(reason)))
        return EXIT_FAILED


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    stream = sys.stdin.buffer
    given = msgspec.json.decode(stream.readline())
    engine_module = given.pop("engine_module")
    setup = msgspec.convert(given, EngineSetup)
    setup_logging(setup.log_level, setup.log_format)
    exit_with_parent(stream, setup.socket_directory)
    status = Relay(setup, engine_module).run()
    logging.shutdown()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
