"""Families with experts against transformers: logits, greedy tokens, batches, chunks, the prefix
cache, tensor parallelism, GGUF files and weights quantised at load."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from error_helpers import invalid_input
from family_parity import (
    best_tokens,
    check_greedy_tokens,
    check_logits,
    check_prompts_chunks_and_batches,
)
from moe_models import MODELS, VOCAB, YARN, make_moe_model, write_moe_gguf
from reference_models import BLOCK, Piece, opened, random_tokens, reference_logits, run_block, save

from llaisys import LLM, SamplingParams
from llaisys.common.errors import ModelLoadError
from llaisys.common.parallel import ParallelConfig
from llaisys.libllaisys.types import LlaisysKvStats
from llaisys.models.base import AdapterOptions
from llaisys.models.decoder import DecoderAdapter
from llaisys.models.families import open_checkpoint
from llaisys.models.loading.shard import Shard

pytestmark = pytest.mark.parity


@pytest.fixture(scope="module", params=MODELS)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, Path]:
    """A transformers model and its directory."""
    model = make_moe_model(request.param)
    return model, save(model, tmp_path_factory.mktemp(request.param))


def test_logits_of_prompts_chunks_and_batches(pair: tuple[Any, Path]) -> None:
    check_prompts_chunks_and_batches(*pair, VOCAB)


def test_greedy_tokens_alone_batched_and_with_prefix_cache(pair: tuple[Any, Path]) -> None:
    is_long = pair[0].config.model_type in ("gpt_oss", "deepseek_v2", "deepseek_v3")
    check_greedy_tokens(*pair, VOCAB, 64 if is_long else 24)


def test_latent_attention_caches_one_entry_per_token_and_layer(tmp_path: Path) -> None:
    """The sizes of DeepSeek-V2-Lite: 576 values of 2 bytes."""
    model = make_moe_model(
        "deepseek_v2", num_attention_heads=16, kv_lora_rank=512, qk_rope_head_dim=64,
        num_hidden_layers=2,
    )  # fmt: skip
    directory = save(model, tmp_path)
    entry, tokens = 576 * 2, 4 * BLOCK
    with open_checkpoint(directory) as checkpoint:
        for ranks in (1, 2):
            options = AdapterOptions(
                dtype="bf16", parallel=ParallelConfig(tensor_parallel_size=ranks)
            )
            assert DecoderAdapter.kv_bytes_per_token(checkpoint, options) == 2 * entry
        with invalid_input("kv_cache_dtype"):
            DecoderAdapter.kv_bytes_per_token(checkpoint, AdapterOptions(kv_cache_dtype="q8"))
        with invalid_input("max_loras"):
            DecoderAdapter.lora_bytes(checkpoint, AdapterOptions(), 1, 8)
    with opened(directory, kv_cache_capacity_tokens=tokens, dtype="bf16") as adapter:
        stats = LlaisysKvStats(struct_size=ctypes.sizeof(LlaisysKvStats))
        adapter.native.call("KvStats", ctypes.byref(stats))
        assert stats.bytes == 2 * entry * tokens


@pytest.mark.parametrize("name", ["qwen2_moe", "mixtral", "deepseek_v2", "deepseek_v3"])
def test_tensor_parallel_ranks_give_the_same_tokens(name: str, tmp_path: Path) -> None:
    model = make_moe_model(name)
    directory = save(model, tmp_path)
    prompts = [random_tokens(length, VOCAB, length) for length in (5, 21)]
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, detokenize=False)
    with LLM(str(directory), max_model_len=64, tensor_parallel_size=2) as llm:
        found = [list(out.token_ids) for out in llm.generate(prompts, params)]
    pairs = zip(prompts, found, strict=True)
    assert [best_tokens(model, prompt, tokens) for prompt, tokens in pairs] == found


# Rows of whole Q8_0 blocks.
GGUF_SIZES = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 160}
GGUF_CHANGES = {
    "qwen3_moe": {"moe_intermediate_size": 32},
    "qwen2_moe": {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64},
    "deepseek_v2": {"moe_intermediate_size": 32, "qk_nope_head_dim": 32},
    "deepseek_v3": {
        "moe_intermediate_size": 32,
        "qk_nope_head_dim": 32,
        "q_lora_rank": 32,
        "rope_parameters": YARN,
    },
    **{
        name: {"moe_intermediate_size": 32}
        for name in (
            *("glm4_moe", "glm4_moe-air", "dots1", "solar_open", "exaone_moe", "ernie4_5_moe"),
        )
    },
}
ARCHITECTURES = {"qwen3_moe": "qwen3moe", "qwen2_moe": "qwen2moe", "mixtral": "llama",
                 "olmoe": "olmoe", "deepseek_v2": "deepseek2",
                 "deepseek_v3": "deepseek2", "glm4_moe": "glm4moe", "glm4_moe-air": "glm4moe",
                 "solar_open": "glm4moe", "dots1": "dots1", "minimax_m2": "minimax-m2",
                 "exaone_moe": "exaone-moe", "ernie4_5_moe": "ernie4_5-moe",
                 "granitemoe": "granitemoe"}  # fmt: skip


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_q8_0_gguf_file_equals_transformers(name: str, tmp_path: Path) -> None:
    model = make_moe_model(name, **{**GGUF_SIZES, **GGUF_CHANGES.get(name, {})})
    path = tmp_path / "model.gguf"
    write_moe_gguf(model, path, ARCHITECTURES[name])
    tokens = random_tokens(37, 160)
    expected = reference_logits(model, tokens)
    blocks = {0: [0, 1, 2]}
    with opened(path, kv_cache_capacity_tokens=4 * BLOCK, max_model_len=60, dtype="f32") as adapter:
        check_logits(run_block(adapter, [Piece(0, tokens)], blocks), expected)
    with opened(path, kv_cache_capacity_tokens=4 * BLOCK, max_model_len=60) as adapter:
        # Blocks as stored: products round activations to 8 bits, which may change an expert.
        got = run_block(adapter, [Piece(0, tokens)], blocks)
        difference = np.linalg.norm(got - expected) / np.linalg.norm(expected)
        assert difference < 0.3


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_weights_quantised_at_load(quantization: str, tmp_path: Path) -> None:
    model = make_moe_model("qwen3_moe", hidden_size=64, moe_intermediate_size=32)
    directory = save(model, tmp_path)
    tokens = random_tokens(37, VOCAB)
    expected = reference_logits(model, tokens)
    with opened(
        directory, kv_cache_capacity_tokens=4 * BLOCK, max_model_len=60, quantization=quantization
    ) as adapter:
        got = run_block(adapter, [Piece(0, tokens)], {0: [0, 1, 2]})
    difference = np.linalg.norm(got - expected) / np.linalg.norm(expected)
    assert difference < (0.3 if quantization == "int8" else 0.8)


def test_experts_in_one_tensor_load_like_separate_ones(tmp_path: Path) -> None:
    """The layout of `model.state_dict()`, which newer versions of transformers may write."""
    from safetensors.torch import save_file

    model = make_moe_model("qwen3_moe-dense")
    directory = save(model, tmp_path)
    save_file(
        {name: value.contiguous() for name, value in model.state_dict().items()},
        str(directory / "model.safetensors"),
    )
    tokens = random_tokens(37, VOCAB)
    with opened(directory, kv_cache_capacity_tokens=4 * BLOCK, max_model_len=60) as adapter:
        check_logits(
            run_block(adapter, [Piece(0, tokens)], {0: [0, 1, 2]}), reference_logits(model, tokens)
        )


def test_a_rank_reads_its_rows_of_every_expert(tmp_path: Path) -> None:
    directory = save(make_moe_model("mixtral"), tmp_path)
    name = "model.layers.1.mlp.experts.gate_proj.weight"
    with open_checkpoint(directory) as checkpoint:
        whole = checkpoint.read(name, "f32").reshape(5, 40, 48)
        shard = Shard(0, 20, 40, parts=5)
        expected = whole[:, 20:].reshape(100, 48)
        np.testing.assert_array_equal(checkpoint.read_shard(name, "f32", shard), expected)
        records = checkpoint.records(name, shard)
        assert records is not None and [r.shape for r in records] == [(20, 48)] * 5
        parts = [np.empty(r.shape, np.float32) for r in records]
        for record, part in zip(records, parts, strict=True):
            record.read_into(part.reshape(-1).view(np.uint8).data)
        np.testing.assert_array_equal(np.concatenate(parts), expected)


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    directory = save(make_moe_model("mixtral"), tmp_path)
    path = str(directory / "model.safetensors")
    name = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    save_file({k: v for k, v in load_file(path).items() if k != name}, path)
    with pytest.raises(ModelLoadError, match=re.escape(repr(name))), opened(directory):
        pass


def test_fp8_blocks_of_latent_attention_equal_their_values(tmp_path: Path) -> None:
    """As DeepSeek-V3 is published: e4m3 with a scale per block of 128 x 128."""
    import json
    import shutil

    import torch
    from safetensors.torch import load_file, save_file

    size = 128
    names = ("hidden_size", "intermediate_size", "moe_intermediate_size", "q_lora_rank")
    model = make_moe_model(
        "deepseek_v3", **dict.fromkeys(names, size), kv_lora_rank=size, num_attention_heads=8,
        num_key_value_heads=8,
    )  # fmt: skip
    plain = save(model, tmp_path / "plain")
    quantised = tmp_path / "fp8"
    shutil.copytree(plain, quantised)
    stored, values = {}, {}
    for name, weight in load_file(str(plain / "model.safetensors")).items():
        stored[name] = values[name] = weight
        if weight.ndim == 2 and "_proj" in name:
            rows, columns = weight.shape
            scales = torch.rand(-(-rows // size), -(-columns // size)) / 8 + 0.01
            wide = scales.repeat_interleave(size, 0)[:rows]
            wide = wide.repeat_interleave(size, 1)[:, :columns]
            stored[name] = (weight / wide).to(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = scales
            values[name] = stored[name].float() * wide
    save_file(values, str(plain / "model.safetensors"))
    save_file(stored, str(quantised / "model.safetensors"))
    config = json.loads((quantised / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [size, size]}
    (quantised / "config.json").write_text(json.dumps(config))
    tokens, found = random_tokens(37, VOCAB), []
    for directory in (plain, quantised):
        with opened(directory, kv_cache_capacity_tokens=4 * BLOCK, max_model_len=60) as adapter:
            found.append(run_block(adapter, [Piece(0, tokens)], {0: [0, 1, 2]}))
    np.testing.assert_array_equal(found[0], found[1])
