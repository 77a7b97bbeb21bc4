"""Reference SLOT layout for test_kv_cache.py: a list of cells."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import numpy as np
from native_helpers import Array, KvStatus, MockModel, Shape

END = (1 << 63) - 1


@dataclass
class Cell:
    pos: int
    seqs: set[int]
    x: Array  # the embedding of its token


@dataclass
class Token:
    id: int
    seqs: list[int]
    pos: int | None = None  # None: derived


@dataclass
class NaiveKvCache:
    capacity: int
    max_positions: int
    table: Array
    cells: dict[int, Cell] = field(default_factory=dict)  # by slot
    peak: int = 0
    last_slots: list[int] = field(default_factory=list)

    def held_by(self, seq: int) -> list[Cell]:
        return [cell for cell in self.cells.values() if seq in cell.seqs]

    def pos_max(self, seq: int) -> int:
        return max((cell.pos for cell in self.held_by(seq)), default=-1)

    def pos_min(self, seq: int) -> int:
        return min((cell.pos for cell in self.held_by(seq)), default=-1)

    def sequences(self) -> set[int]:
        return {seq for cell in self.cells.values() for seq in cell.seqs}

    # -- A step: the expected code, then the expected changes -------------------------------------

    def plan(self, tokens: list[Token]) -> tuple[int, list[int]]:
        """Return (code, position of each token). A step that can never fit is not checked;
        otherwise all tokens are checked before the capacity."""
        if len(tokens) > self.capacity:
            return 1, []
        last: dict[int, int] = {}
        positions = []
        if not tokens:
            return -1, []
        for token in tokens:
            bad_ids = not token.seqs or min(token.seqs) < 0
            if bad_ids or len(set(token.seqs)) < len(token.seqs):
                return -1, []
            if not 0 <= token.id < len(self.table):
                return -1, []
        for token in tokens:
            before = max(last.get(seq, self.pos_max(seq)) for seq in token.seqs)
            pos = before + 1 if token.pos is None else token.pos
            if not 0 <= pos < self.max_positions or pos <= before:
                return -1, []
            positions.append(pos)
            last.update(dict.fromkeys(token.seqs, pos))
        return int(len(tokens) > self.capacity - len(self.cells)), positions

    def apply(self, tokens: list[Token], positions: list[int], slots: list[int]) -> None:
        """Store the tokens in the slots that the library chose; they must be free."""
        assert len(set(slots)) == len(slots) == len(tokens)
        assert not set(slots) & set(self.cells) and all(0 <= s < self.capacity for s in slots)
        for token, pos, slot in zip(tokens, positions, slots, strict=True):
            self.cells[slot] = Cell(pos, set(token.seqs), self.table[token.id])
        self.peak = max(self.peak, len(self.cells))
        self.last_slots = slots

    def logits(self, shape: Shape, token: Token, pos: int) -> Array:
        """Return the expected logits of the mock model for a token in the cache."""
        seen = [
            (cell.x, cell.pos)
            for cell in self.cells.values()
            if cell.pos <= pos and cell.seqs & set(token.seqs)
        ]
        return shape.logits(self.table[token.id], pos, seen)

    # -- Sequences: the checks in the order of kv_cache.hpp ---------------------------------------

    def _range(self, seq: int, p0: int, p1: int) -> tuple[KvStatus, list[Cell]]:
        p0, p1 = max(p0, 0), END if p1 < 0 else p1
        if p0 >= p1:
            return KvStatus.EMPTY_RANGE, []
        held = self.held_by(seq)
        if not held:
            return KvStatus.INVALID_SEQ, []
        inside = [cell for cell in held if p0 <= cell.pos < p1]
        return (KvStatus.OK if inside else KvStatus.EMPTY_RANGE), inside

    def seq_cp(self, dst: int, src: int, p0: int, p1: int) -> KvStatus:
        if dst < 0 or src < 0:
            return KvStatus.INVALID_SEQ
        status, inside = self._range(src, p0, p1)
        for cell in inside:
            cell.seqs.add(dst)
        return status

    def seq_rm(self, seq: int, p0: int, p1: int) -> KvStatus:
        if seq < 0:
            return KvStatus.INVALID_SEQ
        status, inside = self._range(seq, p0, p1)
        for cell in inside:
            cell.seqs.discard(seq)
        self._free()
        return status

    def seq_add(self, seq: int, p0: int, p1: int, delta: int) -> KvStatus:
        if seq < 0:
            return KvStatus.INVALID_SEQ
        status, inside = self._range(seq, p0, p1)
        if any(not 0 <= cell.pos + delta < self.max_positions for cell in inside):
            return KvStatus.INVALID_POS
        for cell in inside:
            cell.pos += delta
        return status

    def seq_keep(self, seq: int) -> KvStatus:
        if seq < 0 or not self.held_by(seq):
            return KvStatus.INVALID_SEQ
        for cell in self.cells.values():
            cell.seqs &= {seq}
        self._free()
        return KvStatus.OK

    def _free(self) -> None:
        self.cells = {slot: cell for slot, cell in self.cells.items() if cell.seqs}


# -- Output of the library ------------------------------------------------------------------------


def parse_dump(text: str) -> tuple[dict[int, tuple[tuple[int, ...], int]], list[int]]:
    """({cell: (sequences, position)}, cell of each token of the last step)."""
    cells: dict[int, tuple[tuple[int, ...], int]] = {}
    slots: list[int] = []
    for line in text.splitlines():
        cell = re.fullmatch(r"cell\[(\d+)\] = \{seq_ids=\[([\d, ]+)\], pos=(\d+), used=1\}", line)
        token = re.fullmatch(r"token\[(\d+)\] -> cell\[(\d+)\]", line)
        if cell:
            ids = tuple(int(i) for i in cell.group(2).split(", "))
            assert ids == tuple(sorted(set(ids))) and int(cell.group(1)) not in cells
            cells[int(cell.group(1))] = (ids, int(cell.group(3)))
        else:
            assert token is not None, f"not a line of the dump: {line!r}"
            assert int(token.group(1)) == len(slots)
            slots.append(int(token.group(2)))
    assert list(cells) == sorted(cells)
    return cells, slots


def assert_same(model: MockModel, naive: NaiveKvCache, seqs: range = range(6)) -> None:
    cells, slots = parse_dump(model.kv_dump())
    expected = {slot: (tuple(sorted(c.seqs)), c.pos) for slot, c in naive.cells.items()}
    assert cells == expected
    assert slots == naive.last_slots
    stats = model.kv_stats()
    got = (stats.capacity_slots, stats.used_slots, stats.peak_used_slots, stats.n_sequences)
    assert got == (naive.capacity, len(naive.cells), naive.peak, len(naive.sequences()))
    for seq in seqs:
        assert model.kv_seq_pos_max(seq) == naive.pos_max(seq)
        assert model.kv_seq_pos_min(seq) == naive.pos_min(seq)


def step_both(
    model: MockModel, naive: NaiveKvCache, tokens: list[Token], check_logits: bool
) -> int:
    """Run one step on both sides; positions are given for all tokens or for none."""
    code, positions = naive.plan(tokens)
    before = (model.kv_dump(), bytes(model.kv_stats()))
    derived = all(token.pos is None for token in tokens)
    got = model.try_step(
        [token.id for token in tokens],
        seqs=[token.seqs for token in tokens],
        positions=None if derived else [token.pos or 0 for token in tokens],
        marks=[1] * len(tokens),
    )
    assert got == code
    if code != 0:
        assert (model.kv_dump(), bytes(model.kv_stats())) == before  # unchanged
        assert model.n_outputs == 0
        return code
    naive.apply(tokens, positions, parse_dump(model.kv_dump())[1])
    if check_logits:
        logits = model.logits()
        for i in {0, len(tokens) // 2, len(tokens) - 1}:
            expected = naive.logits(model.shape, tokens[i], positions[i])
            np.testing.assert_allclose(logits[i], expected, atol=1e-3, rtol=1e-3)
    return code
