"""The arrays of a step, filled from the input batch, and its sequences that sample.

A step names sequences and ranges of their tokens; what there is per token is filled natively.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llaisys.common.step import AttentionMetadata, ModelStepInput
from llaisys.common.types import SchedulerOutputs, StepOutput, TokenLogprobs
from llaisys.engine.worker.input_batch import InputBatch
from llaisys.models.step_filler import StepFiller


class SamplingBatch(NamedTuple):
    """The sequences of a step that sample a token, in the plan's order; r rows."""

    rows: NDArray[np.int64]  # [r]: row of the input batch
    ends: NDArray[np.int64]  # [r]: position of the sampled token
    tokens: NDArray[np.int64]  # [r]: index in the step of the token before it
    drafts: NDArray[np.int64] | None = None  # [r]: draft tokens from `ends` on; None: no drafts

    def select(self, chosen: NDArray[Any]) -> SamplingBatch:
        """Return some of the rows, by index or by mask."""
        drafts = None if self.drafts is None else self.drafts[chosen]
        return SamplingBatch(self.rows[chosen], self.ends[chosen], self.tokens[chosen], drafts)

    def next_tokens(self, accepted: NDArray[np.bool_]) -> SamplingBatch:
        """Return the rows whose draft token was accepted, one token further."""
        rows, ends, tokens, drafts = self.select(accepted)
        assert drafts is not None
        return SamplingBatch(rows, ends + 1, tokens + 1, drafts - 1)

    def expand_drafts(self) -> SamplingBatch:
        """Return a row for each draft token as well, after the first row of its sequence."""
        assert self.drafts is not None
        counts = self.drafts + 1
        first = counts.cumsum() - counts
        offsets = np.arange(counts.sum()) - first.repeat(counts)
        rows, ends, tokens, drafts = self.select(np.arange(len(counts)).repeat(counts))
        assert drafts is not None
        return SamplingBatch(rows, ends + offsets, tokens + offsets, drafts - offsets)


class SampledTokens(NamedTuple):
    """The result of sampling, by sequence id."""

    tokens: dict[int, list[int]]  # more than one when drafts were accepted
    logprobs: dict[int, list[TokenLogprobs]]  # of sequences that request them
    failed: dict[int, str]  # errors

    def output(self, step_id: int) -> StepOutput:
        return StepOutput(step_id, self.tokens, self.logprobs, failed=self.failed)


class PromptLogprobRows(NamedTuple):
    """Prompt tokens of a step whose successors' logprobs are requested; m tokens."""

    seq_id: int
    start: int  # position of the first successor
    tokens: NDArray[np.int64]  # [m]: index in the step
    successors: NDArray[np.int64]  # [m]
    num_top: int  # number of top logprobs


@dataclass(slots=True)
class PreparedStep(ModelStepInput):
    """The tokens of a step, and its sequences for the later stages."""

    rows: NDArray[np.int64]  # [s]
    ends: NDArray[np.int64]  # [s]: tokens computed after the step
    sampling: SamplingBatch
    prompt_logprobs: tuple[PromptLogprobRows, ...] = ()
    # (sequence, is a score) of the embeddings that are complete after this step
    pooled: tuple[tuple[int, bool], ...] = ()


class StepBuffers:
    """The arrays of one step; the next step overwrites them. n tokens, s sequences."""

    def __init__(self, batch: InputBatch, max_tokens: int) -> None:
        self._batch = batch
        self.token_ids = np.zeros(max_tokens, dtype=np.int64)
        self.positions = np.zeros(max_tokens, dtype=np.int64)
        self.token_seq_ids = np.zeros(max_tokens, dtype=np.int64)
        self.logits_mask = np.zeros(max_tokens, dtype=np.int8)
        self.lora_slots = np.zeros(max_tokens, dtype=np.int32)
        self.slot_mapping = np.zeros(max_tokens, dtype=np.int32)
        # [max_rows] each: row, position of the first token, tokens, and tokens that need logits.
        self._ranges = np.zeros((4, batch.max_rows), dtype=np.int64)
        rows, starts, counts, num_logits = self._ranges
        self._filler = StepFiller(
            batch.block_size,
            row_tokens=batch.tokens,
            row_blocks=batch.blocks,
            row_seq_ids=batch.seq_ids,
            row_lora_slots=batch.lora_slots,
            rows=rows,
            starts=starts,
            n_tokens=counts,
            n_logits=num_logits,
            token_ids=self.token_ids,
            positions=self.positions,
            seq_ids=self.token_seq_ids,
            logits=self.logits_mask,
            lora_slots=self.lora_slots,
            slot_mapping=self.slot_mapping,
        )

    def fill_tokens(self, plan: SchedulerOutputs) -> PreparedStep:
        """Concatenate the token ranges of the sequences."""
        batch, n = self._batch, sum(plan.counts)
        if n > len(self.token_ids):
            raise RuntimeError(f"a step has {n} tokens; the limit is {len(self.token_ids)}")
        num_seqs = len(plan.seq_ids)
        rows, starts, counts, num_logits = self._ranges[:, :num_seqs]
        rows[:] = np.fromiter(map(batch.row_of.__getitem__, plan.seq_ids), np.int64, num_seqs)
        starts[:] = np.fromiter(plan.starts, np.int64, num_seqs)
        counts[:] = np.fromiter(plan.counts, np.int64, num_seqs)
        num_logits[:] = 1
        rows, ends, last_tokens = rows.copy(), starts + counts, counts.cumsum() - 1
        sampling = SamplingBatch(rows, ends, last_tokens)
        if plan.draft_token_ids:
            drafts = self._write_drafts(plan, rows, ends)
            num_logits += drafts
            sampling = SamplingBatch(rows, ends - drafts, last_tokens - drafts, drafts)
        if False in plan.samples:
            num_logits *= plan.samples
            sampling = sampling.select(np.flatnonzero(plan.samples))
        self._filler.fill_tokens(num_seqs)
        step = PreparedStep(
            self.token_ids[:n],
            self.positions[:n],
            self.token_seq_ids[:n],
            self.logits_mask[:n],
            rows,
            ends,
            sampling,
        )
        if batch.num_loras and batch.lora_slots[rows].max() >= 0:
            step.lora_slots = self.lora_slots[:n]
        return step

    def _write_drafts(
        self, plan: SchedulerOutputs, rows: NDArray[np.int64], ends: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Write the drafts into the input batch and return their counts [s]. Sampled tokens
        overwrite them."""
        counts = np.zeros(len(rows), dtype=np.int64)
        for index, seq_id in enumerate(plan.seq_ids):
            ids = plan.draft_token_ids.get(seq_id)
            if ids:
                counts[index] = len(ids)
                end = int(ends[index])
                self._batch.tokens[rows[index], end - len(ids) : end] = ids
        return counts

    def fill_attention(self, step: PreparedStep) -> AttentionMetadata:
        """Return slots, context lengths and block tables of the step filled last."""
        batch = self._batch
        self._filler.fill_slots(len(step.rows))
        width = int(batch.num_blocks[step.rows].max())
        return AttentionMetadata(
            slot_mapping=self.slot_mapping[: len(step.positions)],
            batch_seq_ids=batch.seq_ids[step.rows],
            context_lens=step.ends.astype(np.int32),
            block_tables=batch.blocks[step.rows, :width],
        )
