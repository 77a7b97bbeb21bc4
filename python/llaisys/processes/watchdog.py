"""Tells a sick child from a busy one, by what was heard of it and when.

A judgement and nothing else: no process, no socket, no clock but the caller's.
"""

from __future__ import annotations

from dataclasses import dataclass

from llaisys.common.options import Number, check_options, option


@dataclass(frozen=True, slots=True)
class WatchdogLimits:
    """Seconds."""

    heartbeat_interval: float = option(
        0.1, Number(0, above_low=True), "Time between heartbeats",
        flag=None, group="health", metavar="SECONDS",
    )  # fmt: skip
    unresponsive_after: float = option(
        0.6, Number(0, above_low=True), "Time without a heartbeat until unhealthy",
        flag=None, group="health", metavar="SECONDS",
    )  # fmt: skip
    dead_after: float = option(
        10.0, Number(0, above_low=True), "Time without a heartbeat until the engine counts as dead",
        flag="--engine-dead-after", group="health", metavar="SECONDS",
    )  # fmt: skip
    step_limit: float = option(
        300.0, Number(0, above_low=True), "Longest iteration of the engine loop",
        flag="--engine-step-limit", group="health", metavar="SECONDS",
        more="A longer one counts as a hang.",
    )  # fmt: skip
    start_limit: float = option(
        1800.0, Number(0, above_low=True), "Longest start, with a download",
        flag=None, group="health", metavar="SECONDS",
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_options(self)


TICK = 0.05  # seconds between two looks at the clock


class Watchdog:
    """Watches one child, which is called `name` in what it says.

    Time counts only where the watching process was running itself: `tick` is called every TICK
    seconds, and however late it comes, no more than that has passed. What a watcher that was
    stopped, starved or busy has not read yet is no silence of the child.
    """

    def __init__(self, name: str, limits: WatchdogLimits, now: float) -> None:
        self.name = name
        self.limits = limits
        self.is_ready = False  # set when the child reports it
        self._ticked = now  # time.monotonic()
        self._awake = self._heard = 0.0  # seconds of the watcher's own time
        self._has_spoken = False  # it is up, so silence means something
        self._loop_age = 0.0

    def tick(self, now: float) -> None:
        """The watcher runs; `now` is time.monotonic()."""
        self._awake += min(now - self._ticked, TICK)
        self._ticked = now

    def record_message(self, loop_age: float | None = None) -> None:
        """A message has come; a heartbeat has the age of the child's loop."""
        self._heard = self._awake
        self._has_spoken = True
        if loop_age is not None:
            self._loop_age = loop_age

    def problem(self) -> str | None:
        """Why the child cannot be called healthy; None: it can."""
        silence = self._awake - self._heard
        if self._has_spoken and silence > self.limits.unresponsive_after:
            return f"no heartbeat from {self.name} for {silence:.1f} s"
        if self._loop_age > self.limits.step_limit:
            return f"the loop of {self.name} has not turned for {self._loop_age:.1f} s"
        return None

    def failure(self, exit_status: int | None) -> str | None:
        """Why the child must be given up; None: it need not be."""
        limits, silence = self.limits, self._awake - self._heard
        if exit_status is not None:
            return f"the process of {self.name} ended with status {exit_status}"
        if self._has_spoken and silence > limits.dead_after:
            return f"no heartbeat from {self.name} for {silence:.1f} s"
        if self._loop_age > limits.step_limit:
            return f"a step of {self.name} takes longer than {limits.step_limit:g} s"
        if not self.is_ready and self._awake > limits.start_limit:
            return f"{self.name} was not ready within {limits.start_limit:g} s"
        return None
