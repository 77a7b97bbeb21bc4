"""Interface of the sources of draft tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from llaisys.common.request import Request


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
