"""Decides from heartbeats whether a child process is healthy. No process, no socket, no clock."""

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
        1.5, Number(0, above_low=True), "Time without a heartbeat until unhealthy",
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


TICK = 0.05  # seconds between two calls of `tick`


class Watchdog:
    """Watches one child; `name` is used in its texts.

    Only time in which the watching process itself runs counts: `tick` is called every TICK seconds
    and adds at most that, so a stopped or starved watcher does not blame the child.
    """

    def __init__(self, name: str, limits: WatchdogLimits, now: float) -> None:
        self.name = name
        self.limits = limits
        self.is_ready = False  # set when the child reports it
        self._ticked = now  # time.monotonic()
        self._elapsed = self._last_message = 0.0  # seconds of the watcher
        self._is_up = False  # a message has arrived
        self._loop_age = 0.0

    def tick(self, now: float) -> None:
        """Add the time since the last tick; `now` is time.monotonic()."""
        self._elapsed += min(now - self._ticked, TICK)
        self._ticked = now

    def record_message(self, loop_age: float | None = None) -> None:
        """Record a message; `loop_age` is in heartbeats."""
        self._last_message = self._elapsed
        self._is_up = True
        if loop_age is not None:
            self._loop_age = loop_age

    def problem(self) -> str | None:
        """Return why the child is unhealthy, or None."""
        silence = self._elapsed - self._last_message
        if self._is_up and silence > self.limits.unresponsive_after:
            return f"no heartbeat from {self.name} for {silence:.1f} s"
        if self._loop_age > self.limits.step_limit:
            return f"the loop of {self.name} has not turned for {self._loop_age:.1f} s"
        return None

    def failure(self, exit_status: int | None) -> str | None:
        """Return why the child has failed, or None."""
        limits, silence = self.limits, self._elapsed - self._last_message
        if exit_status is not None:
            return f"the process of {self.name} ended with status {exit_status}"
        if self._is_up and silence > limits.dead_after:
            return f"no heartbeat from {self.name} for {silence:.1f} s"
        if self._loop_age > limits.step_limit:
            return f"a step of {self.name} takes longer than {limits.step_limit:g} s"
        if not self.is_ready and self._elapsed > limits.start_limit:
            return f"{self.name} was not ready within {limits.start_limit:g} s"
        return None
