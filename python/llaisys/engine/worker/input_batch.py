"""Persistent batch: the tokens and the block table of each sequence, one row each.

The arrays are allocated once. A row keeps its contents between steps, so a decoding sequence costs
a step only its index in the gathers.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llaisys.common.packed import packed_ints
from llaisys.common.types import ContextShift, NewSequence


class SlotMoves(NamedTuple):
    """KV cache changes of a context shift: copy slots, then rotate keys."""

    copy_from: NDArray[np.int32]
    copy_to: NDArray[np.int32]
    rotated: NDArray[np.int32]
    deltas: NDArray[np.int64]  # change of position of each rotated slot


class InputBatch:
    """Token ids and block tables by row and position. A row belongs to one sequence until
    `release`."""

    def __init__(self, max_rows: int, max_model_len: int, block_size: int) -> None:
        self.block_size = block_size
        self.max_rows = max_rows
        # Zero pages use no memory until they are written.
        self.tokens = np.zeros((max_rows, max_model_len + 1), dtype=np.int64)
        self.blocks = np.zeros((max_rows, -(-max_model_len // block_size) + 1), dtype=np.int32)
        self.blocks[:] = -1
        self.num_blocks = np.zeros(max_rows, dtype=np.int32)
        self.seq_ids = np.zeros(max_rows, dtype=np.int64)
        self.num_discarded = np.zeros(max_rows, dtype=np.int64)  # tokens, by context shifts
        self.lora_slots = np.full(max_rows, -1, dtype=np.int32)  # -1: no adapter
        self.num_loras = 0  # rows with an adapter
        self.generations = np.zeros(max_rows, dtype=np.int64)  # sequences that had the row
        self.num_released = 0  # rows, in all
        self.row_of: dict[int, int] = {}  # sequence id -> row
        self._free = list(range(max_rows - 1, -1, -1))

    def add(self, seq: NewSequence) -> int:
        """Return the row of a new sequence."""
        if seq.seq_id in self.row_of:
            raise RuntimeError(f"sequence {seq.seq_id} has a row already")
        row = self._free.pop()
        self.row_of[seq.seq_id] = row
        self.seq_ids[row] = seq.seq_id
        self.generations[row] += 1
        self.num_discarded[row] = 0
        self.lora_slots[row] = seq.lora_slot
        self.num_loras += seq.lora_slot >= 0
        known = packed_ints(seq.token_ids)[: self.tokens.shape[1]]  # a shift adds the rest
        self.tokens[row, : len(known)] = known
        return row

    def append_blocks(self, seq_id: int, blocks: list[int]) -> None:
        row = self.row_of[seq_id]
        start = int(self.num_blocks[row])
        self.blocks[row, start : start + len(blocks)] = blocks
        self.num_blocks[row] = start + len(blocks)

    def shift(self, shift: ContextShift) -> SlotMoves:
        """Shift the row of a sequence whose blocks are full; return the changes of its slots."""
        row, size = self.row_of[shift.seq_id], self.block_size
        keep, discard = shift.num_keep, shift.num_discard
        first, begin = divmod(keep, size)
        before = self.blocks[row, first : self.num_blocks[row]].copy()
        blocks = np.array(shift.blocks, dtype=np.int32)
        offsets = np.arange(size, dtype=np.int32)
        sources = before[discard // size :, None] * size + offsets
        sources[0, :begin] = before[0] * size + offsets[:begin]
        sources, targets = sources.reshape(-1), (blocks[:, None] * size + offsets).reshape(-1)
        copied = sources != targets
        length = int(self.num_blocks[row]) * size
        end = length - discard
        tokens = self.tokens[row]
        # The token after the last slot is sampled, but not computed.
        tokens[keep : end + 1] = tokens[keep + discard : length + 1].copy()
        tokens[end : end + len(shift.token_ids)] = shift.token_ids
        self.blocks[row, first : self.num_blocks[row]] = -1
        self.blocks[row, first : first + len(blocks)] = blocks
        self.num_blocks[row] = first + len(blocks)
        self.num_discarded[row] += discard
        rotated = targets[begin:]
        deltas = np.full(len(rotated), -discard, dtype=np.int64)
        return SlotMoves(sources[copied], targets[copied], rotated, deltas)

    def release(self, seq_id: int) -> int | None:
        """Free the row of a sequence and return it; None when it has none."""
        row = self.row_of.pop(seq_id, None)
        if row is not None:
            self.blocks[row, : self.num_blocks[row]] = -1
            self.num_blocks[row] = 0
            self.num_loras -= int(self.lora_slots[row] >= 0)
            self.num_released += 1
            self._free.append(row)
        return row
