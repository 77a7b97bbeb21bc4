"""llaisysLora against NumPy: odd sizes, every rank and dtype, and batch invariance."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
from native_helpers import EPSILON, REALS, Array, Natives, array, bits, handle_array, op, rounded

from llaisys.common.errors import InvalidInputError
from llaisys.libllaisys.handles import Stream, Tensor

RANKS = (1, 3, 8, 16, 17, 64, 256)


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng([seed, *shape]).standard_normal(shape, np.float32)


def lora(
    natives: Natives,
    x: Tensor,
    slots: Sequence[int],
    adapters: Sequence[Sequence[tuple[Array, Array] | None]],
    outs: Sequence[Tensor],
    scales: Sequence[float],
    dtype: str,
    stream: Stream | None = None,
) -> None:
    """adapters[part][slot]: (a, b), or None."""
    n = len(adapters[0])
    flat = [pair for part in adapters for pair in part]
    a = [None if pair is None else natives(pair[0], dtype) for pair in flat]
    b = [None if pair is None else natives(pair[1], dtype) for pair in flat]
    values = np.asarray(scales, np.float32)
    rows = natives(np.asarray(slots), "i32")
    op("Lora", x, rows, len(adapters), n, handle_array(a), handle_array(b), values.ctypes.data,
       handle_array(outs), stream=stream)  # fmt: skip


def reference(
    x: Array, slots: Sequence[int], part: Sequence[tuple[Array, Array] | None],
    before: Array, scales: Sequence[float],
) -> tuple[Array, Array]:  # fmt: skip
    """The result in float64, and the sum of the magnitudes of its terms."""
    out = before.astype(np.float64)
    size = np.abs(out)
    for i, slot in enumerate(slots):
        pair = part[slot] if slot >= 0 else None
        if pair is None:
            continue
        a, b = (values.astype(np.float64) for values in pair)
        out[i] += np.float32(scales[slot]) * (b @ (a @ x[i]))
        size[i] += np.abs(scales[slot] * (np.abs(b) @ (np.abs(a) @ np.abs(x[i]))))
    return out, size


def assert_lora(
    m: int, k: int, outs: Sequence[int], ranks: Sequence[int | None], dtypes: tuple[str, str, str]
) -> None:
    x_dtype, w_dtype, out_dtype = dtypes
    rng = np.random.default_rng([m, k, *outs])
    slots = rng.integers(-1, len(ranks), m).tolist()
    scales = [0.5 + s for s in range(len(ranks))]
    adapters = [
        [
            None if r is None else (
                rounded(normal(r, k, seed=p), w_dtype), rounded(normal(n, r, seed=p), w_dtype)
            )
            for r in ranks
        ]
        for p, n in enumerate(outs)
    ]  # fmt: skip
    x = rounded(normal(m, k, seed=7), x_dtype)
    before = [rounded(normal(m, n, seed=8), out_dtype) for n in outs]
    with Natives() as natives, Stream(n_threads=2) as stream:
        tensors = [natives.strided(values, out_dtype) for values in before]
        lora(natives, natives.strided(x, x_dtype), slots, adapters, tensors, scales, w_dtype,
             stream)  # fmt: skip
        for part, values, made in zip(adapters, before, tensors, strict=True):
            expected, size = reference(x, slots, part, values, scales)
            tolerance = 2e-6 * size + EPSILON[out_dtype] * (np.abs(expected) + 1e-3)
            assert (np.abs(array(made) - expected) <= tolerance).all()


@pytest.mark.parametrize("rank", RANKS)
def test_every_rank_at_odd_sizes(rank: int) -> None:
    for m, k, n in ((1, 1, 1), (3, 7, 5), (5, 33, 70), (17, 65, 31), (70, 129, 517)):
        assert_lora(m, k, [n], [rank], ("f32", "f32", "f32"))


def test_parts_share_one_input_and_slots_differ_in_rank() -> None:
    for m in (1, 2, 16, 33, 600):
        assert_lora(m, 67, [40, 9, 13], [5, None, 64, 1], ("f32", "f32", "f32"))


@pytest.mark.parametrize("dtypes", list(product(REALS, REALS, REALS)))
def test_every_dtype(dtypes: tuple[str, str, str]) -> None:
    assert_lora(9, 45, [37, 600], [8, 3], dtypes)


@pytest.mark.parametrize("dtype", REALS)
def test_a_row_does_not_depend_on_other_rows_or_threads(dtype: str) -> None:
    k, n, m = 131, 523, 37
    adapters = [[(normal(r, k, seed=r), normal(n, r, seed=r)) for r in (3, 16, 33)]]
    x, before = normal(m, k), normal(m, n, seed=1)
    slots = np.random.default_rng(3).integers(-1, 3, m).tolist()
    scales = (0.5, 2.0, 1.25)
    together = []
    for threads in (1, 3):
        with Natives() as natives, Stream(n_threads=threads) as stream:
            out = natives(before, dtype)
            lora(natives, natives(x, dtype), slots, adapters, [out], scales, dtype, stream)
            together.append(bits(out))
    assert together[0] == together[1]
    row_bytes = len(together[0]) // m
    for i in range(m):
        with Natives() as natives:
            out = natives(before[i : i + 1], dtype)
            alone = natives(x[i : i + 1], dtype)
            lora(natives, alone, slots[i : i + 1], adapters, [out], scales, dtype)
            assert bits(out) == together[0][i * row_bytes : (i + 1) * row_bytes], f"row {i}"


def test_invalid_arguments_are_named() -> None:
    pair = (normal(4, 6), normal(5, 4))
    with Natives() as natives:
        x, out = natives(normal(3, 6), "f32"), natives(normal(3, 5), "f32")
        with pytest.raises(InvalidInputError, match=r"slots\[1\] must be in \[-1, 1\), got 1"):
            lora(natives, x, [0, 1, 0], [[pair]], [out], [1.0], "f32")
        with pytest.raises(InvalidInputError, match="slots must be an i32 host tensor"):
            lora(natives, x, [0, 0], [[pair]], [out], [1.0], "f32")
        wrong = (pair[0], normal(6, 4))
        with pytest.raises(InvalidInputError, match=r"b: got \[6, 4\], expected \[5, 4\]"):
            lora(natives, x, [0, 0, 0], [[wrong]], [out], [1.0], "f32")
        large = (normal(257, 6), normal(5, 257))
        with pytest.raises(InvalidInputError, match="256"):
            lora(natives, x, [0, 0, 0], [[large]], [out], [1.0], "f32")
