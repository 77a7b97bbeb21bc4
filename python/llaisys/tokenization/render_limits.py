"""Limits of a chat template render: steps, CPU time, value sizes, output size."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from math import inf


@dataclass(frozen=True, slots=True)
class RenderLimits:
    """Limits of one render. Characters = base_chars + chars_per_input * input characters; CPU time
    = cpu_seconds + cpu_seconds_per_million * millions of input characters."""

    cpu_seconds: float = 0.5
    cpu_seconds_per_million: float = 0.5
    steps: int = 1_000_000
    base_chars: int = 1_000_000
    chars_per_input: int = 4


class LimitExceeded(Exception):
    """A render exceeded a limit; templates cannot catch it."""


class OutOfBudget(LimitExceeded):
    """Renders exceeded `cpu_budget`; the render may succeed in another context."""


NODE_COST = 16  # characters counted per element of a container
_MAX_DEPTH = 100


_budget_end: ContextVar[float] = ContextVar("cpu_budget_end", default=inf)


@contextmanager
def cpu_budget(seconds: float) -> Iterator[None]:
    """Renders in this context raise OutOfBudget after this much CPU time in total."""
    token = _budget_end.set(time.thread_time() + seconds)
    try:
        yield
    finally:
        _budget_end.reset(token)


class Meter:
    """The budget of one render, used by one thread."""

    def __init__(self, limits: RenderLimits, input_chars: int = 0) -> None:
        self.limits = limits
        self.max_chars = limits.base_chars + limits.chars_per_input * input_chars
        self.steps_left = limits.steps
        self.output_left = 4 * self.max_chars
        self.cpu_seconds = limits.cpu_seconds + limits.cpu_seconds_per_million * input_chars / 1e6
        self.deadline = time.thread_time() + self.cpu_seconds
        self.budget_end = _budget_end.get()

    def touch(self) -> None:
        """Count one step; raises when the limit of steps or CPU time is exceeded."""
        self.steps_left -= 1
        if self.steps_left < 0:
            raise LimitExceeded(f"more than {self.limits.steps} steps")
        now = time.thread_time()
        if now > self.budget_end:
            raise OutOfBudget
        if now > self.deadline:
            raise LimitExceeded(f"more than {self.cpu_seconds:.1f} s of CPU time")

    def size(self, chars: int) -> None:
        """Check the size of a value of `chars` characters before it is created."""
        if chars > self.max_chars:
            raise LimitExceeded(f"a value of {chars} characters (limit {self.max_chars})")

    def output(self, chars: int) -> None:
        """Count `chars` characters of output, to the result or to a captured block."""
        self.output_left -= chars
        if self.output_left < 0:
            raise LimitExceeded(f"more than {4 * self.max_chars} characters of output")

    def measure(self, *values: object) -> int:
        """Check and return the size of values as text; shared parts count each time."""
        total = 0
        stack: list[tuple[object, int]] = [(value, 0) for value in values]
        while stack:
            value, depth = stack.pop()
            if isinstance(value, str):
                total += len(value)
            elif isinstance(value, Mapping):
                stack.extend((item, depth + 1) for pair in value.items() for item in pair)
            elif isinstance(value, (list, tuple, set, frozenset)):
                stack.extend((item, depth + 1) for item in value)
            if depth > _MAX_DEPTH:
                raise LimitExceeded(f"a value nested more than {_MAX_DEPTH} deep")
            total += NODE_COST
            if total > self.max_chars or len(stack) * NODE_COST > self.max_chars:
                raise LimitExceeded(f"a value of more than {self.max_chars} characters")
        return total


current_meter: ContextVar[Meter | None] = ContextVar("chat_template_meter", default=None)


def active_meter() -> Meter:
    """The meter of the current render, or a new one outside a render."""
    return current_meter.get() or Meter(RenderLimits())
