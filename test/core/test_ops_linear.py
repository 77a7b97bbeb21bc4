"""llaisysLinear against NumPy, and batch invariance: a row depends only on itself."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from native_helpers import (
    EPSILON,
    REALS,
    Array,
    Natives,
    array,
    bits,
    handle_array,
    normal,
    op,
    rounded,
)

from llaisys.libllaisys.handles import LinearWeight, Stream, Tensor

MIXED = [(x, w, out) for x, w, out in product(REALS, REALS, REALS)]
# Rows around the register tile and the switch to many rows; columns around vectors and blocks of k;
# outputs around the panel of 32.
SHAPES = (
    (1, 1, 1), (1, 3, 31), (2, 7, 33), (3, 8, 32), (4, 15, 17), (5, 16, 64), (7, 33, 65),
    (12, 255, 31), (25, 256, 34), (33, 257, 1), (100, 31, 5), (241, 19, 35), (1, 1000, 129),
)  # fmt: skip


def linear(
    x: Tensor,
    weights: Sequence[LinearWeight],
    outs: Sequence[Tensor],
    biases: Sequence[Tensor | None] | None = None,
    rows: Tensor | None = None,
    stream: Stream | None = None,
) -> None:
    bias = None if biases is None else handle_array(biases)
    op("Linear", x, rows, len(weights), handle_array(weights), bias, handle_array(outs),
       stream=stream)  # fmt: skip


@cache
def has_tiles() -> bool:
    """Return whether products with bf16 weights use AMX tiles."""
    with Stream(n_threads=1) as stream:
        return stream.probe("bf16") > 0


def assert_product(
    got: Array, x: Array, w: Array, bias: Array | None, dtype: str, w_dtype: str = "f32"
) -> None:
    """Check within the error of f32 sums along k and one rounding. Tiles round x first."""
    if w_dtype == "bf16" and has_tiles():
        x = rounded(x, "bf16")
    wide_x, wide_w = x.astype(np.float64), w.astype(np.float64)
    expected = wide_x @ wide_w.T
    magnitude = np.abs(wide_x) @ np.abs(wide_w).T
    if bias is not None:
        expected += bias
        magnitude += np.abs(bias)
    room = 2.0**-23 * (2 + np.sqrt(x.shape[1])) * magnitude
    room += EPSILON[dtype] * np.abs(expected) + 1e-30
    assert got.shape == expected.shape
    assert (np.abs(got - expected) <= room).all()


@pytest.mark.parametrize(("x_dtype", "w_dtype", "dtype"), MIXED)
def test_against_numpy(x_dtype: str, w_dtype: str, dtype: str) -> None:
    for m, k, n in SHAPES:
        x, w = rounded(normal(m, k), x_dtype), rounded(normal(n, k, seed=1), w_dtype)
        bias = rounded(normal(n, seed=2), x_dtype)
        with Natives() as native:
            weight = native.keep(LinearWeight(native(w, w_dtype)))
            out, plain = native.empty((m, n), dtype), native.empty((m, n), dtype)
            source = native(x, x_dtype)
            linear(source, [weight], [out], [native(bias, x_dtype)])
            assert_product(array(out), x, w, bias, dtype, w_dtype)
            linear(source, [weight], [plain])
            assert_product(array(plain), x, w, None, dtype, w_dtype)


@pytest.mark.parametrize("dtype", REALS)
def test_strided_input_and_output_and_a_strided_weight(dtype: str) -> None:
    for m, k, n in SHAPES:
        x, w = rounded(normal(m, k), dtype), rounded(normal(n, k, seed=1), dtype)
        with Natives() as native:
            weight = native.keep(LinearWeight(native.strided(w, dtype)))
            source = native.strided(x, dtype, before=3)
            out = native.strided(np.zeros((m, n)), dtype)
            surroundings = native.whole
            linear(source, [weight], [out])
            assert_product(array(out), x, w, None, dtype)
            gaps = array(surroundings)
            assert np.isnan(gaps[:, 0]).all() and np.isnan(gaps[:, n + 1 :]).all()


def test_several_weights_over_one_input_and_rows_by_index() -> None:
    x = normal(9, 70)
    sizes, dtypes = (33, 1, 64), ("f32", "bf16", "f16")
    rows = np.array([8, 0, 0, 5], np.int32)
    with Natives() as native, Stream(n_threads=2) as stream:
        weights = [rounded(normal(n, 70, seed=n), d) for n, d in zip(sizes, dtypes, strict=True)]
        packed = [
            native.keep(LinearWeight(native(w, d), stream))
            for w, d in zip(weights, dtypes, strict=True)
        ]
        bias = normal(64)
        outs = [native.empty((4, n), "f32") for n in sizes]
        linear(native(x, "f32"), packed, outs, [None, None, native(bias, "f32")],
               native(rows, "i32"), stream)  # fmt: skip
        for i, (w, out) in enumerate(zip(weights, outs, strict=True)):
            assert_product(array(out), x[rows], w, bias if i == 2 else None, "f32", dtypes[i])


def test_tensor_may_be_destroyed_after_packing() -> None:
    w = normal(40, 11)
    with Natives() as native:
        with Natives() as short:
            weight = native.keep(LinearWeight(short(w, "f32")))
        out = native.empty((2, 40), "f32")
        x = normal(2, 11)
        linear(native(x, "f32"), [weight], [out])
        assert_product(array(out), x, w, None, "f32")


def test_empty_input() -> None:
    with Natives() as native:
        weight = native.keep(LinearWeight(native(normal(5, 3), "f32")))
        linear(native.empty((0, 3), "f32"), [weight], [native.empty((0, 5), "f32")])
        linear(native.empty((4, 3), "f32"), [weight], [native.empty((0, 5), "f32")],
               rows=native.empty((0,), "i32"))  # fmt: skip
        none = native.keep(LinearWeight(native.empty((0, 3), "f32")))
        linear(native.empty((4, 3), "f32"), [none], [native.empty((4, 0), "f32")])
        # Empty sums give the bias.
        thin = native.keep(LinearWeight(native.empty((5, 0), "f32")))
        out, bias = native(normal(2, 5), "f32"), normal(5)
        linear(native.empty((2, 0), "f32"), [thin], [out], [native(bias, "f32")])
        np.testing.assert_array_equal(array(out), np.tile(bias, (2, 1)))


def test_nan_and_inf_stay_in_their_row() -> None:
    x, w = normal(6, 40), normal(35, 40)
    with Natives() as native:
        weight = native.keep(LinearWeight(native(w, "f32")))
        clean, dirty = native.empty((6, 35), "f32"), native.empty((6, 35), "f32")
        linear(native(x, "f32"), [weight], [clean])
        x[2, 7], x[4, 0] = np.nan, np.inf
        linear(native(x, "f32"), [weight], [dirty])
        got, expected = array(dirty), array(clean)
        assert np.isnan(got[2]).all() and not np.isfinite(got[4]).any()
        for row in (0, 1, 3, 5):
            assert got[row].tobytes() == expected[row].tobytes()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_row_is_bitwise_independent_of_batch_and_threads(data: st.DataObject) -> None:
    m = data.draw(st.integers(1, 60) | st.sampled_from([239, 240, 241, 300]), "m")
    k = data.draw(st.integers(1, 80) | st.sampled_from([255, 256, 257, 700]), "k")
    n = data.draw(st.integers(1, 100), "n")
    x_dtype, w_dtype, dtype = data.draw(st.sampled_from(MIXED), "dtypes")
    chosen = data.draw(st.lists(st.integers(0, m - 1), min_size=1, max_size=30), "rows")
    x, w, bias = normal(m, k), normal(n, k, seed=1), normal(n, seed=2)
    with Natives() as native, Stream(n_threads=2) as stream:
        source, offset = native(x, x_dtype), native(bias, "f32")
        weight = native.keep(LinearWeight(native(w, w_dtype)))
        again = native.keep(LinearWeight(native(w, w_dtype), stream))
        whole, threaded = native.empty((m, n), dtype), native.empty((m, n), dtype)
        linear(source, [weight], [whole], [offset])
        linear(source, [again, again], [threaded, native.empty((m, n), dtype)],
               [offset, None], stream=stream)  # fmt: skip
        assert bits(whole) == bits(threaded)
        some = native.empty((len(chosen), n), dtype)
        linear(source, [weight], [some], [offset], native(np.array(chosen), "i32"))
        assert array(some).tobytes() == array(whole)[chosen].tobytes()
        alone = native.empty((1, n), dtype)
        row = native.keep(source.slice(0, chosen[0], chosen[0] + 1))
        linear(row, [weight], [alone], [offset], stream=stream)
        assert array(alone).tobytes() == array(whole)[chosen[:1]].tobytes()
