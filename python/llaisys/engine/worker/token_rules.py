"""Rules for the next token of a row, each a function of its tokens so far: the same after a
preemption and with drafts.

    bad_words        tokens that would complete a banned word
    DRY              ("don't repeat yourself") penalties of tokens that would extend a repetition
    thinking_budget  the end marker, when the reasoning has used its tokens
"""

import math
from collections import deque
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llaisys.common.types import NewSequence

Words = tuple[tuple[int, ...], ...]
START = 0


class WordAutomaton:
    """An Aho-Corasick automaton: a state is the longest suffix of the tokens that is a prefix of a
    word. The choices of a request share it; a token costs the same for any number of words."""

    def __init__(self, words: Words) -> None:
        """`words`: of two or more tokens."""
        self._next: list[dict[int, int]] = [{}]  # state -> token -> next state
        self._last: dict[int, list[int]] = {}  # state -> tokens that complete a word there
        for word in words:
            state = START
            for token in word[:-1]:
                following = self._next[state]
                if token not in following:
                    following[token] = len(self._next)
                    self._next.append({})
                state = following[token]
            self._last.setdefault(state, []).append(word[-1])
        self._failure = self._link()
        self._banned: dict[int, tuple[int, ...]] = {}

    def _link(self) -> list[int]:
        """Return the failure link of each state: its longest proper suffix that is a state."""
        failure = [START] * len(self._next)
        waiting = deque(self._next[START].values())
        while waiting:
            state = waiting.popleft()
            for token, child in self._next[state].items():
                waiting.append(child)
                end = failure[state]
                while end != START and token not in self._next[end]:
                    end = failure[end]
                failure[child] = self._next[end].get(token, START)
        return failure

    def step(self, state: int, token: int) -> int:
        """Return the state after one more token."""
        while token not in self._next[state]:
            if state == START:
                return START
            state = self._failure[state]
        return self._next[state][token]

    def banned(self, state: int) -> tuple[int, ...]:
        """Return the tokens that are banned next."""
        found = self._banned.get(state)
        if found is None:
            tokens: dict[int, None] = {}
            end = state
            while end != START:
                tokens.update(dict.fromkeys(self._last.get(end, ())))
                end = self._failure[end]
            found = self._banned[state] = tuple(tokens)
        return found


@lru_cache(maxsize=16)
def automaton_of(words: Words) -> WordAutomaton:
    """Return the automaton of `words`, cached."""
    return WordAutomaton(words)


Array = NDArray[Any]
MAX_PENALTY = 1e6  # a token with it is never sampled; longer matches are not measured


class DryPenalty:
    """The penalties of one row. They are added to the logits with the biases, before the sampler
    chain."""

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
