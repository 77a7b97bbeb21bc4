"""N-gram drafts (prompt lookup): when the last tokens of a request occurred earlier, the draft is
what followed them.

The index of every `shortest`-gram is stored under its tokens, with a link to the previous
occurrence: one entry per token. Of the latest occurrences the one with the longest common suffix is
chosen, the latest among equals.
"""

from __future__ import annotations

from collections.abc import Sequence

from llaisys.common.request import Request
from llaisys.engine.speculative.proposer import Proposer

MAX_CANDIDATES = 8  # occurrences examined for one draft
_NONE = -1


class NgramProposer(Proposer):
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
