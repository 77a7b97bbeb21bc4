"""Plain data that crosses layers and processes: plans, step results, updates and outputs. No numpy.

`TokenUpdate`, `TokenLogprobs` and `StreamOutput` exist per request and step; they are msgspec
structs, which are created three times faster than dataclasses.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from msgspec import Struct

from llaisys.common.lora import LoraLoad
from llaisys.common.request import Request, RequestStatus
from llaisys.common.sampling import SamplingParams

# ---- steps ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class NewSequence:
    """A sequence that the worker does not have: new, or restarted after a preemption."""

    seq_id: int
    request_id: str
    token_ids: list[int]  # prompt, and tokens sampled before a preemption
    num_prompt_tokens: int
    sampling: SamplingParams
    seed: int
    choice: int
    stop_token_ids: frozenset[int]
    bad_words: tuple[tuple[int, ...], ...]
    dry_breakers: tuple[tuple[int, ...], ...] = ()
    thinking: tuple[int, ...] = ()
    lora_slot: int = -1  # device slot of its LoRA adapter; -1: none


@dataclass(slots=True)
class ContextShift:
    """Discards the tokens at positions [num_keep, num_keep + num_discard) of a sequence; the tokens
    after them move up and their keys are rotated by -num_discard (K-shift). Applied before the
    step, in order. Keys and values of replaced blocks are copied first."""

    seq_id: int
    num_keep: int
    num_discard: int  # whole blocks
    blocks: list[int]  # from the block of position `num_keep` on
    token_ids: list[int]  # known tokens that follow, of a recomputed sequence
    num_copies: int = 0  # block copies of the plan that precede it


class BlockCopy(NamedTuple):
    """A copy of a block of the KV cache to a host slot, or back."""

    block: int
    host_slot: int
    to_host: bool


class DraftRequest(Struct, frozen=True):
    """A sequence that gets drafts. The tokens before `start` were sent earlier."""

    seq_id: int
    start: int
    token_ids: list[int]  # from `start` on
    count: int  # maximum of draft tokens


@dataclass(slots=True)
class SchedulerOutputs:
    """The plan of a step. The lists of length s run in parallel, one entry per sequence.

    Sequence i computes its tokens at positions [starts[i], starts[i] + counts[i]) and, when
    samples[i], samples the token after them. Drafts are the last of its tokens: then a token is
    sampled after the token before them and after each accepted draft token.
    """

    step_id: int
    seq_ids: list[int] = field(default_factory=list)  # [s]
    request_ids: list[str] = field(default_factory=list)  # [s]
    starts: list[int] = field(default_factory=list)  # [s]
    counts: list[int] = field(default_factory=list)  # [s]
    samples: list[bool] = field(default_factory=list)  # [s]
    draft_token_ids: dict[int, list[int]] = field(default_factory=dict)  # seq id -> drafts
    new_seqs: list[NewSequence] = field(default_factory=list)
    shifts: list[ContextShift] = field(default_factory=list)
    # Before the step, in order, between its shifts: a block may be saved and refilled.
    block_copies: list[BlockCopy] = field(default_factory=list)
    # seq id -> appended blocks, after those of its shift
    new_blocks: dict[int, list[int]] = field(default_factory=dict)
    released_seq_ids: list[int] = field(default_factory=list)  # finished or preempted
    lora_loads: list[LoraLoad] = field(default_factory=list)  # before the step
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    prefill_position: int = 0  # mean of the prefill tokens

    @property
    def batch_size(self) -> int:
        return len(self.seq_ids)


class TokenLogprobs(Struct, array_like=True, gc=False, forbid_unknown_fields=True):
    """Logprobs at one position, before bias, mask and chain. The most likely tokens stay packed
    until `top` is read: most positions of a large batch are never looked at."""

    token_id: int
    logprob: float
    rank: int  # 1 = the most likely token
    top_ids: bytes = b""  # int32, native order
    top_values: bytes = b""  # float, native order

    @classmethod
    def of(
        cls, token_id: int, logprob: float, rank: int, top: Sequence[tuple[int, float]] = ()
    ) -> TokenLogprobs:
        ids, values = array("i", (i for i, _ in top)), array("f", (p for _, p in top))
        return cls(token_id, logprob, rank, ids.tobytes(), values.tobytes())

    def with_top(self, most: int) -> TokenLogprobs:
        """Return a copy with at most `most` of the most likely tokens."""
        fields = (self.token_id, self.logprob, self.rank)
        return TokenLogprobs(*fields, self.top_ids[: 4 * most], self.top_values[: 4 * most])

    @property
    def top(self) -> list[tuple[int, float]]:
        """The most likely tokens and their logprobs, descending."""
        ids, values = array("i", self.top_ids), array("f", self.top_values)
        return list(zip(ids, values, strict=True))


@dataclass(slots=True)
class PromptLogprobs:
    """Prompt logprobs from position `start` on. A preempted request may send some twice."""

    start: int
    entries: list[TokenLogprobs]


@dataclass(slots=True)
class StepOutput:
    """The result of a step; later steps may be scheduled before it is applied."""

    step_id: int
    sampled: dict[int, list[int]]  # seq id -> new tokens (one; more when drafts were accepted)
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)  # if requested
    # seq id -> logprobs of the successors of the prompt tokens of the step, if requested
    prompt_logprobs: dict[int, PromptLogprobs] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)  # seq id -> sampling error
    # seq id -> embedding of a pooled prompt that is complete: f32 [hidden size], native order
    pooled: dict[int, bytes] = field(default_factory=dict)


@dataclass(slots=True)
class StepRecord:
    step_id: int
    batch_size: int
    num_prefill_tokens: int
    num_decode_tokens: int
    seconds: float = 0.0


class TokenUpdate(Struct, array_like=True, gc=False, forbid_unknown_fields=True):
    """The result of one step for one request; output of the engine core."""

    request_id: str
    token_ids: list[int]  # new in this step
    status: RequestStatus
    logprobs: list[TokenLogprobs] | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    scheduled_time: float | None = None
    error: str | None = None
    prompt_logprobs: PromptLogprobs | None = None
    pooled: bytes | None = None  # f32 [hidden size]
    num_computed_prompt_tokens: int = 0  # with reports_progress
    num_host_cached_tokens: int = 0  # of the cached tokens

    @classmethod
    def of(
        cls, request: Request, tokens: list[int], logprobs: list[TokenLogprobs] | None = None
    ) -> TokenUpdate:
        cached = max(request.num_cached_tokens, 0)
        fields = (request.stop_reason, cached, request.scheduled_time, request.error)
        update = cls(request.request_id, tokens, request.status, logprobs, *fields)
        if request.num_host_cached_tokens:
            update.num_host_cached_tokens = request.num_host_cached_tokens
        return update


class GpuUsage(Struct, array_like=True, gc=False):
    """Usage of a GPU by all processes."""

    index: int  # device index in this process
    memory_used: int  # bytes
    memory_total: int
    busy: float = -1.0  # utilization, 0 to 1; -1: unknown


@dataclass(frozen=True, slots=True)
class ModelInfo:
    model_path: str
    model_type: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    num_blocks: int
    block_size: int
    kv_bytes_per_token: int = 0
    kv_cache_dtype: str = "auto"  # as configured
    num_host_blocks: int = 0  # host slots for evicted blocks
    generation_defaults: dict[str, float | int | None] = field(default_factory=dict)
    hidden_size: int = 0  # size of an embedding; 0: not supported
    pooling: str = "last"  # default of embeddings
    is_encoder: bool = False  # generates no text
    scores_pairs: bool = False  # a reranker: scores pairs of texts, no embeddings
    judges_pairs: bool = False  # its inputs are chats that ask for "yes" or "no"
    tokenizer_source: Any = None  # for llaisys.tokenization; None: no tokenizer
    device: str = "cpu"
    max_loras: int = 0  # device slots of LoRA adapters; 0: not supported
    max_lora_rank: int = 0
    weight_type: str = ""  # of most weights in the files: BF16, Q4_K_M, ...
    # By GGUF's keys.
    metadata: dict[str, str | int | float | bool | None] = field(default_factory=dict)

    @property
    def kv_cache_bytes(self) -> int:
        """Bytes of one rank."""
        return self.num_blocks * self.block_size * self.kv_bytes_per_token

    @property
    def kv_host_bytes(self) -> int:
        """Bytes of one rank."""
        return self.num_host_blocks * self.block_size * self.kv_bytes_per_token


# ---- outputs -------------------------------------------------------------------------------------


@dataclass(slots=True)
class Usage:
    prompt_tokens: int = 0
    completion_tokens: int = 0  # over all choices
    cached_tokens: int = 0  # prompt tokens found in the prefix cache
    reasoning_tokens: int = 0  # of the completion, if counted
    host_cached_tokens: int = 0  # of the cached tokens, restored from host memory

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(slots=True)
class Timings:
    """Seconds since the request was submitted; None: not reached."""

    queue: float | None = None  # until it was first scheduled
    first_token: float | None = None
    total: float | None = None
    per_token: float | None = None  # mean time between tokens after the first


@dataclass(slots=True)
class CompletionOutput:
    """One finished choice."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)  # including the stop token
    finish_reason: str | None = None  # stop, length, abort, error
    stop_reason: int | str | None = None  # the stop string or token; None for eos and length
    status: RequestStatus = RequestStatus.WAITING
    logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None
    num_cached_tokens: int = 0
    num_host_cached_tokens: int = 0  # of those
    timings: Timings = field(default_factory=Timings)
    error: str | None = None
    seed: int | None = None  # as used


@dataclass(slots=True)
class RequestOutput:
    """A prompt and all its choices."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    usage: Usage = field(default_factory=Usage)
    # One per prompt token, if requested; the first is NaN, rank 0.
    prompt_logprobs: list[TokenLogprobs] | None = None
    pooled: bytes | None = None  # f32 [hidden size]; see `common.embedding`

    @property
    def finished(self) -> bool:
        return all(output.finish_reason is not None for output in self.outputs)

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> str | None:
        return self.outputs[0].finish_reason


class PromptProgress(Struct, frozen=True):
    total: int  # tokens
    cached: int  # of them, found in the prefix cache
    done: int  # computed tokens, including the cached ones
    seconds: float  # since its first step was scheduled


class StreamOutput(Struct):
    """A part of one choice. The concatenated `text` parts are the final text."""

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    logprobs: list[TokenLogprobs] | None = None
    stop_reason: int | str | None = None
    output: RequestOutput | None = None  # with the last part of the last choice
    prompt_logprobs: list[TokenLogprobs] | None = None  # with the first part of the first choice
    # If requested: in parts without a token during prefill, and with the first token.
    progress: PromptProgress | None = None
