"""Attention against NumPy, and batch invariance: a token's result depends only on its list."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from attention_case import Case, make_case, naive
from hypothesis import given, settings
from hypothesis import strategies as st
from native_helpers import (
    REALS,
    Array,
    Natives,
    array,
    assert_close,
    is_sanitized,
    normal,
    op,
    rounded,
)

from llaisys.libllaisys.handles import Stream

LENGTHS = (1, 2, 15, 63, 64, 65, 130, 255, 256, 257, 512, 1100)  # tiles of 64, spans of 256


@pytest.mark.parametrize("dtypes", list(product(REALS, REALS, REALS)))
def test_against_numpy_in_every_dtype(dtypes: tuple[str, str, str]) -> None:
    for heads, kv_heads, d in ((1, 1, 2), (4, 2, 6), (6, 1, 33), (3, 3, 64), (14, 2, 80)):
        case = make_case((1, 65, 130), 5, heads, kv_heads, d, dtypes=dtypes)
        assert_close(case.run(), case.reference(), *case.rounding(16))


@pytest.mark.parametrize("block_size", [1, 2, 3, 16])
def test_against_numpy_over_lengths(block_size: int) -> None:
    with Stream(n_threads=2) as stream:
        for length in LENGTHS:
            case = make_case((length,), 3, 4, 2, 12, block_size, seed=length)
            assert_close(case.run(stream=stream), case.reference(), "f32", 16)
            windowed = make_case((length,), 3, 4, 2, 12, block_size, seed=length, window=40)
            assert_close(windowed.run(stream=stream), windowed.reference(), "f32", 16)


def test_token_without_visible_entries_gives_zeros() -> None:
    case = make_case((70, 3), 3, 4, 2, 6)
    case.seen[1] = (0, 5, 5)
    case.seen[4] = (1, 3, 2)
    got = case.run()
    assert (got[[1, 4]] == 0).all()
    assert_close(got, case.reference(), "f32", 16)
    nothing = make_case((4,), 1, 2, 1, 4)
    assert nothing.run(tokens=[]).shape == (0, 2, 4)


def test_large_scores_do_not_overflow() -> None:
    case = make_case((200,), 4, 2, 2, 8)
    case.scale = 300.0
    assert_close(case.run(), case.reference(), "f32", 4096)


def test_nan_in_invisible_slots_has_no_effect() -> None:
    """Slots after `end`, before `begin` and in other lists have no effect."""
    case = make_case((150, 90), 150, 4, 2, 10, block_size=8, window=70)
    expected = case.run()
    assert np.isfinite(expected).all()
    for token in (0, 63, 64, 100, 149, 200):
        row, begin, end = case.seen[token]
        visible = case.lists[row][begin:end]
        hidden = np.ones(len(case.k), bool)
        hidden[visible] = False
        k, v = case.k.copy(), case.v.copy()
        k[hidden] = v[hidden] = np.nan
        spoilt = Case(case.q, k, v, case.lists, case.seen, 8, case.dtypes, case.scale)
        assert spoilt.run()[token].tobytes() == expected[token].tobytes()


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_attention_is_bitwise_independent_of_batch_blocks_chunks_and_threads(
    data: st.DataObject,
) -> None:
    sizes = st.integers(1, 150) | st.sampled_from([255, 256, 257, 512, 700, 1030])
    lengths = data.draw(st.lists(sizes, min_size=1, max_size=4), "lengths")
    group, kv_heads = (
        data.draw(st.integers(1, 7), "group"),
        data.draw(st.integers(1, 3), "kv_heads"),
    )
    d = data.draw(st.sampled_from([2, 4, 6, 16, 33, 64]), "d")
    block_size = data.draw(st.sampled_from([1, 2, 5, 16]), "block_size")
    window = data.draw(st.sampled_from([0, 0, 1, 40, 600]), "window")
    dtypes = data.draw(st.sampled_from(list(product(REALS, REALS, REALS))), "dtypes")
    per_list = data.draw(st.sampled_from([1, 2, 30]), "per_list")
    case = make_case(
        lengths, per_list, group * kv_heads, kv_heads, d, block_size, sum(lengths), window, dtypes
    )
    expected = case.run()
    n = len(case.q)
    order = data.draw(st.permutations(range(n)), "order")[: data.draw(st.integers(1, n), "take")]
    with Stream(n_threads=2) as stream:
        assert case.run(stream=stream).tobytes() == expected.tobytes()
        assert case.run(order, stream).tobytes() == expected[order].tobytes()
    assert case.run(order[:1]).tobytes() == expected[order[:1]].tobytes()
    # The same entries as a list of single slots.
    cells = Case(case.q, case.k, case.v, case.lists, case.seen, 1, dtypes, case.scale)
    assert cells.run().tobytes() == expected.tobytes()
    # The same tokens in other slots of another cache.
    mapping = np.random.default_rng(n).permutation(len(case.k))
    k, v = np.empty_like(case.k), np.empty_like(case.v)
    k[mapping], v[mapping] = case.k, case.v
    moved = [mapping[np.asarray(entries)].tolist() for entries in case.lists]
    elsewhere = Case(case.q, k, v, moved, case.seen, 1, dtypes, case.scale)
    assert elsewhere.run().tobytes() == expected.tobytes()


def masked(q: Array, k: Array, v: Array, mask: Array, dtype: str = "f32") -> Array:
    with Natives() as native:
        out = native.empty(q.shape, dtype)
        op("SelfAttentionMasked", out, native(q, dtype), native(k, dtype), native(v, dtype),
           native(mask, "u8"), 0.25)  # fmt: skip
        return array(out)


@pytest.mark.parametrize("dtype", REALS)
def test_self_attention_masked(dtype: str) -> None:
    rng = np.random.default_rng(3)
    for n, m, heads, kv_heads, d in ((1, 1, 1, 1, 2), (5, 70, 4, 2, 6), (33, 33, 6, 1, 33)):
        q, k, v = (rounded(normal(*s, seed=i), dtype) for i, s in enumerate(
            [(n, heads, d), (m, kv_heads, d), (m, kv_heads, d)]))  # fmt: skip
        causal = np.tri(n, m, m - n, dtype=np.uint8)
        for mask in (causal, (rng.random((n, m)) < 0.4) * 255, np.zeros((n, m)), np.ones((n, m))):
            expected = np.stack(
                [naive(q[i], k[mask[i] != 0], v[mask[i] != 0], 0.25) for i in range(n)]
            )
            assert_close(masked(q, k, v, mask, dtype), expected, dtype, 16)


def test_causal_mask_and_list_are_bitwise_identical() -> None:
    case = make_case((90,), 90, 4, 2, 16)
    case.scale = 0.25
    slots = list(case.lists[0])
    k, v = case.k[slots], case.v[slots]
    assert masked(case.q, k, v, np.tri(90)).tobytes() == case.run().tobytes()
    assert masked(case.q[:0], k, v, np.zeros((0, 90))).shape == (0, 4, 16)
    assert (masked(case.q, k[:0], v[:0], np.zeros((90, 0))) == 0).all()


def test_references_match_torch() -> None:
    """Check the references of these files."""
    if is_sanitized():
        pytest.skip("torch does not load under a preloaded sanitizer")
    torch = pytest.importorskip("torch")
    case = make_case((40,), 40, 4, 2, 16)
    slots = list(case.lists[0])
    q, k, v = (torch.from_numpy(x).double().transpose(0, 1) for x in
               (case.q, case.k[slots].repeat(2, 1), case.v[slots].repeat(2, 1)))  # fmt: skip
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    np.testing.assert_allclose(case.reference(), expected.transpose(0, 1).numpy(), rtol=1e-6)


def test_known_runs_do_not_change_results() -> None:
    case = make_case((70, 1, 9), 3, 4, 2, 8)
    tables = np.full((3, 70), -1, np.int32)
    for row, entries in enumerate(case.lists):
        tables[row, : len(entries)] = entries
    q_rows, begin, end = np.array(case.seen, np.int32).T
    for runs in (None, np.array([[0, 3]], np.int32)):
        with Natives() as native:
            out = native(np.zeros(case.q.shape), "f32")
            op("Attention", out, native(case.q, "f32"), native(case.k, "f32"),
               native(case.v, "f32"), native(q_rows, "i32"), native(begin, "i32"),
               native(end, "i32"), native(tables, "i32"),
               None, None if runs is None else native(runs, "i32"), 1 if runs is None else 3, 1,
               case.scale, 0.0)  # fmt: skip
            assert (array(out) == case.run()).all()
