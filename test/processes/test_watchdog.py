"""When a child is called sick and when it is given up, with a clock of the test's own."""

from __future__ import annotations

import pytest

from llaisys.common.errors import InvalidInputError
from llaisys.processes.watchdog import Watchdog, WatchLimits

LIMITS = WatchLimits(unresponsive_after=1.0, dead_after=10.0, step_limit=100.0, start_limit=1000.0)


def watch() -> Watchdog:
    return Watchdog("worker 3", LIMITS, now=0.0)


def test_a_child_that_has_not_spoken_may_take_its_time():
    dog = watch()
    assert dog.problem(999.0) is None and dog.verdict(999.0, None) is None
    assert dog.verdict(1001.0, None) == "worker 3 was not ready within 1000 s"


def test_silence_is_first_sick_and_then_dead():
    dog = watch()
    dog.hear(5.0, 0.0)
    assert dog.problem(6.0) is None
    assert dog.problem(6.5) == "no heartbeat from worker 3 for 1.5 s"
    assert dog.verdict(15.0, None) is None
    assert dog.verdict(15.5, None) == "no heartbeat from worker 3 for 10.5 s"
    dog.hear(15.6)
    assert dog.problem(15.7) is None and dog.verdict(15.7, None) is None


def test_a_loop_that_does_not_turn_is_hanging_however_the_heart_beats():
    dog = watch()
    dog.is_ready = True
    dog.hear(5.0, 99.0)
    assert dog.problem(5.1) is None
    dog.hear(6.0, 100.5)
    dog.hear(6.1)  # a message that says nothing of the loop
    assert dog.problem(6.1) == "the loop of worker 3 has not turned for 100.5 s"
    assert dog.verdict(6.1, None) == "a step of worker 3 takes longer than 100 s"
    dog.hear(6.2, 0.0)
    assert dog.problem(6.2) is None


def test_a_watcher_that_slept_itself_gives_another_chance():
    dog = watch()
    dog.hear(5.0, 0.0)
    dog.overslept(50.0)
    assert dog.problem(50.0) is None and dog.verdict(50.0, None) is None
    assert dog.problem(50.6) is not None


def test_the_end_of_the_process_is_the_end():
    dog = watch()
    dog.hear(5.0, 0.0)
    assert dog.verdict(5.0, -9) == "the process of worker 3 ended with status -9"


@pytest.mark.parametrize("name", ["dead_after", "step_limit", "start_limit"])
def test_limits_are_above_zero(name):
    with pytest.raises(InvalidInputError, match=name):
        WatchLimits(**{name: 0.0})
