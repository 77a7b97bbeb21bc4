"""The Ray actor of one rank: executes the calls of the driver."""

from __future__ import annotations

import os
import socket
from typing import Any

from llaisys.common.logs import setup_logging
from llaisys.engine.config import EngineConfig
from llaisys.engine.executor.calls import answer_call
from llaisys.engine.executor.messages import decode_call
from llaisys.engine.worker import Worker
from llaisys.processes.channel import encode


def listen(host: str) -> tuple[int, str]:
    """Return the descriptor of a listening socket, which the model will own, and its address."""
    with socket.create_server((host, 0), backlog=64) as server:
        port = server.getsockname()[1]
        return server.detach(), f"{host}:{port}"


def init_method(descriptor: int, token: str, addresses: list[str]) -> str:
    return f"tcp://{descriptor}:{token}@{','.join(addresses)}"


class RayRank:
    """Methods without a concurrency group run in one thread, in order."""

    def __init__(self, engine: dict[str, Any], rank: int, log_level: str, log_format: str) -> None:
        setup_logging(log_level, log_format)
        self._config = EngineConfig.from_wire(engine)
        self._rank = rank
        self._descriptor = -1
        self._worker: Worker

    def listen(self) -> str:
        """Open the socket of this rank and return its address."""
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
        """Execute an encoded Call; return the encoded Answer, or nothing."""
        answer = answer_call(self._worker, decode_call(frame))
        return b"" if answer is None else encode(answer)

    def ping(self) -> int:
        return os.getpid()
