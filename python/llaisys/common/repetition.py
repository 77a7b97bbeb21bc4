"""Detection of loops: an answer that ends in a token pattern repeated many times is ended."""

from dataclasses import dataclass

from llaisys.common.options import Integer, check_options, option
from llaisys.common.validation import invalid_value

FIELD = "repetition_detection"
DETECTED = "repetition_detected"  # the stop_reason, as in vLLM
MAX_PATTERN = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class RepetitionDetection:
    """End an answer whose last tokens are `min_count` times the same pattern."""

    max_pattern_size: int = option(
        0, Integer(0, MAX_PATTERN), "Longest pattern, in tokens; 0: no detection"
    )
    min_pattern_size: int = option(0, Integer(0, MAX_PATTERN), "Shortest pattern; 0: 1")
    min_count: int = option(0, Integer(0, 1 << 16), "Repetitions that end the answer, 2 or more")

    def __post_init__(self) -> None:
        check_options(self)
        if self.min_pattern_size > self.max_pattern_size:
            raise invalid_value(
                f"{FIELD}.min_pattern_size",
                self.min_pattern_size,
                f"at most max_pattern_size, {self.max_pattern_size}",
            )
        if self.max_pattern_size and self.min_count < 2:
            raise invalid_value(f"{FIELD}.min_count", self.min_count, "2 or more")


CHAT_DETECTION = {"max_pattern_size": 64, "min_pattern_size": 4, "min_count": 6}


class RepetitionDetector:
    """Fed with every output token. `_runs[p]` is the number of latest tokens that equal the token p
    places before them, so the answer ends in c + 1 copies of a pattern of p tokens when the run
    is at least c * p."""

    def __init__(self, limits: RepetitionDetection) -> None:
        self._shortest = max(1, limits.min_pattern_size)
        self._longest = limits.max_pattern_size
        self._copies = limits.min_count - 1
        self._runs = [0] * (self._longest + 1)
        self._latest: list[int] = []

    def append(self, token_id: int) -> bool:
        """Return whether the answer now ends in the repetitions."""
        latest, runs, copies = self._latest, self._runs, self._copies
        found = False
        for size in range(self._shortest, min(self._longest, len(latest)) + 1):
            if latest[-size] != token_id:
                runs[size] = 0
            else:
                runs[size] += 1
                found = found or runs[size] >= copies * size
        latest.append(token_id)
        if len(latest) >= 2 * self._longest:
            del latest[: -self._longest]
        return found
