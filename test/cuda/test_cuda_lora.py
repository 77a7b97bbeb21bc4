"""LoRA on the GPU: slots of a decoder against the CPU and merged weights, captured graphs with
other adapters, batch-invariant results. test/cpp/test_ops_lora.cpp tests the operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from native_decoder import Adapter, Decoder, DecoderShape
from native_helpers import Array, BlockRow

from llaisys.libllaisys.types import DEVICE_NVIDIA

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
