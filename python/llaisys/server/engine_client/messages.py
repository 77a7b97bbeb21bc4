"""Messages between the API process and the engine process, as typed msgpack.

Every frame is one tagged message of the unions at the end. The receiver logs and drops any other
frame (`msgspec.DecodeError`); nothing in a frame is ever executed.
"""

from dataclasses import replace
from typing import Any, Self

from msgspec import Struct

from llaisys.common.request import Request
from llaisys.common.sampling import SamplingParams
from llaisys.common.types import GpuUsage, ModelInfo, TokenUpdate
from llaisys.engine.config import EngineConfig
from llaisys.processes.channel import decoder
from llaisys.tokenization import TokenizerSource

# ---- API process -> engine process ---------------------------------------------------------------


# Fields of `Submit` that are those of the requests of its choices.
SHARED_FIELDS = (
    *("prompt_token_ids", "seed", "stop_token_ids", "bad_words", "dry_breakers", "thinking"),
    *("constrain_after", "cache_salt", "lora", "owner", "job", "arrival_time"),
    *("kv_export", "kv_source"),
)


class Submit(Struct, tag="submit", forbid_unknown_fields=True):
    """A prompt and its choices; the engine accepts all of them or replies `Rejected`."""

    group: str  # id of the prompt, unique among open requests
    request_ids: list[str]  # one per choice
    sampling: dict[str, Any]  # SamplingParams.to_wire(); validated again by the receiver
    queue_timeout: float | None  # seconds until it must be scheduled
    reports_progress: bool  # for its first choice
    # see Request
    prompt_token_ids: list[int]
    seed: int
    stop_token_ids: frozenset[int]
    bad_words: tuple[tuple[int, ...], ...]
    dry_breakers: tuple[tuple[int, ...], ...]
    thinking: tuple[int, ...]
    constrain_after: int
    cache_salt: str
    lora: str
    owner: str
    job: str
    arrival_time: float  # time.monotonic() of the server's machine
    kv_export: bool
    kv_source: str

    @classmethod
    def of(cls, group: str, requests: list[Request], queue_timeout: float | None) -> Self:
        first = requests[0]
        names = [request.request_id for request in requests]
        shared = {name: getattr(first, name) for name in SHARED_FIELDS}
        sampling = first.sampling.to_wire()
        return cls(group, names, sampling, queue_timeout, first.reports_progress, **shared)

    def requests(self) -> list[Request]:
        sampling = SamplingParams.from_wire(self.sampling)
        shared = {name: getattr(self, name) for name in SHARED_FIELDS}
        return [
            Request(
                request_id=name,
                sampling=sampling,
                group=self.group,
                choice=choice,
                reports_progress=self.reports_progress and choice == 0,
                **shared,
            )
            for choice, name in enumerate(self.request_ids)
        ]


class Finish(Struct, tag="finish", forbid_unknown_fields=True):
    """End requests. `stopped`: a stop string was found (no reply). Otherwise they are cancelled,
    and the engine replies with a last update each."""

    request_ids: list[str]
    stopped: bool = False


class Load(Struct, tag="load", forbid_unknown_fields=True):
    """Memory for the `MemoryEstimate` is reserved: load the model."""


class LoadLora(Struct, tag="load_lora", forbid_unknown_fields=True):
    """Load a LoRA adapter; the engine replies `LoraChanged` when it is read."""

    serial: int
    name: str
    path: str
    in_place: bool = False  # replace the adapter of that name


class UnloadLora(Struct, tag="unload_lora", forbid_unknown_fields=True):
    """Unload a LoRA adapter; the engine replies `LoraChanged`."""

    serial: int
    name: str


class Shutdown(Struct, tag="shutdown", forbid_unknown_fields=True):
    """Close the model and exit with status 0."""


# ---- engine process -> API process ---------------------------------------------------------------


class EngineStats(Struct, array_like=True):
    """Counters (monotonic) and gauges of an engine."""

    num_running: int = 0
    num_waiting: int = 0
    kv_blocks: int = 0
    kv_blocks_used: int = 0
    kv_blocks_cached: int = 0
    kv_cache_bytes: int = 0  # of one rank
    kv_host_blocks: int = 0  # for offloaded KV blocks
    kv_host_blocks_used: int = 0
    kv_host_bytes: int = 0  # of one rank
    num_steps: int = 0
    num_preemptions: int = 0
    num_context_shifts: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    prefix_cache_host_hits: int = 0
    kv_blocks_saved: int = 0
    kv_blocks_restored: int = 0
    kv_transfer_sent_blocks: int = 0
    kv_transfer_received_blocks: int = 0
    kv_transfer_received_bytes: int = 0
    kv_transfer_seconds: float = 0.0
    kv_transfer_failures: int = 0
    loras: int = 0
    loras_in_host: int = 0
    lora_slots_used: int = 0
    lora_reads: int = 0
    lora_slot_loads: int = 0
    lora_failures: int = 0
    worker_errors: int = 0
    executor_timeouts: int = 0
    spec_decode_num_drafts: int = 0
    spec_decode_num_draft_tokens: int = 0
    spec_decode_num_accepted_tokens: int = 0
    spec_decode_accepted_per_position: list[int] = []
    spec_decode_mean_accepted_length: float = 0.0  # a gauge
    stage_seconds: dict[str, float] = {}  # since the start, by worker stage
    sample_counts: dict[str, int] = {}  # rows sampled since the start, by device or host
    gpus: list[GpuUsage] = []  # gauges; empty on the CPU
    kv_cache_dtype: str = ""  # as configured

    @property
    def kv_usage(self) -> float:
        """Fraction of KV blocks in use."""
        return self.kv_blocks_used / self.kv_blocks if self.kv_blocks else 0.0

    @classmethod
    def at_start(cls, info: ModelInfo) -> Self:
        return cls(
            kv_blocks=info.num_blocks,
            kv_cache_bytes=info.kv_cache_bytes,
            kv_cache_dtype=info.kv_cache_dtype,
            kv_host_blocks=info.num_host_blocks,
            kv_host_bytes=info.kv_host_bytes,
        )


class Outputs(Struct, tag="outputs"):
    """The updates of one iteration of the engine loop."""

    updates: list[TokenUpdate]  # times are on the server's clock
    stats: EngineStats

    @property
    def request_ids(self) -> list[str]:
        return [update.request_id for update in self.updates]


class Rejected(Struct, tag="rejected"):
    """The engine rejected a `Submit`, or it exceeded the queue timeout."""

    group: str
    request_ids: list[str]
    error: str
    field: str | None = None  # of the request; as in InvalidInputError
    code: str | None = None
    timed_out: bool = False


class LoraChanged(Struct, tag="lora_changed"):
    """A LoRA adapter was loaded or unloaded, or `error` says why not."""

    serial: int  # of the message
    error: str | None = None
    field: str | None = None
    code: str | None = None


class Heartbeat(Struct, tag="heartbeat"):
    """Sent a few times per second by a thread, from process start."""

    loop_age: float  # seconds since the last loop iteration; 0 while idle
    cpu_seconds: float
    rss_bytes: int
    stats: EngineStats | None = None  # None: still loading
    loading: tuple[str, int, int] | None = None  # stage, done, total; see `common.progress`


class MemoryEstimate(Struct, tag="memory_estimate"):
    """Estimated memory of the model in bytes, sent before loading with
    `EngineSetup.wait_for_memory`; the engine then waits for `Load`."""

    weights: int
    kv_cache: int
    fixed: int  # process and scratch buffers

    @property
    def total(self) -> int:
        return self.weights + self.kv_cache + self.fixed


class Ready(Struct, tag="ready"):
    """The model is loaded."""

    info: ModelInfo  # without tokenizer_source, which is `source`
    source: TokenizerSource | None
    kv_address: str = ""  # where other engines fetch its KV blocks; empty: nowhere

    @classmethod
    def of(cls, info: ModelInfo, kv_address: str = "") -> Self:
        return cls(replace(info, tokenizer_source=None), info.tokenizer_source, kv_address)

    def model_info(self) -> ModelInfo:
        return replace(self.info, tokenizer_source=self.source)


class Failed(Struct, tag="failed"):
    """The engine has failed and is about to exit."""

    error: str


# ---- setup of the engine process, on its standard input ------------------------------------------


class EngineSetup(Struct, forbid_unknown_fields=True):
    """Setup of an engine process."""

    input_address: str
    output_address: str
    socket_directory: str
    heartbeat_interval: float
    max_failed_steps: int
    log_level: str
    log_format: str
    engine: dict[str, Any]  # EngineConfig.to_wire(); validated again by the receiver
    wait_for_memory: bool = False  # before loading; see `MemoryEstimate`
    replica: int = 0  # index, below `replicas`
    replicas: int = 1
    clock_offset: float = 0.0  # time.monotonic() of this machine minus that of the server's
    kv_token: str = ""  # shared secret of the engines that exchange KV blocks, in hexadecimal
    kv_host: str = "127.0.0.1"  # address of this machine, for other machines

    def engine_config(self) -> EngineConfig:
        return EngineConfig.from_wire(self.engine)


ToEngine = Submit | Finish | Load | LoadLora | UnloadLora | Shutdown
FromEngine = Outputs | Rejected | LoraChanged | Heartbeat | MemoryEstimate | Ready | Failed

decode_to_engine = decoder(ToEngine)
decode_from_engine = decoder(FromEngine)
