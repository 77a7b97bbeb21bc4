"""Context shift: the output depends on the remaining tokens only, with any batch, chunks, drafts
and preemptions."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
from engine_fakes import (
    VOCAB,
    FakeAdapter,
    adapter_of,
    make_engine,
    run_all,
    sample_token,
    state_of,
)
from error_helpers import invalid_input
from proposers import AlwaysRight, AlwaysWrong, SometimesRight

from llaisys.common.sampling import SamplingParams
from llaisys.engine.config import CacheConfig, EngineConfig, SchedulerConfig
from llaisys.engine.llm_engine import LLMEngine

CONTEXT = 32
BLOCK = 4


class ShortAdapter(FakeAdapter):
    max_len = CONTEXT + 3  # rounded down to whole blocks


def shifting(num_blocks: int = 64, max_num_seqs: int = 8, **others: Any) -> LLMEngine:
    scheduler = SchedulerConfig(max_num_seqs, 16, min_prefill_chunk=4, context_shift=True)
    cache = CacheConfig(block_size=BLOCK, num_kv_blocks=num_blocks)
    return make_engine(adapter_class=ShortAdapter, scheduler=scheduler, cache=cache, **others)


def expected(
    prompt: list[int],
    max_tokens: int,
    keep: int = 4,
    context: int = CONTEXT,
    seed: int | None = None,
    choice: int = 0,
    penalised: bool = False,
) -> list[int]:
    """The expected output. A sampled token is the hash of the tokens in the KV cache; position and
    history count all tokens."""
    tokens, window = list(prompt), list(prompt)
    keep = min(keep, len(prompt))
    for _ in range(max_tokens):
        history = tokens if penalised else ()
        token = sample_token(state_of(window), seed, choice, len(tokens), history)
        if len(window) == context:
            dropped = max(1, (context - keep) // 2 // BLOCK) * BLOCK
            del window[keep : keep + dropped]
        window.append(token)
        tokens.append(token)
    return tokens[len(prompt) :]


def endless(max_tokens: int, **others: Any) -> SamplingParams:
    values = {"temperature": 0.0, "ignore_eos": True, **others}
    return SamplingParams(max_tokens=max_tokens, **values)


def prompt_of(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, VOCAB) for _ in range(length)]


def test_ten_contexts_of_output_need_no_more_than_one_context_of_blocks():
    engine = shifting()
    assert engine.model_info.max_model_len == CONTEXT
    prompt = prompt_of(1, 9)
    engine.submit(prompt, endless(10 * CONTEXT), request_id="a")
    most, output = 0, None
    while engine.has_unfinished():
        for part in engine.step():
            output = part.output or output
        most = max(most, engine.stats()["kv_blocks_used"])
    assert output is not None
    assert output.token_ids == expected(prompt, 10 * CONTEXT)
    assert most == CONTEXT // BLOCK
    assert (output.usage.prompt_tokens, output.usage.completion_tokens) == (9, 10 * CONTEXT)
    assert output.finish_reason == "length"
    assert engine.stats()["num_context_shifts"] > 10
    assert adapter_of(engine).num_forwards == 10 * CONTEXT  # nothing is computed twice


@pytest.mark.parametrize("keep", [0, 1, 4, 5, 8, 17, CONTEXT - BLOCK - 1, -1])
def test_the_first_tokens_stay_as_n_keep_says(keep: int):
    engine = shifting()
    prompt = prompt_of(keep, 27)
    engine.submit(prompt, endless(100, n_keep=keep), request_id="a")
    kept = len(prompt) if keep == -1 else keep
    assert run_all(engine)["a"].token_ids == expected(prompt, 100, kept)


def test_n_keep_beyond_the_limit_is_rejected():
    engine = shifting()
    with invalid_input("n_keep"):
        engine.submit(prompt_of(1, 30), endless(5, n_keep=30))
    engine.submit(prompt_of(1, 5), endless(5, n_keep=3000))  # all 5 prompt tokens are kept
    run_all(engine)


def test_without_context_shift_the_context_ends_the_answer():
    engine = make_engine(adapter_class=ShortAdapter)
    engine.submit(prompt_of(1, 9), endless(100), request_id="a")
    output = run_all(engine)["a"]
    assert len(output.token_ids) == CONTEXT + 3 - 9 and output.finish_reason == "length"


def test_without_max_tokens_an_answer_has_one_context():
    engine = shifting()
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    engine.submit(prompt_of(1, 9), params, request_id="a")
    assert len(run_all(engine)["a"].token_ids) == CONTEXT


def test_context_shift_copies_blocks_shared_by_choices():
    engine = shifting()
    prompt = prompt_of(3, 30)  # seven full blocks that all choices share
    params = endless(90, temperature=1.0, seed=7, n=3, n_keep=6)
    engine.submit(prompt, params, request_id="a")
    output = run_all(engine)["a"]
    for choice, completion in enumerate(output.outputs):
        wanted = expected(prompt, 90, keep=6, seed=7, choice=choice)
        assert completion.token_ids == wanted
    assert adapter_of(engine).num_copied > 0
    engine.core.scheduler.check_integrity()


def test_shifted_blocks_leave_the_prefix_cache():
    engine = shifting()
    prompt = prompt_of(4, 29)
    engine.submit(prompt, endless(80, n_keep=8), request_id="a")
    first = run_all(engine)["a"].token_ids
    assert first == expected(prompt, 80, keep=8)
    # The kept and the discarded blocks hold the prompt's first 20 tokens as they were computed.
    engine.submit(prompt, endless(1), request_id="c")
    assert run_all(engine)["c"].usage.cached_tokens >= 20
    for tokens in (prompt, prompt + first[:2], prompt[:8] + (prompt + first)[-16:]):
        engine.submit(tokens, endless(20), request_id="b")
        output = run_all(engine)["b"]
        assert output.token_ids == expected(tokens, 20)


@pytest.mark.parametrize("blocks", [9, 13, 20])
def test_preempted_request_with_shifted_context_resumes_with_same_tokens(blocks: int):
    engine = shifting(num_blocks=blocks)
    prompts = [prompt_of(seed, 3 + 5 * seed) for seed in range(5)]
    for number, prompt in enumerate(prompts):
        params = endless(60 + 17 * number, temperature=1.0, seed=number, n_keep=number)
        engine.submit(prompt, params, request_id=str(number))
    outputs = run_all(engine)
    for number, prompt in enumerate(prompts):
        wanted = expected(prompt, 60 + 17 * number, keep=number, seed=number)
        assert outputs[str(number)].token_ids == wanted
    assert engine.stats()["num_preemptions"] > 0
    assert engine.stats()["kv_blocks_used"] == 0
    engine.core.scheduler.check_integrity()


def test_penalties_count_discarded_tokens():
    engine = shifting(num_blocks=12)  # two cannot run at once: they are preempted, too
    prompts = [prompt_of(8, 6), prompt_of(9, 11)]
    for number, prompt in enumerate(prompts):
        params = endless(100, repetition_penalty=1.1)
        engine.submit(prompt, params, request_id=str(number))
    outputs = run_all(engine)
    for number, prompt in enumerate(prompts):
        assert outputs[str(number)].token_ids == expected(prompt, 100, penalised=True)
    assert engine.stats()["num_preemptions"] > 0


@pytest.mark.parametrize("source", [AlwaysRight, AlwaysWrong, SometimesRight])
def test_drafts_change_nothing(source: Any):
    prompt = prompt_of(5, 13)
    wanted = expected(prompt, 150)
    engine = shifting(speculative_config={"num_speculative_tokens": 7})
    speculator = engine.core.speculator
    assert speculator is not None
    speculator.proposer = source({"a": prompt + wanted}, VOCAB)
    speculator.costs.price = lambda running: 0.0  # type: ignore[method-assign]
    engine.submit(prompt, endless(150), request_id="a")
    assert run_all(engine)["a"].token_ids == wanted
    assert engine.stats()["spec_decode_num_draft_tokens"] > 10


def test_bad_words_are_found_across_a_shift():
    prompt = prompt_of(6, 10)
    base = expected(prompt, 120)
    # Pairs of tokens around shifts and far from them: the first one changes what follows.
    pairs = tuple((base[i], base[i + 1]) for i in (21, 22))

    def run(num_blocks: int, others: int) -> tuple[list[int], LLMEngine]:
        engine = shifting(num_blocks)
        engine.input_processor._encode_bad_words = lambda words: pairs  # type: ignore
        for number in range(others):
            engine.submit(prompt_of(number, 20), endless(60, min_tokens=9), request_id=str(number))
        engine.submit(prompt, endless(120, bad_words="x", min_tokens=100), request_id="a")
        return run_all(engine)["a"].token_ids, engine

    alone, _ = run(64, 0)
    assert alone[:22] == base[:22] and alone[22] != base[22]
    assert not {*pairs} & {*pairwise(alone)}
    crowded, engine = run(11, 2)
    assert crowded == alone
    assert engine.stats()["num_preemptions"] > 0


def test_thinking_budget_counts_across_context_shifts():
    opening, closing = 300, (301, 302)
    prompt = [*prompt_of(14, 10), opening]
    for blocks, others in ((64, 0), (11, 2)):
        engine = shifting(blocks)
        engine.input_processor._thinking_tokens = lambda: (opening, *closing)  # type: ignore
        for number in range(others):
            engine.submit(prompt_of(number, 20), endless(60), request_id=str(number))
        engine.submit(prompt, endless(100, thinking_budget=70), request_id="a")
        tokens = run_all(engine)["a"].token_ids
        assert not {*closing} & {*tokens[:70]}
        assert tokens[70:72] == list(closing)


def test_a_stop_token_far_beyond_the_context_ends_the_answer():
    prompt = prompt_of(11, 7)
    wanted = expected(prompt, 200)
    last = next(i for i, t in enumerate(wanted) if i > 90 and wanted.index(t) == i)
    engine = shifting()
    params = endless(200, stop_token_ids=[wanted[last]])
    engine.submit(prompt, params, request_id="a")
    output = run_all(engine)["a"]
    assert output.token_ids == wanted[: last + 1] and output.finish_reason == "stop"


def test_failed_step_ends_its_requests_and_keeps_block_counts_valid():
    engine = shifting()
    adapter = adapter_of(engine)
    engine.submit(prompt_of(12, 20), endless(100), request_id="a")
    while not engine.stats()["num_context_shifts"]:
        engine.step()

    def fail(step: Any) -> None:
        raise RuntimeError("out of luck")

    adapter.on_forward = fail
    (part,) = engine.step()
    assert part.finish_reason == "error"
    adapter.on_forward = None
    assert engine.stats()["kv_blocks_used"] == 0
    engine.submit(prompt_of(13, 20), endless(100), request_id="b")
    assert run_all(engine)["b"].token_ids == expected(prompt_of(13, 20), 100)


def test_random_traffic_returns_each_request_its_own_tokens():
    """Few sequences and blocks, choices, cancelled requests."""
    for seed in range(6):
        rng = random.Random(seed)
        engine = shifting(num_blocks=rng.choice([10, 17, 40]), max_num_seqs=rng.choice([2, 5]))
        shared = prompt_of(100, 20)
        wanted = {}
        for number in range(8):
            prompt = shared[: rng.randrange(1, 20)] + prompt_of(number, rng.randrange(1, 8))
            count, keep, n = rng.randrange(1, 150), rng.randrange(0, 20), rng.choice([1, 1, 2])
            params = endless(count, temperature=1.0, seed=number, n_keep=keep, n=n)
            engine.submit(prompt, params, request_id=str(number))
            wanted[str(number)] = [
                expected(prompt, count, keep, seed=number, choice=choice) for choice in range(n)
            ]
        for _ in range(rng.randrange(5, 60)):
            engine.step()
        for part in engine.cancel("3"):
            wanted.pop(part.request_id, None)
        outputs = run_all(engine)
        for name, output in outputs.items():
            assert [c.token_ids for c in output.outputs] == wanted[name], (seed, name)
        engine.core.scheduler.check_integrity()


def test_context_of_one_block_cannot_be_shifted():
    scheduler = SchedulerConfig(context_shift=True)
    with invalid_input("max_model_len"):
        LLMEngine(EngineConfig(adapter_class=FakeAdapter, max_model_len=31, scheduler=scheduler))
