"""Late results, results of several tokens, rejected drafts: no output changes, nothing leaks."""

from __future__ import annotations

from collections import deque

from engine_fakes import EOS, expected_tokens, greedy, make_engine
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_helpers import add, answer, make_scheduler, preempt_latest, step

from llaisys.common.request import Request, RequestStatus
from llaisys.common.sampling import SamplingParams
from llaisys.common.types import SchedulerOutputs, StepOutput, TokenLogprobs
from llaisys.engine.scheduler import RequestScheduler

# ---- late results ------------------------------------------------------------------------------


def test_results_may_come_one_step_late():
    scheduler = make_scheduler(budget=8, max_num_seqs=4)
    first = add(scheduler, "a", [1, 2], max_tokens=3)
    plan0 = scheduler.schedule()
    second = add(scheduler, "b", [5, 6, 7], max_tokens=2)
    plan1 = scheduler.schedule()
    assert plan0.request_ids == ["a"] and plan1.request_ids == ["b"]  # a's token is in flight
    assert scheduler.schedule().batch_size == 0
    scheduler.update_from_output(answer(plan0, 3))
    plan2 = scheduler.schedule()
    assert plan2.request_ids == ["a"]
    scheduler.update_from_output(answer(plan1, 4))
    scheduler.update_from_output(answer(plan2, 5))
    assert first.output_token_ids == [3, 5] and second.output_token_ids == [4]
    while scheduler.has_unfinished():
        step(scheduler)
    scheduler.check_integrity()


def test_late_result_of_a_cancelled_request_is_discarded():
    scheduler = make_scheduler()
    request = add(scheduler, "a", [1, 2])
    plan = scheduler.schedule()
    assert scheduler.finish("a", RequestStatus.FINISHED_ABORTED) is not None
    assert scheduler.update_from_output(answer(plan)) == []
    assert request.output_token_ids == []
    scheduler.check_integrity()


def test_late_result_of_a_preempted_request_is_applied():
    scheduler = make_scheduler(blocks=4, size=4, enable_prefix_caching=False)
    old = add(scheduler, "old", [1] * 8, max_tokens=9)
    young = add(scheduler, "young", [2] * 3, max_tokens=5)
    scheduler.update_from_output(answer(scheduler.schedule(), 1))
    for _ in range(3):  # old leads by one block, young's last result is in flight
        plan = scheduler.schedule()
        scheduler.update_from_output(answer(plan, 1))
    out = scheduler.schedule()
    assert set(out.request_ids) == {"old", "young"} or young.num_preemptions
    preempt_latest(scheduler)
    before = young.num_output_tokens
    scheduler.update_from_output(answer(out, 9))
    assert young.num_output_tokens == before + ("young" in out.request_ids)
    while scheduler.has_unfinished():
        step(scheduler)
    assert old.num_output_tokens == 9 and young.num_output_tokens == 5
    scheduler.check_integrity()


def test_repeated_token_is_counted_once():
    scheduler = make_scheduler()
    request = add(scheduler, "a", [1, 2, 3], max_tokens=3)
    first = scheduler.schedule()
    preempt_latest(scheduler)
    again = scheduler.schedule()  # computes the same tokens, the first result is in flight
    assert again.request_ids == ["a"] and again.samples == [True]
    assert scheduler.update_from_output(answer(first, 5)) == []  # of the preempted run
    scheduler.update_from_output(answer(again, 6))
    assert request.output_token_ids == [6]


def test_late_result_does_not_commit_blocks_after_a_preemption():
    scheduler = make_scheduler(budget=4, max_num_seqs=4)
    add(scheduler, "a", list(range(12)))
    first = scheduler.schedule()
    preempt_latest(scheduler)
    scheduler.schedule()
    scheduler.update_from_output(answer(first))
    reference = Request("reference", list(range(12)), SamplingParams())
    match = scheduler.block_manager.match_prefix(reference)
    assert match.pending and match.num_tokens == 0


def test_preempted_request_is_removed_from_the_batch():
    scheduler = make_scheduler(blocks=4, size=4, max_num_seqs=4, enable_prefix_caching=False)
    old = add(scheduler, "old", [1, 2, 3, 4], max_tokens=8)
    young = add(scheduler, "young", [5, 6, 7, 8, 9, 10, 11, 12], max_tokens=8)
    step(scheduler)
    spare = add(scheduler, "spare", [1, 2, 3], max_tokens=8)
    scheduler.running.reverse()  # admitted in another order than they arrived
    plan = scheduler.schedule()
    assert plan.request_ids == ["old"] and set(plan.new_blocks) == {old.seq_id}
    assert plan.num_decode_tokens == 1 and plan.released_seq_ids == [young.seq_id]
    assert young.status is RequestStatus.PREEMPTED and spare.status is RequestStatus.WAITING


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=14), min_size=1, max_size=10),
    num_blocks=st.integers(7, 14),
    lateness=st.lists(st.integers(0, 3), min_size=1, max_size=20),
    cancelled=st.dictionaries(st.integers(0, 9), st.integers(0, 20), max_size=3),
    max_in_flight_tokens=st.integers(0, 3),
)
def test_late_results_change_no_output(
    prompts, num_blocks, lateness, cancelled, max_in_flight_tokens
):
    """A real worker whose results are delayed up to three steps; requests wait for their token or
    are scheduled behind it and discard the surplus."""
    core = make_engine(num_blocks=num_blocks, max_num_seqs=4, max_num_batched_tokens=12).core
    core.scheduler.builder.max_in_flight_tokens = max_in_flight_tokens
    requests = [
        Request(str(i), prompt, greedy(10).with_defaults(None), stop_token_ids=frozenset({EOS}))
        for i, prompt in enumerate(prompts)
    ]
    for request in requests:
        core.add_requests([request])
    results: deque[StepOutput] = deque()
    for now in range(10_000):
        if not core.has_unfinished():
            break
        for index, when in cancelled.items():
            if when == now:
                core.scheduler.finish(str(index), RequestStatus.FINISHED_ABORTED)
        plan = core.scheduler.schedule()
        if plan.batch_size:
            core.executor.execute_model(plan)
            results.append(core.executor.sample_tokens(plan.step_id))
        while results and (len(results) > lateness[now % len(lateness)] or not plan.batch_size):
            core.scheduler.update_from_output(results.popleft())
    for request in requests:
        expected = expected_tokens(request.prompt_token_ids, 10)
        assert request.finished
        if request.status is RequestStatus.FINISHED_ABORTED:
            expected = expected[: request.num_output_tokens]
        assert request.output_token_ids == expected
    core.scheduler.check_integrity()


def test_request_is_scheduled_behind_its_token_in_flight():
    scheduler = make_scheduler(max_in_flight_tokens=1)
    request = add(scheduler, "a", [1, 2], max_tokens=3)
    plans = [scheduler.schedule(), scheduler.schedule()]
    assert [(p.starts, p.counts, p.samples) for p in plans] == [
        ([0], [2], [True]),
        ([2], [1], [True]),
    ]
    assert scheduler.schedule().batch_size == 0  # one token in flight, not two
    scheduler.update_from_output(answer(plans[0], 5))
    last = scheduler.schedule()  # samples the third token, which is not computed
    assert last.starts == [3] and scheduler.schedule().batch_size == 0
    scheduler.update_from_output(answer(plans[1], 6))
    scheduler.update_from_output(answer(last, 7))
    assert request.output_token_ids == [5, 6, 7] and request.finished
    scheduler.check_integrity()


def test_surplus_of_a_stopped_request_is_discarded():
    scheduler = make_scheduler(max_in_flight_tokens=1)
    request = Request("a", [1, 2], SamplingParams(), stop_token_ids=frozenset({9}))
    scheduler.add([request])
    first, second = scheduler.schedule(), scheduler.schedule()
    scheduler.update_from_output(answer(first, 9))
    assert request.finished
    assert scheduler.update_from_output(answer(second, 5)) == []
    assert request.output_token_ids == [9]
    scheduler.check_integrity()


# ---- drafts ------------------------------------------------------------------------------------


def drafted(scheduler: RequestScheduler, request: Request, draft: list[int]) -> SchedulerOutputs:
    request.draft_token_ids = draft
    plan = scheduler.schedule()
    assert request.draft_token_ids == []
    return plan


def test_drafts_are_verified_with_the_token_before_them():
    scheduler = make_scheduler(size=4)
    request = add(scheduler, "a", [1, 2, 3], max_tokens=20)
    step(scheduler)  # samples token 3
    plan = drafted(scheduler, request, [8, 9])
    assert (plan.starts, plan.counts, plan.samples) == ([3], [3], [True])
    assert plan.draft_token_ids == {request.seq_id: [8, 9]} and plan.num_decode_tokens == 3
    assert len(plan.new_blocks[request.seq_id]) == 1  # tokens 4 and 5 begin a block
    updates = scheduler.update_from_output(StepOutput(plan.step_id, {request.seq_id: [8, 9, 4]}))
    assert updates[0].token_ids == [8, 9, 4] and request.num_computed_tokens == 6
    assert scheduler.schedule().starts == [6]


def test_computed_tokens_of_rejected_drafts_are_rolled_back():
    scheduler = make_scheduler(size=4)
    request = add(scheduler, "a", [1, 2, 3], max_tokens=20)
    step(scheduler)
    plan = drafted(scheduler, request, [8, 9, 8, 9])
    scheduler.update_from_output(StepOutput(plan.step_id, {request.seq_id: [8, 5]}))
    assert request.output_token_ids == [7, 8, 5] and request.num_computed_tokens == 5
    again = drafted(scheduler, request, [6])
    assert (again.starts, again.counts) == ([5], [2])
    scheduler.update_from_output(StepOutput(again.step_id, {request.seq_id: [6, 6]}))
    while scheduler.has_unfinished():
        step(scheduler)
    scheduler.check_integrity()
    reference = Request("reference", [*request.token_ids], SamplingParams())
    assert (
        scheduler.block_manager.match_prefix(reference).num_tokens == 20
    )  # no rejected token is cached


def test_a_stop_inside_accepted_drafts_ends_there():
    scheduler = make_scheduler()
    request = Request("a", [1, 2], SamplingParams(logprobs=0), stop_token_ids=frozenset({9}))
    scheduler.add([request])
    scheduler.update_from_output(answer(scheduler.schedule(), 3))
    plan = drafted(scheduler, request, [8, 9, 7])
    logprobs = [TokenLogprobs(token, -1.0, 1) for token in (8, 9, 7, 7)]
    output = StepOutput(plan.step_id, {request.seq_id: [8, 9, 7, 7]}, {request.seq_id: logprobs})
    (update,) = scheduler.update_from_output(output)
    assert update.token_ids == [8, 9] and len(update.logprobs) == 2
    assert update.status is RequestStatus.FINISHED_STOPPED
    scheduler.check_integrity()


def test_drafts_respect_the_token_budget_and_the_length_limit():
    scheduler = make_scheduler(budget=6, max_num_seqs=4)
    requests = [add(scheduler, name, [i], max_tokens=4) for i, name in enumerate("abc")]
    step(scheduler)
    requests[0].draft_token_ids = [5] * 9
    plan = scheduler.schedule()
    assert plan.counts == [3, 1, 1]  # 4 tokens are all that a may have: 2 drafts and what follows
    assert plan.draft_token_ids == {requests[0].seq_id: [5, 5]}
    tight = make_scheduler(budget=4, max_num_seqs=4)
    requests = [add(tight, name, [i], max_tokens=40) for i, name in enumerate("abc")]
    step(tight)
    requests[1].draft_token_ids = [5] * 9
    assert tight.schedule().counts == [1, 2, 1]


def test_no_step_is_scheduled_behind_drafts_in_flight():
    scheduler = make_scheduler(max_in_flight_tokens=1)
    request = add(scheduler, "a", [1, 2], max_tokens=20)
    step(scheduler)
    drafted(scheduler, request, [8])
    assert scheduler.schedule().batch_size == 0
