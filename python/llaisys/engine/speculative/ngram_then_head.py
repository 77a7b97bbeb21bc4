"""N-gram drafts where the request repeats itself, drafts of a head elsewhere. An n-gram lookup is
free and its drafts may be long.

The length of n-gram drafts adapts per sequence: as many tokens as were accepted last time, twice as
many when all were, and a pause when none was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from llaisys.common.request import Request
from llaisys.engine.speculative.ngram import NgramProposer
from llaisys.engine.speculative.proposer import Proposer

FIRST_LENGTH = 3  # tokens of the first n-gram draft
FIRST_PAUSE = 16  # tokens; doubles with every draft that is rejected entirely
MAX_PAUSE = 256


@dataclass(slots=True)
class NgramTracker:
    """Acceptance of the n-gram drafts of one sequence."""

    length: int = FIRST_LENGTH
    paused_until: int = 0  # tokens of the sequence
    pause: int = FIRST_PAUSE
    start: int = 0  # index of the last draft
    draft: list[int] = field(default_factory=list)  # the last draft until `update`

    def update(self, tokens: list[int]) -> None:
        """Compare the last draft with the tokens of the sequence."""
        if not self.draft:
            return
        draft, self.draft = self.draft, []
        drafted, accepted = len(draft), 0
        actual = tokens[self.start : self.start + drafted]
        while accepted < len(actual) and actual[accepted] == draft[accepted]:
            accepted += 1
        if accepted:
            self.pause = FIRST_PAUSE
            self.length = 2 * drafted if accepted == drafted else accepted
        else:
            self.paused_until = len(tokens) + self.pause
            self.pause = min(MAX_PAUSE, 2 * self.pause)
            self.length = FIRST_LENGTH


class NgramThenHead(Proposer):
    is_steady = True

    def __init__(self, ngram: NgramProposer, head: Proposer) -> None:
        self._ngram, self._head = ngram, head
        self.num_observed_steps = head.num_observed_steps
        self.limits_length = head.limits_length
        self.is_catching_up = False
        self._trackers: dict[int, NgramTracker] = {}  # by sequence id

    def propose(self, requests: Sequence[Request], counts: Sequence[int]) -> list[Sequence[int]]:
        drafts = [self._ngram_draft(r, count) for r, count in zip(requests, counts, strict=True)]
        others = [index for index, draft in enumerate(drafts) if not draft]
        self.is_catching_up = False
        if others:
            rest = [requests[index] for index in others]
            found = self._head.propose(rest, [counts[index] for index in others])
            self.is_catching_up = self._head.is_catching_up
            for index, draft in zip(others, found, strict=True):
                drafts[index] = draft
        return drafts

    def _ngram_draft(self, request: Request, count: int) -> Sequence[int]:
        tracker = self._trackers.get(request.seq_id)
        if tracker is None:
            tracker = self._trackers[request.seq_id] = NgramTracker()
        tracker.update(request.token_ids)
        if request.num_tokens < tracker.paused_until:
            return ()
        (draft,) = self._ngram.propose([request], [min(count, tracker.length)])
        tracker.start, tracker.draft = request.num_tokens, list(draft)
        return draft

    def release(self, seq_id: int) -> None:
        self._trackers.pop(seq_id, None)
        self._ngram.release(seq_id)
        self._head.release(seq_id)
