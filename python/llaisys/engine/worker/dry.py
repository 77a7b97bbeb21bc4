"""DRY ("don't repeat yourself"): a penalty of the tokens that would extend a repetition.

The penalty is a function of the tokens so far, so it is the same after a preemption and with
drafts. It is added to the logits with the biases, before the sampler chain.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llaisys.common.types import NewSequence

Array = NDArray[Any]
MAX_PENALTY = 1e6  # a token with it is never sampled; longer matches are not measured


class DryPenalty:
    """The penalties of one row."""

    def __init__(self, seq: NewSequence, vocab_size: int) -> None:
        params = seq.sampling
        self._multiplier, self._base = params.dry_multiplier, params.dry_base
        self._allowed, self._last_n = params.dry_allowed_length, params.dry_penalty_last_n
        self._breaks = np.zeros(vocab_size, dtype=np.bool_)
        self._breaks[[word[0] for word in seq.dry_breakers if len(word) == 1]] = True
        self._words = [np.array(word) for word in seq.dry_breakers if len(word) > 1]
        growth = math.log(self._base)
        over = math.log(MAX_PENALTY / self._multiplier) / growth if growth > 0 else 0.0
        self._longest = self._allowed + max(0, math.ceil(over))

    def at(self, tokens: Array) -> tuple[Array, Array]:
        """Return the penalised tokens and their penalties after `tokens`."""
        known = tokens if self._last_n < 0 else tokens[max(0, len(tokens) - self._last_n) :]
        longest = min(self._longest, self._since_breaker(known))
        ends = np.flatnonzero(known[:-1] == known[-1:]) if longest > 0 else np.zeros(0, np.int64)
        lengths = {}  # token -> longest match before it
        length = 0
        while len(ends):  # the `length + 1` tokens up to each end equal the last ones
            length += 1
            if length >= self._allowed:
                lengths.update(dict.fromkeys(known[ends + 1].tolist(), length))
            if length == longest:
                break
            ends = ends[ends >= length]
            ends = ends[known[ends - length] == known[-1 - length]]
        if self._allowed == 0:  # every other token has a match of length 0
            lengths = dict.fromkeys(known.tolist(), 0) | lengths
        values = [
            -min(MAX_PENALTY, self._multiplier * self._base ** (length - self._allowed))
            for length in lengths.values()
        ]
        return np.array(list(lengths), dtype=np.int32), np.array(values, dtype=np.float32)

    def _since_breaker(self, tokens: Array) -> int:
        """Return the number of tokens after the last sequence breaker."""
        found = np.flatnonzero(self._breaks[tokens])
        end = int(found[-1]) + 1 if len(found) else 0
        for word in self._words:
            starts = np.flatnonzero(tokens[: len(tokens) - len(word) + 1] == word[0])
            for start in starts[::-1]:
                if start + len(word) <= end:
                    break
                if (tokens[start : start + len(word)] == word).all():
                    end = int(start) + len(word)
                    break
        return len(tokens) - end
