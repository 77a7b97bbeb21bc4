"""The server's configuration and the command-line options that fill it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llaisys.common.errors import InvalidInputError
from llaisys.common.model_argument import add_model_argument
from llaisys.common.options import add_flags, given_flags, options_of
from llaisys.common.sampling import DEFAULTED, SamplingParams
from llaisys.common.validation import check_choice, check_float, check_int
from llaisys.engine.config import EngineConfig, add_engine_flags, given_engine_options
from llaisys.processes.watchdog import WatchLimits
from llaisys.server.logs import FORMATS, LEVELS

MIN_SESSION_BYTES = 1 << 20  # the empty file takes a part of it
ENGINE_MODULE = "llaisys.server.engine_client.process"


def default_session_file() -> Path:
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "llaisys" / "sessions.sqlite3"


MAX_BYTES = 1 << 62


@dataclass(frozen=True, slots=True)
class Limits:
    """What one client, and all of them together, may ask for. Times are in seconds."""

    max_queued: int = 256  # sequences beyond max_num_seqs that may wait
    # Open sequences of one API key; None: half of all when there are several keys; 0: no own limit.
    max_per_key: int | None = None
    queue_timeout: float = 120.0  # a request that was not started by then gets 503; 0: never
    max_body_bytes: int = 8 << 20
    max_bodies_bytes: int = 256 << 20  # of all bodies that are on their way
    max_body_items: int = 128 << 10  # numbers, texts, lists and objects of a body
    max_header_bytes: int = 64 << 10
    max_connections: int = 2048
    header_timeout: float = 20.0  # until the head of a request is complete
    body_timeout: float = 60.0  # until its body is
    send_timeout: float = 60.0  # a client that takes next to nothing for so long is dropped
    max_n: int = 128  # choices of a request: n times its prompts
    max_prompts: int = 64  # prompts of one /v1/completions request
    max_messages: int = 4096
    max_prompt_tokens: int | None = None  # None: what the model holds
    max_sessions: int = 1000  # of one API key
    max_session_bytes: int = 1 << 30  # of the session file

    def __post_init__(self) -> None:
        for name in (
            "max_body_bytes",
            "max_bodies_bytes",
            "max_body_items",
            "max_header_bytes",
            "max_connections",
            "max_n",
            "max_prompts",
            "max_messages",
        ):
            check_int(name, getattr(self, name), 1, MAX_BYTES)
        for name in ("max_queued", "max_sessions"):
            check_int(name, getattr(self, name), 0)
        if self.max_per_key is not None:
            check_int("max_per_key", self.max_per_key, 0)
        check_float("queue_timeout", self.queue_timeout, 0)
        check_int("max_session_bytes", self.max_session_bytes, MIN_SESSION_BYTES, MAX_BYTES)
        for name in ("header_timeout", "body_timeout", "send_timeout"):
            check_float(name, getattr(self, name), 0, above_low=True)
        if self.max_prompt_tokens is not None:
            check_int("max_prompt_tokens", self.max_prompt_tokens, 1)


@dataclass(frozen=True, slots=True)
class Health(WatchLimits):
    """How a sick engine is told from a busy one: no sign of life turns /health to 503, a longer
    silence ends the server. Times are in seconds."""

    max_failed_steps: int = 3  # failed steps in a row until the engine gives up
    exit_delay: float = 1.5  # the dead server answers 503 for so long, then exits

    def __post_init__(self) -> None:
        WatchLimits.__post_init__(self)
        check_int("max_failed_steps", self.max_failed_steps, 1)


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Everything that `serve` needs."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free one
    served_model_names: tuple[str, ...] = ()  # () : the model's own name
    api_keys: tuple[str, ...] = ()  # (): everybody may
    share_prefix_cache: bool = False  # with several keys: between them, too
    allowed_hosts: tuple[str, ...] = ()  # names beside localhost and IP addresses; '*': any
    allowed_origins: tuple[str, ...] = ()  # CORS; '*': any
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_keyfile_password: str | None = None
    session_file: Path | None = None  # None: default_session_file()
    webui: Path | None = None  # None: the one that is installed, if any
    drain_timeout: float = 30.0  # seconds that open requests get after SIGTERM
    log_level: str = "info"
    log_format: str = "text"
    # Sampling fields (DEFAULTED) for requests that leave them out, before the model's own.
    sampling: Mapping[str, Any] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)
    health: Health = field(default_factory=Health)
    engine_module: str = ENGINE_MODULE  # what runs as the engine process; tests put faults in one

    def __post_init__(self) -> None:
        check_int("port", self.port, 0, 65535)
        checked = SamplingParams.from_wire(self.sampling).to_wire()
        object.__setattr__(self, "sampling", checked)
        if any(not key or not key.isascii() or len(key) > 512 for key in self.api_keys):
            raise InvalidInputError("an API key must have 1 to 512 ASCII characters")
        if bool(self.ssl_certfile) != bool(self.ssl_keyfile):
            raise InvalidInputError("TLS needs both --ssl-certfile and --ssl-keyfile")
        check_choice("log_format", self.log_format, FORMATS)
        check_choice("log_level", self.log_level, LEVELS)
        check_float("drain_timeout", self.drain_timeout, 0)

    @property
    def has_private_prefixes(self) -> bool:
        """Whether a key's prompts are found in the prefix cache by that key only."""
        return len(self.api_keys) > 1 and not self.share_prefix_cache

    @property
    def max_per_key(self) -> int:
        """Open sequences of one API key; 0: no own limit."""
        if self.limits.max_per_key is not None:
            return self.limits.max_per_key
        if len(self.api_keys) < 2:
            return 0
        return max(1, (self.engine.scheduler.max_num_seqs + self.limits.max_queued) // 2)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `llaisys serve`; `config_from_args` reads them."""
    limits, health = Limits(), Health()
    add_model_argument(parser)
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1")
    group.add_argument("--port", type=int, default=8000, help="0: any free one")
    group.add_argument("--served-model-name", nargs="+", default=[], metavar="NAME")
    group.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help="repeatable; also LLAISYS_API_KEY (comma separated)",
    )
    group.add_argument("--api-key-file", type=Path, metavar="FILE", help="one key per line")
    group.add_argument(
        "--share-prefix-cache",
        action="store_true",
        help="let keys reuse each other's prompts; timing then tells what others have asked",
    )
    group.add_argument(
        "--allowed-host",
        action="append",
        default=[],
        metavar="NAME",
        help="a name the server is reached by, beside localhost and IP addresses",
    )
    group.add_argument(
        "--allowed-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="a web origin that may call the API (CORS)",
    )
    group.add_argument("--ssl-certfile")
    group.add_argument("--ssl-keyfile")
    group.add_argument("--ssl-keyfile-password")
    group.add_argument("--session-file", type=Path, help="SQLite file that keeps the sessions")
    group.add_argument("--webui", type=Path, metavar="DIR", help="web UI to serve at /")
    group.add_argument("--drain-timeout", "--shutdown-timeout", type=float, default=30.0)
    group.add_argument("--log-level", choices=LEVELS, default="info")
    group.add_argument("--log-format", choices=FORMATS, default="text")
    group = parser.add_argument_group("limits")
    for name, value in (
        ("max_queued", limits.max_queued),
        ("queue_timeout", limits.queue_timeout), ("max_body_bytes", limits.max_body_bytes),
        ("max_body_items", limits.max_body_items), ("max_bodies_bytes", limits.max_bodies_bytes),
        ("max_header_bytes", limits.max_header_bytes), ("max_connections", limits.max_connections),
        ("header_timeout", limits.header_timeout), ("body_timeout", limits.body_timeout),
        ("send_timeout", limits.send_timeout), ("max_n", limits.max_n),
        ("max_prompts", limits.max_prompts), ("max_sessions", limits.max_sessions),
        ("max_session_bytes", limits.max_session_bytes),
    ):  # fmt: skip
        option = "--" + name.replace("_", "-")
        group.add_argument(option, type=type(value), default=value, metavar=str(value))
    group.add_argument(
        "--max-per-key", type=int, metavar="N", help="default: half of all places; 0: no own limit"
    )
    group.add_argument("--max-prompt-tokens", type=int)
    group.add_argument("--engine-dead-after", type=float, default=health.dead_after)
    group.add_argument("--engine-step-limit", type=float, default=health.step_limit)
    group.add_argument("--max-failed-steps", type=int, default=health.max_failed_steps)
    add_engine_flags(parser)
    group = parser.add_argument_group("sampling, for requests that do not say")
    add_flags(group, [row for row in options_of(SamplingParams) if row[0] in DEFAULTED])


def config_from_args(args: argparse.Namespace) -> ServerConfig:
    """Raises InvalidInputError with the option's name and value."""
    engine = EngineConfig.of(model=args.model, **given_engine_options(args))
    sampling = given_flags(args, SamplingParams)
    limits = {name: getattr(args, name) for name in Limits.__slots__ if hasattr(args, name)}
    return ServerConfig(
        engine=engine,
        host=args.host,
        port=args.port,
        served_model_names=tuple(args.served_model_name),
        api_keys=_api_keys(args.api_key, args.api_key_file),
        share_prefix_cache=args.share_prefix_cache,
        allowed_hosts=tuple(args.allowed_host),
        allowed_origins=tuple(args.allowed_origin),
        ssl_certfile=args.ssl_certfile,
        ssl_keyfile=args.ssl_keyfile,
        ssl_keyfile_password=args.ssl_keyfile_password,
        session_file=args.session_file,
        webui=args.webui,
        drain_timeout=args.drain_timeout,
        log_level=args.log_level,
        log_format=args.log_format,
        sampling={name: value for name, value in sampling.items() if name in DEFAULTED},
        limits=Limits(**limits),
        health=Health(
            dead_after=args.engine_dead_after,
            step_limit=args.engine_step_limit,
            max_failed_steps=args.max_failed_steps,
        ),
    )


def _api_keys(given: Sequence[str], file: Path | None) -> tuple[str, ...]:
    keys = [*given, *os.environ.get("LLAISYS_API_KEY", "").split(",")]
    if file is not None:
        try:
            keys += file.read_text().splitlines()
        except OSError as error:
            raise InvalidInputError(f"--api-key-file {file}: {error.strerror}") from error
    return tuple(dict.fromkeys(key.strip() for key in keys if key.strip()))
