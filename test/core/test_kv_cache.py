"""The SLOT layout of the KV cache through the C API: every rule and code, then random calls with
failures against the reference of naive_kv_cache.py."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from naive_kv_cache import END, NaiveKvCache, Token, assert_same, parse_dump, step_both
from native_helpers import KvStatus, MockModel, Shape

from llaisys.common.errors import KvCacheFullError
from llaisys.libllaisys.library import lib
from llaisys.libllaisys.types import LlaisysKvStats, LlaisysStepInput

SMALL = Shape(voc=13, nh=2, nkvh=1, dh=4, maxseq=64)
OK, OOM, BAD_SEQ, BAD_POS, EMPTY = (
    KvStatus.OK, KvStatus.OOM_SLOT, KvStatus.INVALID_SEQ, KvStatus.INVALID_POS,
    KvStatus.EMPTY_RANGE,
)  # fmt: skip
BIG = (1 << 63) - 1


@pytest.fixture
def model() -> Iterator[MockModel]:
    """20 cells; sequence 0 at 0..4, sequence 1 at 0..1."""
    with MockModel(SMALL, kv_cache_capacity_tokens=20) as made:
        made.run([1, 2, 3, 4, 5])
        made.run([6, 7], seqs=[[1], [1]])
        yield made


def cells_of(model: MockModel) -> list[tuple[tuple[int, ...], int]]:
    return sorted(parse_dump(model.kv_dump())[0].values())


# -- Rules ----------------------------------------------------------------------------------------


def test_dump_lists_cells_and_tokens(model: MockModel) -> None:
    assert model.kv_dump().splitlines() == [
        *(f"cell[{i}] = {{seq_ids=[0], pos={i}, used=1}}" for i in range(5)),
        "cell[5] = {seq_ids=[1], pos=0, used=1}",
        "cell[6] = {seq_ids=[1], pos=1, used=1}",
        "token[0] -> cell[5]",
        "token[1] -> cell[6]",
    ]
    model.kv_seq_cp(12, 1, -1, -1)
    model.kv_seq_rm(0, 1, 3)
    lines = model.kv_dump().splitlines()
    assert "cell[5] = {seq_ids=[1, 12], pos=0, used=1}" in lines
    assert not any(line.startswith(("cell[1]", "cell[2]")) for line in lines)


def test_dump_fits_any_buffer(model: MockModel) -> None:
    text = model.kv_dump().encode()
    length = ctypes.c_size_t()
    for capacity in (1, 2, 17, len(text), len(text) + 1, len(text) + 50):
        buffer = ctypes.create_string_buffer(b"#" * (len(text) + 60))
        assert lib().llaisysModelKvDump(model.handle, buffer, capacity, ctypes.byref(length)) == 0
        assert length.value == len(text)
        assert buffer.value == text[: capacity - 1]
        assert buffer.raw[min(capacity, len(text) + 1)] == ord("#")  # no overrun
    assert lib().llaisysModelKvDump(model.handle, None, 0, ctypes.byref(length)) == 0
    assert lib().llaisysModelKvDump(model.handle, None, 5, ctypes.byref(length)) == -1
    assert lib().llaisysModelKvDump(model.handle, None, 0, None) == -1
    assert lib().llaisysModelKvDump(None, None, 0, ctypes.byref(length)) == -1


def test_statistics(model: MockModel) -> None:
    stats = model.kv_stats()
    assert (stats.layout, stats.capacity_slots, stats.used_slots) == (0, 20, 7)
    assert (stats.peak_used_slots, stats.n_sequences, stats.block_size) == (7, 2, 1)
    assert stats.bytes == 20 * 2 * SMALL.nkvh * SMALL.dh * 4
    model.kv_seq_cp(9, 0, -1, -1)
    assert (model.kv_stats().used_slots, model.kv_stats().n_sequences) == (7, 3)
    model.kv_seq_rm(0, -1, -1)
    assert (model.kv_stats().used_slots, model.kv_stats().n_sequences) == (7, 2)
    model.kv_seq_rm(9, -1, -1)
    stats = model.kv_stats()
    assert (stats.used_slots, stats.peak_used_slots, stats.n_sequences) == (2, 7, 1)
    bad = LlaisysKvStats(struct_size=8)
    assert lib().llaisysModelKvStats(model.handle, ctypes.byref(bad)) == -1
    assert b"struct_size" in lib().llaisysLastError()
    assert lib().llaisysModelKvStats(model.handle, None) == -1
    assert lib().llaisysModelKvStats(None, ctypes.byref(stats)) == -1


def test_cp_shares_cells(model: MockModel) -> None:
    assert model.kv_seq_cp(3, 0, 1, 3) == OK
    assert cells_of(model) == [((0,), 0), ((0,), 3), ((0,), 4), ((0, 3), 1), ((0, 3), 2),
                            ((1,), 0), ((1,), 1)]  # fmt: skip
    assert (model.kv_seq_pos_min(3), model.kv_seq_pos_max(3)) == (1, 2)
    assert model.kv_stats().used_slots == 7
    before = model.kv_dump()
    assert model.kv_seq_cp(3, 0, 1, 3) == OK  # again: no change
    assert model.kv_seq_cp(0, 0, -1, -1) == OK  # onto itself: no change
    assert model.kv_dump() == before


def test_rm_frees_cells_without_sequences(model: MockModel) -> None:
    model.kv_seq_cp(3, 0, 0, 2)
    assert model.kv_seq_rm(0, -1, -1) == OK
    assert model.kv_seq_pos_max(0) == -1 and model.kv_seq_pos_max(3) == 1
    assert model.kv_stats().used_slots == 4
    assert model.kv_seq_rm(0, -1, -1) == BAD_SEQ


def test_add_moves_shared_cells_for_all(model: MockModel) -> None:
    model.kv_seq_cp(3, 0, 2, 4)
    assert model.kv_seq_add(0, 3, -1, 10) == OK
    assert (model.kv_seq_pos_min(3), model.kv_seq_pos_max(3)) == (2, 13)
    assert model.kv_seq_pos_max(0) == 14
    assert model.kv_seq_add(3, 0, -1, -2) == OK
    assert (model.kv_seq_pos_min(3), model.kv_seq_pos_max(3)) == (0, 11)
    before = model.kv_dump()
    assert model.kv_seq_add(0, -1, -1, 0) == OK
    assert model.kv_dump() == before


def test_keep_removes_all_other_sequences(model: MockModel) -> None:
    model.kv_seq_cp(3, 0, 0, 2)
    assert model.kv_seq_keep(3) == OK
    assert cells_of(model) == [((3,), 0), ((3,), 1)]
    assert model.kv_seq_keep(0) == BAD_SEQ


@pytest.mark.parametrize(
    ("call", "arguments", "status"),
    [
        # 1. a negative sequence
        ("cp", (-1, 0, -1, -1), BAD_SEQ),
        ("cp", (3, -1, 5, 5), BAD_SEQ),
        ("rm", (-1, 5, 5), BAD_SEQ),
        ("rm", (-BIG - 1, 0, -1), BAD_SEQ),
        ("add", (-1, 5, 5, 1), BAD_SEQ),
        ("keep", (-1,), BAD_SEQ),
        # 2. an empty range, before the sequence is looked up
        ("cp", (3, 0, 2, 2), EMPTY),
        ("cp", (3, 99, 3, 2), EMPTY),
        ("rm", (99, 5, 5), EMPTY),
        ("rm", (0, 4, 1), EMPTY),
        ("rm", (0, -1, 0), EMPTY),
        ("rm", (0, BIG, -1), EMPTY),
        ("add", (99, 7, 6, 1), EMPTY),
        # 3. a sequence without cells
        ("cp", (3, 99, -1, -1), BAD_SEQ),
        ("rm", (99, 0, 1), BAD_SEQ),
        ("add", (99, 0, 1, -100), BAD_SEQ),
        ("keep", (99,), BAD_SEQ),
        # 4. no cell in the range
        ("cp", (3, 0, 5, 100), EMPTY),
        ("rm", (0, 5, -1), EMPTY),
        ("add", (1, 2, -1, -50), EMPTY),
        # 5. positions outside [0, 64)
        ("add", (0, -1, -1, -1), BAD_POS),
        ("add", (0, 1, -1, -2), BAD_POS),
        ("add", (0, -1, -1, 60), BAD_POS),
        ("add", (0, -1, -1, BIG), BAD_POS),
        ("add", (0, -1, -1, -BIG - 1), BAD_POS),
        ("add", (0, 4, -1, BIG - 3), BAD_POS),
        # valid limits
        ("add", (0, -1, -1, 59), OK),
        ("add", (0, 4, 5, -4), OK),
        ("rm", (0, 4, 5), OK),
        ("rm", (0, -5, -5), OK),
        ("rm", (0, 0, BIG), OK),
        ("cp", (BIG, 0, 4, BIG), OK),
    ],
)
def test_codes_and_their_order(
    model: MockModel, call: str, arguments: tuple[int, ...], status: KvStatus
) -> None:
    before = (model.kv_dump(), bytes(model.kv_stats()))
    assert getattr(model, f"kv_seq_{call}")(*arguments) == status
    if status == OK:
        return
    assert (model.kv_dump(), bytes(model.kv_stats())) == before


@pytest.mark.parametrize(
    ("call", "arguments"),
    [("Rm", (-1, 0, 1)), ("Rm", (99, 0, 1)), ("Rm", (0, 3, 3)), ("Add", (0, 0, 5, -3)),
     ("Cp", (1, 55, 0, 1)), ("Keep", (44,))],
)  # fmt: skip
def test_failed_call_sets_the_error_text(
    model: MockModel, call: str, arguments: tuple[int, ...]
) -> None:
    """llaisys.h: llaisysLastError() returns the error text of the calling thread."""
    lib().llaisysModelKvStats(None, None)
    stale = lib().llaisysLastError()
    assert getattr(lib(), f"llaisysModelKvSeq{call}")(model.handle, *arguments) != 0
    assert lib().llaisysLastError() not in (b"", stale)


def test_positions_of_sequences_without_cells(model: MockModel) -> None:
    for seq in (2, 99, -1, BIG, -BIG - 1):
        assert model.kv_seq_pos_max(seq) == model.kv_seq_pos_min(seq) == -1
    assert lib().llaisysModelKvSeqPosMax(None, 0) == -1
    for call, count in (("Cp", 4), ("Rm", 3), ("Add", 4), ("Keep", 1)):
        code = getattr(lib(), f"llaisysModelKvSeq{call}")(None, *[0] * count)
        assert code == KvStatus.INTERNAL_ERROR
        assert b"model is NULL" in lib().llaisysLastError()


def test_full_cache_evicts_nothing(model: MockModel) -> None:
    before = (model.kv_dump(), bytes(model.kv_stats()))
    assert model.try_step([1] * 14) == 1
    assert (model.kv_dump(), bytes(model.kv_stats())) == before
    assert model.n_outputs == 0
    model.run([1] * 13)
    assert model.kv_stats().used_slots == 20
    assert model.try_step([1], seqs=[[5]]) == 1
    with pytest.raises(KvCacheFullError):
        model.step(LlaisysStepInput(n_tokens=1, token_ids=np.zeros(1, np.int64).ctypes.data))
    assert model.kv_seq_cp(5, 0, -1, -1) == OK  # sharing needs no free cell
    model.kv_seq_rm(1, 0, 1)
    model.run([1], seqs=[[5]])
    assert model.try_step([1], seqs=[[5]]) == 1


def test_freed_cells_are_reused_in_any_pattern() -> None:
    with MockModel(SMALL, kv_cache_capacity_tokens=10, max_batch_tokens=3) as model:
        model.run([1] * 10)
        for p0, p1 in ((1, 2), (4, 6), (9, 10)):
            assert model.kv_seq_rm(0, p0, p1) == OK
        got = model.run([2, 3, 4, 5], seqs=[[7]] * 4, marks=[1] * 4)
        _, slots = parse_dump(model.kv_dump())
        assert sorted(slots) == [1, 4, 5, 9]
        np.testing.assert_allclose(got, SMALL.sequence_logits([2, 3, 4, 5]), atol=2e-4)


def test_sequence_can_be_removed_and_restarted(model: MockModel) -> None:
    model.kv_seq_rm(0, -1, -1)
    got = model.run([9, 8])
    np.testing.assert_allclose(got[0], SMALL.sequence_logits([9, 8])[1], atol=2e-4)
    assert model.kv_seq_pos_max(0) == 1


def test_shared_prefix_is_bitwise_identical_to_an_own_prompt() -> None:
    tokens = [1, 2, 3, 4, 5, 6]
    with MockModel(SMALL, kv_cache_capacity_tokens=30) as model:
        own = model.run([*tokens, 7, 8])
        model.run(tokens, seqs=[[1]] * 6)
        model.kv_seq_cp(2, 1, 0, 6)
        got = model.run([7, 8], seqs=[[2]] * 2)
        assert got.tobytes() == own.tobytes()
        model.kv_seq_rm(1, -1, -1)  # the prefix outlives its first sequence
        model.kv_seq_rm(2, 6, -1)
        assert model.run([7, 8], seqs=[[2]] * 2).tobytes() == own.tobytes()


# -- The state machine ----------------------------------------------------------------------------


class Driver:
    """Random calls on both sides, mostly with sequences 0..5, some out of range."""

    def __init__(self, seed: int, capacity: int, max_batch_tokens: int) -> None:
        self.random = random.Random(seed)
        self.model = MockModel(
            SMALL, kv_cache_capacity_tokens=capacity, max_batch_tokens=max_batch_tokens
        )
        self.naive = NaiveKvCache(capacity, SMALL.maxseq, SMALL.table())
        self.codes: dict[str, int] = {}

    def seq(self) -> int:
        return self.random.choice([0, 0, 1, 1, 2, 3, 4, 5, 5, -1 if self.chance(10) else 2])

    def chance(self, one_in: int) -> bool:
        return self.random.randrange(one_in) == 0

    def tokens(self) -> list[Token]:
        n = self.random.choice([1, 1, 2, 3, 5, 9, self.naive.capacity + 1 if self.chance(4) else 4])
        given = self.chance(3)
        if self.chance(60):
            n = 0
        made = []
        next_pos: dict[int, int] = {}
        for _ in range(n):
            count = self.random.choice([1, 1, 1, 1, 2, 3])
            seqs = self.random.sample(range(6), count)
            if self.chance(80):
                seqs = self.random.choice([[-1], [1, 1], [1 << 40, 2]])
            token = Token(self.random.randrange(13), seqs)
            if self.chance(100):
                token.id = self.random.choice([-1, 13, 1 << 60])
            if given:
                start = max(next_pos.get(s, self.naive.pos_max(s)) for s in seqs) + 1
                token.pos = start + self.random.choice([0, 0, 0, 1, 3])
                if self.chance(50):
                    token.pos = self.random.choice([-1, 0, 63, 64, 1 << 62])
                next_pos.update(dict.fromkeys(seqs, token.pos))
            made.append(token)
        return made

    def bounds(self) -> tuple[int, int]:
        return self.random.choice([
            (-1, -1), (-1, self.random.randrange(12)), (self.random.randrange(30), -1),
            tuple(sorted((self.random.randrange(40), self.random.randrange(40)))),
            (self.random.randrange(12), self.random.randrange(12)), (0, END), (END, -1),
        ])  # fmt: skip

    def turn(self, number: int) -> None:
        kind = self.random.choice("decode decode decode decode cp cp rm rm rm add add keep".split())
        if kind == "decode":
            code = step_both(self.model, self.naive, self.tokens(), check_logits=number % 4 == 0)
        else:
            arguments: list[int] = [self.seq()]
            if kind == "keep" and not self.chance(6):
                return
            if kind == "cp":
                arguments = [self.random.randrange(-1 if self.chance(10) else 0, 6), self.seq()]
            if kind != "keep":
                arguments += self.bounds()
            if kind == "add":
                arguments.append(self.random.choice([-7, -2, -1, 0, 1, 2, 5, 40, 1 << 62, -END]))
            before = (self.model.kv_dump(), bytes(self.model.kv_stats()))
            code = getattr(self.model, f"kv_seq_{kind}")(*arguments)
            assert code == getattr(self.naive, f"seq_{kind}")(*arguments), (kind, arguments)
            if code != OK:
                assert (self.model.kv_dump(), bytes(self.model.kv_stats())) == before
        assert_same(self.model, self.naive)
        self.codes[f"{kind} {int(code)}"] = self.codes.get(f"{kind} {int(code)}", 0) + 1


@pytest.mark.parametrize(
    ("seed", "capacity", "max_batch_tokens"), [(0, 24, 4), (1, 40, 512), (2, 7, 1), (3, 70, 3)]
)
def test_random_calls_match_the_reference(seed: int, capacity: int, max_batch_tokens: int) -> None:
    driver = Driver(seed, capacity, max_batch_tokens)
    with driver.model:
        for number in range(2500):
            driver.turn(number)
    seen = driver.codes
    assert {"decode 0", "decode 1", "decode -1", "cp 0", "cp 2", "cp 4", "rm 0", "rm 2", "rm 4",
            "add 0", "add 2", "add 3", "add 4", "keep 0"} <= set(seen), seen  # fmt: skip
    assert seen["decode 0"] > 80


SEQS = st.integers(-1, 4)
ENDS = st.integers(-2, 20)


class KvMachine(RuleBasedStateMachine):
    """The same as a hypothesis state machine, which shrinks failures."""

    def __init__(self) -> None:
        super().__init__()
        self.model = MockModel(SMALL, kv_cache_capacity_tokens=12, max_batch_tokens=3)
        self.naive = NaiveKvCache(12, SMALL.maxseq, SMALL.table())

    def teardown(self) -> None:
        self.model.close()

    @rule(
        tokens=st.lists(
            st.tuples(st.integers(0, 12), st.lists(st.integers(0, 4), min_size=1, max_size=3)),
            min_size=1, max_size=14,
        ),
        positions=st.none() | st.lists(st.integers(-1, 64), min_size=14, max_size=14),
    )  # fmt: skip
    def decode(self, tokens: list, positions: list[int] | None) -> None:
        made = [
            Token(token, seqs, positions[i] if positions is not None else None)
            for i, (token, seqs) in enumerate(tokens)
        ]
        step_both(self.model, self.naive, made, check_logits=True)

    @rule(dst=SEQS, src=SEQS, p0=ENDS, p1=ENDS)
    def cp(self, dst: int, src: int, p0: int, p1: int) -> None:
        assert self.model.kv_seq_cp(dst, src, p0, p1) == self.naive.seq_cp(dst, src, p0, p1)

    @rule(seq=SEQS, p0=ENDS, p1=ENDS)
    def rm(self, seq: int, p0: int, p1: int) -> None:
        assert self.model.kv_seq_rm(seq, p0, p1) == self.naive.seq_rm(seq, p0, p1)

    @rule(seq=SEQS, p0=ENDS, p1=ENDS, delta=st.integers(-70, 70))
    def add(self, seq: int, p0: int, p1: int, delta: int) -> None:
        assert self.model.kv_seq_add(seq, p0, p1, delta) == self.naive.seq_add(seq, p0, p1, delta)

    @rule(seq=SEQS)
    def keep(self, seq: int) -> None:
        assert self.model.kv_seq_keep(seq) == self.naive.seq_keep(seq)

    @invariant()
    def same(self) -> None:
        assert_same(self.model, self.naive, range(5))


KvMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestKvMachine = KvMachine.TestCase
