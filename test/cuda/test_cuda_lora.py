"""LoRA on the GPU: the operator against the CPU, slots of a decoder against the CPU and merged
weights, captured graphs with other adapters, batch-invariant results."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from native_decoder import Adapter, Decoder, DecoderShape
from native_helpers import EPSILON, Array, BlockRow, handle_array, op, tensor, to_bits

from llaisys.libllaisys.handles import Stream, Tensor
from llaisys.libllaisys.types import DEVICE_NVIDIA


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng([seed, *shape]).standard_normal(shape, np.float32)


def run_op(
    device: str, dtype: str, out_dtype: str, x: Array, slots: Sequence[int],
    adapters: Sequence[Sequence[tuple[Array, Array] | None]], before: Sequence[Array],
) -> list[Array]:  # fmt: skip
    """The outputs of llaisysLora on a device."""
    with ExitStack() as stack:

        def on(values: Array, kind: str) -> Tensor:
            stored = to_bits(values, kind)
            made = stack.enter_context(Tensor.create(values.shape, kind, device))
            made.load(stored.ctypes.data, stored.nbytes)
            return made

        def host(values: Array | None) -> Tensor | None:
            return None if values is None else stack.enter_context(tensor(values, dtype))

        stream = stack.enter_context(Stream(device))
        pairs = [pair or (None, None) for part in adapters for pair in part]
        a, b = [host(pair[0]) for pair in pairs], [host(pair[1]) for pair in pairs]
        outs = [on(values, out_dtype) for values in before]
        scales = np.arange(1, 1 + len(adapters[0]), dtype=np.float32)
        rows = stack.enter_context(tensor(np.asarray(slots), "i32"))
        op("Lora", on(x, dtype), rows, len(adapters), len(adapters[0]), handle_array(a),
           handle_array(b), scales.ctypes.data, handle_array(outs), stream=stream)  # fmt: skip
        results = []
        for out in outs:
            bits = np.empty(out.shape, {"f32": np.float32, "f16": np.float16}.get(out_dtype, "u2"))
            out.store(bits.ctypes.data, bits.nbytes)
            is_bf16 = out_dtype == "bf16"
            wide = (bits.astype(np.uint32) << 16).view(np.float32) if is_bf16 else bits
            results.append(wide.astype(np.float32))
        return results


CASES = [  # rows, input, outputs of the parts, ranks of the slots
    (1, 64, [72], [16]),
    (3, 40, [24, 8, 8], [1, 8]),
    (17, 1032, [520], [64, None, 3]),
    (33, 2088, [1048, 128, 128], [16, 5, 17, 40]),
    (256, 1536, [2048], [16] * 9),
    (513, 200, [304, 304], [256, 64]),
    (700, 96, [104], [16, 8]),
]


@pytest.mark.parametrize("dtypes", [("bf16", "bf16"), ("bf16", "f32"), ("f16", "f16")])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_tensor_core_kernels(dtypes: tuple[str, str], case: Any) -> None:
    check_op(*dtypes, *case)


@pytest.mark.parametrize("dtypes", [("f32", "f32"), ("bf16", "bf16"), ("f16", "f32")])
def test_reference_kernels_at_odd_sizes(dtypes: tuple[str, str]) -> None:
    for case in ((1, 1, [1], [1]), (5, 33, [70, 3], [3, 17]), (70, 129, [517], [64, None, 256])):
        check_op(*dtypes, *case)


def check_op(
    dtype: str, out_dtype: str, m: int, k: int, outs: Sequence[int], ranks: Sequence[int | None]
) -> None:
    slots = np.random.default_rng(m).integers(-1, len(ranks), m).tolist()
    x = normal(m, k, seed=1)
    adapters = [
        [
            None if r is None
            else (normal(r, k, seed=p) / np.sqrt(k), normal(n, r, seed=p) / np.sqrt(r))
            for r in ranks
        ]
        for p, n in enumerate(outs)
    ]  # fmt: skip
    before = [normal(m, n, seed=2) for n in outs]
    expected = run_op("cpu", dtype, out_dtype, x, slots, adapters, before)
    found = run_op("cuda", dtype, out_dtype, x, slots, adapters, before)
    for ours, theirs, start in zip(found, expected, before, strict=True):
        largest = float(np.abs(theirs).max())
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2 * EPSILON[dtype] * largest)
        untouched = np.asarray(slots) < 0
        assert (ours[untouched] == theirs[untouched]).all()
        assert len(ours) == len(start)


# -- Decoder ---------------------------------------------------------------------------------------

BLOCK: dict[str, Any] = {
    "kv_cache_layout": 1, "kv_cache_block_size": 16, "kv_cache_capacity_tokens": 8192,
}  # fmt: skip
CUDA: dict[str, Any] = BLOCK | {"device": DEVICE_NVIDIA}


def fast_shape(dtype: str, **changes: Any) -> DecoderShape:
    """Sizes that the 16-bit kernels support."""
    sizes: dict[str, Any] = {
        "hidden": 256, "heads": 6, "kv_heads": 2, "head_dim": 64, "inner": 360, "voc": 500,
    }  # fmt: skip
    return DecoderShape(dtype=dtype, **(sizes | changes))


def prompt_rows(n: int, length: int, voc: int) -> list[BlockRow]:
    rng = np.random.default_rng([n, length])
    width = (length + 8) // 16 + 1
    return [
        BlockRow(i, range(i * width, (i + 1) * width), rng.integers(0, voc, length).tolist(),
                 length)
        for i in range(n)
    ]  # fmt: skip


def decode_rows(rows: Sequence[BlockRow], token: int) -> list[BlockRow]:
    return [BlockRow(row.seq, row.blocks, [token], row.length + 1) for row in rows]


def run_model(
    model: Decoder, n: int, slots: Sequence[int], length: int = 9, replays: int = 3
) -> list[Array]:
    """Logits of a prompt and of decode steps, the last ones replayed as a graph."""
    rows = prompt_rows(n, length, model.decoder.voc)
    marks = [int(i == length - 1) for _ in rows for i in range(length)]
    results = [model.run_rows(rows, slots, marks)]
    for _ in range(replays):
        results.append(model.run_rows(decode_rows(rows, 7), slots, [1] * n))
    return results


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("n", [1, 5, 40, 130])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_slots_match_cpu(dtype: str, n: int, norms: bool) -> None:
    shape = fast_shape(dtype, has_head_norms=norms, has_biases=not norms)
    slots = np.random.default_rng(n).integers(-1, 3, n).tolist()
    found = []
    for options in (BLOCK, CUDA):
        with Decoder(shape, shape.weights(), **options) as model:
            model.reserve_lora(4, 64)
            for slot, rank in enumerate((16, 3, 64)):
                model.load_adapter(slot, Adapter.random(shape, rank, seed=slot))
            found.append(run_model(model, n, slots))
    scale = {"f32": 1e-4, "f16": 0.02, "bf16": 0.12}[dtype]
    for ours, theirs in zip(found[1], found[0], strict=True):
        assert np.abs(ours - theirs).max() < scale * np.abs(theirs).max()
    assert (found[1][2] == found[1][3]).all()


SIZES: list[tuple[dict[str, int], tuple[int, ...]]] = [  # changes of the shape, ranks of the slots
    ({"hidden": 264, "inner": 1032, "head_dim": 128}, (1, 8, 16)),
    ({"hidden": 2056, "inner": 72, "head_dim": 32}, (40, 17, 48)),
    ({"hidden": 4104, "inner": 520, "heads": 4, "head_dim": 256}, (33, 16, 2)),
    ({"hidden": 8200, "inner": 64}, (16, 5, 8)),
    ({"hidden": 200, "inner": 200}, (256, 65, 1)),
]


@pytest.mark.parametrize("n", [3, 70])
@pytest.mark.parametrize(("changes", "ranks"), SIZES, ids=lambda value: str(value))
def test_sizes_match_cpu(changes: dict[str, int], ranks: tuple[int, ...], n: int) -> None:
    """Each instance of the fused kernels, what they do not support, adapters of some products."""
    shape = fast_shape("f16", **changes)
    slots = [(7 * i) % 4 - 1 for i in range(n)]
    targets = (None, ("attn_q_w", "attn_o_w", "mlp_up_w"), ("attn_v_w", "mlp_down_w"))
    found = []
    for options in (BLOCK, CUDA):
        with Decoder(shape, shape.weights(), **options) as model:
            model.reserve_lora(3, max(ranks))
            for slot, (rank, some) in enumerate(zip(ranks, targets, strict=True)):
                adapter = Adapter.random(shape, rank, slot, *([some] if some else []))
                model.load_adapter(slot, adapter)
            found.append(run_model(model, n, slots, replays=2))
    for ours, theirs in zip(found[1], found[0], strict=True):
        assert np.abs(ours - theirs).max() < 0.02 * np.abs(theirs).max()


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_slots_equal_merged_weights(dtype: str) -> None:
    shape = fast_shape(dtype)
    adapter = Adapter.random(shape, 16, seed=1)
    with Decoder(shape, shape.weights(), **CUDA) as model:
        model.reserve_lora(2, 16)
        model.load_adapter(1, adapter)
        ours = run_model(model, 3, [1, 1, 1])
        base = run_model(model, 3, [-1, -1, -1])
    with Decoder(shape, adapter.merge(shape.weights()), **CUDA) as model:
        merged = run_model(model, 3, [-1, -1, -1])
    scale = {"f32": 1e-4, "bf16": 0.1}[dtype]
    for mine, theirs, without in zip(ours, merged, base, strict=True):
        assert np.abs(mine - theirs).max() < scale * np.abs(theirs).max()
        assert np.abs(mine - without).max() > 0.3 * np.abs(without).max()


def test_graphs_stay_valid_when_adapters_change() -> None:
    shape = fast_shape("bf16")
    adapters = [Adapter.random(shape, rank, seed=rank) for rank in (16, 8, 32)]
    n = 6
    rows = prompt_rows(n, 9, shape.voc)

    def decode(model: Decoder, slots: Sequence[int]) -> Array:
        """The prompt without an adapter, then one decode step."""
        marks = [int(i == 8) for _ in rows for i in range(9)]
        model.run_rows(rows, [-1] * n, marks)
        return model.run_rows(decode_rows(rows, 7), slots, [1] * n)

    with Decoder(shape, shape.weights(), **CUDA) as model:
        base = decode(model, [-1] * n)
        model.reserve_lora(3, 32)
        for slot, adapter in enumerate(adapters):
            model.load_adapter(slot, adapter)
        each = [decode(model, [slot] * n) for slot in range(3)]
        mixed = decode(model, [2, 0, -1, 1, 1, 0])
        expected = np.stack([each[2][0], each[0][1], base[2], each[1][3], each[1][4], each[0][5]])
        np.testing.assert_allclose(mixed, expected, rtol=0, atol=0.05 * np.abs(expected).max())
        assert (decode(model, [-1] * n) == base).all()
        model.load_adapter(1, adapters[0])
        assert (decode(model, [1] * n) == each[0]).all()
        model.clear_lora(1)
        cleared = decode(model, [1] * n)
        np.testing.assert_allclose(cleared, base, rtol=0, atol=0.05 * np.abs(base).max())


def test_exact_rows_do_not_depend_on_the_batch() -> None:
    shape = fast_shape("bf16")
    slots = [2, 0, -1, 2, 1, 1, 0, 2, -1, 0, 1, 2, 2, 0, 1, 0, 2, 1]
    n = len(slots)
    with Decoder(shape, shape.weights(), exact=1, **CUDA) as model:
        model.reserve_lora(3, 16)
        for slot, rank in enumerate((3, 16, 8)):
            model.load_adapter(slot, Adapter.random(shape, rank, seed=slot))
        together = run_model(model, n, slots, replays=2)
        rows = prompt_rows(n, 9, shape.voc)
        for i in (0, 2, 4, 17):
            marks = [0] * 8 + [1]
            alone = model.run_rows([rows[i]], [slots[i]], marks)
            assert (alone[0] == together[0][i]).all(), f"prompt of row {i}"
            alone = model.run_rows(decode_rows([rows[i]], 7), [slots[i]], [1])
            assert (alone[0] == together[1][i]).all(), f"decode of row {i}"
