"""What one key may use: requests and tokens in any minute, and sequences that are open at once.

A limit is exact over a sliding minute, so the second at which there is room again is known. Tokens
of a prompt are asked for before it runs; those of an answer are counted as they come, and may go
beyond the limit by what is under way: the next request then waits for that as well.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from llaisys.common.validation import check_int, invalid_count
from llaisys.server.errors import ApiError
from llaisys.server.keys.api_key import ApiKey

MINUTE = 60.0
MERGED = 0.05  # seconds within which amounts are one entry, as old as the last of them
CODE = "rate_limit_exceeded"


class Window:
    """Amounts of the last minute. Times are the caller's and only grow."""

    def __init__(self) -> None:
        self.used = 0
        self._entries: deque[tuple[float, int]] = deque()  # (when, amount), the oldest first
        self._begun = 0.0  # when the latest entry had its first amount

    def add(self, now: float, amount: int) -> None:
        self._forget(now)
        self.used += amount
        if self._entries and now - self._begun < MERGED:
            amount += self._entries.pop()[1]
        else:
            self._begun = now
        self._entries.append((now, amount))

    def wait(self, now: float, amount: int, limit: int) -> float:
        """Seconds until `amount` more are within `limit`; 0: they are. `amount` <= `limit`."""
        self._forget(now)
        over = self.used + amount - limit
        for when, gone in self._entries:
            if over <= 0:
                break
            over -= gone
            if over <= 0:
                return when + MINUTE - now
        return 0.0

    def _forget(self, now: float) -> None:
        while self._entries and self._entries[0][0] + MINUTE <= now:
            self.used -= self._entries.popleft()[1]


class KeyBudget:
    """Of one key: its limits, and what has been used of them."""

    def __init__(self, key: ApiKey, clock: Callable[[], float]) -> None:
        self.key = key  # replaced when the file is read again; what was used stays
        self.open = 0  # sequences
        self.num_requests = 0  # since the start, like the rest
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.rejected: Counter[str] = Counter()  # by the limit
        self._clock = clock
        self._requests = Window()
        self._tokens = Window()

    @contextmanager
    def reserve(self, count: int, retry_after: int) -> Iterator[None]:
        """`count` sequences are open while the block runs. `retry_after`: seconds until one has
        probably ended."""
        most = self.key.max_concurrent
        if most is not None:
            check_int("n", count, 1, most, label="the number of sequences of this API key")
            if self.open + count > most:
                told = f"{self.open} sequences of this API key are open; at most {most} are allowed"
                raise self._refusal("max_concurrent", told, retry_after)
        self.open += count
        try:
            yield
        finally:
            self.open -= count

    def begin(self, prompt_tokens: int) -> None:
        """A request with so many tokens begins, or is refused and changes nothing."""
        now, key = self._clock(), self.key
        waits: list[tuple[str, float, int]] = []
        if key.requests_per_minute is not None:
            most = key.requests_per_minute
            waits.append(("requests_per_minute", self._requests.wait(now, 1, most), most))
        if key.tokens_per_minute is not None:
            most = key.tokens_per_minute
            if prompt_tokens > most:
                limit = f"at most {most}, what this API key may use in a minute"
                raise invalid_count(
                    "prompt", prompt_tokens, "tokens", limit, code="tokens_per_minute"
                )
            # An answer needs a token, too: a key at its limit does not begin another.
            needed = min(max(1, prompt_tokens), most)
            waits.append(("tokens_per_minute", self._tokens.wait(now, needed, most), most))
        name, wait, most = max(waits, key=lambda row: row[1], default=("", 0.0, 0))
        if wait > 0:
            unit = name.partition("_")[0]
            told = f"this API key may use {most} {unit} a minute, and has"
            raise self._refusal(name, told, math.ceil(wait))
        self.num_requests += 1
        self._requests.add(now, 1)
        if prompt_tokens:
            self.prompt_tokens += prompt_tokens
            self._tokens.add(now, prompt_tokens)

    def spend(self, tokens: int) -> None:
        """`tokens` of an answer were generated."""
        self.generation_tokens += tokens
        self._tokens.add(self._clock(), tokens)

    def _refusal(self, limit: str, message: str, retry_after: int) -> ApiError:
        self.rejected[limit] += 1
        return ApiError(429, message, code=CODE, retry_after=max(1, retry_after))
