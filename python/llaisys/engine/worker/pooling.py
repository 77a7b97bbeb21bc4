"""Pooling of prompts into embeddings: the tokens of a step that are pooled."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from llaisys.common.sampling import SCORE
from llaisys.common.types import NewSequence, SchedulerOutputs
from llaisys.engine.worker.step_buffers import PreparedStep
from llaisys.models.base import ModelAdapter

NONE, LAST, MEAN = 0, 1, 2  # LlaisysPooling


class _Pooled(NamedTuple):
    num_prompt: int  # tokens
    method: str  # 'last' | 'cls' | 'mean'
    is_score: bool
    second_text: int  # first token of the second text; 0: no pair


class PromptPooling:
    """The sequences whose prompts are pooled. The model owns the embeddings."""

    def __init__(self) -> None:
        self._requested: dict[int, _Pooled] = {}  # by seq id

    def __bool__(self) -> bool:
        return bool(self._requested)

    def add(self, adapter: ModelAdapter, seq: NewSequence) -> None:
        sampling = seq.sampling
        if sampling.pooling is None:
            return
        method, is_score = sampling.pooling, sampling.pooling == SCORE
        if is_score:
            head = adapter.score_head
            method = "last" if head is not None and head.is_judge else "cls"
        pair = sampling.second_text or 0
        self._requested[seq.seq_id] = _Pooled(seq.num_prompt_tokens, method, is_score, pair)

    def release(self, adapter: ModelAdapter, seq_id: int) -> None:
        if self._requested.pop(seq_id, None) is not None:
            adapter.pool_forget(seq_id)

    def mark(self, plan: SchedulerOutputs, step: PreparedStep) -> None:
        """Set the pooling and the type of each token, and the sequences whose prompts end."""
        pooling, types = (np.zeros(sum(plan.counts), dtype=np.uint8) for _ in range(2))
        ended, first = [], 0
        for seq_id, start, count in zip(plan.seq_ids, plan.starts, plan.counts, strict=True):
            end = first + count
            found = self._requested.get(seq_id)
            if found is not None:
                is_end = start + count >= found.num_prompt
                if found.method == "mean":
                    pooling[first:end] = MEAN
                elif found.method == "cls":
                    pooling[first] = LAST if start == 0 else NONE
                elif is_end:
                    pooling[end - 1] = LAST
                if found.second_text:
                    types[first + max(0, found.second_text - start) : end] = 1
                if is_end:
                    ended.append((seq_id, found.is_score))
            first = end
        step.pooling = pooling if pooling.any() else None
        step.token_types = types if types.any() else None
        step.pooled = tuple(ended)


def read_pooled(adapter: ModelAdapter, pooled: tuple[tuple[int, bool], ...]) -> dict[int, bytes]:
    """Return the embeddings, or scores, of sequences whose prompts ended in the last step."""
    found = {}
    for seq_id, is_score in pooled:
        state = adapter.pooled(seq_id)
        if is_score and adapter.score_head is not None:
            state = adapter.score_head(state)
        found[seq_id] = state.tobytes()
    return found
