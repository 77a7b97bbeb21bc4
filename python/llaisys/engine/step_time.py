"""Bounds the time of a step: how many prefill tokens fit into it, by the steps measured so far."""

import math
from collections.abc import Sequence

MIN_TOKENS = 16  # of a step, if the bound allows them: fewer read all weights for almost nothing
FIRST_TOKENS = 64  # before anything is measured
FLAT_POSITIONS = 1024  # up to here the cost of a token hardly grows
HEADROOM = 0.8  # of the bound: steps that take longer than estimated
IDLE_FACTOR = 4  # no stream waits for the step: only requests that have not arrived yet
DECODE_FACTOR = 1.75  # a step that many streams wait for, in steps without prefill
PROMPT_WEIGHT = 64  # streams that may wait one decode step longer per prompt that waits
LONG_PROMPT_WEIGHT = 1  # the same beside a long prompt, which occupies many steps
LONG_STEPS = 8  # decode steps that the tokens of a long prompt take
MIN_STREAMS = 8  # fewer take the same time
PROBE_STEPS = 8  # at least, from one step that only measures the time without prefill to the next
WEIGHT = 0.3  # of the latest step in the moving averages
WEIGHT_UP = 0.5  # of a step whose prefill tokens took longer than the average
WEIGHT_FIT = 0.1  # of the latest step in the line that gives the fixed time


class StepTimeBound:
    """`max_seconds`: of a step that one running stream waits for; 0: no bound. With more streams it
    shrinks with their number, down to DECODE_FACTOR steps without prefill, and it grows with the
    number of prompts that wait: each becomes a stream, and many streams make a step efficient.

    A step with n prefill tokens takes about decode + fixed + n * token seconds. The cost of a token
    grows with its position, at most linearly, so it is measured per power of two of the position. A
    position without a measurement is estimated from the measured ones around it, never too low. All
    measurements are moving averages. From one step to the next the tokens at most double.

    `decode` depends on the number of streams. When that has changed and every step has prefill
    tokens, a step without them measures it.
    """

    def __init__(self, max_seconds: float) -> None:
        self.max_seconds = max_seconds
        self._decode_seconds = 0.0
        self._decode_streams = 0  # of that measurement
        self._steps_since_probe = 0
        self._fixed_seconds = 0.0  # at most a decode step
        # Means of tokens, seconds, tokens squared and tokens times seconds of steps with prefill.
        self._means = [0.0] * 4
        self._costs: dict[int, float] = {}  # key of a position -> seconds per token
        self._last_cost = 0.0
        self._most = FIRST_TOKENS
        # Of the step that is being built.
        self._seconds_left = math.inf
        self._tokens_left = FIRST_TOKENS
        self._is_empty = True

    def observe(self, num_streams: int, num_prefill: int, position: int, seconds: float) -> None:
        """Record the time of a step in which `num_streams` requests decoded, with `num_prefill`
        prefill tokens; `position`: their mean."""
        decode = self._decode_seconds
        if not num_prefill:
            self._decode_seconds = _average(decode, seconds, WEIGHT)
            self._decode_streams = num_streams
        else:
            # Beside a long prompt no step without prefill corrects an average that is too high.
            self._decode_seconds = decode = min(decode, seconds)
            added = max(seconds - decode, 0.1 * seconds)
            key = _key(position)
            if key == _key(0):
                self._update_fixed(num_prefill, added)
            measured = max(added - self._fixed_seconds, 0.1 * added) / num_prefill
            if num_prefill < MIN_TOKENS:  # the time of few tokens is lost in the noise
                measured = max(measured, 0.5 * self._cost(position))
            old = self._costs.get(key, 0.0)
            weight = WEIGHT_UP if measured > old else WEIGHT
            self._last_cost = self._costs[key] = _average(old, measured, weight)
            self._most = max(self._most, 2 * num_prefill)

    def _update_fixed(self, num_prefill: int, added: float) -> None:
        """Fit a line to the time that prefill tokens added to the latest steps."""
        values = num_prefill, added, num_prefill * num_prefill, num_prefill * added
        self._means = [
            _average(mean, value, WEIGHT_FIT)
            for mean, value in zip(self._means, values, strict=True)
        ]
        count, time, square, product = self._means
        variance = square - count * count
        if variance > (0.1 * count) ** 2:
            slope = (product - count * time) / variance
            self._fixed_seconds = min(max(time - slope * count, 0.0), self._decode_seconds)

    def open_step(self, num_streams: int, prompts: Sequence[int], max_tokens: int) -> None:
        """Begin a step in which `num_streams` running requests decode, with at most `max_tokens`
        prefill tokens. `prompts`: lengths of the prompts that run or can start; 0 where it is not
        known."""
        decode, fixed = self._decode_seconds, self._fixed_seconds
        self._is_empty = True
        self._tokens_left = min(self._most, max_tokens) if self.max_seconds else max_tokens
        self._steps_since_probe += 1
        efficient = max(MIN_TOKENS * self._last_cost, fixed)
        if not num_streams:
            self._seconds_left = max(IDLE_FACTOR * self.max_seconds, efficient)
        elif prompts and self._should_probe(num_streams):
            self._steps_since_probe = 0
            self._seconds_left, self._is_empty = 0.0, False
        else:
            target = HEADROOM * self.max_seconds
            shared = self.max_seconds / max(1, 2 * (num_streams - 1))
            is_long = max(prompts, default=0) * self._last_cost > LONG_STEPS * decode
            weight = LONG_PROMPT_WEIGHT if is_long else PROMPT_WEIGHT
            longest = decode * (DECODE_FACTOR + weight * len(prompts) / num_streams)
            soft = min(target, max(shared, longest)) - decode - fixed
            hard = max(target, DECODE_FACTOR * decode) - decode - fixed
            self._seconds_left = max(soft, min(hard, efficient))

    def _should_probe(self, num_streams: int) -> bool:
        """Whether the time without prefill was measured with another number of streams."""
        is_old = 4 * abs(num_streams - self._decode_streams) > max(num_streams, MIN_STREAMS)
        return self.max_seconds > 0 and is_old and self._steps_since_probe > PROBE_STEPS

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
