"""Row operators against NumPy references: odd sizes, every dtype, views, threads."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest
from native_helpers import REALS, Array, Natives, array, assert_close, bits, normal, op, rounded

from llaisys.libllaisys.handles import Stream

# Around vector widths (4, 8, 16), the piece of 512 values, and what threads share.
LENGTHS = (1, 2, 3, 5, 7, 8, 15, 17, 31, 33, 63, 65, 129, 511, 512, 513, 1031)
SHAPES = ((1, 1), (2, 3), (3, 7), (1, 17), (5, 33), (2, 513), (67, 129), (33, 1031))


@pytest.fixture(scope="module", params=[0, 2])
def stream(request: pytest.FixtureRequest) -> Iterator[Stream | None]:
    """NULL and a stream with two threads."""
    if request.param == 0:
        yield None
        return
    with Stream(n_threads=request.param) as made:
        assert made.n_threads == request.param
        yield made


@pytest.mark.parametrize("dtype", REALS)
def test_add(dtype: str, stream: Stream | None) -> None:
    for shape in [(n,) for n in LENGTHS] + [(3, 5, 7), (70001,), (), (0, 3)]:
        a, b = rounded(normal(*shape), dtype), rounded(normal(*shape, seed=1), dtype)
        with Natives() as native:
            x, y, out = native(a, dtype), native(b, dtype), native.empty(shape, dtype)
            op("Add", out, x, y, stream=stream)
            expected = rounded(a + b, dtype)
            np.testing.assert_array_equal(array(out), expected)  # one rounding: exact
            op("Add", x, x, y, stream=stream)
            np.testing.assert_array_equal(array(x), expected)
            op("Add", y, native(a, dtype), y, stream=stream)
            np.testing.assert_array_equal(array(y), expected)
            mixed, sums = native(b, "f32"), native.empty(shape, "f32")
            op("Add", sums, native(a, dtype), mixed, stream=stream)
            np.testing.assert_array_equal(array(sums), a + b)


@pytest.mark.parametrize("dtype", REALS)
def test_add_on_views_that_begin_at_an_odd_element(dtype: str) -> None:
    for n in (1, 7, 33, 1031):
        values = rounded(normal(n + 3), dtype)
        with Natives() as native:
            whole = native(values, dtype)
            a, b = native.keep(whole.slice(0, 1, n + 1)), native.keep(whole.slice(0, 3, n + 3))
            out = native.keep(native.empty((n + 1,), dtype).slice(0, 1, n + 1))
            op("Add", out, a, b)
            np.testing.assert_array_equal(
                array(out), rounded(values[1 : n + 1] + values[3 : n + 3], dtype)
            )


@pytest.mark.parametrize("dtype", REALS)
def test_argmax(dtype: str, stream: Stream | None) -> None:
    for rows, n in [*product((1, 3), LENGTHS), (40, 3001)]:
        values = rounded(normal(rows, n), dtype)
        check_argmax(values, dtype, stream)
        check_argmax(np.round(values), dtype, stream)  # many ties: the lowest index
        check_argmax(np.full((rows, n), -np.inf, np.float32), dtype, stream)


def check_argmax(values: Array, dtype: str, stream: Stream | None = None) -> None:
    with Natives() as native:
        index = native.empty(values.shape[:1], "i64")
        largest = native.empty(values.shape[:1], dtype)
        op("Argmax", index, largest, native(values, dtype), stream=stream)
        expected = np.where(np.isnan(values), -np.inf, values).argmax(1)
        only_nan = np.isnan(values).all(1)
        first = np.where(np.isnan(values), -np.inf, values) == -np.inf
        for r in range(len(values)):  # a NaN is never chosen, not even before -inf
            if not only_nan[r] and first[r].all():
                expected[r] = int(np.flatnonzero(~np.isnan(values[r]))[0])
        expected[only_nan] = 0
        np.testing.assert_array_equal(array(index), expected)
        np.testing.assert_array_equal(array(largest), values[np.arange(len(values)), expected])


@pytest.mark.parametrize("dtype", REALS)
def test_argmax_never_chooses_nan(dtype: str) -> None:
    rng = np.random.default_rng(5)
    for n in (1, 2, 9, 33, 513, 1031):
        values = rounded(normal(6, n), dtype)
        values[rng.random(values.shape) < 0.5] = np.nan
        values[1] = np.nan
        values[2, ~np.isnan(values[2])] = -np.inf
        check_argmax(values, dtype)


@pytest.mark.parametrize(("table_dtype", "dtype"), list(product(REALS, REALS)))
def test_embedding(table_dtype: str, dtype: str, stream: Stream | None) -> None:
    for (rows, d), n in product(((1, 1), (5, 7), (13, 33), (3, 1031)), (0, 1, 4, 65)):
        table = rounded(normal(rows, d), table_dtype)
        index = np.random.default_rng(n).integers(0, rows, n)
        with Natives() as native:
            out = native.empty((n, d), dtype)
            op("Embedding", out, native(index, "i64"), native(table, table_dtype), stream=stream)
            np.testing.assert_array_equal(array(out), rounded(table[index], dtype))


def rms_norm_reference(x: Array, weight: Array, epsilon: float) -> Array:
    wide = x.astype(np.float64)
    return wide / np.sqrt((wide**2).mean(1, keepdims=True) + epsilon) * weight


@pytest.mark.parametrize(("in_dtype", "dtype"), list(product(REALS, REALS)))
def test_rms_norm(in_dtype: str, dtype: str, stream: Stream | None) -> None:
    for (n, d), weight_dtype in product(SHAPES, REALS):
        x, weight = rounded(normal(n, d), in_dtype), rounded(normal(d, seed=2), weight_dtype)
        with Natives() as native:
            out = native.strided(np.zeros((n, d)), dtype)
            surroundings = native.whole
            source = native.strided(x, in_dtype, before=3)
            op("RmsNorm", out, source, native(weight, weight_dtype), 1e-5, stream=stream)
            assert_close(array(out), rms_norm_reference(x, weight, 1e-5), dtype, 4)
            gaps = array(surroundings)
            assert np.isnan(gaps[:, 0]).all() and np.isnan(gaps[:, d + 1 :]).all()


def test_rms_norm_in_place() -> None:
    x, weight = normal(3, 21), normal(21)
    with Natives() as native:
        inout = native(x, "f32")
        op("RmsNorm", inout, inout, native(weight, "f32"), 1e-6)
        assert_close(array(inout), rms_norm_reference(x, weight, 1e-6), "f32", 4)


@pytest.mark.parametrize(("in_dtype", "residual_dtype"), list(product(REALS, REALS)))
def test_add_rms_norm(in_dtype: str, residual_dtype: str, stream: Stream | None) -> None:
    for n, d in SHAPES:
        x, residual = rounded(normal(n, d), in_dtype), rounded(normal(n, d, seed=3), residual_dtype)
        weight = normal(d)
        with Natives() as native:
            inout = native.strided(x, in_dtype)
            sums = native.strided(residual, residual_dtype, before=2)
            op("AddRmsNorm", inout, sums, inout, native(weight, "f32"), 1e-5, stream=stream)
            expected = rounded(x + residual, residual_dtype)
            np.testing.assert_array_equal(array(sums), expected)
            # The norm may use the sum before or after rounding.
            scale = 4 if residual_dtype == "f32" else 8
            worst = max((in_dtype, residual_dtype), key=REALS.index)
            assert_close(array(inout), rms_norm_reference(expected, weight, 1e-5), worst, scale)


def rope_reference(x: Array, positions: Array, inv_freq: Array) -> Array:
    """x [n, heads, d]."""
    half = x.shape[2] // 2
    angle = positions[:, None, None] * inv_freq.astype(np.float64)
    low, high = x[..., :half].astype(np.float64), x[..., half:].astype(np.float64)
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], 2)


@pytest.mark.parametrize(("in_dtype", "dtype"), list(product(REALS, REALS)))
def test_rope(in_dtype: str, dtype: str, stream: Stream | None) -> None:
    for n, heads, d in ((1, 1, 2), (3, 2, 6), (5, 3, 34), (2, 1, 258), (65, 2, 64), (0, 2, 4)):
        x = rounded(normal(n, heads, d), in_dtype)
        positions = np.random.default_rng(d).integers(0, 131072, n)
        inv_freq = (10000.0 ** (-2.0 * np.arange(d // 2) / d)).astype(np.float32)
        with Natives() as native:
            out = native.strided(np.zeros((n, heads, d)), dtype)
            source = native.strided(x, in_dtype, before=3)
            angles = native(positions, "i64"), native(inv_freq, "f32")
            op("Rope", out, source, *angles, stream=stream)
            assert_close(array(out), rope_reference(x, positions, inv_freq), dtype, 2)
            op("Rope", source, source, *angles, stream=stream)
            assert_close(array(source), rope_reference(x, positions, inv_freq), in_dtype, 2)


def test_rope_is_invertible_and_keeps_norms_at_any_position() -> None:
    x = normal(4, 2, 10)
    inv_freq = np.array([1.0, 0.3, 0.01, 1e-4, 1e-7], np.float32)
    positions = np.array([0, 1, -5, 1 << 20])
    with Natives() as native:
        there, back = native.empty(x.shape, "f32"), native.empty(x.shape, "f32")
        frequencies = native(inv_freq, "f32")
        op("Rope", there, native(x, "f32"), native(positions, "i64"), frequencies)
        assert_close(array(there), rope_reference(x, positions, inv_freq), "f32", 4)
        np.testing.assert_array_equal(array(there)[0], x[0])
        op("Rope", back, there, native(-positions, "i64"), frequencies)
        assert_close(array(back), x.astype(np.float64), "f32", 4)


@pytest.mark.parametrize(("dtype", "cache_dtype"), list(product(REALS, REALS)))
def test_kv_store(dtype: str, cache_dtype: str, stream: Stream | None) -> None:
    for n, heads, d, n_slots in ((0, 1, 2, 3), (1, 1, 1, 1), (3, 2, 5, 9), (40, 3, 33, 64)):
        before = rounded(normal(n_slots, heads, d, seed=4), cache_dtype)
        values = rounded(normal(n, heads, d), dtype)
        slots = np.random.default_rng(n).permutation(n_slots)[:n]
        expected = before.copy()
        expected[slots] = rounded(values, cache_dtype)
        for strided in (False, True):
            with Natives() as native:
                cache = native(before, cache_dtype)
                source = native.strided(values, dtype) if strided else native(values, dtype)
                op("KvStore", cache, source, native(slots, "i32"), stream=stream)
                np.testing.assert_array_equal(array(cache), expected)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "i64", "i32", "i8", "u8"])
def test_rearrange(dtype: str, stream: Stream | None) -> None:
    values = np.arange(3 * 5 * 7).reshape(3, 5, 7) % 120
    for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2), (2, 0, 1)):
        with Natives() as native:
            source = native.keep(native(values, dtype).permute(order))
            expected = values.transpose(order)
            out = native.strided(np.zeros(expected.shape), dtype)
            op("Rearrange", out, source, stream=stream)
            np.testing.assert_array_equal(array(out), expected)
            back = native.keep(native.empty(values.shape, dtype).permute(order))
            op("Rearrange", back, out, stream=stream)
            np.testing.assert_array_equal(array(back), expected)
    with Natives() as native:
        for shape in ((), (1,), (0, 3), (300, 257)):
            source, out = native(np.ones(shape), dtype), native.empty(shape, dtype)
            op("Rearrange", out, source, stream=stream)
            assert bits(out) == bits(source)


@pytest.mark.parametrize(("gate_dtype", "dtype"), list(product(REALS, REALS)))
def test_swiglu(gate_dtype: str, dtype: str, stream: Stream | None) -> None:
    for (n, d), up_dtype in product(((0, 3), (3, 0), *SHAPES), ("f32", "bf16")):
        gate, up = rounded(normal(n, d) * 4, gate_dtype), rounded(normal(n, d, seed=6), up_dtype)
        wide = gate.astype(np.float64)
        expected = up * wide / (1 + np.exp(-wide))
        with Natives() as native:
            left = native.strided(gate, gate_dtype)
            right = native.strided(up, up_dtype, before=2)
            out = native.strided(np.zeros((n, d)), dtype, before=3)
            op("SwiGLU", out, left, right, stream=stream)
            assert_close(array(out), expected, dtype, 4)
            if dtype == gate_dtype:
                op("SwiGLU", left, left, right, stream=stream)
                assert bits(left) == bits(out)


def test_swiglu_of_extreme_values() -> None:
    gate = np.array([[-1e4, -90.0, 0.0, 90.0, 1e4, np.inf]], np.float32)
    with Natives() as native:
        out = native.empty(gate.shape, "f32")
        op("SwiGLU", out, native(gate, "f32"), native(np.ones_like(gate), "f32"))
        np.testing.assert_allclose(array(out), [[0, 0, 0, 90, 1e4, np.inf]], atol=1e-30, rtol=1e-6)


def test_topk(stream: Stream | None) -> None:
    rng = np.random.default_rng(9)
    for rows, n in [*product((1, 3), LENGTHS), (40, 3001), (0, 4)]:
        for k in sorted({1, min(2, n), (n + 1) // 2, n}):
            values = np.round(rng.standard_normal((rows, n)) * 4).astype(np.float32)
            values[rng.random((rows, n)) < 0.1] = -np.inf
            values[rng.random((rows, n)) < 0.1] = np.nan
            check_topk(values, k, stream)
    check_topk(np.full((2, 33), np.nan, np.float32), 5, stream)


def check_topk(values: Array, k: int, stream: Stream | None) -> None:
    rows = len(values)
    clean = np.where(np.isnan(values), -np.inf, values)
    order = np.argsort(-clean, axis=1, kind="stable")[:, :k]
    with Natives() as native:
        index, value = native.empty((rows, k), "i32"), native.empty((rows, k), "f32")
        op("TopK", index, value, native(values, "f32"), stream=stream)
        np.testing.assert_array_equal(array(index), order)
        np.testing.assert_array_equal(array(value), np.take_along_axis(clean, order, 1))


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_conversions_round_to_nearest_even_over_all_bit_patterns(dtype: str) -> None:
    """embedding f32 -> 16 bits -> f32 over every 16-bit value, midpoint and adjacent value."""
    patterns = np.arange(1 << 16, dtype=np.uint16)
    exact = (patterns.view(np.float16).astype(np.float32) if dtype == "f16"
             else (patterns.astype(np.uint32) << 16).view(np.float32))  # fmt: skip
    finite = np.sort(exact[np.isfinite(exact)])
    middles = ((finite[:-1].astype(np.float64) + finite[1:]) / 2).astype(np.float32)
    values = np.concatenate([
        exact, middles, np.nextafter(middles, np.float32(np.inf)),
        np.nextafter(middles, np.float32(-np.inf)), np.float32([3e38, -3e38, 1e-45, 65520, 65519]),
    ])  # fmt: skip
    with Natives() as native:
        narrow = native.empty((1, len(values)), dtype)
        index = native(np.zeros(1), "i64")
        op("Embedding", narrow, index, native(values[None], "f32"))
        wide = native.empty((1, len(values)), "f32")
        op("Embedding", wide, index, narrow)
        expected = rounded(values[None], dtype)
        got = array(wide)
        np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))
        numbers = ~np.isnan(expected)
        assert got[numbers].tobytes() == expected[numbers].tobytes()  # signed zeros too
