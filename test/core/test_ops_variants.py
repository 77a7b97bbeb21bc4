"""Operators of families other than Llama against NumPy: layer norm, GeGLU, scaling and soft caps,
RoPE of some pairs."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from native_helpers import REALS, Array, Natives, array, assert_close, bits, op, rounded
from test_ops_attention import make_case

from llaisys.common.errors import InvalidInputError
from llaisys.libllaisys.handles import Stream

SHAPES = ((1, 1), (3, 7), (5, 33), (2, 513), (33, 1031))


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng([seed, *shape]).standard_normal(shape, np.float32)


@pytest.mark.parametrize(("in_dtype", "dtype"), list(product(REALS, REALS)))
def test_layer_norm(in_dtype: str, dtype: str) -> None:
    for (n, d), has_bias in product(SHAPES, (False, True)):
        x = rounded(normal(n, d) * 3 + 5, in_dtype)  # a mean far from 0
        weight, bias = normal(d, seed=1), normal(d, seed=2)
        wide = x.astype(np.float64)
        centred = wide - wide.mean(1, keepdims=True)
        expected = centred / np.sqrt((centred**2).mean(1, keepdims=True) + 1e-5) * weight
        expected += bias if has_bias else 0
        with Natives() as native, Stream(n_threads=2) as stream:
            out, source = native.strided(np.zeros((n, d)), dtype), native.strided(x, in_dtype)
            given = native(weight, "f32"), native(bias, "f32") if has_bias else None
            op("LayerNorm", out, source, *given, 1e-5, stream=stream)
            assert_close(array(out), expected, dtype, 16)
            if in_dtype == dtype:
                op("LayerNorm", source, source, *given, 1e-5)
                assert bits(source) == bits(out)


@pytest.mark.parametrize(("gate_dtype", "dtype"), list(product(REALS, REALS)))
def test_geglu(gate_dtype: str, dtype: str) -> None:
    for (n, d), has_up, is_erf in product(((0, 3), *SHAPES), (False, True), (0, 1)):
        gate, up = rounded(normal(n, d) * 4, gate_dtype), rounded(normal(n, d, seed=6), "bf16")
        wide = gate.astype(np.float64)
        tanh = np.tanh(np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3))
        erf = np.array([math.erf(x) for x in (wide / np.sqrt(2)).flat]).reshape(n, d)
        expected = 0.5 * wide * (1 + (erf if is_erf else tanh)) * (up if has_up else 1)
        with Natives() as native, Stream(n_threads=2) as stream:
            left = native.strided(gate, gate_dtype)
            right = native.strided(up, "bf16") if has_up else None
            out = native.strided(np.zeros((n, d)), dtype)
            op("GeGLU", out, left, right, is_erf, stream=stream)
            assert_close(array(out), expected, dtype, 8)


@pytest.mark.parametrize("is_erf", [0, 1])
def test_geglu_of_extreme_values(is_erf: int) -> None:
    gate = np.array([[-1e4, -90.0, 0.0, 90.0, 1e4, np.inf]], np.float32)
    with Natives() as native:
        out = native.empty(gate.shape, "f32")
        op("GeGLU", out, native(gate, "f32"), None, is_erf)
        np.testing.assert_allclose(array(out), [[0, 0, 0, 90, 1e4, np.inf]], atol=1e-30, rtol=1e-6)


@pytest.mark.parametrize(("in_dtype", "dtype"), list(product(REALS, REALS)))
def test_scale_and_soft_cap(in_dtype: str, dtype: str) -> None:
    for (n, d), factor, cap in product(SHAPES, (1.0, 0.3), (0.0, 2.5)):
        x = rounded(normal(n, d) * 4, in_dtype)
        expected = x.astype(np.float64) * np.float32(factor)
        expected = cap * np.tanh(expected / cap) if cap else expected
        with Natives() as native, Stream(n_threads=2) as stream:
            out = native.strided(np.zeros((n, d)), dtype)
            op("Scale", out, native.strided(x, in_dtype), factor, cap, stream=stream)
            assert_close(array(out), expected, dtype, 8)


def test_scale_rejects_a_negative_or_nan_cap() -> None:
    with Natives() as native:
        x = native(np.ones((2, 3)), "f32")
        for cap in (-1.0, float("nan")):
            with pytest.raises(InvalidInputError, match=r"scale: soft_cap: got .* at least 0"):
                op("Scale", x, x, 1.0, cap)


@pytest.mark.parametrize("dtype", REALS)
def test_pairs_with_frequency_zero_are_copied(dtype: str) -> None:
    x = rounded(normal(3, 2, 12), dtype)
    frequencies = np.array([1.0, 0.0, 0.25, 0.0, 0.0, 1e-3], np.float32)
    with Natives() as native:
        out = native.empty(x.shape, dtype)
        positions = native(np.array([0, 7, 100000]), "i64")
        op("Rope", out, native(x, dtype), positions, native(frequencies, "f32"))
        kept = np.flatnonzero(frequencies == 0)
        got = array(out)
        np.testing.assert_array_equal(got[..., kept], x[..., kept])
        np.testing.assert_array_equal(got[..., kept + 6], x[..., kept + 6])
        assert (got[1:, :, 0] != x[1:, :, 0]).all()


@pytest.mark.parametrize("kv_dtype", ["f32", "bf16"])
def test_attention_with_a_soft_cap(kv_dtype: str) -> None:
    for length, heads, d in ((1, 4, 6), (65, 4, 33), (130, 14, 64), (1100, 2, 256)):
        case = make_case((length, 70), 5, heads, 2, d, 4, dtypes=("f32", kv_dtype, "f32"))
        case.scale, case.soft_cap = 1.0, 3.0
        with Stream(n_threads=2) as stream:
            capped = case.run(stream=stream)
        assert_close(capped, case.reference(), "f32", 64)
        case.soft_cap = 0.0
        assert np.abs(case.run() - capped).max() > 1e-2 or length == 1


@pytest.mark.parametrize("dtypes", list(product(REALS, REALS, REALS)))
def test_attention_with_sinks(dtypes: tuple[str, str, str]) -> None:
    for length, heads, d, window in (
        (1, 4, 6, 0),
        (65, 6, 33, 9),
        (130, 14, 64, 0),
        (1100, 2, 8, 0),
    ):
        case = make_case((length, 70), 5, heads, 2, d, 4, dtypes=dtypes, window=window)
        case.sinks = (normal(heads) * 3).astype(np.float32)
        case.sinks[0], case.sinks[-1] = -200.0, 30.0  # no effect, and nearly all of the weight
        case.seen[2] = (case.seen[2][0], 1, 1)  # nothing visible
        for threads in (1, 3):
            with Stream(n_threads=threads) as stream:
                assert_close(case.run(stream=stream), case.reference(), dtypes[2], 32)
        case.soft_cap = 2.0
        assert_close(case.run(), case.reference(), dtypes[2], 64)


def test_a_sink_above_every_score_does_not_overflow() -> None:
    case = make_case((20,), 3, 2, 1, 8)
    case.sinks = np.array([1e6, -1e6], np.float32)
    got = case.run()
    assert (got[:, 0] == 0).all()
    assert_close(got, case.reference(), "f32", 16)


def test_attention_rejects_other_sinks() -> None:
    case = make_case((5,), 1, 4, 2, 8)
    case.sinks = np.zeros(3, np.float32)
    with pytest.raises(InvalidInputError, match="attention: sinks"):
        case.run()
