"""LoRA slots of a decoder: equal to merged weights, independent of the batch."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from error_helpers import naming
from native_decoder import TARGETS, Adapter, Decoder, DecoderShape
from native_helpers import Array, BlockRow, MockModel, create_params, op, tensor

from llaisys.common.errors import InvalidInputError, LlaisysError
from llaisys.libllaisys.handles import Tensor
from llaisys.libllaisys.model_handle import lora_bytes

SHAPE = DecoderShape()
PROMPT = [5, 17, 3, 60, 22, 8, 8, 41, 0, 13, 29]
N_GREEDY = 64


def greedy(model: Decoder, slot: int = -1, n: int = N_GREEDY) -> tuple[Array, list[int]]:
    """The logits of the prompt and n greedy tokens."""
    logits = model.run_tokens(PROMPT, slot=slot)
    tokens = [int(logits[-1].argmax())]
    while len(tokens) < n:
        tokens.append(int(model.run_tokens([tokens[-1]], slot=slot)[-1].argmax()))
    return logits, tokens


def merged_run(shape: DecoderShape, adapter: Adapter) -> tuple[Array, list[int]]:
    with Decoder(shape, adapter.merge(shape.weights())) as model:
        return greedy(model)


@pytest.mark.parametrize("rank", [1, 8, 64, 256])
def test_slots_equal_merged_weights(rank: int) -> None:
    adapter = Adapter.random(SHAPE, rank, seed=1)
    expected, tokens = merged_run(SHAPE, adapter)
    with Decoder(SHAPE, SHAPE.weights()) as model:
        model.reserve_lora(3, rank)
        model.load_adapter(1, adapter)
        ours, our_tokens = greedy(model, slot=1)
    assert np.abs(ours - expected).max() < 1e-4 * max(1.0, np.abs(expected).max())
    assert our_tokens == tokens


@pytest.mark.parametrize("target", TARGETS)
def test_each_target_alone_equals_merged_weights(target: str) -> None:
    adapter = Adapter.random(SHAPE, 4, seed=2, targets=[target])
    expected, tokens = merged_run(SHAPE, adapter)
    with Decoder(SHAPE, SHAPE.weights()) as model:
        base, _ = greedy(model, n=1)
    with Decoder(SHAPE, SHAPE.weights()) as model:
        model.reserve_lora(1, 8)
        model.load_adapter(0, adapter)
        ours, our_tokens = greedy(model, slot=0)
    assert np.abs(ours - expected).max() < 1e-4
    assert np.abs(base - expected).max() > 1e-2, "the adapter has no effect"
    assert our_tokens == tokens


def test_head_norms_come_after_the_adapter() -> None:
    shape = DecoderShape(has_head_norms=True, has_biases=False)
    adapter = Adapter.random(shape, 8, seed=3)
    expected, tokens = merged_run(shape, adapter)
    with Decoder(shape, shape.weights()) as model:
        model.reserve_lora(1, 8)
        model.load_adapter(0, adapter)
        ours, our_tokens = greedy(model, slot=0)
    assert np.abs(ours - expected).max() < 1e-4
    assert our_tokens == tokens


BLOCK: dict[str, Any] = {
    "kv_cache_layout": 1, "kv_cache_block_size": 8, "kv_cache_capacity_tokens": 512,
}  # fmt: skip


def block_rows(lengths: Sequence[int], seed: int) -> list[BlockRow]:
    rng = np.random.default_rng(seed)
    rows, block = [], 0
    for seq, n in enumerate(lengths):
        width = n // 8 + 1
        rows.append(
            BlockRow(seq, range(block, block + width), rng.integers(0, SHAPE.voc, n).tolist(), n)
        )
        block += width
    return rows


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("max_batch_tokens", [0, 16])
def test_a_row_equals_the_row_alone_bit_for_bit(dtype: str, max_batch_tokens: int) -> None:
    shape = DecoderShape(dtype=dtype)
    options = BLOCK | {"max_batch_tokens": max_batch_tokens}
    lengths = [1, 9, 1, 4, 21, 1, 2, 7]
    slots = [2, 0, -1, 2, 1, 1, 3, -1]  # slot 3 is empty
    rows = block_rows(lengths, seed=4)
    marks = [int(i in {0, 1, n - 1}) for n in lengths for i in range(n)]
    with Decoder(shape, shape.weights(), n_threads=2, **options) as model:
        model.reserve_lora(4, 16)
        for slot, rank in enumerate((3, 16, 8)):
            model.load_adapter(slot, Adapter.random(shape, rank, seed=slot))
        together = model.run_rows(rows, slots, marks)
        first = 0
        for row, slot in zip(rows, slots, strict=True):
            n = len(row.tokens)
            own = [int(i in {0, 1, n - 1}) for i in range(n)]
            alone = model.run_rows([row], [slot], own)
            assert (alone == together[first : first + sum(own)]).all(), f"sequence {row.seq}"
            first += sum(own)


def test_only_the_last_token_of_a_prompt_has_an_output() -> None:
    adapter = Adapter.random(SHAPE, 8, seed=5)
    rows = block_rows([9, 13, 5], seed=6)
    marks = [0] * 8 + [1] + [0] * 12 + [1] + [0] * 4 + [1]
    with Decoder(SHAPE, SHAPE.weights(), **BLOCK) as model:
        model.reserve_lora(2, 8)
        model.load_adapter(1, adapter)
        some = model.run_rows(rows, [1, -1, 1], marks)
        every = model.run_rows(rows, [1, -1, 1], [1] * 27)
    assert (some == every[[8, 21, 26]]).all()


def test_replaced_and_cleared_slots() -> None:
    first, second = (Adapter.random(SHAPE, rank, seed=rank) for rank in (16, 2))
    few = Adapter.random(SHAPE, 3, seed=9, targets=["attn_v_w"])

    def logits(model: Decoder, slot: int) -> Array:
        values = model.run_tokens(PROMPT, slot=slot)
        model.kv_seq_rm(0, -1, -1)
        return values

    with Decoder(SHAPE, SHAPE.weights()) as model:
        base = logits(model, -1)
        model.reserve_lora(2, 16)
        assert (logits(model, 0) == base).all()
        model.load_adapter(0, first)
        model.load_adapter(1, second)
        of_first, of_second = logits(model, 0), logits(model, 1)
        model.load_adapter(0, second)
        assert (logits(model, 0) == of_second).all()
        model.clear_lora(0)
        assert (logits(model, 0) == base).all()
        model.load_adapter(0, few)
        with Decoder(SHAPE, few.merge(SHAPE.weights())) as merged:
            assert np.abs(logits(model, 0) - logits(merged, -1)).max() < 1e-4
        model.load_adapter(0, first)
        assert (logits(model, 0) == of_first).all()
        assert (logits(model, -1) == base).all()
        model.reserve_lora(1, 16)
        assert (logits(model, 0) == base).all()
        model.reserve_lora(0, 0)
        with naming(AssertionError, "lora_slots[0]"):
            logits(model, 0)


def test_quantised_weights_with_an_adapter() -> None:
    shape = DecoderShape(hidden=64, heads=8, head_dim=8, inner=96, has_biases=False)
    adapter = Adapter.random(shape, 8, seed=11)
    weights = shape.weights()
    quantised = {key: values for key, values in weights.items() if key[0] in TARGETS}
    with Decoder(shape, weights) as plain:
        plain.reserve_lora(1, 8)
        plain.load_adapter(0, adapter)
        exact, _ = greedy(plain, slot=0, n=1)
    with Decoder(shape, weights) as model:
        for (name, layer), values in quantised.items():
            packed = Tensor.create(values.shape, "q8_0")
            with tensor(values, "f32") as source:
                op("Quantise", packed, source)
            model.replace_weight(name, layer, packed)
        model.reserve_lora(1, 8)
        base = model.run_tokens(PROMPT, seq=1)
        model.load_adapter(0, adapter)
        ours, _ = greedy(model, slot=0, n=1)
    scale = np.abs(exact).max()
    assert np.abs(ours - exact).max() < 0.03 * scale
    assert np.abs(base - exact).max() > 0.3 * scale


def test_tensor_parallel_ranks_shard_an_adapter() -> None:
    adapter = Adapter.random(SHAPE, 8, seed=12)
    with Decoder(SHAPE, SHAPE.weights()) as one:
        one.reserve_lora(2, 8)
        one.load_adapter(1, adapter)
        expected, tokens = greedy(one, slot=1, n=16)
    results: dict[int, tuple[Array, list[int]]] = {}
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            options = {"init_method": b"test-core-lora"}
            with Decoder(SHAPE, SHAPE.weights(), rank, 2, **options) as model:
                model.reserve_lora(2, 8)
                model.load_adapter(1, adapter)
                results[rank] = greedy(model, slot=1, n=16)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures, failures
    for rank in range(2):
        logits, ours = results[rank]
        assert np.abs(logits - expected).max() < 1e-4
        assert ours == tokens


def test_memory_is_what_lora_bytes_says() -> None:
    params = create_params(SHAPE.meta(), "decoder")
    per_rank = 4 * SHAPE.layers * sum(out + width for out, width in SHAPE.sizes().values())
    tables = 8 * SHAPE.layers * len(TARGETS)
    assert lora_bytes(params, 3, 16) == 3 * (16 * per_rank + tables)
    assert lora_bytes(params, 2, 17) == 2 * (32 * per_rank + tables)
    assert lora_bytes(params, 0, 0) == 0


def test_errors_are_named() -> None:
    a, b = np.zeros((4, SHAPE.hidden), np.float32), np.zeros((36, 4), np.float32)
    with (
        Decoder(SHAPE, SHAPE.weights()) as model,
        tensor(a, "f32") as a_tensor,
        tensor(b, "f32") as b_tensor,
        tensor(np.zeros((9, SHAPE.hidden)), "f32") as large,
    ):

        def fails(text: str, *arguments: Any) -> None:
            with pytest.raises(InvalidInputError, match=text):
                model.set_lora(*arguments)

        fails("slot must be in", 0, "attn_q_w", 0, a_tensor, b_tensor, 1.0)
        model.reserve_lora(2, 8)
        fails("slot must be in", 2, "attn_q_w", 0, a_tensor, b_tensor, 1.0)
        fails("layer must be in", 0, "attn_q_w", 2, a_tensor, b_tensor, 1.0)
        fails("field must be .* 'out_embed'", 0, "out_embed", 0, a_tensor, b_tensor, 1.0)
        fails(r"b: got \[36, 4\], expected \[12, 4\]", 0, "attn_k_w", 0, a_tensor, b_tensor, 1.0)
        fails("rank of a must be at most 8", 0, "attn_q_w", 0, large, b_tensor, 1.0)
        fails("scale must be finite", 0, "attn_q_w", 0, a_tensor, b_tensor, float("nan"))
        for sizes in ((-1, 8), (1025, 8), (1, 0), (1, 257)):
            with pytest.raises(InvalidInputError):
                model.reserve_lora(*sizes)
        assert model.try_step([1, 2], lora_slots=[0, 2]) == -1
        assert model.try_step([1, 2], lora_slots=[-2, 0]) == -1
        assert model.try_step([1, 2], lora_slots=[-1, 1]) == 0


def test_other_models_have_no_lora() -> None:
    with MockModel() as model, pytest.raises(LlaisysError):
        model.reserve_lora(1, 8)
