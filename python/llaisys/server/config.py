"""The server's configuration and the declaration of its options; `options` fills it from the
command line and a file."""

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from llaisys.chat import reasoning, tool_formats
from llaisys.chat.reasoning import REASONING_FORMATS
from llaisys.chat.style import AUTO, NONE
from llaisys.chat.tool_formats import TOOL_FORMATS
from llaisys.common.errors import InvalidInputError
from llaisys.common.logs import FORMATS, LEVELS
from llaisys.common.machine_limits import usable_cores
from llaisys.common.options import (
    Bytes,
    Choice,
    FilePath,
    Integer,
    JsonObject,
    Names,
    Number,
    Paths,
    Switch,
    Text,
    check_options,
    option,
)
from llaisys.common.sampling import SamplingParams
from llaisys.common.validation import MAX_INT, invalid_value
from llaisys.engine.config import EngineConfig
from llaisys.processes.watchdog import WatchdogLimits
from llaisys.server.api_keys import ApiKey, ApiKeys, named_keys, read_key_file
from llaisys.server.model_entries import ModelEntry

MAX_REPLICAS = 64
REPLICA_BACKENDS = ("local", "ray")
MIN_SESSION_BYTES = 1 << 20  # an empty file needs part of it
ENGINE_MODULE = "llaisys.server.engine_client.process"


def default_session_file() -> Path:
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "llaisys" / "sessions.sqlite3"


MAX_BYTES = 1 << 62
ORIGIN = re.compile(r"https?://([A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?")
BARE_ENGINE_BYTES = 128 << 20  # of an engine process without a model
POSITIVE = Number(0, above_low=True)
limit = partial(option, group="limits")


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one request, one API key and the whole server."""

    max_queued: int = option(
        256, Integer(0), "Maximum waiting sequences", group="scheduling", common=True,
        aliases=("max_num_queued_reqs", "max_queued_requests"),
        more="Beyond `max_num_seqs`. A further request gets 429.",
    )  # fmt: skip
    max_per_key: int | None = limit(
        None, Integer(0), "Maximum open sequences of an API key",
        default_text="half of all with several keys", more="0: no limit.",
    )  # fmt: skip
    queue_timeout: float = option(
        120.0, Number(0), "Longest time in the queue", group="scheduling", common=True,
        metavar="SECONDS", more="A request that has not started by then gets 503. 0: no limit.",
    )  # fmt: skip
    max_body_bytes: int = limit(8 << 20, Bytes(1, MAX_BYTES), "Maximum size of a request body")
    max_total_body_bytes: int = limit(
        256 << 20, Bytes(1, MAX_BYTES), "Maximum size of all bodies in transfer",
    )  # fmt: skip
    max_body_items: int = limit(
        128 << 10, Integer(1), "Maximum JSON values in a body",
        more="Counts numbers, strings, arrays and objects.",
    )  # fmt: skip
    max_header_bytes: int = limit(
        64 << 10, Bytes(1, MAX_INT), "Maximum size of the request headers"
    )
    max_connections: int = limit(2048, Integer(1), "Maximum open connections")
    header_timeout: float = limit(
        20.0, POSITIVE, "Time limit to receive the headers", metavar="SECONDS",
    )  # fmt: skip
    body_timeout: float = limit(60.0, POSITIVE, "Time limit to receive the body", metavar="SECONDS")
    send_timeout: float = limit(
        60.0, POSITIVE, "Time until a client that does not read is disconnected", metavar="SECONDS",
    )  # fmt: skip
    max_n: int = limit(128, Integer(1), "Maximum choices of a request, n times its prompts")
    max_prompts: int = limit(64, Integer(1), "Maximum prompts of a /v1/completions request")
    max_inputs: int = limit(2048, Integer(1), "Maximum inputs of an embeddings request")
    max_logprobs: int = limit(20, Integer(-1), "Maximum logprobs of a token; -1: the vocabulary")
    max_total_logprobs: int = limit(
        2 << 20, Integer(1), "Maximum buffered logprobs of all requests"
    )
    max_messages: int = limit(4096, Integer(1), "Maximum messages of a conversation")
    max_prompt_tokens: int | None = limit(
        None, Integer(1), "Maximum prompt length, in tokens", default_text="the context length",
    )  # fmt: skip
    max_sessions: int = limit(1000, Integer(0), "Maximum stored sessions of an API key")
    max_session_bytes: int = limit(
        1 << 30, Bytes(MIN_SESSION_BYTES, MAX_BYTES), "Maximum size of the session file",
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, slots=True)
class Health(WatchdogLimits):
    """When an engine counts as failed: without a heartbeat /health answers 503, and after a longer
    silence the server exits."""

    max_failed_steps: int = option(
        3, Integer(1), "Consecutive failed steps until the engine exits", group="health"
    )
    exit_delay: float = option(
        1.5, Number(0), "Time to answer 503 before the server exits",
        flag=None, group="health", metavar="SECONDS",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """Memory of several models. A single model is loaded at start and never unloaded."""

    memory_budget: int | None = option(
        None, Bytes(BARE_ENGINE_BYTES), "Memory of all loaded models, e.g. 12GiB",
        group="models", default_text="0.8 of the available memory",
    )  # fmt: skip
    keep_alive: float = option(
        300.0, Number(0), "Idle time until a model is unloaded",
        group="models", metavar="SECONDS", more="0: never.",
    )  # fmt: skip
    load_timeout: float = option(
        300.0, POSITIVE, "Longest time a request waits for its model",
        group="models", metavar="SECONDS",
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The configuration of `llaisys serve`."""

    engine: EngineConfig = field(default_factory=EngineConfig)  # of the first model
    models: tuple[ModelEntry, ...] = ()  # empty with a single model
    model_limits: ModelLimits = field(default_factory=ModelLimits)
    data_parallel_size: int = option(
        1, Integer(1, MAX_REPLICAS), "Engine replicas behind this server",
        group="parallel", common=True, aliases=("-dp",),
        more="Each replica serves part of the requests with part of the CPU cores.",
    )  # fmt: skip
    data_parallel_backend: str = option(
        "local", Choice(REPLICA_BACKENDS, {"mp": "local"}), "Where replicas run",
        group="parallel",
        more="`local`: processes of this machine; `ray`: a Ray cluster, with `threads` CPUs each.",
    )  # fmt: skip
    prefill_replicas: int = option(
        0, Integer(0, MAX_REPLICAS - 1), "Replicas that compute long prompts for the others",
        group="parallel",
        more="Of `data_parallel_size`; the others decode. See docs/guides/scaling.md.",
    )  # fmt: skip
    prefill_threshold: int = option(
        512, Integer(1), "Shortest prompt for a prefill replica, in tokens that are not cached",
        group="parallel",
    )  # fmt: skip
    host: str = option(
        "127.0.0.1", Text(), "Bind address", group="server", common=True, metavar="ADDRESS"
    )
    port: int = option(
        8000, Integer(0, 65535), "TCP port", group="server", common=True, metavar="PORT",
        more="0: a free port.",
    )  # fmt: skip
    served_model_names: tuple[str, ...] = option(
        (), Names(several_words=True), "Model names in the API", flag="--served-model-name",
        group="model", common=True, default_text="from model", metavar="NAME",
        aliases=("alias", "-a"),
    )  # fmt: skip
    api_keys: Iterable[str | ApiKey] = option(  # a tuple of ApiKey once checked
        (), ApiKeys(), "API key, also LLAISYS_API_KEY; repeatable", flag="--api-key",
        group="security", common=True,
    )  # fmt: skip
    api_key_file: Path | None = option(
        None, FilePath(), "File with API keys and their budgets", group="security", common=True,
        more="A key, or a JSON object with its name and budgets, per line. SIGHUP reloads it.",
    )  # fmt: skip
    share_prefix_cache: bool = option(
        False, Switch(), "Share the prefix cache between API keys", group="security",
        more="Response times then reveal which prompts other keys have sent.",
    )  # fmt: skip
    allowed_hosts: tuple[str, ...] = option(
        (), Names(), "Accepted Host header; repeatable", flag="--allowed-host", group="security",
        default_text="localhost and IP addresses", more="`*`: any.",
    )  # fmt: skip
    allowed_origins: tuple[str, ...] = option(
        (), Names(), "Allowed CORS origin; repeatable", flag="--allowed-origin",
        group="security", common=True, metavar="ORIGIN",
        more="Pages on localhost are always allowed. `*`: any.",
    )  # fmt: skip
    ssl_certfile: str | None = option(
        None, Text(), "TLS certificate", group="security", common=True, metavar="FILE"
    )
    ssl_keyfile: str | None = option(
        None, Text(), "TLS private key", group="security", common=True, metavar="FILE"
    )
    ssl_keyfile_password: str | None = option(
        None, Text(), "Password of the TLS private key", group="security"
    )
    session_file: Path | None = option(
        None, FilePath(), "SQLite file for sessions", group="server",
        default_text="$XDG_STATE_HOME/llaisys/sessions.sqlite3",
    )  # fmt: skip
    webui: Path | None = option(
        None, FilePath(), "Directory of the web UI", group="server", metavar="DIR",
        default_text="the installed one",
    )  # fmt: skip
    serve_webui: bool = option(
        True, Switch(), "Serve the web UI at /", flag="--ui", group="server", common=True,
        aliases=("--no-webui",),
    )  # fmt: skip
    mcp_origins: tuple[str, ...] = option(
        (), Names(), "Origin of MCP servers for the web UI; repeatable", flag="--mcp-origin",
        group="security", metavar="ORIGIN",
        more="The browser calls them; this server does not. Without one, the web UI has no tools.",
    )  # fmt: skip
    serve_metrics: bool = option(
        True, Switch(), "Serve /metrics", flag="--metrics", group="observability",
        more="Otherwise it is a 501.",
    )  # fmt: skip
    serve_slots: bool = option(
        True, Switch(), "Serve /slots", flag="--slots", group="observability",
        more="Otherwise it is a 501.",
    )  # fmt: skip
    slot_save_path: Path | None = option(
        None, FilePath(), "Directory for saved slots (llama.cpp)", group="server", metavar="DIR",
        more="Requests with `id_slot` then have a prefix cache per slot.",
    )  # fmt: skip
    strict_fields: bool = option(
        False, Switch(), "Reject unknown request fields and tools", group="server",
        more="Otherwise they are ignored and named in `x-llaisys-ignored-fields`, and other names "
        "of a field, such as `n_predict`, are accepted.",
    )  # fmt: skip
    root_path: str | None = option(
        None, Text(), "Path before all routes, of a proxy that keeps it", group="server",
        metavar="PATH", more="Routes answer with and without it.",
    )  # fmt: skip
    force_include_usage: bool = option(
        False, Switch(), "Send usage in every chunk of a stream",
        flag="--enable-force-include-usage", group="server",
        more="In streams without `stream_options`; `usage` ends the others.",
    )  # fmt: skip
    return_tokens_as_token_ids: bool = option(
        False, Switch(), "Write tokens of logprobs as token_id:ID", group="server",
        more="For requests that do not set the field of this name.",
    )  # fmt: skip
    drain_timeout: float = option(
        30.0, Number(0), "Time for open requests after SIGTERM", group="server",
        metavar="SECONDS", aliases=("shutdown_timeout",),
    )  # fmt: skip
    default_chat_template_kwargs: Mapping[str, Any] | None = option(
        None, JsonObject(), "Chat template variables, e.g. {\"enable_thinking\": false}",
        group="model", aliases=("chat_template_kwargs",),
        more="`chat_template_kwargs` of a request override them.",
    )  # fmt: skip
    tool_call_parser: str = option(
        AUTO, Choice((AUTO, *TOOL_FORMATS), tool_formats.ALIASES), "Tool-call format",
        group="model", more="`auto`: as the chat template shows.",
    )  # fmt: skip
    reasoning_parser: str = option(
        AUTO, Choice((AUTO, NONE, *REASONING_FORMATS), reasoning.ALIASES), "Reasoning format",
        group="model", more="`auto`: as the chat template shows.",
    )  # fmt: skip
    allowed_lora_paths: tuple[Path, ...] = option(
        (), Paths(), "Directory of LoRA adapters for run-time loads; repeatable",
        flag="--allowed-lora-path", group="lora", metavar="DIR",
        more="Without it /v1/load_lora_adapter is refused.",
    )  # fmt: skip
    otlp_traces_endpoint: str | None = option(
        None, Text(), "OpenTelemetry endpoint for traces (OTLP over HTTP)",
        group="observability", metavar="URL",
    )  # fmt: skip
    log_level: str = option(
        "info", Choice(LEVELS), "Log level", group="observability", common=True, metavar="LEVEL"
    )
    log_format: str = option("text", Choice(FORMATS), "Log format", group="observability")
    # Sampling fields (DEFAULTED) for requests that leave them out; they override the model's.
    sampling: Mapping[str, Any] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)
    health: Health = field(default_factory=Health)
    engine_module: str = ENGINE_MODULE  # module of the engine process

    def __post_init__(self) -> None:
        check_options(self)
        on_ray = self.data_parallel_backend == "ray"
        if self.models and self.data_parallel_size > 1:
            raise invalid_value(
                "data_parallel_size", self.data_parallel_size, "1 with several models"
            )
        if self.prefill_replicas >= max(1, self.data_parallel_size):
            raise invalid_value(
                "prefill_replicas",
                self.prefill_replicas,
                f"less than data_parallel_size, {self.data_parallel_size}",
            )
        if self.prefill_replicas and on_ray and self.engine.cache.kv_transfer == "shm":
            raise invalid_value("kv_transfer", "shm", "tcp with data_parallel_backend ray")
        if self.models and on_ray:
            raise invalid_value("data_parallel_backend", "ray", "local with several models")
        if on_ray and not self.engine.n_threads:
            raise invalid_value(
                "n_threads", 0, "the CPUs of an engine when engines are on a Ray cluster"
            )
        self._check_loras()
        for origin in self.mcp_origins:
            if not ORIGIN.fullmatch(origin):
                raise invalid_value("mcp_origins", origin, "an origin such as https://mcp.example")
        checked = SamplingParams.from_wire(self.sampling).to_wire()
        object.__setattr__(self, "sampling", checked)
        object.__setattr__(self, "api_keys", named_keys(self.keys))
        if bool(self.ssl_certfile) != bool(self.ssl_keyfile):
            missing = "ssl_keyfile" if self.ssl_certfile else "ssl_certfile"
            raise InvalidInputError(
                "TLS needs both --ssl-certfile and --ssl-keyfile", field=missing
            )

    def _check_loras(self) -> None:
        engines = [entry.engine for entry in self.models] or [self.engine]
        if self.allowed_lora_paths and not any(engine.lora.is_enabled for engine in engines):
            raise invalid_value(
                "allowed_lora_paths", "given", "left out without enable_lora or lora_modules"
            )
        taken = {name for entry in self.models for name in entry.names}
        taken.update(self.served_model_names)
        for engine in engines:
            for module in engine.lora.lora_modules:
                if module.name in taken:
                    raise invalid_value(
                        "lora_modules", module.name, "a name that no model and no adapter has"
                    )
                taken.add(module.name)

    @property
    def engine_of_replica(self) -> EngineConfig:
        """The configuration of each engine process; several of them divide the cores."""
        engine, count = self.engine, self.data_parallel_size
        on_ray = self.data_parallel_backend == "ray"
        if self.prefill_replicas and engine.cache.kv_transfer == "off":
            cache = replace(engine.cache, kv_transfer="tcp" if on_ray else "shm")
            engine = replace(engine, cache=cache)
        if count == 1 or engine.n_threads:
            return engine
        ranks = count * engine.parallel.world_size
        return replace(engine, n_threads=max(1, usable_cores() // ranks))

    @property
    def max_num_seqs(self) -> int:
        """Maximum running sequences of all replicas."""
        return self.engine.scheduler.max_num_seqs * self.data_parallel_size

    @property
    def has_private_prefixes(self) -> bool:
        """Whether a prefix is reused only by the API key that sent it."""
        return bool(self.api_keys) and not self.share_prefix_cache

    @property
    def keys(self) -> tuple[ApiKey, ...]:
        return tuple(self.api_keys)  # type: ignore[arg-type]  # checked and named

    def with_reloaded_keys(self) -> Self:
        """A copy with the keys of the file read again. Raises InvalidInputError for a bad file."""
        kept = [key for key in self.keys if not key.from_file]
        read = [] if self.api_key_file is None else read_key_file(self.api_key_file)
        return replace(self, api_keys=(*kept, *read))

    @property
    def max_per_key(self) -> int:
        """Maximum open sequences of an API key; 0: no limit."""
        if self.limits.max_per_key is not None:
            return self.limits.max_per_key
        if len(self.keys) < 2:
            return 0
        return max(1, (self.max_num_seqs + self.limits.max_queued) // 2)

    @property
    def max_session_bytes_per_key(self) -> int | None:
        """Half of the session file with several keys; None: no limit."""
        return None if len(self.keys) < 2 else self.limits.max_session_bytes // 2
