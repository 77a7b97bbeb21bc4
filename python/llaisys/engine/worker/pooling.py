"""Pooling of prompts into embeddings: the tokens of a step that are pooled."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llaisys.common.types import NewSequence, SchedulerOutputs
from llaisys.models.base import ModelAdapter

LAST, MEAN = 1, 2  # LlaisysPooling


class PromptPooling:
    """The sequences whose prompts are pooled. The model owns the embeddings."""

    def __init__(self) -> None:
        self._requested: dict[int, tuple[int, int]] = {}  # seq id -> (prompt tokens, LAST or MEAN)

    def __bool__(self) -> bool:
        return bool(self._requested)

    def add(self, seq: NewSequence) -> None:
        if seq.sampling.pooling is not None:
            method = MEAN if seq.sampling.pooling == "mean" else LAST
            self._requested[seq.seq_id] = (seq.num_prompt_tokens, method)

    def release(self, adapter: ModelAdapter, seq_id: int) -> None:
        if self._requested.pop(seq_id, None) is not None:
            adapter.pool_forget(seq_id)

    def mark(self, plan: SchedulerOutputs) -> tuple[NDArray[np.uint8] | None, tuple[int, ...]]:
        """Return ([n] LlaisysPooling of each token, or None; sequences whose prompts end here)."""
        pooling, ended, first = np.zeros(sum(plan.counts), dtype=np.uint8), [], 0
        for seq_id, start, count in zip(plan.seq_ids, plan.starts, plan.counts, strict=True):
            num_prompt, method = self._requested.get(seq_id, (0, 0))
            end = first + count
            if method == MEAN:
                pooling[first:end] = MEAN
            if method and start + count >= num_prompt:
                pooling[end - 1] = method
                ended.append(seq_id)
            first = end
        return (pooling if pooling.any() else None), tuple(ended)


def read_pooled(adapter: ModelAdapter, seq_ids: tuple[int, ...]) -> dict[int, bytes]:
    """Return the embeddings of sequences whose prompts ended in the last step."""
    return {seq_id: adapter.pooled(seq_id).tobytes() for seq_id in seq_ids}
