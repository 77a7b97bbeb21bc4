"""FP8 directories: scales per tensor, row and block, values equal to the definition of e4m3, and
errors that name the tensor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_blocks import e4m3_values
from model_files import tiny_config, tiny_weights, write_tiny_tokenizer

from llaisys import LLM, SamplingParams
from llaisys.common.errors import ModelLoadError
from llaisys.models.base import AdapterOptions
from llaisys.models.decoder import weight_dtype
from llaisys.models.families import open_checkpoint
from llaisys.models.loading.convert import Array
from llaisys.models.loading.shard import Shard

CONFIG = tiny_config("qwen2", hidden_size=256, intermediate_size=384)
Q_PROJ = "model.layers.0.self_attn.q_proj"
DOWN = "model.layers.1.mlp.down_proj"
BLOCK = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


def compressed(strategy: str) -> dict[str, Any]:
    weights: dict[str, Any] = {"num_bits": 8, "type": "float", "strategy": strategy}
    if strategy == "block":
        weights["block_structure"] = [128, 128]
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }


SECTIONS = {
    "fp8 block": BLOCK,
    "fp8 tensor": {"quant_method": "fp8"},
    "compressed channel": compressed("channel"),
    "compressed tensor": compressed("tensor"),
    "compressed block": compressed("block"),
}


def write_raw(path: Path, tensors: dict[str, Array]) -> None:
    """A safetensors file; uint8 arrays are e4m3."""
    names = {"u1": "F8_E4M3", "f4": "F32"}
    header, blobs, offset = {}, [], 0
    for name, values in tensors.items():
        blob = values.tobytes()
        header[name] = {
            "dtype": names[values.dtype.str[1:]],
            "shape": list(values.shape),
            "data_offsets": [offset, offset + len(blob)],
        }
        offset += len(blob)
        blobs.append(blob)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(blobs))


def write_fp8(directory: Path, kind: str, **changes: Any) -> dict[str, Array]:
    """Write a model directory and return its dequantised weights. `changes`: tensors of q_proj."""
    rng = np.random.default_rng(0)
    worth, stored = tiny_weights(CONFIG), {}
    suffix = "weight_scale_inv" if kind == "fp8 block" else "weight_scale"
    for name, values in list(worth.items()):
        if "proj.weight" not in name:
            stored[name] = values.astype("<f4")
            continue
        n, k = values.shape
        q = rng.integers(0, 256, (n, k), np.uint8)
        q[(q & 127) == 127] = 0
        shape: tuple[int, ...] = (1,) if kind.endswith("tensor") else (n, 1)
        if kind.endswith("block"):
            shape = (-(-n // 128), -(-k // 128))
        scales = rng.uniform(1e-4, 2e-3, shape).astype("<f4")
        wide = scales.reshape(1, 1) if scales.size == 1 else scales
        if kind.endswith("block"):
            wide = scales.repeat(128, 0)[:n].repeat(128, 1)[:, :k]
        worth[name] = (e4m3_values()[q] * wide).astype(np.float32)
        stored[name] = q
        stored[name.removesuffix("weight") + suffix] = scales
    stored |= {f"{Q_PROJ}.{name}": value for name, value in changes.items()}
    directory.mkdir(exist_ok=True)
    write_raw(directory / "model.safetensors", stored)
    config = CONFIG | {"quantization_config": SECTIONS[kind]}
    (directory / "config.json").write_text(json.dumps(config))
    write_tiny_tokenizer(directory)
    return worth


def values_of(rows: Array, shape: tuple[int, ...]) -> Array:
    blocks = rows.reshape(shape[0], -1, 132)
    scales = blocks[:, :, :4].copy().view("<f4")
    return np.asarray(e4m3_values()[blocks[:, :, 4:]] * scales, np.float32).reshape(shape)


@pytest.mark.parametrize("kind", SECTIONS)
def test_values_and_blocks_are_exact(kind: str, tmp_path: Path) -> None:
    worth = write_fp8(tmp_path, kind)
    with open_checkpoint(tmp_path) as checkpoint:
        for name, expected in worth.items():
            np.testing.assert_array_equal(checkpoint.read(name, "f32"), expected)
            blocks = checkpoint.read_blocks(name)
            assert (blocks is None) == ("proj.weight" not in name)
            if blocks is not None:
                assert checkpoint.block_type(name) == blocks.type_name == "F8_G128"
                np.testing.assert_array_equal(values_of(blocks.rows, blocks.shape), expected)
        for part in (Shard(0, 32, 96), Shard(1, 128, 256)):
            blocks = checkpoint.read_blocks(DOWN + ".weight", part)
            assert blocks is not None
            expected = worth[DOWN + ".weight"][part.index()]
            np.testing.assert_array_equal(values_of(blocks.rows, blocks.shape), expected)
        assert checkpoint.read_blocks(DOWN + ".weight", Shard(1, 0, 96)) is None
        name = Q_PROJ + ".weight"
        assert weight_dtype(checkpoint, name, AdapterOptions(device="cuda")) == "f8_g128"
        assert weight_dtype(checkpoint, name, AdapterOptions()) == "f32"  # widened on the CPU


def test_cpu_runs_the_widened_model(tmp_path: Path) -> None:
    write_fp8(tmp_path, "fp8 block")
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
    with LLM(tmp_path, device="cpu") as llm:
        assert len(llm.generate([[5, 9, 200, 31]], params)[0].token_ids) == 4


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        (
            "fp8 block",
            {"weight_scale_inv": np.ones((1, 2), "<f4")},
            r"q_proj.weight_scale_inv' is f32 of shape \[1, 2\]; .* shape \[2, 2\]",
        ),
        (
            "compressed channel",
            {"weight_scale": np.ones((255, 1), "<f4")},
            r"q_proj.weight_scale' is f32 of shape \[255, 1\]; .* shape \[256, 1\]",
        ),
        (
            "compressed channel",
            {"weight_scale": np.full((256, 1), np.nan, "<f4")},
            r"q_proj.weight': a scale is not finite",
        ),
        (
            "fp8 tensor",
            {"weight": np.full((256, 256), 127, np.uint8)},
            r"q_proj.weight': a value is NaN",
        ),
        (
            "fp8 tensor",
            {"weight": np.ones((256, 256), "<f4")},
            r"q_proj.weight' is f32 of shape \[256, 256\]; the config requires F8_E4M3",
        ),
    ],
)
def test_inconsistent_tensors_are_named(
    kind: str, changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    write_fp8(tmp_path, kind, **changes)
    with pytest.raises(ModelLoadError, match=words), LLM(tmp_path, device="cpu"):
        pass


@pytest.mark.parametrize(
    ("section", "words"),
    [
        (BLOCK | {"weight_block_size": [128, 96]}, "columns must be a multiple of 128"),
        (BLOCK | {"weight_block_size": [128]}, "expected rows and columns of a block"),
        (BLOCK | {"fmt": "e5m2"}, "only 'e4m3' is supported"),
    ],
)
def test_unsupported_schemes_are_rejected_before_loading(
    section: dict[str, Any], words: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": section}))
    with pytest.raises(ModelLoadError, match=words):
        open_checkpoint(tmp_path)
