"""What the API process and the engine process say to each other: typed msgpack, nothing else.

Every frame is one tagged message of the unions at the bottom. A frame that is not one of them is a
`msgspec.DecodeError` at the receiver, which logs and drops it; nothing in a frame is ever executed.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from llaisys.common.request import Request, RequestStatus
from llaisys.common.sampling import SamplingParams
from llaisys.common.types import GpuUsage, ModelInfo, PromptLogprobs, TokenLogprobs, TokenUpdate
from llaisys.engine.config import EngineConfig
from llaisys.processes.channel import decoder
from llaisys.tokenization import BpeVocabulary, TokenizerSource

# ---- API process -> engine process ---------------------------------------------------------------


class Submit(Struct, tag="submit", forbid_unknown_fields=True):
    """A prompt and its choices; the engine takes all of them or answers `Rejected`."""

    group: str  # the prompt's own name, unique while it lives
    request_ids: list[str]  # one per choice
    prompt_token_ids: list[int]
    sampling: dict[str, Any]  # SamplingParams.to_wire(); checked again where it arrives
    seed: int
    stop_token_ids: list[int]
    bad_words: list[list[int]]
    thinking: list[int]
    constrain_after: int
    cache_salt: str
    owner: str
    job: str
    arrival_time: float  # time.monotonic() of the server
    queue_timeout: float | None  # seconds until it must have been scheduled
    reports_progress: bool = False  # of its first choice

    @classmethod
    def of(cls, group: str, requests: list[Request], queue_timeout: float | None) -> Submit:
        first = requests[0]
        return cls(
            group,
            [request.request_id for request in requests],
            first.prompt_token_ids,
            first.sampling.to_wire(),
            first.seed,
            sorted(first.stop_token_ids),
            [list(word) for word in first.bad_words],
            list(first.thinking),
            first.constrain_after,
            first.cache_salt,
            first.owner,
            first.job,
            first.arrival_time,
            queue_timeout,
            first.reports_progress,
        )

    def requests(self) -> list[Request]:
        sampling = SamplingParams.from_wire(self.sampling)
        stops = frozenset(self.stop_token_ids)
        words = tuple(tuple(word) for word in self.bad_words)
        return [
            Request(
                request_id=name,
                prompt_token_ids=self.prompt_token_ids,
                sampling=sampling,
                seed=self.seed,
                group=self.group,
                choice=choice,
                stop_token_ids=stops,
                bad_words=words,
                thinking=tuple(self.thinking),
                constrain_after=self.constrain_after,
                cache_salt=self.cache_salt,
                owner=self.owner,
                job=self.job,
                arrival_time=self.arrival_time,
                reports_progress=self.reports_progress and choice == 0,
            )
            for choice, name in enumerate(self.request_ids)
        ]


class Finish(Struct, tag="finish", forbid_unknown_fields=True):
    """End requests: `stopped` when a stop string was found (no answer), else cancelled (answered
    with a last update each)."""

    request_ids: list[str]
    stopped: bool = False


class Load(Struct, tag="load", forbid_unknown_fields=True):
    """There is room for what `Needs` asked for: the model may be loaded."""


class Shutdown(Struct, tag="shutdown", forbid_unknown_fields=True):
    """Close the model and exit with status 0."""


# ---- engine process -> API process ---------------------------------------------------------------


# token id, logprob, rank, [(token id, logprob), ..]
WireLogprobs = tuple[int, float, int, list[tuple[int, float]]]


def to_wire(entries: list[TokenLogprobs]) -> list[WireLogprobs]:
    return [(entry.token_id, entry.logprob, entry.rank, entry.top) for entry in entries]


def from_wire(entries: list[WireLogprobs]) -> list[TokenLogprobs]:
    return [TokenLogprobs(i, p, rank, top) for i, p, rank, top in entries]


class Update(Struct, array_like=True, forbid_unknown_fields=True):
    """A `TokenUpdate`."""

    request_id: str
    token_ids: list[int]
    status: str
    num_cached_tokens: int = 0
    scheduled_time: float | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    logprobs: list[WireLogprobs] | None = None
    prompt_logprobs: tuple[int, list[WireLogprobs]] | None = None  # position of the first
    pooled: bytes | None = None
    num_computed_prompt_tokens: int = 0
    num_host_cached_tokens: int = 0

    @classmethod
    def of(cls, update: TokenUpdate, clock_ahead: float = 0.0) -> Update:
        """With times of the server, whose clock ours is ahead of."""
        scheduled = update.scheduled_time
        logprobs = None if update.logprobs is None else to_wire(update.logprobs)
        scores = update.prompt_logprobs
        return cls(
            update.request_id,
            update.token_ids,
            update.status.value,
            update.num_cached_tokens,
            None if scheduled is None else scheduled - clock_ahead,
            update.stop_reason,
            update.error,
            logprobs,
            None if scores is None else (scores.start, to_wire(scores.entries)),
            update.pooled,
            update.num_computed_prompt_tokens,
            update.num_host_cached_tokens,
        )

    def update(self) -> TokenUpdate:
        logprobs = None if self.logprobs is None else from_wire(self.logprobs)
        scores = None
        if self.prompt_logprobs is not None:
            start, entries = self.prompt_logprobs
            scores = PromptLogprobs(start, from_wire(entries))
        return TokenUpdate(
            self.request_id,
            self.token_ids,
            RequestStatus(self.status),
            logprobs,
            self.stop_reason,
            self.num_cached_tokens,
            self.scheduled_time,
            self.error,
            scores,
            self.pooled,
            self.num_computed_prompt_tokens,
            self.num_host_cached_tokens,
        )


class EngineStats(Struct, array_like=True):
    """The engine's counters; all but the gauges only rise."""

    num_running: int = 0
    num_waiting: int = 0
    kv_blocks: int = 0
    kv_blocks_used: int = 0
    kv_blocks_cached: int = 0
    kv_cache_bytes: int = 0  # of one rank
    kv_host_blocks: int = 0  # places of evicted blocks in CPU memory
    kv_host_blocks_used: int = 0
    kv_host_bytes: int = 0  # of one rank
    num_steps: int = 0
    num_preemptions: int = 0
    num_context_shifts: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    prefix_cache_host_hits: int = 0
    kv_blocks_saved: int = 0
    kv_blocks_brought_back: int = 0
    worker_errors: int = 0
    executor_timeouts: int = 0
    spec_decode_num_drafts: int = 0
    spec_decode_num_draft_tokens: int = 0
    spec_decode_num_accepted_tokens: int = 0
    spec_decode_accepted_per_position: list[int] = []
    spec_decode_mean_accepted_length: float = 0.0  # a gauge
    stage_seconds: dict[str, float] = {}  # of the worker's stages, since the start
    draws: dict[str, int] = {}  # rows drawn since the start, by where: device, host
    gpus: list[GpuUsage] = []  # gauges, of the engine's GPU; empty on a CPU

    @classmethod
    def at_start(cls, info: ModelInfo) -> EngineStats:
        return cls(
            kv_blocks=info.num_blocks,
            kv_cache_bytes=info.kv_cache_bytes,
            kv_host_blocks=info.num_host_blocks,
            kv_host_bytes=info.kv_host_bytes,
        )


class Outputs(Struct, tag="outputs"):
    """Everything that one turn of the engine loop produced."""

    updates: list[Update]
    stats: EngineStats

    @property
    def request_ids(self) -> list[str]:
        return [update.request_id for update in self.updates]


class Rejected(Struct, tag="rejected"):
    """The engine did not take a `Submit`, or let it wait for too long."""

    group: str
    request_ids: list[str]
    error: str
    field: str | None = None  # of the request; as in InvalidInputError
    code: str | None = None
    timed_out: bool = False


class Heartbeat(Struct, tag="heartbeat"):
    """Sent a few times a second by a thread beside the loop, from the first moment on."""

    loop_age: float  # seconds since the loop last turned; 0 while it waits for work
    cpu_seconds: float
    rss_bytes: int
    stats: EngineStats | None = None  # None: still loading
    loading: tuple[str, int, int] | None = None  # stage, done, total; see `common.progress`


class Needs(Struct, tag="needs"):
    """The memory that the model will take, in bytes; the engine waits for `Load`. Sent when
    `EngineSetup.ask_first` says so."""

    weights: int
    kv_cache: int
    fixed: int  # the process and its scratch

    @property
    def total(self) -> int:
        return self.weights + self.kv_cache + self.fixed


class Source(Struct):
    """A `TokenizerSource`."""

    directory: str | None
    vocabulary: BpeVocabulary | None
    chat_template: str | None
    special_ids: tuple[tuple[str, int], ...]
    eos_token_ids: tuple[int, ...]
    missing: str


class Ready(Struct, tag="ready"):
    """The model is loaded."""

    info: ModelInfo  # its tokenizer_source is apart
    source: Source | None

    @classmethod
    def of(cls, info: ModelInfo) -> Ready:
        origin: TokenizerSource | None = info.tokenizer_source
        source = None
        if origin is not None:
            source = Source(
                None if origin.directory is None else str(origin.directory),
                origin.vocabulary,
                origin.chat_template,
                origin.special_ids,
                origin.eos_token_ids,
                origin.missing,
            )
        return cls(replace(info, tokenizer_source=None), source)

    def model_info(self) -> ModelInfo:
        source = self.source
        if source is None:
            return self.info
        values = msgspec.structs.asdict(source)
        if source.directory is not None:
            values["directory"] = Path(source.directory)
        return replace(self.info, tokenizer_source=TokenizerSource(**values))


class Failed(Struct, tag="failed"):
    """The engine cannot go on and is about to exit."""

    error: str


# ---- the engine's configuration, on its standard input -------------------------------------------


class EngineSetup(Struct, forbid_unknown_fields=True):
    """What the engine process is started with."""

    input_address: str
    output_address: str
    socket_directory: str
    heartbeat_interval: float
    max_failed_steps: int
    log_level: str
    log_format: str
    engine: dict[str, Any]  # EngineConfig.to_wire(); checked again where it arrives
    ask_first: bool = False  # before the model is loaded; see `Needs`
    replica: int = 0  # its number, of `replicas`
    replicas: int = 1
    clock_ahead: float = 0.0  # seconds by which this machine's time.monotonic() is ahead

    def engine_config(self) -> EngineConfig:
        return EngineConfig.from_wire(self.engine)


ToEngine = Submit | Finish | Load | Shutdown
FromEngine = Outputs | Rejected | Heartbeat | Needs | Ready | Failed

decode_to_engine = decoder(ToEngine)
decode_from_engine = decoder(FromEngine)
