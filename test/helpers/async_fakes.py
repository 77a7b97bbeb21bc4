"""The fake model with asynchronous launches: a launched step runs at a random time before it is
collected.

It reads its input arrays when it runs, so a worker that overwrites them too early changes the
output.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from engine_fakes import FakeAdapter, make_engine
from numpy.typing import NDArray

from llaisys.common.step import (
    AttentionMetadata,
    ForwardOutput,
    ModelStepInput,
    SamplingMetadata,
)
from llaisys.common.types import TokenLogprobs
from llaisys.engine.llm_engine import LLMEngine
from llaisys.models.base import AdapterOptions


@dataclass
class Launched:
    ticket: int
    is_behind: bool
    step: ModelStepInput
    attention: AttentionMetadata
    sampling: SamplingMetadata
    tokens: NDArray[np.int32] | None = None
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    error: Exception | None = None


class AsyncAdapter(FakeAdapter):
    can_launch = True

    def __init__(self, options: AdapterOptions) -> None:
        super().__init__(options)
        self.early = random.Random(0)  # whether a step runs at once; reseed for another order
        self.num_launched = 0
        self._waiting: deque[Launched] = deque()
        self._out: deque[Launched] = deque()
        self._last: Launched | None = None  # that ran
        self._collected: Launched | None = None
        self._forward = ForwardOutput(0, np.zeros(0, np.int32))

    def launch(
        self, step: ModelStepInput, attention: AttentionMetadata, sampling: SamplingMetadata
    ) -> int:
        self.num_launched += 1
        job = Launched(self.num_launched, bool(self._out), step, attention, sampling)
        self._waiting.append(job)
        self._out.append(job)
        assert len(self._out) <= 2
        if self.early.random() < 0.5:
            self.settle()
        return job.ticket

    def collect(self, ticket: int) -> NDArray[np.int32] | None:
        self.settle()
        while self._out[0].ticket != ticket:
            self._out.popleft()
        self._collected = job = self._out.popleft()
        if job.error is not None:
            raise job.error
        return job.tokens

    def collected_logprobs(self, index: int) -> TokenLogprobs | None:
        assert self._collected is not None
        return self._collected.logprobs[index]

    def last_output(self) -> ForwardOutput:
        self.settle()
        return self._forward

    def settle(self) -> None:
        while self._waiting:
            self._run(self._waiting.popleft())

    def _run(self, job: Launched) -> None:
        before, self._last = self._last, job
        if job.is_behind and (before is None or before.tokens is None):
            return
        tokens = job.step.token_ids.copy()
        if (tokens < 0).any():
            assert before is not None and before.tokens is not None
            assert before.ticket == job.ticket - 1
            tokens[tokens < 0] = before.tokens[-1 - tokens[tokens < 0]]
        step = ModelStepInput(tokens, job.step.positions, job.step.seq_ids, job.step.logits_mask)
        try:
            self._forward = ForwardOutput(0, np.zeros(0, np.int32))
            self._forward = super().forward(step, job.attention)
            sampled = super().sample(job.sampling)
        except Exception as error:
            job.error = error
            return
        job.tokens = sampled
        job.logprobs = [super(AsyncAdapter, self).logprobs(i) for i in range(len(sampled))]
        if job.sampling.seq_ids is not None:
            for seq, token in zip(job.sampling.seq_ids.tolist(), sampled.tolist(), strict=True):
                if seq in self.histories:
                    self.histories[seq].append(token)

    def forward(self, step: ModelStepInput, attention: AttentionMetadata | None) -> ForwardOutput:
        self.settle()
        self._forward = super().forward(step, attention)
        return self._forward

    def sample(self, sampling: SamplingMetadata) -> NDArray[np.int32]:
        self.settle()
        return super().sample(sampling)

    def sampler_reset(self, seq_id: int, prompt: Sequence[int]) -> None:
        self.settle()
        super().sampler_reset(seq_id, prompt)

    def sampler_forget(self, seq_id: int) -> None:
        self.settle()
        super().sampler_forget(seq_id)

    def copy_slots(self, src: NDArray[np.int32], dst: NDArray[np.int32]) -> None:
        self.settle()
        super().copy_slots(src, dst)

    def shift_slots(self, slots: NDArray[np.int32], deltas: NDArray[np.int64]) -> None:
        self.settle()
        super().shift_slots(slots, deltas)


def make_async_engine(order: int = 0, **settings: Any) -> LLMEngine:
    """Return an engine with asynchronous scheduling; `order`: seed of the times of its steps."""
    engine = make_engine(**{"adapter_class": AsyncAdapter, "async_scheduling": "on", **settings})
    assert engine.core.is_async
    adapter = async_adapter_of(engine)
    adapter.early.seed(order)
    return engine


def async_adapter_of(engine: LLMEngine) -> AsyncAdapter:
    adapter = engine.core.executor.worker.adapter  # type: ignore[attr-defined]
    assert isinstance(adapter, AsyncAdapter)
    return adapter
