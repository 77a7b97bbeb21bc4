"""Drafts from the request's own tokens: when its last tokens have occurred before, what followed
them then may follow now. Answers that quote, edit or repeat their prompt are full of that.

Every place where `shortest` tokens end is entered into a table under these tokens, with a link to
the place before it of the same tokens: one entry a token, whatever the lengths that are looked for.
Of the latest few places the one with the longest common past is taken, the latest among equals.
"""

from __future__ import annotations

from collections.abc import Sequence

from llaisys.common.request import Request
from llaisys.engine.speculative.proposer import Proposer

MAX_CANDIDATES = 8  # places that are looked at for one draft
_NONE = -1


class NgramProposer(Proposer):
    def __init__(self, shortest: int, longest: int) -> None:
        """A draft needs `shortest` tokens in common; more than `longest` are not counted."""
        self._shortest = shortest
        self._longest = longest
        self._tables: dict[int, _Places] = {}  # by sequence

    def propose(self, requests: Sequence[Request], counts: Sequence[int]) -> list[Sequence[int]]:
        drafts: list[Sequence[int]] = []
        for request, count in zip(requests, counts, strict=True):
            tokens = request.token_ids
            start = self._places(request).find(tokens, self._longest)
            draft = [] if start == _NONE else tokens[start : start + count]
            if draft and len(draft) < count:  # what repeats itself goes on repeating itself
                draft = (draft * (-(-count // len(draft))))[:count]
            drafts.append(draft)
        return drafts

    def foresees(self, request: Request) -> bool:
        """When the last token is what was guessed at without a draft, and there is a guess at the
        next one: one that comes true may be chance, and to look costs nothing."""
        places, tokens = self._places(request), request.token_ids
        came_true = places.guess == (len(tokens) - 1, tokens[-1])
        start = places.find(tokens, self._longest)
        places.guess = None if start == _NONE else (len(tokens), tokens[start])
        return came_true and start != _NONE

    def _places(self, request: Request) -> _Places:
        places = self._tables.get(request.seq_id)
        if places is None:
            places = self._tables[request.seq_id] = _Places(self._shortest)
        return places

    def forget(self, seq_id: int) -> None:
        self._tables.pop(seq_id, None)


class _Places:
    """Where the tokens of one sequence occurred."""

    __slots__ = ("_before", "_latest", "_shortest", "guess")

    def __init__(self, shortest: int) -> None:
        self._shortest = shortest
        self._latest: dict[tuple[int, ...], int] = {}  # tokens -> index behind them
        # Place i - shortest: the place before i of the same tokens.
        self._before: list[int] = []
        self.guess: tuple[int, int] | None = None  # (index, token) that nobody was told

    def find(self, tokens: list[int], longest: int) -> int:
        """The index of what followed the last tokens before, or _NONE. Enters the new tokens."""
        size, latest, before = self._shortest, self._latest, self._before
        for end in range(len(before) + size, len(tokens) + 1):
            key = tuple(tokens[end - size : end])
            before.append(latest.get(key, _NONE))
            latest[key] = end
        place = before[-1] if before else _NONE
        best, best_length, left = _NONE, 0, MAX_CANDIDATES
        while place != _NONE and left and best_length < longest:
            length = self._common(tokens, place, longest)
            if length > best_length:
                best, best_length = place, length
            place = before[place - size]
            left -= 1
        return best

    def _common(self, tokens: list[int], place: int, longest: int) -> int:
        """How many tokens before `place` are also the last ones."""
        length, most = self._shortest, min(longest, place)
        while length < most and tokens[place - length - 1] == tokens[-length - 1]:
            length += 1
        return length
