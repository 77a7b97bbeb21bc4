"""The interface of the sources of draft tokens, and the draft model or head on the worker."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from llaisys.common.request import Request
from llaisys.common.types import DraftRequest
from llaisys.engine.executor import ExecutorTimeoutError, WorkerError

logger = logging.getLogger("llaisys.engine")

# (sequences, released sequence ids) -> drafts, one list per sequence
Draft = Callable[[Sequence[DraftRequest], Sequence[int]], list[list[int]]]

HEAD_OBSERVED_STEPS = 16  # steps before a draft whose hidden states a head needs
CATCHING_UP = 65  # new tokens of a sequence; more than one step can sample


class Proposer(ABC):
    """Proposes draft tokens. Drafts affect speed only, never the output: wrong tokens, ids outside
    the vocabulary and too many tokens are allowed."""

    # The last call also computed known tokens (prefill); its time is not that of a draft.
    is_catching_up = False
    # The acceptance rate is uniform over a sequence; otherwise accepted drafts come in streaks.
    is_steady = False
    # Steps of a sequence that the proposer must observe before a draft (hidden states).
    num_observed_steps = 0
    # The proposer ends a draft when its confidence is low, so drafts may have the maximum length.
    limits_length = False

    @abstractmethod
    def propose(self, requests: Sequence[Request], counts: Sequence[int]) -> list[Sequence[int]]:
        """Return up to `counts[i]` draft tokens after `token_ids` of each request. The tokens of a
        request only grow between two calls."""

    def expects_draft(self, request: Request) -> bool:
        """Whether a draft is likely once the token in flight is known."""
        return True

    @abstractmethod
    def release(self, seq_id: int) -> None:
        """Free the state of a sequence that has finished or was preempted; it may be unknown."""


class DraftModelProposer(Proposer):
    """The number of tokens that the worker has of each sequence is tracked here, so a call carries
    new tokens only."""

    is_steady = True

    def __init__(self, draft: Draft, is_head: bool = False) -> None:
        self._draft = draft
        self.num_observed_steps = HEAD_OBSERVED_STEPS if is_head else 0
        self.limits_length = is_head
        self._known: dict[int, int] = {}  # sequence id -> tokens that the model has
        self._released: list[int] = []  # sent with the next call
        self.is_catching_up = False

    def propose(self, requests: Sequence[Request], counts: Sequence[int]) -> list[Sequence[int]]:
        """Return no drafts and restart every sequence when the draft model fails."""
        calls = []
        for request, count in zip(requests, counts, strict=True):
            start = self._known.get(request.seq_id, 0)
            calls.append(DraftRequest(request.seq_id, start, request.token_ids[start:], count))
            self._known[request.seq_id] = request.num_tokens
        released, self._released = self._released, []
        self.is_catching_up = any(len(request.token_ids) >= CATCHING_UP for request in calls)
        try:
            return list(self._draft(calls, released))
        except (WorkerError, ExecutorTimeoutError):
            names = [request.request_id for request in requests]
            logger.exception("the draft model failed; the step has no drafts: %s", names)
            self._released = [*released, *self._known]
            self._known.clear()
            return [()] * len(requests)

    def release(self, seq_id: int) -> None:
        if self._known.pop(seq_id, None) is not None:
            self._released.append(seq_id)
