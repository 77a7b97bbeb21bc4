"""A head's drafts, and before them the request's own tokens: what is copied or said again is in
them, costs nothing to look up and may be long, while a head knows what is new.

How far the own tokens are trusted is learned from what came of them, for each sequence: they are
asked for as many as were right the last time, or twice as many when all were, and rest for a while
when none was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from llaisys.common.request import Request
from llaisys.engine.speculative.ngram import NgramProposer
from llaisys.engine.speculative.proposer import Proposer

FIRST_LENGTH = 3  # of the first draft from a sequence's own tokens
FIRST_REST = 16  # tokens; it doubles with every draft that is all wrong
LONGEST_REST = 256


@dataclass(slots=True)
class NgramTracker:
    length: int = FIRST_LENGTH
    until: int = 0  # tokens of the sequence up to which it rests
    rest: int = FIRST_REST
    start: int = 0  # where the last draft began
    draft: list[int] = field(default_factory=list)  # what it was; empty: none is open

    def learn(self, tokens: list[int]) -> None:
        """What became of the last draft."""
        if not self.draft:
            return
        draft, self.draft = self.draft, []
        drafted, right = len(draft), 0
        came = tokens[self.start : self.start + drafted]
        while right < len(came) and came[right] == draft[right]:
            right += 1
        if right:
            self.rest = FIRST_REST
            self.length = 2 * drafted if right == drafted else right
        else:
            self.until = len(tokens) + self.rest
            self.rest = min(LONGEST_REST, 2 * self.rest)
            self.length = FIRST_LENGTH


class NgramThenHead(Proposer):
    is_steady = True

    def __init__(self, own: NgramProposer, head: Proposer) -> None:
        self._own, self._head = own, head
        self.steps_watched = head.steps_watched
        self.stops_itself = head.stops_itself
        self.is_catching_up = False
        self._trackers: dict[int, NgramTracker] = {}  # by sequence

    def propose(self, requests: Sequence[Request], counts: Sequence[int]) -> list[Sequence[int]]:
        drafts = [self._own_draft(r, count) for r, count in zip(requests, counts, strict=True)]
        others = [index for index, draft in enumerate(drafts) if not draft]
        self.is_catching_up = False
        if others:
            asked = [requests[index] for index in others]
            found = self._head.propose(asked, [counts[index] for index in others])
            self.is_catching_up = self._head.is_catching_up
            for index, draft in zip(others, found, strict=True):
                drafts[index] = draft
        return drafts

    def _own_draft(self, request: Request, count: int) -> Sequence[int]:
        trust = self._trackers.get(request.seq_id)
        if trust is None:
            trust = self._trackers[request.seq_id] = NgramTracker()
        trust.learn(request.token_ids)
        if request.num_tokens < trust.until:
            return ()
        (draft,) = self._own.propose([request], [min(count, trust.length)])
        trust.start, trust.draft = request.num_tokens, list(draft)
        return draft

    def forget(self, seq_id: int) -> None:
        self._trackers.pop(seq_id, None)
        self._own.forget(seq_id)
        self._head.forget(seq_id)
