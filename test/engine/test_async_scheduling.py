"""Asynchronous scheduling returns the tokens and logprobs of synchronous scheduling: random
requests with stops, aborts, preemptions, shifts, failures and interrupts."""

from __future__ import annotations

import random
from typing import Any

import pytest
from async_fakes import (
    SMALL,
    AsyncAdapter,
    assert_same,
    async_adapter_of,
    make_async_engine,
    run_random,
)
from engine_fakes import (
    EOS,
    FakeTokenizer,
    expected_tokens,
    greedy,
    make_engine,
    run_all,
    run_prompts,
    texts,
)
from error_helpers import invalid_input
from hypothesis import given, settings
from hypothesis import strategies as st

from llaisys import LLM
from llaisys.common.errors import InvalidInputError
from llaisys.common.sampling import SamplingParams
from llaisys.engine.llm_engine import LLMEngine

NATIVE = {"model": "mock", "adapter_class": None, "tokenizer": FakeTokenizer()}


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1 << 20), order=st.integers(0, 99), num_blocks=st.integers(20, 40))
def test_random_requests_equal_synchronous_scheduling(seed, order, num_blocks):
    sizes = {**SMALL, "num_blocks": num_blocks}
    late = make_async_engine(order, **sizes)
    assert_same(run_random(late, seed), run_random(make_engine(**sizes), seed))
    assert not async_adapter_of(late).histories or late.core.scheduler.queues.released
    assert late.debug_state()["worker_steps_in_flight"] == 0


def test_native_model_equals_synchronous_scheduling():
    """With the native sampler and the thread of the native pipeline."""
    ahead = make_engine(**NATIVE, **SMALL, async_scheduling="on", n_threads=1)
    behind = make_engine(**NATIVE, **SMALL, async_scheduling="off", n_threads=1)
    assert ahead.core.is_async and not behind.core.is_async
    try:
        for seed in range(12):
            assert_same(run_random(ahead, seed), run_random(behind, seed))
    finally:
        ahead.close()
        behind.close()


def test_decoding_request_is_launched_before_its_last_token_is_known():
    engine = make_async_engine()
    engine.submit([1, 2, 3], greedy(6, ignore_eos=True))
    assert [part.token_ids for part in engine.step()] == []  # reported at the end
    assert (
        async_adapter_of(engine).num_launched == 2 and engine.debug_state()["steps_in_flight"] == 1
    )
    (output,) = run_all(engine).values()
    assert output.token_ids == expected_tokens([1, 2, 3], 6, stops=())
    assert async_adapter_of(engine).num_launched == 6  # the last token of all is not computed


def test_late_stop_discards_surplus_tokens():
    engine = make_async_engine()
    prompt = next(p for p in ([i, i + 1] for i in range(1, 500)) if _stops_in(p, 4))
    expected = expected_tokens(prompt, 50)
    assert run_prompts(engine, [prompt], greedy(50)) == [expected]
    assert async_adapter_of(engine).num_launched == len(expected) + 1
    # What the surplus step wrote is not taken for a prefix of the next request.
    assert run_prompts(engine, [[*prompt, *expected, 7]], greedy(9)) == [
        expected_tokens([*prompt, *expected, 7], 9)
    ]


def _stops_in(prompt: list[int], count: int) -> bool:
    tokens = expected_tokens(prompt, count)
    return tokens[-1] == EOS and len(tokens) > 1


def test_stop_string_ends_the_text_as_without_async_scheduling():
    def run(engine: LLMEngine) -> tuple[str, list[int]]:
        engine.submit([5, 6], greedy(60, ignore_eos=True, stop=["e", "k"]), stream=True)
        parts = []
        while engine.has_unfinished():
            parts += engine.step()
        return texts(parts), parts[-1].output.token_ids

    assert run(make_async_engine()) == run(make_engine())


def test_a_full_context_is_shifted_at_the_same_tokens():
    scheduler = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "context_shift": True}

    def run(**others: Any) -> list[Any]:
        with LLM(max_model_len=32, num_kv_blocks=16, block_size=4, **scheduler, **others) as llm:
            params = SamplingParams(max_tokens=90, temperature=0.7, seed=3, ignore_eos=True)
            outputs = llm.generate([[1, 2, 3], [4, 5]], params)
            assert llm.stats()["num_context_shifts"] > 4
            return [o.token_ids for o in outputs]

    assert run(**NATIVE, async_scheduling="on") == run(**NATIVE)


def test_requests_that_need_sync_run_in_synchronous_steps():
    engine, plain = make_async_engine(), make_engine()
    bound = greedy(8, ignore_eos=True, bad_words=["ab"])
    names = [engine.submit([1, 2], bound), engine.submit([3, 4], greedy(20, ignore_eos=True))]
    engine.step()
    assert (
        async_adapter_of(engine).num_launched == 0 and not engine.debug_state()["steps_in_flight"]
    )
    outputs = run_all(engine)
    assert async_adapter_of(engine).num_launched > 5  # once it is alone
    assert [outputs[name].token_ids for name in names] == [
        *run_prompts(plain, [[1, 2]], bound),
        expected_tokens([3, 4], 20, stops=()),
    ]


def test_failed_step_ends_its_requests_and_the_next_step_runs():
    engine = make_async_engine(max_num_seqs=2, max_num_batched_tokens=2)
    adapter = async_adapter_of(engine)
    broken = engine.submit([1], greedy(9, ignore_eos=True))
    for _ in range(3):
        engine.step()
    whole = engine.submit([2], greedy(5, ignore_eos=True))  # its first step is behind the one out

    def explode(step: Any) -> None:
        adapter.on_forward = None
        raise RuntimeError("a cosmic ray")

    adapter.settle()
    adapter.on_forward = explode
    outputs = run_all(engine)
    assert outputs[broken].finish_reason == "error"
    assert "a cosmic ray" in outputs[broken].outputs[0].error
    assert engine.core.failed_steps == 0 and engine.stats()["worker_errors"] == 1
    if outputs[whole].finish_reason != "error":
        assert outputs[whole].token_ids == expected_tokens([2], 5, stops=())
    assert run_prompts(engine, [[3, 4]], greedy(5)) == [expected_tokens([3, 4], 5)]
    engine.core.scheduler.check_integrity()


@pytest.mark.parametrize("order", range(4))
def test_randomly_failing_steps_keep_other_requests_tokens(order):
    """Requests that are not in a failed step get exactly their tokens."""
    engine = make_async_engine(order, **SMALL)
    adapter, rng = async_adapter_of(engine), random.Random(order)

    def fail_sometimes(_: Any) -> None:
        if rng.random() < 0.06:
            raise RuntimeError("bad luck")

    adapter.on_forward = adapter.on_sample = fail_sometimes
    prompts = [[rng.randint(1, 60) for _ in range(rng.randint(1, 14))] for _ in range(30)]
    names = [engine.submit(prompt, greedy(8)) for prompt in prompts]
    outputs = run_all(engine)
    reasons = [outputs[name].finish_reason for name in names]
    assert "error" in reasons and len(set(reasons)) > 1
    for name, prompt in zip(names, prompts, strict=True):
        expected = expected_tokens(prompt, 8)
        got = outputs[name].token_ids
        assert got == (expected[: len(got)] if outputs[name].finish_reason == "error" else expected)
    adapter.on_forward = adapter.on_sample = None
    assert run_prompts(engine, prompts[:3], greedy(8)) == [
        expected_tokens(prompt, 8) for prompt in prompts[:3]
    ]


@pytest.mark.parametrize("order", range(4))
def test_sequence_without_a_token_to_sample_fails_alone(order):
    engine = make_async_engine(order)
    adapter = async_adapter_of(engine)
    names = [engine.submit([i, i + 1], greedy(6, ignore_eos=True)) for i in (1, 3, 5)]
    engine.step()
    adapter.settle()
    doomed = engine.core.scheduler.running[1]

    def ban(sampling: Any) -> None:
        own = sampling.positions[sampling.seeds == doomed.seed]
        if doomed.num_prompt_tokens + 3 in own:
            raise InvalidInputError("it has no token left")

    adapter.on_sample = ban
    outputs = run_all(engine)
    for name, first in zip(names, (1, 3, 5), strict=True):
        expected = expected_tokens([first, first + 1], 6, stops=())
        if name == names[1]:
            assert outputs[name].finish_reason == "error"
            assert "no token left" in outputs[name].outputs[0].error
            expected = expected[:3]
        assert outputs[name].token_ids == expected
    assert engine.stats()["worker_errors"] == 0


@pytest.mark.parametrize("where", ["launch", "collect", "collected"])
def test_an_interruption_ends_the_step_and_not_the_engine(where):
    engine = make_async_engine()
    adapter = async_adapter_of(engine)
    engine.submit([1, 2], greedy(30, ignore_eos=True))
    engine.step()
    original = adapter.launch if where == "launch" else adapter.collect
    name = "launch" if where == "launch" else "collect"

    def interrupted(*args: Any) -> Any:
        setattr(adapter, name, original)
        if where == "collected":
            original(*args)
        raise KeyboardInterrupt

    setattr(adapter, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    (output,) = run_all(engine).values()
    assert output.finish_reason == "abort"
    got = output.token_ids
    assert got == expected_tokens([1, 2], 30, stops=())[: len(got)]
    assert run_prompts(engine, [[3, 4], [5]], greedy(7)) == [
        expected_tokens([3, 4], 7),
        expected_tokens([5], 7),
    ]
    engine.core.scheduler.check_integrity()


def test_a_preempted_sequence_that_comes_back_is_not_released_by_an_older_failure():
    engine = make_async_engine(num_blocks=9, max_num_seqs=2, max_num_batched_tokens=16)
    adapter = async_adapter_of(engine)
    rng = random.Random(1)

    def fail_sometimes(_: Any) -> None:
        if rng.random() < 0.1:
            raise RuntimeError("bad luck")

    adapter.on_forward = fail_sometimes
    names = [engine.submit([i] * 14, greedy(18, ignore_eos=True)) for i in range(1, 20)]
    outputs = run_all(engine)
    for index, name in enumerate(names, 1):
        expected = expected_tokens([index] * 14, 18, stops=())
        got = outputs[name].token_ids
        assert got == (expected[: len(got)] if outputs[name].finish_reason == "error" else expected)
    assert engine.stats()["num_preemptions"] > 0


def test_engine_with_a_step_timeout_stays_synchronous(caplog):
    fields = {"tokenizer": FakeTokenizer(), "num_kv_blocks": 32, "warmup": False}
    fields |= {"step_timeout": 60.0, "adapter_class": AsyncAdapter}
    with LLM(async_scheduling="on", **fields) as llm:
        assert "async_scheduling is off" in caplog.text
        assert len(llm.generate([[1, 2]], greedy(4, ignore_eos=True))[0].token_ids) == 4


def test_auto_is_off_on_devices_that_were_not_measured():
    assert not make_engine().core.is_async
    with invalid_input("async_scheduling"):
        make_engine(async_scheduling="maybe")
