"""Requests share steps: counted, not timed."""

from __future__ import annotations

from engine_fakes import (
    EOS,
    adapter_of,
    expected_tokens,
    greedy,
    make_engine,
    run_prompts,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from llaisys.common.sampling import SamplingParams

PROMPTS = [[5 + i, 7, 9 + i, 11] * (1 + i % 3) for i in range(8)]


def test_batch_of_eight_needs_a_quarter_of_the_forward_calls():
    params = greedy(12, ignore_eos=True)
    alone = make_engine()
    in_turn = [run_prompts(alone, [prompt], params)[0] for prompt in PROMPTS]
    together = make_engine()
    outputs = run_prompts(together, PROMPTS, params)
    assert outputs == in_turn
    assert outputs == [expected_tokens(p, 12, stops=()) for p in PROMPTS]
    assert adapter_of(together).num_forwards * 4 <= adapter_of(alone).num_forwards


def test_two_requests_advance_in_the_same_loop():
    engine = make_engine()
    first = engine.submit([1, 2, 3], greedy(6, ignore_eos=True), stream=True)
    engine.step()
    second = engine.submit([4, 5, 6], greedy(6, ignore_eos=True), stream=True)
    seen = [part.request_id for _ in range(3) for part in engine.step()]
    assert seen == [first, second] * 3


def test_a_new_prompt_shares_its_step_with_decoding_requests():
    engine = make_engine()
    engine.submit([1, 2, 3], greedy(8, ignore_eos=True))
    engine.step()
    engine.submit(list(range(1, 20)), greedy(2, ignore_eos=True))
    engine.step()
    record = engine.core.steps[-1]
    assert (record.batch_size, record.num_prefill_tokens, record.num_decode_tokens) == (2, 19, 1)


@settings(max_examples=40, deadline=None)
@given(
    prompts=st.lists(
        st.lists(st.integers(1, 40), min_size=1, max_size=30), min_size=1, max_size=12
    ),
    seed=st.integers(0, 2**64 - 1),
    max_num_seqs=st.integers(1, 12),
    budget=st.integers(12, 40),
)
def test_seeded_request_does_not_depend_on_the_batch(prompts, seed, max_num_seqs, budget):
    params = SamplingParams(seed=seed, max_tokens=9)
    engine = make_engine(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget)
    outputs = run_prompts(engine, prompts, params)
    assert outputs == [expected_tokens(p, 9, seed=seed, stops=(EOS,)) for p in prompts]
