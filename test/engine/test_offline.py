"""Offline inference through `LLM` on a fake model: batches and streams agree."""

from __future__ import annotations

import os
import signal

import pytest
from engine_fakes import (
    EOS,
    FakeTokenizer,
    adapter_of,
    expected_tokens,
    greedy,
    is_idle,
    make_llm,
)
from error_helpers import invalid_input

from llaisys import SamplingParams


@pytest.fixture
def llm():
    with make_llm() as llm:
        yield llm


def test_batch_keeps_the_order_of_its_prompts(llm):
    prompts = [[9 - i, 2, 3][: 1 + i % 3] for i in range(9)]
    outputs = llm.generate(prompts, greedy(7))
    assert [output.token_ids for output in outputs] == [expected_tokens(p, 7) for p in prompts]
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert is_idle(llm)


def test_stream_and_generate_agree(llm):
    params = greedy(25, ignore_eos=True)
    (whole,) = llm.generate("Streams", params)
    parts = list(llm.stream("Streams", params))
    assert "".join(part.text for part in parts) == whole.text == parts[-1].output.text
    assert [token for part in parts for token in part.token_ids] == whole.token_ids
    assert [part.finish_reason for part in parts[:-1]] == [None] * (len(parts) - 1)
    assert parts[-1].finish_reason == whole.finish_reason == "length"
    assert whole.prompt == "Streams" and whole.text
    assert is_idle(llm)


def test_streams_and_batches_can_be_mixed(llm):
    params = greedy(10, ignore_eos=True)
    stream = llm.stream([1, 2], params)
    first = next(stream)
    (other,) = llm.generate([[3, 4]], params)  # runs while the stream waits
    rest = list(stream)
    tokens = [token for part in [first, *rest] for token in part.token_ids]
    assert tokens == expected_tokens([1, 2], 10, stops=())
    assert other.token_ids == expected_tokens([3, 4], 10, stops=())
    assert is_idle(llm)


def test_closing_a_stream_cancels_its_request(llm):
    stream = llm.stream([1, 2], greedy(50, ignore_eos=True))
    next(stream)
    stream.close()
    assert is_idle(llm)


def test_stop_string_ends_generate_and_stream_alike(llm):
    (free,) = llm.generate([[1, 2]], greedy(30, ignore_eos=True))
    stop = free.text[8:11]
    params = greedy(30, ignore_eos=True, stop=stop)
    (output,) = llm.generate([[1, 2]], params)
    assert output.text == free.text[: free.text.index(stop)]
    assert output.outputs[0].stop_reason == stop and output.finish_reason == "stop"
    assert output.token_ids == free.token_ids[: len(output.token_ids)]
    streamed = list(llm.stream([1, 2], params))
    assert "".join(part.text for part in streamed) == output.text
    assert streamed[-1].output.token_ids == output.token_ids
    assert is_idle(llm)


def test_seeds_are_reproducible_and_choices_differ(llm):
    params = SamplingParams(n=3, seed=7, max_tokens=8, ignore_eos=True)
    one, two = llm.generate([[1, 2], [1, 2]], params)
    texts = [choice.token_ids for choice in one.outputs]
    assert texts == [choice.token_ids for choice in two.outputs]
    assert texts == [expected_tokens([1, 2], 8, seed=7, choice=c, stops=()) for c in range(3)]
    assert len({tuple(t) for t in texts}) == 3
    assert [choice.index for choice in one.outputs] == [0, 1, 2]
    assert one.usage.completion_tokens == 24 and one.usage.prompt_tokens == 2
    assert one.usage.total_tokens == 26


def test_without_a_seed_outputs_differ_and_the_engine_seed_repeats_them():
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    with make_llm(seed=3) as a, make_llm(seed=3) as b, make_llm() as c:
        first = [o.token_ids for o in a.generate([[1, 2]] * 3, params)]
        assert first == [o.token_ids for o in b.generate([[1, 2]] * 3, params)]
        assert first != [o.token_ids for o in c.generate([[1, 2]] * 3, params)]
        assert len({tuple(tokens) for tokens in first}) == 3


def test_interrupt_in_the_model_releases_everything(llm):
    adapter = adapter_of(llm.llm_engine)
    before = llm.submit([5, 6, 7], greedy(30, ignore_eos=True))

    def interrupt(step):
        if adapter.num_forwards == 3:
            adapter.on_forward = None
            raise KeyboardInterrupt

    adapter.on_forward = interrupt
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1, 2], [3, 4]], greedy(30, ignore_eos=True))
    assert llm.has_unfinished()  # the update of the other request is pending
    llm.step()
    assert llm.collect(before).finish_reason == "abort"
    assert is_idle(llm)
    assert llm.generate([[1, 2]], greedy(5))[0].token_ids == expected_tokens([1, 2], 5)


def test_ctrl_c_waits_for_the_step_and_keeps_other_requests(llm):
    adapter = adapter_of(llm.llm_engine)
    other = llm.submit([5, 6, 7], greedy(12, ignore_eos=True))

    def interrupt(step):
        if adapter.num_forwards == 4:
            adapter.on_forward = None
            os.kill(os.getpid(), signal.SIGINT)

    adapter.on_forward = interrupt
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[1, 2], [3, 4]], greedy(30, ignore_eos=True))
    finally:
        signal.signal(signal.SIGINT, before)
    assert llm.stats()["num_running"] == 1
    while llm.has_unfinished():
        llm.step()
    assert llm.collect(other).token_ids == expected_tokens([5, 6, 7], 12, stops=())
    assert is_idle(llm)


def test_a_bad_prompt_in_a_batch_cancels_the_batch_and_nothing_else(llm):
    other = llm.submit([5, 6], greedy(4, ignore_eos=True))
    with invalid_input("prompt[1]"):
        llm.generate([[1, 2], [3, 9999]], greedy(5))
    assert llm.stats()["num_waiting"] == 1
    while llm.has_unfinished():
        llm.step()
    assert llm.collect(other).token_ids == expected_tokens([5, 6], 4, stops=())


def test_fault_fails_its_requests_and_the_next_batch_works(llm):
    adapter = adapter_of(llm.llm_engine)

    def explode(step):
        adapter.on_forward = None
        raise RuntimeError("a cosmic ray")

    adapter.on_forward = explode
    (output,) = llm.generate([[1, 2]], greedy(5))
    assert output.finish_reason == "error" and "a cosmic ray" in output.outputs[0].error
    assert llm.generate([[1, 2]], greedy(5))[0].token_ids == expected_tokens([1, 2], 5)


NATIVE = {"model": "mock", "adapter_class": None}  # its sampler is the real one


@pytest.mark.parametrize("settings", [{}, NATIVE], ids=["fake", "native"])
def test_request_without_a_token_to_sample_fails_alone(settings):
    """Its second token would complete a bad word, and no other is allowed."""
    other, nothing_left = (
        greedy(6, ignore_eos=True),
        greedy(6, ignore_eos=True, allowed_token_ids=[48], bad_words=["00"]),
    )
    with make_llm(**settings) as llm:
        (alone,) = llm.generate([[1, 2]], other)
        first, failed, last = llm.generate([[1, 2], [3, 4], [1, 2]], [other, nothing_left, other])
        assert failed.finish_reason == "error" and failed.token_ids == [48]
        assert "no token left" in failed.outputs[0].error
        assert first.token_ids == last.token_ids == alone.token_ids
        assert llm.stats()["worker_errors"] == 0 and is_idle(llm)


@pytest.mark.parametrize("settings", [{}, NATIVE], ids=["fake", "native"])
@pytest.mark.parametrize(
    "fields",
    [
        {"allowed_token_ids": [EOS], "min_tokens": 1},
        {"allowed_token_ids": [5], "stop_token_ids": [5], "min_tokens": 2},
        {"allowed_token_ids": [48], "bad_words": ["0"]},
    ],
    ids=str,
)
def test_request_without_an_allowed_token_is_rejected(settings, fields):
    with make_llm(**settings) as llm:
        with invalid_input("allowed_token_ids"):
            llm.generate([[1, 2]], SamplingParams(**fields))
        assert is_idle(llm)
        assert len(llm.generate([[1, 2]], greedy(3, ignore_eos=True))[0].token_ids) == 3


def test_end_tokens_outside_the_vocabulary_are_ignored():
    class Larger(FakeTokenizer):
        eos_token_ids = (EOS, 64, 1000)

    with make_llm(**NATIVE, tokenizer=Larger()) as llm:
        assert llm.model_info.vocab_size == 64
        (output,) = llm.generate([[1, 2]], greedy(4, min_tokens=3))
        assert output.finish_reason != "error" and len(output.token_ids) >= 3


def test_shared_prefix_is_reported_in_usage(llm):
    prompt = list(range(1, 30))
    llm.generate([prompt], greedy(2))
    (output,) = llm.generate([prompt], greedy(2))
    assert output.usage.cached_tokens == 28
    (salted,) = llm.generate([prompt], greedy(2), cache_salt="someone else")
    assert salted.usage.cached_tokens == 0 and salted.token_ids == output.token_ids


def test_timings_and_logprobs_are_there(llm):
    (output,) = llm.generate([[1, 2]], greedy(5, ignore_eos=True, logprobs=3))
    choice = output.outputs[0]
    assert len(choice.logprobs) == 5 and len(choice.logprobs[0].top) == 3
    assert choice.timings.total >= choice.timings.first_token >= choice.timings.queue >= 0
    assert choice.timings.per_token > 0


def test_eos_ends_a_request_unless_ignored(llm):
    prompts = [[i, j] for i in range(1, 40) for j in range(1, 9)]
    ending = next(p for p in prompts if expected_tokens(p, 40)[-1] == EOS)
    (output,) = llm.generate([ending], greedy(40))
    assert output.finish_reason == "stop" and output.token_ids[-1] == EOS
    assert output.outputs[0].stop_reason is None and "<eos>" not in output.text
    (longer,) = llm.generate([ending], greedy(40, ignore_eos=True))
    assert len(longer.token_ids) == 40 and longer.finish_reason == "length"
