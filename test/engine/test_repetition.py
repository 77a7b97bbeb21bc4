"""`repetition_detection`: the detector against a direct definition, and the end of a request."""

from __future__ import annotations

import random

import pytest

from llaisys.common.errors import InvalidInputError
from llaisys.common.repetition import DETECTED, RepetitionDetection, RepetitionDetector
from llaisys.common.request import Request, RequestStatus
from llaisys.common.sampling import SamplingParams


def ends_in_pattern(tokens: list[int], limits: RepetitionDetection) -> bool:
    """The definition: some pattern fills the last min_count * size tokens."""
    for size in range(max(1, limits.min_pattern_size), limits.max_pattern_size + 1):
        span = size * limits.min_count
        if len(tokens) >= span and tokens[-span:] == tokens[-size:] * limits.min_count:
            return True
    return False


@pytest.mark.parametrize(("least", "most", "count"), [(0, 1, 2), (1, 4, 3), (3, 7, 2), (4, 64, 6)])
def test_detector_equals_the_definition(least: int, most: int, count: int) -> None:
    limits = RepetitionDetection(max_pattern_size=most, min_pattern_size=least, min_count=count)
    rng = random.Random(most)
    num_found = 0
    for _ in range(60):
        detector, tokens = RepetitionDetector(limits), []
        pattern = [rng.randrange(3) for _ in range(rng.randint(1, most + 2))]
        text = [rng.randrange(3) for _ in range(rng.randint(0, 150))] + pattern * (count + 1)
        for token in text:
            tokens.append(token)
            found = detector.append(token)
            assert found == ends_in_pattern(tokens, limits)
            num_found += found
    assert num_found > 60


def test_request_ends_with_length_and_a_reason() -> None:
    params = SamplingParams(repetition_detection={"max_pattern_size": 4, "min_count": 3})
    assert SamplingParams.from_wire(params.to_wire()) == params
    request = Request("a", [1, 2, 1, 2, 1, 2], params, max_total_tokens=100)
    ends = [request.append_token(token) for token in (1, 2, 1, 2, 1)]
    assert ends == [None] * 5  # the prompt does not count
    assert request.append_token(2) is RequestStatus.FINISHED_LENGTH_CAPPED
    assert request.stop_reason == DETECTED


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"max_pattern_size": 4}, "min_count"),
        ({"max_pattern_size": 4, "min_count": 1}, "min_count"),
        ({"max_pattern_size": 2, "min_pattern_size": 3, "min_count": 2}, "min_pattern_size"),
        ({"max_pattern_size": 100000, "min_count": 2}, "max_pattern_size"),
        ({"max_size": 4}, "max_size"),
        ([4], "repetition_detection"),
    ],
)
def test_bad_limits_are_named(fields: object, word: str) -> None:
    with pytest.raises(InvalidInputError, match=word):
        SamplingParams(repetition_detection=fields)  # type: ignore[arg-type]
