"""A request: the tokens and the status of one sequence, and the allowed status transitions."""

import logging
from dataclasses import dataclass, field
from enum import Enum

from llaisys.common.repetition import DETECTED, RepetitionDetection, RepetitionDetector
from llaisys.common.sampling import SamplingParams

logger = logging.getLogger("llaisys.engine")


class RequestStatus(Enum):
    """Status of a request; the names are those of the seeds, and two more. FINISHED_IGNORED is
    unused."""

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
        self.finished = value.startswith("finished")  # an attribute: read once per step and request

    @property
    def finish_reason(self) -> str | None:
        """`stop`, `length`, `abort`, `error`, `timeout`; None before the end."""
        return FINISH_REASONS.get(self)


FINISH_REASONS = {
    RequestStatus.FINISHED_STOPPED: "stop",
    RequestStatus.FINISHED_LENGTH_CAPPED: "length",
    RequestStatus.FINISHED_ABORTED: "abort",
    RequestStatus.FINISHED_IGNORED: "abort",
    RequestStatus.FINISHED_ERROR: "error",
    RequestStatus.FINISHED_TIMED_OUT: "timeout",
}

_ENDS = frozenset(FINISH_REASONS) - {RequestStatus.FINISHED_IGNORED}
_EARLY_ENDS = frozenset(FINISH_REASONS) - {
    RequestStatus.FINISHED_STOPPED,
    RequestStatus.FINISHED_LENGTH_CAPPED,
}

# A preempted request may still stop: its last result may arrive after the preemption.
TRANSITIONS: dict[RequestStatus, frozenset[RequestStatus]] = {
    RequestStatus.WAITING: _EARLY_ENDS
    | {RequestStatus.RUNNING, RequestStatus.WAITING_FOR_REMOTE_KVS},
    RequestStatus.WAITING_FOR_REMOTE_KVS: _EARLY_ENDS | {RequestStatus.WAITING},
    RequestStatus.RUNNING: _ENDS | {RequestStatus.PREEMPTED},
    RequestStatus.PREEMPTED: _ENDS | {RequestStatus.RUNNING},
    **{status: frozenset() for status in FINISH_REASONS},
}


class IllegalTransitionError(RuntimeError):
    """A status transition that is not allowed; nothing was changed."""


@dataclass(slots=True, eq=False)
class Request:
    """One sequence: a prompt and one choice of its continuation.

    `num_computed_tokens` catches up with `num_tokens`. When it is equal or larger, sampled tokens
    are in flight.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams  # after with_defaults()
    seed: int = 0
    group: str = ""  # request id of the prompt, shared by its choices
    choice: int = 0  # index among the n choices of a prompt
    stop_token_ids: frozenset[int] = frozenset()  # eos (unless ignored) and the request's own
    bad_words: tuple[tuple[int, ...], ...] = ()  # banned token sequences
    dry_breakers: tuple[tuple[int, ...], ...] = ()  # token sequences that end a repetition
    # With a thinking_budget: the start marker of reasoning (-1: none), then the end marker.
    thinking: tuple[int, ...] = ()
    constrain_after: int = -1  # token after which the grammar applies; -1: from the start
    cache_salt: str = ""  # prefixes are shared only between equal salts
    kv_export: bool = False  # publish the KV blocks of its prompt, without generating
    kv_source: str = ""  # request of another engine that published them: "id@address"
    lora: str = ""  # name of its LoRA adapter; "": none
    lora_id: int = 0  # of that adapter's load, set by the engine core; 0: none
    lora_slot: int = -1  # device slot while it runs, set by the scheduler
    owner: str = ""  # hash of the API key; see FairQueue
    job: str = ""  # the client call of the request; see FairQueue
    max_total_tokens: int = 0  # prompt + output; set by the scheduler
    arrival_time: float = 0.0
    seq_id: int = -1  # set by the scheduler; increases with arrival
    status: RequestStatus = RequestStatus.WAITING
    token_ids: list[int] = field(default_factory=list)  # prompt, then output
    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0
    num_keep_tokens: int = 0  # kept by context shifts; set by the scheduler
    num_discarded_tokens: int = 0  # computed tokens that context shifts have discarded
    draft_token_ids: list[int] = field(default_factory=list)  # for the next step
    num_cached_tokens: int = -1  # prompt tokens found in the prefix cache; -1: not yet scheduled
    num_host_cached_tokens: int = 0  # of those, restored from host memory
    num_preemptions: int = 0
    scheduled_time: float | None = None
    stop_reason: int | str | None = None  # stop token, stop string or "repetition_detected"
    error: str | None = None
    generates: bool = True  # samples tokens after the prompt
    needs_sync: bool = False  # sampling needs its last token or its logits on the host
    reports_progress: bool = False  # of its prompt, after each step
    repetition: RepetitionDetector | None = None  # with repetition_detection

    def __post_init__(self) -> None:
        self.generates = self.sampling.generates
        self.needs_sync = (
            self.sampling.structured_outputs is not None
            or self.sampling.logprob_token_ids is not None
            or self.sampling.pooling is not None
            or self.needs_prompt_logprobs
            or bool(self.thinking)
            or any(len(word) > 1 for word in self.bad_words)
            or self.sampling.dry_multiplier > 0
            or self.sampling.mirostat > 0
            or (self.sampling.uses_penalties and self.sampling.repeat_last_n > 0)
        )
        limits = self.sampling.repetition_detection
        if limits:
            self.repetition = RepetitionDetector(RepetitionDetection(**limits))
        if not self.token_ids:
            self.token_ids = list(self.prompt_token_ids)
        self.num_prompt_tokens = len(self.prompt_token_ids)

    @property
    def prefix_salt(self) -> str | tuple[int, str]:
        """What must be equal to share a prefix: the salt, and the load of the adapter, which
        changes keys and values."""
        return (self.lora_id, self.cache_salt) if self.lora_id else self.cache_salt

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def position(self) -> int:
        """Position in the KV cache of the next token to compute."""
        return self.num_computed_tokens - self.num_discarded_tokens

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
    def needs_prompt_logprobs(self) -> bool:
        """Whether prompt logprobs are requested; only the first choice computes them."""
        return self.sampling.prompt_logprobs is not None and self.choice == 0

    @property
    def needs_every_token(self) -> bool:
        """Whether every prompt token must be computed, so that the prefix cache cannot be used."""
        return self.needs_prompt_logprobs or self.sampling.pooling in ("mean", "cls")

    def set_status(self, status: RequestStatus) -> None:
        """Change the status; a transition that is not allowed is logged and raises."""
        if status not in TRANSITIONS[self.status]:
            change = f"{self.status.value} -> {status.value}"
            logger.error("request %s: illegal transition %s", self.request_id, change)
            raise IllegalTransitionError(f"request {self.request_id}: {change}")
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("request %s: %s -> %s", self.request_id, self.status.value, status.value)
        self.status = status

    def append_token(self, token_id: int) -> RequestStatus | None:
        """Append a sampled token; return the final status, or None to continue."""
        token_ids = self.token_ids
        token_ids.append(token_id)
        if token_id in self.stop_token_ids and self.num_output_tokens >= self.sampling.min_tokens:
            if token_id in (self.sampling.stop_token_ids or ()):
                self.stop_reason = token_id
            return RequestStatus.FINISHED_STOPPED
        if self.repetition is not None and self.repetition.append(token_id):
            self.stop_reason = DETECTED
            return RequestStatus.FINISHED_LENGTH_CAPPED
        if len(token_ids) >= self.max_total_tokens:
            return RequestStatus.FINISHED_LENGTH_CAPPED
        return None
