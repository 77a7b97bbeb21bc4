"""The arrays of small verification steps: all sequences decode, some with drafts.

Such a step is launched when the tokens before it are known, and the device is idle until then. For
few tokens lists take a third of the time of gathers, and the arrays of the sampler are built while
the device runs.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llaisys.common.step import AttentionMetadata, ModelStepInput
from llaisys.common.types import SchedulerOutputs
from llaisys.engine.worker.input_batch import InputBatch
from llaisys.engine.worker.sampling_batch import SamplingBatch
from llaisys.engine.worker.step_buffers import PreparedStep

MAX_VERIFICATION_TOKENS = 64  # of a captured verification step, as in ModelRunner


class VerificationBuffers:
    """The same arrays as StepBuffers; the next step overwrites them."""

    def __init__(self, batch: InputBatch) -> None:
        self._batch = batch
        # Views with fast access to single elements.
        self._token_at, self._block_at = batch.tokens.data, batch.blocks.data
        self._numbers = np.zeros((3, MAX_VERIFICATION_TOKENS), dtype=np.int64)
        self._slots = np.zeros(MAX_VERIFICATION_TOKENS, dtype=np.int32)
        self._lora_slots = np.zeros(MAX_VERIFICATION_TOKENS, dtype=np.int32)
        self._logits_mask = np.ones(MAX_VERIFICATION_TOKENS, dtype=np.int8)

    @staticmethod
    def fits(plan: SchedulerOutputs) -> bool:
        is_decoding = bool(plan.draft_token_ids) and not plan.num_prefill_tokens
        return is_decoding and plan.num_decode_tokens <= MAX_VERIFICATION_TOKENS

    def fill(self, plan: SchedulerOutputs) -> tuple[ModelStepInput, AttentionMetadata]:
        """Return the inputs of the forward pass."""
        batch, size, width = self._batch, self._batch.block_size, 0
        ids: list[int] = []
        positions: list[int] = []
        seq_ids: list[int] = []
        slots: list[int] = []
        step_rows, ends = [], []
        for seq_id, start, count in zip(plan.seq_ids, plan.starts, plan.counts, strict=True):
            row, end = batch.row_of[seq_id], start + count
            step_rows.append(row)
            ends.append(end)
            ids.append(self._token_at[row, start])
            if count > 1:
                draft = plan.draft_token_ids[seq_id]
                batch.tokens[row, start + 1 : end] = draft  # sampled tokens overwrite it
                ids += draft
            positions += range(start, end)
            seq_ids += [seq_id] * count
            last = (end - 1) // size
            for index in range(start // size, last + 1):
                block, position = self._block_at[row, index], index * size
                if block < 0:
                    raise RuntimeError(f"position {start} of a sequence is outside its blocks")
                first, stop = max(start, position), min(end, position + size)
                offset = block * size - position  # from positions to slots
                slots += range(first + offset, stop + offset)
            width = max(width, last + 1)
        n = len(ids)
        numbers, slot_mapping = self._numbers[:, :n], self._slots[:n]
        numbers[:] = (ids, positions, seq_ids)
        slot_mapping[:] = slots
        step = ModelStepInput(numbers[0], numbers[1], numbers[2], self._logits_mask[:n])
        if batch.num_loras:
            step.lora_slots = self._lora_slots[:n]
            step.lora_slots[:] = batch.lora_slots[step_rows].repeat(plan.counts)
        return step, AttentionMetadata(
            slot_mapping=slot_mapping,
            batch_seq_ids=np.array(plan.seq_ids, np.int64),
            context_lens=np.array(ends, np.int32),
            block_tables=self._tables(step_rows, width),
        )

    def _tables(self, rows: list[int], width: int) -> NDArray[np.int32]:
        blocks = self._batch.blocks
        if len(rows) == 1:  # a view
            return blocks[rows[0] : rows[0] + 1, :width]
        tables: NDArray[np.int32] = blocks[rows, :width]
        return tables

    def prepared(self, plan: SchedulerOutputs, step: ModelStepInput) -> PreparedStep:
        """Return the step with its sampling batch."""
        rows = np.array([self._batch.row_of[seq_id] for seq_id in plan.seq_ids], np.int64)
        counts, starts = np.array(plan.counts, np.int64), np.array(plan.starts, np.int64)
        sampling = SamplingBatch(rows, starts + 1, counts.cumsum() - counts, counts - 1)
        arrays = (step.token_ids, step.positions, step.seq_ids, step.logits_mask)
        return PreparedStep(*arrays, rows, starts + counts, sampling)
