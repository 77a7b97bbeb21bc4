"""Starts the engine process. Imports next to nothing: the model begins to load before the rest of
the server is even read."""

from __future__ import annotations

from llaisys.processes.child import ChildProcess
from llaisys.server.config import ServerConfig

RAY_RELAY = "llaisys.server.replicas.ray_relay"  # runs the engine's module on a cluster


class EngineProcess(ChildProcess):
    """Made before the event loop runs; its setup is checked where it arrives, as `EngineSetup`."""

    def __init__(self, config: ServerConfig, ask_first: bool = False, replica: int = 0) -> None:
        """`ask_first`: it says what memory it needs, and waits for `Load`. `replica`: its number
        among data_parallel_size."""
        on_ray = config.data_parallel_backend == "ray"
        super().__init__(
            RAY_RELAY if on_ray else config.engine_module,
            {
                **({"engine_module": config.engine_module} if on_ray else {}),
                "heartbeat_interval": config.health.heartbeat_interval,
                "max_failed_steps": config.health.max_failed_steps,
                "log_level": config.log_level,
                "log_format": config.log_format,
                "engine": config.engine_of_replica.to_wire(),
                "ask_first": ask_first,
                "replica": replica,
                "replicas": config.data_parallel_size,
            },
        )
