"""The sequences that a worker holds, one row each, in arrays that are made once.

A step names sequences and ranges of their tokens; everything per token is then numpy. A row keeps
its tokens and its block table between steps, so that a decoding sequence costs a step nothing but
its place in the gathers.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llaisys.common.step import AttentionMetadata, ModelStepInput
from llaisys.common.types import NewSequence, SchedulerOutputs


class SequenceRows:
    """Token ids and block tables by row. A row belongs to one sequence until `release`."""

    def __init__(self, max_rows: int, max_model_len: int, block_size: int) -> None:
        self.block_size = block_size
        self.max_rows = max_rows
        # Zero pages cost nothing until they are written: most rows stay far below the limit.
        self.tokens = np.zeros((max_rows, max_model_len + 1), dtype=np.int64)
        self.blocks = np.zeros((max_rows, -(-max_model_len // block_size) + 1), dtype=np.int32)
        self.blocks[:] = -1
        self.num_blocks = np.zeros(max_rows, dtype=np.int32)
        self.seq_ids = np.zeros(max_rows, dtype=np.int64)
        self.row_of: dict[int, int] = {}  # sequence -> row
        self._free = list(range(max_rows - 1, -1, -1))

    def add(self, seq: NewSequence) -> int:
        if seq.seq_id in self.row_of:
            raise RuntimeError(f"sequence {seq.seq_id} has a row already")
        row = self._free.pop()
        self.row_of[seq.seq_id] = row
        self.seq_ids[row] = seq.seq_id
        self.tokens[row, : len(seq.token_ids)] = seq.token_ids
        return row

    def append_blocks(self, seq_id: int, blocks: list[int]) -> None:
        row = self.row_of[seq_id]
        start = int(self.num_blocks[row])
        self.blocks[row, start : start + len(blocks)] = blocks
        self.num_blocks[row] = start + len(blocks)

    def release(self, seq_id: int) -> int | None:
        """The row that became free; None when the sequence has none."""
        row = self.row_of.pop(seq_id, None)
        if row is not None:
            self.blocks[row, : self.num_blocks[row]] = -1
            self.num_blocks[row] = 0
            self._free.append(row)
        return row


class StepBuffers:
    """The arrays of one step; the next step overwrites them. n tokens, s sequences."""

    def __init__(self, rows: SequenceRows, max_tokens: int) -> None:
        self._rows = rows
        self.token_ids = np.zeros(max_tokens, dtype=np.int64)
        self.positions = np.zeros(max_tokens, dtype=np.int64)
        self.token_seq_ids = np.zeros(max_tokens, dtype=np.int64)
        self.logits_mask = np.zeros(max_tokens, dtype=np.int8)
        self.slot_mapping = np.zeros(max_tokens, dtype=np.int32)
        self._token_rows = np.zeros(max_tokens, dtype=np.int64)
        self._arange = np.arange(max_tokens, dtype=np.int64)
        # Of the step being built:
        self.step_rows: NDArray[np.int64] = self._arange[:0]  # [s]
        self.ends: NDArray[np.int64] = self._arange[:0]  # [s]: tokens computed after the step
        self.last_tokens: NDArray[np.int64] = self._arange[:0]  # [s]: index of each last token
        self.samples: NDArray[np.bool_] = np.zeros(0, dtype=np.bool_)  # [s]

    def fill_tokens(self, plan: SchedulerOutputs) -> ModelStepInput:
        """Lay the sequences' token ranges end to end."""
        rows = self._rows
        row_of = rows.row_of
        count = len(plan.seq_ids)
        self.step_rows = np.fromiter(
            (row_of[seq_id] for seq_id in plan.seq_ids), dtype=np.int64, count=count
        )
        starts = np.array(plan.starts, dtype=np.int64)
        counts = np.array(plan.counts, dtype=np.int64)
        self.samples = np.array(plan.samples, dtype=np.bool_)
        self.ends = starts + counts
        edges = np.cumsum(counts)
        self.last_tokens = edges - 1
        n = int(edges[-1])
        if n > len(self.token_ids):
            raise RuntimeError(f"a step of {n} tokens; the buffers hold {len(self.token_ids)}")
        token_rows, positions = self._token_rows[:n], self.positions[:n]
        # The position of token j of a sequence is j - (its first index in the step) + its start.
        token_rows[:] = np.repeat(self.step_rows, counts)
        positions[:] = self._arange[:n] + np.repeat(self.ends - edges, counts)
        self.token_ids[:n] = rows.tokens[token_rows, positions]
        self.token_seq_ids[:n] = rows.seq_ids[token_rows]
        self.logits_mask[:n] = 0
        self.logits_mask[self.last_tokens[self.samples]] = 1
        return ModelStepInput(
            token_ids=self.token_ids[:n],
            positions=positions,
            seq_ids=self.token_seq_ids[:n],
            logits_mask=self.logits_mask[:n],
        )

    def fill_attention(self, step: ModelStepInput) -> AttentionMetadata:
        """Where each token of the step is written and what each sequence may look at."""
        rows, block_size = self._rows, self._rows.block_size
        n = len(step.token_ids)
        positions = self.positions[:n]
        blocks = rows.blocks[self._token_rows[:n], positions // block_size]
        if blocks.min() < 0:
            raise RuntimeError("a token of the step lies outside the blocks of its sequence")
        self.slot_mapping[:n] = blocks * block_size + positions % block_size
        width = int(rows.num_blocks[self.step_rows].max())
        return AttentionMetadata(
            slot_mapping=self.slot_mapping[:n],
            batch_seq_ids=rows.seq_ids[self.step_rows],
            context_lens=self.ends.astype(np.int32),
            block_tables=rows.blocks[self.step_rows, :width],
        )
