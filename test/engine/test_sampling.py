"""The sampler against exact distributions, through the adapter and through the engine.

Samples differ only in their position, the counter of the generator; each test compares counts with
the distribution in double precision of the same logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from llaisys.common.sampling import SamplerKind
from llaisys.common.step import ROW_NUMBERS, ModelStepInput, SamplingMetadata
from llaisys.models.base import AdapterOptions
from llaisys.models.mock import MockAdapter, MockShape

VOCAB = 40
SAMPLES = 20_000
Floats = NDArray[np.float64]


@pytest.fixture(scope="module")
def adapter() -> Iterator[MockAdapter]:
    """A model with one output row, whose logits are spread over a few units."""
    model = MockAdapter.load(
        MockShape(vocab_size=VOCAB, heads=1, kv_heads=1, head_dim=4, seed=5),
        AdapterOptions(kv_cache_layout="slot", max_model_len=64),
    )
    model.forward(
        ModelStepInput(
            np.array([7], np.int64),
            np.zeros(1, np.int64),
            np.zeros(1, np.int64),
            np.ones(1, np.int8),
        ),
        None,
    )
    yield model
    model.close()


def sample(
    adapter: MockAdapter, seed: int = 11, n: int = SAMPLES, **values: Any
) -> NDArray[np.int32]:
    """Sample row 0 n times; scalar values apply to all."""
    numbers = {
        name: np.full(n, values.pop(name), np.float64) for name in ROW_NUMBERS if name in values
    }
    if "seq_ids" in values:
        values["seq_ids"] = np.full(n, values["seq_ids"], np.int64)
    metadata = SamplingMetadata(
        rows=np.zeros(n, np.int32),
        seeds=np.full(n, seed, np.uint64),
        positions=np.arange(n, dtype=np.int64),
        numbers=numbers,
        **values,
    )
    return adapter.sample(metadata)


def softmax(logits: Floats) -> Floats:
    weights = np.exp(logits - logits.max())
    result: Floats = weights / weights.sum()
    return result


def keep(probabilities: Floats, mask: NDArray[np.bool_]) -> Floats:
    kept = np.where(mask, probabilities, 0.0)
    result: Floats = kept / kept.sum()
    return result


def top_p_of(probabilities: Floats, p: float) -> Floats:
    order = np.argsort(-probabilities, kind="stable")
    sums = np.cumsum(probabilities[order])
    mask = np.zeros(len(order), bool)
    mask[order[: int(np.searchsorted(sums, p)) + 1]] = True
    return keep(probabilities, mask)


def top_k_of(probabilities: Floats, k: int) -> Floats:
    mask = np.zeros(len(probabilities), bool)
    mask[np.argsort(-probabilities, kind="stable")[:k]] = True
    return keep(probabilities, mask)


def check(sampled: NDArray[np.int32], expected: Floats) -> None:
    """Chi-square over the tokens that are likely enough, and nothing outside the support."""
    counts = np.bincount(sampled, minlength=VOCAB)
    assert counts[expected == 0].sum() == 0
    wanted = expected * len(sampled)
    likely = wanted >= 5
    rest_counts, rest_wanted = counts[~likely].sum(), wanted[~likely].sum()
    statistic = ((counts[likely] - wanted[likely]) ** 2 / wanted[likely]).sum()
    if rest_wanted > 1:
        statistic += (rest_counts - rest_wanted) ** 2 / rest_wanted
    degrees = int(likely.sum())
    # Mean and spread of the distribution: five standard deviations never happen by chance.
    assert statistic < degrees + 5 * np.sqrt(2 * degrees)


def logits_of(adapter: MockAdapter) -> Floats:
    return adapter.logits()[0].astype(np.float64)


def test_without_truncation_the_full_distribution_is_sampled(adapter: MockAdapter) -> None:
    check(sample(adapter), softmax(logits_of(adapter)))


@pytest.mark.parametrize("temperature", [0.3, 0.8, 1.7])
def test_temperature(adapter: MockAdapter, temperature: float) -> None:
    check(sample(adapter, temperature=temperature), softmax(logits_of(adapter) / temperature))


@pytest.mark.parametrize("k", [1, 3, 17, VOCAB, 1000])
def test_top_k(adapter: MockAdapter, k: int) -> None:
    check(sample(adapter, top_k=k), top_k_of(softmax(logits_of(adapter)), k))


@pytest.mark.parametrize("p", [0.01, 0.4, 0.9, 1.0])
def test_top_p(adapter: MockAdapter, p: float) -> None:
    check(sample(adapter, top_p=p), top_p_of(softmax(logits_of(adapter)), p))


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 1.0])
def test_min_p(adapter: MockAdapter, p: float) -> None:
    probabilities = softmax(logits_of(adapter))
    check(sample(adapter, min_p=p), keep(probabilities, probabilities >= p * probabilities.max()))


def test_chain_order_is_that_of_the_request(adapter: MockAdapter) -> None:
    """Top-p before a high temperature keeps fewer tokens than after it."""
    logits, temperature, p = logits_of(adapter), 3.0, 0.6
    after = top_p_of(softmax(logits / temperature), p)
    before = keep(softmax(logits / temperature), top_p_of(softmax(logits), p) > 0)
    assert (after > 0).sum() > (before > 0).sum()
    for order, expected in (
        ((SamplerKind.TEMPERATURE, SamplerKind.TOP_P), after),
        ((SamplerKind.TOP_P, SamplerKind.TEMPERATURE), before),
    ):
        chain = np.array(order * SAMPLES, np.uint8)
        offsets = np.arange(0, 2 * SAMPLES + 1, 2, dtype=np.int32)
        sampled = sample(
            adapter, temperature=temperature, top_p=p, chain=chain, chain_offsets=offsets
        )
        check(sampled, expected)


def test_penalties(adapter: MockAdapter) -> None:
    """Repetition counts prompt and output; frequency and presence count the output."""
    logits = logits_of(adapter)
    prompt, output = [1, 2, 2], [3, 3, 4]
    adapter.sampler_reset(9, prompt)
    adapter.sampler_accept(9, output)
    expected = logits.copy()
    for token in {*prompt, *output}:
        expected[token] = expected[token] / 1.5 if expected[token] > 0 else expected[token] * 1.5
    expected[3] -= 0.4 * 2 + 0.3
    expected[4] -= 0.4 * 1 + 0.3
    sampled = sample(
        adapter,
        seq_ids=9,
        repetition_penalty=1.5,
        frequency_penalty=0.4,
        presence_penalty=0.3,
    )
    check(sampled, softmax(expected))
    adapter.sampler_forget(9)


def test_bias_bans_and_prefers(adapter: MockAdapter) -> None:
    logits = logits_of(adapter)
    best = int(logits.argmax())
    other = (best + 1) % VOCAB
    expected = logits.copy()
    expected[best], expected[other] = -np.inf, expected[other] + 2.0
    sampled = sample(
        adapter,
        bias_offsets=np.arange(0, 2 * SAMPLES + 1, 2, dtype=np.int32),
        bias_ids=np.array([best, other] * SAMPLES, np.int32),
        bias_values=np.array([-np.inf, 2.0] * SAMPLES, np.float32),
    )
    check(sampled, softmax(expected))


def test_mask_allows_only_its_tokens(adapter: MockAdapter) -> None:
    allowed = np.zeros(VOCAB, bool)
    allowed[[0, 5, 31, 32, 39]] = True
    masks = np.zeros((1, 2), np.uint32)
    for token in np.flatnonzero(allowed):
        masks[0, token // 32] |= np.uint32(1) << np.uint32(token % 32)
    sampled = sample(adapter, masks=masks, mask_rows=np.zeros(SAMPLES, np.int32))
    check(sampled, keep(softmax(logits_of(adapter)), allowed))


def test_sampled_token_depends_on_seed_choice_and_position_only(adapter: MockAdapter) -> None:
    first = sample(adapter, seed=1, n=500)
    np.testing.assert_array_equal(first, sample(adapter, seed=1, n=500))
    assert (first != sample(adapter, seed=2, n=500)).any()
    choices = sample(adapter, seed=1, n=500, choices=np.ones(500, np.int32))
    assert (first != choices).any()
    alone = [
        int(
            adapter.sample(
                SamplingMetadata(
                    rows=np.zeros(1, np.int32),
                    seeds=np.ones(1, np.uint64),
                    positions=np.array([p], np.int64),
                )
            )[0]
        )
        for p in range(50)
    ]
    assert alone == first[:50].tolist()


def test_greedy_is_the_argmax_with_any_other_parameters(adapter: MockAdapter) -> None:
    sampled = sample(adapter, n=10, temperature=0.0, top_p=0.1, top_k=7, min_p=0.9)
    assert set(sampled.tolist()) == {int(logits_of(adapter).argmax())}


def test_logprobs_are_those_of_the_raw_logits(adapter: MockAdapter) -> None:
    exact = np.log(softmax(logits_of(adapter)))
    sampled = sample(adapter, n=1, temperature=0.0, n_logprobs=np.array([5], np.int32))
    row = adapter.logprobs(0)
    assert row is not None
    order = np.argsort(-exact, kind="stable")[:5]
    assert [token for token, _ in row.top] == order.tolist()
    np.testing.assert_allclose([value for _, value in row.top], exact[order], atol=1e-5)
    assert row.rank == 1
    assert abs(row.logprob - exact[int(sampled[0])]) < 1e-5


def test_typical_p_keeps_the_tokens_that_are_as_surprising_as_expected(
    adapter: MockAdapter,
) -> None:
    probabilities = softmax(adapter.logits()[0].astype(np.float64))
    surprise = -np.log(probabilities)
    order = np.argsort(np.abs(surprise - (probabilities * surprise).sum()), kind="stable")
    mask = np.zeros(VOCAB, bool)
    kept = int(np.searchsorted(np.cumsum(probabilities[order]), 0.5)) + 1
    mask[order[:kept]] = True
    sampled = sample(adapter, typical_p=0.5)
    assert set(sampled.tolist()) == set(np.flatnonzero(mask).tolist())


def test_top_n_sigma_keeps_tokens_near_the_best_logit(adapter: MockAdapter) -> None:
    logits = adapter.logits()[0].astype(np.float64)
    near = np.flatnonzero(logits >= logits.max() - 1.5 * logits.std())
    sampled = sample(adapter, top_n_sigma=1.5)
    assert 1 < len(near) < VOCAB and set(sampled.tolist()) == set(near.tolist())


def test_mirostat_1_keeps_the_best_tokens_of_a_zipf_estimate(adapter: MockAdapter) -> None:
    probabilities = softmax(adapter.logits()[0].astype(np.float64))
    order = np.argsort(-probabilities, kind="stable")
    p, mu, rank = probabilities[order], 3.0, np.arange(1, VOCAB)
    t, b = np.log((rank + 1) / rank), np.log(p[:-1] / p[1:])
    s = (t * b).sum() / (t * t).sum()
    k = int(((s - 1) * 2**mu / (1 - VOCAB ** (1 - s))) ** (1 / s))
    chain = {"chain_offsets": np.arange(SAMPLES + 1, dtype=np.int32),
             "chain": np.full(SAMPLES, SamplerKind.MIROSTAT, np.uint8)}  # fmt: skip
    sampled = sample(adapter, mirostat=1, mirostat_mu=mu, **chain)
    assert 1 < k < VOCAB and set(sampled.tolist()) == set(order[:k].tolist())


def test_dynamic_temperature_follows_the_entropy(adapter: MockAdapter) -> None:
    logits = adapter.logits()[0].astype(np.float64)
    p = softmax(logits)
    share = -(p * np.log(p)).sum() / np.log(VOCAB)
    temperature = 0.2 + 1.6 * share**2
    sampled = sample(adapter, temperature=1.0, dynatemp_range=0.8, dynatemp_exponent=2.0)
    same = sample(adapter, temperature=temperature)
    assert (sampled == same).mean() > 0.999
    assert (sampled == sample(adapter)).mean() < 0.999


def test_xtc_removes_the_top_choices_except_the_least_likely(adapter: MockAdapter) -> None:
    probabilities = softmax(adapter.logits()[0].astype(np.float64))
    threshold = float(np.sort(probabilities)[-3] * 0.999)  # three top choices
    tops = np.flatnonzero(probabilities >= threshold)
    gone = set(tops.tolist()) - {int(tops[probabilities[tops].argmin()])}
    always = sample(adapter, xtc_probability=1.0, xtc_threshold=threshold)
    assert len(gone) == 2 and not gone & set(always.tolist())
    never = sample(adapter, xtc_probability=0.0, xtc_threshold=threshold)
    np.testing.assert_array_equal(never, sample(adapter))
