"""The bound on the time of a step, with a simulated machine: no clock is read."""

from __future__ import annotations

import itertools
from typing import NamedTuple

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
    HEADROOM,
    IDLE_FACTOR,
    MIN_TOKENS,
    PROBE_STEPS,
    StepTimeBound,
)

DECODE, TOKEN = 0.02, 0.002  # seconds of the simulated machine


def run(scheduler: RequestScheduler, attention: float = 0.0) -> tuple[int, float, list[str]]:
    """Run one step; return its prefill tokens, its simulated seconds and its requests.
    `attention`: seconds of a token per position before it."""
    plan = scheduler.schedule()
    token = TOKEN + attention * plan.prefill_position
    seconds = DECODE + token * plan.num_prefill_tokens
    sampled = {seq: [7] for seq, samples in zip(plan.seq_ids, plan.samples, strict=True) if samples}
    scheduler.update_from_output(StepOutput(plan.step_id, sampled))
    observed = plan.batch_size, plan.num_prefill_tokens, plan.prefill_position, seconds
    scheduler.builder.step_time.observe(*observed)
    return plan.num_prefill_tokens, seconds, plan.request_ids


def scheduler_of(max_step_time: float | None) -> RequestScheduler:
    config = SchedulerConfig(max_step_time=max_step_time)
    return RequestScheduler(config, BlockManager(4096, 16), 32768)


def request(name: str, length: int) -> Request:
    return Request(name, list(range(length)), SamplingParams(max_tokens=10000))


# On two cores of the default model a token at position 20,000 costs six times one at the start.
@pytest.mark.parametrize("attention", [0.0, 5 * TOKEN / 20000, 50 * TOKEN / 20000])
def test_no_stream_waits_longer_than_the_bound_beside_a_long_prompt(attention: float) -> None:
    scheduler = scheduler_of(0.25)
    scheduler.add([request("stream", 8)])
    for _ in range(8):
        run(scheduler, attention)
    scheduler.add([request("long", 20000)])
    steps = []
    while not steps or steps[-1][0]:
        steps.append(run(scheduler, attention))
    assert sum(count for count, _, _ in steps) >= 19999  # a last single token counts as decode
    assert max(seconds for _, seconds, _ in steps) < 0.25
    assert all("stream" in names for _, _, names in steps)
    # The bound is used, not only kept: nearly all steps take most of it.
    assert sum(seconds > 0.1 for _, seconds, _ in steps) > 0.8 * len(steps)


def test_bound_holds_for_the_rest_of_a_cached_prompt() -> None:
    """Its first tokens are at a position where they are expensive, after many cheap ones."""
    attention = 10 * TOKEN / 20000
    scheduler = scheduler_of(0.25)
    scheduler.add([request("first", 20000)])
    while not scheduler.requests["first"].num_output_tokens:
        run(scheduler, attention)
    for number in range(50):
        scheduler.add([Request(f"{number}", [number] * 100, SamplingParams(max_tokens=1))])
        while f"{number}" in scheduler.requests:
            run(scheduler, attention)
    scheduler.add([request("second", 21000)])  # it has the tokens of "first"
    steps = []
    while not scheduler.requests["second"].num_output_tokens:
        steps.append(run(scheduler, attention))
    assert sum(count for count, _, _ in steps) < 1100
    assert max(seconds for _, seconds, _ in steps) < 0.25


def test_first_prompt_after_a_short_one_is_bounded_too() -> None:
    """Before a token is measured, it costs at most a step."""
    bound = StepTimeBound(0.25)
    bound.observe(1, 0, 0, 0.06)
    bound.open_step(1, [2048], 2048)
    assert bound.fitting_tokens(0) == int((HEADROOM * 0.25 - 0.06) / 0.06)


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


def test_short_prompts_get_their_tokens_first() -> None:
    """Beside a stream, so that steps are small: in the first step each short prompt is computed
    completely, and the long one goes on with the rest."""
    scheduler = scheduler_of(0.25)
    scheduler.add([request("stream", 8), request("long", 20000)])
    for _ in range(20):
        run(scheduler)
    for name, length in ("short", 28), ("other", 20):  # they share no prefix
        scheduler.add([Request(name, [length] * length, SamplingParams())])
    done = scheduler.requests["long"].num_computed_tokens
    count, seconds, _ = run(scheduler)
    assert scheduler.requests["short"].num_output_tokens == 1
    assert scheduler.requests["other"].num_output_tokens == 1
    assert scheduler.requests["long"].num_computed_tokens - done == count - 48 > 0
    assert seconds < 0.25


def test_a_long_prompt_goes_on_beside_many_shorter_ones() -> None:
    scheduler = scheduler_of(0.25)
    scheduler.add([request("stream", 8), request("long", 20000)])
    for _ in range(20):
        run(scheduler)
    for number in range(8):
        scheduler.add([Request(f"{number}", [number] * 200, SamplingParams(max_tokens=1))])
    done = scheduler.requests["long"].num_computed_tokens
    count, seconds, _ = run(scheduler)
    assert scheduler.requests["long"].num_computed_tokens - done == pytest.approx(count / 4, abs=1)
    assert seconds < 0.25


def test_alone_a_prompt_gets_larger_chunks() -> None:
    scheduler = scheduler_of(0.25)
    scheduler.add([request("long", 20000)])
    counts = [run(scheduler)[0] for _ in range(12)]
    assert counts[0] == FIRST_TOKENS
    # Less at a position that is not measured yet.
    assert max(counts[-2:]) == pytest.approx(IDLE_FACTOR * 0.25 / TOKEN, rel=0.1)


def test_without_a_bound_the_token_budget_alone_counts() -> None:
    for none in (None, 0.0):
        scheduler = scheduler_of(none)
        scheduler.add([request("stream", 8), request("long", 20000)])
        run(scheduler)
        assert run(scheduler)[0] == 2047


def test_a_slow_machine_still_makes_progress() -> None:
    bound = StepTimeBound(0.25)
    bound.observe(1, 0, 0, 3.0)
    bound.observe(1, 64, 32, 60.0)
    bound.open_step(1, [2048], 2048)
    assert bound.fitting_tokens(0) == 2  # 0.75 steps more
    bound.spend(0, 2)
    assert bound.fitting_tokens(0) == 0
    bound.observe(1, 0, 0, 0.1)
    bound.open_step(0, [2048], 2048)
    assert bound.fitting_tokens(0) == MIN_TOKENS


@pytest.mark.parametrize(("decode", "expected"), [(0.02, 90), (0.15, 25), (0.3, MIN_TOKENS)])
def test_a_high_estimate_is_corrected_by_small_steps(decode: float, expected: int) -> None:
    """Also where a step without prefill alone takes longer than the bound."""
    bound = StepTimeBound(0.25)
    bound.observe(1, 0, 0, decode)
    bound.observe(1, 1, 5000, decode + 1.0)  # another program had the processor
    for _ in range(40):
        bound.open_step(1, [2048], 2048)
        count = bound.fitting_tokens(5000)
        bound.observe(1, count, 5000, decode + count * TOKEN)
    assert count == pytest.approx(expected, rel=0.15)


class Load(NamedTuple):
    """What a closed loop of streams saw on a simulated GPU."""

    tokens_per_second: float
    gaps: list[float]  # between tokens of a stream, sorted


def run_streams(max_step_time: float, num_streams: int, long_prompt: int = 0) -> Load:
    """Each stream sends three requests of 128 prompt and 128 new tokens, one after the other, on a
    GPU where the prefill of a step takes 1 ms and 6.7 us per token. `long_prompt`: tokens of the
    prompts that another client sends meanwhile."""
    config = SchedulerConfig(num_streams + 1, 8192, max_step_time=max_step_time)
    scheduler = RequestScheduler(config, BlockManager(num_streams * 16 + 1024, 16), 32768)
    left = dict.fromkeys(range(num_streams), 3)
    names = itertools.count()
    owners: dict[str, int] = {}
    last: dict[str, float] = {}
    now, gaps, num_tokens = 0.0, [], 0

    def send(owner: int) -> None:
        number = next(names)
        length, most = (long_prompt, 1) if owner < 0 else (128, 128)
        tokens = [number] * length  # no two share a prefix
        scheduler.add(
            [Request(f"{number}", tokens, SamplingParams(max_tokens=most), job=f"{number}")]
        )
        owners[f"{number}"] = owner

    for owner in (*left, *([-1] if long_prompt else [])):
        send(owner)
    while any(left.values()):
        plan = scheduler.schedule()
        seconds = 1e-3 + 6e-6 * plan.num_decode_tokens
        if plan.num_prefill_tokens:
            seconds += 1e-3 + plan.num_prefill_tokens * (1 + plan.prefill_position / 12000) / 150e3
        now += seconds
        pairs = zip(plan.seq_ids, plan.samples, strict=True)
        sampled = {seq: [7] for seq, samples in pairs if samples}
        for update in scheduler.update_from_output(StepOutput(plan.step_id, sampled)):
            name, owner = update.request_id, owners[update.request_id]
            if name in last:
                gaps.append(now - last[name])
            last[name] = now
            num_tokens += owner >= 0
            if name not in scheduler.requests:
                if owner >= 0:
                    left[owner] -= 1
                if owner < 0 or left[owner]:
                    send(owner)
        measured = plan.batch_size, plan.num_prefill_tokens, plan.prefill_position, seconds
        scheduler.builder.step_time.observe(*measured)
    return Load(num_tokens / now, sorted(gaps))


@pytest.mark.parametrize("num_streams", [24, 96])
def test_short_prompts_start_fast_enough_to_keep_all_streams_busy(num_streams: int) -> None:
    """The fixed time of prefill does not count as the cost of a token: chunks would shrink, each
    of them would cost more, and the streams would wait for their prompts."""
    bounded = run_streams(0.25, num_streams).tokens_per_second
    assert bounded > 0.93 * run_streams(0.0, num_streams).tokens_per_second


@pytest.mark.parametrize("num_streams", [24, 96])
def test_long_prompts_delay_a_token_by_less_than_the_median(num_streams: int) -> None:
    gaps = run_streams(0.25, num_streams, long_prompt=8000).gaps
    assert gaps[99 * len(gaps) // 100] < 2 * gaps[len(gaps) // 2]


def test_time_without_prefill_is_measured_again_with_more_streams() -> None:
    bound = StepTimeBound(0.25)
    bound.observe(1, 0, 0, DECODE)
    for _ in range(PROBE_STEPS):
        bound.open_step(64, [1000], 2048)
        assert bound.fitting_tokens(0) > 0
        bound.observe(65, 10, 5, 5 * DECODE)
    bound.open_step(64, [1000], 2048)
    assert bound.fitting_tokens(0) == 0
    bound.observe(64, 0, 0, 4 * DECODE)
    for _ in range(2 * PROBE_STEPS):
        bound.open_step(64, [1000], 2048)
        assert bound.fitting_tokens(0) > 0


def test_one_stalled_step_is_forgotten() -> None:
    bound = StepTimeBound(0.25)

    def fitting() -> int:
        bound.open_step(0, [2048], 2048)
        return bound.fitting_tokens(100)

    for _ in range(20):
        bound.observe(1, 200, 100, DECODE + 200 * TOKEN)
    usual = fitting()
    bound.observe(1, 200, 100, 10.0)
    assert fitting() != usual
    for _ in range(20):
        bound.observe(1, 200, 100, DECODE + 200 * TOKEN)
    assert fitting() == pytest.approx(usual, rel=0.1)
