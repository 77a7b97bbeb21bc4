"""The scheduler alone and in an engine with a fake model: no starvation, no leak, no deadlock, and
outputs do not depend on the size of the pool."""

from __future__ import annotations

import pytest
from engine_fakes import (
    EOS,
    adapter_of,
    expected_tokens,
    greedy,
    make_engine,
    run_all,
    run_prompts,
)
from error_helpers import invalid_input
from hypothesis import given, settings
from hypothesis import strategies as st
from nightly import NIGHTLY
from scheduler_helpers import add, given_tokens, make_scheduler, step

from llaisys.common.errors import InvalidInputError
from llaisys.common.request import Request, RequestStatus
from llaisys.common.sampling import SamplingParams
from llaisys.common.types import StepOutput

# ---- failed steps ------------------------------------------------------------------------------


def test_released_sequences_of_a_failed_step_are_sent_again():
    """The worker may not have received the plan and would keep the rows."""
    scheduler = make_scheduler()
    first = add(scheduler, "a", 3, max_tokens=1)
    step(scheduler)
    second = add(scheduler, "b", 3)
    failed = scheduler.schedule()
    assert failed.released_seq_ids == [first.seq_id]
    scheduler.fail_step(failed.step_id, "too late")
    add(scheduler, "c", 3)
    assert set(scheduler.schedule().released_seq_ids) == {first.seq_id, second.seq_id}


def test_sequence_without_a_token_to_sample_ends_alone():
    scheduler = make_scheduler()
    good, bad = add(scheduler, "good", 3), add(scheduler, "bad", 3)
    plan = scheduler.schedule()
    output = StepOutput(plan.step_id, {good.seq_id: [7]}, failed={bad.seq_id: "no token left"})
    updates = {update.request_id: update for update in scheduler.update_from_output(output)}
    assert updates["bad"].status is RequestStatus.FINISHED_ERROR
    assert updates["bad"].error == "no token left" and updates["bad"].token_ids == []
    assert updates["good"].token_ids == [7] and not good.finished
    assert given_tokens(scheduler.schedule()) == {"good": 1}


# ---- all or none -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "prompts", "message"),
    [(["a", "b", "c"], [3, 3, 900], "900 tokens"), (["a", "b", "a"], [3, 3, 3], "in use")],
)
def test_requests_are_added_all_or_none(names, prompts, message):
    scheduler = make_scheduler()
    requests = [
        Request(name, [1] * size, SamplingParams())
        for name, size in zip(names, prompts, strict=True)
    ]
    with pytest.raises(InvalidInputError, match=message):
        scheduler.add(requests)
    assert not scheduler.has_unfinished() and scheduler.num_waiting == 0
    scheduler.add(requests[:2])
    assert scheduler.num_waiting == 2


# ---- one budget --------------------------------------------------------------------------------


def test_prompt_longer_than_the_budget_is_chunked():
    scheduler = make_scheduler(budget=10, max_num_seqs=2)
    add(scheduler, "a", 25)
    plans = [step(scheduler) for _ in range(4)]
    assert [given_tokens(plan)["a"] for plan in plans] == [10, 10, 5, 1]
    assert [plan.samples for plan in plans] == [[False], [False], [True], [True]]
    assert [plan.starts for plan in plans] == [[0], [10], [20], [25]]


def test_decoding_requests_get_their_token_before_any_prompt():
    scheduler = make_scheduler(budget=8, max_num_seqs=4)
    add(scheduler, "a", [1, 1])
    add(scheduler, "b", [2, 2])
    step(scheduler)
    add(scheduler, "long", list(range(100, 150)))
    for _ in range(5):
        plan = step(scheduler)
        counts = given_tokens(plan)
        assert (counts["a"], counts["b"], counts["long"]) == (1, 1, 6)
        assert plan.num_decode_tokens == 2 and plan.num_prefill_tokens == 6


def test_long_prompt_leaves_budget_for_a_short_one():
    scheduler = make_scheduler(budget=16, max_num_seqs=4, blocks=200)
    add(scheduler, "long", list(range(100, 250)))
    assert given_tokens(step(scheduler)) == {"long": 16}  # alone: everything
    add(scheduler, "short", [1, 2, 3, 4])
    assert given_tokens(step(scheduler)) == {"long": 12, "short": 4}


def test_several_long_prompts_leave_budget():
    scheduler = make_scheduler(budget=64, max_num_seqs=8, blocks=400)
    for index in range(3):
        add(scheduler, f"long{index}", [index, *range(100, 250)])
    add(scheduler, "short", [9, 9, 9])
    counts = given_tokens(step(scheduler))
    assert counts == {"long0": 30, "long1": 15, "long2": 16, "short": 3}


def test_no_more_than_max_num_seqs_run():
    scheduler = make_scheduler(max_num_seqs=3)
    for index in range(7):
        add(scheduler, str(index), [index, index], max_tokens=2)
    sizes = []
    while scheduler.has_unfinished():
        sizes.append(step(scheduler).batch_size)
        assert len(scheduler.running) <= 3
    assert max(sizes) == 3 and sum(sizes) == 14


def test_first_come_first_served():
    scheduler = make_scheduler(max_num_seqs=1)
    for name in "abc":
        add(scheduler, name, [ord(name)], max_tokens=1)
    assert [step(scheduler).request_ids for _ in range(3)] == [["a"], ["b"], ["c"]]


# ---- what can never fit ------------------------------------------------------------------------


def test_request_that_can_never_fit_is_rejected_with_the_numbers():
    scheduler = make_scheduler(blocks=4, size=4, limit=100)
    with invalid_input("prompt") as caught:
        add(scheduler, "a", 17)
    assert (caught.value.field, caught.value.code) == ("prompt", "context_length_exceeded")
    with invalid_input("max_tokens"):
        add(scheduler, "b", 10, max_tokens=10)
    with invalid_input("prompt"):
        add(scheduler, "c", [])
    with invalid_input("prompt"):
        add(make_scheduler(limit=8), "d", 8)
    assert not scheduler.has_unfinished()
    assert (
        add(scheduler, "e", 10, max_tokens=7).max_total_tokens == 17
    )  # the last one needs no slot
    assert add(scheduler, "f", 10, max_tokens=None).max_total_tokens == 17
    with invalid_input("request_id"):
        add(scheduler, "f", 1)


def test_max_tokens_is_capped_by_the_context():
    assert add(make_scheduler(limit=20), "a", 15, max_tokens=50).max_total_tokens == 20


# ---- preemption --------------------------------------------------------------------------------


def test_latest_arrival_is_preempted_and_resumes_first():
    scheduler = make_scheduler(blocks=4, size=4, max_num_seqs=4, enable_prefix_caching=False)
    old = add(scheduler, "old", [1, 2, 3, 4, 5, 6], max_tokens=9)
    young = add(scheduler, "young", [7, 8, 9], max_tokens=4)
    while young.status is not RequestStatus.PREEMPTED:
        plan = step(scheduler)
    assert "young" not in plan.request_ids and "old" in plan.request_ids
    assert young.num_computed_tokens == 0 and young.num_output_tokens > 0
    assert scheduler.queues.num_preemptions == 1
    late = add(scheduler, "late", [3], max_tokens=1)
    order = []
    while scheduler.has_unfinished():
        order += [n for n in step(scheduler).request_ids if n not in order]
    assert order.index("young") < order.index("late")
    assert old.num_output_tokens == 9 and young.num_output_tokens == 4 and late.finished
    scheduler.check_integrity()


def test_a_preempted_sequence_is_released_before_it_is_sent_again():
    scheduler = make_scheduler(blocks=4, size=4, max_num_seqs=4, enable_prefix_caching=False)
    add(scheduler, "old", [1, 2, 3, 4, 5, 6], max_tokens=9)
    young = add(scheduler, "young", [7, 8, 9], max_tokens=9)
    held: set[int] = set()
    while scheduler.has_unfinished():
        plan = step(scheduler)
        held -= set(plan.released_seq_ids)
        for seq in plan.new_seqs:
            assert seq.seq_id not in held
            held.add(seq.seq_id)
        assert set(plan.seq_ids) <= held
    assert young.num_preemptions >= 1


# ---- the prefix cache --------------------------------------------------------------------------


def test_requests_with_one_prefix_that_arrive_together_compute_it_once():
    prefix = [3 + i % 50 for i in range(64)]
    prompts = [[*prefix, 60 + i, 61, 62] for i in range(32)]
    params = greedy(3, ignore_eos=True)
    engine = make_engine(max_num_seqs=32, max_num_batched_tokens=64, num_blocks=400)
    outputs = run_prompts(engine, prompts, params)
    assert outputs == [expected_tokens(p, 3, stops=()) for p in prompts]
    computed = adapter_of(engine).num_tokens - 32 * 2  # without the decoding steps
    assert computed == 64 + 32 * 3
    without = make_engine(
        max_num_seqs=32, max_num_batched_tokens=64, num_blocks=1000, enable_prefix_caching=False
    )
    assert run_prompts(without, prompts, params) == outputs
    assert adapter_of(without).num_tokens > 10 * computed


def test_cached_tokens_are_reported():
    engine = make_engine(block_size=4)
    prompt = list(range(1, 15))
    first = run_all_one(engine, prompt)
    second = run_all_one(engine, prompt)
    assert first.usage.cached_tokens == 0 and second.usage.cached_tokens == 12
    assert first.token_ids == second.token_ids
    assert engine.stats()["prefix_cache_hit_rate"] == 12 / 28


def run_all_one(engine, prompt):
    name = engine.submit(prompt, greedy(2, ignore_eos=True))
    return run_all(engine)[name]


def test_choices_of_one_prompt_share_its_blocks():
    engine = make_engine(block_size=4, num_blocks=64)
    prompt = list(range(1, 42))
    name = engine.submit(prompt, SamplingParams(n=8, seed=5, max_tokens=4, ignore_eos=True))
    output = run_all(engine)[name]
    expected = [expected_tokens(prompt, 4, seed=5, choice=c, stops=()) for c in range(8)]
    assert [choice.token_ids for choice in output.outputs] == expected
    assert len({tuple(tokens) for tokens in expected}) > 1
    assert adapter_of(engine).num_tokens == 41 + 7 * 1 + 8 * 3
    assert output.usage.completion_tokens == 32


# ---- everything at once ------------------------------------------------------------------------

JOBS = st.lists(
    st.tuples(
        st.integers(0, 12),  # arrival, in steps
        st.lists(st.integers(1, 3), min_size=1, max_size=24),  # prompt: few tokens, many hits
        st.integers(1, 12),  # max_tokens
        st.one_of(st.none(), st.integers(0, 15)),  # cancelled this many steps after arrival
        st.integers(1, 3),  # choices
    ),
    min_size=1,
    max_size=16,
)


@settings(max_examples=200 if NIGHTLY else 80, deadline=None)
@given(
    jobs=JOBS,
    num_blocks=st.integers(9, 24),
    max_num_seqs=st.integers(1, 8),
    budget=st.integers(8, 40),
    caching=st.booleans(),
    min_match=st.sampled_from([0, 6]),
)
def test_random_load_on_a_tiny_pool(jobs, num_blocks, max_num_seqs, budget, caching, min_match):
    """Nothing starves, leaks or deadlocks, and a tiny pool changes no output."""
    engine = make_engine(
        num_blocks=num_blocks,
        block_size=4,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        enable_prefix_caching=caching,
        prefix_cache_min_match=min_match,
    )
    finished = {}
    cancelled = set()
    waiting = {f"job{i}": job for i, job in enumerate(jobs)}
    bound = 50 + sum(n * (len(p) + m) for _, p, m, _, n in jobs) * 8
    for now in range(bound):
        for name, (arrival, prompt, max_tokens, _, n) in list(waiting.items()):
            if arrival <= now:
                del waiting[name]
                params = SamplingParams(seed=11, max_tokens=max_tokens, n=n)
                engine.submit(prompt, params, request_id=name)
        for index, (arrival, _, _, after, _) in enumerate(jobs):
            if after is not None and arrival + after == now:
                for part in engine.cancel(f"job{index}"):
                    cancelled.add(f"job{index}")
                    if part.output is not None:
                        finished[part.request_id] = part.output
        for part in engine.step() if engine.has_unfinished() else ():
            if part.output is not None:
                finished[part.request_id] = part.output
        engine.core.scheduler.block_manager.check_integrity()
        if not waiting and not engine.has_unfinished():
            break
    assert len(finished) == len(jobs)
    for index, (_, prompt, max_tokens, _, n) in enumerate(jobs):
        output = finished[f"job{index}"]
        for choice in range(n):
            tokens = output.outputs[choice].token_ids
            whole = expected_tokens(prompt, max_tokens, seed=11, choice=choice)
            assert tokens == whole[: len(tokens)]
            if f"job{index}" not in cancelled:
                assert tokens == whole
                reason = "stop" if whole[-1] == EOS else "length"
                assert output.outputs[choice].finish_reason == reason
    assert engine.stats()["kv_blocks_used"] == 0
    engine.core.scheduler.check_integrity()


def test_sixty_four_requests_on_eight_blocks_equal_a_big_pool():
    prompts = [[1 + i % 7, 2, 3 + i % 5, 4, 5, 6][: 2 + i % 5] for i in range(64)]
    params = SamplingParams(seed=3, max_tokens=24, ignore_eos=True)
    small = make_engine(num_blocks=8, block_size=4, max_num_seqs=16)
    large = make_engine(num_blocks=2000, block_size=4, max_num_seqs=64)
    assert run_prompts(small, prompts, params) == run_prompts(large, prompts, params)
    assert small.stats()["num_preemptions"] > 0 and large.stats()["num_preemptions"] == 0


def test_penalties_survive_preemption():
    prompts = [[1 + i, 2, 3] for i in range(6)]
    params = greedy(20, ignore_eos=True, repetition_penalty=1.2)
    small = make_engine(num_blocks=8, block_size=4)
    large = make_engine(num_blocks=500, block_size=4)
    assert run_prompts(small, prompts, params) == run_prompts(large, prompts, params)
    assert small.stats()["num_preemptions"] > 0
    small.submit([1], greedy(1))
    run_all(small)
    assert adapter_of(small).histories == {}


def test_every_request_progresses_while_new_ones_arrive():
    engine = make_engine(num_blocks=16, max_num_seqs=4, max_num_batched_tokens=16)
    name = engine.submit([1] * 40, greedy(12, ignore_eos=True))
    for index in range(400):
        engine.submit([2 + index % 50, 3], greedy(2, ignore_eos=True))
        for part in engine.step():
            if part.request_id == name:
                return
    raise AssertionError("the long request starved")
