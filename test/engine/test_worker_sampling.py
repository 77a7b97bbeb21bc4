"""Sampling in the worker on a fake adapter: parameters, offsets, masks and logprobs of each row."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from engine_fakes import (
    EOS,
    VOCAB,
    adapter_of,
    expected_tokens,
    greedy,
    make_engine,
    run_all,
    run_prompts,
    sample_token,
    state_of,
)

from llaisys.common.sampling import DEFAULT_SAMPLERS, SamplerKind, SamplingParams
from llaisys.engine.worker.sampling_state import allowed_mask


def sampling_of(*requests: SamplingParams, prompt=(1, 2, 3)):
    """Return the sampler's arrays for the first tokens of these requests."""
    engine = make_engine()
    for params in requests:
        engine.submit(list(prompt), params)
    engine.core.scheduler.block_manager.enable_prefix_caching = False
    engine.step()
    return adapter_of(engine).last_sampling


def test_neutral_parameters_stay_none():
    meta = sampling_of(SamplingParams(seed=4), SamplingParams(seed=2**64 - 1))
    assert meta.numbers == {}
    for name in ("seq_ids", "chain", "bias_ids", "mask_rows", "masks"):
        assert getattr(meta, name) is None, name
    assert meta.seeds.tolist() == [4, 2**64 - 1] and meta.seeds.dtype == np.uint64
    assert meta.positions.tolist() == [3, 3] and meta.rows.tolist() == [0, 1]


def test_each_row_has_its_own_parameters():
    meta = sampling_of(
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.5, top_p=0.9, top_k=7, min_p=0.25, logprobs=2),
        SamplingParams(presence_penalty=0.5, samplers=["top_k", "temperature"]),
    )
    numbers = {name: values.tolist() for name, values in meta.numbers.items()}
    assert np.allclose(numbers.pop("top_p"), [1, 0.9, 1]) and meta.seq_ids is not None
    assert numbers == {
        "temperature": [0.0, 0.5, 1.0],
        "top_k": [0, 7, 0],
        "min_p": [0, 0.25, 0],
        "n_logprobs": [-1, 2, -1],
        "presence_penalty": [0, 0, 0.5],
    }
    links = len(DEFAULT_SAMPLERS)
    assert meta.chain_offsets.tolist() == [0, links, 2 * links, 2 * links + 2]
    assert meta.chain[2 * links :].tolist() == [SamplerKind.TOP_K, SamplerKind.TEMPERATURE]


def test_request_without_seed_gets_a_random_one():
    seeds = sampling_of(SamplingParams(), SamplingParams()).seeds.tolist()
    assert seeds[0] != seeds[1]
    first, second = make_engine(seed=1), make_engine(seed=1)
    a = run_prompts(first, [[1, 2]] * 2, SamplingParams(max_tokens=8, ignore_eos=True))
    b = run_prompts(second, [[1, 2]] * 2, SamplingParams(max_tokens=8, ignore_eos=True))
    assert a == b and a[0] != a[1]


def test_bias_and_bans_become_offsets():
    meta = sampling_of(
        SamplingParams(logit_bias={5: 2.0, 6: -1.0}),
        SamplingParams(),
        SamplingParams(bad_words="x", min_tokens=2),
    )
    assert meta.bias_offsets.tolist()[:3] == [0, 2, 2]
    assert meta.bias_ids[:2].tolist() == [5, 6] and meta.bias_values[:2].tolist() == [2.0, -1.0]
    banned = meta.bias_ids[2:].tolist()
    assert ord("x") in banned and EOS in banned
    assert np.isneginf(meta.bias_values[2:]).all()


def test_allowed_tokens_become_a_mask():
    mask = allowed_mask([0, 31, 32, VOCAB - 1], VOCAB)
    assert mask.shape == (VOCAB // 32,) and mask.dtype == np.uint32
    assert mask[0] == (1 | 1 << 31) and mask[1] == 1 and mask[-1] == 1 << 31
    engine = make_engine()
    params = greedy(12, ignore_eos=True, allowed_token_ids=[40, 50, 60])
    (tokens,) = run_prompts(engine, [[1, 2]], params)
    assert set(tokens) <= {40, 50, 60}


def test_bad_words_of_several_tokens_are_never_completed():
    free = expected_tokens([1, 2, 3], 12, stops=())
    word = FakeText(free[4:6])
    engine = make_engine(tokenizer=word)
    output = run_prompts(engine, [[1, 2, 3]], greedy(12, ignore_eos=True, bad_words=["bad"]))[0]
    assert output[:5] == free[:5]  # the beginning of the word alone is fine
    assert output[5] == (free[5] + 1) % VOCAB
    pairs = list(itertools.pairwise(output))
    assert tuple(free[4:6]) not in pairs


def test_failing_row_is_removed_and_the_others_sample_as_without_it():
    """Also their logprobs and penalties: the rows move up when one is removed."""
    params = greedy(4, ignore_eos=True, logprobs=2, frequency_penalty=0.5)
    nothing_left = greedy(4, ignore_eos=True, allowed_token_ids=[40], bad_words=["(("])

    def outputs(second):
        engine = make_engine()
        jobs = (([1, 2], params), ([5, 6], second), ([3, 4], params))
        names = [engine.submit(*job) for job in jobs]
        finished = run_all(engine)
        return [finished[name].outputs[0] for name in names]

    good, bad = outputs(params), outputs(nothing_left)
    assert bad[1].finish_reason == "error" and bad[1].token_ids == [40]
    assert "no token left" in bad[1].error
    for index in (0, 2):
        assert bad[index].token_ids == good[index].token_ids
        assert bad[index].logprobs == good[index].logprobs


class FakeText:
    """Encodes everything as one given sequence."""

    eos_token_ids = (EOS,)

    def __init__(self, tokens):
        self.tokens = tokens

    def encode(self, text, add_special_tokens=True):
        return list(self.tokens)

    def detokenizer(self, skip_special_tokens):
        return None


def test_penalties_include_prompt_and_output():
    engine = make_engine()
    name = engine.submit([1, 2, 3], greedy(4, ignore_eos=True, frequency_penalty=0.5))
    tokens = [1, 2, 3]
    for _ in range(4):
        tokens.append(sample_token(state_of(tokens), None, 0, 0, tokens))
    assert run_all(engine)[name].token_ids == tokens[3:]


def test_logprobs_come_with_their_tokens():
    engine = make_engine()
    plain = engine.submit([1, 2], greedy(3, ignore_eos=True))
    asked = engine.submit([1, 2], greedy(3, ignore_eos=True, logprobs=2))
    outputs = run_all(engine)
    assert outputs[plain].outputs[0].logprobs is None
    choice = outputs[asked].outputs[0]
    assert [entry.token_id for entry in choice.logprobs] == choice.token_ids
    assert all(len(entry.top) == 2 and entry.rank == 1 for entry in choice.logprobs)
    assert choice.cumulative_logprob == -1.5


@pytest.mark.parametrize(
    ("params", "needs_sync"),
    [
        ({}, False),
        ({"temperature": 0.5, "top_p": 0.9, "min_p": 0.1, "top_k": 5}, False),
        ({"typical_p": 0.5, "top_n_sigma": 2.0, "xtc_probability": 0.5}, False),
        ({"logit_bias": {5: 2.0}, "min_tokens": 9}, False),
        ({"dry_multiplier": 1.0, "dry_allowed_length": 1}, True),
    ],
)
def test_parameters_that_depend_on_the_last_token_need_sync(params, needs_sync):
    """The device sampler plans a step before the last token is known: SamplingPlan::Async states
    what it cannot sample, and penalties read the token on the device (test_sampler_device.cpp).
    What the worker computes itself must not depend on that token, unless the step is synchronous.
    """
    found = []
    for last in (4, 8):
        engine = make_engine()
        prompt = [4, 9, 7, last]
        name = engine.submit(prompt, SamplingParams(seed=1, **params))
        assert engine.core.scheduler.requests[name].needs_sync == needs_sync
        engine.step()
        meta = adapter_of(engine).last_sampling
        numbers = {key: values.tolist() for key, values in meta.numbers.items()}
        arrays = (meta.bias_ids, meta.bias_values, meta.masks)
        found.append((numbers, [None if array is None else array.tolist() for array in arrays]))
    assert (found[0] != found[1]) == needs_sync


@pytest.mark.parametrize(
    ("params", "needs_sync"),
    [
        ({"repetition_penalty": 1.5, "repeat_last_n": -1}, False),  # the native history: all tokens
        ({"repetition_penalty": 1.5, "repeat_last_n": 4}, True),  # the worker replaces the history
        ({"bad_words": "xy"}, True),  # banned after the first tokens of the word were sampled
    ],
)
def test_parameters_that_depend_on_sampled_tokens_need_sync(params, needs_sync):
    engine = make_engine()
    name = engine.submit([1, 2, 3], SamplingParams(**params))
    assert engine.core.scheduler.requests[name].needs_sync == needs_sync
