"""Steps that a worker has handed to its model and not got back.

While a step is out, the token that each of its sequences draws is unknown: its row has -1-j there,
the j-th id of that step, which is what the model takes for it in the step launched next. Nothing
else of the next step may depend on it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llaisys.common.types import SchedulerOutputs, StepOutput
from llaisys.engine.worker.input_batch import InputBatch
from llaisys.engine.worker.sampler import token_logprobs
from llaisys.engine.worker.step_buffers import PreparedStep
from llaisys.models.base import ModelAdapter


@dataclass(slots=True)
class InFlightStep:
    """What was known when the step was launched: its rows may have been given to others since."""

    plan: SchedulerOutputs
    step: PreparedStep
    ticket: int
    seq_ids: list[int]  # of those that draw
    tenures: NDArray[np.int64]  # of their rows
    num_released: int  # rows, until then
    with_logprobs: list[int]  # indices of those that want logprobs
    arrays: tuple[Any, ...]  # which the model reads until the step is collected

    def output(self, tokens: list[int], adapter: ModelAdapter) -> StepOutput:
        """What it drew; `adapter`: has just been asked for the tokens."""
        sampled = {s: [t] for s, t in zip(self.seq_ids, tokens, strict=True)}
        output = StepOutput(self.plan.step_id, sampled)
        for index in self.with_logprobs:
            found = adapter.collected_logprobs(index)
            if found is not None:
                entry = token_logprobs(tokens[index], found)
                output.logprobs[self.seq_ids[index]] = [entry]
        return output

    def without(self, seq_ids: frozenset[int]) -> SchedulerOutputs:
        """Its plan, with these sequences left out."""
        plan = self.plan
        kept = [index for index, seq_id in enumerate(plan.seq_ids) if seq_id not in seq_ids]
        return replace(
            plan,
            seq_ids=[plan.seq_ids[i] for i in kept],
            request_ids=[plan.request_ids[i] for i in kept],
            starts=[plan.starts[i] for i in kept],
            counts=[plan.counts[i] for i in kept],
            samples=[plan.samples[i] for i in kept],
        )


class InFlightSteps:
    """In the order of their launches."""

    def __init__(self, rows: InputBatch) -> None:
        self._rows = rows
        self._steps: deque[InFlightStep] = deque()
        # A step whose caller was interrupted may still run: it is kept until a later one is done.
        self._last: InFlightStep | None = None

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, launched: InFlightStep) -> None:
        """Its tokens are unknown from now on."""
        self._steps.append(launched)
        drawing = launched.step.drawing
        self._rows.tokens[drawing.rows, drawing.ends] = -1 - np.arange(len(drawing.rows))

    def take(self, step_id: int) -> InFlightStep:
        """Forgets the steps before it."""
        while self._steps:
            self._last = self._steps.popleft()
            if self._last.plan.step_id == step_id:
                return self._last
        raise RuntimeError(f"step {step_id} is not out")

    def pop(self) -> InFlightStep | None:
        """The one launched last, if one is out; it is not any more."""
        return self._steps.pop() if self._steps else None

    def held(self, launched: InFlightStep) -> NDArray[np.bool_]:
        """Which of its sequences still have the rows that they had."""
        rows = launched.step.drawing.rows
        still: NDArray[np.bool_] = self._rows.tenures[rows] == launched.tenures
        known = self._rows.row_of
        return still & np.fromiter((s in known for s in launched.seq_ids), bool, len(rows))

    def settle(self, launched: InFlightStep, tokens: NDArray[Any] | int) -> None:
        """Its tokens are known: put them where they are waited for."""
        drawing, rows = launched.step.drawing, self._rows
        if rows.num_released == launched.num_released:  # as in most steps: everybody is there
            rows.tokens[drawing.rows, drawing.ends] = tokens
            return
        held = self.held(launched)
        found = tokens if isinstance(tokens, int) else tokens[held]
        rows.tokens[drawing.rows[held], drawing.ends[held]] = found
