"""Sequences that are pooled into a vector: which tokens of a step go into it, and who is done."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llaisys.common.types import NewSequence, SchedulerOutputs
from llaisys.models.base import ModelAdapter

LAST, MEAN = 1, 2  # LlaisysPooling


class PromptPooling:
    """The sequences that want a vector of their prompt. The vectors themselves are the model's."""

    def __init__(self) -> None:
        self._wanted: dict[int, tuple[int, int]] = {}  # seq id -> (prompt tokens, LAST or MEAN)

    def __bool__(self) -> bool:
        return bool(self._wanted)

    def add(self, seq: NewSequence) -> None:
        if seq.sampling.pooling is not None:
            how = MEAN if seq.sampling.pooling == "mean" else LAST
            self._wanted[seq.seq_id] = (seq.num_prompt_tokens, how)

    def release(self, adapter: ModelAdapter, seq_id: int) -> None:
        if self._wanted.pop(seq_id, None) is not None:
            adapter.pool_forget(seq_id)

    def mark(self, plan: SchedulerOutputs) -> tuple[NDArray[np.uint8] | None, tuple[int, ...]]:
        """([n] what each token of the step does, the sequences whose prompts end in it)."""
        pooling, ended, first = np.zeros(sum(plan.counts), dtype=np.uint8), [], 0
        for seq_id, start, count in zip(plan.seq_ids, plan.starts, plan.counts, strict=True):
            num_prompt, how = self._wanted.get(seq_id, (0, 0))
            end = first + count
            if how == MEAN:
                pooling[first:end] = MEAN
            if how and start + count >= num_prompt:
                pooling[end - 1] = how
                ended.append(seq_id)
            first = end
        return (pooling if pooling.any() else None), tuple(ended)


def read_vectors(adapter: ModelAdapter, seq_ids: tuple[int, ...]) -> dict[int, bytes]:
    """Of sequences whose prompts have ended in the last step."""
    return {seq_id: adapter.pooled(seq_id).tobytes() for seq_id in seq_ids}
