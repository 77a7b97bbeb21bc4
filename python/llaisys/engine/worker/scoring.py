"""Logprobs of a prompt's own tokens: which rows of a step they need, and how they are read.

A row's logits say how likely each token is that could follow. The native sampler already knows how
to turn a row into logprobs, of the drawn token and of the best; so the token that does follow is
what it is made to draw. What it reports is taken before any bias.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from llaisys.common.step import SamplingMetadata
from llaisys.common.types import NewSequence, PromptLogprobs, SchedulerOutputs, TokenLogprobs
from llaisys.engine.worker.input_batch import InputBatch
from llaisys.engine.worker.step_buffers import PromptLogprobRows
from llaisys.models.base import ModelAdapter

FORCED = 1e30  # a bias that no logit can make up for


class PromptScoring:
    """The sequences whose prompts are scored."""

    def __init__(self) -> None:
        self._wanted: dict[int, tuple[int, int]] = {}  # seq id -> (prompt tokens, how many best)

    def __bool__(self) -> bool:
        return bool(self._wanted)

    def add(self, seq: NewSequence) -> None:
        if seq.sampling.prompt_logprobs is not None and seq.choice == 0:
            self._wanted[seq.seq_id] = (seq.num_prompt_tokens, seq.sampling.prompt_logprobs)

    def release(self, seq_id: int) -> None:
        self._wanted.pop(seq_id, None)

    def mark(
        self, plan: SchedulerOutputs, logits_mask: NDArray[np.int8], rows: InputBatch
    ) -> tuple[PromptLogprobRows, ...]:
        """What a step scores; the logits of those tokens are asked for."""
        found, first = [], 0
        for seq_id, start, count in zip(plan.seq_ids, plan.starts, plan.counts, strict=True):
            num_prompt, num_top = self._wanted.get(seq_id, (0, 0))
            scored = min(start + count, num_prompt - 1) - start  # the last one has no successor
            if scored > 0:
                tokens = np.arange(first, first + scored, dtype=np.int64)
                successors = rows.tokens[rows.row_of[seq_id], start + 1 : start + 1 + scored]
                logits_mask[tokens] = 1
                found.append(
                    PromptLogprobRows(
                        seq_id, start + 1, tokens, successors.astype(np.int64), num_top
                    )
                )
            first += count
        return tuple(found)


def score_prompt(
    adapter: ModelAdapter, output_rows: NDArray[Any], prompt: PromptLogprobRows
) -> PromptLogprobs:
    """Read the logprobs of a step's part of a prompt from the last forward."""
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
        found = adapter.logprobs(index)
        if found is None:
            raise RuntimeError(f"no logprobs of row {index} of a scored prompt")
        top = list(zip(found.top_ids, found.top_logprobs, strict=True))
        entries.append(TokenLogprobs(token, found.sampled, found.sampled_rank, top))
    return PromptLogprobs(prompt.start, entries)
