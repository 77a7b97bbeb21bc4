"""The sequences that a worker holds, one row each, in arrays that are made once.

A step names sequences and ranges of their tokens; everything per token is then numpy. A row keeps
its tokens and its block table between steps, so that a decoding sequence costs a step nothing but
its place in the gathers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llaisys.common.packed import packed_ints
from llaisys.common.step import AttentionMetadata, ForwardOutput, ModelStepInput
from llaisys.common.types import ContextShift, NewSequence, SchedulerOutputs

LONG_PIECE = 64  # tokens of a sequence, on average: then slices take less time than gathers


class SlotMoves(NamedTuple):
    """What a context shift does to the KV cache: copies first, then rotations of keys."""

    copy_from: NDArray[np.int32]
    copy_to: NDArray[np.int32]
    rotated: NDArray[np.int32]
    deltas: NDArray[np.int64]  # positions, a number for each rotated slot


class SequenceRows:
    """Token ids and block tables by row, both by position. A row belongs to one sequence until
    `release`."""

    def __init__(self, max_rows: int, max_model_len: int, block_size: int) -> None:
        self.block_size = block_size
        self.max_rows = max_rows
        # Zero pages cost nothing until they are written: most rows stay far below the limit.
        self.tokens = np.zeros((max_rows, max_model_len + 1), dtype=np.int64)
        self.blocks = np.zeros((max_rows, -(-max_model_len // block_size) + 1), dtype=np.int32)
        self.blocks[:] = -1
        self.num_blocks = np.zeros(max_rows, dtype=np.int32)
        self.seq_ids = np.zeros(max_rows, dtype=np.int64)
        self.dropped = np.zeros(max_rows, dtype=np.int64)  # tokens that shifts have let go
        self.tenures = np.zeros(max_rows, dtype=np.int64)  # how often each row was given out
        self.num_released = 0  # rows, so far
        self.row_of: dict[int, int] = {}  # sequence -> row
        self._free = list(range(max_rows - 1, -1, -1))

    def add(self, seq: NewSequence) -> int:
        if seq.seq_id in self.row_of:
            raise RuntimeError(f"sequence {seq.seq_id} has a row already")
        row = self._free.pop()
        self.row_of[seq.seq_id] = row
        self.seq_ids[row] = seq.seq_id
        self.tenures[row] += 1
        self.dropped[row] = 0
        known = packed_ints(seq.token_ids)[: self.tokens.shape[1]]  # more comes with a shift
        self.tokens[row, : len(known)] = known
        return row

    def append_blocks(self, seq_id: int, blocks: list[int]) -> None:
        row = self.row_of[seq_id]
        start = int(self.num_blocks[row])
        self.blocks[row, start : start + len(blocks)] = blocks
        self.num_blocks[row] = start + len(blocks)

    def shift(self, shift: ContextShift) -> SlotMoves:
        """Move the row of a sequence whose blocks are full; what is to be done to its slots."""
        row, size = self.row_of[shift.seq_id], self.block_size
        first, begin = divmod(shift.kept, size)
        before = self.blocks[row, first : self.num_blocks[row]].copy()
        blocks = np.array(shift.blocks, dtype=np.int32)
        offsets = np.arange(size, dtype=np.int32)
        sources = before[shift.dropped // size :, None] * size + offsets
        sources[0, :begin] = before[0] * size + offsets[:begin]
        sources, targets = sources.reshape(-1), (blocks[:, None] * size + offsets).reshape(-1)
        copied = sources != targets
        length = int(self.num_blocks[row]) * size
        end = length - shift.dropped
        tokens = self.tokens[row]
        # The one behind the last is drawn, but not computed.
        tokens[shift.kept : end + 1] = tokens[shift.kept + shift.dropped : length + 1].copy()
        tokens[end : end + len(shift.token_ids)] = shift.token_ids
        self.blocks[row, first : self.num_blocks[row]] = -1
        self.blocks[row, first : first + len(blocks)] = blocks
        self.num_blocks[row] = first + len(blocks)
        self.dropped[row] += shift.dropped
        rotated = targets[begin:]
        deltas = np.full(len(rotated), -shift.dropped, dtype=np.int64)
        return SlotMoves(sources[copied], targets[copied], rotated, deltas)

    def release(self, seq_id: int) -> int | None:
        """The row that became free; None when the sequence has none."""
        row = self.row_of.pop(seq_id, None)
        if row is not None:
            self.blocks[row, : self.num_blocks[row]] = -1
            self.num_blocks[row] = 0
            self.num_released += 1
            self._free.append(row)
        return row


class Drawing(NamedTuple):
    """The sequences of a step that draw a token, in the plan's order; d in number."""

    rows: NDArray[np.int64]  # [d]
    ends: NDArray[np.int64]  # [d]: position of the token that is drawn
    tokens: NDArray[np.int64]  # [d]: index in the step of the token before it
    drafts: NDArray[np.int64] | None = None  # [d]: drafts from `ends` on; None: nobody has any

    def only(self, chosen: NDArray[Any]) -> Drawing:
        """Some of them, by index or by mask."""
        drafts = None if self.drafts is None else self.drafts[chosen]
        return Drawing(self.rows[chosen], self.ends[chosen], self.tokens[chosen], drafts)

    def following(self, agreed: NDArray[np.bool_]) -> Drawing:
        """The next draw of those whose draft was drawn."""
        rows, ends, tokens, drafts = self.only(agreed)
        assert drafts is not None
        return Drawing(rows, ends + 1, tokens + 1, drafts - 1)

    def with_drafts(self) -> Drawing:
        """All draws that there can be: those behind a sequence's drafts stand behind its first."""
        assert self.drafts is not None
        counts = self.drafts + 1
        first = counts.cumsum() - counts
        further = np.arange(counts.sum()) - first.repeat(counts)
        every = self.only(np.arange(len(counts)).repeat(counts))
        assert every.drafts is not None
        return Drawing(
            every.rows, every.ends + further, every.tokens + further, every.drafts - further
        )


class ScoredPrompt(NamedTuple):
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
    drawing: Drawing
    scored: tuple[ScoredPrompt, ...] = ()
    pooled: tuple[int, ...] = ()  # sequences whose vectors are complete with this step


class Drawn(NamedTuple):
    """What the sampler made of a step."""

    drawing: Drawing  # those for which a token was drawn
    tokens: NDArray[np.int32]  # [d]
    failed: dict[int, str]  # sequence -> why nothing could be drawn for it
    forward: ForwardOutput


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

    def __init__(self, rows: SequenceRows, max_tokens: int) -> None:
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
        drawing = Drawing(step_rows, ends, last_tokens)
        if plan.draft_token_ids:
            drafts = self._write_drafts(plan, step_rows, ends)
            drawing = Drawing(step_rows, ends - drafts, last_tokens - drafts, drafts)
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
