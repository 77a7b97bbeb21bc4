"""Priorities order the requests of one owner; a timeout ends running and waiting requests."""

from __future__ import annotations

import time
from typing import Any

import pytest
from engine_fakes import adapter_of, expected_tokens, greedy, make_engine, run_all
from error_helpers import invalid_input
from scheduler_helpers import make_scheduler, step

from llaisys.common.request import Request
from llaisys.common.sampling import SamplingParams
from llaisys.engine.fair_queue import STARTS_PER_LEVEL
from llaisys.engine.llm_engine import LLMEngine
from llaisys.engine.scheduler import RequestScheduler


def add(
    scheduler: RequestScheduler, name: str, priority: int = 0, count: int = 4, **fields: Any
) -> Request:
    params = SamplingParams(max_tokens=count, priority=priority)
    request = Request(name, [1, 2, 3, len(name)], params, **fields)
    scheduler.add([request])
    return request


def started(scheduler: RequestScheduler) -> list[str]:
    return [request.request_id for request in scheduler.running]


def test_lower_priority_values_start_first():
    scheduler = make_scheduler(max_num_seqs=1)
    for name, priority in [("c", 5), ("b", 0), ("a", -3), ("b2", 0)]:
        add(scheduler, name, priority)
    order: list[str] = []
    while scheduler.has_unfinished():
        step(scheduler)
        order += [name for name in started(scheduler) if name not in order]
    assert order == ["a", "b", "b2", "c"]


def test_urgent_request_preempts_a_less_urgent_one():
    scheduler = make_scheduler(max_num_seqs=2)
    add(scheduler, "slow", 5, count=50)
    add(scheduler, "slower", 9, count=50)
    step(scheduler)
    add(scheduler, "now", -1)
    step(scheduler)
    assert sorted(started(scheduler)) == ["now", "slow"]
    assert scheduler.queues.num_preemptions == 1
    add(scheduler, "equal", 5)  # no more urgent than what runs
    step(scheduler)
    assert sorted(started(scheduler)) == ["now", "slow"]


def test_blocks_are_taken_from_the_least_urgent():
    scheduler = make_scheduler(blocks=6, size=4, max_num_seqs=8)
    add(scheduler, "urgent", -5, count=12)
    add(scheduler, "plain", 0, count=12)
    add(scheduler, "idle", 5, count=12)
    preempted = []
    while scheduler.has_unfinished():
        before = {r.request_id: r.num_preemptions for r in scheduler.requests.values()}
        living = list(scheduler.requests.values())
        step(scheduler)
        preempted += [r.request_id for r in living if r.num_preemptions > before[r.request_id]]
    assert preempted and set(preempted) <= {"idle", "plain"} and preempted[0] == "idle"


def test_priorities_of_one_owner_do_not_affect_another():
    scheduler = make_scheduler(max_num_seqs=2)
    for number in range(4):
        add(scheduler, f"loud{number}", -1000, owner="loud", job=str(number), count=20)
        add(scheduler, f"quiet{number}", 0, owner="quiet", job=str(number), count=20)
    while scheduler.has_unfinished():
        step(scheduler)
        owners = [request.owner for request in scheduler.running]
        if len(owners) == 2 and scheduler.num_waiting:
            assert sorted(owners) == ["loud", "quiet"]


def test_aging_starts_requests_behind_urgent_ones():
    scheduler = make_scheduler(max_num_seqs=1, blocks=256)
    add(scheduler, "patient", 2, count=1)
    for number in range(10 * STARTS_PER_LEVEL):
        add(scheduler, f"urgent{number}", 0, count=1, job=str(number))
        step(scheduler)
        if "patient" not in scheduler.requests:
            break
    assert 2 * STARTS_PER_LEVEL <= number <= 3 * STARTS_PER_LEVEL


def test_priorities_have_limits():
    for value in (1001, -1001, 1.5, "high"):
        with invalid_input("priority"):
            SamplingParams(priority=value)  # type: ignore[arg-type]


def test_priorities_change_the_order_but_not_the_answers():
    engine = make_engine(max_num_seqs=2, num_blocks=12)
    for number in range(6):
        params = greedy(20, ignore_eos=True, priority=-number)
        engine.submit([number + 1, 2, 3], params, request_id=str(number))
    outputs = run_all(engine)
    for number in range(6):
        assert outputs[str(number)].token_ids == expected_tokens([number + 1, 2, 3], 20, stops=())
    assert next(iter(outputs)) == "5"


# ---- timeouts ------------------------------------------------------------------------------------


def let_pass(engine: LLMEngine, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Advance the engine's clock."""
    later = time.monotonic() + seconds
    monkeypatch.setattr("llaisys.engine.core.time.monotonic", lambda: later)


def test_timed_out_request_returns_its_tokens(monkeypatch: pytest.MonkeyPatch):
    engine = make_engine()
    endless = greedy(400, ignore_eos=True)
    engine.submit([1, 2, 3], endless.clone(timeout=60.0, n=2, temperature=1.0), request_id="late")
    engine.submit([4, 5, 6], endless.clone(max_tokens=30), request_id="other")
    for _ in range(10):
        engine.step()
    let_pass(engine, 61, monkeypatch)
    outputs = run_all(engine)
    late = outputs["late"]
    assert [choice.finish_reason for choice in late.outputs] == ["timeout", "timeout"]
    assert [len(choice.token_ids) for choice in late.outputs] == [10, 10]
    assert late.usage.completion_tokens == 20
    assert outputs["other"].token_ids == expected_tokens([4, 5, 6], 30, stops=())
    assert engine.stats()["kv_blocks_used"] == 0


def test_waiting_request_times_out_without_tokens(monkeypatch: pytest.MonkeyPatch):
    engine = make_engine(max_num_seqs=1)
    engine.submit([4, 5, 6], greedy(30, ignore_eos=True), request_id="first")
    engine.submit([1, 2, 3], greedy(30, timeout=0.5), request_id="late")
    engine.step()
    let_pass(engine, 1, monkeypatch)
    outputs = run_all(engine)
    assert outputs["late"].finish_reason == "timeout" and outputs["late"].token_ids == []
    assert len(outputs["first"].token_ids) == 30
    assert adapter_of(engine).num_tokens == 3 + 29


def test_request_that_ends_in_time_removes_its_timeout():
    engine = make_engine()
    for number in range(500):
        engine.submit([1, 2, 3], greedy(2, timeout=3600.0), request_id=str(number))
        outputs = run_all(engine)
        assert outputs[str(number)].finish_reason in ("length", "stop")
    assert engine.debug_state()["timeouts"] <= 70


def test_a_timeout_is_a_positive_number_of_seconds():
    for value in (0, -1, float("inf"), float("nan"), "soon"):
        with invalid_input("timeout"):
            SamplingParams(timeout=value)  # type: ignore[arg-type]
