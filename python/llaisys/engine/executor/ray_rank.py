"""The Ray actor of one rank: executes the calls of the driver. It ends within a second of the
raylet of its node; Ray itself takes longer."""

import os
import socket
from dataclasses import dataclass, replace
from typing import Any

from llaisys.common.logs import setup_logging
from llaisys.engine.config import EngineConfig
from llaisys.engine.executor.calls import answer_call
from llaisys.engine.executor.messages import decode_call
from llaisys.engine.worker import Worker
from llaisys.processes.channel import encode
from llaisys.processes.child import exit_when_orphaned


def listen(host: str) -> tuple[int, str]:
    """Return the descriptor of a listening socket, which the model will own, and its address."""
    with socket.create_server((host, 0), backlog=64) as server:
        port = server.getsockname()[1]
        return server.detach(), f"{host}:{port}"


def init_method(descriptor: int, token: str, addresses: list[str]) -> str:
    return f"tcp://{descriptor}:{token}@{','.join(addresses)}"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank runs."""

    address: str  # of its socket
    node: str  # id in the cluster
    gpu: str = ""  # id on the node; empty: none

    @property
    def device(self) -> tuple[str, str]:
        return self.node, self.gpu


def gpu_index(gpu: str) -> int:
    """Return the CUDA device of a GPU of this node in this process. Ray sets CUDA_VISIBLE_DEVICES
    of an actor to its own GPUs, but not that of the driver."""
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    if gpu in visible:
        return visible.index(gpu)
    return int(gpu) if gpu.isdigit() else 0


def device_ids(places: list[Place], rank: int) -> tuple[int, ...]:
    """Return the device ids of all ranks as rank `rank` sees them. Only its own names a device; the
    others tell whether ranks share a GPU: then all are equal, otherwise they differ."""
    own = gpu_index(places[rank].gpu)
    if len({place.device for place in places}) < len(places):
        return (own,) * len(places)
    return tuple(own if other == rank else own + 1 + other for other in range(len(places)))


def with_device_ids(config: EngineConfig, places: list[Place], rank: int) -> EngineConfig:
    if not places[rank].gpu:
        return config
    ids = device_ids(places, rank)
    return replace(config, parallel=replace(config.parallel, tensor_parallel_device_ids=ids))


class RayRank:
    """Methods without a concurrency group run in one thread, in order."""

    def __init__(self, engine: dict[str, Any], log_level: str, log_format: str) -> None:
        setup_logging(log_level, log_format)
        exit_when_orphaned()
        self._config = EngineConfig.from_wire(engine)
        self._descriptor = -1
        self._worker: Worker

    def place(self, listens: bool = True) -> Place:
        """Open the socket of this rank and return where it runs."""
        import ray

        context, address = ray.get_runtime_context(), ""
        if listens:
            self._descriptor, address = listen(ray.util.get_node_ip_address())
        gpus = context.get_accelerator_ids().get("GPU", [])
        return Place(address, context.get_node_id(), gpus[0] if gpus else "")

    def join(self, rank: int, token: str, places: list[Place]) -> None:
        addresses = [place.address for place in places]
        self._worker = Worker(
            with_device_ids(self._config, places, rank),
            local_rank=rank,
            rank=rank,
            distributed_init_method=init_method(self._descriptor, token, addresses),
            is_driver_worker=False,
        )

    def call(self, frame: bytes) -> bytes:
        """Execute an encoded Call; return the encoded Answer, or nothing."""
        answer = answer_call(self._worker, decode_call(frame))
        return b"" if answer is None else encode(answer)

    def ping(self) -> int:
        return os.getpid()
