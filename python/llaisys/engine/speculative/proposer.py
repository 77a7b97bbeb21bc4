"""Sources of draft tokens: n-gram lookup, and the draft model or head on the worker."""

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


MAX_CANDIDATES = 8  # occurrences examined for one draft
_NONE = -1


class NgramProposer(Proposer):
    """Prompt lookup: when the last tokens of a request occurred earlier, the draft is what followed
    them. The index of every `shortest`-gram is stored under its tokens, with a link to the previous
    occurrence: one entry per token. Of the latest occurrences the one with the longest common
    suffix is chosen, the latest among equals."""

    def __init__(self, shortest: int, longest: int) -> None:
        """`shortest`, `longest`: length of the n-gram to match."""
        self._shortest = shortest
        self._longest = longest
        self._tables: dict[int, _NgramTable] = {}  # by sequence id

    def propose(self, requests: Sequence[Request], counts: Sequence[int]) -> list[Sequence[int]]:
        drafts: list[Sequence[int]] = []
        for request, count in zip(requests, counts, strict=True):
            tokens = request.token_ids
            start = self._table(request).find(tokens, self._longest)
            draft = [] if start == _NONE else tokens[start : start + count]
            if draft and len(draft) < count:  # the tokens repeat with this period
                draft = (draft * (-(-count // len(draft))))[:count]
            drafts.append(draft)
        return drafts

    def expects_draft(self, request: Request) -> bool:
        """Whether the previous prediction of one token was right and there is another: a single
        match may be chance."""
        table, tokens = self._table(request), request.token_ids
        was_right = table.prediction == (len(tokens) - 1, tokens[-1])
        start = table.find(tokens, self._longest)
        table.prediction = None if start == _NONE else (len(tokens), tokens[start])
        return was_right and start != _NONE

    def _table(self, request: Request) -> _NgramTable:
        table = self._tables.get(request.seq_id)
        if table is None:
            table = self._tables[request.seq_id] = _NgramTable(self._shortest)
        return table

    def release(self, seq_id: int) -> None:
        self._tables.pop(seq_id, None)


class _NgramTable:
    """Occurrences of the n-grams of one sequence."""

    __slots__ = ("_before", "_latest", "_shortest", "prediction")

    def __init__(self, shortest: int) -> None:
        self._shortest = shortest
        self._latest: dict[tuple[int, ...], int] = {}  # n-gram -> index after it
        # [i - shortest]: the previous occurrence of the n-gram that ends at i
        self._before: list[int] = []
        self.prediction: tuple[int, int] | None = None  # (index, token)

    def find(self, tokens: list[int], longest: int) -> int:
        """Return the index after the best earlier occurrence of the last tokens, or _NONE; adds the
        new tokens."""
        size, latest, before = self._shortest, self._latest, self._before
        for end in range(len(before) + size, len(tokens) + 1):
            key = tuple(tokens[end - size : end])
            before.append(latest.get(key, _NONE))
            latest[key] = end
        index = before[-1] if before else _NONE
        best, best_length, left = _NONE, 0, MAX_CANDIDATES
        while index != _NONE and left and best_length < longest:
            length = self._common(tokens, index, longest)
            if length > best_length:
                best, best_length = index, length
            index = before[index - size]
            left -= 1
        return best

    def _common(self, tokens: list[int], index: int, longest: int) -> int:
        """Return the length of the common suffix of tokens[:index] and tokens."""
        length, most = self._shortest, min(longest, index)
        while length < most and tokens[index - length - 1] == tokens[-length - 1]:
            length += 1
        return length
