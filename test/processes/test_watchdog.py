"""The watchdog with a simulated clock: unhealthy and failed children."""

from __future__ import annotations

import pytest

from llaisys.common.errors import InvalidInputError
from llaisys.processes.watchdog import TICK, Watchdog, WatchdogLimits

LIMITS = WatchdogLimits(
    unresponsive_after=1.0, dead_after=10.0, step_limit=100.0, start_limit=1000.0
)


def watch() -> Watchdog:
    return Watchdog("worker 3", LIMITS, now=0.0)


def run(dog: Watchdog, since: float, until: float) -> None:
    """Advance the clock with regular ticks."""
    ticks = round((until - since) / TICK)
    for number in range(ticks):
        dog.tick(since + (number + 1) * TICK)


def test_child_without_a_first_message_is_healthy():
    dog = watch()
    run(dog, 0.0, 999.0)
    assert dog.problem() is None and dog.failure(None) is None
    run(dog, 999.0, 1001.0)
    assert dog.failure(None) == "worker 3 was not ready within 1000 s"


def test_missing_heartbeats_are_unhealthy_then_failed():
    dog = watch()
    run(dog, 0.0, 5.0)
    dog.record_message(0.0)
    run(dog, 5.0, 5.9)
    assert dog.problem() is None
    run(dog, 5.9, 6.5)
    assert dog.problem() == "no heartbeat from worker 3 for 1.5 s"
    run(dog, 6.5, 14.9)
    assert dog.failure(None) is None
    run(dog, 14.9, 15.5)
    assert dog.failure(None) == "no heartbeat from worker 3 for 10.5 s"
    dog.record_message()
    assert dog.problem() is None and dog.failure(None) is None


def test_stuck_loop_is_a_failure_despite_heartbeats():
    dog = watch()
    dog.is_ready = True
    dog.record_message(99.0)
    assert dog.problem() is None
    dog.record_message(100.5)
    dog.record_message()  # a message that says nothing of the loop
    assert dog.problem() == "the loop of worker 3 has not turned for 100.5 s"
    assert dog.failure(None) == "a step of worker 3 takes longer than 100 s"
    dog.record_message(0.0)
    assert dog.problem() is None


def test_time_of_a_stopped_watcher_does_not_count():
    dog = watch()
    dog.record_message(0.0)
    run(dog, 0.0, 0.5)
    for at in (100.0, 200.0, 300.0):  # stopped three times, with nothing read between
        assert dog.problem() is None and dog.failure(None) is None
        dog.tick(at)
    assert dog.problem() is None and dog.failure(None) is None
    run(dog, 300.0, 300.5)  # then it runs and hears nothing
    assert dog.problem() is not None


def test_late_watcher_counts_less_time():
    dog = watch()
    dog.record_message(0.0)
    for number in range(19):  # 19 s, in each of which it got to look once
        dog.tick(float(number + 1))
    assert dog.problem() is None


def test_exit_of_the_process_is_a_failure():
    dog = watch()
    dog.record_message(0.0)
    assert dog.failure(-9) == "the process of worker 3 ended with status -9"


@pytest.mark.parametrize("name", ["dead_after", "step_limit", "start_limit"])
def test_limits_are_above_zero(name):
    with pytest.raises(InvalidInputError) as caught:
        WatchdogLimits(**{name: 0.0})
    assert caught.value.field == name
