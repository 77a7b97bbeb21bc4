"""What a step consists of, and what comes back: plain data, no numpy.

Everything that crosses a layer (`SchedulerOutputs`, `StepOutput`, `TokenUpdate`, `StreamOutput`,
`RequestOutput`) is a record of plain values, so that it can cross a process. Of two of them there
is one per request and step; those are msgspec structs, which are made in a third of the time that a
dataclass takes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from msgspec import Struct

from llaisys.common.request import Request, RequestStatus
from llaisys.common.sampling import SamplingParams

# ---- what a step consists of ---------------------------------------------------------------------


@dataclass(slots=True)
class NewSequence:
    """A sequence that the worker does not hold: new, or back after a preemption."""

    seq_id: int
    request_id: str
    token_ids: list[int]  # prompt and what was drawn before a preemption
    num_prompt_tokens: int
    sampling: SamplingParams
    seed: int
    choice: int
    stop_token_ids: frozenset[int]
    bad_words: tuple[tuple[int, ...], ...]
    thinking: tuple[int, ...] = ()


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
    """Keys and values of a block of the KV cache to its place in host memory, or back."""

    block: int
    host_slot: int
    to_host: bool


class DraftRequest(Struct, frozen=True):
    """A sequence that can use drafts. The tokens before `start` were in an earlier one, and are the
    same."""

    seq_id: int
    start: int
    token_ids: list[int]  # from `start` on
    count: int  # drafts at most


@dataclass(slots=True)
class SchedulerOutputs:
    """One step's work. The lists of length s run in parallel, one entry a sequence.

    Sequence i computes its tokens at positions [starts[i], starts[i] + counts[i]), and when
    samples[i] the token after them is drawn. The last of its tokens are its drafts, if it has any:
    then a token is drawn after each of them and after the token before them, up to the first that
    was not drafted.
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
    # Before the step, in order, between its shifts: a block may be saved and filled anew.
    block_copies: list[BlockCopy] = field(default_factory=list)
    # seq id -> appended blocks, behind those of its shift
    new_blocks: dict[int, list[int]] = field(default_factory=dict)
    released_seq_ids: list[int] = field(default_factory=list)  # finished or preempted before
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0

    @property
    def batch_size(self) -> int:
        return len(self.seq_ids)


@dataclass(slots=True)
class TokenLogprobs:
    """Log-probabilities at one position, before bias, mask and chain."""

    token_id: int
    logprob: float
    rank: int  # 1 = the most likely token
    top: list[tuple[int, float]] = field(default_factory=list)  # the best, falling


@dataclass(slots=True)
class PromptLogprobs:
    """Logprobs of a prompt's tokens from `start` on. A preempted request may send some twice."""

    start: int
    entries: list[TokenLogprobs]


@dataclass(slots=True)
class StepOutput:
    """What a step drew. It names its step, so it may be applied after later steps were planned."""

    step_id: int
    sampled: dict[int, list[int]]  # seq id -> new tokens (one; more when drafts were accepted)
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)  # where asked for
    # seq id -> of its prompt's tokens that follow those of the step, where asked for
    prompt_logprobs: dict[int, PromptLogprobs] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)  # seq id -> why nothing could be drawn
    # seq id -> of a prompt that is pooled and now at its end: f32 [hidden size], native order
    pooled: dict[int, bytes] = field(default_factory=dict)

    def extend(self, later: StepOutput) -> None:
        """Add what was drawn after accepted drafts. A sequence that failed there keeps the tokens
        that it has: the next step meets the same failure in its first draw."""
        for seq_id, tokens in later.sampled.items():
            self.sampled[seq_id] += tokens
        for seq_id, logprobs in later.logprobs.items():
            self.logprobs[seq_id] += logprobs


@dataclass(slots=True)
class StepRecord:
    """The engine's note about one step."""

    step_id: int
    batch_size: int
    num_prefill_tokens: int
    num_decode_tokens: int
    seconds: float = 0.0


class TokenUpdate(Struct, gc=False):
    """What one step did to one request; the engine core's output, token ids only."""

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
    num_computed_prompt_tokens: int = (
        0  # tokens of the prompt, of a request that tells its progress
    )
    num_host_cached_tokens: int = 0  # of the cached ones

    @classmethod
    def of(
        cls, request: Request, tokens: list[int], logprobs: list[TokenLogprobs] | None = None
    ) -> TokenUpdate:
        """What a request has become."""
        cached = max(request.num_cached_tokens, 0)
        facts = (request.stop_reason, cached, request.scheduled_time, request.error)
        update = cls(request.request_id, tokens, request.status, logprobs, *facts)
        if request.num_host_cached_tokens:
            update.num_host_cached_tokens = request.num_host_cached_tokens
        return update


class GpuUsage(Struct, array_like=True, gc=False):
    """Of a whole GPU, whoever uses it."""

    index: int  # as the process counts its devices
    memory_used: int  # bytes
    memory_total: int
    busy: float = -1.0  # the part of the last moment in which it computed, 0 to 1; -1: not known


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the worker says about the model that it loaded."""

    model_path: str
    model_type: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    num_blocks: int
    block_size: int
    kv_bytes_per_token: int = 0
    num_host_blocks: int = 0  # places of evicted blocks in host memory
    generation_defaults: dict[str, float | int | None] = field(default_factory=dict)
    hidden_size: int = 0  # numbers of a pooled vector; 0: the model gives none
    tokenizer_source: Any = None  # what llaisys.tokenization opens; None: no tokenizer

    @property
    def kv_cache_bytes(self) -> int:
        """Of one rank."""
        return self.num_blocks * self.block_size * self.kv_bytes_per_token

    @property
    def kv_host_bytes(self) -> int:
        """Of one rank."""
        return self.num_host_blocks * self.block_size * self.kv_bytes_per_token


# ---- what the caller gets ------------------------------------------------------------------------


@dataclass(slots=True)
class Usage:
    prompt_tokens: int = 0
    completion_tokens: int = 0  # over all choices
    cached_tokens: int = 0  # prompt tokens that the prefix cache saved
    reasoning_tokens: int = 0  # of the completion, where somebody counted them
    host_cached_tokens: int = 0  # of the cached ones, brought back from host memory

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(slots=True)
class Timings:
    """Seconds since the request was submitted; None: it did not come that far."""

    queue: float | None = None  # until it was first scheduled
    first_token: float | None = None
    total: float | None = None
    per_token: float | None = None  # mean time between tokens after the first


@dataclass(slots=True)
class CompletionOutput:
    """One finished (or abandoned) choice."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)  # the stop token included
    finish_reason: str | None = None  # stop, length, abort, error
    stop_reason: int | str | None = None  # the stop string or token; None for eos and length
    status: RequestStatus = RequestStatus.WAITING
    logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None
    num_cached_tokens: int = 0
    num_host_cached_tokens: int = 0  # of those
    timings: Timings = field(default_factory=Timings)
    error: str | None = None


@dataclass(slots=True)
class RequestOutput:
    """A prompt and all its choices."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    usage: Usage = field(default_factory=Usage)
    # One for each prompt token, when asked for; the first has nothing before it: NaN, rank 0.
    prompt_logprobs: list[TokenLogprobs] | None = None
    pooled: bytes | None = None  # f32 [hidden size], as `common.embedding` reads it

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
    """How much of a prompt has been computed."""

    total: int  # tokens
    cached: int  # of them, found in the prefix cache
    done: int  # of them, the cached ones included
    seconds: float  # since its first step was planned


class StreamOutput(Struct):
    """What is new of one choice. The `text` parts, put together, are the final text."""

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    logprobs: list[TokenLogprobs] | None = None
    stop_reason: int | str | None = None
    output: RequestOutput | None = None  # with the last part of the last choice
    prompt_logprobs: list[TokenLogprobs] | None = None  # with the first part of the first choice
    # Where asked for: in parts without a token while the prompt is computed, and with the first.
    progress: PromptProgress | None = None
