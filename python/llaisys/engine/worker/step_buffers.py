"""The arrays of a step, filled from the input batch.

A step names sequences and ranges of their tokens; everything per token is then numpy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llaisys.common.step import AttentionMetadata, ModelStepInput
from llaisys.common.types import SchedulerOutputs
from llaisys.engine.worker.input_batch import InputBatch
from llaisys.engine.worker.sampling_batch import SamplingBatch

LONG_CHUNK = 64  # mean tokens per sequence from which on slices are faster than gathers


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
    pooled: tuple[int, ...] = ()  # sequences whose embeddings are complete after this step


class _Chunk(NamedTuple):
    """Tokens [first, end) of the step are those of a row from position `start` on."""

    row: int
    start: int
    first: int
    end: int


def _chunks(rows: list[int], starts: list[int], counts: list[int]) -> Iterator[_Chunk]:
    end = 0
    for row, start, count in zip(rows, starts, counts, strict=True):
        first, end = end, end + count
        yield _Chunk(row, start, first, end)


def _check_blocks(blocks: NDArray[np.int32]) -> None:
    if blocks.min() < 0:
        raise RuntimeError("a token of the step is outside the blocks of its sequence")


class StepBuffers:
    """The arrays of one step; the next step overwrites them. n tokens, s sequences."""

    def __init__(self, batch: InputBatch, max_tokens: int) -> None:
        self._batch = batch
        self.token_ids = np.zeros(max_tokens, dtype=np.int64)
        self.positions = np.zeros(max_tokens, dtype=np.int64)
        self.token_seq_ids = np.zeros(max_tokens, dtype=np.int64)
        self.logits_mask = np.zeros(max_tokens, dtype=np.int8)
        self.slot_mapping = np.zeros(max_tokens, dtype=np.int32)
        self.lora_slots = np.zeros(max_tokens, dtype=np.int32)
        self._token_rows = np.zeros(max_tokens, dtype=np.int64)
        self._arange = np.arange(max_tokens, dtype=np.int64)
        self._offsets = np.arange(batch.block_size, dtype=np.int32)
        self._chunks: list[_Chunk] = []  # of the step filled last, if they are long

    def fill_tokens(self, plan: SchedulerOutputs) -> PreparedStep:
        """Concatenate the token ranges of the sequences."""
        batch = self._batch
        num_seqs, n = len(plan.seq_ids), sum(plan.counts)
        step_rows = np.fromiter(map(batch.row_of.__getitem__, plan.seq_ids), np.int64, num_seqs)
        starts = np.fromiter(plan.starts, np.int64, num_seqs)
        if n > len(self.token_ids):
            raise RuntimeError(f"a step has {n} tokens; the limit is {len(self.token_ids)}")
        token_rows, positions = self._token_rows[:n], self.positions[:n]
        self._chunks = []
        if n == num_seqs:  # one token each
            token_rows[:] = step_rows
            positions[:] = starts
            ends, last_tokens = starts + 1, self._arange[:n]
        elif n >= LONG_CHUNK * num_seqs:
            counts = np.array(plan.counts, dtype=np.int64)
            ends, last_tokens = starts + counts, counts.cumsum() - 1
            self._chunks = list(_chunks(step_rows.tolist(), plan.starts, plan.counts))
        else:
            counts = np.array(plan.counts, dtype=np.int64)
            ends, edges = starts + counts, counts.cumsum()
            # Token j of the step has position j - (the sequence's first index) + its start.
            token_rows[:] = step_rows.repeat(counts)
            positions[:] = self._arange[:n] + (ends - edges).repeat(counts)
            last_tokens = edges - 1
        sampling = SamplingBatch(step_rows, ends, last_tokens)
        if plan.draft_token_ids:
            drafts = self._write_drafts(plan, step_rows, ends)
            sampling = SamplingBatch(step_rows, ends - drafts, last_tokens - drafts, drafts)
        if False in plan.samples:
            sampling = sampling.select(np.flatnonzero(plan.samples))
        token_ids, seq_ids = self.token_ids[:n], self.token_seq_ids[:n]
        if self._chunks:
            for row, start, first, end in self._chunks:
                np.add(self._arange[: end - first], start, out=positions[first:end])
                token_ids[first:end] = batch.tokens[row, start : start + end - first]
                seq_ids[first:end] = batch.seq_ids[row]
        else:
            token_ids[:] = batch.tokens[token_rows, positions]
            seq_ids[:] = batch.seq_ids[token_rows]
        logits_mask = self.logits_mask[:n]
        logits_mask[:] = 0
        logits_mask[sampling.tokens] = 1
        if sampling.drafts is not None:
            for index in range(int(sampling.drafts.max(initial=0))):
                logits_mask[sampling.tokens[sampling.drafts > index] + index + 1] = 1
        step = PreparedStep(token_ids, positions, seq_ids, logits_mask, step_rows, ends, sampling)
        if batch.num_loras:
            step.lora_slots = self._fill_lora_slots(step_rows, token_rows)
        return step

    def _fill_lora_slots(
        self, step_rows: NDArray[np.int64], token_rows: NDArray[np.int64]
    ) -> NDArray[np.int32] | None:
        """Return the adapter slot of each token; None: no sequence of the step has one."""
        by_row = self._batch.lora_slots
        if by_row[step_rows].max() < 0:
            return None
        slots = self.lora_slots[: len(token_rows)]
        if self._chunks:
            for row, _, first, end in self._chunks:
                slots[first:end] = by_row[row]
        else:
            slots[:] = by_row[token_rows]
        return slots

    def _write_drafts(
        self, plan: SchedulerOutputs, step_rows: NDArray[np.int64], ends: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Write the drafts into the input batch and return their counts [s]. Sampled tokens
        overwrite them."""
        counts = np.zeros(len(step_rows), dtype=np.int64)
        for index, seq_id in enumerate(plan.seq_ids):
            ids = plan.draft_token_ids.get(seq_id)
            if ids:
                counts[index] = len(ids)
                end = int(ends[index])
                self._batch.tokens[step_rows[index], end - len(ids) : end] = ids
        return counts

    def fill_attention(self, step: PreparedStep) -> AttentionMetadata:
        """Return slots, context lengths and block tables of the step filled last."""
        batch, block_size = self._batch, self._batch.block_size
        slot_mapping = self.slot_mapping[: len(step.positions)]
        if self._chunks:
            for row, start, first, end in self._chunks:
                begin, offset = divmod(start, block_size)
                stop = start + end - first
                blocks = batch.blocks[row, begin : -(-stop // block_size)]
                _check_blocks(blocks)
                slots = np.add.outer(blocks * block_size, self._offsets).reshape(-1)
                slot_mapping[first:end] = slots[offset : offset + end - first]
        else:
            indices = step.positions // block_size
            blocks = batch.blocks[self._token_rows[: len(indices)], indices]
            _check_blocks(blocks)
            slot_mapping[:] = step.positions + (blocks - indices) * block_size
        width = int(batch.num_blocks[step.rows].max())
        return AttentionMetadata(
            slot_mapping=slot_mapping,
            batch_seq_ids=batch.seq_ids[step.rows],
            context_lens=step.ends.astype(np.int32),
            block_tables=batch.blocks[step.rows, :width],
        )
