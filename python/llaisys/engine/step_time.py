"""Bounds the time of a step: how many prefill tokens fit into it, by the steps measured so far."""

from __future__ import annotations

MIN_TOKENS = 16  # fewer would read all weights for almost nothing
FIRST_TOKENS = 64  # before anything is measured
IDLE_FACTOR = 4  # no stream waits for the step: only requests that have not arrived yet
DECODE_FACTOR = 1.75  # a step that many streams wait for, in steps without prefill
WEIGHT = 0.3  # of the latest step in the moving averages


class StepTimeBound:
    """`max_seconds`: of a step that one running stream waits for; 0: no bound. With more streams it
    shrinks with their number, down to DECODE_FACTOR steps without prefill.

    A step with n prefill tokens takes about decode + n * token seconds. Both are moving averages,
    so the growing cost of attention in a long prompt is followed chunk by chunk. From one step to
    the next the bound at most doubles.
    """

    def __init__(self, max_seconds: float) -> None:
        self.max_seconds = max_seconds
        self._decode_seconds = 0.0
        self._token_seconds = 0.0
        self._most = FIRST_TOKENS

    def observe(self, num_prefill: int, seconds: float) -> None:
        """Record the time of a step with `num_prefill` prefill tokens."""
        if not num_prefill:
            self._decode_seconds += WEIGHT * (seconds - self._decode_seconds)
        elif num_prefill >= MIN_TOKENS:
            measured = max(seconds - self._decode_seconds, 0.1 * seconds) / num_prefill
            weight = WEIGHT if self._token_seconds else 1.0
            self._token_seconds += weight * (measured - self._token_seconds)
            self._most = max(self._most, 2 * num_prefill)

    def prefill_tokens(self, num_streams: int) -> int | None:
        """Return the maximum prefill tokens of the next step; None: no bound. `num_streams`: number
        of running requests that decode in it."""
        if not self.max_seconds:
            return None
        if not self._token_seconds:
            return FIRST_TOKENS
        if num_streams:
            shared = self.max_seconds / max(1, 2 * (num_streams - 1))
            relative = max(shared, DECODE_FACTOR * self._decode_seconds)
            seconds = min(self.max_seconds, relative) - self._decode_seconds
        else:
            seconds = IDLE_FACTOR * self.max_seconds
        fits = seconds / self._token_seconds
        return max(MIN_TOKENS, min(int(fits), self._most))
