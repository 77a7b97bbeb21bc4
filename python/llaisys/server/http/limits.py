"""Who gets in: how many sequences may be open, in all and per key; and how large a request is."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from llaisys.common.errors import CONTEXT_LENGTH_EXCEEDED
from llaisys.common.validation import check_count, check_int
from llaisys.server.config import Limits
from llaisys.server.errors import ApiError

MAX_RETRY_AFTER = 60


class Admission:
    """Counts open sequences; refuses with 429 and a Retry-After what is above the caps."""

    def __init__(self, limits: Limits, max_num_seqs: int, max_per_key: int = 0) -> None:
        self.max_per_key = max_per_key  # 0: no own limit
        self.capacity = max_num_seqs + limits.max_queued
        self.open = 0
        self.num_rejected = 0
        self.on_rejected: Callable[[str], None] = lambda code: None
        self.closed: str | None = None  # why nothing is admitted any more
        self._by_owner: Counter[str] = Counter()
        self._mean_seconds = 1.0  # of recent requests

    @contextmanager
    def admit(self, owner: str, count: int) -> Iterator[None]:
        """Hold `count` sequences' places while the block runs."""
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
            raise self._refusal(
                f"the server is full: {self.open} of {self.capacity} sequences are open", "full"
            )
        mine = self._by_owner[owner]
        if self.max_per_key and mine + count > self.max_per_key:
            raise self._refusal(
                f"{mine} sequences of this API key are open; at most "
                f"{self.max_per_key} are allowed",
                "rate_limit_exceeded",
            )

    def _refusal(self, message: str, code: str) -> ApiError:
        self.num_rejected += 1
        self.on_rejected(code)
        return ApiError(429, message, code=code, retry_after=self.retry_after)

    @property
    def retry_after(self) -> int:
        """Seconds after which a place is likely to be free."""
        return max(1, min(MAX_RETRY_AFTER, math.ceil(self._mean_seconds)))

    def record_duration(self, seconds: float) -> None:
        """A request has finished after `seconds`."""
        self._mean_seconds += 0.1 * (seconds - self._mean_seconds)


class _Budget:
    """Of something that all requests under way have together."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.used = 0

    @contextmanager
    def _reserved(self, count: int) -> Iterator[None]:
        self.used += count
        try:
            yield
        finally:
            self.used -= count


class LogprobBudget(_Budget):
    """Log-probabilities of all answers that are under way, until their clients have them: each
    costs a hundred bytes and more. What a request may come to is held from its start."""

    @contextmanager
    def reserve(self, count: int, most_of_one: int = 0) -> Iterator[None]:
        """`count` numbers are wanted; one request may have `most_of_one` in any case. Raises
        InvalidInputError for what never fits, ApiError 429 for what does not fit now."""
        most = max(self.most, most_of_one)
        check_int("logprobs", count, 0, most, label="the number of logprobs: n x max_tokens x each")
        if self.used and self.used + count > most:
            raise ApiError(
                429,
                f"{self.used} logprobs are wanted by open requests, and {count} by this one; at "
                f"most {most} are kept",
                param="logprobs",
                code="too_many_logprobs",
                retry_after=1,
            )
        with self._reserved(count):
            yield


class VectorBudget(_Budget):
    """Numbers of the vectors of all requests that are under way, until their clients have them."""

    @contextmanager
    def reserve(self, field: str, count: int) -> Iterator[None]:
        """One request is always let in; its own size is checked elsewhere. Raises ApiError 429."""
        if self.used and self.used + count > self.most:
            raise ApiError(
                429,
                f"vectors of {self.used} numbers are wanted by open requests, and of {count} by "
                f"this one; at most {self.most} are kept",
                param=field,
                code="too_many_vectors",
                retry_after=1,
            )
        with self._reserved(count):
            yield


# No vocabulary has tokens that are longer on average, so a longer text cannot fit the context.
CHARS_PER_TOKEN = 64


def check_prompt_chars(name: str, chars: int, max_model_len: int) -> None:
    """Before anything is tokenised: a text that cannot fit costs nothing."""
    most = CHARS_PER_TOKEN * max_model_len
    check_count(name, chars, most, "characters", code=CONTEXT_LENGTH_EXCEEDED)


def check_prompt_tokens(name: str, count: int, most: int) -> None:
    check_count(name, count, most, "tokens", code=CONTEXT_LENGTH_EXCEEDED)
