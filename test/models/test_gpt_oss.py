"""gpt-oss: MXFP4 experts of directories and GGUF files, and tensor parallelism."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from error_helpers import naming
from family_parity import best_tokens, check_logits
from moe_models import MXFP4_SIZES, VOCAB, make_moe_model, write_mxfp4
from reference_models import BLOCK, Piece, opened, random_tokens, reference_logits, run_block, save
from safetensors.torch import load_file, save_file

from llaisys import LLM, SamplingParams
from llaisys.common.errors import ModelLoadError
from llaisys.models import decoder
from llaisys.models.families import open_checkpoint
from llaisys.models.loading import mxfp4
from llaisys.models.loading.mapped import MappedCheckpoint
from llaisys.models.loading.shard import Shard

pytestmark = pytest.mark.parity


def run(path: Path, tokens: list[int], **options: Any) -> Any:
    size = {"kv_cache_capacity_tokens": 4 * BLOCK, "max_model_len": 60}
    with opened(path, **size, **options) as adapter:
        return run_block(adapter, [Piece(0, tokens)], {0: [0, 1, 2]})


def test_mxfp4_directory_equals_transformers(tmp_path: Path) -> None:
    model = write_mxfp4(tmp_path)
    tokens = random_tokens(37, 160)
    expected = reference_logits(model, tokens)
    check_logits(run(tmp_path, tokens, dtype="f32"), expected)
    got = run(tmp_path, tokens)  # blocks; products round activations to 8 bits
    assert np.linalg.norm(got - expected) / np.linalg.norm(expected) < 0.3


def test_mxfp4_blocks_hold_the_same_values(tmp_path: Path) -> None:
    model = write_mxfp4(tmp_path)
    experts = model.model.layers[1].mlp.experts
    with open_checkpoint(tmp_path) as checkpoint:
        assert isinstance(checkpoint, MappedCheckpoint)
        inner = checkpoint.inner.names()
        assert not [name for name in inner if name.endswith(("_blocks", "_scales"))]
        for kind, values in (
            ("gate_proj", experts.gate_up_proj[..., 0::2]),
            ("up_proj", experts.gate_up_proj[..., 1::2]),
            ("down_proj", experts.down_proj),
        ):
            name = f"model.layers.1.mlp.experts.{kind}.weight"
            expected = values.detach().numpy().swapaxes(1, 2).reshape(-1, values.shape[1])
            assert checkpoint.shape(name) == expected.shape
            assert checkpoint.block_type(name) == "Q5_0" and checkpoint.record(name) is None
            np.testing.assert_array_equal(checkpoint.read(name, "f32"), expected)
            for shard in (None, Shard(0, 1, 9, parts=4), Shard(1, 32, 64)):
                blocks = checkpoint.read_blocks(name, shard)
                assert blocks is not None
                found = gguf.dequantize(blocks.rows, gguf.GGMLQuantizationType.Q5_0)
                part = expected if shard is None else shard.cut(expected)
                np.testing.assert_array_equal(found, part)
                assert blocks.shape == part.shape
            assert checkpoint.read_blocks(name, Shard(1, 0, 48)) is None


def test_mxfp4_scales_of_other_shapes_and_sizes_are_rejected(tmp_path: Path) -> None:
    write_mxfp4(tmp_path)
    path = str(tmp_path / "model.safetensors")
    tensors = load_file(path)
    name = "model.layers.0.mlp.experts.down_proj_scales"
    save_file({**tensors, name: tensors[name][:, :-1].contiguous()}, path)
    with naming(ModelLoadError, "down_proj_blocks"):
        run(tmp_path, [1, 2])
    save_file({**tensors, name: torch.full_like(tensors[name], 200)}, path)
    with naming(ModelLoadError, "32768"):
        run(tmp_path, [1, 2])


def test_dequantised_matrices_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_mxfp4(tmp_path)
    run(tmp_path, [1, 2])
    assert "dequantized" not in caplog.text
    monkeypatch.setattr(decoder, "kept_dtype", lambda *_: None)  # as a device without kernels
    run(tmp_path, [1, 2])
    assert "12 quantized matrices are dequantized to f32, such as model.layers.0." in caplog.text


def test_small_scales_become_zero() -> None:
    codes = np.full((1, 1, 16), 0x77, np.uint8)
    for exponent, expected in ((104, 12 * 2.0**-24), (60, 0.0)):
        weight = mxfp4.Mxfp4Weight(codes, np.array([[exponent]], np.uint8), True)
        rows = weight.blocks("x").rows
        assert (gguf.dequantize(rows, gguf.GGMLQuantizationType.Q5_0) == expected).all()


# ---- GGUF ----------------------------------------------------------------------------------------


def write_gguf(model: Any, path: Path) -> None:
    """Experts in MXFP4, other matrices in Q8_0, with the names and metadata of llama.cpp's
    converter. The values in `model` become those of the file."""
    config, rope = model.config, model.config.rope_parameters
    writer = gguf.GGUFWriter(path, "gpt-oss")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_expert_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_sliding_window(config.sliding_window)
    writer.add_expert_count(config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GPT_OSS, config.num_hidden_layers)

    def add(name: str, values: Any, kind: str) -> Any:
        """Write a matrix; returns the values of the file."""
        qtype = gguf.GGMLQuantizationType[kind]
        blocks = gguf.quantize(values.reshape(-1, values.shape[-1]), qtype)
        writer.add_tensor(name, blocks.reshape(*values.shape[:-1], -1), raw_dtype=qtype)
        return np.array(gguf.dequantize(blocks, qtype)).reshape(values.shape)

    for name, parameter in model.state_dict().items():
        values = parameter.numpy().copy()
        layer = [*name.split("."), ""][2]
        if name.endswith("gate_up_proj"):
            rows = np.ascontiguousarray(values.swapaxes(1, 2))
            for start, part in enumerate(("gate", "up")):
                own = np.ascontiguousarray(rows[:, start::2])
                rows[:, start::2] = add(f"blk.{layer}.ffn_{part}_exps.weight", own, "MXFP4")
            parameter.copy_(torch.from_numpy(rows.swapaxes(1, 2).copy()))
        elif name.endswith("down_proj"):
            rows = add(
                f"blk.{layer}.ffn_down_exps.weight",
                np.ascontiguousarray(values.swapaxes(1, 2)), "MXFP4",
            )  # fmt: skip
            parameter.copy_(torch.from_numpy(rows.swapaxes(1, 2).copy()))
        elif name.endswith("gate_up_proj_bias"):
            for start, part in enumerate(("gate", "up")):
                own = np.ascontiguousarray(values[:, start::2])
                writer.add_tensor(f"blk.{layer}.ffn_{part}_exps.bias", own)
        elif name.endswith("down_proj_bias"):
            writer.add_tensor(f"blk.{layer}.ffn_down_exps.bias", values)
        elif name.endswith("sinks"):
            writer.add_tensor(f"blk.{layer}.attn_sinks.weight", values)
        else:
            target = names.get_name(name, try_suffixes=(".weight", ".bias"))
            assert target is not None, name
            if values.ndim == 1 or "router" in name:
                writer.add_tensor(target, values)
            else:
                parameter.copy_(torch.from_numpy(add(target, values, "Q8_0")))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_gguf_file_equals_transformers(tmp_path: Path) -> None:
    model = make_moe_model("gpt_oss", **MXFP4_SIZES)
    path = tmp_path / "model.gguf"
    with torch.no_grad():
        write_gguf(model, path)
    tokens = random_tokens(37, 160)
    expected = reference_logits(model, tokens)
    check_logits(run(path, tokens, dtype="f32"), expected)
    got = run(path, tokens)  # blocks as stored
    assert np.linalg.norm(got - expected) / np.linalg.norm(expected) < 0.3


def test_tensor_parallel_ranks_give_the_same_tokens(tmp_path: Path) -> None:
    """Sinks and biases of experts are sharded too."""
    model = make_moe_model("gpt_oss")
    directory = save(model, tmp_path)
    prompt = random_tokens(21, VOCAB)
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, detokenize=False)
    with LLM(str(directory), max_model_len=64, tensor_parallel_size=2) as llm:
        tokens = list(llm.generate([prompt], params)[0].token_ids)
    assert best_tokens(model, prompt, tokens) == tokens
