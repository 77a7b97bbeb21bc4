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

LONG_PIECE = 64  # tokens of a sequence, on average: then slices take less time than gathers


class PromptLogprobRows(NamedTuple):
    """Tokens of a prompt whose successors' logprobs are wanted; m in number."""

    seq_id: int
    start: int  # position of the first successor
    tokens: NDArray[np.int64]  # [m]: index in the step
    successors: NDArray[np.int64]  # [m]
    num_top: int  # logprobs of so many of the best


@dataclass(slots=True)
class PreparedStep(ModelStepInput):
    """The tokens of a step, and what the later stages need to know of its sequences."""

    rows: NDArray[np.int64]  # [s]
    ends: NDArray[np.int64]  # [s]: tokens computed after the step
    drawing: SamplingBatch
    scored: tuple[PromptLogprobRows, ...] = ()
    pooled: tuple[int, ...] = ()  # sequences whose vectors are complete with this step


class _Piece(NamedTuple):
    """Tokens of a sequence from `start` on, [first, end) of the step."""

    row: int
    start: int
    first: int
    end: int


def _pieces(rows: list[int], starts: list[int], counts: list[int]) -> Iterator[_Piece]:
    end = 0
    for row, start, count in zip(rows, starts, counts, strict=True):
        first, end = end, end + count
        yield _Piece(row, start, first, end)


def _check_inside(blocks: NDArray[np.int32]) -> None:
    if blocks.min() < 0:
        raise RuntimeError("a token of the step lies outside the blocks of its sequence")


class StepBuffers:
    """The arrays of one step; the next step overwrites them. n tokens, s sequences."""

    def __init__(self, rows: InputBatch, max_tokens: int) -> None:
        self._rows = rows
        self.token_ids = np.zeros(max_tokens, dtype=np.int64)
        self.positions = np.zeros(max_tokens, dtype=np.int64)
        self.token_seq_ids = np.zeros(max_tokens, dtype=np.int64)
        self.logits_mask = np.zeros(max_tokens, dtype=np.int8)
        self.slot_mapping = np.zeros(max_tokens, dtype=np.int32)
        self._token_rows = np.zeros(max_tokens, dtype=np.int64)
        self._arange = np.arange(max_tokens, dtype=np.int64)
        self._offsets = np.arange(rows.block_size, dtype=np.int32)
        self._pieces: list[_Piece] = []  # of the step that was filled last, if they are long

    def fill_tokens(self, plan: SchedulerOutputs) -> PreparedStep:
        """Lay the sequences' token ranges end to end."""
        rows = self._rows
        num_seqs, n = len(plan.seq_ids), sum(plan.counts)
        step_rows = np.fromiter(map(rows.row_of.__getitem__, plan.seq_ids), np.int64, num_seqs)
        starts = np.fromiter(plan.starts, np.int64, num_seqs)
        if n > len(self.token_ids):
            raise RuntimeError(f"a step of {n} tokens; the buffers hold {len(self.token_ids)}")
        token_rows, positions = self._token_rows[:n], self.positions[:n]
        self._pieces = []
        if n == num_seqs:  # one token each
            token_rows[:] = step_rows
            positions[:] = starts
            ends, last_tokens = starts + 1, self._arange[:n]
        elif n >= LONG_PIECE * num_seqs:
            counts = np.array(plan.counts, dtype=np.int64)
            ends, last_tokens = starts + counts, counts.cumsum() - 1
            self._pieces = list(_pieces(step_rows.tolist(), plan.starts, plan.counts))
        else:
            counts = np.array(plan.counts, dtype=np.int64)
            ends, edges = starts + counts, counts.cumsum()
            # Token j of the step has position j - (the sequence's first index) + its start.
            token_rows[:] = step_rows.repeat(counts)
            positions[:] = self._arange[:n] + (ends - edges).repeat(counts)
            last_tokens = edges - 1
        drawing = SamplingBatch(step_rows, ends, last_tokens)
        if plan.draft_token_ids:
            drafts = self._write_drafts(plan, step_rows, ends)
            drawing = SamplingBatch(step_rows, ends - drafts, last_tokens - drafts, drafts)
        if False in plan.samples:
            drawing = drawing.only(np.flatnonzero(plan.samples))
        token_ids, seq_ids = self.token_ids[:n], self.token_seq_ids[:n]
        if self._pieces:
            for row, start, first, end in self._pieces:
                np.add(self._arange[: end - first], start, out=positions[first:end])
                token_ids[first:end] = rows.tokens[row, start : start + end - first]
                seq_ids[first:end] = rows.seq_ids[row]
        else:
            token_ids[:] = rows.tokens[token_rows, positions]
            seq_ids[:] = rows.seq_ids[token_rows]
        logits_mask = self.logits_mask[:n]
        logits_mask[:] = 0
        logits_mask[drawing.tokens] = 1
        if drawing.drafts is not None:
            for index in range(int(drawing.drafts.max(initial=0))):
                logits_mask[drawing.tokens[drawing.drafts > index] + index + 1] = 1
        return PreparedStep(token_ids, positions, seq_ids, logits_mask, step_rows, ends, drawing)

    def _write_drafts(
        self, plan: SchedulerOutputs, step_rows: NDArray[np.int64], ends: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Put the drafts behind the tokens of their sequences; how many each sequence has. What is
        drawn overwrites them."""
        counts = np.zeros(len(step_rows), dtype=np.int64)
        for index, seq_id in enumerate(plan.seq_ids):
            ids = plan.draft_token_ids.get(seq_id)
            if ids:
                counts[index] = len(ids)
                end = int(ends[index])
                self._rows.tokens[step_rows[index], end - len(ids) : end] = ids
        return counts

    def fill_attention(self, step: PreparedStep) -> AttentionMetadata:
        """Where each token of the step that was filled last is written, and what each sequence may
        look at."""
        rows, block_size = self._rows, self._rows.block_size
        slot_mapping = self.slot_mapping[: len(step.positions)]
        if self._pieces:
            for row, start, first, end in self._pieces:
                begin, inside = divmod(start, block_size)
                behind = start + end - first
                blocks = rows.blocks[row, begin : -(-behind // block_size)]
                _check_inside(blocks)
                slots = np.add.outer(blocks * block_size, self._offsets).reshape(-1)
                slot_mapping[first:end] = slots[inside : inside + end - first]
        else:
            indices = step.positions // block_size
            blocks = rows.blocks[self._token_rows[: len(indices)], indices]
            _check_inside(blocks)
            slot_mapping[:] = step.positions + (blocks - indices) * block_size
        width = int(rows.num_blocks[step.rows].max())
        return AttentionMetadata(
            slot_mapping=slot_mapping,
            batch_seq_ids=rows.seq_ids[step.rows],
            context_lens=step.ends.astype(np.int32),
            block_tables=rows.blocks[step.rows, :width],
        )
