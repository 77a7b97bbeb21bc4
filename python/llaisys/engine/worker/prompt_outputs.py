"""Outputs of prompts: logprobs of their tokens, and embeddings pooled over them.

The native sampler reports logprobs of the sampled token and of the top tokens, before any bias. A
large bias forces it to sample the next token of the prompt.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llaisys.common.sampling import SCORE
from llaisys.common.step import SamplingMetadata
from llaisys.common.types import NewSequence, PromptLogprobs, SchedulerOutputs
from llaisys.engine.worker.input_batch import InputBatch
from llaisys.engine.worker.step_buffers import PreparedStep, PromptLogprobRows
from llaisys.models.base import ModelAdapter

FORCED = 1e30  # bias of a forced token


class PromptLogprobState:
    """The sequences whose prompt logprobs are requested."""

    def __init__(self) -> None:
        self._requested: dict[int, tuple[int, int]] = {}  # seq id -> (prompt tokens, top n)

    def __bool__(self) -> bool:
        return bool(self._requested)

    def add(self, seq: NewSequence) -> None:
        if seq.sampling.prompt_logprobs is not None and seq.choice == 0:
            self._requested[seq.seq_id] = (seq.num_prompt_tokens, seq.sampling.prompt_logprobs)

    def release(self, seq_id: int) -> None:
        self._requested.pop(seq_id, None)

    def mark(
        self, plan: SchedulerOutputs, logits_mask: NDArray[np.int8], batch: InputBatch
    ) -> tuple[PromptLogprobRows, ...]:
        """Return the prompt tokens of a step with logprobs, and set them in `logits_mask`."""
        found, first = [], 0
        for seq_id, start, count in zip(plan.seq_ids, plan.starts, plan.counts, strict=True):
            num_prompt, num_top = self._requested.get(seq_id, (0, 0))
            num_rows = min(start + count, num_prompt - 1) - start  # the last one has no successor
            if num_rows > 0:
                tokens = np.arange(first, first + num_rows, dtype=np.int64)
                successors = batch.tokens[batch.row_of[seq_id], start + 1 : start + 1 + num_rows]
                logits_mask[tokens] = 1
                found.append(
                    PromptLogprobRows(
                        seq_id, start + 1, tokens, successors.astype(np.int64), num_top
                    )
                )
            first += count
        return tuple(found)


def prompt_logprobs(
    adapter: ModelAdapter, output_rows: NDArray[Any], prompt: PromptLogprobRows
) -> PromptLogprobs:
    """Return the logprobs of a chunk of a prompt from the last forward pass."""
    count = len(prompt.tokens)
    adapter.sample(
        SamplingMetadata(
            rows=output_rows.astype(np.int32),
            bias_offsets=np.arange(count + 1, dtype=np.int32),
            bias_ids=prompt.successors.astype(np.int32),
            bias_values=np.full(count, FORCED, dtype=np.float32),
            numbers={
                "temperature": np.zeros(count, dtype=np.float64),
                "n_logprobs": np.full(count, prompt.num_top, dtype=np.float64),
            },
        )
    )
    entries = []
    for index, token in enumerate(prompt.successors.tolist()):
        entry = adapter.logprobs(index)
        if entry is None:
            raise RuntimeError(f"no logprobs of row {index} of a prompt")
        entry.token_id = token
        entries.append(entry)
    return PromptLogprobs(prompt.start, entries)


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
