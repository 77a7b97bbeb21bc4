"""Drafts with asynchronous scheduling: steps without drafts are queued, those with drafts wait, and
the answers equal those of synchronous scheduling without drafts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from async_fakes import AsyncAdapter, async_adapter_of, make_async_engine
from draft_heads import head_tensors, write_head
from engine_fakes import VOCAB, expected_tokens, greedy, make_config, run_all
from model_files import tiny_config, write_hf_model
from proposers import AlwaysRight, AlwaysWrong, Fake, NoIdea, SometimesRight
from speculation import (
    MOCK_VOCAB,
    NATIVE,
    NothingCosts,
    answers,
    check_streams,
    make_speculator,
    random_requests,
    request_of,
    run,
    truth_of,
)

from llaisys.common.request import Request
from llaisys.common.types import SchedulerOutputs, StepOutput
from llaisys.engine.executor.uni import UniProcExecutor
from llaisys.engine.llm_engine import LLMEngine
from llaisys.engine.speculative.control import MAX_PAUSE
from llaisys.engine.speculative.proposer import HEAD_OBSERVED_STEPS, NgramProposer

ASYNC: dict[str, Any] = {"async_scheduling": "on"}
SETTINGS: dict[str, dict[str, Any]] = {
    "fake": {"max_num_seqs": 48},
    "native": {**NATIVE, "max_num_seqs": 8, "max_num_batched_tokens": 11, "num_blocks": 24},
}
HEAD_VOCAB = 96
HEAD_CONFIG = tiny_config(
    "mimo", hidden_size=32, num_hidden_layers=6, intermediate_size=40, vocab_size=HEAD_VOCAB,
    max_position_embeddings=256,
)  # fmt: skip


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[SchedulerOutputs]:
    """The plans that were queued behind another step."""
    found: list[SchedulerOutputs] = []
    execute = UniProcExecutor.execute_model

    def record(executor: UniProcExecutor, plan: SchedulerOutputs, queued: bool = False) -> None:
        if queued:
            assert not plan.draft_token_ids
            found.append(plan)
        execute(executor, plan, queued)

    monkeypatch.setattr(UniProcExecutor, "execute_model", record)
    return found


# ---- answers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "proposer",
    [None, AlwaysRight, AlwaysWrong, SometimesRight, NoIdea],
    ids=lambda p: p.__name__ if p else "ngram",
)
@pytest.mark.parametrize("name", SETTINGS)
def test_drafts_with_async_scheduling_change_no_answer(
    name: str, proposer: type[Fake] | None, launched: list[SchedulerOutputs]
):
    plain_settings = SETTINGS[name]
    settings = plain_settings | ASYNC
    if name == "fake":
        settings |= {"adapter_class": AsyncAdapter}
    drafts = 0
    for seed in range(2, 4):
        requests = random_requests(seed, VOCAB if name == "fake" else MOCK_VOCAB)
        plain = run(requests, plain_settings)
        drafted = run(requests, settings, truth_of(plain), proposer)
        assert answers(drafted.outputs) == answers(plain.outputs)
        check_streams(drafted, [f"r{i}" for i, request in enumerate(requests) if request[2]])
        drafts += drafted.stats["spec_decode_num_draft_tokens"]
    assert launched
    if proposer is not None:
        assert bool(drafts) == (proposer is not NoIdea)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model and a random head."""
    path = tmp_path_factory.mktemp("ahead")
    write_hf_model(path / "model", HEAD_CONFIG, tokenizer=False)
    head = write_head(
        path / "eagle",
        {**HEAD_CONFIG, "model_type": "llama"},
        head_tensors("eagle", HEAD_CONFIG),
    )
    return {"model": path / "model", "eagle": head}


@pytest.mark.parametrize("method", ["eagle", "draft_model"])
def test_draft_weights_follow_unobserved_steps(
    method: str, files: dict[str, Path], launched: list[SchedulerOutputs]
):
    """Long answers, so that pauses allow asynchronous scheduling; then short ones."""
    settings = {"model": str(files["model"]), "adapter_class": None, "max_num_seqs": 4}
    drafts = {"method": method, "model": str(files["eagle"]), "num_speculative_tokens": 3}
    drafts["prompt_lookup_max"] = 64  # no n-gram drafts
    if method == "draft_model":
        drafts["model"] = str(files["model"])
    requests = [([1, 2, 3], greedy(150, ignore_eos=True), False)]
    requests += [([4 + i] * 5, greedy(9 + i, ignore_eos=True), False) for i in range(3)]
    plain = run(requests, settings)
    drafted = run(requests, settings | ASYNC, speculative={**drafts, "disable_by_batch_size": 9})
    assert answers(drafted.outputs) == answers(plain.outputs)
    assert drafted.stats["worker_errors"] == 0
    assert drafted.stats["spec_decode_num_draft_tokens"] > 9
    if method == "eagle":  # steps that the head observes are not queued
        assert launched and all(not plan.num_prefill_tokens for plan in launched)


def test_draft_head_releases_sequences_of_unobserved_steps(files: dict[str, Path]):
    drafts = {"method": "eagle", "model": str(files["eagle"]), "disable_by_batch_size": 2}
    settings = {"model": str(files["model"]), "adapter_class": None, **ASYNC}
    engine = LLMEngine(make_config(seed=7, speculative_config=drafts, **settings))
    for count in (1, 3, 1):  # observed, too many, observed
        for index in range(count):
            engine.submit([index + 1] * 6, greedy(12, ignore_eos=True))
        run_all(engine)
    head = engine.core.executor.worker.drafter  # type: ignore[attr-defined]
    head.tables.check_integrity()
    assert len(head.tracks) <= 1  # the last one, not yet released by a plan
    engine.close()


# ---- which steps wait ----------------------------------------------------------------------------


def steps_of(engine: LLMEngine, prompt: list[int], count: int, proposer: Any) -> tuple[int, int]:
    """Return (steps, queued steps) of one answer."""
    engine.core.speculator.proposer = proposer
    engine.core.speculator.costs = NothingCosts()
    engine.submit(prompt, greedy(count, ignore_eos=True), "r")
    output = run_all(engine)["r"]
    assert output.token_ids == expected_tokens(prompt, count, stops=())
    return engine.stats()["num_steps"], async_adapter_of(engine).num_launched


def test_request_without_accepted_drafts_uses_async_scheduling():
    engine = make_async_engine(speculative_config={})
    steps, launched = steps_of(engine, [1, 2, 3], 60, NgramProposer(2, 4))
    assert steps == launched == 60


def test_steps_wait_for_drafts_while_accepted():
    prompt, drafts = [1, 2, 3], {"num_speculative_tokens": 4}
    truth = {"r": [*prompt, *expected_tokens(prompt, 60, stops=())]}
    engine = make_async_engine(speculative_config=drafts)
    steps, launched = steps_of(engine, prompt, 60, AlwaysRight(truth, VOCAB))
    assert launched == 1 and steps < 20  # the prompt's own
    engine = make_async_engine(speculative_config=drafts)
    steps, launched = steps_of(engine, prompt, 60, AlwaysWrong(truth, VOCAB))
    assert steps == 60 and 50 < launched < 60


def test_step_with_drafts_is_launched_before_the_previous_result_is_returned(
    monkeypatch: pytest.MonkeyPatch,
):
    prompts = {"r": [1, 2, 3], "s": [7, 8]}
    truth = {n: [*p, *expected_tokens(p, 40, stops=())] for n, p in prompts.items()}
    engine = make_async_engine(speculative_config={"num_speculative_tokens": 4})
    engine.core.speculator.proposer = AlwaysRight(truth, VOCAB)
    engine.core.speculator.costs = NothingCosts()
    for name, prompt in prompts.items():
        engine.submit(prompt, greedy(40, ignore_eos=True), name, stream=True)
    received: dict[str, list[int]] = {"r": [], "s": []}
    plans: list[SchedulerOutputs] = []
    execute = engine.core.executor.execute_model

    def record(plan: SchedulerOutputs, queued: bool = False) -> None:
        plans.append(plan)
        execute(plan, queued)

    monkeypatch.setattr(engine.core.executor, "execute_model", record)
    is_cancelled = False
    while engine.has_unfinished():
        outputs = engine.step()
        for output in outputs:
            received[output.request_id] += output.token_ids
        if not is_cancelled and any(len(output.token_ids) > 1 for output in outputs):
            assert engine.debug_state()["steps_in_flight"] == 1
            assert set(plans[-1].draft_token_ids) == {0, 1}
            engine.cancel("r")  # the other request is unaffected
            is_cancelled = True
    assert 1 < len(received["r"]) < 20 and received["r"] == truth["r"][3 : 3 + len(received["r"])]
    assert received["s"] == truth["s"][2:]
    engine.core.scheduler.check_integrity()


def test_ngram_expects_a_draft_after_a_right_prediction():
    proposer = NgramProposer(2, 4)
    request = request_of([1, 2, 3, 4, 5, 1])
    seen = []
    for token in (2, 3, 4, 9, 1, 2, 8, 8):
        seen.append(proposer.expects_draft(request))
        request.token_ids.append(token)
    #  1      2: guess 3  3: it came   4: and again  9      1      2: guess 3  8: another came
    assert seen == [False, False, True, True, False, False, False, False]
    assert not proposer.expects_draft(request_of([7], 1))


class Foreseeing(NgramProposer):
    """Expects a draft and never has one."""

    def expects_draft(self, request: Request) -> bool:
        return True

    def propose(self, requests: Sequence[Request], counts: Sequence[int]) -> list[Sequence[int]]:
        return [()] * len(requests)


def test_waiting_without_a_draft_counts_as_a_rejected_draft():
    speculator = make_speculator()
    speculator.proposer = Foreseeing(2, 4)
    request = request_of([1, 2, 3])
    speculator.propose([request])
    waited = 0
    for _ in range(300):
        request.num_computed_tokens = request.num_tokens
        if speculator.should_wait([request]):
            waited += 1
            request.num_computed_tokens -= 1
            speculator.propose([request])
    assert 5 < waited < 25
    assert speculator.stats.num_drafts == 0


def test_no_step_waits_for_unlikely_drafts():
    speculator = make_speculator(disable_by_batch_size=3)
    speculator.proposer = Foreseeing(2, 4)
    request, second, third = (request_of([1, 2, 3], seq_id) for seq_id in range(3))
    for each in (request, second, third):
        each.num_computed_tokens = 3
    assert speculator.should_wait([request])
    assert not speculator.should_wait([request, second, third])  # too many
    assert not speculator.should_wait([request, second])  # two have not been timed
    request.num_computed_tokens = 1
    assert not speculator.should_wait([request])  # a prompt
    request.num_computed_tokens, request.max_total_tokens = 3, 5
    assert not speculator.should_wait([request])  # it ends before a draft would


def test_draft_head_observes_the_steps_before_its_drafts():
    speculator = make_speculator()
    plan = SchedulerOutputs(0, [0], ["r"])
    assert not speculator.needs_sync(plan)  # n-grams need no hidden states
    speculator.proposer.num_observed_steps = HEAD_OBSERVED_STEPS
    assert speculator.needs_sync(plan)  # a new sequence
    request = request_of([1, 2, 3])
    speculator.propose([request])
    course = speculator.trackers[0]
    course.pause = MAX_PAUSE
    request.num_computed_tokens = 3
    unseen = 0
    while not speculator.needs_sync(plan):
        assert not speculator.should_wait([request])
        unseen += 1
    assert unseen == MAX_PAUSE - HEAD_OBSERVED_STEPS
    assert not speculator.needs_sync(SchedulerOutputs(0, list(range(32)), ["r"] * 32))


def test_step_with_unknown_duration_is_not_timed():
    speculator = make_speculator()
    plan = SchedulerOutputs(0, [0, 1], ["r", "s"], num_decode_tokens=2)
    speculator.observe(plan, StepOutput(0, {0: [1], 1: [1]}), None)
    assert speculator.costs.needs_plain_step(2)
    speculator.observe(plan, StepOutput(0, {0: [1], 1: [1]}), 0.01)
    assert not speculator.costs.needs_plain_step(2)
