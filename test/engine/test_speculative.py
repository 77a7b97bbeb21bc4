"""Drafts change the number of steps but not the answers: random requests with every proposer, good
and bad, equal the run without drafts."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from engine_fakes import VOCAB, adapter_of, greedy, make_config, run_all
from proposers import (
    AlwaysRight,
    AlwaysWrong,
    Fake,
    Garbage,
    NoIdea,
    SometimesRight,
    TooMany,
)
from speculation import (
    COUNT,
    MOCK_VOCAB,
    NATIVE,
    SPECULATIVE,
    NothingCosts,
    Run,
    answers,
    check_streams,
    random_requests,
    run,
    truth_of,
)

from llaisys.common.errors import InvalidInputError
from llaisys.common.sampling import SamplingParams
from llaisys.engine.llm_engine import LLMEngine

FAKES = [AlwaysRight, AlwaysWrong, SometimesRight, Garbage, TooMany, NoIdea]


SETTINGS = {
    "fake": {"max_num_seqs": 48},
    "native": {**NATIVE, "max_num_seqs": 48},
    "tight": {**NATIVE, "max_num_seqs": 8, "max_num_batched_tokens": 11, "num_blocks": 24},
}


@cache
def requests_of(name: str, seed: int) -> list[tuple[list[int], SamplingParams, bool]]:
    return random_requests(seed, VOCAB if name == "fake" else MOCK_VOCAB)


@cache
def plain_run(name: str, seed: int) -> Run:
    """Without drafts."""
    return run(requests_of(name, seed), SETTINGS[name])


@pytest.mark.parametrize("proposer", [None, *FAKES], ids=lambda p: p.__name__ if p else "ngram")
@pytest.mark.parametrize("name", SETTINGS)
def test_drafts_change_nothing_but_the_number_of_steps(name: str, proposer: type[Fake] | None):
    settings = SETTINGS[name]
    accepted = preemptions = 0
    for seed in range(COUNT):
        requests, plain = requests_of(name, seed), plain_run(name, seed)
        drafted = run(requests, settings, truth_of(plain), proposer)
        assert answers(drafted.outputs) == answers(plain.outputs)
        streamed = [f"r{index}" for index, request in enumerate(requests) if request[2]]
        check_streams(plain, streamed)
        check_streams(drafted, streamed)
        accepted += drafted.stats["spec_decode_num_accepted_tokens"]
        preemptions += drafted.stats["num_preemptions"]
        if proposer is AlwaysRight and name != "tight":
            assert drafted.stats["num_steps"] <= plain.stats["num_steps"]
    if name == "tight":
        assert preemptions
    if proposer in (AlwaysWrong, NoIdea):
        assert accepted == 0
    elif proposer is not None or name == "native":
        assert accepted > 2 * COUNT


@pytest.mark.parametrize("proposer", [AlwaysWrong, SometimesRight])
def test_blocks_of_rejected_drafts_are_never_shared(proposer: type[Fake]):
    """The answers become prompts: their cached blocks must be correct."""
    first = [([9, 9, index], greedy(30, ignore_eos=True), False) for index in range(4)]
    plain = run(first, {})
    second = [
        ([*prompt, *plain.outputs[f"r{index}"].token_ids], params, stream)
        for index, (prompt, params, stream) in enumerate(first)
    ]
    expected = run(second, {})
    truth = truth_of(plain)
    engine = LLMEngine(make_config(seed=7, speculative_config=SPECULATIVE))
    speculator = engine.core.speculator
    speculator.costs = NothingCosts()
    for wave, name, result in ((first, "r", plain), (second, "s", expected)):
        truth |= {name + key.removeprefix("r"): tokens for key, tokens in truth_of(result).items()}
        speculator.proposer = proposer(truth, VOCAB)
        for index, (prompt, params, _) in enumerate(wave):
            engine.submit(prompt, params, f"{name}{index}")
        found = run_all(engine)
        for index in range(len(wave)):
            output = found[f"{name}{index}"].outputs[0]
            assert output.token_ids == result.outputs[f"r{index}"].token_ids
    assert found["s0"].outputs[0].num_cached_tokens >= 28  # 32 tokens of wave one were computed
    assert engine.stats()["spec_decode_num_draft_tokens"] > 20


def test_request_cancelled_between_drafts_leaves_no_state():
    requests = [([1, 2, 3], greedy(60, ignore_eos=True), True) for _ in range(3)]
    truth = truth_of(run(requests, {}))
    engine = LLMEngine(make_config(speculative_config=SPECULATIVE))
    engine.core.speculator.proposer = AlwaysRight(truth, VOCAB)
    engine.core.speculator.costs = NothingCosts()
    for index, (prompt, params, stream) in enumerate(requests):
        engine.submit(prompt, params, f"r{index}", stream=stream)
    for _ in range(4):
        engine.step()
    (part,) = engine.cancel("r1")
    tokens = part.output.outputs[0].token_ids
    assert part.finish_reason == "abort" and 4 < len(tokens) < 60
    assert [1, 2, 3, *tokens] == truth["r1"][: 3 + len(tokens)]
    assert run_all(engine)["r2"].token_ids == truth["r2"][3:]
    engine.core.scheduler.check_integrity()
    assert engine.stats()["kv_blocks_used"] == 0


def test_failure_after_accepted_drafts_is_reported_with_its_token():
    """Sampling fails from the fifth token on: the four before it are delivered."""
    plain_engine = LLMEngine(make_config())

    def fail_late(sampling: Any) -> None:
        if (sampling.positions >= 3 + 4).any():
            raise InvalidInputError("row 0 has no token left")

    def fail(engine: LLMEngine) -> tuple[list[int], str | None, str | None]:
        adapter_of(engine).on_sample = fail_late
        engine.submit([1, 2, 3], greedy(20, ignore_eos=True), "r0")
        output = run_all(engine)["r0"].outputs[0]
        return output.token_ids, output.finish_reason, output.error

    truth = truth_of(run([([1, 2, 3], greedy(20, ignore_eos=True), False)], {}))
    engine = LLMEngine(make_config(speculative_config=SPECULATIVE))
    engine.core.speculator.proposer = AlwaysRight(truth, VOCAB)
    engine.core.speculator.costs = NothingCosts()
    found = fail(engine)
    assert found == fail(plain_engine)
    assert found[0] == truth["r0"][3:7] and found[1] == "error"
    assert engine.stats()["num_steps"] < plain_engine.stats()["num_steps"]


def test_draft_and_acceptance_counts():
    requests = [([1, 2, 3], greedy(15, ignore_eos=True), False)]
    truth = truth_of(run(requests, {}))
    stats = run(requests, {}, truth, AlwaysRight).stats
    # One step for the prompt, then 7 + 7 tokens; the last draft ends where the answer does.
    assert stats["num_steps"] == 3
    assert stats["spec_decode_num_drafts"] == 2
    assert stats["spec_decode_num_draft_tokens"] == 12
    assert stats["spec_decode_num_accepted_tokens"] == 12
    assert stats["spec_decode_accepted_per_position"] == [2] * 6
    assert stats["spec_decode_mean_accepted_length"] == 7.0
    wrong = run(requests, {}, truth, AlwaysWrong).stats
    assert wrong["spec_decode_num_accepted_tokens"] == 0
    assert wrong["spec_decode_mean_accepted_length"] == 1.0
    assert wrong["spec_decode_num_drafts"] == 7  # in 14 steps: the intervals grow
    assert run(requests, {}).stats["spec_decode_mean_accepted_length"] == 0.0
