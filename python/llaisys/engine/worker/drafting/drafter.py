"""Interface of draft models and draft heads on the worker."""

from __future__ import annotations

from collections.abc import Sequence

from llaisys.common.types import DraftRequest, SchedulerOutputs, StepOutput
from llaisys.engine.worker.input_batch import InputBatch
from llaisys.models.base import ModelAdapter


class Drafter:
    """Owns its adapter and closes it."""

    adapter: ModelAdapter

    def draft(
        self, requests: Sequence[DraftRequest], released: Sequence[int] = ()
    ) -> list[list[int]]:
        """Return up to `count` draft tokens per request. `released`: sequences to free, which have
        finished or are restarted."""
        raise NotImplementedError

    def observe(
        self, plan: SchedulerOutputs, output: StepOutput, batch: InputBatch, model: ModelAdapter
    ) -> None:
        """A step of the model was sampled; its hidden states are still available."""

    def skip(self, plan: SchedulerOutputs) -> None:
        """A step was launched that is not observed."""

    def close(self) -> None:
        self.adapter.close()
