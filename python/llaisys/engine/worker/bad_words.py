"""bad_words: an Aho-Corasick automaton finds the tokens that would complete a banned word.

The automaton of a request is shared by its choices. A sequence stores one state; a token costs the
same for any number of words.
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache

Words = tuple[tuple[int, ...], ...]
START = 0


class WordAutomaton:
    """A state is the longest suffix of the tokens that is a prefix of a word."""

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
