"""Requests, what a step consists of, and what comes back: plain data, no numpy.

`Request` owns the tokens and the status of one sequence. Everything that crosses a layer
(`SchedulerOutputs`, `StepOutput`, `TokenUpdate`, `StreamOutput`, `RequestOutput`) is a record of
plain values, so that it can cross a process. Of two of them there is one per request and step;
those are msgspec structs, which are made in a third of the time that a dataclass takes.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from msgspec import Struct

from llaisys.common.sampling import SamplingParams

logger = logging.getLogger("llaisys.engine")


class RequestStatus(Enum):
    """Where a request stands; the names are the seeds', and the last two ours."""

    WAITING = "waiting"
    WAITING_FOR_REMOTE_KVS = "waiting_for_remote_kvs"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED_STOPPED = "finished_stopped"
    FINISHED_LENGTH_CAPPED = "finished_length_capped"
    FINISHED_ABORTED = "finished_aborted"
    FINISHED_IGNORED = "finished_ignored"
    FINISHED_ERROR = "finished_error"
    FINISHED_TIMED_OUT = "finished_timed_out"

    def __init__(self, value: str) -> None:
        self.finished = value.startswith("finished")  # looked at once a step and request

    @property
    def finish_reason(self) -> str | None:
        """`stop`, `length`, `abort`, `error`, `timeout`; None while the request lives."""
        return FINISH_REASONS.get(self)


FINISH_REASONS = {
    RequestStatus.FINISHED_STOPPED: "stop",
    RequestStatus.FINISHED_LENGTH_CAPPED: "length",
    RequestStatus.FINISHED_ABORTED: "abort",
    RequestStatus.FINISHED_IGNORED: "abort",
    RequestStatus.FINISHED_ERROR: "error",
    RequestStatus.FINISHED_TIMED_OUT: "timeout",
}

_ENDS = frozenset(
    {
        RequestStatus.FINISHED_STOPPED,
        RequestStatus.FINISHED_LENGTH_CAPPED,
        RequestStatus.FINISHED_ABORTED,
        RequestStatus.FINISHED_ERROR,
        RequestStatus.FINISHED_TIMED_OUT,
    }
)
_EARLY_ENDS = frozenset(
    {
        RequestStatus.FINISHED_ABORTED,
        RequestStatus.FINISHED_IGNORED,
        RequestStatus.FINISHED_ERROR,
        RequestStatus.FINISHED_TIMED_OUT,
    }
)

# A preempted request may still stop: a result or a stop string can arrive one step late.
TRANSITIONS: dict[RequestStatus, frozenset[RequestStatus]] = {
    RequestStatus.WAITING: _EARLY_ENDS
    | {RequestStatus.RUNNING, RequestStatus.WAITING_FOR_REMOTE_KVS},
    RequestStatus.WAITING_FOR_REMOTE_KVS: _EARLY_ENDS | {RequestStatus.WAITING},
    RequestStatus.RUNNING: _ENDS | {RequestStatus.PREEMPTED},
    RequestStatus.PREEMPTED: _ENDS | {RequestStatus.RUNNING},
    **{status: frozenset() for status in FINISH_REASONS},
}


class IllegalTransitionError(RuntimeError):
    """A request was asked to go where its status does not lead; nothing was changed."""


@dataclass(slots=True, eq=False)
class Request:
    """One sequence: a prompt and one choice of its continuation.

    A step gives the request tokens; `num_computed_tokens` catches up with `num_tokens`. When it is
    equal or larger, tokens have been asked for whose ids are not known yet.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams  # with_defaults() done
    seed: int = 0
    group: str = ""  # the prompt's own name, which its choices share
    choice: int = 0  # index among the n choices of a prompt
    stop_token_ids: frozenset[int] = frozenset()  # eos (unless ignored) and the request's own
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that must not be completed
    # With a thinking_budget: the token that opens reasoning (-1: none), then what closes it.
    thinking: tuple[int, ...] = ()
    form_after: int = -1  # structured_outputs hold behind this token, the end of reasoning; -1: now
    cache_salt: str = ""  # prefixes are shared only between equal salts
    owner: str = ""  # whose request it is: an API key's hash; owners share the engine fairly
    job: str = ""  # the client's call that it is a part of; so do the jobs of one owner
    max_total_tokens: int = 0  # prompt + output; set by the scheduler when it takes the request
    arrival_time: float = 0.0
    seq_id: int = -1  # set by the scheduler; rises with arrival
    status: RequestStatus = RequestStatus.WAITING
    token_ids: list[int] = field(default_factory=list)  # prompt, then output
    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0
    num_kept_tokens: int = 0  # that stay when the context is shifted; set with max_total_tokens
    num_dropped_tokens: int = 0  # of the computed ones, behind the kept: no longer in the KV cache
    draft_token_ids: list[int] = field(default_factory=list)  # proposed; the next step takes them
    num_cached_tokens: int = -1  # prompt tokens found in the prefix cache; -1: not yet scheduled
    num_preemptions: int = 0
    scheduled_time: float | None = None
    stop_reason: int | str | None = None  # the token id or the string that ended it
    error: str | None = None
    draws: bool = True  # a token is drawn behind the prompt
    is_bound: bool = False  # its next draw needs its last token, or its logits, on the host
    tells_progress: bool = False  # says after each step how much of its prompt is done

    def __post_init__(self) -> None:
        self.draws = self.sampling.draws
        self.is_bound = (
            self.sampling.structured_outputs is not None
            or self.sampling.logprob_token_ids is not None
            or self.sampling.pooling is not None
            or self.scores_prompt
            or bool(self.thinking)
            or any(len(word) > 1 for word in self.bad_words)
        )
        if not self.token_ids:
            self.token_ids = list(self.prompt_token_ids)
        self.num_prompt_tokens = len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def position(self) -> int:
        """Where the next token to compute stands in the KV cache."""
        return self.num_computed_tokens - self.num_dropped_tokens

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def finished(self) -> bool:
        return self.status.finished

    @property
    def scores_prompt(self) -> bool:
        """Whether its prompt's logprobs are wanted; those of a prompt's choices are the same."""
        return self.sampling.prompt_logprobs is not None and self.choice == 0

    @property
    def needs_every_token(self) -> bool:
        """Whether something is read from each token of the prompt, so that none may be left out
        because its keys and values are known."""
        return self.scores_prompt or self.sampling.pooling == "mean"

    def set_status(self, status: RequestStatus) -> None:
        """Move to `status`; an illegal move is logged and raises, and changes nothing."""
        if status not in TRANSITIONS[self.status]:
            logger.error(
                "request %s: illegal transition %s -> %s",
                self.request_id,
                self.status.value,
                status.value,
            )
            raise IllegalTransitionError(
                f"request {self.request_id}: {self.status.value} -> {status.value}"
            )
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("request %s: %s -> %s", self.request_id, self.status.value, status.value)
        self.status = status

    def append_token(self, token_id: int) -> RequestStatus | None:
        """Take a drawn token; the status to finish with, or None to go on."""
        token_ids = self.token_ids
        token_ids.append(token_id)
        if token_id in self.stop_token_ids and self.num_output_tokens >= self.sampling.min_tokens:
            if token_id in (self.sampling.stop_token_ids or ()):
                self.stop_reason = token_id
            return RequestStatus.FINISHED_STOPPED
        if len(token_ids) >= self.max_total_tokens:
            return RequestStatus.FINISHED_LENGTH_CAPPED
        return None


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
    """A sequence that fills its context lets go of the tokens at positions [kept, kept + dropped),
    and those behind them move up: their keys are rotated by -dropped. Before the step, in order. A
    block that was another one gets its keys and values first, the first also the kept tokens'.
    """

    seq_id: int
    kept: int
    dropped: int  # whole blocks
    blocks: list[int]  # from the one that holds position `kept` on
    token_ids: list[int]  # known ones that follow; a sequence computed anew has more than fit


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
class PromptScores:
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
    prompt_logprobs: dict[int, PromptScores] = field(default_factory=dict)
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
    prompt_logprobs: PromptScores | None = None
    pooled: bytes | None = None  # f32 [hidden size]
    num_prompt_done: int = 0  # tokens of the prompt, of a request that tells its progress

    @classmethod
    def of(
        cls, request: Request, tokens: list[int], logprobs: list[TokenLogprobs] | None = None
    ) -> TokenUpdate:
        """What a request has become."""
        cached = max(request.num_cached_tokens, 0)
        facts = (request.stop_reason, cached, request.scheduled_time, request.error)
        return cls(request.request_id, tokens, request.status, logprobs, *facts)


class GpuUse(Struct, array_like=True, gc=False):
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
    generation_defaults: dict[str, float | int | None] = field(default_factory=dict)
    hidden_size: int = 0  # numbers of a pooled vector; 0: the model gives none
    tokenizer_source: Any = None  # what llaisys.tokenization opens; None: no tokenizer

    @property
    def kv_cache_bytes(self) -> int:
        """Of one rank."""
        return self.num_blocks * self.block_size * self.kv_bytes_per_token


# ---- what the caller gets ------------------------------------------------------------------------


@dataclass(slots=True)
class Usage:
    prompt_tokens: int = 0
    completion_tokens: int = 0  # over all choices
    cached_tokens: int = 0  # prompt tokens that the prefix cache saved
    reasoning_tokens: int = 0  # of the completion, where somebody counted them

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
