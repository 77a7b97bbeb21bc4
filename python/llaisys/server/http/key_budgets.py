"""Rate limits of an API key: requests and tokens per minute, and open sequences.

The window slides exactly, so the time until the limit admits more is known (Retry-After). Prompt
tokens are checked before a request runs. Generated tokens are counted as they arrive, so requests
in flight may exceed the limit; the next request waits until the window allows it.
"""

import hashlib
import hmac
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from llaisys.common.validation import check_int, invalid_count
from llaisys.server.api_keys import ApiKey
from llaisys.server.errors import ApiError

MINUTE = 60.0
MERGED = 0.05  # seconds; amounts within share an entry, dated by the last
CODE = "rate_limit_exceeded"


class SlidingWindow:
    """Sum of the amounts of the last minute. The caller passes monotonic times."""

    def __init__(self) -> None:
        self.used = 0
        self._entries: deque[tuple[float, int]] = deque()  # (time, amount), oldest first
        self._entry_start = 0.0  # time of the first amount of the latest entry

    def add(self, now: float, amount: int) -> None:
        self._expire(now)
        self.used += amount
        if self._entries and now - self._entry_start < MERGED:
            amount += self._entries.pop()[1]
        else:
            self._entry_start = now
        self._entries.append((now, amount))

    def wait(self, now: float, amount: int, limit: int) -> float:
        """Return the seconds until `amount` more fits `limit`, 0 if now. `amount` <= `limit`."""
        self._expire(now)
        over = self.used + amount - limit
        for when, expired in self._entries:
            if over <= 0:
                break
            over -= expired
            if over <= 0:
                return when + MINUTE - now
        return 0.0

    def _expire(self, now: float) -> None:
        while self._entries and self._entries[0][0] + MINUTE <= now:
            self.used -= self._entries.popleft()[1]


class KeyBudget:
    """The limits of a key and its usage."""

    def __init__(self, key: ApiKey, clock: Callable[[], float]) -> None:
        self.key = key  # replaced on reload; the usage stays
        self.open = 0  # sequences
        self.num_requests = 0  # this and the following: totals since the start
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.rejected: Counter[str] = Counter()  # by limit
        self._clock = clock
        self._requests = SlidingWindow()
        self._tokens = SlidingWindow()

    @contextmanager
    def reserve(self, count: int, retry_after: int) -> Iterator[None]:
        """Count `count` open sequences while the block runs. `retry_after`: seconds for the
        Retry-After header."""
        most = self.key.max_concurrent
        if most is not None:
            check_int("n", count, 1, most, label="the number of sequences of this API key")
            if self.open + count > most:
                text = f"{self.open} sequences of this API key are open; at most {most} are allowed"
                raise self._rejection("max_concurrent", text, retry_after)
        self.open += count
        try:
            yield
        finally:
            self.open -= count

    def begin(self, prompt_tokens: int) -> None:
        """Count a new request and its prompt tokens; if rejected, nothing is counted."""
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
            # At least one token, for the answer: a key at its limit starts no request.
            needed = min(max(1, prompt_tokens), most)
            waits.append(("tokens_per_minute", self._tokens.wait(now, needed, most), most))
        name, wait, most = max(waits, key=lambda row: row[1], default=("", 0.0, 0))
        if wait > 0:
            unit = name.partition("_")[0]
            text = f"the limit of this API key is reached: {most} {unit} per minute"
            raise self._rejection(name, text, math.ceil(wait))
        self.num_requests += 1
        self._requests.add(now, 1)
        if prompt_tokens:
            self.prompt_tokens += prompt_tokens
            self._tokens.add(now, prompt_tokens)

    def spend(self, tokens: int) -> None:
        """Count generated tokens."""
        self.generation_tokens += tokens
        self._tokens.add(self._clock(), tokens)

    def _rejection(self, limit: str, message: str, retry_after: int) -> ApiError:
        self.rejected[limit] += 1
        return ApiError(429, message, code=CODE, retry_after=max(1, retry_after))


ANONYMOUS = "anonymous"  # owner of all requests when no keys are configured


class KeyRing:
    """Owners are hashes of keys; sessions and quotas refer to them. Names are for logs."""

    def __init__(
        self, keys: Iterable[ApiKey] = (), clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._digests: list[bytes] = []
        self._anonymous = KeyBudget(ApiKey(ANONYMOUS, ANONYMOUS), clock)
        self.budgets: dict[str, KeyBudget] = {}  # by owner, including removed keys
        self.replace(keys)

    def replace(self, keys: Iterable[ApiKey]) -> None:
        """Replace the keys. Keys that stay keep their usage; removed keys are rejected from the
        next request on."""
        digests = []
        for key in keys:
            digest = hashlib.sha256(key.key.encode()).digest()
            digests.append(digest)
            budget = self.budgets.setdefault(digest.hex(), KeyBudget(key, self._clock))
            budget.key = key
        self._digests = digests

    def __len__(self) -> int:
        return len(self._digests)

    def owner(self, authorization: str | None) -> str | None:
        """Return the owner of a valid key, else None. Takes constant time: digests of equal length,
        all of them compared."""
        scheme, _, key = (authorization or "").partition(" ")
        digest = hashlib.sha256(key.strip().encode("utf-8", "replace")).digest()
        found = False
        for known in self._digests:
            found |= hmac.compare_digest(digest, known)
        return digest.hex() if found and scheme.lower() == "bearer" else None

    def budget(self, owner: str) -> KeyBudget:
        """Return the budget of an owner; without keys one shared budget without limits."""
        return self.budgets.get(owner, self._anonymous)

    def is_admin(self, owner: str) -> bool:
        return self.budget(owner).key.admin

    def name(self, owner: str) -> str:
        return self.budget(owner).key.name
