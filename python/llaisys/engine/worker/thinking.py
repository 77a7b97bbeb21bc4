"""A limit on reasoning: when a sequence has spent its tokens for it, the reasoning is closed.

What must come next is a function of the tokens so far, so it is the same after a preemption, with
drafts, and for each choice of a prompt.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from llaisys.common.types import NewSequence


class ThinkingBudget:
    """Of one row. Tokens between the opening and the closing one count, all sections together; a
    prompt may have opened one."""

    def __init__(self, seq: NewSequence) -> None:
        self._start, *self._closing = seq.thinking  # closing: its token and what follows it
        self._budget: int = seq.sampling.thinking_budget or 0
        self._first = seq.num_prompt_tokens
        prompt = np.array(seq.token_ids[: self._first], dtype=np.int64)
        opened = _last(prompt, self._start) > _last(prompt, self._closing[0])
        self._before = (opened, 0, 0)  # what the tokens before `first` led to
        self._reset()

    def _reset(self) -> None:
        self._position = self._first  # the tokens in [first, position) led to what follows
        # `written`: tokens of `closing` that were forced; 0: none, or all
        self._open, self._spent, self._written = self._before

    def forced(self, position: int, tokens: NDArray[Any]) -> int | None:
        """The token that must stand at `position`; None: any. `tokens`: those before it."""
        self._read(position, tokens)
        if self._written:
            return self._closing[self._written]
        return self._closing[0] if self._open and self._spent >= self._budget else None

    def shift(self, length: int, dropped: int, tokens: NDArray[Any]) -> None:
        """A context of `length` tokens is about to lose `dropped` of them."""
        self._read(length, tokens)
        self._first = length - dropped
        self._before = (self._open, self._spent, self._written)
        self._reset()

    def _read(self, position: int, tokens: NDArray[Any]) -> None:
        if position < self._position:  # tokens were taken back
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
    """Where `token` stands last; -1: nowhere."""
    places = np.flatnonzero(tokens == token)
    return int(places[-1]) if len(places) else -1
