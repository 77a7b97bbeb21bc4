"""Relay to a replica on a Ray cluster: a child process of the server that forwards frames to an
actor, which runs the engine process on its node.

    python -m llaisys.server.engine_client.replicas.ray_relay      (internal; `start` runs it)

    server <- ipc -> relay <- Ray -> actor <- ipc -> engine process

Frames are not decoded. When the actor, its node or the engine dies, the relay exits and the server
sees a dead replica. When the server dies, the relay exits, Ray ends the actor, and that its engine.
"""

import logging
import os
import sys
import threading
import time
from typing import Any

import msgspec
import zmq

from llaisys.engine.config import EngineConfig
from llaisys.engine.executor.device_choice import cpu_option
from llaisys.engine.executor.ray import described, import_ray
from llaisys.processes.channel import Context, bind_receiver, connect_sender, encode
from llaisys.processes.child import EXIT_FAILED
from llaisys.processes.startup import init_child
from llaisys.server.engine_client.messages import EngineSetup, Failed
from llaisys.server.engine_client.replicas.ray_engine import RayEngine

logger = logging.getLogger("llaisys.server.engine_client.replicas")

MAX_FRAMES = 256  # per remote call
FINAL_LINGER_MS = 10_000
PLACEMENT_TIMEOUT = 60.0  # seconds


class RelaySetup(EngineSetup):
    engine_module: str = ""


class Relay:
    """Forwards frames between the server's two sockets and one actor."""

    def __init__(self, setup: RelaySetup) -> None:
        self._context: Context = zmq.Context()
        self._outputs = connect_sender(self._context, setup.output_address, FINAL_LINGER_MS)
        self._inputs = bind_receiver(self._context, setup.input_address)
        self._setup = setup
        self._actor: Any

    def run(self) -> int:
        """Run until the engine ends; return its exit status."""
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
        """Create the actor and start its engine process."""
        needs = replica_needs(self._setup.engine_config(), ray.cluster_resources())
        if "GPU" not in needs:  # the engine may see GPUs that it has not reserved
            self._setup.engine = {**self._setup.engine, "device": "cpu"}
        actor_class = ray.remote(concurrency_groups={"send": 1, "clock": 1})(RayEngine)
        actor = actor_class.options(
            num_cpus=needs["CPU"],
            num_gpus=needs.get("GPU", 0),
            scheduling_strategy="SPREAD",
            max_restarts=0,
        ).remote()
        clock = actor.clock.options(concurrency_group="clock")
        ready, _ = ray.wait([clock.remote()], timeout=PLACEMENT_TIMEOUT)
        if not ready:
            raise ray.exceptions.RayError(
                f"the cluster has no room for an engine with {described(needs)}: it has "
                f"{described(ray.cluster_resources(), *needs)} in all"
            )
        sent = time.monotonic()
        theirs = ray.get(clock.remote())
        offset = theirs - (sent + time.monotonic()) / 2
        setup = msgspec.to_builtins(self._setup)
        ray.get(actor.start.remote(setup.pop("engine_module"), setup, offset))
        return actor

    def _forward_to_engine(self) -> None:
        while True:
            frames = [self._inputs.recv()]
            while len(frames) < MAX_FRAMES and self._inputs.poll(0):
                frames.append(self._inputs.recv())
            self._actor.send.options(concurrency_group="send").remote(frames)

    def _forward_to_server(self, ray: Any) -> int:
        while True:
            frames, status = ray.get(self._actor.receive.remote())
            for frame in frames:
                self._outputs.send(frame)
            if status is not None:
                return int(status)

    def _fail(self, reason: str) -> int:
        logger.error("%s", reason)
        self._outputs.send(encode(Failed(reason)))
        return EXIT_FAILED


def replica_needs(config: EngineConfig, resources: dict[str, float]) -> dict[str, float]:
    """Return what a replica reserves. `resources`: of the cluster; with `auto`, one that has GPUs
    for a replica gives it some. Its engine uses the CPU if CUDA does not work there."""
    ranks = config.parallel.world_size
    needs: dict[str, float] = {"CPU": max(1, config.n_threads) * ranks}
    gpus = len(set(config.parallel.tensor_parallel_device_ids or range(ranks)))
    is_auto = config.device == "auto" and not cpu_option(config)
    if config.device == "cuda" or (is_auto and resources.get("GPU", 0) >= gpus):
        needs["GPU"] = gpus
    return needs


def main() -> None:
    status = Relay(init_child(RelaySetup)).run()
    logging.shutdown()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
