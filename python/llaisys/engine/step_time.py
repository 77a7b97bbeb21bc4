"""Bounds the time of a step: how many prefill tokens fit into it, by the steps measured so far."""

from __future__ import annotations

import math

MIN_TOKENS = 16  # of a step, if the bound allows them: fewer read all weights for almost nothing
FIRST_TOKENS = 64  # before anything is measured
FLAT_POSITIONS = 1024  # up to here the cost of a token hardly grows
HEADROOM = 0.8  # of the bound: steps that take longer than estimated
IDLE_FACTOR = 4  # no stream waits for the step: only requests that have not arrived yet
DECODE_FACTOR = 1.75  # a step that many streams wait for, in steps without prefill
WEIGHT = 0.3  # of the latest step in the moving averages
WEIGHT_UP = 0.5  # of a step whose prefill tokens took longer than the average


class StepTimeBound:
    """`max_seconds`: of a step that one running stream waits for; 0: no bound. With more streams it
    shrinks with their number, down to DECODE_FACTOR steps without prefill.

    A step with n prefill tokens takes about decode + n * token seconds. The cost of a token grows
    with its position, at most linearly, so it is measured per power of two of the position. A
    position without a measurement is estimated from the measured ones around it, never too low. All
    measurements are moving averages. From one step to the next the tokens at most double.
    """

    def __init__(self, max_seconds: float) -> None:
        self.max_seconds = max_seconds
        self._decode_seconds = 0.0
        self._costs: dict[int, float] = {}  # key of a position -> seconds per token
        self._last_cost = 0.0
        self._most = FIRST_TOKENS
        # Of the step that is being built.
        self._seconds_left = math.inf
        self._tokens_left = FIRST_TOKENS
        self._is_empty = True

    def observe(self, num_prefill: int, position: int, seconds: float) -> None:
        """Record the time of a step with `num_prefill` prefill tokens; `position`: their mean."""
        decode = self._decode_seconds
        if not num_prefill:
            self._decode_seconds = _average(decode, seconds, WEIGHT)
        else:
            # Beside a long prompt no step without prefill corrects an average that is too high.
            self._decode_seconds = decode = min(decode, seconds)
            measured = max(seconds - decode, 0.1 * seconds) / num_prefill
            if num_prefill < MIN_TOKENS:  # the time of few tokens is lost in the noise
                measured = max(measured, 0.5 * self._cost(position))
            key = _key(position)
            old = self._costs.get(key, 0.0)
            weight = WEIGHT_UP if measured > old else WEIGHT
            self._last_cost = self._costs[key] = _average(old, measured, weight)
            self._most = max(self._most, 2 * num_prefill)

    def open_step(self, num_streams: int, max_tokens: int) -> None:
        """Begin a step in which `num_streams` running requests decode, with at most `max_tokens`
        prefill tokens."""
        decode = self._decode_seconds
        self._is_empty = True
        self._tokens_left = min(self._most, max_tokens) if self.max_seconds else max_tokens
        efficient = MIN_TOKENS * self._last_cost
        if num_streams:
            target = HEADROOM * self.max_seconds
            shared = self.max_seconds / max(1, 2 * (num_streams - 1))
            soft = min(target, max(shared, DECODE_FACTOR * decode)) - decode
            hard = max(target, DECODE_FACTOR * decode) - decode
            self._seconds_left = max(soft, min(hard, efficient))
        else:
            self._seconds_left = max(IDLE_FACTOR * self.max_seconds, efficient)

    def fitting_tokens(self, start: int) -> int:
        """Return how many prefill tokens from position `start` on fit into the rest of the step, at
        least one in an empty step."""
        count = self._tokens_left
        if not self.max_seconds:
            return count
        for _ in range(2):  # the cost depends on the mean position, and that on the count
            cost = self._cost(start + count // 2)
            if cost:
                count = min(self._tokens_left, int(self._seconds_left / cost))
        return max(count, int(self._is_empty))

    def spend(self, start: int, count: int) -> None:
        """Take `count` prefill tokens from position `start` on into the step."""
        self._seconds_left -= count * self._cost(start + count // 2)
        self._tokens_left -= count
        self._is_empty = False

    def _cost(self, position: int) -> float:
        """Return the seconds of a token at `position`; 0: nothing is measured."""
        key, costs = _key(position), self._costs
        if key in costs:
            return costs[key]
        bounds = []  # not less than the cost
        if below := [other for other in costs if other < key]:
            bounds.append(costs[max(below)] * 2 ** (key - max(below)))
        if above := [other for other in costs if other > key]:
            bounds.append(costs[min(above)])
        return min(bounds, default=self._decode_seconds)


def _key(position: int) -> int:
    return max(position, FLAT_POSITIONS - 1).bit_length()


def _average(old: float, new: float, weight: float) -> float:
    """Return the moving average after a measurement; `old` is 0 before the first."""
    return old + weight * (new - old) if old else new
