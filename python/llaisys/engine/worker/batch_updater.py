"""What the plans have told a worker about its sequences: tokens and blocks, how each draws, what is
read of its prompt."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter

import numpy as np

from llaisys.common.types import BlockCopy, ContextShift, SchedulerOutputs
from llaisys.engine.worker.input_batch import InputBatch
from llaisys.engine.worker.pooling import PromptPooling
from llaisys.engine.worker.sampling_state import SamplingState
from llaisys.engine.worker.scoring import PromptScoring
from llaisys.engine.worker.step_buffers import PreparedStep
from llaisys.models.base import ModelAdapter


def swap_blocks(adapter: ModelAdapter, copies: Sequence[BlockCopy]) -> None:
    """Copy blocks to host memory and back, in order: a run of one kind at a time."""
    for to_host, run in groupby(copies, attrgetter("to_host")):
        blocks, host_blocks, _ = zip(*run, strict=True)
        adapter.swap_blocks(np.array(blocks, np.int32), np.array(host_blocks, np.int32), to_host)


class BatchUpdater:
    """The books of every sequence, kept together: each is told of all that come and go."""

    def __init__(self, rows: InputBatch, sampling: SamplingState) -> None:
        self._rows = rows
        self._sampling = sampling
        self._scoring = PromptScoring()
        self._pooling = PromptPooling()

    def follow(self, adapter: ModelAdapter, plan: SchedulerOutputs) -> None:
        """Let go of those that are released, take up the new ones, save and bring back blocks, move
        the sequences that are shifted."""
        for seq_id in plan.released_seq_ids:
            self._scoring.release(seq_id)
            self._pooling.release(adapter, seq_id)
            row = self._rows.release(seq_id)
            if row is not None:
                if row in self._sampling.penalised:
                    adapter.sampler_forget(seq_id)
                self._sampling.release(row)
        for seq in plan.new_seqs:
            row = self._rows.add(seq)
            self._sampling.add(row, seq)
            self._scoring.add(seq)
            self._pooling.add(seq)
            if row in self._sampling.penalised:
                adapter.sampler_reset(seq.seq_id, seq.token_ids[: seq.num_prompt_tokens])
                if len(seq.token_ids) > seq.num_prompt_tokens:
                    adapter.sampler_accept(seq.seq_id, seq.token_ids[seq.num_prompt_tokens :])
        done = 0
        for shift in plan.shifts:
            swap_blocks(adapter, plan.block_copies[done : shift.num_copies])
            done = shift.num_copies
            self._shift_context(adapter, shift)
        swap_blocks(adapter, plan.block_copies[done:])
        for seq_id, blocks in plan.new_blocks.items():
            self._rows.append_blocks(seq_id, blocks)

    def mark_prompts(self, plan: SchedulerOutputs, step: PreparedStep) -> None:
        """Whose prompts are scored or pooled in this step."""
        if self._scoring:
            step.scored = self._scoring.mark(plan, step.logits_mask, self._rows)
        if self._pooling:
            step.pooling, step.pooled = self._pooling.mark(plan)

    def _shift_context(self, adapter: ModelAdapter, shift: ContextShift) -> None:
        rows = self._rows
        row = rows.row_of[shift.seq_id]
        length = int(rows.num_blocks[row]) * rows.block_size
        self._sampling.shift(row, length, shift.dropped, rows.tokens[row])
        moves = rows.shift(shift)
        if len(moves.copy_from):
            adapter.copy_slots(moves.copy_from, moves.copy_to)
        adapter.shift_slots(moves.rotated, moves.deltas)
