"""Drafts change the number of steps but not the answers: random requests with every proposer, good
and bad, equal the run without drafts."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field
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

from llaisys.common.errors import InvalidInputError
from llaisys.common.sampling import SamplingParams
from llaisys.common.types import RequestOutput
from llaisys.engine.llm_engine import LLMEngine
from llaisys.engine.speculative.costs import DraftCosts

COUNT = int(os.environ.get("LLAISYS_TEST_BATCHES", "8"))  # requests per proposer
NATIVE = {"model": "mock", "adapter_class": None}  # the real sampler, 64 tokens
MOCK_VOCAB = 64
FAKES = [AlwaysRight, AlwaysWrong, SometimesRight, Garbage, TooMany, NoIdea]
SPECULATIVE = {"num_speculative_tokens": 6, "disable_by_batch_size": 1000}


class NothingCosts(DraftCosts):
    """Drafts of maximum length; durations of steps are ignored."""

    def price(self, running: int) -> float:
        return 0.0

    def first_price(self, running: int) -> float:
        return 0.0

    def needs_plain_step(self, running: int) -> bool:
        return False


@dataclass
class Run:
    """The results of one engine."""

    outputs: dict[str, RequestOutput]
    parts: dict[tuple[str, int], list[Any]] = field(default_factory=dict)  # of streams
    stats: dict[str, Any] = field(default_factory=dict)


def random_requests(seed: int, vocab: int) -> list[tuple[list[int], SamplingParams, bool]]:
    """(prompt, parameters, streamed) of a batch of 1 to 16 choices and more."""
    rng = random.Random(seed)
    requests = []
    for _ in range(rng.choice([1, 2, 5, 16])):
        period = [rng.randrange(vocab) for _ in range(rng.randrange(1, 6))]
        prompt = (period * 40)[: rng.randrange(1, 50)]
        changes: dict[str, Any] = {}
        if rng.random() < 0.5:
            changes |= {"temperature": 0.0}
        else:
            changes |= {"temperature": rng.choice([0.2, 1.0]), "top_p": rng.choice([0.7, 1.0])}
            if rng.random() < 0.5:
                changes["seed"] = rng.randrange(1000)
        if rng.random() < 0.3:
            changes |= {"repetition_penalty": 1.3, "presence_penalty": 0.5}
        if rng.random() < 0.3:
            changes["frequency_penalty"] = rng.choice([-0.3, 0.4])
        if rng.random() < 0.4:
            changes["logprobs"] = rng.randrange(4)
        if rng.random() < 0.3:
            changes["min_tokens"] = rng.randrange(8)
        if rng.random() < 0.3:
            changes["stop_token_ids"] = [rng.randrange(vocab) for _ in range(3)]
        if rng.random() < 0.3:
            changes["allowed_token_ids"] = sorted(rng.sample(range(vocab), vocab // 2))
        if rng.random() < 0.3:
            changes["logit_bias"] = {rng.randrange(vocab): 3.0, rng.randrange(vocab): -50.0}
        if rng.random() < 0.5:
            changes["stop"] = [bytes([rng.randrange(97, 123)]).decode() for _ in range(2)]
        if rng.random() < 0.4:
            changes["bad_words"] = ["ab", "!", "#$", "1", "23"]
        changes["n"] = rng.choice([1, 1, 1, 3])
        changes["max_tokens"] = max(rng.randrange(1, 40), changes.get("min_tokens", 1))
        requests.append((prompt, SamplingParams(**changes), rng.random() < 0.5))
    return requests


def run(
    requests: list[tuple[list[int], SamplingParams, bool]],
    settings: dict[str, Any],
    truth: dict[str, list[int]] | None = None,
    proposer: type[Fake] | None = None,
    speculative: dict[str, Any] | None = None,
) -> Run:
    """Run requests with drafts of `proposer`, of n-grams, or of the configuration `speculative`."""
    if truth is not None:
        speculative = SPECULATIVE
    engine = LLMEngine(make_config(seed=7, speculative_config=speculative, **settings))
    if proposer is not None:
        engine.core.speculator.proposer = proposer(truth, engine.model_info.vocab_size)
    if speculative is not None:
        engine.core.speculator.costs = NothingCosts()
    for index, (prompt, params, stream) in enumerate(requests):
        engine.submit(prompt, params, f"r{index}", stream=stream)
    result = Run({})
    while engine.has_unfinished():
        for part in engine.step():
            result.parts.setdefault((part.request_id, part.index), []).append(part)
            if part.output is not None:
                result.outputs[part.request_id] = part.output
    engine.core.scheduler.check_integrity()
    result.stats = engine.stats()
    engine.close()
    return result


def answers(outputs: dict[str, RequestOutput]) -> dict[str, Any]:
    """The parts of the outputs that must not change."""
    return {
        name: [
            (o.token_ids, o.text, o.finish_reason, o.stop_reason, o.logprobs, o.error)
            for o in output.outputs
        ]
        for name, output in outputs.items()
    }


def truth_of(plain: Run) -> dict[str, list[int]]:
    """Tokens of each sequence by request id."""
    found = {}
    for name, output in plain.outputs.items():
        for o in output.outputs:
            many = len(output.outputs) > 1
            found[f"{name}#{o.index}" if many else name] = [*output.prompt_token_ids, *o.token_ids]
    return found


def check_streams(result: Run, streamed: list[str]) -> None:
    for (name, index), parts in result.parts.items():
        if name in streamed:
            output = result.outputs[name].outputs[index]
            assert "".join(part.text for part in parts) == output.text
            assert [t for part in parts for t in part.token_ids] == output.token_ids
            logprobs = [entry for part in parts for entry in part.logprobs or ()]
            assert logprobs == (output.logprobs or [])


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
    assert wrong["spec_decode_num_drafts"] == 5  # in 14 steps: the intervals grow
    assert run(requests, {}).stats["spec_decode_mean_accepted_length"] == 0.0
