"""What a source of drafts is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from llaisys.common.request import Request


class Proposer(ABC):
    """Guesses how requests go on. What it says changes the speed of an answer and nothing else:
    wrong tokens, ids that the vocabulary does not have and too many of them are all allowed."""

    # The last call did work that those behind it need not do: its time says nothing of theirs.
    is_catching_up = False
    # It is right about as often anywhere in an answer; otherwise it comes true in streaks.
    is_steady = False
    # It sees what the model computes: so many of a sequence's steps before a draft at least.
    steps_watched = 0
    # It stops where it is no longer sure, so that a draft may be as long as it likes.
    stops_itself = False

    @abstractmethod
    def propose(self, requests: Sequence[Request], counts: Sequence[int]) -> list[Sequence[int]]:
        """For each request at most `counts[i]` tokens that may follow `token_ids`; none: no idea.
        The tokens of a request only ever grow between two calls."""

    def foresees(self, request: Request) -> bool:
        """Whether it will have an idea when the next token, which is being computed, is known."""
        return True

    @abstractmethod
    def forget(self, seq_id: int) -> None:
        """The sequence has ended, or begins anew after a preemption; it may be unknown."""
