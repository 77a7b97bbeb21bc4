"""DRY penalties, Mirostat, dynamic temperature and repeat_last_n against naive references."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llaisys.common.errors import InvalidInputError
from llaisys.common.sampling import SamplingParams
from llaisys.common.types import NewSequence
from llaisys.engine.worker.sampling_state import SamplingState
from llaisys.engine.worker.token_rules import MAX_PENALTY, DryPenalty
from llaisys.entrypoints.llm import LLM

TOKENS = st.integers(0, 3)


def sequence(tokens, breakers=(), **sampling):
    return NewSequence(
        seq_id=1, request_id="r", token_ids=list(tokens), num_prompt_tokens=len(tokens),
        sampling=SamplingParams(**sampling).with_defaults(None), seed=0, choice=0,
        stop_token_ids=frozenset(), bad_words=(), dry_breakers=breakers,
    )  # fmt: skip


def naive_dry(tokens, breakers, multiplier, base, allowed, last_n):
    """Compare the end of the text with every earlier position, token by token."""
    known = tokens if last_n < 0 else tokens[max(0, len(tokens) - last_n) :]
    since = len(known)
    for end in range(len(known) + 1):
        for word in breakers:
            if len(word) <= end and tuple(known[end - len(word) : end]) == word:
                since = min(since, len(known) - end)
    found = {}
    for end in range(len(known) - 1):
        length = 0
        while length <= end and known[end - length] == known[-1 - length]:
            length += 1
        length = min(length, since)
        token = known[end + 1]
        if length and length >= allowed:
            found[token] = max(found.get(token, 0), length)
    return {t: min(MAX_PENALTY, multiplier * base ** (n - allowed)) for t, n in found.items()}


@given(
    st.lists(TOKENS, max_size=40),
    st.lists(st.lists(TOKENS, min_size=1, max_size=3).map(tuple), max_size=2).map(tuple),
    st.sampled_from([0.5, 2.0]),
    st.sampled_from([1.0, 1.75, 40.0]),
    st.integers(1, 4),
    st.sampled_from([-1, 0, 1, 7, 30]),
)
def test_dry_equals_a_comparison_of_every_position(
    tokens, breakers, multiplier, base, allowed, last_n
):
    seq = sequence(
        [0], breakers, dry_multiplier=multiplier, dry_base=base, dry_allowed_length=allowed,
        dry_penalty_last_n=last_n,
    )  # fmt: skip
    ids, values = DryPenalty(seq, 8).at(np.array(tokens, dtype=np.int64))
    expected = naive_dry(tokens, breakers, multiplier, base, allowed, last_n)
    if base == 1.0:  # the length of a match does not matter
        assert set(ids.tolist()) == set(expected)
    found = dict(zip(ids.tolist(), (-values).tolist(), strict=True))
    assert found == pytest.approx(expected, rel=1e-6)


def test_dry_is_a_bias_of_its_row():
    rows = SamplingState(2, 16)
    rows.add(0, sequence([1, 2, 3]))
    rows.add(1, sequence([5, 6, 7, 5, 6], dry_multiplier=1.0, logit_bias={9: 2.0}))
    tokens = np.zeros((2, 8), dtype=np.int64)
    tokens[1, :5] = [5, 6, 7, 5, 6]
    ends = np.array([3, 5])
    meta = rows.metadata(np.array([0, 1]), np.array([0, 1]), ends, np.array([0, 1]), tokens)
    assert meta.bias_offsets.tolist() == [0, 0, 2]
    assert meta.bias_ids.tolist() == [9, 7] and meta.bias_values.tolist() == [2.0, -1.0]
    rows.release(1)
    meta = rows.metadata(np.array([0]), np.array([0]), ends[:1], np.array([0, 1]), tokens)
    assert meta.bias_ids is None


def test_mirostat_state_follows_the_surprise():
    rows = SamplingState(1, 16)
    rows.add(0, sequence([1], mirostat=2, mirostat_tau=3.0, mirostat_eta=0.5))

    def metadata():
        return rows.metadata(
            np.array([0]), np.array([0]), np.array([1]), np.array([0]), np.zeros((1, 4), np.int64)
        )

    mu = 6.0
    for probability in (0.5, 0.125, 0.01):
        meta = metadata()
        assert meta.numbers["mirostat_mu"].tolist() == pytest.approx([mu])
        assert meta.numbers["mirostat"].tolist() == [2.0]
        assert meta.chain.tolist() == [0, 1, 8]  # penalties, temperature, mirostat
        assert not rows.observe(0, math.log(probability))  # no logprobs were requested
        mu -= 0.5 * (-math.log2(probability) - 3.0)
    rows.release(0)
    rows.add(0, sequence([1]))
    assert metadata().numbers == {} and rows.observe(0, -1.0)


def test_repeat_last_n_limits_the_history():
    rows = SamplingState(1, 16)
    rows.add(0, sequence([1, 2, 3], repetition_penalty=1.5, repeat_last_n=4))
    tokens = np.array([1, 2, 3, 4, 5, 6])
    assert rows.history(0, tokens[:3]) == ([1, 2, 3], [])
    assert rows.history(0, tokens[:5]) == ([2, 3], [4, 5])
    assert rows.history(0, tokens) == ([3], [4, 5, 6])
    assert not SamplingParams(presence_penalty=1, repeat_last_n=0).uses_penalties


PROMPT = [1, 2, 3]


@pytest.fixture(scope="module")
def llm():
    with LLM(model_type="mock", max_model_len=256) as found:
        yield found


def answer(llm, prompt=PROMPT, **sampling):
    params = SamplingParams(**{"max_tokens": 24, "ignore_eos": True, "seed": 3, **sampling})
    return llm.generate([prompt], params)[0]


@pytest.mark.parametrize(
    "sampling",
    [
        {"mirostat": 1, "mirostat_tau": 1.0},
        {"dynatemp_range": 0.9, "dynatemp_exponent": 0.5},
        {"repetition_penalty": 4.0, "repeat_last_n": 2, "temperature": 0},
        {"dry_multiplier": 50.0, "dry_allowed_length": 1, "dry_sequence_breakers": [],
         "temperature": 0.1},
    ],
)  # fmt: skip
def test_engine_applies_each_sampler(llm, sampling):
    found = answer(llm, **sampling).outputs[0]
    assert found.token_ids == answer(llm, **sampling).outputs[0].token_ids
    plain = {name: sampling[name] for name in ("temperature",) if name in sampling}
    assert found.token_ids != answer(llm, **plain).outputs[0].token_ids
    assert found.logprobs is None and len(found.token_ids) == 24
    if "dry_multiplier" in sampling:  # no pair of tokens occurs twice
        tokens = [*PROMPT, *found.token_ids]
        pairs = list(pairwise(tokens))
        assert len(set(pairs)) == len(pairs)


def test_mirostat_keeps_the_tokens_below_its_surprise(llm):
    """Mirostat 2 of the whole answer, computed again from the model's own logprobs."""
    sampled = answer(llm, mirostat=2, mirostat_tau=2.0, mirostat_eta=0.3, logprobs=20)
    output = sampled.outputs[0]
    again = answer(llm, [*PROMPT, *output.token_ids], max_tokens=0, prompt_logprobs=20)
    raw = again.prompt_logprobs[len(PROMPT) :]
    mu = 4.0
    for chosen, model in zip(output.logprobs, raw, strict=True):
        kept = [(t, v) for t, v in model.top if -v / math.log(2) <= mu] or [model.top[0]]
        total = sum(math.exp(value) for _, value in kept)
        assert [token for token, _ in chosen.top] == [token for token, _ in kept][:20]
        expected = {token: value - math.log(total) for token, value in kept}
        assert chosen.logprob == pytest.approx(expected[chosen.token_id], abs=1e-4)
        mu -= 0.3 * (-chosen.logprob / math.log(2) - 2.0)


def test_post_sampling_probs_add_up_to_one(llm):
    output = answer(llm, post_sampling_probs=True, logprobs=5, top_k=4).outputs[0]
    for entry in output.logprobs:
        assert len(entry.top) == 4
        assert sum(math.exp(value) for _, value in entry.top) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("mirostat", 3), ("mirostat_tau", -1), ("mirostat_eta", 2), ("dynatemp_range", -1),
        ("dynatemp_exponent", 0), ("dry_multiplier", -1), ("dry_base", 0.5),
        ("dry_allowed_length", -1), ("dry_penalty_last_n", -2), ("repeat_last_n", -2),
        ("dry_sequence_breakers", [1]), ("post_sampling_probs", "yes"),
    ],
)  # fmt: skip
def test_limits(field, value):
    with pytest.raises(InvalidInputError) as error:
        SamplingParams(**{field: value})
    assert error.value.field.startswith(field)
