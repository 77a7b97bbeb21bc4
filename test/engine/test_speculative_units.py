"""Units of speculative decoding: proposers, costs, draft lengths."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from scheduler_helpers import add, make_scheduler, step
from speculation import make_speculator, request_of

from llaisys.common.errors import InvalidInputError
from llaisys.common.request import Request
from llaisys.common.sampling import SamplingParams
from llaisys.common.types import NewSequence, SchedulerOutputs, StepOutput
from llaisys.engine.config import EngineConfig, SpeculativeConfig
from llaisys.engine.speculative.control import MAX_PAUSE, Speculator, best_length
from llaisys.engine.speculative.costs import REFRESH, DraftCosts
from llaisys.engine.speculative.proposer import MAX_CANDIDATES, NgramProposer
from llaisys.engine.worker.sampling_state import SamplingState
from llaisys.engine.worker.step_buffers import SamplingBatch

# ---- drafts from the request's own tokens --------------------------------------------------------


def naive_draft(tokens: list[int], shortest: int, longest: int, count: int) -> list[int]:
    """The reference: examines every earlier index, the latest first."""
    places = []
    for end in range(len(tokens) - 1, shortest - 1, -1):
        length = 0
        while length < min(longest, end) and tokens[end - 1 - length] == tokens[-1 - length]:
            length += 1
        if length >= shortest:
            places.append((length, end))
    places = places[:MAX_CANDIDATES]
    if not places:
        return []
    longest_found = max(length for length, _ in places)
    end = next(end for length, end in places if length == longest_found)
    draft: list[int] = []
    while len(draft) < count:  # the drafts themselves follow the last token
        draft.append((tokens + draft)[end + len(draft)])
    return draft


@pytest.mark.parametrize(("shortest", "longest"), [(1, 1), (1, 3), (2, 4), (3, 3)])
def test_drafts_are_what_followed_the_same_tokens(shortest: int, longest: int):
    rng = random.Random(shortest)
    for alphabet in (1, 2, 5, 40):
        proposer = NgramProposer(shortest, longest)
        request = request_of([rng.randrange(alphabet) for _ in range(rng.randrange(1, 30))])
        found = 0
        for _ in range(120):
            count = rng.randrange(1, 6)
            expected = naive_draft(request.token_ids, shortest, longest, count)
            assert list(proposer.propose([request], [count])[0]) == expected
            found += bool(expected)
            request.token_ids += [rng.randrange(alphabet) for _ in range(rng.randrange(3))]
        assert found or alphabet == 40


def test_ngram_tables_are_separate_and_released():
    proposer = NgramProposer(2, 4)
    first, second = request_of([1, 2, 3, 1, 2], 0), request_of([1, 2], 1)
    assert [list(d) for d in proposer.propose([first, second], [5, 2])] == [[3, 1, 2, 3, 1], []]
    proposer.release(0)
    proposer.release(77)
    assert list(proposer._tables) == [1]


# ---- how many ------------------------------------------------------------------------------------


def test_draft_length_maximises_tokens_per_second():
    assert best_length(1.0, 0.0, 6) == 6
    assert best_length(1.0, 0.9, 6) == 6  # every draft token pays
    assert best_length(0.9, 0.95, 6) == 0
    assert best_length(0.0, 0.1, 6) == 0
    for rate in (0.3, 0.6, 0.8, 0.95):
        for price in (0.01, 0.1, 0.3, 0.6):
            speeds = [sum(rate**i for i in range(n + 1)) / (1 + n * price) for n in range(9)]
            assert best_length(rate, price, 8) == speeds.index(max(speeds))


def test_price_is_measured_from_steps():
    costs = DraftCosts()
    assert costs.needs_plain_step(1)
    costs.add_step(1, 0, 0.010)
    assert not costs.needs_plain_step(1) and costs.needs_plain_step(4)
    before = costs.price(1)
    for _ in range(60):
        costs.add_step(1, 4, 0.012)  # each draft adds 5 %
    assert costs.price(1) == pytest.approx(0.05, rel=0.01) and costs.price(1) < before
    costs.add_step(4, 0, 0.010)
    costs.add_step(4, 4, 9.0)  # one outlier has little effect
    assert costs.price(4) < 0.4
    for _ in range(60):
        costs.add_step(4, 4, 0.020)  # as much as a token of each of the four
    assert costs.price(4) == pytest.approx(1.0, rel=0.01)
    costs.add_step(1, 0, 9.0)  # other load
    assert costs.price(1) == pytest.approx(0.05, rel=0.02)
    for _ in range(REFRESH):
        costs.add_step(1, 4, 0.012)
    assert costs.needs_plain_step(1)


def test_unmeasured_batch_size_uses_the_nearest_price():
    costs = DraftCosts()
    costs.add_step(2, 0, 0.010)
    assert costs.price(2) == costs.price(9) == 0.2  # not measured
    for _ in range(80):
        costs.add_step(2, 2, 0.012)  # 1 ms a draft
    costs.add_step(8, 0, 0.016)
    assert costs.price(8) == pytest.approx(8 * 0.001 / 0.016, rel=0.01)
    costs.add_step(8, 8, 0.032)  # 2 ms a draft, in the one step that was seen
    assert costs.price(8) == pytest.approx(8 * 0.001 / 0.016, rel=0.01)
    for _ in range(2):
        costs.add_step(8, 8, 0.032)
    assert costs.price(8) == pytest.approx(8 * 0.002 / 0.016, rel=0.01)
    costs.add_step(7, 0, 0.014)
    assert costs.price(7) == pytest.approx(7 * 0.002 / 0.014, rel=0.01)


def test_other_load_does_not_raise_the_draft_price():
    costs = DraftCosts()
    costs.add_step(1, 0, 0.010)
    for index in range(40):
        costs.add_step(1, 2, 0.030 if index % 3 == 0 else 0.012)  # now and then
    assert costs.price(1) == pytest.approx(0.1) and not costs.needs_plain_step(1)
    while not costs.needs_plain_step(1):
        costs.add_step(1, 2, 0.024)  # from now on
    costs.add_step(1, 0, 0.020)
    for _ in range(8):
        costs.add_step(1, 2, 0.024)
    assert costs.price(1) == pytest.approx(0.1) and not costs.needs_plain_step(1)
    costs.add_step(1, 2, 0.012)  # and is gone
    assert costs.needs_plain_step(1)
    costs.add_step(1, 0, 0.010)
    costs.add_step(1, 2, 0.012)
    assert costs.price(1) == pytest.approx(0.1, rel=0.01) and not costs.needs_plain_step(1)


def test_higher_price_is_accepted_when_plain_steps_are_unchanged():
    costs = DraftCosts()
    costs.add_step(1, 0, 0.010)
    for drafts, seconds in ((4, 0.012), (4, 0.030)):
        for _ in range(20):
            costs.add_step(1, drafts, seconds)
            if costs.needs_plain_step(1):
                costs.add_step(1, 0, 0.010)
        assert costs.price(1) == pytest.approx((seconds / 0.010 - 1) / drafts)


def verified(speculator: Speculator, request: Request, accepted: int) -> None:
    """Observe a step with this many accepted drafts; its time is proportional to its tokens."""
    draft = request.draft_token_ids
    plan = SchedulerOutputs(0, [request.seq_id], ["r"], num_decode_tokens=1 + len(draft))
    plan.draft_token_ids = {request.seq_id: draft} if draft else {}
    output = StepOutput(0, {request.seq_id: [1] * (accepted + 1)})
    speculator.observe(plan, output, 0.01 + 0.002 * len(draft))


def test_request_with_rejected_drafts_gets_few_drafts():
    speculator = make_speculator(num_speculative_tokens=4)
    request = request_of([1, 2, 3])
    drafted = 0
    for _ in range(1000):
        request.draft_token_ids = []
        speculator.propose([request])
        drafted += len(request.draft_token_ids)
        verified(speculator, request, 0)
    assert 10 < drafted < 1000 / MAX_PAUSE + 35
    for _ in range(MAX_PAUSE + 20):  # and comes back when it can
        request.draft_token_ids = []
        speculator.propose([request])
        verified(speculator, request, len(request.draft_token_ids))
    assert len(request.draft_token_ids) == 4


def test_a_full_batch_and_prompts_get_no_drafts():
    speculator = make_speculator(disable_by_batch_size=4)
    requests = [request_of([1, 2, 3], seq_id) for seq_id in range(4)]
    speculator.costs.add_step(3, 0, 0.01)
    speculator.propose(requests)
    assert not any(request.draft_token_ids for request in requests)
    requests[0].num_computed_tokens = 0  # a prompt
    requests[1].max_total_tokens = 4  # the next token is the last
    speculator.propose(requests[:3])
    assert [bool(request.draft_token_ids) for request in requests] == [False, False, True, False]


def test_finished_sequences_are_released():
    speculator = make_speculator()
    request = request_of([1, 2, 3], 5)
    speculator.propose([request])
    assert list(speculator.trackers) == [5]
    speculator.observe(SchedulerOutputs(0, released_seq_ids=[5, 6]), StepOutput(0, {}), 0.01)
    assert not speculator.trackers


# ---- drafts in a plan ----------------------------------------------------------------------------


def test_drafts_preempt_no_request():
    scheduler = make_scheduler(blocks=5, size=4, budget=32)
    first = add(scheduler, "a", [1, 2, 3, 4, 5, 6, 7], max_tokens=9)
    second = add(scheduler, "b", [8, 9, 10, 11, 12, 13, 14], max_tokens=9)
    step(scheduler)
    first.draft_token_ids = [5] * 6
    plan = scheduler.schedule()
    assert plan.counts == [1, 1] and scheduler.queues.num_preemptions == 0
    assert not plan.draft_token_ids and second in scheduler.running


# ---- the option ----------------------------------------------------------------------------------


def test_the_option_is_checked_field_by_field():
    assert EngineConfig().speculative is None
    default = SpeculativeConfig(disable_by_batch_size=32)
    assert EngineConfig(speculative_config={}).speculative == default
    given = {"method": "ngram", "num_speculative_tokens": 7, "prompt_lookup_max": 5}
    config = EngineConfig.of(speculative_config=given)
    assert config.speculative == replace(default, num_speculative_tokens=7, prompt_lookup_max=5)
    for bad, message in (
        ({"method": "medusa"}, "method is 'medusa'"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens is 0"),
        ({"prompt_lookup_min": 5, "prompt_lookup_max": 4}, "prompt_lookup_min is 5"),
        ({"k": 4}, "unknown field 'k' of SpeculativeConfig"),
        ("ngram", "speculative_config is 'ngram'"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            EngineConfig(speculative_config=bad)


# ---- sampling after drafts -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "device", "batch"),
    [
        ({"method": "ngram"}, "cpu", 32),
        ({"method": "eagle"}, "cpu", 4),
        ({"method": "eagle", "disable_by_batch_size": 32}, "cpu", 32),
        ({"method": "draft_model", "model": "small"}, "cuda", 32),
    ],
)
def test_cpu_draft_models_have_a_small_default_batch_limit(given, device, batch):
    config = EngineConfig(device=device, speculative_config=given).speculative
    assert config is not None and config.disable_by_batch_size == batch


def test_expand_drafts_orders_rows_by_sequence():
    rows, ends, tokens, drafts = (np.array(x) for x in ([4, 1, 7], [9, 3, 5], [0, 2, 3], [1, 0, 2]))
    every = SamplingBatch(rows, ends, tokens, drafts).expand_drafts()
    assert every.rows.tolist() == [4, 4, 1, 7, 7, 7]
    assert every.ends.tolist() == [9, 10, 3, 5, 6, 7]
    assert every.tokens.tolist() == [0, 1, 2, 3, 4, 5]
    assert every.drafts is not None and every.drafts.tolist() == [1, 0, 0, 2, 1, 0]


def test_only_greedy_rows_verify_drafts_in_one_call():
    sampling = SamplingState(8, 64)

    def hold(row: int, **changes: Any) -> None:
        params = SamplingParams(**{"temperature": 0.0, **changes})
        sampling.add(row, NewSequence(row, "r", [1, 2], 2, params, 1, 0, frozenset({5}), ()))

    hold(0)
    hold(1, logit_bias={3: 1.0})
    assert sampling.are_greedy(np.array([0, 1]))
    for changes in (
        {"temperature": 0.5},
        {"repetition_penalty": 1.3},
        {"logprobs": 1},
        {"min_tokens": 3, "max_tokens": 9},
    ):
        hold(2, **changes)
        assert not sampling.are_greedy(np.array([0, 2])) and sampling.are_greedy(np.array([0, 1]))
        sampling.release(2)


# ---- a head behind the own tokens ----------------------------------------------------------------


class Nines(NgramProposer):
    """A fake head: proposes nines and records its requests."""

    num_observed_steps = 16
    limits_length = True
    asked: tuple[int, ...] = ()

    def propose(self, requests: Any, counts: Any) -> list[Any]:
        self.asked = tuple(request.seq_id for request in requests)
        return [[9] * count for count in counts]


def make_head_speculator(longest: int) -> tuple[Speculator, Nines]:
    """The head drafts where the n-grams do not."""
    head = Nines(2, 4)
    config = SpeculativeConfig(disable_by_batch_size=32)
    speculator = Speculator(config, head, 64, NgramProposer(longest, longest))
    for count in (1, 2):
        speculator.costs.add_step(count, 0, 0.01)
    return speculator, head


def test_ngram_drafts_precede_head_drafts_while_accepted():
    speculator, head = make_head_speculator(3)
    text = list(range(10, 40))
    copying, fresh = request_of([*text, 7, *text[:3]], 0), request_of([1, 2, 3], 1)
    known = [*copying.token_ids, *text[3:], 7]
    lengths = []
    while copying.num_tokens < 55:
        speculator.propose([copying, fresh])
        assert set(fresh.draft_token_ids) == {9} and head.asked == (1,)
        draft, end = copying.draft_token_ids, copying.num_tokens
        assert draft == known[end : end + len(draft)]
        lengths.append(len(draft))
        plan = SchedulerOutputs(0, [0], ["r"], draft_token_ids={0: draft})
        speculator.observe(plan, StepOutput(0, {0: [*draft, 1]}), None)
        copying.token_ids = known[: end + len(draft) + 1]
        copying.num_computed_tokens = copying.num_tokens - 1
        copying.draft_token_ids, fresh.draft_token_ids = [], []
    assert lengths == sorted(lengths) and 1 < lengths[0] < lengths[-1]


def test_rejected_ngram_drafts_leave_the_next_steps_to_the_head():
    speculator, _ = make_head_speculator(2)
    request, own = request_of([1, 2, 3, 1, 2]), []
    for index in range(200):
        speculator.propose([request])
        draft, request.draft_token_ids = request.draft_token_ids, []
        if set(draft) != {9}:
            own.append(index)
            plan = SchedulerOutputs(0, [0], ["r"], draft_token_ids={0: draft})
            speculator.observe(plan, StepOutput(0, {0: [5]}), None)
            request.token_ids.append(5)  # not what it was
        request.token_ids += [1, 2]
        request.num_computed_tokens = request.num_tokens - 1
    assert [later - earlier for earlier, later in pairwise(own)] == [2, 4, 8, 16, 32, 64, 64]
    speculator.observe(SchedulerOutputs(0, released_seq_ids=[0]), StepOutput(0, {}), None)
    assert not speculator._first_trackers and not speculator._first._tables
