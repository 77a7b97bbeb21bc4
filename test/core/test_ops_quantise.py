"""Quantisation of weights against a NumPy reference: equal bytes over odd sizes and every dtype."""

from __future__ import annotations

import numpy as np
import pytest
from error_helpers import naming
from gguf_blocks import e4m3_values
from native_helpers import Array, Natives, op

from llaisys.common.errors import InvalidInputError
from llaisys.libllaisys.handles import Stream, Tensor
from llaisys.models.loading.convert import convert
from llaisys.models.tensors import tensor_from

F32 = np.float32


def fit(x: Array, s: Array, m: Array, low: int, high: int) -> tuple[Array, Array]:
    """(q [n, 32], sum of squared differences [n]) of blocks on the grid s * q + m."""
    with np.errstate(divide="ignore"):
        inverse = np.where(s != 0, F32(1) / s, F32(0))
    q = np.rint(np.clip((x - m[:, None]) * inverse[:, None], F32(low), F32(high)))
    squares = (x - (s[:, None] * q + m[:, None])) ** 2
    while squares.shape[1] > 1:
        half = squares.shape[1] // 2
        squares = squares[:, :half] + squares[:, half:]
    return q, squares[:, 0]


def half(values: Array) -> tuple[Array, Array]:
    """Return (f16 bytes, their f32 values)."""
    halves = values.astype("<f2")
    return halves[:, None].view(np.uint8), halves.astype(F32)


def nibbles(q: Array) -> Array:
    codes = q.astype(np.uint8)
    return codes[:, :16] | codes[:, 16:] << 4


def best(x: Array, tries: list[tuple[Array, Array, Array, int, int]]) -> Array:
    """Return the blocks of the first least-error attempt: (header, s, m, low, offset of q)."""
    blocks, least = None, None
    for header, s, m, low, offset in tries:
        q, error = fit(x, s, m, low, low + 15)
        made = np.concatenate([header, nibbles(q + offset)], 1)
        if blocks is None or least is None:
            blocks, least = made, error
        better = error < least
        blocks[better], least[better] = made[better], error[better]
    assert blocks is not None
    return blocks


def reference(x: Array, dtype: str) -> Array:
    """uint8 [rows, bytes]."""
    rows = len(x)
    x = x.reshape(-1, 32)
    low, high = x.min(1), x.max(1)
    none = np.zeros(len(x), F32)
    if dtype == "q8_0":
        header, s = half(np.maximum(abs(low), abs(high)) / F32(127))
        q, _ = fit(x, s, none, -127, 127)
        blocks = np.concatenate([header, q.astype(np.int8).view(np.uint8)], 1)
    elif dtype == "q4_0":
        largest = np.where(-low > high, low, high)
        scales = [half(-largest / F32(n)) for n in (8, 7, 7.5, 8.5, 9, 9.5)]
        blocks = best(x, [(header, s, none, -8, 8) for header, s in scales])
    else:
        tries = []
        middle = low / F32(2) + high / F32(2)
        for share in (1, 0.95, 0.9, 0.85, 0.8):
            first, s = half(F32(share) * (high / F32(15) - low / F32(15)))
            second, m = half(middle - F32(7.5) * s)
            tries.append((np.concatenate([first, second], 1), s, m, 0, 0))
        blocks = best(x, tries)
    return blocks.reshape(rows, -1)


def quantised(x: Array, source: str, dtype: str, stream: Stream | None = None) -> Array:
    """Return the operator's result for f32 values stored as `source`."""
    with Natives() as make:
        out = make.keep(Tensor.create(x.shape, dtype))
        op(
            "Quantise",
            out,
            make.keep(tensor_from(convert(x, "f32", source), source)),
            stream=stream,
        )
        sizes = {"q8_0": 34, "q4_0": 18, "q4_1": 20}
        result = np.empty((len(x), x.shape[1] // 32 * sizes[dtype]), np.uint8)
        out.store(result.ctypes.data, result.nbytes)
        return result


@pytest.mark.parametrize("shape", [(1, 32), (3, 544), (7, 1056)])
@pytest.mark.parametrize("source", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("dtype", ["q8_0", "q4_0", "q4_1"])
def test_blocks_match_the_reference(dtype: str, source: str, shape: tuple[int, int]) -> None:
    x = np.random.default_rng(shape[1]).standard_normal(shape, F32) * F32(0.05)
    x[0, :16] = 0
    x[-1, -32:] = 0  # a block of zeros
    stored = convert(convert(x, "f32", source), source, "f32")
    got = quantised(x, source, dtype)
    np.testing.assert_array_equal(got, reference(stored, dtype))
    with Stream(n_threads=3) as stream:
        np.testing.assert_array_equal(quantised(x, source, dtype, stream), got)


@pytest.mark.parametrize("dtype", ["q8_0", "q4_0", "q4_1"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38])
def test_block_without_a_finite_scale_becomes_nan(dtype: str, value: float) -> None:
    x = np.ones((2, 64), F32)
    x[1, 40] = value
    blocks = quantised(x, "f32", dtype).reshape(4, -1)
    assert np.isnan(np.ascontiguousarray(blocks[3, :2]).view("<f2"))[0]
    assert np.isfinite(np.ascontiguousarray(blocks[:3, :2]).view("<f2")).all()


def test_unsupported_types_and_shapes_are_rejected() -> None:
    with Natives() as make:
        x = make(np.ones((2, 64), F32), "f32")
        for shape, dtype, words in (
            ((2, 64), "q5_0", "expected q8_0, q4_0, q4_1 or f8_g128"),
            ((2, 32), "q8_0", "shape"),
        ):
            out = make.keep(Tensor.create(shape, dtype))
            with pytest.raises(InvalidInputError, match=words):
                op("Quantise", out, x)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_fp8_rounds_to_the_nearest_code_of_a_row_scale(dtype: str) -> None:
    x = np.random.default_rng(0).standard_normal((5, 256), F32)
    x *= np.array([[1.0], [1e-3], [300.0], [0.0], [1.0]], F32)
    stored = convert(x, "f32", dtype)
    x = convert(stored, dtype, "f32").astype(F32)
    with Natives() as make:
        out = make.keep(Tensor.create(x.shape, "f8_g128"))
        op("Quantise", out, make.keep(tensor_from(stored, dtype)))
        blocks = np.empty((5, 2, 132), np.uint8)
        out.store(blocks.ctypes.data, blocks.nbytes)
    scales = blocks[:, :, :4].copy().view("<f4")[..., 0]
    np.testing.assert_allclose(scales, np.abs(x).max(1, keepdims=True).repeat(2, 1) / 448)
    codes = e4m3_values()
    got = (codes[blocks[:, :, 4:]] * scales[..., None]).reshape(x.shape)
    known = codes[np.isfinite(codes)]
    wanted = x / np.maximum(scales[:, :1], F32(1e-30))
    nearest = known[np.abs(wanted[..., None] - known).argmin(-1)] * scales[:, :1]
    np.testing.assert_allclose(np.abs(got - x), np.abs(nearest - x), rtol=1e-4, atol=1e-7)


def test_fp8_needs_whole_blocks() -> None:
    with naming(InvalidInputError, "128"):
        Tensor.create((2, 96), "f8_g128")
