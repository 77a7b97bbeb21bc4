"""Fair scheduling of a full engine: owners share evenly, so do the jobs of one owner with any
number of choices, and no job starves."""

from __future__ import annotations

from collections import Counter

from engine_fakes import EOS, expected_tokens, greedy, make_engine
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_helpers import make_scheduler, step

from llaisys.common.request import Request, RequestStatus
from llaisys.engine.scheduler import RequestScheduler

ENDLESS = 180


def add_job(
    scheduler: RequestScheduler,
    job: str,
    choices: int = 1,
    owner: str = "",
    max_tokens: int = ENDLESS,
    prompt: int = 1,
) -> list[Request]:
    """One job. Each choice has its own prompt, so that none waits for a prefix."""
    number = len(scheduler.requests)
    requests = [
        Request(
            f"{owner}{job}#{i}",
            [number * 1000 + i] * prompt,
            greedy(max_tokens).with_defaults(None),
            owner=owner,
            job=job,
            choice=i,
        )
        for i in range(choices)
    ]
    scheduler.add(requests)
    return requests


def steps_until_done(scheduler: RequestScheduler, requests: list[Request], most: int) -> int:
    for count in range(most):
        if all(request.finished for request in requests):
            return count
        step(scheduler)
    raise AssertionError(f"not finished after {most} steps: {[r.status for r in requests]}")


def running(scheduler: RequestScheduler) -> Counter[str]:
    return Counter(request.owner + request.job for request in scheduler.running)


def test_large_job_is_preempted_for_a_new_job():
    scheduler = make_scheduler(4000, max_num_seqs=8, budget=64)
    add_job(scheduler, "many", 128)
    step(scheduler)
    assert running(scheduler) == {"many": 8}
    (single,) = add_job(scheduler, "single", max_tokens=5)
    assert steps_until_done(scheduler, [single], 10) == 5  # as if it were alone
    assert running(scheduler)["many"] >= 7


def test_two_large_jobs_get_half_each_without_further_preemption():
    scheduler = make_scheduler(4000, max_num_seqs=8, budget=64)
    add_job(scheduler, "first", 32)
    step(scheduler)
    add_job(scheduler, "second", 32)
    for _ in range(20):
        step(scheduler)
    assert running(scheduler) == {"first": 4, "second": 4}
    assert scheduler.queues.num_preemptions == 4


def test_owners_share_evenly_with_any_number_of_jobs():
    scheduler = make_scheduler(4000, max_num_seqs=8, budget=64)
    for index in range(20):
        add_job(scheduler, f"job{index}", owner="busy")
    step(scheduler)
    add_job(scheduler, "a", 8, owner="quiet")
    step(scheduler)
    assert Counter(r.owner for r in scheduler.running) == {"busy": 4, "quiet": 4}


def test_preempted_request_does_not_start_before_other_owners():
    scheduler = make_scheduler(4000, max_num_seqs=2, budget=64)
    many = add_job(scheduler, "many", 4)
    step(scheduler)
    (first,) = add_job(scheduler, "first", max_tokens=3)
    step(scheduler)
    assert many[1].status is RequestStatus.PREEMPTED
    (second,) = add_job(scheduler, "second", max_tokens=3)
    steps_until_done(scheduler, [first], 5)
    step(scheduler)
    assert second.status is RequestStatus.RUNNING and many[1].status is RequestStatus.PREEMPTED


def test_large_job_is_not_starved_by_single_requests():
    scheduler = make_scheduler(4000, max_num_seqs=4, budget=64)
    many = add_job(scheduler, "many", 12, max_tokens=20)
    for index in range(2000):
        if all(request.finished for request in many):
            return
        if sum(r.job != "many" for r in scheduler.requests.values()) < 8:  # there is always one
            add_job(scheduler, f"single{index}", max_tokens=4)
        step(scheduler)
    raise AssertionError([request.status for request in many])


def test_owner_with_many_jobs_is_not_starved():
    scheduler = make_scheduler(4000, max_num_seqs=2, budget=64)
    mine = [add_job(scheduler, f"job{i}", owner="busy", max_tokens=10)[0] for i in range(10)]
    for index in range(600):
        if all(request.finished for request in mine):
            return
        if not any(r.owner == "quiet" for r in scheduler.requests.values()):
            add_job(scheduler, f"job{index}", 2, owner="quiet", max_tokens=5)
        step(scheduler)
    raise AssertionError([request.status for request in mine])


def test_blocks_are_shared_fairly_between_owners():
    """The choices of one job fill the pool; another job starts before they finish."""
    scheduler = make_scheduler(64, max_num_seqs=64, budget=128)
    add_job(scheduler, "many", 16, max_tokens=150)
    while scheduler.block_manager.num_free_blocks > 1:
        step(scheduler)
    (single,) = add_job(scheduler, "single", prompt=20, max_tokens=10)
    assert steps_until_done(scheduler, [single], 20) <= 12
    assert single.num_preemptions == 0


def test_requests_without_owner_are_first_come_first_served():
    scheduler = make_scheduler(4000, max_num_seqs=2, budget=64)
    requests = add_job(scheduler, "", 6, max_tokens=4)
    order = []
    while scheduler.has_unfinished():
        step(scheduler)
        order += [r.request_id for r in scheduler.running if r.request_id not in order]
    assert order == [request.request_id for request in requests]
    assert scheduler.queues.num_preemptions == 0


def test_finished_owners_and_jobs_leave_no_state():
    scheduler = make_scheduler(4000, max_num_seqs=2, budget=64)
    jobs = [add_job(scheduler, f"j{i}", 3, owner=f"o{i % 3}", max_tokens=3) for i in range(6)]
    scheduler.finish(jobs[5][2].request_id, RequestStatus.FINISHED_ABORTED)
    while scheduler.has_unfinished():
        step(scheduler)
    assert scheduler.queues.waiting.num_owners == len(scheduler.queues.waiting) == 0


@settings(max_examples=60, deadline=None)
@given(
    jobs=st.lists(
        st.tuples(
            st.integers(0, 12),  # arrival, in steps
            st.sampled_from(["", "p", "q"]),  # owner
            st.lists(st.integers(1, 3), min_size=1, max_size=12),  # prompt
            st.integers(1, 10),  # max_tokens
            st.integers(1, 5),  # choices
        ),
        min_size=1,
        max_size=8,
    ),
    num_blocks=st.integers(7, 20),
    max_num_seqs=st.integers(1, 6),
)
def test_sharing_changes_no_output(jobs, num_blocks, max_num_seqs):
    engine = make_engine(
        num_blocks=num_blocks, max_num_seqs=max_num_seqs, max_num_batched_tokens=16
    )
    core, requests = engine.core, []
    for now in range(5000):
        for number, (arrival, owner, prompt, max_tokens, choices) in enumerate(jobs):
            if arrival == now:
                params = greedy(max_tokens).with_defaults(None)
                added = [
                    Request(
                        f"{number}#{i}", prompt, params, stop_token_ids=frozenset({EOS}),
                        owner=owner, job=str(number),
                    )
                    for i in range(choices)
                ]  # fmt: skip
                core.add_requests(added)
                requests += added
        if core.has_unfinished():
            core.step()
        elif now > 12:
            break
        core.scheduler.block_manager.check_integrity()
    for request in requests:
        limit = request.sampling.max_tokens
        assert request.output_token_ids == expected_tokens(request.prompt_token_ids, limit)
    core.scheduler.check_integrity()
