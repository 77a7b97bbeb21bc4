"""thinking_budget: when the reasoning of a sequence has used its tokens, the end marker is forced.

The forced token is a function of the tokens so far, so it is the same after a preemption and with
drafts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from llaisys.common.types import NewSequence


class ThinkingBudget:
    """The budget of one row: tokens between start and end marker, over all sections. The prompt may
    contain a start marker."""

    def __init__(self, seq: NewSequence) -> None:
        self._start, *self._closing = seq.thinking  # _closing: end marker and what follows it
        self._budget: int = seq.sampling.thinking_budget or 0
        self._first = seq.num_prompt_tokens
        prompt = np.array(seq.token_ids[: self._first], dtype=np.int64)
        opened = _last(prompt, self._start) > _last(prompt, self._closing[0])
        self._before = (opened, 0, 0)  # state at `first`
        self._reset()

    def _reset(self) -> None:
        self._position = self._first  # the state below is that after [first, position)
        # _written: tokens of `_closing` already forced; 0: none or all
        self._open, self._spent, self._written = self._before

    def forced(self, position: int, tokens: NDArray[Any]) -> int | None:
        """Return the forced token at `position`, or None. `tokens`: the tokens before it."""
        self._read(position, tokens)
        if self._written:
            return self._closing[self._written]
        return self._closing[0] if self._open and self._spent >= self._budget else None

    def shift(self, length: int, num_discard: int, tokens: NDArray[Any]) -> None:
        """Prepare for a context shift: `num_discard` of `length` tokens are discarded."""
        self._read(length, tokens)
        self._first = length - num_discard
        self._before = (self._open, self._spent, self._written)
        self._reset()

    def _read(self, position: int, tokens: NDArray[Any]) -> None:
        if position < self._position:  # tokens were rolled back
            self._reset()
        for token in tokens[self._position : position].tolist():
            self._take(token)
        self._position = position

    def _take(self, token: int) -> None:
        if self._written:
            self._written = (self._written + 1) % len(self._closing)
        elif not self._open:
            self._open = token == self._start
        elif token == self._closing[0]:
            self._open = False
            if self._spent >= self._budget:
                self._written = 1 % len(self._closing)
        else:
            self._spent += 1


def _last(tokens: NDArray[np.int64], token: int) -> int:
    """Return the last index of `token`, or -1."""
    indices = np.flatnonzero(tokens == token)
    return int(indices[-1]) if len(indices) else -1
