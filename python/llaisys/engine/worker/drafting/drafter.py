"""Draft models and draft heads on the worker: their interface and their KV cache.

No prefix caching, no preemption: a sequence without free blocks gets no drafts until others end.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from llaisys.common.step import AttentionMetadata, ModelStepInput
from llaisys.common.types import DraftRequest, SchedulerOutputs, StepOutput
from llaisys.engine.worker.input_batch import InputBatch
from llaisys.models.base import ModelAdapter


class Drafter:
    """Owns its adapter and closes it."""

    adapter: ModelAdapter

    def draft(
        self, requests: Sequence[DraftRequest], released: Sequence[int] = ()
    ) -> list[list[int]]:
        """Return up to `count` draft tokens per request. `released`: sequences to free, which have
        finished or are restarted."""
        raise NotImplementedError

    def observe(
        self, plan: SchedulerOutputs, output: StepOutput, batch: InputBatch, model: ModelAdapter
    ) -> None:
        """A step of the model was sampled; its hidden states are still available."""

    def skip(self, plan: SchedulerOutputs) -> None:
        """A step was launched that is not observed."""

    def close(self) -> None:
        self.adapter.close()


@dataclass(slots=True, eq=False)
class DraftSequence:
    """Slots [0, computed) have the keys and values of tokens[:computed]."""

    seq_id: int
    tokens: list[int] = field(default_factory=list)  # known tokens, then drafts
    computed: int = 0
    blocks: list[int] = field(default_factory=list)

    def set_tokens(self, start: int, tokens: Sequence[int]) -> None:
        """Set the known tokens from `start` on. Computed tokens that differ are rolled back, and
        so is the last one: its logits are needed."""
        if start > len(self.tokens):
            raise RuntimeError(f"sequence {self.seq_id}: {start} follows {len(self.tokens)} tokens")
        common = start
        for known, token in zip(self.tokens[start:], tokens, strict=False):
            if known != token:
                break
            common += 1
        self.tokens[start:] = tokens
        self.computed = min(self.computed, common, len(self.tokens) - 1)


class DraftBlockTables:
    """Sequences by id, and the free blocks."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.sequences: dict[int, DraftSequence] = {}
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    def sequence(self, seq_id: int) -> DraftSequence:
        """Return the sequence with this id; a new one is empty."""
        found = self.sequences.get(seq_id)
        if found is None:
            found = self.sequences[seq_id] = DraftSequence(seq_id)
        return found

    def reserve(self, sequence: DraftSequence, num_tokens: int) -> bool:
        """Allocate blocks for `num_tokens` in all; False, and no change, when there are too few."""
        missing = -(-num_tokens // self.block_size) - len(sequence.blocks)
        if missing > len(self._free):
            return False
        for _ in range(missing):
            sequence.blocks.append(self._free.pop())
        return True

    def release(self, seq_id: int) -> None:
        """Free the blocks of a sequence; it may be unknown."""
        sequence = self.sequences.pop(seq_id, None)
        if sequence is not None:
            self._free += sequence.blocks

    def check_integrity(self) -> None:
        """Raise RuntimeError unless every block is free or has one owner."""
        used = [block for s in self.sequences.values() for block in s.blocks]
        if sorted(used + self._free) != list(range(self.num_blocks)):
            raise RuntimeError(
                f"{len(used)} draft blocks are in use and {len(self._free)} are free, "
                f"of {self.num_blocks}"
            )

    def step(
        self,
        sequences: Sequence[DraftSequence],
        starts: Sequence[int],
        ends: Sequence[int],
        tokens: NDArray[np.int64],
        samples: Sequence[bool],
    ) -> tuple[ModelStepInput, AttentionMetadata]:
        """Build a step that computes the tokens [starts[i], ends[i]) of sequence i, with the logits
        of the last one when samples[i]. `tokens`: of all sequences, concatenated."""
        last = np.array(ends, dtype=np.int64)
        counts = last - np.array(starts, dtype=np.int64)
        edges = counts.cumsum()
        rows = np.arange(len(sequences)).repeat(counts)
        positions = np.arange(len(tokens)) + (last - edges).repeat(counts)
        mask = np.zeros(len(tokens), dtype=np.int8)
        mask[edges[np.array(samples, dtype=np.bool_)] - 1] = 1
        seq_ids = np.array([s.seq_id for s in sequences], dtype=np.int64)
        width = max(len(sequence.blocks) for sequence in sequences)
        tables = np.full((len(sequences), width), -1, dtype=np.int32)
        for row, sequence in enumerate(sequences):
            tables[row, : len(sequence.blocks)] = sequence.blocks
        block, offset = np.divmod(positions, self.block_size)
        attention = AttentionMetadata(
            slot_mapping=(tables[rows, block] * self.block_size + offset).astype(np.int32),
            batch_seq_ids=seq_ids,
            context_lens=last.astype(np.int32),
            block_tables=tables,
        )
        return ModelStepInput(tokens, positions, seq_ids[rows], mask), attention
