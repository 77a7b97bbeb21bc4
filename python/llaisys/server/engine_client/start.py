"""Start of the engine process. Imports little, so that the model starts to load before the rest of
the server is imported."""

import secrets

from llaisys.processes.child import ChildProcess
from llaisys.server.config import ServerConfig

KV_TOKEN = secrets.token_hex(32)  # of this server's engines; see EngineSetup
RAY_RELAY = (
    "llaisys.server.engine_client.replicas.ray_relay"  # runs the engine module on a Ray cluster
)


class EngineProcess(ChildProcess):
    """An engine's child process, started before the event loop. It validates its `EngineSetup`."""

    def __init__(
        self, config: ServerConfig, wait_for_memory: bool = False, replica: int = 0
    ) -> None:
        """`wait_for_memory`: the engine sends its memory estimate and waits for `Load`. `replica`:
        index below data_parallel_size."""
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
                "wait_for_memory": wait_for_memory,
                "replica": replica,
                "replicas": config.data_parallel_size,
                "kv_token": KV_TOKEN if config.prefill_replicas else "",
            },
        )
