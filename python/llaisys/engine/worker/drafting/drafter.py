"""Interface of draft models and draft heads on the worker."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from llaisys.common.types import DraftRequest, SchedulerOutputs, StepOutput
from llaisys.engine.worker.input_batch import InputBatch
from llaisys.models.base import ModelAdapter


class Drafter(ABC):
    """Owns its adapter and closes it."""

    adapter: ModelAdapter

    @abstractmethod
    def draft(
        self, requests: Sequence[DraftRequest], released: Sequence[int] = ()
    ) -> list[list[int]]:
        """Return up to `count` draft tokens per request. `released`: sequences to free, which have
        finished or are restarted."""

    @abstractmethod
    def observe(
        self, plan: SchedulerOutputs, output: StepOutput, batch: InputBatch, model: ModelAdapter
    ) -> None:
        """Observe a sampled step of the model; its hidden states are still available."""

    @abstractmethod
    def skip(self, plan: SchedulerOutputs) -> None:
        """Note a launched step that is not observed."""

    def close(self) -> None:
        self.adapter.close()
