"""Steps in flight: launched, result not collected."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llaisys.common.step import ForwardOutput
from llaisys.common.types import SchedulerOutputs
from llaisys.engine.worker.input_batch import InputBatch
from llaisys.engine.worker.step_buffers import PreparedStep, SamplingBatch, StepBuffers


@dataclass(slots=True)
class InFlightStep:
    """State of a step at its launch; its rows may belong to other sequences since."""

    plan: SchedulerOutputs
    step: PreparedStep
    forward: ForwardOutput | None = None  # None: the device samples; see QueuedSteps
    buffers: StepBuffers | None = None  # this and the next fields: of a step that it samples
    ticket: int = -1
    logprob_rows: list[int] = field(default_factory=list)  # of sequences that request logprobs
    arrays: tuple[Any, ...] = ()  # read by the model until the step is collected
    # Set by InFlightSteps.add:
    seq_ids: list[int] = field(default_factory=list)  # that sample
    generations: NDArray[np.int64] | None = None  # of their rows
    num_released: int = 0  # rows of the input batch, in all, at the launch


class InFlightSteps:
    """Steps in flight, in order of launch."""

    def __init__(self, batch: InputBatch) -> None:
        self._batch = batch
        self._steps: deque[InFlightStep] = deque()
        # After an interrupt a step may still run: its arrays live until a later step ends.
        self._last: InFlightStep | None = None

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, launched: InFlightStep) -> None:
        rows = launched.step.sampling.rows
        launched.seq_ids = self._batch.seq_ids[rows].tolist()
        launched.generations = self._batch.generations[rows]
        launched.num_released = self._batch.num_released
        self._steps.append(launched)

    def mark_unknown(self, sampling: SamplingBatch) -> None:
        """Write the placeholders of the tokens that the device samples."""
        self._batch.tokens[sampling.rows, sampling.ends] = -1 - np.arange(len(sampling.rows))

    def take(self, step_id: int | None = None) -> InFlightStep:
        """Remove and return a step, or the oldest one; earlier steps are discarded."""
        while self._steps:
            self._last = self._steps.popleft()
            if step_id is None or self._last.plan.step_id == step_id:
                return self._last
        raise RuntimeError(f"step {step_id} is not in flight: sample_tokens without execute_model")

    def pop(self) -> InFlightStep | None:
        """Remove and return the step launched last, if any."""
        return self._steps.pop() if self._steps else None

    def still_present(self, launched: InFlightStep) -> NDArray[np.bool_]:
        """Return which of its sequences still have their rows."""
        rows = launched.step.sampling.rows
        same: NDArray[np.bool_] = self._batch.generations[rows] == launched.generations
        known = self._batch.row_of
        return same & np.fromiter((s in known for s in launched.seq_ids), bool, len(rows))

    def store_tokens(self, launched: InFlightStep, tokens: NDArray[Any] | int) -> None:
        """Write the sampled tokens of a step into the input batch."""
        sampling, batch = launched.step.sampling, self._batch
        if batch.num_released == launched.num_released:  # no sequence has left
            batch.tokens[sampling.rows, sampling.ends] = tokens
            return
        present = self.still_present(launched)
        found = tokens if isinstance(tokens, int) else tokens[present]
        batch.tokens[sampling.rows[present], sampling.ends[present]] = found
