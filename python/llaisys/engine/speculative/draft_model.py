"""Drafts from a model that runs beside the one that answers.

The worker has it; here is what it has been told of each sequence, so that a step carries new tokens
only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from llaisys.common.request import Request
from llaisys.common.types import DraftRequest
from llaisys.engine.executor import ExecutorTimeoutError, WorkerError
from llaisys.engine.speculative.proposer import Proposer

logger = logging.getLogger("llaisys.engine")

# (sequences, those that have gone) -> drafts, one list a sequence
Draft = Callable[[Sequence[DraftRequest], Sequence[int]], list[list[int]]]

HEAD_WATCHES = 16  # steps before a draft whose hidden states a head sees
CATCHING_UP = 65  # new tokens of a sequence that cannot all be the last step's


class DraftModelProposer(Proposer):
    is_steady = True

    def __init__(self, draft: Draft, is_head: bool = False) -> None:
        self._draft = draft
        self.steps_watched = HEAD_WATCHES if is_head else 0
        self.stops_itself = is_head
        self._known: dict[int, int] = {}  # sequence -> tokens that the model was told
        self._forgotten: list[int] = []  # it is to be told of with the next call
        self.is_catching_up = False

    def propose(self, requests: Sequence[Request], counts: Sequence[int]) -> list[Sequence[int]]:
        """A model that fails gives no drafts and begins anew: the answers do not need it."""
        asked = []
        for request, count in zip(requests, counts, strict=True):
            start = self._known.get(request.seq_id, 0)
            asked.append(DraftRequest(request.seq_id, start, request.token_ids[start:], count))
            self._known[request.seq_id] = request.num_tokens
        forgotten, self._forgotten = self._forgotten, []
        self.is_catching_up = any(len(request.token_ids) >= CATCHING_UP for request in asked)
        try:
            return list(self._draft(asked, forgotten))
        except (WorkerError, ExecutorTimeoutError):
            names = [request.request_id for request in requests]
            logger.exception("the draft model failed; the step goes without drafts: %s", names)
            self._forgotten = [*forgotten, *self._known]
            self._known.clear()
            return [()] * len(requests)

    def forget(self, seq_id: int) -> None:
        if self._known.pop(seq_id, None) is not None:
            self._forgotten.append(seq_id)
