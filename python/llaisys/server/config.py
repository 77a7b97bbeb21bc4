"""The server's configuration; `options` fills it from the command line."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from llaisys.chat.style import AUTO, REASONING_PARSERS, TOOL_PARSERS
from llaisys.common.errors import InvalidInputError
from llaisys.common.logs import FORMATS, LEVELS
from llaisys.common.options import (
    Bytes,
    Integer,
    Number,
    check_options,
    option,
)
from llaisys.common.sampling import SamplingParams
from llaisys.common.validation import check_choice, check_float, check_int, invalid_value
from llaisys.engine.config import (
    EngineConfig,
)
from llaisys.processes.watchdog import WatchdogLimits
from llaisys.server.keys.api_key import ApiKey, named_keys, read_key_file
from llaisys.server.models.entries import ModelEntry

MAX_REPLICAS = 64
REPLICA_BACKENDS = ("local", "ray")
MIN_SESSION_BYTES = 1 << 20  # the empty file takes a part of it
ENGINE_MODULE = "llaisys.server.engine_client.process"


def default_session_file() -> Path:
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "llaisys" / "sessions.sqlite3"


MAX_BYTES = 1 << 62


BARE_ENGINE_BYTES = 128 << 20  # of an engine process that has no model yet


@dataclass(frozen=True, slots=True)
class Limits:
    """What one client, and all of them together, may ask for."""

    max_queued: int = option(256, Integer(0), "sequences beyond max_num_seqs that may wait")
    max_per_key: int | None = option(
        None,
        Integer(0),
        "open sequences of one API key; 0: no own limit; else half of all when there are several",
    )
    queue_timeout: float = option(
        120.0, Number(0), "seconds; a request that was not started by then gets 503; 0: never"
    )
    max_body_bytes: int = option(8 << 20, Integer(1, MAX_BYTES), "of one request")
    max_bodies_bytes: int = option(
        256 << 20, Integer(1, MAX_BYTES), "of all bodies that are on their way"
    )
    max_body_items: int = option(
        128 << 10, Integer(1), "numbers, texts, lists and objects of a body"
    )
    max_header_bytes: int = option(64 << 10, Integer(1), "of the head of a request")
    max_connections: int = option(2048, Integer(1), "that are open at once")
    header_timeout: float = option(
        20.0, Number(0, above_low=True), "seconds until the head of a request is complete"
    )
    body_timeout: float = option(
        60.0, Number(0, above_low=True), "seconds until the body of a request is complete"
    )
    send_timeout: float = option(
        60.0,
        Number(0, above_low=True),
        "seconds; a client that takes next to nothing for so long is dropped",
    )
    max_n: int = option(128, Integer(1), "choices of a request: n times its prompts")
    max_prompts: int = option(64, Integer(1), "prompts of one /v1/completions request")
    max_inputs: int = option(2048, Integer(1), "texts of one request for vectors")
    max_logprobs: int = option(
        2 << 20, Integer(1), "log-probabilities of all answers that are under way"
    )
    max_messages: int = option(4096, Integer(1), "messages of one conversation")
    max_prompt_tokens: int | None = option(
        None, Integer(1), "tokens of a prompt; else what the model holds"
    )
    max_sessions: int = option(1000, Integer(0), "of one API key")
    max_session_bytes: int = option(
        1 << 30, Integer(MIN_SESSION_BYTES, MAX_BYTES), "of the session file"
    )

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, slots=True)
class Health(WatchdogLimits):
    """How a sick engine is told from a busy one: no sign of life turns /health to 503, a longer
    silence ends the server."""

    max_failed_steps: int = option(3, Integer(1), "failed steps in a row until the engine gives up")
    exit_delay: float = option(
        1.5, Number(0), "seconds that the dead server answers 503, then it exits", flag=None
    )


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """How several models share the memory; one alone is loaded at the start and stays."""

    memory_budget: int | None = option(
        None,
        Bytes(BARE_ENGINE_BYTES),
        "bytes of all engines together (12GiB, say); else 0.8 of what is available at the start",
    )
    keep_alive: float = option(
        300.0, Number(0), "seconds until a model that nobody uses is unloaded; 0: never"
    )
    load_timeout: float = option(
        300.0, Number(0, above_low=True), "seconds that a request waits for its model to be loaded"
    )

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Everything that `serve` needs."""

    engine: EngineConfig = field(
        default_factory=EngineConfig
    )  # of the model, of each service's own
    models: tuple[ModelEntry, ...] = ()  # when there are several
    model_limits: ModelLimits = field(default_factory=ModelLimits)
    data_parallel_size: int = 1  # engine processes with the same model
    data_parallel_backend: str = "local"  # where they run: this machine, or a Ray cluster
    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free one
    served_model_names: tuple[str, ...] = ()  # () : the model's own name
    api_keys: Iterable[str | ApiKey] = ()  # a tuple of ApiKey when checked; (): everybody may
    api_key_file: Path | None = None  # where those `from_file` come from
    share_prefix_cache: bool = False  # with several keys: between them, too
    allowed_hosts: tuple[str, ...] = ()  # names beside localhost and IP addresses; '*': any
    allowed_origins: tuple[str, ...] = ()  # CORS; '*': any
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_keyfile_password: str | None = None
    session_file: Path | None = None  # None: default_session_file()
    webui: Path | None = None  # None: the one that is installed, if any
    serve_webui: bool = True
    strict_fields: bool = False  # refuse the fields of a request that change nothing here
    drain_timeout: float = 30.0  # seconds that open requests get after SIGTERM
    tool_call_parser: str = AUTO  # how calls of tools are read; auto: as the template shows
    reasoning_parser: str = AUTO
    otlp_traces_endpoint: str | None = None  # None: no traces
    log_level: str = "info"
    log_format: str = "text"
    # Sampling fields (DEFAULTED) for requests that leave them out, before the model's own.
    sampling: Mapping[str, Any] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)
    health: Health = field(default_factory=Health)
    engine_module: str = ENGINE_MODULE  # what runs as the engine process; tests put faults in one

    def __post_init__(self) -> None:
        check_int("port", self.port, 0, 65535)
        check_int("data_parallel_size", self.data_parallel_size, 1, MAX_REPLICAS)
        check_choice("data_parallel_backend", self.data_parallel_backend, REPLICA_BACKENDS)
        on_ray = self.data_parallel_backend == "ray"
        if self.models and self.data_parallel_size > 1:
            raise invalid_value(
                "data_parallel_size", self.data_parallel_size, "1 with several models"
            )
        if self.models and on_ray:
            raise invalid_value("data_parallel_backend", "ray", "local with several models")
        if on_ray and not self.engine.n_threads:
            raise invalid_value(
                "n_threads", 0, "the CPUs of an engine when engines are on a Ray cluster"
            )
        checked = SamplingParams.from_wire(self.sampling).to_wire()
        object.__setattr__(self, "sampling", checked)
        object.__setattr__(self, "api_keys", named_keys(self.api_keys))
        if bool(self.ssl_certfile) != bool(self.ssl_keyfile):
            missing = "ssl_keyfile" if self.ssl_certfile else "ssl_certfile"
            raise InvalidInputError(
                "TLS needs both --ssl-certfile and --ssl-keyfile", field=missing
            )
        check_choice("tool_call_parser", self.tool_call_parser, TOOL_PARSERS)
        check_choice("reasoning_parser", self.reasoning_parser, REASONING_PARSERS)
        check_choice("log_format", self.log_format, FORMATS)
        check_choice("log_level", self.log_level, LEVELS)
        check_float("drain_timeout", self.drain_timeout, 0)

    @property
    def engine_of_replica(self) -> EngineConfig:
        """What each engine process gets: with several of them, its share of the cores."""
        engine, count = self.engine, self.data_parallel_size
        if count == 1 or engine.n_threads:
            return engine
        ranks = count * engine.parallel.tensor_parallel_size
        return replace(engine, n_threads=max(1, len(os.sched_getaffinity(0)) // ranks))

    @property
    def max_num_seqs(self) -> int:
        """Sequences that run at once, on all replicas together."""
        return self.engine.scheduler.max_num_seqs * self.data_parallel_size

    @property
    def has_private_prefixes(self) -> bool:
        """Whether a key's prompts are found in the prefix cache by that key only."""
        return bool(self.api_keys) and not self.share_prefix_cache

    @property
    def keys(self) -> tuple[ApiKey, ...]:
        return tuple(self.api_keys)  # type: ignore[arg-type]  # checked and named

    def with_keys_read_again(self) -> ServerConfig:
        """With the keys that the file has now. Raises InvalidInputError when it cannot be used."""
        kept = [key for key in self.keys if not key.from_file]
        read = [] if self.api_key_file is None else read_key_file(self.api_key_file)
        return replace(self, api_keys=(*kept, *read))

    @property
    def max_per_key(self) -> int:
        """Open sequences of one API key; 0: no own limit."""
        if self.limits.max_per_key is not None:
            return self.limits.max_per_key
        if len(self.keys) < 2:
            return 0
        return max(1, (self.max_num_seqs + self.limits.max_queued) // 2)

    @property
    def max_session_bytes_per_key(self) -> int | None:
        """Half of the session file when there are several keys; None: no own limit."""
        return None if len(self.keys) < 2 else self.limits.max_session_bytes // 2
