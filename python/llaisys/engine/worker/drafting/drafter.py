"""What the worker knows of a source of drafts that has weights."""

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
        self, requests: Sequence[DraftRequest], forgotten: Sequence[int] = ()
    ) -> list[list[int]]:
        """At most as many tokens for each as it asks for; none: not now. The sequences `forgotten`
        have gone, or begin anew."""

    @abstractmethod
    def observe(
        self, plan: SchedulerOutputs, output: StepOutput, rows: InputBatch, model: ModelAdapter
    ) -> None:
        """A step of the model has been drawn from; its hidden states are there still."""

    @abstractmethod
    def pass_over(self, plan: SchedulerOutputs) -> None:
        """A step is launched of which it will not hear again."""

    def close(self) -> None:
        self.adapter.close()
