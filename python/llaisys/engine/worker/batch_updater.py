"""Applies a plan to the worker's state of its sequences: input batch, sampling, prompt logprobs and
pooling."""

from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter

import numpy as np

from llaisys.common.types import BlockCopy, ContextShift, SchedulerOutputs
from llaisys.engine.worker.input_batch import InputBatch
from llaisys.engine.worker.lora_store import LoraStore
from llaisys.engine.worker.prompt_outputs import PromptLogprobState, PromptPooling
from llaisys.engine.worker.sampling_state import SamplingState
from llaisys.engine.worker.step_buffers import PreparedStep
from llaisys.models.base import ModelAdapter


def swap_blocks(adapter: ModelAdapter, copies: Sequence[BlockCopy]) -> None:
    """Copy blocks to host memory and back, in order; one call per run in the same direction. Of
    several copies of a run to one destination only the last one is executed."""
    for to_host, run in groupby(copies, attrgetter("to_host")):
        last = {copy.host_slot if to_host else copy.block: copy for copy in run}
        blocks, slots, _ = zip(*last.values(), strict=True)
        adapter.swap_blocks(np.array(blocks, np.int32), np.array(slots, np.int32), to_host)


class BatchUpdater:
    """Adds, releases and shifts sequences in every part of the worker's state."""

    def __init__(
        self,
        batch: InputBatch,
        sampling: SamplingState,
        loras: LoraStore | None = None,
        samples: bool = True,
    ) -> None:
        """`samples`: False in a pipeline stage before the last one, which has no outputs."""
        self._samples = samples
        self._loras = loras
        self._batch = batch
        self._sampling = sampling
        self._logprobs = PromptLogprobState()
        self._pooling = PromptPooling()

    def update(self, adapter: ModelAdapter, plan: SchedulerOutputs) -> None:
        """Release finished sequences, add new ones, fill LoRA slots, copy blocks, shift contexts,
        append blocks."""
        for seq_id in plan.released_seq_ids:
            self._logprobs.release(seq_id)
            self._pooling.release(adapter, seq_id)
            row = self._batch.release(seq_id)
            if row is not None:
                if row in self._sampling.penalised:
                    adapter.sampler_forget(seq_id)
                self._sampling.release(row)
        for seq in plan.new_seqs:
            row = self._batch.add(seq)
            self._logprobs.add(seq)
            if not self._samples:
                continue
            self._sampling.add(row, seq)
            self._pooling.add(adapter, seq)
            if row in self._sampling.penalised:
                prompt, output = self._sampling.history(row, np.array(seq.token_ids))
                adapter.sampler_reset(seq.seq_id, prompt)
                if output:
                    adapter.sampler_accept(seq.seq_id, output)
        if self._loras is not None:
            for load in plan.lora_loads:
                self._loras.fill_slot(adapter, load)
        done = 0
        for shift in plan.shifts:
            swap_blocks(adapter, plan.block_copies[done : shift.num_copies])
            done = shift.num_copies
            self._shift_context(adapter, shift)
        swap_blocks(adapter, plan.block_copies[done:])
        for seq_id, blocks in plan.new_blocks.items():
            self._batch.append_blocks(seq_id, blocks)

    def mark_prompts(self, plan: SchedulerOutputs, step: PreparedStep) -> None:
        """Mark the prompt tokens of a step whose logprobs or hidden states are needed."""
        if self._logprobs:
            step.prompt_logprobs = self._logprobs.mark(plan, step.logits_mask, self._batch)
        if self._pooling:
            self._pooling.mark(plan, step)

    def _shift_context(self, adapter: ModelAdapter, shift: ContextShift) -> None:
        batch = self._batch
        row = batch.row_of[shift.seq_id]
        length = int(batch.num_blocks[row]) * batch.block_size
        self._sampling.shift(row, length, shift.num_discard, batch.tokens[row])
        moves = batch.shift(shift)
        if len(moves.copy_from):
            adapter.copy_slots(moves.copy_from, moves.copy_to)
        adapter.shift_slots(moves.rotated, moves.deltas)
