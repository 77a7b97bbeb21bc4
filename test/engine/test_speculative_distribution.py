"""Verification of drafts keeps the model's distribution for any proposer: chi-square over many
seeded answers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from engine_fakes import make_config, run_all
from speculation import MOCK_VOCAB, NATIVE, NothingCosts

from llaisys.common.request import Request
from llaisys.common.sampling import SamplingParams
from llaisys.common.step import ModelStepInput
from llaisys.engine.llm_engine import LLMEngine
from llaisys.engine.speculative import Proposer
from llaisys.models.base import AdapterOptions
from llaisys.models.mock import MockAdapter

ALLOWED = [3, 11, 20, 41]
PROMPT = [7, 3, 50, 11, 2]
TEMPERATURE = 4.0
SAMPLES = 1000
# The statistic of a correct sampler exceeds it once in 10,000 runs (Wilson, Hilferty).
ONE_IN_10000 = 3.719


class Saying(Proposer):
    """Always the same tokens."""

    def __init__(self, *tokens: int) -> None:
        self.tokens = tokens

    def propose(self, requests: Sequence[Request], counts: Sequence[int]) -> list[Sequence[int]]:
        return [self.tokens[:count] for count in counts]

    def release(self, seq_id: int) -> None:
        pass


def limit_of(degrees: int) -> float:
    part = 2 / (9 * degrees)
    return degrees * (1 - part + ONE_IN_10000 * math.sqrt(part)) ** 3


def chances_behind(tokens: Sequence[int]) -> dict[int, float]:
    """Probabilities of the allowed tokens from the logits of the model."""
    options = AdapterOptions(kv_cache_layout="slot", kv_cache_capacity_tokens=64)
    with MockAdapter.load(None, options) as adapter:
        n = len(tokens)
        mask = np.zeros(n, dtype=np.int8)
        mask[-1] = 1
        ids, zeros = np.array(tokens, dtype=np.int64), np.zeros(n, dtype=np.int64)
        adapter.forward(ModelStepInput(ids, np.arange(n), zeros, mask), None)
        logits = adapter.logits()[0].astype(np.float64)[ALLOWED] / TEMPERATURE
    weights = np.exp(logits - logits.max())
    return dict(zip(ALLOWED, (weights / weights.sum()).tolist(), strict=True))


@pytest.fixture(scope="module")
def chances() -> dict[tuple[int, ...], float]:
    """Probabilities of answers of three tokens; the last two are verified drafts."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        found = {
            (*answer, token): chance * share
            for answer, chance in found.items()
            for token, share in chances_behind([*PROMPT, *answer]).items()
        }
    return found


def chi_square(counts: Counter[tuple[int, ...]], chances: dict[tuple[int, ...], float]) -> float:
    """Return the statistic relative to its limit; rare answers are pooled."""
    total, rest, seen, statistic, cells = counts.total(), 0.0, 0, 0.0, 0
    for answer, chance in chances.items():
        if chance * total < 5:
            rest, seen = rest + chance * total, seen + counts[answer]
        else:
            statistic += (counts[answer] - chance * total) ** 2 / (chance * total)
            cells += 1
    if rest:
        statistic += (seen - rest) ** 2 / rest
        cells += 1
    return statistic / limit_of(cells - 1)


@pytest.mark.parametrize(
    "proposer",
    [Saying(), Saying(41, 41, 41), Saying(3, 20, 11), Saying(9, 9, 9), Saying(MOCK_VOCAB, -1)],
    ids=["nothing", "one", "others", "never", "garbage"],
)
def test_answers_follow_the_distribution_of_the_model(
    proposer: Saying, chances: dict[tuple[int, ...], float]
):
    speculative = {"num_speculative_tokens": 3, "disable_by_batch_size": 1000}
    settings = {**NATIVE, "max_num_seqs": 64, "speculative_config": speculative}
    engine = LLMEngine(make_config(max_num_batched_tokens=512, **settings))
    assert engine.core.speculator is not None
    engine.core.speculator.proposer = proposer
    engine.core.speculator.costs = NothingCosts()
    for seed in range(SAMPLES):
        params = SamplingParams(
            temperature=TEMPERATURE,
            seed=seed,
            max_tokens=4,  # the last of which is not counted: it never has a draft behind it
            ignore_eos=True,
            allowed_token_ids=ALLOWED,
            detokenize=False,
        )
        engine.submit(PROMPT, params, f"r{seed}")
    counts = Counter(tuple(output.token_ids[:3]) for output in run_all(engine).values())
    stats = engine.stats()
    engine.close()
    assert counts.total() == SAMPLES and chi_square(counts, chances) < 1
    if proposer.tokens and proposer.tokens[0] in ALLOWED:
        assert stats["spec_decode_num_accepted_tokens"] > SAMPLES / 20
    else:
        assert stats["spec_decode_num_accepted_tokens"] == 0


def test_wrong_distribution_is_detected(chances: dict[tuple[int, ...], float]):
    """For example, accepting every possible draft."""
    rng = np.random.default_rng(1)
    answers, weights = list(chances), list(chances.values())
    sampled = [answers[i] for i in rng.choice(len(answers), SAMPLES, p=weights)]
    assert chi_square(Counter(sampled), chances) < 1
    biased = [a if rng.random() > 0.1 else (a[0], 41, a[2]) for a in sampled]
    assert chi_square(Counter(biased), chances) > 1
