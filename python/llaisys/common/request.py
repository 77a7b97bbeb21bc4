"""A request: the owner of one sequence's tokens and status, and where each status leads."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from enum import Enum

from llaisys.common.sampling import SamplingParams

logger = logging.getLogger("llaisys.engine")


class RequestStatus(Enum):
    """Where a request stands; the names are the seeds', and the last two ours. Nothing uses
    WAITING_FOR_REMOTE_KVS and FINISHED_IGNORED yet."""

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
    constrain_after: int = (
        -1
    )  # structured_outputs hold behind this token, the end of reasoning; -1: now
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
    num_keep_tokens: int = 0  # that stay when the context is shifted; set with max_total_tokens
    num_discarded_tokens: int = (
        0  # of the computed ones, behind the kept: no longer in the KV cache
    )
    draft_token_ids: list[int] = field(default_factory=list)  # proposed; the next step takes them
    num_cached_tokens: int = -1  # prompt tokens found in the prefix cache; -1: not yet scheduled
    num_host_cached_tokens: int = 0  # of those, brought back from host memory
    num_preemptions: int = 0
    scheduled_time: float | None = None
    stop_reason: int | str | None = None  # the token id or the string that ended it
    error: str | None = None
    generates: bool = True  # samples tokens after the prompt
    needs_sync: bool = False  # its next draw needs its last token, or its logits, on the host
    reports_progress: bool = False  # says after each step how much of its prompt is done

    def __post_init__(self) -> None:
        self.generates = self.sampling.generates
        self.needs_sync = (
            self.sampling.structured_outputs is not None
            or self.sampling.logprob_token_ids is not None
            or self.sampling.pooling is not None
            or self.needs_prompt_logprobs
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
        """Whether its prompt's logprobs are wanted; those of a prompt's choices are the same."""
        return self.sampling.prompt_logprobs is not None and self.choice == 0

    @property
    def needs_every_token(self) -> bool:
        """Whether something is read from each token of the prompt, so that none may be left out
        because its keys and values are known."""
        return self.needs_prompt_logprobs or self.sampling.pooling == "mean"

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
