"""Admission: limits on open sequences, in total and per key, and on what open requests hold."""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from llaisys.common.validation import check_int
from llaisys.server.config import Limits
from llaisys.server.errors import ApiError

MAX_RETRY_AFTER = 60


class Admission:
    """Counts open sequences; rejects requests above the limits with 429 and Retry-After."""

    def __init__(self, limits: Limits, max_num_seqs: int, max_per_key: int = 0) -> None:
        self.max_per_key = max_per_key  # 0: no limit per key
        self.capacity = max_num_seqs + limits.max_queued
        self.open = 0
        self.on_rejected: Callable[[str], None] = lambda code: None
        self.closed: str | None = None  # why nothing is admitted
        self._by_owner: Counter[str] = Counter()
        self._mean_seconds = 1.0  # of recent requests

    @contextmanager
    def admit(self, owner: str, count: int) -> Iterator[None]:
        """Count `count` open sequences while the block runs. Raises ApiError 429 or 503."""
        self._check(owner, count)
        self.open += count
        self._by_owner[owner] += count
        try:
            yield
        finally:
            self.open -= count
            self._by_owner[owner] -= count
            if not self._by_owner[owner]:
                del self._by_owner[owner]

    def _check(self, owner: str, count: int) -> None:
        if self.closed is not None:
            raise ApiError(503, self.closed, code="shutting_down", retry_after=5)
        most = self.capacity
        if self.max_per_key:
            most = min(most, self.max_per_key)
        check_int("n", count, 1, most, label="the number of sequences")
        if self.open + count > self.capacity:
            raise self._rejection(
                f"the server is full: {self.open} of {self.capacity} sequences are open", "full"
            )
        mine = self._by_owner[owner]
        if self.max_per_key and mine + count > self.max_per_key:
            raise self._rejection(
                f"{mine} sequences of this API key are open; at most "
                f"{self.max_per_key} are allowed",
                "rate_limit_exceeded",
            )

    def _rejection(self, message: str, code: str) -> ApiError:
        self.on_rejected(code)
        return ApiError(429, message, code=code, retry_after=self.retry_after)

    @property
    def retry_after(self) -> int:
        """Seconds after which a sequence has probably ended."""
        return max(1, min(MAX_RETRY_AFTER, math.ceil(self._mean_seconds)))

    def record_duration(self, seconds: float) -> None:
        self._mean_seconds += 0.1 * (seconds - self._mean_seconds)


class Budget:
    """A limit of values that all requests in flight share. A request reserves its maximum at the
    start, until the client has the response."""

    def __init__(self, most: int, what: str, code: str) -> None:
        self.most = most
        self.what = what  # the values
        self.code = code  # of the error
        self.used = 0

    @contextmanager
    def reserve(self, field: str, count: int, most_of_one: int = 0) -> Iterator[None]:
        """Reserve `count` values while the block runs. The limit is at least `most_of_one`, and a
        request that is alone always fits. Raises ApiError 429 for request field `field`."""
        most = max(self.most, most_of_one)
        if self.used and self.used + count > most:
            raise ApiError(
                429,
                f"open requests have reserved {self.used} {self.what}, and this one needs {count}; "
                f"at most {most} are allowed",
                param=field,
                code=self.code,
                retry_after=1,
            )
        self.used += count
        try:
            yield
        finally:
            self.used -= count
