"""Weight shards of tensor-parallel ranks: only their bytes are read."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from error_helpers import invalid_input
from model_files import tiny_config, write_gguf, write_hf_model, write_safetensors

from llaisys.common.errors import InvalidInputError
from llaisys.common.parallel import ParallelConfig
from llaisys.models.base import AdapterOptions
from llaisys.models.decoder import DecoderAdapter
from llaisys.models.families import FAMILIES, open_checkpoint
from llaisys.models.loading.shard import Shard
from llaisys.models.sharding import SHARD_DIMENSIONS, check_divisibility, lm_head_shard, shard_of

LAYER = "model.layers.0."
# Hugging Face name -> (weight field, shard shape with two ranks) for the sizes of `wide_config`.
LOCAL_SHAPES = {
    "self_attn.q_proj.weight": ("attn_q_w", (32, 64)),
    "self_attn.q_proj.bias": ("attn_q_b", (32,)),
    "self_attn.k_proj.weight": ("attn_k_w", (16, 64)),
    "self_attn.k_proj.bias": ("attn_k_b", (16,)),
    "self_attn.v_proj.weight": ("attn_v_w", (16, 64)),
    "self_attn.v_proj.bias": ("attn_v_b", (16,)),
    "self_attn.o_proj.weight": ("attn_o_w", (64, 32)),
    "mlp.gate_proj.weight": ("mlp_gate_w", (48, 64)),
    "mlp.up_proj.weight": ("mlp_up_w", (48, 64)),
    "mlp.down_proj.weight": ("mlp_down_w", (64, 48)),
}
WHOLE = ("attn_norm_w", "mlp_norm_w", "attn_o_b", "in_embed", "out_embed", "out_norm_w")


def test_shard_shapes_follow_the_seed(tmp_path: Path) -> None:
    # Of families that the seed does not have.
    own = {slot for slot in SHARD_DIMENSIONS if slot.startswith(("moe_", "shared_"))}
    own |= {"mlp_up_b", "attn_sinks_w", "attn_k_b_w", "attn_v_b_w"}
    assert {slot for slot, _ in LOCAL_SHAPES.values()} == set(SHARD_DIMENSIONS) - own
    write_hf_model(tmp_path, tiny_config())
    with open_checkpoint(tmp_path) as checkpoint:
        shapes = dict(FAMILIES["qwen2"].tensors(checkpoint.config))
        for name, (slot, local) in LOCAL_SHAPES.items():
            for rank in range(2):
                part = shard_of(name, slot, shapes[LAYER + name], 2, rank)
                assert part is not None and part.shape_in(shapes[LAYER + name]) == local
                assert checkpoint.read_shard(LAYER + name, "f32", part).shape == local
    for slot in WHOLE:
        assert shard_of(slot, slot, (64, 64), 2, 1) is None
    assert shard_of("q", "attn_q_w", (64, 64), 1, 0) is None


@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
@pytest.mark.parametrize("stored", ["f32", "bf16"])
def test_shards_partition_every_weight(tmp_path: Path, tp_size: int, stored: str) -> None:
    write_hf_model(tmp_path, tiny_config(), dtype=stored)
    with open_checkpoint(tmp_path) as checkpoint:
        for name, (slot, _) in LOCAL_SHAPES.items():
            whole = checkpoint.read(LAYER + name, "f32")
            dim = SHARD_DIMENSIONS[slot]
            parts = []
            for rank in range(tp_size):
                part = shard_of(name, slot, whole.shape, tp_size, rank)
                if part is None:
                    assert tp_size == 1
                    part = Shard(dim, 0, whole.shape[dim])
                parts.append(checkpoint.read_shard(LAYER + name, "f32", part))
            np.testing.assert_array_equal(np.concatenate(parts, axis=dim), whole)


def test_shard_follows_the_rank(tmp_path: Path) -> None:
    config = tiny_config()
    weights = write_hf_model(tmp_path, config)
    for name, values in weights.items():  # each value encodes its index
        weights[name] = np.arange(values.size, dtype=np.float32).reshape(values.shape)
    write_safetensors(tmp_path / "model.safetensors", weights)
    with open_checkpoint(tmp_path) as checkpoint:
        gate = checkpoint.read_shard(LAYER + "mlp.gate_proj.weight", "f32", Shard(0, 48, 96))
        assert gate[0, 0] == 48 * 64 and gate[-1, -1] == 96 * 64 - 1
        down = checkpoint.read_shard(LAYER + "mlp.down_proj.weight", "f32", Shard(1, 48, 96))
        assert down[0].tolist() == list(range(48, 96)) and down[1, 0] == 96 + 48
        bias = checkpoint.read_shard(LAYER + "self_attn.q_proj.bias", "f32", Shard(0, 16, 32))
        assert bias.tolist() == list(range(16, 32))


@pytest.mark.parametrize("part", [Shard(0, 24, 48), Shard(1, 24, 48)])
def test_only_bytes_of_the_shard_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: Shard
) -> None:
    write_hf_model(tmp_path, tiny_config())
    name = LAYER + ("mlp.gate_proj.weight" if part.dim == 0 else "mlp.down_proj.weight")
    read = 0
    preadv = os.preadv

    def counting(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        nonlocal read
        read += (count := preadv(descriptor, buffers, offset))
        return count

    with open_checkpoint(tmp_path) as checkpoint:
        monkeypatch.setattr(os, "preadv", counting)
        values = checkpoint.read_shard(name, "bf16", part)
    assert read == values.size * 4  # f32 in the file


@pytest.mark.parametrize("model_type", ["qwen2", "llama"])
def test_permuted_tensors_are_sharded_correctly(tmp_path: Path, model_type: str) -> None:
    """llama GGUF files store the rows of q and k permuted."""
    path = tmp_path / "model.gguf"
    write_gguf(path, tiny_config(model_type))
    with open_checkpoint(path) as checkpoint:
        name = LAYER + "self_attn.q_proj.weight"
        whole = checkpoint.read(name, "f32")
        np.testing.assert_array_equal(
            checkpoint.read_shard(name, "f32", Shard(0, 32, 64)), whole[32:]
        )


@pytest.mark.parametrize("model_type", ["qwen2", "llama"])
def test_quantised_tensors_are_sharded_in_whole_blocks(tmp_path: Path, model_type: str) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, tiny_config(model_type, intermediate_size=128), kind="Q8_0")
    with open_checkpoint(path) as checkpoint:
        for name, dim in (("self_attn.q_proj", 0), ("mlp.down_proj", 1)):
            whole = checkpoint.read_blocks(f"{LAYER}{name}.weight")
            assert whole is not None
            half = whole.shape[dim] // 2
            parts = [
                checkpoint.read_blocks(
                    f"{LAYER}{name}.weight", Shard(dim, i * half, (i + 1) * half)
                )
                for i in range(2)
            ]
            assert all(part is not None and part.shape[dim] == half for part in parts)
            rows = [part.rows for part in parts if part is not None]
            np.testing.assert_array_equal(np.concatenate(rows, axis=dim), whole.rows)
        assert checkpoint.read_blocks(f"{LAYER}mlp.down_proj.weight", Shard(1, 16, 64)) is None


def test_kv_heads_are_replicated_when_ranks_outnumber_them() -> None:
    parts = [shard_of("k", "attn_k_w", (16, 64), 4, rank, kv_copies=2) for rank in range(4)]
    assert parts == [Shard(0, 0, 8), Shard(0, 0, 8), Shard(0, 8, 16), Shard(0, 8, 16)]
    assert shard_of("q", "attn_q_w", (64, 64), 4, 3, kv_copies=2) == Shard(0, 48, 64)
    many = ParallelConfig(tensor_parallel_size=4, replicate_kv_heads=True)
    assert [many.kv_copies(heads) for heads in (1, 2, 3, 4, 8)] == [4, 2, 1, 1, 1]
    assert ParallelConfig(tensor_parallel_size=4).kv_copies(2) == 1


def test_last_output_matrix_shard_may_be_shorter() -> None:
    assert [lm_head_shard(10, 4, rank) for rank in range(4)] == [
        Shard(0, 0, 3), Shard(0, 3, 6), Shard(0, 6, 9), Shard(0, 9, 10)
    ]  # fmt: skip
    with invalid_input("vocab_parallel_head"):
        lm_head_shard(6, 4, 0)


@pytest.mark.parametrize(("slot", "shape"), [("attn_q_w", (66, 64)), ("mlp_down_w", (64, 97))])
def test_uneven_shard_error_has_the_sizes(slot: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidInputError) as caught:
        shard_of("layers.3.w", slot, shape, 4, 1)
    text = str(caught.value)
    assert f"weight_name=layers.3.w global_shape={list(shape)} local_shape=" in text
    assert text.endswith("tp_size=4 tp_rank=1")


@pytest.mark.parametrize(
    ("sizes", "name", "value"),
    [((6, 4, 8), "nh", 6), ((8, 2, 8), "nkvh", 2), ((8, 4, 90), "di", 90), ((8, 3, 8), "nkvh", 3)],
)
def test_indivisible_sizes_error_has_the_sizes(
    sizes: tuple[int, int, int], name: str, value: int
) -> None:
    parallel = ParallelConfig(tensor_parallel_size=4, rank=2, local_rank=2)
    options = AdapterOptions(device_ids=(0, 1, 2, 3), parallel=parallel)
    with pytest.raises(InvalidInputError) as caught:
        check_divisibility(*sizes, options)
    assert str(caught.value).endswith(
        f"tp_size=4 tp_rank=2 global_{name}={value} local_{name}={value // 4} device_id=2"
    )
    assert (caught.value.field, caught.value.value) == ("tensor_parallel_size", 4)
    check_divisibility(8, 4, 8, options)


def test_kv_cache_of_a_rank_has_its_own_heads_only(tmp_path: Path) -> None:
    write_hf_model(tmp_path, tiny_config(num_attention_heads=8, num_key_value_heads=8))
    with open_checkpoint(tmp_path) as checkpoint:
        alone, half, quarter = (
            DecoderAdapter.kv_bytes_per_token(
                checkpoint, AdapterOptions(parallel=ParallelConfig(tensor_parallel_size=size))
            )
            for size in (1, 2, 4)
        )
    assert (half, quarter) == (alone // 2, alone // 4)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_memory_needs_of_a_rank_count_its_shards(
    tmp_path: Path, tp_size: int, is_cut: bool, tied: bool
) -> None:
    """Sharded weights count once over all ranks, replicated ones on each."""
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}
    config = tiny_config(**sizes, intermediate_size=256, tie_word_embeddings=tied)
    write_hf_model(tmp_path, config)
    with open_checkpoint(tmp_path) as checkpoint:
        layers, whole = 0, 0
        vectors = 0  # f32 whatever the dtype is
        for name, shape in FAMILIES["qwen2"].tensors(checkpoint.config):
            size = int(np.prod(shape))
            is_local = name.startswith("model.layers.") and name.split(".", 3)[3] in LOCAL_SHAPES
            if len(shape) == 1:
                vectors += size // (tp_size if is_local else 1)
            if is_local:
                layers += size
            elif name != "lm_head.weight":
                whole += size
        head = 320 * 64 if is_cut or not tied or tp_size == 1 else 0
        if tp_size == 1 and tied:
            head = 0  # tied: the embedding table is the output matrix
        local = layers // tp_size + whole + head // (tp_size if is_cut else 1)
        for rank in range(tp_size):
            parallel = ParallelConfig(
                tensor_parallel_size=tp_size,
                world_size=tp_size,
                rank=rank,
                vocab_parallel_head=is_cut,
            )
            options = AdapterOptions(device="cuda", dtype="bf16", parallel=parallel)
            weights = DecoderAdapter.memory_needs(checkpoint, options, 1).weights
            assert weights == 2 * local + 2 * vectors
            on_cpu = replace(options, device="cpu", dtype="f32")
            packed = DecoderAdapter.memory_needs(checkpoint, on_cpu, 1).weights
            assert 4 * local <= packed < 4 * local * 1.2
