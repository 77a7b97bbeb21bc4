"""The actor: one worker on a node of a Ray cluster, which does what the driver's calls say."""

from __future__ import annotations

import os
import queue
import socket
from typing import Any

from llaisys.common.logs import setup_logging
from llaisys.engine.config import EngineConfig
from llaisys.engine.executor.calls import answer_call
from llaisys.engine.executor.messages import decode_call
from llaisys.engine.worker import Worker
from llaisys.processes.channel import encode


def listen(host: str) -> tuple[int, str]:
    """A listening socket's descriptor, for the model to take over, and its address."""
    with socket.create_server((host, 0), backlog=64) as server:
        port = server.getsockname()[1]
        return server.detach(), f"{host}:{port}"


def init_method(descriptor: int, token: str, addresses: list[str]) -> str:
    return f"tcp://{descriptor}:{token}@{','.join(addresses)}"


class RayRank:
    """Its methods that belong to no group run one after the other in one thread."""

    def __init__(self, engine: dict[str, Any], rank: int, log_level: str, log_format: str) -> None:
        setup_logging(log_level, log_format)
        self._config = EngineConfig.from_wire(engine)
        self._rank = rank
        self._frames: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._descriptor = -1
        self._worker: Worker

    def listen(self) -> str:
        """Where the other ranks find this one."""
        import ray

        self._descriptor, address = listen(ray.util.get_node_ip_address())
        return address

    def join(self, token: str, addresses: list[str]) -> None:
        self._worker = Worker(
            self._config,
            local_rank=self._rank,
            rank=self._rank,
            distributed_init_method=init_method(self._descriptor, token, addresses),
            is_driver_worker=False,
        )

    def call(self, frame: bytes) -> bytes:
        """An encoded Call; the encoded Answer."""
        return encode(answer_call(self._worker, decode_call(frame), self._frames.get))

    def give(self, frame: bytes) -> None:
        """What a call that runs waits for."""
        self._frames.put(frame)

    def ping(self) -> int:
        return os.getpid()
