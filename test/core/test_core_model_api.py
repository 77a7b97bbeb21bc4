"""A model handle: creation, weights, steps in both layouts, batch invariance.

Weights are in test_core_weights_api.py, output rows in test_core_output_api.py, sampling in
test_core_sampling_api.py, and what a handle rejects in test_core_model_errors.py.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from native_helpers import (
    REALS,
    TOLERANCE,
    BlockRow,
    KvStatus,
    MockModel,
    Shape,
)

from llaisys.libllaisys import types
from llaisys.libllaisys.library import lib

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
BLOCK = {"kv_cache_layout": 1, "kv_cache_block_size": 4}


@pytest.fixture
def model() -> Iterator[MockModel]:
    with MockModel() as made:
        yield made


# -- Creation -------------------------------------------------------------------------------------


def test_defaults_are_filled_in() -> None:
    with MockModel(n_threads=0) as model:
        params = model.params
        assert lib().llaisysModelType(model.handle) == params.model_type == 2
        assert (params.kv_cache_block_size, params.max_batch_tokens) == (16, 512)
        assert params.max_model_len == params.kv_cache_capacity_tokens == model.shape.maxseq
        assert params.ndevice == 1
        assert (ctypes.c_int32 * 1).from_address(params.device_ids)[0] == 0
        assert params.distributed_executor_backend == b"uni"
        assert params.struct_size == ctypes.sizeof(params)


def test_block_capacity_is_rounded_up_and_slot_capacity_is_not() -> None:
    with MockModel(kv_cache_capacity_tokens=33, kv_cache_layout=1) as model:
        assert model.params.kv_cache_capacity_tokens == 48
        stats = model.kv_stats()
        assert (stats.layout, stats.capacity_slots, stats.block_size) == (1, 48, 16)
        assert stats.bytes == 48 * 2 * model.shape.nkvh * model.shape.dh * 4
    with MockModel(kv_cache_capacity_tokens=33) as model:
        assert model.params.kv_cache_capacity_tokens == model.kv_stats().capacity_slots == 33


@pytest.mark.parametrize(("dtype", "width"), [("auto", 4), ("f32", 4), ("f16", 2), ("bf16", 2)])
def test_kv_cache_dtype_is_independent_of_the_model(dtype: str, width: int) -> None:
    code = 0 if dtype == "auto" else types.DTYPES[dtype]
    with MockModel(kv_cache_capacity_tokens=16, kv_cache_dtype=code) as model:
        assert model.params.kv_cache_dtype == types.DTYPES["f32" if dtype == "auto" else dtype]
        assert model.kv_stats().bytes == 16 * 2 * model.shape.nkvh * model.shape.dh * width


def test_int8_kv_cache_has_a_scale_per_head() -> None:
    with MockModel(kv_cache_capacity_tokens=16, kv_cache_dtype=types.KV_DTYPES["q8"]) as model:
        assert model.kv_stats().bytes == 16 * 2 * model.shape.nkvh * (model.shape.dh + 4)


# -- Steps against the maths ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", REALS)
@pytest.mark.parametrize("layout", [0, 1])
def test_mock_model_matches_its_definition(dtype: str, layout: int) -> None:
    for shape in (Shape(dtype=dtype), Shape(voc=65, nh=3, nkvh=1, dh=34, dtype=dtype, theta=500.0)):
        tokens = np.random.default_rng(0).integers(0, shape.voc, 70).tolist()
        with MockModel(shape, kv_cache_layout=layout, kv_cache_block_size=16) as model:
            if layout == 0:
                got = model.run(tokens, marks=[1] * 70)
            else:
                row = BlockRow(4, [9, 0, 3, 8, 1], tokens, 70)
                got = model.run_blocks([row], marks=[1] * 70)
        expected = shape.sequence_logits(tokens)
        np.testing.assert_allclose(got, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_embeddings_instead_of_ids(model: MockModel) -> None:
    table = model.shape.table()
    by_id = model.run(PROMPT, marks=[1] * len(PROMPT))
    by_row = model.run(None, embd=table[PROMPT], seqs=[[1]] * len(PROMPT), marks=[1] * len(PROMPT))
    assert by_row.tobytes() == by_id.tobytes()
    # ids are ignored with embeddings
    again = model.run(
        [-5] * len(PROMPT), embd=table[PROMPT], seqs=[[2]] * len(PROMPT), marks=[1] * len(PROMPT)
    )
    assert again.tobytes() == by_id.tobytes()


def test_positions_are_derived_per_sequence(model: MockModel) -> None:
    model.run(PROMPT[:3])
    model.run([7, 8], seqs=[[1], [0]])
    assert (model.kv_seq_pos_max(0), model.kv_seq_pos_max(1)) == (3, 0)
    derived = model.run([2, 6, 2], seqs=[[0], [1], [0]], marks=[1, 1, 1])
    assert (model.kv_seq_pos_max(0), model.kv_seq_pos_max(1)) == (5, 1)
    expected = model.shape.sequence_logits([*PROMPT[:3], 8, 2, 2])
    np.testing.assert_allclose(derived[[0, 2]], expected[4:], atol=2e-4)
    np.testing.assert_allclose(derived[1], model.shape.sequence_logits([7, 6])[1], atol=2e-4)


def test_positions_may_have_gaps_but_not_go_back(model: MockModel) -> None:
    got = model.run([3, 1, 4], positions=[2, 7, 100], marks=[1] * 3)
    table = model.shape.table()
    cells = [(table[3], 2), (table[1], 7), (table[4], 100)]
    for i, cell in enumerate(cells):
        np.testing.assert_allclose(got[i], model.shape.logits(*cell, cells[: i + 1]), atol=2e-4)
    for positions in ([100], [5], [0]):
        assert model.try_step([1], positions=positions) == -1
        assert b"positions[0] must be above 100" in lib().llaisysLastError()
    assert model.try_step([1, 1], positions=[102, 101]) == -1
    assert model.kv_seq_pos_max(0) == 100


def test_a_token_of_several_sequences(model: MockModel) -> None:
    shape, table = model.shape, model.shape.table()
    model.run(PROMPT[:2], seqs=[[0], [0]])
    model.run([7], seqs=[[1]], positions=[0])
    # The shared token follows all cells of its sequences and sees both.
    got = model.run([5], seqs=[[0, 1]])
    assert model.kv_stats().used_slots == 4
    cells = [(table[3], 0), (table[7], 0), (table[1], 1), (table[5], 2)]
    np.testing.assert_allclose(got[0], shape.logits(*cells[3], cells), atol=2e-4)
    got = model.run([6, 6], seqs=[[0], [1]], marks=[1, 1])
    cell = (table[6], 3)
    left, right = [cells[0], cells[2], cells[3], cell], [cells[1], cells[3], cell]
    np.testing.assert_allclose(got[0], shape.logits(*cell, left), atol=2e-4)
    np.testing.assert_allclose(got[1], shape.logits(*cell, right), atol=2e-4)


@pytest.mark.parametrize("window", [1, 2, 7, 64])
@pytest.mark.parametrize("layout", [0, 1])
def test_sliding_window(window: int, layout: int) -> None:
    shape = Shape(window=window)
    tokens = np.random.default_rng(window).integers(0, shape.voc, 90).tolist()
    with MockModel(shape, kv_cache_layout=layout, max_batch_tokens=7) as model:
        if layout == 0:
            got = model.run(tokens, marks=[1] * 90)
        else:
            got = model.run_blocks([BlockRow(0, range(6), tokens, 90)], marks=[1] * 90)
    np.testing.assert_allclose(got, shape.sequence_logits(tokens), atol=3e-4)


def test_k_shift_equals_recomputation(model: MockModel) -> None:
    shape = model.shape
    tokens = np.random.default_rng(7).integers(0, shape.voc, 40).tolist()
    model.run(tokens)
    assert model.kv_seq_rm(0, 4, 14) == KvStatus.OK
    assert model.kv_seq_add(0, 14, -1, -10) == KvStatus.OK
    assert model.kv_seq_pos_max(0) == 29
    got = model.run([11])
    expected = shape.sequence_logits([*tokens[:4], *tokens[14:], 11])[-1]
    np.testing.assert_allclose(got[0], expected, atol=3e-4)
    assert model.kv_seq_add(0, 0, -1, 400) == KvStatus.OK  # again, far away
    got = model.run([12])
    expected = shape.sequence_logits([*tokens[:4], *tokens[14:], 11, 12])[-1]
    np.testing.assert_allclose(got[0], expected, atol=3e-4)  # only differences matter


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_k_shift_in_16_bits(dtype: str) -> None:
    shape = Shape(dtype=dtype)
    with MockModel(shape) as model:
        model.run(PROMPT)
        model.kv_seq_rm(0, 0, 3)
        model.kv_seq_add(0, 3, -1, -3)
        got = model.run([11])
    expected = shape.sequence_logits([*PROMPT[3:], 11])[-1]
    np.testing.assert_allclose(got[0], expected, atol=2 * TOLERANCE[dtype])


# -- Exactness ------------------------------------------------------------------------------------


def logits_of(tokens: list[int], **fields: Any) -> np.ndarray:
    """Return all rows of one sequence, run in one step."""
    with MockModel(Shape(dtype="bf16", dh=16), **fields) as model:
        if fields.get("kv_cache_layout"):
            blocks = np.random.default_rng(1).permutation(40).tolist()
            return model.run_blocks([BlockRow(9, blocks, tokens, len(tokens))], [1] * len(tokens))
        return model.run(tokens, marks=[1] * len(tokens))


def test_results_are_bitwise_identical_over_chunks_layouts_blocks_and_threads() -> None:
    tokens = np.random.default_rng(3).integers(0, 37, 150).tolist()
    expected = logits_of(tokens).tobytes()
    for size in (1, 2, 7, 64, 149, 150, 1000):
        assert logits_of(tokens, max_batch_tokens=size).tobytes() == expected
    for size in (4, 5, 16, 64):
        block = {"kv_cache_layout": 1, "kv_cache_block_size": size}
        capacity = {"kv_cache_capacity_tokens": 40 * size}
        assert logits_of(tokens, **block, **capacity).tobytes() == expected
    for threads in (2, 3):
        assert logits_of(tokens, n_threads=threads, max_batch_tokens=33).tobytes() == expected
        assert logits_of(tokens, n_threads=threads, **BLOCK).tobytes() == expected


@pytest.mark.parametrize("layout", [0, 1])
def test_mixed_prefill_and_decode_is_bitwise_identical_to_separate_steps(layout: int) -> None:
    rng = np.random.default_rng(4)
    prompts = [rng.integers(0, 37, n).tolist() for n in (30, 1, 17, 64)]
    shape = Shape(dtype="f16")

    def run(model: MockModel, parts: list[tuple[int, int, int]]) -> list[np.ndarray]:
        """Run chunks (sequence, first, last) of the prompts in one step; a row for each token."""
        n = sum(last - first for _, first, last in parts)
        if layout == 0:
            tokens = [t for s, first, last in parts for t in prompts[s][first:last]]
            seqs = [[s] for s, first, last in parts for _ in range(first, last)]
            return list(model.run(tokens, seqs=seqs, marks=[1] * n))
        rows = [
            BlockRow(s, range(20 * s, 20 * s + 20), prompts[s][first:last], last)
            for s, first, last in parts
        ]
        return list(model.run_blocks(rows, marks=[1] * n))

    fields = BLOCK | {"kv_cache_layout": layout}
    alone: list[list[np.ndarray]] = []
    for s, prompt in enumerate(prompts):
        with MockModel(shape, **fields) as model:
            alone.append(run(model, [(s, 0, len(prompt))]))
    with MockModel(shape, n_threads=2, max_batch_tokens=16, **fields) as model:
        first = run(model, [(0, 0, 29), (2, 0, 5)])
        second = run(model, [(3, 0, 60), (0, 29, 30), (1, 0, 1), (2, 5, 17)])
        third = run(model, [(3, 60, 64)])
    together = [
        first[:29] + second[60:61], second[61:62], first[29:] + second[62:], second[:60] + third,
    ]  # fmt: skip
    for got, expected in zip(together, alone, strict=True):
        assert np.stack(got).tobytes() == np.stack(expected).tobytes()


def test_handles_are_independent() -> None:
    """Run two models in two threads at once, each with its own thread pool."""
    rng = np.random.default_rng(8)
    prompts = [rng.integers(0, 37, 40).tolist() for _ in range(2)]
    alone = [logits_of(prompt, n_threads=2).tobytes() for prompt in prompts]
    together: list[set[bytes]] = [set(), set()]

    def work(i: int) -> None:
        for _ in range(20):
            together[i].add(logits_of(prompts[i], n_threads=2).tobytes())

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == [{alone[0]}, {alone[1]}]


def test_process_may_exit_with_open_handles() -> None:
    program = (
        "from native_helpers import MockModel\n"
        "models = [MockModel(n_threads=2) for _ in range(3)]\n"
        "print(len([model.run([1, 2, 3]) for model in models]))\n"
    )
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path)))
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "3\n"), done.stderr


# -- Decode and batches ---------------------------------------------------------------------------


def test_decode_equals_step(model: MockModel) -> None:
    expected = model.run(PROMPT)
    tokens = (ctypes.c_int64 * len(PROMPT))(*PROMPT)
    with MockModel() as other:
        batch = lib().llaisysBatchGetOne(tokens, len(PROMPT))
        assert lib().llaisysModelDecode(other.handle, batch) == 0
        assert other.logits().tobytes() == expected.tobytes()
        lib().llaisysBatchFree(batch)
        assert list(tokens) == PROMPT
    expected = model.run([1, 2], seqs=[[0, 5], [5]], positions=[20, 30], marks=[1, 1])
    with MockModel() as other:
        other.run(PROMPT)
        batch = lib().llaisysBatchInit(2, 0, 2)
        int64s = ctypes.POINTER(ctypes.c_int64)
        ids = ctypes.cast(batch.seq_id, ctypes.POINTER(int64s))
        ids[0][0], ids[0][1], ids[1][0] = 0, 5, 5
        counts = ctypes.cast(batch.n_seq_id, ctypes.POINTER(ctypes.c_int32))
        assert (counts[0], counts[1]) == (1, 1)
        counts[0] = 2
        for i, (token, position) in enumerate([(1, 20), (2, 30)]):
            ctypes.cast(batch.token, int64s)[i] = token
            ctypes.cast(batch.pos, int64s)[i] = position
            ctypes.cast(batch.logits, ctypes.POINTER(ctypes.c_int8))[i] = 1
        assert lib().llaisysModelDecode(other.handle, batch) == 0
        assert other.logits().tobytes() == expected.tobytes()
        lib().llaisysBatchFree(batch)


def test_a_batch_of_embeddings(model: MockModel) -> None:
    expected = model.run(PROMPT)
    hs, n = model.shape.hs, len(PROMPT)
    batch = lib().llaisysBatchInit(n, hs, 1)
    assert batch.n_tokens == n and batch.token is None
    rows = (ctypes.c_float * (n * hs)).from_address(batch.embd)
    assert not any(rows)
    rows[:] = model.shape.table()[PROMPT].reshape(-1).tolist()
    positions = (ctypes.c_int64 * n).from_address(batch.pos)
    positions[:] = list(range(n))
    (ctypes.c_int8 * n).from_address(batch.logits)[n - 1] = 1
    with MockModel() as other:
        assert lib().llaisysModelDecode(other.handle, batch) == 0
        assert other.logits().tobytes() == expected.tobytes()
    lib().llaisysBatchFree(batch)


# -- Slots of the BLOCK layout --------------------------------------------------------------------


def test_copy_slots_reads_all_before_it_writes() -> None:
    shape = Shape()
    with MockModel(shape, **BLOCK) as model:
        row = BlockRow(0, [0, 1, 2], PROMPT[:9], 9)
        model.run_blocks([row])
        src, dst = np.arange(8, dtype=np.int32), np.roll(np.arange(8, dtype=np.int32), 3)
        model.kv_copy_slots(
            src.ctypes.data, dst.ctypes.data, 8
        )  # a cycle: sequential copies would differ
        # dst[i] = (i + 5) % 8 has the bytes of slot i; copy them elsewhere to undo it
        back = np.arange(40, 48, dtype=np.int32)
        model.kv_copy_slots(dst.ctypes.data, back.ctypes.data, 8)
        got = model.run_blocks([BlockRow(7, [10, 11, 2], [7], 10)])
        np.testing.assert_allclose(got, shape.sequence_logits([*PROMPT[:9], 7])[9:], atol=2e-4)


def test_offloaded_blocks_can_be_restored_into_other_blocks() -> None:
    shape = Shape()
    with MockModel(shape, **BLOCK) as model:
        model.kv_reserve_host(5)
        model.run_blocks([BlockRow(0, [0, 1, 2], PROMPT[:9], 9)])
        blocks, host_slots = np.array([0, 1, 2], np.int32), np.array([4, 0, 3], np.int32)
        model.kv_to_host(blocks.ctypes.data, host_slots.ctypes.data, 3)
        model.run_blocks([BlockRow(1, [0, 1, 2], PROMPT[2:11], 9)])  # overwrites the blocks
        back = np.array([9, 2, 7], np.int32)
        model.kv_from_host(back.ctypes.data, host_slots.ctypes.data, 3)
        got = model.run_blocks([BlockRow(7, [9, 2, 7], [7], 10)])
        np.testing.assert_allclose(got, shape.sequence_logits([*PROMPT[:9], 7])[9:], atol=2e-4)


def test_shift_slots_moves_a_context() -> None:
    shape = Shape()
    with MockModel(shape, **BLOCK) as model:
        model.run_blocks([BlockRow(0, [5, 6, 7], PROMPT, 11)])
        slots = np.arange(24, 31, dtype=np.int32)  # tokens 4 .. 10
        delta = np.full(7, -4, np.int64)
        model.kv_shift_slots(slots.ctypes.data, delta.ctypes.data, 7)
        got = model.run_blocks([BlockRow(0, [6, 7], [8], 8)])
    np.testing.assert_allclose(got[0], shape.sequence_logits([*PROMPT[4:], 8])[-1], atol=2e-4)
