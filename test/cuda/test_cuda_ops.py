"""Every operator on the GPU against the CPU: odd sizes, every dtype, views, both KV layouts."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from cuda_helpers import IS_SMALL, VARIANTS, Side
from native_helpers import EPSILON, REALS, Array, handle_array, normal

from llaisys.libllaisys.handles import LinearWeight, Stream

LENGTHS = (1, 3, 8, 17) if IS_SMALL else (1, 3, 8, 17, 64, 129, 513, 1031)


def compare(
    streams: dict[str, Stream], body: Any, dtype: str, scale: float = 4.0, exact: bool = False
) -> None:
    """Compares the array that body(side) returns on each device."""
    results = {}
    for device, stream in streams.items():
        with Side(device, stream) as side:
            results[device] = body(side)
    expected, got = results["cpu"], results["cuda"]
    assert got.shape == expected.shape
    if exact:
        np.testing.assert_array_equal(got, expected)
        return
    largest = float(np.abs(expected).max(initial=1e-3))
    np.testing.assert_allclose(got, expected, rtol=0, atol=scale * EPSILON[dtype] * largest)


@pytest.mark.parametrize("dtype", REALS)
def test_add(streams: dict[str, Stream], dtype: str) -> None:
    for n in LENGTHS:

        def body(side: Side, n: int = n) -> Array:
            out = side.empty((n,), dtype)
            a, b = side.tensor(normal(n), dtype), side.tensor(normal(n, seed=1), dtype)
            side.run("Add", out, a, b)
            return side.array(out)

        compare(streams, body, dtype, exact=True)

        def mixed(side: Side, n: int = n) -> Array:
            sums = side.tensor(normal(n), "f32")
            side.run("Add", sums, sums, side.tensor(normal(n, seed=1), dtype))
            return side.array(sums)

        compare(streams, mixed, "f32", exact=True)


@pytest.mark.parametrize("dtype", REALS)
def test_argmax_with_ties_and_nan(streams: dict[str, Stream], dtype: str) -> None:
    # 20,004: more than four float4 per thread when one block has a row.
    for rows, n in (*product((1, 5), LENGTHS), *(() if IS_SMALL else ((140, 20004),))):
        values = np.round(normal(rows, n) * 3)
        values[np.random.default_rng(n).random(values.shape) < 0.2] = np.nan
        values[0] = np.nan if n == 3 else values[0]

        def body(side: Side, values: Array = values) -> Array:
            index = side.empty(values.shape[:1], "i64")
            largest = side.empty(values.shape[:1], dtype)
            side.run("Argmax", index, largest, side.tensor(values, dtype))
            return np.stack([side.array(index), np.nan_to_num(side.array(largest))])

        compare(streams, body, dtype, exact=True)


@pytest.mark.parametrize(("table_dtype", "dtype"), list(product(REALS, REALS)))
def test_embedding(streams: dict[str, Stream], table_dtype: str, dtype: str) -> None:
    for (rows, d), n in product(((1, 1), (13, 33), (3, 1031)), (1, 65)):
        index = np.random.default_rng(n).integers(0, rows, n)

        def body(side: Side, rows: int = rows, d: int = d, index: Array = index) -> Array:
            out = side.empty((len(index), d), dtype)
            table = side.tensor(normal(rows, d), table_dtype)
            side.run("Embedding", out, side.tensor(index, "i64"), table)
            return side.array(out)

        compare(streams, body, dtype, exact=True)


@pytest.mark.parametrize(("dtype", "out_dtype"), list(product(REALS, REALS)))
def test_rms_norm_and_add_rms_norm(streams: dict[str, Stream], dtype: str, out_dtype: str) -> None:
    for (n, d), gap in product(((1, 1), (5, 33), (3, 512), (2, 1536), (7, 1031)), (0, 3)):
        x, r, w = normal(n, d), normal(n, d, seed=1), normal(d, seed=2)

        def plain(side: Side, x: Array = x, w: Array = w, gap: int = gap) -> Array:
            out = side.empty(x.shape, out_dtype)
            side.run("RmsNorm", out, side.strided(x, dtype, gap), side.tensor(w, "f32"), 1e-5)
            return side.array(out)

        def added(side: Side, x: Array = x, r: Array = r, w: Array = w, gap: int = gap) -> Array:
            out, sums = side.empty(x.shape, out_dtype), side.tensor(r, "f32")
            side.run(
                "AddRmsNorm", out, sums, side.strided(x, dtype, gap), side.tensor(w, "f32"), 1e-5
            )
            return np.concatenate([side.array(out), side.array(sums)])

        compare(streams, plain, out_dtype)
        compare(streams, added, out_dtype)


@pytest.mark.parametrize("dtype", REALS)
def test_rope(streams: dict[str, Stream], dtype: str) -> None:
    for n, heads, d in ((1, 1, 2), (5, 3, 10), (9, 2, 128)):
        positions = np.random.default_rng(n).integers(0, 30000, n)
        inv_freq = (1e4 ** (-2.0 * np.arange(d // 2) / d)).astype(np.float32)
        inv_freq[2::3] = 0.0  # copied

        def body(
            side: Side, shape: tuple[int, ...] = (n, heads, d), at: Array = positions,
            inv_freq: Array = inv_freq,
        ) -> Array:  # fmt: skip
            x = side.tensor(normal(*shape), dtype)
            side.run("Rope", x, x, side.tensor(at, "i64"), side.tensor(inv_freq, "f32"))
            return side.array(x)

        compare(streams, body, dtype, scale=40 if dtype == "f32" else 4)


@pytest.mark.parametrize("dtype", REALS)
def test_swiglu_topk_rearrange(streams: dict[str, Stream], dtype: str) -> None:
    for n, d in ((1, 1), (3, 7), (2, 513), (5, 64), (3, 8960)):
        x, y = normal(n, d) * 3, normal(n, d, seed=1)

        def swiglu(side: Side, x: Array = x, y: Array = y) -> Array:
            gate = side.strided(x, dtype, 8)
            side.run("SwiGLU", gate, gate, side.tensor(y, dtype))
            return side.array(gate)

        def topk(side: Side, x: Array = x) -> Array:
            k = min(5, x.shape[1])
            index = side.empty((len(x), k), "i32")
            value = side.empty((len(x), k), "f32")
            side.run("TopK", index, value, side.tensor(np.round(x), "f32"))
            return np.concatenate([side.array(index), side.array(value)])

        def rearrange(side: Side, x: Array = x) -> Array:
            out = side.empty(x.T.shape, dtype)
            side.run("Rearrange", out, side.keep(side.tensor(x, dtype).permute((1, 0))))
            return side.array(out)

        compare(streams, swiglu, dtype)
        compare(streams, topk, "f32", exact=True)
        compare(streams, rearrange, dtype, exact=True)


LINEAR = (
    (1, 1, 1), (1, 8, 31), (2, 7, 33), (3, 64, 32), (5, 16, 64), (7, 136, 65), (8, 1536, 100),
    (9, 72, 48), (16, 2056, 4100), (17, 256, 34), (33, 257, 1), (100, 320, 56), (300, 64, 40),
    (1, 1536, 5000), (1, 8960, 96), (64, 512, 1000), (1, 520, 7), (4, 1032, 523), (6, 4104, 77),
    (8, 8960, 40),
)  # fmt: skip
if IS_SMALL:
    LINEAR = tuple((m, k, n) for m, k, n in LINEAR if m * k * n < 200_000)


@pytest.mark.parametrize(
    ("x_dtype", "w_dtype", "out_dtype"),
    [("f32", "f32", "f32"), ("f16", "f16", "f16"), ("bf16", "bf16", "bf16"),
     ("bf16", "bf16", "f32"), ("f16", "f16", "f32"), ("f32", "bf16", "f32"),
     ("bf16", "f32", "f16")],
)  # fmt: skip
def test_linear(streams: dict[str, Stream], x_dtype: str, w_dtype: str, out_dtype: str) -> None:
    for m, k, n in LINEAR:
        x, w = normal(m, k) / np.sqrt(k), normal(n, k, seed=1)
        bias = normal(n, seed=2)
        rows = np.random.default_rng(m).integers(0, m, 5)

        def body(
            side: Side, x: Array = x, w: Array = w, bias: Array = bias, rows: Array = rows
        ) -> Array:
            n = len(w)
            in_, weight = side.strided(x, x_dtype, 8), side.weight(w, w_dtype)
            one, two = side.empty((len(x), n), out_dtype), side.empty((len(x), n), out_dtype)
            chosen = side.empty((5, n), out_dtype)
            side.run(
                "Linear", in_, None, 2, handle_array([weight, weight]),
                handle_array([side.tensor(bias, "f32"), None]), handle_array([one, two]),
            )  # fmt: skip
            side.run(
                "Linear", in_, side.tensor(rows, "i32"), 1, handle_array([weight]), None,
                handle_array([chosen]),
            )  # fmt: skip
            return np.concatenate([side.array(t) for t in (one, two, chosen)])

        compare(streams, body, out_dtype, scale=16 if out_dtype == "f32" else 2)


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_small_m_row_bits_do_not_depend_on_other_rows(
    streams: dict[str, Stream], dtype: str
) -> None:
    """For 2 to 16 rows; a single row uses another kernel."""
    for k, n in ((520, 33), (1536, 257)):
        x = normal(16, k) / np.sqrt(k)
        with Side("cuda", streams["cuda"]) as side:
            weight = side.weight(normal(n, k, seed=1), dtype)

            def product(
                rows: Array, side: Side = side, weight: LinearWeight = weight, n: int = n
            ) -> Array:
                out = side.empty((len(rows), n), "f32")
                side.run(
                    "Linear", side.tensor(rows, dtype), None, 1, handle_array([weight]), None,
                    handle_array([out]),
                )  # fmt: skip
                return side.array(out)

            together = product(x)
            for i in range(15):
                np.testing.assert_array_equal(product(x[i : i + 2]), together[i : i + 2])


def test_topk_256_with_ties_and_nan(streams: dict[str, Stream]) -> None:
    for rows, n, k, grain in (
        (1, 300, 256, 8), (3, 5000, 256, 64), (2, 5000, 1000, 1), (2, 40001, 256, 1024),
        (1, 70000, 256, 0.01), (1, 5000, 1500, 1),
    ):  # fmt: skip
        if IS_SMALL and n > 5000:
            continue
        values = np.round(normal(rows, n) * grain) / grain
        values[np.random.default_rng(n).random(values.shape) < 0.1] = np.nan
        values[0, :7] = (np.inf, -np.inf, 0.0, -0.0, np.nan, 3.0, 3.0)

        def body(side: Side, values: Array = values, k: int = k) -> Array:
            index = side.empty((len(values), k), "i32")
            value = side.empty((len(values), k), "f32")
            side.run("TopK", index, value, side.tensor(values, "f32"))
            return np.concatenate([side.array(index), side.array(value)])

        compare(streams, body, "f32", exact=True)


@pytest.mark.parametrize(("case", "variant"), VARIANTS)
@pytest.mark.parametrize("dtype", REALS)
def test_attention(
    streams: dict[str, Stream], dtype: str, case: tuple[Any, ...], variant: str
) -> None:
    lengths, fresh, heads, kv_heads, d, block, window = case
    rng = np.random.default_rng(7)
    n_blocks = sum(-(-length // block) for length in lengths) + 3
    order = rng.permutation(n_blocks)
    width = max(-(-length // block) for length in lengths)
    tables = np.full((len(lengths), width), -1, np.int32)
    seen, used = [], 0
    for row, length in enumerate(lengths):
        count = -(-length // block)
        tables[row, :count] = order[used : used + count]
        used += count
        for end in range(max(1, length - fresh + 1), length + 1):
            seen.append((row, max(0, end - window) if window else 0, end))
    seen.append((0, 3, 3) if lengths[0] > 3 else (0, 1, 1))  # empty range
    rows, begin, end = np.array(seen, np.int32).T
    is_latent = isinstance(d, tuple)
    d, value_dim = d if is_latent else (d, d)
    q = normal(len(seen), heads, d)
    sinks = (normal(heads) * 2 + 1).astype(np.float32)
    k, v = normal(n_blocks * block, kv_heads, d, seed=1), normal(n_blocks * block, kv_heads, d)

    def body(side: Side) -> Array:
        out = side.empty((len(seen), heads, value_dim), dtype)
        side.run(
            "Attention", out, side.strided(q, dtype, 8),
            side.tensor(k, dtype), None if is_latent else side.tensor(v, dtype),
            *(side.tensor(t, "i32") for t in (rows, begin, end, tables)),
            side.tensor(sinks, "f32") if "sinks" in variant else None, None, 0, block, 0.1,
            0.5 if "cap" in variant else 0.0,
        )  # fmt: skip
        return side.array(out)

    compare(streams, body, dtype, scale=8 if d <= 128 else 16)  # longer dot products round more


@pytest.mark.parametrize("dtype", REALS)
def test_kv_store_and_masked_attention(streams: dict[str, Stream], dtype: str) -> None:
    for n, heads, d in ((1, 1, 2), (5, 3, 10), (33, 2, 64)):
        slots = np.random.default_rng(n).permutation(2 * n)[:n]
        mask = np.random.default_rng(n).random((n, n)) < 0.6

        def store(side: Side, s: Array = slots, shape: Any = (n, heads, d)) -> Array:
            cache = side.tensor(np.zeros((2 * len(s), *shape[1:])), dtype)
            side.run("KvStore", cache, side.tensor(normal(*shape), "f32"), side.tensor(s, "i32"))
            return side.array(cache)

        def masked(side: Side, mask: Array = mask, shape: Any = (n, heads, d)) -> Array:
            q, k, v = (side.tensor(normal(*shape, seed=i), dtype) for i in range(3))
            out = side.empty(shape, dtype)
            side.run("SelfAttentionMasked", out, q, k, v, side.tensor(mask, "u8"), 0.3)
            return side.array(out)

        compare(streams, store, dtype, exact=True)
        compare(streams, masked, dtype, scale=8)
