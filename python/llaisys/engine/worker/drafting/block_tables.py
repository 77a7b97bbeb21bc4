"""The KV cache of what drafts: which sequences it knows, how far, and in which blocks.

Nothing is shared and nobody is preempted: a sequence that finds no block gets no drafts until
others have gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from llaisys.common.step import AttentionMetadata


@dataclass(slots=True, eq=False)
class DraftSequence:
    """Slots [0, computed) hold the keys and values of tokens[0 .. computed)."""

    seq_id: int
    tokens: list[int] = field(default_factory=list)  # known ones, then drafts
    computed: int = 0
    blocks: list[int] = field(default_factory=list)

    def learn(self, start: int, tokens: Sequence[int]) -> None:
        """`tokens` are what really stands from `start` on. What was computed of other ones, and of
        drafts behind them, is computed anew; so is the last one, for what follows it."""
        if start > len(self.tokens):
            raise RuntimeError(f"sequence {self.seq_id}: {start} follows {len(self.tokens)} tokens")
        agreed = start
        for known, token in zip(self.tokens[start:], tokens, strict=False):
            if known != token:
                break
            agreed += 1
        self.tokens[start:] = tokens
        self.computed = min(self.computed, agreed, len(self.tokens) - 1)


class DraftBlockTables:
    """Sequences by id, and the blocks that nobody holds."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.sequences: dict[int, DraftSequence] = {}
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    def sequence(self, seq_id: int) -> DraftSequence:
        """The one with this id; a new one knows nothing."""
        found = self.sequences.get(seq_id)
        if found is None:
            found = self.sequences[seq_id] = DraftSequence(seq_id)
        return found

    def reserve(self, sequence: DraftSequence, num_tokens: int) -> bool:
        """Room for `num_tokens` in all; False, and nothing changes, when there is none."""
        missing = -(-num_tokens // self.block_size) - len(sequence.blocks)
        if missing > len(self._free):
            return False
        for _ in range(missing):
            sequence.blocks.append(self._free.pop())
        return True

    def forget(self, seq_id: int) -> None:
        """Its blocks are free; it may be unknown."""
        sequence = self.sequences.pop(seq_id, None)
        if sequence is not None:
            self._free += sequence.blocks

    def check_integrity(self) -> None:
        """Every block is free or has one holder; raises with the numbers."""
        held = [block for s in self.sequences.values() for block in s.blocks]
        if sorted(held + self._free) != list(range(self.num_blocks)):
            raise RuntimeError(
                f"{len(held)} draft blocks are held and {len(self._free)} are free, "
                f"of {self.num_blocks}"
            )

    def attention(
        self,
        sequences: Sequence[DraftSequence],
        ends: Sequence[int],
        token_rows: NDArray[np.int64],
        positions: NDArray[np.int64],
    ) -> AttentionMetadata:
        """Of a step in which sequence i has `ends[i]` tokens at its end; `token_rows`: whose each
        token is, as an index of `sequences`."""
        width = max(len(sequence.blocks) for sequence in sequences)
        tables = np.full((len(sequences), width), -1, dtype=np.int32)
        for row, sequence in enumerate(sequences):
            tables[row, : len(sequence.blocks)] = sequence.blocks
        block, offset = np.divmod(positions, self.block_size)
        return AttentionMetadata(
            slot_mapping=(tables[token_rows, block] * self.block_size + offset).astype(np.int32),
            batch_seq_ids=np.array([s.seq_id for s in sequences], dtype=np.int64),
            context_lens=np.array(ends, dtype=np.int32),
            block_tables=tables,
        )
