"""The bound on the time of a step, with a simulated machine: no clock is read."""

from __future__ import annotations

import pytest

from llaisys.common.request import Request
from llaisys.common.sampling import SamplingParams
from llaisys.common.types import StepOutput
from llaisys.engine.block_manager import BlockManager
from llaisys.engine.config import SchedulerConfig
from llaisys.engine.scheduler import RequestScheduler
from llaisys.engine.step_time import (
    DECODE_FACTOR,
    FIRST_TOKENS,
    IDLE_FACTOR,
    MIN_TOKENS,
    StepTimeBound,
)

DECODE, TOKEN = 0.02, 0.002  # seconds of the simulated machine


def run(scheduler: RequestScheduler) -> tuple[int, float, list[str]]:
    """Run one step; return its prefill tokens, its simulated seconds and its requests."""
    plan = scheduler.schedule()
    seconds = DECODE + TOKEN * plan.num_prefill_tokens
    sampled = {seq: [7] for seq, samples in zip(plan.seq_ids, plan.samples, strict=True) if samples}
    scheduler.update_from_output(StepOutput(plan.step_id, sampled))
    scheduler.builder.step_time.observe(plan.num_prefill_tokens, seconds)
    return plan.num_prefill_tokens, seconds, plan.request_ids


def scheduler_of(max_step_time: float | None) -> RequestScheduler:
    config = SchedulerConfig(max_step_time=max_step_time)
    return RequestScheduler(config, BlockManager(4096, 16), 32768)


def request(name: str, length: int) -> Request:
    return Request(name, list(range(length)), SamplingParams(max_tokens=2000))


def test_no_stream_waits_longer_than_the_bound_beside_a_long_prompt() -> None:
    scheduler = scheduler_of(0.25)
    scheduler.add([request("stream", 8)])
    for _ in range(8):
        run(scheduler)
    scheduler.add([request("long", 20000)])
    steps = []
    while not steps or steps[-1][0]:
        steps.append(run(scheduler))
    assert sum(count for count, _, _ in steps) == 20000
    assert max(seconds for _, seconds, _ in steps) < 0.26
    assert all("stream" in names for _, _, names in steps)
    # The bound is used, not only kept: nearly all steps take most of it.
    assert sum(seconds > 0.2 for _, seconds, _ in steps) > 0.8 * len(steps)


def test_many_streams_wait_less_than_two_steps_beside_a_long_prompt() -> None:
    scheduler = scheduler_of(0.25)
    scheduler.add([request(f"stream {number}", 8) for number in range(32)])
    for _ in range(16):
        run(scheduler)
    scheduler.add([request("long", 500)])
    steps = []
    while not steps or steps[-1][0]:
        steps.append(run(scheduler))
    assert sum(count for count, _, _ in steps) == 500
    longest = max(seconds for _, seconds, _ in steps)
    assert 1.3 * DECODE < longest < 1.05 * max(DECODE_FACTOR * DECODE, DECODE + MIN_TOKENS * TOKEN)
    assert all(len(names) == 33 for count, _, names in steps if count)


def test_a_short_prompt_overtakes_a_long_one() -> None:
    scheduler = scheduler_of(0.25)
    scheduler.add([request("long", 20000)])
    for _ in range(8):
        run(scheduler)
    scheduler.add([request("short", 28)])
    waited = 0.0
    while len(scheduler.requests["short"].token_ids) == 28:
        waited += run(scheduler)[1]
    assert waited < 0.3 * IDLE_FACTOR


def test_alone_a_prompt_gets_larger_chunks() -> None:
    scheduler = scheduler_of(0.25)
    scheduler.add([request("long", 20000)])
    counts = [run(scheduler)[0] for _ in range(12)]
    assert counts[0] == FIRST_TOKENS
    assert counts[-1] == pytest.approx(IDLE_FACTOR * 0.25 / TOKEN, rel=0.1)


def test_without_a_bound_the_token_budget_alone_counts() -> None:
    for none in (None, 0.0):
        scheduler = scheduler_of(none)
        scheduler.add([request("stream", 8), request("long", 20000)])
        run(scheduler)
        assert run(scheduler)[0] == 2047


def test_a_slow_machine_still_makes_progress() -> None:
    bound = StepTimeBound(0.25)
    bound.observe(0, 3.0)
    bound.observe(64, 60.0)
    assert bound.prefill_tokens(1) == MIN_TOKENS


def test_one_stalled_step_is_forgotten() -> None:
    bound = StepTimeBound(0.25)
    for _ in range(20):
        bound.observe(200, DECODE + 200 * TOKEN)
    usual = bound.prefill_tokens(0)
    bound.observe(200, 10.0)
    for _ in range(20):
        bound.observe(200, DECODE + 200 * TOKEN)
    assert bound.prefill_tokens(0) == pytest.approx(usual, rel=0.1)
