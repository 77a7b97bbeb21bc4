"""Which tokens would complete a banned word, found token by token.

The words of a request are put into an automaton (Aho and Corasick, 1975) once; its choices share
it. A sequence keeps one number, the state: taking a token costs the same however many words there
are.
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache

Words = tuple[tuple[int, ...], ...]
START = 0


class WordAutomaton:
    """A state is the longest end of the tokens so far with which a word begins."""

    def __init__(self, words: Words) -> None:
        """Words of two or more tokens."""
        self._next: list[dict[int, int]] = [{}]  # state -> token -> state one token further
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
        self._shorter = self._link()
        self._banned: dict[int, tuple[int, ...]] = {}

    def _link(self) -> list[int]:
        """For each state, the one of the longest proper end of its tokens; shorter ones first."""
        shorter = [START] * len(self._next)
        waiting = deque(self._next[START].values())
        while waiting:
            state = waiting.popleft()
            for token, child in self._next[state].items():
                waiting.append(child)
                end = shorter[state]
                while end != START and token not in self._next[end]:
                    end = shorter[end]
                shorter[child] = self._next[end].get(token, START)
        return shorter

    def step(self, state: int, token: int) -> int:
        """The state after one more token."""
        while token not in self._next[state]:
            if state == START:
                return START
            state = self._shorter[state]
        return self._next[state][token]

    def banned(self, state: int) -> tuple[int, ...]:
        """The tokens that may not come next."""
        found = self._banned.get(state)
        if found is None:
            tokens: dict[int, None] = {}
            end = state
            while end != START:
                tokens.update(dict.fromkeys(self._last.get(end, ())))
                end = self._shorter[end]
            found = self._banned[state] = tuple(tokens)
        return found


@lru_cache(maxsize=16)
def automaton_of(words: Words) -> WordAutomaton:
    """The choices of a request, and requests with the same words, share one."""
    return WordAutomaton(words)
