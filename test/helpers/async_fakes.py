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

from llaisys.common.sampling import SamplingParams
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


SMALL = {"num_blocks": 24, "max_num_seqs": 4, "max_num_batched_tokens": 12}


def random_params(rng: random.Random) -> SamplingParams:
    """Random requests of every kind, some of which need sync."""
    fields: dict[str, Any] = {"max_tokens": rng.randint(1, 12), "seed": rng.randint(0, 99)}
    if rng.random() < 0.5:
        fields["temperature"] = 0.0
    if rng.random() < 0.3:
        fields["logprobs"] = rng.randint(0, 3)
    if rng.random() < 0.3:
        fields["frequency_penalty"] = 0.7
    if rng.random() < 0.2:
        fields["min_tokens"] = rng.randint(0, fields["max_tokens"])
    if rng.random() < 0.2:
        fields["n"] = rng.randint(2, 3)
    if rng.random() < 0.2:
        fields["stop_token_ids"] = [rng.randint(1, 60) for _ in range(12)]
    if rng.random() < 0.15:
        fields["bad_words"] = ["ab", "0"]
    if rng.random() < 0.1:
        fields["prompt_logprobs"] = 1
    return SamplingParams(**fields)


def run_random(engine: LLMEngine, seed: int) -> dict[str, Any]:
    """Run requests that arrive while others run, cancel some, and return the outputs."""
    rng = random.Random(seed)
    shared = [rng.randint(1, 60) for _ in range(12)]
    pending = []
    for index in range(rng.randint(2, 9)):
        prompt = shared[: rng.randint(0, 12)] + [
            rng.randint(1, 60) for _ in range(rng.randint(1, 9))
        ]
        pending.append((str(index), prompt, random_params(rng)))
    cancelled = {str(rng.randint(0, 8)) for _ in range(rng.randint(0, 2))}
    results: dict[str, Any] = {}
    while pending or engine.has_unfinished():
        for _ in range(min(len(pending), rng.choice((0, 0, 1, 2)))):
            name, prompt, params = pending.pop()
            engine.submit(prompt, params, request_id=name)
        parts = engine.step() if engine.has_unfinished() else []
        for name in sorted(cancelled):
            if rng.random() < 0.1:
                parts += engine.cancel(name)
        for part in parts:
            if part.output is not None:
                results[part.request_id] = [
                    (c.token_ids, c.finish_reason, c.stop_reason, c.logprobs)
                    for c in part.output.outputs
                ]
    engine.core.scheduler.check_integrity()
    assert engine.core.scheduler.block_manager.num_used_blocks == 0
    return results


def assert_same(got: dict[str, Any], expected: dict[str, Any]) -> None:
    assert got.keys() == expected.keys()
    for name, choices in expected.items():
        for (tokens, reason, stop, logprobs), other in zip(choices, got[name], strict=True):
            if "abort" in (reason, other[1]):  # it depends on the moment how far they came
                both = min(len(tokens), len(other[0]))
                tokens, other = tokens[:both], (other[0][:both], *other[1:])
                assert tokens == other[0]
            else:
                assert (tokens, reason, stop, logprobs) == other
